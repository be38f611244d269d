"""Writes rows of fixed size and notes as members of a gzip file (docs/formats.md), by the standard library alone."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dlbench.records.rows.shared import HEAD_BYTES, block, open_shared

Fields = Sequence[tuple[str, str]]  # Name and type of each column, e.g. ("start_ns", "<i8").

CODES = {"<i8": "q", "<u8": "Q", "<i4": "i", "<u4": "I", "<u2": "H", "<f4": "f", "<f8": "d"}
"""Types of columns with their codes for `struct`."""
MAX_CONTENT = 1 << 25  # Largest content of a block before deflation, bytes.
MAX_JSON = 65_000  # Largest subfield of JSON, bytes: an extra field has two bytes for its length.
TRAILER = struct.Struct("<II")  # Of a gzip member: CRC-32 and length of the content.
SUBFIELD = struct.Struct("<2sH")  # Of an extra field: its name and length.

_LEVEL = 1  # Of deflate: measured rows are mostly noise, which higher levels do not shrink.


class BlockWriter:
    """Appends rows and notes of a rank to a file that its node's ranks share. Rows beyond `max_bytes` are left out and
    counted.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        fields: Fields,
        *,
        rows_per_block: int = 64,
        max_bytes: int | None = None,
        rank: int = 0,
    ) -> None:
        self._kinds = [kind for _, kind in fields]
        self._row = struct.Struct("<" + "".join(CODES[kind] for kind in self._kinds))
        self._rows: list[bytes] = []
        self._per_block = max(1, min(rows_per_block, MAX_CONTENT // self._row.size))
        self._max_bytes = max_bytes
        self._failure: OSError | None = None
        self._rank, self._num_blocks, self._seed = rank, 0, 0
        self.bytes_written = 0
        """Bytes of this rank in the file."""
        self.num_rows = 0  # Rows in the file.
        self.dropped = 0  # Rows left out, or not written because of errors.
        first_block = self._block({**header, "fields": [list(field) for field in fields]})
        self._path = path
        self._file = open_shared(path, rank)
        self._write(first_block)
        self._seed = zlib.crc32(first_block[HEAD_BYTES:])

    def append(self, row: Sequence[float]) -> None:
        """Adds a row; values too large for a 4-byte float become infinite. Raises struct.error: one does not fit."""
        try:
            packed = self._row.pack(*row)
        except OverflowError:
            # `struct` refuses values too large for a 4-byte float, such as a diverging loss.
            largest = 3.4028234663852886e38
            packed = self._row.pack(
                *(
                    math.copysign(math.inf, value) if kind == "<f4" and abs(value) > largest else value
                    for kind, value in zip(self._kinds, row, strict=True)
                )
            )
        self._rows.append(packed)
        if len(self._rows) == self._per_block:
            self.flush()

    @property
    def num_held(self) -> int:
        """Returns the rows in memory, which the next `flush` writes."""
        return len(self._rows)

    def note(self, content: Mapping[str, Any]) -> None:
        """Writes the rows in memory, then a note. Raises OSError: as `flush`; ValueError: it is too large."""
        self.flush()
        self._write(self._block(content))

    def flush(self) -> None:
        """Writes the rows in memory. Raises OSError: the disk is full or gone, now or earlier; no more is written."""
        self.flush_with(None)

    def flush_with(self, note: Mapping[str, Any] | None) -> bool:
        """Writes the rows in memory, if there are any, with a note on them; returns whether they were written."""
        if not self._rows:
            return False
        rows, self._rows = self._rows, []
        self.dropped += len(rows)
        try:
            data = self._block(note, b"".join(rows))
        except ValueError:  # more names than a block can have
            return False
        if self._max_bytes is not None and self.bytes_written + len(data) > self._max_bytes:
            return False
        self._write(data)
        self.dropped -= len(rows)
        self.num_rows += len(rows)
        return True

    def _block(self, note: Mapping[str, Any] | None, rows: bytes = b"") -> bytes:
        json_data = b"" if note is None else deflated_json(note)
        return block(self._rank, self._num_blocks, json_data, deflated_rows(rows), self._seed)

    def _write(self, data: bytes) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            # Other ranks may have written since, so an incomplete block is written again completely; a full disk then
            # raises.
            while self._file.write(data) < len(data):
                pass
        except OSError as error:  # It does not name the file.
            # Blocks behind a missing one could not be read.
            self._failure = OSError(error.errno, error.strerror, str(self._path))
            raise self._failure from None
        self._num_blocks += 1
        self.bytes_written += len(data)

    def sync(self) -> None:
        """Writes the rows in memory and syncs the file, as some file systems report errors only then."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes the remaining rows and closes. Raises OSError: the disk is full or gone; lost rows are counted."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()


def deflated_rows(rows: bytes) -> bytes:
    """Returns packed rows as the end of a gzip member."""
    return _deflated(rows) + TRAILER.pack(zlib.crc32(rows), len(rows))


def deflated_json(content: Mapping[str, Any]) -> bytes:
    """Returns a header or a note as a subfield of a gzip member. Raises ValueError: it is too large."""
    data = _deflated(json.dumps(content, allow_nan=False, sort_keys=True).encode())
    if len(data) > MAX_JSON:
        raise ValueError(f"a header or a note of {len(data)} bytes, but at most {MAX_JSON} can be read")
    return SUBFIELD.pack(b"DJ", len(data)) + data


def _deflated(data: bytes) -> bytes:
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return engine.compress(data) + engine.flush()
