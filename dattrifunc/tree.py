"""Trees and flat vectors: one leaf order, one layout, one set of checks at the door.

Leaf order is dict insertion order, everywhere. ``optree`` sorts dict keys unless told otherwise, so this module keeps a
namespace of its own in which it does not; classes registered with torch's pytree registry are known there too. Nothing
outside this module flattens a user's tree.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import optree
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as torch_pytree

from .errors import DtypeError, StructureError, message

__all__ = ["Layout", "combine", "partition", "ravel"]

Tree = Any
Path = tuple[Any, ...]

_NAMESPACE = "dattrifunc"
# optree restores the sorted order when this context manager is closed or forgotten; atexit holds it for the life of the
# process, also when this module is loaded again.
_INSERTION_ORDER = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_INSERTION_ORDER.__enter__()
atexit.register(_INSERTION_ORDER.__exit__, None, None, None)

_ADOPTING = threading.Lock()
_ADOPTED: set[type] = set()
_LEAVES = {torch.Size, type(None)}  # nodes to torch, not to us
_LONGEST = 300  # characters of a structure, or of a list of names, in a message


# ---------------------------------------------------------------------------------------------------------------------
# flatten and unflatten


def _adopt(cls: type) -> None:
    """Make a class of torch's pytree registry a node of our namespace, once."""
    with _ADOPTING:
        if cls not in _ADOPTED:
            _register(cls)
            _ADOPTED.add(cls)


def _register(cls: type) -> None:
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


def flatten(tree: Tree, argument: str = "tree", none_is_leaf: bool = False) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of ``tree`` in insertion order, and the structure that puts them back. None is no leaf."""
    try:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=none_is_leaf, namespace=_NAMESPACE)
    except RecursionError:
        expected = "containers nested at most some hundreds deep, none inside itself"
        fix = "look for a list or dict that holds itself, or use flatter containers"
        raise StructureError(message(argument, expected, "a deeper or endless nest", fix)) from None
    foreign = {type(leaf) for leaf in leaves} & torch_pytree.SUPPORTED_NODES.keys() - _LEAVES
    if not foreign:
        return leaves, spec
    for cls in foreign:
        _adopt(cls)
    return flatten(tree, argument, none_is_leaf)


def flatten_like(spec: optree.PyTreeSpec, tree: Tree, argument: str, fix: str) -> list[Any]:
    """Return the leaves of ``tree`` in the order of ``spec``, dicts matched by key, or StructureError."""
    try:
        parts = spec.flatten_up_to(tree)
    except (ValueError, TypeError):
        parts = None
    if parts is not None and all(isinstance(part, torch.Tensor) for part in parts):
        return parts  # what nearly every call gets
    got = flatten(tree, argument, spec.none_is_leaf)[1]  # also adopts classes that only torch's registry knows
    try:
        parts = spec.flatten_up_to(tree)
    except (ValueError, TypeError):
        parts = None
    if parts is None or any(part is not None and not _is_leaf(part) for part in parts) or got.num_leaves != len(parts):
        expected = f"the structure {describe(spec)}"
        raise StructureError(message(argument, expected, describe(got), f"{fix} ({_difference(spec, got)})"))
    return parts


def _is_leaf(part: Any) -> bool:
    return isinstance(part, torch.Tensor) or optree.tree_is_leaf(part, namespace=_NAMESPACE)


def _difference(want: optree.PyTreeSpec, got: optree.PyTreeSpec) -> str:
    """Say in words what sets two structures apart."""
    expected, found = dict.fromkeys(paths_of(want)), dict.fromkeys(paths_of(got))
    missing = [name_of(path) for path in expected if path not in found]
    extra = [name_of(path) for path in found if path not in expected]
    if not missing and not extra:
        return "the leaves have the same names, a container is of another type"
    said = [f"{word} {names_text(names)}" for word, names in (("missing", missing), ("unexpected", extra)) if names]
    return ", ".join(said)


def names_text(names: Sequence[str]) -> str:
    """Return names as text for a message, the first few of many."""
    text, shown = "", 0
    for name in names:
        if shown and len(text) + len(name) > _LONGEST:
            break
        text, shown = f"{text}{', ' if shown else ''}{repr(name) if name else 'a leaf without a key'}", shown + 1
    return text + (f" and {len(names) - shown} more" if shown < len(names) else "")


def flatten_dims(in_dims: Any, tree: Tree, argument: str) -> list[int | None]:
    """Return the sample axis of each leaf of ``tree``, from an int, None, or a tree of those that may end early.

    ``{"x": 0, "mask": None}`` fits ``{"mask": ..., "x": {"ids": ..., "kind": ...}}``: dicts are matched by key.

    Raises:
        StructureError: ``in_dims`` has another structure than the argument it belongs to.
        TypeError: a leaf of ``in_dims`` is neither an int nor None.
    """
    spec = flatten(tree)[1]
    dims, prefix = flatten(in_dims, argument, none_is_leaf=True)
    fix = "give an int or None for the whole argument, or a tree of those with its keys"
    for dim in dims:
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise TypeError(message(argument, "int or None at each leaf, as in torch.func.vmap", repr(dim), fix))
    try:
        parts = prefix.flatten_up_to(tree)
    except (ValueError, TypeError):
        raise StructureError(message(argument, f"a part of {describe(spec)}", repr(in_dims), fix)) from None
    below = [flatten(part)[1] for part in parts]
    # Text stands for None here, which is no leaf: the answer comes in the order of ``tree``, not of ``in_dims``.
    marks = [s.unflatten([str(dim)] * s.num_leaves) for s, dim in zip(below, dims, strict=True)]
    found = flatten_like(spec, prefix.unflatten(marks), argument, fix)
    return [None if mark == "None" else int(mark) for mark in found]


def describe(spec: optree.PyTreeSpec) -> str:
    """Return the structure as text, without the namespace; the middle of a long one is left out."""
    text = str(spec).removeprefix("PyTreeSpec(").removesuffix(")")
    text = text.removesuffix(f", namespace='{_NAMESPACE}'").removesuffix(", NoneIsLeaf")
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]} ({spec.num_leaves} leaves)"


def name_of(path: Path) -> str:
    """Return the dotted name of a leaf."""
    return ".".join(str(key) for key in path)


def is_number(value: Any) -> bool:
    """Say whether ``value`` is a plain Python number (bool, int or float)."""
    return isinstance(value, bool | int | float)


# ---------------------------------------------------------------------------------------------------------------------
# layout


def _widest(dtypes: Sequence[torch.dtype], names: Sequence[str]) -> torch.dtype:
    """Return the dtype that holds every leaf exactly: all floating point, all integer (or bool), or all complex."""
    if not dtypes:
        return torch.get_default_dtype()

    def kind(dtype: torch.dtype) -> str:
        return "a complex" if dtype.is_complex else "a floating point" if dtype.is_floating_point else "an integer"

    common = "a floating point" if any(kind(dtype) == "a floating point" for dtype in dtypes) else kind(dtypes[0])
    widest: torch.dtype | None = None
    for dtype, name in zip(dtypes, names, strict=True):
        expected = f"{common} tensor like the other leaves"
        if kind(dtype) != common:
            fix = "keep it out of the vector with partition(), or convert it"
            raise DtypeError(message(label(name), expected, str(dtype), fix))
        try:
            widest = dtype if widest is None else torch.promote_types(widest, dtype)
        except RuntimeError:
            got = f"{dtype} beside {widest}, for which torch has no common dtype"
            raise DtypeError(message(label(name), expected, got, "convert one of the two with .to()")) from None
    assert widest is not None
    return widest


@dataclass(frozen=True)
class Layout:
    """Where each leaf of a tree lies in its flat vector: static metadata, no values.

    Leaves come in dict insertion order. ``offsets[i] : offsets[i] + sizes[i]`` are the columns of leaf ``i``; a leaf is
    laid out in row-major order. The vector's dtype is the widest of the leaves'. A tensor that occurs twice has two
    blocks of columns: keep one of tied weights, as ``named_parameters()`` does.

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
        offsets = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        for name, value in (("sizes", sizes), ("offsets", offsets), ("size", sum(sizes))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dtype", _widest(self.dtypes, self.names))

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        """Read the layout off a tree of tensors (or Python numbers; a float takes the dtype of the tensors beside it).

        Raises:
            StructureError: the tree is endless, or too deep.
            DtypeError: a leaf is neither a dense tensor nor a number, or integer leaves are mixed with floating point
                ones.
        """
        leaves, spec = flatten(tree)
        paths = paths_of(spec)
        names = [name_of(path) for path in paths]
        tensors = [as_leaf(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        given = zip(leaves, names, strict=True)
        floats = {
            name: leaf.dtype for leaf, name in given if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        }
        weak = _widest(list(floats.values()), list(floats))
        dtypes = (weak if isinstance(leaf, float) else t.dtype for leaf, t in zip(leaves, tensors, strict=True))
        return cls(paths, tuple(tuple(t.shape) for t in tensors), tuple(dtypes), spec)

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
        """Return the vector [size] of a tree with this layout's structure and shapes, in the widest of its dtypes.

        The vector never shares memory with the tree.

        Raises:
            StructureError: another structure, or a leaf of another shape.
            DtypeError: a leaf is no dense tensor, or integer leaves are mixed with floating point ones.
        """
        leaves = self._leaves(tree, 0)
        return self.join(leaves) if len(leaves) != 1 else self.join(leaves).clone()

    def ravel_rows(self, tree: Tree) -> torch.Tensor:
        """Return the rows [n, size] of a tree whose leaves carry one more leading axis n (n = 0 without leaves).

        Raises:
            StructureError, DtypeError: as ``ravel``, or the leaves do not agree on n.
        """
        leaves = self._leaves(tree, 1)
        if not leaves:
            return torch.zeros(0, 0, dtype=self.dtype)
        return self.join(leaves) if len(leaves) != 1 else self.join(leaves).clone()

    def _leaves(self, tree: Tree, extra: int) -> list[torch.Tensor]:
        found = flatten_like(self.spec, tree, "tree", "pass a tree with the layout's structure")
        leaves = [as_leaf(*item) for item in zip(found, self.names, self.dtypes, strict=True)]
        for leaf, shape, name in zip(leaves, self.shapes, self.names, strict=True):
            if leaf.ndim != len(shape) + extra or tuple(leaf.shape[extra:]) != shape:
                expected = f"shape {_led('n', shape) if extra else shape}"
                fix = "pass one vector's tree, with the shapes that the layout was read from"
                if extra:
                    fix = "give every leaf one leading axis n before its own shape"
                raise StructureError(message(label(name), expected, f"shape {tuple(leaf.shape)}", fix))
            if leaf.is_meta != leaves[0].is_meta:
                fix = "give every leaf its values first, as with module.to_empty(device='cpu')"
                raise DtypeError(message(label(name), "leaves that all have values", "some on device meta", fix))
            if extra and leaf.shape[0] != leaves[0].shape[0]:
                expected = f"{leaves[0].shape[0]} rows, as on {label(self.names[0])}"
                fix = "stack the same samples on every leaf"
                raise StructureError(message(label(name), expected, f"{leaf.shape[0]} rows", fix))
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
        stays a mask, float64 is never cut to float32. Leaves share memory with the vector where they can.

        Raises:
            StructureError: the vector is no dense tensor of shape [size].
        """
        if not is_dense(vector) or tuple(vector.shape) != (self.size,):
            fix = "pass one vector of this layout" + _rows_hint(vector, self.size)
            raise StructureError(message("vector", f"a dense tensor of shape ({self.size},)", _got(vector), fix))
        return self.build(self.split(vector, cast=vector.dtype == self.dtype))

    def unravel_rows(self, rows: torch.Tensor) -> Tree:
        """Return the tree of rows [n, size]: each leaf gets a leading axis n. Dtypes as in ``unravel``.

        Raises:
            StructureError: the rows are no dense tensor of shape [n, size].
        """
        if not is_dense(rows) or rows.ndim != 2 or rows.shape[1] != self.size:
            fix = "pass rows of this layout" + _rows_hint(rows, self.size)
            raise StructureError(message("rows", f"a dense tensor of shape (n, {self.size})", _got(rows), fix))
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

    def slices(self, prefix: Any) -> list[slice]:
        """Return the columns of a subtree, neighbours merged.

        Args:
            prefix: a dotted name ("encoder" or "encoder.weight") or a tuple of keys. "" and () are the whole tree.

        Raises:
            TypeError: ``prefix`` is neither.
            StructureError: no leaf lies under ``prefix``.
        """
        if not isinstance(prefix, str | tuple | list):
            fix = f"pass one of layout.names or layout.paths, such as ({prefix!r},) for the key {prefix!r}"
            raise TypeError(message("prefix", "a dotted name or a tuple of keys", _got(prefix), fix))
        found: list[slice] = []
        hit = len(prefix) == 0
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
            expected = f"the start of one of {names_text(self.names)}" if self.names else "'' (the tree has no leaves)"
            raise StructureError(message("prefix", expected, repr(prefix), "take a name from layout.names"))
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

        Raises:
            StructureError: the text is not what ``to_json`` writes.
        """
        try:
            leaves = json.loads(text)["leaves"]
            paths = [_read_path(leaf["path"]) for leaf in leaves]
            shapes = tuple(_read_shape(leaf["shape"]) for leaf in leaves)
            dtypes = tuple(_read_dtype(leaf["dtype"]) for leaf in leaves)
            order, spec = flatten(_nest([(path, i) for i, path in enumerate(paths)]))
            if order != list(range(len(paths))):
                raise ValueError("two leaves have the same path, or paths are out of order")
            return cls(tuple(tuple(key for _, key in path) for path in paths), shapes, dtypes, spec)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            why = f"no {error} in it" if isinstance(error, KeyError) else str(error)
            got = f"{_shorten(repr(text), 60)} ({_shorten(why, 200)})"
            fix = "pass the text that to_json() returned, unchanged"
            raise StructureError(message("text", "the JSON of Layout.to_json()", got, fix)) from None


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _led(axis: str, shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, (axis, *shape)))}{',' * (not shape)})"


def _got(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if not is_dense(value):
        return f"a tensor that is {_form(value)}"
    return f"shape {tuple(value.shape)}"


def _rows_hint(value: Any, size: int) -> str:
    if not isinstance(value, torch.Tensor):
        return ", as a torch.Tensor"
    if not is_dense(value):
        return ", made dense with .to_dense()"
    if value.ndim == 2 and value.shape[1] == size:
        return ", or call unravel_rows for rows"
    if value.ndim == 1 and value.shape[0] == size:
        return ", or call unravel for one vector"
    return ""


def label(name: str) -> str:
    """Return how a message names a leaf; a tree that is one bare leaf has no name."""
    return f"leaf {name!r}" if name else "tree"


def is_dense(value: Any) -> bool:
    """Say whether ``value`` is a tensor with one number per element, laid out with strides."""
    return isinstance(value, torch.Tensor) and not _form(value)


def _form(tensor: torch.Tensor) -> str:
    """Return what keeps a tensor from being reshaped: "sparse_coo", "nested", ..., or "" for an ordinary one."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "uninitialized"
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.").lstrip("_")


def as_leaf(value: Any, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a leaf as a tensor, a number in ``dtype`` if that is floating point.

    Raises:
        DtypeError: the leaf is neither a dense tensor nor a number.
    """
    if isinstance(value, torch.Tensor):
        form = _form(value)
        if not form:
            return value
        fix = {
            "uninitialized": "run the module once, so that its lazy parameters get their shapes",
            "nested": "pad it with .to_padded_tensor(0.0), or give each part a leaf of its own",
            "quantized": "convert it with .dequantize()",
        }.get(form, "convert it with .to_dense()")
        raise DtypeError(message(label(name), "a dense tensor", f"one that is {form}", fix))
    if is_number(value):
        return torch.as_tensor(value, dtype=dtype if dtype is not None and dtype.is_floating_point else None)
    raise DtypeError(message(label(name), "a tensor or a number", type(value).__name__, _advice(value)))


def _advice(value: Any) -> str:
    """Say what to do with a leaf that is no tensor."""
    if isinstance(value, torch.nn.Module):
        return "pass dict(module.named_parameters())"
    if isinstance(value, set | frozenset | Iterator | Mapping):
        return "put the tensors in a dict, a list or a tuple"
    if dataclasses.is_dataclass(value):
        return "register the class with torch.export.register_dataclass, or use a dict"
    if hasattr(value, "__array__") or isinstance(value, torch.Size):
        return "convert it with torch.as_tensor"
    return "keep it out of the tree, as with partition(tree, lambda name, leaf: torch.is_tensor(leaf))"


# One step of a path in JSON: "i" an index, "k" a dict key, "f" a field.
Step = tuple[str, Any]
_MOST_INDEX = 10**6  # a longer list is no list of leaves, but a damaged text


def _read_path(steps: Any) -> tuple[Step, ...]:
    path = tuple((kind, _from_json_key(key)) for kind, key in steps)
    for kind, key in path:
        if kind not in ("i", "k", "f") or (kind == "i" and not (isinstance(key, int) and 0 <= key < _MOST_INDEX)):
            raise ValueError(f"{[kind, key]} is no step of a path")
    return path


def _read_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape} is no shape")
    return tuple(shape)


def _read_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


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


def _nest(items: list[tuple[tuple[Step, ...], Any]]) -> Tree:
    """Build nested dicts and lists from (path, leaf) pairs."""
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    groups: dict[Step, list[tuple[tuple[Step, ...], Any]]] = {}
    for path, leaf in items:
        if not path:
            raise ValueError("a leaf lies at the path of another, or above it")
        groups.setdefault(path[0], []).append((path[1:], leaf))
    indices = [index for kind, index in groups if kind == "i"]
    if groups and len(indices) == len(groups) and indices == sorted(indices):
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
        predicate: ``predicate(name)`` on the dotted name, or ``predicate(name, leaf)`` when both arguments are
            required. A one-argument predicate that only reads attributes of the tensor (``lambda p: p.requires_grad``)
            works as well.

    Raises:
        TypeError: ``predicate`` is no function of a leaf, or does not answer yes or no.

    >>> params = {"body": torch.zeros(2), "head": torch.ones(1)}
    >>> head, frozen = partition(params, lambda name: name.startswith("head"))
    >>> head["body"] is None, combine(head, frozen).keys()
    (True, dict_keys(['body', 'head']))
    """
    if not callable(predicate):
        raise TypeError(
            message("predicate", "a function of a leaf's name", _got(predicate), "pass lambda name: name == 'head'")
        )
    leaves, spec = flatten(tree)
    both = _takes_both(predicate)
    chosen = [_decide(predicate, both, name_of(path), leaf) for path, leaf in zip(paths_of(spec), leaves, strict=True)]
    return (
        spec.unflatten([leaf if yes else None for leaf, yes in zip(leaves, chosen, strict=True)]),
        spec.unflatten([None if yes else leaf for leaf, yes in zip(leaves, chosen, strict=True)]),
    )


def _takes_both(predicate: Callable[..., bool]) -> bool:
    """Say whether ``predicate`` wants (name, leaf); a default, as in ``lambda name, keep=keep: ...``, stays."""
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = sum(p.default is p.empty for p in positional)
    rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    stuck = any(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if required > 2 or stuck or not (positional or rest):
        expected = "a function of a leaf's name, or of (name, leaf)"
        fix = "pass lambda name: name == 'head'"
        raise TypeError(message("predicate", expected, f"one of {inspect.signature(predicate)}", fix))
    return required == 2 or (rest and len(positional) < 2)


def _decide(predicate: Callable[..., bool], both: bool, name: str, leaf: Any) -> bool:
    if both:
        answer: Any = predicate(name, leaf)
    else:
        try:
            answer = predicate(name)
        except (AttributeError, TypeError):
            answer = predicate(leaf)
    if isinstance(answer, torch.Tensor) and answer.numel() != 1:
        fix = "reduce it with .all() or .any()"
        raise TypeError(message("predicate", f"True or False for {label(name)}", _got(answer), fix))
    return bool(answer)


def combine(first: Tree, second: Tree) -> Tree:
    """Put the two halves of ``partition`` back together.

    Raises:
        StructureError: the halves have different structures, or both hold the same leaf.
    """
    mine, spec = flatten(first, "first", none_is_leaf=True)
    theirs = flatten_like(spec, second, "second", "combine the two halves of one partition")
    for path, a, b in zip(paths_of(spec), mine, theirs, strict=True):
        if a is not None and b is not None:
            fix = "set it to None in one of them, as partition() does"
            raise StructureError(message(label(name_of(path)), "a value in one half, None in the other", "two", fix))
    return spec.unflatten([b if a is None else a for a, b in zip(mine, theirs, strict=True)])


# ---------------------------------------------------------------------------------------------------------------------
# the door: argnums, x, v, numbers


def check_number(value: Any, argument: str, *, low: float = 0.0, strict: bool = False, fix: str) -> float:
    """Return ``value`` as a float if it is a finite real number >= low (> low when strict)."""
    expected = f"a finite number {'>' if strict else '>='} {low:g}"
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.requires_grad and is_plain(value):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = f"a tensor of {_got(value)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(message(argument, expected, got, fix))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low or (strict and number == low):
        raise ValueError(message(argument, expected, f"{number:g}", fix))
    return number


def check_count(value: Any, argument: str, *, low: int = 1, fix: str, none: str | None = None) -> int:
    """Return ``value`` as an int >= low; ``none`` says what None means where it is allowed (checked by the caller)."""
    expected = f"an integer >= {low}" + (f" or None ({none})" if none else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
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
    joint: bool  # argnums came as a tuple, so vectors are tuples of trees
    arguments: Callable[[Leaves, Leaves], tuple[Any, ...]] = field(repr=False)
    take: Callable[[tuple[Any, ...]], tuple[Leaves, Leaves]] = field(repr=False)
    func: Callable[..., Any] = field(repr=False)

    def loss(self, leaves: Leaves, rest: Leaves) -> torch.Tensor:
        """Return func's value for these tensors."""
        return check_scalar(self.func(*self.arguments(leaves, rest)))

    def rows(self, v: Tree, argument: str = "v") -> tuple[torch.Tensor, bool]:
        """Return v as rows [k, p] in the working dtype, and whether it was one vector (k = 1).

        The rows may share memory with v: they are for reading.
        """
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
                expected = f"shape {shape}, or {_led('k', shape)} for k vectors"
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


def check_scalar(value: Any, argument: str = "func") -> torch.Tensor:
    """Return func's value if it is a real 0-d tensor."""
    fix = f"end {argument} with .mean() or .sum()"
    if not isinstance(value, torch.Tensor):
        raise TypeError(message(argument, "a loss that returns a scalar tensor", type(value).__name__, fix))
    if value.ndim != 0:
        got = f"shape {tuple(value.shape)}"
        raise StructureError(message(argument, "a loss that returns a scalar tensor (0-d)", got, fix))
    if not value.is_floating_point():
        raise DtypeError(message(argument, "a real floating point loss", str(value.dtype), "convert it with .float()"))
    return value


def check_vector_leaf(value: Any, like: torch.Tensor, leaf: str) -> None:
    """Raise unless ``value`` is a float tensor that fits beside the parameter ``like`` without losing digits."""
    if not isinstance(value, torch.Tensor):
        raise StructureError(message(leaf, "a tensor", type(value).__name__, "give v one tensor per parameter"))
    if not is_dense(value):
        raise DtypeError(message(leaf, "a dense tensor", _got(value), "convert it with .to_dense()"))
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
        _check_differentiable(leaf, name_of(path), positions[0])
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

    def take(arguments: tuple[Any, ...]) -> tuple[Leaves, Leaves]:
        fix = "call func with arguments built like x"
        flat = [flatten_like(spec, argument, "x", fix) for spec, argument in zip(specs, arguments, strict=True)]
        others = (value for i, values in enumerate(flat) if i not in starts for value in values)
        chosen = tuple(value for i in positions for value in flat[i])
        return chosen, tuple(value for value in others if isinstance(value, torch.Tensor))

    if detach:
        leaves = [leaf.detach() for leaf in leaves]
        rest = [tensor.detach() for tensor in rest]
    joint = isinstance(argnums, tuple)
    return Point(layout, tuple(leaves), tuple(rest), positions, joint, arguments, take, func)


def _named(tree: Tree) -> list[tuple[Any, Path]]:
    leaves, spec = flatten(tree)
    return list(zip(leaves, paths_of(spec), strict=True))


def _check_differentiable(leaf: Any, name: str, position: int) -> None:
    where = label(name) if name else f"x[{position}]"
    fix = "differentiate only float leaves: move this one to another argument, or split it off with partition()"
    if not isinstance(leaf, torch.Tensor):
        if not is_number(leaf):
            fix = _advice(leaf)
        raise DtypeError(message(where, "a floating point tensor", type(leaf).__name__, fix))
    if not leaf.is_floating_point():
        raise DtypeError(message(where, "a real floating point tensor", str(leaf.dtype), fix))
