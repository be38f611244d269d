"""The index of a data set of many files: handed on between the ranks of a node, and kept in its folder.

`.dlbench-index` holds as long as no folder of the set has changed since: a file that comes, goes or gets another name
changes the time of its folder, so one look at each folder tells, and no name is listed. Bytes that are written into a
file in place change no index; a copy keeps it if it keeps times (cp -a, rsync -a, tar). It is the tuple of format,
version, names of inner folders, their latest time (ns) and index in packed form, and SHA-256 of that.

Packed form: 8 bytes, the length of a description in JSON (UTF-8), little-endian; the description; then the
blocks: arrays and byte strings, each beginning at a multiple of 64 bytes counted from the end of the description,
itself padded likewise. Nothing in it is executed: dataclasses are named and must be among those that the reader
expects. Arrays are views of the memory and cannot be written to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dlbench.errors import UserError
from dlbench.lazy import np
from dlbench.opening import parse_json, read_bytes, why_unreadable

T = TypeVar("T")

NAME = ".dlbench-index"
FORMAT, VERSION = "dlbench.file-index", 1
_MAX_BYTES = 1 << 34
_SHA256_BYTES = 32
_TICK_S = 0.02  # times of files go by ticks of 10 ms at most: so much later a change bears another time


def save_index(folder: Path, make: Callable[[Path], Any]) -> None:
    """Keeps what `make` lists of a folder. Raises UserError: it cannot be written, or changed meanwhile; as `make`."""
    path, partial = folder / NAME, folder / f"{NAME}.partial"
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            inner = tuple(sorted(name for name in next(os.walk(folder))[1] if not name.startswith(".")))
            before = [(folder / name).stat().st_mtime_ns for name in ("", *inner)]
            time.sleep(_TICK_S)
            content = b"".join(packed((FORMAT, VERSION, inner, max(before), make(folder))))
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        if [(folder / name).stat().st_mtime_ns for name in ("", *inner)] != before:
            raise UserError(f"{str(folder)!r}: changed while its files were listed; try again")
        partial.replace(path)
        os.utime(path, ns=(folder.stat().st_mtime_ns,) * 2)
        time.sleep(_TICK_S)
    except OSError as error:
        raise UserError(f"{path}: cannot be made: {why_unreadable(error)}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def load_index(folder: Path, kind: type[T]) -> tuple[T | None, str]:
    """The kept index of a folder, and where the names of its files are from, in words; None: they have to be listed."""
    try:
        made = (folder / NAME).stat().st_mtime_ns
        data = memoryview(read_bytes(folder / NAME, _MAX_BYTES))
        content = data[:-_SHA256_BYTES]
        if hashlib.sha256(content).digest() != data[-_SHA256_BYTES:]:
            return None, f"its folders: {NAME} is altered or cut off"
        form, version, inner, listed, index = unpacked(content, (kind,))
        if (form, version) != (FORMAT, VERSION):
            return None, f"its folders: {NAME} is of version {version!r}, not {VERSION}"
        for name, at in (("", made), *((name, listed) for name in inner)):
            if not (folder / name).is_dir() or (folder / name).stat().st_mtime_ns > at:
                return None, f"its folders: {name or folder.name!r} changed after {NAME} was made"
    except (FileNotFoundError, NotADirectoryError):
        return None, "its folders"
    except (OSError, ValueError) as error:
        return None, f"its folders: {NAME}: {why_unreadable(error)}"
    return index, NAME


class Files(Sequence[Path]):
    """Paths of a data set's files, each made when it is asked for: a million of them take seconds and 400 MB."""

    def __init__(self, num: int, path: Callable[[int], Path]) -> None:
        self._num, self._path = num, path

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, at: Any) -> Any:
        some = range(self._num)[at]
        return self._path(some) if isinstance(some, int) else Files(len(some), lambda n: self._path(some[n]))

    def __iter__(self) -> Iterator[Path]:
        return map(self._path, range(self._num))  # several threads may share it, as they may not a generator


_HEAD = struct.Struct("<q")
_ALIGNED = 64
_KINDS = frozenset("biuf")  # of the arrays: numbers and truth values


def packed(value: Any) -> Iterator[bytes | memoryview]:
    """Pieces that make up an index when written one behind the other.

    `value`: None, a bool, an int, a str, bytes, a Path, an array of numbers, or a tuple or a dataclass of such.
    Raises TypeError: it is, or holds, something else.
    """
    blocks: list[bytes | memoryview] = []
    text = json.dumps(_described(value, blocks)).encode("ascii")
    for block in (_HEAD.pack(len(text)) + text, *blocks):
        yield block
        yield bytes(-len(block) % _ALIGNED)


def _described(value: Any, blocks: list[bytes | memoryview]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return {"path": os.fspath(value)}
    if isinstance(value, bytes):
        blocks.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        flat = np.ascontiguousarray(value)
        blocks.append(flat.reshape(-1).view(np.uint8).data)
        return {"array": flat.dtype.str, "shape": list(flat.shape)}
    if isinstance(value, tuple):
        return [_described(one, blocks) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _described(getattr(value, f.name), blocks) for f in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} is not of an index")


def unpacked(data: memoryview, expected: Sequence[type]) -> Any:
    """What `packed` was given. Arrays are views of `data`.

    Raises ValueError: they are not of this form, or cut off.
    """
    kinds: Mapping[str, Callable[..., Any]] = {one.__name__: one for one in expected}
    at = _HEAD.size

    def block(length: int) -> memoryview:
        """The next one: they are taken in the order in which they were written."""
        nonlocal at
        if not 0 <= length <= len(data) - at:
            raise ValueError("cut off")
        begin, end = at, at + length
        at = end + -end % _ALIGNED
        return data[begin:end]

    def value(described: Any) -> Any:
        if isinstance(described, list):
            return tuple(value(one) for one in described)
        if not isinstance(described, dict):
            return described
        if "path" in described:
            return Path(described["path"])
        if "bytes" in described:
            return bytes(block(int(described["bytes"])))
        if "array" not in described:
            fields = {name: value(one) for name, one in described["fields"].items()}
            return kinds[described["dataclass"]](**fields)
        kind, shape = np.dtype(str(described["array"])), [int(edge) for edge in described["shape"]]
        if kind.kind not in _KINDS:
            raise ValueError(f"arrays of {kind}")
        array = np.frombuffer(block(int(np.prod(shape, dtype=np.int64)) * kind.itemsize) or b"", kind).reshape(shape)
        array.flags.writeable = False
        return array

    try:
        return value(parse_json(bytes(block(_HEAD.unpack_from(data)[0]))))
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a packed index: {error}") from None
