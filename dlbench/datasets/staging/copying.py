"""One file copied, whole or not at all, with its checksum taken on the way; and the journal of the files copied.

`journal.jsonl`: the first line is `{"format": "dlbench.staged", "version": 1}`, every other one a file:
`{"path", "bytes", "mtime_ns" of the source, "crc32" of all of it, "edges": CRC-32 of its first and last 64 KiB}`. A
torn last line is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dlbench.datasets.staging.streams import Tally
from dlbench.errors import IncompleteDataError
from dlbench.opening import descriptor, open_file

JOURNAL = "journal.jsonl"
BUFFER_BYTES = 4 << 20
_EDGE_BYTES = 64 << 10
_HEAD = {"format": "dlbench.staged", "version": 1}
_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class CopiedFile:
    """One file that was copied."""

    path: str
    """Relative, with `/`; bytes that are not UTF-8 as surrogate escapes."""
    bytes: int
    mtime_ns: int
    crc32: int
    edges: int


class Journal:
    """Which files are there, whole. Safe for threads.

    Args:
        folder: where it lies; made where there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.known = _load(self._path)
        self._lock = threading.Lock()
        if not self.known:
            self._path.unlink(missing_ok=True)
        self._file = self._path.open("ab", 0)
        # A line that was torn ends here.
        self._file.write(b"\n" if self.known else json.dumps(_HEAD).encode() + b"\n")

    def add(self, copied: CopiedFile) -> None:
        """A file is there; OSError if the disk refuses."""
        line = json.dumps(asdict(copied), ensure_ascii=True).encode("ascii") + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        """No more is added."""
        self._file.close()


def _load(path: Path) -> dict[str, CopiedFile]:
    found: dict[str, CopiedFile] = {}
    try:
        with open_file(path, follow=False) as file:
            if json.loads(file.readline(_MAX_LINE)) != _HEAD:
                return {}
            while line := file.readline(_MAX_LINE):
                with suppress(ValueError, TypeError):
                    copied = CopiedFile(**json.loads(line))
                    found[copied.path] = copied
    except (OSError, ValueError):
        return {}
    return found


def is_whole(path: Path, entry: CopiedFile) -> bool:
    """Whether a copy still is what the journal says, by size, time and the checksum of its two ends."""
    try:
        opened = descriptor(path, follow=False)
    except OSError:
        return False
    try:
        status = os.fstat(opened)
        if (status.st_size, status.st_mtime_ns) != (entry.bytes, entry.mtime_ns):
            return False
        return _edges(opened, status.st_size) == entry.edges
    except OSError:
        return False
    finally:
        os.close(opened)


def copy_file(
    source: Path, target: Path, *, name: str, partial: Path, buffer: memoryview, tally: Tally, sha256: bytes | None
) -> CopiedFile:
    """Copies one file under another name, and then renames it.

    Args:
        source: a regular file, or a link to one.
        target: where to; what is there is replaced.
        name: of the file in the journal.
        partial: the other name, on the same file system.
        buffer: to read into.
        tally: told of the bytes.
        sha256: what its digest must be; None: unknown.

    Raises:
        IncompleteDataError: the source changed meanwhile, or its digest is another one.
        OSError: reading or writing failed; nothing of the copy is left.
    """
    opened = descriptor(source)
    try:
        status = os.fstat(opened)
        if status.st_size > BUFFER_BYTES:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        with suppress(FileNotFoundError):
            partial.unlink()
        written = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size, crc, digest = _poured(opened, written, buffer, tally, with_digest=sha256 is not None)
            edges = _edges(written, size)
            os.utime(written, ns=(status.st_mtime_ns, status.st_mtime_ns))
            _require_same(source, status, os.fstat(opened), size)
            _require_digest(source, digest, sha256)
            partial.rename(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(written)
    finally:
        os.close(opened)
    return CopiedFile(name, size, status.st_mtime_ns, crc, edges)


def _require_same(source: Path, before: os.stat_result, after: os.stat_result, size: int) -> None:
    if (after.st_size, after.st_mtime_ns, size) != (before.st_size, before.st_mtime_ns, before.st_size):
        raise IncompleteDataError(f"{str(source)!r} changed while it was staged; start the run again")


def _require_digest(source: Path, digest: bytes | None, expected: bytes | None) -> None:
    if expected is not None and digest != expected:
        raise IncompleteDataError(
            f"{str(source)!r}: altered (its SHA-256 differs from that in the data set's manifest); see "
            "`dlbench data verify`"
        )


def _poured(
    opened: int, written: int, buffer: memoryview, tally: Tally, *, with_digest: bool
) -> tuple[int, int, bytes | None]:
    """Copies all that a descriptor gives; size, CRC-32 and SHA-256 of it."""
    size = crc = 0
    digest = hashlib.sha256() if with_digest else None
    while num := os.readv(opened, [buffer]):
        piece = buffer[:num]
        crc = zlib.crc32(piece, crc)
        if digest is not None:
            digest.update(piece)
        done = 0
        while done < num:
            done += os.write(written, piece[done:])
        size += num
        tally.add(num)
    return size, crc, digest.digest() if digest is not None else None


def _edges(opened: int, size: int) -> int:
    first = os.pread(opened, _EDGE_BYTES, 0)
    return zlib.crc32(os.pread(opened, _EDGE_BYTES, max(0, size - _EDGE_BYTES)), zlib.crc32(first))
