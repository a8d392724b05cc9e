"""A fingerprint of parameters, losses and data, to know stored rows by."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from .errors import message
from .store import as_bytes

__all__ = ["fingerprint"]


def fingerprint(*things: Any) -> str:
    """Return a SHA-256 hex digest of values and functions, equal in every process that holds the same.

    Tensors and arrays count with dtype, shape and bytes; containers with their order; functions with their bytecode,
    constants, names, defaults and what they close over or read from their module; other objects with their class and
    attributes. Of the functions of torch, NumPy and the standard library only the name counts, and torch's version.

    Raises:
        TypeError: something that has neither value, code nor attributes.

    >>> fingerprint({"w": torch.ones(2)}) == fingerprint({"w": torch.ones(2)})
    True
    >>> fingerprint(lambda w: 2 * w) == fingerprint(lambda w: 3 * w)
    False
    """
    digest = _Digest()
    digest.put("torch", torch.__version__)
    for thing in things:
        digest.add(thing)
    return digest.sha.hexdigest()


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "optree"}


class _Digest:
    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.seen: dict[int, int] = {}  # functions, classes and objects by identity: they may refer to each other

    def put(self, tag: str, payload: str | bytes | memoryview = b"") -> None:
        data = payload.encode() if isinstance(payload, str) else payload
        self.sha.update(f"{tag}:{len(data)}:".encode())
        self.sha.update(data)

    def add(self, thing: Any) -> None:
        if thing is None or thing is Ellipsis or isinstance(thing, bool | int | float | complex | str | bytes):
            self.put(type(thing).__name__, thing if isinstance(thing, bytes | str) else repr(thing))
        elif isinstance(thing, torch.Tensor):
            self._tensor(thing)
        elif isinstance(thing, np.ndarray | np.generic):
            self._array(np.asarray(thing))
        elif isinstance(thing, dict):
            self._many("dict", thing.items())
        elif isinstance(thing, list | tuple | deque | range | slice):
            parts = (thing.start, thing.stop, thing.step) if isinstance(thing, slice) else tuple(thing)
            self._many(type(thing).__name__, parts)
        elif isinstance(thing, set | frozenset):
            self._many("set", sorted(fingerprint(part) for part in thing))
        elif isinstance(thing, torch.dtype | torch.device | torch.layout | os.PathLike):
            self.put(type(thing).__name__, str(thing))
        elif isinstance(thing, torch.Generator):
            self._tensor(thing.get_state())
        elif isinstance(thing, types.ModuleType):
            self.put("module", thing.__name__)
        elif isinstance(thing, types.CodeType):
            self._code(thing)
        elif id(thing) in self.seen:
            self.put("again", str(self.seen[id(thing)]))
        else:
            self.seen[id(thing)] = len(self.seen)
            self._object(thing)

    def _many(self, tag: str, parts: Any) -> None:
        parts = list(parts)
        self.put(tag, str(len(parts)))
        for part in parts:
            self.add(part)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.put("tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
        if tensor.numel():
            flat = tensor.detach().cpu().reshape(-1)
            flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
            self.put("bytes", flat.view(torch.uint8).numpy().data)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.put("array", f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self.add(array.tolist())
        else:
            self.put("bytes", as_bytes(array))

    def _code(self, code: types.CodeType) -> None:
        self.put("code", code.co_code)
        self._many("consts", code.co_consts)
        self._many("names", (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))

    def _object(self, thing: Any) -> None:
        if isinstance(thing, functools.partial):
            self._many("partial", (thing.func, thing.args, thing.keywords))
        elif isinstance(thing, types.MethodType):
            self._many("method", (thing.__func__, thing.__self__))
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self.put("class", f"{thing.__module__}.{thing.__qualname__}")
            if not _is_library(thing):
                parts = [(k, v) for k, v in vars(thing).items() if not k.startswith("__") or callable(v)]
                slots = types.GetSetDescriptorType | types.MemberDescriptorType
                self._many("body", [part for part in parts if not isinstance(part[1], slots)])
                self._many("bases", thing.__bases__)
        elif isinstance(thing, staticmethod | classmethod):
            self._many(type(thing).__name__, (thing.__func__,))
        elif isinstance(thing, property):
            self._many("property", (thing.fget, thing.fset))
        elif isinstance(thing, types.BuiltinFunctionType | types.WrapperDescriptorType | types.MethodDescriptorType):
            self.put("builtin", f"{getattr(thing, '__module__', '')}.{thing.__qualname__}")
        elif (
            _is_library(type(thing))
            and callable(thing)
            and hasattr(thing, "__name__")
            and not hasattr(thing, "__dict__")
        ):
            self.put("named", f"{type(thing).__qualname__} {thing.__name__}")
        else:
            names = [name for cls in type(thing).__mro__ for name in _slots(cls) if hasattr(thing, name)]
            if not hasattr(thing, "__dict__") and not names:
                fix = "close over tensors, numbers, modules and functions only"
                raise TypeError(message("fingerprint", "a value, a function or an object", repr(type(thing)), fix))
            self.add(type(thing))
            self.add(dict(getattr(thing, "__dict__", {})))
            self.add({name: getattr(thing, name) for name in names})

    def _function(self, function: types.FunctionType) -> None:
        self.put("function", f"{function.__module__}.{function.__qualname__}" if _is_library(function) else "")
        if _is_library(function):
            return
        self._code(function.__code__)
        self._many("defaults", (function.__defaults__, function.__kwdefaults__))
        self._many("closure", [_content(cell) for cell in function.__closure__ or ()])
        known = function.__globals__
        self._many("globals", [(name, known[name]) for name in _names(function.__code__) if name in known])


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _is_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _LIBRARIES - {"__main__"}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> list[str]:
    """Return the names that code, and code inside it, may read from its module."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names(constant))
    return list(found)
