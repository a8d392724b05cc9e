"""Solves through a dense factor, made once: Cholesky, LDL^T if indefinite, eigenvalues if singular."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import message
from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .rows import judge, normalise

__all__ = ["Factor", "factorise", "matrix_of"]

Matvec = Callable[[torch.Tensor], torch.Tensor]


def matrix_of(matvec: Matvec, layout: Layout, lead: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the dense symmetric matrices [*lead, p, p] behind rows [k, *lead, p] -> products.

    Raises:
        ValueError: an entry is not finite; the message names the leaves.
    """
    p = layout.size
    eye = torch.eye(p, dtype=like.dtype, device=like.device)
    rows = eye.reshape(p, *(1,) * len(lead), p).expand(p, *lead, p)
    matrix = matvec(rows).movedim(0, -2)
    finite = matrix.isfinite()
    if not bool(finite.all()):
        columns = ~finite.reshape(-1, p).all(0) if p else finite
        leaves = ", ".join(repr(name) for name in leaves_at(layout, columns))
        fix = "look for log(0), norm(0) or overflow in the loss, and for NaN or inf in the data"
        raise ValueError(
            message("func", "finite curvature", f"{int((~finite).sum())} NaN or inf entries in {leaves}", fix)
        )
    return (matrix + matrix.mT) / 2


def leaves_at(layout: Layout, columns: torch.Tensor) -> list[str]:
    """Return the names of the leaves that hold one of these columns [p]."""
    spans = zip(layout.names, layout.offsets, layout.sizes, strict=True)
    return [name for name, start, size in spans if bool(columns[start : start + size].any())]


@dataclass(frozen=True)
class Factor:
    """A symmetric matrix [*B, p, p], factored; ``solve`` takes rows [k, *B, p].

    Attributes:
        matrix: what was factored, C + lambda I.
        kind: "cholesky", "ldl" or "eigenvalues" (the last where the matrix is singular to working precision).
        singular: per matrix [*B].
        reason: in words, where it is singular: which leaves have no curvature, and the lambda that would do.
    """

    matrix: torch.Tensor
    kind: str
    singular: torch.Tensor
    reason: str
    apply: Callable[[torch.Tensor], torch.Tensor]

    def solve(self, rows: torch.Tensor, tol: float, eps: float) -> Raw:
        """Return the solutions of all rows, with one step of refinement, judged by the residual on the matrix."""
        scaled = normalise(rows)
        columns = scaled.unit.movedim(0, -1)  # [*B, p, k]
        u = self.apply(columns)
        left = columns - self.matrix @ u
        better = u + self.apply(left)
        left_after = columns - self.matrix @ better
        gain = torch.linalg.vector_norm(left_after, dim=-2) < torch.linalg.vector_norm(left, dim=-2)
        u = torch.where(gain.unsqueeze(-2), better, u)
        left = torch.where(gain.unsqueeze(-2), left_after, left)
        residual = torch.linalg.vector_norm(left, dim=-2).movedim(-1, 0)
        size = torch.linalg.matrix_norm(self.matrix).expand_as(residual)
        singular = self.singular.expand_as(residual)
        status = torch.where(singular, int(Status.SINGULAR), int(Status.STAGNATED))
        iterations = torch.zeros_like(status)
        raw = judge(scaled, u.movedim(-1, 0), residual, size, status, iterations, tol, eps)
        # A singular matrix has no inverse: said even where v lies in its range and the least-norm u solves the system.
        flagged = singular & (raw.status == Status.CONVERGED) & ~scaled.zero
        return raw._replace(status=raw.status.masked_fill(flagged, int(Status.SINGULAR)))


def factorise(matrix: torch.Tensor, layout: Layout, eps: float) -> Factor:
    """Factor symmetric matrices [*B, p, p].

    Cholesky where positive definite; Bunch-Kaufman LDL^T where indefinite; where a pivot says singular, eigenvalues
    decide, and those below ``cut`` = max(10, sqrt(p)) eps max|eigenvalue| are left out (least-norm answer).

    Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, chapters 10 and 11,
        doi:10.1137/1.9780898718027.
    """
    none = torch.zeros(matrix.shape[:-2], dtype=torch.bool, device=matrix.device)
    if matrix.shape[-1] == 0:
        return Factor(matrix, "cholesky", none, "", lambda columns: columns)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    if bool(((failed == 0) & (pivots.amin(-1) ** 2 > eps * pivots.amax(-1) ** 2)).all()):
        return Factor(matrix, "cholesky", none, "", lambda columns: torch.cholesky_solve(columns, lower))
    factor, order, failed = torch.linalg.ldl_factor_ex(matrix)
    if bool((failed == 0).all()) and bool(_pivots_safe(factor, order, eps).all()):
        return Factor(matrix, "ldl", none, "", lambda columns: torch.linalg.ldl_solve(factor, order, columns))
    values, vectors = torch.linalg.eigh(matrix)
    largest = values.abs().amax(-1, keepdim=True)
    cut = max(10.0, matrix.shape[-1] ** 0.5) * eps * largest
    kept = values.abs() > cut
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0).unsqueeze(-1)
    singular = ~kept.all(-1)
    reason = _why_singular(matrix, values, singular, layout, eps) if bool(singular.any()) else ""
    return Factor(matrix, "eigenvalues", singular, reason, lambda columns: vectors @ (inverse * (vectors.mT @ columns)))


def _pivots_safe(factor: torch.Tensor, order: torch.Tensor, eps: float) -> torch.Tensor:
    """Say per matrix whether no block of D is near 0 (2 x 2 where two neighbours in ``order`` are negative)."""
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    below = torch.nn.functional.pad(factor.diagonal(-1, dim1=-2, dim2=-1), (0, 1))
    pairs = torch.zeros_like(diagonal, dtype=torch.bool)  # first index of each 2 x 2 block
    for i in range(diagonal.shape[-1] - 1):
        start = (order[..., i] < 0) & (order[..., i] == order[..., i + 1])
        if i:
            start = start & ~pairs[..., i - 1]
        pairs[..., i] = start
    second = torch.nn.functional.pad(pairs[..., :-1], (1, 0))
    beside = torch.nn.functional.pad(diagonal[..., 1:], (0, 1))
    middle, radius = (diagonal + beside) / 2, torch.hypot((diagonal - beside) / 2, below)
    high, low = middle + radius, middle - radius
    large = torch.where(pairs, torch.maximum(high.abs(), low.abs()), diagonal.abs()).masked_fill(second, 0.0)
    small = torch.where(pairs, torch.minimum(high.abs(), low.abs()), diagonal.abs()).masked_fill(second, torch.inf)
    return small.amin(-1) > eps * large.amax(-1)


def _why_singular(
    matrix: torch.Tensor, values: torch.Tensor, singular: torch.Tensor, layout: Layout, eps: float
) -> str:
    p = matrix.shape[-1]
    flat, spectrum = matrix.reshape(-1, p, p)[singular.reshape(-1)], values.reshape(-1, p)[singular.reshape(-1)]
    empty = leaves_at(layout, (flat == 0).all(-1).any(0))
    size = float(spectrum.abs().max())
    extra = max(0.0, -float(spectrum.min())) + eps**0.5 * (size or 1.0)
    where = f"no curvature in {', '.join(repr(name) for name in empty)}; " if empty else ""
    return (
        f"{where}smallest |eigenvalue| {float(spectrum.abs().min()):.2g}; regularization larger by {extra:.2g} would do"
    )
