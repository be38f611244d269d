"""Reads files of rows in compressed blocks (see `dlbench.records.rows.format`); damaged blocks are errors."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import np, npt
from dlbench.opening import parse_json
from dlbench.records.rows.format import CHECK, CODES, HEAD, MAX_CONTENT, MAX_HEADER, NOTE, ROWS
from dlbench.records.rows.shared import Opened, opened

if TYPE_CHECKING:
    Rows = npt.NDArray[np.void]
    Values = npt.NDArray[np.generic]

try:  # isal inflates the same streams in three quarters of the time.
    _inflater: Any = import_module("isal.isal_zlib")
except ImportError:
    _inflater = zlib
_HEAD = struct.Struct(HEAD.format + CHECK.format.removeprefix("<"))
_TRANSPOSED_AT_ONCE = 1 << 20  # Bytes that are transposed at once: fast, and small next to the columns.
_last_columns: list[Any] = []  # `fields`, `delta` and columns of the last checked header.


def read_header(path: Path, format_name: str, content: str, rows: Opened | None = None) -> tuple[dict[str, Any], bytes]:
    """Returns the first line of a file of rows, as JSON and as bytes. `content`: its rows in words, for errors."""
    try:
        with nullcontext(rows.file) if rows else opened(path, 1).file as file:
            line = file.readline(MAX_HEADER)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != format_name:
        raise IncompleteDataError(f"{path}: not a file of {content}, or damaged at its start")
    return header, line


class BlockReader:
    """Reads a file by block, so that memory does not grow with it; the part of a rank of a shared file is read at once.
    `run_id`: the run that the rows must belong to; empty: any.
    """

    def __init__(
        self, path: Path, format_name: str, content: str | None = None, rows: Opened | None = None, run_id: str = ""
    ) -> None:
        self.path = path
        self._rows_there = rows
        self.torn_bytes = 0
        """Bytes behind the last complete block, after all blocks were read; 0 unless a writer was killed."""
        self.notes: list[dict[str, Any]] = []  # Notes in the blocks read so far.
        self.header, line = read_header(path, format_name, content or format_name, rows)
        if run_id and self.header.get("run_id", run_id) != run_id:
            other_run = str(self.header["run_id"])[:80]
            raise IncompleteDataError(f"{path}: belongs to run {other_run!r}, not to {run_id}")
        self.begin = len(line)  # Bytes of the header's line.
        self._seed = zlib.crc32(line)
        self._columns: tuple[tuple[str, str], ...] | None = None

    def take_note(self, note: dict[str, Any]) -> None:
        """Takes a note, before the rows that were written after it."""
        self.notes.append(note)

    def blocks(self) -> Iterator[Rows]:
        """Yields arrays of rows (structured, by the header's fields) in the order in which they were written."""
        dtype = np.dtype(list(self.fields()))
        for kind, content in self.contents(dtype.itemsize):
            if kind == NOTE:
                self.take_note(self._note(content))
                continue
            transposed = np.frombuffer(content, dtype=np.uint8).reshape(dtype.itemsize, -1)
            rows: Rows = np.array(transposed.T, order="C").view(dtype).reshape(-1)
            for name in self.header["delta"]:
                rows[name] = np.cumsum(rows[name], dtype=rows[name].dtype)
            yield rows

    def read(self, names: Collection[str]) -> dict[str, Values]:
        """Returns some columns of all rows, by name, each of shape (rows,); much faster than by block."""
        columns = self.fields()
        size = _row_bytes(columns)
        stretches = _stretches(columns, frozenset(names))
        parts: list[list[Values]] = [[] for _ in stretches]
        pending: list[bytes] = []

        def transpose() -> None:
            if pending:
                transposed = np.frombuffer(b"".join(pending), dtype=np.uint8).reshape(len(pending), size, -1)
                for stretch, values in zip(stretches, parts, strict=True):
                    values.append(self.values(transposed, *stretch))
                pending.clear()

        for kind, content in self.contents(size):
            if kind == NOTE:
                self.take_note(self._note(content))
                continue
            if pending and (len(content) != len(pending[0]) or len(pending) * len(content) > _TRANSPOSED_AT_ONCE):
                transpose()
            pending.append(content)
        transpose()
        columns_by_name: dict[str, Values] = {}
        for (column_names, dtype, _), values in zip(stretches, parts, strict=True):
            empty = np.zeros((len(column_names), 0), dtype=dtype)
            columns_by_name.update(zip(column_names, np.concatenate([empty, *values], axis=1), strict=True))
        return columns_by_name

    def contents(self, row_size: int) -> Iterator[tuple[bytes, bytes]]:
        """Yields kind and plain content of every block; `row_size` in bytes. Raises IncompleteDataError: damage."""
        self.torn_bytes = 0
        crc32, decompressobj = zlib.crc32, _inflater.decompressobj  # A run of a million steps has 16,000 blocks.
        try:
            file, torn_behind, is_damaged = self._rows_there or opened(self.path)
            with nullcontext() if self._rows_there else file:
                file.seek(self.begin)
                while head := file.read(_HEAD.size):
                    if len(head) < _HEAD.size:
                        self.torn_bytes = len(head)
                        return
                    kind, length, crc, check = _HEAD.unpack(head)
                    # Deflate never makes content much longer, so such a length is damage.
                    if crc32(head[: HEAD.size]) != check or length > 2 * MAX_CONTENT:
                        raise self._damaged()
                    content = file.read(length)
                    if len(content) < length:
                        self.torn_bytes = len(head) + len(content)
                        return
                    if crc32(content, self._seed) != crc or kind not in (ROWS, NOTE):
                        raise self._damaged()
                    engine = decompressobj(-zlib.MAX_WBITS)
                    try:
                        # One byte above the limit, so that content of exactly the limit reaches its end.
                        plain = engine.decompress(content, MAX_CONTENT + 1)
                    except _inflater.error:
                        raise self._damaged() from None
                    if not engine.eof or engine.unused_data or len(plain) > MAX_CONTENT:
                        raise self._damaged()
                    if kind == ROWS and len(plain) % row_size:
                        raise self._damaged()
                    yield kind, plain
            self.torn_bytes = torn_behind
            if is_damaged:
                raise self._damaged()
        except OSError as error:
            raise IncompleteDataError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _note(self, content: bytes) -> dict[str, Any]:
        try:
            note = parse_json(content)
        except ValueError:
            raise self._damaged() from None
        if not isinstance(note, dict):
            raise self._damaged()
        return note

    def values(
        self, transposed: npt.NDArray[np.uint8], names: Sequence[str], kind: str, byte_indexes: slice | Sequence[int]
    ) -> Values:
        """Returns columns of one type, shape (columns, rows), of `transposed`: (blocks, bytes of a row, rows)."""
        dtype = np.dtype(kind)
        shape = len(transposed), len(names), dtype.itemsize, transposed.shape[2]
        selected = transposed[:, byte_indexes, :].reshape(shape)
        # By byte, which is faster than all at once; the high bytes of most times are zero.
        item_bytes = np.zeros((shape[1], shape[0], shape[3], dtype.itemsize), dtype=np.uint8)
        for place in range(dtype.itemsize):
            if selected[:, :, place].any():
                item_bytes[..., place] = selected[:, :, place].transpose(1, 0, 2)
        values: Values = item_bytes.view(dtype)[..., 0]
        for number, name in enumerate(names):
            if name in self.header["delta"]:
                # Differences start again in each block.
                np.cumsum(values[number], axis=1, dtype=dtype, out=values[number])
        return values.reshape(len(names), -1)

    def fields(self) -> tuple[tuple[str, str], ...]:
        """Returns name and type of each column. Raises IncompleteDataError: the header's columns are damaged."""
        if self._columns is None:
            # The many files of a run have the same columns, which are checked once.
            header_columns = [self.header.get("fields"), self.header.get("delta")]
            if _last_columns[:2] != header_columns:
                _last_columns[:] = [*header_columns, _checked_columns(*header_columns)]
            self._columns = _last_columns[2]
        if self._columns is None:
            raise IncompleteDataError(f"{self.path}: the header's `fields` or `delta` are damaged")
        return self._columns

    def _damaged(self) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: a block is damaged; restore the file from a copy")


def read_alike(readers: Sequence[BlockReader], names: Collection[str]) -> dict[str, Values] | None:
    """Returns columns of files with equal columns and blocks, shape (files, rows), fast for small files; else None."""
    first = readers[0]
    columns, delta = first.fields(), first.header["delta"]
    if any(reader.fields() != columns or reader.header["delta"] != delta for reader in readers):
        return None
    size = _row_bytes(columns)
    plain = [[content for kind, content in reader.contents(size) if kind == ROWS] for reader in readers]
    lengths = [len(content) for content in plain[0]]
    if any([len(content) for content in contents] != lengths for contents in plain):
        return None
    stretches = _stretches(columns, frozenset(names))
    parts: list[list[Values]] = [
        [np.zeros((len(column_names), len(readers), 0), dtype=kind)] for column_names, kind, _ in stretches
    ]
    for _, group in groupby(range(len(lengths)), key=lengths.__getitem__):
        blocks = list(group)
        joined = b"".join(content for contents in plain for content in contents[blocks[0] : blocks[-1] + 1])
        transposed = np.frombuffer(joined, dtype=np.uint8).reshape(len(blocks) * len(readers), size, -1)
        for stretch, stretch_parts in zip(stretches, parts, strict=True):
            stretch_parts.append(first.values(transposed, *stretch).reshape(len(stretch[0]), len(readers), -1))
    joined_parts = [np.concatenate(stretch_parts, axis=2) for stretch_parts in parts]
    columns_by_name: dict[str, Values] = {}
    for (column_names, *_), values in zip(stretches, joined_parts, strict=True):
        columns_by_name.update(zip(column_names, values, strict=True))
    return columns_by_name


_Stretch = tuple[list[str], str, "slice | list[int]"]
"""Columns of one type: names, type, and the indexes of their bytes in a row."""


def _row_bytes(columns: Sequence[tuple[str, str]]) -> int:
    return sum(int(kind[2:]) for _, kind in columns)


@lru_cache(maxsize=64)
def _stretches(columns: tuple[tuple[str, str], ...], names: frozenset[str]) -> list[_Stretch]:
    """Returns the named columns, grouped by type, as reading single columns of few rows is slow."""
    by_kind: dict[str, tuple[list[str], list[int]]] = {}
    offset = 0
    for name, kind in columns:
        size = int(kind[2:])
        if name in names:
            column_names, byte_indexes = by_kind.setdefault(kind, ([], []))
            column_names.append(name)
            byte_indexes += range(offset, offset + size)
        offset += size
    stretches: list[_Stretch] = []
    for kind, (column_names, byte_indexes) in by_kind.items():
        first, last = byte_indexes[0], byte_indexes[-1]
        is_contiguous = last - first + 1 == len(byte_indexes)  # Then a slice, which is a view; a list is a copy.
        stretches.append((column_names, kind, slice(first, last + 1) if is_contiguous else byte_indexes))
    return stretches


def _checked_columns(fields: object, delta: object) -> tuple[tuple[str, str], ...] | None:
    if not isinstance(fields, list) or not isinstance(delta, list):
        return None
    kinds: dict[str, str] = {}
    for field in fields:
        if not isinstance(field, list) or len(field) != 2 or not all(isinstance(part, str) for part in field):
            return None
        kinds[field[0]] = field[1]
    if not fields or len(kinds) != len(fields) or not set(kinds.values()) <= set(CODES) or "" in kinds:
        return None
    exact = {name for name in delta if isinstance(name, str) and kinds.get(name, "<f4")[1] in "iu"}
    return tuple(kinds.items()) if len(exact) == len(delta) else None
