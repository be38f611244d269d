"""`node-NNNN.steps` and `.spans`: the rows of all ranks of a node in one file, in chunks (layout: docs/formats.md).

With O_APPEND the inode's lock orders the writes, for the processes of one client also on NFS (Linux, fs/nfs/file.c:
`nfs_file_write` takes the position within `nfs_start_io_write`); open(2) warns of several clients, hence one file per
node. The path `node-0001.steps/rank-0003` names the rows of a rank; no file system has it.
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

_ANY = -1  # In place of a rank that is not known.
_BEGINNING = 1 << 16  # Bytes at the start of a file, which contain a whole header: one has some hundred.


class Opened(NamedTuple):
    """The opened rows of a file, or of one rank in it."""

    file: IO[bytes]
    torn_bytes: int = 0  # Bytes of an incomplete chunk after them.
    is_damaged: bool = False  # Whether further rows are damaged.


class _Index(NamedTuple):
    places: defaultdict[int, array[int]]  # By rank: offset and length of each piece in turn.
    torn: Counter[int]  # By rank: bytes of an incomplete chunk.
    broken: set[int]  # Ranks with further rows that are damaged; `_ANY`: all of them.


def chunk(rank: int, number: int, piece: bytes) -> bytes:
    """Returns a chunk: its head and a piece of a rank's rows."""
    head = _HEAD.pack(_MARK, rank, number, len(piece))
    return head + zlib.crc32(head).to_bytes(4, "little") + piece


def open_shared(path: Path, rank: int) -> IO[bytes]:
    """Opens a node's file to append chunks of a rank that has none there yet."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
    with open_file(path, follow=False) as readable:
        index = _index_of(path, readable)
    if rank in index.places or _ANY in index.broken:
        file.close()
        problem = f"rows of rank {rank}" if rank in index.places else "data that no rank wrote"
        raise FileExistsError(errno.EEXIST, f"already contains {problem}; start another run", str(path))
    return file


def _index_of(path: Path, file: IO[bytes], max_bytes: int = sys.maxsize) -> _Index:
    status = os.fstat(file.fileno())
    return _indexed(path, status.st_ino, min(status.st_size, max_bytes), status.st_mtime_ns)


@lru_cache(maxsize=512)
def _indexed(path: Path, inode: int, size: int, changed_ns: int) -> _Index:
    with open_file(path, follow=False) as file:
        return _index(file.read(size))


def _index(data: bytes) -> _Index:
    index = _Index(defaultdict(partial(array, "Q")), Counter(), set())
    marks = (mark.start() for mark in re.finditer(re.escape(_MARK), data))
    heads = [at for at in marks if zlib.crc32(data[at : at + 16]).to_bytes(4, "little") == data[at + 16 : at + 20]]
    if len(data) >= HEAD_BYTES and heads[:1] != [0]:
        index.broken.add(_ANY)
    for at, end in zip(heads, [*heads[1:], len(data)], strict=False):
        _, rank, number, length = _HEAD.unpack_from(data, at)
        remaining = data[at + HEAD_BYTES + length : end]
        if end - at < HEAD_BYTES + length:
            index.torn[rank] = end - at
            continue
        if len(remaining) >= HEAD_BYTES:
            index.broken.add(_ANY)
        elif end == len(data):
            index.torn[_ANY] = len(remaining)
        places = index.places[rank]
        if 2 * number != len(places):
            index.broken.add(rank)
        places.extend((at + HEAD_BYTES, length))
        del index.torn[rank]
    return index


def file_of(path: Path) -> Path:
    """Returns the file that has the rows."""
    is_part = path.parent.suffix in (".steps", ".spans") and not path.suffix
    return path.parent if is_part else path


def opened(path: Path, chunks: int | None = None) -> Opened:
    """Opens the rows of a file, or of a rank's part of one. `chunks`: only the first. Raises OSError: unreadable."""
    node_file = file_of(path)
    file = open_file(node_file, follow=False)
    if node_file is path and file.peek(4)[:4] != _MARK:
        return Opened(file)
    with file:
        index = _index_of(node_file, file, _BEGINNING if node_file is path and chunks == 1 else sys.maxsize)
        if node_file is path and chunks != 1 and len(index.places) > 1:
            raise UnfitFileError(
                path,
                f"contains rows of several ranks; name those of one, e.g. {path.name}/rank-{min(index.places):04d}",
            )
        rank = next(iter(index.places), _ANY) if node_file is path else int(path.name[5:])
        places = index.places.get(rank, array("Q"))[: chunks and 2 * chunks]
        return _opened(
            index, rank, [os.pread(file.fileno(), places[n + 1], places[n]) for n in range(0, len(places), 2)]
        )


def _opened(index: _Index, rank: int, pieces: Sequence[bytes]) -> Opened:
    is_damaged = not index.broken.isdisjoint({rank, _ANY})
    return Opened(BytesIO(b"".join(pieces)), index.torn[rank] + index.torn[_ANY], is_damaged)


def opened_at_once(path: Path) -> dict[int, Opened]:
    """Returns the opened rows of every rank of a node's file, which is read once. Raises OSError: unreadable."""
    with open_file(path, follow=False) as file:
        data = file.read()
    index = _index(data)
    return {
        rank: _opened(index, rank, [data[places[n] : places[n] + places[n + 1]] for n in range(0, len(places), 2)])
        for rank, places in index.places.items()
    }


def parts_of(path: Path) -> dict[int, Path]:
    """Returns the paths of the ranks' parts of a node's file; none for other files. Raises OSError: unreadable."""
    with open_file(path, follow=False) as file:
        ranks = _index_of(path, file).places if file.peek(4)[:4] == _MARK else ()
        return {rank: path / f"rank-{rank:04d}" for rank in ranks}
