"""Per-sample gradients, their flat rows, and a store of rows on disk.

``func`` is a loss of one sample: ``in_dims`` says which axis of which argument counts the samples. Rows are g_i, the
gradient of ``func`` on sample i alone, in the layout's columns; nothing is divided by the number of samples.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import math
import numbers
import os
import re
import sys
import types
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch._C._functorch import TransformType
from torch.overrides import TorchFunctionMode, resolve_name

from .errors import DtypeError, StructureError, message
from .implicit import transforms_active
from .tree import (
    Layout,
    Leaves,
    Point,
    Tree,
    bind,
    check_callable,
    check_choice,
    check_chunk,
    check_count,
    check_scalar,
    flatten,
    flatten_dims,
    paths_of,
)

# Where there are no file locks, two writers of one store are not told apart.
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

__all__ = ["RowStore", "fingerprint", "grad_rows", "mean_loss", "per_sample_grads", "rows_of"]

Dims = tuple[int | None, ...]
Progress = Callable[[int, int], object]

RANDOMNESS = ("error", "different", "same")


# ---------------------------------------------------------------------------------------------------------------------
# samples: func and its arguments, taken apart once


@dataclass(frozen=True)
class Samples:
    """A loss of one sample and the arguments that hold n of them. Everything here is a flat tuple of tensors."""

    point: Point
    dims: tuple[Dims, Dims]  # sample axis of each differentiated leaf, and of each other tensor
    count: int
    layout: Layout  # of what one sample's gradient looks like
    keep: bool

    def part(self, start: int, stop: int) -> tuple[Leaves, Leaves]:
        """Return the tensors of samples start to stop."""
        first, second = (
            tuple(t if dim is None else t.narrow(dim, start, stop - start) for t, dim in zip(ts, dims, strict=True))
            for ts, dims in zip((self.point.leaves, self.point.rest), self.dims, strict=True)
        )
        return first, second

    def one(self, leaves: Leaves, rest: Leaves) -> torch.Tensor:
        """Return the loss of one sample, from tensors without their sample axis."""
        if self.keep:
            leaves, rest = (
                tuple(t if dim is None else t.unsqueeze(dim) for t, dim in zip(ts, dims, strict=True))
                for ts, dims in zip((leaves, rest), self.dims, strict=True)
            )
        return check_scalar(self.point.func(*self.point.arguments(leaves, rest)))

    def single(self, i: int) -> tuple[Leaves, Leaves]:
        """Return the tensors of sample i, without the sample axis."""
        first, second = (
            tuple(t if dim is None else t.select(dim, i) for t, dim in zip(ts, dims, strict=True))
            for ts, dims in zip((self.point.leaves, self.point.rest), self.dims, strict=True)
        )
        return first, second


def check_in_dims(in_dims: Any, count: int) -> tuple[Any, ...]:
    """Return ``in_dims`` as a tuple with one entry per argument of func."""
    fix = "give one entry per argument of func, parameters included, e.g. in_dims=(None, 0, 0)"
    if not isinstance(in_dims, tuple | list) or hasattr(in_dims, "_fields"):
        raise TypeError(message("in_dims", f"a tuple of {count} entries", repr(in_dims), fix))
    if len(in_dims) != count:
        raise StructureError(message("in_dims", f"{count} entries", f"{len(in_dims)}: {in_dims!r}", fix))
    return tuple(in_dims)


def samples_of(
    func: Callable[..., Any],
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...],
    in_dims: Any,
    keep_batch_dim: Any,
    constant: bool = True,
) -> Samples:
    """Check func, x, argnums and in_dims, and take them apart; ``constant`` detaches x outside all derivatives.

    Raises:
        StructureError: in_dims does not fit x, no argument holds samples, or their counts differ.
    """
    if not isinstance(keep_batch_dim, bool):
        fix = "pass keep_batch_dim=True for a loss that expects a batch axis"
        raise TypeError(message("keep_batch_dim", "True or False", repr(keep_batch_dim), fix))
    point = bind(func, x, argnums, detach=False)
    if constant and not _inside_derivative():
        leaves, rest = (tuple(t.detach() for t in ts) for ts in (point.leaves, point.rest))
        point = replace(point, leaves=leaves, rest=rest)
    in_dims = check_in_dims(in_dims, len(x))
    axes: list[list[int | None]] = []
    counts: dict[str, int] = {}
    for i, (dim, argument) in enumerate(zip(in_dims, x, strict=True)):
        found: list[int | None] = []
        values, spec = flatten(argument)
        named = zip(flatten_dims(dim, argument, f"in_dims[{i}]"), values, paths_of(spec), strict=True)
        for axis, value, path in named:
            name = f"x[{i}]" + "".join(f"[{key!r}]" for key in path)
            if axis is not None:
                axis = _axis(axis, value, name)
                counts[name] = value.shape[axis]
            if isinstance(value, torch.Tensor):
                found.append(axis)
        axes.append(found)
    if not counts:
        fix = "say which axis of the data counts samples, e.g. in_dims=(None, 0, 0)"
        raise StructureError(message("in_dims", "a sample axis in at least one argument", repr(in_dims), fix))
    if len(set(counts.values())) > 1:
        fix = "pass arguments of the same samples, or None where an argument is shared"
        raise StructureError(message("x", "one number of samples", str(counts), fix))
    chosen = tuple(axis for i in point.argnums for axis in axes[i])
    others = tuple(axis for i, found in enumerate(axes) if i not in point.argnums for axis in found)
    shapes = tuple(_without(tuple(t.shape), axis, keep_batch_dim) for t, axis in zip(point.leaves, chosen, strict=True))
    layout = Layout(point.layout.paths, shapes, point.layout.dtypes, point.layout.spec)
    return Samples(point, (chosen, others), next(iter(counts.values())), layout, keep_batch_dim)


def _axis(axis: int, value: Any, name: str) -> int:
    """Return a sample axis as a non-negative number."""
    fix = f"pass None in in_dims for {name}, or the axis that counts samples"
    if not isinstance(value, torch.Tensor):
        raise StructureError(message(name, f"a tensor with sample axis {axis}", type(value).__name__, fix))
    if not -value.ndim <= axis < value.ndim:
        raise StructureError(message(name, f"a tensor with sample axis {axis}", f"shape {tuple(value.shape)}", fix))
    return axis % value.ndim


def _without(shape: tuple[int, ...], axis: int | None, keep: bool) -> tuple[int, ...]:
    return shape if axis is None else shape[:axis] + (1,) * keep + shape[axis + 1 :]


def _inside_derivative() -> bool:
    """Say whether something outside differentiates what happens here.

    Operators whose backward is decomposed for vmap (layer_norm in torch 2.13) give wrong derivatives, silently, when
    the derivative is taken outside ``vmap(grad(...))``. Samples are then looped over, which is exact.
    """
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or []}
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or not kinds.isdisjoint({TransformType.Grad, TransformType.Jvp})


# ---------------------------------------------------------------------------------------------------------------------
# over samples: vmap, or a loop where vmap cannot go


_REASONS = (
    (r"data-dependent control flow|\.item\(\)", "it reads the value of a tensor, as a branch on data does"),
    (r"boolean mask|dynamic shape|data-dependent", "the shape of its result depends on the data"),
    (r"setup_context|autograd\.Function", "an autograd.Function without setup_context and a vmap rule"),
    (r"saved tensor hooks", "saved tensor hooks, as activation checkpointing uses"),
    (r"doesn't have storage|data pointer", "it reads the memory of a tensor, as NumPy does"),
    (r"doesn't match the broadcast shape|in-?place", "it writes in place into a tensor without a sample axis"),
    (r"batching rule|not implemented|not supported", "it has no batching rule"),
)


class _Culprit(TorchFunctionMode):
    """Remembers the first operator that raised."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            self.name = self.name or str(resolve_name(func) or getattr(func, "__name__", func))
            raise


@dataclass
class Runner:
    """Applies a function of one sample to blocks of samples. Warns once, where it has to loop."""

    caller: str
    randomness: str
    looping: bool = False
    warned: bool = False
    state: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice(self.randomness, "randomness", RANDOMNESS)
        self.state = _random_state()

    def __call__(
        self, samples: Samples, start: int, stop: int, mapped: Callable[..., Any], looped: Callable[..., Any]
    ) -> Leaves:
        """Return the outputs [stop - start, ...] of samples start to stop.

        ``mapped(leaves, rest)`` is what vmap takes; ``looped`` the same function, in a form that runs without it.
        """
        if not self.looping:
            try:
                return self._mapped(samples, start, stop, mapped)
            except (RuntimeError, NotImplementedError) as error:
                if "randomness error mode" in str(error):
                    raise ValueError(self._random()) from None
                out = self._looped(samples, start, stop, looped)  # an error that is the loss's own comes up here
                reason = self._reason(samples, start, stop, mapped, error)
                self._warn(
                    f"vmap cannot batch this loss ({reason}); took a loop over the samples, one backward pass each. "
                    "Rewrite that step to make it fast"
                )
                self.looping = True
                return out
        return self._looped(samples, start, stop, looped)

    def _mapped(self, samples: Samples, start: int, stop: int, function: Callable[..., Any]) -> Leaves:
        if self.randomness == "same":
            _restore(self.state)
        over = torch.func.vmap(function, in_dims=samples.dims, randomness=self.randomness)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message="There is a performance drop")
            out: Leaves = over(*samples.part(start, stop))
        for warning in caught:
            slow = re.search(r"batching rule for (\S+?)\.? ", str(warning.message))
            if slow and "performance drop" in str(warning.message):
                self._warn(f"{slow.group(1)} has no batching rule, so torch runs it sample by sample, which is slow")
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return out

    def _looped(self, samples: Samples, start: int, stop: int, function: Callable[..., Any]) -> Leaves:
        before = _random_state()
        each = []
        for i in range(start, stop):
            if self.randomness == "same":
                _restore(self.state)
            each.append(function(*samples.single(i)))
        if self.randomness == "error" and not all(map(torch.equal, before, _random_state())):
            raise ValueError(self._random())
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    def _reason(self, samples: Samples, start: int, stop: int, function: Callable[..., Any], error: Exception) -> str:
        state = _random_state()
        over = torch.func.vmap(function, in_dims=samples.dims, randomness=self.randomness)
        culprit = _Culprit()
        with contextlib.suppress(RuntimeError, NotImplementedError), culprit, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            over(*samples.part(start, stop))
        _restore(state)
        text = str(error)
        why = next((why for pattern, why in _REASONS if re.search(pattern, text)), text.split("\n")[0][:120])
        return f"{culprit.name}: {why}" if culprit.name else why

    def _random(self) -> str:
        fix = "pass randomness='different' (or 'same' for one draw), or call module.eval()"
        return message("randomness", "'different' or 'same' for a loss that draws random numbers", "'error'", fix)

    def _warn(self, text: str) -> None:
        if not self.warned:
            warnings.warn(f"{self.caller}: {text}.", UserWarning, stacklevel=5)
        self.warned = True


def _random_state() -> list[torch.Tensor]:
    on_device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_device]


def _restore(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    for i, one in enumerate(state[1:]):
        torch.cuda.set_rng_state(one, i)


def _gradient(samples: Samples, leaves: Leaves, rest: Leaves) -> Leaves:
    """Return the gradient of one sample's loss, for the loop."""
    if transforms_active():
        out: Leaves = torch.func.grad(samples.one)(leaves, rest)
        return out
    with torch.enable_grad():  # plain autograd also takes what torch.func refuses: hooks, old autograd.Functions
        at = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        value = samples.one(at, rest)
        if not value.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        found = torch.autograd.grad(value, at, allow_unused=True)
    return tuple(torch.zeros_like(a) if g is None else g for a, g in zip(at, found, strict=True))


def gradient_blocks(samples: Samples, size: int, runner: Runner) -> Iterator[tuple[int, Leaves]]:
    """Yield (start, gradient leaves [b, *shape]) in sample order, at most ``size`` samples at a time."""
    inside = _inside_derivative()
    runner.looping = runner.looping or inside
    mapped = torch.func.grad(samples.one)
    for start in range(0, samples.count, size):
        stop = min(start + size, samples.count)
        if not samples.point.leaves:
            yield start, ()
            continue
        leaves = runner(samples, start, stop, mapped, functools.partial(_gradient, samples))
        yield start, leaves if inside else tuple(leaf.detach() for leaf in leaves)


def mean_loss(func: Callable[..., Any], in_dims: Any, keep_batch_dim: bool = False) -> Callable[..., torch.Tensor]:
    """Return the mean over the samples of a loss of one sample.

    Args:
        func: loss of one sample, ``func(*x) -> scalar``.
        in_dims: sample axis per argument of func, as in ``torch.func.vmap``.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.

    Returns:
        ``loss(*x) -> scalar``, 1/n sum_i func(sample i). One vmap of the forward pass only, so that derivatives of any
        order are exact; a loop with one warning where vmap cannot go.

    >>> loss = mean_loss(lambda w, x: (w * x).square().sum(), in_dims=(None, 0))
    >>> loss(torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    tensor(5.)
    """
    check_callable(func, "func", "the loss of one sample")
    runner = Runner("mean_loss", "error")

    def without_last(*x: Any) -> Any:
        return func(*x[:-1])

    def loss(*x: Any) -> torch.Tensor:
        # Nothing is differentiated here: an empty tree stands where samples_of expects what is.
        dims = check_in_dims(in_dims, len(x))
        samples = samples_of(without_last, (*x, ()), -1, (*dims, None), keep_batch_dim, constant=False)
        if samples.count == 0:
            fix = "pass at least one sample"
            raise StructureError(message("x", "samples to take the mean of", "0 samples", fix))

        def one(leaves: Leaves, rest: Leaves) -> tuple[torch.Tensor]:
            return (samples.one(leaves, rest),)

        return runner(samples, 0, samples.count, one, one)[0].mean()

    return loss


# ---------------------------------------------------------------------------------------------------------------------
# per-sample gradients and rows


def per_sample_grads(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    randomness: str = "error",
) -> Tree:
    """Return the gradient of each sample's loss, as one tree.

    Args:
        func: loss of one sample, ``func(*x) -> scalar``.
        x: arguments of func; any pytrees, constants unless a torch.func transform is running.
        argnums: which argument to differentiate, or a tuple.
        in_dims: one entry per argument of func, parameters included: the axis that counts samples (negative from the
            end), None for an argument that all samples share, or a tree of those.
        chunk_size: most samples pushed through autodiff at once; None = all. Memory only, not values.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis, for a loss written for batches.
        randomness: "error", "different" (each sample its own draw) or "same" (one draw for all, whatever chunk_size).

    Returns:
        The tree ``x[argnums]``, each leaf [n, *shape]. Under an outer torch.func derivative the samples are looped
        over, because torch 2.13 differentiates ``vmap(grad)`` of a layer norm wrongly.

    Raises:
        StructureError: in_dims does not fit x, or the samples' counts differ.
        DtypeError: a differentiated leaf is not floating point.
        ValueError: func draws random numbers and ``randomness`` is "error".

    Warns:
        UserWarning: vmap cannot go through func, so a loop was used; once per call, with the operator or the reason.

    >>> loss = lambda w, x, y: (w @ x - y).square() / 2
    >>> x, y = torch.tensor([[1.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 4.0])
    >>> per_sample_grads(loss, torch.ones(2), x, y, in_dims=(None, 0, 0))
    tensor([[ 1.,  1.],
            [-1., -2.]])
    """
    chunk = check_chunk(chunk_size)
    samples = samples_of(func, x, argnums, in_dims, keep_batch_dim)
    blocks = gradient_blocks(samples, chunk or max(samples.count, 1), Runner("per_sample_grads", randomness))
    if transforms_active() or not chunk or chunk >= samples.count > 0:
        parts = [leaves for _, leaves in blocks]
        if len(parts) == 1:
            return samples.layout.build(parts[0])
        if parts:
            return samples.layout.build([torch.cat(leaf) for leaf in zip(*parts, strict=True)])
    out = [
        torch.empty((samples.count, *shape), dtype=dtype, device=leaf.device)
        for shape, dtype, leaf in zip(samples.layout.shapes, samples.layout.dtypes, samples.point.leaves, strict=True)
    ]
    for start, leaves in blocks:
        for target, leaf in zip(out, leaves, strict=True):
            target[start : start + len(leaf)] = leaf
    return samples.layout.build(out)


def grad_rows(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    randomness: str = "error",
    out: torch.Tensor | np.ndarray[Any, Any] | RowStore | None = None,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
) -> Any:
    """Return the gradient of each sample's loss as flat rows, written block by block.

    Args:
        func: loss of one sample; this and all up to ``randomness`` as in ``per_sample_grads``.
        x: arguments of func.
        argnums: which argument to differentiate, or a tuple.
        in_dims: sample axis per argument of func.
        chunk_size: most samples pushed through autodiff, and written, at once; None = all.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.
        randomness: "error", "different" or "same".
        out: where the rows go: a tensor or NumPy array (a memory map) of shape [n, p], or an open RowStore, to which
            they are appended. None allocates [n, p] once; beside it one block is held.
        dtype: float dtype of the rows; None = that of ``out``, or the layout's widest.
        progress: ``progress(done, total)``, called after each block of samples.

    Returns:
        ``out``, or a new tensor [n, p]; columns in the order of ``Layout.of(x[argnums])``.

    Raises:
        StructureError: ``out`` has another shape or layout than the rows; else as ``per_sample_grads``.

    >>> rows = grad_rows(lambda p, x: p["b"] + p["a"] * x, {"b": torch.zeros(()), "a": torch.ones(())},
    ...                  torch.tensor([2.0, 3.0]), in_dims=(None, 0))
    >>> rows
    tensor([[1., 2.],
            [1., 3.]])
    """
    chunk = check_chunk(chunk_size)
    if progress is not None:
        check_callable(progress, "progress", "a function of (done, total)")
    samples = samples_of(func, x, argnums, in_dims, keep_batch_dim)
    layout, n = samples.layout, samples.count
    wanted = None if dtype is None else _float_dtype(dtype)
    blocks = gradient_blocks(samples, chunk or max(n, 1), Runner("grad_rows", randomness))
    if chunk is None and n:
        chunk = n

    def told(start: int) -> None:
        if progress is not None:
            progress(min(start + (chunk or 1), n), n)

    if out is None and transforms_active():
        found = [torch.zeros(0, layout.size, dtype=layout.dtype)]
        for start, leaves in blocks:
            found.append(_joined(layout, leaves, min(chunk or 1, n - start)))
            told(start)
        return torch.cat(found[1:] or found).to(wanted or layout.dtype)
    target = _target(out, samples, wanted)
    for start, leaves in blocks:
        if isinstance(target, RowStore):
            target.append(_joined(layout, leaves, min(chunk or 1, n - start)))
        else:
            for leaf, offset, size in zip(leaves, layout.offsets, layout.sizes, strict=True):
                block = leaf.reshape(len(leaf), size)
                target[start : start + len(leaf), offset : offset + size] = block
        told(start)
    return target if out is None else out


def _joined(layout: Layout, leaves: Leaves, count: int) -> torch.Tensor:
    return layout.join(leaves) if leaves else torch.zeros(count, 0, dtype=layout.dtype)


def _target(out: Any, samples: Samples, dtype: torch.dtype | None) -> torch.Tensor | RowStore:
    """Return where rows are written: a tensor [n, p] (a view of a NumPy array) or a store, checked."""
    layout, shape = samples.layout, (samples.count, samples.layout.size)
    if out is None:
        device = samples.point.leaves[0].device if samples.point.leaves else None
        return torch.empty(shape, dtype=dtype or layout.dtype, device=device)
    if transforms_active():
        fix = "leave out=None there"
        raise ValueError(message("out", "None inside a torch.func transform", type(out).__name__, fix))
    if isinstance(out, RowStore):
        if out.layout != layout:
            fix = "create the store with Layout.of(x[argnums])"
            raise StructureError(message("out", f"a store of the layout {layout.names}", f"{out.layout.names}", fix))
        target: torch.Tensor | RowStore = out
        found = out.dtype
    else:
        target = writable(out, "out", shape)
        found = target.dtype
    if dtype is not None and dtype != found:
        raise DtypeError(message("dtype", f"{found}, as out has", str(dtype), "leave dtype=None, or change out"))
    return target


def writable(out: Any, argument: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that writes into ``out``: a float tensor or a writable NumPy array of this shape."""
    fix = f"pass torch.empty{shape}, or a NumPy array or memory map of that shape"
    if not isinstance(out, torch.Tensor | np.ndarray):
        raise TypeError(message(argument, "a tensor or a NumPy array", type(out).__name__, fix))
    if tuple(out.shape) != shape:
        raise StructureError(message(argument, f"shape {shape}", f"shape {tuple(out.shape)}", fix))
    if isinstance(out, np.ndarray):
        if out.dtype not in (np.float16, np.float32, np.float64):
            raise DtypeError(message(argument, "a floating point array", str(out.dtype), fix))
        if not out.flags.writeable:
            fix = "open the memory map with mode 'r+' or 'w+'"
            raise ValueError(message(argument, "an array that may be written", "a read-only one", fix))
        return torch.from_numpy(out)
    if not out.is_floating_point():
        raise DtypeError(message(argument, "a floating point tensor", str(out.dtype), fix))
    return out.detach()


def rows_of(tree: Tree, layout: Layout, argument: str) -> torch.Tensor:
    """Return the rows [n, p] of a tree of [n, ...], its leaves matched to the layout by path.

    Raises:
        StructureError: other leaves than the layout's, or other shapes.
    """
    leaves, spec = flatten(tree)
    by_path = dict(zip(paths_of(spec), leaves, strict=True))
    if by_path.keys() != set(layout.paths):
        got = [".".join(map(str, path)) for path in by_path]
        fix = "pass a tree like the parameters, one leading axis on every leaf"
        raise StructureError(message(argument, f"the leaves {list(layout.names)}", f"{got}", fix))
    return layout.ravel_rows(layout.build([by_path[path] for path in layout.paths]))


# ---------------------------------------------------------------------------------------------------------------------
# the store


_FORMAT = "dattrifunc rows"
_DTYPES = {  # name -> (torch dtype, what lies on disk)
    "float64": (torch.float64, "<f8"),
    "float32": (torch.float32, "<f4"),
    "float16": (torch.float16, "<f2"),
    "bfloat16": (torch.bfloat16, "<u2"),
}
_PREFIX = 128  # bytes before the numbers of a .npy file
_ROWS, _HEADER, _JOURNAL = "rows.npy", "header.json", "journal.part"
_IDS = {"int64": ("ids.npy", _PREFIX), "str": ("ids.jsonl", 0)}


class StoreExistsError(FileExistsError, ValueError):
    """A path where a store is to be created holds something."""


class StoreMissingError(FileNotFoundError, ValueError):
    """There is no store at a path."""


def _float_dtype(dtype: Any) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype) or name not in _DTYPES:
        raise DtypeError(message("dtype", f"one of {list(_DTYPES)}", repr(dtype), "pass dtype='float32'"))
    return _DTYPES[name][0]


class _Block(NamedTuple):
    """One append: how many rows, the checksum of their bytes, and the same of the ids."""

    rows: int
    crc32: int
    ids: str
    ids_bytes: int
    ids_crc32: int


def _npy_prefix(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a .npy file (format 1.0), of one length whatever the shape."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + (_PREFIX - 10).to_bytes(2, "little") + text.ljust(_PREFIX - 11).encode() + b"\n"


class _File:
    """A file that grows at its end, and is cut back when an append fails."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)

    def put(self, offset: int, data: bytes | memoryview) -> None:
        os.lseek(self.fd, offset, os.SEEK_SET)
        view = memoryview(data)
        while len(view):
            view = view[os.write(self.fd, view) :]

    def cut(self, end: int) -> None:
        os.ftruncate(self.fd, end)

    def sync(self) -> None:
        os.fsync(self.fd)

    def lock(self, path: Path) -> None:
        """Keep other writers out until the file is closed."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = "close the other writer first, or open with mode='r'"
            raise ValueError(message("path", "a store that nobody is writing", f"{path}, in use", fix)) from None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file so that it is either there, complete and durable, or not there."""
    temporary = path.with_suffix(".tmp")
    file = _File(temporary)
    try:
        file.cut(0)
        file.put(0, data)
        file.sync()
    finally:
        file.close()
    os.replace(temporary, path)
    _sync_folder(path.parent)


class RowStore(torch.utils.data.Dataset[torch.Tensor]):
    """Rows [n, p] in one folder, appended block by block, with their ids and the layout of their columns.

    ============  =================================================================================================
    rows.npy      the rows, a plain .npy that any NumPy program can memory-map (bfloat16 lies there as uint16)
    ids.npy       the ids, int64; or ids.jsonl, one JSON string per line
    header.json   written last: layout, dtype, attrs, row count, and a checksum per append
    journal.part  in place of the header while the store is unfinished: one line per append
    ============  =================================================================================================

    An append is on disk when it returns. A process killed at any moment leaves whole appends, which ``open`` finds, and
    maybe a torn one, which it leaves out. Rows keep the order in which they came; equal ids and equal rows are kept.

    Attributes:
        path: the folder.
        layout: columns of a row.
        dtype: torch dtype of the rows.
        attrs: what ``create`` was given, as JSON has it.
        complete: the store was closed, so the header is there.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RowStore.create(folder.name, Layout.of({"w": torch.zeros(2)})) as store:
    ...     store.append(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> RowStore.open(folder.name)[1]
    tensor([3., 4.])
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, meta: dict[str, Any], blocks: list[_Block], complete: bool) -> None:
        """Use ``create`` or ``open``."""
        self.path = path
        self.layout = Layout.from_json(json.dumps(meta["layout"]))
        self.attrs: dict[str, Any] = meta["attrs"]
        self.dtype, self._descr = _DTYPES[meta["dtype"]]
        self.complete = complete
        self._meta, self._blocks = meta, blocks
        self._count = sum(block.rows for block in blocks)
        self._ids_bytes = sum(block.ids_bytes for block in blocks)
        self._files: dict[str, _File] = {}
        self._journal_end = 0
        self._mapped: np.ndarray[Any, Any] | None = None
        self._read_ids: np.ndarray[Any, Any] | None = None

    # create, open, close

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        layout: Layout,
        *,
        dtype: torch.dtype | str | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> RowStore:
        """Start a store in a new or empty folder.

        Args:
            path: the folder; parents are made.
            layout: columns of a row, ``Layout.of(params)``.
            dtype: float64, float32, float16 or bfloat16; None = the layout's widest.
            attrs: a dict that JSON can hold, kept with the rows.

        Raises:
            FileExistsError (a ValueError too): the path holds something.
            DtypeError, TypeError: the dtype is not one of the four; attrs is not JSON.
        """
        folder = _folder(path)
        check_layout(layout)
        name = str(_float_dtype(layout.dtype if dtype is None else dtype)).removeprefix("torch.")
        kept = _as_json({} if attrs is None else attrs)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            fix = "choose another path, remove what is there, or resume with RowStore.open(path, mode='a')"
            raise StoreExistsError(message("path", "a new or empty folder", f"{folder}, which holds something", fix))
        folder.mkdir(parents=True, exist_ok=True)
        descr = _DTYPES[name][1]
        meta = {
            "format": _FORMAT,
            "version": 1,
            "dtype": name,
            "on_disk": np.dtype(descr).name,
            "layout": json.loads(layout.to_json()),
            "attrs": kept,
        }
        store = cls(folder, meta, [], complete=False)
        store._files[_ROWS] = _File(folder / _ROWS)
        try:
            store._files[_ROWS].lock(folder)
            store._start_writing()
        except BaseException:
            store._release()
            raise
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r") -> RowStore:
        """Open a store, finished or not.

        Args:
            path: the folder.
            mode: "r" maps it read-only (also from a read-only disk, and several times at once); "a" cuts off a torn
                append and goes on after the last whole one.

        Raises:
            FileNotFoundError (a ValueError too): nothing there.
            ValueError: the folder is no store, a file has not the size that the header says, or somebody else writes.
        """
        folder = _folder(path)
        check_choice(mode, "mode", ("r", "a"))
        if not folder.is_dir():
            raise StoreMissingError(message("path", "the folder of a store", f"{folder}, not there", "check the path"))
        if mode == "r":
            store = cls(folder, *_read_meta(folder))
            store._check_sizes()
            return store
        _read_meta(folder)  # before anything is created in a folder that is no store
        rows = _File(folder / _ROWS)
        try:
            rows.lock(folder)
            store = cls(folder, *_read_meta(folder))
            store._check_sizes()
            store._files[_ROWS] = rows
            store._start_writing()
        except BaseException:
            rows.close()
            raise
        return store

    def _start_writing(self) -> None:
        """Put a journal in the header's place, and cut every file to whole appends."""
        lines = [self._meta, *(block._asdict() for block in self._blocks)]
        journal = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        _replace(self.path / _JOURNAL, journal)
        (self.path / _HEADER).unlink(missing_ok=True)
        self.complete = False
        self._files[_JOURNAL] = _File(self.path / _JOURNAL)
        self._journal_end = len(journal)
        if self._blocks:
            self._open_ids(self._blocks[0].ids)
        for file, end in self._ends():
            file.cut(end)
        self._write_prefixes()
        for file, _ in self._ends():
            file.sync()
        _sync_folder(self.path)

    def _open_ids(self, kind: str) -> None:
        self._files[_IDS[kind][0]] = _File(self.path / _IDS[kind][0])
        _sync_folder(self.path)

    @property
    def _kind(self) -> str:
        return self._blocks[0].ids if self._blocks else "int64"

    def _ends(self) -> list[tuple[_File, int]]:
        """Return the open files and where each ends."""
        ends = {_ROWS: _PREFIX + self._count * self._row_bytes, _JOURNAL: self._journal_end}
        ends |= {name: prefix + self._ids_bytes for name, prefix in _IDS.values()}
        return [(file, ends[name]) for name, file in self._files.items()]

    @property
    def _row_bytes(self) -> int:
        return self.layout.size * np.dtype(self._descr).itemsize

    def _write_prefixes(self) -> None:
        """Bring the shapes in the .npy files up to date. Until the store is closed they are a courtesy to readers."""
        self._files[_ROWS].put(0, _npy_prefix(self._descr, (self._count, self.layout.size)))
        if "ids.npy" in self._files:
            self._files["ids.npy"].put(0, _npy_prefix("<i8", (self._count,)))

    def close(self) -> None:
        """Finish the store: write the header, last and atomically. Nothing happens when it is only read, or closed."""
        if not self._files:
            return
        if not self._blocks:
            self._open_ids("int64")
        self._write_prefixes()
        for file in self._files.values():
            file.sync()
        _replace(
            self.path / _HEADER,
            _sealed(
                {
                    **self._meta,
                    "rows": self._count,
                    "ids": self._kind,
                    "blocks": [list(block) for block in self._blocks],
                }
            ),
        )
        self.complete = True
        self._release()
        (self.path / _JOURNAL).unlink()

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def __del__(self) -> None:
        self._release()

    def __reduce__(self) -> Any:
        """Another process (a DataLoader's worker) opens the folder for itself, read-only."""
        return RowStore.open, (self.path,)

    # write

    def append(self, rows: Any, ids: Any = None) -> None:
        """Add rows; on disk when this returns, all of them or none.

        Args:
            rows: [b, p], a float tensor or array; or a tree of [b, ...] with the layout's leaves.
            ids: b integers or b strings, the same kind in the whole store; None = the rows' positions.

        Raises:
            StructureError: the width or the number of ids is wrong.
            DtypeError: rows are not floating point, or ids are of another kind than before.
            ValueError: a row holds NaN or inf, or a value too large for the store's dtype (rows are counted, and the
                first named), or the store is not open for writing. Nothing is written.
        """
        if not self._files:
            fix = "open it with RowStore.open(path, mode='a')"
            raise ValueError(message("store", "a store that is open for writing", "one that is not", fix))
        values = self._checked_rows(rows)
        kind, names = self._checked_ids(ids, len(values))
        bad = ~torch.isfinite(values.to(self.dtype)).all(dim=1)
        if bool(bad.any()):
            raise ValueError(self._nonfinite(values, bad, names))
        if not len(values):
            return
        data = _bytes(_on_disk(values.to(self.dtype), self._descr))
        if kind == "str":
            id_data = _bytes("".join(json.dumps(name) + "\n" for name in names.tolist()).encode())
        else:
            id_data = _bytes(names.astype("<i8"))
        block = _Block(len(values), zlib.crc32(data), kind, len(id_data), zlib.crc32(id_data))
        line = (json.dumps(block._asdict(), separators=(",", ":")) + "\n").encode()
        name, prefix = _IDS[kind]
        if name not in self._files:
            self._open_ids(kind)
        before, ends = len(self._blocks), self._ends()
        try:
            for file, offset, piece in (
                (name, prefix + self._ids_bytes, id_data),
                (_ROWS, _PREFIX + self._count * self._row_bytes, data),
                (_JOURNAL, self._journal_end, line),  # the append counts from here on
            ):
                self._files[file].put(offset, piece)
                self._files[file].sync()
            self._blocks.append(block)
        except BaseException:
            del self._blocks[before:]
            for opened, end in ends:
                opened.cut(end)
            raise
        self._count += block.rows
        self._ids_bytes += block.ids_bytes
        self._journal_end += len(line)
        self._mapped = self._read_ids = None
        self._write_prefixes()

    def _checked_rows(self, rows: Any) -> torch.Tensor:
        shape = f"[b, {self.layout.size}]"
        fix = "pass rows of the store's layout, as grad_rows gives"
        if not isinstance(rows, torch.Tensor | np.ndarray):
            rows = rows_of(rows, self.layout, "rows")
        if isinstance(rows, np.ndarray):
            if rows.dtype.kind != "f":
                raise DtypeError(message("rows", "floating point rows", str(rows.dtype), fix))
            rows = torch.from_numpy(np.array(rows, order="C"))
        if not rows.is_floating_point():
            raise DtypeError(message("rows", "floating point rows", str(rows.dtype), fix))
        if rows.ndim != 2 or rows.shape[1] != self.layout.size:
            raise StructureError(message("rows", f"shape {shape}", f"shape {tuple(rows.shape)}", fix))
        return cast(torch.Tensor, rows.detach().cpu())

    def _checked_ids(self, ids: Any, count: int) -> tuple[str, np.ndarray[Any, Any]]:
        """Return the kind of the ids and the ids."""
        before = self._blocks[0].ids if self._blocks else None
        if ids is None:
            if before == "str":
                fix = "pass ids=, one string per row"
                raise DtypeError(message("ids", "strings, as in the rows before", "None", fix))
            return "int64", np.arange(self._count, self._count + count, dtype=np.int64)
        listed = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
        fix = "pass a list of ints or a list of strings, one per row"
        if not isinstance(listed, list | tuple | range):
            raise TypeError(message("ids", "a list, an array or a tensor", type(ids).__name__, fix))
        if len(listed) != count:
            raise StructureError(message("ids", f"{count} ids, one per row", f"{len(listed)}", fix))
        if all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in listed) and (
            listed or before != "str"
        ):
            kind = "int64"
        elif all(isinstance(i, str) for i in listed):
            kind = "str"
        else:
            got = sorted({type(i).__name__ for i in listed})
            raise DtypeError(message("ids", "all integers or all strings", " and ".join(got), fix))
        if before is not None and kind != before and count:
            raise DtypeError(message("ids", f"{before}, as in the rows before", kind, fix))
        if kind == "str":
            return kind, np.array(listed, dtype=object)
        if any(not -(2**63) <= i < 2**63 for i in listed):
            raise ValueError(message("ids", "integers of 64 bits", str(max(listed, key=abs)), fix))
        return kind, np.array(listed, dtype=np.int64)

    def _nonfinite(self, values: torch.Tensor, bad: torch.Tensor, ids: np.ndarray[Any, Any]) -> str:
        source = ~torch.isfinite(values).all(dim=1)
        if bool(source.any()):
            fix = "look for overflow, log(0) or norm(0) in the loss on those samples, or leave them out"
            return message("rows", "finite rows", f"NaN or inf in {named(source, ids)}", fix)
        largest = float(values[bad].double().abs().max())
        fix = "create the store with a wider dtype, or scale the loss"
        expected = f"values that {self.dtype} can hold (up to {torch.finfo(self.dtype).max:.3g})"
        return message("rows", expected, f"up to {largest:.3g} in {named(bad, ids)}", fix)

    # read

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        return f"RowStore({str(self.path)!r}, rows={self._count}, width={self.layout.size}, {self.dtype}, {state})"

    @property
    def ids(self) -> np.ndarray[Any, Any]:
        """Ids of the rows [n]: int64, or strings."""
        if self._read_ids is None:
            name, prefix = _IDS[self._kind]
            if not self._count:
                self._read_ids = np.zeros(0, dtype=np.int64)
            elif self._kind == "int64":
                self._read_ids = np.fromfile(self.path / name, "<i8", self._count, offset=prefix)
            else:
                with open(self.path / name, "rb") as file:
                    lines = file.read(self._ids_bytes).decode().splitlines()
                self._read_ids = np.array([json.loads(line) for line in lines], dtype=np.str_)
        return self._read_ids

    def _map(self) -> np.ndarray[Any, Any]:
        """Return the rows as they lie on disk, mapped read-only."""
        if self._mapped is None:
            shape = (self._count, self.layout.size)
            if math.prod(shape):
                self._mapped = np.memmap(self.path / _ROWS, self._descr, "r", _PREFIX, shape)
            else:
                self._mapped = np.zeros(shape, self._descr)
        return self._mapped

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return row [p] for an int, rows [k, p] for a slice or a list of positions. Always a copy, in memory."""
        fix = f"pass an int below {self._count}, a slice, or a list of ints"
        if isinstance(index, torch.Tensor):
            index = index.tolist()
        listed = index if isinstance(index, list | np.ndarray) else [] if isinstance(index, slice) else [index]
        if any(not isinstance(i, numbers.Integral) or isinstance(i, bool) for i in listed):
            raise TypeError(message("index", "an int, a slice or a list of ints", repr(index), fix))
        if any(not -self._count <= i < self._count for i in listed):
            raise IndexError(message("index", f"positions among {self._count} rows", repr(index), fix))
        if isinstance(index, list):
            index = np.array(index, dtype=np.int64)
        values = torch.from_numpy(np.array(self._map()[index]))
        return values.view(torch.bfloat16) if self.dtype == torch.bfloat16 else values

    def blocks(self, size: int) -> Iterator[torch.Tensor]:
        """Yield all rows in order, as tensors [b, p] with b = ``size`` except in the last."""
        size = check_count(size, "size", fix="pass the number of rows per block")
        return (self[start : start + size] for start in range(0, self._count, size))

    def verify(self) -> int:
        """Read every byte and compare checksums.

        Returns:
            The number of rows, all of them as they were appended.

        Raises:
            ValueError: a file differs from what was written; it and the rows are named.
        """
        self._check_sizes()
        name, prefix = _IDS[self._kind]
        facts = [(b.rows, b.rows * self._row_bytes, b.crc32, b.ids_bytes, b.ids_crc32) for b in self._blocks]
        self._verify(_ROWS, _npy_prefix(self._descr, (self._count, self.layout.size)), [fact[:3] for fact in facts])
        if self._blocks or self.complete:
            first = _npy_prefix("<i8", (self._count,)) if prefix else b""
            self._verify(name, first, [(fact[0], *fact[3:]) for fact in facts])
        return self._count

    def _verify(self, shard: str, prefix: bytes, blocks: list[tuple[int, int, int]]) -> None:
        """Compare a file with its first bytes and, for each append, (rows, bytes, crc32)."""
        with open(self.path / shard, "rb") as file:
            if file.read(len(prefix)) != prefix and self.complete:
                raise ValueError(_damaged(self.path / shard, f"the .npy header for {self._count} rows", "another one"))
            done = 0
            for rows, size, crc in blocks:
                if _crc_of(file, size) != crc:
                    where = f"the bytes written for rows {done} to {done + rows - 1}"
                    raise ValueError(_damaged(self.path / shard, where, "other bytes"))
                done += rows

    def _check_sizes(self) -> None:
        name, prefix = _IDS[self._kind]
        expected = {_ROWS: _PREFIX + self._count * self._row_bytes}
        if self._blocks or self.complete:
            expected[name] = prefix + self._ids_bytes
        for shard, size in expected.items():
            path = self.path / shard
            got = path.stat().st_size if path.exists() else 0
            if got < size or (self.complete and got > size):
                raise ValueError(_damaged(path, f"{size} bytes for {self._count} rows", f"{got} bytes"))


def check_layout(layout: Any) -> Layout:
    """Return ``layout`` if it is one."""
    if not isinstance(layout, Layout):
        raise TypeError(message("layout", "a Layout", type(layout).__name__, "pass Layout.of(params)"))
    return layout


def _as_json(attrs: Any) -> Any:
    fix = "pass a dict of strings, numbers, lists and dicts"
    if not isinstance(attrs, dict):
        raise TypeError(message("attrs", "a dict", type(attrs).__name__, fix))
    try:
        return json.loads(json.dumps(attrs))
    except (TypeError, ValueError) as error:
        raise TypeError(message("attrs", "values that JSON can hold", str(error), fix)) from None


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(message("path", "a path", type(path).__name__, "pass the name of a folder"))
    return Path(path)


def _damaged(path: Path, expected: str, got: str) -> str:
    fix = "restore the file from a copy, or make the rows again"
    return message(path.name, expected, f"{got} in {path.parent}", fix)


def _crc_of(file: Any, size: int) -> int:
    crc = 0
    while size:
        data = file.read(min(size, 1 << 24))
        if not data:
            return -1
        crc = zlib.crc32(data, crc)
        size -= len(data)
    return crc


def _sealed(header: dict[str, Any]) -> bytes:
    """Return a header as JSON, with a checksum of itself."""
    return json.dumps({**header, "crc32": zlib.crc32(json.dumps(header).encode())}, indent=1).encode()


def _read_meta(folder: Path) -> tuple[dict[str, Any], list[_Block], bool]:
    """Return what the header, or else the journal, says: meta, blocks, complete."""
    header, journal = folder / _HEADER, folder / _JOURNAL
    if header.exists():
        try:
            found = json.loads(header.read_bytes())
            crc = found.pop("crc32")
            meta = {key: value for key, value in found.items() if key not in ("rows", "ids", "blocks")}
            blocks = [_Block(*block) for block in found["blocks"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(_damaged(header, "the header of a RowStore", f"{error}")) from None
        if crc != zlib.crc32(json.dumps(found).encode()):
            raise ValueError(_damaged(header, "the header as it was written", "a changed one"))
        return _supported(meta, header), blocks, True
    if not journal.exists():
        fix = "check the path; a store killed while it was being created can be removed"
        raise ValueError(message("path", "a folder with header.json or journal.part", f"{folder}, no RowStore", fix))
    # A torn last line has no newline: it belongs to an append that never finished.
    lines = journal.read_bytes().split(b"\n")[:-1]
    try:
        meta, *facts = [json.loads(line) for line in lines]
        blocks = [_Block(**fact) for fact in facts]
    except (ValueError, TypeError) as error:
        raise ValueError(_damaged(journal, "one line of JSON per append", f"{error}")) from None
    return _supported(meta, journal), blocks, False


def _supported(meta: dict[str, Any], path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT or meta.get("version") != 1:
        raise ValueError(_damaged(path, f"format {_FORMAT!r}, version 1", "something else"))
    return meta


def _on_disk(values: torch.Tensor, descr: str) -> np.ndarray[Any, Any]:
    if values.dtype == torch.bfloat16:
        values = values.contiguous().view(torch.int16)
        return values.numpy().view("<u2")
    return np.ascontiguousarray(values.numpy().astype(descr, copy=False))


def _bytes(data: bytes | np.ndarray[Any, Any]) -> memoryview:
    if isinstance(data, bytes):
        return memoryview(data)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data if data.size else memoryview(b"")


def named(bad: torch.Tensor, ids: Sequence[Any] | np.ndarray[Any, Any]) -> str:
    """Return "3 of 10 rows, first ids [...]" for a mask of rows."""
    where = bad.nonzero().flatten().tolist()
    first = [ids[i].item() if isinstance(ids[i], np.generic) else ids[i] for i in where[:5]]
    return f"{len(where)} of {len(bad)} rows, first ids {first}"


# ---------------------------------------------------------------------------------------------------------------------
# fingerprints


def fingerprint(*things: Any) -> str:
    """Return a SHA-256 hex digest of values and functions, equal in every process that holds the same.

    Tensors and arrays count with dtype, shape and bytes; containers with their order; functions with their bytecode,
    constants, names, defaults and what they close over or read from their module; other objects with their class and
    attributes. Of the functions of torch, NumPy and the standard library only the name counts, and torch's version.

    Raises:
        TypeError: something that has neither value, code nor attributes.

    >>> fingerprint({"w": torch.ones(2)}) == fingerprint({"w": torch.ones(2)})
    True
    >>> fingerprint(lambda w: 2 * w) == fingerprint(lambda w: 3 * w)
    False
    """
    digest = _Digest()
    digest.put("torch", torch.__version__)
    for thing in things:
        digest.add(thing)
    return digest.sha.hexdigest()


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "optree"}


class _Digest:
    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.seen: dict[int, int] = {}  # functions, classes and objects by identity: they may refer to each other

    def put(self, tag: str, payload: str | bytes | memoryview = b"") -> None:
        data = payload.encode() if isinstance(payload, str) else payload
        self.sha.update(f"{tag}:{len(data)}:".encode())
        self.sha.update(data)

    def add(self, thing: Any) -> None:
        if thing is None or thing is Ellipsis or isinstance(thing, bool | int | float | complex | str | bytes):
            self.put(type(thing).__name__, thing if isinstance(thing, bytes | str) else repr(thing))
        elif isinstance(thing, torch.Tensor):
            self._tensor(thing)
        elif isinstance(thing, np.ndarray | np.generic):
            self._array(np.asarray(thing))
        elif isinstance(thing, dict):
            self._many("dict", thing.items())
        elif isinstance(thing, list | tuple | deque | range | slice):
            parts = (thing.start, thing.stop, thing.step) if isinstance(thing, slice) else tuple(thing)
            self._many(type(thing).__name__, parts)
        elif isinstance(thing, set | frozenset):
            self._many("set", sorted(fingerprint(part) for part in thing))
        elif isinstance(thing, torch.dtype | torch.device | torch.layout | os.PathLike):
            self.put(type(thing).__name__, str(thing))
        elif isinstance(thing, torch.Generator):
            self._tensor(thing.get_state())
        elif isinstance(thing, types.ModuleType):
            self.put("module", thing.__name__)
        elif isinstance(thing, types.CodeType):
            self._code(thing)
        elif id(thing) in self.seen:
            self.put("again", str(self.seen[id(thing)]))
        else:
            self.seen[id(thing)] = len(self.seen)
            self._object(thing)

    def _many(self, tag: str, parts: Any) -> None:
        parts = list(parts)
        self.put(tag, str(len(parts)))
        for part in parts:
            self.add(part)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.put("tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
        if tensor.numel():
            flat = tensor.detach().cpu().reshape(-1)
            flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
            self.put("bytes", flat.view(torch.uint8).numpy().data)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.put("array", f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self.add(array.tolist())
        else:
            self.put("bytes", _bytes(array))

    def _code(self, code: types.CodeType) -> None:
        self.put("code", code.co_code)
        self._many("consts", code.co_consts)
        self._many("names", (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))

    def _object(self, thing: Any) -> None:
        if isinstance(thing, functools.partial):
            self._many("partial", (thing.func, thing.args, thing.keywords))
        elif isinstance(thing, types.MethodType):
            self._many("method", (thing.__func__, thing.__self__))
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self.put("class", f"{thing.__module__}.{thing.__qualname__}")
            if not _is_library(thing):
                parts = [(k, v) for k, v in vars(thing).items() if not k.startswith("__") or callable(v)]
                slots = types.GetSetDescriptorType | types.MemberDescriptorType
                self._many("body", [part for part in parts if not isinstance(part[1], slots)])
                self._many("bases", thing.__bases__)
        elif isinstance(thing, staticmethod | classmethod):
            self._many(type(thing).__name__, (thing.__func__,))
        elif isinstance(thing, property):
            self._many("property", (thing.fget, thing.fset))
        elif isinstance(thing, types.BuiltinFunctionType | types.WrapperDescriptorType | types.MethodDescriptorType):
            self.put("builtin", f"{getattr(thing, '__module__', '')}.{thing.__qualname__}")
        elif (
            _is_library(type(thing))
            and callable(thing)
            and hasattr(thing, "__name__")
            and not hasattr(thing, "__dict__")
        ):
            self.put("named", f"{type(thing).__qualname__} {thing.__name__}")
        else:
            names = [name for cls in type(thing).__mro__ for name in _slots(cls) if hasattr(thing, name)]
            if not hasattr(thing, "__dict__") and not names:
                fix = "close over tensors, numbers, modules and functions only"
                raise TypeError(message("fingerprint", "a value, a function or an object", repr(type(thing)), fix))
            self.add(type(thing))
            self.add(dict(getattr(thing, "__dict__", {})))
            self.add({name: getattr(thing, name) for name in names})

    def _function(self, function: types.FunctionType) -> None:
        self.put("function", f"{function.__module__}.{function.__qualname__}" if _is_library(function) else "")
        if _is_library(function):
            return
        self._code(function.__code__)
        self._many("defaults", (function.__defaults__, function.__kwdefaults__))
        self._many("closure", [_content(cell) for cell in function.__closure__ or ()])
        known = function.__globals__
        self._many("globals", [(name, known[name]) for name in _names(function.__code__) if name in known])


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _is_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _LIBRARIES - {"__main__"}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> list[str]:
    """Return the names that code, and code inside it, may read from its module."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names(constant))
    return list(found)
