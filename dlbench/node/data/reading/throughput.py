"""How many samples a second readers give, their queues empty at the start: what trials and the pure benchmark share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from dlbench.node.data.loader import Ledger, end_workers, fetch_batches
from dlbench.node.data.reader import BatchReader, Fetched, SampleReader
from dlbench.node.data.reading.epochs import ReadSums
from dlbench.node.data.sharding import Key

_LONGEST = 8
"""Times the wanted seconds after which a measurement ends with what it has."""


@dataclass(frozen=True)
class Readers:
    """What reads for a rank."""

    loader_workers: int
    """Reader processes; 0: the training process itself."""
    prefetch_batches: int
    """Batches that each reads ahead; 0 where there is none."""


@dataclass(kw_only=True)
class Throughput(ReadSums):
    """What was read in some seconds."""

    seconds: float = 0.0
    ended: bool = False
    """Whether the order came to its end."""

    @property
    def samples_per_s(self) -> float:
        """0 where nothing was read."""
        return self.samples / self.seconds if self.seconds else 0.0


@contextmanager
def reading(
    reader: SampleReader,
    keys: Callable[[], Iterator[list[Key]]],
    readers: Readers,
    *,
    on_bad_sample: Literal["stop", "skip"],
    pin_memory: bool = False,
) -> Iterator[Callable[[], Fetched | None]]:
    """The next batch each time it is called, None at the end of the order; the readers end with the context."""
    batches = fetch_batches(
        BatchReader(reader, on_bad_sample),
        keys,
        loader_workers=readers.loader_workers,
        prefetch_batches=max(1, readers.prefetch_batches),
        pin_memory=pin_memory,
        persistent=False,
    )
    ledger, iterator = Ledger(readers.loader_workers), iter(batches)
    try:
        yield lambda: ledger.next(iterator)
    finally:
        end_workers(iterator)


def throughput(
    take: Callable[[], Fetched | None],
    readers: Readers,
    *,
    seconds: float,
    beat: Callable[[], None],
    compute: Callable[[], object] | None = None,
    ready: Callable[[], None] = lambda: None,
    longest: float | None = _LONGEST,
) -> Throughput:
    """Takes batches for so many seconds.

    What queues hold when the clock starts was read before: as many batches are taken first and not counted.

    Args:
        take: as of `reading`.
        readers: that read; tells how much their queues hold.
        seconds: to measure for; at least two batches of each reader are taken.
        beat: called at each batch.
        compute: what the taker does between two batches; None: nothing.
        ready: called when the queues are empty and the clock is about to start.
        longest: times the seconds after which it ends with what it has; None: it does not.
    """
    found = Throughput()
    for _ in range(max(1, readers.loader_workers * readers.prefetch_batches)):
        beat()
        if take() is None:
            found.ended = True
            break
    ready()
    least = 2 * max(1, readers.loader_workers)
    start = time.monotonic()
    while not found.ended:
        found.seconds = time.monotonic() - start
        is_late = longest is not None and found.seconds >= longest * seconds
        if is_late or (found.seconds >= seconds and found.batches >= least):
            break
        beat()
        if compute is not None:
            compute()
        item = take()
        if item is None:
            found.ended = True
        else:
            found.add(item)
            found.seconds = time.monotonic() - start
    return found
