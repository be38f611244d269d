"""Reading of single samples and of batches, with unreadable samples. Formats implement `DataReader`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.machine.storage import storage_reads
from dlbench.specs.system import Tier
from dlbench.units import utf8_text

Key = tuple[int, int]  # Epoch and sample index, which with the seed decide a sample's random augmentation.
NAMES_FROM = "its folders"  # Origin of the names of files, in a description.
_SKIP_AT_MOST = 100  # Unreadable samples in a row after which a run stops even if samples may be skipped.
_FETCH_AHEAD_BYTES = 1 << 20
"""Bytes of samples that are fetched and begun before the first is finished: decoding evicts a core's caches, and short
operations are two to four times faster while these hold their data (measured)."""
Arrays = Mapping[str, NDArray[Any]]  # Arrays of a sample, with the names of `build.Batch`, without its first dimension.
ArraySpecs = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]  # Shape and type of each array of a sample.
RAGGED = "encoded"  # Arrays of this name differ in length: a batch concatenates them, and `ends` (N,) has their ends.
ArrayAllocator = Callable[[int, ArraySpecs], dict[str, NDArray[Any]]]  # Returns arrays for that many samples.


class BadSampleError(Exception):
    """One sample cannot be read; `str` names the file and the reason."""


class NotArrivedError(Exception):
    """A sample from another rank did not arrive in time."""

    def __init__(self, index: int, waited_s: float) -> None:
        super().__init__(index, waited_s)
        self.waited_s = waited_s


@dataclass
class PreparedSample:
    """One sample, ready for training."""

    arrays: dict[str, NDArray[np.generic]]
    converted: str | None = None  # file and reason if the stored form had to be converted


@dataclass(frozen=True)
class Raw:
    """The stored bytes of one sample, and the tier from which they were read."""

    data: bytes  # or a view of bytes
    tier: Tier = "shared"
    waited_ns: int = 0  # time of waiting until another rank had sent it
    num_bytes_in_place: int = 0  # bytes that are not in `data`, because they were read directly into the batch


class DataReader(Protocol):
    """A data set, sample by sample. It must survive pickling: loader processes get a copy."""

    num_samples: int

    def read(self, key: Key) -> PreparedSample:
        """Fetches and prepares one sample. Raises BadSampleError if it cannot be read."""
        return self.prepare(key, self.fetch(key[1]).data)

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """Reads the stored bytes of a sample, or arrays directly into `out`. Raises BadSampleError if it cannot."""

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        """Does the quick part of `prepare`; the returned function does the rest when called with `out`."""
        return partial(self.prepare, key, data)

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        """Makes a sample from the bytes of `fetch`; the result depends only on them, the seed and the key. It may write
        into `out`, to save copying into the batch. Raises BadSampleError if the bytes are damaged.
        """

    def num_bytes(self, index: int) -> int:
        """Returns the bytes of a sample, 0 if it is not in a file. Raises BadSampleError if its file does not exist."""

    def labels(self) -> NDArray[np.int32] | None:
        """Returns the class of each sample, (num_samples,); None if samples have none."""
        return None

    def name(self, index: int) -> str:
        """Returns file, and place in it, of one sample, for messages; never fails."""

    def _bad(self, index: int, fault: object) -> BadSampleError:
        return BadSampleError(f"{self.name(index)}: {fault}")

    def files(self) -> Sequence[Path]:
        """Returns the files that `fetch` reads, of a data set or a store; empty if it reads none."""

    def describe(self) -> dict[str, object]:
        """Returns a description ready for JSON: kind, path, index_sha256, ..."""

    def close(self) -> None:
        """Closes files."""
        return


class WrappedReader(DataReader):
    """Base of readers that change some methods of another reader."""

    def __init__(self, reader: DataReader) -> None:
        self._reader = reader
        self.num_samples = reader.num_samples

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        return self._reader.begin(key, data)

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        return self._reader.prepare(key, data, out)

    def num_bytes(self, index: int) -> int:
        return self._reader.num_bytes(index)

    def labels(self) -> NDArray[np.int32] | None:
        return self._reader.labels()

    def name(self, index: int) -> str:
        return self._reader.name(index)

    def files(self) -> Sequence[Path]:
        return self._reader.files()

    def describe(self) -> dict[str, object]:
        return self._reader.describe()

    def close(self) -> None:
        self._reader.close()


@dataclass
class Fetched:
    """A batch from a loader process, with failures, times and counts of reading it."""

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    error: str | None = None  # reason why the run must stop; exceptions may not survive pickling
    lacks: str | None = None  # what the machine lacks, if the run must stop for it
    worker: int = 0  # loader process, from 0; also 0 if the training process reads
    start_ns: int = 0  # CLOCK_MONOTONIC, which all processes of a machine share
    end_ns: int = 0
    visited: list[Key] = field(default_factory=list)  # samples in order, for replaced ones their substitutes
    tier_bytes: dict[Tier, int] = field(default_factory=dict)  # bytes fetched from each tier
    fetch_ns: int = 0  # time in `DataReader.fetch`
    prepare_ns: int = 0  # time in `DataReader.prepare`
    waited_ns: int = 0  # part of `fetch_ns` spent waiting for samples of other ranks
    not_arrived: tuple[Key, float] | None = None  # sample of another rank that was waited for in vain, and the seconds
    storage_bytes: int | None = None  # bytes that the kernel read from storage, with read-ahead; None if not counted
    asked_slot: int | None = None  # slot for the batch (`node_sharing`); None without slots
    slot: int | None = None  # slot that holds the batch; `batch` then has only other tensors until it is received
    new_slot_tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # those of the slot, when it is used first
    names: tuple[str, ...] = ()  # names of all tensors of the batch, if it is in a slot
    num: int = 0  # samples of the batch, if it is in a slot

    @property
    def must_stop(self) -> bool:
        """True if the run must stop."""
        return self.error is not None or self.not_arrived is not None

    def pin_memory(self) -> Self:
        """Moves the batch to page-locked memory; torch calls it, too."""
        self.batch = {name: tensor.pin_memory() for name, tensor in self.batch.items()}
        return self


@dataclass(frozen=True, kw_only=True)
class ReadSpan:
    """The time of reading a batch, nanoseconds of CLOCK_MONOTONIC."""

    number: int  # number of the batch, from 0: the step of this run that trains with it
    worker: int  # loader process, from 0; also 0 if the training process reads
    start_ns: int
    end_ns: int


class BatchReader:
    """Reads batches by their keys. If samples may be skipped, `replace` uses the next sample of the data set instead,
    or with `within_batch` of the batch, because this rank may not hold others. `arrange` is the last step of making a
    batch.
    """

    def __init__(
        self,
        reader: DataReader,
        on_bad_sample: Literal["stop", "skip"],
        *,
        replace: bool = True,
        within_batch: bool = False,
        arrange: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> None:
        self.reader = reader
        self._arrange = arrange
        self._on_bad_sample = on_bad_sample
        self._attempts = _SKIP_AT_MOST if replace else 1  # candidates for a position in a batch
        self._replace, self._within_batch = replace, within_batch
        self._specs: ArraySpecs = {}

    def __getitem__(self, keys: list[Key]) -> Fetched:
        return self.read(keys, _new_arrays)

    def read(self, keys: list[Key], allocate: ArrayAllocator) -> Fetched:
        """Reads a batch of at most these samples into arrays of `allocate`; its errors propagate."""
        before = storage_reads()
        fetched = Fetched(start_ns=time.monotonic_ns())
        stack = _Stack(len(keys), self._specs, allocate)
        begun: list[Iterator[PreparedSample | None]] = []
        finished = 0  # bytes
        for position in range(len(keys)):
            begun.append(self._read(position, keys, fetched, stack.sample_arrays(len(begun))))
            next(begun[-1], None)
            num_bytes = sum(fetched.tier_bytes.values())
            if num_bytes < finished + _FETCH_AHEAD_BYTES and position + 1 < len(keys) and not fetched.must_stop:
                continue
            for reading in begun:
                if fetched.must_stop:
                    return fetched
                sample = next(reading, None)
                if sample is not None:
                    stack.add(sample.arrays)
            if fetched.must_stop:
                return fetched
            begun, finished = [], num_bytes
        fetched.batch, self._specs = self._arrange(stack.batch()), stack.specs
        fetched.end_ns = time.monotonic_ns()
        after = storage_reads()
        if before is not None and after is not None:
            fetched.storage_bytes = after - before
        return fetched

    def _read(
        self, position: int, keys: list[Key], fetched: Fetched, out: Arrays | None
    ) -> Iterator[PreparedSample | None]:
        """Yields None when a sample is fetched and begun, then the sample; ends early if this position gets none."""
        clock, tried, is_begun = time.monotonic_ns, 0, False
        for candidate in self._candidates(position, keys):
            tried += 1
            try:
                start = clock()
                raw = self.reader.fetch(candidate[1], out)
                between = clock()
                fetched.fetch_ns += between - start
                fetched.waited_ns += raw.waited_ns
                num_bytes = len(raw.data) + raw.num_bytes_in_place
                fetched.tier_bytes[raw.tier] = fetched.tier_bytes.get(raw.tier, 0) + num_bytes
                finish = self.reader.begin(candidate, raw.data)
                if not is_begun:
                    is_begun = True
                    fetched.prepare_ns += clock() - between
                    yield None
                    between = clock()
                sample = finish(out)
                fetched.prepare_ns += clock() - between
            except NotArrivedError as error:
                fetched.not_arrived = (candidate, error.waited_s)
                return
            except BadSampleError as error:
                fetched.failures.append(str(error))
                if self._on_bad_sample == "stop":
                    fetched.error = f"{error}; repair it, or set data.on_bad_sample to skip"
                    return
                continue
            fetched.visited.append(candidate)
            if sample.converted is not None:
                fetched.converted.append(sample.converted)
            yield sample
            return
        if self._replace:
            fetched.error = f"{tried} samples in a row are unreadable, the last one is {fetched.failures[-1]}"

    def _candidates(self, position: int, keys: list[Key]) -> Iterator[Key]:
        """Yields the sample for a position in a batch, and then its substitutes."""
        if self._within_batch:
            for attempt in range(min(self._attempts, len(keys))):
                yield keys[(position + attempt) % len(keys)]
            return
        epoch, index = keys[position]
        for attempt in range(self._attempts):
            yield (epoch, (index + attempt) % self.reader.num_samples)


def _new_arrays(num: int, specs: ArraySpecs) -> dict[str, NDArray[Any]]:
    return {name: np.empty((num, *shape), dtype) for name, (shape, dtype) in specs.items()}


class _Stack:
    """A batch that is filled sample by sample; `specs` are those of the last batch, empty if not known."""

    def __init__(self, capacity: int, specs: ArraySpecs, allocate: ArrayAllocator) -> None:
        self._capacity, self._num, self.specs, self._allocate = capacity, 0, specs, allocate
        self._arrays: dict[str, NDArray[Any]] = allocate(capacity, specs) if specs else {}
        self._views: dict[int, Arrays] = {}
        self._ragged: list[NDArray[Any]] = []

    def sample_arrays(self, ahead: int = 0) -> Arrays | None:
        """Returns arrays for a later sample (`ahead`) to be written into; None if their specs are not known."""
        number = self._num + ahead
        if number not in self._views:
            # The ellipsis makes a view also of a scalar.
            self._views[number] = {name: array[number, ...] for name, array in self._arrays.items()}
        return self._views[number] or None

    def add(self, sample: Arrays) -> None:
        """Adds a sample, copying what was not written in place. Raises ValueError if shapes differ from the first."""
        if RAGGED in sample:
            self._ragged.append(sample[RAGGED])
            sample = {name: array for name, array in sample.items() if name != RAGGED}
        if not self._num:
            specs = {name: (np.shape(value), np.asarray(value).dtype) for name, value in sample.items()}
            if specs != self.specs:
                self.specs, self._views = specs, {}
                self._arrays = self._allocate(self._capacity, specs)
        for name, target in (self.sample_arrays() or {}).items():
            if sample[name] is target:
                continue  # it was written there
            if np.shape(sample[name]) != target.shape:
                raise ValueError(f"{name}: a sample of shape {np.shape(sample[name])}, the first has {target.shape}")
            target[...] = sample[name]
        self._num += 1

    def batch(self) -> dict[str, torch.Tensor]:
        if not self._num:
            return {}
        batch = {name: torch.from_numpy(array[: self._num]) for name, array in self._arrays.items()}
        if self._ragged:
            batch[RAGGED] = torch.from_numpy(np.concatenate(self._ragged))
            batch["ends"] = torch.from_numpy(np.cumsum([len(array) for array in self._ragged]))
        return batch


def path_text(path: Path) -> str:
    """Returns a path for JSON, with bytes that are not UTF-8 as escapes."""
    return utf8_text(str(path))
