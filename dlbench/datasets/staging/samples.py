"""Single samples on a node: those of its ranks before training (shard), or each when it is first read (lazy)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.staging.place import block_of, rounded
from dlbench.datasets.staging.store import DamagedSampleError, SampleStore
from dlbench.datasets.staging.streams import Tally, run_streams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AT_ONCE = 32
"""Samples of a task: neighbours in the data set, so that each stream reads on where it was."""
_CHOICE = 0x57A6
"""Beside the seed, so that the choice is none of the epochs' permutations."""
STORE_BYTES = 4
"""What the store adds to each sample."""

Fetch = Callable[[int], bytes]


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
    """Which samples of an earlier staging are there, whole; others that are there are removed.

    Args:
        stores: by rank.
        wanted: sample numbers, by rank.
        tally: told of what was found.
    """
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
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Copies samples into the stores of ranks, in the order of storage.

    Args:
        stores: by rank.
        missing: sample numbers, by rank.
        open_fetch: a new reader for one stream, which gives a sample's bytes.
        streams: samples at a time.
        tally: told of everything.
        on_bad: given the error of a sample that cannot be read; whether to go on without it.
        on_progress: called now and then.

    Raises:
        OSError: a store's disk refuses.
        Exception: a sample cannot be read.
    """
    pairs = sorted((int(index), rank) for rank, indices in missing.items() for index in indices)
    fetches = [open_fetch() for _ in range(streams)]
    told = [time.monotonic()]

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
        if stream == 0 and time.monotonic() - told[0] > 1:
            told[0] = time.monotonic()
            on_progress()

    run_streams(streams, range(0, len(pairs), _AT_ONCE), copy)


def choose_kept(sizes: NDArray[np.int64], capacity: int, *, seed: int, block: int) -> NDArray[np.bool_]:
    """Which samples a node keeps when not all fit: drawn in the order of the seed until the next does not fit.

    All processes of all nodes with the same capacity choose the same. Nothing is ever put out for another: every sample
    is read once an epoch, so that any kept one is worth as much as any other (Mohan et al., "Analyzing and Mitigating
    Data Stalls in DNN Training", 2021: MinIO).

    Args:
        sizes: (N,) bytes of each sample.
        capacity: bytes that may be taken.
        seed: of the draw.
        block: bytes of a block of the file system.

    Returns:
        (N,) whether a sample is kept.
    """
    import numpy as np

    taken = -(-(sizes + STORE_BYTES) // block) * block
    order = np.random.default_rng([seed, _CHOICE]).permutation(len(sizes))
    kept = np.zeros(len(sizes), dtype=bool)
    kept[order[np.cumsum(taken[order]) <= capacity]] = True
    return kept


class Keeping:
    """Whether samples are still being kept in a folder: the first process that meets a full disk ends it for all.

    A file is renamed for that, which needs no room on the disk.
    """

    _ON, _OFF = "keeping", "full"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> None:
        """Called once for each node, before anything is kept."""
        with suppress(FileNotFoundError):
            (self._folder / self._OFF).unlink()
        (self._folder / self._ON).touch()

    def stop(self) -> None:
        """The disk is full."""
        with suppress(OSError):
            (self._folder / self._ON).rename(self._folder / self._OFF)

    def has_stopped(self) -> bool:
        """Whether a process has met a full disk."""
        return (self._folder / self._OFF).exists()
