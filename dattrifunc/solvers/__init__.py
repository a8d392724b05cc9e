"""Solvers of A u = b that know nothing of losses: pure functions of (matvec, b) on pytrees.

``matvec`` and ``b`` speak of one vector tree; with ``batched=True`` both carry a leading axis k on every leaf. A is
symmetric. Every function returns a ``SolveResult(value, info)``, works under torch.func.vmap, and is differentiable
in b and in the tensors that ``matvec`` closes over, by another solve.

The knobs of each solver are checked and turned into a rule here, once, for these functions and for ``ihvp_*`` alike:
a rule is ``(system, tensors) -> (rows -> Raw)``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from .. import implicit
from ..errors import DtypeError, StructureError, message
from ..tree import (
    Layout,
    Leaves,
    Point,
    Tree,
    bind,
    check_callable,
    check_count,
    check_generator,
    check_number,
    flatten,
    is_plain,
    name_of,
    paths_of,
)
from .block import NUMBERS, block_rows, fits
from .conjugate import cg_rows
from .dense import Factor, check_symmetric, factorise, matrix_of
from .gram import factor_gram
from .info import SolveInfo, SolveResult, Status, warn_unsolved
from .lanczos import arnoldi_rows, ritz_inverse, seed_of
from .minimal import minres_rows
from .precondition import PROBES, by_diagonal, diagonal_of, random_signs
from .rows import as_returned
from .sketch import RANK, by_sketch, directions, nystrom_rows, sketched
from .stochastic import draw_batches, largest_batch_curvature, lissa_rows

__all__ = [
    "SolveInfo",
    "SolveResult",
    "Status",
    "arnoldi",
    "auto",
    "cg",
    "explicit",
    "lissa",
    "minres",
    "nystrom",
    "woodbury",
]

Callback = Callable[[int, torch.Tensor], None]
Preconditioner = Callable[[Tree], Tree] | str | None
_NEAR = "a function v -> M v that stands for the inverse, 'jacobi' or 'nystrom'"
_TOL_FIX = "pass a relative tolerance, for example tol=1e-7"


class Problem(Protocol):
    """What a rule may ask of the system it solves."""

    @property
    def layout(self) -> Layout:
        """Layout of one vector."""

    @property
    def point(self) -> Point:
        """Working dtype and rounding unit."""

    @property
    def levels(self) -> tuple[implicit.Level, ...]:
        """Lifted axes."""

    @property
    def notes(self) -> implicit.Notes:
        """What the call and its solve tell each other."""

    @property
    def shift(self) -> float:
        """Lambda."""

    def matvec(self, tensors: Leaves) -> implicit.Matvec:
        """Rows -> (C + lambda I) rows."""

    def unshifted(self, tensors: Leaves) -> implicit.Matvec:
        """Rows -> C rows."""

    def factor(self, tensors: Leaves) -> torch.Tensor:
        """Rows g_i [*B, n, p] of which C is the mean outer product, where it has them."""

    def sampled(self, tensors: Leaves) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """(rows [k, R, *B, p], indices [R, batch]) -> (C_batch + lambda I) rows."""


Rule = Callable[[Any, Leaves], Callable[[torch.Tensor], implicit.Raw]]


class Method(NamedTuple):
    """A solver with its knobs set: its name, its rule and the tolerance its warnings speak of."""

    name: str
    rule: Rule
    tol: float
    random: bool = False
    start: Tree = None


def _judged(
    problem: Problem,
    name: str,
    tol: float,
    run: Callable[[torch.Tensor], implicit.Raw],
    matvec: implicit.Matvec | None,
) -> Callable[[torch.Tensor], implicit.Raw]:
    """Return ``run`` with a warning for what it could not solve; ``matvec`` serves residuals of rounded answers."""

    def judged(rows: torch.Tensor) -> implicit.Raw:
        problem.notes.texts.clear()
        problem.notes.method = name
        raw = as_returned(run(rows), rows, problem.layout, matvec)
        if not problem.notes.quiet:
            picked = problem.notes.method
            label = name if picked == name else f"{name} ({picked})"
            warn_unsolved(raw, label, tol, "; ".join(problem.notes.texts))
        return raw

    return judged


def _sizes(problem: Problem) -> tuple[int, ...]:
    return tuple(level.size for level in reversed(problem.levels))


# ---------------------------------------------------------------------------------------------------------------------
# the methods: knobs checked at the door


def cg_method(*, block: bool | str = False, **knobs: Any) -> Method:
    """Return conjugate gradients with these knobs: those of ``_iterative``."""
    if not isinstance(block, bool) and block != "auto":
        fix = "pass block=True to share one Krylov space among all right-hand sides, 'auto' to do so where it pays"
        raise ValueError(message("block", "True, False or 'auto'", repr(block), fix))

    def solve(matvec: implicit.Matvec, rows: torch.Tensor, **options: Any) -> implicit.Raw:
        several = len(rows) > 1 and fits(math.prod(rows.shape[:-1]), rows.shape[-1])
        if block is True or (block and several):
            return block_rows(matvec, rows, **options)[0]
        return cg_rows(matvec, rows, **options)

    return _iterative("cg", solve, **knobs)


def minres_method(**knobs: Any) -> Method:
    """Return minimal residuals with these knobs: those of ``_iterative``."""
    return _iterative("minres", minres_rows, **knobs)


def _iterative(
    name: str,
    solve: Callable[..., implicit.Raw],
    *,
    max_iter: int | None,
    tol: float,
    callback: Callback | None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    generator: torch.Generator | None = None,
    batched: bool = False,
) -> Method:
    """Return an iteration that makes one batched product per step."""
    tol = check_number(tol, "tol", fix=_TOL_FIX)
    max_iter = _check_steps(max_iter)
    if callback is not None:
        check_callable(callback, "callback", "callback(iteration, residuals)")
    check_generator(generator)
    if isinstance(preconditioner, str) and preconditioner not in ("jacobi", "nystrom"):
        fix = "pass 'jacobi' or 'nystrom', or a function v -> M v"
        expected = "'jacobi', 'nystrom', a function or None"
        raise ValueError(message("preconditioner", expected, repr(preconditioner), fix))
    if preconditioner is not None and not isinstance(preconditioner, str):
        check_callable(preconditioner, "preconditioner", _NEAR)
        preconditioner = implicit.frozen(preconditioner)
        if preconditioner is None:
            fix = "pass one that depends on nothing that vmap maps"
            raise ValueError(message("preconditioner", "the same function for all that vmap maps", "a mapped one", fix))
    drawn: dict[int, torch.Tensor] = {}  # p -> what chance decided: once, also for the solves behind a derivative

    def near(problem: Problem, product: implicit.Matvec, matvec: implicit.Matvec) -> implicit.Matvec | None:
        p = problem.layout.size
        if preconditioner is None or not p:
            return None
        if not isinstance(preconditioner, str):
            return _on_rows(preconditioner, problem.point, batched)
        like = torch.empty(p, dtype=problem.point.work_dtype, device=device_of(problem.point))
        if preconditioner == "nystrom":
            if p not in drawn:
                drawn[p] = directions(RANK, p, generator)
            return by_sketch(sketched(product, drawn[p], _sizes(problem), like, problem.point.eps), problem.shift)
        if p > PROBES and p not in drawn:
            drawn[p] = random_signs(PROBES, p, generator)
        return by_diagonal(diagonal_of(matvec, _sizes(problem), drawn.get(p), like))

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        product = problem.unshifted(tensors)
        matvec = implicit.shifted(product, problem.shift)
        precondition = near(problem, product, matvec)
        limit = min(10 * problem.layout.size, 1000) if max_iter is None else max_iter

        def told(iteration: int, residuals: torch.Tensor) -> None:
            assert callback is not None
            callback(iteration, residuals.squeeze(0) if problem.notes.single else residuals)

        def run(rows: torch.Tensor) -> implicit.Raw:
            start, problem.notes.start = problem.notes.start, None
            return solve(
                matvec,
                rows,
                tol=tol,
                max_iter=limit,
                eps=problem.point.eps,
                layout=problem.layout,
                callback=None if callback is None else told,
                notes=problem.notes.texts,
                start=start,
                precondition=precondition,
            )

        return _judged(problem, name, tol, run, matvec)

    return Method(name, rule, tol, start=x0)


def _check_steps(max_iter: int | None) -> int | None:
    """Return the most steps of an iteration, or None."""
    if max_iter is None:
        return None
    return check_count(max_iter, "max_iter", low=0, none="10 p, at most 1000", fix="pass max_iter=None or a count")


def _on_rows(preconditioner: Callable[[Tree], Tree], point: Point, batched: bool) -> implicit.Matvec:
    """Return a user's preconditioner on rows [k, *B, p], the same constant for all of them."""

    def apply(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        if not len(flat):
            return rows

        def call(v: torch.Tensor, single: bool) -> torch.Tensor:
            found, alone = point.rows(preconditioner(point.tree(v, single)), "preconditioner(v)")
            if alone != single or len(found) != len(v):
                expected, got = "one vector" if single else f"{len(v)} vectors", "one" if alone else f"k = {len(found)}"
                fix = "return M v in the shapes of v; batched says whether v is one vector or k of them"
                raise StructureError(message("preconditioner(v)", f"{expected}, as v", got, fix))
            return found

        with torch.no_grad():
            if batched:
                out = call(flat, False)
            else:
                out = torch.func.vmap(lambda row: call(row.unsqueeze(0), True).squeeze(0))(flat)
        return out.reshape(rows.shape)

    return apply


def explicit_method() -> Method:
    """Return the dense solve; the matrix is factored once, when the rule meets the tensors."""
    tol = 1e-7

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        like = torch.empty(0, dtype=problem.point.work_dtype, device=device_of(problem.point))
        matvec = problem.matvec(tensors)
        matrix = matrix_of(matvec, problem.layout, _sizes(problem), like, problem.point.eps)
        factor = factorise(matrix, problem.layout, problem.point.eps)

        def run(rows: torch.Tensor) -> implicit.Raw:
            problem.notes.texts.extend([factor.reason] if factor.reason else [])
            return factor.solve(rows, tol, problem.point.eps)

        judged = _judged(problem, "explicit", tol, run, matvec)
        judged.matrix = factor.matrix  # type: ignore[attr-defined]
        return judged

    return Method("explicit", rule, tol)


def auto_method(*, tol: float, max_iter: int | None) -> Method:
    """Return the solve by what fits the problem: dense, over one block Krylov space, or by short recurrences."""
    tol = check_number(tol, "tol", fix=_TOL_FIX)
    max_iter = _check_steps(max_iter)

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        matvec, p, eps = problem.matvec(tensors), problem.layout.size, problem.point.eps
        factors: list[Factor] = []  # one, made by the first call that needs it

        def factor() -> Factor:
            if not factors:
                like = torch.empty(0, dtype=problem.point.work_dtype, device=device_of(problem.point))
                matrix = matrix_of(matvec, problem.layout, _sizes(problem), like, eps)
                factors.append(factorise(matrix, problem.layout, eps))
            return factors[0]

        def run(rows: torch.Tensor) -> implicit.Raw:
            k, count, texts = len(rows), math.prod(_sizes(problem)), problem.notes.texts
            size = f"p = {p}, k = {k}, lambda = {problem.shift:g}"
            if factors or (p <= k and count * p * p <= NUMBERS):
                texts.append(f"{size}: {'the matrix is factored already' if factors else 'p products give the matrix'}")
                problem.notes.method = "explicit"
                texts.extend([factor().reason] if factor().reason else [])
                return factor().solve(rows, tol, eps)
            limit = min(10 * p, 1000) if max_iter is None else max_iter
            knobs: dict[str, Any] = {
                "tol": tol,
                "max_iter": limit,
                "eps": eps,
                "layout": problem.layout,
                "notes": texts,
            }
            if fits(k * count, p):
                raw, negative = block_rows(matvec, rows, indefinite=True, **knobs)
                problem.notes.method = "block minres" if negative else "block cg"
                texts.insert(0, f"{size}: one Krylov space for all; {'' if negative else 'no '}negative curvature met")
                return raw
            problem.notes.method = "cg"
            texts.append(f"{size}: too large to keep a basis")
            raw = cg_rows(matvec, rows, **knobs)
            left = (raw.status == Status.NEGATIVE_CURVATURE) | (raw.status == Status.SINGULAR)
            left = left.reshape(k, -1).any(1)
            if not bool(left.any()):
                return raw
            problem.notes.method = "cg, then minres"
            again = minres_rows(matvec, rows[left], **knobs)
            pairs = zip(raw.outputs(), again.outputs(), strict=True)
            return implicit.Raw(*(old.index_copy(0, left.nonzero()[:, 0], new) for old, new in pairs))

        return _judged(problem, "auto", tol, run, matvec)

    return Method("auto", rule, tol)


def check_positive(regularization: Any, solver: str) -> float:
    """Return lambda of a solver that divides by it."""
    fix = f"pass lambda > 0 in units of loss / parameter**2, for example regularization=1e-3: {solver} divides by it"
    return check_number(regularization, "regularization", strict=True, fix=fix)


def woodbury_method(*, regularization: float, argument: str) -> Method:
    """Return the solve through the Gram matrix of the rows; ``argument`` is what a row that is not finite comes from.

    The matrix is factored once, when the rule meets the tensors.
    """
    tol = 1e-7
    check_positive(regularization, "woodbury")

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        gram = factor_gram(problem.factor(tensors), problem.shift, problem.layout, argument)

        def run(rows: torch.Tensor) -> implicit.Raw:
            return gram.solve(rows, tol, problem.point.eps, problem.notes.texts)

        return _judged(problem, "woodbury", tol, run, gram.matvec)

    return Method("woodbury", rule, tol)


def nystrom_method(
    *, rank: int, regularization: float, tol: float, generator: torch.Generator | None, want_residual: bool
) -> Method:
    """Return the Nystrom approximation with these knobs; C is sketched once, when the rule meets the tensors."""
    rank = check_count(rank, "rank", fix="pass how many directions of curvature to keep, for example rank=50")
    tol = check_number(tol, "tol", fix=_TOL_FIX)
    check_generator(generator)
    check_positive(regularization, "nystrom")
    drawn: dict[int, torch.Tensor] = {}  # p -> what chance decided

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        p, eps, shift = problem.layout.size, problem.point.eps, problem.shift
        if p not in drawn:
            drawn[p] = directions(rank, p, generator)
        like = torch.empty(0, dtype=problem.point.work_dtype, device=device_of(problem.point))
        product = problem.unshifted(tensors)
        sketch = sketched(product, drawn[p], _sizes(problem), like, eps)
        full = implicit.shifted(product, shift) if want_residual else None

        def run(rows: torch.Tensor) -> implicit.Raw:
            return nystrom_rows(sketch, rows, shift=shift, tol=tol, eps=eps, full=full, notes=problem.notes.texts)

        return _judged(problem, "nystrom", tol, run, full)

    return Method("nystrom", rule, tol)


def arnoldi_method(
    *, max_iter: int, top_k: int, tol: float, generator: torch.Generator | None, want_residual: bool
) -> Method:
    """Return the inverse on a Krylov space with these knobs; it is built once, when the rule meets the tensors."""
    max_iter = check_count(max_iter, "max_iter", fix="pass how many products to build the space from, for example 100")
    top_k = check_count(top_k, "top_k", fix="pass how many eigenvalues to keep, for example top_k=100")
    tol = check_number(tol, "tol", fix=_TOL_FIX)
    check_generator(generator)
    drawn: list[int] = []  # what chance decided: a seed, once, also for the solves behind a derivative

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        if not drawn:
            drawn.append(seed_of(generator))
        eps, shift, product = problem.point.eps, problem.shift, problem.unshifted(tensors)
        like = torch.empty(problem.layout.size, dtype=problem.point.work_dtype, device=device_of(problem.point))
        knobs: dict[str, Any] = {"shift": shift, "tol": tol, "eps": eps}
        inverse = ritz_inverse(product, _sizes(problem), like, max_iter=max_iter, top_k=top_k, seed=drawn[0], **knobs)
        full = implicit.shifted(product, shift) if want_residual else None

        def run(rows: torch.Tensor) -> implicit.Raw:
            return arnoldi_rows(inverse, rows, layout=problem.layout, full=full, notes=problem.notes.texts, **knobs)

        return _judged(problem, "arnoldi", tol, run, full)

    return Method("arnoldi", rule, tol)


def lissa_method(
    *,
    num_samples: int | None,
    batch_size: int,
    num_repeat: int,
    recursion_depth: int,
    damping: float,
    scaling: float | str,
    tol: float,
    generator: torch.Generator | None,
    want_residual: bool,
    memory: dict[str, Any],
) -> Method:
    """Return LiSSA with these knobs, for one call.

    ``num_samples=None``: every step uses the whole curvature. ``memory`` keeps an estimated scale from call to call.
    """
    fix = "pass a positive integer"
    batch_size = check_count(batch_size, "batch_size", fix=fix)
    num_repeat = check_count(num_repeat, "num_repeat", fix=fix)
    depth = check_count(recursion_depth, "recursion_depth", low=0, fix="pass the number of steps, for example 5000")
    damping = check_number(damping, "damping", fix="pass damping=0.0, and lambda as regularization")
    tol = check_number(tol, "tol", fix=_TOL_FIX)
    check_generator(generator)
    if scaling != "auto":
        if isinstance(scaling, str):
            fix = "pass scaling='auto', or more than half the largest curvature of any batch"
            raise ValueError(message("scaling", "a number > 0 or 'auto'", repr(scaling), fix))
        scaling = check_number(scaling, "scaling", strict=True, fix="pass scaling='auto' to estimate it")
    if damping >= 1:
        fix = "pass damping below 1; lambda goes to regularization"
        raise ValueError(message("damping", "a number in [0, 1)", f"{damping:g}", fix))
    if num_samples is not None and batch_size > num_samples:
        fix = f"pass batch_size <= {num_samples}"
        raise ValueError(message("batch_size", f"at most the number of samples ({num_samples})", f"{batch_size}", fix))
    drawn: dict[str, torch.Tensor] = {}  # what chance decided: once, also for the solves behind a derivative

    def rule(problem: Problem, tensors: Leaves) -> Callable[[torch.Tensor], implicit.Raw]:
        device = device_of(problem.point)
        sampled = problem.sampled(tensors)
        if "scaling" not in memory:
            like = torch.empty(*_sizes(problem), problem.layout.size, dtype=problem.point.work_dtype, device=device)
            memory["scaling"] = (
                _safe_scaling(sampled, like, num_samples, batch_size, damping, generator)
                if isinstance(scaling, str)
                else scaling
            )
        whole = num_samples is None or batch_size == num_samples
        if not whole and not drawn:
            indices = draw_batches(num_samples or 0, batch_size, (num_repeat, depth), generator)
            drawn["indices"] = indices.to(device)
        if not memory["scaling"]:
            problem.notes.texts.append("no curvature was found in any batch")
        full = problem.matvec(tensors) if want_residual else None

        def run(rows: torch.Tensor) -> implicit.Raw:
            return lissa_rows(
                sampled,
                rows,
                indices=drawn.get("indices"),
                depth=depth,
                num_repeat=1 if whole else num_repeat,
                damping=damping,
                scaling=memory["scaling"],
                tol=tol,
                eps=problem.point.eps,
                full=full,
                notes=problem.notes.texts,
            )

        return _judged(problem, "lissa", tol, run, None if damping else full)

    return Method("lissa", rule, tol, random=True)


def _safe_scaling(
    sampled: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    like: torch.Tensor,
    num_samples: int | None,
    batch_size: int,
    damping: float,
    generator: torch.Generator | None,
) -> float:
    """Return a scale at which steps contract: above the largest curvature of 32 batches, disjoint while data lasts."""
    indices = None
    if num_samples is not None and batch_size < num_samples:
        device = generator.device if generator is not None else None
        shuffled = torch.randperm(num_samples, generator=generator, device=device)
        count = min(-(-num_samples // batch_size), 32)
        shuffled = torch.cat([shuffled, shuffled])[: count * batch_size]  # the last batch is filled up from the first
        indices = shuffled.reshape(count, batch_size).to(like.device)
        if count < 32:  # a partition of little data: batches that mix its parts may curve more
            more = draw_batches(num_samples, batch_size, (32 - count,), generator).to(like.device)
            indices = torch.cat([indices, more])
    largest = largest_batch_curvature(sampled, like, indices, generator)
    if not math.isfinite(largest):
        fix = "look for log(0), norm(0) or overflow in the loss"
        raise ValueError(message("scaling", "finite curvature to estimate 'auto' from", "NaN or inf", fix))
    return 1.1 * largest / (1 - damping)


def device_of(point: Point) -> torch.device | None:
    """Return the device of rows."""
    return point.leaves[0].device if point.leaves else None


def run(method: Method, system: Any, held: implicit.System, tensors: Leaves, v: Tree, argument: str) -> SolveResult:
    """Solve ``held``, which is ``system`` with or without its tensors bound, for a tree v or a batch of them."""
    point, notes = system.point, system.notes
    rows, notes.single = point.rows(v, argument)
    single = notes.single
    notes.start = None if method.start is None else _start(point, method.start, len(rows), single)
    value, *facts = implicit.apply(held, rows, tensors)
    fields = [fact.squeeze(0) for fact in facts] if single else facts
    converged, status, iterations, residual, error = fields
    info = SolveInfo(converged, status, iterations, residual, error, notes.method, "; ".join(notes.texts))
    return SolveResult(point.tree(value, single), info)


def _start(point: Point, x0: Tree, count: int, single: bool) -> torch.Tensor:
    """Return x0 as rows [1, p] or [k, p], constant."""
    rows, alone = point.rows(x0, "x0")
    if not alone and (single or len(rows) != count):
        expected = "one vector" if single else f"one vector or k = {count}"
        raise StructureError(message("x0", f"{expected}, as v", f"k = {len(rows)}", "start one solve per vector of v"))
    plain = implicit.constant(rows)
    if plain is None:
        fix = "give vmap no x0 that it maps, or solve for a batch of v with a batch of x0"
        raise ValueError(message("x0", "the same start for all that vmap maps", "a mapped tensor", fix))
    return plain


# ---------------------------------------------------------------------------------------------------------------------
# the public functions: a user's matvec as a system


@dataclass(frozen=True)
class _Matrix(implicit.System):
    """A user's matvec on trees, as a system on rows; the tensors are those it closes over."""

    point: Point = field(kw_only=True)
    closure: implicit.Closure = field(kw_only=True)
    batched: bool = field(kw_only=True)
    shift: float = field(kw_only=True, default=0.0)
    sampling: int = field(kw_only=True, default=0)  # number of samples, where the function takes an index of them

    @property
    def layout(self) -> Layout:
        return self.point.layout

    def _call(self, tensors: Leaves, row: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        """Return A row for one row [p] (or rows [k, p] when the user's function is batched)."""
        lead = row.ndim - 1
        leaves = self.layout.split(row)
        out = self.closure.with_tensors(tensors)(self.layout.build(leaves), *index)
        found, single = self.point.rows(out, "matvec(v)")
        if single == bool(lead) or (lead and len(found) != len(row)):
            expected, got = (f"{len(row)} vectors" if lead else "one vector"), "one" if single else f"k = {len(found)}"
            fix = "return A v in the shapes of v; batched says whether v is one vector or k of them"
            raise StructureError(message("matvec(v)", f"{expected}, as v", got, fix))
        return found if lead else found.squeeze(0)

    def _at(self, levels: tuple[implicit.Level, ...], tensors: Leaves, rows: torch.Tensor, lead: int) -> torch.Tensor:
        """Return A rows for rows [*lead, *B, p], the levels' axes mapped one by one."""
        if not levels:
            return self._call(tensors, rows)
        *inner, (size, mapped) = levels
        dims = tuple(0 if m else None for m in mapped)
        if not size:
            return torch.zeros_like(rows)
        return torch.func.vmap(lambda t, r: self._at(tuple(inner), t, r, lead), (dims, lead), lead)(tensors, rows)

    def matvec(self, tensors: Leaves) -> implicit.Matvec:
        return implicit.shifted(self.unshifted(tensors), self.shift)

    def unshifted(self, tensors: Leaves) -> implicit.Matvec:
        def product(rows: torch.Tensor) -> torch.Tensor:
            if rows.shape[0] == 0 or self.layout.size == 0:
                return torch.zeros_like(rows)
            if self.batched:
                return self._at(self.levels, tensors, rows, 1)
            return torch.func.vmap(lambda row: self._at(self.levels, tensors, row, 0))(rows)

        return product

    def exact(self, tensors: Leaves, row: torch.Tensor) -> torch.Tensor:
        if not self.levels:
            out = self._call(tensors, row.unsqueeze(0)).squeeze(0) if self.batched else self._call(tensors, row)
            return out + self.shift * row if self.shift else out
        *inner, (size, mapped) = self.levels
        lower = replace(self, levels=tuple(inner))
        each = [
            lower.exact(tuple(t[i] if m else t for t, m in zip(tensors, mapped, strict=True)), row[i])
            for i in range(size)
        ]
        return torch.stack(each) if each else torch.zeros_like(row)

    def sampled(self, tensors: Leaves) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        if not self.sampling:
            full = self.matvec(tensors)
            return lambda rows, _: full(rows.flatten(0, 1)).reshape(rows.shape)
        if self.levels:
            raise RuntimeError(
                "matvec: expected tensors that no transform maps, got a sampled matvec that closes over mapped ones. "
                "Fix: map over b only, or use ihvp_lissa, which takes such tensors as arguments."
            )

        def product(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
            index = torch.arange(self.sampling).expand(rows.shape[1], -1) if index is None else index

            def one(row: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
                return self._call(tensors, row, batch)

            if self.batched:
                return torch.func.vmap(one, (1, 0), 1)(rows, index)
            return torch.func.vmap(torch.func.vmap(one), (0, None))(rows, index)

        return product


@dataclass(frozen=True)
class _Factored(implicit.System):
    """The mean of the outer products of rows [n, p], plus lambda I; the rows are its only tensor."""

    point: Point = field(kw_only=True)
    shift: float = field(kw_only=True)

    @property
    def layout(self) -> Layout:
        return self.point.layout

    def factor(self, tensors: Leaves) -> torch.Tensor:
        (rows,) = tensors  # [*B, n, p]: a level is a vmap that maps some tensor, and there is no other
        return rows

    def exact(self, tensors: Leaves, row: torch.Tensor) -> torch.Tensor:
        rows, column = self.factor(tensors), row.unsqueeze(-1)
        return (rows.mT @ (rows @ column)).squeeze(-1) / rows.shape[-2] + self.shift * row


@implicit.eager
def _solve(
    matvec: Any,
    b: Tree,
    method: Method,
    *,
    batched: bool,
    shift: float = 0.0,
    sampling: int = 0,
    probe: tuple[Any, ...] = (),
) -> SolveResult:
    """Solve on a user's matvec and b: what all public functions share."""
    dense = isinstance(matvec, torch.Tensor)
    if not dense:
        check_callable(matvec, "matvec", "a function v -> A v on trees like b, or the matrix as a torch.Tensor")
    point, batched_function = _point_of(b, batched), batched or dense
    if dense:
        matvec = _multiply(matvec, point)
    rows = torch.zeros(1, point.layout.size, dtype=point.work_dtype, device=device_of(point))

    def call() -> Any:
        return matvec(point.tree(rows, single=not batched_function), *probe)

    closure = implicit.Closure(matvec, (), call)
    closed_over = closure.tensors
    system = _Matrix(
        inverse=True,
        solve=method.rule,
        active=tuple(t.is_floating_point() for t in closed_over),
        must_map=(False,) * len(closed_over),
        quiet=True,
        point=point,
        closure=closure,
        batched=batched_function,
        shift=shift,
        sampling=sampling,
    )
    return run(method, system, system, closed_over, b, "b")


def _multiply(matrix: torch.Tensor, point: Point) -> Callable[[Tree], Tree]:
    """Return v -> A v for the matrix A in the columns of the flat vector."""
    layout, dtype, p = point.layout, point.work_dtype, point.layout.size
    if tuple(matrix.shape) != (p, p):
        fix = "pass a matrix for the flat vector; k right-hand sides carry a leading axis k and need batched=True"
        got = f"shape {tuple(matrix.shape)}"
        raise StructureError(message("matvec", f"a matrix of shape {(p, p)}, one vector of b having {p}", got, fix))
    if not matrix.is_floating_point() or torch.promote_types(matrix.dtype, dtype) != dtype:
        fix = f"convert it with .to({dtype})"
        raise DtypeError(message("matvec", f"a matrix of dtype {dtype}, like b", str(matrix.dtype), fix))
    if point.leaves and matrix.device != point.leaves[0].device:
        fix = f"move it with .to({str(point.leaves[0].device)!r})"
        expected = f"a matrix on {point.leaves[0].device}, like b"
        raise DtypeError(message("matvec", expected, f"one on {matrix.device}", fix))
    if is_plain(matrix):
        check_symmetric(matrix, point.eps, "matvec")

    def product(v: Tree) -> Tree:
        return layout.build(layout.split(layout.join(flatten(v)[0]).to(dtype) @ matrix.mT.to(dtype)))

    return product


def _point_of(b: Tree, batched: bool) -> Point:
    """Return the point whose layout is that of one vector of b."""
    given, spec = flatten(b, "b")
    for leaf, path in zip(given, paths_of(spec), strict=True):
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
            name, got = name_of(path), str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            fix = "convert it with torch.as_tensor(..., dtype=torch.float32)"
            raise DtypeError(message(f"b[{name!r}]" if name else "b", "a real floating point tensor", got, fix))
    point = bind(_no_loss, (b,), 0, detach=False)
    layout = point.layout
    if not batched:
        return point
    if any(not shape for shape in layout.shapes):
        fix = "give every leaf a leading axis k, or pass batched=False"
        raise StructureError(message("b", "leaves with a leading axis k (batched=True)", "a 0-d leaf", fix))
    one = Layout(layout.paths, tuple(shape[1:] for shape in layout.shapes), layout.dtypes, layout.spec)
    # A zero of each leaf's shape stands for the vector: only shapes, dtypes and devices are read from it.
    leaves = tuple(leaf.new_zeros(shape) for leaf, shape in zip(point.leaves, one.shapes, strict=True))
    return replace(point, layout=one, leaves=leaves)


def _no_loss(*_: Any) -> torch.Tensor:
    raise AssertionError("a solver knows no loss")


def cg(
    matvec: Callable[[Tree], Tree],
    b: Tree,
    *,
    batched: bool = False,
    max_iter: int | None = None,
    tol: float = 1e-7,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    block: bool | str = False,
    generator: torch.Generator | None = None,
) -> SolveResult:
    """Solve A u = b by conjugate gradients, A symmetric positive definite.

    Args:
        matvec: v -> A v, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side, any tree of floating point tensors; with ``batched`` one leading axis k on every leaf.
        batched: matvec and b carry the leading axis k.
        max_iter: most iterations (one batched product each); None = 10 p, at most 1000.
        tol: stop a right-hand side when ||b - A u|| <= tol ||b||.
        callback: ``callback(iteration, residuals)``, relative, in the shape of the info's fields.
        x0: where to start, like b or one vector for all of it; a constant. None, or where 0 is nearer: from 0.
        preconditioner: v -> M v, M symmetric positive definite and near the inverse of A; batched as matvec is. Or
            "jacobi": by the diagonal of A, from 64 products (exact where p <= 64, else from random signs). Or
            "nystrom": by a sketch of A of rank 50, from as many products, for A with a few large eigenvalues.
        block: one Krylov space for all right-hand sides, whose directions serve every one of them: fewer products, more
            memory (all directions are kept). "auto": where there are several right-hand sides and memory allows it.
        generator: source of the signs, or the sketch; same seed, bit-equal answer. None = always the same.

    Returns:
        SolveResult(value, info): u like b; one entry per right-hand side in info.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; StructureError where A v is not like v.

    Source: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044.

    >>> cg(lambda v: 2 * v, torch.tensor([2.0, 4.0])).value
    tensor([1., 2.])
    """
    method = cg_method(
        max_iter=max_iter,
        tol=tol,
        callback=callback,
        x0=x0,
        preconditioner=preconditioner,
        block=block,
        generator=generator,
        batched=batched,
    )
    return _solve(matvec, b, method, batched=batched)


def minres(
    matvec: Callable[[Tree], Tree],
    b: Tree,
    *,
    batched: bool = False,
    max_iter: int | None = None,
    tol: float = 1e-7,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    generator: torch.Generator | None = None,
) -> SolveResult:
    """Solve A u = b by minimal residuals, A symmetric: indefinite or singular as it may be.

    Args:
        matvec: v -> A v, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side, any tree of floating point tensors; with ``batched`` one leading axis k on every leaf.
        batched: matvec and b carry the leading axis k.
        max_iter: most iterations (one batched product each); None = 10 p, at most 1000.
        tol: stop a right-hand side when ||b - A u|| <= tol ||b||.
        callback: ``callback(iteration, residuals)``, relative, in the shape of the info's fields.
        x0: where to start, like b or one vector for all of it; a constant. None, or where 0 is nearer: from 0.
        preconditioner: v -> M v, M symmetric positive definite and near the inverse of A; batched as matvec is. Or
            "jacobi": by the diagonal of A, from 64 products (exact where p <= 64, else from random signs). Or
            "nystrom": by a sketch of A of rank 50, from as many products, for A with a few large eigenvalues.
        generator: source of the signs, or the sketch; same seed, bit-equal answer. None = always the same.

    Returns:
        SolveResult(value, info): u like b; one entry per right-hand side in info. Where A is singular, u is the
        solution of least norm if b is in the range of A, and otherwise, with status 3, the least-squares solution.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; StructureError where A v is not like v.

    Source: Paige and Saunders (1975), doi:10.1137/0712047.

    >>> minres(torch.diag(torch.tensor([2.0, -4.0, 0.0])), torch.tensor([2.0, 4.0, 1.0])).info.status
    tensor(3)
    """
    method = minres_method(
        max_iter=max_iter,
        tol=tol,
        callback=callback,
        x0=x0,
        preconditioner=preconditioner,
        generator=generator,
        batched=batched,
    )
    return _solve(matvec, b, method, batched=batched)


def auto(
    matvec: Callable[[Tree], Tree],
    b: Tree,
    *,
    batched: bool = False,
    max_iter: int | None = None,
    tol: float = 1e-7,
) -> SolveResult:
    """Solve A u = b by what fits, A symmetric: definite, indefinite or singular as it may be.

    Through the dense matrix where there are at least as many right-hand sides as unknowns (p products, the matrix in
    memory). Otherwise by minimal residuals over one Krylov space that all right-hand sides share, whose directions are
    kept; where they would take more than 2^27 numbers, by ``cg``, and ``minres`` where that meets negative curvature.

    Args:
        matvec: v -> A v, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side, any tree of floating point tensors; with ``batched`` one leading axis k on every leaf.
        batched: matvec and b carry the leading axis k.
        max_iter: most steps of an iteration (one batched product each); None = 10 p, at most 1000.
        tol: relative tolerance: ||b - A u|| <= tol ||b||.

    Returns:
        SolveResult(value, info): u like b; ``info.method`` says what was picked ("explicit", "block cg", "block minres"
        where negative curvature was met, "cg", "cg, then minres"), ``info.reason`` why.

    Source: see ``explicit``, ``cg`` and ``minres``.

    >>> auto(torch.diag(torch.tensor([2.0, -4.0])), torch.tensor([2.0, 4.0])).info.method
    'block minres'
    """
    return _solve(matvec, b, auto_method(max_iter=max_iter, tol=tol), batched=batched)


def explicit(matvec: Callable[[Tree], Tree], b: Tree, *, batched: bool = False) -> SolveResult:
    """Solve A u = b through the dense matrix: Cholesky, LDL^T where indefinite, least-norm where singular.

    Args:
        matvec: v -> A v, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side; with ``batched`` one leading axis k on every leaf.
        batched: matvec and b carry the leading axis k.

    Returns:
        SolveResult(value, info); status 3 where A is singular, with the least-norm u.

    Raises:
        ValueError: A has non-finite entries; the leaves are named.

    >>> explicit(torch.diag(torch.tensor([2.0, -4.0])), torch.tensor([2.0, 4.0])).value
    tensor([ 1., -1.])
    """
    return _solve(matvec, b, explicit_method(), batched=batched)


@implicit.eager
def woodbury(factor: Tree, b: Tree, *, regularization: float, batched: bool = False) -> SolveResult:
    """Solve (F + lambda I) u = b exactly, F = 1/n sum_i g_i g_i^T, through the n x n Gram matrix of the rows g_i.

    u = (b - G^T (n lambda I + G G^T)^-1 G b) / lambda for rows G [n, p]: n^2 p operations once, and four products with
    G for each b, four more for each step of refinement. Where n >= p it is as right, and ``explicit`` is cheaper.

    Args:
        factor: the rows: a tree like one vector of b, with a leading axis n on every leaf.
        b: the right-hand side; with ``batched`` one leading axis k on every leaf.
        regularization: lambda > 0.
        batched: b carries the leading axis k.

    Returns:
        SolveResult(value, info). Status 6 where lambda is so small beside F that rounding leaves no such answer.

    Raises:
        StructureError: factor is not like b.
        ValueError: lambda is not > 0, or factor has non-finite entries; the leaves are named.

    Source: Woodbury (1950), Inverting modified matrices; Hager (1989), doi:10.1137/1031049.

    >>> woodbury(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([3.0, 1.0]), regularization=1.0).value
    tensor([1., 1.])
    """
    method = woodbury_method(regularization=regularization, argument="factor")
    point = _point_of(b, batched)
    rows, single = point.rows(factor, "factor")
    if (single and point.leaves) or not len(rows):
        fix = "give every leaf a leading axis n, one row per sample"
        raise StructureError(message("factor", "n >= 1 rows", "one vector" if single else "n = 0", fix))
    system = _Factored(
        inverse=True,
        solve=method.rule,
        active=(True,),
        must_map=(False,),
        quiet=True,
        point=point,
        shift=float(regularization),
    )
    return run(method, system, system, (rows,), b, "b")


def nystrom(
    matvec: Callable[[Tree], Tree],
    b: Tree,
    *,
    regularization: float,
    rank: int = 50,
    batched: bool = False,
    generator: torch.Generator | None = None,
    tol: float = 1e-7,
) -> SolveResult:
    """Approximate u in (A + lambda I) u = b by a randomised Nystrom approximation of A, positive semidefinite.

    A ~ U L U^T of rank r from one product with r vectors; u = U (L + lambda)^-1 U^T b + (I - U U^T) b / lambda.
    r >= p is exact. One product more tells the residual.

    Args:
        matvec: v -> A v, without lambda, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side; with ``batched`` one leading axis k on every leaf.
        regularization: lambda > 0.
        rank: r, how many directions of curvature are kept.
        batched: matvec and b carry the leading axis k.
        generator: source of the test matrix; same seed, bit-equal answer. None = always the same one.
        tol: what ``info.converged`` holds the relative residual against; changes no value.

    Returns:
        SolveResult(value, info); status 1 where r is too low for tol, 2 where A has negative curvature beyond a tenth
        of lambda in the sketch.

    Raises:
        ValueError: lambda is not > 0, or rank is not >= 1.

    Source: Tropp, Yurtsever, Udell and Cevher (2017), arXiv:1706.05736; Frangella, Tropp and Udell (2021),
    arXiv:2110.02820. Differs: see ``solvers.sketch.sketched``.

    >>> nystrom(torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([4.0, 4.0]), regularization=1.0).value
    tensor([1.0000, 2.0000])
    """
    method = nystrom_method(rank=rank, regularization=regularization, tol=tol, generator=generator, want_residual=True)
    return _solve(matvec, b, method, batched=batched, shift=float(regularization))


def arnoldi(
    matvec: Callable[[Tree], Tree],
    b: Tree,
    *,
    regularization: float = 0.0,
    max_iter: int = 100,
    top_k: int = 100,
    batched: bool = False,
    generator: torch.Generator | None = None,
    tol: float = 1e-7,
) -> SolveResult:
    """Approximate u in (A + lambda I) u = b on a Krylov space of A, symmetric: indefinite or singular as it may be.

    A ~ U T U^T, T the Ritz values of largest size, with their signs, on a space of ``max_iter`` directions from a
    random start. u = U (T + lambda)^-1 U^T b + (I - U U^T) b / lambda, the last part only where lambda is more than
    rounding of A. Exact where max_iter and top_k are at least p. One product more tells the residual.

    Args:
        matvec: v -> A v, without lambda, on trees like b; or the matrix [p, p] itself.
        b: the right-hand side, any tree of floating point tensors; with ``batched`` one leading axis k on every leaf.
        regularization: lambda >= 0.
        max_iter: directions of the space, at most p; one product of one vector each.
        top_k: how many Ritz values are kept.
        batched: matvec and b carry the leading axis k.
        generator: source of the start; same seed, bit-equal answer. None = always the same one.
        tol: curvature below this part of the largest (or below rounding) counts as none: its directions are dropped, or
            divided by lambda where that is > 0. Also what ``info.converged`` holds the relative residual against.

    Returns:
        SolveResult(value, info); status 1 where max_iter or top_k is too low for tol, 2 where it is and A + lambda I
        has negative curvature, 3 where b is not in the range of a singular A (u is then the least-squares answer of
        least norm). ``info.reason`` tells of negative curvature and of dropped directions.

    Raises:
        ValueError: max_iter or top_k is not >= 1, or lambda is not >= 0.

    Source: see ``solvers.lanczos.ritz_inverse``.

    >>> arnoldi(torch.diag(torch.tensor([2.0, 2.0, -4.0])), torch.tensor([2.0, 4.0, 4.0])).value.round(decimals=4)
    tensor([ 1.,  2., -1.])
    """
    shift = check_number(regularization, "regularization", fix="pass lambda >= 0 in units of A, or leave it out")
    method = arnoldi_method(max_iter=max_iter, top_k=top_k, tol=tol, generator=generator, want_residual=True)
    return _solve(matvec, b, method, batched=batched, shift=shift)


def lissa(
    matvec: Callable[..., Tree],
    b: Tree,
    *,
    batched: bool = False,
    num_samples: int | None = None,
    batch_size: int = 1,
    num_repeat: int = 1,
    recursion_depth: int = 5000,
    damping: float = 0.0,
    scaling: float | str = 50.0,
    tol: float = 0.0,
    generator: torch.Generator | None = None,
) -> SolveResult:
    """Solve (A + damping scaling I) u = b by a Neumann series, A the mean of per-sample matrices.

    Args:
        matvec: v -> A v; with ``num_samples``, ``matvec(v, index)`` -> A_index v, index [batch_size] of samples.
        b: the right-hand side; with ``batched`` one leading axis k on every leaf.
        batched: matvec and b carry the leading axis k.
        num_samples: how many samples there are to draw from; None = A itself in each step.
        batch_size: samples per step, without replacement.
        num_repeat: independent repeats, averaged; from two on, info.standard_error tells how far they differ.
        recursion_depth: steps T; for fixed A the error is (1 - A/scaling)^(T+1) u.
        damping: in [0, 1); see the equation above.
        scaling: larger than half the largest eigenvalue of any A_index; "auto" estimates it.
        tol: stop early when a step changes the estimate by at most tol, relative.
        generator: source of the batches; same seed, bit-equal answer.

    Returns:
        SolveResult(value, info); status 4 where the series diverges, with the last finite value, and 2 where that or
        an unsolved row comes of negative curvature: ``info.reason`` has the eigenvalue and the lambda that would do.
        The residual takes one more product, with A itself, where ``matvec`` can be called without an index, and the
        eigenvalue up to 50 of one vector; otherwise the residual is NaN and status 2 is not told.

    Source: Agarwal, Bullins and Hazan (2017), arXiv:1602.03943.

    >>> lissa(lambda v: 2 * v, torch.tensor([2.0]), scaling=4.0, recursion_depth=50).value
    tensor([1.])
    """
    if num_samples is not None:
        num_samples = check_count(num_samples, "num_samples", none="A itself in each step", fix="pass the sample count")
        _check_sampled(matvec)
    method = lissa_method(
        num_samples=num_samples,
        batch_size=batch_size,
        num_repeat=num_repeat,
        recursion_depth=recursion_depth,
        damping=damping,
        scaling=scaling,
        tol=tol,
        generator=generator,
        want_residual=num_samples is None,
        memory={},
    )
    sampling = num_samples or 0
    probe = (torch.arange(batch_size),) if sampling else ()
    return _solve(matvec, b, method, batched=batched, sampling=sampling, probe=probe)


def _check_sampled(matvec: Any) -> None:
    """Raise TypeError unless ``matvec`` is a function of a vector and an index."""
    fix = "take the index of the samples as second argument, or drop num_samples"
    expected = "a function (v, index) -> A_index v, as num_samples is given"
    if not callable(matvec):
        raise TypeError(message("matvec", expected, type(matvec).__name__, fix))
    try:
        signature = inspect.signature(matvec)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(message("matvec", expected, f"one of {signature}", fix)) from None
