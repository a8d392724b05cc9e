"""(F + lambda I)^-1 through the n x n Gram matrix of the rows behind F = 1/n sum_i g_i g_i^T: Woodbury's identity."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..implicit import Raw
from ..tree import Layout
from .dense import cholesky_solve, refined, require_finite
from .info import Status
from .rows import judge, normalise

__all__ = ["Gram", "factor_gram"]

_STEPS = 3  # most steps of refinement


@dataclass(frozen=True)
class Gram:
    """F + lambda I for rows g_i [*B, n, p], factored; ``solve`` takes rows [k, *B, p].

    With K the rows over sqrt(n lambda), F + lambda I = lambda (I + K^T K), so that every scale is in K and lambda.

    Attributes:
        unit: the rows scaled to unit norm [*B, n, p]; zero rows are 0.
        length: the norms of the rows of K [*B, n, 1].
        short: length / hypot(1, length), in [0, 1) [*B, n, 1].
        inverse: [*B, n, k] -> M^-1 [*B, n, k], M = E (I + K K^T) E, with E = 1 / hypot(1, length) on the diagonal.
        size: |I + K^T K| [*B], float64.
        shift: lambda.
    """

    unit: torch.Tensor
    length: torch.Tensor
    short: torch.Tensor
    inverse: Callable[[torch.Tensor], torch.Tensor]
    size: torch.Tensor
    shift: float

    def product(self, columns: torch.Tensor) -> torch.Tensor:
        """Return (I + K^T K) columns [*B, p, k]."""
        return columns + self.unit.mT @ (self.length * (self.length * (self.unit @ columns)))

    def apply(self, columns: torch.Tensor) -> torch.Tensor:
        """Return (I + K^T K)^-1 columns [*B, p, k] = columns - K^T (I + K K^T)^-1 K columns."""
        return columns - self.unit.mT @ (self.short * self.inverse(self.short * (self.unit @ columns)))

    def matvec(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (F + lambda I) rows [k, *B, p]."""
        return self.shift * self.product(rows.movedim(0, -1)).movedim(-1, 0)

    def solve(self, rows: torch.Tensor, tol: float, eps: float, notes: list[str]) -> Raw:
        """Return the solutions of all rows, refined, and judged by their residual on the rows of K."""
        scaled = normalise(rows)
        enough = torch.finfo(rows.dtype).eps
        u, residual = refined(self.apply, self.product, scaled.unit.movedim(0, -1), _STEPS, enough)
        residual = residual.nan_to_num(torch.inf, torch.inf)  # lambda is so small that the product leaves the dtype
        size = self.size.expand_as(residual)
        status = torch.full(residual.shape, int(Status.STAGNATED), device=rows.device)
        iterations = torch.zeros_like(status)
        gauge = torch.full((), self.shift, dtype=rows.dtype, device=rows.device)
        raw = judge(scaled, u.movedim(-1, 0), residual, size, status, iterations, tol, eps, gauge)
        if bool((raw.status == Status.STAGNATED).any()):
            enough = self.shift * float(self.size.max()) * eps**0.5
            notes.append(f"lambda is lost in the rounding of the Fisher matrix; regularization={enough:.2g} would do")
        return raw


def factor_gram(rows: torch.Tensor, shift: float, layout: Layout, argument: str) -> Gram:
    """Factor F + lambda I, F the mean of the outer products of rows [*B, n, p].

    M has a unit diagonal at any scale of the rows, and no eigenvalue below 1 / (1 + max length^2): where Cholesky fails
    by rounding, eigenvalues are raised to that, or to rounding itself.

    Raises:
        ValueError: a row is not finite; the message names the leaves, and ``argument``.

    Source: Woodbury (1950), Inverting modified matrices; Hager (1989), doi:10.1137/1031049. Differs: (1) scaled from
    both sides, so that nothing overflows; (2) refined, since the identity alone cancels where lambda is small.
    """
    require_finite(rows, layout, argument, "finite gradients of all samples")
    scaled = normalise(rows)
    count, dtype = rows.shape[-2], rows.dtype
    length = scaled.peak.double() * scaled.norm.double() / (count * shift) ** 0.5
    length = length.masked_fill(scaled.zero, 0.0).unsqueeze(-1)
    across = torch.hypot(length, torch.ones_like(length))
    least, short = across**-2, (length / across).to(dtype)
    cosines = scaled.unit @ scaled.unit.mT
    matrix = cosines * short * short.mT + torch.diag_embed(least.squeeze(-1).to(dtype))
    lower, failed = torch.linalg.cholesky_ex(matrix)
    floor = least.amin((-2, -1)).clamp(min=torch.finfo(dtype).eps).to(dtype)
    inverse = _spectral(matrix, floor) if bool(failed.any()) else functools.partial(cholesky_solve, lower)
    longest = length.amax((-2, -1), keepdim=True)
    part = (length / longest.masked_fill(longest == 0, 1.0)).to(dtype)
    size = 1 + longest.squeeze(-1).squeeze(-1).square() * torch.linalg.matrix_norm(cosines * part * part.mT)
    length = length.clamp(max=torch.finfo(dtype).max).to(dtype)
    return Gram(scaled.unit, length, short, inverse, size, shift)


def _spectral(matrix: torch.Tensor, floor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the inverse of symmetric matrices [*B, n, n] whose eigenvalues are known to be at least ``floor`` [*B]."""
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.maximum(values, floor.unsqueeze(-1)).unsqueeze(-1)
    return lambda columns: vectors @ ((vectors.mT @ columns) / values)
