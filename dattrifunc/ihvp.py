"""Inverse products: (C + lambda I)^-1 v = product + lambda + solver, and nothing else.

Every solver stands once, as a method of ``solvers``. ``_Inverse`` puts a method together with a product; its two
faces are the bound form (x held, all work that depends on x alone done at build) and the unbound form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import implicit, solvers
from .curvature import RULES, Curvature, Unchanged, bound, check_func, check_product_knobs, curvature
from .errors import StructureError, message
from .losses import CompositeLoss
from .products import fvp_at_x, hvp_at_x
from .solvers import Callback, Method, Preconditioner
from .tree import (
    Leaves,
    Tree,
    check_argnums,
    check_args,
    check_callable,
    flatten,
    flatten_dims,
    name_of,
    paths_of,
)

__all__ = [
    "ihvp_arnoldi",
    "ihvp_at_x_arnoldi",
    "ihvp_at_x_auto",
    "ihvp_at_x_cg",
    "ihvp_at_x_explicit",
    "ihvp_at_x_lissa",
    "ihvp_at_x_minres",
    "ihvp_at_x_nystrom",
    "ihvp_at_x_woodbury",
    "ihvp_auto",
    "ihvp_cg",
    "ihvp_explicit",
    "ihvp_lissa",
    "ihvp_minres",
    "ihvp_nystrom",
    "ihvp_woodbury",
]

Solve = Callable[[Tree], Any]
SolveAt = Callable[[tuple[Any, ...], Tree], Any]


# ---------------------------------------------------------------------------------------------------------------------
# both forms of every solver


@dataclass(frozen=True)
class _Inverse:
    """An inverse product before it meets x.

    ``make(samples, memory)`` returns the solver's method; ``memory`` outlives a call of a bound form.
    """

    func: Callable[..., Any]
    argnums: int | tuple[int, ...]
    mode: str
    regularization: float
    product: Callable[..., Any]
    chunk_size: int | None
    has_aux: bool
    make: Callable[[int | None, dict[str, Any]], Method]
    samples: bool = False
    collate: Callable[..., Any] | None = None
    in_dims: Any = None
    keep_batch_dim: bool = False

    @implicit.eager
    def __post_init__(self) -> None:
        check_callable(self.product, "product", "hvp_at_x, or a function with its signature")
        check_func(self.product, self.func)
        check_product_knobs(self.argnums, self.mode, self.regularization, self.chunk_size)
        if self.collate is not None:
            check_callable(self.collate, "collate_fn", "a function of the tuple of arguments of func")
        self.make(None, {})  # a wrong knob raises here, before there is an x

    def at(self, x: tuple[Any, ...], in_dims: Any, *, detach: bool) -> tuple[Curvature, Leaves, int | None]:
        """Return the system at x, without a solver, and how many samples it can draw from."""
        axes, count = _sample_axes(x, in_dims, self.argnums) if self.samples else ((), None)
        rule = RULES.get(self.product)
        sampled = rule is not None and rule.sampled
        if not self.samples:
            in_dims = self.in_dims
        elif sampled and in_dims is None:
            in_dims = _first_axes(x, self.argnums)
        if self.collate is not None and sampled:
            fix = "collate inside func, or pass product=hvp_at_x or ggnvp_at_x"
            raise ValueError(message("collate_fn", "None for a product that takes samples one by one", "one", fix))
        func = self.func if self.collate is None else _collated(self.func, self.collate)
        system, tensors = curvature(
            func,
            x,
            self.argnums,
            self.mode,
            self.regularization,
            self.chunk_size,
            detach=detach,
            hold=True,
            product=self.product,
            kind=_Sampled,
            inverse=True,
            quiet=self.has_aux,
            axes=axes,
            in_dims=in_dims if sampled or not self.samples else None,
            keep_batch_dim=self.keep_batch_dim,
        )
        return system, tensors, count

    def finish(self, system: Curvature, method: Method, v: Tree, held: implicit.System, tensors: Leaves) -> Any:
        """Solve for v."""
        out = solvers.run(method, system, held, tensors, v, "v")
        return tuple(out) if self.has_aux else out.value

    def bound(self, x: tuple[Any, ...], in_dims: Any = None) -> _BoundSolve:
        """Return v -> u with x held."""
        return _BoundSolve(self, x, in_dims)

    @implicit.eager
    def unbound(self, x: tuple[Any, ...], v: Tree, in_dims: Any = None) -> Any:
        """Return u at x."""
        system, tensors, count = self.at(check_args(x), in_dims, detach=False)
        method = self.make(count, {})
        return self.finish(system, method, v, replace(system, solve=method.rule), tensors)


class _BoundSolve:
    """An inverse product with x bound: ``f(v)``; see the function that made it.

    Attributes:
        point: x taken apart, with the layout of a vector.
    """

    @implicit.eager
    def __init__(self, inverse: _Inverse, x: tuple[Any, ...], in_dims: Any) -> None:
        self._inverse = inverse
        self._system, self._tensors, self._count = inverse.at(x, in_dims, detach=True)
        self._memory: dict[str, Any] = {}
        self._held = self._hold(inverse.make(self._count, self._memory))
        self.point = self._system.point
        self._data = Unchanged(self._system)

    def _hold(self, method: Method) -> tuple[Method, implicit.System, Leaves]:
        system = replace(self._system, solve=method.rule)
        return (method, system, self._tensors) if method.random else (method, *bound(system, self._tensors))

    @property
    def matrix(self) -> torch.Tensor:
        """The dense C + lambda I [p, p] that an explicit solve has factored."""
        method, system, _ = self._held
        if not isinstance(system, implicit.Held) or not hasattr(system.run, "matrix"):
            raise AttributeError(f"matrix: only ihvp_at_x_explicit outside of transforms holds one, not {method.name}")
        matrix: torch.Tensor = system.run.matrix
        return matrix

    @implicit.eager
    def __call__(self, v: Tree) -> Any:
        """Return the inverse product with v, in v's shapes; with ``has_aux``, ``(u, SolveInfo)``."""
        self._data.check()
        method, held, tensors = self._held
        if method.random:  # every call draws anew
            method, held, tensors = self._hold(self._inverse.make(self._count, self._memory))
        return self._inverse.finish(self._system, method, v, held, tensors)


@dataclass(frozen=True)
class _Collated:
    """A loss on collated arguments."""

    func: Callable[..., Any]
    collate: Callable[..., Any]

    def __call__(self, *x: Any) -> Any:
        return self.func(*_collate(self.collate, x))


@dataclass(frozen=True)
class _CollatedComposite(CompositeLoss):
    """A loss in two parts on collated arguments."""

    collate: Callable[..., Any]

    def __call__(self, *x: Any) -> Any:
        return super().__call__(*_collate(self.collate, x))

    def output(self, *x: Any) -> Any:
        return super().output(*_collate(self.collate, x))

    def value(self, output: Any, *x: Any) -> Any:
        return super().value(output, *_collate(self.collate, x))


def _collated(func: Callable[..., Any], collate: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(func, CompositeLoss):
        return _CollatedComposite(func.inner, func.outer, collate)
    return _Collated(func, collate)


def _collate(collate: Callable[..., Any], x: tuple[Any, ...]) -> tuple[Any, ...]:
    collated = collate(x)
    if not isinstance(collated, tuple | list):
        expected, got = "a function that returns the tuple of func's arguments", type(collated).__name__
        raise TypeError(message("collate_fn", expected, f"one that returns {got}", "return (params, batch)"))
    return tuple(collated)


# ---------------------------------------------------------------------------------------------------------------------
# losses whose arguments hold samples


@dataclass(frozen=True)
class _Sampled(Curvature):
    """Curvature that can be restricted to a batch of samples.

    ``axes`` says for each tensor of the arguments outside argnums which axis holds samples, or None. With
    ``indexed``, the last tensor is the index of the samples to use.
    """

    axes: tuple[int | None, ...] = field(kw_only=True, default=())
    indexed: bool = field(kw_only=True, default=False)

    def sampled(self, tensors: Leaves) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """Return (rows [k, R, *B, p], indices [R, batch] or None) -> (C_batch + lambda I) rows."""
        whole: list[implicit.Matvec] = []

        def product(rows: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
            if indices is None:
                if not whole:
                    whole.append(self.matvec(tensors))
                return whole[0](rows.flatten(0, 1)).reshape(rows.shape)
            one = replace(
                self, indexed=True, hold=False, levels=tuple(_with_index(level, False) for level in self.levels)
            )
            if len(indices) == 1:
                return one.matvec((*tensors, indices[0]))(rows.squeeze(1)).unsqueeze(1)
            repeats = implicit.Level(len(indices), self.must_map)
            each = replace(one, levels=(*one.levels, _with_index(repeats, True)))
            lifted = (
                t.expand(len(indices), *t.shape) if must else t for t, must in zip(tensors, self.must_map, strict=True)
            )
            return each.matvec((*lifted, indices))(rows)

        return product

    def parts(self, tensors: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """Return the differentiated leaves, the other tensors of x (of the batch), and the captured ones."""
        if not self.indexed:
            return super().parts(tensors)
        *whole, index = tensors
        leaves, rest, closed_over = super().parts(tuple(whole))
        taken = (t if axis is None else t.index_select(axis, index) for t, axis in zip(rest, self.axes, strict=True))
        return leaves, tuple(taken), closed_over

    def sample_count(self, tensors: Leaves) -> int:
        """Return how many samples the (lifted) tensors hold, or the index picks."""
        return tensors[-1].shape[-1] if self.indexed else super().sample_count(tensors)


def _with_index(level: implicit.Level, mapped: bool) -> implicit.Level:
    return implicit.Level(level.size, (*level.mapped, mapped))


def _sample_axes(
    x: tuple[Any, ...], in_dims: Any, argnums: int | tuple[int, ...]
) -> tuple[tuple[int | None, ...], int | None]:
    """Return the sample axis of each tensor outside argnums, and how many samples they hold (None: there are none)."""
    if not x:
        raise StructureError(message("x", "at least one argument", "none", "pass the arguments of func"))
    positions = check_argnums(argnums, len(x))
    fix = "pass one entry per argument of func: an int, None or a tree of those, None at argnums"
    if in_dims is not None:
        if not isinstance(in_dims, tuple | list) or len(in_dims) != len(x):
            raise StructureError(
                message("in_dims", f"a tuple of {len(x)} entries, one per argument", f"{in_dims!r}", fix)
            )
        if any(in_dims[i] is not None for i in positions):
            raise StructureError(message("in_dims", f"None at argnums {positions}", f"{in_dims!r}", fix))
    axes: list[int | None] = []
    counts: dict[str, int] = {}
    for i, argument in enumerate(x):
        if i in positions:
            continue
        entries = flatten_dims(0 if in_dims is None else in_dims[i], argument, f"in_dims[{i}]")
        leaves, spec = flatten(argument)
        for leaf, axis, path in zip(leaves, entries, paths_of(spec), strict=True):
            if not isinstance(leaf, torch.Tensor):
                continue
            if axis is None or (in_dims is None and leaf.ndim == 0):
                axes.append(None)
                continue
            if not -leaf.ndim <= axis < leaf.ndim:
                expected = f"an axis of a tensor of shape {tuple(leaf.shape)}"
                raise StructureError(message(f"in_dims[{i}]", expected, str(axis), fix))
            axes.append(axis % leaf.ndim)
            name = f"x[{i}][{name_of(path)!r}]" if path else f"x[{i}]"
            counts[f"{name} {tuple(leaf.shape)}"] = leaf.shape[axis]
    if len(set(counts.values())) > 1:
        fix = "pass in_dims with None for what holds no samples"
        raise StructureError(
            message("x", "the same number of samples in each argument outside argnums", str(counts), fix)
        )
    count = next(iter(counts.values()), None)
    if count == 0:
        raise StructureError(
            message("x", "at least one sample", "0", "pass data, or in_dims=None for the data argument")
        )
    return tuple(axes), count


def _first_axes(x: tuple[Any, ...], argnums: int | tuple[int, ...]) -> tuple[Any, ...]:
    """Return LiSSA's default as in_dims: axis 0 of every tensor outside argnums that has one."""
    positions = check_argnums(argnums, len(x))

    def axes(argument: Any) -> Any:
        leaves, spec = flatten(argument)
        return spec.unflatten([0 if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves])

    return tuple(None if i in positions else axes(argument) for i, argument in enumerate(x))


# ---------------------------------------------------------------------------------------------------------------------
# explicit


def _explicit(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...],
    regularization: float,
    product: Callable[..., Any],
    mode: str,
    chunk_size: int | None,
    has_aux: bool,
    **samples: Any,
) -> _Inverse:
    method = solvers.explicit_method()
    return _Inverse(func, argnums, mode, regularization, product, chunk_size, has_aux, lambda *_: method, **samples)


def ihvp_at_x_explicit(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    regularization: float = 0.0,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> Solve:
    """Bind x, build C + lambda I, factor it once, and return v -> (C + lambda I)^-1 v.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars.
    Memory p**2 numbers, time p products and p**3 / 3 operations, all at build.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        regularization: lambda >= 0, in units of loss / parameter**2.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        chunk_size: most columns pushed through autodiff at once; None = all p.
        has_aux: return ``(u, SolveInfo)``.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf
        (all k in one triangular solve). ``solve.matrix`` is C + lambda I [p, p].

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.
        ValueError: C has NaN or inf entries; the leaves are named.

    Warns:
        ConvergenceWarning: C + lambda I is singular (u is then the least-norm answer); names leaves without curvature
            and the lambda that would do.

    Source: Koh and Liang (2017), Understanding black-box predictions via influence functions, arXiv:1703.04730.

    >>> loss = lambda p: (p["w"] ** 2).sum() - p["b"] ** 2          # Hessian diag(2, 2, -2): indefinite
    >>> solve = ihvp_at_x_explicit(loss, {"w": torch.zeros(2), "b": torch.zeros(())})
    >>> solve({"w": torch.ones(2), "b": torch.tensor(1.0)})["b"]
    tensor(-0.5000)
    """
    samples = {"in_dims": in_dims, "keep_batch_dim": keep_batch_dim}
    return _explicit(func, argnums, regularization, product, mode, chunk_size, has_aux, **samples).bound(x)


def ihvp_explicit(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> SolveAt:
    """Return ``f(x, v)`` = (C(x) + lambda I)^-1 v through the dense matrix; see ``ihvp_at_x_explicit``.

    Differentiable in v and x (implicitly, by another solve).

    >>> ihvp_explicit(lambda w: (w**3).sum())((torch.ones(2),), torch.ones(2))
    tensor([0.1667, 0.1667])
    """
    samples = {"in_dims": in_dims, "keep_batch_dim": keep_batch_dim}
    return _explicit(func, argnums, regularization, product, mode, chunk_size, has_aux, **samples).unbound


# ---------------------------------------------------------------------------------------------------------------------
# conjugate gradients


def _cg(**knobs: Any) -> _Inverse:
    return _iterative(solvers.cg_method, **knobs)


def _iterative(
    make: Callable[..., Method],
    *,
    func: Callable[..., Any],
    argnums: int | tuple[int, ...],
    mode: str,
    regularization: float,
    product: Callable[..., Any],
    chunk_size: int | None,
    has_aux: bool,
    in_dims: Any,
    keep_batch_dim: bool,
    **knobs: Any,
) -> _Inverse:
    method = make(**knobs)
    samples = {"in_dims": in_dims, "keep_batch_dim": keep_batch_dim}
    return _Inverse(func, argnums, mode, regularization, product, chunk_size, has_aux, lambda *_: method, **samples)


def ihvp_at_x_cg(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    max_iter: int | None = None,
    tol: float = 1e-7,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    block: bool | str = False,
    generator: torch.Generator | None = None,
) -> Solve:
    """Bind x and return v -> (C + lambda I)^-1 v by conjugate gradients.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        max_iter: most iterations (one batched product each); None = 10 p, at most 1000.
        tol: stop a right-hand side when ||v - (C + lambda I) u|| <= tol * ||v||.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        regularization: lambda >= 0, in units of loss / parameter**2.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        chunk_size: most vectors pushed through autodiff at once; None = all k.
        has_aux: return ``(u, SolveInfo)``.
        callback: ``callback(iteration, residuals)``, residuals relative, in the shape of the info's fields.
        x0: where to start, like v or one vector for all of it; a constant. None, or where 0 is nearer: from 0.
        preconditioner: v -> M v for one v (mapped over all), M symmetric positive definite and near the inverse of
            C + lambda I. Or "jacobi": by its diagonal, from 64 products (exact where p <= 64, else from random signs).
            Or "nystrom": by a sketch of C of rank 50, from as many products, for C with a few large eigenvalues.
        block: one Krylov space for all right-hand sides, whose directions serve every one of them: fewer products, more
            memory (all directions are kept). "auto": where there are several right-hand sides and memory allows it.
        generator: source of the signs, or the sketch; same seed, bit-equal answer. None = always the same.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k].

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.

    Warns:
        ConvergenceWarning: some right-hand side missed ``tol``. Where curvature <= 0 was met: says how small the
            smallest eigenvalue is, and the lambda that would do.

    Source: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044. Differs: (1) right-hand sides are normalised first,
    so the solve scales with v; (2) one mask entry per right-hand side; (3) the true residual decides, with restarts.

    >>> loss = lambda p: (p["w"] ** 2).sum()            # Hessian 2 I
    >>> ihvp_at_x_cg(loss, {"w": torch.zeros(2)})({"w": torch.ones(2)})["w"]
    tensor([0.5000, 0.5000])
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _cg(**knobs).bound(x)


def ihvp_cg(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    max_iter: int | None = None,
    tol: float = 1e-7,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    block: bool | str = False,
    generator: torch.Generator | None = None,
) -> SolveAt:
    """Return ``f(x, v)`` = (C(x) + lambda I)^-1 v by conjugate gradients; see ``ihvp_at_x_cg``.

    Differentiable in v and x (implicitly, by another solve).

    >>> ihvp_cg(lambda w: (w**3).sum())((torch.ones(2),), torch.ones(2))
    tensor([0.1667, 0.1667])
    """
    return _cg(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# minimal residuals


def _minres(**knobs: Any) -> _Inverse:
    return _iterative(solvers.minres_method, **knobs)


def ihvp_at_x_minres(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    max_iter: int | None = None,
    tol: float = 1e-7,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    generator: torch.Generator | None = None,
) -> Solve:
    """Bind x and return v -> (C + lambda I)^-1 v by minimal residuals, C indefinite or singular as it may be.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        max_iter: most iterations (one batched product each); None = 10 p, at most 1000.
        tol: stop a right-hand side when ||v - (C + lambda I) u|| <= tol * ||v||.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        regularization: lambda >= 0, in units of loss / parameter**2.
        product: ``hvp_at_x``, or any function with its signature.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        chunk_size: most vectors pushed through autodiff at once; None = all k.
        has_aux: return ``(u, SolveInfo)``.
        callback: ``callback(iteration, residuals)``, residuals relative, in the shape of the info's fields.
        x0: where to start, like v or one vector for all of it; a constant. None, or where 0 is nearer: from 0.
        preconditioner: v -> M v for one v (mapped over all), M symmetric positive definite and near the inverse of
            C + lambda I. Or "jacobi": by its diagonal, from 64 products (exact where p <= 64, else from random signs).
            Or "nystrom": by a sketch of C of rank 50, from as many products, for C with a few large eigenvalues.
        generator: source of the signs, or the sketch; same seed, bit-equal answer. None = always the same.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k]. Where C + lambda I is singular, u is the solution of
        least norm if v is in its range, and otherwise, flagged, the least-squares solution.

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.

    Warns:
        ConvergenceWarning: some right-hand side missed ``tol``; says whether it is not in the range of C + lambda I.

    Source: Paige and Saunders (1975), doi:10.1137/0712047. Differs: see ``solvers.minres``.

    >>> loss = lambda p: p["a"] * p["b"]                # Hessian [[0, 1], [1, 0]]: indefinite
    >>> p = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    >>> ihvp_at_x_minres(loss, p)(p)
    {'a': tensor(2.0000), 'b': tensor(1.0000)}
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _minres(**knobs).bound(x)


def ihvp_minres(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    max_iter: int | None = None,
    tol: float = 1e-7,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
    callback: Callback | None = None,
    x0: Tree = None,
    preconditioner: Preconditioner = None,
    generator: torch.Generator | None = None,
) -> SolveAt:
    """Return ``f(x, v)`` = (C(x) + lambda I)^-1 v by minimal residuals; see ``ihvp_at_x_minres``.

    Differentiable in v and x (implicitly, by another solve).

    >>> ihvp_minres(lambda w: (w**3).sum())((torch.ones(2),), torch.ones(2))
    tensor([0.1667, 0.1667])
    """
    return _minres(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# Nystrom


def _nystrom(*, regularization: float, has_aux: bool, **knobs: Any) -> _Inverse:
    make = functools.partial(solvers.nystrom_method, regularization=regularization, want_residual=has_aux)
    return _iterative(make, regularization=regularization, has_aux=has_aux, **knobs)


def ihvp_at_x_nystrom(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    rank: int = 50,
    regularization: float = 0.0,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    generator: torch.Generator | None = None,
    has_aux: bool = False,
    tol: float = 1e-7,
) -> Solve:
    """Bind x, sketch C once, and return v -> an approximation of (C + lambda I)^-1 v of low rank.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars;
    it must be positive semidefinite. C ~ U L U^T, U [p, r], from one product with r vectors at build; a call makes
    none: u = U (L + lambda)^-1 U^T v + (I - U U^T) v / lambda. Good where the eigenvalues that the sketch leaves out
    are small beside lambda; r >= p is exact. Memory r p numbers, twice at build.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        rank: r, how many directions of curvature are kept; at most p of them.
        regularization: lambda > 0, in units of loss / parameter**2.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first. The last two are never negative.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        chunk_size: most vectors pushed through autodiff at once; None = all r.
        generator: source of the test matrix; same seed, bit-equal answer. None = always the same one.
        has_aux: return ``(u, SolveInfo)``; spends one product on the residual.
        tol: what ``info.converged`` holds the relative residual against; changes no value.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k].

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.
        ValueError: lambda is not > 0, or rank is not >= 1.

    Warns:
        ConvergenceWarning: the sketch met negative curvature of more than a tenth of lambda (it is taken for 0; says
            which lambda would do), or C is not finite. Without ``has_aux``, no residual is known, and none is judged.

    Source: Tropp, Yurtsever, Udell and Cevher (2017), arXiv:1706.05736; Frangella, Tropp and Udell (2021),
    arXiv:2110.02820. Differs: see ``solvers.sketch.sketched``.

    >>> loss = lambda p: 1.5 * p["w"] ** 2 + 0.5 * p["b"] ** 2          # Hessian diag(3, 1)
    >>> p = {"w": torch.tensor(4.0), "b": torch.tensor(4.0)}
    >>> ihvp_at_x_nystrom(loss, p, regularization=1.0)(p)
    {'w': tensor(1.0000), 'b': tensor(2.0000)}
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _nystrom(**knobs).bound(x)


def ihvp_nystrom(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    rank: int = 50,
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    generator: torch.Generator | None = None,
    has_aux: bool = False,
    tol: float = 1e-7,
) -> SolveAt:
    """Return ``f(x, v)``, the Nystrom approximation of (C(x) + lambda I)^-1 v; see ``ihvp_at_x_nystrom``.

    Differentiable in v and x: the implicit derivative, whose solve is the same approximation (exact where rank >= p).

    >>> ihvp_nystrom(lambda w: (w**2).sum(), regularization=2.0)((torch.ones(2),), torch.ones(2))
    tensor([0.2500, 0.2500])
    """
    return _nystrom(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# Arnoldi (Lanczos, as curvature is symmetric)


def _arnoldi(*, has_aux: bool, **knobs: Any) -> _Inverse:
    return _iterative(functools.partial(solvers.arnoldi_method, want_residual=has_aux), has_aux=has_aux, **knobs)


def ihvp_at_x_arnoldi(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    max_iter: int = 100,
    tol: float = 1e-7,
    mode: str = "rev-fwd",
    regularization: float = 0.0,
    top_k: int = 100,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    generator: torch.Generator | None = None,
    has_aux: bool = False,
) -> Solve:
    """Bind x, build a Krylov space of C once, and return v -> an approximation of (C + lambda I)^-1 v on it.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars;
    it may be indefinite or singular. C ~ U T U^T with the Ritz values T of largest size, signs kept, on a space of
    ``max_iter`` directions from a random start: one product each, at build. A call makes none:
    u = U (T + lambda)^-1 U^T v + (I - U U^T) v / lambda, the last part only where lambda is more than rounding
    of C; otherwise it is dropped, and u is the pseudo-inverse's on the kept space. max_iter and top_k of at least p are
    exact. Memory max_iter p numbers at build, top_k p held.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        max_iter: directions of the space, at most p.
        tol: curvature below this part of the largest (or below rounding) counts as none. Its directions are dropped, or
            divided by lambda where that is > 0, and counted in ``info.reason``; so is a space that C leads out of by no
            more, which goes on with a fresh direction. Also what ``info.converged`` holds the residual against.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        regularization: lambda >= 0, in units of loss / parameter**2.
        top_k: how many Ritz values are kept, the largest in size first.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        chunk_size: most vectors pushed through autodiff at once; the build takes one at a time, the residual all k.
        generator: source of the start; same seed, bit-equal answer. None = always the same one.
        has_aux: return ``(u, SolveInfo)``; spends one product on the residual.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k]; ``info.reason`` gives the smallest Ritz value where
        negative curvature was met (it is inverted with its sign), and how many directions have none. Status 2: more
        directions are needed, and C + lambda I is indefinite.

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.
        ValueError: lambda is not >= 0, or max_iter or top_k is not >= 1.

    Warns:
        ConvergenceWarning: C is not finite, or it is singular, the space is all there is, and v is not in its range.
            Without ``has_aux``, no other residual is known, and none is judged.

    Source: Schioppa, Zablotskaia, Vilar and Sokolov (2022), Scaling up influence functions, arXiv:2112.03052. Differs:
    see ``solvers.lanczos.ritz_inverse``.

    >>> loss = lambda p: 1.5 * p["w"] ** 2 - p["b"] ** 2                # Hessian diag(3, -2): indefinite
    >>> p = {"w": torch.tensor(3.0), "b": torch.tensor(4.0)}
    >>> u = ihvp_at_x_arnoldi(loss, p)(p)
    >>> round(float(u["w"]), 4), round(float(u["b"]), 4)
    (1.0, -2.0)
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _arnoldi(**knobs).bound(x)


def ihvp_arnoldi(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    max_iter: int = 100,
    tol: float = 1e-7,
    mode: str = "rev-fwd",
    regularization: float = 0.0,
    *,
    top_k: int = 100,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    generator: torch.Generator | None = None,
    has_aux: bool = False,
) -> SolveAt:
    """Return ``f(x, v)``, an approximation of (C(x) + lambda I)^-1 v on a Krylov space; see ``ihvp_at_x_arnoldi``.

    Differentiable in v and x: the implicit derivative, whose solve is the same approximation (exact where max_iter and
    top_k are at least p).

    >>> ihvp_arnoldi(lambda w: (w**3).sum())((torch.ones(2),), torch.ones(2))
    tensor([0.1667, 0.1667])
    """
    return _arnoldi(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# Woodbury


def check_rows(product: Any) -> None:
    """Raise unless the curvature is made of the gradients of samples."""
    check_callable(product, "product", "fvp_at_x, or leave it out")
    if product is not fvp_at_x:
        expected, got = "fvp_at_x, the curvature made of rows", getattr(product, "__name__", repr(product))
        raise ValueError(message("product", expected, got, "leave it out, or use ihvp_cg, which takes any product"))


def _woodbury(*, product: Callable[..., Any], regularization: float, **rest: Any) -> _Inverse:
    check_rows(product)
    method = solvers.woodbury_method(regularization=regularization, argument="func")
    return _Inverse(product=product, regularization=regularization, make=lambda *_: method, **rest)


def ihvp_at_x_woodbury(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    regularization: float = 0.0,
    product: Callable[..., Any] = fvp_at_x,
    in_dims: Any,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> Solve:
    """Bind x and return v -> (F + lambda I)^-1 v, exactly, through the n x n Gram matrix of the samples' gradients.

    F = 1/n sum_i g_i g_i^T is the empirical Fisher, g_i the gradient of ``func`` on sample i with respect to
    ``x[argnums]``: (F + lambda I)^-1 v = (v - G^T (n lambda I + G G^T)^-1 G v) / lambda for the rows G [n, p]. At
    build: the rows (n p numbers, held; twice that for a moment), their Gram matrix (n^2 p operations) and its Cholesky
    factor (n^2 numbers, held). A call calls ``func`` no more: four products with G for each v, four more for each step
    of refinement, which only a small lambda needs. Where n >= p it is as right, and
    ``ihvp_at_x_explicit`` with ``product=fvp_at_x`` is cheaper.

    Args:
        func: loss of one sample, ``func(*x) -> scalar``.
        x: arguments of ``func``, holding all n samples; any pytrees, taken as constants.
        argnums: which argument, or a tuple for several at once.
        regularization: lambda > 0, in units of loss / parameter**2.
        product: ``fvp_at_x``: no other curvature is made of rows.
        in_dims: sample axis per argument of func, as in ``torch.func.vmap``, e.g. (None, 0, 0).
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.
        mode: as in the other solvers; changes nothing here.
        chunk_size: most samples pushed through autodiff at once; None = all n.
        has_aux: return ``(u, SolveInfo)``.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k]; the residual is always the true one.

    Raises:
        StructureError: in_dims does not fit x, or v does not match x[argnums].
        ValueError: lambda is not > 0, another product is given, or a gradient has NaN or inf; the leaves are named.

    Warns:
        ConvergenceWarning: lambda is so small beside F that rounding leaves no such answer; says which would do.

    Source: Woodbury (1950), Inverting modified matrices; Hager (1989), doi:10.1137/1031049. Differs: see
    ``solvers.woodbury``.

    >>> loss = lambda w, x: w @ x                       # gradients (2, 0) and (0, 0), so F = diag(2, 0)
    >>> x = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    >>> solve = ihvp_at_x_woodbury(loss, torch.zeros(2), x, in_dims=(None, 0), regularization=1.0)
    >>> solve(torch.tensor([3.0, 1.0]))
    tensor([1., 1.])
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _woodbury(**knobs).bound(x)


def ihvp_woodbury(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = fvp_at_x,
    in_dims: Any,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> SolveAt:
    """Return ``f(x, v)`` = (F(x) + lambda I)^-1 v through the Gram matrix; see ``ihvp_at_x_woodbury``.

    Differentiable in v and x (implicitly, by another solve).

    >>> f = ihvp_woodbury(lambda w, x: w @ x, in_dims=(None, 0), regularization=1.0)
    >>> f((torch.zeros(2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])), torch.tensor([3.0, 1.0]))
    tensor([1., 1.])
    """
    return _woodbury(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# what fits


def _auto(**knobs: Any) -> _Inverse:
    return _iterative(solvers.auto_method, **knobs)


def ihvp_at_x_auto(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    tol: float = 1e-7,
    regularization: float = 0.0,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    max_iter: int | None = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> Solve:
    """Bind x and return v -> (C + lambda I)^-1 v by the solver that fits, C indefinite or singular as it may be.

    C is the Hessian of ``func`` with respect to ``x[argnums]`` (or what ``product`` computes), p its number of scalars.
    With k >= p vectors the dense matrix is built and kept for later calls. Otherwise all k vectors share one Krylov
    space, whose directions are kept (2 numbers per parameter and direction); where that would take more than 2^27
    numbers, conjugate gradients, and minimal residuals where those meet negative curvature.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument, or a tuple for several at once.
        tol: stop a right-hand side when ||v - (C + lambda I) u|| <= tol * ||v||.
        regularization: lambda >= 0, in units of loss / parameter**2.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first.
        in_dims: sample axis per argument of func, handed on to a product over samples, such as ``fvp_at_x``.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        max_iter: most steps of an iteration (one batched product each); None = 10 p, at most 1000.
        chunk_size: most vectors pushed through autodiff at once; None = all k.
        has_aux: return ``(u, SolveInfo)``; ``info.method`` says what was picked, and ``info.reason`` why.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf. With
        ``has_aux``, ``(u, SolveInfo)``, each field [] or [k].

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed).
        DtypeError: a differentiated leaf is not floating point.
        ValueError: k >= p, and C has NaN or inf entries.

    Warns:
        ConvergenceWarning: some right-hand side missed ``tol``; says why, and what to change.

    Source: see ``solvers.auto``.

    >>> loss = lambda p: p["a"] * p["b"]                # Hessian [[0, 1], [1, 0]]: indefinite
    >>> p = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    >>> ihvp_at_x_auto(loss, p)(p)
    {'a': tensor(2.), 'b': tensor(1.0000)}
    """
    knobs = {name: value for name, value in locals().items() if name != "x"}  # every parameter, by its name
    return _auto(**knobs).bound(x)


def ihvp_auto(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    tol: float = 1e-7,
    regularization: float = 0.0,
    *,
    product: Callable[..., Any] = hvp_at_x,
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    mode: str = "rev-rev",
    max_iter: int | None = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> SolveAt:
    """Return ``f(x, v)`` = (C(x) + lambda I)^-1 v by the solver that fits; see ``ihvp_at_x_auto``.

    Differentiable in v and x (implicitly, by another solve).

    >>> ihvp_auto(lambda w: (w**3).sum())((torch.ones(2),), torch.ones(2))
    tensor([0.1667, 0.1667])
    """
    return _auto(**locals()).unbound


# ---------------------------------------------------------------------------------------------------------------------
# LiSSA


def _lissa(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...],
    batch_size: int,
    num_repeat: int,
    recursion_depth: int,
    damping: float,
    scaling: float | str,
    collate_fn: Callable[..., Any] | None,
    mode: str,
    regularization: float,
    tol: float,
    generator: torch.Generator | None,
    product: Callable[..., Any],
    chunk_size: int | None,
    has_aux: bool,
    keep_batch_dim: bool,
) -> _Inverse:
    def make(num_samples: int | None, memory: dict[str, Any]) -> Method:
        return solvers.lissa_method(
            num_samples=num_samples,
            batch_size=batch_size,
            num_repeat=num_repeat,
            recursion_depth=recursion_depth,
            damping=damping,
            scaling=scaling,
            tol=tol,
            generator=generator,
            want_residual=has_aux,
            memory=memory,
        )

    return _Inverse(
        func,
        argnums,
        mode,
        regularization,
        product,
        chunk_size,
        has_aux,
        make,
        samples=True,
        collate=collate_fn,
        keep_batch_dim=keep_batch_dim,
    )


@implicit.eager
def lissa_scaling(func: Callable[..., Any], x: tuple[Any, ...], in_dims: Any, **knobs: Any) -> float:
    """Return the scale that ``scaling="auto"`` takes, with knobs as in ``ihvp_at_x_lissa``; 0 = no curvature."""
    inverse = _lissa(func, num_repeat=1, recursion_depth=0, scaling="auto", tol=0.0, has_aux=False, **knobs)
    system, tensors, count = inverse.at(x, in_dims, detach=True)
    memory: dict[str, Any] = {}
    with torch.no_grad():
        inverse.make(count, memory).rule(system, tensors)
    return float(memory["scaling"])


def ihvp_at_x_lissa(
    func: Callable[..., Any],
    *x: Any,
    in_dims: Any = None,
    argnums: int | tuple[int, ...] = 0,
    batch_size: int = 1,
    num_repeat: int = 1,
    recursion_depth: int = 5000,
    damping: float = 0.0,
    scaling: float | str = 50.0,
    collate_fn: Callable[..., Any] | None = None,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    tol: float = 0.0,
    generator: torch.Generator | None = None,
    product: Callable[..., Any] = hvp_at_x,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> Solve:
    """Bind x and return v -> an estimate of (C + (lambda + damping * scaling) I)^-1 v by LiSSA.

    The recursion e <- v + (1 - damping) e - (C_batch + lambda I) e / scaling runs ``recursion_depth`` times from e = v,
    each step on a fresh batch of samples; the estimate is the mean of e / scaling over the repeats. Its fixed point is
    (C + lambda I + damping * scaling * I)^-1 v, C the mean of C_batch: ``regularization`` is the lambda of all solvers,
    ``damping`` keeps the meaning it was published with. With all samples in each step, the error is
    (1 - damping - (C + lambda I) / scaling)^(recursion_depth + 1) of the answer.

    Args:
        func: loss of a batch, ``func(*x) -> scalar``, a mean over its samples.
        x: arguments of ``func``, holding all samples; taken as constants.
        in_dims: which axis of each argument holds samples: one entry per argument of func (an int, None or a tree of
            those), None at argnums. None as a whole: axis 0 of every tensor of the arguments outside argnums (0-d ones
            are passed whole). The counts must agree.
        argnums: which argument to differentiate, or a tuple for several at once.
        batch_size: samples per step, drawn without replacement inside a batch, independently from step to step. All
            right-hand sides share the batches; each repeat has its own.
        num_repeat: independent repeats, averaged (run side by side). From two on, SolveInfo.standard_error tells how
            far they differ.
        recursion_depth: steps of the recursion.
        damping: in [0, 1); see the fixed point.
        scaling: more than c / (2 - damping), c the largest curvature of any batch (above c / (1 - damping) for monotone
            convergence); "auto" estimates it from 32 batches, with a margin of 10 percent.
        collate_fn: applied to the tuple of (sampled) arguments before ``func``.
        mode: "rev-rev" or "rev-fwd", handed on to the product.
        regularization: lambda >= 0, in units of loss / parameter**2.
        tol: stop a right-hand side early when a step changes its estimate by at most tol, relative.
        generator: source of the batches. Same seed, bit-equal answer; a call moves it on, so two calls differ.
        product: ``hvp_at_x``, ``ggnvp_at_x`` (func is a CompositeLoss), ``fvp_at_x`` (func takes one sample), or any
            function with the signature of the first.
        keep_batch_dim: handed on to a product over samples: an axis of size 1 in place of the sample axis.
        chunk_size: most vectors pushed through autodiff at once; None = all k.
        has_aux: return ``(u, SolveInfo)``; spends one product with all samples on the residual and, where a row is not
            solved, up to 50 of one vector on whether negative curvature is why.

    Returns:
        ``solve(v) -> u`` with the shapes of v: those of ``x[argnums]``, or one extra leading axis k on every leaf.

    Raises:
        StructureError: the arguments disagree about the number of samples, or v does not match x[argnums].
        ValueError: batch_size is larger than the number of samples, or a knob is out of range.

    Warns:
        ConvergenceWarning: the series diverges (the last finite value is returned); says what to change.

    Source: Agarwal, Bullins and Hazan (2017), Second-order stochastic optimization in linear time, arXiv:1602.03943.

    >>> loss = lambda w, a: (a * w**2).mean()                       # Hessian 2 mean(a)
    >>> solve = ihvp_at_x_lissa(loss, torch.tensor(1.0), torch.tensor([1.0, 3.0]), batch_size=2, scaling=8.0)
    >>> solve(torch.tensor(1.0))
    tensor(0.2500)
    """
    return _lissa(
        func,
        argnums,
        batch_size,
        num_repeat,
        recursion_depth,
        damping,
        scaling,
        collate_fn,
        mode,
        regularization,
        tol,
        generator,
        product,
        chunk_size,
        has_aux,
        keep_batch_dim,
    ).bound(x, in_dims)


def ihvp_lissa(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    batch_size: int = 1,
    num_repeat: int = 1,
    recursion_depth: int = 5000,
    damping: float = 0.0,
    scaling: float | str = 50.0,
    collate_fn: Callable[..., Any] | None = None,
    mode: str = "rev-rev",
    *,
    regularization: float = 0.0,
    tol: float = 0.0,
    generator: torch.Generator | None = None,
    product: Callable[..., Any] = hvp_at_x,
    keep_batch_dim: bool = False,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return ``f(x, v, in_dims=None)``, the LiSSA estimate at x; see ``ihvp_at_x_lissa``.

    Differentiable in v and x: the implicit derivative, whose solve is another LiSSA run on the same batches.

    >>> f = ihvp_lissa(lambda w, a: (a * w**2).mean(), batch_size=2, scaling=8.0)
    >>> f((torch.tensor(1.0), torch.tensor([1.0, 3.0])), torch.tensor(1.0))
    tensor(0.2500)
    """
    return _lissa(
        func,
        argnums,
        batch_size,
        num_repeat,
        recursion_depth,
        damping,
        scaling,
        collate_fn,
        mode,
        regularization,
        tol,
        generator,
        product,
        chunk_size,
        has_aux,
        keep_batch_dim,
    ).unbound
