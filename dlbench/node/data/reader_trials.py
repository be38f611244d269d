"""Chooses the number of reader processes and of prefetched batches by trials before training, on all ranks at the same
time. The smallest number is chosen that is not clearly slower than the best on the slowest rank; 0 readers are then
compared with 1 while the training process computes, which only a separate process can overlap.
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
from dlbench.node.data.reader import BatchReader, DataReader, Fetched, Key
from dlbench.records.data_path import ReaderTrial
from dlbench.specs.plan import MOST_PREFETCH_BATCHES

_LONGEST = 8  # Longest duration of a measurement over the planned seconds.
# Cores that training on a GPU needs: a thread that launches kernels (torch/csrc/autograd/engine.cpp), and one that
# copies; with an exchange also NCCL's proxy, which polls (nccl/src/proxy.cc), and the thread that schedules it.
TRAINING_CORES = 2
TRAINING_CORES_WITH_EXCHANGE = 4
ROUNDS = 3
SECONDS = 0.4  # Duration of one trial.
CLEARLY = 0.95  # A rate is clearly below the best if its median is below this share of it, and every round is below.
USUAL_PREFETCH = 2  # Batches that each reader prefetches in trials of the number of readers.


def training_cores(device: torch.device, ranks: int) -> int | None:
    """Returns the cores of a rank to which no reader is bound; None on a CPU, where readers share all cores."""
    if device.type == "cpu":
        return None
    return TRAINING_CORES if ranks == 1 else TRAINING_CORES_WITH_EXCHANGE


def most_readers(cores: int, reserved: int | None) -> int:
    """Returns the most reader processes of the automatic choice; `reserved` is a result of `training_cores`."""
    return cores if reserved is None else max(1, cores - reserved)


@dataclass(frozen=True)
class Readers:
    """The reader processes of a rank."""

    loader_workers: int  # reader processes; 0 if the training process reads
    prefetch_batches: int  # batches that each process prefetches; 0 without any


@dataclass(kw_only=True)
class Throughput(ReadSums):
    """Totals of reading for some seconds."""

    seconds: float = 0.0
    ended: bool = False  # True if all samples of the order were read

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 if nothing was read."""
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
    """Provides a function that returns the next batch, None at the end; the readers end with the context."""
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
    """Takes batches for `seconds`, at least two of each reader, not counting those in the queues at the start. `ready`
    is called before the clock starts, `beat` for each batch, `compute` between two; `longest` is a multiple of
    `seconds`.
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
        """Waits for all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on every rank."""


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """Data, limits and functions of a rank that trials need."""

    reader: DataReader
    keys: Sequence[list[Key]]  # batches of this rank for trials, in order, repeated if there are too few
    most_readers: int  # largest number of readers that is tried
    ranks: Ranks
    device: torch.device
    on_bad_sample: Literal["stop", "skip"]
    beat: Callable[[str], None]
    empty_cache: Callable[[], object] | None = None  # called by all ranks before samples are read again, if not None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen readers, with the trials that led to them."""

    readers: Readers
    of_workers: tuple[ReaderTrial, ...]  # trials of the number of readers; empty if the plan gives it
    of_prefetch: tuple[ReaderTrial, ...]  # trials of prefetched batches; empty if the plan gives them, or no readers
    seconds: float
    again: bool  # True if samples had to be read more than once

    @property
    def trials(self) -> tuple[ReaderTrial, ...]:
        return self.of_workers + self.of_prefetch


def choose(context: TrialContext, workers: int | Literal["auto"], prefetch: int | Literal["auto"]) -> Choice:
    """Chooses readers by trials; called by all ranks, with the same result."""
    start = time.monotonic()
    trials = Trials(context)
    num_of_workers = 0
    ahead = USUAL_PREFETCH if prefetch == "auto" else prefetch
    if workers == "auto":
        best = trials.best([Readers(0, 0), *(Readers(n, ahead) for n in _doubled(context.most_readers))])
        if best.loader_workers == 0:
            best = trials.best([best, Readers(1, ahead)], computing=True)
        workers = best.loader_workers
        num_of_workers = len(trials.results)
    if workers and prefetch == "auto":
        ahead = trials.best([Readers(workers, n) for n in _doubled(MOST_PREFETCH_BATCHES)]).prefetch_batches
    if not workers:
        ahead = 0
    return Choice(
        readers=Readers(workers, ahead),
        of_workers=tuple(trials.results[:num_of_workers]),
        of_prefetch=tuple(trials.results[num_of_workers:]),
        seconds=time.monotonic() - start,
        again=trials.again,
    )


def _doubled(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... and `largest`."""
    counts = [1]
    while 2 * counts[-1] <= largest:
        counts.append(2 * counts[-1])
    if counts[-1] != largest:
        counts.append(largest)
    return counts


class Trials:
    """Runs trials; keeps their results."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.results: list[ReaderTrial] = []
        self.again = False
        self._next = 0
        self._batch_s = 0.0

    def best(self, candidates: Sequence[Readers], *, computing: bool = False) -> Readers:
        """Returns the first of the candidates, cheapest first, that is not clearly slower than the best."""
        if len(candidates) == 1:
            return candidates[0]
        rates: list[list[float]] = [[] for _ in candidates]
        stand_in = self._stand_in() if computing else None
        for number in range(ROUNDS):
            # Each round begins with another candidate, so that warm caches do not always favour the same one.
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
        """Returns a function that occupies the training process like a step as long as reading a batch."""
        if self._context.device.type != "cpu":
            return lambda: time.sleep(self._batch_s)  # the host waits while the device computes
        matrix = torch.rand(256, 256)
        start, times = time.monotonic(), 0
        while time.monotonic() - start < 0.05:
            times += len(torch.mm(matrix, matrix)) // 256
        product_s = (time.monotonic() - start) / times
        # A fixed number of products, not a time, so that it takes longer if readers use its core.
        return lambda: [torch.mm(matrix, matrix) for _ in range(max(1, round(self._batch_s / product_s)))]


def chosen(rates: Sequence[Sequence[float]]) -> int:
    """Returns the index of the first candidate, cheapest first, that is not clearly slower than the best."""
    best = max(range(len(rates)), key=lambda place: statistics.median(rates[place]))

    def is_clearly_slower(values: Sequence[float]) -> bool:
        ratios = [rate / best_rate for rate, best_rate in zip(values, rates[best], strict=True) if best_rate > 0]
        return bool(ratios) and statistics.median(ratios) < CLEARLY and max(ratios) < 1

    return next(place for place, values in enumerate(rates) if place == best or not is_clearly_slower(values))
