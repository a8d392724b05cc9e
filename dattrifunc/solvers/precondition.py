"""Preconditioners: symmetric positive definite maps of rows that stand for the inverse of a matrix."""

from __future__ import annotations

import torch

from .rows import Matvec

WRONG = "the preconditioner is not positive definite on what it met"
__all__ = ["PROBES", "WRONG", "Guarded", "by_diagonal", "diagonal_of", "random_signs"]

PROBES = 64


def random_signs(count: int, p: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return [count, p] of +1 and -1 (int64); without a generator, always the same ones."""
    rng = torch.Generator().manual_seed(0) if generator is None else generator
    return 2 * torch.randint(2, (count, p), generator=rng, device=rng.device) - 1


def diagonal_of(matvec: Matvec, lead: tuple[int, ...], signs: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a positive diagonal [*lead, p] for symmetric matrices, its largest entry 1.

    Args:
        matvec: rows [k, *lead, p] -> A rows.
        lead: sizes of the lifted axes.
        signs: probes [m, p]; the entry is the mean of z * A z, or its standard error where that is larger. None = unit
            vectors: exact.
        like: for p (its last axis), dtype and device.

    Negative entries count by their size, entries of 0 as 1: the preconditioner stays positive definite.

    Source: Bekas, Kokiopoulou and Saad (2007), An estimator for the diagonal of a matrix,
        doi:10.1016/j.apnum.2007.01.003.
    """
    p = like.shape[-1]
    probes = torch.eye(p).to(like) if signs is None else signs.to(like)
    rows = probes.reshape(len(probes), *(1,) * len(lead), p).expand(-1, *lead, p)
    # Scaled, so that squares stay in the range of the dtype.
    product = matvec(rows).nan_to_num(0.0, 0.0, 0.0)
    peak = product.abs().amax((0, -1), keepdim=True)
    found = rows * (product / peak.masked_fill(peak == 0, 1.0))
    if signs is None:
        entries = found.sum(0).abs()
    else:
        entries = torch.maximum(found.mean(0).abs(), found.std(0) / len(probes) ** 0.5)
    entries = entries / entries.amax(-1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)
    return entries.masked_fill(entries < torch.finfo(like.dtype).tiny, 1.0)


def by_diagonal(entries: torch.Tensor) -> Matvec:
    """Return rows -> rows / entries."""
    return lambda rows: rows / entries


class Guarded:
    """A preconditioner that is watched: rows -> (M rows, row' M row), times a number per row so that any scale will do.

    Attributes:
        wrong: the rows of the last call at which M is not positive definite, or not finite; their M row is 0.
    """

    def __init__(self, precondition: Matvec) -> None:
        self._precondition = precondition
        self._gauge: torch.Tensor | None = None
        self.wrong = torch.zeros((), dtype=torch.bool)

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return M rows and row' M row."""
        out = self._precondition(rows)
        if self._gauge is None:
            before, after = rows.abs().amax(-1, keepdim=True), out.abs().amax(-1, keepdim=True)
            self._gauge = torch.where((before > 0) & (after > 0) & after.isfinite(), after / before, 1.0)
        out = out / self._gauge
        norm, inner = torch.linalg.vector_norm, torch.linalg.vecdot(rows, out)
        noise = torch.finfo(rows.dtype).eps * norm(rows, dim=-1) * norm(out, dim=-1)
        self.wrong = (rows != 0).any(-1) & ~(inner > noise)
        return torch.where(self.wrong.unsqueeze(-1), 0.0, out), torch.where(self.wrong, 0.0, inner)
