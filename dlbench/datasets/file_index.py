"""Packs the index of a data set into shared memory, so that one rank of a node lists the files for all. Format: 8
bytes, the length of a description in JSON (UTF-8), little-endian; the description; then arrays and byte strings, each
aligned to 64 bytes. Nothing in it is executed: dataclasses are named, and must be among those that the reader
expects.
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
_KINDS = frozenset("biuf")  # numpy's kinds of the arrays: numbers and booleans


class Files(Sequence[Path]):
    """Paths of a data set's files, created on access: a million `Path` objects take seconds and 400 MB."""

    def __init__(self, num: int, path: Callable[[int], Path]) -> None:
        self._num, self._path = num, path

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self._num)[index]
        if isinstance(numbers, int):
            return self._path(numbers)
        return Files(len(numbers), lambda n: self._path(numbers[n]))

    def __iter__(self) -> Iterator[Path]:
        return map(self._path, range(self._num))  # unlike a generator, threads may share it


def packed(value: Any) -> Iterator[bytes | memoryview]:
    """Yields the pieces of the packed form in their order. `value`: None, a bool, an int, a str, bytes, a Path, an
    array of numbers, or a tuple or a dataclass of these. Raises TypeError: it contains something else.
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
        return [_described(element, blocks) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _described(getattr(value, field.name), blocks) for field in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be packed into an index")


def unpacked(data: memoryview, expected: Sequence[type]) -> Any:
    """Returns the value that `packed` was given; arrays are read-only views of `data`. `expected`: its dataclasses."""
    dataclass_types: Mapping[str, Callable[..., Any]] = {cls.__name__: cls for cls in expected}
    position = _HEAD.size

    def block(length: int) -> memoryview:
        """Returns the next block; they are read in the order in which they were written."""
        nonlocal position
        begin, end = position, position + length
        position = end + -end % _ALIGNED
        return data[begin:end]

    def value(described: Any) -> Any:
        if isinstance(described, list):
            return tuple(value(element) for element in described)
        if not isinstance(described, dict):
            return described
        if "path" in described:
            return Path(described["path"])
        if "bytes" in described:
            return bytes(block(int(described["bytes"])))
        if "array" not in described:
            fields = {name: value(field) for name, field in described["fields"].items()}
            return dataclass_types[described["dataclass"]](**fields)
        dtype, shape = np.dtype(str(described["array"])), [int(edge) for edge in described["shape"]]
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        array = np.frombuffer(block(num_bytes) or b"", dtype).reshape(shape)
        array.flags.writeable = False
        return array

    return value(parse_json(bytes(block(_HEAD.unpack_from(data)[0]))))
