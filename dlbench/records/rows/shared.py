"""`node-NNNN.steps` and `.spans`: the rows of all ranks of a node in one file, so that a run makes few files.

Each rank appends chunks, one write each: a head, then a piece of what would be a file of its own (the header's line,
then whole blocks, see `dlbench.records.rows.format`). The head is a mark, the rank, the number of the chunk among those
of the rank, the length of the piece, and the CRC-32 of these (4 bytes each, little-endian).

With O_APPEND who writes where is decided under the inode's lock. Between the processes of one client that holds on NFS
too (Linux, fs/nfs/file.c: `nfs_file_write` takes the place within `nfs_start_io_write`); open(2) warns of several
clients, hence a file for each node and not for each run. A write cut short by a full disk or a kill leaves a torn chunk
amidst whole ones: readers find the next head, and a writer that goes on writes the chunk anew.

`node-0001.steps/rank-0003`, a path that no file system has, says whose rows of which file are meant.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from dlbench.opening import UnfitFileError, open_file

_MARK = b"\xffDLR"
_HEAD = struct.Struct("<4sIII")  # Mark, rank, number, length.
HEAD_BYTES = _HEAD.size + 4

_ANY = -1  # Instead of a rank: nobody knows which.
_BEGINNING = 1 << 16  # Bytes in which a whole header is sought: one has some hundred.


class Opened(NamedTuple):
    """Rows to be read, those of a rank as if it had a file of its own."""

    file: IO[bytes]
    torn_bytes: int = 0  # Of a torn chunk behind them.
    is_damaged: bool = False  # Whether more is there that is damaged.


class _Index(NamedTuple):
    places: defaultdict[int, array[int]]  # By rank: offset and length of each piece in turn.
    torn: Counter[int]  # By rank: bytes of a chunk that was never written whole.
    broken: set[int]  # Ranks of which more is there that is damaged; `_ANY`: of all.


def chunk(rank: int, number: int, piece: bytes) -> bytes:
    """A piece of a rank's rows with its head."""
    head = _HEAD.pack(_MARK, rank, number, len(piece))
    return head + zlib.crc32(head).to_bytes(4, "little") + piece


def open_shared(path: Path, rank: int) -> IO[bytes]:
    """A node's file, to append chunks of a rank that has none there yet."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
    with open_file(path, follow=False) as there:
        index = _index_of(path, there)
    if rank in index.places or _ANY in index.broken:
        file.close()
        held = f"rows of rank {rank}" if rank in index.places else "what no rank wrote"
        raise FileExistsError(errno.EEXIST, f"holds {held} already; start a run of its own", str(path))
    return file


def _index_of(path: Path, file: IO[bytes], most: int = sys.maxsize) -> _Index:
    status = os.fstat(file.fileno())
    return _indexed(path, status.st_ino, min(status.st_size, most), status.st_mtime_ns)


@lru_cache(maxsize=512)
def _indexed(path: Path, inode: int, size: int, changed_ns: int) -> _Index:
    with open_file(path, follow=False) as file:
        return _index(file.read(size))


def _index(data: bytes) -> _Index:
    found = _Index(defaultdict(partial(array, "Q")), Counter(), set())
    marks = (mark.start() for mark in re.finditer(re.escape(_MARK), data))
    heads = [at for at in marks if zlib.crc32(data[at : at + 16]).to_bytes(4, "little") == data[at + 16 : at + 20]]
    if len(data) >= HEAD_BYTES and heads[:1] != [0]:
        found.broken.add(_ANY)
    for at, end in zip(heads, [*heads[1:], len(data)], strict=False):
        _, rank, number, length = _HEAD.unpack_from(data, at)
        rest = data[at + HEAD_BYTES + length : end]
        if end - at < HEAD_BYTES + length:
            found.torn[rank] = end - at
            continue
        if len(rest) >= HEAD_BYTES:
            found.broken.add(_ANY)
        elif end == len(data):
            found.torn[_ANY] = len(rest)
        own = found.places[rank]
        if 2 * number != len(own):
            found.broken.add(rank)
        own.extend((at + HEAD_BYTES, length))
        del found.torn[rank]
    return found


def file_of(path: Path) -> Path:
    """The file that has the rows."""
    return path.parent if path.parent.suffix in (".steps", ".spans") and not path.suffix else path


def opened(path: Path, chunks: int | None = None) -> Opened:
    """The rows of a file, or of a rank's part of one, perhaps the first chunks alone. The first chunk of a node's file,
    whoever's, is had from its beginning alone. Raises OSError: the file cannot be read.
    """
    whole = file_of(path)
    file = open_file(whole, follow=False)
    if whole is path and file.peek(4)[:4] != _MARK:
        return Opened(file)
    with file:
        index = _index_of(whole, file, _BEGINNING if whole is path and chunks == 1 else sys.maxsize)
        if whole is path and chunks != 1 and len(index.places) > 1:
            raise UnfitFileError(
                path,
                f"holds rows of several ranks; ask for those of one, e.g. {path.name}/rank-{min(index.places):04d}",
            )
        rank = next(iter(index.places), _ANY) if whole is path else int(path.name[5:])
        places = index.places.get(rank, array("Q"))[: chunks and 2 * chunks]
        return _opened(
            index, rank, [os.pread(file.fileno(), places[n + 1], places[n]) for n in range(0, len(places), 2)]
        )


def _opened(index: _Index, rank: int, pieces: Sequence[bytes]) -> Opened:
    is_damaged = not index.broken.isdisjoint({rank, _ANY})
    return Opened(BytesIO(b"".join(pieces)), index.torn[rank] + index.torn[_ANY], is_damaged)


def opened_at_once(path: Path) -> dict[int, Opened]:
    """The rows of every rank of a node's file, which is read once and held. Raises OSError: it cannot be read."""
    with open_file(path, follow=False) as file:
        data = file.read()
    index = _index(data)
    return {
        rank: _opened(index, rank, [data[places[n] : places[n] + places[n + 1]] for n in range(0, len(places), 2)])
        for rank, places in index.places.items()
    }


def parts_of(path: Path) -> dict[int, Path]:
    """The parts of a node's file by rank; nothing of any other. Raises OSError: it cannot be read."""
    with open_file(path, follow=False) as file:
        ranks = _index_of(path, file).places if file.peek(4)[:4] == _MARK else ()
        return {rank: path / f"rank-{rank:04d}" for rank in ranks}
