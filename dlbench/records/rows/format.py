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

CODES = {"<u1": "B", "<i8": "q", "<u8": "Q", "<i4": "i", "<u4": "I", "<u2": "H", "<f4": "f", "<f8": "d"}
"""Types of columns with their codes for `struct`."""
MAX_CONTENT = 1 << 25  # Largest content of a block before deflation, bytes.
MAX_JSON = 65_000  # Largest subfield of JSON, bytes: an extra field has two bytes for its length.
TRAILER = struct.Struct("<II")  # Of a gzip member: CRC-32 and length of the content.
SUBFIELD = struct.Struct("<2sH")  # Of an extra field: its name and length.
STORED = struct.Struct("<BHH")  # Of a stored last chunk (RFC 1951, 3.2.4): 1, its length, the length's complement.
MAX_STORED = 65_535  # Largest content of a stored chunk, bytes.

_LEVEL = 1  # Of deflate: measured rows are mostly noise, which higher levels do not shrink.


class BlockWriter:
    """Appends rows and notes of a rank to a file that its node's ranks share. Rows beyond `max_bytes` are left out and
    counted.

    `wide_fields`: the same columns in larger types. Rows are then stored as they are, which saves deflating and
    inflating; only a block with a value that `fields` do not hold has `wide_fields`, a note of them, and is deflated.
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
        wide_fields: Fields | None = None,
    ) -> None:
        self._kinds = [kind for _, kind in fields]
        self._wide_fields = wide_fields
        self._narrow_row = self._row = _row_struct(fields)
        self._wide_row = _row_struct(wide_fields or fields)
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
            packed = self._packed(row)
        except struct.error:
            if self._row is self._wide_row or self._wide_fields is None:
                raise
            narrow_rows = self._rows
            self._row = self._wide_row
            self._rows = [self._row.pack(*self._narrow_row.unpack(narrow)) for narrow in narrow_rows]
            packed = self._packed(row)
        self._rows.append(packed)
        if len(self._rows) == self._per_block:
            self.flush()

    def _packed(self, row: Sequence[float]) -> bytes:
        try:
            return self._row.pack(*row)
        except OverflowError:
            # `struct` refuses values too large for a 4-byte float, such as a diverging loss.
            largest = 3.4028234663852886e38
            return self._row.pack(
                *(
                    math.copysign(math.inf, value) if kind == "<f4" and abs(value) > largest else value
                    for kind, value in zip(self._kinds, row, strict=True)
                )
            )

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
        is_stored = self._wide_fields is not None
        if self._row is not self._narrow_row:
            self._row, is_stored = self._narrow_row, False
            note = {**(note or {}), "fields": self._wide_fields}
        self.dropped += len(rows)
        try:
            data = self._block(note, b"".join(rows), is_stored=is_stored)
        except ValueError:  # more names than a block can have
            return False
        if self._max_bytes is not None and self.bytes_written + len(data) > self._max_bytes:
            return False
        self._write(data)
        self.dropped -= len(rows)
        self.num_rows += len(rows)
        return True

    def _block(self, note: Mapping[str, Any] | None, rows: bytes = b"", *, is_stored: bool = False) -> bytes:
        json_data = b"" if note is None else deflated_json(note)
        if is_stored and len(rows) <= MAX_STORED:
            content = STORED.pack(1, len(rows), len(rows) ^ MAX_STORED) + rows
        else:
            content = _deflated(rows)
        member_end = content + TRAILER.pack(zlib.crc32(rows), len(rows))
        return block(self._rank, self._num_blocks, json_data, member_end, self._seed)

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


def _row_struct(fields: Fields) -> struct.Struct:
    return struct.Struct("<" + "".join(CODES[kind] for _, kind in fields))


def deflated_json(content: Mapping[str, Any]) -> bytes:
    """Returns a header or a note as a subfield of a gzip member. Raises ValueError: it is too large."""
    data = _deflated(json.dumps(content, allow_nan=False, sort_keys=True).encode())
    if len(data) > MAX_JSON:
        raise ValueError(f"a header or a note of {len(data)} bytes, but at most {MAX_JSON} can be read")
    return SUBFIELD.pack(b"DJ", len(data)) + data


def _deflated(data: bytes) -> bytes:
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return engine.compress(data) + engine.flush()
