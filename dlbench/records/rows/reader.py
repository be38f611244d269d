"""Reads the rows of a rank (see `dlbench.records.rows.format`); damaged blocks are errors."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import np, npt
from dlbench.opening import parse_json
from dlbench.records.rows.format import CODES, MAX_CONTENT, MAX_STORED, STORED, SUBFIELD, TRAILER, Fields
from dlbench.records.rows.shared import RankRows, RowBlock, fast_zlib, read_header_block, read_part

if TYPE_CHECKING:
    Rows = npt.NDArray[np.void]
    Values = npt.NDArray[np.generic]


class BlockReader:
    """Reads the rows of a rank. `content`: its rows in words, for errors; `part`: its blocks, if they were read before;
    `run_id`: the run that the rows must belong to; empty: any.
    """

    wide_fields: Fields = ()
    """Types in which rows are returned, which are those of blocks with `fields` in a note; empty: the header's."""

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
                if part is None or not part.is_checked:
                    self._check(header)
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
        dtype = self.dtype()
        for stored_dtype, content in self._pieces():
            yield _converted([np.frombuffer(content, stored_dtype)], dtype)

    def read_rows(self) -> Rows:
        """Returns all rows as one structured array."""
        return _converted(_gathered(self._pieces()), self.dtype())

    def dtype(self) -> np.dtype[np.void]:
        """Returns the numpy type of a row. Raises IncompleteDataError: the header's columns are damaged."""
        return _dtype(tuple(self.wide_fields) or self.fields)

    def _pieces(self) -> Iterator[tuple[np.dtype[np.void], bytes | memoryview]]:
        """Yields the rows of every block as they were packed, with their type. Raises IncompleteDataError: damage."""
        self.notes.clear()
        self.torn_bytes = 0
        header_dtype = _dtype(self.fields)
        try:
            part = self._part or read_part(self.path)
        except OSError as error:
            raise self._unreadable(error) from None
        for block in part.blocks[1:]:
            if not part.is_checked:
                self._check(block)
            dtype = header_dtype
            if block.json and self._takes_wide_rows(self._json(block)):
                dtype = self.dtype()
            rows = _stored_rows(block.rows)
            if rows is None:
                rows, trailer = self._inflated(block.rows)
                if len(trailer) != TRAILER.size:
                    raise self._damaged()
            if len(rows) % dtype.itemsize:
                raise self._damaged()
            if rows:
                yield dtype, rows
        self.torn_bytes = part.torn_bytes
        if part.is_damaged:
            raise self._damaged()

    def _takes_wide_rows(self, note: dict[str, Any]) -> bool:
        """Takes a note; returns whether the rows after it have the types of `wide_fields`."""
        if not self.wide_fields or "fields" not in note:
            self.take_note(note)
            return False
        if note.pop("fields") != [list(field) for field in self.wide_fields]:
            raise self._damaged()
        if note:
            self.take_note(note)
        return True

    def _check(self, block: RowBlock) -> None:
        if fast_zlib.crc32(block.rows, fast_zlib.crc32(block.json, self._seed)) != block.check:
            raise self._damaged()

    def _inflated(self, data: bytes | memoryview) -> tuple[bytes, bytes]:
        """Returns the inflated beginning of a part of a block, and what follows it."""
        engine = fast_zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte above the limit, so that content of exactly the limit reaches its end.
            plain = engine.decompress(data, MAX_CONTENT + 1)
        except fast_zlib.error:
            raise self._damaged() from None
        if not engine.eof or len(plain) > MAX_CONTENT:
            raise self._damaged()
        return plain, engine.unused_data

    def _json(self, block: RowBlock) -> dict[str, Any]:
        text, _ = self._inflated(block.json[SUBFIELD.size :])
        try:
            content = parse_json(text.decode("utf-8"))
        except ValueError:
            raise self._damaged() from None
        if not isinstance(content, dict):
            raise self._damaged()
        return content

    @cached_property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """Returns name and type of each column. Raises IncompleteDataError: the header's columns are damaged."""
        fields = self.header.get("fields")
        kinds = None
        if isinstance(fields, list) and set(map(type, fields)) == {list}:
            with suppress(TypeError):  # A name or a type is a list or an object.
                kinds = _checked_fields(tuple(map(tuple, fields)))
        if kinds is None:
            raise IncompleteDataError(f"{self.path}: the header's `fields` are damaged")
        return kinds

    def _damaged(self) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: a block is damaged; restore the file from a copy")

    def _unreadable(self, error: OSError) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: cannot be read: {error.strerror or error}")


def read_columns(readers: Sequence[BlockReader], names: Collection[str]) -> dict[str, Values]:
    """Returns columns of equally many rows of one rank or several, shape (ranks, rows), faster than `read_rows`.

    They have the types of the file, if all blocks have the same. Raises IncompleteDataError: also if columns or rows of
    the ranks differ.
    """
    fields, dtype = readers[0].fields, readers[0].dtype()
    unlike = IncompleteDataError(f"{readers[0].path}: columns or rows differ from those of other ranks")
    if any(reader.fields != fields or reader.dtype() != dtype for reader in readers):
        raise unlike
    pieces: list[tuple[np.dtype[np.void], bytes | memoryview]] = []
    row_counts = set()
    for reader in readers:
        of_reader = [*reader._pieces()]
        row_counts.add(sum(len(content) // stored_dtype.itemsize for stored_dtype, content in of_reader))
        pieces += of_reader
    if len(row_counts) > 1:
        raise unlike
    arrays = _gathered(pieces)
    if len(arrays) == 1:
        dtype = arrays[0].dtype
    return {name: _column(arrays, name, dtype).reshape(len(readers), -1) for name in names}


@lru_cache(maxsize=64)  # The ranks and the nodes of a run mostly have the same.
def _checked_fields(fields: tuple[tuple[Any, ...], ...]) -> tuple[tuple[str, str], ...] | None:
    """Returns the columns of a header; None if they are damaged."""
    if any([*map(type, field)] != [str, str] for field in fields):
        return None
    kinds: dict[str, str] = dict(fields)
    if len(kinds) != len(fields) or not set(kinds.values()) <= set(CODES) or "" in kinds:
        return None
    return tuple(kinds.items())


@lru_cache(maxsize=64)
def _dtype(fields: tuple[tuple[str, str], ...]) -> np.dtype[np.void]:
    return np.dtype([*fields])


def _stored_rows(data: bytes | memoryview) -> bytes | memoryview | None:
    """Returns the rows of the end of a gzip member, if they are one stored chunk; None if they must be inflated."""
    num_bytes = len(data) - STORED.size - TRAILER.size
    if num_bytes > 0 and STORED.unpack_from(data) == (1, num_bytes, MAX_STORED - num_bytes):
        return data[STORED.size : STORED.size + num_bytes]
    return None


def _gathered(pieces: Iterable[tuple[np.dtype[np.void], bytes | memoryview]]) -> list[Rows]:
    """Returns rows in their order, in as few arrays as their types allow."""
    contents_by_dtype: list[tuple[np.dtype[np.void], list[bytes | memoryview]]] = []
    last_dtype = None
    for dtype, content in pieces:
        if dtype is not last_dtype:
            contents: list[bytes | memoryview] = []
            contents_by_dtype.append((dtype, contents))
            last_dtype = dtype
        contents.append(content)
    return [np.frombuffer(b"".join(contents), dtype) for dtype, contents in contents_by_dtype]


def _column(arrays: Sequence[Rows], name: str, dtype: np.dtype[np.void]) -> Values:
    empty = np.empty(0, dtype[name])
    return np.concatenate([empty, *(rows[name] for rows in arrays)], dtype=dtype[name])


def _converted(arrays: Sequence[Rows], dtype: np.dtype[np.void]) -> Rows:
    if len(arrays) == 1 and arrays[0].dtype == dtype:
        return arrays[0]
    rows = np.empty(sum(map(len, arrays)), dtype)
    # By column, as numpy converts whole rows of another type many times slower.
    for name in dtype.names or ():
        rows[name] = _column(arrays, name, dtype)
    return rows
