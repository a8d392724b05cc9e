"""Minimal residuals over a block Krylov space that all right-hand sides share: few products, each used by every row."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..implicit import Raw
from ..tree import Layout
from .info import Status, told_indefinite
from .krylov import noise, outside, principal
from .precondition import WRONG, Guarded, random_signs
from .rows import Matvec, attainable, gauge_of, judge, leaves_at, normalise, start_at

__all__ = ["NUMBERS", "block_rows", "fits"]

_THRESHOLD = 0.45  # directions of a block that are this much weaker than its strongest one wait for the next block
NUMBERS = 1 << 27  # most numbers that the two bases hold, where that leaves room for 8 blocks


def fits(k: int, p: int) -> bool:
    """Say whether 8 blocks of k directions are held without a restart."""
    return 2 * p * min(8 * k, p) <= NUMBERS


class _Space:
    """Bases of a space K and of A K, for b matrices at once: Q and Z with orthonormal rows, A Q = a Z.

    ``a`` is lower triangular. A direction that A takes to what is there already is null: its row of Z is 0, and it
    serves only to keep later directions orthogonal.
    """

    def __init__(self, rows: torch.Tensor, most: int) -> None:
        b, k, p = rows.shape
        self.size, self.most = 0, min(most, p)
        self._q = self._z = rows.new_zeros(b, 0, p)
        self._a = torch.zeros(b, 0, 0, dtype=torch.float64, device=rows.device)
        self._taken = self._a.new_zeros(b, k, 0)
        self._null = torch.zeros(b, 0, dtype=torch.bool, device=rows.device)

    @property
    def q(self) -> torch.Tensor:
        """Q [b, m, p]."""
        return self._q[:, : self.size]

    @property
    def z(self) -> torch.Tensor:
        """Z [b, m, p]."""
        return self._z[:, : self.size]

    @property
    def null(self) -> torch.Tensor:
        """Which directions are null [b, m]."""
        return self._null[:, : self.size]

    def add(self, w: torch.Tensor, aw: torch.Tensor, cut: torch.Tensor) -> None:
        """Take directions w [b, j, p], orthonormal and outside Q (or 0), and aw = A w; below ``cut`` [b], A w is 0."""
        j, m = w.shape[1], self.size
        first, rest = outside(aw, self.z)
        v, upper = torch.linalg.qr(rest.mT.double())  # in float32 its error would be the largest of all
        v, lower, first = v.mT.to(w.dtype), upper.mT, first.double()  # rest = lower v
        absent = (w == 0).all(-1)
        apart = 4 * j * (1 + torch.linalg.matrix_norm(lower))  # keeps rows that are not there from mixing with others
        turn, s, back = torch.linalg.svd(lower + torch.diag_embed(absent * apart.unsqueeze(-1)))
        null = (s <= cut.unsqueeze(-1)) | (s > 2 * j * (1 + torch.linalg.matrix_norm(lower)).unsqueeze(-1))
        if bool(null.any()):  # turn the block, so that null directions stand alone
            turn = turn.mT
            w, first = turn.to(w.dtype) @ w, turn @ first
            v, lower = (back.to(w.dtype) @ v).masked_fill(null.unsqueeze(-1), 0.0), torch.diag_embed(s)
        self._grow(j)
        new = slice(m, m + j)
        self._q[:, new], self._z[:, new], self._null[:, new] = w, v, null
        self._a[:, new, :m], self._a[:, new, new] = first, lower
        self.size = m + j

    def _grow(self, count: int) -> None:
        held, needed = self._q.shape[1], self.size + count
        if needed <= held:
            return
        room, pad = max(needed, min(2 * held, self.most)) - held, torch.nn.functional.pad
        self._q, self._z = pad(self._q, (0, 0, 0, room)), pad(self._z, (0, 0, 0, room))
        self._a, self._taken = pad(self._a, (0, room, 0, room)), pad(self._taken, (0, room))
        self._null = pad(self._null, (0, room))

    def take(self, r: torch.Tensor, start: int) -> torch.Tensor:
        """Return r without its part in Z[start:], which the solution takes over."""
        z = self.z[:, start:]
        part = r @ z.mT
        self._taken[:, :, start : self.size] += part
        return r - part @ z

    def solution(self) -> torch.Tensor:
        """Return the u in K, without null vectors of A, for which A u is what was taken: [b, k, p]."""
        a, taken, null, q = self._a[:, : self.size, : self.size], self._taken[..., : self.size], self.null, self.q
        if not bool(null.any()):
            return _combined(torch.linalg.solve_triangular(a, taken, upper=False, left=False), q)
        # q_i - (a_i / a) q is a null vector for a null i; of those that are solutions, the shortest.
        eye = torch.eye(self.size, dtype=a.dtype, device=a.device)
        solve = torch.where(null.unsqueeze(-1), eye, a)
        weights = torch.linalg.solve_triangular(solve, taken, upper=False, left=False)
        others = torch.where(null.unsqueeze(-1), a * ~null.unsqueeze(1), 0.0)
        vectors = eye * null.unsqueeze(-1) - torch.linalg.solve_triangular(solve, others, upper=False, left=False)
        gram = torch.linalg.pinv(vectors @ vectors.mT, hermitian=True)
        return _combined(weights - weights @ vectors.mT @ gram @ vectors, q)

    def times(self, r: torch.Tensor) -> torch.Tensor:
        """Return A times the part of r in K."""
        inside = (r @ self.q.mT).double() @ self._a[:, : self.size, : self.size]
        return inside.to(r.dtype) @ self.z

    def least(self) -> torch.Tensor:
        """Return the least Ritz value of A in K, [b]."""
        if not self.size:
            return torch.zeros(len(self._q), dtype=torch.float64, device=self._q.device)
        found = self._a[:, : self.size, : self.size] @ (self.z @ self.q.mT).double()
        absent = ~(self.q != 0).any(-1) * found.abs().amax((-1, -2)).unsqueeze(-1)
        values: torch.Tensor = torch.linalg.eigvalsh((found + found.mT) / 2 + torch.diag_embed(absent))
        return values[:, 0]


def _combined(weights: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return weights [b, k, m] q in q's dtype, added up in float64."""
    out = weights.new_zeros(*weights.shape[:2], q.shape[-1])
    for part, rows in zip(torch.split(weights, 256, -1), torch.split(q, 256, 1), strict=True):
        out += part @ rows.double()
    return out.to(q.dtype)


def block_rows(
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
    indefinite: bool = False,
) -> tuple[Raw, bool]:
    """Minimise |b - A u| for each row b of [k, *B, p] over one space, made of the residuals of all of them.

    Each step makes one batched product, with the strongest directions of the residuals that have not met ``tol``:
    directions that depend on each other, or belong to converged rows, cost nothing. A may be indefinite.

    The residual is that of the products that were made, A (Q y) = (A Q) y. One product with a random combination of
    all rows confirms it at the end; where it does not, all residuals are recomputed and what is missing is solved for.

    Source: O'Leary (1980), The block conjugate gradient algorithm, doi:10.1016/0024-3795(80)90247-5. Differs: (1) rows
    are normalised first; (2) minimal residuals, as in Gutknecht (2007), Block Krylov space methods for linear systems
    with multiple right-hand sides; (3) all directions are kept and orthogonalised twice, up to 2^27 numbers, beyond
    which it starts again from the residual; (4) a block holds only directions of at least 0.45 of its strongest.

    Args:
        matvec: rows [j, *B, p] -> A rows.
        rows: right-hand sides [k, *B, p].
        tol: relative tolerance.
        max_iter: most steps.
        eps: rounding unit of a product.
        layout: names the leaves.
        callback: ``callback(step, residuals)``.
        notes: takes what was found out.
        start: see ``start_at``.
        precondition: M, applied to residuals before they become directions.
        indefinite: whether negative curvature is no reason of failure.

    Returns:
        What became of the rows, and whether negative curvature was met.
    """
    scaled = normalise(rows)
    lead, (k, p) = rows.shape[1:-1], (rows.shape[0], rows.shape[-1])
    count, norm, work = math.prod(lead), torch.linalg.vector_norm, torch.finfo(rows.dtype).eps
    if not rows.numel():
        none = torch.zeros(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        return judge(scaled, scaled.unit, none, none, none.long(), none.long(), tol, eps), False
    unit, x, r = (t.reshape(k, count, p).transpose(0, 1) for t in (scaled.unit, *start_at(matvec, scaled, start)))
    zero = torch.zeros(count, k, dtype=rows.dtype, device=rows.device)

    def flat(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1).reshape(t.shape[1], *lead, *t.shape[2:])

    gauge: torch.Tensor | None = None  # [b, 1, 1]: the iteration runs on A / gauge

    def product(w: torch.Tensor) -> torch.Tensor:
        aw = matvec(flat(w)).reshape(w.shape[1], count, p).transpose(0, 1)
        return aw if gauge is None else aw / gauge

    near = None if precondition is None else Guarded(precondition)
    unfit = False
    most = p if 2 * p * p * count <= NUMBERS else max(NUMBERS // (2 * p * count), 8 * k)
    space, moved = _Space(r, most), x
    length = norm(r, dim=-1)
    stop, size = 0.9 * tol, zero[:, :1]
    status = torch.full(zero.shape, int(Status.MAX_ITER), device=rows.device)
    iterations = torch.zeros_like(status)
    residual, best = torch.full_like(zero, torch.inf), x
    active = length > (0.0 if start is None else stop)
    ended = torch.zeros_like(active)  # no direction is left that could help
    step, tries, missing = 0, 0, active.unsqueeze(-1)
    while True:
        while step < max_iter and bool(active.any()):
            wanted = r * active.unsqueeze(-1)
            if near is not None:
                aimed = near(flat(wanted))[0].reshape(k, count, p).transpose(0, 1)
                wrong = near.wrong.reshape(k, count).T & active
                unfit |= bool(wrong.any())
                wanted = torch.where(wrong.unsqueeze(-1), wanted, aimed)
            if space.size >= space.most and space.most < p:
                moved, space = moved + space.solution(), _Space(r, most)
            for again in (False, True):  # where r lies in K, go on along A r; then there is nothing more to find
                if again:
                    wanted = torch.where(missing, space.times(r * active.unsqueeze(-1)), wanted)
                w = principal(wanted, space.q, _THRESHOLD, min(k, space.most - space.size), 1e3 * work)
                found = (w[:, :1] != 0).any(-1) if w.shape[1] else torch.zeros_like(active[:, :1])
                missing = (active.any(-1, keepdim=True) & ~found).unsqueeze(-1)
                if not bool(missing.any()):
                    break
            missing = missing.squeeze(-1)
            ended, active = ended | active & missing, active & ~missing
            if not bool(active.any()):
                break
            step += 1
            aw = product(w)
            if step == 1 and (sizes := gauge_of(aw)) is not None:
                gauge = sizes.amax(1, keepdim=True)
                aw, x, moved, best = aw / gauge, x * gauge, moved * gauge, best * gauge
            iterations += active
            broken = ~aw.isfinite().all(-1).all(-1, keepdim=True)
            if bool(broken.any()):
                status = status.masked_fill(active & broken, int(Status.NONFINITE))
                active = active & ~broken
                aw, w = (t.masked_fill(broken.unsqueeze(-1), 0.0) for t in (aw, w))
            size = torch.maximum(size, norm(aw, dim=-1).amax(-1, keepdim=True))
            begin = space.size
            space.add(w, aw, noise(p, eps) * size.squeeze(-1).double())
            r = space.take(r, begin)
            length = torch.where(active, norm(r, dim=-1), length)
            if callback is not None:
                callback(step, torch.where(scaled.nonfinite, torch.nan, flat(length)))
            active = active & (length > stop)
        # What is left is the truth: check the residuals, and go on from the recomputed ones while that helps.
        x = moved + space.solution()
        bound = attainable(x, size, eps).clamp(min=tol)
        told = length
        r, length = _checked(product, unit, x, r, tol)
        ended = ended & (length <= 1.5 * told)  # otherwise what was solved for was noise
        status = status.masked_fill(~length.isfinite() & (status == Status.MAX_ITER), int(Status.NONFINITE))
        before, better = residual, length < residual
        best, residual = torch.where(better.unsqueeze(-1), x, best), torch.where(better, length, residual)
        active = (status == Status.MAX_ITER) & (residual > tol) & ~ended
        stuck = active & (residual > 0.5 * before)
        status, active = status.masked_fill(stuck, int(Status.STAGNATED)), active & ~stuck
        if tries and bool((residual <= bound)[active].all()):  # as good as rounding promises: one more try was enough
            break
        tries += 1
        if step >= max_iter or not bool(active.any()):
            break
        r = space.take(r, 0)
    unsolved = (status != Status.NONFINITE) & (residual > bound)
    if bool((ended & unsolved).any()):
        flatness = norm(space.times(r), dim=-1) / (size * length).clamp(min=torch.finfo(rows.dtype).tiny)
        lost = ended & unsolved & (flatness <= eps**0.5)
        status = status.masked_fill(ended & unsolved, int(Status.STAGNATED)).masked_fill(lost, int(Status.SINGULAR))
        if notes is not None and bool(lost.any()):
            left = (r.abs() > 1e-3 * length.unsqueeze(-1))[lost].any(0)
            names = ", ".join(repr(name) for name in leaves_at(layout, left))
            notes.append(f"v is not in the range: no curvature in {names} along what is left of it")
    if notes is not None:
        dropped = int(space.null.logical_and((space.q != 0).any(-1)).sum())
        notes.extend([f"{dropped} null directions dropped"] if dropped else [])
        notes.extend([WRONG] if unfit else [])
    scale = torch.ones_like(zero[:, 0]) if gauge is None else gauge.reshape(-1)
    least = space.least().to(rows.dtype)
    negative = least < -noise(p, eps) * size.squeeze(-1)
    if bool(negative.any()):
        if notes is not None:
            notes.append(told_indefinite(float((least * scale).min())))
        if not indefinite:
            hit = unsolved & negative.unsqueeze(-1) & (status != Status.SINGULAR)
            status = status.masked_fill(hit, int(Status.NEGATIVE_CURVATURE))
    sizes, scales = flat(size.expand_as(residual)), flat(scale[:, None, None].expand(-1, k, -1))
    raw = judge(scaled, flat(best), flat(residual), sizes, flat(status), flat(iterations), tol, eps, scales)
    return raw, bool(negative.any())


def _checked(
    product: Matvec, b: torch.Tensor, x: torch.Tensor, r: torch.Tensor, tol: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return r [b, k, p] and its norms, if one product says that it is b - A x; otherwise b - A x and its norms.

    The sum of the errors with random signs is, in the mean square, as long as all of them together. It may not carry a
    row over ``tol``, nor change it by more than a tenth; it is added to the norms, which are bounds then.

    Source: Freivalds (1979), Fast probabilistic algorithms, doi:10.1007/3-540-09526-8_5.
    """
    k, norm = x.shape[1], torch.linalg.vector_norm
    if k > 1:
        signs = random_signs(1, k, None).to(x)
        error = norm(signs @ (b - r) - product(signs @ x), dim=-1)
        told = norm(r, dim=-1)
        if bool((error <= torch.maximum(tol - told, 0.1 * told)).all()):
            return r, torch.hypot(told, error)
    r = b - product(x)
    return r, norm(r, dim=-1)
