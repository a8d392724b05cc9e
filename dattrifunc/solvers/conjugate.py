"""Conjugate gradients for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status
from .lanczos import lowest_curvature, tell_lowest
from .precondition import WRONG, Guarded
from .rows import Matvec, attainable, divide, gauge_of, goal, judge, leaves_at, normalise, start_at

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
    residual, with a preconditioner as without; (5) a row that makes no progress any more stops, see ``Watch``; (6) on
    negative curvature the smallest eigenvalue is told, see ``tell_lowest``.
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
    dip: torch.Tensor | None = None  # that p, at unit length
    halted = torch.zeros_like(active)  # rows whose p'A p vanished
    empty = torch.zeros(b.shape[-1], dtype=torch.bool, device=b.device)  # columns of the null vectors met
    residual, best = torch.full_like(rr, torch.inf), x
    failures = torch.zeros_like(iterations)  # restarts that brought little
    gauge: torch.Tensor | None = None  # [k, *B, 1]: the iteration runs on A / gauge
    unfit, step = torch.zeros_like(active), 0  # rows on which M is not positive definite
    watch = Watch(b.shape[-1], eps, rr)
    while True:
        watch.begin(step, rr)
        if near is not None:
            unfit |= active & near.wrong
            active = active & ~unfit
        while step < max_iter and bool(active.any()):
            step += 1
            if watch.doubts(step, active, x, rr, largest, lowest):
                iterations += active
                true, active = watch.look(b, x, matvec(x) if gauge is None else matvec(x / gauge), rr, active)
                if callback is not None:
                    callback(step, torch.where(scaled.nonfinite, torch.nan, true))
                continue
            ap = matvec(p) if gauge is None else matvec(p) / gauge
            if step == 1 and (gauge := gauge_of(divide(ap, torch.linalg.vector_norm(p, dim=-1)))) is not None:
                ap, x = ap / gauge, x * gauge
            pp, pap, aa = (torch.linalg.vecdot(first, second) for first, second in ((p, p), (p, ap), (ap, ap)))
            growth = aa / pp.clamp(min=tiny)
            largest = torch.maximum(largest, growth)
            iterations += active
            watch.compare(p, ap, largest)
            sound = (pap > work * (pp * aa).sqrt()) & (growth > (4 * eps) ** 2 * largest)
            if not bool((sound | ~active).all()):
                broken = active & ~aa.isfinite()
                # A p = 0 to rounding: p is a null vector. Otherwise p'A p = 0 or less: A is indefinite.
                null = active & ~broken & (growth <= (4 * eps) ** 2 * largest)
                flat = active & ~null & ~broken & (pap.abs() <= work * (pp * aa).sqrt())
                lower = (active & (pap <= 0) | flat) & (pap / pp < lowest)
                lowest = torch.where(lower, pap / pp, lowest)
                if bool(lower.any()):
                    unit = lower.unsqueeze(-1) / pp.clamp(min=tiny).sqrt().unsqueeze(-1)
                    dip = unit * p if dip is None else torch.where(unit > 0, unit * p, dip)
                halted |= flat
                status[broken], status[null] = int(Status.NONFINITE), int(Status.SINGULAR)
                status[flat] = int(Status.NEGATIVE_CURVATURE)
                empty |= (p.abs() > 1e-3 * pp.sqrt().unsqueeze(-1))[null].any(0)
                largest, ap = torch.where(broken, 0.0, largest), torch.where(broken.unsqueeze(-1), 0.0, ap)
                active = active & ~(broken | null | flat)
            alpha = torch.where(active, rz / pap, 0.0).unsqueeze(-1)
            x, r = torch.addcmul(x, alpha, p), r.addcmul_(alpha, ap, value=-1)
            rr = torch.linalg.vecdot(r, r)
            watch.keep(active, x, rr, largest)
            z, rz_next = (r, rr) if near is None else near(r)
            beta = torch.where(active, rz_next / rz, 0.0).unsqueeze(-1)
            p, rz = p.mul_(beta).add_(z), rz_next
            if callback is not None:
                callback(step, torch.where(scaled.nonfinite, torch.nan, rr.sqrt()))
            active = active & (rr > max(tol * tol, 0.0))
            if near is not None:
                unfit |= active & near.wrong
                active = active & ~unfit
        x = watch.better(x, rr, tol)
        # What is left is the truth: recompute, and restart the rows that rounding fooled while that still helps.
        r = b - (matvec(x) if gauge is None else matvec(x / gauge))
        true, size = torch.linalg.vector_norm(r, dim=-1), largest.sqrt()
        failed = ~true.isfinite()
        better = true < residual
        best = torch.where(better.unsqueeze(-1), x, best)
        status[failed & (status == Status.MAX_ITER)] = int(Status.NONFINITE)
        unmet = (status == Status.MAX_ITER) & (true > goal(x, size, tol, eps))
        fooled = unmet & ((rr <= tol * tol) | watch.fooled)
        failures += true > 0.5 * residual
        stuck = fooled & (failures > watch.fooled.long()) | unmet & watch.idle
        status[stuck] = int(Status.STAGNATED)
        residual = torch.where(better, true, residual)
        active = fooled & ~stuck & ~failed
        if step >= max_iter or not bool(active.any()):
            break
        x = torch.where(active.unsqueeze(-1), x, best)
        rr = torch.where(active, true * true, rr)
        p, rz = (r.clone(), rr) if near is None else near(r)
    if near is not None and bool((lowest < 0).any()):  # preconditioned directions need not have shown how large A is
        ab = matvec(b) if gauge is None else matvec(b) / gauge
        largest = torch.maximum(largest, torch.linalg.vecdot(ab, ab).nan_to_num(0.0, 0.0, 0.0))
    # Closer to 0 than rounding, an eigenvalue has no sign.
    below = -10 * eps * largest.sqrt()
    halted &= lowest >= below
    if dip is not None and bool(halted.any()):  # p'A p = 0, and A p is not: span(p, A p) holds negative curvature
        least, _ = lowest_curvature(matvec, dip.masked_fill(~halted.unsqueeze(-1), 0.0), eps, most=2)
        lowest = torch.minimum(lowest, (least if gauge is None else least / gauge.squeeze(-1)).to(lowest))
    negative = (lowest < below) & ~watch.twisted
    negative &= (status != Status.SINGULAR) & (status != Status.NONFINITE)
    status[status == Status.NEGATIVE_CURVATURE] = int(Status.STAGNATED)
    status[negative] = int(Status.NEGATIVE_CURVATURE)
    if notes is not None and bool(empty.any()):
        notes.append(
            f"no curvature in {', '.join(repr(name) for name in leaves_at(layout, empty))} along a direction met"
        )
    status[unfit] = int(Status.SINGULAR)
    if notes is not None and bool(unfit.any()):
        notes.append(WRONG)
    if notes is not None and bool((watch.twisted & (status == Status.STAGNATED)).any()):
        notes.append(f"x'A p and p'A x differ by {watch.twist:.1e} of |A| |x| |p|: the product is not symmetric")
    if notes is not None and dip is not None and bool(negative.any()):
        curvature = (lowest if gauge is None else lowest * gauge.squeeze(-1)).masked_fill(~negative, torch.inf)
        notes.append(tell_lowest(matvec, dip, curvature, eps)[1])
    return judge(scaled, best, residual, size, status, iterations, tol, eps, gauge)


# ---------------------------------------------------------------------------------------------------------------------
# rows that make no progress


class Watch:
    """Says which rows make no progress any more, at a product now and then (one step in five at most, few in all).

    A row is looked at, by its true residual, where its recursive one has fallen below what rounding lets the true one
    reach, 0.1 eps |A| |x|, or has not fallen for long: CG may be on a plateau for p steps, and for a few p where
    rounding spoils conjugacy, so that long is counted in p.

    Args:
        p: numbers in a row.
        eps: rounding unit of a product.
        rr: |r|^2 of every row, for shape.

    Attributes:
        fooled: rows whose true residual is more than twice the recursive one, that no step can lower any more.
        idle: rows to give up: no new least residual for 5 p + 50 steps; for 2 p + 200 where A is indefinite; for
            p + 50 where A is not symmetric, or where a residual that rounding allows has been met.
        twisted: rows on which A was seen not to be symmetric: |x'A p - p'A x| > sqrt(eps) |A| |x| |p|.
        twist: by how much, at most.
    """

    def __init__(self, p: int, eps: float, rr: torch.Tensor) -> None:
        self._p, self._eps = p, eps
        self.fooled = self.idle = self.twisted = torch.zeros_like(rr, dtype=torch.bool)
        self.twist = 0.0
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None  # x and A x of the last look
        self.begin(0, rr)

    def begin(self, step: int, rr: torch.Tensor) -> None:
        """Start a run of the recursion after ``step`` steps."""
        self._least = self._before = rr
        self._kept: torch.Tensor | None = None  # x where rr was least, and as small as rounding allows
        self._kept_rr = torch.full_like(rr, torch.inf)
        self._since = torch.full_like(rr, step, dtype=torch.int64)
        self._start, self._due = step, step + 8
        self._seen = None
        self.fooled = torch.zeros_like(self.fooled)

    def doubts(
        self,
        step: int,
        active: torch.Tensor,
        x: torch.Tensor,
        rr: torch.Tensor,
        largest: torch.Tensor,
        lowest: torch.Tensor,
    ) -> bool:
        """Say whether a product with x is worth it now."""
        self._least = torch.minimum(self._least, rr)
        if step % 8:
            return False
        self._since.masked_fill_(self._least < self._before, step)
        self._before = self._least
        if step < self._due or self._seen is not None:
            return False
        waited = step - self._since
        self.idle = self.idle | active & (
            (waited > 5 * self._p + 50)
            | (waited > 2 * self._p + 200) & (lowest <= 0)
            | (waited > self._p + 50) & (self.twisted | self._kept_rr.isfinite())
        )
        floor = 0.1 * self._eps * largest.sqrt() * torch.linalg.vector_norm(x, dim=-1)
        self._low = active & (rr.sqrt() < floor)
        return bool((active & (self._low | self.idle | (waited > self._p + 50))).any())

    def keep(self, active: torch.Tensor, x: torch.Tensor, rr: torch.Tensor, largest: torch.Tensor) -> None:
        """Keep x where it is as good as rounding allows, and better than before: it may be spoilt by further steps."""
        if not bool((rr < self._eps).any()):
            return
        good = active & (rr < self._eps) & (rr < self._kept_rr)
        if not bool(good.any()):
            return
        good &= rr.sqrt() <= attainable(x, largest.sqrt(), self._eps)
        self._kept = torch.where(good.unsqueeze(-1), x, x if self._kept is None else self._kept)
        self._kept_rr = torch.where(good, rr, self._kept_rr)

    def better(self, x: torch.Tensor, rr: torch.Tensor, tol: float) -> torch.Tensor:
        """Return x, or what was kept where ``tol`` has not been met since."""
        if self._kept is None:
            return x
        return torch.where(((rr > tol * tol) & (self._kept_rr < rr)).unsqueeze(-1), self._kept, x)

    def look(
        self, b: torch.Tensor, x: torch.Tensor, ax: torch.Tensor, rr: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take A x in; return the true residuals, and the rows that go on."""
        self._due += max(8, (self._due - self._start) // 4)
        self._seen = x, ax
        true = torch.linalg.vector_norm(b - ax, dim=-1)
        self.fooled = self.fooled | self._low & ~(true <= 2 * rr.sqrt())
        return true, active & ~self.fooled & ~self.idle

    def compare(self, p: torch.Tensor, ap: torch.Tensor, largest: torch.Tensor) -> None:
        """Compare what A does to p with what it did to x at the last look."""
        if self._seen is None:
            return
        (x, ax), self._seen = self._seen, None
        norm = torch.linalg.vector_norm
        apart = (torch.linalg.vecdot(x, ap) - torch.linalg.vecdot(p, ax)).abs()
        whole = largest.sqrt() * norm(x, dim=-1) * norm(p, dim=-1)
        twisted = apart > self._eps**0.5 * whole
        self.twisted = self.twisted | twisted
        if bool(twisted.any()):
            self.twist = max(self.twist, float((apart / whole)[twisted].max()))
