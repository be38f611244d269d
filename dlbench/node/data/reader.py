"""Reading one sample, and what happens when it cannot be read. Formats implement `SampleReader`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.node.data.sharding import Key
from dlbench.units import utf8_text

_SKIP_AT_MOST = 100
"""Unreadable samples in a row after which a data set is taken for broken even where samples may be skipped."""


class BadSampleError(Exception):
    """One sample cannot be read; `str` names the file and the reason."""


@dataclass
class Sample:
    """One sample."""

    arrays: dict[str, NDArray[np.generic]]
    """By the names of `dlbench.node.models.build.Batch`, without the first dimension."""
    converted: str | None = None
    """File and reason if it was used, but not as it was stored."""


class SampleReader(Protocol):
    """A data set, sample by sample. It must survive pickling: loader processes get a copy."""

    @property
    def num_samples(self) -> int:
        """Samples in the data set."""

    def read(self, key: Key) -> Sample:
        """One sample, prepared for training; a function of the data set, the seed and the key.

        Raises:
            BadSampleError: it cannot be read.
        """

    def describe(self) -> dict[str, object]:
        """What the data set is, ready for JSON: kind, path, index_sha256, ..."""

    def close(self) -> None:
        """Lets go of open files."""


@dataclass
class Fetched:
    """A batch on its way from a loader process, with what went wrong on the way."""

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    error: str | None = None
    """Why the run must stop; exceptions cross processes badly."""
    lacks: str | None = None
    """What the machine lacks, where that is why the run must stop."""
    worker: int = 0
    """The loader process that read it, from 0; 0 also where the training process reads itself."""
    start_ns: int = 0
    """CLOCK_MONOTONIC, which is one clock for all processes of a machine."""
    end_ns: int = 0

    def pin_memory(self) -> Self:
        """Moves the batch to page-locked memory; torch calls it where that is asked for."""
        self.batch = {name: tensor.pin_memory() for name, tensor in self.batch.items()}
        return self


@dataclass(frozen=True, kw_only=True)
class ReadSpan:
    """When a batch was read, nanoseconds of CLOCK_MONOTONIC."""

    number: int
    """Of the batch, from 0, in the order of handing out: the step of this run that trains with it."""
    worker: int
    """The loader process, from 0; 0 also where the training process reads itself."""
    start_ns: int
    end_ns: int


class BatchReader:
    """Turns keys into a batch. Whether it runs in the training process or in a loader process makes no difference.

    Args:
        reader: the data set.
        on_bad_sample: what to do where a sample is unreadable.
        replace: with `skip`, take the next sample of the data set instead; otherwise leave the place out, so that the
            batch is smaller and may be empty (an evaluation must not count a sample twice).
    """

    def __init__(self, reader: SampleReader, on_bad_sample: Literal["stop", "skip"], *, replace: bool = True) -> None:
        self.reader = reader
        self._on_bad_sample = on_bad_sample
        self._attempts = _SKIP_AT_MOST if replace else 1
        self._replace = replace

    def __getitem__(self, keys: list[Key]) -> Fetched:
        fetched = Fetched(start_ns=time.monotonic_ns())
        samples = []
        for key in keys:
            sample = self._read(key, fetched)
            if fetched.error is not None:
                return fetched
            if sample is not None:
                samples.append(sample.arrays)
        if samples:
            fetched.batch = _stacked(samples)
        fetched.end_ns = time.monotonic_ns()
        return fetched

    def _read(self, key: Key, fetched: Fetched) -> Sample | None:
        epoch, index = key
        for attempt in range(self._attempts):
            try:
                sample = self.reader.read((epoch, (index + attempt) % self.reader.num_samples))
            except BadSampleError as error:
                fetched.failures.append(str(error))
                if self._on_bad_sample == "stop":
                    fetched.error = f"{error}; repair it, or set data.on_bad_sample to skip"
                    return None
                continue
            if sample.converted is not None:
                fetched.converted.append(sample.converted)
            return sample
        if self._replace:
            fetched.error = f"{_SKIP_AT_MOST} samples in a row are unreadable, the last: {fetched.failures[-1]}"
        return None


def _stacked(samples: list[dict[str, NDArray[np.generic]]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}


def path_text(path: Path) -> str:
    """A path for JSON: bytes of a name that are not UTF-8 become escapes."""
    return utf8_text(str(path))
