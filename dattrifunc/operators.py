"""Operators whose derivatives are wrong in torch itself, written out in operations whose derivatives are right.

Measured on torch 2.13 against finite differences: the second derivative of ``weight_norm`` (Hessians 40 to 90 percent
off, not symmetric), and the third derivatives of ``layer_norm``, ``instance_norm`` and ``batch_norm`` with batch
statistics (derivatives of a Hessian product with respect to x, up to 140 percent off). Losses run inside ``corrected``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["corrected"]

Weight = torch.Tensor | None


class corrected(TorchFunctionMode):  # noqa: N801 - used as a context, like torch.no_grad
    """Run operators with a wrong derivative in another form.

    Args:
        norms: also those that are wrong from the third derivative on.
    """

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self.table = {**_SECOND, **_THIRD} if norms else _SECOND

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, or what stands for it."""
        return self.table.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [i for i in range(v.ndim) if i != dim % v.ndim or dim == -1]
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


def _standardised(x: torch.Tensor, dims: Sequence[int], eps: float) -> torch.Tensor:
    centred = x - x.mean(list(dims), keepdim=True)
    variance: torch.Tensor = centred.square().mean(list(dims), keepdim=True)
    return centred * (variance + eps).rsqrt()


def _scaled(x: torch.Tensor, weight: Weight, bias: Weight) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Weight = None, bias: Weight = None, eps: float = 1e-5, *_: Any
) -> torch.Tensor:
    return _scaled(_standardised(x, range(-len(shape), 0), eps), weight, bias)


def _per_channel(x: torch.Tensor, dims: Sequence[int], weight: Weight, bias: Weight, eps: float) -> torch.Tensor:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    weight, bias = (None if t is None else t.reshape(shape) for t in (weight, bias))
    return _scaled(_standardised(x, dims, eps), weight, bias)


def _instance_norm(
    x: torch.Tensor,
    running_mean: Weight = None,
    running_var: Weight = None,
    weight: Weight = None,
    bias: Weight = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is not None or not use_input_stats:
        return functional.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _per_channel(x, range(2, x.ndim), weight, bias, eps)


def _batch_norm(
    x: torch.Tensor,
    running_mean: Weight,
    running_var: Weight,
    weight: Weight = None,
    bias: Weight = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is not None or not training:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return _per_channel(x, [0, *range(2, x.ndim)], weight, bias, eps)


_SECOND: dict[Any, Callable[..., torch.Tensor]] = {torch._weight_norm: _weight_norm}
_THIRD: dict[Any, Callable[..., torch.Tensor]] = {
    functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    functional.instance_norm: _instance_norm,
    functional.batch_norm: _batch_norm,
}
