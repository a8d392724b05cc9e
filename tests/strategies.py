"""What the tests draw, and the plain references they compare with. Nothing here calls dattrifunc.

trees()          pytrees of tensors, of every container
quadratics()     a loss whose Hessian is the drawn matrix
nonquadratics()  a smooth loss on integer, bool and float data, with its Hessian by torch.autograd
flat, unflat     ravel and unravel in a few lines
reorder, row     the same tree with dict keys in another order; one vector of a batch
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

Layer = namedtuple("Layer", ["weight", "bias"])
Triple = namedtuple("Triple", ["z", "m", "a"])

SHAPES = [(), (1,), (2,), (3,), (4,), (1, 2), (2, 2), (2, 1, 2), (0,), (0, 2)]
KEYS = ["w", "b", "a", "Z", "layer.0", "", 10, 9, 0, -1]  # unsorted as they stand; str and int

# ---------------------------------------------------------------------------------------------------------------------
# plain references


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree: dict insertion order, None is nothing."""
    if tree is None:
        return []
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def rebuild(tree: Any, new: Sequence[Any]) -> Any:
    """The tree with its tensors replaced, in order."""
    source = iter(new)

    def go(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, torch.Tensor):
            return next(source)
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, {key: go(part) for key, part in node.items()})
        if isinstance(node, dict):
            return type(node)((key, go(part)) for key, part in node.items())
        parts = [go(part) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)

    return go(tree)


def flat(tree: Any, batch: bool = False) -> torch.Tensor:
    """The vector [p] of a tree; with ``batch``, the rows [k, p] of a tree of [k, ...]."""
    found = leaves(tree)
    if not found:
        return torch.zeros(0, dtype=torch.float64)
    if batch:
        return torch.cat([leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in found], dim=1)
    return torch.cat([leaf.reshape(-1) for leaf in found])


def unflat(values: torch.Tensor, like: Any) -> Any:
    """The tree of a vector [p], or the tree of [k, ...] of rows [k, p], with the structure of ``like``."""
    parts, start = [], 0
    for leaf in leaves(like):
        piece = values[..., start : start + leaf.numel()]
        parts.append(piece.reshape((*values.shape[:-1], *leaf.shape)))
        start += leaf.numel()
    assert start == values.shape[-1]
    return rebuild(like, parts)


def row(tree: Any, i: int) -> Any:
    """Vector i of a batch of vectors."""
    return rebuild(tree, [leaf[i] for leaf in leaves(tree)])


def reorder(tree: Any, rng: Random) -> Any:
    """The same tree, the keys of every dict in another order (the reverse where chance would leave them)."""
    if isinstance(tree, dict):
        items = [(key, reorder(part, rng)) for key, part in tree.items()]
        before = [key for key, _ in items]
        rng.shuffle(items)
        if [key for key, _ in items] == before:
            items.reverse()
        return defaultdict(tree.default_factory, items) if isinstance(tree, defaultdict) else type(tree)(items)
    if tree is None or isinstance(tree, torch.Tensor):
        return tree
    parts = [reorder(part, rng) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def getters(tree: Any) -> list[Callable[[Any], torch.Tensor]]:
    """For each leaf, in order, the function that picks it by key out of a tree of the same keys in any order."""
    if tree is None:
        return []
    if isinstance(tree, torch.Tensor):
        return [lambda node: node]
    keyed = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [lambda node, key=key, get=get: get(node[key]) for key, part in keyed for get in getters(part)]


# ---------------------------------------------------------------------------------------------------------------------
# trees


def tensor(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of normal (or small integer) numbers, sometimes with strides that are not the usual ones."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    values = torch.randn(shape, generator=rng, dtype=torch.float64)
    values = (values if dtype.is_floating_point else 3 * values).to(dtype)
    if values.ndim and draw(st.booleans()):
        return torch.stack([values, values + 1], dim=-1)[..., 0]  # not contiguous
    return values


@st.composite
def shape_lists(draw: Any, min_size: int = 1, max_size: int = 8) -> list[tuple[int, ...]]:
    """Shapes of one to six leaves, with min_size to max_size numbers in all; some leaves are empty."""
    shapes: list[tuple[int, ...]] = []
    room = max_size
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.sampled_from([shape for shape in SHAPES if math.prod(shape) <= room]))
        room -= math.prod(shape)
        shapes.append(shape)
    missing = min_size - (max_size - room)
    if missing > 0:
        shapes.insert(draw(st.integers(0, len(shapes))), (missing,))
    return shapes


def arrange(draw: Any, items: list[Any], depth: int = 3) -> Any:
    """Put the leaves, in order, into drawn containers."""
    if len(items) == 1 and (depth == 0 or draw(st.booleans())):
        return items[0]
    count = draw(st.integers(1, min(4, len(items)))) if depth else len(items)
    cuts = sorted(draw(st.permutations(range(1, len(items))))[: count - 1])
    groups = [items[i:j] for i, j in zip([0, *cuts], [*cuts, len(items)], strict=True)]
    parts = [arrange(draw, group, depth - 1) if depth else group[0] for group in groups]
    if draw(st.integers(0, 3)) == 0:
        parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from([None, {}, []])))
    kinds = ["dict", "dict", "dict", "list", "tuple", "OrderedDict", "defaultdict", "deque"]
    kinds += {2: ["Layer"], 3: ["Triple"]}.get(len(parts), [])
    kind = draw(st.sampled_from(kinds))
    if kind in ("dict", "OrderedDict", "defaultdict"):
        items = list(zip(draw(st.permutations(KEYS)), parts, strict=False))
        return {"dict": dict, "OrderedDict": OrderedDict, "defaultdict": lambda x: defaultdict(list, x)}[kind](items)
    if kind in ("Layer", "Triple"):
        return (Layer if kind == "Layer" else Triple)(*parts)
    return {"list": list, "tuple": tuple, "deque": deque}[kind](parts)


@st.composite
def trees(
    draw: Any,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float64,
    min_size: int = 1,
    max_size: int = 12,
) -> Any:
    """A pytree of tensors; with several dtypes, each leaf draws its own.

    Dicts with str and int keys out of order, lists, tuples, namedtuples, OrderedDicts, defaultdicts, deques, None,
    empty containers, 0-d and empty leaves, leaves that are not contiguous, or a bare tensor; min_size to max_size
    numbers in all.
    """
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    shapes = draw(shape_lists(min_size, max_size))
    return arrange(draw, [tensor(draw, shape, draw(st.sampled_from(dtypes))) for shape in shapes])


# ---------------------------------------------------------------------------------------------------------------------
# losses


class Quadratic(NamedTuple):
    """A loss of constant curvature. ``loss`` picks leaves by key, so that it does not mind their order."""

    params: Any
    loss: Callable[[Any], torch.Tensor]
    hessian: torch.Tensor  # [p, p], in the leaf order of params
    rhs: Any  # a batch of k vectors; k may be 0, 1, less or more than p


def symmetric(rng: torch.Generator, p: int, kind: str) -> torch.Tensor:
    """A symmetric [p, p] whose eigenvalues have sizes 0.5 to 5: all positive, or of both signs (negative if p = 1)."""
    basis = torch.linalg.qr(torch.randn(p, p, generator=rng, dtype=torch.float64)).Q
    values = 0.5 * 10 ** torch.rand(p, generator=rng, dtype=torch.float64)
    if kind == "indefinite":
        values[::2] *= -1
    matrix = basis @ torch.diag(values) @ basis.T
    return (matrix + matrix.T) / 2


@st.composite
def quadratics(draw: Any, dtype: torch.dtype = torch.float64, kind: str = "spd", max_p: int = 8) -> Quadratic:
    """``loss(params) = 1/2 t'Ht + b't`` with t the numbers of params; H and a gradient of norm >= 1 are drawn first."""
    assert kind in ("spd", "indefinite")
    params = draw(trees(dtype, 1, max_p))
    at = flat(params)
    p = len(at)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    hessian = symmetric(rng, p, kind).to(dtype)
    gradient = torch.randn(p, generator=rng, dtype=torch.float64)
    gradient = gradient / gradient.norm().clamp(max=1.0)
    slope = gradient.to(dtype) - hessian @ at
    picks = getters(params)

    def loss(params: Any) -> torch.Tensor:
        t = torch.cat([get(params).reshape(-1) for get in picks])
        return 0.5 * t @ (hessian @ t) + slope @ t

    k = draw(st.sampled_from(sorted({0, 1, max(1, p - 1), p, p + 2})))
    rhs = unflat(torch.randn(k, p, generator=rng, dtype=torch.float64).to(dtype), params)
    return Quadratic(params, loss, hessian, rhs)


class Nonquadratic(NamedTuple):
    """A loss whose curvature depends on where it is taken; a mean over samples plus a ridge."""

    params: Any
    data: Any  # {"x": float64 [n, p], "y": int64 [n], "mask": bool [n]}
    loss: Callable[[Any, Any], torch.Tensor]  # also takes the data of one sample, without the axis n
    hessian: torch.Tensor  # float64 [p, p] at (params, data), in the leaf order of params; eigenvalues >= 0.9
    rhs: Any  # a batch of k vectors, as in Quadratic


def _objective(t: torch.Tensor, data: Any) -> torch.Tensor:
    z = data["x"] @ t
    logits = torch.stack([z, -0.5 * z, torch.zeros_like(z)], dim=-1)
    picked = logits.gather(-1, data["y"].unsqueeze(-1)).squeeze(-1)
    fit = torch.logsumexp(logits, dim=-1) - picked + 0.1 * torch.tanh(z)
    return torch.where(data["mask"], fit, 0.5 * fit).mean() + 0.5 * t @ t


@st.composite
def nonquadratics(draw: Any, max_p: int = 8, max_n: int = 5) -> Nonquadratic:
    """A softmax regression with a tanh term. Its Hessian comes from torch.autograd on one flat vector."""
    params = draw(trees(torch.float64, 1, max_p))
    at = flat(params)
    p, n = len(at), draw(st.integers(1, max_n))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(n, p, generator=rng, dtype=torch.float64)
    data = {
        "y": torch.randint(0, 3, (n,), generator=rng),
        "x": x / x.norm(dim=1, keepdim=True).clamp(min=1.0),
        "mask": torch.rand(n, generator=rng) < 0.7,
    }
    picks = getters(params)

    def loss(params: Any, data: Any) -> torch.Tensor:
        return _objective(torch.cat([get(params).reshape(-1) for get in picks]), data)

    hessian = torch.autograd.functional.hessian(lambda t: _objective(t, data), at)
    k = draw(st.sampled_from(sorted({0, 1, max(1, p - 1), p, p + 2})))
    rhs = unflat(torch.randn(k, p, generator=rng, dtype=torch.float64), params)
    return Nonquadratic(params, data, loss, hessian, rhs)
