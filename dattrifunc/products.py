"""Curvature products: Hessian, Gauss-Newton or empirical Fisher times vector, for trees and many vectors at once.

Each is a rule of ``curvature``; the bound form holds what the rule builds, the unbound form builds at the x it is
called with. Scale: the loss's own reduction (a mean loss gives a mean Hessian); the Fisher product is a mean over
samples. ``regularization`` adds lambda I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import implicit
from .curvature import (
    RULES,
    BoundProduct,
    Curvature,
    Rule,
    build_fisher,
    build_gauss_newton,
    build_hessian,
    check_func,
    check_product_knobs,
    curvature,
    warn_not_finite,
)
from .errors import DtypeError, StructureError, message
from .losses import CompositeLoss
from .tree import Layout, Point, Tree, bind, check_callable, check_chunk

__all__ = [
    "BoundProduct",
    "CompositeLoss",
    "fvp",
    "fvp_at_x",
    "ggnvp",
    "ggnvp_at_x",
    "hessian_matrix",
    "hvp",
    "hvp_at_x",
]


@implicit.eager
def held(
    product: Callable[..., Any],
    func: Callable[..., Any],
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...],
    mode: str,
    regularization: float,
    chunk_size: int | None,
    **samples: Any,
) -> BoundProduct:
    """Return the bound form of a product."""
    system, tensors = curvature(
        func,
        x,
        argnums,
        mode,
        regularization,
        chunk_size,
        detach=True,
        hold=True,
        product=product,
        kind=Curvature,
        **samples,
    )
    return BoundProduct(system, tensors)


@implicit.eager
def unbound(
    product: Callable[..., Any],
    func: Callable[..., Any],
    argnums: int | tuple[int, ...],
    mode: str,
    regularization: float,
    chunk_size: int | None,
    **samples: Any,
) -> Callable[[tuple[Any, ...], Tree], Tree]:
    """Return the unbound form of a product."""
    check_func(product, func)
    check_product_knobs(argnums, mode, regularization, chunk_size)

    @implicit.eager
    def at(x: tuple[Any, ...], v: Tree) -> Tree:
        system, tensors = curvature(
            func,
            x,
            argnums,
            mode,
            regularization,
            chunk_size,
            detach=False,
            hold=False,
            product=product,
            kind=Curvature,
            **samples,
        )
        rows, single = system.point.rows(v)
        out = implicit.apply(system, rows, tensors)[0]
        warn_not_finite(system.point, rows, out)
        return system.point.tree(out, single)

    return at


def hvp_at_x(
    func: Callable[..., Any],
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    chunk_size: int | None = None,
) -> BoundProduct:
    """Bind x and return v -> (H + lambda I) v, H the Hessian of ``func`` with respect to ``x[argnums]``.

    The loss is evaluated once, here; a call only does work that depends on v.

    Args:
        func: loss, ``func(*x) -> scalar``. Its own reduction sets the scale: a mean loss gives a mean Hessian.
        x: the arguments of ``func``; any pytrees, taken as constants. Only ``argnums`` must be floating point.
        argnums: which argument to differentiate, or a tuple for the joint Hessian of several (vectors are then tuples).
        mode: "rev-rev" (reverse over reverse) or "rev-fwd" (forward over reverse); same value. Where an operator has no
            forward mode, "rev-fwd" falls back with one warning that names it.
        regularization: lambda >= 0, in units of loss / parameter**2.
        chunk_size: most vectors pushed through autodiff at once; None = all. Memory only, not values.

    Returns:
        ``f(v)``: v like ``x[argnums]``, or with one leading axis k on every leaf; the result has v's shapes and x's key
        order. Differentiable in v, and usable under every torch.func transform.

    Raises:
        StructureError: v does not match x[argnums] (both structures are printed), or func returns no scalar.
        DtypeError: a differentiated leaf is not floating point, or v is wider than its parameter.
        ValueError: func draws random numbers, so that it has no one Hessian.

    Warns:
        NonFiniteWarning: the product with a finite v holds NaN or inf; once per call, names the leaves. A v that is not
            finite gives NaN without a word, and nothing is said inside a torch.func transform.

    What autodiff sees is what is differentiated. A tensor that func detaches is a constant in both modes. A block under
    ``torch.no_grad`` is a constant in "rev-rev", but forward mode goes through it: with c = t**2 made there and loss
    c t, the product with 1 is 0 in "rev-rev" and 2 t in "rev-fwd". Use ``detach`` for what is meant as a constant.

    Source: Pearlmutter (1994), Fast exact multiplication by the Hessian, doi:10.1162/neco.1994.6.1.147.

    >>> loss = lambda p, a: (a * p["w"] ** 3).sum()          # Hessian diag(6 a w)
    >>> f = hvp_at_x(loss, ({"w": torch.ones(2)}, torch.tensor([1.0, 2.0])))
    >>> f({"w": torch.ones(2)})["w"]
    tensor([ 6., 12.])
    """
    return held(hvp_at_x, func, x, argnums, mode, regularization, chunk_size)


def hvp(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    chunk_size: int | None = None,
) -> Callable[[tuple[Any, ...], Tree], Tree]:
    """Return ``f(x, v)`` = (H(x) + lambda I) v; see ``hvp_at_x`` for the arguments.

    Returns:
        ``f(x, v)`` with x the tuple of func's arguments. Differentiable in v and x.

    >>> f = hvp(lambda w: (w**3).sum())
    >>> f((torch.tensor([1.0, 2.0]),), torch.ones(2))
    tensor([ 6., 12.])
    """
    return unbound(hvp_at_x, func, argnums, mode, regularization, chunk_size)


def ggnvp_at_x(
    loss: CompositeLoss,
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    chunk_size: int | None = None,
) -> BoundProduct:
    """Bind x and return v -> (G + lambda I) v, G = J^T H J the Gauss-Newton matrix of ``loss`` at x.

    J is the Jacobian of ``inner`` with respect to ``x[argnums]``, H the Hessian of ``outer`` with respect to inner's
    output. G is the Hessian of the loss with ``inner`` made linear at x: positive semi-definite where outer is convex,
    and the true Fisher matrix for cross-entropy with softmax. Inner and outer are evaluated once, here.

    Args:
        loss: a ``CompositeLoss(inner, outer)``. Outer's own reduction sets the scale: a mean gives a mean matrix.
        x: the arguments of ``loss``, (params, inputs, *targets); any pytrees, taken as constants.
        argnums: 0 for params, 1 for inputs, or a tuple of both. No target: G has no part in one.
        mode: how J v is computed: "rev-rev" (the transpose of the transpose) or "rev-fwd" (forward mode); same value.
            Falls back as in ``hvp_at_x``.
        regularization: lambda >= 0, in units of loss / parameter**2.
        chunk_size: most vectors pushed through autodiff at once; None = all. Memory only, not values.

    Returns:
        ``f(v)``, as ``hvp_at_x``.

    Raises:
        TypeError: loss is no CompositeLoss.
        StructureError: v does not match x[argnums], or outer returns no scalar.
        DtypeError: a differentiated leaf, or an output of inner, is not floating point.
        ValueError: argnums names a target, or loss draws random numbers.

    Warns:
        NonFiniteWarning: as ``hvp_at_x``.

    Source: Schraudolph (2002), Fast curvature matrix-vector products, doi:10.1162/08997660260028683. The equality with
    the Fisher matrix: Martens (2020), New insights and perspectives on the natural gradient method, arXiv:1412.1193.

    >>> loss = CompositeLoss(lambda w, x: x @ w, lambda z, y: (z - y).square().sum() / 2)
    >>> f = ggnvp_at_x(loss, (torch.ones(2), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0])))      # G = x^T x
    >>> f(torch.tensor([1.0, 0.0]))
    tensor([1., 2.])
    """
    return held(ggnvp_at_x, loss, x, argnums, mode, regularization, chunk_size)


def ggnvp(
    loss: CompositeLoss,
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    chunk_size: int | None = None,
) -> Callable[[tuple[Any, ...], Tree], Tree]:
    """Return ``f(x, v)`` = (G(x) + lambda I) v; see ``ggnvp_at_x`` for the arguments.

    Returns:
        ``f(x, v)`` with x the tuple of the loss's arguments. Differentiable in v and x.

    >>> f = ggnvp(CompositeLoss(lambda w, x: (w * x).sum(), lambda z: z**2))          # G = 2 x x^T
    >>> f((torch.ones(2), torch.tensor([1.0, 2.0])), torch.tensor([1.0, 0.0]))
    tensor([2., 4.])
    """
    return unbound(ggnvp_at_x, loss, argnums, mode, regularization, chunk_size)


def fvp_at_x(
    func: Callable[..., Any],
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
) -> BoundProduct:
    """Bind x and return v -> (F + lambda I) v, F = 1/n sum_i g_i g_i^T the empirical Fisher matrix.

    g_i is the gradient of ``func`` on sample i alone. Up to n p = 2**24 numbers the rows g_i are computed once, here,
    and a product is two matrix products. Beyond that F = J^T J / n with J the Jacobian of the n losses, in one forward
    and one backward pass and without an n x p matrix; the losses are then evaluated once, here, or, with a
    ``chunk_size`` below n, chunk by chunk in every product, so that memory stays bounded.

    Args:
        func: loss of one sample, ``func(*x) -> scalar``.
        x: the arguments of ``func``, holding n >= 1 samples; any pytrees, taken as constants.
        argnums: which argument to differentiate, or a tuple (vectors are then tuples).
        mode: "rev-rev" or "rev-fwd", how J v is computed where the rows are not held; same value.
        regularization: lambda >= 0, in units of (loss / parameter)**2, F's own.
        in_dims: sample axis per argument of func, as in ``torch.func.vmap``: one entry each (an int, None or a tree of
            those), None at argnums.
        chunk_size: most samples, and most vectors, pushed through autodiff at once; None = all. Memory only, not
            values.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis, for a loss written for batches.

    Returns:
        ``f(v)``, as ``hvp_at_x``.

    Raises:
        StructureError: in_dims does not fit x, the samples' counts differ, or v does not match x[argnums].
        DtypeError: a differentiated leaf is not floating point.
        ValueError: func draws random numbers.

    Warns:
        UserWarning: vmap cannot go through func, so a loop over the samples was used; names the operator or the reason.
        NonFiniteWarning: as ``hvp_at_x``.

    Source: Kunstner, Balles and Hennig (2019), Limitations of the empirical Fisher approximation for natural gradient
    descent, arXiv:1905.12558.

    >>> loss = lambda w, x, y: (w @ x - y).square() / 2
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 3.0])       # gradients (1, 0) and (0, -2)
    >>> fvp_at_x(loss, (torch.ones(2), x, y), in_dims=(None, 0, 0))(torch.ones(2))
    tensor([0.5000, 2.0000])
    """
    samples = {"in_dims": in_dims, "keep_batch_dim": keep_batch_dim}
    return held(fvp_at_x, func, x, argnums, mode, regularization, chunk_size, **samples)


def fvp(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    mode: str = "rev-rev",
    regularization: float = 0.0,
    *,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
) -> Callable[[tuple[Any, ...], Tree], Tree]:
    """Return ``f(x, v)`` = (F(x) + lambda I) v, without an n x p matrix; see ``fvp_at_x`` for the arguments.

    Returns:
        ``f(x, v)`` with x the tuple of func's arguments. Differentiable in v and x.

    >>> f = fvp(lambda w, x: (w * x).sum(), in_dims=(None, 0))
    >>> f((torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]])), torch.tensor([1.0, 1.0]))
    tensor([2., 3.])
    """
    samples = {"in_dims": in_dims, "keep_batch_dim": keep_batch_dim}
    return unbound(fvp_at_x, func, argnums, mode, regularization, chunk_size, **samples)


RULES[hvp_at_x] = Rule(build_hessian)
RULES[ggnvp_at_x] = Rule(build_gauss_newton, composite=True)
RULES[fvp_at_x] = Rule(build_fisher, sampled=True)


def hessian_matrix(product_at_x: Callable[[Tree], Tree], like: Tree, *, chunk_size: int | None = None) -> torch.Tensor:
    """Return the dense matrix [p, p] of a bound product, in leaf order.

    Args:
        product_at_x: a bound product ``f(v)``, ``hvp_at_x(...)`` for one, that takes k vectors at once.
        like: the tree x[argnums], for its structure.
        chunk_size: most columns computed at once; None = all p.

    Returns:
        [p, p] in the working dtype (the widest leaf's, at least float32). Row i is the product with unit vector i.

    Raises:
        TypeError: product_at_x cannot be called.
        StructureError: ``like`` and the product do not belong together.

    >>> hessian_matrix(hvp_at_x(lambda w: (w**3).sum(), (torch.tensor([1.0, 2.0]),)), torch.zeros(2))
    tensor([[ 6.,  0.],
            [ 0., 12.]])
    """
    chunk = check_chunk(chunk_size)
    point, product = on_rows(product_at_x, like)
    p, device = point.layout.size, point.leaves[0].device if point.leaves else None
    out = torch.empty(p, p, dtype=point.work_dtype, device=device)
    step = chunk or max(p, 1)
    for start in range(0, p, step):
        stop = min(start + step, p)
        rows = torch.zeros(stop - start, p, dtype=point.work_dtype, device=device)
        rows.diagonal(start).fill_(1)
        out[start:stop] = product(rows)
    return out


def on_rows(product_at_x: Any, like: Tree) -> tuple[Point, Callable[[torch.Tensor], torch.Tensor]]:
    """Check that a bound product and the tree ``like`` belong together; return the point, and rows [k, p] -> products.

    Raises:
        TypeError: product_at_x cannot be called.
        StructureError: ``like`` and the product do not belong together; from the product, if it returns no k vectors.
    """
    check_callable(product_at_x, "product_at_x", "a bound product, for example hvp_at_x(func, x)")
    layout, fix = Layout.of(like), "pass the tree that the product differentiates, x[argnums]"
    if isinstance(product_at_x, BoundProduct) and product_at_x.point.layout != layout:
        expected, got = _leaves_text(product_at_x.point.layout), _leaves_text(layout)
        raise StructureError(message("like", expected, got, fix))
    if not layout.dtype.is_floating_point:
        raise DtypeError(message("like", "a tree of floating point tensors", str(layout.dtype), fix))
    point = bind(lambda tree: tree, (like,), 0, detach=True)

    def product(rows: torch.Tensor) -> torch.Tensor:
        found, single = point.rows(product_at_x(point.tree(rows, single=False)), "product_at_x(v)")
        if single or len(found) != len(rows):
            expected, got = f"{len(rows)} vectors, as v has", "one" if single else f"{len(found)}"
            fix = "wrap a product of one vector as torch.func.vmap(product_at_x)"
            raise StructureError(message("product_at_x(v)", expected, got, fix))
        return found

    return point, product


def _leaves_text(layout: Layout) -> str:
    """Return a layout as text for a message."""
    shown = zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    text = ", ".join(f"{name!r} {str(dtype)[6:]}{list(shape)}" for name, shape, dtype in shown)
    return f"leaves {text[:300]}{'...' if len(text) > 300 else ''}" if text else "no leaves"
