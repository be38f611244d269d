"""Batches read from files: in the training process, or ahead of it in loader processes.

Loader processes come from a fork server, not from the training process itself: forking a process that has started
MPI, InfiniBand or CUDA is not safe (Horovod's own examples do the same). Epochs follow each other without a gap: the
processes read ahead across their border.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dlbench.errors import DlbenchError, EnvironmentLacksError, RunError, UserError
from dlbench.node.cores import by_physical_core
from dlbench.node.data.loader_transport import Batch, LoaderContext, MadeSlots, NoRoomError, Slots, no_room
from dlbench.node.data.read_audit import ReadAudit
from dlbench.node.data.reader import BatchReader, DataReader, Fetched, ReadSpan
from dlbench.node.data.sample_exchange import SampleExchange
from dlbench.node.data.sharding import Key, ShardedOrder, evaluation_batches
from dlbench.records.data_path import ReadEpoch
from dlbench.specs.system import Tier
from dlbench.specs.watch import MAX_WINDOW_STEPS

_RANK_VARIABLE = "DLBENCH_LOADERS_OF"
"""Names to `dlbench.node.data.end_with_rank`, in the fork server, whose loaders these are."""
_NAMED_CONVERSIONS = 20
RECENT_READS = 2 * MAX_WINDOW_STEPS
"""Batches of which is kept when they were read: the largest window, and what follows it in the warm-up."""


@dataclass(kw_only=True)
class ReadSums:
    """What was read for some batches."""

    batches: int = 0
    samples: int = 0
    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    storage_bytes: int | None = 0  # None where the kernel does not count for one of the readers
    fetch_ns: int = 0
    prepare_ns: int = 0

    def add(self, fetched: Fetched) -> None:
        self.batches += 1
        self.samples += len(fetched.visited)
        for tier, num in fetched.tier_bytes.items():
            self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + num
        if self.storage_bytes is not None:
            self.storage_bytes = None if fetched.storage_bytes is None else self.storage_bytes + fetched.storage_bytes
        self.fetch_ns += fetched.fetch_ns
        self.prepare_ns += fetched.prepare_ns


@dataclass
class EpochReads(ReadSums):
    """What one rank read of one epoch for the batches that it was given, without what was read ahead and never used."""

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
    """What all ranks read, epoch by epoch.

    `ranks`: of each rank, its `EpochReads` as JSON gives them back. `step_s`: length of each step of rank 0, seconds;
    the steps take the batches in order. `counts_storage`: whether the kernel is sure to count what comes from storage;
    otherwise it is taken to if any byte was counted. `cached_shares`: by epoch, share of the data set's pages in the
    page cache at its beginning, where looked at.
    """
    found, first = [], 0
    moved = any(epoch["storage_bytes"] for rank in ranks for epoch in rank)
    for number, own in enumerate(ranks[0]):
        everyone = [rank[number] for rank in ranks if number < len(rank)]
        tiers: dict[Tier, int] = {}
        for one in everyone:
            for tier, num in one["tier_bytes"].items():
                tiers[tier] = tiers.get(tier, 0) + num
        storage = [one["storage_bytes"] for one in everyone]
        is_counted = (counts_storage or moved) and None not in storage
        last = first + own["batches"]
        found.append(
            ReadEpoch(
                epoch=own["epoch"],
                is_whole=own["batches"] == batches_per_epoch,
                samples=sum(one["samples"] for one in everyone),
                tier_bytes=tiers,
                storage_bytes=sum(storage) if is_counted else None,
                fetch_s=sum(one["fetch_ns"] for one in everyone) / 1e9,
                prepare_s=sum(one["prepare_ns"] for one in everyone) / 1e9,
                wait_s=sum(one["wait_ns"] for one in everyone) / 1e9 / len(everyone),
                seconds=float(sum(step_s[first:last])),
                cached_share=cached_shares.get(own["epoch"]),
            )
        )
        first = last
    return tuple(found)


class _Batches(Dataset[Fetched]):
    """torch's view of a BatchReader: its "index" is the list of keys of one batch, and the slot that it goes to."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader, self._slots = reader, MadeSlots()

    def __getitem__(self, asked: tuple[list[Key], int | None]) -> Fetched:
        keys, slot = asked
        if slot is None:
            fetched = self._reader[keys]
        else:
            try:
                fetched = self._reader.read(keys, partial(self._slots.room, slot))
                self._slots.hand_over(fetched, slot)
            except NoRoomError as error:
                fetched = no_room(error)
            fetched.asked_slot = slot
        info = get_worker_info()
        if info is not None:
            fetched.worker = info.id
        return fetched


class _Order(torch.utils.data.Sampler[tuple[list[Key], int | None]]):
    """The keys of batches and their slots; called anew for each pass."""

    def __init__(self, keys: Callable[[], Iterator[list[Key]]], slots: Slots | None) -> None:
        self._keys, self._slots = keys, slots

    def __iter__(self) -> Iterator[tuple[list[Key], int | None]]:
        return zip(self._keys(), itertools.repeat(None) if self._slots is None else self._slots.turns(), strict=False)


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


def _as_it_is(fetched: Any) -> Any:
    return fetched


class RankCores:
    """The cores of a rank, shared out among its loader processes and its training process.

    On a CPU training computes on all of them. A GPU's training process needs few, but needs them at once: with more
    cores than loader processes each process has one of its own, from the last core down, and training the others.
    Hyper-threads of one physical core are next to each other, so that a process shares it with training at most once.
    """

    _shared_out: ClassVar[list[int] | None] = None  # All of the rank, while its training process keeps to some of them.

    def __init__(self) -> None:
        self.all = RankCores._shared_out or by_physical_core(os.sched_getaffinity(0))

    def of_worker(self, worker: int, *, spares_first: bool) -> int:
        """The core of a loader process; `spares_first`: never the first, if there is another."""
        cores = self.all[1:] if spares_first and len(self.all) > 1 else self.all
        return cores[-1 - worker % len(cores)]

    def keep_to_rest(self, workers: int) -> None:
        """Binds the calling thread, and those that it starts, to what loader processes leave, if they leave any."""
        if 0 < workers < len(self.all):
            RankCores._shared_out = self.all
            os.sched_setaffinity(0, self.all[:-workers])

    def pin_worker(self, worker: int, *, spares_first: bool) -> None:
        """Gives the calling loader process one thread and, where the rank has several cores, one of them."""
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {self.of_worker(worker, spares_first=spares_first)})

    @classmethod
    def release(cls) -> None:
        """The calling thread may run on all cores of the rank again."""
        if cls._shared_out is not None:
            os.sched_setaffinity(0, cls._shared_out)
            cls._shared_out = None


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
    """Begins a pass over `keys` each time: batches from loader processes or, without them, read when asked for.

    `in_slots`: the memory of a batch is used again when no tensor of it is left, so that a copy from it to a GPU must
    be waited for before; otherwise torch sees to that.
    """
    if not loader_workers:

        def fetch(wanted: list[Key]) -> Fetched:
            return batches[wanted].pin_memory() if pin_memory else batches[wanted]

        return lambda: map(fetch, keys())
    context = LoaderContext()
    # The first ends them with this process, whose main thread starts them; the second imports torch once for all.
    os.environ[_RANK_VARIABLE] = str(os.getpid())
    context.set_forkserver_preload(["dlbench.node.data.end_with_rank", __name__])
    slots = Slots(loader_workers, pin_memory=pin_memory) if in_slots else None
    loader: DataLoader[Fetched] = DataLoader(
        _Batches(batches),
        batch_size=None,
        sampler=_Order(keys, slots),
        num_workers=loader_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory and slots is None,
        worker_init_fn=partial(RankCores().pin_worker, spares_first=pin_memory),
        multiprocessing_context=context,
        prefetch_factor=prefetch_batches,
        persistent_workers=persistent,
        # torch draws a seed when loader processes start; from its global generator, it would shift dropout.
        generator=torch.Generator(),
    )
    return lambda: iter(loader) if slots is None else _SlottedPass(iter(loader), slots)


@dataclass(frozen=True)
class Read:
    """A batch that was waited for."""

    item: Fetched | None  # None at the end of the pass, or with an error
    waited_ns: int
    error: Exception | None  # raised where the batch is handed out

    @property
    def is_good(self) -> bool:
        """Whether handing it out raises nothing."""
        return self.item is not None and self.item.lacks is None and not self.item.is_lost


class Ledger:
    """What went wrong while reading, what was read in another form than it was stored in, and when."""

    def __init__(self, loader_workers: int, on_taken: Callable[[Fetched], None] = lambda fetched: None) -> None:
        self._on_taken = on_taken
        self.failures: list[str] = []
        self.num_converted = 0
        self.converted: dict[str, None] = {}
        self._loader_workers = loader_workers
        self.recent: deque[ReadSpan] = deque(maxlen=RECENT_READS)
        self.num_taken = 0  # batches that were handed out
        self.epochs: list[EpochReads] = []

    def next(self, fetched: Iterator[Fetched]) -> Fetched | None:
        """The next batch with what is known of its reading; None at the end of the pass. Errors as of `hand_out`."""
        return self.hand_out(self.read(fetched))

    def read(self, fetched: Iterator[Fetched]) -> Read:
        """Waits for the next batch; nothing of it counts before it is handed out."""
        begun_ns = time.monotonic_ns()
        error: Exception | None = None
        item: Fetched | None = None
        try:
            item = next(fetched, None)
        except (RuntimeError, OSError, EOFError) as failure:
            # torch begins what a loader process itself raised with "Caught"; all else is the process's death, seen as
            # a signal, a closed socket or a missing one.
            error = failure
            if self._loader_workers and not str(failure).startswith("Caught "):
                # The end of its pipe may be seen before its own.
                reason = " ".join(str(failure).split()) or "it was killed, or crashed"
                error = RunError(f"a loader process of the rank ended: {reason}")
                error.__cause__ = failure
        except DlbenchError as failure:
            error = failure
        return Read(item, time.monotonic_ns() - begun_ns, error)

    def hand_out(self, read: Read) -> Fetched | None:
        """What was read, which counts from now on; None at the end of the pass."""
        if read.error is not None:
            raise read.error
        item = read.item
        if item is None:
            return None
        self.recent.append(
            ReadSpan(number=self.num_taken, worker=item.worker, start_ns=item.start_ns, end_ns=item.end_ns)
        )
        self.num_taken += 1
        if item.visited:  # one without a readable sample belongs to no epoch
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
    """The keys of an endless order in passes of one epoch each; called anew for each pass."""

    def __init__(self, batches: Iterator[list[Key]]) -> None:
        self._batches = batches
        self._next: list[Key] | None = None
        self._given = 0
        self.ends_after: int | None = None
        """Batches, of all passes, after which the present pass ends; None until that is known."""

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
    # torch ends the processes when the last reference to its iterator goes, which the traceback of an error may hold;
    # it has no public call for doing so now.
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


class BatchSource:
    """Batches of one rank on the CPU, without end: epochs follow each other. What is here is of a source that reads
    nothing.

    The names and shapes in a batch are those of `dlbench.node.models.build.Batch`.
    """

    num_samples: int  # in the data set, or in a synthetic pool
    order: ShardedOrder | None = None  # what this rank reads when; None where nothing is read
    audit: ReadAudit | None = None  # who read what; None where nothing is read
    exchange: SampleExchange | None = None
    """Brings samples of other ranks; None where nothing is exchanged. Stays open when the source is closed."""

    @property
    def failures(self) -> list[str]:
        """File and reason of each unreadable sample met so far; a file met twice is there twice."""
        return []

    def sample_name(self, index: int) -> str:
        """File, and place in it, of one sample; made samples have none."""
        return f"sample {index}"

    def recent_reads(self) -> list[ReadSpan]:
        """When the last `RECENT_READS` batches were read."""
        return []

    @property
    def is_between_epochs(self) -> bool:
        """Whether, read epoch by epoch, the last batch of one has been handed out and none of the next is read."""
        return False

    def begin_epoch(self) -> None:
        """Begins to read the next epoch, where `is_between_epochs`; asking for a batch does it, too."""

    def epoch_reads(self) -> list[EpochReads]:
        """What was read for the batches handed out so far, epoch by epoch."""
        return []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; blocks until it is read."""
        raise NotImplementedError

    def ahead(self) -> Batch | None:
        """The batch after those that were handed out or looked at, without handing it out: to be copied ahead.

        Blocks until it is there; nothing counts as read by it. None: the next cannot be read, which `next` will say, or
        is of an epoch that is not to begin yet.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """What was read and what went wrong, for the record; ready for JSON, also after `close`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends loader processes and closes files; twice does no harm."""


class LoadedSource(BatchSource):
    """Endless batches of one rank from a DataReader.

    `on_bad_sample`: stop the run, or take the next sample of the data set instead. `in_slots`: see `fetch_batches`.
    `is_held`: whether the reader has this rank's samples alone: then one of the same batch is taken instead. `audit`:
    given everything that is handed out. `exchange`: brings samples of other ranks, and is given how far training is;
    its owner closes it. `epoch_by_epoch`: read nothing ahead across the border of epochs; what comes before the next
    epoch is read can be done where `is_between_epochs` says so. `arrange`: what is done last with each batch, where it
    is read.
    """

    def __init__(
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
            RankCores().keep_to_rest(loader_workers)
        self._looked: deque[Read] = deque()  # read, and not handed out yet

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
            raise RunError("a batch was asked for from a closed data source")
        if self.exchange is not None:
            self.exchange.require_well()
        self.begin_epoch()
        item = self._ledger.hand_out(self._looked.popleft() if self._looked else self._ledger.read(self._fetched))
        assert item is not None  # the order has no end
        return item.batch

    def ahead(self) -> Batch | None:
        is_last = self._epochs is not None and self._epochs.ends_after == self._ledger.num_taken + len(self._looked)
        if self._fetched is None or is_last or (self._looked and not self._looked[-1].is_good):
            return None
        self._looked.append(self._ledger.read(self._fetched))
        item = self._looked[-1].item
        return item.batch if item is not None and self._looked[-1].is_good else None

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
        """The reader's description, plus how the data set is dealt out and what went wrong so far; ready for JSON."""
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
        self._looked.clear()
        RankCores.release()
        end_workers(iterator)
        self._reader.close()


class EvaluationSource:
    """One rank's share of a validation set, pass by pass; loader processes stay between passes.

    `num_samples`: how many samples, from the first on, are evaluated over all ranks. `batch_size`: of one batch;
    the last of a pass may be smaller. `on_bad_sample`: stop the run, or leave the sample out.
    """

    def __init__(
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
    ) -> None:
        self.num_samples = num_samples
        self._reader, self._loader_workers = reader, loader_workers
        self._ledger = Ledger(loader_workers)
        self._iterator: Iterator[Fetched] | None = None
        keys = partial(evaluation_batches, num_samples, batch_size=batch_size, rank=rank, world_size=world_size)
        self._begin_pass = fetch_batches(
            BatchReader(reader, on_bad_sample, replace=False),
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
        """One pass; a batch without a readable sample is passed over. Errors as of `LoadedSource`."""
        self._iterator = self._begin_pass()
        while (item := self._ledger.next(self._iterator)) is not None:
            if item.batch:
                yield item.batch

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)
        self._reader.close()
