"""Readers of samples that are their own numbers: from nowhere, and from a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.staging.samples import SampleStore
from dlbench.node.data.reader import BadSampleError, DataReader, Key, PreparedSample, Raw


def number_bytes(index: int) -> bytes:
    """What is stored of a sample: longer for some than for others."""
    return str(index).encode() * (1 + index % 7)


class NumberReader(DataReader):
    """Samples with their number in them, of four classes in the order of storage; some may be unreadable."""

    def __init__(self, num_samples: int, bad: frozenset[int] = frozenset()) -> None:
        self.num_samples, self._bad = num_samples, bad

    def fetch(self, index: int, out: object = None) -> Raw:
        if index in self._bad:
            raise BadSampleError(f"{self.name(index)}: unreadable")
        return Raw(number_bytes(index))

    def prepare(self, key: Key, data: bytes, out: object = None) -> PreparedSample:
        assert data == number_bytes(key[1])
        return PreparedSample({"number": np.array(key[1])})

    def num_bytes(self, index: int) -> int:
        return len(number_bytes(index))

    def labels(self) -> NDArray[np.int32] | None:
        return (np.arange(self.num_samples, dtype=np.int32) * 4) // self.num_samples

    def name(self, index: int) -> str:
        return f"number {index}"

    def files(self) -> list[Path]:
        return []

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


class StoreReader(NumberReader):
    """The same from a store."""

    def __init__(self, store: SampleStore) -> None:
        super().__init__(1000)
        self._store = store

    def fetch(self, index: int, out: object = None) -> Raw:
        data = self._store.get(index)
        if data is None:
            raise BadSampleError(f"{self.name(index)}: not there")
        return Raw(data, "local")
