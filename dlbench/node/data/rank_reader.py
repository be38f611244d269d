"""Reader processes and page cache of one rank: chosen before training and reported in the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import torch

from dlbench.machine.page_cache import COLD_AT_MOST, DROP_CACHES, WARM_AT_LEAST, cached_pages, evict, fill
from dlbench.machine.storage import counts_reads
from dlbench.node.data.loader import read_epochs
from dlbench.node.data.reader import DataReader
from dlbench.node.data.reader_trials import Choice, Ranks, Readers, TrialContext, choose, most_readers, training_cores
from dlbench.node.data.sharding import ShardedOrder, keys_of
from dlbench.records.data_path import ReaderTrial, ReadingResult
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec
from dlbench.units import counted

_TURN_S = 5.0  # Seconds after which ranks interrupt the work on the page cache to show that they are alive.

CacheRequest = Literal["any", "cold", "warm"]


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The state of the page cache for one data set."""

    requested: CacheRequest  # requested state
    share: float | None  # cached share of the data set's pages on the worst node; None if not known
    summary: str
    in_force: bool  # True if the requested state was reached
    is_known: bool = True  # False if that is not known; then `in_force` is false


@dataclass(frozen=True)
class NodeCache:
    """Controls the page caches of all nodes, for one data set."""

    files: Sequence[Path]  # Files of the data set; empty if samples are in memory.
    requested: CacheRequest
    acts: bool  # True if this rank acts for its node.
    ranks: Ranks
    beat: Callable[[str], None]

    def prepare(self) -> CacheState:
        """Evicts or reads in the data set and checks the result, which is equal on all ranks; called by all ranks."""
        state = self._try()
        for _ in range(2):
            # Pages in a core's own list are evicted only the second time.
            if self.requested != "cold" or state.in_force or state.share is None:
                break
            state = self._try()
        return state

    def _try(self) -> CacheState:
        actions: list[str] = []
        if self.requested == "cold":
            self._in_turns(evict(self.files, actions, DROP_CACHES), "emptying the page cache")
        elif self.requested == "warm":
            self._in_turns(fill(self.files, actions), "filling the page cache")
        own_node = None
        if self.acts and self.files:
            pages = cached_pages(self.files)
            own_node = [pages.share, pages.evidence, "; ".join(actions)]
        everyone = [node for node in self.ranks.gather(own_node) if node is not None]
        if not everyone:
            return CacheState(
                requested=self.requested,
                share=None,
                summary="no file is read while training, because the samples are in memory",
                in_force=self.requested != "cold",
            )
        return _state(self.requested, [(share, evidence, action) for share, evidence, action in everyone])

    def _in_turns(self, work: Iterator[None], activity: str) -> None:
        """Does the work of the acting ranks a few seconds at a time, so that no rank waits longer without a beat."""
        is_working = self.acts and bool(self.files)
        while any(self.ranks.gather(is_working)):
            deadline = monotonic() + _TURN_S
            while is_working and monotonic() < deadline:
                is_working = next(work, self) is not self
            self.beat(activity)


def _state(requested: CacheRequest, nodes: Sequence[tuple[float | None, str, str]]) -> CacheState:
    """Returns the state from cached share, evidence and actions of each node."""
    shares = [share for share, _, _ in nodes if share is not None]
    is_known = len(shares) == len(nodes)
    if requested == "cold":
        worst = max(shares, default=1.0)
        is_reached = worst <= COLD_AT_MOST
    else:
        worst = min(shares, default=0.0)
        is_reached = requested == "any" or worst >= WARM_AT_LEAST
    share = worst if is_known else None
    _, evidence, action = next((node for node in nodes if node[0] == share), nodes[0])
    cached = evidence
    if share is not None:
        cached = f"{100 * share:.1f} % of its pages were cached ({evidence})"
    if len(nodes) > 1:
        cached += f", the worst of {len(nodes)} nodes"
    return CacheState(
        requested=requested,
        share=share,
        summary=f"{action or 'left as it was'}; {cached}",
        in_force=requested == "any" or (is_known and is_reached),
        is_known=is_known or requested == "any",
    )


def planned_readers(data: DataSpec) -> Readers:
    """Returns the readers of a plan. Raises ValueError if the plan leaves their number to a measurement."""
    workers, prefetch = data.loader_workers, data.prefetch_batches
    if workers == "auto" or (prefetch == "auto" and workers):
        raise ValueError("data.loader_workers and data.prefetch_batches auto are chosen by `RankReading`")
    if not workers or prefetch == "auto":
        return Readers(workers, 0)
    return Readers(workers, prefetch)


class RankReading:
    """Readers and page cache of one rank. All ranks call the same methods in the same order."""

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
        self._reserved: int | None = None  # cores that automatic readers leave to training; None on a CPU
        self._cache: NodeCache | None = None
        self._states: dict[int, CacheState] = {}  # by epoch
        self._batches_per_epoch = 0
        self._described: dict[str, object] = {}  # description of the reader
        self._decoders: dict[str, int] = {}  # image decoders, each with the first rank that has it
        self.readers = Readers(0, 0)  # valid after `prepare`

    def prepare(self, reader: DataReader, order: ShardedOrder, batch_size: int) -> Readers:
        """Prepares the page cache and chooses the readers, before the first step."""
        data, files = self._data, reader.files()
        self._batches_per_epoch = order.batches_per_epoch
        self._described = reader.describe()
        own_facts = [not files or counts_reads(files[0]), str(self._described.get("decoder"))]
        counts, decoders = zip(*self._ranks.gather(own_facts), strict=True)
        self._counts, self._reserved = all(counts), training_cores(self._device, len(counts))
        self._decoders = {decoder: decoders.index(decoder) for decoder in decoders}
        self._cache = cache = NodeCache(files, data.cache, acts=self._acts, ranks=self._ranks, beat=self._beat)
        first = order.position(0).epoch
        state = cache.prepare()
        if "auto" in (data.loader_workers, data.prefetch_batches) and data.loader_workers != 0:
            self._choice = self._chosen(reader, order, batch_size, cache)
            if data.cache == "cold":
                state = cache.prepare()  # samples that the trials read are cached now
        self._states[first] = state
        self.readers = planned_readers(data) if self._choice is None else self._choice.readers
        return self.readers

    def _chosen(self, reader: DataReader, order: ShardedOrder, batch: int, cache: NodeCache) -> Choice:
        data = self._data
        epoch = order.position(0).epoch
        # From the end of the epoch, whose samples training reads last.
        samples = order.epoch(epoch)[::-1]
        starts = range(0, len(samples) - len(samples) % batch, batch)
        keys = [keys_of(epoch, samples[start : start + batch]) for start in starts]
        context = TrialContext(
            reader=reader,
            keys=keys,
            most_readers=most_readers(self._cores, self._reserved),
            ranks=self._ranks,
            device=self._device,
            on_bad_sample=data.on_bad_sample,
            beat=self._beat,
            empty_cache=cache.prepare if data.cache == "cold" else None,
        )
        return choose(context, data.loader_workers, data.prefetch_batches)

    @property
    def _training_cores(self) -> int | None:
        """Cores that no reader is bound to, see `LoaderCores`; None on a CPU."""
        if self._reserved is None:
            return None
        return max(int(self._cores > 1), self._cores - self.readers.loader_workers)

    def between_epochs(self) -> None:
        """Evicts the data set between two epochs, after all ranks have finished reading (data.cache cold)."""
        assert self._cache is not None
        self._ranks.barrier()
        self._states[max(self._states) + 1] = self._cache.prepare()

    def settings(self) -> list[Setting]:
        data = self._data
        settings = []
        if self._choice is not None and data.loader_workers == "auto":
            limit = ""
            if self._reserved is not None:
                limit_readers = most_readers(self._cores, self._reserved)
                cores = f"{self._training_cores} of the rank's {self._cores} cores"
                limit = f"; at most {limit_readers}: training keeps {cores}"
            settings.append(self._measured("loader_workers", self._choice.of_workers, limit))
        if self._choice is not None and data.prefetch_batches == "auto":
            settings.append(self._measured("prefetch_batches", self._choice.of_prefetch))
        if (decode := self._described.get("decode")) is not None:
            evidence = f"decoded: {self._described['decoded']}; decoder: {self._described['decoder']}"
            settings.append(Setting(key="data.decode", requested=data.decode, effective=str(decode), evidence=evidence))
        if data.cache != "any":
            states = list(self._states.values())
            state = next((state for state in states if not state.in_force), states[0])
            effective: str | None = data.cache
            if not state.in_force:
                effective = "any" if state.is_known else None
            key, evidence = "data.cache", state.summary
            settings.append(Setting(key=key, requested=data.cache, effective=effective, evidence=evidence))
        return settings

    def _measured(self, name: str, trials: Sequence[ReaderTrial], limit: str = "") -> Setting:
        """Returns a setting that was chosen by trials, with their results. `limit` explains the limit of trials."""
        assert self._choice is not None
        effective = None
        evidence = "no loader processes read ahead"
        if trials:
            effective = getattr(self.readers, name)
            rates = []
            for trial in trials:
                computing = " while computing" if trial.computing else ""
                rates.append(f"{getattr(trial, name)}: {trial.samples_per_s:.4g}{computing}")
            again = "; samples were read more than once for it" if self._choice.again else ""
            evidence = (
                "measured before training on all ranks at the same time, samples/s of the slowest rank with "
                f"{', '.join(rates)}; the smallest that is not clearly slower than the best{again}{limit}"
            )
        return Setting(key=f"data.{name}", requested="auto", effective=effective, evidence=evidence)

    def warnings(self) -> list[str]:
        warnings = []
        unknown = next((state for state in self._states.values() if not state.is_known), None)
        if unknown is not None:
            warnings.append(f"data.cache {self._data.cache}: it is not known whether it had effect: {unknown.summary}")
        if len(self._decoders) > 1:
            by_rank = "; ".join(f"rank {rank}: {decoder}" for decoder, rank in self._decoders.items())
            warnings.append(f"ranks use different JPEG decoders, and some may be slower than others: {by_rank}")
        workers, num_training = self.readers.loader_workers, self._training_cores
        if workers and num_training is not None and self._reserved is not None and num_training < self._reserved:
            lower = "" if self._data.loader_workers == "auto" else ", or lower data.loader_workers"
            warnings.append(
                f"data.loader_workers {workers} leaves training {num_training} of a rank's "
                f"{counted(self._cores, 'core')}, but its threads need {self._reserved}: kernels may be launched late; "
                f"give each rank {workers + self._reserved} cores (layout.cores_per_rank){lower}"
            )
        return warnings

    def result(self, ranks: Sequence[Sequence[dict[str, Any]]], step_s: Sequence[float]) -> ReadingResult:
        states = list(self._states.values())
        bad = [state for state in states if not state.in_force]
        is_chosen = self._choice is not None and self._data.loader_workers == "auto"
        limit_readers = most_readers(self._cores, self._reserved)
        trials: tuple[ReaderTrial, ...] = ()
        trials_s = 0.0
        if self._choice is not None:
            trials, trials_s = self._choice.trials, self._choice.seconds
        return ReadingResult(
            loader_workers=self.readers.loader_workers,
            prefetch_batches=self.readers.prefetch_batches,
            training_cores=self._training_cores,
            limited_by_cores=is_chosen and self._reserved is not None and self.readers.loader_workers == limit_readers,
            trials=trials,
            trials_s=trials_s,
            cache=(bad or states)[0].summary,
            cache_in_force=not bad,
            cached_share=states[0].share,
            epochs=read_epochs(
                ranks,
                step_s,
                batches_per_epoch=self._batches_per_epoch,
                counts_storage=self._counts,
                cached_shares={epoch: state.share for epoch, state in self._states.items()},
            ),
        )
