"""Conjugate gradients for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .precondition import WRONG, Guarded
from .rows import Matvec, attainable, divide, gauge_of, judge, leaves_at, normalise, start_at

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
    start: torch.Tensor | None = None,
    precondition: Matvec | None = None,
) -> Raw:
    """Solve A u = b for each row b of [k, *B, p], A symmetric, by one batched product per iteration.

    Each row has its own scale, tolerance and stop. The iteration goes on through directions of negative curvature (it
    is exact there unless p'Ap vanishes), and the true residual decides. Where the recursive residual meets ``tol``
    and the true one does not, the row restarts from its true residual.

    Source: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044. Differs: (1) rows are normalised first; (2) one mask
    entry per row; (3) restarts on the true residual until it stops falling; (4) a row stops by the norm of its
    residual, with a preconditioner as without.
    """
    scaled = normalise(rows)
    b = scaled.unit
    work, tiny = torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    x, r = start_at(matvec, scaled, start)
    r, near = r.clone(), None if precondition is None else Guarded(precondition)
    rr = torch.linalg.vecdot(r, r)
    p, rz = (r.clone(), rr) if near is None else near(r)
    active = rr > (0.0 if start is None else tol * tol)
    status = torch.full(rr.shape, int(Status.MAX_ITER), device=b.device)
    iterations = torch.zeros(rr.shape, dtype=torch.int64, device=b.device)
    largest = torch.zeros_like(rr)  # of |A p|^2 / |p|^2: what A was seen to do
    lowest = torch.full_like(rr, torch.inf)  # of p'A p / p'p, where not positive
    empty = torch.zeros(b.shape[-1], dtype=torch.bool, device=b.device)  # columns of the null vectors met
    residual, best = torch.full_like(rr, torch.inf), x
    gauge: torch.Tensor | None = None  # [k, *B, 1]: the iteration runs on A / gauge
    unfit, step = torch.zeros_like(active), 0  # rows on which M is not positive definite
    while True:
        if near is not None:
            unfit |= active & near.wrong
            active = active & ~unfit
        while step < max_iter and bool(active.any()):
            step += 1
            ap = matvec(p) if gauge is None else matvec(p) / gauge
            if step == 1 and (gauge := gauge_of(divide(ap, torch.linalg.vector_norm(p, dim=-1)))) is not None:
                ap, x = ap / gauge, x * gauge
            pp, pap, aa = (torch.linalg.vecdot(first, second) for first, second in ((p, p), (p, ap), (ap, ap)))
            growth = aa / pp.clamp(min=tiny)
            largest = torch.maximum(largest, growth)
            iterations += active
            sound = (pap > work * (pp * aa).sqrt()) & (growth > (4 * eps) ** 2 * largest)
            if not bool((sound | ~active).all()):
                broken = active & ~aa.isfinite()
                # A p = 0 to rounding: p is a null vector. Otherwise p'A p = 0 or less: A is indefinite.
                null = active & ~broken & (growth <= (4 * eps) ** 2 * largest)
                lowest = torch.where(active & (pap <= 0), torch.minimum(lowest, pap / pp), lowest)
                flat = active & ~null & ~broken & (pap.abs() <= work * (pp * aa).sqrt())
                status[broken], status[null] = int(Status.NONFINITE), int(Status.SINGULAR)
                status[flat] = int(Status.NEGATIVE_CURVATURE)
                empty |= (p.abs() > 1e-3 * pp.sqrt().unsqueeze(-1))[null].any(0)
                largest, ap = torch.where(broken, 0.0, largest), torch.where(broken.unsqueeze(-1), 0.0, ap)
                active = active & ~(broken | null | flat)
            alpha = torch.where(active, rz / pap, 0.0).unsqueeze(-1)
            x, r = torch.addcmul(x, alpha, p), r.addcmul_(alpha, ap, value=-1)
            rr = torch.linalg.vecdot(r, r)
            z, rz_next = (r, rr) if near is None else near(r)
            beta = torch.where(active, rz_next / rz, 0.0).unsqueeze(-1)
            p, rz = p.mul_(beta).add_(z), rz_next
            if callback is not None:
                callback(step, torch.where(scaled.nonfinite, torch.nan, rr.sqrt()))
            active = active & (rr > max(tol * tol, 0.0))
            if near is not None:
                unfit |= active & near.wrong
                active = active & ~unfit
        # What is left is the truth: recompute, and restart the rows that rounding fooled while that still helps.
        r = b - (matvec(x) if gauge is None else matvec(x / gauge))
        true, size = torch.linalg.vector_norm(r, dim=-1), largest.sqrt()
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
        rr = torch.where(active, true * true, rr)
        p, rz = (r.clone(), rr) if near is None else near(r)
    negative = (lowest <= 0) & (status != Status.SINGULAR) & (status != Status.NONFINITE)
    status[negative] = int(Status.NEGATIVE_CURVATURE)
    if notes is not None and bool(empty.any()):
        notes.append(
            f"no curvature in {', '.join(repr(name) for name in leaves_at(layout, empty))} along a direction met"
        )
    status[unfit] = int(Status.SINGULAR)
    if notes is not None and bool(unfit.any()):
        notes.append(WRONG)
    if gauge is not None:
        lowest = lowest * gauge.squeeze(-1)
    if notes is not None and bool(negative.any()):
        least = float(lowest[negative].min())
        notes.append(
            f"curvature {least:.3g} along a search direction: regularization must grow by more than {-least:.3g}"
        )
    return judge(scaled, best, residual, size, status, iterations, tol, eps, gauge)
