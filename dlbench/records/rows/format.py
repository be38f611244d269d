"""Writes rows of fixed size in compressed blocks with notes (docs/formats.md); it needs only the standard library."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dlbench.records.rows.shared import chunk, open_shared

Fields = Sequence[tuple[str, str]]  # Name and type of each column, e.g. ("start_ns", "<i8").

CODES = {"<i8": "q", "<u8": "Q", "<i4": "i", "<u4": "I", "<u2": "H", "<f4": "f", "<f8": "d"}
"""Types of columns with their codes for `struct`."""
MAX_CONTENT = 1 << 25  # Largest content of a block before deflation, bytes.
MAX_HEADER = 1 << 20  # Longest line of a header, bytes.
HEAD = struct.Struct("<cII")  # Kind, length, CRC-32 of the content.
CHECK = struct.Struct("<I")  # CRC-32 of those.
ROWS, NOTE = b"R", b"N"  # Kinds of blocks.

_LEVEL = 1  # Of deflate: measured rows are mostly noise, which higher levels do not shrink.


class BlockWriter:
    """Appends rows and notes to a file. `delta`: integer columns stored as differences. `rank`: of these rows, in a
    file that its node's ranks share; None: a separate file. Rows beyond `max_bytes` are left out and counted.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        fields: Fields,
        *,
        delta: Sequence[str] = (),
        rows_per_block: int = 64,
        max_bytes: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._kinds = [kind for _, kind in fields]
        self._row = struct.Struct("<" + "".join(CODES[kind] for kind in self._kinds))
        self._delta = [n for n, (name, _) in enumerate(fields) if name in delta]
        self._limits = [_limits(self._kinds[n]) for n in self._delta]
        self._last = [0] * len(self._delta)
        self._rows: list[bytes] = []
        self._per_block = max(1, min(rows_per_block, MAX_CONTENT // self._row.size))
        self._max_bytes = max_bytes
        self._notes = b""
        self._failure: OSError | None = None
        self._rank, self._chunks = rank, 0
        self.bytes_written = 0
        """Bytes in the file without heads of chunks."""
        self.num_rows = 0  # Rows in the file.
        self.dropped = 0  # Rows left out, or not written because of errors.
        content = {**header, "fields": [list(field) for field in fields], "delta": list(delta)}
        line = (json.dumps(content, sort_keys=True) + "\n").encode()
        if len(line) > MAX_HEADER:
            raise ValueError(f"{path}: a header of {len(line)} bytes, but at most {MAX_HEADER} can be read")
        self._seed = zlib.crc32(line)
        self._path = path
        self._file = path.open("xb", buffering=0) if rank is None else open_shared(path, rank)
        self._write(line)

    def append(self, row: Sequence[float]) -> None:
        """Adds a row; values too large for a 4-byte float become infinite. Raises struct.error: one does not fit."""
        if self._delta:
            values = list(row)
            news = []
            for column, (low, high), last in zip(self._delta, self._limits, self._last, strict=True):
                new = int(values[column])
                step = new - last
                if not low <= new <= high:
                    raise struct.error(f"{new} is not from {low} to {high}")
                if not low <= step <= high:  # The difference modulo the size of its column.
                    step = (step - low) % (high - low + 1) + low
                values[column] = step
                news.append(new)
            self._rows.append(self._packed(values))
            self._last = news
        else:
            self._rows.append(self._packed(row))
        if len(self._rows) == self._per_block:
            self.flush()

    @property
    def num_held(self) -> int:
        """Returns the rows in memory, which the next `flush` writes."""
        return len(self._rows)

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

    def note(self, content: Mapping[str, Any], *, before_rows: bool = False) -> None:
        """Writes the rows in memory, then a note; with `before_rows` it is written later, before the next rows."""
        data = json.dumps(content, allow_nan=False, sort_keys=True).encode()
        if len(data) > MAX_CONTENT:
            raise ValueError(f"a note of {len(data)} bytes, but at most {MAX_CONTENT} can be read")
        block = self._block(NOTE, data)
        if before_rows:
            self._notes += block
            return
        self.flush()
        self._write(block)

    def flush(self) -> None:
        """Writes the rows in memory. Raises OSError: the disk is full or gone, now or earlier; no more is written."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        self._last = [0] * len(self._delta)
        room = math.inf if self._max_bytes is None else self._max_bytes - self.bytes_written
        if room <= len(self._notes) + HEAD.size + CHECK.size:
            self.dropped += len(rows)
            return
        data, size = b"".join(rows), self._row.size
        block = self._notes + self._block(ROWS, b"".join(data[n::size] for n in range(size)))
        if len(block) > room:
            self.dropped += len(rows)
            return
        self._notes = b""
        self._write(block, len(rows))

    def _block(self, kind: bytes, content: bytes) -> bytes:
        engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = engine.compress(content) + engine.flush()
        head = HEAD.pack(kind, len(packed), zlib.crc32(packed, self._seed))
        return head + CHECK.pack(zlib.crc32(head)) + packed

    def _write(self, data: bytes, num_rows: int = 0) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if self._rank is None:
                piece = data
                while piece:  # Unbuffered writes may be short; a full disk then raises at the next one.
                    piece = piece[self._file.write(piece) :]
            else:
                piece = chunk(self._rank, self._chunks, data)
                # Other ranks may have written since, so an incomplete chunk is written again completely.
                while self._file.write(piece) < len(piece):
                    pass
        except OSError as error:  # It does not name the file.
            # Blocks behind an incomplete one could not be read.
            self._failure = OSError(error.errno, error.strerror, str(self._path))
            self.dropped += num_rows
            raise self._failure from None
        self._chunks += 1
        self.bytes_written += len(data)
        self.num_rows += num_rows

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


def _limits(kind: str) -> tuple[int, int]:
    bits = 8 * int(kind[2])
    if kind[1] == "i":
        return -(1 << bits - 1), (1 << bits - 1) - 1
    if kind[1] == "u":
        return 0, (1 << bits) - 1
    raise ValueError(f"a column of type {kind} has no exact differences")
