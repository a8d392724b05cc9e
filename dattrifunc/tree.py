"""Trees and flat vectors: one leaf order, one layout, one set of checks at the door.

Leaf order is dict insertion order, everywhere. ``optree`` sorts dict keys unless told otherwise, so this module keeps a
namespace of its own in which it does not; classes registered with torch's pytree registry are known there too. Nothing
outside this module flattens a user's tree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import optree
import torch
from torch.utils import _pytree as torch_pytree

from .errors import DtypeError, StructureError, message

__all__ = ["Layout", "combine", "partition", "ravel"]

Tree = Any
Path = tuple[Any, ...]

_NAMESPACE = "dattrifunc"
# Held for the life of the process: optree restores the sorted order when this context manager is closed.
_INSERTION_ORDER = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_INSERTION_ORDER.__enter__()


# ---------------------------------------------------------------------------------------------------------------------
# flatten and unflatten


def _adopt(cls: type) -> None:
    """Make a class of torch's pytree registry a node of our namespace."""
    node = torch_pytree.SUPPORTED_NODES[cls]
    with_keys = getattr(node, "flatten_with_keys_fn", None)

    def entry(key: Any) -> Any:
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                return getattr(key, attribute)
        return str(key)

    def flatten(obj: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(obj)
        if dataclasses.is_dataclass(obj) and with_keys is not None:
            # torch notes in the context which fields are None, so two halves of a partition would not match.
            dropped = {f.name for f in dataclasses.fields(obj) if getattr(obj, f.name) is not None}
            dropped -= {entry(key) for key, _ in with_keys(obj)[0]}
            names = tuple(f.name for f in dataclasses.fields(obj) if f.init and f.name not in dropped)
            return tuple(getattr(obj, name) for name in names), names, names
        if with_keys is None:
            return children, context
        return children, context, tuple(entry(key) for key, _ in with_keys(obj)[0])

    def unflatten(context: Any, children: Any) -> Any:
        if dataclasses.is_dataclass(cls) and with_keys is not None:
            return cls(**dict(zip(context, children, strict=True)))
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(cls, flatten, unflatten, namespace=_NAMESPACE)


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of ``tree`` in insertion order, and the structure that puts them back. None is no leaf."""
    leaves, spec = optree.tree_flatten(tree, namespace=_NAMESPACE)
    foreign = {type(leaf) for leaf in leaves} & _adoptable()
    if not foreign:
        return leaves, spec
    for cls in foreign:
        _adopt(cls)
    return flatten(tree)


def _adoptable() -> set[type]:
    builtin = {torch.Size, type(None)}
    return {cls for cls in torch_pytree.SUPPORTED_NODES if isinstance(cls, type)} - builtin


def flatten_like(spec: optree.PyTreeSpec, tree: Tree, argument: str, fix: str) -> list[Any]:
    """Return the parts of ``tree`` at the leaves of ``spec``, dicts matched by key, or StructureError."""
    flatten(tree)  # adopts classes that only torch's registry knows
    try:
        return spec.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise StructureError(
            message(argument, f"the structure {describe(spec)}", describe(flatten(tree)[1]), f"{fix} ({error})")
        ) from None


def describe(spec: optree.PyTreeSpec) -> str:
    """Return the structure as text, without the namespace."""
    text = str(spec)
    return text.removeprefix("PyTreeSpec(").replace(f", namespace='{_NAMESPACE}'", "").removesuffix(")")


def name_of(path: Path) -> str:
    """Return the dotted name of a leaf."""
    return ".".join(str(key) for key in path)


def is_number(value: Any) -> bool:
    """Say whether ``value`` is a plain Python number (bool, int or float)."""
    return isinstance(value, bool | int | float)


# ---------------------------------------------------------------------------------------------------------------------
# layout


def _widest(dtypes: Sequence[torch.dtype], names: Sequence[str]) -> torch.dtype:
    """Return the dtype that holds every leaf exactly."""
    if not dtypes:
        return torch.get_default_dtype()
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    if widest.is_floating_point or widest.is_complex:
        for dtype, name in zip(dtypes, names, strict=True):
            if not (dtype.is_floating_point or dtype.is_complex):
                raise DtypeError(
                    message(
                        f"leaf {name!r}",
                        f"a floating point tensor like the other leaves ({widest})",
                        str(dtype),
                        "keep integer leaves out of the vector with partition(), or convert them",
                    )
                )
    return widest


@dataclass(frozen=True)
class Layout:
    """Where each leaf of a tree lies in its flat vector: static metadata, no values.

    Leaves come in dict insertion order. ``offsets[i] : offsets[i] + sizes[i]`` are the columns of leaf ``i``; a leaf is
    laid out in row-major order. The vector's dtype is the widest of the leaves'.

    >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    >>> layout.names, layout.shapes, layout.offsets, layout.size
    (('w', 'b'), ((2, 3), (3,)), (0, 6), 9)
    >>> layout.slices("b")
    [slice(6, 9, None)]
    """

    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    spec: optree.PyTreeSpec = field(compare=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)
    size: int = field(init=False, compare=False)
    dtype: torch.dtype = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = tuple(math.prod(shape) for shape in self.shapes)
        offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        for name, value in (("sizes", sizes), ("offsets", offsets), ("size", sum(sizes))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dtype", _widest(self.dtypes, self.names))

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        """Read the layout off a tree of tensors (or Python numbers).

        Raises:
            DtypeError: a leaf is neither a tensor nor a number, or integer leaves are mixed with floating point ones.
        """
        leaves, spec = flatten(tree)
        tensors = [as_leaf(leaf, name_of(path)) for leaf, path in zip(leaves, paths_of(spec), strict=True)]
        return cls(paths_of(spec), tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors), spec)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the leaves."""
        return tuple(name_of(path) for path in self.paths)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of paths, shapes and dtypes: equal for equal layouts, on every machine."""
        paths = [[_json_key(key) for key in path] for path in self.paths]
        text = json.dumps([paths, self.shapes, [str(dtype) for dtype in self.dtypes]])
        return hashlib.sha256(text.encode()).hexdigest()

    # values -> vector

    def ravel(self, tree: Tree) -> torch.Tensor:
        """Return the vector [size] of a tree with this layout's structure and shapes.

        Raises:
            StructureError: another structure, or a leaf of another shape.
        """
        return self.join(self._leaves(tree, 0))

    def ravel_rows(self, tree: Tree) -> torch.Tensor:
        """Return the rows [n, size] of a tree whose leaves carry one more leading axis n."""
        return self.join(self._leaves(tree, 1))

    def _leaves(self, tree: Tree, extra: int) -> list[torch.Tensor]:
        found = flatten_like(self.spec, tree, "tree", "pass a tree with the layout's structure")
        leaves = [as_leaf(leaf, name) for leaf, name in zip(found, self.names, strict=True)]
        for leaf, shape, name in zip(leaves, self.shapes, self.names, strict=True):
            if leaf.ndim != len(shape) + extra or tuple(leaf.shape[extra:]) != shape:
                expected = f"shape {('n', *shape) if extra else shape}"
                raise StructureError(
                    message(f"leaf {name!r}", expected, f"shape {tuple(leaf.shape)}", "use the tree the layout is of")
                )
        if extra and len({leaf.shape[0] for leaf in leaves}) > 1:
            got = {name: leaf.shape[0] for name, leaf in zip(self.names, leaves, strict=True)}
            raise StructureError(
                message("tree", "one row count n on every leaf", str(got), "stack the same samples on every leaf")
            )
        return leaves

    def join(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [..., size] from leaves [..., *shape], in the widest of their dtypes; nothing is checked."""
        if not leaves:
            return torch.zeros(0, dtype=self.dtype)
        lead = leaves[0].shape[: leaves[0].ndim - len(self.shapes[0])]
        flat = [leaf.reshape((*lead, size)) for leaf, size in zip(leaves, self.sizes, strict=True)]
        if len(flat) == 1:
            return flat[0]
        if len({t.dtype for t in flat}) > 1:
            dtype = _widest([t.dtype for t in flat], self.names)
            flat = [t.to(dtype) for t in flat]
        return torch.cat([t if t.device == flat[0].device else t.to(flat[0].device) for t in flat], dim=-1)

    # vector -> values

    def unravel(self, vector: torch.Tensor) -> Tree:
        """Return the tree of a vector [size].

        A vector of the layout's own dtype gives each leaf its dtype back. Any other dtype is kept on every leaf: a mask
        stays a mask, float64 is never cut to float32.

        Raises:
            StructureError: the vector does not have shape [size].
        """
        if not isinstance(vector, torch.Tensor) or tuple(vector.shape) != (self.size,):
            raise StructureError(
                message("vector", f"a tensor of shape ({self.size},)", _got(vector), "pass one vector of this layout")
            )
        return self.build(self.split(vector, cast=vector.dtype == self.dtype))

    def unravel_rows(self, rows: torch.Tensor) -> Tree:
        """Return the tree of rows [n, size]: each leaf gets a leading axis n. Dtypes as in ``unravel``."""
        if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or rows.shape[1] != self.size:
            raise StructureError(
                message("rows", f"a tensor of shape (n, {self.size})", _got(rows), "pass rows of this layout")
            )
        return self.build(self.split(rows, cast=rows.dtype == self.dtype))

    def split(self, rows: torch.Tensor, cast: bool = True) -> tuple[torch.Tensor, ...]:
        """Return leaves [..., *shape] from [..., size]; views where the dtype allows; nothing is checked."""
        lead = rows.shape[:-1]
        parts = torch.split(rows, list(self.sizes), dim=-1) if len(self.sizes) > 1 else (rows,) * len(self.sizes)
        leaves = (part.reshape((*lead, *shape)) for part, shape in zip(parts, self.shapes, strict=True))
        if not cast:
            return tuple(leaves)
        return tuple(leaf.to(dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True))

    def build(self, leaves: Sequence[Any]) -> Tree:
        """Return the tree of these leaves."""
        return self.spec.unflatten(leaves)

    # columns

    def slices(self, prefix: str | Path) -> list[slice]:
        """Return the columns of a subtree, neighbours merged.

        Args:
            prefix: a dotted name ("encoder" or "encoder.weight") or a tuple of keys.

        Raises:
            StructureError: no leaf lies under ``prefix``.
        """
        found: list[slice] = []
        hit = False
        for path, name, offset, size in zip(self.paths, self.names, self.offsets, self.sizes, strict=True):
            if isinstance(prefix, str):
                inside = name == prefix or name.startswith(prefix + ".") or prefix == ""
            else:
                inside = path[: len(prefix)] == tuple(prefix)
            if not inside:
                continue
            hit = True
            if found and found[-1].stop == offset:
                found[-1] = slice(found[-1].start, offset + size)
            else:
                found.append(slice(offset, offset + size))
        if not hit:
            raise StructureError(
                message(
                    "prefix", f"the start of one of {list(self.names)}", repr(prefix), "use a name from layout.names"
                )
            )
        return found

    # text

    def to_json(self) -> str:
        """Return the layout as JSON: for each leaf its path, shape and dtype."""
        kinds = _path_kinds(self.spec)
        leaves = [
            {
                "path": [[kind, _json_key(key)] for kind, key in zip(kinds_of, path, strict=True)],
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
            }
            for path, kinds_of, shape, dtype in zip(self.paths, kinds, self.shapes, self.dtypes, strict=True)
        ]
        return json.dumps({"leaves": leaves}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read ``to_json`` back.

        ``unravel`` then gives nested dicts and lists with the same keys (a class that is not a dict, list or tuple
        becomes a dict of its fields): the vector can be taken apart without the code that made it.
        """
        try:
            leaves = json.loads(text)["leaves"]
            paths = [tuple((kind, _from_json_key(key)) for kind, key in leaf["path"]) for leaf in leaves]
            shapes = [tuple(leaf["shape"]) for leaf in leaves]
            dtypes = [getattr(torch, leaf["dtype"]) for leaf in leaves]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StructureError(
                message("text", "the JSON of Layout.to_json()", f"{text[:60]!r} ({error})", "pass that text unchanged")
            ) from None
        return cls(
            tuple(tuple(key for _, key in path) for path in paths),
            tuple(shapes),
            tuple(dtypes),
            flatten(_nest([(path, i) for i, path in enumerate(paths)]))[1],
        )


def _got(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def as_leaf(value: Any, name: str) -> torch.Tensor:
    """Return a leaf as a tensor; DtypeError names a leaf that is neither a tensor nor a number."""
    if isinstance(value, torch.Tensor):
        return value
    if is_number(value):
        return torch.as_tensor(value)
    raise DtypeError(
        message(f"leaf {name!r}", "a tensor or a number", type(value).__name__, "convert it with torch.as_tensor")
    )


def _path_kinds(spec: optree.PyTreeSpec) -> list[list[str]]:
    """Return, for each leaf, whether each step of its path is an index ("i"), a dict key ("k") or a field ("f")."""

    def kind(entry: Any) -> str:
        if isinstance(entry, optree.NamedTupleEntry | optree.DataclassEntry | optree.GetAttrEntry):
            return "f"
        if isinstance(entry, optree.MappingEntry):
            return "k"
        return "i" if isinstance(entry.entry, int) else "f"

    return [[kind(entry) for entry in accessor] for accessor in spec.accessors()]


def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """Return the path of each leaf: dict keys, positions, and field names (of namedtuples too)."""

    def key(entry: Any) -> Any:
        return entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry

    return tuple(tuple(key(entry) for entry in accessor) for accessor in spec.accessors())


def _json_key(key: Any) -> Any:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    if isinstance(key, tuple):
        return {"tuple": [_json_key(part) for part in key]}
    raise StructureError(
        message("tree", "dict keys that are strings, integers or tuples of those", repr(key), "rename the key")
    )


def _from_json_key(key: Any) -> Any:
    return tuple(_from_json_key(part) for part in key["tuple"]) if isinstance(key, dict) else key


def _nest(items: list[tuple[tuple[tuple[str, Any], ...], Any]]) -> Tree:
    """Build nested dicts and lists from (path, leaf) pairs."""
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    groups: dict[Any, list[tuple[tuple[tuple[str, Any], ...], Any]]] = {}
    for path, leaf in items:
        groups.setdefault(path[0], []).append((path[1:], leaf))
    if groups and all(kind == "i" for kind, _ in groups):
        by_index = {index: _nest(group) for (_, index), group in groups.items()}
        return [by_index.get(i) for i in range(max(by_index) + 1)]  # None (no leaf) where nothing lies
    return {key: _nest(group) for (_, key), group in groups.items()}


# ---------------------------------------------------------------------------------------------------------------------
# ravel, partition, combine


def ravel(tree: Tree) -> tuple[torch.Tensor, Callable[[torch.Tensor], Tree]]:
    """Flatten a tree into one vector, and return the way back.

    Args:
        tree: any tree of tensors; all floating point, or all integer. ``None`` is no leaf.

    Returns:
        ``(vector [p], unravel)``, leaves in dict insertion order, in the widest dtype. Differentiable, and usable under
        every torch.func transform. ``unravel`` gives each leaf its own dtype back; a vector of another dtype than
        ``vector`` keeps it (see ``Layout.unravel``).

    Raises:
        DtypeError: a leaf is no tensor, or integer and floating point leaves are mixed.

    >>> vector, unravel = ravel({"b": torch.tensor(1.0), "a": torch.tensor([2.0, 3.0])})
    >>> vector
    tensor([1., 2., 3.])
    >>> unravel(2 * vector)["a"]
    tensor([4., 6.])
    """
    layout = Layout.of(tree)
    return layout.ravel(tree), layout.unravel


def partition(tree: Tree, predicate: Callable[..., bool]) -> tuple[Tree, Tree]:
    """Split a tree in two by leaf: where ``predicate`` holds, and the rest. The other's leaves are None in each.

    Args:
        tree: any tree.
        predicate: ``predicate(name)`` on the dotted name, or ``predicate(name, leaf)``. A one-argument predicate that
            only reads attributes of the tensor (``lambda p: p.requires_grad``) works as well.

    >>> params = {"body": torch.zeros(2), "head": torch.ones(1)}
    >>> head, frozen = partition(params, lambda name: name.startswith("head"))
    >>> head["body"] is None, combine(head, frozen).keys()
    (True, dict_keys(['body', 'head']))
    """
    if not callable(predicate):
        raise TypeError(
            message("predicate", "a function of a leaf's name", type(predicate).__name__, "pass lambda name: ...")
        )
    leaves, spec = flatten(tree)
    chosen = [_decide(predicate, name_of(path), leaf) for path, leaf in zip(paths_of(spec), leaves, strict=True)]
    return (
        spec.unflatten([leaf if yes else None for leaf, yes in zip(leaves, chosen, strict=True)]),
        spec.unflatten([None if yes else leaf for leaf, yes in zip(leaves, chosen, strict=True)]),
    )


def _decide(predicate: Callable[..., bool], name: str, leaf: Any) -> bool:
    try:
        inspect.signature(predicate).bind(name, leaf)
    except (TypeError, ValueError):
        pass
    else:
        return bool(predicate(name, leaf))
    try:
        return bool(predicate(name))
    except (AttributeError, TypeError):
        return bool(predicate(leaf))


def combine(first: Tree, second: Tree) -> Tree:
    """Put the two halves of ``partition`` back together.

    Raises:
        StructureError: the halves have different structures, or both hold the same leaf.
    """
    none_is_leaf = {"none_is_leaf": True, "namespace": _NAMESPACE}
    for tree in (first, second):
        flatten(tree)
    mine, spec = optree.tree_flatten(first, **none_is_leaf)  # type: ignore[arg-type]
    try:
        theirs = spec.flatten_up_to(second)
    except (ValueError, TypeError) as error:
        other = optree.tree_structure(second, **none_is_leaf)  # type: ignore[arg-type]
        raise StructureError(
            message("second", f"the structure {spec}", f"{other} ({error})", "combine the two halves of one partition")
        ) from None
    for path, a, b in zip(paths_of(spec), mine, theirs, strict=True):
        if a is not None and b is not None:
            raise StructureError(
                message(f"leaf {name_of(path)!r}", "a value in one half only", "one in both", "set one of them to None")
            )
    return spec.unflatten([b if a is None else a for a, b in zip(mine, theirs, strict=True)])


# ---------------------------------------------------------------------------------------------------------------------
# the door: argnums, x, v, numbers


def check_number(value: Any, argument: str, *, low: float = 0.0, strict: bool = False, fix: str) -> float:
    """Return ``value`` as a float if it is a finite real number >= low (> low when strict)."""
    expected = f"a finite number {'>' if strict else '>='} {low:g}"
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.requires_grad and is_plain(value):
        value = value.item()
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(message(argument, expected, type(value).__name__, fix))
    number = float(value)
    if not math.isfinite(number) or number < low or (strict and number == low):
        raise ValueError(message(argument, expected, f"{number:g}", fix))
    return number


def check_count(value: Any, argument: str, *, low: int = 1, fix: str, none: str | None = None) -> int:
    """Return ``value`` as an int >= low; ``none`` says what None means where it is allowed (checked by the caller)."""
    expected = f"an integer >= {low}" + (f" or None ({none})" if none else "")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(message(argument, expected, f"{value!r}", fix))
    if value < low:
        raise ValueError(message(argument, expected, f"{value}", fix))
    return int(value)


def check_chunk(value: int | None) -> int | None:
    """Return a ``chunk_size``: None or an integer >= 1."""
    fix = "pass a positive integer, or None for all at once"
    return None if value is None else check_count(value, "chunk_size", fix=fix, none="all at once")


def check_choice(value: Any, argument: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        names = " or ".join(repr(choice) for choice in choices)
        raise ValueError(message(argument, names, repr(value), f"pass {argument}={choices[0]!r}"))
    return value


def check_callable(value: Any, argument: str, example: str) -> None:
    """Raise TypeError unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(message(argument, "a function", type(value).__name__, f"pass {example}"))


def check_generator(value: Any) -> torch.Generator | None:
    """Return a ``generator``: None or a torch.Generator."""
    if value is not None and not isinstance(value, torch.Generator):
        fix = "pass torch.Generator().manual_seed(seed)"
        raise TypeError(message("generator", "a torch.Generator or None", type(value).__name__, fix))
    return value


def check_args(x: Any) -> tuple[Any, ...]:
    """Return ``x`` as the tuple of func's arguments."""
    if not isinstance(x, tuple | list) or hasattr(x, "_fields"):
        raise TypeError(
            message("x", "a tuple of the arguments of func", type(x).__name__, "wrap a single argument as (params,)")
        )
    return tuple(x)


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is free of torch.func wrappers."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_argnums(argnums: Any, count: int) -> tuple[int, ...]:
    """Return ``argnums`` as non-negative positions among ``count`` arguments."""
    given = argnums if isinstance(argnums, tuple) else (argnums,)
    fix = "pass the position of the parameters, argnums=0 for the first argument"
    if not given or any(not isinstance(i, int) or isinstance(i, bool) for i in given):
        raise TypeError(message("argnums", "an int or a tuple of ints", repr(argnums), fix))
    if any(not -count <= i < count for i in given):
        raise ValueError(message("argnums", f"positions among {count} argument(s) of func", repr(argnums), fix))
    positions = tuple(i % count for i in given)
    if len(set(positions)) < len(positions):
        raise ValueError(message("argnums", "different positions", repr(argnums), "name each argument once"))
    return positions


Leaves = tuple[torch.Tensor, ...]
Loss = Callable[[Leaves, Leaves], torch.Tensor]


@dataclass(frozen=True)
class Point:
    """A loss at x, taken apart once: the differentiated leaves, the other tensors, and how to call func on them.

    ``loss(leaves, rest)`` rebuilds the arguments and calls ``func``. Everything behind the door works on these flat
    tuples; the user's trees are put together only to call ``func`` and to hand back an answer.
    """

    layout: Layout
    leaves: Leaves
    rest: Leaves
    argnums: tuple[int, ...]
    arguments: Callable[[Leaves, Leaves], tuple[Any, ...]] = field(repr=False)
    func: Callable[..., Any] = field(repr=False)

    def loss(self, leaves: Leaves, rest: Leaves) -> torch.Tensor:
        """Return func's value for these tensors."""
        return check_scalar(self.func(*self.arguments(leaves, rest)))

    def rows(self, v: Tree, argument: str = "v") -> tuple[torch.Tensor, bool]:
        """Return v as rows [k, p] in the working dtype, and whether it was one vector (k = 1)."""
        layout = self.layout
        found = flatten_like(layout.spec, v, argument, f"build {argument} like x[argnums], dict keys in any order")
        extra = None
        leaves = []
        for value, like, name, shape in zip(found, self.leaves, layout.names, layout.shapes, strict=True):
            leaf = f"{argument}[{name!r}]" if name else argument
            check_vector_leaf(value, like, leaf)
            ndim = value.ndim - len(shape)
            count = tuple(value.shape[:1]) if ndim == 1 else ()
            wrong = ndim not in (0, 1) or tuple(value.shape[ndim:]) != shape
            if wrong or (extra is not None and extra != count):
                expected = f"shape {shape}, or {('k', *shape)} for k vectors"
                if extra is not None and not wrong:
                    expected = f"shape {(*extra, *shape)}, as the leaves before it"
                fix = "give every leaf its parameter's shape, with one leading axis k on all leaves or on none"
                raise StructureError(message(leaf, expected, f"shape {tuple(value.shape)}", fix))
            extra = count
            leaves.append(value.to(self.work_dtype))
        if not extra:
            return layout.join(leaves).to(self.work_dtype).unsqueeze(0), True
        return layout.join(leaves), False

    def tree(self, rows: torch.Tensor, single: bool) -> Tree:
        """Return rows [k, p] (or the only row) as a tree like x[argnums], each leaf in its own dtype."""
        leaves = self.layout.split(rows.squeeze(0) if single else rows)
        pairs = zip(leaves, self.leaves, strict=True)
        return self.layout.build([leaf if leaf.device == like.device else leaf.to(like.device) for leaf, like in pairs])

    @cached_property
    def work_dtype(self) -> torch.dtype:
        """The dtype of rows: the widest leaf's, at least float32."""
        return torch.promote_types(self.layout.dtype, torch.float32)

    @cached_property
    def eps(self) -> float:
        """Rounding unit of the narrowest differentiated leaf: products are no better than that."""
        return max((torch.finfo(dtype).eps for dtype in self.layout.dtypes), default=torch.finfo(self.work_dtype).eps)


def check_scalar(value: Any) -> torch.Tensor:
    """Return func's value if it is a real 0-d tensor."""
    fix = "end func with .mean() or .sum()"
    if not isinstance(value, torch.Tensor):
        raise TypeError(message("func", "a loss that returns a scalar tensor", type(value).__name__, fix))
    if value.ndim != 0:
        got = f"shape {tuple(value.shape)}"
        raise StructureError(message("func", "a loss that returns a scalar tensor (0-d)", got, fix))
    if not value.is_floating_point():
        raise DtypeError(message("func", "a real floating point loss", str(value.dtype), "convert it with .float()"))
    return value


def check_vector_leaf(value: Any, like: torch.Tensor, leaf: str) -> None:
    """Raise unless ``value`` is a float tensor that fits beside the parameter ``like`` without losing digits."""
    if not isinstance(value, torch.Tensor):
        raise StructureError(message(leaf, "a tensor", type(value).__name__, "give v one tensor per parameter"))
    if value.dtype != like.dtype and torch.promote_types(value.dtype, like.dtype) != like.dtype:
        fix = f"convert v with .to({like.dtype}), or the parameters to {value.dtype}"
        raise DtypeError(message(leaf, f"dtype {like.dtype}, or a narrower float", str(value.dtype), fix))
    if not value.is_floating_point():
        fix = f"convert v with .to({like.dtype})"
        raise DtypeError(message(leaf, "a floating point tensor", str(value.dtype), fix))
    if value.device != like.device:
        fix = f"move v with .to({str(like.device)!r})"
        raise DtypeError(message(leaf, f"a tensor on {like.device}", f"one on {value.device}", fix))


def bind(func: Callable[..., Any], x: tuple[Any, ...], argnums: int | tuple[int, ...], detach: bool) -> Point:
    """Check ``func``, ``x`` and ``argnums``, and take x apart; ``detach`` makes x constant (the bound forms).

    Raises:
        TypeError, ValueError: func cannot be called, or argnums does not name arguments of it.
        DtypeError: a differentiated leaf is not a real floating point tensor.
    """
    check_callable(func, "func", "the loss itself, func(*x) -> scalar")
    if not x:
        raise StructureError(message("x", "at least one argument", "none", "pass the arguments of func"))
    positions = check_argnums(argnums, len(x))
    chosen = x[positions[0]] if not isinstance(argnums, tuple) else tuple(x[i] for i in positions)
    for leaf, path in _named(chosen):
        _check_differentiable(leaf, name_of(path) or f"x[{positions[0]}]")
    layout = Layout.of(chosen)
    flat = [flatten(argument) for argument in x]
    # Where each tensor goes: differentiated leaves in argnums order, other tensors in argument order, constants stay.
    slots: list[list[tuple[str, Any]]] = []
    leaves: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    starts: dict[int, int] = {}
    for i in positions:
        starts[i] = len(leaves)
        leaves += flat[i][0]
    for i, (values, _) in enumerate(flat):
        slot: list[tuple[str, Any]] = []
        for j, value in enumerate(values):
            if i in starts:
                slot.append(("leaf", starts[i] + j))
            elif isinstance(value, torch.Tensor):
                slot.append(("rest", len(rest)))
                rest.append(value)
            else:
                slot.append(("constant", value))
        slots.append(slot)
    specs = [spec for _, spec in flat]

    def arguments(leaves: Leaves, rest: Leaves) -> tuple[Any, ...]:
        source = {"leaf": leaves, "rest": rest}
        return tuple(
            spec.unflatten([at if kind == "constant" else source[kind][at] for kind, at in slot])
            for spec, slot in zip(specs, slots, strict=True)
        )

    if detach:
        leaves = [leaf.detach() for leaf in leaves]
        rest = [tensor.detach() for tensor in rest]
    return Point(layout, tuple(leaves), tuple(rest), positions, arguments, func)


def _named(tree: Tree) -> list[tuple[Any, Path]]:
    leaves, spec = flatten(tree)
    return list(zip(leaves, paths_of(spec), strict=True))


def _check_differentiable(leaf: Any, name: str) -> None:
    fix = "differentiate only float leaves: move this one to another argument, or split it off with partition()"
    if not isinstance(leaf, torch.Tensor):
        raise DtypeError(message(f"leaf {name!r}", "a floating point tensor", type(leaf).__name__, fix))
    if not leaf.is_floating_point():
        raise DtypeError(message(f"leaf {name!r}", "a real floating point tensor", str(leaf.dtype), fix))
