"""Curvature products: Hessian times vector, for whole trees and many vectors at once.

Each product is written once, as a builder that takes a loss on flat tuples of leaves and returns the product of a
batch of vectors; the bound form holds what the builder returns, the unbound form builds at the x it is called with.
Scale: the loss's own reduction (a mean loss gives a mean Hessian). ``regularization`` adds lambda I.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from . import implicit
from .errors import DtypeError, StructureError, message
from .tree import (
    Layout,
    Leaves,
    Loss,
    Point,
    Tree,
    bind,
    check_argnums,
    check_args,
    check_callable,
    check_choice,
    check_chunk,
    check_number,
    check_scalar,
    flatten_like,
)

__all__ = ["BoundProduct", "Curvature", "hessian_matrix", "hvp", "hvp_at_x"]

MODES = ("rev-rev", "rev-fwd")
_LAMBDA_FIX = "pass lambda >= 0 in units of loss / parameter**2, for example regularization=1e-3"

# (loss, leaves, rest, mode, hold) -> (leaves of one vector -> leaves of its product)
Builder = Callable[[Loss, Leaves, Leaves, str, bool], Callable[..., Leaves]]


# ---------------------------------------------------------------------------------------------------------------------
# the Hessian, one vector at a time


def _hessian(loss: Loss, leaves: Leaves, rest: Leaves, mode: str, hold: bool) -> Callable[..., Leaves]:
    """Return one vector -> Hessian times it; with ``hold``, the loss is evaluated once, here, in either mode."""
    gradient = torch.func.grad(lambda at: loss(at, rest))

    def reverse() -> Callable[..., Leaves]:
        pull = torch.func.vjp(gradient, leaves)[1]
        return lambda *vectors: pull(vectors)[0]

    def forward(*vectors: torch.Tensor) -> Leaves:
        out: Leaves = torch.func.jvp(gradient, (leaves,), (vectors,))[1]
        return out

    def fall_back(error: Exception) -> Callable[..., Leaves]:
        warnings.warn(
            f"mode='rev-fwd': {_operator_without_forward_mode(loss, leaves, rest, error)} has no forward mode here; "
            "used mode='rev-rev', which has the same value.",
            UserWarning,
            stacklevel=2,
        )
        return reverse()

    if mode == "rev-rev" or torch.autograd.forward_ad._current_level >= 0:  # dual levels of torch.autograd do not nest
        return reverse()
    _load_forward_mode()
    leaves = tuple(leaf.contiguous() for leaf in leaves)  # forward mode refuses to write into expanded tensors
    if hold:
        try:
            return _hold(gradient, leaves) or reverse()
        except (RuntimeError, NotImplementedError) as error:
            return fall_back(error)
    chosen: list[Callable[..., Leaves]] = []

    def product(*vectors: torch.Tensor) -> Leaves:
        if not chosen:
            try:
                return forward(*vectors)
            except (RuntimeError, NotImplementedError) as error:
                chosen.append(fall_back(error))
        return chosen[0](*vectors)

    return product


@functools.cache
def _load_forward_mode() -> None:
    """Load torch's forward-mode rules, which torch 2.13 does on first use, with a DeprecationWarning about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


# Tracing the forward mode of these kills the process, without an exception (torch 2.13).
_UNTRACEABLE = {"mse_loss", "mse_loss_backward"}


def _hold(gradient: Callable[[Leaves], Leaves], leaves: Leaves) -> Callable[..., Leaves] | None:
    """Return one vector -> Hessian times it in forward mode, with every operation that needs no vector done once.

    The loss is evaluated once, when its gradient is traced. Forward mode is tried on the traced operations before it is
    traced in turn. None: the loss draws random numbers (from a generator of its own), which a trace would draw anew.

    Raises:
        RuntimeError: some operator has no forward mode, or one that cannot be traced.
    """
    traced = make_fx(torch.func.functionalize(gradient))(leaves)
    operators = [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if any(torch.Tag.nondeterministic_seeded in op.tags for op in operators):
        return None
    for op in operators:
        if op.overloadpacket.__name__ in _UNTRACEABLE:
            raise RuntimeError(f"aten::{op.overloadpacket.__name__.removesuffix('_backward')} cannot be traced")

    def push(*vectors: torch.Tensor) -> Leaves:
        out: Leaves = torch.func.jvp(traced, (leaves,), (vectors,))[1]
        return out

    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    push(*zeros)
    return _fold(make_fx(torch.func.functionalize(push))(*zeros))


def _fold(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the traced function with all nodes that do not depend on its inputs evaluated and kept as constants."""
    graph, constants = torch.fx.Graph(), torch.nn.Module()
    values: dict[torch.fx.Node, Any] = {}  # of nodes that do not depend on the inputs
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            name = f"held_{len(copies)}"
            setattr(constants, name, values[node])
            copies[node] = graph.get_attr(name)
        return copies[node]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.fx doubts constants that are not registered buffers
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(traced)
            elif node.op == "call_function" and all(parent in values for parent in node.all_input_nodes):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda parent: values[parent])
                values[node] = node.target(*args, **kwargs)
            else:
                copies[node] = graph.node_copy(node, copied)
                if node.target is torch.ops.aten.copy.default:  # has no batching rule
                    copies[node].target = _copied
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(constants, graph)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
    return source.to(target.dtype).expand(target.shape)


def _operator_without_forward_mode(loss: Loss, leaves: Leaves, rest: Leaves, error: Exception) -> str:
    """Return the name of the operator in the loss that stops forward over reverse."""
    calls: list[tuple[Any, Any, Any]] = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                calls.append((func, args, kwargs or {}))
            return out

    with Record(), torch.no_grad():
        loss(leaves, rest)
    for func, args, kwargs in calls:
        spots = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()]

        def call(
            *at: torch.Tensor, func: Any = func, args: Any = args, kwargs: Any = kwargs, spots: Any = spots
        ) -> Any:
            filled = list(args)
            for i, value in zip(spots, at, strict=True):
                filled[i] = value
            return func(*filled, **kwargs).sum()

        at = tuple(args[i].detach() for i in spots)
        try:
            if at:
                torch.func.jvp(torch.func.grad(call, argnums=tuple(range(len(at)))), at, at)
        except (RuntimeError, NotImplementedError):
            return f"operator {getattr(func, '__name__', func)!r}"
    named = re.search(r"with (\w+) that does not support|aten::(\w+)", str(error))
    return f"operator {named.group(1) or named.group(2)!r}" if named else f"an operator ({str(error)[:80]})"


_BUILDERS: dict[Any, Builder] = {}  # product function -> builder, filled below


# ---------------------------------------------------------------------------------------------------------------------
# from a builder to a system on rows


@dataclass(frozen=True)
class Curvature(implicit.System):
    """C(tensors) of a loss at x, on rows: tensors are the differentiated leaves, the other tensors, then captured ones.

    ``product`` is a function with the signature of ``hvp_at_x``; ``shift`` is lambda.
    """

    point: Point = field(kw_only=True)
    product: Callable[..., Any] = field(kw_only=True)
    shift: float = field(kw_only=True)
    mode: str = field(kw_only=True)
    chunk_size: int | None = field(kw_only=True)
    hold: bool = field(kw_only=True)
    closure: implicit.Closure = field(kw_only=True)

    @property
    def layout(self) -> Layout:
        """Layout of one vector."""
        return self.point.layout

    def loss(self, levels: Sequence[implicit.Level], *, exact: bool) -> Callable[[Leaves], torch.Tensor]:
        """Return the loss as a function of all tensors, summed over the levels (so that C is block diagonal)."""
        if not levels:
            return self._base_loss
        *inner_levels, (size, mapped) = levels
        inner = self.loss(inner_levels, exact=exact)
        in_dims = (tuple(0 if m else None for m in mapped),)

        def total(tensors: Leaves) -> torch.Tensor:
            if not exact and size:
                try:
                    return torch.func.vmap(inner, in_dims=in_dims)(tensors).sum()
                except RuntimeError:  # an operator that vmap cannot take: the sum below has the same value
                    pass
            each = [inner(tuple(t[i] if m else t for t, m in zip(tensors, mapped, strict=True))) for i in range(size)]
            return torch.stack(each).sum() if each else tensors[0].sum() * 0

        return total

    def _base_loss(self, tensors: Leaves) -> torch.Tensor:
        n, m = len(self.point.leaves), len(self.point.rest)
        leaves, rest, closed_over = tensors[:n], tensors[n : n + m], tensors[n + m :]
        func = self.closure.with_tensors(closed_over)
        return check_scalar(func(*self.point.arguments(leaves, rest)))

    def of_leaves(self, tensors: Leaves, *, exact: bool) -> Callable[..., Leaves]:
        """Return one vector (a leaf each) -> C times it, without lambda."""
        n = len(self.point.leaves)
        if not n:
            return lambda *vectors: vectors
        whole = self.loss(self.levels, exact=exact)

        def flat_loss(leaves: Leaves, rest: Leaves) -> torch.Tensor:
            return whole((*leaves, *rest))

        builder = _BUILDERS.get(self.product)
        if builder is not None:
            if exact:
                return builder(flat_loss, tensors[:n], tensors[n:], "rev-rev", False)
            hold = not self.levels and self.hold
            product = _one_value(lambda: builder(flat_loss, tensors[:n], tensors[n:], self.mode, hold), tensors)
            if hold or self.mode == "rev-rev":
                return product
            return lambda *vectors: _one_value(lambda: product(*vectors), tensors)  # evaluates the loss here
        return self._foreign(flat_loss, tensors)

    def _foreign(self, flat_loss: Loss, tensors: Leaves) -> Callable[..., Leaves]:
        """Use a product that somebody else wrote: it sees func and x as trees, and no lambda."""
        n, m = len(self.point.leaves), len(self.point.rest)
        x = self.point.arguments(tensors[:n], tensors[n : n + m])

        def func(*arguments: Any) -> torch.Tensor:
            leaves, rest = self.point.take(arguments)
            return flat_loss(leaves, (*rest, *tensors[n + m :]))

        argnums = self.point.argnums if self.point.joint else self.point.argnums[0]
        bound = self.product(func, x, argnums=argnums, mode=self.mode, chunk_size=self.chunk_size)
        check_callable(bound, "product(func, x)", "hvp_at_x, or a function with its signature")

        def product(*vectors: torch.Tensor) -> Leaves:
            argument, fix = "product(func, x)(v)", "return a tree of tensors with the structure and shapes of v"
            out = flatten_like(self.layout.spec, bound(self.layout.build(vectors)), argument, fix)
            for value, like, name in zip(out, vectors, self.layout.names, strict=True):
                shape = getattr(value, "shape", None)
                if shape != like.shape:
                    got = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
                    leaf = f"{argument}[{name!r}]" if name else argument
                    raise StructureError(message(leaf, f"a tensor of shape {tuple(like.shape)}", got, fix))
            return tuple(out)

        return product

    def batched(self, tensors: Leaves) -> implicit.Matvec:
        """Return rows [k, *B, p] -> C rows, without lambda."""
        one = self.of_leaves(tensors, exact=False)
        layout, dtype = self.layout, self.point.work_dtype
        many = torch.func.vmap(one, chunk_size=self.chunk_size)
        devices = [leaf.device for leaf in self.point.leaves]

        def product(rows: torch.Tensor) -> torch.Tensor:
            if rows.shape[0] == 0 or layout.size == 0:
                return torch.zeros_like(rows)
            if rows.shape[0] == 1:
                out = tuple(leaf.unsqueeze(0) for leaf in one(*_to(layout.split(rows[0]), devices)))
            else:
                out = many(*_to(layout.split(rows), devices))
            return layout.join(out).to(dtype)

        return product

    def matvec(self, tensors: Leaves) -> implicit.Matvec:
        """Return rows -> (C + lambda I) rows."""
        product = self.batched(tensors)
        if not self.shift:
            return product
        return lambda rows: torch.add(product(rows), rows, alpha=self.shift)

    def exact(self, tensors: Leaves, row: torch.Tensor) -> torch.Tensor:
        """Return (C + lambda I) row in operations that may be differentiated further."""
        devices = [leaf.device for leaf in self.point.leaves]
        out = self.of_leaves(tensors, exact=True)(*_to(self.layout.split(row), devices))
        return self.layout.join(out).to(row.dtype) + self.shift * row


CurvatureType = TypeVar("CurvatureType", bound=Curvature)
Result = TypeVar("Result")


def _to(leaves: Leaves, devices: Sequence[torch.device]) -> Leaves:
    return tuple(leaf.to(device) for leaf, device in zip(leaves, devices, strict=True))


def _one_value(run: Callable[[], Result], tensors: Leaves) -> Result:
    """Run what evaluates the loss, and refuse a loss that draws random numbers: it has no one Hessian."""
    fix = "call module.eval(), or draw masks before and pass them as an argument"
    random = ValueError(message("func", "a loss with one fixed value at x", "one that draws random numbers", fix))
    cuda = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

    def state() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]

    before = state()
    try:
        out = run()
    except RuntimeError as error:
        if "called random operation" in str(error):  # under vmap, torch stops it first
            raise random from None
        raise
    if not all(torch.equal(a, b) for a, b in zip(before, state(), strict=True)):
        raise random
    return out


def check_product_knobs(argnums: Any, mode: Any, regularization: Any, chunk_size: Any) -> float:
    """Check what all products share, as far as it can be without x, and return lambda."""
    check_argnums(argnums, sys.maxsize)
    check_choice(mode, "mode", MODES)
    check_chunk(chunk_size)
    return check_number(regularization, "regularization", fix=_LAMBDA_FIX)


def check_takes(func: Callable[..., Any], count: int, argument: str) -> None:
    """Raise TypeError unless ``func`` can be called with ``count`` arguments."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        fix = "give one entry per argument of func; bound inverse products take them one by one, f(func, *x)"
        raise TypeError(message(argument, f"the arguments of func{signature}", f"{count} ({error})", fix)) from None


@implicit.eager
def curvature(
    func: Callable[..., Any],
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...],
    mode: str,
    regularization: float,
    chunk_size: int | None,
    *,
    detach: bool,
    hold: bool,
    product: Callable[..., Any],
    kind: type[CurvatureType],
    **fields: Any,
) -> tuple[CurvatureType, Leaves]:
    """Check all arguments of a product, and return the system with its tensors."""
    shift = check_product_knobs(argnums, mode, regularization, chunk_size)
    point = bind(func, check_args(x), argnums, detach)
    check_takes(func, len(x), "x")
    tensors = (*point.leaves, *point.rest)
    closure = implicit.Closure(func, tensors, lambda: _one_value(lambda: point.loss(point.leaves, point.rest), tensors))
    closed_over = closure.tensors
    if detach:  # parameters of its own: an optimizer may change the caller's in place
        tensors = (*(leaf.clone() for leaf in point.leaves), *point.rest)
        closed_over = tuple(t.detach().clone() for t in closed_over)
    system = kind(
        active=tuple(t.is_floating_point() for t in (*tensors, *closed_over)),
        must_map=(True,) * len(point.leaves) + (False,) * (len(point.rest) + len(closed_over)),
        point=point,
        product=product,
        shift=shift,
        mode=mode,
        chunk_size=chunk_size,
        hold=hold,
        closure=closure,
        **fields,
    )
    return system, (*tensors, *closed_over)


def bound(system: Curvature, tensors: Leaves) -> tuple[implicit.System, Leaves]:
    """Do everything that depends on the tensors now, or keep them with the system while a transform traces them."""
    if implicit.transforms_active():
        return system, tensors
    if not system.inverse:
        matvec = system.matvec(tensors)
        return implicit.Held(run=lambda rows: (matvec(rows),)), ()
    assert system.solve is not None
    run = system.solve(system, tensors)
    return implicit.Held(inverse=True, run=run, quiet=system.quiet, notes=system.notes), ()


# ---------------------------------------------------------------------------------------------------------------------
# the public products


class BoundProduct:
    """A product with x bound: ``f(v)``, for one vector or k of them.

    Attributes:
        point: x taken apart, with the layout of a vector.
    """

    @implicit.eager
    def __init__(self, system: Curvature, tensors: Leaves) -> None:
        self.point = system.point
        self._system, self._tensors = bound(system, tensors)

    @implicit.eager
    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of flat rows [k, p], in the layout's columns."""
        return implicit.apply(self._system, rows, self._tensors)[0]

    @implicit.eager
    def __call__(self, v: Tree) -> Tree:
        """Return the product with v, in v's shapes."""
        rows, single = self.point.rows(v)
        return self.point.tree(self.rows(rows), single)


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

    Source: Pearlmutter (1994), Fast exact multiplication by the Hessian, doi:10.1162/neco.1994.6.1.147.

    >>> loss = lambda p, a: (a * p["w"] ** 3).sum()          # Hessian diag(6 a w)
    >>> f = hvp_at_x(loss, ({"w": torch.ones(2)}, torch.tensor([1.0, 2.0])))
    >>> f({"w": torch.ones(2)})["w"]
    tensor([ 6., 12.])
    """
    system, tensors = curvature(
        func, x, argnums, mode, regularization, chunk_size, detach=True, hold=True, product=hvp_at_x, kind=Curvature
    )
    return BoundProduct(system, tensors)


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


@implicit.eager
def unbound(
    product: Callable[..., Any],
    func: Callable[..., Any],
    argnums: int | tuple[int, ...],
    mode: str,
    regularization: float,
    chunk_size: int | None,
) -> Callable[[tuple[Any, ...], Tree], Tree]:
    """Return the unbound form of a product."""
    check_callable(func, "func", "the loss itself, func(*x) -> scalar")
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
        )
        rows, single = system.point.rows(v)
        return system.point.tree(implicit.apply(system, rows, tensors)[0], single)

    return at


_BUILDERS[hvp_at_x] = _hessian


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
    check_callable(product_at_x, "product_at_x", "a bound product, for example hvp_at_x(func, x)")
    chunk = check_chunk(chunk_size)
    layout, fix = Layout.of(like), "pass the tree that the product differentiates, x[argnums]"
    if isinstance(product_at_x, BoundProduct) and product_at_x.point.layout != layout:
        expected, got = _leaves_text(product_at_x.point.layout), _leaves_text(layout)
        raise StructureError(message("like", expected, got, fix))
    if not layout.dtype.is_floating_point:
        raise DtypeError(message("like", "a tree of floating point tensors", str(layout.dtype), fix))
    point = bind(lambda tree: tree, (like,), 0, detach=True)
    p, device = layout.size, point.leaves[0].device if point.leaves else None
    out = torch.empty(p, p, dtype=point.work_dtype, device=device)
    step = chunk or max(p, 1)
    for start in range(0, p, step):
        stop = min(start + step, p)
        rows = torch.zeros(stop - start, p, dtype=point.work_dtype, device=device)
        rows.diagonal(start).fill_(1)
        found, single = point.rows(product_at_x(point.tree(rows, single=False)), "product_at_x(v)")
        if single or len(found) != len(rows):
            expected, got = f"{len(rows)} vectors, as v has", "one" if single else f"{len(found)}"
            fix = "wrap a product of one vector as torch.func.vmap(product_at_x)"
            raise StructureError(message("product_at_x(v)", expected, got, fix))
        out[start:stop] = found
    return out


def _leaves_text(layout: Layout) -> str:
    """Return a layout as text for a message."""
    shown = zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    text = ", ".join(f"{name!r} {str(dtype)[6:]}{list(shape)}" for name, shape, dtype in shown)
    return f"leaves {text[:300]}{'...' if len(text) > 300 else ''}" if text else "no leaves"
