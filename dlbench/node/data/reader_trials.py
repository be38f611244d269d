"""How many readers, and how far ahead they read: tried before training and chosen by what was measured.

All ranks try the same at the same time, because they share cores, disks and the page cache. Each trial reads samples
that no trial before it has read, from the end of the rank's first epoch, as long as there are any. Trials take turns,
round by round, so that a disturbance meets all of them; what counts is the slowest rank, since it holds up the others.

First the number of reader processes: 0, 1, 2, 4, ... up to what `most_readers` allows, batches being taken as fast as
they come.
Of these the smallest is chosen that is not clearly slower than the best. Should that be 0, it is tried once more
against 1 with a stand-in for training between batches, as long as reading a batch takes: only a process of its own can
read meanwhile, if there is a core for it. Then, likewise, the batches that each reads ahead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from dlbench.node.data.loader import Ledger, ReadSums, end_workers, fetch_batches
from dlbench.node.data.reader import BatchReader, DataReader, Fetched
from dlbench.node.data.sharding import Key
from dlbench.records.data_path import ReaderTrial
from dlbench.specs.plan import MOST_PREFETCH_BATCHES

_LONGEST = 8  # times the wanted seconds after which a measurement ends with what it has
TRAINING_CORES = 2
"""Cores that training on a GPU keeps for itself. Of its threads two are busy at a time: the main thread or autograd's
(torch/csrc/autograd/engine.cpp: one a device), which launch kernels, and one that copies, or that writes a checkpoint.
"""
TRAINING_CORES_WITH_EXCHANGE = 4
"""And where gradients are exchanged: also NCCL's proxy, which polls while it sends (nccl/src/proxy.cc), and the thread
that orders the exchange (Horovod's background thread, gloo's, dlbench's own)."""
ROUNDS = 3
SECONDS = 0.4  # of one trial
CLEARLY = 0.95
"""A rate is clearly below the best if its median is below this share of it, and if it is below in every round."""
USUAL_PREFETCH = 2  # batches read ahead while the number of readers is looked for


def training_cores(device: torch.device, ranks: int) -> int | None:
    """Cores of a rank that no reader is to be bound to; None on a CPU.

    There training computes on all cores of its rank, and readers share them: they stand still once their queues are
    full, so that a core kept from them would idle while batches are missing, and one kept from training all the time.
    """
    if device.type == "cpu":
        return None
    return TRAINING_CORES if ranks == 1 else TRAINING_CORES_WITH_EXCHANGE


def most_readers(cores: int, training_cores: int | None) -> int:
    """Reader processes that the automatic choice tries at most; `kept`: by `training_cores`."""
    return cores if training_cores is None else max(1, cores - training_cores)


@dataclass(frozen=True)
class Readers:
    """The reader processes of a rank."""

    loader_workers: int  # reader processes; 0: the training process itself
    prefetch_batches: int  # batches that each reads ahead; 0 where there is none


@dataclass(kw_only=True)
class Throughput(ReadSums):
    """Totals of reading for some seconds."""

    seconds: float = 0.0
    ended: bool = False  # whether the order came to its end

    @property
    def samples_per_s(self) -> float:
        """0 where nothing was read."""
        return self.samples / self.seconds if self.seconds else 0.0


@contextmanager
def reading(
    reader: DataReader,
    keys: Callable[[], Iterator[list[Key]]],
    readers: Readers,
    *,
    on_bad_sample: Literal["stop", "skip"],
    pin_memory: bool = False,
) -> Iterator[Callable[[], Fetched | None]]:
    """The next batch each time it is called, None at the end of the order; the readers end with the context."""
    begin_pass = fetch_batches(
        BatchReader(reader, on_bad_sample),
        keys,
        loader_workers=readers.loader_workers,
        prefetch_batches=max(1, readers.prefetch_batches),
        pin_memory=pin_memory,
        persistent=False,
    )
    ledger, iterator = Ledger(readers.loader_workers), begin_pass()
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
    """Takes batches for some seconds.

    What queues hold when the clock starts was read before: as many batches are taken first and not counted.
    `readers`: that read; says how much their queues hold. `seconds`: to measure for; at least two batches of each
    reader are taken. `compute`: what the taker does between two batches; None: nothing. `ready`: called when the queues
    are empty and the clock is about to start. `longest`: times the seconds after which it ends with what it has; None:
    it does not.
    """
    measured = Throughput()
    for _ in range(max(1, readers.loader_workers * readers.prefetch_batches)):
        beat()
        if take() is None:
            measured.ended = True
            break
    ready()
    least_batches = 2 * max(1, readers.loader_workers)
    start = time.monotonic()
    while not measured.ended:
        measured.seconds = time.monotonic() - start
        is_late = longest is not None and measured.seconds >= longest * seconds
        if is_late or (measured.seconds >= seconds and measured.batches >= least_batches):
            break
        beat()
        if compute is not None:
            compute()
        item = take()
        if item is None:
            measured.ended = True
        else:
            measured.add(item)
            measured.seconds = time.monotonic() - start
    return measured


class Ranks(Protocol):
    """All ranks of the run; an engine."""

    def barrier(self) -> None:
        """Returns when every rank is here."""

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank."""


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """Data, limits and functions of a rank that trials need."""

    reader: DataReader
    keys: Sequence[list[Key]]  # batches of this rank to be read, in order; when all have been, it begins anew
    most_readers: int  # that are tried
    ranks: Ranks
    device: torch.device
    on_bad_sample: Literal["stop", "skip"]
    beat: Callable[[str], None]
    empty_cache: Callable[[], object] | None = None
    """Called by all ranks before samples are read a second time; None: they need not be cold."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen readers, with the trials that led to them."""

    readers: Readers
    of_workers: tuple[ReaderTrial, ...]  # Of the number of reader processes; none where that was given.
    of_prefetch: tuple[ReaderTrial, ...]  # Of what they read ahead; none where that was given, or there are none.
    seconds: float
    again: bool  # whether samples had to be read more than once

    @property
    def trials(self) -> tuple[ReaderTrial, ...]:
        return self.of_workers + self.of_prefetch


def choose(context: TrialContext, workers: int | Literal["auto"], prefetch: int | Literal["auto"]) -> Choice:
    """Measures and chooses; called by all ranks, and the same on all of them."""
    start = time.monotonic()
    trials = Trials(context)
    num_of_workers = 0
    ahead = USUAL_PREFETCH if prefetch == "auto" else prefetch
    if workers == "auto":
        best = trials.best([Readers(n, ahead if n else 0) for n in (0, *_doubled(context.most_readers))])
        if best.loader_workers == 0:
            best = trials.best([best, Readers(1, ahead)], computing=True)
        workers = best.loader_workers
        num_of_workers = len(trials.results)
    if workers and prefetch == "auto":
        ahead = trials.best([Readers(workers, n) for n in _doubled(MOST_PREFETCH_BATCHES)]).prefetch_batches
    return Choice(
        readers=Readers(workers, ahead if workers else 0),
        of_workers=tuple(trials.results[:num_of_workers]),
        of_prefetch=tuple(trials.results[num_of_workers:]),
        seconds=time.monotonic() - start,
        again=trials.again,
    )


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    counts = [1]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return counts if counts[-1] == most else [*counts, most]


class Trials:
    """Runs trials; keeps their results."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.results: list[ReaderTrial] = []
        self.again = False
        self._next = 0
        self._batch_s = 0.0

    def best(self, candidates: Sequence[Readers], *, computing: bool = False) -> Readers:
        """The first of the candidates, in order of what they cost, that is not clearly slower than the best."""
        if len(candidates) == 1:
            return candidates[0]
        rates: list[list[float]] = [[] for _ in candidates]
        stand_in = self._stand_in() if computing else None
        for number in range(ROUNDS):
            # Each round begins with another, so that what grows warm does not always favour the same.
            for shift in range(len(candidates)):
                place = (number + shift) % len(candidates)
                rates[place].append(self._rate(candidates[place], stand_in))
        for readers, values in zip(candidates, rates, strict=True):
            self.results.append(
                ReaderTrial(
                    loader_workers=readers.loader_workers,
                    prefetch_batches=readers.prefetch_batches,
                    computing=computing,
                    samples_per_s=statistics.median(values),
                )
            )
        return candidates[chosen(rates)]

    def _rate(self, readers: Readers, stand_in: Callable[[], object] | None) -> float:
        context = self._context
        ends = self._next + max(1, readers.loader_workers) * (readers.prefetch_batches + 2) > len(context.keys)
        if any(context.ranks.gather(ends)) and self._next:
            self.again, self._next = True, 0
            if context.empty_cache is not None:
                context.empty_cache()
        activity = f"a trial of {readers.loader_workers} readers"
        with reading(context.reader, self._keys, readers, on_bad_sample=context.on_bad_sample) as take:
            measured: Throughput = throughput(
                take,
                readers,
                seconds=SECONDS,
                beat=lambda: context.beat(activity),
                compute=stand_in,
                ready=context.ranks.barrier,
            )
        if readers.loader_workers == 0 and measured.batches:
            self._batch_s = measured.seconds / measured.batches
        return min(float(rate) for rate in context.ranks.gather(measured.samples_per_s))

    def _keys(self) -> Iterator[list[Key]]:
        keys = self._context.keys
        while True:
            if self._next >= len(keys):
                self._next, self.again = 0, True
            self._next += 1
            yield keys[self._next - 1]

    def _stand_in(self) -> Callable[[], object]:
        """Something that keeps the training process as busy as a step that takes as long as reading a batch."""
        if self._context.device.type != "cpu":
            return lambda: time.sleep(self._batch_s)  # the device computes, and the host waits for it
        matrix = torch.rand(256, 256)
        start, times = time.monotonic(), 0
        while time.monotonic() - start < 0.05:
            times += len(torch.mm(matrix, matrix)) // 256
        product_s = (time.monotonic() - start) / times
        # A number, not a time: where readers take its core, it must take longer.
        return lambda: [torch.mm(matrix, matrix) for _ in range(max(1, round(self._batch_s / product_s)))]


def chosen(rates: Sequence[Sequence[float]]) -> int:
    """The place of the first candidate that is not clearly slower than the best.

    `rates`: of each candidate in each round, cheapest first.
    """
    best = max(range(len(rates)), key=lambda place: statistics.median(rates[place]))

    def is_clearly_slower(values: Sequence[float]) -> bool:
        ratios = [own / most for own, most in zip(values, rates[best], strict=True) if most > 0]
        return bool(ratios) and statistics.median(ratios) < CLEARLY and max(ratios) < 1

    return next(place for place, values in enumerate(rates) if place == best or not is_clearly_slower(values))
