"""Randomised Nystrom approximations C ~ U L U^T from one batched product: as an inverse, and as a preconditioner."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..implicit import Raw
from .info import Status
from .krylov import noise, spectral
from .rows import Matvec, judge_approximation, normalise

__all__ = ["RANK", "Sketch", "by_sketch", "directions", "nystrom_rows", "sketched"]

RANK = 50  # of the preconditioner
_NEGLIGIBLE = 0.1  # negative curvature up to this part of lambda is taken for 0


class Sketch(NamedTuple):
    """U L U^T for matrices [*B, p, p].

    Attributes:
        vectors: U, orthonormal columns [*B, p, r].
        values: the diagonal of L, falling, >= 0 [*B, r], float64.
        lowest: the smallest curvature seen in the sketch where that is clearly negative, else 0 [*B], float64.
        lost: where a product was not finite [*B]; L is 0 there.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    lowest: torch.Tensor
    lost: torch.Tensor

    def spectral(self, factors: torch.Tensor) -> Matvec:
        """Return rows [k, *B, p] -> (I - U U^T) rows + U diag(factors) U^T rows."""
        return spectral(self.vectors, factors)


def directions(rank: int, p: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return an orthonormal Gaussian matrix [p, min(rank, p)], float64; without a generator, always the same one."""
    if rank >= p:  # all of the space: chance would add rounding only
        return torch.eye(p, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0) if generator is None else generator
    drawn = torch.randn(p, rank, generator=rng, device=rng.device, dtype=torch.float64)
    basis: torch.Tensor = torch.linalg.qr(drawn).Q
    return basis


def sketched(product: Matvec, test: torch.Tensor, lead: tuple[int, ...], like: torch.Tensor, eps: float) -> Sketch:
    """Return the Nystrom approximation of symmetric matrices that should be positive semidefinite, by one product.

    Args:
        product: rows [k, *lead, p] -> C rows.
        test: orthonormal columns [p, r], the same for all matrices.
        lead: sizes of the lifted axes.
        like: for dtype and device.
        eps: rounding unit of a product.

    Source: Tropp, Yurtsever, Udell and Cevher (2017), Fixed-rank approximation of a positive-semidefinite matrix from
    streaming data, arXiv:1706.05736, algorithm 3. Differs: (1) nothing is cut from the rank; (2) scaled by the largest
    entry; (3) where Cholesky fails, the positive eigenvalues of test^T C test are used, and the others told.
    """
    p, r = test.shape
    test = test.to(like)
    rows = test.mT.reshape(r, *(1,) * len(lead), p).expand(r, *lead, p)
    image = product(rows).movedim(0, -1)  # [*B, p, r]
    if not r:
        none = torch.zeros(lead, dtype=torch.float64, device=like.device)
        return Sketch(image, none.new_zeros(*lead, 0), none, none.bool())
    lost = ~image.isfinite().all(-1).all(-1)
    image = image.masked_fill(lost[..., None, None], 0.0)
    gauge = image.abs().amax((-2, -1), keepdim=True)
    image = image / gauge.masked_fill(gauge == 0, 1.0)
    size = torch.linalg.matrix_norm(image)
    core = test.mT @ image
    core = (core + core.mT) / 2
    shift = torch.finfo(like.dtype).eps * size[..., None, None]
    lower, failed = torch.linalg.cholesky_ex(core + shift * torch.eye(r).to(like))
    root = torch.linalg.solve_triangular(lower, (image + shift * test).mT, upper=False).mT  # C + shift = root root^T
    values, vectors = torch.linalg.eigh(core)
    small = noise(p, eps) * size
    failed = (failed != 0) | (size == 0)
    kept = values > small.unsqueeze(-1)
    positive = image @ vectors * torch.where(kept, values.where(kept, 1.0).rsqrt(), 0.0).unsqueeze(-2)
    root = torch.where(failed[..., None, None], positive, root)
    basis, singular, _ = torch.linalg.svd(root, full_matrices=False)
    taken = torch.where(failed, 0.0, shift[..., 0, 0]).unsqueeze(-1)
    unit = (singular.double() ** 2 - taken).clamp(min=0.0)
    scale = gauge.squeeze(-1).double()
    lowest = torch.where(values[..., 0] < -small, values[..., 0], 0.0) * scale.squeeze(-1)
    return Sketch(basis, unit * scale, lowest, lost)


def by_sketch(sketch: Sketch, shift: float) -> Matvec:
    """Return rows -> (l_r + lambda) U (L + lambda)^-1 U^T rows + (I - U U^T) rows, positive definite in any case.

    Source: Frangella, Tropp and Udell (2021), Randomized Nystrom preconditioning, arXiv:2110.02820. Differs: lambda is
    no less than the rounding of the largest value, below which nothing keeps the map positive definite.
    """
    values = sketch.values
    if not values.shape[-1]:
        return lambda rows: rows
    floor = noise(sketch.vectors.shape[-2], torch.finfo(sketch.vectors.dtype).eps)
    least = (floor * values[..., :1]).clamp(min=shift)
    return sketch.spectral(torch.where(least > 0, (values[..., -1:] + least) / (values + least), 1.0))


def nystrom_rows(
    sketch: Sketch,
    rows: torch.Tensor,
    *,
    shift: float,
    tol: float,
    eps: float,
    full: Matvec | None,
    notes: list[str],
) -> Raw:
    """Return U (L + lambda)^-1 U^T rows + (I - U U^T) rows / lambda for rows [k, *B, p].

    Args:
        sketch: the approximation of C.
        rows: right-hand sides.
        shift: lambda > 0.
        tol: relative tolerance, for the judgement only.
        eps: rounding unit of a product.
        full: rows -> (C + lambda I) rows, for the true residual; None = not wanted, and the residual is NaN.
        notes: takes what is found out.
    """
    scaled = normalise(rows)
    u = sketch.spectral(shift / (sketch.values + shift))(scaled.unit)  # lambda times the answer
    p, r = sketch.vectors.shape[-2:]
    negative = (-sketch.lowest > _NEGLIGIBLE * shift).expand(u.shape[:-1])
    lost = sketch.lost.expand_as(negative)
    whole = r == p
    status = torch.full(negative.shape, int(Status.STAGNATED if whole else Status.MAX_ITER), device=u.device)
    status = status.masked_fill(negative, int(Status.NEGATIVE_CURVATURE)).masked_fill(lost, int(Status.NONFINITE))
    known = torch.zeros_like(scaled.norm).masked_fill(negative, torch.inf)
    size = 1 + sketch.values.amax(-1).expand_as(known) / shift if r else torch.ones_like(known)
    gauge = torch.full((), shift, dtype=u.dtype, device=u.device)
    steps = torch.zeros_like(status)
    raw = judge_approximation(scaled, u, known.masked_fill(lost, torch.inf), size, status, steps, tol, eps, gauge, full)
    if bool((raw.status == Status.NEGATIVE_CURVATURE).any()):
        lowest = float(sketch.lowest.min())
        enough = -1.01 * lowest / _NEGLIGIBLE
        notes.append(
            f"curvature {lowest:.2g} in the sketch, which takes it for 0; regularization={enough:.3g} "
            "would do, or a product that is positive semidefinite: ggnvp_at_x or fvp_at_x"
        )
    if bool((raw.status == Status.MAX_ITER).any()):
        least = float(sketch.values.amin(-1).max())
        notes.append(
            f"rank {r} of {p} ends at curvature {least:.2g}, lambda is {shift:.2g}; raise rank, or use ihvp_cg"
        )
    return raw
