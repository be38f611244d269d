"""Reads the rows of a rank (see `dlbench.records.rows.format`); damaged blocks are errors."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import np, npt
from dlbench.opening import parse_json
from dlbench.records.rows.format import CODES, MAX_CONTENT, SUBFIELD, TRAILER
from dlbench.records.rows.shared import RankRows, RowBlock, read_header_block, read_part

if TYPE_CHECKING:
    Rows = npt.NDArray[np.void]
    Values = npt.NDArray[np.generic]

try:  # isal inflates the same streams in three quarters of the time.
    _inflater: Any = import_module("isal.isal_zlib")
except ImportError:
    _inflater = zlib


class BlockReader:
    """Reads the rows of a rank. `content`: its rows in words, for errors; `part`: its blocks, if they were read before;
    `run_id`: the run that the rows must belong to; empty: any.
    """

    def __init__(
        self, path: Path, format_name: str, content: str | None = None, part: RankRows | None = None, run_id: str = ""
    ) -> None:
        self.path = path
        self._part = part
        self.torn_bytes = 0
        """Bytes behind the last complete block, after all blocks were read; 0 unless a writer was killed."""
        self.notes: list[dict[str, Any]] = []  # Notes in the blocks read so far.
        self.header: dict[str, Any] = {}
        self._seed = 0  # CRC-32 of the header, with which those of the other blocks begin.
        try:
            header = part.blocks[0] if part else read_header_block(path)
            if header is not None:
                self.header, self._seed = self._json(header), header.check
        except OSError as error:
            raise self._unreadable(error) from None
        except IncompleteDataError:
            pass
        if self.header.get("format") != format_name:
            raise IncompleteDataError(f"{path}: not a file of {content or format_name}, or damaged at its start")
        if run_id and self.header.get("run_id", run_id) != run_id:
            other_run = str(self.header["run_id"])[:80]
            raise IncompleteDataError(f"{path}: belongs to run {other_run!r}, not to {run_id}")

    def take_note(self, note: dict[str, Any]) -> None:
        """Takes a note, before the rows that were written after it."""
        self.notes.append(note)

    def blocks(self) -> Iterator[Rows]:
        """Yields arrays of rows (structured, by the header's fields) in the order in which they were written."""
        dtype = np.dtype([*self.fields()])
        for content in self.contents():
            yield np.frombuffer(content, dtype)

    def read(self, names: Collection[str]) -> dict[str, Values]:
        """Returns some columns of all rows, by name, each of shape (rows,); much faster than by block."""
        rows = np.frombuffer(b"".join(self.contents()), np.dtype([*self.fields()]))
        return {name: np.ascontiguousarray(rows[name]) for name in names}

    def contents(self) -> Iterator[bytes]:
        """Yields the rows of every block as they were packed. Raises IncompleteDataError: damage."""
        self.notes.clear()
        self.torn_bytes = 0
        row_bytes = sum(int(kind[2:]) for _, kind in self.fields())
        try:
            part = self._part or read_part(self.path)
        except OSError as error:
            raise self._unreadable(error) from None
        for block in part.blocks[1:]:
            if block.json:
                self.take_note(self._json(block))
            rows, remaining = self._inflated(block, block.rows)
            if len(remaining) != TRAILER.size or len(rows) % row_bytes:
                raise self._damaged()
            if rows:
                yield rows
        self.torn_bytes = part.torn_bytes
        if part.is_damaged:
            raise self._damaged()

    def _inflated(self, block: RowBlock, data: bytes) -> tuple[bytes, bytes]:
        """Returns the inflated beginning of a part of a block, and what follows it."""
        if zlib.crc32(block.rows, zlib.crc32(block.json, self._seed)) != block.check:
            raise self._damaged()
        engine = _inflater.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte above the limit, so that content of exactly the limit reaches its end.
            plain = engine.decompress(data, MAX_CONTENT + 1)
        except _inflater.error:
            raise self._damaged() from None
        if not engine.eof or len(plain) > MAX_CONTENT:
            raise self._damaged()
        return plain, engine.unused_data

    def _json(self, block: RowBlock) -> dict[str, Any]:
        text, _ = self._inflated(block, block.json[SUBFIELD.size :])
        try:
            content = parse_json(text)
        except ValueError:
            raise self._damaged() from None
        if not isinstance(content, dict):
            raise self._damaged()
        return content

    def fields(self) -> tuple[tuple[str, str], ...]:
        """Returns name and type of each column. Raises IncompleteDataError: the header's columns are damaged."""
        fields = self.header.get("fields")
        if not isinstance(fields, list):
            fields = []
        kinds: dict[str, str] = {}
        for field in fields:
            if isinstance(field, list) and len(field) == 2 and all(isinstance(part, str) for part in field):
                kinds[field[0]] = field[1]
        if not kinds or len(kinds) != len(fields) or not set(kinds.values()) <= set(CODES) or "" in kinds:
            raise IncompleteDataError(f"{self.path}: the header's `fields` are damaged")
        return tuple(kinds.items())

    def _damaged(self) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: a block is damaged; restore the file from a copy")

    def _unreadable(self, error: OSError) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: cannot be read: {error.strerror or error}")


def read_alike(readers: Sequence[BlockReader], names: Collection[str]) -> dict[str, Values] | None:
    """Returns columns of equally many rows of several ranks, shape (ranks, rows); None if columns or rows differ."""
    fields = readers[0].fields()
    if any(reader.fields() != fields for reader in readers):
        return None
    contents = [b"".join(reader.contents()) for reader in readers]
    if any(len(content) != len(contents[0]) for content in contents):
        return None
    rows = np.frombuffer(b"".join(contents), np.dtype([*fields])).reshape(len(readers), -1)
    return {name: np.ascontiguousarray(rows[name]) for name in names}
