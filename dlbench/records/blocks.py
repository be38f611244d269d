"""Rows of fixed size in compressed blocks, appended while a run goes on; a torn tail is legal. Notes lie between them.

Layout: one line of JSON (the header), then blocks. A block is its kind (1 byte: `R` rows, `N` a note), the length of
its content and the CRC-32 of that (4 bytes each, little-endian), and its content, deflated. Rows are little-endian and
turned, all first bytes, then all second bytes, and so on; columns named in the header's `delta` hold differences to
the row before in the same block. A note is JSON.

Writing needs the standard library alone: samplers use it, and must be light.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.void]

Fields = Sequence[tuple[str, str]]
"""Name and type of each column, e.g. ("start_ns", "<i8")."""

_CODES = {"<i8": "q", "<u8": "Q", "<i4": "i", "<u4": "I", "<u2": "H", "<f4": "f", "<f8": "d"}
_HEAD = struct.Struct("<cII")
_ROWS, _NOTE = b"R", b"N"
# Level 1 of deflate: measured rows are mostly noise, which no level shrinks.
_LEVEL = 1


class BlockWriter:
    """Appends rows and notes.

    Args:
        path: the file; it must not exist.
        header: stored with the file; `format` and `version` belong into it.
        fields: the columns.
        delta: integer columns that grow from row to row.
        rows_per_block: rows held in memory until they are written.
        max_bytes: size that the file does not exceed; None: no limit. Rows that do not fit are counted and left out;
            notes always fit.
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
    ) -> None:
        self._row = struct.Struct("<" + "".join(_CODES[kind] for _, kind in fields))
        self._delta = [n for n, (name, _) in enumerate(fields) if name in delta]
        self._last = [0] * len(self._delta)
        self._rows: list[bytes] = []
        self._per_block = rows_per_block
        self._max_bytes = max_bytes
        self._notes = b""
        self._unwritten = b""
        self.bytes_written = 0
        """Bytes in the file, those that wait for the disk included."""
        self.num_rows = 0
        """Rows that were kept."""
        self.dropped = 0
        """Rows that were left out."""
        self._file = path.open("xb", buffering=0)
        content = {**header, "fields": [list(field) for field in fields], "delta": list(delta)}
        self._write((json.dumps(content, sort_keys=True) + "\n").encode())

    def append(self, row: Sequence[float]) -> None:
        """Adds one row, in the order of the fields.

        Raises:
            OSError: the disk is full or gone.
            struct.error: a value does not fit its column.
        """
        if self._delta:
            values = list(row)
            for place, column in enumerate(self._delta):
                value = int(values[column])
                values[column] = value - self._last[place]
                self._last[place] = value
            row = values
        self._rows.append(self._row.pack(*row))
        if len(self._rows) == self._per_block:
            self.flush()

    def note(self, content: Mapping[str, Any], *, before_rows: bool = False) -> None:
        """Writes what is held, then a note; or, `before_rows`, keeps the note and writes it before the rows held now.

        Raises:
            OSError: the disk is full or gone.
            ValueError: a number is not finite.
        """
        block = _block(_NOTE, json.dumps(content, allow_nan=False, sort_keys=True).encode())
        if before_rows:
            self._notes += block
            return
        self.flush()
        self._write(block)

    def flush(self) -> None:
        """Writes what is held in memory.

        Raises:
            OSError: the disk is full or gone; what was written of a block is not written again.
        """
        if self._rows:
            data = b"".join(self._rows)
            size = self._row.size
            block = self._notes + _block(_ROWS, b"".join(data[n::size] for n in range(size)))
            if self._max_bytes is None or self.bytes_written + len(block) <= self._max_bytes:
                self.num_rows += len(self._rows)
                self._rows, self._notes = [], b""
                self._last = [0] * len(self._delta)
                self._write(block)
                return
            self.dropped += len(self._rows)
            self._rows = []
            self._last = [0] * len(self._delta)
        notes, self._notes = self._notes, b""
        self._write(notes)

    def _write(self, data: bytes) -> None:
        self._unwritten += data
        self.bytes_written += len(data)
        while self._unwritten:
            # Unbuffered writes may be short; a full disk then raises at the next one.
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Writes the rest and closes."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _block(kind: bytes, content: bytes) -> bytes:
    packed = zlib.compress(content, _LEVEL)
    return _HEAD.pack(kind, len(packed), zlib.crc32(packed)) + packed


class BlockReader:
    """Reads a file block by block, so that memory does not grow with it.

    Raises:
        IncompleteDataError: the file cannot be read, or is none of `format`.
    """

    def __init__(self, path: Path, format_name: str) -> None:
        self.path = path
        self.torn_bytes = 0
        """Bytes behind the last whole block, known when all blocks were read: 0 unless a writer was killed."""
        try:
            with path.open("rb") as file:
                head = file.readline(1 << 20)
        except OSError as error:
            raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
        try:
            header = json.loads(head) if head.endswith(b"\n") else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != format_name:
            raise IncompleteDataError(f"{path}: not a file of {format_name}, or damaged at its start")
        self.header: dict[str, Any] = header
        self._begin = len(head)

    def blocks(self) -> Iterator[Rows | dict[str, Any]]:
        """Arrays of rows (structured, by the header's fields) and notes, in the order in which they were written.

        Raises:
            IncompleteDataError: a block within the file is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(self._begin)
            while head := file.read(_HEAD.size):
                content = b""
                if len(head) == _HEAD.size:
                    kind, length, crc = _HEAD.unpack(head)
                    content = file.read(length)
                if len(head) < _HEAD.size or len(content) < length:
                    self.torn_bytes = len(head) + len(content)
                    return
                if zlib.crc32(content) != crc or kind not in (_ROWS, _NOTE):
                    raise IncompleteDataError(f"{self.path}: a block is damaged; restore the file from a copy")
                plain = zlib.decompress(content)
                yield self._rows(plain) if kind == _ROWS else json.loads(plain)

    def _rows(self, content: bytes) -> Rows:
        import numpy as np

        dtype = np.dtype([(str(name), str(kind)) for name, kind in self.header["fields"]])
        turned = np.frombuffer(content, dtype=np.uint8).reshape(dtype.itemsize, -1)
        rows: Rows = np.ascontiguousarray(turned.T).view(dtype).reshape(-1)
        for name in self.header["delta"]:
            rows[name] = np.cumsum(rows[name])
        return rows
