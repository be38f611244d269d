"""A reader of a rank's own samples, some of which are still on their way from another rank."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from dlbench.datasets.staging.samples import SampleStore
from dlbench.node.data.reader import Around, NotArrivedError, Raw, SampleReader

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_LOST = "lost"


def lost_mark(store: SampleStore) -> Path:
    """The file whose being there tells all readers that nothing more will arrive; beside the samples."""
    return store.folder / _LOST


class AwaitingReader(Around):
    """The same samples, each waited for until it is in the store.

    A sample is there when its file is (`SampleStore`), so that readers in other processes need not be told.

    Args:
        reader: reads samples of the store.
        store: of this rank.
        patience_s: how long a sample may be waited for, seconds.
    """

    def __init__(self, reader: SampleReader, store: SampleStore, *, patience_s: float) -> None:
        super().__init__(reader)
        self._store, self._patience_s = store, patience_s
        self._lost = lost_mark(store)

    def fetch(self, index: int) -> Raw:
        """The stored bytes of one sample, once it is there.

        Raises:
            NotArrivedError: it is not coming, or not in time.
            BadSampleError: it cannot be read.
        """
        if self._store.has(index):
            return self._reader.fetch(index)
        begun = time.monotonic_ns()
        pause_s = _FIRST_PAUSE_S
        while not self._store.has(index):
            waited_s = (time.monotonic_ns() - begun) / 1e9
            if waited_s > self._patience_s or self._lost.exists():
                raise NotArrivedError(index, waited_s)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        waited_ns = time.monotonic_ns() - begun
        return replace(self._reader.fetch(index), waited_ns=waited_ns)
