"""`tf.train.Example` without TensorFlow: a protocol buffer becomes named lists of bytes, float32 or int64, and back.

The messages (tensorflow/core/example/example.proto and feature.proto): Example{features = 1}, Features{map<string,
Feature> feature = 1}, Feature{bytes_list = 1 | float_list = 2 | int64_list = 3}, each list{repeated value = 1}. The
encoding is that of protobuf.dev, "Encoding": numbers are packed or not, unknown fields are passed over, of a name that
comes twice the last counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def example_views(payload: bytes | memoryview) -> dict[str, list[memoryview] | NDArray[Any]]:
    """As `decode_example`, but lists of bytes are views into the payload: nothing is copied."""
    found: dict[str, list[memoryview] | NDArray[Any]] = {}
    for features in _fields(memoryview(payload), 1):
        for entry in _fields(features, 1):
            # In a map's entry field 1 is the key and field 2 the value; either may be left out if it is empty.
            name = b"".join(bytes(part) for part in list(_fields(entry, 1))[-1:])
            value = list(_fields(entry, 2))[-1:]
            try:
                found[name.decode("utf-8")] = _feature(value[0]) if value else []
            except UnicodeDecodeError:
                raise ValueError(f"Example: a feature's name is not UTF-8: {name!r}") from None
    return found


def decode_example(payload: bytes | memoryview) -> dict[str, list[bytes] | NDArray[Any]]:
    """The features of one Example by name: a list of bytes, or an array (n,) of float32 or of int64.

    A feature without content is an empty list, for its kind is not known.

    Raises:
        ValueError: it is no Example; the message says what does not fit.
    """
    views = example_views(payload)
    return {name: [bytes(v) for v in value] if isinstance(value, list) else value for name, value in views.items()}


def encode_example(
    features: Mapping[str, bytes | Sequence[bytes] | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]],
) -> bytes:
    """An Example: bytes and lists of bytes as they are, arrays flattened as float32 or int64 (packed), names sorted.

    Raises:
        ValueError: an array holds neither floating-point numbers nor integers.
    """
    entries = []
    for name in sorted(features):
        feature = _sized(1, name.encode("utf-8")) + _sized(2, _encoded(name, features[name]))
        entries.append(_sized(1, feature))
    return _sized(1, b"".join(entries))


def _encoded(name: str, value: Any) -> bytes:
    import numpy as np

    if isinstance(value, bytes):
        value = [value]
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            return _sized(_FLOAT_LIST, _sized(1, value.astype("<f4").tobytes()))
        if value.dtype.kind not in "iu":
            raise ValueError(f"Example: feature {name!r} is {value.dtype}, neither floating-point nor integer")
        return _sized(_INT64_LIST, _sized(1, b"".join(_varint(int(v) & 0xFFFFFFFFFFFFFFFF) for v in value.flat)))
    return _sized(_BYTES_LIST, b"".join(_sized(1, v) for v in value))


def _sized(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | _SIZED]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _feature(message: memoryview) -> list[memoryview] | NDArray[Any]:
    import numpy as np

    kind = 0
    parts: list[tuple[int, memoryview]] = []
    for field, wire, content in _all_fields(message):
        if field not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) or wire != _SIZED:
            continue
        if field != kind:  # of a `oneof` the last counts
            kind, parts = field, []
        parts += [(w, c) for f, w, c in _all_fields(content) if f == 1]
    if kind in (0, _BYTES_LIST):
        return [content for wire, content in parts if wire == _SIZED]
    if kind == _FLOAT_LIST:
        joined = b"".join(content for wire, content in parts if wire in (_SIZED, _FIXED32))
        if len(joined) % 4:
            raise ValueError(f"Example: a list of floats has {len(joined)} bytes, no multiple of 4")
        return np.frombuffer(joined, dtype="<f4")
    return _integers(b"".join(content for wire, content in parts if wire in (_SIZED, _VARINT)))


def _integers(packed: bytes) -> NDArray[np.int64]:
    import numpy as np

    small = np.frombuffer(packed, dtype=np.uint8)
    if not (small & 0x80).any():  # one byte a number
        return small.astype(np.int64)
    values, at, view = [], 0, memoryview(packed)
    while at < len(packed):
        value, at = _read_varint(view, at)
        values.append(value)
    return np.array(values, dtype=np.uint64).view(np.int64)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("Example: ends inside a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("Example: a number of more than 10 bytes")


def _all_fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Field number, wire type and content of each field; of a number the content is its encoding."""
    at = 0
    while at < len(message):
        tag, start = _read_varint(message, at)
        field, wire = tag >> 3, tag & 7
        if field == 0:
            raise ValueError("Example: not a protocol buffer (field number 0)")
        if wire == _VARINT:
            _value, at = _read_varint(message, start)
        elif wire == _SIZED:
            length, start = _read_varint(message, start)
            at = start + length
        elif wire in (_FIXED64, _FIXED32):
            at = start + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"Example: not a protocol buffer (wire type {wire})")
        if at > len(message):
            raise ValueError(f"Example: field {field} of {at - start} bytes is cut off")
        yield field, wire, message[start:at]


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
    return (content for field, wire, content in _all_fields(message) if field == number and wire == _SIZED)
