"""Curvature products, inverse products, flat gradient rows and influence scores, as pure functions on torch.func."""

from . import solvers, spectrum
from .attribution import influence, scores, self_scores, top_k
from .errors import ConvergenceWarning, DtypeError, NonFiniteWarning, StructureError
from .ihvp import (
    ihvp_arnoldi,
    ihvp_at_x_arnoldi,
    ihvp_at_x_auto,
    ihvp_at_x_cg,
    ihvp_at_x_explicit,
    ihvp_at_x_lissa,
    ihvp_at_x_minres,
    ihvp_at_x_nystrom,
    ihvp_at_x_woodbury,
    ihvp_auto,
    ihvp_cg,
    ihvp_explicit,
    ihvp_lissa,
    ihvp_minres,
    ihvp_nystrom,
    ihvp_woodbury,
)
from .losses import CompositeLoss
from .products import fvp, fvp_at_x, ggnvp, ggnvp_at_x, hessian_matrix, hvp, hvp_at_x
from .rows import RowStore, grad_rows, per_sample_grads
from .solvers import SolveInfo, SolveResult
from .tree import Layout, combine, partition, ravel

__all__ = [
    "CompositeLoss",
    "ConvergenceWarning",
    "DtypeError",
    "Layout",
    "NonFiniteWarning",
    "RowStore",
    "SolveInfo",
    "SolveResult",
    "StructureError",
    "combine",
    "fvp",
    "fvp_at_x",
    "ggnvp",
    "ggnvp_at_x",
    "grad_rows",
    "hessian_matrix",
    "hvp",
    "hvp_at_x",
    "ihvp_arnoldi",
    "ihvp_at_x_arnoldi",
    "ihvp_at_x_auto",
    "ihvp_at_x_cg",
    "ihvp_at_x_explicit",
    "ihvp_at_x_lissa",
    "ihvp_at_x_minres",
    "ihvp_at_x_nystrom",
    "ihvp_at_x_woodbury",
    "ihvp_auto",
    "ihvp_cg",
    "ihvp_explicit",
    "ihvp_lissa",
    "ihvp_minres",
    "ihvp_nystrom",
    "ihvp_woodbury",
    "influence",
    "partition",
    "per_sample_grads",
    "ravel",
    "scores",
    "self_scores",
    "solvers",
    "spectrum",
    "top_k",
]
