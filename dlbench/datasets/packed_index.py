"""An index of a data set becomes bytes that another process maps into memory, and is read from them again.

Form: 8 bytes, the length of a description in JSON (UTF-8), little-endian; the description; then the blocks: arrays and
byte strings, each beginning at a multiple of 64 bytes counted from the end of the description, itself padded likewise.
Nothing in it is executed: dataclasses are named and must be among those that the reader expects. Arrays are views of
the memory and cannot be written to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.opening import parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<q")
_ALIGNED = 64
_KINDS = frozenset("biuf")
"""Of the arrays: numbers and truth values."""


def packed(value: Any) -> Iterator[bytes | memoryview]:
    """Pieces that make up an index when written one behind the other.

    Args:
        value: None, a bool, an int, a str, bytes, a Path, an array of numbers, or a tuple or a dataclass of such.

    Raises:
        TypeError: it is, or holds, something else.
    """
    blocks: list[bytes | memoryview] = []
    text = json.dumps(_described(value, blocks)).encode("ascii")
    yield _HEAD.pack(len(text))
    yield text
    yield _padding(_HEAD.size + len(text))
    for block in blocks:
        yield block
        yield _padding(len(block))


def _padding(length: int) -> bytes:
    return bytes(-length % _ALIGNED)


def _described(value: Any, blocks: list[bytes | memoryview]) -> Any:
    import numpy as np

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

    Args:
        data: all bytes.
        expected: the dataclasses that may be in it.

    Raises:
        ValueError: they are not of this form, or cut off.
    """
    try:
        (length,) = _HEAD.unpack_from(data)
        description = parse_json(bytes(data[_HEAD.size : _HEAD.size + length]))
        start = _HEAD.size + length + len(_padding(_HEAD.size + length))
        reader = _Reader(data[start:], {one.__name__: one for one in expected})
        return reader.value(description)
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a packed index: {error}") from None


class _Reader:
    """Builds values; blocks are taken in the order in which they were written."""

    def __init__(self, blocks: memoryview, expected: Mapping[str, Callable[..., Any]]) -> None:
        self._blocks, self._at, self._expected = blocks, 0, expected

    def value(self, described: Any) -> Any:
        """What a description stands for."""
        if isinstance(described, list):
            return tuple(self.value(one) for one in described)
        if not isinstance(described, dict):
            return described
        if "path" in described:
            return Path(described["path"])
        if "bytes" in described:
            return bytes(self._block(int(described["bytes"])))
        if "array" in described:
            return self._array(str(described["array"]), [int(edge) for edge in described["shape"]])
        fields = {name: self.value(one) for name, one in described["fields"].items()}
        return self._expected[described["dataclass"]](**fields)

    def _array(self, dtype: str, shape: list[int]) -> NDArray[Any]:
        import numpy as np

        kind = np.dtype(dtype)
        if kind.kind not in _KINDS:
            raise ValueError(f"arrays of {dtype}")
        number = int(np.prod(shape, dtype=np.int64))
        if not number:
            return np.empty(shape, dtype=kind)
        array = np.frombuffer(self._block(number * kind.itemsize), dtype=kind).reshape(shape)
        array.flags.writeable = False
        return array

    def _block(self, length: int) -> memoryview:
        if not 0 <= length <= len(self._blocks) - self._at:
            raise ValueError("cut off")
        block = self._blocks[self._at : self._at + length]
        self._at += length + len(_padding(length))
        return block
