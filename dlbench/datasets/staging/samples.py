"""Single samples on a node: those of its ranks before training (shard), or each when it is first read (lazy).

Several processes write and read them at the same time. `<folder>/<index // 4096>/<index>` holds a sample's bytes and
then their CRC-32 (4 bytes, little-endian). A file appears whole or not at all (written under another name, then
renamed), so that its being there means that the sample has arrived. It is not synced: a node that loses power loses the
job, too, and a damaged file is found by its checksum.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.staging.copying import Tally, run_streams
from dlbench.datasets.staging.place import block_of, rounded
from dlbench.opening import descriptor

_PER_FOLDER = 4096  # samples of a folder: a million in one would be slow on most file systems
_CRC_BYTES = 4
MAX_BYTES = 1 << 32  # of a sample at most
_AT_ONCE = 32  # samples of a task: neighbours in the data set, so that each stream reads on where it was
_CHOICE = 0x57A6  # with the seed, so that the choice is none of the epochs' permutations
STORE_BYTES = 4  # what the store adds to each sample
Fetch = Callable[[int], bytes]


class DamagedSampleError(Exception):
    """A sample is there, and is not what was put; `str` says the file and the reason."""


class SampleStore:
    """Samples by their number in the data set. Survives pickling.

    `folder`: where they are; made when the first is put, if the folder above it is there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, index: int) -> Path:
        return self.folder / str(index // _PER_FOLDER) / str(index)

    def put(self, index: int, data: bytes) -> None:
        """Keeps a sample; one that is there is replaced.

        Raises OSError: the disk refuses; nothing of the sample is left.
        """
        # Texts and plain calls: a million samples are put, and objects for their paths would take half of the time.
        folder = f"{self.folder}/{index // _PER_FOLDER}"
        temporary = f"{folder}/.{index}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            # But nothing above the store: where that is gone, the run is over.
            for path in (self.folder, folder):
                with suppress(FileExistsError):
                    os.mkdir(path)  # noqa: PTH102
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            content = memoryview(b"".join((data, zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))))
            try:
                while content:  # one call as a rule
                    content = content[os.write(opened, content) :]
            finally:
                os.close(opened)
            os.rename(temporary, f"{folder}/{index}")  # noqa: PTH104
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise

    def remove_partial(self) -> None:
        """Removes what processes that were killed had begun to write; while nobody writes."""
        for group in self._groups():
            for entry in os.scandir(group.path):
                if entry.name.startswith("."):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108

    def get(self, index: int) -> bytes | None:
        """The bytes of a sample; None if it is not there.

        Raises DamagedSampleError: they are not what was put. OSError: they cannot be read.
        """
        path = self.path(index)
        try:
            opened = descriptor(path, follow=False)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(opened).st_size
            content = b"" if size > MAX_BYTES else os.read(opened, size)
            while 0 < len(content) < size and (more := os.read(opened, size - len(content))):
                content += more
        finally:
            os.close(opened)
        data, crc = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
        if len(crc) < _CRC_BYTES or zlib.crc32(data) != int.from_bytes(crc, "little"):
            raise DamagedSampleError(f"{str(path)!r}: changed or cut off since it was staged")
        return data

    def has(self, index: int) -> bool:
        return self.path(index).exists()

    def remove(self, index: int) -> None:
        """Forgets a sample; one that is not there is none to forget."""
        with suppress(FileNotFoundError):
            self.path(index).unlink()

    def indices(self) -> Iterator[int]:
        """The samples that are there, in no order."""
        for group in self._groups():
            yield from (int(entry.name) for entry in os.scandir(group.path) if entry.name.isdigit())

    def _groups(self) -> Iterator[os.DirEntry[str]]:
        if self.folder.is_dir():
            for group in os.scandir(self.folder):
                if group.name.isdigit() and group.is_dir(follow_symlinks=False):
                    yield group


def sample_sizes(num_bytes: Callable[[int], int], indices: Sequence[int], streams: int, tally: Tally) -> list[int]:
    """Bytes of each of these samples, asked for by several threads: a file system may have to be asked for each."""
    sizes = [0] * len(indices)
    starts = range(0, len(indices), 1024)

    def ask(_stream: int, start: int) -> None:
        for place in range(start, min(start + 1024, len(indices))):
            sizes[place] = num_bytes(indices[place])
        tally.look(min(1024, len(indices) - start))

    run_streams(streams, starts, ask)
    return sizes


def stored_bytes(sizes: Sequence[int], folder: Path) -> int:
    """What samples of these sizes take in a store on the file system of a folder."""
    block = block_of(folder)
    return sum(rounded(size + STORE_BYTES, block) for size in sizes)


def find_whole(
    stores: Mapping[int, SampleStore], wanted: Mapping[int, Sequence[int]], tally: Tally
) -> dict[int, set[int]]:
    """Which samples of an earlier staging are there, whole; others that are there are removed."""
    found: dict[int, set[int]] = {}
    for rank, store in stores.items():
        found[rank], needed = set(), set(wanted[rank])
        store.remove_partial()
        for index in list(store.indices()):
            data = None
            if index in needed:
                with suppress(DamagedSampleError, OSError):
                    data = store.get(index)
            if data is None:
                store.remove(index)
            else:
                found[rank].add(index)
                tally.found(len(data))
    return found


def fill(
    stores: Mapping[int, SampleStore],
    missing: Mapping[int, Sequence[int]],
    open_fetch: Callable[[], Fetch],
    *,
    streams: int,
    tally: Tally,
    on_bad: Callable[[Exception], bool],
) -> None:
    """Copies samples into the stores of ranks, in the order of storage.

    `missing`: sample numbers, by rank. `open_fetch`: a new reader for one stream, which gives a sample's bytes.
    `on_bad`: given the error of a sample that cannot be read; whether to go on without it.
    Raises OSError: a store's disk refuses. Exception: a sample cannot be read.
    """
    pairs = sorted((int(index), rank) for rank, indices in missing.items() for index in indices)
    fetches = [open_fetch() for _ in range(streams)]

    def copy(stream: int, start: int) -> None:
        begun, num_bytes, items = time.monotonic_ns(), 0, 0
        for index, rank in pairs[start : start + _AT_ONCE]:
            try:
                data = fetches[stream](index)
            except OSError:
                raise
            except Exception as error:
                if on_bad(error):
                    continue
                raise
            stores[rank].put(index, data)
            tally.add(len(data))
            num_bytes, items = num_bytes + len(data), items + 1
        tally.done(stream, begun, num_bytes, items)

    run_streams(streams, range(0, len(pairs), _AT_ONCE), copy)


def choose_kept(sizes: NDArray[np.int64], capacity: int, *, seed: int, block: int) -> NDArray[np.bool_]:
    """Which samples a node keeps when not all fit: drawn in the order of the seed until the next does not fit.

    All processes of all nodes with the same capacity choose the same. Nothing is ever put out for another: every sample
    is read once an epoch, so that any kept one is worth as much as any other (Mohan et al., "Analyzing and Mitigating
    Data Stalls in DNN Training", 2021: MinIO). Returns (N,) whether a sample is kept.
    """
    taken = -(-(sizes + STORE_BYTES) // block) * block
    order = np.random.default_rng([seed, _CHOICE]).permutation(len(sizes))
    kept = np.zeros(len(sizes), dtype=bool)
    kept[order[np.cumsum(taken[order]) <= capacity]] = True
    return kept


class Keeping:
    """Whether samples are still being kept in a folder: the first process that meets a full disk ends it for all."""

    def __init__(self, folder: Path) -> None:
        self._on, self._off = folder / "keeping", folder / "full"

    def begin(self) -> None:
        """Called once for each node, before anything is kept."""
        self._off.unlink(missing_ok=True)
        self._on.touch()

    def stop(self) -> None:
        with suppress(OSError):
            self._on.rename(self._off)  # which needs no room on the disk

    def has_stopped(self) -> bool:
        """Whether a process has met a full disk."""
        return self._off.exists()
