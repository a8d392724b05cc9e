"""Errors and warnings, and the one form that every message takes."""

from __future__ import annotations

__all__ = ["ConvergenceWarning", "DtypeError", "NonFiniteWarning", "StructureError", "message", "random_loss"]


class StructureError(ValueError):
    """A tree, a shape or a batch axis does not match what it is used with."""


class DtypeError(ValueError):
    """A leaf has a dtype or a device that the call cannot use."""


class ConvergenceWarning(UserWarning):
    """Some right-hand side was not solved to its tolerance; the message says which, why and what to change."""


class NonFiniteWarning(RuntimeWarning):
    """A curvature product with a finite vector holds NaN or inf; the message says where, why and what to change."""


def message(argument: str, expected: str, got: str, fix: str) -> str:
    """Return the text of an error: what was wrong with which argument, and how to put it right.

    >>> message("tol", "a number >= 0", "-1", "pass tol=1e-7")
    'tol: expected a number >= 0, got -1. Fix: pass tol=1e-7.'
    """
    return f"{argument}: expected {expected}, got {got}. Fix: {fix}."


def random_loss() -> ValueError:
    """Return the error for a loss that draws random numbers where it must have one value."""
    fix = "call module.eval(), or draw masks before and pass them as an argument"
    return ValueError(message("func", "a loss with one fixed value at x", "one that draws random numbers", fix))
