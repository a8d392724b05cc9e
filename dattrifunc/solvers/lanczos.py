"""Lanczos with full re-orthogonalisation: a low-rank inverse on one Krylov basis, and eigenpairs by thick restarts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..implicit import Raw
from ..tree import Layout
from .block import NUMBERS
from .info import Status, told_indefinite
from .krylov import Projection, noise, spectral
from .rows import Matvec, judge_approximation, leaves_at, normalise

__all__ = [
    "Eigenpairs",
    "RitzInverse",
    "arnoldi_rows",
    "eigenpairs",
    "lowest_curvature",
    "ritz_inverse",
    "seed_of",
    "tell_lowest",
]

_MOST_SEED = 1 << 62
DIRECTIONS = 512  # most that the space of eigenpairs holds, where 8 blocks are fewer
_TELLING = 50  # products that telling the smallest eigenvalue may take, with one vector each


def seed_of(generator: torch.Generator | None) -> int:
    """Return a seed that the generator decides; without one, always the same."""
    if generator is None:
        return 0
    return int(torch.randint(_MOST_SEED, (), generator=generator, device=generator.device))


def _drawn(seed: int, like: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    """Return draw(step, count) -> [count, p]: what is drawn at a step does not depend on what was drawn before."""

    def draw(step: int, count: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed + step)
        return torch.randn(count, like.shape[-1], generator=rng, dtype=like.dtype)

    return draw


# ---------------------------------------------------------------------------------------------------------------------
# the inverse


class RitzInverse(NamedTuple):
    """U diag(factors) U^T + (I - U U^T) where ``divides``, over ``gauge``: (C + lambda I)^-1 on a Krylov space of C.

    Attributes:
        vectors: Ritz vectors, orthonormal columns [*B, p, r]; 0 where a pair was left out.
        values: their Ritz values, falling in size, 0 where left out [*B, r], float64.
        factors: gauge / (value + lambda); 0 where that is singular [*B, r].
        divides: whether there is more than U, and lambda is large enough beside C to divide it by [*B, 1].
        gauge: lambda where that divides, or else the largest |value| [*B, 1].
        steps: products made.
        whole: the space is all there is, up to directions without curvature [*B].
        lowest: the smallest Ritz value where that is clearly negative, else 0 [*B].
        indefinite: whether that plus lambda is clearly negative [*B].
        dropped: directions without curvature, where lambda is too small to divide by, over all B.
        bare: directions without curvature but lambda, over all B.
        unsettled: Ritz pairs left out since they may as well belong to no curvature at all, over all B.
        lost: where a product was not finite [*B].
    """

    vectors: torch.Tensor
    values: torch.Tensor
    factors: torch.Tensor
    divides: torch.Tensor
    gauge: torch.Tensor
    steps: int
    whole: torch.Tensor
    lowest: torch.Tensor
    indefinite: torch.Tensor
    dropped: int
    bare: int
    unsettled: int
    lost: torch.Tensor


def ritz_inverse(
    product: Matvec,
    lead: tuple[int, ...],
    like: torch.Tensor,
    *,
    max_iter: int,
    top_k: int,
    shift: float,
    tol: float,
    eps: float,
    seed: int,
) -> RitzInverse:
    """Return the inverse of C + shift I on a Krylov space of C from a random start, by ``max_iter`` products or p.

    Args:
        product: rows [k, *lead, p] -> C rows.
        lead: sizes of the lifted axes.
        like: for p (its last axis), dtype and device.
        max_iter: most directions.
        top_k: how many Ritz pairs are kept, the largest |value| first.
        shift: lambda >= 0.
        tol: curvature up to this part of the largest counts as none, and so does what leads out of a space.
        eps: rounding unit of a product.
        seed: of the start, and of fresh directions.

    Source: Lanczos (1950), doi:10.6028/jres.045.026; Schioppa et al. (2022), Scaling up influence functions,
    arXiv:2112.03052. Differs: (1) directions are orthogonalised twice against all before them, and the projection is
    that of the products made, not a recurrence's; (2) where the space is invariant before ``max_iter`` (repeated
    eigenvalues), it goes on with a fresh direction; (3) signs of eigenvalues are kept; (4) in indefinite C, a Ritz
    value that is closer to -lambda than its own error bound is left out: its inverse would be noise.
    """
    p, b = like.shape[-1], math.prod(lead)
    flat = like.new_zeros(b, p)
    cut = max(tol, noise(p, eps))

    def times(rows: torch.Tensor) -> torch.Tensor:
        out = product(rows.transpose(0, 1).reshape(-1, *lead, p))
        return out.reshape(-1, b, p).transpose(0, 1)

    space, draw = Projection(times, max_iter, flat), _drawn(seed, flat)
    while space.size < space.most and not bool(space.lost.all()):
        space.add(space.follow(1, cut, draw))
    values, turn, error = space.ritz()
    order = values.abs().argsort(dim=-1, descending=True, stable=True)
    values, error = values.gather(-1, order), error.gather(-1, order)
    largest = values[:, :1].abs() if space.size else values.new_zeros(b, 1)
    values = values.masked_fill(space.lost.unsqueeze(-1), 0.0)
    null = values.abs() <= cut * largest
    # Below rounding, 1 / lambda would blow up what rounding leaves outside U.
    counts = shift > torch.finfo(like.dtype).eps * largest
    lowest = values.amin(-1) if space.size else largest[:, 0]
    lowest = torch.where(lowest < -cut * largest[:, 0], lowest, 0.0)
    sums = torch.where(null, values.clamp(min=0), values) + shift
    rounding = cut * (largest + shift)  # an error below that is none, and a sum below that is 0
    unsettled = (lowest < 0).unsqueeze(-1) & (error > torch.maximum(sums.abs(), rounding)) & ~null
    top = min(top_k, space.size)
    whole = (null | (torch.arange(space.size, device=null.device) < top)).all(-1) & ~unsettled.any(-1)
    told = null & ~space.lost.unsqueeze(-1)
    out = ((null & ~counts) | unsettled)[:, :top]
    columns = turn.gather(-1, order.unsqueeze(1).expand_as(turn))[..., :top].masked_fill(out.unsqueeze(1), 0.0)
    vectors = (columns.mT.to(like.dtype) @ space.basis).mT
    singular = ((sums.abs() <= rounding) & ~null)[:, :top] | out
    divides = counts & (out.any(-1, keepdim=True) | torch.tensor(top < p, device=counts.device))
    gauge = torch.where(divides, shift, largest.masked_fill(largest == 0, 1.0))
    factors = torch.where(singular, 0.0, gauge / torch.where(singular, 1.0, sums[:, :top]))
    return RitzInverse(
        vectors.reshape(*lead, p, top),
        values[:, :top].masked_fill(out, 0.0).reshape(*lead, top),
        factors.reshape(*lead, top),
        divides.reshape(*lead, 1),
        gauge.reshape(*lead, 1),
        space.size,
        (whole & (space.size == p)).reshape(lead),
        lowest.reshape(lead),
        (lowest + shift < -rounding[:, 0]).reshape(lead),
        int((told & ~counts).sum()),
        int((told & counts).sum()),
        int(unsettled[:, :top].sum()),
        space.lost.reshape(lead),
    )


def arnoldi_rows(
    inverse: RitzInverse,
    rows: torch.Tensor,
    *,
    shift: float,
    tol: float,
    eps: float,
    layout: Layout,
    full: Matvec | None,
    notes: list[str],
) -> Raw:
    """Return the inverse's product with rows [k, *B, p].

    Args:
        inverse: of C + shift I.
        rows: right-hand sides.
        shift: lambda >= 0.
        tol: relative tolerance, for the judgement only.
        eps: rounding unit of a product.
        layout: names the leaves.
        full: rows -> (C + lambda I) rows, for the true residual; None = not wanted, and the residual is NaN.
        notes: takes what is found out.
    """
    scaled, (p, r) = normalise(rows), inverse.vectors.shape[-2:]
    u = spectral(inverse.vectors, inverse.factors, inverse.divides)(scaled.unit)  # gauge times the answer
    # What no factor takes over is lost: the residual, where the space is all there is.
    dropped = spectral(inverse.vectors, (inverse.factors == 0).double(), ~inverse.divides)(scaled.unit)
    missed = torch.linalg.vector_norm(dropped, dim=-1)
    whole, lost = inverse.whole.expand_as(missed), inverse.lost.expand_as(missed)
    status = torch.where(whole, int(Status.STAGNATED), int(Status.MAX_ITER))
    gauge = inverse.gauge.to(u.dtype)
    size = (inverse.values.abs().amax(-1) if r else inverse.gauge[..., 0] * 0) + shift
    size = (size / inverse.gauge[..., 0]).to(u.dtype).expand_as(missed)
    singular = whole & (missed > max(tol, eps**0.5))
    status = status.masked_fill(singular, int(Status.SINGULAR)).masked_fill(lost, int(Status.NONFINITE))
    known = torch.where(whole, missed, 0.0).masked_fill(lost, torch.inf)
    steps = torch.full_like(status, inverse.steps)
    raw = judge_approximation(scaled, u, known, size, status, steps, tol, eps, gauge, full)
    lowest = float(inverse.lowest.min()) if inverse.lowest.numel() else 0.0
    if lowest < 0:
        notes.append(f"negative curvature, inverted with its sign: smallest Ritz value {lowest:.4g}")
    if inverse.dropped:
        notes.append(f"{inverse.dropped} null directions dropped")
    if inverse.bare:
        notes.append(f"{inverse.bare} null directions divided by lambda")
    if inverse.unsettled:
        notes.append(f"{inverse.unsettled} Ritz values closer to {-shift:g} than to their eigenvalue left out")
    lacking = raw.status == Status.SINGULAR
    if bool(lacking.any()):
        names = leaves_at(layout, (dropped.abs() > 1e-3 * missed.unsqueeze(-1))[lacking].any(0))
        notes.append(f"no curvature in {', '.join(repr(name) for name in names)} along a part of v")
    short = raw.status == Status.MAX_ITER
    if bool(short.any()):
        raw = raw._replace(status=raw.status.masked_fill(short & inverse.indefinite, int(Status.NEGATIVE_CURVATURE)))
        rest = f"divided by lambda = {shift:.2g}" if bool(inverse.divides.any()) else "dropped: lambda is (nearly) 0"
        count = int((inverse.factors != 0).sum(-1).min())
        exact = "ihvp_minres" if bool(inverse.indefinite.any()) else "ihvp_cg"
        notes.append(f"{count} of {p} directions kept, the rest {rest}; raise max_iter and top_k, or use {exact}")
    return raw


# ---------------------------------------------------------------------------------------------------------------------
# the smallest eigenvalue, where an iteration met negative curvature


def lowest_curvature(
    product: Matvec, start: torch.Tensor, eps: float, most: int = _TELLING
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a bound of the smallest eigenvalue of A for each row of ``start``, from the Krylov space of that row.

    The space is orthogonalised twice, and the bound is its smallest Ritz value: what products showed. What the steps of
    an iteration say of its Krylov space (their Lanczos matrix) is wrong by any factor once rounding has spoilt them.

    Args:
        product: rows [k, *B, p] -> A rows.
        start: directions [k, *B, p], best of low curvature already; a row of 0 has no answer.
        eps: rounding unit of a product.
        most: products at most; they end where the Ritz value is known to a thousandth.

    Returns:
        (values, errors) [k, *B] in float64: no eigenvalue is above ``value`` for all of A, and one is within ``error``
        of it; rounding is in both. (inf, inf) where there is no answer.
    """
    p = start.shape[-1]
    unit = normalise(start.reshape(-1, p))
    none = unit.zero | unit.nonfinite

    def times(rows: torch.Tensor) -> torch.Tensor:
        return product(rows.reshape(start.shape)).reshape(rows.shape)

    space = Projection(times, max(1, min(most, NUMBERS // max(unit.unit.numel(), 1))), unit.unit)
    direction, cut, draw = unit.unit.unsqueeze(1), noise(p, eps), _drawn(0, unit.unit)
    while True:
        space.add(direction)
        values, _, errors = space.ritz()
        least, error = values[:, 0], errors[:, 0]
        none |= space.lost
        known = none | (least < 0) & (error <= 1e-3 * least.abs())
        if space.size == space.most or bool(known.all()):
            break
        direction = space.follow(1, cut, draw)
    rounding = cut * space.largest
    found = (least + rounding, error + rounding)
    values, errors = (t.masked_fill(none, torch.inf).reshape(start.shape[:-1]) for t in found)
    return values, errors


def tell_lowest(product: Matvec, start: torch.Tensor, curvature: torch.Tensor, eps: float) -> tuple[torch.Tensor, str]:
    """Return a bound of the smallest eigenvalue of matrices, and in words the lambda that would do where it is < 0.

    Args:
        product: rows [k, *B, p] -> A rows.
        start: directions [k, *B, p]; one of them is taken for each of *B, that of least curvature.
        curvature: an upper bound of the smallest eigenvalue from each [k, *B]; inf where a direction is none.
        eps: rounding unit of a product.

    Returns:
        (bounds [1, *B] in float64, text). A bound is inf where there is no direction.
    """
    curvature = curvature.double()
    row = curvature.argmin(0, keepdim=True)
    known = curvature.gather(0, row)
    best = start.gather(0, row.unsqueeze(-1).expand(*row.shape, start.shape[-1]))
    values, errors = lowest_curvature(product, best.masked_fill(known.isinf().unsqueeze(-1), 0.0), eps)
    bounds = torch.minimum(values, known)  # rounding is in the former
    least, error = float(bounds.min()), float(errors.flatten()[bounds.argmin()])
    enough = error - least + 0.01 * abs(least)
    condition = f"if that eigenvalue (to {error:.1g}) is the smallest"
    return bounds, f"{told_indefinite(least)}; larger by {enough:.4g} would do, {condition}"


# ---------------------------------------------------------------------------------------------------------------------
# eigenpairs


class Eigenpairs(NamedTuple):
    """Eigenpairs of one symmetric matrix.

    Attributes:
        values: [k], the wanted end first, float64.
        vectors: orthonormal rows [k, p].
        residuals: |A x - value x| [k], recomputed with one product more; float64.
        largest: a lower bound of the norm of A.
        missed: how many residuals are not within tol, or rounding, of that.
    """

    values: torch.Tensor
    vectors: torch.Tensor
    residuals: torch.Tensor
    largest: float
    missed: int


_ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LA": lambda values: values.argsort(descending=True),
    "SA": lambda values: values.argsort(),
    "LM": lambda values: values.abs().argsort(descending=True),
}


def eigenpairs(
    product: Matvec,
    like: torch.Tensor,
    k: int,
    which: str,
    *,
    tol: float,
    max_iter: int,
    eps: float,
    seed: int,
) -> Eigenpairs:
    """Return k eigenpairs at an end of the spectrum of a symmetric A.

    Args:
        product: rows [j, p] -> A rows, always finite.
        like: for p (its last axis), dtype and device.
        k: how many, at most p.
        which: "LA" (largest), "SA" (smallest) or "LM" (largest in size).
        tol: stop when |A x - value x| <= tol times the norm of A, for all k.
        max_iter: most products, each with k + 2 vectors.
        eps: rounding unit of a product.
        seed: of the start, and of fresh directions.

    Blocks are wider than k, so that an eigenvalue of any multiplicity is found as often as it is asked for, and the
    space starts again from the best half of its Ritz vectors when it is full.

    Source: Wu and Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems,
    doi:10.1137/S0895479898334605. Differs: (1) blocks; (2) the projection is that of the products made; (3) fresh
    directions where a block is deficient; (4) the residuals are recomputed at the end.
    """
    p = like.shape[-1]
    width = min(k + 2, p)
    blocks = max(8, min(NUMBERS // p, DIRECTIONS) // width)
    space = Projection(lambda rows: product(rows[0]).unsqueeze(0), blocks * width, like.reshape(1, p))
    draw, order, cut = _drawn(seed, like), _ORDERS[which], noise(p, eps)
    bound = max(tol, cut)
    step = 0
    while True:
        q = space.follow(min(width, space.most - space.size), cut, draw)
        space.add(q)
        step += 1
        values, turn, error = space.ritz()
        best = order(values[0])
        largest = float(space.largest)
        enough = space.size == p or (space.size >= k and bool((error[0, best[:k]] <= bound * largest).all()))
        if enough or step == max_iter:
            break
        if space.size == space.most:
            best = best[: blocks // 2 * width]
            space.restart(values[:, best], turn[..., best])
    best = best[:k]
    values, rows = values[0, best], (turn[0, :, best].mT.to(like.dtype) @ space.basis[0])
    image = normalise(product(rows))
    size = (image.peak.double() * image.norm.double()).masked_fill(image.zero, 0.0)
    scale = max(largest, float(size.max()) if k else 0.0) or 1.0
    left = image.unit * (size / scale).to(rows.dtype).unsqueeze(-1) - rows * (values / scale).to(rows).unsqueeze(-1)
    residuals = torch.linalg.vector_norm(left.double(), dim=-1) * scale
    missed = int((residuals > 2 * bound * largest).sum())  # twice: the basis is as good as rounding, and a product too
    return Eigenpairs(values, rows, residuals, largest, missed)
