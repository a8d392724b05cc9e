"""Conjugate gradients for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .rows import Matvec, attainable, judge, leaves_at, normalise

__all__ = ["cg_rows"]


def cg_rows(
    matvec: Matvec,
    rows: torch.Tensor,
    *,
    tol: float,
    max_iter: int,
    eps: float,
    layout: Layout,
    callback: Callable[[int, torch.Tensor], None] | None = None,
    notes: list[str] | None = None,
) -> Raw:
    """Solve A u = b for each row b of [k, *B, p], A symmetric, by one batched product per iteration.

    Each row has its own scale, tolerance and stop. The iteration goes on through directions of negative curvature (it
    is exact there unless p'Ap vanishes), and the true residual decides. Where the recursive residual meets ``tol``
    and the true one does not, the row restarts from its true residual.

    Source: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044. Differs: (1) rows are normalised first; (2) one mask
    entry per row; (3) restarts on the true residual until it stops falling.
    """
    scaled = normalise(rows)
    b = scaled.unit
    work = torch.finfo(b.dtype).eps
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    rr = (r * r).sum(-1)
    active = rr > 0
    size, lowest = torch.zeros_like(rr), torch.full_like(rr, torch.inf)
    status = torch.full(rr.shape, int(Status.MAX_ITER), device=b.device)
    iterations = torch.zeros(rr.shape, dtype=torch.int64, device=b.device)
    residual, best = torch.full_like(rr, torch.inf), x
    empty = torch.zeros(b.shape[-1], dtype=torch.bool, device=b.device)  # columns of the null vectors met
    step = 0
    while True:
        while step < max_iter and bool(active.any()):
            step += 1
            ap = matvec(p)
            pp, pap = (p * p).sum(-1), (p * ap).sum(-1)
            p_norm, ap_norm = pp.sqrt(), torch.linalg.vector_norm(ap, dim=-1)
            broken = active & ~ap_norm.isfinite()
            status[broken] = int(Status.NONFINITE)
            active = active & ~broken
            iterations += active
            growth = torch.where(active, ap_norm / p_norm, 0.0)
            size = torch.maximum(size, growth)
            lowest = torch.where(active, torch.minimum(lowest, pap / pp), lowest)
            # p'Ap = 0: the step is undefined. A p = 0 to rounding: p is a null vector; otherwise A is indefinite.
            null = active & (growth <= 4 * eps * size)
            flat = active & ~null & (pap.abs() <= work * p_norm * ap_norm)
            empty |= (p.abs() > 1e-3 * p_norm.unsqueeze(-1))[null].any(0)
            status[null], status[flat] = int(Status.SINGULAR), int(Status.NEGATIVE_CURVATURE)
            active = active & ~null & ~flat
            alpha = torch.where(active, rr / pap, 0.0).unsqueeze(-1)
            x = x + alpha * p
            r = torch.where(active.unsqueeze(-1), r - alpha * ap, r)
            rr_next = (r * r).sum(-1)
            active = active & rr_next.isfinite()
            beta = torch.where(active, rr_next / rr, 0.0).unsqueeze(-1)
            p = torch.where(active.unsqueeze(-1), r + beta * p, p)
            rr = torch.where(active, rr_next, rr)
            if callback is not None:
                callback(step, torch.where(scaled.nonfinite, torch.nan, rr.sqrt()))
            active = active & (rr > tol * tol) & (rr > 0)
        # What is left is the truth: recompute, and restart the rows that rounding fooled while that still helps.
        r = b - matvec(x)
        true = torch.linalg.vector_norm(r, dim=-1)
        failed = ~true.isfinite()
        better = true < residual
        best = torch.where(better.unsqueeze(-1), x, best)
        status[failed & (status == Status.MAX_ITER)] = int(Status.NONFINITE)
        fooled = (status == Status.MAX_ITER) & (true > attainable(x, size, eps).clamp(min=tol)) & (rr <= tol * tol)
        stuck = fooled & (true > 0.5 * residual)
        status[stuck] = int(Status.STAGNATED)
        residual = torch.where(better, true, residual)
        active = fooled & ~stuck & ~failed
        if step >= max_iter or not bool(active.any()):
            break
        x = torch.where(active.unsqueeze(-1), x, best)
        p, rr = r.clone(), torch.where(active, true * true, rr)
    negative = (lowest <= 0) & (status != Status.SINGULAR) & (status != Status.NONFINITE)
    status[negative] = int(Status.NEGATIVE_CURVATURE)
    if notes is not None and bool(empty.any()):
        notes.append(
            f"no curvature in {', '.join(repr(name) for name in leaves_at(layout, empty))} along a direction met"
        )
    if notes is not None and bool(negative.any()):
        least = float(lowest[negative].min())
        notes.append(
            f"curvature {least:.3g} along a search direction: regularization must grow by more than {-least:.3g}"
        )
    return judge(scaled, best, residual, size, status, iterations, tol, eps)
