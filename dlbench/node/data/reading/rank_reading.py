"""How one rank reads: readers and page cache are settled before training, then kept, then reported for the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dlbench.machine.storage import counts_reads
from dlbench.node.data.reader import SampleReader
from dlbench.node.data.reading.cache import CacheState, NodeCache
from dlbench.node.data.reading.epochs import read_epochs
from dlbench.node.data.reading.throughput import Readers
from dlbench.node.data.reading.trials import Choice, Ranks, Search, Surroundings, choose
from dlbench.node.data.sharding import ShardedOrder
from dlbench.records.data_path import ReadingResult
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec


class RestingSource(Protocol):
    """What a rest needs of a source of batches."""

    @property
    def is_between_epochs(self) -> bool:
        """Whether an epoch has been handed out and nothing of the next is read."""

    def begin_epoch(self) -> None:
        """Begins to read it."""


def planned_readers(data: DataSpec) -> Readers:
    """The readers of a plan that says how many.

    Raises:
        ValueError: it leaves that to measurement.
    """
    workers, prefetch = data.loader_workers, data.prefetch_batches
    if workers == "auto" or (prefetch == "auto" and workers):
        raise ValueError("data.loader_workers and data.prefetch_batches auto are settled by `RankReading`")
    return Readers(workers, 0 if not workers or prefetch == "auto" else prefetch)


class RankReading:
    """Readers and page cache of one rank. All ranks call the same methods in the same order.

    Args:
        data: of the workload; not synthetic.
        cores: of a rank.
        is_node_first: whether this rank acts for its node.
        ranks: all of them.
        device: where this rank computes.
        beat: told that something moves.
    """

    def __init__(
        self,
        data: DataSpec,
        *,
        cores: int,
        is_node_first: bool,
        ranks: Ranks,
        device: torch.device,
        beat: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._data, self._cores, self._acts = data, cores, is_node_first
        self._ranks, self._device, self._beat = ranks, device, beat
        self._choice: Choice | None = None
        self._counts = False
        self._cache: NodeCache | None = None
        self._states: dict[int, CacheState] = {}
        """By epoch."""
        self._batches_per_epoch = 0
        self._decode: object = None
        """What of a JPEG is decoded; None where the samples are none."""
        self.readers = Readers(0, 0)
        """What reads; from `settle` on."""

    def settle(self, reader: SampleReader, order: ShardedOrder, batch_size: int) -> Readers:
        """Makes the page cache as asked for and finds the readers; outside of any step.

        Args:
            reader: what this rank will read, opened.
            order: when.
            batch_size: samples of this rank in one batch.

        Raises:
            UserError, EnvironmentLacksError, RunError: a trial could not read, or not start its readers.
        """
        data, files = self._data, reader.files()
        self._batches_per_epoch = order.batches_per_epoch
        self._counts = all(self._ranks.gather(not files or counts_reads(files[0])))
        self._cache = NodeCache(files, data.cache, acts=self._acts, ranks=self._ranks, beat=self._beat)
        first = order.position(0).epoch
        state = self._cache.settle()
        if "auto" in (data.loader_workers, data.prefetch_batches) and data.loader_workers != 0:
            self._choice = self._chosen(reader, order, batch_size)
            if data.cache == "cold":
                state = self._cache.settle()  # what the trials read is cached now
        self._states[first] = state
        self._decode = reader.describe().get("decode")
        self.readers = planned_readers(data) if self._choice is None else self._choice.readers
        return self.readers

    def _chosen(self, reader: SampleReader, order: ShardedOrder, batch: int) -> Choice:
        data = self._data
        epoch = order.position(0).epoch
        # From the end of the epoch, whose samples training asks for last.
        mine = order.epoch(epoch)[::-1]
        keys = [
            [(epoch, int(index)) for index in mine[start : start + batch]]
            for start in range(0, len(mine) - len(mine) % batch, batch)
        ]
        around = Surroundings(
            reader=reader,
            keys=keys,
            cores=self._cores,
            ranks=self._ranks,
            device=self._device,
            on_bad_sample=data.on_bad_sample,
            beat=self._beat,
            empty_cache=self._empty if data.cache == "cold" else None,
        )
        return choose(around, data.loader_workers, data.prefetch_batches)

    def _empty(self) -> None:
        assert self._cache is not None
        self._cache.settle()

    @property
    def is_epoch_by_epoch(self) -> bool:
        """Whether each epoch begins with a cold cache, so that nothing may be read ahead across its border."""
        return self._data.cache == "cold"

    def rest(self) -> None:
        """Between two epochs, where each begins cold: empties the cache anew, when no rank reads any more."""
        assert self._cache is not None
        self._ranks.barrier()
        self._states[max(self._states) + 1] = self._cache.settle()

    def settings(self) -> list[Setting]:
        """What was asked of reading and what was in force."""
        data = self._data
        found = []
        if self._choice is not None and data.loader_workers == "auto":
            found.append(_measured("data.loader_workers", self._choice.of_workers, self._choice.again))
        if self._choice is not None and data.prefetch_batches == "auto":
            found.append(_measured("data.prefetch_batches", self._choice.of_prefetch, self._choice.again))
        if self._decode is not None:
            how = "rows below a crop are not decoded" if self._decode == "region" else "images are decoded whole"
            found.append(Setting(key="data.decode", requested=data.decode, effective=str(self._decode), evidence=how))
        if data.cache != "any":
            states = list(self._states.values())
            bad = next((state for state in states if not state.in_force), None)
            told = bad or states[0]
            effective_cache = data.cache if bad is None else "any" if bad.known else None
            found.append(Setting(key="data.cache", requested=data.cache, effective=effective_cache, evidence=told.told))
        return found

    def warnings(self) -> list[str]:
        """Where it is not known whether what was asked for was in force, or readers have too few cores."""
        told = []
        unknown = next((state for state in self._states.values() if not state.known), None)
        if unknown is not None:
            told.append(f"data.cache {self._data.cache}: whether it was in force cannot be told: {unknown.told}")
        workers = self.readers.loader_workers
        if self._device.type == "cuda" and workers >= self._cores:
            told.append(
                f"{workers} loader processes and the training process share {self._cores} "
                f"core{'s' if self._cores > 1 else ''}: give each rank {workers + 1} (layout.cores_per_rank), or lower "
                "data.loader_workers"
            )
        return told

    def result(self, told: Sequence[Sequence[dict[str, Any]]], step_s: Sequence[float]) -> ReadingResult:
        """For the record, on rank 0.

        Args:
            told: of each rank, its `EpochReads` as JSON gives them back.
            step_s: length of each step of rank 0, seconds.
        """
        states = list(self._states.values())
        bad = [state for state in states if not state.in_force]
        return ReadingResult(
            loader_workers=self.readers.loader_workers,
            prefetch_batches=self.readers.prefetch_batches,
            trials=self._choice.trials if self._choice else (),
            trials_s=self._choice.seconds if self._choice else 0.0,
            cache=(bad or states)[0].told,
            cache_in_force=not bad,
            cached_share=states[0].share,
            epochs=read_epochs(
                told,
                step_s,
                batches_per_epoch=self._batches_per_epoch,
                counts_storage=self._counts,
                cached_shares={epoch: state.share for epoch, state in self._states.items()},
            ),
        )


class EpochRest:
    """The rest between two epochs where each begins with a cold page cache, called by the training loop."""

    def __init__(self, reading: RankReading, source: RestingSource) -> None:
        self._reading, self._source = reading, source

    @property
    def is_due(self) -> bool:
        """Whether an epoch has ended; the same on all ranks after the same step."""
        return self._source.is_between_epochs

    def take(self) -> None:
        """Empties the cache; afterwards readers begin with the next epoch."""
        self._reading.rest()
        self._source.begin_epoch()


def _measured(key: str, search: Search | None, again: bool) -> Setting:
    """A setting that was found by measurement, with what was measured."""
    if search is None:
        return Setting(key=key, requested="auto", effective=None, evidence="no process reads ahead of the training one")
    name = key.partition(".")[2]
    tried = ", ".join(
        f"{getattr(trial, name)}: {trial.samples_per_s:.4g}{' beside computing' if trial.computing else ''}"
        for trial in search.trials
    )
    return Setting(
        key=key,
        requested="auto",
        effective=search.found,
        evidence="measured before training on all ranks at the same time, samples/s of the slowest rank with "
        f"{tried}; the smallest that is not clearly slower than the best"
        + ("; samples were read more than once for it" if again else ""),
    )
