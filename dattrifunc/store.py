"""A store of rows on disk: a folder of plain .npy files that any NumPy program can map, and a JSON header.

An append is whole or not there, and durable when it returns: the numbers are written and flushed first, then one line
of a journal. Closing replaces the journal by the header, in one step. A process killed at any moment leaves a prefix of
whole blocks.
"""

from __future__ import annotations

import importlib
import json
import math
import numbers
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from .errors import DtypeError, StructureError, message
from .tree import Layout, Tree, check_choice, check_count, flatten, paths_of

# Where there are no file locks, two writers of one store are not told apart.
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

__all__ = [
    "RowStore",
    "StoreExistsError",
    "StoreMissingError",
    "as_bytes",
    "check_layout",
    "float_dtype",
    "named",
    "rows_of",
]

_FORMAT = "dattrifunc rows"
_DTYPES = {  # name -> (torch dtype, what lies on disk)
    "float64": (torch.float64, "<f8"),
    "float32": (torch.float32, "<f4"),
    "float16": (torch.float16, "<f2"),
    "bfloat16": (torch.bfloat16, "<u2"),
}
_PREFIX = 128  # bytes before the numbers of a .npy file
_ROWS, _HEADER, _JOURNAL = "rows.npy", "header.json", "journal.part"
_IDS = {"int64": ("ids.npy", _PREFIX), "str": ("ids.jsonl", 0)}


class StoreExistsError(FileExistsError, ValueError):
    """A path where a store is to be created holds something."""


class StoreMissingError(FileNotFoundError, ValueError):
    """There is no store at a path."""


def float_dtype(dtype: Any) -> torch.dtype:
    """Return a store's dtype, from its name or torch's object."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype) or name not in _DTYPES:
        raise DtypeError(message("dtype", f"one of {list(_DTYPES)}", repr(dtype), "pass dtype='float32'"))
    return _DTYPES[name][0]


class _Block(NamedTuple):
    """One append: how many rows, the checksum of their bytes, and the same of the ids."""

    rows: int
    crc32: int
    ids: str
    ids_bytes: int
    ids_crc32: int


def _npy_prefix(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a .npy file (format 1.0), of one length whatever the shape."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + (_PREFIX - 10).to_bytes(2, "little") + text.ljust(_PREFIX - 11).encode() + b"\n"


class _File:
    """A file that grows at its end, and is cut back when an append fails."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)

    def put(self, offset: int, data: bytes | memoryview) -> None:
        os.lseek(self.fd, offset, os.SEEK_SET)
        view = memoryview(data)
        while len(view):
            view = view[os.write(self.fd, view) :]

    def cut(self, end: int) -> None:
        os.ftruncate(self.fd, end)

    def sync(self) -> None:
        os.fsync(self.fd)

    def lock(self, path: Path) -> None:
        """Keep other writers out until the file is closed."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = "close the other writer first, or open with mode='r'"
            raise ValueError(message("path", "a store that nobody is writing", f"{path}, in use", fix)) from None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file so that it is either there, complete and durable, or not there."""
    temporary = path.with_suffix(".tmp")
    file = _File(temporary)
    try:
        file.cut(0)
        file.put(0, data)
        file.sync()
    finally:
        file.close()
    os.replace(temporary, path)
    _sync_folder(path.parent)


class RowStore(torch.utils.data.Dataset[torch.Tensor]):
    """Rows [n, p] in one folder, appended block by block, with their ids and the layout of their columns.

    ============  =================================================================================================
    rows.npy      the rows, a plain .npy that any NumPy program can memory-map (bfloat16 lies there as uint16)
    ids.npy       the ids, int64; or ids.jsonl, one JSON string per line
    header.json   written last: layout, dtype, attrs, row count, and a checksum per append
    journal.part  in place of the header while the store is unfinished: one line per append
    ============  =================================================================================================

    An append is on disk when it returns. A process killed at any moment leaves whole appends, which ``open`` finds, and
    maybe a torn one, which it leaves out. Rows keep the order in which they came; equal ids and equal rows are kept.

    Attributes:
        path: the folder.
        layout: columns of a row.
        dtype: torch dtype of the rows.
        attrs: what ``create`` was given, as JSON has it.
        complete: the store was closed, so the header is there.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RowStore.create(folder.name, Layout.of({"w": torch.zeros(2)})) as store:
    ...     store.append(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> RowStore.open(folder.name)[1]
    tensor([3., 4.])
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, meta: dict[str, Any], blocks: list[_Block], complete: bool) -> None:
        """Use ``create`` or ``open``."""
        self.path = path
        self.layout = Layout.from_json(json.dumps(meta["layout"]))
        self.attrs: dict[str, Any] = meta["attrs"]
        self.dtype, self._descr = _DTYPES[meta["dtype"]]
        self.complete = complete
        self._meta, self._blocks = meta, blocks
        self._count = sum(block.rows for block in blocks)
        self._ids_bytes = sum(block.ids_bytes for block in blocks)
        self._files: dict[str, _File] = {}
        self._journal_end = 0
        self._mapped: np.ndarray[Any, Any] | None = None
        self._read_ids: np.ndarray[Any, Any] | None = None

    # create, open, close

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        layout: Layout,
        *,
        dtype: torch.dtype | str | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> RowStore:
        """Start a store in a new or empty folder.

        Args:
            path: the folder; parents are made.
            layout: columns of a row, ``Layout.of(params)``.
            dtype: float64, float32, float16 or bfloat16; None = the layout's widest.
            attrs: a dict that JSON can hold, kept with the rows.

        Raises:
            FileExistsError (a ValueError too): the path holds something.
            DtypeError, TypeError: the dtype is not one of the four; attrs is not JSON.
        """
        folder = _folder(path)
        check_layout(layout)
        name = str(float_dtype(layout.dtype if dtype is None else dtype)).removeprefix("torch.")
        kept = _as_json({} if attrs is None else attrs)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            fix = "choose another path, remove what is there, or resume with RowStore.open(path, mode='a')"
            raise StoreExistsError(message("path", "a new or empty folder", f"{folder}, which holds something", fix))
        folder.mkdir(parents=True, exist_ok=True)
        descr = _DTYPES[name][1]
        meta = {
            "format": _FORMAT,
            "version": 1,
            "dtype": name,
            "on_disk": np.dtype(descr).name,
            "layout": json.loads(layout.to_json()),
            "attrs": kept,
        }
        store = cls(folder, meta, [], complete=False)
        store._files[_ROWS] = _File(folder / _ROWS)
        try:
            store._files[_ROWS].lock(folder)
            store._start_writing()
        except BaseException:
            store._release()
            raise
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r") -> RowStore:
        """Open a store, finished or not.

        Args:
            path: the folder.
            mode: "r" maps it read-only (also from a read-only disk, and several times at once); "a" cuts off a torn
                append and goes on after the last whole one.

        Raises:
            FileNotFoundError (a ValueError too): nothing there.
            ValueError: the folder is no store, a file has not the size that the header says, or somebody else writes.
        """
        folder = _folder(path)
        check_choice(mode, "mode", ("r", "a"))
        if not folder.is_dir():
            raise StoreMissingError(message("path", "the folder of a store", f"{folder}, not there", "check the path"))
        if mode == "r":
            store = cls(folder, *_read_meta(folder))
            store._check_sizes()
            return store
        _read_meta(folder)  # before anything is created in a folder that is no store
        rows = _File(folder / _ROWS)
        try:
            rows.lock(folder)
            store = cls(folder, *_read_meta(folder))
            store._check_sizes()
            store._files[_ROWS] = rows
            store._start_writing()
        except BaseException:
            rows.close()
            raise
        return store

    def _start_writing(self) -> None:
        """Put a journal in the header's place, and cut every file to whole appends."""
        lines = [self._meta, *(block._asdict() for block in self._blocks)]
        journal = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        _replace(self.path / _JOURNAL, journal)
        (self.path / _HEADER).unlink(missing_ok=True)
        self.complete = False
        self._files[_JOURNAL] = _File(self.path / _JOURNAL)
        self._journal_end = len(journal)
        if self._blocks:
            self._open_ids(self._blocks[0].ids)
        for file, end in self._ends():
            file.cut(end)
        self._write_prefixes()
        for file, _ in self._ends():
            file.sync()
        _sync_folder(self.path)

    def _open_ids(self, kind: str) -> None:
        self._files[_IDS[kind][0]] = _File(self.path / _IDS[kind][0])
        _sync_folder(self.path)

    @property
    def _kind(self) -> str:
        return self._blocks[0].ids if self._blocks else "int64"

    def _ends(self) -> list[tuple[_File, int]]:
        """Return the open files and where each ends."""
        ends = {_ROWS: _PREFIX + self._count * self._row_bytes, _JOURNAL: self._journal_end}
        ends |= {name: prefix + self._ids_bytes for name, prefix in _IDS.values()}
        return [(file, ends[name]) for name, file in self._files.items()]

    @property
    def _row_bytes(self) -> int:
        return self.layout.size * np.dtype(self._descr).itemsize

    def _write_prefixes(self) -> None:
        """Bring the shapes in the .npy files up to date. Until the store is closed they are a courtesy to readers."""
        self._files[_ROWS].put(0, _npy_prefix(self._descr, (self._count, self.layout.size)))
        if "ids.npy" in self._files:
            self._files["ids.npy"].put(0, _npy_prefix("<i8", (self._count,)))

    def close(self) -> None:
        """Finish the store: write the header, last and atomically. Nothing happens when it is only read, or closed."""
        if not self._files:
            return
        if not self._blocks:
            self._open_ids("int64")
        self._write_prefixes()
        for file in self._files.values():
            file.sync()
        _replace(
            self.path / _HEADER,
            _sealed(
                {
                    **self._meta,
                    "rows": self._count,
                    "ids": self._kind,
                    "blocks": [list(block) for block in self._blocks],
                }
            ),
        )
        self.complete = True
        self._release()
        (self.path / _JOURNAL).unlink()

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def __del__(self) -> None:
        self._release()

    def __reduce__(self) -> Any:
        """Another process (a DataLoader's worker) opens the folder for itself, read-only."""
        return RowStore.open, (self.path,)

    # write

    def append(self, rows: Any, ids: Any = None) -> None:
        """Add rows; on disk when this returns, all of them or none.

        Args:
            rows: [b, p], a float tensor or array; or a tree of [b, ...] with the layout's leaves.
            ids: b integers or b strings, the same kind in the whole store; None = the rows' positions.

        Raises:
            StructureError: the width or the number of ids is wrong.
            DtypeError: rows are not floating point, or ids are of another kind than before.
            ValueError: a row holds NaN or inf, or a value too large for the store's dtype (rows are counted, and the
                first named), or the store is not open for writing. Nothing is written.
        """
        if not self._files:
            fix = "open it with RowStore.open(path, mode='a')"
            raise ValueError(message("store", "a store that is open for writing", "one that is not", fix))
        values = self._checked_rows(rows)
        kind, names = self._checked_ids(ids, len(values))
        bad = ~torch.isfinite(values.to(self.dtype)).all(dim=1)
        if bool(bad.any()):
            raise ValueError(self._nonfinite(values, bad, names))
        if not len(values):
            return
        data = as_bytes(_on_disk(values.to(self.dtype), self._descr))
        if kind == "str":
            id_data = as_bytes("".join(json.dumps(name) + "\n" for name in names.tolist()).encode())
        else:
            id_data = as_bytes(names.astype("<i8"))
        block = _Block(len(values), zlib.crc32(data), kind, len(id_data), zlib.crc32(id_data))
        line = (json.dumps(block._asdict(), separators=(",", ":")) + "\n").encode()
        name, prefix = _IDS[kind]
        if name not in self._files:
            self._open_ids(kind)
        before, ends = len(self._blocks), self._ends()
        try:
            for file, offset, piece in (
                (name, prefix + self._ids_bytes, id_data),
                (_ROWS, _PREFIX + self._count * self._row_bytes, data),
                (_JOURNAL, self._journal_end, line),  # the append counts from here on
            ):
                self._files[file].put(offset, piece)
                self._files[file].sync()
            self._blocks.append(block)
        except BaseException:
            del self._blocks[before:]
            for opened, end in ends:
                opened.cut(end)
            raise
        self._count += block.rows
        self._ids_bytes += block.ids_bytes
        self._journal_end += len(line)
        self._mapped = self._read_ids = None
        self._write_prefixes()

    def _checked_rows(self, rows: Any) -> torch.Tensor:
        shape = f"[b, {self.layout.size}]"
        fix = "pass rows of the store's layout, as grad_rows gives"
        if not isinstance(rows, torch.Tensor | np.ndarray):
            rows = rows_of(rows, self.layout, "rows")
        if isinstance(rows, np.ndarray):
            if rows.dtype.kind != "f":
                raise DtypeError(message("rows", "floating point rows", str(rows.dtype), fix))
            rows = torch.from_numpy(np.array(rows, order="C"))
        if not rows.is_floating_point():
            raise DtypeError(message("rows", "floating point rows", str(rows.dtype), fix))
        if rows.ndim != 2 or rows.shape[1] != self.layout.size:
            raise StructureError(message("rows", f"shape {shape}", f"shape {tuple(rows.shape)}", fix))
        return cast(torch.Tensor, rows.detach().cpu())

    def _checked_ids(self, ids: Any, count: int) -> tuple[str, np.ndarray[Any, Any]]:
        """Return the kind of the ids and the ids."""
        before = self._blocks[0].ids if self._blocks else None
        if ids is None:
            if before == "str":
                fix = "pass ids=, one string per row"
                raise DtypeError(message("ids", "strings, as in the rows before", "None", fix))
            return "int64", np.arange(self._count, self._count + count, dtype=np.int64)
        listed = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
        fix = "pass a list of ints or a list of strings, one per row"
        if not isinstance(listed, list | tuple | range):
            raise TypeError(message("ids", "a list, an array or a tensor", type(ids).__name__, fix))
        if len(listed) != count:
            raise StructureError(message("ids", f"{count} ids, one per row", f"{len(listed)}", fix))
        if all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in listed) and (
            listed or before != "str"
        ):
            kind = "int64"
        elif all(isinstance(i, str) for i in listed):
            kind = "str"
        else:
            got = sorted({type(i).__name__ for i in listed})
            raise DtypeError(message("ids", "all integers or all strings", " and ".join(got), fix))
        if before is not None and kind != before and count:
            raise DtypeError(message("ids", f"{before}, as in the rows before", kind, fix))
        if kind == "str":
            return kind, np.array(listed, dtype=object)
        if any(not -(2**63) <= i < 2**63 for i in listed):
            raise ValueError(message("ids", "integers of 64 bits", str(max(listed, key=abs)), fix))
        return kind, np.array(listed, dtype=np.int64)

    def _nonfinite(self, values: torch.Tensor, bad: torch.Tensor, ids: np.ndarray[Any, Any]) -> str:
        source = ~torch.isfinite(values).all(dim=1)
        if bool(source.any()):
            fix = "look for overflow, log(0) or norm(0) in the loss on those samples, or leave them out"
            return message("rows", "finite rows", f"NaN or inf in {named(source, ids)}", fix)
        largest = float(values[bad].double().abs().max())
        fix = "create the store with a wider dtype, or scale the loss"
        expected = f"values that {self.dtype} can hold (up to {torch.finfo(self.dtype).max:.3g})"
        return message("rows", expected, f"up to {largest:.3g} in {named(bad, ids)}", fix)

    # read

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        return f"RowStore({str(self.path)!r}, rows={self._count}, width={self.layout.size}, {self.dtype}, {state})"

    @property
    def ids(self) -> np.ndarray[Any, Any]:
        """Ids of the rows [n]: int64, or strings."""
        if self._read_ids is None:
            name, prefix = _IDS[self._kind]
            if not self._count:
                self._read_ids = np.zeros(0, dtype=np.int64)
            elif self._kind == "int64":
                self._read_ids = np.fromfile(self.path / name, "<i8", self._count, offset=prefix)
            else:
                with open(self.path / name, "rb") as file:
                    lines = file.read(self._ids_bytes).decode().splitlines()
                self._read_ids = np.array([json.loads(line) for line in lines], dtype=np.str_)
        return self._read_ids

    def _map(self) -> np.ndarray[Any, Any]:
        """Return the rows as they lie on disk, mapped read-only."""
        if self._mapped is None:
            shape = (self._count, self.layout.size)
            if math.prod(shape):
                self._mapped = np.memmap(self.path / _ROWS, self._descr, "r", _PREFIX, shape)
            else:
                self._mapped = np.zeros(shape, self._descr)
        return self._mapped

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return row [p] for an int, rows [k, p] for a slice or a list of positions. Always a copy, in memory."""
        fix = f"pass an int below {self._count}, a slice, or a list of ints"
        if isinstance(index, torch.Tensor):
            index = index.tolist()
        listed = index if isinstance(index, list | np.ndarray) else [] if isinstance(index, slice) else [index]
        if any(not isinstance(i, numbers.Integral) or isinstance(i, bool) for i in listed):
            raise TypeError(message("index", "an int, a slice or a list of ints", repr(index), fix))
        if any(not -self._count <= i < self._count for i in listed):
            raise IndexError(message("index", f"positions among {self._count} rows", repr(index), fix))
        if isinstance(index, list):
            index = np.array(index, dtype=np.int64)
        values = torch.from_numpy(np.array(self._map()[index]))
        return values.view(torch.bfloat16) if self.dtype == torch.bfloat16 else values

    def blocks(self, size: int) -> Iterator[torch.Tensor]:
        """Yield all rows in order, as tensors [b, p] with b = ``size`` except in the last."""
        size = check_count(size, "size", fix="pass the number of rows per block")
        return (self[start : start + size] for start in range(0, self._count, size))

    def verify(self) -> int:
        """Read every byte and compare checksums.

        Returns:
            The number of rows, all of them as they were appended.

        Raises:
            ValueError: a file differs from what was written; it and the rows are named.
        """
        self._check_sizes()
        name, prefix = _IDS[self._kind]
        facts = [(b.rows, b.rows * self._row_bytes, b.crc32, b.ids_bytes, b.ids_crc32) for b in self._blocks]
        self._verify(_ROWS, _npy_prefix(self._descr, (self._count, self.layout.size)), [fact[:3] for fact in facts])
        if self._blocks or self.complete:
            first = _npy_prefix("<i8", (self._count,)) if prefix else b""
            self._verify(name, first, [(fact[0], *fact[3:]) for fact in facts])
        return self._count

    def _verify(self, shard: str, prefix: bytes, blocks: list[tuple[int, int, int]]) -> None:
        """Compare a file with its first bytes and, for each append, (rows, bytes, crc32)."""
        with open(self.path / shard, "rb") as file:
            if file.read(len(prefix)) != prefix and self.complete:
                raise ValueError(_damaged(self.path / shard, f"the .npy header for {self._count} rows", "another one"))
            done = 0
            for rows, size, crc in blocks:
                if _crc_of(file, size) != crc:
                    where = f"the bytes written for rows {done} to {done + rows - 1}"
                    raise ValueError(_damaged(self.path / shard, where, "other bytes"))
                done += rows

    def _check_sizes(self) -> None:
        name, prefix = _IDS[self._kind]
        expected = {_ROWS: _PREFIX + self._count * self._row_bytes}
        if self._blocks or self.complete:
            expected[name] = prefix + self._ids_bytes
        for shard, size in expected.items():
            path = self.path / shard
            got = path.stat().st_size if path.exists() else 0
            if got < size or (self.complete and got > size):
                raise ValueError(_damaged(path, f"{size} bytes for {self._count} rows", f"{got} bytes"))


def check_layout(layout: Any) -> Layout:
    """Return ``layout`` if it is one."""
    if not isinstance(layout, Layout):
        raise TypeError(message("layout", "a Layout", type(layout).__name__, "pass Layout.of(params)"))
    return layout


def _as_json(attrs: Any) -> Any:
    fix = "pass a dict of strings, numbers, lists and dicts"
    if not isinstance(attrs, dict):
        raise TypeError(message("attrs", "a dict", type(attrs).__name__, fix))
    try:
        return json.loads(json.dumps(attrs))
    except (TypeError, ValueError) as error:
        raise TypeError(message("attrs", "values that JSON can hold", str(error), fix)) from None


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(message("path", "a path", type(path).__name__, "pass the name of a folder"))
    return Path(path)


def _damaged(path: Path, expected: str, got: str) -> str:
    fix = "restore the file from a copy, or make the rows again"
    return message(path.name, expected, f"{got} in {path.parent}", fix)


def _crc_of(file: Any, size: int) -> int:
    crc = 0
    while size:
        data = file.read(min(size, 1 << 24))
        if not data:
            return -1
        crc = zlib.crc32(data, crc)
        size -= len(data)
    return crc


def _sealed(header: dict[str, Any]) -> bytes:
    """Return a header as JSON, with a checksum of itself."""
    return json.dumps({**header, "crc32": zlib.crc32(json.dumps(header).encode())}, indent=1).encode()


def _read_meta(folder: Path) -> tuple[dict[str, Any], list[_Block], bool]:
    """Return what the header, or else the journal, says: meta, blocks, complete."""
    header, journal = folder / _HEADER, folder / _JOURNAL
    if header.exists():
        try:
            found = json.loads(header.read_bytes())
            crc = found.pop("crc32")
            meta = {key: value for key, value in found.items() if key not in ("rows", "ids", "blocks")}
            blocks = [_Block(*block) for block in found["blocks"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(_damaged(header, "the header of a RowStore", f"{error}")) from None
        if crc != zlib.crc32(json.dumps(found).encode()):
            raise ValueError(_damaged(header, "the header as it was written", "a changed one"))
        return _supported(meta, header), blocks, True
    if not journal.exists():
        fix = "check the path; a store killed while it was being created can be removed"
        raise ValueError(message("path", "a folder with header.json or journal.part", f"{folder}, no RowStore", fix))
    # A torn last line has no newline: it belongs to an append that never finished.
    lines = journal.read_bytes().split(b"\n")[:-1]
    try:
        meta, *facts = [json.loads(line) for line in lines]
        blocks = [_Block(**fact) for fact in facts]
    except (ValueError, TypeError) as error:
        raise ValueError(_damaged(journal, "one line of JSON per append", f"{error}")) from None
    return _supported(meta, journal), blocks, False


def _supported(meta: dict[str, Any], path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT or meta.get("version") != 1:
        raise ValueError(_damaged(path, f"format {_FORMAT!r}, version 1", "something else"))
    return meta


def _on_disk(values: torch.Tensor, descr: str) -> np.ndarray[Any, Any]:
    if values.dtype == torch.bfloat16:
        values = values.contiguous().view(torch.int16)
        return values.numpy().view("<u2")
    return np.ascontiguousarray(values.numpy().astype(descr, copy=False))


def as_bytes(data: bytes | np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array, as they lie on disk."""
    if isinstance(data, bytes):
        return memoryview(data)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data if data.size else memoryview(b"")


def named(bad: torch.Tensor, ids: Sequence[Any] | np.ndarray[Any, Any]) -> str:
    """Return "3 of 10 rows, first ids [...]" for a mask of rows."""
    where = bad.nonzero().flatten().tolist()
    first = [ids[i].item() if isinstance(ids[i], np.generic) else ids[i] for i in where[:5]]
    return f"{len(where)} of {len(bad)} rows, first ids {first}"


def rows_of(tree: Tree, layout: Layout, argument: str) -> torch.Tensor:
    """Return the rows [n, p] of a tree of [n, ...], its leaves matched to the layout by path.

    Raises:
        StructureError: other leaves than the layout's, or other shapes.
    """
    leaves, spec = flatten(tree)
    by_path = dict(zip(paths_of(spec), leaves, strict=True))
    if by_path.keys() != set(layout.paths):
        got = [".".join(map(str, path)) for path in by_path]
        fix = "pass a tree like the parameters, one leading axis on every leaf"
        raise StructureError(message(argument, f"the leaves {list(layout.names)}", f"{got}", fix))
    return layout.ravel_rows(layout.build([by_path[path] for path in layout.paths]))
