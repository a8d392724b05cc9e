"""Bases of Krylov spaces with full re-orthogonalisation, for b matrices at once: rows [b, m, p]."""

from __future__ import annotations

import torch

__all__ = ["orthonormal", "outside", "principal"]


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
    rest = outside(unit, basis)[1]
    if x.shape[1] == 1:
        size = torch.linalg.vector_norm(rest, dim=-1)
        kept = size > cut
        rest = rest / size.masked_fill(~kept, 1.0).unsqueeze(-1)
    else:
        squares, turn = torch.linalg.eigh((rest @ rest.mT).double())
        size, turn = squares.clamp(min=0).sqrt().flip(-1)[:, :most], turn.flip(-1)[:, :, :most]
        kept = (size > cut) & (size > threshold * size[:, :1])
        count = int(kept.sum(-1).max()) if kept.numel() else 0
        size, turn, kept = size[:, :count], turn[..., :count], kept[:, :count]
        rest = (turn / size.masked_fill(~kept, 1.0).unsqueeze(1)).to(x.dtype).mT @ rest
    if not bool(kept.any()):
        return x.new_zeros(len(x), 0, x.shape[-1])
    rest = rest.masked_fill(~kept.unsqueeze(-1), 0.0)
    return orthonormal(outside(rest, basis)[1], kept)
