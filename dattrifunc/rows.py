"""Per-sample gradients and their flat rows.

Rows are g_i, the gradient of a loss on sample i alone, in the layout's columns; nothing is divided by the number of
samples. ``RowStore`` keeps them on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .digest import fingerprint
from .errors import DtypeError, StructureError, message
from .implicit import transforms_active
from .samples import Runner, Samples, gradient_blocks, mean_loss, samples_of
from .store import RowStore, float_dtype, rows_of
from .tree import (
    Layout,
    Leaves,
    Tree,
    check_callable,
    check_chunk,
)

__all__ = ["RowStore", "fingerprint", "grad_rows", "mean_loss", "per_sample_grads", "rows_of"]

Progress = Callable[[int, int], object]


def per_sample_grads(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    randomness: str = "error",
) -> Tree:
    """Return the gradient of each sample's loss, as one tree.

    Args:
        func: loss of one sample, ``func(*x) -> scalar``.
        x: arguments of func; any pytrees, constants unless a torch.func transform is running.
        argnums: which argument to differentiate, or a tuple.
        in_dims: one entry per argument of func, parameters included: the axis that counts samples (negative from the
            end), None for an argument that all samples share, or a tree of those.
        chunk_size: most samples pushed through autodiff at once; None = all. Memory only, not values.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis, for a loss written for batches.
        randomness: "error", "different" (each sample its own draw) or "same" (one draw for all, whatever chunk_size).

    Returns:
        The tree ``x[argnums]``, each leaf [n, *shape]. Under an outer torch.func derivative the samples are looped
        over, because torch 2.13 differentiates ``vmap(grad)`` of a layer norm wrongly.

    Raises:
        StructureError: in_dims does not fit x, or the samples' counts differ.
        DtypeError: a differentiated leaf is not floating point.
        ValueError: func draws random numbers and ``randomness`` is "error".

    Warns:
        UserWarning: vmap cannot go through func, so a loop was used; once per call, with the operator or the reason.

    >>> loss = lambda w, x, y: (w @ x - y).square() / 2
    >>> x, y = torch.tensor([[1.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 4.0])
    >>> per_sample_grads(loss, torch.ones(2), x, y, in_dims=(None, 0, 0))
    tensor([[ 1.,  1.],
            [-1., -2.]])
    """
    chunk = check_chunk(chunk_size)
    samples = samples_of(func, x, argnums, in_dims, keep_batch_dim)
    blocks = gradient_blocks(samples, chunk or max(samples.count, 1), Runner("per_sample_grads", randomness))
    if transforms_active() or not chunk or chunk >= samples.count > 0:
        parts = [leaves for _, leaves in blocks]
        if len(parts) == 1:
            return samples.layout.build(parts[0])
        if parts:
            return samples.layout.build([torch.cat(leaf) for leaf in zip(*parts, strict=True)])
    out = [
        torch.empty((samples.count, *shape), dtype=dtype, device=leaf.device)
        for shape, dtype, leaf in zip(samples.layout.shapes, samples.layout.dtypes, samples.point.leaves, strict=True)
    ]
    for start, leaves in blocks:
        for target, leaf in zip(out, leaves, strict=True):
            target[start : start + len(leaf)] = leaf
    return samples.layout.build(out)


def grad_rows(
    func: Callable[..., Any],
    *x: Any,
    argnums: int | tuple[int, ...] = 0,
    in_dims: Any,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    randomness: str = "error",
    out: torch.Tensor | np.ndarray[Any, Any] | RowStore | None = None,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
) -> Any:
    """Return the gradient of each sample's loss as flat rows, written block by block.

    Args:
        func: loss of one sample; this and all up to ``randomness`` as in ``per_sample_grads``.
        x: arguments of func.
        argnums: which argument to differentiate, or a tuple.
        in_dims: sample axis per argument of func.
        chunk_size: most samples pushed through autodiff, and written, at once; None = all.
        keep_batch_dim: give func an axis of size 1 in place of the sample axis.
        randomness: "error", "different" or "same".
        out: where the rows go: a tensor or NumPy array (a memory map) of shape [n, p], or an open RowStore, to which
            they are appended. None allocates [n, p] once; beside it one block is held.
        dtype: float dtype of the rows; None = that of ``out``, or the layout's widest.
        progress: ``progress(done, total)``, called after each block of samples.

    Returns:
        ``out``, or a new tensor [n, p]; columns in the order of ``Layout.of(x[argnums])``.

    Raises:
        StructureError: ``out`` has another shape or layout than the rows; else as ``per_sample_grads``.

    >>> rows = grad_rows(lambda p, x: p["b"] + p["a"] * x, {"b": torch.zeros(()), "a": torch.ones(())},
    ...                  torch.tensor([2.0, 3.0]), in_dims=(None, 0))
    >>> rows
    tensor([[1., 2.],
            [1., 3.]])
    """
    chunk = check_chunk(chunk_size)
    if progress is not None:
        check_callable(progress, "progress", "a function of (done, total)")
    samples = samples_of(func, x, argnums, in_dims, keep_batch_dim)
    layout, n = samples.layout, samples.count
    wanted = None if dtype is None else float_dtype(dtype)
    blocks = gradient_blocks(samples, chunk or max(n, 1), Runner("grad_rows", randomness))
    if chunk is None and n:
        chunk = n

    def told(start: int) -> None:
        if progress is not None:
            progress(min(start + (chunk or 1), n), n)

    if out is None and transforms_active():
        found = [torch.zeros(0, layout.size, dtype=layout.dtype)]
        for start, leaves in blocks:
            found.append(_joined(layout, leaves, min(chunk or 1, n - start)))
            told(start)
        return torch.cat(found[1:] or found).to(wanted or layout.dtype)
    target = _target(out, samples, wanted)
    for start, leaves in blocks:
        if isinstance(target, RowStore):
            target.append(_joined(layout, leaves, min(chunk or 1, n - start)))
        else:
            for leaf, offset, size in zip(leaves, layout.offsets, layout.sizes, strict=True):
                block = leaf.reshape(len(leaf), size)
                target[start : start + len(leaf), offset : offset + size] = block
        told(start)
    return target if out is None else out


def _joined(layout: Layout, leaves: Leaves, count: int) -> torch.Tensor:
    return layout.join(leaves) if leaves else torch.zeros(count, 0, dtype=layout.dtype)


def _target(out: Any, samples: Samples, dtype: torch.dtype | None) -> torch.Tensor | RowStore:
    """Return where rows are written: a tensor [n, p] (a view of a NumPy array) or a store, checked."""
    layout, shape = samples.layout, (samples.count, samples.layout.size)
    if out is None:
        device = samples.point.leaves[0].device if samples.point.leaves else None
        return torch.empty(shape, dtype=dtype or layout.dtype, device=device)
    if transforms_active():
        fix = "leave out=None there"
        raise ValueError(message("out", "None inside a torch.func transform", type(out).__name__, fix))
    if isinstance(out, RowStore):
        if out.layout != layout:
            fix = "create the store with Layout.of(x[argnums])"
            raise StructureError(message("out", f"a store of the layout {layout.names}", f"{out.layout.names}", fix))
        target: torch.Tensor | RowStore = out
        found = out.dtype
    else:
        target = writable(out, "out", shape)
        found = target.dtype
    if dtype is not None and dtype != found:
        raise DtypeError(message("dtype", f"{found}, as out has", str(dtype), "leave dtype=None, or change out"))
    return target


def writable(out: Any, argument: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that writes into ``out``: a float tensor or a writable NumPy array of this shape."""
    fix = f"pass torch.empty{shape}, or a NumPy array or memory map of that shape"
    if not isinstance(out, torch.Tensor | np.ndarray):
        raise TypeError(message(argument, "a tensor or a NumPy array", type(out).__name__, fix))
    if tuple(out.shape) != shape:
        raise StructureError(message(argument, f"shape {shape}", f"shape {tuple(out.shape)}", fix))
    if isinstance(out, np.ndarray):
        if out.dtype not in (np.float16, np.float32, np.float64):
            raise DtypeError(message(argument, "a floating point array", str(out.dtype), fix))
        if not out.flags.writeable:
            fix = "open the memory map with mode 'r+' or 'w+'"
            raise ValueError(message(argument, "an array that may be written", "a read-only one", fix))
        return torch.from_numpy(out)
    if not out.is_floating_point():
        raise DtypeError(message(argument, "a floating point tensor", str(out.dtype), fix))
    return out.detach()
