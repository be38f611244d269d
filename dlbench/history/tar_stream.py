"""The members of a tar archive of unknown origin, one after the other, none of them extracted.

The standard library's extraction has been got around again and again (CVE-2025-4517 and its kin), and its reader takes
as long a name, or as large a header, as the archive says. So headers are read here, block by block: regular files,
folders (passed over) and GNU's long names are known; links, devices, sparse files and the headers of other formats
end it. Names are taken apart and must be harmless. Counts, sizes, names, and how far an archive unfolds are limited.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dlbench.errors import IncompleteDataError, UserError
from dlbench.opening import UnfitFileError, open_file
from dlbench.units import format_bytes

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20
_MAX_PART_BYTES = 255
_LONG_NAME = b"L"

_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"7": "a contiguous file",
    b"K": "a link with a long name",
    b"S": "a sparse file",
    b"x": "a header of the pax format (make the archive with `tar --format=gnu`)",
    b"g": "a header of the pax format (make the archive with `tar --format=gnu`)",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an archive may not exceed."""

    members: int = 5_000_000
    file_bytes: int = 1 << 37
    """Of one member: 128 GiB."""
    total_bytes: int = 1 << 42
    """Of all members: 4 TiB."""
    name_bytes: int = 1000
    unfolding: int = 200
    """Bytes that a compressed byte may become, on average, beyond the first `unfolding_from` bytes."""
    unfolding_from: int = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Member:
    """A regular file of an archive; its content must be read before the next member is asked for, or is lost."""

    parts: tuple[str, ...]
    """Of its name; none is `.`, `..`, or begins with a dot, none holds a control character."""
    num_bytes: int
    stream: _Stream

    def pieces(self) -> Iterator[bytes]:
        """Its content.

        Raises:
            IncompleteDataError: the archive ends too early, or is damaged.
        """
        left = self.num_bytes
        while left:
            piece = self.stream.exactly(min(left, _PIECE))
            left -= len(piece)
            yield piece


class _Stream:
    """The archive's bytes, unfolded and counted."""

    def __init__(self, path: Path, raw: IO[bytes], limits: Limits) -> None:
        self._path = path
        self._raw = raw
        self._limits = limits
        is_packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        self._file: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_packed else raw
        self.position = 0

    def some(self, num_bytes: int) -> bytes:
        """Up to so many bytes; fewer at the end alone."""
        pieces = []
        try:
            while num_bytes and (piece := self._file.read(num_bytes)):
                pieces.append(piece)
                num_bytes -= len(piece)
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
            raise IncompleteDataError(f"damaged: {error}") from None
        found = b"".join(pieces)
        self.position += len(found)
        limits = self._limits
        if self.position > limits.unfolding_from and self.position > limits.unfolding * self._raw.tell():
            raise IncompleteDataError(f"refused: unfolds to more than {limits.unfolding} times its size")
        return found

    def exactly(self, num_bytes: int) -> bytes:
        """So many bytes."""
        found = self.some(num_bytes)
        if len(found) < num_bytes:
            raise IncompleteDataError("damaged: ends in the middle: copied in part?")
        return found

    def skip_to(self, position: int) -> None:
        """Passes over what comes before a place."""
        while self.position < position:
            self.exactly(min(position - self.position, _PIECE))


def members(path: Path, limits: Limits) -> Generator[Member, None, None]:
    """The regular files of an archive, in order; hidden ones are passed over.

    Raises:
        UserError: the file cannot be read, or is no plain file, which alone can be read twice.
        IncompleteDataError: it is no archive, a damaged one, or one that holds what none of dlbench's does.
    """
    try:
        raw = open_file(path)
    except UnfitFileError as error:
        raise UserError(f"{path}: {error.strerror}; write the archive to a file first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    with raw:
        try:
            stream = _Stream(path, raw, limits)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        yield from _members(stream, limits)


def _members(stream: _Stream, limits: Limits) -> Iterator[Member]:
    long_name: str | None = None
    count = total = 0
    while any(block := stream.exactly(tarfile.BLOCKSIZE)):
        info = _header(block)
        size = info.size
        shown = ascii(long_name or info.name)[:200]
        count += 1
        if count > limits.members:
            raise IncompleteDataError(f"refused: more than {limits.members} members")
        if info.type == _LONG_NAME:
            long_name = _long_name(stream, size, limits)
            continue
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise IncompleteDataError(f"refused: {shown} is {_REFUSED.get(info.type, 'of an unknown kind')}")
        if not 0 <= size <= limits.file_bytes or (info.type == tarfile.DIRTYPE and size):
            raise IncompleteDataError(f"refused: {shown} has {size} bytes")
        total += size
        if total > limits.total_bytes:
            raise IncompleteDataError(f"refused: more than {format_bytes(limits.total_bytes)}")
        parts = safe_parts(long_name or info.name, limits)
        long_name = None
        end = stream.position + size + -size % tarfile.BLOCKSIZE
        if info.type != tarfile.DIRTYPE and parts is not None:
            yield Member(parts=parts, num_bytes=size, stream=stream)
        stream.skip_to(end)
    # The end of a compressed file says whether it was whole; behind the end of a tar archive is padding.
    if any(stream.some(_PIECE)) or stream.some(1):
        raise IncompleteDataError("refused: something stands behind its end")


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise IncompleteDataError(f"no tar archive, or damaged: {error}") from None


def _long_name(stream: _Stream, size: int, limits: Limits) -> str:
    if not 0 < size <= limits.name_bytes:
        raise IncompleteDataError(f"refused: a name of {size} bytes")
    content = stream.exactly(size)
    stream.exactly(-size % tarfile.BLOCKSIZE)
    try:
        return content.rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError:
        raise IncompleteDataError("refused: a name that is not UTF-8") from None


def safe_parts(name: str, limits: Limits) -> tuple[str, ...] | None:
    """The parts of a member's name; None for hidden files, which no run has.

    Raises:
        IncompleteDataError: a name that leads out of its folder, or that no file of dlbench's has.
    """
    shown = ascii(name)[:200]
    if name.startswith("/") or "\\" in name or not name.isprintable() or len(name.encode()) > limits.name_bytes:
        raise IncompleteDataError(f"refused: the name {shown}")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise IncompleteDataError(f"refused: the name {shown}")
    return parts if parts and not any(part.startswith(".") for part in parts) else None
