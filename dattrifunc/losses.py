"""Losses in two parts, as the Gauss-Newton product needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tree import check_callable

__all__ = ["CompositeLoss"]


@dataclass(frozen=True)
class CompositeLoss:
    """A loss in two parts: ``loss(params, inputs, *targets) = outer(inner(params, inputs), *targets)``.

    Attributes:
        inner: the model, ``inner(params, inputs) -> output``, a floating point tensor or a tree of them.
        outer: the loss of an output, ``outer(output, *targets) -> scalar``.

    Raises:
        TypeError: inner or outer is no function.

    >>> import torch
    >>> loss = CompositeLoss(lambda w, x: x @ w, lambda z, y: (z - y).square().mean())
    >>> loss(torch.ones(2), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0]))
    tensor(4.)
    """

    inner: Callable[[Any, Any], Any]
    outer: Callable[..., Any]

    def __post_init__(self) -> None:
        check_callable(self.inner, "inner", "the model, inner(params, inputs) -> output")
        check_callable(self.outer, "outer", "the loss of an output, outer(output, *targets) -> scalar")

    def __call__(self, params: Any, inputs: Any, *targets: Any) -> Any:
        """Return the loss."""
        return self.outer(self.inner(params, inputs), *targets)

    def output(self, *x: Any) -> Any:
        """Return inner's output, from the arguments of the loss."""
        return self.inner(*x[:2])

    def value(self, output: Any, *x: Any) -> Any:
        """Return the loss of an output, from the arguments of the loss."""
        return self.outer(output, *x[2:])
