"""What all solvers share: rows are scaled to unit norm first, and judged by their true residual at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status

__all__ = [
    "Scaled",
    "as_returned",
    "attainable",
    "divide",
    "gauge_of",
    "judge",
    "judge_approximation",
    "leaves_at",
    "normalise",
    "start_at",
]

Matvec = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scaled:
    """Rows scaled to unit norm. Zero and non-finite rows are zero in ``unit``.

    The scale is kept in two factors: the square of a norm of 1e-25 is 0 in float32.
    """

    unit: torch.Tensor
    peak: torch.Tensor
    norm: torch.Tensor
    zero: torch.Tensor
    nonfinite: torch.Tensor

    def restore(self, u: torch.Tensor) -> torch.Tensor:
        """Return u in the scale of the rows: exact zeros for zero rows, NaN for non-finite ones."""
        scaled = u * self.norm.unsqueeze(-1) * self.peak.unsqueeze(-1)
        scaled = scaled.masked_fill(self.zero.unsqueeze(-1), 0.0)
        return scaled.masked_fill(self.nonfinite.unsqueeze(-1), float("nan"))


def normalise(rows: torch.Tensor) -> Scaled:
    """Scale each row [..., p] to unit norm, so that a solve of a v is a times the solve of v, at any scale."""
    if rows.shape[-1] == 0:
        none = torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        ones = torch.ones(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        return Scaled(rows, ones, ones, ~none, none)
    nonfinite = ~rows.isfinite().all(-1)
    unit = rows.masked_fill(nonfinite.unsqueeze(-1), 0.0)
    peak = unit.abs().amax(-1)
    zero = (peak == 0) & ~nonfinite
    peak = peak.masked_fill(peak == 0, 1.0)
    unit = unit / peak.unsqueeze(-1)
    norm = torch.linalg.vector_norm(unit, dim=-1)
    norm = norm.masked_fill(norm == 0, 1.0)
    return Scaled(unit / norm.unsqueeze(-1), peak, norm, zero, nonfinite)


def gauge_of(ap: torch.Tensor) -> torch.Tensor | None:
    """Return the size of each row of A p, if squares of it leave the range of the dtype; p has unit norm."""
    peak = ap.abs().amax(-1, keepdim=True)
    safe = torch.finfo(ap.dtype).max ** 0.25
    if bool(((peak < safe) & (peak > 1 / safe) | (peak == 0) | ~peak.isfinite()).all()):
        return None
    return peak.masked_fill((peak == 0) | ~peak.isfinite(), 1.0)


def divide(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return rows [..., p] / by [...], and 0 where that is 0."""
    by = by.unsqueeze(-1)
    return torch.where(by == 0, 0.0, rows / torch.where(by == 0, 1.0, by))


def start_at(matvec: Matvec, scaled: Scaled, start: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where an iteration on the unit rows starts, and its residual; 0 where ``start`` is no better than that.

    Args:
        matvec: rows -> A rows.
        scaled: the right-hand sides [k, *B, p].
        start: solutions in the scale of the rows, [k, p], [1, p] or [j, p] with rows joined k = i j; None = 0.
    """
    b, zero = scaled.unit, torch.zeros_like(scaled.unit)
    if start is None or not b.numel():
        return zero, b
    start = start.repeat(len(b) // len(start), 1).reshape(len(b), *(1,) * (b.ndim - 2), b.shape[-1])
    x = (start / scaled.peak.unsqueeze(-1) / scaled.norm.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
    r = b - matvec(x)
    # Not finite or longer than b is worse than 0.
    good = (torch.linalg.vector_norm(r, dim=-1) <= torch.linalg.vector_norm(b, dim=-1)).unsqueeze(-1)
    return torch.where(good, x, zero), torch.where(good, r, b)


def attainable(u: torch.Tensor, size: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the residual that rounding allows for unit right-hand sides; ``size`` is |C + lambda I|."""
    noise: torch.Tensor = 10 * eps * (1 + size * torch.linalg.vector_norm(u, dim=-1))
    return noise.clamp(max=eps**0.5)


def goal(u: torch.Tensor, size: torch.Tensor, tol: float, eps: float) -> torch.Tensor:
    """Return the residual down to which an iteration goes on from the true residual of unit right-hand sides.

    That is ``tol``, or what rounding allows where ``tol`` is below what it ever allows.
    """
    noise = attainable(u, size, eps)
    return noise.clamp(min=tol) if tol < 10 * eps else torch.full_like(noise, tol)


def judge(
    scaled: Scaled,
    u: torch.Tensor,
    residual: torch.Tensor,
    size: torch.Tensor,
    status: torch.Tensor,
    iterations: torch.Tensor,
    tol: float,
    eps: float,
    gauge: torch.Tensor | None = None,
) -> Raw:
    """Return the answer in the rows' own scale, converged where the true residual says so.

    Args:
        scaled: the right-hand sides.
        u: solutions of the unit right-hand sides [..., p].
        residual: their true residual norms [...].
        size: |C + lambda I| as the solver saw it [...].
        status: what a row's status is if it did not converge [...]; SINGULAR is kept in any case.
        iterations: steps taken [...].
        tol: relative tolerance.
        eps: rounding unit of a product.
        gauge: u and size are of A / gauge.
    """
    met = (residual <= attainable(u, size, eps).clamp(min=tol)) & ~scaled.nonfinite | scaled.zero
    status = status.masked_fill(met, Status.CONVERGED).masked_fill(scaled.nonfinite, Status.NONFINITE)
    # A product that is NaN leaves no answer worth having: its row is NaN like that of a right-hand side that is.
    lost = status == Status.NONFINITE
    value = scaled.restore(u if gauge is None else u / gauge)
    peak = value.abs().amax(-1) if value.shape[-1] else torch.zeros_like(residual)
    vanished = (peak < torch.finfo(value.dtype).tiny) & (u != 0).any(-1) & ~scaled.zero
    outside = (~peak.isfinite() | vanished) & ~lost  # the answer is beyond the dtype, though the unit problem is solved
    met, status = met & ~outside, status.masked_fill(outside, Status.NONFINITE)
    lost = lost | outside
    value = value.masked_fill(lost.unsqueeze(-1), float("nan"))
    residual = residual.masked_fill(scaled.zero, 0.0).masked_fill(lost, float("nan"))
    return Raw(value, met, status, iterations.masked_fill(scaled.zero | scaled.nonfinite, 0), residual)


def judge_approximation(
    scaled: Scaled,
    u: torch.Tensor,
    known: torch.Tensor,
    size: torch.Tensor,
    status: torch.Tensor,
    iterations: torch.Tensor,
    tol: float,
    eps: float,
    gauge: torch.Tensor,
    full: Matvec | None,
) -> Raw:
    """Return the answer of an approximation, judged as ``judge`` does where a product is spent on its residual.

    Args:
        scaled: as in ``judge``.
        u: as in ``judge``.
        known: what is known of the residual without a product: inf where the answer must not pass for a solution.
        size: as in ``judge``.
        status: as in ``judge``.
        iterations: as in ``judge``.
        tol: as in ``judge``.
        eps: as in ``judge``.
        gauge: as in ``judge``.
        full: rows -> (C + lambda I) rows; None = not wanted, and the residual is NaN.
    """
    residual = known
    if full is not None:
        residual = torch.linalg.vector_norm(scaled.unit - full(u) / gauge, dim=-1).nan_to_num(torch.inf, torch.inf)
        residual = residual.masked_fill((status == Status.NONFINITE) & known.isinf(), torch.inf)
    raw = judge(scaled, u, residual, size, status, iterations, tol, eps, gauge)
    if full is None:
        gone = (raw.status == Status.NONFINITE) | ~scaled.zero
        raw = raw._replace(residual=raw.residual.masked_fill(gone, torch.nan))
    return raw


def as_returned(raw: Raw, rows: torch.Tensor, layout: Layout, matvec: Matvec | None) -> Raw:
    """Return the facts of the answer in the leaves' own dtypes, where some leaf is narrower than the rows."""
    if all(dtype == rows.dtype for dtype in layout.dtypes):
        return raw
    value = layout.join(layout.split(raw.value)).to(rows.dtype)
    lost = raw.value.isfinite().all(-1) & ~value.isfinite().all(-1)
    residual = raw.residual
    if matvec is not None:
        scaled = normalise(rows)
        left = (rows - matvec(value)) / scaled.peak.unsqueeze(-1)
        residual = (torch.linalg.vector_norm(left, dim=-1) / scaled.norm).masked_fill(scaled.zero, 0.0)
        residual = torch.where(raw.residual.isnan(), raw.residual, residual)
    return raw._replace(
        value=raw.value.masked_fill(lost.unsqueeze(-1), float("nan")),
        converged=raw.converged & ~lost,
        status=raw.status.masked_fill(lost, Status.NONFINITE),
        residual=residual.masked_fill(lost, float("nan")),
    )


def leaves_at(layout: Layout, columns: torch.Tensor) -> list[str]:
    """Return the names of the leaves that hold one of these columns [p]."""
    spans = zip(layout.names, layout.offsets, layout.sizes, strict=True)
    return [name or "v" for name, start, size in spans if bool(columns[start : start + size].any())]
