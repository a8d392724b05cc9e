"""Solves through a dense factor, made once: Cholesky, LDL^T if indefinite, eigenvalues if singular."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import message
from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .krylov import noise
from .rows import judge, leaves_at, normalise

__all__ = ["Factor", "check_symmetric", "cholesky_solve", "factorise", "matrix_of", "refined", "require_finite"]

Matvec = Callable[[torch.Tensor], torch.Tensor]


def matrix_of(matvec: Matvec, layout: Layout, lead: tuple[int, ...], like: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the dense symmetric matrices [*lead, p, p] behind rows [k, *lead, p] -> products.

    Raises:
        ValueError: an entry is not finite; the message names the leaves.
    """
    p = layout.size
    eye = torch.eye(p, dtype=like.dtype, device=like.device)
    rows = eye.reshape(p, *(1,) * len(lead), p).expand(p, *lead, p)
    matrix = matvec(rows).movedim(0, -2)
    require_finite(matrix, layout, "func", "finite curvature")
    check_symmetric(matrix, eps, "matvec")
    return (matrix + matrix.mT) / 2


def require_finite(values: torch.Tensor, layout: Layout, argument: str, expected: str) -> None:
    """Raise ValueError, with the names of the leaves, unless all values [..., p] are finite."""
    finite = values.isfinite()
    if bool(finite.all()):
        return
    leaves = ", ".join(repr(name) for name in leaves_at(layout, ~finite.reshape(-1, layout.size).all(0)))
    fix = "look for log(0), norm(0) or overflow in the loss, and for NaN or inf in the data"
    raise ValueError(message(argument, expected, f"{int((~finite).sum())} NaN or inf entries in {leaves}", fix))


def refined(
    inverse: Callable[[torch.Tensor], torch.Tensor],
    product: Callable[[torch.Tensor], torch.Tensor],
    columns: torch.Tensor,
    steps: int,
    enough: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return solutions of columns [*B, p, k] after steps of iterative refinement, and their residual norms [k, *B].

    A step is kept for the columns it brings closer; no more are taken when none is, or all are within ``enough``.
    """
    norm = torch.linalg.vector_norm
    u = inverse(columns)
    left = columns - product(u)
    for _ in range(steps):
        if bool((norm(left, dim=-2) <= enough).all()):
            break
        better = u + inverse(left)
        left_after = columns - product(better)
        gain = (norm(left_after, dim=-2) < norm(left, dim=-2)).unsqueeze(-2)
        u, left = torch.where(gain, better, u), torch.where(gain, left_after, left)
        if not bool(gain.any()):
            break
    return u, norm(left, dim=-2).movedim(-1, 0)


def check_symmetric(matrix: torch.Tensor, eps: float, argument: str) -> None:
    """Raise ValueError unless matrices [..., p, p] are symmetric to half the digits."""
    skew = (matrix - matrix.mT).abs()
    if skew.numel() and bool((skew.amax((-2, -1)) > eps**0.5 * matrix.abs().amax((-2, -1))).any()):
        worst = float(skew.max() / matrix.abs().max())
        fix = "pass a symmetric matrix or product; for others use torch.linalg.solve"
        got = f"one that differs from its transpose by {worst:.1e}"
        raise ValueError(message(argument, "a symmetric matrix", got, fix))


@dataclass(frozen=True)
class Factor:
    """A symmetric matrix [*B, p, p], factored; ``solve`` takes rows [k, *B, p].

    Attributes:
        matrix: C + lambda I.
        gauge: its largest entry, per matrix [*B, 1, 1]; what is factored is matrix / gauge.
        kind: "cholesky", "ldl" or "eigenvalues" (the last where the matrix is singular to working precision).
        singular: per matrix [*B].
        reason: in words, where it is singular: which leaves have no curvature, and the lambda that would do.
    """

    matrix: torch.Tensor
    gauge: torch.Tensor
    kind: str
    singular: torch.Tensor
    reason: str
    apply: Callable[[torch.Tensor], torch.Tensor]

    def solve(self, rows: torch.Tensor, tol: float, eps: float) -> Raw:
        """Return the solutions of all rows, with one step of refinement, judged by the residual on the matrix."""
        scaled = normalise(rows)
        columns = scaled.unit.movedim(0, -1)  # [*B, p, k]
        matrix = self.matrix / self.gauge
        u, residual = refined(self.apply, lambda columns: matrix @ columns, columns, steps=1)
        size = torch.linalg.matrix_norm(matrix).expand_as(residual)
        singular = self.singular.expand_as(residual)
        status = torch.where(singular, int(Status.SINGULAR), int(Status.STAGNATED))
        iterations = torch.zeros_like(status)
        gauge = self.gauge.squeeze(-1)
        raw = judge(scaled, u.movedim(-1, 0), residual, size, status, iterations, tol, eps, gauge)
        # A singular matrix has no inverse: said even where v lies in its range and the least-norm u solves the system.
        flagged = singular & (raw.status == Status.CONVERGED) & ~scaled.zero
        return raw._replace(status=raw.status.masked_fill(flagged, int(Status.SINGULAR)))


def factorise(matrix: torch.Tensor, layout: Layout, eps: float) -> Factor:
    """Factor symmetric matrices [*B, p, p].

    Cholesky where positive definite; Bunch-Kaufman LDL^T where indefinite; where inverse iteration says singular,
    eigenvalues decide, and those below max(10, sqrt(p)) eps max|eigenvalue| are left out (least-norm answer).

    Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, chapters 10 and 11,
        doi:10.1137/1.9780898718027.
    """
    none = torch.zeros(matrix.shape[:-2], dtype=torch.bool, device=matrix.device)
    gauge = torch.ones(*matrix.shape[:-2], 1, 1, dtype=matrix.dtype, device=matrix.device)
    if matrix.shape[-1] == 0:
        return Factor(matrix, gauge, "cholesky", none, "", lambda columns: columns)
    gauge = matrix.abs().amax((-2, -1), keepdim=True)
    gauge = gauge.masked_fill(gauge == 0, 1.0)
    unit = matrix / gauge  # so that no norm leaves the range of the dtype
    make = functools.partial(Factor, matrix, gauge)
    cut = noise(matrix.shape[-1], eps)
    lower, failed = torch.linalg.cholesky_ex(unit)
    cholesky = functools.partial(cholesky_solve, lower)
    if not bool(failed.any()) and _regular(unit, cholesky, cut):
        return make("cholesky", none, "", cholesky)
    if bool(failed.any()):
        packed, order, failed = torch.linalg.ldl_factor_ex(unit)
        ldl = functools.partial(torch.linalg.ldl_solve, packed, order)
        if not bool(failed.any()) and _regular(unit, ldl, cut):
            return make("ldl", none, "", ldl)
    values, vectors = torch.linalg.eigh(unit)
    kept = values.abs() > cut * values.abs().amax(-1, keepdim=True)
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0).unsqueeze(-1)
    singular = ~kept.all(-1)
    reason = _why_singular(matrix, values * gauge.squeeze(-1), singular, layout, eps) if bool(singular.any()) else ""
    return make("eigenvalues", singular, reason, lambda columns: vectors @ (inverse * (vectors.mT @ columns)))


def cholesky_solve(lower: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return A^-1 columns for A = lower lower^T."""
    return torch.cholesky_solve(columns, lower)


def _regular(matrix: torch.Tensor, inverse: Callable[[torch.Tensor], torch.Tensor], cut: float) -> bool:
    """Say whether no matrix is singular: 1 / |A^-1| by three steps of inverse iteration, beside |A|."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(matrix.shape[-1], 1, generator=rng, dtype=torch.float64).to(matrix)
    x = x.expand(*matrix.shape[:-1], 1)
    for _ in range(3):
        x = inverse(x / torch.linalg.vector_norm(x, dim=-2, keepdim=True))
    growth = torch.linalg.vector_norm(x, dim=-2).squeeze(-1) * torch.linalg.matrix_norm(matrix, ord=torch.inf)
    return bool((growth * cut < 1).all())  # NaN or inf, from a zero pivot, is not


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
