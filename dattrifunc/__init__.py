"""Curvature products, inverse products, flat gradient rows and influence scores, as pure functions on torch.func."""

from .errors import ConvergenceWarning, DtypeError, StructureError
from .tree import Layout, combine, partition, ravel

__all__ = [
    "ConvergenceWarning",
    "DtypeError",
    "Layout",
    "StructureError",
    "combine",
    "partition",
    "ravel",
]
