"""A rank's own samples, brought into its store before training, and read from there."""

from __future__ import annotations

from collections.abc import Iterable

from dlbench.datasets.staging.store import DamagedSampleError, SampleStore
from dlbench.node.data.reader import BadSampleError, InHalves, Raw, Sample, SampleReader
from dlbench.node.data.sharding import Key
from dlbench.specs.system import StagingTier


def fill(store: SampleStore, reader: SampleReader, samples: Iterable[int]) -> None:
    """Copies samples into a store."""
    for index in samples:
        store.put(int(index), reader.fetch(int(index)).data)


class StoredReader(InHalves):
    """The samples of a reader, fetched from a store."""

    def __init__(self, reader: SampleReader, store: SampleStore, tier: StagingTier = "local") -> None:
        self._reader, self._store, self._tier = reader, store, tier
        self.num_samples, self.num_bytes = reader.num_samples, reader.num_bytes
        self.labels, self.name, self.describe, self.close = reader.labels, reader.name, reader.describe, reader.close

    def fetch(self, index: int) -> Raw:
        try:
            data = self._store.get(index)
        except (DamagedSampleError, OSError) as error:
            raise BadSampleError(str(error)) from None
        if data is None:
            raise BadSampleError(f"{self.name(index)}: not staged")
        return Raw(data, self._tier)

    def prepare(self, key: Key, data: bytes) -> Sample:
        return self._reader.prepare(key, data)
