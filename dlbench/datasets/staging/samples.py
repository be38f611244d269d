"""Stages single samples on a node: those of its ranks before training (shard), or each one at its first read (lazy).
Several processes write and read at the same time. `<folder>/<index // 4096>/<index>` holds a sample's bytes and their
CRC-32 (4 bytes, little-endian). A file is renamed when it is complete. It is not synced: a power failure ends the job,
too, and the checksum reveals a damaged file.
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

from dlbench.datasets.staging.copying import Tally, block_of, rounded, run_streams
from dlbench.opening import descriptor

_PER_FOLDER = 4096  # samples in a folder: a million in one would be slow on most file systems
_CRC_BYTES = 4
MAX_BYTES = 1 << 32  # largest sample
_SAMPLES_PER_TASK = 32  # neighbours in the data set, so that each thread reads sequentially
_CHOICE = 0x57A6  # added to the seed, so that the choice is independent of the epochs' permutations
STORE_BYTES = 4  # bytes that the store adds to each sample
Fetch = Callable[[int], bytes]


class DamagedSampleError(Exception):
    """A stored sample was damaged; the message has the file and the reason."""


class SampleStore:
    """A store of samples by their number in the data set; its folder is created with the first one. Can be pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, index: int) -> Path:
        return self.folder / str(index // _PER_FOLDER) / str(index)

    def put(self, index: int, data: bytes) -> None:
        """Stores or replaces a sample. Raises OSError: writing failed; no part of the sample is left."""
        # Strings and os functions, because `Path` objects would take half of the time for a million samples.
        folder = f"{self.folder}/{index // _PER_FOLDER}"
        temporary = f"{folder}/.{index}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            # Without parents: if the folder above the store was removed, the run is over.
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
        """Removes incomplete files of killed processes; no process may write meanwhile."""
        for group in self._groups():
            for entry in os.scandir(group.path):
                if entry.name.startswith("."):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108

    def get(self, index: int) -> bytes | None:
        """Reads a sample; None if it is not stored. Raises DamagedSampleError, or OSError if reading failed."""
        path = self.path(index)
        try:
            opened = descriptor(path, follow=False)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(opened).st_size
            content = os.read(opened, size) if size <= MAX_BYTES else b""
            while 0 < len(content) < size and (more := os.read(opened, size - len(content))):
                content += more
        finally:
            os.close(opened)
        data, crc = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
        if len(crc) < _CRC_BYTES or zlib.crc32(data) != int.from_bytes(crc, "little"):
            raise DamagedSampleError(f"{str(path)!r}: changed or truncated since it was staged")
        return data

    def has(self, index: int) -> bool:
        return self.path(index).exists()

    def remove(self, index: int) -> None:
        with suppress(FileNotFoundError):
            self.path(index).unlink()

    def indices(self) -> Iterator[int]:
        for group in self._groups():
            yield from (int(entry.name) for entry in os.scandir(group.path) if entry.name.isdigit())

    def _groups(self) -> Iterator[os.DirEntry[str]]:
        if self.folder.is_dir():
            for group in os.scandir(self.folder):
                if group.name.isdigit() and group.is_dir(follow_symlinks=False):
                    yield group


def sample_sizes(num_bytes: Callable[[int], int], indices: Sequence[int], streams: int, tally: Tally) -> list[int]:
    """Returns the sizes of samples in bytes, asked for in several threads: each may need a call of the file system."""
    sizes = [0] * len(indices)
    starts = range(0, len(indices), 1024)

    def ask(_stream: int, start: int) -> None:
        for position in range(start, min(start + 1024, len(indices))):
            sizes[position] = num_bytes(indices[position])
        tally.look(min(1024, len(indices) - start))

    run_streams(streams, starts, ask)
    return sizes


def stored_bytes(sizes: Sequence[int], folder: Path) -> int:
    """Returns the disk space of samples of these sizes in a store on the file system of a folder."""
    block = block_of(folder)
    return sum(rounded(size + STORE_BYTES, block) for size in sizes)


def find_whole(
    stores: Mapping[int, SampleStore], needed: Mapping[int, Sequence[int]], tally: Tally
) -> dict[int, set[int]]:
    """Returns the intact samples of an earlier staging by rank, and removes all others."""
    intact: dict[int, set[int]] = {}
    for rank, store in stores.items():
        intact[rank], needed_indices = set(), set(needed[rank])
        store.remove_partial()
        for index in list(store.indices()):
            data = None
            if index in needed_indices:
                with suppress(DamagedSampleError, OSError):
                    data = store.get(index)
            if data is None:
                store.remove(index)
            else:
                intact[rank].add(index)
                tally.reuse(len(data))
    return intact


def fill(
    stores: Mapping[int, SampleStore],
    missing: Mapping[int, Sequence[int]],
    open_fetch: Callable[[], Fetch],
    *,
    streams: int,
    tally: Tally,
    on_bad: Callable[[Exception], bool],
) -> None:
    """Copies samples into the stores of ranks, in the order of the data set. `open_fetch`: returns a reader for one
    thread. `on_bad`: returns whether to continue without a sample. Raises the error of a sample, or OSError.
    """
    pairs: list[tuple[int, int]] = []  # sample number and rank
    for rank, indices in missing.items():
        pairs += [(int(index), rank) for index in indices]
    pairs.sort()
    fetches = [open_fetch() for _ in range(streams)]

    def copy(stream: int, start: int) -> None:
        start_ns, num_bytes, items = time.monotonic_ns(), 0, 0
        for index, rank in pairs[start : start + _SAMPLES_PER_TASK]:
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
        tally.done(stream, start_ns, num_bytes, items)

    run_streams(streams, range(0, len(pairs), _SAMPLES_PER_TASK), copy)


def choose_kept(sizes: NDArray[np.int64], capacity: int, *, seed: int, block: int) -> NDArray[np.bool_]:
    """Returns (N,) whether a node stores each sample if not all fit: in random order, equal on all nodes of equal
    capacity. A stored sample is never replaced: each one is read once per epoch, so that all are worth the same (Mohan
    et al., "Analyzing and Mitigating Data Stalls in DNN Training", 2021: MinIO).
    """
    disk_bytes = -(-(sizes + STORE_BYTES) // block) * block
    order = np.random.default_rng([seed, _CHOICE]).permutation(len(sizes))
    is_stored = np.zeros(len(sizes), dtype=bool)
    is_stored[order[np.cumsum(disk_bytes[order]) <= capacity]] = True
    return is_stored


class Keeping:
    """A switch for storing samples: the first process that finds a full disk stops it for all of the node."""

    def __init__(self, folder: Path) -> None:
        self._on, self._off = folder / "keeping", folder / "full"

    def begin(self) -> None:
        """Starts storing; called once per node."""
        self._off.unlink(missing_ok=True)
        self._on.touch()

    def stop(self) -> None:
        with suppress(OSError):
            self._on.rename(self._off)  # renaming also works on a full disk

    def has_stopped(self) -> bool:
        return self._off.exists()
