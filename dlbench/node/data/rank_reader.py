"""How one rank reads: readers and page cache are settled before training, then kept, then reported for the record.

The page cache is emptied of the data set or filled with it, as data.cache asks. One process of each node acts, the
others wait with it; what it did and found goes to all ranks, so that all of them know what the record will say. The
caches of file servers and of disks are out of reach.
"""

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
from dlbench.node.data.sharding import ShardedOrder
from dlbench.records.data_path import ReaderTrial, ReadingResult
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec

_TURN_S = 5.0  # after so long all ranks say that they are alive

Wanted = Literal["any", "cold", "warm"]


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The state of the page cache for one data set."""

    wanted: Wanted
    share: float | None
    """Of the data set's pages in the page cache: of the node that is farthest from what is wanted; None: unknown."""
    summary: str
    in_force: bool
    known: bool = True  # whether that is known; otherwise `in_force` is false


@dataclass(frozen=True)
class NodeCache:
    """The page caches of all nodes, for one data set."""

    files: Sequence[Path]  # Of the data set; none where nothing is read from files.
    wanted: Wanted
    acts: bool  # Whether this rank acts for its node.
    ranks: Ranks
    beat: Callable[[str], None]

    def settle(self) -> CacheState:
        """Empties or fills the cache as wanted, and looks; called by all ranks, with the same result on all."""
        state = self._try()
        for _ in range(2):
            # A page that some core holds in a list of its own is not evicted; the next time it is.
            if self.wanted != "cold" or state.in_force or state.share is None:
                break
            state = self._try()
        return state

    def _try(self) -> CacheState:
        deeds: list[str] = []
        if self.wanted == "cold":
            self._in_turns(evict(self.files, deeds, DROP_CACHES), "emptying the page cache")
        elif self.wanted == "warm":
            self._in_turns(fill(self.files, deeds), "filling the page cache")
        pages = cached_pages(self.files) if self.acts and self.files else None
        mine = None if pages is None else [pages.share, pages.evidence, "; ".join(deeds)]
        everyone = [node for node in self.ranks.gather(mine) if node is not None]
        if not everyone:
            return CacheState(
                wanted=self.wanted,
                share=None,
                summary="no file is read while training: the samples are in memory",
                in_force=self.wanted != "cold",
            )
        return _state(self.wanted, [(share, evidence, did) for share, evidence, did in everyone])

    def _in_turns(self, work: Iterator[None], activity: str) -> None:
        """Goes through the work of the acting ranks, a few seconds at a time; no rank stands still for longer."""
        goes_on = self.acts and bool(self.files)
        while any(self.ranks.gather(goes_on)):
            deadline = monotonic() + _TURN_S
            while goes_on and monotonic() < deadline:
                goes_on = next(work, self) is not self
            self.beat(activity)


def _state(wanted: Wanted, nodes: Sequence[tuple[float | None, str, str]]) -> CacheState:
    """Returns the state from cached share, evidence and actions of each node."""
    shares = [share for share, _, _ in nodes if share is not None]
    is_known = len(shares) == len(nodes)
    worst = max(shares) if wanted == "cold" else min(shares, default=0.0)
    share = worst if is_known else None
    at = next((node for node in nodes if node[0] == share), nodes[0])
    if wanted == "any":
        in_force = True
    else:
        in_force = is_known and (worst <= COLD_AT_MOST if wanted == "cold" else worst >= WARM_AT_LEAST)
    cached = at[1] if share is None else f"{100 * share:.1f} % of its pages were cached ({at[1]})"
    deed = at[2] or "left as it was"
    where = f", the farthest of {len(nodes)} nodes" if len(nodes) > 1 else ""
    return CacheState(
        wanted=wanted,
        share=share,
        summary=f"{deed}; {cached}{where}",
        in_force=in_force,
        known=is_known or wanted == "any",
    )


def planned_readers(data: DataSpec) -> Readers:
    """The readers of a plan that says how many. Raises ValueError: it leaves that to measurement."""
    workers, prefetch = data.loader_workers, data.prefetch_batches
    if workers == "auto" or (prefetch == "auto" and workers):
        raise ValueError("data.loader_workers and data.prefetch_batches auto are settled by `RankReading`")
    return Readers(workers, 0 if not workers or prefetch == "auto" else prefetch)


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
        self._kept: int | None = None  # Cores that readers leave to training where it decides; None on a CPU.
        self._cache: NodeCache | None = None
        self._states: dict[int, CacheState] = {}  # by epoch
        self._batches_per_epoch = 0
        self._described: dict[str, object] = {}  # of the reader
        self._decoders: dict[str, int] = {}  # of images, each with the first rank that has it
        self.readers = Readers(0, 0)  # what reads; from `settle` on

    def settle(self, reader: DataReader, order: ShardedOrder, batch_size: int) -> Readers:
        """Makes the page cache as asked for and finds the readers; outside of any step."""
        data, files = self._data, reader.files()
        self._batches_per_epoch = order.batches_per_epoch
        self._described = reader.describe()
        mine = [not files or counts_reads(files[0]), str(self._described.get("decoder"))]
        counts, decoders = zip(*self._ranks.gather(mine), strict=True)
        self._counts, self._kept = all(counts), training_cores(self._device, len(counts))
        self._decoders = {decoder: decoders.index(decoder) for decoder in decoders}
        self._cache = cache = NodeCache(files, data.cache, acts=self._acts, ranks=self._ranks, beat=self._beat)
        first = order.position(0).epoch
        state = cache.settle()
        if "auto" in (data.loader_workers, data.prefetch_batches) and data.loader_workers != 0:
            self._choice = self._chosen(reader, order, batch_size, cache)
            if data.cache == "cold":
                state = cache.settle()  # what the trials read is cached now
        self._states[first] = state
        self.readers = planned_readers(data) if self._choice is None else self._choice.readers
        return self.readers

    def _chosen(self, reader: DataReader, order: ShardedOrder, batch: int, cache: NodeCache) -> Choice:
        data = self._data
        epoch = order.position(0).epoch
        # From the end of the epoch, whose samples training asks for last.
        mine = order.epoch(epoch)[::-1]
        keys = [
            [(epoch, int(index)) for index in mine[start : start + batch]]
            for start in range(0, len(mine) - len(mine) % batch, batch)
        ]
        context = TrialContext(
            reader=reader,
            keys=keys,
            most_readers=most_readers(self._cores, self._kept),
            ranks=self._ranks,
            device=self._device,
            on_bad_sample=data.on_bad_sample,
            beat=self._beat,
            empty_cache=cache.settle if data.cache == "cold" else None,
        )
        return choose(context, data.loader_workers, data.prefetch_batches)

    @property
    def _training_cores(self) -> int | None:
        """Cores that no reader is bound to, see `LoaderCores`; None on a CPU."""
        if self._kept is None:
            return None
        return max(int(self._cores > 1), self._cores - self.readers.loader_workers)

    def between_epochs(self) -> None:
        """Between two epochs, where each begins cold: empties the cache anew, when no rank reads any more."""
        assert self._cache is not None
        self._ranks.barrier()
        self._states[max(self._states) + 1] = self._cache.settle()

    def settings(self) -> list[Setting]:
        """Returns the settings of reading, requested and effective."""
        data = self._data
        settings = []
        if self._choice is not None and data.loader_workers == "auto":
            limit = ""
            if self._kept is not None:
                limit_readers = most_readers(self._cores, self._kept)
                limit = f"; at most {limit_readers}, as training needs {self._training_cores} of {self._cores} cores"
            settings.append(self._measured("loader_workers", self._choice.of_workers, limit))
        if self._choice is not None and data.prefetch_batches == "auto":
            settings.append(self._measured("prefetch_batches", self._choice.of_prefetch))
        if (decode := self._described.get("decode")) is not None:
            how = f"decoded: {self._described['decoded']}; decoder: {self._described['decoder']}"
            settings.append(Setting(key="data.decode", requested=data.decode, effective=str(decode), evidence=how))
        if data.cache != "any":
            states = list(self._states.values())
            bad = next((state for state in states if not state.in_force), None)
            shown = bad or states[0]
            effective = data.cache if bad is None else "any" if bad.known else None
            settings.append(
                Setting(key="data.cache", requested=data.cache, effective=effective, evidence=shown.summary)
            )
        return settings

    def _measured(self, name: str, trials: Sequence[ReaderTrial], limit: str = "") -> Setting:
        """Returns a setting that was chosen by measurement, with what was measured. `limit`: of what was tried."""
        assert self._choice is not None
        effective = None
        evidence = "no process reads ahead of the training one"
        if trials:
            effective = getattr(self.readers, name)
            tried = ", ".join(
                f"{getattr(trial, name)}: {trial.samples_per_s:.4g}{' while computing' if trial.computing else ''}"
                for trial in trials
            )
            again = "; samples were read more than once for it" if self._choice.again else ""
            evidence = (
                "measured before training on all ranks at the same time, samples/s of the slowest rank with "
                f"{tried}; the smallest that is not clearly slower than the best{again}{limit}"
            )
        return Setting(key=f"data.{name}", requested="auto", effective=effective, evidence=evidence)

    def warnings(self) -> list[str]:
        """Returns warnings about an unknown page cache, different decoders, and too few cores for training."""
        warnings = []
        unknown = next((state for state in self._states.values() if not state.known), None)
        if unknown is not None:
            warnings.append(f"data.cache {self._data.cache}: whether it was in force is not known: {unknown.summary}")
        if len(self._decoders) > 1:
            by_rank = "; ".join(f"rank {rank}: {decoder}" for decoder, rank in self._decoders.items())
            warnings.append(f"not all ranks decode images alike, and some may be slower than others: {by_rank}")
        workers, num_training = self.readers.loader_workers, self._training_cores
        if workers and num_training is not None and self._kept is not None and num_training < self._kept:
            lower = "" if self._data.loader_workers == "auto" else ", or lower data.loader_workers"
            warnings.append(
                f"data.loader_workers {workers} leaves training {num_training} of a rank's {self._cores} "
                f"core{'s' if self._cores > 1 else ''}, and its threads keep {self._kept} busy: kernels may be "
                f"launched late; give each rank {workers + self._kept} (layout.cores_per_rank){lower}"
            )
        return warnings

    def result(self, ranks: Sequence[Sequence[dict[str, Any]]], step_s: Sequence[float]) -> ReadingResult:
        states = list(self._states.values())
        bad = [state for state in states if not state.in_force]
        is_chosen = self._choice is not None and self._data.loader_workers == "auto"
        limit_readers = most_readers(self._cores, self._kept)
        return ReadingResult(
            loader_workers=self.readers.loader_workers,
            prefetch_batches=self.readers.prefetch_batches,
            training_cores=self._training_cores,
            limited_by_cores=is_chosen and self._kept is not None and self.readers.loader_workers == limit_readers,
            trials=self._choice.trials if self._choice else (),
            trials_s=self._choice.seconds if self._choice else 0.0,
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
