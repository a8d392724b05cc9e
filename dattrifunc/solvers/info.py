"""What became of a solve: one status, iteration count and true residual per right-hand side, with messages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_pytree

from ..errors import ConvergenceWarning
from ..implicit import Raw

__all__ = ["SolveInfo", "SolveResult", "Status", "warn_unsolved"]


class Status(IntEnum):
    """What became of a right-hand side."""

    CONVERGED = 0
    MAX_ITER = 1
    NEGATIVE_CURVATURE = 2
    SINGULAR = 3
    DIVERGED = 4
    NONFINITE = 5
    STAGNATED = 6


_TEXTS = {
    Status.CONVERGED: "converged: the true relative residual meets tol, or what the dtype can attain",
    Status.MAX_ITER: "ran out of steps before the residual met tol: the curvature is badly conditioned or the limit "
    "is too low; raise max_iter (recursion_depth for lissa), loosen tol, or add regularization",
    Status.NEGATIVE_CURVATURE: "met a direction of curvature <= 0, so the matrix is not positive definite (x is no "
    "minimum, or the model is not convex); add regularization, or use ihvp_minres or ihvp_explicit, which solve "
    "indefinite systems",
    Status.SINGULAR: "singular: the curvature vanishes in some direction (an unused or redundant parameter); add "
    "regularization, or leave that parameter out of argnums",
    Status.DIVERGED: "diverged: some batch has curvature above what scaling allows, or negative curvature; raise "
    "scaling (more than half the largest curvature of any batch; scaling='auto' estimates it), or add regularization",
    Status.NONFINITE: "non-finite: the right-hand side or a product with it holds NaN or inf, or the answer leaves "
    "the range of the dtype; look for overflow, log(0) or norm(0) in the loss, check the data, or use a wider dtype",
    Status.STAGNATED: "stagnated above tol: rounding, or a product that is not symmetric, stops further progress; use "
    "float64, add regularization, or loosen tol",
}


@dataclass(frozen=True)
class SolveInfo:
    """The facts of a solve, one entry per right-hand side: 0-d for one vector, [k] for a batch.

    A pytree (registered with torch), so it passes through vmap; ``method`` and ``reason`` are static text.

    Attributes:
        converged: bool; the residual meets ``max(tol, attainable)``, attainable = 10 eps (1 + |C + lambda I| |u| /
            |v|), at most sqrt(eps).
        status: int, see ``Status``.
        iterations: int; steps taken.
        residual: ``||v - (C + lambda I) u|| / ||v||``, recomputed from v and u.
        standard_error: of a random u, relative: the norm of the elementwise standard error of the mean over LiSSA's
            repeats, over ``||u||``. It knows nothing of the bias of a series that was cut short, which the residual
            shows. NaN where it is not known: one repeat, all samples in each step, another solver.
        method: the solver.
        reason: what the solver found out, where it says something.
    """

    converged: torch.Tensor
    status: torch.Tensor
    iterations: torch.Tensor
    residual: torch.Tensor
    standard_error: torch.Tensor = None  # type: ignore[assignment]  # NaN for all, below
    method: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        given: Any = self.standard_error
        residual: Any = self.residual
        if given is None and isinstance(residual, torch.Tensor):  # a tree map may put anything into the fields
            object.__setattr__(self, "standard_error", torch.full_like(residual, torch.nan))

    def messages(self) -> list[str]:
        """Return one text per right-hand side: what happened, the likely cause, what to change."""
        codes = [int(code) for code in self.status.reshape(-1)]
        return [_TEXTS[Status(code)] + (f" ({self.reason})" if self.reason and code else "") for code in codes]


def _flatten(info: SolveInfo) -> tuple[list[Any], tuple[str, str]]:
    facts = [info.converged, info.status, info.iterations, info.residual, info.standard_error]
    return facts, (info.method, info.reason)


def _unflatten(children: Any, context: tuple[str, str]) -> SolveInfo:
    converged, status, iterations, residual, error = children
    return SolveInfo(converged, status, iterations, residual, error, *context)


torch_pytree.register_pytree_node(SolveInfo, _flatten, _unflatten)


class SolveResult(NamedTuple):
    """The solution, and what became of it."""

    value: Any
    info: SolveInfo


def told_indefinite(least: float) -> str:
    """Return, in words, what a negative upper bound of the smallest eigenvalue means."""
    bound = f"smallest eigenvalue at most {least:.4g}"
    return f"negative curvature: {bound}: regularization must grow by more than {-least:.4g}"


def warn_unsolved(raw: Raw, method: str, tol: float, reason: str) -> None:
    """Warn once about all right-hand sides that were not solved, with counts, the worst residual and what to change."""
    bad = (~raw.converged | (raw.status != Status.CONVERGED)).reshape(-1)
    if not bool(bad.any()):
        return
    status, residual = raw.status.reshape(-1)[bad], raw.residual.reshape(-1)[bad]
    worst = residual.nan_to_num(nan=-1.0).max()
    told = f"worst relative residual {float(worst):.2e} (tol {tol:.0e}); " if worst >= 0 else ""
    kinds = [
        f"{int((status == code).sum())} {_TEXTS[Status(int(code))]}"
        for code in torch.unique(status)
        if int(code) in _TEXTS
    ]
    warnings.warn(
        f"{method}: {int(bad.sum())} of {bad.numel()} right-hand sides not solved; {told}"
        + "; ".join(kinds)
        + (f" ({reason})" if reason else "")
        + ". has_aux=True returns the facts instead of this warning.",
        ConvergenceWarning,
        stacklevel=2,
    )
