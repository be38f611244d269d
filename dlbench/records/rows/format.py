"""Rows of fixed size in compressed blocks, appended while a run goes on; a torn tail is legal. Notes lie between them.

Layout: one line of JSON (the header), then blocks. A block is its head and its content, deflated (RFC 1951, without
zlib's frame). The head is its kind (1 byte: `R` rows, `N` a note), the length of the deflated content, the CRC-32 of
the header's line followed by that content, and the CRC-32 of these nine bytes (4 bytes each, little-endian): a
reader can distinguish a block that is not whole yet from a damaged one. Rows are little-endian and turned, all first
bytes, then all second bytes, and so on; columns named in the header's `delta` hold differences to the row before in
the same block, modulo their size. A note is JSON.

Writing needs the standard library alone: samplers use it, and must be light. `dlbench.records.rows.reader` reads.
"""

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
"""Types of columns, and what `struct` calls them."""
MAX_CONTENT = 1 << 25  # Bytes of a block's content, before it is deflated: none is larger.

MAX_HEADER = 1 << 20  # Bytes of the header's line: it is no longer.

HEAD = struct.Struct("<cII")  # Kind, length, CRC-32 of the content.
CHECK = struct.Struct("<I")  # CRC-32 of those.
ROWS, NOTE = b"R", b"N"  # Kinds of blocks.

# Level 1 of deflate: measured rows are mostly noise, which no level shrinks.
_LEVEL = 1


class BlockWriter:
    """Appends rows and notes.

    `header` is stored with the file (`format` and `version` belong into it); `delta`: integer columns that grow from
    row to row; `rows_per_block` are held in memory until they are written; `rank`: whose rows these are, in a file that
    the ranks of its node share, or None: in a file of their own, which must not exist. They do not exceed `max_bytes`:
    rows that do not fit are counted and left out; the header and notes always fit.
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
        """Bytes in the file, heads of chunks apart."""
        self.num_rows = 0
        """Rows that are in the file."""
        self.dropped = 0
        """Rows that were left out, or that the disk did not take."""
        content = {**header, "fields": [list(field) for field in fields], "delta": list(delta)}
        line = (json.dumps(content, sort_keys=True) + "\n").encode()
        if len(line) > MAX_HEADER:
            raise ValueError(f"{path}: a header of {len(line)} bytes, {MAX_HEADER} at most can be read")
        self._seed = zlib.crc32(line)
        self._path = path
        self._file = path.open("xb", buffering=0) if rank is None else open_shared(path, rank)
        self._write(line)

    def append(self, row: Sequence[float]) -> None:
        """Adds one row, in the order of the fields. What a 4-byte float cannot hold becomes infinite. Raises OSError:
        the disk is full or gone; or struct.error: a value does not fit its column; the row is left out.
        """
        if self._delta:
            values = list(row)
            news = []
            for column, (low, high), last in zip(self._delta, self._limits, self._last, strict=True):
                new = int(values[column])
                step = new - last
                if not low <= new <= high:
                    raise struct.error(f"{new} is not from {low} to {high}")
                if not low <= step <= high:  # the difference modulo the size of its column, which cannot hold it
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
        """Rows in memory, which the next `flush` writes."""
        return len(self._rows)

    def _packed(self, row: Sequence[float]) -> bytes:
        try:
            return self._row.pack(*row)
        except OverflowError:
            # What `struct` says of a 4-byte float, of which a diverging loss has one.
            largest = 3.4028234663852886e38
            return self._row.pack(
                *(
                    math.copysign(math.inf, value) if kind == "<f4" and abs(value) > largest else value
                    for kind, value in zip(self._kinds, row, strict=True)
                )
            )

    def note(self, content: Mapping[str, Any], *, before_rows: bool = False) -> None:
        """Writes what is held, then a note; or, `before_rows`, keeps the note and writes it with the rows held now.

        What is kept comes before those rows or, where they do not fit, before the next that do. Raises OSError: the
        disk is full or gone; or ValueError: a number is not finite, or the note is too long.
        """
        data = json.dumps(content, allow_nan=False, sort_keys=True).encode()
        if len(data) > MAX_CONTENT:
            raise ValueError(f"a note of {len(data)} bytes, {MAX_CONTENT} at most can be read")
        block = self._block(NOTE, data)
        if before_rows:
            self._notes += block
            return
        self.flush()
        self._write(block)

    def flush(self) -> None:
        """Writes what is held in memory. Raises OSError: the disk is full or gone, now or before: nothing more is
        written.
        """
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
                # Others may have written since, so that a chunk that was cut short is written anew, whole.
                while self._file.write(piece) < len(piece):
                    pass
        except OSError as error:  # which does not know its file
            # What follows a block that was cut short could not be read.
            self._failure = OSError(error.errno, error.strerror, str(self._path))
            self.dropped += num_rows
            raise self._failure from None
        self._chunks += 1
        self.bytes_written += len(data)
        self.num_rows += num_rows

    def sync(self) -> None:
        """Writes what is held in memory and waits until the disk has it, which is when some say that they failed."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes the rest and closes. Raises OSError: the disk is full or gone; what it did not take is counted."""
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
    """Smallest and largest value of an integer column."""
    bits = 8 * int(kind[2])
    if kind[1] == "i":
        return -(1 << bits - 1), (1 << bits - 1) - 1
    if kind[1] == "u":
        return 0, (1 << bits) - 1
    raise ValueError(f"a column of type {kind} has no differences that would be exact")
