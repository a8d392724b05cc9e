"""Products of one vector by automatic differentiation: a Hessian, and a Jacobian from both sides.

Everything here takes functions of flat tuples of leaves, and returns functions of one vector (a tensor per leaf), to be
batched by vmap. With ``hold``, all that needs no vector is done once, when the product is made. Forward mode falls
back to reverse mode, with one warning, where an operator lacks it.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from .tree import Leaves, is_plain

__all__ = ["Map", "Product", "hessian", "sandwich"]

# What torch raises where forward mode cannot go; an assertion in its vmap rule of a custom function without a jvp.
_FAILURES = (RuntimeError, NotImplementedError, AssertionError)

Map = Callable[[Leaves], Leaves]
Product = Callable[..., Leaves]  # the leaves of one vector -> the leaves of its product


def hessian(loss: Callable[[Leaves], torch.Tensor], leaves: Leaves, mode: str, hold: bool) -> Product:
    """Return one vector -> Hessian times it; with ``hold``, the loss is evaluated once, here, in either mode."""
    gradient = torch.func.grad(loss)

    def reverse() -> Product:
        pull = torch.func.vjp(gradient, leaves)[1]
        return lambda *vectors: pull(vectors)[0]

    if not _forward_mode(mode):
        return reverse()
    at = _dense(leaves)
    if not hold:
        return _pushed(gradient, at, lambda error: _fall_back(loss, at, error, reverse))
    try:
        return _hold(gradient, at) or reverse()
    except _FAILURES as error:
        return _fall_back(loss, at, error, reverse)


def sandwich(function: Map, middle: Callable[[Leaves], Map], leaves: Leaves, mode: str, hold: bool) -> Product:
    """Return one vector v -> J^T M J v, J the Jacobian of ``function``, M(outputs) what ``middle`` makes of them.

    With ``hold``, ``function`` is evaluated once, here, in either mode.
    """
    outputs, push, pull = _linearised(function, leaves, mode, hold)
    between = middle(outputs)

    def product(*vectors: torch.Tensor) -> Leaves:
        out: Leaves = pull(between(push(*vectors)))[0]
        return out

    return product


def _linearised(function: Map, leaves: Leaves, mode: str, hold: bool) -> tuple[Leaves, Product, Callable[..., Any]]:
    """Return the outputs of ``function``, v -> J v, and cotangents -> (J^T cotangents,).

    In reverse mode J is the transpose of the transpose; in forward mode with ``hold``, J^T is the transpose of J.
    """
    forward = _forward_mode(mode)
    at = _dense(leaves) if forward else leaves
    failed = None
    if forward and hold:
        try:
            held = _hold_outputs(function, at)
            if held is not None:
                return held
        except _FAILURES as error:
            failed = error
    outputs: Leaves
    outputs, pull = torch.func.vjp(function, at)  # type: ignore[misc]  # two without has_aux

    def reverse() -> Product:
        push = torch.func.vjp(lambda cotangents: pull(cotangents)[0], tuple(map(torch.zeros_like, outputs)))[1]
        return lambda *vectors: push(vectors)[0]

    if failed is not None:
        return outputs, _fall_back(lambda at: function(at)[0], at, failed, reverse), pull
    if not forward or hold:
        return outputs, reverse(), pull
    push = _pushed(function, at, lambda error: _fall_back(lambda at: function(at)[0], at, error, reverse))
    return outputs, push, pull


# ---------------------------------------------------------------------------------------------------------------------
# forward mode


def _forward_mode(mode: str) -> bool:
    """Say whether to go forward, and make ready for it."""
    if mode == "rev-rev" or torch.autograd.forward_ad._current_level >= 0:  # dual levels of torch.autograd do not nest
        return False
    _load_forward_mode()
    return True


def _dense(leaves: Leaves) -> Leaves:
    return tuple(leaf.contiguous() for leaf in leaves)  # forward mode refuses to write into expanded tensors


def _pushed(function: Map, leaves: Leaves, fall_back: Callable[[Exception], Product]) -> Product:
    """Return one vector -> J v by forward mode, or by what ``fall_back`` returns once that has failed."""
    chosen: list[Product] = []

    def push(*vectors: torch.Tensor) -> Leaves:
        if not chosen:
            try:
                out: Leaves = torch.func.jvp(function, (leaves,), (vectors,))[1]
            except _FAILURES as error:
                chosen.append(fall_back(error))
            else:
                return out
        return chosen[0](*vectors)

    return push


def _fall_back(
    loss: Callable[[Leaves], torch.Tensor], leaves: Leaves, error: Exception, reverse: Callable[[], Product]
) -> Product:
    warnings.warn(
        f"mode='rev-fwd': {_operator_without_forward_mode(loss, leaves, error)} has no forward mode here; "
        "used mode='rev-rev', which has the same value.",
        UserWarning,
        stacklevel=2,
    )
    return reverse()


@functools.cache
def _load_forward_mode() -> None:
    """Load torch's forward-mode rules, which torch 2.13 does on first use, with a DeprecationWarning about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


# Tracing the forward mode of these kills the process, without an exception (torch 2.13).
_UNTRACEABLE = {"mse_loss", "mse_loss_backward"}


def _hold(gradient: Map, leaves: Leaves) -> Product | None:
    """Return one vector -> Hessian times it in forward mode, with every operation that needs no vector done once.

    The loss is evaluated once, when its gradient is traced. Forward mode is tried on the traced operations before it is
    traced in turn. None: the loss draws random numbers (from a generator of its own), which a trace would draw anew.

    Raises:
        RuntimeError: some operator has no forward mode, or one that cannot be traced.
    """
    traced = make_fx(torch.func.functionalize(gradient))(leaves)
    if _draws(traced):
        return None
    for op in _operators(traced):
        if op.overloadpacket.__name__ in _UNTRACEABLE:
            raise RuntimeError(f"aten::{op.overloadpacket.__name__.removesuffix('_backward')} cannot be traced")

    def push(*vectors: torch.Tensor) -> Leaves:
        out: Leaves = torch.func.jvp(traced, (leaves,), (vectors,))[1]
        return out

    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    push(*zeros)
    return _fold(make_fx(torch.func.functionalize(push))(*zeros))


def _hold_outputs(function: Map, leaves: Leaves) -> tuple[Leaves, Product, Callable[..., Any]] | None:
    """Return what ``_linearised`` does, from one traced evaluation of ``function`` in forward mode.

    The user's own code is traced with its tangents, so that a derivative it defines itself is used. None, and raises:
    as ``_hold``.
    """

    def pushed(*vectors: torch.Tensor) -> tuple[Leaves, Leaves]:
        outputs, tangents = torch.func.jvp(function, (leaves,), (vectors,))  # type: ignore[misc]
        return outputs, tangents

    zeros = tuple(map(torch.zeros_like, leaves))
    traced = make_fx(torch.func.functionalize(pushed))(*zeros)
    if _draws(traced):
        return None
    held = _fold(traced)
    outputs: Leaves = held(*zeros)[0]
    pull = torch.func.vjp(lambda at: held(*at)[1], zeros)[1]
    pull(outputs)  # an operator whose tangent has no transpose raises here
    return outputs, lambda *vectors: held(*vectors)[1], pull


def _draws(traced: torch.fx.GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in _operators(traced))


def _operators(traced: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


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
                copies[node].target = _BATCHABLE.get(node.target, node.target)
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(constants, graph)


def _reshaped(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return tensor.reshape(shape)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
    return source.to(target.dtype).expand(target.shape)


# Operators of a trace that vmap cannot take, or only in the strides of the trace.
_BATCHABLE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.view.default: _reshaped,
    torch.ops.aten._unsafe_view.default: _reshaped,
}


def _unmapped(value: Any) -> Any:
    """Return a tensor inside a vmap as the first of those it stands for, so that it outlives the vmap."""
    while isinstance(value, torch.Tensor) and not is_plain(value):
        axis = torch._C._functorch.maybe_get_bdim(value)
        value = torch._C._functorch.get_unwrapped(value)
        value = value if axis < 0 else value.select(axis, 0)
    return value


def _operator_without_forward_mode(loss: Callable[[Leaves], Any], leaves: Leaves, error: Exception) -> str:
    """Return the name of the operator in the loss that stops forward over reverse."""
    calls: list[tuple[Any, Any, Any]] = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                calls.append((func, [_unmapped(arg) for arg in args], kwargs or {}))
            return out

    with Record(), torch.no_grad():
        loss(leaves)
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
        except _FAILURES:
            return f"operator {getattr(func, '__name__', func)!r}"
    named = re.search(r"with (\w+) that does not support|aten::(\w+)", str(error))
    return f"operator {named.group(1) or named.group(2)!r}" if named else f"an operator ({str(error)[:80]})"
