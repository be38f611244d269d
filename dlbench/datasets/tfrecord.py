"""Reads and writes TFRecord files without TensorFlow: framed records with checksums, plain or gzip.

A record is: length (uint64), masked CRC-32C of these 8 bytes (uint32), payload, masked CRC-32C of the payload; all
little-endian (tensorflow.org, "TFRecord and tf.train.Example"). A file is a sequence of records, optionally compressed
with gzip. A payload is mostly a `tf.train.Example`. Damage raises a ValueError with the record and its byte in the
uncompressed file; the caller adds the file's name. Messages (tensorflow/core/example/example.proto and feature.proto):
Example{features = 1}, Features{map<string, Feature> feature = 1}, Feature{bytes_list = 1 | float_list = 2 | int64_list
= 3}, each list{repeated value = 1}. The encoding is that of protobuf.dev, "Encoding": numbers are packed or not,
unknown fields are ignored, and if a name occurs twice the last one counts.
"""

from __future__ import annotations

import gzip as python_gzip
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Self

from dlbench.errors import EnvironmentLacksError
from dlbench.lazy import np
from dlbench.opening import open_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
FRAME = _HEAD.size + _TAIL.size  # bytes of a record without its payload
_LARGEST = 2**31 - 1  # bytes of a payload: the largest protocol buffer
_MAX_EXPANSION = 1032  # largest compression ratio of deflate (zlib.net, "zlib technical details")
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


@lru_cache(maxsize=1)
def _codec() -> tuple[str, ModuleType, ModuleType]:
    try:
        return "isal", import_module("isal.isal_zlib"), import_module("isal.igzip")
    except ImportError:  # slower by a factor of three
        return "zlib", zlib, python_gzip


@lru_cache(maxsize=1)
def _crc32c() -> Any:
    try:
        return import_module("google_crc32c").value
    except ImportError:
        raise EnvironmentLacksError("google-crc32c is not installed; pip install 'dlbench[data]'") from None


def decompressor() -> str:
    """Returns the library that decompresses gzip: `isal`, or Python's own `zlib`."""
    return _codec()[0]


def masked_crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """Returns TFRecord's checksum: CRC-32C (RFC 3720, appendix B.4) rotated by 15 bits, plus a constant."""
    crc = int(_crc32c()(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(head: bytes, where: str) -> int:
    length, checksum = _HEAD.unpack(head)
    if masked_crc32c(head[:8]) != checksum:
        raise ValueError(f"{where}: the checksum of its length differs")
    if length > _LARGEST:
        raise ValueError(f"{where}: {length} bytes long, at most {_LARGEST} are possible")
    return int(length)


def _whole(size: int, expected: int, where: str) -> None:
    if size != expected:
        raise ValueError(f"{where}: truncated, {size} of {expected} bytes are there")


def _checked(payload: Any, tail: bytes, where: str) -> None:
    if masked_crc32c(payload) != _TAIL.unpack(tail)[0]:
        raise ValueError(f"{where}: the checksum of its payload differs")


def is_gzip(start: bytes) -> bool:
    """Returns whether a file that starts with these (at least 12) bytes is gzip, not a record that begins like it."""
    if not start.startswith(b"\x1f\x8b"):
        return False
    return len(start) < _HEAD.size or masked_crc32c(start[:8]) != _HEAD.unpack_from(start)[1]


def read_records(path: Path, *, gzip: bool | None = None) -> Iterator[bytes]:
    """Yields the payloads of a file; only one at a time is in memory.

    `gzip`: whether it is compressed; None: determined from its first bytes. Raises OSError: it cannot be opened or
    read. ValueError: it is damaged or truncated. EnvironmentLacksError: google-crc32c is not installed.
    """
    with open_file(path) as file:
        if gzip is None:
            gzip = is_gzip(file.read(_HEAD.size))
            file.seek(0)
        if not gzip:
            yield from _records(file)
            return
        _name, codec, opener = _codec()
        try:
            with opener.open(file, "rb") as stream:
                yield from _records(stream)
        except (codec.error, zlib.error, python_gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"not an intact gzip file: {error}") from None


def _records(stream: IO[bytes]) -> Iterator[bytes]:
    record = offset = 0
    while head := stream.read(_HEAD.size):
        where = f"record {record} at byte {offset}"
        _whole(len(head), _HEAD.size, where)
        length = _length(head, where)
        body = stream.read(length + _TAIL.size)
        _whole(len(body), length + _TAIL.size, where)
        payload = body[:length]
        _checked(payload, body[length:], where)
        yield payload
        record, offset = record + 1, offset + FRAME + length


def gunzip(data: bytes) -> bytes:
    """Decompresses a whole gzip file of one or several members. Raises ValueError: it is damaged or truncated."""
    _name, codec, _opener = _codec()
    # The last four bytes hold the size of a file of one member: with one byte more, one buffer is enough. The bounds
    # are for damaged files.
    expected = max(4 * len(data), min(int.from_bytes(data[-4:], "little"), _MAX_EXPANSION * len(data))) + 1
    blocks: list[bytes] = []
    position = len(data)
    try:
        while data:
            engine = codec.decompressobj(31)
            while not engine.eof:
                blocks.append(engine.decompress(data, expected))
                data = engine.unconsumed_tail
                if not data and not engine.eof and len(blocks[-1]) < expected:
                    raise ValueError(f"gzip: truncated after {position} bytes")
            data = engine.unused_data.lstrip(b"\0")  # padding is allowed
    except (codec.error, zlib.error) as error:
        raise ValueError(f"gzip: damaged: {error}") from None
    if len(blocks) == 1:
        return blocks[0]
    return b"".join(blocks)


def unframe(data: bytes) -> Iterator[memoryview]:
    """Yields the payloads of an uncompressed file in memory without copies. Raises ValueError: it is damaged."""
    view, array = memoryview(data), np.frombuffer(data, dtype=np.uint8)
    record = offset = 0
    while offset < len(data):
        where = f"record {record} at byte {offset}"
        _whole(min(_HEAD.size, len(data) - offset), _HEAD.size, where)
        length = _length(data[offset : offset + _HEAD.size], where)
        start, end = offset + _HEAD.size, offset + _HEAD.size + length
        _whole(min(length + _TAIL.size, len(data) - start), length + _TAIL.size, where)
        _checked(array[start:end], data[end : end + _TAIL.size], where)
        yield view[start:end]
        record, offset = record + 1, end + _TAIL.size


def record_offsets(path: Path) -> NDArray[np.int64]:
    """Returns the byte offsets (num_records,) of the records of a plain file, whose payloads are not read.

    Raises OSError: it cannot be opened or read. ValueError: it is compressed, damaged or truncated.
    """
    offsets: list[int] = []
    with open_file(path) as file:
        offset, end = 0, os.fstat(file.fileno()).st_size
        if is_gzip(os.pread(file.fileno(), _HEAD.size, 0)):
            raise ValueError("gzip allows no random access; decompress it, or read it from its start")
        while offset < end:
            where = f"record {len(offsets)} at byte {offset}"
            head = os.pread(file.fileno(), _HEAD.size, offset)
            _whole(len(head), _HEAD.size, where)
            length = _length(head, where)
            _whole(min(FRAME + length, end - offset), FRAME + length, where)
            offsets.append(offset)
            offset += FRAME + length
    return np.array(offsets, dtype=np.int64)


def read_record_at(file: int | IO[bytes], offset: int) -> bytes:
    """Reads the payload of the record at a byte of a plain file, given as a descriptor or an open file.

    A descriptor's position is neither used nor changed, so that processes can share it.
    Raises OSError: it cannot be read. ValueError: there is no complete record, or it is damaged.
    """
    descriptor = file if isinstance(file, int) else file.fileno()
    head = os.pread(descriptor, _HEAD.size, offset)
    where = f"record at byte {offset}"
    if len(head) < _HEAD.size:
        raise ValueError(f"{where}: the file ends before it")
    length = _length(head, where)
    size, body = length + _TAIL.size, b""
    while len(body) < size and (block := os.pread(descriptor, size - len(body), offset + _HEAD.size + len(body))):
        body += block
    _whole(len(body), size, where)
    payload = body[:length]
    _checked(payload, body[length:], where)
    return payload


class RecordWriter:
    """Writes records into a new file; a context manager.

    The same records give the same bytes: a compressed file holds neither a time nor its name.
    `level`: of the compression, 1 (fast) to 9.
    """

    def __init__(self, path: Path, gzip: bool = False, level: int = 6) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._engine = zlib.compressobj(level, wbits=31) if gzip else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def write(self, payload: bytes) -> None:
        head = struct.pack("<Q", len(payload))
        for part in (head + _TAIL.pack(masked_crc32c(head)), payload, _TAIL.pack(masked_crc32c(payload))):
            if self._engine is not None:
                part = self._engine.compress(part)
            self._file.write(part)

    def close(self) -> None:
        """Completes the file. May be called twice."""
        if not self._file.closed:
            with self._file:
                if self._engine is not None:
                    self._file.write(self._engine.flush())


def example_views(payload: bytes | memoryview) -> dict[str, list[memoryview] | NDArray[Any]]:
    """Returns the features of one Example by name: a list of views of bytes, or an array (n,) of float32 or int64.

    Nothing is copied. A feature without content is an empty list, because its kind is unknown.
    Raises ValueError: it is not an Example; the message has the reason.
    """
    by_name: dict[str, list[memoryview] | NDArray[Any]] = {}
    for features in _fields(memoryview(payload), 1):
        for entry in _fields(features, 1):
            # In a map's entry field 1 is the key and field 2 the value; an empty one may be missing.
            name, feature = b"", None
            for content in _fields(entry, 1):
                name = bytes(content)
            for content in _fields(entry, 2):
                feature = content
            try:
                by_name[name.decode("utf-8")] = [] if feature is None else _feature(feature)
            except UnicodeDecodeError:
                raise ValueError(f"Example: a feature's name is not UTF-8: {name!r}") from None
    return by_name


def encode_example(
    features: Mapping[str, bytes | Sequence[bytes] | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]],
) -> bytes:
    """Encodes an Example, sorted by name: bytes, lists of bytes, and arrays, which become float32 or int64 (packed).

    Raises ValueError: an array holds neither floating-point numbers nor integers.
    """
    entries = []
    for name in sorted(features):
        feature = _sized(1, name.encode("utf-8")) + _sized(2, _encoded(name, features[name]))
        entries.append(_sized(1, feature))
    return _sized(1, b"".join(entries))


def _encoded(name: str, value: Any) -> bytes:
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
    kind = 0
    parts: list[tuple[int, memoryview]] = []
    for field, wire, content in _all_fields(message):
        if field not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) or wire != _SIZED:
            continue
        if field != kind:  # of a `oneof` the last counts
            kind, parts = field, []
        for list_field, list_wire, element in _all_fields(content):
            if list_field == 1:
                parts.append((list_wire, element))
    if kind in (0, _BYTES_LIST):
        return [content for wire, content in parts if wire == _SIZED]
    if kind == _FLOAT_LIST:
        joined = b"".join(content for wire, content in parts if wire in (_SIZED, _FIXED32))
        if len(joined) % 4:
            raise ValueError(f"Example: a list of floats has {len(joined)} bytes, not a multiple of 4")
        return np.frombuffer(joined, dtype="<f4")
    packed = b"".join(content for wire, content in parts if wire in (_SIZED, _VARINT))
    small = np.frombuffer(packed, dtype=np.uint8)
    if not (small & 0x80).any():  # one byte per number
        return small.astype(np.int64)
    values, position, view = [], 0, memoryview(packed)
    while position < len(packed):
        value, position = _read_varint(view, position)
        values.append(value)
    return np.array(values, dtype=np.uint64).view(np.int64)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("Example: ends inside a number")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise ValueError("Example: a number of more than 10 bytes")


def _all_fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields field number, wire type and content of each field; the content of a number is its encoding."""
    end = 0
    while end < len(message):
        tag, start = _read_varint(message, end)
        field, wire = tag >> 3, tag & 7
        if field == 0:
            raise ValueError("Example: not a protocol buffer (field number 0)")
        if wire == _VARINT:
            _value, end = _read_varint(message, start)
        elif wire == _SIZED:
            length, start = _read_varint(message, start)
            end = start + length
        elif wire == _FIXED64:
            end = start + 8
        elif wire == _FIXED32:
            end = start + 4
        else:
            raise ValueError(f"Example: not a protocol buffer (wire type {wire})")
        if end > len(message):
            raise ValueError(f"Example: field {field} of {end - start} bytes is truncated")
        yield field, wire, message[start:end]


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
    return (content for field, wire, content in _all_fields(message) if field == number and wire == _SIZED)
