"""`node-NNNN.steps`, `.spans` and `.samples`: gzip files to which the ranks of a node append blocks (docs/formats.md).

With O_APPEND the inode's lock orders the writes, for the processes of one client also on NFS (Linux, fs/nfs/file.c:
`nfs_file_write` takes the position within `nfs_start_io_write`); open(2) warns of several clients, hence one file per
node. The path `node-0001.steps/rank-0003` names the rows of a rank; no file system has it.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from dlbench.opening import UnfitFileError, open_file

try:  # isal's CRC-32 takes an eighth of zlib's time for a block, and its inflating three quarters.
    fast_zlib: Any = import_module("isal.isal_zlib")
except ImportError:
    fast_zlib = zlib

# A gzip member (RFC 1952) with an extra field, no time and an unknown system; the field's subfield "DL" of 20 bytes.
_GZIP, _SUBFIELD = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff", b"DL\x14\0"
_MARK = re.compile(re.escape(_GZIP) + b".." + re.escape(_SUBFIELD), re.DOTALL)
# Both, with the length of the extra field between them; rank, number of the block of this rank, bytes after the head,
# their CRC-32, CRC-32 of the head before.
_HEAD = struct.Struct("<10sH4s5I")
HEAD_BYTES = _HEAD.size
_EXTRA_BYTES = _HEAD.size - 12  # Length of the extra field without its second subfield, "DJ", which has JSON.

_MAX_HEADER = 1 << 17  # More than the bytes of a header, whose JSON is in an extra field.
_ANY = -1  # In place of a rank that is not known.


class RowBlock(NamedTuple):
    """A block as it is in the file."""

    json: bytes  # Subfield of a header or a note; empty: none.
    rows: bytes | memoryview  # The rest of the gzip member.
    check: int  # CRC-32 of both.


class RankRows(NamedTuple):
    """The blocks of one rank in a file."""

    blocks: list[RowBlock]
    torn_bytes: int = 0  # Bytes of an incomplete block after them.
    is_damaged: bool = False  # Whether further blocks are damaged.
    is_checked: bool = False  # Whether the CRC-32 of every block was found right.


class _Index(NamedTuple):
    """The blocks of every rank in a file."""

    places: defaultdict[int, array[int]]  # By rank: offset and length of each block in turn.
    torn: Counter[int]  # By rank: bytes of an incomplete block.
    broken: set[int]  # Ranks with further blocks that are damaged; `_ANY`: all of them.
    unchecked: set[int]  # Ranks with a block whose CRC-32 was not found right.


def block(rank: int, number: int, json: bytes, rows: bytes, seed: int) -> bytes:
    """Returns a block of a rank, the number of which counts from 0. `json`, `rows`: see `RowBlock`. `seed`: `check` of
    the rank's header; of the header itself 0.
    """
    content = json + rows
    check = zlib.crc32(content, seed)
    head = _HEAD.pack(_GZIP, _EXTRA_BYTES + len(json), _SUBFIELD, rank, number, len(content), check, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little") + content


def open_shared(path: Path, rank: int) -> IO[bytes]:
    """Opens a node's file to append blocks of a rank that has none there yet."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
    with open_file(path, follow=False) as readable:
        index = _index_of(path, readable)
    if rank in index.places or _ANY in index.broken:
        file.close()
        problem = f"rows of rank {rank}" if rank in index.places else "data that no rank wrote"
        raise FileExistsError(errno.EEXIST, f"already contains {problem}; start another run", str(path))
    return file


def _index_of(path: Path, file: IO[bytes]) -> _Index:
    status = os.fstat(file.fileno())
    return _indexed(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=512)
def _indexed(path: Path, inode: int, size: int, changed_ns: int) -> _Index:
    with open_file(path, follow=False) as file:
        return _index(file.read(size))


def _index(data: bytes) -> _Index:
    """Returns the index of a file, from block to block; behind a torn or damaged one the next head is searched for."""
    index = _Index(defaultdict(partial(array, "Q")), Counter(), set(), set())
    view, seeds, size = memoryview(data), Counter[int](), len(data)
    at = _next_head(data, 0)
    # Before the first head there may be a part of one, which was then written again.
    if at >= HEAD_BYTES or not _GZIP.startswith(data[: min(at, len(_GZIP))]):
        index.broken.add(_ANY)
    while at < size:
        *_, rank, number, length, check, _ = _HEAD.unpack_from(data, at)
        content, end = at + HEAD_BYTES, at + HEAD_BYTES + length
        seed = seeds[rank] if number else 0
        # A torn block whose length happens to reach the beginning of another one has the wrong content.
        has_content = end <= size and fast_zlib.crc32(view[content:end], seed) == check
        following = _next_head(data, end if has_content else content)
        if following < end:
            index.torn[rank] = following - at
        else:
            if following - end >= HEAD_BYTES:
                index.broken.add(_ANY)
            elif following == size:
                index.torn[_ANY] = following - end
            places = index.places[rank]
            if 2 * number != len(places):
                index.broken.add(rank)
            if not has_content:
                index.unchecked.add(rank)
            if not number:
                seeds[rank] = check
            places.extend((at, end - at))
            del index.torn[rank]
        at = following
    return index


def _next_head(data: bytes, begin: int) -> int:
    """Returns where the first head from `begin` on is; the length of the data if there is none."""
    if _is_head(data, begin):
        return begin
    heads = (mark.start() for mark in _MARK.finditer(data, begin) if _is_head(data, mark.start()))
    return next(heads, len(data))


def _is_head(data: bytes, at: int) -> bool:
    head = data[at : at + HEAD_BYTES]
    return (
        len(head) == HEAD_BYTES
        and head.startswith(_GZIP)
        and fast_zlib.crc32(head[:-4]).to_bytes(4, "little") == head[-4:]
    )


def file_of(path: Path) -> Path:
    """Returns the file that has the rows."""
    is_part = path.parent.suffix in (".steps", ".spans") and not path.suffix
    return path.parent if is_part else path


def read_header_block(path: Path) -> RowBlock | None:
    """Returns the first block of a file or of a rank's part of one, if there is one. Raises OSError: unreadable."""
    node_file = file_of(path)
    with open_file(node_file, follow=False) as file:
        offset = 0
        if node_file is not path:
            places = _index_of(node_file, file).places.get(int(path.name[5:]))
            if not places:
                return None
            offset = places[0]
        head = os.pread(file.fileno(), HEAD_BYTES, offset)
        if not _is_head(head, 0):
            return None
        *_, length, _, _ = _HEAD.unpack(head)
        content = os.pread(file.fileno(), min(length, _MAX_HEADER), offset + HEAD_BYTES)
    return _block_of(head + content) if len(content) == length else None


def read_part(path: Path) -> RankRows:
    """Reads the blocks of a file of one rank, or of a rank's part of a file. Raises OSError: unreadable."""
    node_file = file_of(path)
    if node_file is path:
        parts = read_parts(path)
        if len(parts) > 1:
            raise UnfitFileError(
                path, f"contains rows of several ranks; name those of one, e.g. {path.name}/rank-{min(parts):04d}"
            )
        return next(iter(parts.values()), RankRows([]))
    with open_file(node_file, follow=False) as file:
        index, rank = _index_of(node_file, file), int(path.name[5:])
        places = index.places.get(rank, array("Q"))
        pieces = [os.pread(file.fileno(), places[n + 1], places[n]) for n in range(0, len(places), 2)]
    return _part(index, rank, pieces)


def _part(index: _Index, rank: int, pieces: Iterable[bytes | memoryview], *, is_checked: bool = False) -> RankRows:
    is_damaged = not index.broken.isdisjoint({rank, _ANY})
    return RankRows([*map(_block_of, pieces)], index.torn[rank] + index.torn[_ANY], is_damaged, is_checked)


def _block_of(data: bytes | memoryview) -> RowBlock:
    _, extra_bytes, *_, check, _ = _HEAD.unpack_from(data)
    end = HEAD_BYTES + extra_bytes - _EXTRA_BYTES
    return RowBlock(bytes(data[HEAD_BYTES:end]), data[end:], check)


def read_parts(path: Path) -> dict[int, RankRows]:
    """Returns the blocks of every rank of a node's file, which is read once. Raises OSError: unreadable."""
    with open_file(path, follow=False) as file:
        data = file.read()
    index, view = _index(data), memoryview(data)
    parts = {}
    for rank, places in index.places.items():
        pieces = (view[places[n] : places[n] + places[n + 1]] for n in range(0, len(places), 2))
        parts[rank] = _part(index, rank, pieces, is_checked=rank not in index.unchecked)
    return parts


def parts_of(path: Path) -> dict[int, Path]:
    """Returns the paths of the ranks' parts of a node's file. Raises OSError: unreadable."""
    with open_file(path, follow=False) as file:
        return {rank: path / f"rank-{rank:04d}" for rank in _index_of(path, file).places}
