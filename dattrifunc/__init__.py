"""Curvature products, inverse products, flat gradient rows and influence scores, as pure functions on torch.func."""

from . import solvers
from .errors import ConvergenceWarning, DtypeError, StructureError
from .ihvp import ihvp_at_x_cg, ihvp_at_x_explicit, ihvp_at_x_lissa, ihvp_cg, ihvp_explicit, ihvp_lissa
from .products import hessian_matrix, hvp, hvp_at_x
from .solvers import SolveInfo, SolveResult
from .tree import Layout, combine, partition, ravel

__all__ = [
    "ConvergenceWarning",
    "DtypeError",
    "Layout",
    "SolveInfo",
    "SolveResult",
    "StructureError",
    "combine",
    "hessian_matrix",
    "hvp",
    "hvp_at_x",
    "ihvp_at_x_cg",
    "ihvp_at_x_explicit",
    "ihvp_at_x_lissa",
    "ihvp_cg",
    "ihvp_explicit",
    "ihvp_lissa",
    "partition",
    "ravel",
    "solvers",
]
