"""Reading one sample, and what happens when it cannot be read. Formats implement `DataReader`.

Reading has two halves. `fetch` brings the stored bytes of a sample from where they lie: what a file system costs, and
what staging and shuffling move about. `prepare` makes tensors of them: what decoding and augmentation cost.
"""

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
from dlbench.node.data.sharding import Key
from dlbench.specs.system import Tier
from dlbench.units import utf8_text

NAMES_FROM = "its folders"  # where the names of single files are from, in a description
_SKIP_AT_MOST = 100
"""Unreadable samples in a row after which a data set is taken for broken even where samples may be skipped."""
_IN_A_ROW = 1 << 20  # bytes of samples fetched and begun before the first is finished
"""Decoding empties a core's caches; what is quick is two to four times as quick while they hold it (measured)."""
Arrays = Mapping[str, NDArray[Any]]  # by the names of `dlbench.node.models.build.Batch`, without the first dimension
Forms = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]  # shape and type of each array of a sample
RAGGED = "encoded"
"""Arrays of this name differ in length: in a batch they stand one behind another, and `ends` (N,) says up to where."""
Room = Callable[[int, Forms], dict[str, NDArray[Any]]]  # gives arrays for `num` samples of these forms


class BadSampleError(Exception):
    """One sample cannot be read; `str` names the file and the reason."""


class NotArrivedError(Exception):
    """A sample that another rank should have sent is not there, and was waited for."""

    def __init__(self, index: int, waited_s: float) -> None:
        super().__init__(index, waited_s)
        self.waited_s = waited_s


@dataclass
class PreparedSample:
    """One sample."""

    arrays: dict[str, NDArray[np.generic]]  # As in `dlbench.node.models.build.Batch`, without the first dimension.
    converted: str | None = None  # file and reason if it was used, but not as it was stored


@dataclass(frozen=True)
class Raw:
    """The stored bytes of one sample, and from where they came."""

    data: bytes  # or a view of bytes, which is read from alike
    tier: Tier = "shared"
    waited_ns: int = 0  # how long it was waited for, because another rank had not sent it yet
    num_placed: int = 0  # bytes of it that are not in `data`, because they were read to where they are wanted


class DataReader(Protocol):
    """A data set, sample by sample. It must survive pickling: loader processes get a copy."""

    num_samples: int

    def read(self, key: Key) -> PreparedSample:
        """One sample, fetched and prepared. Raises BadSampleError: it cannot be read."""
        return self.prepare(key, self.fetch(key[1]).data)

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """The stored bytes of one sample, in a form of the reader's own that `prepare` takes.

        `out`: as for `prepare`, which will be given the same; what is stored as it is wanted may be read to there.
        Raises BadSampleError: it cannot be read, or a checksum differs.
        """

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        """Does the quick part of `prepare`; the returned function does the rest when called with `out`."""
        return partial(self.prepare, key, data)

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        """A sample ready for training, of its bytes; a function of them, the seed and the key.

        `data`: what `fetch` gave. `out`: arrays of the right shapes, by name, that it may write into instead of making
        its own, which saves copying large ones into the batch; None: there are none. Raises BadSampleError: the bytes
        are damaged.
        """

    def num_bytes(self, index: int) -> int:
        """Bytes that `fetch` gives of a sample, known without reading it (0: the sample needs none).

        Raises BadSampleError: its file is not there.
        """

    def labels(self) -> NDArray[np.int32] | None:
        """(num_samples,) the class of each sample; None where samples have none."""
        return None

    def name(self, index: int) -> str:
        """File, and place in it, of one sample, for messages; never fails."""

    def files(self) -> Sequence[Path]:
        """The files that `fetch` reads, from the index; none where it reads none. Those of a store, if it reads one."""

    def describe(self) -> dict[str, object]:
        """Returns a description ready for JSON: kind, path, index_sha256, ..."""

    def close(self) -> None:
        """Lets go of open files."""
        return


class WrappedReader(DataReader):
    """Another reader, to change a part of it."""

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
    """A batch on its way from a loader process, with what went wrong on the way."""

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    error: str | None = None  # why the run must stop; exceptions cross processes badly
    lacks: str | None = None  # what the machine lacks, where that is why the run must stop
    worker: int = 0  # the loader process that read it, from 0; 0 also where the training process reads itself
    start_ns: int = 0  # CLOCK_MONOTONIC, which is one clock for all processes of a machine
    end_ns: int = 0
    visited: list[Key] = field(default_factory=list)  # the samples in it, in order; a replaced one under its own number
    tier_bytes: dict[Tier, int] = field(default_factory=dict)  # bytes fetched from each tier
    fetch_ns: int = 0  # of the time between start and end, spent in `DataReader.fetch`
    prepare_ns: int = 0  # the same in `DataReader.prepare`
    waited_ns: int = 0  # of `fetch_ns`, spent in waiting for samples on their way from other ranks
    not_arrived: tuple[Key, float] | None = None
    """A sample that did not come from another rank, and how long it was waited for, seconds: the run must stop."""
    storage_bytes: int | None = None
    """Bytes that the kernel fetched from storage for it, read-ahead included; None where it does not count."""
    asked_slot: int | None = None
    """The slot that it was to be written to (see `dlbench.node.data.loader_transport`); None: there are none."""
    slot: int | None = None  # the slot that it lies in; on its way `batch` then has only what does not lie there
    made: dict[str, torch.Tensor] = field(default_factory=dict)  # all of the slot, the first time that it is used
    names: tuple[str, ...] = ()  # of all tensors of the batch, where it lies in a slot
    num: int = 0  # samples of it, where it lies in a slot

    @property
    def is_lost(self) -> bool:
        """True if the run must stop."""
        return self.error is not None or self.not_arrived is not None

    def pin_memory(self) -> Self:
        """Moves the batch to page-locked memory; torch calls it where that is asked for."""
        self.batch = {name: tensor.pin_memory() for name, tensor in self.batch.items()}
        return self


@dataclass(frozen=True, kw_only=True)
class ReadSpan:
    """The time of reading a batch, nanoseconds of CLOCK_MONOTONIC."""

    number: int  # of the batch, from 0, in the order of handing out: the step of this run that trains with it
    worker: int  # the loader process, from 0; 0 also where the training process reads itself
    start_ns: int
    end_ns: int


class BatchReader:
    """Turns keys into a batch. Whether it runs in the training process or in a loader process makes no difference.

    `replace`: with `skip`, take the next sample of the data set instead; otherwise leave the place out, so that the
    batch is smaller and may be empty (an evaluation must not count a sample twice). `arrange`: what is done last with a
    batch, where it is read; see `dlbench.node.data.text`. `within_batch`: take the next of the same batch instead of
    the next of the data set, which this rank may not hold.
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
        self._attempts = _SKIP_AT_MOST if replace else 1
        self._replace, self._within_batch = replace, within_batch
        self._forms: Forms = {}

    def __getitem__(self, keys: list[Key]) -> Fetched:
        return self.read(keys, _new_arrays)

    def read(self, keys: list[Key], room: Room) -> Fetched:
        """A batch of at most these samples, written into what `room` gives; its errors are passed on."""
        before = storage_reads()
        fetched = Fetched(start_ns=time.monotonic_ns())
        stack = _Stack(len(keys), self._forms, room)
        begun: list[Iterator[PreparedSample | None]] = []
        finished = 0  # bytes
        for place in range(len(keys)):
            begun.append(self._read(place, keys, fetched, stack.place(len(begun))))
            next(begun[-1], None)
            num_bytes = sum(fetched.tier_bytes.values())
            if num_bytes < finished + _IN_A_ROW and place + 1 < len(keys) and not fetched.is_lost:
                continue
            for reading in begun:
                sample = None if fetched.is_lost else next(reading, None)
                if sample is not None:
                    stack.add(sample.arrays)
            if fetched.is_lost:
                return fetched
            begun, finished = [], num_bytes
        fetched.batch, self._forms = self._arrange(stack.batch()), stack.forms
        fetched.end_ns = time.monotonic_ns()
        after = storage_reads()
        if before is not None and after is not None:
            fetched.storage_bytes = after - before
        return fetched

    def _read(
        self, place: int, keys: list[Key], fetched: Fetched, out: Arrays | None
    ) -> Iterator[PreparedSample | None]:
        """Nothing once a sample is fetched and begun, then the sample; ends before where this place gets none."""
        clock, tried, is_begun = time.monotonic_ns, 0, False
        for candidate in self._candidates(place, keys):
            tried += 1
            try:
                start = clock()
                raw = self.reader.fetch(candidate[1], out)
                between = clock()
                fetched.fetch_ns += between - start
                fetched.waited_ns += raw.waited_ns
                num_bytes = len(raw.data) + raw.num_placed
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
            fetched.error = f"{tried} samples in a row are unreadable, the last: {fetched.failures[-1]}"

    def _candidates(self, place: int, keys: list[Key]) -> Iterator[Key]:
        """The sample of a place in a batch, and those that stand in for it, one after another."""
        epoch, index = keys[place]
        for attempt in range(min(self._attempts, len(keys)) if self._within_batch else self._attempts):
            if self._within_batch:
                yield keys[(place + attempt) % len(keys)]
            else:
                yield (epoch, (index + attempt) % self.reader.num_samples)


def _new_arrays(num: int, forms: Forms) -> dict[str, NDArray[Any]]:
    return {name: np.empty((num, *shape), dtype) for name, (shape, dtype) in forms.items()}


class _Stack:
    """A batch that is filled sample by sample, so that only one sample's arrays are held besides it.

    `most`: samples that it will have at most. `forms`: of the last batch's samples, which these most likely have, too;
    empty: not known. `room`: gives the arrays.
    """

    def __init__(self, most: int, forms: Forms, room: Room) -> None:
        self._most, self._num, self.forms, self._room = most, 0, forms, room
        self._arrays = room(most, forms) if forms else {}
        self._places: dict[int, Arrays] = {}
        self._ragged: list[NDArray[Any]] = []

    def place(self, ahead: int = 0) -> Arrays | None:
        """Returns arrays for a later sample (`ahead`) to be written into; None if their forms are not known."""
        number = self._num + ahead
        if number not in self._places:
            # With the dimension of the batch and without it again: of a scalar, too, that is a view.
            self._places[number] = {name: array[number, ...] for name, array in self._arrays.items()}
        return self._places[number] or None

    def add(self, sample: Arrays) -> None:
        """Takes a sample into the next place, copying what does not lie there yet.

        Raises ValueError: it has another shape than the first.
        """
        if RAGGED in sample:
            self._ragged.append(sample[RAGGED])
            sample = {name: array for name, array in sample.items() if name != RAGGED}
        if not self._num:
            forms = {name: (np.shape(value), np.asarray(value).dtype) for name, value in sample.items()}
            if forms != self.forms:
                self.forms, self._places = forms, {}
                self._arrays = self._room(self._most, forms)
        for name, place in (self.place() or {}).items():
            if sample[name] is place:
                continue  # it was written there
            if np.shape(sample[name]) != place.shape:
                raise ValueError(f"{name}: a sample of shape {np.shape(sample[name])}, the first has {place.shape}")
            place[...] = sample[name]
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
    """A path for JSON: bytes of a name that are not UTF-8 become escapes."""
    return utf8_text(str(path))
