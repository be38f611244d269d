"""Reads files of rows in compressed blocks (see `blocks`), block by block; damage is told, never read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.records.blocks import CHECK, CODES, HEAD, MAX_CONTENT, MAX_HEADER, NOTE, ROWS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.void]

_SIZE = HEAD.size + CHECK.size


def read_header(path: Path, format_name: str, content: str) -> tuple[dict[str, Any], bytes]:
    """The first line of a file of rows, as JSON and as it is.

    Args:
        path: the file.
        format_name: what its `format` must be.
        content: what the file holds, in words.

    Raises:
        IncompleteDataError: the file cannot be read, or is none of `format_name`.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != format_name:
        raise IncompleteDataError(f"{path}: not a file of {content}, or damaged at its start")
    return header, line


class BlockReader:
    """Reads a file block by block, so that memory does not grow with it.

    Args:
        path: the file.
        format_name: what its `format` must be.
        content: what the file holds, in words; none: `format_name`.

    Raises:
        IncompleteDataError: the file cannot be read, or is none of `format_name`.
    """

    def __init__(self, path: Path, format_name: str, content: str | None = None) -> None:
        self.path = path
        self.torn_bytes = 0
        """Bytes behind the last whole block, known when all blocks were read: 0 unless a writer was killed."""
        self.header, line = read_header(path, format_name, content or format_name)
        self._begin, self._seed = len(line), zlib.crc32(line)
        self._dtype: np.dtype[np.void] | None = None

    def blocks(self) -> Iterator[Rows | dict[str, Any]]:
        """Arrays of rows (structured, by the header's fields) and notes, in the order in which they were written.

        Raises:
            IncompleteDataError: a block within the file is damaged, or the header's columns are.
        """
        import numpy as np

        self._dtype = np.dtype(self.columns())
        self.torn_bytes = 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._begin)
                while head := file.read(_SIZE):
                    if len(head) < _SIZE:
                        self.torn_bytes = len(head)
                        return
                    kind, length, crc = HEAD.unpack_from(head)
                    (check,) = CHECK.unpack_from(head, HEAD.size)
                    # Deflate never makes anything much longer: such a length is no writer's.
                    if zlib.crc32(head[: HEAD.size]) != check or length > 2 * MAX_CONTENT:
                        raise self._damaged()
                    content = file.read(length)
                    if len(content) < length:
                        self.torn_bytes = len(head) + len(content)
                        return
                    if zlib.crc32(content, self._seed) != crc:
                        raise self._damaged()
                    yield self._content(kind, content)
        except OSError as error:
            raise IncompleteDataError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _content(self, kind: bytes, content: bytes) -> Rows | dict[str, Any]:
        engine = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than there may be: a content of just the limit still comes to its end.
            plain = engine.decompress(content, MAX_CONTENT + 1)
            if not engine.eof or engine.unused_data or len(plain) > MAX_CONTENT:
                raise self._damaged()
            if kind == ROWS:
                return self._rows(plain)
            note = json.loads(plain) if kind == NOTE else None
        except (zlib.error, ValueError, RecursionError):
            raise self._damaged() from None
        if not isinstance(note, dict):
            raise self._damaged()
        return note

    def _rows(self, content: bytes) -> Rows:
        import numpy as np

        assert self._dtype is not None
        turned = np.frombuffer(content, dtype=np.uint8).reshape(self._dtype.itemsize, -1)
        rows: Rows = np.array(turned.T, order="C").view(self._dtype).reshape(-1)
        for name in self.header["delta"]:
            rows[name] = np.cumsum(rows[name], dtype=rows[name].dtype)
        return rows

    def columns(self) -> list[tuple[str, str]]:
        """Name and type of each column.

        Raises:
            IncompleteDataError: the header's columns are damaged.
        """
        fields, delta = self.header.get("fields"), self.header.get("delta")
        problem = IncompleteDataError(f"{self.path}: the header's `fields` or `delta` are damaged")
        if not isinstance(fields, list) or not isinstance(delta, list):
            raise problem
        kinds: dict[str, str] = {}
        for field in fields:
            if not isinstance(field, list) or len(field) != 2 or not all(isinstance(part, str) for part in field):
                raise problem
            kinds[field[0]] = field[1]
        if not fields or len(kinds) != len(fields) or not set(kinds.values()) <= set(CODES) or "" in kinds:
            raise problem
        exact = {name for name in delta if isinstance(name, str) and kinds.get(name, "<f4")[1] in "iu"}
        if len(exact) != len(delta):
            raise problem
        return list(kinds.items())

    def _damaged(self) -> IncompleteDataError:
        return IncompleteDataError(f"{self.path}: a block is damaged; restore the file from a copy")
