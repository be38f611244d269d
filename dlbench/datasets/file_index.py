"""The index of a data set of many files, which ranks of a node hand on: it is packed, and its paths are made late.

Packed form: 8 bytes, the length of a description in JSON (UTF-8), little-endian; the description; then the
blocks: arrays and byte strings, each beginning at a multiple of 64 bytes counted from the end of the description,
itself padded likewise. Nothing in it is executed: dataclasses are named and must be among those that the reader
expects. Arrays are views of the memory and cannot be written to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlbench.lazy import np
from dlbench.opening import parse_json

_HEAD = struct.Struct("<q")
_ALIGNED = 64
_KINDS = frozenset("biuf")  # of the arrays: numbers and truth values


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
    """What `packed` was given. Arrays are views of `data`."""
    kinds: Mapping[str, Callable[..., Any]] = {one.__name__: one for one in expected}
    at = _HEAD.size

    def block(length: int) -> memoryview:
        """The next one: they are taken in the order in which they were written."""
        nonlocal at
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
        array = np.frombuffer(block(int(np.prod(shape, dtype=np.int64)) * kind.itemsize) or b"", kind).reshape(shape)
        array.flags.writeable = False
        return array

    return value(parse_json(bytes(block(_HEAD.unpack_from(data)[0]))))
