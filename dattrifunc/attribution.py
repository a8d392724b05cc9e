"""Scores: which training samples help or harm which queries.

Sign and scale, stated here once::

    score[i, j] = g_test_i^T (C + lambda I)^-1 g_train_j

with g the gradient of one sample's loss and C the curvature of the *mean* training loss. Removing training sample j
and training again changes the loss of test sample i by about ``+ score[i, j] / n``, n the number of training samples.
Positive is helpful: without the sample the test loss goes up.

An L2 penalty can stand in two places, and removal means something else in each. Inside ``func`` it is part of every
sample's loss, and of its row: removal means training on the mean over the other n - 1. As ``regularization`` it is in C
but in no row: removal means that the other samples keep weight 1/n, and the penalty its weight.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .curvature import check_func
from .digest import fingerprint
from .errors import DtypeError, StructureError, message
from .ihvp import (
    check_rows,
    ihvp_at_x_arnoldi,
    ihvp_at_x_auto,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
    ihvp_at_x_lissa,
    ihvp_at_x_minres,
    ihvp_at_x_nystrom,
    ihvp_at_x_woodbury,
)
from .implicit import transforms_active
from .products import fvp_at_x, ggnvp_at_x
from .rows import Progress, grad_rows, per_sample_grads, writable
from .samples import Runner, Samples, check_in_dims, gradient_blocks, mean_composite, mean_loss, samples_of
from .solvers import SolveInfo, check_positive
from .store import RowStore, check_layout, named, rows_of
from .tree import (
    Layout,
    Tree,
    check_argnums,
    check_callable,
    check_choice,
    check_chunk,
    check_count,
    check_generator,
    check_number,
)

__all__ = ["influence", "scores", "self_scores", "top_k"]

METRICS = ("dot", "cosine")
_BLOCK_NUMBERS = 1 << 24  # most numbers in a block of rows, or of scores
_BLOCK_ROWS = 4096

Groups = dict[str, list[slice]]


# ---------------------------------------------------------------------------------------------------------------------
# rows, wherever they lie


class _Rows(Protocol):
    """Rows [count, width] that are read block by block, in order."""

    @property
    def count(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def layout(self) -> Layout | None: ...
    @property
    def ids(self) -> np.ndarray[Any, Any] | None: ...
    def blocks(self, size: int) -> Iterator[torch.Tensor]: ...


@dataclass(frozen=True)
class _Memory:
    tensor: torch.Tensor
    layout: Layout | None
    ids: None = None

    @property
    def count(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def width(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def blocks(self, size: int) -> Iterator[torch.Tensor]:
        return (self.tensor[i : i + size] for i in range(0, self.count, size))


@dataclass(frozen=True)
class _Stored:
    store: RowStore

    @property
    def count(self) -> int:
        return len(self.store)

    @property
    def width(self) -> int:
        return self.store.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def layout(self) -> Layout | None:
        return self.store.layout

    @property
    def ids(self) -> np.ndarray[Any, Any] | None:
        return self.store.ids

    def blocks(self, size: int) -> Iterator[torch.Tensor]:
        return self.store.blocks(size)


@dataclass(frozen=True)
class _Gradients:
    """Gradient rows that are made when they are read."""

    samples: Samples
    ids: None = None

    @property
    def count(self) -> int:
        return self.samples.count

    @property
    def width(self) -> int:
        return self.samples.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.samples.layout.dtype

    @property
    def layout(self) -> Layout | None:
        return self.samples.layout

    def blocks(self, size: int) -> Iterator[torch.Tensor]:
        for start, leaves in gradient_blocks(self.samples, size, Runner("influence", "error")):
            count = min(size, self.count - start)
            yield self.samples.layout.join(leaves) if leaves else torch.zeros(count, 0, dtype=self.dtype)


def _rows(value: Any, layout: Layout | None, argument: str) -> _Rows:
    """Return a tensor, an array, a store, or a tree of [n, ...] (where a layout is known) as rows."""
    if isinstance(value, RowStore):
        return _Stored(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    if not isinstance(value, torch.Tensor):
        if layout is None:
            fix = "pass layout=Layout.of(params), or flatten it with Layout.of(params).ravel_rows"
            raise StructureError(message(argument, "rows [n, p] or a RowStore", type(value).__name__, fix))
        value = rows_of(value, layout, argument)
    fix = "pass rows as grad_rows gives them, one per sample"
    if not value.is_floating_point():
        raise DtypeError(message(argument, "floating point rows", str(value.dtype), fix))
    if value.ndim != 2:
        raise StructureError(message(argument, "rows of shape [n, p]", f"shape {tuple(value.shape)}", fix))
    return _Memory(value, layout)


def _pair(queries: Any, rows: Any, layout: Any, first: str, second: str) -> tuple[_Rows, _Rows]:
    """Return both sides as rows of one width."""
    if layout is not None:
        check_layout(layout)
    known = [value.layout for value in (rows, queries) if isinstance(value, RowStore)]
    if layout is not None and known and known[0] != layout:
        fix = "leave layout=None: a store has its own"
        raise StructureError(message("layout", "the store's layout", f"one of {layout.names}", fix))
    layout = layout if layout is not None else known[0] if known else None
    a, b = _rows(queries, layout, first), _rows(rows, layout, second)
    if a.width != b.width:
        fix = "use gradients of the same parameters on both sides"
        raise StructureError(message(first, f"width p = {b.width}, as {second} has", f"width {a.width}", fix))
    return a, b


def _block_size(block_size: int | None, *sizes: int) -> int:
    if block_size is not None:
        fix = "pass the number of rows per matrix product"
        return check_count(block_size, "block_size", fix=fix, none="as many as fit 64 MiB")
    return max(1, min(_BLOCK_ROWS, _BLOCK_NUMBERS // max(*sizes, 1)))


def _all_finite(values: torch.Tensor) -> bool:
    """Say whether all numbers are finite; a sum of them is, except where it overflows, which is looked at closely."""
    return transforms_active() or bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _finite(rows: _Rows, size: int, dtype: torch.dtype, argument: str) -> Iterator[torch.Tensor]:
    """Yield the blocks of rows in ``dtype``, or raise ValueError with the number of rows that hold NaN or inf."""
    seen: list[torch.Tensor] = []
    broken = False
    for block in rows.blocks(size):
        block = block.to(dtype)
        if broken or not _all_finite(block):  # from the first bad row on, the rest is only counted
            broken = True
            seen.append(~block.isfinite().all(dim=1))
            continue
        seen.append(torch.zeros(len(block), dtype=torch.bool))
        yield block
    if broken:
        bad = torch.cat([mask.cpu() for mask in seen])
        ids = rows.ids if rows.ids is not None else np.arange(rows.count)
        fix = "look for overflow, log(0) or norm(0) in the loss on those samples, or leave them out"
        raise ValueError(message(argument, "finite rows", f"NaN or inf in {named(bad, ids)}", fix))


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of norm 1, zero rows as zeros. The peak comes out first: the square of 1e-25 is 0 in float32."""
    peak = rows.abs().amax(dim=1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
    scaled = rows / torch.where(peak > 0, peak, torch.ones_like(peak))
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / torch.where(norm > 0, norm, torch.ones_like(norm))


@dataclass(frozen=True)
class _Product:
    """Products of all queries with the rows, one block of rows at a time."""

    queries: torch.Tensor  # [m, p] in the working dtype
    rows: _Rows
    size: int
    cosine: bool
    names: tuple[str, str] = ("queries", "rows_or_store")

    @classmethod
    def of(cls, queries: _Rows, rows: _Rows, block_size: int | None, metric: str) -> _Product:
        check_choice(metric, "metric", METRICS)
        size = _block_size(block_size, rows.width, queries.count)
        dtype = torch.promote_types(torch.promote_types(queries.dtype, rows.dtype), torch.float32)
        read = list(_finite(queries, max(queries.count, 1), dtype, "queries"))
        held = read[0] if read else torch.zeros(0, queries.width, dtype=dtype)
        return cls(_unit(held) if metric == "cosine" else held, rows, size, metric == "cosine")

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, rows of the block), ready for the product."""
        start = 0
        for block in _finite(self.rows, self.size, self.queries.dtype, self.names[1]):
            block = block.to(self.queries.device)
            yield start, _unit(block) if self.cosine else block
            start += len(block)

    def times(self, block: torch.Tensor, columns: Sequence[slice] | None = None) -> torch.Tensor:
        """Return queries times the rows of a block [m, b], over some columns or all."""
        if columns is None:
            out = self.queries @ block.T
        else:
            parts = [self.queries[:, c] @ block[:, c].T for c in columns]
            out = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        if not _all_finite(out):
            fix = "use float64 rows, or scale the loss"
            raise ValueError(message("queries", f"products that {out.dtype} can hold", "an overflow", fix))
        return out


# ---------------------------------------------------------------------------------------------------------------------
# scores


def scores(
    queries: Any,
    rows_or_store: Any,
    *,
    block_size: int | None = None,
    metric: str = "dot",
    groups: Any = None,
    out: Any = None,
    layout: Layout | None = None,
    progress: Progress | None = None,
) -> Any:
    """Return the product of every query with every row, one matrix product per block of rows.

    Args:
        queries: [m, p], for influence the inverse product of the test gradients; a tensor, an array, a store, or a tree
            of [m, ...] where a layout is known.
        rows_or_store: [n, p], the training rows; the same kinds.
        block_size: rows per matrix product; None = what 64 MiB hold, at most 4096.
        metric: "dot", or "cosine" (both sides scaled to norm 1; a zero row scores 0).
        groups: list of dotted prefixes, or {name: prefix or list of prefixes}: one score matrix per group of columns.
            Groups that cover all columns once add up to the total. Plain rows need ``layout``.
        out: where the scores go, a float tensor or NumPy array (a memory map) of shape [m, n].
        layout: columns of the rows, where neither side is a store.
        progress: ``progress(done, total)`` in rows, called after each block.

    Returns:
        [m, n] (``out`` if given) in the wider of the two dtypes, at least float32, in which products are also summed;
        with ``groups`` a dict name -> [m, n]. m = 0 and n = 0 give empty results.

    Raises:
        StructureError: the widths differ, a tree came without a layout, or a prefix names no column.
        ValueError: rows or queries hold NaN or inf; they are counted and the first ones named, and nothing is returned.

    >>> scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -1.0]]))
    tensor([[ 3., -2.]])
    """
    if progress is not None:
        check_callable(progress, "progress", "a function of (done, total)")
    left, right = _pair(queries, rows_or_store, layout, "queries", "rows_or_store")
    return _score(left, right, block_size, metric, groups, out, progress)


def _score(
    left: _Rows, right: _Rows, block_size: int | None, metric: str, groups: Any, out: Any, progress: Progress | None
) -> Any:
    columns = _columns(groups, right.layout or left.layout)
    if out is not None and groups is not None:
        raise ValueError(message("out", "None with groups", type(out).__name__, "score each group by itself"))
    shape = (left.count, right.count)
    target = None if out is None else writable(out, "out", shape)
    product = _Product.of(left, right, block_size, metric)
    whole: dict[str, list[slice] | None] = {"": None} if columns is None else {**columns}
    # Inside a transform nothing can be written into a plain tensor: the pieces are joined at the end.
    joined = transforms_active()
    pieces: dict[str, list[torch.Tensor]] = {name: [product.queries.new_zeros(shape[0], 0)] for name in whole}
    filled = {} if joined else {name: product.queries.new_empty(shape) if target is None else target for name in whole}
    for start, block in product:
        for name, where in whole.items():
            piece = product.times(block, where)
            if joined:
                pieces[name].append(piece)
            else:
                filled[name][:, start : start + len(block)] = piece
        if progress is not None:
            progress(start + len(block), shape[1])
    done = {name: torch.cat(parts, dim=1) for name, parts in pieces.items()} if joined else filled
    if columns is not None:
        return done
    return done[""] if out is None else out


def _columns(groups: Any, layout: Layout | None) -> Groups | None:
    """Return the columns of each group."""
    if groups is None:
        return None
    if layout is None:
        fix = "pass layout=Layout.of(params)"
        raise StructureError(message("layout", "a Layout where groups are given for plain rows", "None", fix))
    fix = "pass a list of dotted prefixes, or {name: prefix or list of prefixes}"
    if isinstance(groups, list | tuple) and all(isinstance(prefix, str) for prefix in groups):
        groups = {prefix: [prefix] for prefix in groups}
    if not isinstance(groups, dict):
        raise TypeError(message("groups", "a list of prefixes or a dict", repr(groups), fix))
    columns: Groups = {}
    for name, prefixes in groups.items():
        listed = [prefixes] if isinstance(prefixes, str | tuple) else prefixes
        if not isinstance(listed, list) or not listed:
            raise TypeError(message(f"groups[{name!r}]", "a prefix or a list of them", repr(prefixes), fix))
        columns[name] = _merged([part for prefix in listed for part in layout.slices(prefix)])
    return columns


def _merged(columns: list[slice]) -> list[slice]:
    """Return the union of columns, so that overlapping prefixes count once."""
    found: list[slice] = []
    for part in sorted(columns, key=lambda c: (c.start, c.stop)):
        if found and part.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


def self_scores(rows: Any, preconditioned_rows: Any) -> torch.Tensor:
    """Return each row's product with its own preconditioned row: the diagonal of ``scores``, in O(n p).

    Args:
        rows: [n, p], gradient rows; a tensor, an array or a store.
        preconditioned_rows: [n, p], (C + lambda I)^-1 times each of them.

    Returns:
        [n] in the wider dtype, at least float32.

    Raises:
        StructureError: the shapes differ.
        ValueError: a row holds NaN or inf.

    >>> self_scores(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[1.0, 1.0], [1.0, 2.0]]))
    tensor([3., 6.])
    """
    a, b = _pair(rows, preconditioned_rows, None, "rows", "preconditioned_rows")
    if a.count != b.count:
        fix = "precondition the same rows, in the same order"
        raise StructureError(message("preconditioned_rows", f"{a.count} rows", f"{b.count} rows", fix))
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    size = _block_size(None, a.width)
    blocks = zip(_finite(a, size, dtype, "rows"), _finite(b, size, dtype, "preconditioned_rows"), strict=True)
    return torch.cat([torch.zeros(0, dtype=dtype), *(torch.linalg.vecdot(x, y) for x, y in blocks)])


def top_k(
    queries: Any,
    rows_or_store: Any,
    k: int,
    largest: bool = True,
    *,
    block_size: int | None = None,
    metric: str = "dot",
) -> tuple[torch.Tensor, Any]:
    """Return the k highest (or lowest) scores of each query, without ever holding [m, n].

    Args:
        queries: [m, p], as in ``scores``.
        rows_or_store: [n, p], as in ``scores``.
        k: how many, at most n.
        largest: the highest (most helpful), or with False the lowest (most harmful).
        block_size: rows per matrix product.
        metric: "dot" or "cosine".

    Returns:
        ``(values [m, k], ids [m, k])``, best first; of equal scores the earlier row comes first. ids are a tensor of
        int64 (row numbers where the rows have none), or a NumPy array of strings where the store's ids are.

    Raises:
        ValueError: k > n, or rows or queries hold NaN or inf.

    >>> top_k(torch.tensor([[1.0]]), torch.tensor([[3.0], [5.0], [4.0]]), 2)
    (tensor([[5., 4.]]), tensor([[1, 2]]))
    """
    left, right = _pair(queries, rows_or_store, None, "queries", "rows_or_store")
    k = check_count(k, "k", fix="pass how many rows to return for each query")
    if k > right.count:
        raise ValueError(message("k", f"at most {right.count}, the number of rows", str(k), "pass a smaller k"))
    product = _Product.of(left, right, block_size, metric)
    values = product.queries.new_zeros(left.count, 0)
    where = torch.zeros(left.count, 0, dtype=torch.int64, device=values.device)
    for start, block in product:
        numbers = torch.arange(start, start + len(block), device=values.device).expand(left.count, -1)
        values = torch.cat([values, product.times(block)], dim=1)
        where = torch.cat([where, numbers], dim=1)
        order = values.argsort(dim=1, descending=largest, stable=True)[:, :k]
        values, where = values.gather(1, order), where.gather(1, order)
    if right.ids is None:
        return values, where
    ids = right.ids[where.cpu().numpy()]
    return values, ids if ids.dtype.kind == "U" else torch.from_numpy(ids)


# ---------------------------------------------------------------------------------------------------------------------
# influence


_SOLVERS: dict[str, Callable[..., Any]] = {
    "arnoldi": ihvp_at_x_arnoldi,
    "auto": ihvp_at_x_auto,
    "cg": ihvp_at_x_cg,
    "explicit": ihvp_at_x_explicit,
    "lissa": ihvp_at_x_lissa,
    "minres": ihvp_at_x_minres,
    "nystrom": ihvp_at_x_nystrom,
    "woodbury": ihvp_at_x_woodbury,
}
_DRAWS = ("arnoldi", "lissa", "nystrom")  # solvers that take a generator
_DIVIDES = ("nystrom", "woodbury")  # solvers that need lambda > 0


def influence(
    func: Callable[..., Any],
    params: Tree,
    train: tuple[Any, ...],
    test: tuple[Any, ...],
    *,
    solver: Any = "cg",
    in_dims: Any = None,
    argnums: int | tuple[int, ...] = 0,
    regularization: float = 0.0,
    product: Callable[..., Any] | None = None,
    query_func: Callable[..., Any] | None = None,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    store: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    generator: torch.Generator | None = None,
    has_aux: bool = False,
    solver_options: dict[str, Any] | None = None,
) -> Any:
    """Return how much each training sample helps each test sample, end to end.

    score[i, j] = g_test_i^T (C + lambda I)^-1 g_train_j, C the curvature of the mean of ``func`` over the training
    samples. Removing j changes test loss i by about + score[i, j] / n; see the module's text for penalties.

    Args:
        func: loss of one sample, ``func(params, *sample) -> scalar``.
        params: the tree (with a tuple of argnums, a tuple of trees) at which ``func`` was trained.
        train: the other arguments of func in order, holding n training samples.
        test: the same for m test samples.
        solver: "cg", "minres", "explicit", "lissa", "arnoldi", "nystrom", "woodbury" or "auto"; or a bound inverse
            product v -> (C + lambda I)^-1 v of your own, which takes m vectors at once and has its own lambda.
        in_dims: sample axis per argument of func, parameters included; None = axis 0 of everything but params.
        argnums: where params stand among the arguments of func.
        regularization: lambda >= 0, in units of loss / parameter**2; > 0 for "nystrom" and "woodbury".
        product: C, of the mean over the training samples: ``hvp_at_x`` (the default), ``ggnvp_at_x`` (func is a
            CompositeLoss of one sample), ``fvp_at_x`` (the default, and only choice, of "woodbury"), or a function with
            the signature of the first.
        query_func: loss of one test sample, where it is not ``func``.
        chunk_size: most samples, or vectors, pushed through autodiff at once. Memory only, not values.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.
        store: a folder in which training rows are written once, as a RowStore; they are reused as long as params, func,
            the training samples and in_dims are the same, and made again when they are not.
        progress: ``progress(done, total)`` in training rows, called after each block.
        generator: source of randomness of "lissa", "arnoldi" and "nystrom".
        has_aux: return ``(scores, SolveInfo)``; None in its place where nothing was solved, or your solver gave none.
        solver_options: further keywords of the solver, for example {"tol": 1e-10}.

    Returns:
        [m, n]; zeros of that shape when m = 0 or n = 0.

    Raises:
        StructureError: train, test, params and in_dims do not fit together.
        ValueError: an unknown solver, non-finite rows, or a store path that holds something else.

    Warns:
        ConvergenceWarning: some query was not solved to tolerance (without ``has_aux``).

    Source: Koh and Liang (2017), arXiv:1703.04730. Differs: (1) no minus sign, so that positive is helpful; (2) 1/n is
    left to the reader.

    >>> loss = lambda w, x, y: (w @ x - y).square() / 2
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 3.0])
    >>> influence(loss, torch.tensor([0.5, 1.0]), (x, y), (x, y), solver="explicit")
    tensor([[0.5000, 0.0000],
            [0.0000, 8.0000]])
    """
    x, count = _arguments(params, train, argnums, "train")
    queries_x, _ = _arguments(params, test, argnums, "test")
    if len(test) != len(train):
        fix = "pass test=(inputs, targets), the same arguments of func as in train"
        raise StructureError(message("test", f"{len(train)} arguments, as train has", f"{len(test)}", fix))
    if store is not None and not isinstance(store, str | os.PathLike):
        raise TypeError(message("store", "a path", type(store).__name__, "pass the name of a folder"))
    positions = check_argnums(argnums, count)
    dims = tuple(None if i in positions else 0 for i in range(count)) if in_dims is None else in_dims
    dims = check_in_dims(dims, count, positions)
    query_func = func if query_func is None else query_func
    check_callable(query_func, "query_func", "the loss of one test sample")
    if progress is not None:
        check_callable(progress, "progress", "a function of (done, total)")
    chunk = check_chunk(chunk_size)
    samples = samples_of(func, x, argnums, dims, keep_batch_dim)
    asked = samples_of(query_func, queries_x, argnums, dims, keep_batch_dim)
    check_number(regularization, "regularization", fix="pass lambda >= 0, for example regularization=1e-3")
    _check_solver(solver, regularization, product, generator, solver_options)
    if not samples.count or not asked.count:
        empty = torch.zeros(asked.count, samples.count, dtype=torch.promote_types(samples.layout.dtype, torch.float32))
        return (empty, None) if has_aux else empty

    grads: dict[str, Any] = {"in_dims": dims, "argnums": argnums, "chunk_size": chunk, "keep_batch_dim": keep_batch_dim}
    vectors = per_sample_grads(query_func, *queries_x, **grads)
    if callable(solver):
        solve = solver
    else:
        options: dict[str, Any] = {**(solver_options or {})}
        if product is not None:
            options["product"] = product
        if solver in _DRAWS:
            options["generator"] = generator
        if solver == "lissa":  # draws along the samples' axes
            options["in_dims"] = dims
        if product is fvp_at_x or solver == "woodbury":
            loss = func
            options |= {"in_dims": dims, "keep_batch_dim": keep_batch_dim}
        elif product is ggnvp_at_x:
            check_func(product, func)
            loss = mean_composite(func, dims, keep_batch_dim)  # type: ignore[arg-type]
        else:
            loss = mean_loss(func, dims, keep_batch_dim)
        solve = _SOLVERS[solver](
            loss, *x, argnums=argnums, regularization=regularization, chunk_size=chunk, has_aux=has_aux, **options
        )
    solved, info = _unpacked(solve(vectors))
    left = _Memory(samples.layout.ravel_rows(solved), samples.layout)
    size = chunk or _block_size(None, samples.layout.size, asked.count)
    if store is None:
        right: _Rows = _Gradients(samples)
    else:
        right = _Stored(_training_rows(Path(store), samples, func, x, {**grads, "chunk_size": size}))
    table = _score(left, right, size, "dot", None, None, progress)
    return (table, info) if has_aux else table


def _arguments(params: Tree, data: Any, argnums: int | tuple[int, ...], argument: str) -> tuple[tuple[Any, ...], int]:
    """Return all arguments of func: params at argnums, the others in order."""
    fix = f"pass {argument}=(inputs, targets), the arguments of func after params"
    if not isinstance(data, tuple | list) or hasattr(data, "_fields"):
        raise TypeError(message(argument, "a tuple of arguments of func", type(data).__name__, fix))
    many = len(argnums) if isinstance(argnums, tuple) else 1
    positions = check_argnums(argnums, len(data) + many)
    if isinstance(argnums, tuple) and (not isinstance(params, tuple | list) or len(params) != many):
        fix = "pass one tree per position in argnums"
        raise StructureError(message("params", f"a tuple of {many} trees", type(params).__name__, fix))
    given = dict(zip(positions, params if isinstance(argnums, tuple) else (params,), strict=True))
    others = iter(data)
    return tuple(given[i] if i in given else next(others) for i in range(len(data) + many)), len(data) + many


def _check_solver(solver: Any, regularization: float, product: Any, generator: Any, solver_options: Any) -> None:
    check_generator(generator)
    if solver_options is not None and not isinstance(solver_options, dict):
        fix = "pass the keywords of the solver, for example {'tol': 1e-10}"
        raise TypeError(message("solver_options", "a dict", type(solver_options).__name__, fix))
    if not callable(solver):
        if check_choice(solver, "solver", tuple(_SOLVERS)) in _DIVIDES:
            check_positive(regularization, solver)
        if solver == "woodbury":
            check_rows(fvp_at_x if product is None else product)
        return
    fix = "bind them when you make the inverse product, and leave them out here"
    given = {"regularization": regularization, "product": product, "solver_options": solver_options}
    got = [name for name, value in given.items() if value]
    if got:
        raise ValueError(message(got[0], "nothing beside a bound inverse product as solver", "a value", fix))


def _unpacked(result: Any) -> tuple[Tree, SolveInfo | None]:
    """Return the solution and, where the solver was built with ``has_aux``, what became of it."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], SolveInfo):
        return result[0], result[1]
    return result, None


def _training_rows(
    path: Path, samples: Samples, func: Callable[..., Any], x: tuple[Any, ...], grads: dict[str, Any]
) -> RowStore:
    """Return the store of the training rows at ``path``, written now unless it holds just these."""
    mark = fingerprint(func, x, [grads[name] for name in ("in_dims", "argnums", "keep_batch_dim")])
    if path.exists() and (path.is_file() or any(path.iterdir())):
        found = RowStore.open(path)
        if "influence" not in found.attrs:
            fix = "choose another path, or remove the store"
            raise ValueError(message("store", "a store that influence wrote", f"{path}, which holds other rows", fix))
        if found.complete and found.attrs["influence"] == mark:
            return found
    building = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        with RowStore.create(building, samples.layout, attrs={"influence": mark}) as new:
            grad_rows(func, *x, **grads, out=new)
        if path.is_dir():
            old = building.with_name(building.name + ".old")
            os.replace(path, old)
            os.replace(building, path)
            shutil.rmtree(old)
        else:
            os.replace(building, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return RowStore.open(path)
