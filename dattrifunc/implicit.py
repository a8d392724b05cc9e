"""The one place that makes a linear map of rows differentiable, vmap-able and honest about what it closes over.

A ``System`` is a symmetric matrix C(t) that depends on tensors t, or its inverse. ``apply(system, rows, tensors)``
returns C(t) rows or C(t)^-1 rows, and composes with every transform of torch.func and with torch.autograd:

- all work happens in ``forward``, on plain tensors, so that solvers may look at values;
- vmap over rows alone joins the mapped axis to the right-hand sides; vmap over t lifts the system to a block diagonal
  one;
- derivatives are implicit. With u = C^-1 v, u' = C^-1 (v' - C' u), and for a cotangent g with w = C^-1 g, the
  cotangent of v is w and that of t is -w^T dC/dt u. A product has the same rules without the inverse.

Derivatives of C are taken row by row, never outside a vmap: torch's batching rules for norm layers have wrong
derivatives there (torch 2.13).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from .tree import is_plain

__all__ = [
    "Closure",
    "Level",
    "Notes",
    "Raw",
    "System",
    "apply",
    "constant",
    "eager",
    "frozen",
    "shifted",
    "transforms_active",
]

Tensors = tuple[torch.Tensor, ...]
Matvec = Callable[[torch.Tensor], torch.Tensor]
# What stands behind the doors looks at values and at running transforms: torch.compile of code that calls it breaks
# the graph there, and runs it as it is. (torch.compiler.disable, without the second it takes to import the compiler.)
eager = _disable_dynamo


class Raw(NamedTuple):
    """What a solve returns on rows [k, *B, p]: the answer, and one entry per row of what became of it.

    ``standard_error`` None stands for NaN: not known.
    """

    value: torch.Tensor
    converged: torch.Tensor
    status: torch.Tensor
    iterations: torch.Tensor
    residual: torch.Tensor
    standard_error: torch.Tensor | None = None

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return all fields as tensors."""
        unknown = torch.full_like(self.residual, torch.nan)
        return tuple(unknown if field is None else field for field in self)


class Level(NamedTuple):
    """One vmap over the system's tensors: how many, and which tensors carry the mapped axis (in front)."""

    size: int
    mapped: tuple[bool, ...]


class Notes(threading.local):
    """What a call and its solve tell each other beside tensors; shared by all copies of a system, one per thread.

    Attributes:
        single: whether the caller gave one vector, so that facts are told as 0-d tensors.
        quiet: ``System.quiet`` of the map that is running.
        texts: what the solve found out, for SolveInfo.reason.
        method: what the solve chose to do, for SolveInfo.method; "" = what its name says.
        start: rows from which the next solve may start; taken by it, so that the solve of a derivative starts from 0.
    """

    def __init__(self) -> None:
        self.single = False
        self.quiet = False
        self.start: torch.Tensor | None = None
        self.texts: list[str] = []
        self.method = ""


@dataclass(frozen=True)
class System:
    """A symmetric matrix C(tensors) on rows [k, *B, p], or its inverse; B are the sizes of ``levels``, outermost first.

    Attributes:
        inverse: rows -> C^-1 rows by ``solve``; otherwise rows -> C rows.
        solve: ``solve(system, tensors) -> (rows -> Raw)``, for inverse maps.
        active: which tensors C may be differentiated by.
        must_map: which tensors always carry a lifted axis of their own (the differentiated leaves).
        levels: the vmaps over tensors, innermost first.
        quiet: whether a failed solve goes unsaid (it is told by SolveInfo instead).
        notes: see ``Notes``.
    """

    inverse: bool = False
    solve: Callable[[Any, Tensors], Callable[[torch.Tensor], Raw]] | None = None
    active: tuple[bool, ...] = ()
    must_map: tuple[bool, ...] = ()
    levels: tuple[Level, ...] = ()
    quiet: bool = False
    notes: Notes = field(default_factory=Notes, compare=False)

    def matvec(self, tensors: Tensors) -> Matvec:
        """Return rows -> C(tensors) rows, with all that depends on the tensors alone done once. Plain tensors only."""
        raise NotImplementedError

    def exact(self, tensors: Tensors, row: torch.Tensor) -> torch.Tensor:
        """Return C(tensors) row for one row [*B, p], by operations that may be differentiated any number of times."""
        raise NotImplementedError

    def forward(self, rows: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the map's value on plain tensors."""
        if not self.inverse:
            return (self.matvec(tensors)(rows),)
        assert self.solve is not None
        self.notes.quiet = self.quiet
        return self.solve(self, tensors)(rows).outputs()


@dataclass(frozen=True)
class Held(System):
    """A system whose tensors were bound: ``run`` holds everything that depends on them."""

    run: Callable[[torch.Tensor], Raw | tuple[torch.Tensor, ...]] = field(default=lambda rows: (rows,))

    def forward(self, rows: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        """Return the held map's value."""
        self.notes.quiet = self.quiet
        out = self.run(rows)
        return out.outputs() if isinstance(out, Raw) else out


def shifted(product: Matvec, shift: float) -> Matvec:
    """Return rows -> product(rows) + lambda rows."""
    if not shift:
        return product
    return lambda rows: torch.add(product(rows), rows, alpha=shift)


def apply(system: System, rows: torch.Tensor, tensors: Tensors = ()) -> tuple[torch.Tensor, ...]:
    """Return the map's outputs for rows [k, p]: the value, and the fields of Raw where it is a solve."""
    if not transforms_active() and not _wants_grad((rows, *tensors)):
        with torch.no_grad():  # func may hide a tensor that requires grad: no graph grows with the iterations
            return system.forward(rows, tensors)
    outputs: tuple[torch.Tensor, ...] = _Linear.apply(system, rows, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def transforms_active() -> bool:
    """Say whether a torch.func transform (or a forward-mode level of torch.autograd) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _wants_grad(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Linear(torch.autograd.Function):
    """``apply(system, rows, *tensors)``, linear in rows."""

    @staticmethod
    def forward(system: System, rows: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Contiguous: forward mode refuses to write into the expanded tensors of a lifted system.
        plain = [tensor.detach().contiguous() for tensor in (rows, *tensors)]
        return tuple(system.forward(plain[0], tuple(plain[1:])))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        system, rows, *tensors = inputs
        value, *facts = output
        ctx.system = system
        ctx.facts = len(facts)
        ctx.mark_non_differentiable(*facts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value if system.inverse else rows, *tensors)
        ctx.save_for_forward(value if system.inverse else rows, *tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        system: System = ctx.system
        at, *tensors = map(_alive, ctx.saved_tensors)
        if cotangent is None:
            return (None,) * (2 + len(tensors))
        again = replace(system, quiet=False)
        pulled = _Linear.apply(again, cotangent, *tensors)[0]  # type: ignore[no-untyped-call]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed and system.active[i]]
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        if wanted:
            weight = -pulled if system.inverse else cotangent
            pull = torch.func.vjp(_product_at(system, tensors, wanted, at), *(tensors[i] for i in wanted))[1]
            for i, gradient in zip(wanted, pull(weight), strict=True):
                grads[i] = gradient
        return (None, pulled, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, rows_tangent: torch.Tensor | None, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        system: System = ctx.system
        at, *tensors = map(_alive, ctx.saved_tensors)
        again = replace(system, quiet=False)
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None and system.active[i]]
        change = None
        if moved:
            # The transpose of the transpose: forward mode without asking any operator for it.
            pull = torch.func.vjp(_product_at(system, tensors, moved, at), *(tensors[i] for i in moved))[1]
            push = torch.func.vjp(pull, torch.zeros_like(at))[1]
            change = push(tuple(tangents[i] for i in moved))[0]
        if system.inverse:
            right = _total(rows_tangent, None if change is None else -change)
            value = None if right is None else _Linear.apply(again, right, *tensors)[0]  # type: ignore[no-untyped-call]
        else:
            direct = None
            if rows_tangent is not None:
                direct = _Linear.apply(again, rows_tangent, *tensors)[0]  # type: ignore[no-untyped-call]
            value = _total(direct, change)
        if value is None:
            value = torch.zeros_like(at)
        return (value, *(None,) * ctx.facts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], system: System, rows: torch.Tensor, *tensors: torch.Tensor) -> Any:
        _, row_dim, *dims = in_dims
        size = info.batch_size
        if all(dim is None for dim in dims):
            joined = rows.movedim(row_dim, 0)
            count = joined.shape[1]
            outputs = _Linear.apply(system, joined.flatten(0, 1), *tensors)  # type: ignore[no-untyped-call]
            return tuple(out.unflatten(0, (size, count)) for out in outputs), (0,) * len(outputs)
        unmapped = row_dim is None
        rows = rows.unsqueeze(1).expand(-1, size, *rows.shape[1:]) if unmapped else rows.movedim(row_dim, 1)
        mapped, lifted = [], []
        for tensor, dim, must in zip(tensors, dims, system.must_map, strict=True):
            mapped.append(must or dim is not None)
            if dim is not None:
                lifted.append(tensor.movedim(dim, 0))
            else:
                lifted.append(tensor.expand(size, *tensor.shape) if must else tensor)
        higher = replace(system, levels=(*system.levels, Level(size, tuple(mapped))))
        outputs = _Linear.apply(higher, rows, *lifted)  # type: ignore[no-untyped-call]
        return tuple(outputs), (1,) * len(outputs)


def constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor behind what derivatives follow, as a constant; None where vmap maps it."""
    while not is_plain(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return None
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor if transforms_active() else tensor.detach()  # inside, detach would wrap it again


def _alive(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a wrapper of a finished transform stands for: jacrev calls backward after its level has ended."""
    while torch._C._functorch.is_dead_tensor_wrapper(tensor):  # type: ignore[attr-defined]
        tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor


def _total(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _product_at(
    system: System, tensors: Sequence[torch.Tensor], chosen: Sequence[int], rows: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return C(tensors) rows as a function of the chosen tensors, row by row."""

    def product(*values: torch.Tensor) -> torch.Tensor:
        full = list(tensors)
        for i, value in zip(chosen, values, strict=True):
            full[i] = value
        out = [system.exact(tuple(full), row) for row in rows.unbind(0)]
        return torch.stack(out) if out else torch.zeros_like(rows)

    return product


# ---------------------------------------------------------------------------------------------------------------------
# tensors that a function closes over


class Closure:
    """A function together with the tensors it closes over that a transform maps or differentiates.

    ``lambda p: loss(p, data)`` may close over tensors of a running torch.func transform, or over ones that require
    grad. They become explicit tensors of the system, so that vmap and derivatives see them: ``with_tensors`` returns
    the function with others in their place. They are found in closure cells, defaults, partials, containers and plain
    objects (which are rebuilt), and, for parameters of modules, by watching one call (they are exchanged where they
    are used).

    Args:
        func: any function.
        given: the tensors that ``call`` makes func's arguments of.
        call: runs func once. Not run outside all transforms, unless func may reach a tensor that requires grad.

    Raises:
        RuntimeError: func uses a mapped or differentiated tensor in a way that cannot be followed.
    """

    def __init__(self, func: Callable[..., Any], given: Tensors, call: Callable[[], Any]) -> None:
        self.func = func
        self.tensors: Tensors = ()
        inside = transforms_active()
        seen = _Walk({})
        seen(func)
        self.reached = tuple(seen.found)  # every tensor found, followed or not
        if not inside and not torch.is_grad_enabled():
            return
        live = _independent([t for t in seen.found if _followed(t)])
        owned = {id(t): t for t in seen.owned if _followed(t)}
        if not inside and not live and not owned:
            return
        with _Record(owned) as record, torch.enable_grad():
            try:
                out = call()
            except RuntimeError as error:  # an operator that vmap cannot take, which is dealt with elsewhere
                if "Batching rule not implemented" not in str(error):
                    raise
                out = None
        self.tensors = (*live, *record.used.values())
        after, known = _Walk({}), {id(t) for t in seen.found}
        after(func)
        if any(_followed(t) and id(t) not in known for t in after.found):
            raise RuntimeError(
                "func: expected a function that keeps nothing from call to call, got one that stores a tensor made "
                "from one that a transform maps or differentiates. Fix: compute it anew in each call, or pass it as an "
                "argument of func (an extra entry of x)."
            )
        if inside and _levels(out) - set().union(*(_levels(t) for t in (*given, *self.tensors)), set()):
            raise RuntimeError(
                "func: expected a function of tensors that it is given, or closes over in a way that can be "
                "followed, got one that hides a tensor of a running torch.func transform in an object. Fix: pass "
                "that tensor as an argument of func (an extra entry of x), or close over the tensor itself."
            )

    def with_tensors(self, tensors: Tensors, method: str = "") -> Callable[..., Any]:
        """Return the function, or a method of it, with these tensors in place of those it closes over."""
        table = {id(a): b for a, b in zip(self.tensors, tensors, strict=True)}
        rebuilt = _Walk(table)(self.func) if table else self.func
        run: Callable[..., Any] = getattr(rebuilt, method) if method else rebuilt
        if not table:
            return run

        def call(*args: Any) -> Any:
            with _Substitute(table):
                return run(*args)

        return call


def frozen(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function with tensors of running transforms as constants; None where vmap maps one of them."""
    seen = _Walk({})
    seen(func)
    live = [t for t in (*seen.found, *seen.owned) if not is_plain(t)]
    if not live:
        return func
    plain = [constant(t) for t in live]
    table = {id(a): b for a, b in zip(live, plain, strict=True) if b is not None}
    if len(table) < len({id(t) for t in live}):
        return None
    rebuilt = _Walk(table)(func)

    def call(*args: Any) -> Any:
        with _Substitute(table):
            return rebuilt(*args)

    return call


class _Walk:
    """Find the tensors in reach of a value, and rebuild it with those of ``table`` exchanged (identity otherwise)."""

    def __init__(self, table: dict[int, torch.Tensor]) -> None:
        self.table = table
        self.found: list[torch.Tensor] = []
        self.owned: list[torch.Tensor] = []  # parameters and buffers of modules: exchanged where they are used
        self.done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)]
        self.done[id(value)] = value  # a cycle meets the original
        self.done[id(value)] = out = self._rebuild(value)
        return out

    def _rebuild(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.found.append(value)
            return self.table.get(id(value), value)
        if isinstance(value, torch.nn.Module):
            self.owned += [*value.parameters(), *value.buffers()]
            return value
        if isinstance(value, functools.partial):
            func, args, keywords = self(value.func), [self(a) for a in value.args], self._dict(value.keywords)
            same = func is value.func and keywords is value.keywords and _same(args, value.args)
            return value if same else functools.partial(func, *args, **keywords)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            owner = self._object(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list | tuple):
            items = [self(item) for item in value]
            if _same(items, value):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value) or callable(value):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        """Rebuild a plain object; one that cannot be copied stands as it is (and its tensors are then missed)."""
        if isinstance(value, torch.nn.Module):
            return self(value)
        if isinstance(value, type | types.ModuleType) or type(getattr(value, "__dict__", None)) is not dict:
            return value
        attributes = self._dict(vars(value))
        if attributes is vars(value):
            return value
        try:
            twin = copy.copy(value)
        except Exception:  # anything may stand in the way of a copy
            return value
        if twin is not value:
            vars(twin).update(attributes)
        return twin

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {key: self(item) for key, item in value.items()}
        if _same(items.values(), value.values()):
            return value
        if type(value) is dict:
            return items
        twin = copy.copy(value)
        twin.update(items)
        return twin

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        cells = value.__closure__ or ()
        contents = [cell.cell_contents for cell in cells if _filled(cell)]
        swapped = [self(item) for item in contents]
        defaults, keywords = self(value.__defaults__), self(value.__kwdefaults__)
        if _same(swapped, contents) and defaults is value.__defaults__ and keywords is value.__kwdefaults__:
            return value
        fresh = iter(swapped)
        closure = tuple(types.CellType(next(fresh)) if _filled(cell) else cell for cell in cells)
        twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure or None)
        twin.__kwdefaults__ = keywords
        return twin


def _same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(first, second, strict=True))


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class _Record(TorchFunctionMode):
    """Note which of some tensors are used."""

    def __init__(self, owned: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.owned = owned
        self.used: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.owned:
            self.used.update((id(t), t) for t in _tensors_in((args, kwargs)) if id(t) in self.owned)
        return func(*args, **kwargs)


class _Substitute(TorchFunctionMode):
    """Use other tensors in place of those that a function uses directly."""

    def __init__(self, table: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swap(value: Any) -> Any:
            return self.table.get(id(value), value) if isinstance(value, torch.Tensor) else value

        args, kwargs = torch_pytree.tree_map(swap, (args, kwargs or {}))
        return func(*args, **kwargs)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch_pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _independent(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without those that torch.autograd computed from others of them, and without these others.

    A function that holds both holds a graph from one to the other, and goes through it: neither can be exchanged.
    """
    nodes = {id(t if t.grad_fn is None else t.grad_fn): t for t in tensors if is_plain(t)}
    held: set[int] = set()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.grad_fn is None:
            continue
        waiting, seen = [node for node, _ in tensor.grad_fn.next_functions], {id(tensor.grad_fn)}
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            source = nodes.get(id(getattr(node, "variable", node)))
            if source is not None:
                held |= {id(tensor), id(source)}
            waiting += [following for following, _ in node.next_functions]
    return [t for t in tensors if id(t) not in held]


def _followed(tensor: torch.Tensor) -> bool:
    """Say whether a transform, or torch.autograd in either mode, may follow a tensor.

    Not what is left of a transform that has ended: a function that holds it, such as that of torch.func.vjp, holds the
    graph of that transform, and goes through it.
    """
    if torch._C._functorch.is_dead_tensor_wrapper(tensor):  # type: ignore[attr-defined]
        return False
    if not is_plain(tensor) or tensor.requires_grad:
        return True
    dual = torch.autograd.forward_ad._current_level >= 0
    return dual and unpack_dual(tensor, level=0).tangent is not None  # type: ignore[no-untyped-call]


def _depth() -> int:
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


def _level(tensor: torch.Tensor) -> int:
    return 0 if is_plain(tensor) else int(torch._C._functorch.maybe_get_level(tensor))


def _levels(value: Any) -> set[int]:
    """Return the levels of the transforms that map or differentiate a tensor (not those that merely wrap it)."""
    top = torch._C._functorch.peek_interpreter_stack()
    found: set[int] = set()
    for tensor in _tensors_in(value):
        forward = top is not None and top.key() == torch._C._functorch.TransformType.Jvp
        if forward and unpack_dual(tensor, level=0).tangent is not None:  # type: ignore[no-untyped-call]
            found.add(_depth())
        while not is_plain(tensor):
            if torch._C._functorch.is_batchedtensor(tensor) or tensor.requires_grad:
                found.add(_level(tensor))
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return found
