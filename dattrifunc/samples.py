"""Losses of one sample: over samples by vmap in chunks, by a loop where vmap cannot go, and their mean.

``func`` is a loss of one sample: ``in_dims`` says which axis of which argument counts the samples. Nothing is divided
by the number of samples, except in ``mean_loss``.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.overrides import TorchFunctionMode, resolve_name

from .errors import StructureError, message, random_loss
from .implicit import transforms_active
from .losses import CompositeLoss
from .tree import (
    Layout,
    Leaves,
    Point,
    bind,
    check_callable,
    check_choice,
    check_scalar,
    flatten,
    flatten_dims,
    paths_of,
)

__all__ = ["Runner", "Samples", "check_in_dims", "gradient_blocks", "mean_composite", "mean_loss", "samples_of"]

Dims = tuple[int | None, ...]

RANDOMNESS = ("error", "different", "same")


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

    def call(self, leaves: Leaves, rest: Leaves) -> Any:
        """Return func's value for one sample, from tensors without their sample axis."""
        if self.keep:
            leaves, rest = (
                tuple(t if dim is None else t.unsqueeze(dim) for t, dim in zip(ts, dims, strict=True))
                for ts, dims in zip((leaves, rest), self.dims, strict=True)
            )
        return self.point.func(*self.point.arguments(leaves, rest))

    def one(self, leaves: Leaves, rest: Leaves) -> torch.Tensor:
        """Return the loss of one sample, from tensors without their sample axis."""
        return check_scalar(self.call(leaves, rest))

    def single(self, i: int) -> tuple[Leaves, Leaves]:
        """Return the tensors of sample i, without the sample axis."""
        first, second = (
            tuple(t if dim is None else t.select(dim, i) for t, dim in zip(ts, dims, strict=True))
            for ts, dims in zip((self.point.leaves, self.point.rest), self.dims, strict=True)
        )
        return first, second


def check_in_dims(in_dims: Any, count: int, shared: Sequence[int] = ()) -> tuple[Any, ...]:
    """Return ``in_dims`` as a tuple with one entry per argument of func, None for those at ``shared``."""
    fix = "give one entry per argument of func, parameters included, e.g. in_dims=(None, 0, 0)"
    if not isinstance(in_dims, tuple | list) or hasattr(in_dims, "_fields"):
        raise TypeError(message("in_dims", f"a tuple of {count} entries", repr(in_dims), fix))
    if len(in_dims) != count:
        raise StructureError(message("in_dims", f"{count} entries", f"{len(in_dims)}: {in_dims!r}", fix))
    if any(in_dims[i] is not None for i in shared):
        fix = "pass None in in_dims for params: all samples share them"
        raise StructureError(message("in_dims", f"None at argnums {tuple(shared)}", repr(in_dims), fix))
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
    """Applies a function of one sample to blocks of samples. Warns once, where it has to loop.

    ``knob`` says whether the caller has an argument ``randomness``.
    """

    caller: str
    randomness: str
    knob: bool = field(default=True, kw_only=True)
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
                    raise self._random() from None
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
            raise self._random()
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

    def _random(self) -> ValueError:
        if not self.knob:
            return random_loss()
        fix = "pass randomness='different' (or 'same' for one draw), or call module.eval()"
        expected = "'different' or 'same' for a loss that draws random numbers"
        return ValueError(message("randomness", expected, "'error'", fix))

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


def _over_samples(
    func: Callable[..., Any], in_dims: Any, keep_batch_dim: bool, runner: Runner, x: tuple[Any, ...]
) -> Leaves:
    """Return the outputs [n, ...] of a function of one sample to a tuple of tensors."""

    def without_last(*x: Any) -> Any:
        return func(*x[:-1])

    # Nothing is differentiated here: an empty tree stands where samples_of expects what is.
    dims = check_in_dims(in_dims, len(x))
    samples = samples_of(without_last, (*x, ()), -1, (*dims, None), keep_batch_dim, constant=False)
    if samples.count == 0:
        fix = "pass at least one sample"
        raise StructureError(message("x", "samples to take the mean of", "0 samples", fix))
    return runner(samples, 0, samples.count, samples.call, samples.call)


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
    runner = Runner("mean_loss", "error", knob=False)

    def one(*x: Any) -> tuple[torch.Tensor]:
        return (check_scalar(func(*x)),)

    return lambda *x: _over_samples(one, in_dims, keep_batch_dim, runner, x)[0].mean()


def mean_composite(func: CompositeLoss, in_dims: tuple[Any, ...], keep_batch_dim: bool = False) -> CompositeLoss:
    """Return the mean over the samples of a loss of one sample in two parts, in two parts: its inner gives all outputs.

    Args:
        func: loss of one sample, ``func(params, input, *target) -> scalar``.
        in_dims: sample axis per argument of func; some input must hold samples.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.

    >>> loss = CompositeLoss(lambda w, x: w @ x, lambda z, y: (z - y) ** 2)
    >>> mean_composite(loss, (None, 0, 0))(torch.ones(2), torch.eye(2), torch.tensor([1.0, 3.0]))
    tensor(2.)
    """
    runner = Runner("mean_composite", "error", knob=False)

    def inner(params: Any, inputs: Any) -> Any:
        structure: list[Any] = []

        def one(*x: Any) -> Leaves:
            leaves, spec = flatten(func.inner(*x), "inner")
            structure[:] = [spec]
            return tuple(leaves)

        outputs = _over_samples(one, in_dims[:2], keep_batch_dim, runner, (params, inputs))
        return structure[0].unflatten(outputs)

    def outer(output: Any, *targets: Any) -> torch.Tensor:
        leaves, spec = flatten(output, "inner")

        def one(outputs: Leaves, *target: Any) -> tuple[torch.Tensor]:
            outputs = tuple(t.squeeze(0) for t in outputs) if keep_batch_dim else outputs  # they have that axis already
            return (check_scalar(func.outer(spec.unflatten(outputs), *target), "outer"),)

        return _over_samples(one, (0, *in_dims[2:]), keep_batch_dim, runner, (tuple(leaves), *targets))[0].mean()

    return CompositeLoss(inner, outer)
