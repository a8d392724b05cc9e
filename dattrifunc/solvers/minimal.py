"""Minimal residuals, for symmetric systems that may be indefinite or singular, for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .precondition import WRONG, Guarded
from .rows import Matvec, attainable, divide, gauge_of, goal, judge, leaves_at, normalise, start_at

__all__ = ["minres_rows"]


def minres_rows(
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
    """Minimise |b - A u| over Krylov spaces for each row b of [k, *B, p], A symmetric, one batched product per step.

    Where A is singular and b in its range, u is the solution of least length. Where b is not in the range, u is the
    least-squares solution of least length, A (b - A u) = 0, and its row is SINGULAR.

    Source: Paige and Saunders (1975), Solution of sparse indefinite systems of linear equations, doi:10.1137/0712047.
    Differs: (1) rows are normalised first, A is scaled; (2) one mask entry per row; (3) a small |A r| / (|A| |r|) stops
    no row: curvature that is merely small would pass for none. Where there is none, u outgrows what rounding allows,
    the row stops, and u is taken from where |A r| was least; (4) both claims are checked on products with u at the
    end, and rows that rounding fooled restart from there while that helps; (5) the least-squares solution loses its
    part along r, which lies in the null space (Liu, Milzarek and Roosta, 2023, arXiv:2309.17096).
    """
    scaled = normalise(rows)
    b = scaled.unit
    norm, tiny, root = torch.linalg.vector_norm, torch.finfo(b.dtype).tiny, eps**0.5
    x, r = start_at(matvec, scaled, start)
    near = None if precondition is None else Guarded(precondition)
    best = x
    length = residual = norm(r, dim=-1)
    zero = torch.zeros_like(length)
    size, sharpest = zero, torch.full_like(zero, torch.inf)
    status = torch.full(length.shape, int(Status.MAX_ITER), device=b.device)
    iterations = torch.zeros_like(status)
    remainder = torch.zeros_like(b)  # what lies outside the range
    gauge: torch.Tensor | None = None  # [k, *B, 1]: the iteration runs on A / gauge
    unfit = torch.zeros_like(status, dtype=torch.bool)  # where M is not positive definite
    active, step = length > (0.0 if start is None else tol), 0
    while True:
        # One run of the Lanczos process from r: A Q = Q T, T tridiagonal, and its QR factors by rotations (c, s).
        # With M, d = M q are the directions and |r| is taken from r, which is carried along; without, d = q.
        phi, d, kept = length, r, r
        if near is not None:
            d, inner = near(r)
            phi = inner.sqrt()
            unfit = unfit | active & near.wrong
            active = active & ~unfit
        q, q_old = divide(r, phi), torch.zeros_like(b)
        d = q if near is None else divide(d, phi)
        w = w_old = torch.zeros_like(b)
        beta, c, s, delta_bar, epsilon, pace = zero, zero - 1, zero, zero, zero, zero
        flatness, x_flat = torch.full_like(zero, eps**0.25), x  # where |A r| was least: its size beside |A| |r|, and x
        grown = size * norm(x, dim=-1)
        outgrown = done = torch.zeros_like(active)
        earlier = (zero + torch.inf, length)  # |r| two steps ago, and one
        while step < max_iter and bool(active.any()):
            step += 1
            aq = matvec(d) if gauge is None else matvec(d) / gauge
            if step == 1 and (gauge := gauge_of(divide(aq, norm(d, dim=-1)))) is not None:
                aq, x, x_flat, best = aq / gauge, x * gauge, x * gauge, x * gauge
            growth = norm(aq, dim=-1) if near is None else norm(aq, dim=-1) / norm(d, dim=-1).clamp(min=tiny)
            broken = active & ~growth.isfinite()
            if bool(broken.any()):
                status[broken], active = int(Status.NONFINITE), active & ~broken
                aq, growth = torch.where(broken.unsqueeze(-1), 0.0, aq), torch.where(broken, 0.0, growth)
            iterations += active
            size = torch.maximum(size, growth)
            alpha = torch.linalg.vecdot(d, aq)
            q_next = aq.addcmul(alpha.unsqueeze(-1), q, value=-1).addcmul_(beta.unsqueeze(-1), q_old, value=-1)
            beta_old, beta, d_next = beta, norm(q_next, dim=-1), q_next
            if near is not None:
                d_next, inner = near(q_next)
                unfit = unfit | (active & near.wrong & (beta > 4 * eps * norm(aq, dim=-1)))
                active = active & ~unfit
                beta = inner.sqrt()
            # |A| as T shows it; with M, of A between its roots.
            pace = torch.maximum(pace, torch.hypot(torch.hypot(alpha, beta_old), beta))
            beta = torch.where(beta > 4 * eps * pace, beta, 0.0)  # otherwise the Krylov space is exhausted
            # The rotations so far, applied to the new column of T.
            epsilon_old, delta, gamma_bar = epsilon, c * delta_bar + s * alpha, s * delta_bar - c * alpha
            epsilon, delta_bar = s * beta, -c * beta
            # |A r| / (|A| |r|) before this step, no better than rounding lets it be.
            slope = torch.hypot(gamma_bar, delta_bar) / pace.clamp(min=tiny) + eps * grown
            flatter = active & (slope < flatness)
            if bool(flatter.any()):
                flatness = torch.where(flatter, slope, flatness)
                x_flat = torch.where(flatter.unsqueeze(-1), x, x_flat)
            # The new rotation, and the step along w.
            gamma = torch.hypot(gamma_bar, beta).clamp(min=tiny)
            c, s = gamma_bar / gamma, beta / gamma
            tau, phi = c * phi, s * phi
            w_next = d.addcmul(epsilon_old.unsqueeze(-1), w_old, value=-1).addcmul_(delta.unsqueeze(-1), w, value=-1)
            w, w_old = w_next / gamma.unsqueeze(-1), w
            x_next = x.addcmul(tau.unsqueeze(-1), w)
            grown = size * norm(x_next, dim=-1)
            outgrown = outgrown | active & ~(grown < eps**-0.75)
            active = active & ~outgrown
            q, q_old = divide(q_next, beta), q
            d = q if near is None else divide(d_next, beta)
            if near is not None:
                kept = (s * s).unsqueeze(-1) * kept - (phi * c).unsqueeze(-1) * q
            x = torch.where(active.unsqueeze(-1), x_next, x)
            length = torch.where(active, phi if near is None else norm(kept, dim=-1), length)
            if callback is not None:
                callback(step, torch.where(scaled.nonfinite, torch.nan, length))
            # Good enough; or, for a tol that rounding never allows, as good as it does, and two steps gained nothing.
            done = length <= tol
            if tol < 10 * eps:
                done = done | (length <= (3 * eps * (1 + grown)).clamp(max=root)) & (length > 0.9 * earlier[0])
            active, earlier = active & ~done, (earlier[1], length)
        # What is left is the truth: recompute, and restart the rows that rounding fooled while that still helps.
        flat, before = flatness < root, residual
        strayed = outgrown | (flatness < eps**0.25)  # x may be long for a tiny gain
        for candidate in (x_flat, x) if bool(strayed.any()) else (x,):
            left = b - (matvec(candidate) if gauge is None else matvec(candidate / gauge))
            true = norm(left, dim=-1)
            status[~true.isfinite() & (status == Status.MAX_ITER)] = int(Status.NONFINITE)
            better = true < torch.where(strayed, 0.9, 1.0) * residual if candidate is x else true < residual
            best, r = (torch.where(better.unsqueeze(-1), a, z) for a, z in ((candidate, best), (left, r)))
            residual = torch.where(better, true, residual)
        unmet = (status == Status.MAX_ITER) & (residual > attainable(best, size, eps).clamp(min=tol))
        status[unmet & unfit], unmet = int(Status.SINGULAR), unmet & ~unfit
        ended = unmet & (done | flat | outgrown)
        fooled = (status == Status.MAX_ITER) & done & ~unfit & (residual > goal(best, size, tol, eps))
        sharper = torch.zeros_like(ended)
        if bool((ended & (flat | outgrown)).any()):
            along = divide(r, residual)
            a_along = matvec(along) if gauge is None else matvec(along) / gauge
            slope = norm(a_along, dim=-1) / size.clamp(min=tiny)
            apart = ended & (slope <= root)
            status[apart] = int(Status.SINGULAR)
            part = torch.linalg.vecdot(best, along).unsqueeze(-1)
            true = norm(r.addcmul(part, a_along), dim=-1)
            lifted = apart & (true <= 1.01 * residual)
            best = torch.where(lifted.unsqueeze(-1), best.addcmul(part, along, value=-1), best)
            residual = torch.where(lifted, true, residual)
            remainder = torch.where(apart.unsqueeze(-1), along, remainder)
            ended, sharper, sharpest = ended & ~apart, slope < 0.5 * sharpest, torch.minimum(sharpest, slope)
        active = (ended | fooled & (status == Status.MAX_ITER)) & ((residual <= 0.5 * before) | sharper)
        status[ended & ~active] = int(Status.STAGNATED)
        if step >= max_iter or not bool(active.any()):
            break
        x, length = best, residual
        if near is not None and bool((flat | outgrown).any()):
            near = None  # M changes what least squares means: outside the range, on without it
    if notes is not None and precondition is not None and bool(unfit.any()):
        notes.append(WRONG)
    if notes is not None and bool((status == Status.SINGULAR).logical_and(~unfit).any()):
        empty = (remainder.abs() > 1e-3).reshape(-1, b.shape[-1]).any(0)
        names = ", ".join(repr(name) for name in leaves_at(layout, empty))
        notes.append(f"v is not in the range: no curvature in {names} along what is left of it")
    return judge(scaled, best, residual, size, status, iterations, tol, eps, gauge)
