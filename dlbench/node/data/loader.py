"""Batches read from files by the training process, or ahead of time by loader processes from a fork server."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dlbench.errors import DlbenchError, EnvironmentLacksError, RunError, UserError
from dlbench.node.data.node_sharing import Batch, LoaderContext, NoRoomError, Slots, WorkerSlots, no_room
from dlbench.node.data.reader import BatchReader, DataReader, Fetched, Key, ReadSpan
from dlbench.node.data.sample_exchange import SampleExchange
from dlbench.node.data.sharding import ReadAudit, ShardedOrder, evaluation_batches
from dlbench.node.ranks import by_physical_core
from dlbench.records.data_path import ReadEpoch
from dlbench.specs.system import Tier
from dlbench.specs.watch import MAX_WINDOW_STEPS

_RANK_VARIABLE = "DLBENCH_LOADERS_OF"  # Process id of the rank, for `dlbench.node.data.end_with_rank`.
_NAMED_CONVERSIONS = 20  # Most samples that are named because they were converted.
RECENT_READS = 2 * MAX_WINDOW_STEPS  # Last batches whose times are kept: largest window and rest of the warm-up.


@dataclass(kw_only=True)
class ReadSums:
    """Totals of reading some batches."""

    batches: int = 0
    samples: int = 0
    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    storage_bytes: int | None = 0  # None if the kernel does not count for one of the readers
    fetch_ns: int = 0
    prepare_ns: int = 0

    def add(self, fetched: Fetched) -> None:
        self.batches += 1
        self.samples += len(fetched.visited)
        for tier, num in fetched.tier_bytes.items():
            self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + num
        if self.storage_bytes is None or fetched.storage_bytes is None:
            self.storage_bytes = None
        else:
            self.storage_bytes += fetched.storage_bytes
        self.fetch_ns += fetched.fetch_ns
        self.prepare_ns += fetched.prepare_ns


@dataclass
class EpochReads(ReadSums):
    """Totals of one rank's reading of one epoch, without batches that were prefetched and never used."""

    epoch: int
    wait_ns: int = 0


def read_epochs(
    ranks: Sequence[Sequence[Mapping[str, Any]]],
    step_s: Sequence[float],
    *,
    batches_per_epoch: int,
    counts_storage: bool,
    cached_shares: Mapping[int, float | None],
) -> tuple[ReadEpoch, ...]:
    """Combines the reads of all ranks, epoch by epoch. `ranks` holds the `EpochReads` of each rank, from JSON, and
    `step_s` the seconds of each step of rank 0. Without `counts_storage`, reads from storage are known if any byte was
    counted.
    """
    epochs, first = [], 0
    has_counted = any(epoch["storage_bytes"] for epoch in itertools.chain.from_iterable(ranks))
    for number, reads in enumerate(ranks[0]):
        everyone = [rank[number] for rank in ranks if number < len(rank)]
        tiers: Counter[Tier] = Counter()
        for rank_reads in everyone:
            tiers.update(rank_reads["tier_bytes"])
        storage = [rank_reads["storage_bytes"] for rank_reads in everyone]
        storage_bytes = None
        if (counts_storage or has_counted) and None not in storage:
            storage_bytes = sum(storage)
        last = first + reads["batches"]
        epochs.append(
            ReadEpoch(
                epoch=reads["epoch"],
                is_whole=reads["batches"] == batches_per_epoch,
                samples=sum(rank_reads["samples"] for rank_reads in everyone),
                tier_bytes=tiers,
                storage_bytes=storage_bytes,
                fetch_s=sum(rank_reads["fetch_ns"] for rank_reads in everyone) / 1e9,
                prepare_s=sum(rank_reads["prepare_ns"] for rank_reads in everyone) / 1e9,
                wait_s=sum(rank_reads["wait_ns"] for rank_reads in everyone) / 1e9 / len(everyone),
                seconds=float(sum(step_s[first:last])),
                cached_share=cached_shares.get(reads["epoch"]),
            )
        )
        first = last
    return tuple(epochs)


class _Batches(Dataset[Fetched]):
    """A BatchReader as torch's Dataset: an "index" is the list of keys of one batch, and its slot."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader, self._slots = reader, WorkerSlots()

    def __getitem__(self, request: tuple[list[Key], int | None]) -> Fetched:
        keys, slot = request
        if slot is None:
            fetched = self._reader[keys]
        else:
            try:
                fetched = self._reader.read(keys, partial(self._slots.allocate, slot))
                self._slots.hand_over(fetched, slot)
            except NoRoomError as error:
                fetched = no_room(error)
            fetched.asked_slot = slot
        info = get_worker_info()
        if info is not None:
            fetched.worker = info.id
        return fetched


class _Order(torch.utils.data.Sampler[tuple[list[Key], int | None]]):
    """Yields the keys of batches and their slots; each pass iterates again."""

    def __init__(self, keys: Callable[[], Iterator[list[Key]]], slots: Slots | None) -> None:
        self._keys, self._slots = keys, slots

    def __iter__(self) -> Iterator[tuple[list[Key], int | None]]:
        if self._slots is None:
            return zip(self._keys(), itertools.repeat(None), strict=False)
        return zip(self._keys(), self._slots.turns(), strict=False)


class _SlottedPass(Iterator[Fetched]):
    def __init__(self, fetched: Iterator[Fetched], slots: Slots) -> None:
        self._fetched, self._slots = fetched, slots

    def __next__(self) -> Fetched:
        fetched = next(self._fetched)
        self._slots.take(fetched)
        return fetched

    def end(self) -> None:
        end_workers(self._fetched)
        self._slots.close()


def _identity(fetched: Any) -> Any:
    return fetched


class LoaderCores:
    """Divides the cores of a rank between its loader processes and its training process, which on a CPU computes on
    all. On a GPU each loader process has its own core, from the last one down, and training has the others, if there
    are enough.
    """

    _divided: ClassVar[list[int] | None] = None  # All cores of the rank, while its training process uses only some.

    def __init__(self) -> None:
        self.all = LoaderCores._divided or by_physical_core(os.sched_getaffinity(0))

    def of_worker(self, worker: int, *, spares_first: bool) -> int:
        """Returns the core of a loader process; with `spares_first` not the first one, unless it is the only one."""
        cores = self.all
        if spares_first and len(cores) > 1:
            cores = cores[1:]
        return cores[-1 - worker % len(cores)]

    def bind_training(self, workers: int) -> None:
        """Binds the calling thread, and threads that it starts, to the cores without loader processes, if any."""
        if 0 < workers < len(self.all):
            LoaderCores._divided = self.all
            os.sched_setaffinity(0, self.all[:-workers])

    def pin_worker(self, worker: int, *, spares_first: bool) -> None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {self.of_worker(worker, spares_first=spares_first)})

    @classmethod
    def release(cls) -> None:
        if cls._divided is not None:
            os.sched_setaffinity(0, cls._divided)
            cls._divided = None


def fetch_batches(
    batches: BatchReader,
    keys: Callable[[], Iterator[list[Key]]],
    *,
    loader_workers: int,
    prefetch_batches: int,
    pin_memory: bool,
    persistent: bool,
    in_slots: bool = True,
) -> Callable[[], Iterator[Fetched]]:
    """Returns a function that begins a pass over `keys`, read by loader processes or, without them, on demand. With
    `in_slots`, tensors must be kept until their copy to a GPU is done: their memory is used again when freed.
    """
    if not loader_workers:

        def fetch(batch_keys: list[Key]) -> Fetched:
            fetched = batches[batch_keys]
            if pin_memory:
                fetched.pin_memory()
            return fetched

        return lambda: map(fetch, keys())
    context = LoaderContext()  # a fork server: forking after MPI, InfiniBand or CUDA have started is not safe
    # The first module ends loaders with this process, whose main thread starts them; the second imports torch once.
    os.environ[_RANK_VARIABLE] = str(os.getpid())
    context.set_forkserver_preload(["dlbench.node.data.end_with_rank", __name__])
    slots = Slots(loader_workers, pin_memory=pin_memory) if in_slots else None
    loader: DataLoader[Fetched] = DataLoader(
        _Batches(batches),
        batch_size=None,
        sampler=_Order(keys, slots),
        num_workers=loader_workers,
        collate_fn=_identity,
        pin_memory=pin_memory and slots is None,
        worker_init_fn=partial(LoaderCores().pin_worker, spares_first=pin_memory),
        multiprocessing_context=context,
        prefetch_factor=prefetch_batches,
        persistent_workers=persistent,
        # torch draws a seed when loader processes start; from its global generator it would change dropout.
        generator=torch.Generator(),
    )
    if slots is None:
        return lambda: iter(loader)
    return lambda: _SlottedPass(iter(loader), slots)


@dataclass(frozen=True)
class Read:
    """The result of waiting for a batch."""

    item: Fetched | None  # None at the end of the pass, or with an error
    waited_ns: int
    error: Exception | None  # raised when the batch is handed out

    @property
    def is_good(self) -> bool:
        """True if handing it out raises nothing."""
        return self.item is not None and self.item.lacks is None and not self.item.must_stop


class Ledger:
    """Records failures, conversions and times of reading."""

    def __init__(self, loader_workers: int, on_taken: Callable[[Fetched], None] = lambda fetched: None) -> None:
        self._loader_workers, self._on_taken = loader_workers, on_taken
        self.failures: list[str] = []
        self.num_converted = 0
        self.converted: dict[str, None] = {}
        self.recent: deque[ReadSpan] = deque(maxlen=RECENT_READS)
        self.num_taken = 0  # batches that were handed out
        self.epochs: list[EpochReads] = []

    def next(self, fetched: Iterator[Fetched]) -> Fetched | None:
        return self.hand_out(self.read(fetched))

    def read(self, fetched: Iterator[Fetched]) -> Read:
        """Waits for the next batch, which does not count before it is handed out."""
        begun_ns = time.monotonic_ns()
        error: Exception | None = None
        item: Fetched | None = None
        try:
            item = next(fetched, None)
        except (RuntimeError, OSError, EOFError) as failure:
            # torch puts "Caught" before exceptions of loader processes. Other errors mean that a process died, seen as
            # a signal, a closed socket or a missing one.
            error = failure
            if self._loader_workers and not str(failure).startswith("Caught "):
                # Its pipe may be closed before its end is known.
                reason = " ".join(str(failure).split()) or "it was killed, or crashed"
                error = RunError(f"a loader process of the rank ended: {reason}")
                error.__cause__ = failure
        except DlbenchError as failure:
            error = failure
        return Read(item, time.monotonic_ns() - begun_ns, error)

    def hand_out(self, read: Read) -> Fetched | None:
        """Counts what was read and returns its batch; None at the end of the pass."""
        if read.error is not None:
            raise read.error
        item = read.item
        if item is None:
            return None
        self.recent.append(
            ReadSpan(number=self.num_taken, worker=item.worker, start_ns=item.start_ns, end_ns=item.end_ns)
        )
        self.num_taken += 1
        if item.visited:  # a batch without a readable sample belongs to no epoch
            epoch = item.visited[0][0]
            if not self.epochs or self.epochs[-1].epoch != epoch:
                self.epochs.append(EpochReads(epoch))
            self.epochs[-1].add(item)
            self.epochs[-1].wait_ns += read.waited_ns
        self.failures += item.failures
        self.num_converted += len(item.converted)
        for text in item.converted[: _NAMED_CONVERSIONS - len(self.converted)]:
            self.converted[text] = None
        if item.lacks is not None:
            raise EnvironmentLacksError(item.lacks)
        if item.error is not None:
            raise UserError(item.error)
        self._on_taken(item)
        return item


class _OneEpochEach:
    """Divides the keys of an endless order into passes of one epoch; each call returns the next pass."""

    def __init__(self, batches: Iterator[list[Key]]) -> None:
        self._batches = batches
        self._next: list[Key] | None = None
        self._given = 0
        self.ends_after: int | None = None  # Batches of all passes after which this one ends; None until it is known.

    def __call__(self) -> Iterator[list[Key]]:
        self.ends_after = None
        keys = self._next or next(self._batches)
        while True:
            self._next = next(self._batches)
            self._given += 1
            is_last = self._next[0][0] != keys[0][0]
            if is_last:
                self.ends_after = self._given
            yield keys
            if is_last:
                return
            keys = self._next


def end_workers(iterator: object) -> None:
    """Ends the loader processes of a pass over batches, if it has any."""
    if isinstance(iterator, _SlottedPass):
        iterator.end()
        return
    # torch ends the processes with the last reference to its iterator, which the traceback of an error may keep; it has
    # no public method for it.
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


class BatchSource:
    """Endless batches of one rank on the CPU (`build.Batch`); these methods are for a source that reads no files."""

    num_samples: int  # in the data set, or in a synthetic pool
    order: ShardedOrder | None = None  # order of reading; None without files
    audit: ReadAudit | None = None  # checks the samples that were read; None without files
    exchange: SampleExchange | None = None  # exchange of samples between ranks; stays open when the source is closed

    @property
    def failures(self) -> list[str]:
        """File and reason of each unreadable sample so far; repeated if it is read again."""
        return []

    def sample_name(self, index: int) -> str:
        """Returns file, and place in it, of one sample; synthetic samples have none."""
        return f"sample {index}"

    def recent_reads(self) -> list[ReadSpan]:
        """Returns when the last `RECENT_READS` batches were read."""
        return []

    @property
    def is_between_epochs(self) -> bool:
        """True if the last batch of an epoch was handed out and none of the next is read (read epoch by epoch)."""
        return False

    def begin_epoch(self) -> None:
        """Begins to read the next epoch if `is_between_epochs`; the next batch does so, too."""

    def epoch_reads(self) -> list[EpochReads]:
        """Returns totals of the batches handed out so far, by epoch."""
        return []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        raise NotImplementedError

    def ahead(self) -> Batch | None:
        """Returns one more of the next batches without handing it out; None if it must not be read yet."""
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """Returns a description of the data and of failures, ready for JSON, also after `close`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends loader processes and closes files; a second call does nothing."""


class LoadedSource(BatchSource):
    """Endless batches of one rank from a DataReader. `on_bad_sample` stops the run, or takes the next sample of the
    data set instead, or with `is_held` (the reader has only samples of this rank) one of the same batch. With
    `epoch_by_epoch` nothing is prefetched across the border of epochs. `arrange` is the last step of making a batch.
    """

    def __init__(  # noqa: PLR0913  (each option of reading is an argument)
        self,
        reader: DataReader,
        order: ShardedOrder,
        *,
        loader_workers: int,
        prefetch_batches: int = 2,
        on_bad_sample: Literal["stop", "skip"],
        pin_memory: bool = False,
        in_slots: bool = True,
        is_held: bool = False,
        audit: ReadAudit | None = None,
        exchange: SampleExchange | None = None,
        epoch_by_epoch: bool = False,
        arrange: Callable[[Batch], Batch] = dict,
    ) -> None:
        self.order, self.audit, self.exchange = order, audit, exchange
        self._order = order
        self.num_samples = reader.num_samples
        self._reader, self._loader_workers = reader, loader_workers
        self._ledger = Ledger(loader_workers, self._taken)
        self._epochs = _OneEpochEach(order.batches()) if epoch_by_epoch else None
        self._begin_pass = fetch_batches(
            BatchReader(reader, on_bad_sample, within_batch=is_held, arrange=arrange),
            self._epochs or order.batches,
            loader_workers=loader_workers,
            prefetch_batches=prefetch_batches,
            pin_memory=pin_memory,
            persistent=epoch_by_epoch,
            in_slots=in_slots,
        )
        self._fetched: Iterator[Fetched] | None = self._begin_pass()
        if pin_memory:
            LoaderCores().bind_training(loader_workers)
        self._ahead: deque[Read] = deque()  # batches that were read and not yet handed out

    @property
    def failures(self) -> list[str]:
        return self._ledger.failures

    @property
    def is_between_epochs(self) -> bool:
        return self._epochs is not None and self._epochs.ends_after == self._ledger.num_taken

    def begin_epoch(self) -> None:
        if self.is_between_epochs:
            self._fetched = self._begin_pass()

    def epoch_reads(self) -> list[EpochReads]:
        return self._ledger.epochs

    def recent_reads(self) -> list[ReadSpan]:
        return list(self._ledger.recent)

    def __next__(self) -> Batch:
        if self._fetched is None:
            raise RunError("a batch was requested from a closed data source")
        if self.exchange is not None:
            self.exchange.require_well()
        self.begin_epoch()
        read = self._ahead.popleft() if self._ahead else self._ledger.read(self._fetched)
        item = self._ledger.hand_out(read)
        assert item is not None  # the order has no end
        return item.batch

    def ahead(self) -> Batch | None:
        is_last = self._epochs is not None and self._epochs.ends_after == self._ledger.num_taken + len(self._ahead)
        if self._fetched is None or is_last or (self._ahead and not self._ahead[-1].is_good):
            return None
        read = self._ledger.read(self._fetched)
        self._ahead.append(read)
        return None if read.item is None or not read.is_good else read.item.batch

    def _taken(self, fetched: Fetched) -> None:
        if self.exchange is not None:
            if fetched.not_arrived is not None:
                (epoch, index), waited_s = fetched.not_arrived
                raise self.exchange.missing(epoch, index, waited_s)
            self.exchange.consumed(self._order.position(self._ledger.num_taken).epoch)
        if self.audit is not None:
            self.audit.take(fetched)

    def sample_name(self, index: int) -> str:
        return self._reader.name(index)

    def describe(self) -> dict[str, object]:
        return {
            **self._reader.describe(),
            "num_samples": self._reader.num_samples,
            "batches_per_epoch": self._order.batches_per_epoch,
            "dropped_per_epoch": self._order.dropped_per_epoch,
            "loader_workers": self._loader_workers,
            "bad_samples": len(self.failures),
            "converted_samples": self._ledger.num_converted,
            "converted_names": list(self._ledger.converted),
        }

    def close(self) -> None:
        iterator, self._fetched = self._fetched, None
        self._ahead.clear()
        LoaderCores.release()
        end_workers(iterator)
        self._reader.close()


class EvaluationSource:
    """One rank's share of the first `num_samples` of a validation set, pass by pass, by the same loader processes."""

    def __init__(  # noqa: PLR0913  (each option of reading is an argument)
        self,
        reader: DataReader,
        *,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        loader_workers: int,
        prefetch_batches: int = 2,
        on_bad_sample: Literal["stop", "skip"],
        pin_memory: bool = False,
        cut: Callable[[Batch], Batch] = dict,
    ) -> None:
        """`cut` returns the part of a batch that this rank computes."""
        self.num_samples = num_samples
        self._reader, self._loader_workers = reader, loader_workers
        self._ledger = Ledger(loader_workers)
        self._iterator: Iterator[Fetched] | None = None
        keys = partial(evaluation_batches, num_samples, batch_size=batch_size, rank=rank, world_size=world_size)
        self._begin_pass = fetch_batches(
            BatchReader(reader, on_bad_sample, replace=False, arrange=cut),
            keys,
            loader_workers=loader_workers,
            prefetch_batches=prefetch_batches,
            pin_memory=pin_memory,
            persistent=True,
            in_slots=False,  # an evaluation does not wait for its copies
        )

    @property
    def failures(self) -> list[str]:
        return self._ledger.failures

    def batches(self) -> Iterator[Batch]:
        """Yields the batches of one pass, except those without a readable sample."""
        self._iterator = self._begin_pass()
        while (item := self._ledger.next(self._iterator)) is not None:
            if item.batch:
                yield item.batch

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)
        self._reader.close()
