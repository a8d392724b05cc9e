"""Curvature at x as a system on rows: what every product, its lifting by vmap and its derivatives are made of.

A product is a ``Rule``: how to check func, and how to make the product of one vector from a ``Curvature`` and its
tensors. ``Curvature`` batches it over vectors, lifts it over the vmaps that x went through, and adds lambda.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from . import implicit
from .autodiff import Map, Product, hessian, sandwich
from .errors import DtypeError, NonFiniteWarning, StructureError, message, random_loss
from .losses import CompositeLoss
from .operators import corrected
from .samples import Runner, Samples, check_in_dims, gradient_blocks, samples_of
from .tree import (
    Layout,
    Leaves,
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
    flatten,
    flatten_like,
    is_plain,
)

__all__ = [
    "RULES",
    "BoundProduct",
    "Curvature",
    "Rule",
    "bound",
    "check_func",
    "check_product_knobs",
    "curvature",
    "unwatched",
]

MODES = ("rev-rev", "rev-fwd")
_LAMBDA_FIX = "pass lambda >= 0 in units of loss / parameter**2, for example regularization=1e-3"
_HELD_NUMBERS = 1 << 24  # most numbers n p of the gradient rows that a bound Fisher product holds


# ---------------------------------------------------------------------------------------------------------------------
# the system


@dataclass(frozen=True)
class Curvature(implicit.System):
    """C(tensors) of a loss at x, on rows: tensors are the differentiated leaves, the other tensors, then captured ones.

    ``product`` is a function with the signature of ``hvp_at_x``; ``shift`` is lambda. ``samples``, and the ``runner``
    over them, where func takes one sample at a time.
    """

    point: Point = field(kw_only=True)
    product: Callable[..., Any] = field(kw_only=True)
    shift: float = field(kw_only=True)
    mode: str = field(kw_only=True)
    chunk_size: int | None = field(kw_only=True)
    hold: bool = field(kw_only=True)
    closure: implicit.Closure = field(kw_only=True)
    in_dims: Any = field(kw_only=True, default=None)
    samples: Samples | None = field(kw_only=True, default=None)
    norms: bool = field(kw_only=True, default=False)  # write norm layers out, for derivatives of C
    runner: Runner = field(kw_only=True)

    @property
    def layout(self) -> Layout:
        """Layout of one vector."""
        return self.point.layout

    def lift(self, function: Map, exact: bool, more: int = 0) -> Map:
        """Return a function of the tensors as one of the lifted tensors: its outputs [*B, ...].

        ``more`` is how many tensors, all of them lifted, stand before the system's own. ``exact`` loops, so that no
        derivative is taken outside a vmap.
        """
        for size, mapped in self.levels:
            function = _lifted(function, size, (*(True,) * more, *mapped), exact)
        return function

    def loss(self, exact: bool) -> Callable[[Leaves], torch.Tensor]:
        """Return the loss as a function of all tensors, summed over the levels (so that C is block diagonal)."""

        def base(tensors: Leaves) -> Leaves:
            return (check_scalar(self.func(tensors)(*self.arguments(tensors))),)

        lifted = self.lift(base, exact)
        return lambda tensors: lifted(tensors)[0].sum() if self.levels else lifted(tensors)[0]

    def parts(self, tensors: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """Return the differentiated leaves, the other tensors of x, and the captured ones (without levels)."""
        n, m = len(self.point.leaves), len(self.point.rest)
        return tensors[:n], tensors[n : n + m], tensors[n + m :]

    def arguments(self, tensors: Leaves) -> tuple[Any, ...]:
        """Return the arguments of func (without levels)."""
        leaves, rest, _ = self.parts(tensors)
        return self.point.arguments(leaves, rest)

    def func(self, tensors: Leaves, method: str = "") -> Callable[..., Any]:
        """Return func, or a method of it, with the captured tensors in their places, and right derivatives."""
        own = self.closure.with_tensors(self.parts(tensors)[2], method)

        def run(*args: Any) -> Any:
            with corrected(self.norms):
                return own(*args)

        return run

    def samples_at(self, tensors: Leaves) -> Samples:
        """Return the samples (without levels)."""
        assert self.samples is not None
        leaves, rest, _ = self.parts(tensors)
        point = replace(self.point, leaves=leaves, rest=rest, func=self.func(tensors))
        count = next(t.shape[dim] for t, dim in zip(rest, self.samples.dims[1], strict=True) if dim is not None)
        return replace(self.samples, point=point, count=count)

    def sample_count(self, tensors: Leaves) -> int:
        """Return how many samples the (lifted) tensors hold."""
        assert self.samples is not None
        n = len(self.point.leaves)
        i, dim = next((i, dim) for i, dim in enumerate(self.samples.dims[1], n) if dim is not None)
        return tensors[i].shape[dim + sum(level.mapped[i] for level in self.levels)]

    def of_leaves(self, tensors: Leaves, *, exact: bool) -> Product:
        """Return one vector (a leaf each) -> C times it, without lambda."""
        if not self.point.leaves or any(level.size == 0 for level in self.levels):
            return lambda *vectors: vectors
        rule = RULES.get(self.product)
        if rule is None:
            return self._foreign(tensors, exact)
        if exact:
            return rule.build(replace(self, norms=True), tensors, "rev-rev", False, exact=True)
        hold = not self.levels and self.hold
        product = _one_value(lambda: rule.build(self, tensors, self.mode, hold, exact=False), tensors)
        if hold or self.mode == "rev-rev":
            return product
        return lambda *vectors: _one_value(lambda: product(*vectors), tensors)  # evaluates the loss here

    def _foreign(self, tensors: Leaves, exact: bool) -> Product:
        """Use a product that somebody else wrote: it sees func and x as trees, and no lambda."""
        knobs: dict[str, Any] = {"mode": self.mode, "chunk_size": self.chunk_size}
        if self.samples is not None:  # func takes one sample: no sum of it stands for the levels
            if self.levels:
                return self._foreign_blocks(tensors, exact)
            knobs |= {"in_dims": self.in_dims, "keep_batch_dim": self.samples.keep}
        n, m = len(self.point.leaves), len(self.point.rest)
        x = self.point.arguments(tensors[:n], tensors[n : n + m])
        whole = self.loss(exact)

        def func(*arguments: Any) -> torch.Tensor:
            leaves, rest = self.point.take(arguments)
            return whole((*leaves, *rest, *tensors[n + m :]))

        argnums = self.point.argnums if self.point.joint else self.point.argnums[0]
        bound = self.product(func, x, argnums=argnums, **knobs)
        if exact and isinstance(bound, BoundProduct):
            expected, got = "one that depends on x, where x is differentiated", "a wrapped bound product, constant in x"
            fix = "pass hvp_at_x, ggnvp_at_x or fvp_at_x itself, its in_dims beside it"
            raise TypeError(message("product", expected, got, fix))
        check_callable(bound, "product(func, x)", "hvp_at_x, or a function with its signature")

        def product(*vectors: torch.Tensor) -> Leaves:
            argument, fix = "product(func, x)(v)", "return a tree of tensors with the structure and shapes of v"
            with unwatched():
                given = bound(self.layout.build(vectors))
            out = flatten_like(self.layout.spec, given, argument, fix)
            for value, like, name in zip(out, vectors, self.layout.names, strict=True):
                shape = getattr(value, "shape", None)
                if shape != like.shape:
                    got = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
                    leaf = f"{argument}[{name!r}]" if name else argument
                    raise StructureError(message(leaf, f"a tensor of shape {tuple(like.shape)}", got, fix))
            return tuple(out)

        return product

    def _foreign_blocks(self, tensors: Leaves, exact: bool) -> Product:
        """Return the product of a block diagonal curvature, a foreign product for each block."""
        *inner, (size, mapped) = self.levels
        one = replace(self, levels=tuple(inner))
        blocks = [
            one._foreign(tuple(t[i] if m else t for t, m in zip(tensors, mapped, strict=True)), exact)
            for i in range(size)
        ]

        def product(*vectors: torch.Tensor) -> Leaves:
            each = [block(*(leaf[i] for leaf in vectors)) for i, block in enumerate(blocks)]
            return tuple(map(torch.stack, zip(*each, strict=True)))

        return product

    def unshifted(self, tensors: Leaves) -> implicit.Matvec:
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
        return implicit.shifted(self.unshifted(tensors), self.shift)

    def factor(self, tensors: Leaves) -> torch.Tensor:
        """Return the gradients of all samples as rows [*B, n, p]; C = 1/n sum_i g_i g_i^T where it is the Fisher."""
        count, layout, dtype = self.sample_count(tensors), self.layout, self.point.work_dtype
        sizes = tuple(level.size for level in reversed(self.levels))
        if not layout.size or 0 in sizes:
            device = self.point.leaves[0].device if self.point.leaves else None
            return torch.zeros(*sizes, count, layout.size, dtype=dtype, device=device)

        def rows(tensors: Leaves) -> Leaves:
            blocks = gradient_blocks(self.samples_at(tensors), min(self.chunk_size or count, count), self.runner)
            parts = ((start, layout.join(leaves).to(dtype)) for start, leaves in blocks)
            if self.levels:  # vmap takes no writing into a tensor from outside
                return (torch.cat([part for _, part in parts]),)
            out = torch.empty(count, layout.size, dtype=dtype, device=tensors[0].device)
            for start, part in parts:
                out[start : start + len(part)] = part
            return (out,)

        return self.lift(rows, exact=False)(tensors)[0]

    def exact(self, tensors: Leaves, row: torch.Tensor) -> torch.Tensor:
        """Return (C + lambda I) row in operations that may be differentiated further."""
        devices = [leaf.device for leaf in self.point.leaves]
        out = self.of_leaves(tensors, exact=True)(*_to(self.layout.split(row), devices))
        return self.layout.join(out).to(row.dtype) + self.shift * row


def _lifted(function: Map, size: int, mapped: Sequence[bool], exact: bool) -> Map:
    """Return ``function`` over one more level, its outputs stacked."""
    in_dims = (tuple(0 if m else None for m in mapped),)

    def lifted(tensors: Leaves) -> Leaves:
        if not exact:
            try:
                out: Leaves = torch.func.vmap(function, in_dims=in_dims)(tensors)
                return out
            except RuntimeError:  # an operator that vmap cannot take: the loop below has the same value
                pass
        each = [function(tuple(t[i] if m else t for t, m in zip(tensors, mapped, strict=True))) for i in range(size)]
        return tuple(map(torch.stack, zip(*each, strict=True)))

    return lifted


CurvatureType = TypeVar("CurvatureType", bound=Curvature)
Result = TypeVar("Result")


def _to(leaves: Leaves, devices: Sequence[torch.device]) -> Leaves:
    return tuple(leaf.to(device) for leaf, device in zip(leaves, devices, strict=True))


def _one_value(run: Callable[[], Result], tensors: Leaves) -> Result:
    """Run what evaluates the loss, and refuse a loss that draws random numbers: it has no one Hessian."""
    if torch.is_inference_mode_enabled() and not _differentiates_in_inference_mode():
        fix = "use torch.no_grad(), or a newer torch"
        raise RuntimeError(message("torch", "one that differentiates in inference_mode", torch.__version__, fix))
    cuda = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

    def state() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]

    before = state()
    try:
        out = run()
    except RuntimeError as error:
        if "called random operation" in str(error):  # under vmap, torch stops it first
            raise random_loss() from None
        raise
    if not all(torch.equal(a, b) for a, b in zip(before, state(), strict=True)):
        raise random_loss()
    return out


@functools.cache
def _differentiates_in_inference_mode() -> bool:
    """Say whether torch.func does in inference_mode what it does outside (torch 2.4 gives zeros)."""
    with torch.inference_mode():
        at = torch.tensor(2.0)
        return bool(torch.func.grad(torch.func.grad(lambda t: t**3))(at) == 12)


def check_product_knobs(argnums: Any, mode: Any, regularization: Any, chunk_size: Any) -> float:
    """Check what all products share, as far as it can be without x, and return lambda."""
    check_argnums(argnums, sys.maxsize)
    check_choice(mode, "mode", MODES)
    check_chunk(chunk_size)
    return check_number(regularization, "regularization", fix=_LAMBDA_FIX)


def check_takes(func: Callable[..., Any], count: int, argument: str, what: str = "the arguments of func") -> None:
    """Raise TypeError unless ``func`` can be called with ``count`` arguments."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        fix = "give one entry per argument of func; bound inverse products take them one by one, f(func, *x)"
        raise TypeError(message(argument, f"{what}{signature}", f"{count} ({error})", fix)) from None


def check_func(product: Any, func: Any) -> None:
    """Raise TypeError unless ``func`` is a loss that ``product`` can take."""
    rule = RULES.get(product)
    if rule is not None and rule.composite:
        if not isinstance(func, CompositeLoss):
            fix = (
                "pass CompositeLoss(inner, outer), with loss(params, inputs, *targets) = outer(inner(params, inputs), "
            )
            raise TypeError(message("loss", "a CompositeLoss", type(func).__name__, fix + "*targets)"))
    else:
        check_callable(func, "func", "the loss itself, func(*x) -> scalar")


def _check_inner(func: CompositeLoss, positions: tuple[int, ...], argnums: Any, count: int) -> None:
    """Raise unless the differentiated arguments are those of inner, and outer takes the targets."""
    if any(i > 1 for i in positions):
        expected = "arguments of inner (0 for params, 1 for inputs)"
        fix = "differentiate no target: the Gauss-Newton matrix has no part in one; hvp has"
        raise ValueError(message("argnums", expected, f"{argnums!r}, a target", fix))
    if type(func) is CompositeLoss:
        check_takes(func.outer, count - 1, "x", "inner's output and the targets, x[2:], for outer")


def _samples(
    point: Point,
    x: tuple[Any, ...],
    argnums: int | tuple[int, ...],
    product: Callable[..., Any],
    in_dims: Any,
    keep_batch_dim: bool,
) -> Samples | None:
    """Return the samples that x holds, where the product goes over them."""
    rule = RULES.get(product)
    if rule is None or not rule.sampled:
        given = {"in_dims": in_dims is not None, "keep_batch_dim": keep_batch_dim is not False}
        for name in (name for name, there in given.items() if there and (rule is not None or in_dims is None)):
            fix = "leave it out, or pass product=fvp_at_x, which goes over samples"
            expected = f"no {name} for a product that takes func as it stands"
            raise TypeError(message(name, expected, repr(in_dims if name == "in_dims" else keep_batch_dim), fix))
        if in_dims is None:
            return None
    check_in_dims(in_dims, len(x), check_argnums(argnums, len(x)))
    samples = samples_of(point.func, x, argnums, in_dims, keep_batch_dim, constant=False)
    if not samples.count:
        raise StructureError(message("x", "at least one sample", "0", "pass data, or check in_dims"))
    return replace(samples, point=point)  # detached where that is


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
    in_dims: Any = None,
    keep_batch_dim: bool = False,
    **fields: Any,
) -> tuple[CurvatureType, Leaves]:
    """Check all arguments of a product, and return the system with its tensors."""
    shift = check_product_knobs(argnums, mode, regularization, chunk_size)
    check_func(product, func)
    point = bind(func, check_args(x), argnums, detach)
    check_takes(func, len(x), "x")
    if product in RULES and RULES[product].composite:
        _check_inner(func, point.argnums, argnums, len(x))  # type: ignore[arg-type]
    samples = _samples(point, check_args(x), argnums, product, in_dims, keep_batch_dim)
    tensors = (*point.leaves, *point.rest)

    def once() -> torch.Tensor:
        return point.loss(point.leaves, point.rest) if samples is None else samples.one(*samples.single(0))

    closure = implicit.Closure(func, tensors, lambda: _one_value(once, tensors))
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
        in_dims=in_dims,
        samples=samples,
        runner=Runner(getattr(product, "__name__", "product"), "error", knob=False),
        **fields,
    )
    return system, (*tensors, *closed_over)


def bound(system: Curvature, tensors: Leaves) -> tuple[implicit.System, Leaves]:
    """Do everything that depends on the tensors now, or keep them with the system while a transform traces them."""
    if implicit.transforms_active():
        return system, tensors
    if not system.inverse:
        with torch.no_grad():
            matvec = system.matvec(tensors)
        return implicit.Held(run=lambda rows: (matvec(rows),)), ()
    assert system.solve is not None
    with torch.no_grad():
        run = system.solve(system, tensors)
    return implicit.Held(inverse=True, run=run, quiet=system.quiet, notes=system.notes), ()


class Unchanged:
    """The data of a bound form, which is not copied: a change in place would be seen by half of what is held."""

    def __init__(self, system: Curvature) -> None:
        tensors = (*system.point.rest, *system.closure.reached)
        watched = [t for t in tensors if is_plain(t) and not t.is_inference()]
        self._versions = [(t, t._version) for t in watched]

    def check(self) -> None:
        """Raise RuntimeError if a tensor was changed in place."""
        for tensor, version in self._versions:
            if tensor._version != version:
                expected, got = (
                    "the data as it was when x was bound",
                    f"a tensor of shape {tuple(tensor.shape)} changed",
                )
                fix = "bind again after changing data in place, or pass a clone"
                raise RuntimeError(message("x", expected, f"{got} in place", fix))


_quiet = threading.local()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Leave it to the solver that calls somebody else's product to say that it is not finite."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


def warn_not_finite(point: Point, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Warn once if a product ``out`` of finite rows [k, p] holds NaN or inf; silent inside transforms and solvers."""
    if getattr(_quiet, "on", False) or implicit.transforms_active() or not is_plain(out):
        return
    out = out.detach()
    if math.isfinite(out.sum()):  # NaN and inf do not leave a sum; it may overflow by itself, and then we look closer
        return
    wrong = ~out.isfinite() & rows.detach().isfinite().all(-1, keepdim=True)
    if not bool(wrong.any()):
        return
    columns, layout = wrong.any(0), point.layout
    spans = zip(layout.names, layout.offsets, layout.sizes, strict=True)
    names = [repr(name) if name else "v" for name, start, size in spans if bool(columns[start : start + size].any())]
    got = f"NaN or inf for {int(wrong.any(-1).sum())} of {len(rows)} vectors, in {', '.join(names)}"
    fix = (
        "look for norm(0), sqrt(0) or log(0), whose curvature is infinite, and for overflow in func; write a squared "
        "norm as the sum of squares"
    )
    expected = "a finite product (v is finite)"
    warnings.warn(message("func", expected, got, fix), NonFiniteWarning, stacklevel=3)


class BoundProduct:
    """A product with x bound: ``f(v)``, for one vector or k of them.

    Attributes:
        point: x taken apart, with the layout of a vector.
    """

    @implicit.eager
    def __init__(self, system: Curvature, tensors: Leaves) -> None:
        self.point = system.point
        self._data = Unchanged(system)
        self._system, self._tensors = bound(system, tensors)

    @implicit.eager
    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of flat rows [k, p], in the layout's columns."""
        self._data.check()
        return implicit.apply(self._system, rows, self._tensors)[0]

    @implicit.eager
    def __call__(self, v: Tree) -> Tree:
        """Return the product with v, in v's shapes."""
        rows, single = self.point.rows(v)
        out = self.rows(rows)
        warn_not_finite(self.point, rows, out)
        return self.point.tree(out, single)


# ---------------------------------------------------------------------------------------------------------------------
# the rules


class Builder(Protocol):
    """Makes the product of one vector, without lambda, from a system and its tensors."""

    def __call__(self, system: Curvature, tensors: Leaves, mode: str, hold: bool, *, exact: bool) -> Product:
        """Return leaves -> leaves; ``exact`` asks for operations that may be differentiated any number of times."""


class Rule(NamedTuple):
    """A product of ours: how it is made, and what func it takes."""

    build: Builder
    sampled: bool = False  # func takes one sample, and in_dims says where they are
    composite: bool = False  # func is a CompositeLoss


RULES: dict[Any, Rule] = {}  # bound product function -> rule; filled where those are


def build_hessian(system: Curvature, tensors: Leaves, mode: str, hold: bool, *, exact: bool) -> Product:
    """H: the Hessian of the loss."""
    n, whole = len(system.point.leaves), system.loss(exact)
    return hessian(lambda leaves: whole((*leaves, *tensors[n:])), tensors[:n], mode, hold)


def build_gauss_newton(system: Curvature, tensors: Leaves, mode: str, hold: bool, *, exact: bool) -> Product:
    """J^T H_outer J: the Hessian of outer between the Jacobians of inner."""
    n = len(system.point.leaves)
    structure: list[Any] = []  # of inner's output, noted when inner is called

    def output(tensors: Leaves) -> Leaves:
        leaves, spec = flatten(system.func(tensors, "output")(*system.arguments(tensors)), "inner")
        structure[:] = [spec]
        return _check_output(leaves)

    def value(tensors: Leaves) -> Leaves:
        (spec,) = structure
        outputs, own = tensors[: spec.num_leaves], tensors[spec.num_leaves :]
        out = system.func(own, "value")(spec.unflatten(outputs), *system.arguments(own))
        return (check_scalar(out, "outer"),)

    def middle(outputs: Leaves) -> Map:
        whole = system.lift(value, exact, more=len(outputs))

        def outer(outputs: Leaves) -> torch.Tensor:
            return whole((*outputs, *tensors))[0].sum()

        pull = torch.func.vjp(torch.func.grad(outer), outputs)[1]
        return lambda tangents: pull(tangents)[0]

    lifted = system.lift(output, exact)
    return sandwich(lambda leaves: lifted((*leaves, *tensors[n:])), middle, tensors[:n], mode, hold)


def _check_output(leaves: Sequence[Any]) -> Leaves:
    """Return inner's output as a tuple of floating point tensors."""
    expected, fix = "a function that returns floating point tensors", "return only what outer differentiates"
    if not leaves:
        raise StructureError(message("inner", expected, "one that returns none", fix))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(message("inner", expected, f"one that returns {type(leaf).__name__}", fix))
        if not leaf.is_floating_point():
            raise DtypeError(message("inner", expected, f"one that returns {leaf.dtype}", fix))
    return tuple(leaves)


def build_fisher(system: Curvature, tensors: Leaves, mode: str, hold: bool, *, exact: bool) -> Product:
    """1/n sum_i g_i g_i^T = J^T J / n, with J the Jacobian of the n losses.

    With ``hold``, and few enough numbers, the rows g_i are held, and a product is two matrix products. Otherwise J
    stays a function: vmap is taken over the forward pass only, so that layer norms are exact.
    """
    n, count = len(system.point.leaves), system.sample_count(tensors)
    size = min(system.chunk_size or count, count)
    if hold and count * system.layout.size <= _HELD_NUMBERS:
        return _held_rows(system, tensors)
    runner = replace(system.runner, looping=True) if exact else system.runner

    def part(start: int, stop: int, hold: bool) -> Product:
        def losses(tensors: Leaves) -> Leaves:
            samples = system.samples_at(tensors)

            def one(leaves: Leaves, rest: Leaves) -> Leaves:
                return (samples.one(leaves, rest),)

            return runner(samples, start, stop, one, one)

        def divided(tangents: Leaves) -> Leaves:
            return (tangents[0] / count,)

        lifted = system.lift(losses, exact)
        return sandwich(lambda leaves: lifted((*leaves, *tensors[n:])), lambda _: divided, tensors[:n], mode, hold)

    if exact or size == count:
        return part(0, count, hold)

    def product(*vectors: torch.Tensor) -> Leaves:
        """Go over the samples anew, so that one chunk's graph is held at a time."""
        total = part(0, size, hold=False)(*vectors)
        for start in range(size, count, size):
            more = part(start, min(start + size, count), hold=False)(*vectors)
            total = tuple(a + b for a, b in zip(total, more, strict=True))
        return total

    return lambda *vectors: _one_value(lambda: product(*vectors), tensors)


def _held_rows(system: Curvature, tensors: Leaves) -> Product:
    """Return the Fisher product of rows [n, p] that are held."""
    layout, rows = system.layout, system.factor(tensors)

    def product(*vectors: torch.Tensor) -> Leaves:
        v = layout.join(vectors).to(rows.dtype)
        return layout.split(rows.T @ (rows @ v) / len(rows))

    return product
