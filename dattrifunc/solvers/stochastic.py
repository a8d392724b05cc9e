"""LiSSA: a Neumann series on curvature of random batches, for many right-hand sides and repeats at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..implicit import Raw
from .info import Status
from .lanczos import tell_lowest
from .rows import Matvec, divide, judge, normalise

__all__ = ["draw_batches", "largest_batch_curvature", "lissa_rows"]

# (rows [k, R, *B, p], indices [R, batch] or None) -> products of the same shape, each repeat on its own batch
Sampled = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def draw_batches(
    num_samples: int, batch_size: int, shape: tuple[int, ...], generator: torch.Generator | None
) -> torch.Tensor:
    """Return indices [*shape, batch_size], without replacement inside a batch, independent between batches.

    Every batch is the first ``batch_size`` different values of a uniform stream, so each subset is equally likely.
    """
    device = generator.device if generator is not None else None
    count = 1
    for n in shape:
        count *= n

    def random(*size: int) -> torch.Tensor:
        return torch.randint(num_samples, size, generator=generator, device=device)

    if batch_size == num_samples:
        return torch.arange(num_samples, device=device).expand(*shape, batch_size)
    if 2 * batch_size > num_samples:  # the stream would be long: leave out a random complement instead
        left_out = draw_batches(num_samples, num_samples - batch_size, (count,), generator)
        keep = torch.ones(count, num_samples, dtype=torch.bool, device=device).scatter_(1, left_out, False)
        return keep.nonzero()[:, 1].reshape(*shape, batch_size)
    batches = random(count, batch_size)
    while True:
        batches = batches.sort(dim=1, stable=True)[0]
        repeated = torch.zeros_like(batches, dtype=torch.bool)
        repeated[:, 1:] = batches[:, 1:] == batches[:, :-1]
        missing = int(repeated.sum())
        if not missing:
            return batches.reshape(*shape, batch_size)
        batches[repeated] = random(missing)


def lissa_rows(
    sampled: Sampled,
    rows: torch.Tensor,
    *,
    indices: torch.Tensor | None,
    depth: int,
    num_repeat: int,
    damping: float,
    scaling: float,
    tol: float,
    eps: float,
    full: Matvec | None,
    notes: list[str] | None = None,
) -> Raw:
    """Run e <- v + (1 - damping) e - C_batch e / scaling, ``depth`` times from e = v; return the mean of e / scaling.

    Args:
        sampled: products with the curvature of batches (any lambda included).
        rows: right-hand sides [k, *B, p]; all of them, and all *B, see the same batches.
        indices: [num_repeat, depth, batch], or None when every step uses all samples.
        depth: number of steps.
        num_repeat: independent repeats R, run side by side.
        damping: see the fixed point, (C + damping scaling I)^-1 v.
        scaling: larger than the largest curvature of any batch, over 2 - damping; 0 = there is none.
        tol: stop a row when its last step changed the estimate by at most tol, relative; 0 = never.
        eps: rounding unit.
        full: product with all samples, for the true residual; None = not wanted.
        notes: takes what is found out about divergence.

    A row that is not solved has status NEGATIVE_CURVATURE where 50 products of one vector with all samples, or fewer,
    show an eigenvalue < 0 of C + damping scaling I: no scaling and no depth would do. Otherwise, it diverged when its
    estimate became larger than any sequence of contractions can make it (|e_t| <= t + 1 for unit v), when it left the
    range of the dtype, or, with all samples in each step, when its steps grew. The last finite value is kept.

    Source: Agarwal, Bullins and Hazan (2017), Second-order stochastic optimization in linear time, arXiv:1602.03943.
    Differs: (1) batches instead of single samples; (2) index tensors drawn up front; (3) divergence is found.
    """
    scaled = normalise(rows)
    if scaling == 0:  # no batch has any curvature
        u, none = torch.zeros_like(rows), torch.zeros(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        status = torch.full(none.shape, int(Status.SINGULAR), device=rows.device)
        return judge(scaled, u, none + 1, none, status, torch.zeros_like(status), tol, eps)
    v = scaled.unit.unsqueeze(1)
    e = v.expand(v.shape[0], num_repeat, *v.shape[2:]).clone()
    fixed = indices is None
    active = (~scaled.zero & ~scaled.nonfinite).unsqueeze(1).expand(e.shape[:-1]).clone()
    diverged = torch.zeros_like(active)
    nonfinite = torch.zeros_like(active)
    length = torch.ones(e.shape[:-1], dtype=e.dtype, device=e.device)
    first = change = torch.full(e.shape[:-1], torch.inf, dtype=e.dtype, device=e.device)
    steps = torch.zeros(e.shape[:-1], dtype=torch.int64, device=e.device)
    for t in range(depth):
        if not bool(active.any()):
            break
        batch = None if indices is None else indices[:, t]
        after = v + (1 - damping) * e - sampled(e, batch) / scaling
        before, length = length, torch.linalg.vector_norm(after, dim=-1)
        blown = active & ~length.isfinite()
        nonfinite = nonfinite | (blown & (before < 1e12))  # no overflow can come from there: the product is not finite
        diverged = diverged | blown | (active & (length > (t + 2) * 1.001))
        active = active & ~blown
        if fixed or tol > 0:
            change = torch.where(active, torch.linalg.vector_norm(after - e, dim=-1), change)
            if t == 0:
                first = change
        e = torch.where(active.unsqueeze(-1), after, e)
        steps += active
        if tol > 0:
            active = active & (change > tol * length)
    if fixed:
        diverged = diverged | ((steps > 1) & (change > 1.001 * first) & (change > 10 * eps))
    mean = e.mean(1)
    u = mean / scaling
    lost, status = diverged.any(1), torch.full(u.shape[:-1], int(Status.MAX_ITER), device=u.device)
    status = status.masked_fill(lost, int(Status.DIVERGED)).masked_fill(nonfinite.any(1), int(Status.NONFINITE))
    gauge = torch.full((*u.shape[:-1], 1), scaling, dtype=u.dtype, device=u.device)
    # Without a product spent on the residual, only what was seen on the way counts.
    residual = torch.zeros_like(gauge).squeeze(-1)
    rest: torch.Tensor | None = None
    if full is not None:
        rest = v.squeeze(1) - full(u) - damping * scaling * u
        residual = torch.linalg.vector_norm(rest, dim=-1)
    bad, one = residual.masked_fill(lost, torch.inf), torch.ones_like(residual)
    raw = judge(scaled, mean, bad, one, status, steps.amax(1), tol, eps, gauge)
    unsolved = (raw.status == Status.MAX_ITER) | (raw.status == Status.DIVERGED)
    if full is not None and rest is not None and bool(unsolved.any()):
        # The series leaves of v what has small or negative curvature, times (1 - lambda_i / scaling)^depth.
        far = residual.masked_fill(~unsolved | ~residual.isfinite(), 0.0)
        start, bound = (
            divide(rest, far).nan_to_num(0.0, 0.0, 0.0),
            torch.zeros_like(far).masked_fill(far == 0, torch.inf),
        )
        least, text = tell_lowest(lambda x: full(x) + damping * scaling * x, start, bound, eps)
        negative = unsolved & (least < 0)
        raw = raw._replace(status=raw.status.masked_fill(negative, int(Status.NEGATIVE_CURVATURE)))
        if notes is not None and bool(negative.any()):
            notes.append(text)
    if notes is not None and bool((raw.status == Status.DIVERGED).any()):
        notes.append(f"scaling {scaling:.4g} is too small for some batch, or its curvature is negative")
    told = residual if full is not None else torch.full_like(one, torch.nan)
    gone = raw.status == Status.NONFINITE
    error = torch.full_like(one, torch.nan)
    if num_repeat > 1:
        norm = torch.linalg.vector_norm
        error = norm(e.std(1) / num_repeat**0.5, dim=-1) / norm(mean, dim=-1)
    return raw._replace(
        residual=told.masked_fill(scaled.zero, 0.0).masked_fill(gone, torch.nan),
        standard_error=error.masked_fill(scaled.zero, 0.0).masked_fill(gone | lost, torch.nan),
    )


def largest_batch_curvature(
    sampled: Sampled,
    like: torch.Tensor,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    steps: int = 20,
) -> float:
    """Return an estimate from below of the largest |eigenvalue| of the curvature of any of these batches.

    Args:
        sampled: products with the curvature of batches.
        like: one row [*B, p], for shape and dtype.
        indices: the batches [M, batch], taken side by side; None = all samples.
        generator: for the start of the power iteration.
        steps: products with each batch.
    """
    if like.shape[-1] == 0:
        return 0.0
    count = 1 if indices is None else indices.shape[0]
    device = generator.device if generator is not None else like.device
    start = torch.randn(1, count, *like.shape, dtype=like.dtype, device=device, generator=generator)
    vector, largest = start.to(like.device), 0.0
    for _ in range(steps):
        vector = sampled(normalise(vector).unit, indices)
        if not bool(vector.isfinite().all()):
            return float("inf")
        scaled = normalise(vector)
        largest = max(largest, float((scaled.peak.double() * scaled.norm.double()).masked_fill(scaled.zero, 0.0).max()))
    return largest
