"""Bases of Krylov spaces with full re-orthogonalisation, for b matrices at once: rows [b, m, p]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .rows import Matvec, normalise

__all__ = ["Projection", "noise", "orthonormal", "outside", "principal", "spectral"]

Draw = Callable[[int, int], torch.Tensor]


def noise(p: int, eps: float) -> float:
    """Return which part of the largest curvature is rounding, for p numbers."""
    return max(10.0, math.sqrt(p)) * eps


def spectral(vectors: torch.Tensor, factors: torch.Tensor, complement: torch.Tensor | None = None) -> Matvec:
    """Return rows [k, *B, p] -> U diag(factors) U^T rows + (I - U U^T) rows, U [*B, p, r].

    ``complement`` [*B, 1] says where the last part is wanted; None = everywhere.
    """
    factors = factors.to(vectors.dtype).unsqueeze(-1)

    def apply(rows: torch.Tensor) -> torch.Tensor:
        columns = rows.movedim(0, -1)
        inside = vectors.mT @ columns
        kept: torch.Tensor = vectors @ (factors * inside)
        if complement is None or bool(complement.any()):
            rest = columns - vectors @ inside
            rest = rest - vectors @ (vectors.mT @ rest)  # once more: the first leaves rounding of U U^T
            kept = kept + (rest if complement is None else rest.masked_fill(~complement.unsqueeze(-1), 0.0))
        return kept.movedim(-1, 0)

    return apply


def outside(x: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows x [b, j, p] by an orthonormal basis [b, m, p], twice for the digits: coefficients, and the rest."""
    if not basis.shape[1]:
        return x.new_zeros(*x.shape[:2], 0), x
    inside = x @ basis.mT
    rest = x - inside @ basis
    again = rest @ basis.mT
    return inside + again, rest - again @ basis


def orthonormal(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the first rows of x [b, j, p], those of ``kept`` [b, j]; 0 in the other rows."""
    basis: torch.Tensor = torch.linalg.qr(x.mT).Q.mT
    return basis.masked_fill(~kept.unsqueeze(-1), 0.0)


def principal(x: torch.Tensor, basis: torch.Tensor, threshold: float, most: int, cut: float) -> torch.Tensor:
    """Return the strongest directions of rows x [b, k, p] outside a basis: orthonormal [b, j, p], 0 where fewer.

    Args:
        x: any rows.
        basis: orthonormal rows [b, m, p].
        threshold: directions weaker than this part of the strongest one are left out.
        most: largest j.
        cut: what remains outside the basis counts as nothing below this part of the longest row of x.
    """
    longest = torch.linalg.vector_norm(x, dim=-1).amax(-1)
    unit = x / longest.masked_fill(longest == 0, 1.0)[:, None, None]
    found, kept = _strongest(outside(unit, basis)[1], threshold, most, cut)
    if not bool(kept.any()):
        return x.new_zeros(len(x), 0, x.shape[-1])
    return orthonormal(outside(found, basis)[1], kept)


def _strongest(rest: torch.Tensor, threshold: float, most: int, cut: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the strongest directions of rows [b, k, p] at unit length, 0 where weaker than told, and which are not."""
    if rest.shape[1] == 1:
        size = torch.linalg.vector_norm(rest, dim=-1)
        kept = size > cut
        found = rest / size.masked_fill(~kept, 1.0).unsqueeze(-1)
    else:
        squares, turn = torch.linalg.eigh((rest @ rest.mT).double())
        size, turn = squares.clamp(min=0).sqrt().flip(-1)[:, :most], turn.flip(-1)[:, :, :most]
        kept = (size > cut) & (size > threshold * size[:, :1])
        count = int(kept.sum(-1).max()) if kept.numel() else 0
        size, turn, kept = size[:, :count], turn[..., :count], kept[:, :count]
        found = (turn / size.masked_fill(~kept, 1.0).unsqueeze(1)).to(rest.dtype).mT @ rest
    return found.masked_fill(~kept.unsqueeze(-1), 0.0), kept


class Projection:
    """Spaces of b symmetric matrices A, grown by products: orthonormal rows Q [b, m, p], and H = Q A Q^T.

    H is made of the coefficients that orthogonalisation computes anyway. It is the Rayleigh-Ritz projection whatever
    the rows are: Krylov directions, fresh ones where those have run out, or Ritz vectors that were kept at a restart.

    Args:
        product: rows [b, j, p] -> A rows, at any scale.
        most: largest m.
        like: [b, p], for sizes, dtype and device.

    Attributes:
        size: m.
        largest: the longest A q so far, at most the norm of A [b], float64.
        left: what the last products led to outside Q, over ``largest`` [b, j, p].
        lost: where a product was not finite; it counts as 0 [b].
    """

    def __init__(self, product: Matvec, most: int, like: torch.Tensor) -> None:
        b, p = like.shape
        self._product, self.size, self.most = product, 0, min(most, p)
        self._basis = like.new_zeros(b, self.most, p)
        self._h = torch.zeros(b, self.most, self.most, dtype=torch.float64, device=like.device)
        self.largest = self._h.new_zeros(b)
        self.left = like.new_zeros(b, 1, p)
        self.lost = torch.zeros(b, dtype=torch.bool, device=like.device)

    @property
    def basis(self) -> torch.Tensor:
        """Q [b, m, p]."""
        return self._basis[:, : self.size]

    def add(self, q: torch.Tensor) -> None:
        """Take directions q [b, j, p], orthonormal and outside Q, by one product."""
        new = slice(self.size, self.size + q.shape[1])
        self._basis[:, new] = q
        self.size = new.stop
        image = normalise(self._product(q))
        self.lost |= image.nonfinite.any(-1)
        size = (image.peak.double() * image.norm.double()).masked_fill(image.zero | image.nonfinite, 0.0)
        self.largest = torch.maximum(self.largest, size.amax(-1))
        inside, rest = outside(image.unit, self.basis)
        self._h[:, new, : self.size] = inside.double() * size.unsqueeze(-1)
        part = size / self.largest.masked_fill(self.largest == 0, 1.0).unsqueeze(-1)
        self.left = rest * part.to(rest.dtype).unsqueeze(-1)

    def follow(self, count: int, cut: float, draw: Draw) -> torch.Tensor:
        """Return the next directions [b, count, p]: where A led, and fresh ones in place of what is below ``cut``.

        Args:
            count: at most p - m.
            cut: below this part of the norm of A, there is nothing outside Q: the space is invariant.
            draw: ``draw(m, count)`` -> random rows [count, p], the same for all matrices.
        """
        found, kept = _strongest(self.left, 0.0, count, cut)
        pad = count - found.shape[1]
        found, kept = torch.nn.functional.pad(found, (0, 0, 0, pad)), torch.nn.functional.pad(kept, (0, pad))
        if not bool(kept.all()):
            fresh = draw(self.size, count).to(found).expand_as(found)
            found = torch.where(kept.unsqueeze(-1), found, normalise(outside(fresh, self.basis)[1]).unit)
        if count > 1:  # weak directions of a block were blown up, and what was left of Q in them
            found = outside(found, self.basis)[1]
        return orthonormal(found, torch.ones_like(kept))

    def ritz(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return Ritz values [b, m], rising, Ritz vectors as columns [b, m, m] on Q, and |A y - theta y| [b, m]."""
        values, turn = torch.linalg.eigh(self._h[:, : self.size, : self.size])  # the lower triangles
        last = turn[:, max(self.size - self.left.shape[1], 0) :]
        error = torch.linalg.vector_norm(torch.linalg.qr(self.left.mT.double()).R[..., : last.shape[1]] @ last, dim=-2)
        return values, turn, error * self.largest.unsqueeze(-1)

    def restart(self, values: torch.Tensor, turn: torch.Tensor) -> None:
        """Keep only these Ritz pairs: values [b, c], columns [b, m, c]; what ``left`` holds is where to go on."""
        count = values.shape[-1]
        kept = turn.to(self._basis.dtype).mT @ self.basis
        self._basis[:, :count] = orthonormal(kept, torch.ones_like(kept[..., 0], dtype=torch.bool))
        self._h[:, :count, :count] = torch.diag_embed(values)
        self.size = count
