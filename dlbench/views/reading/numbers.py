"""What readers did: bytes by tier and from storage, epoch by epoch; fetching against preparing; the choice of readers.

`fetch` is getting a sample's stored bytes (I/O), `prepare` decoding and augmenting them (CPU). Both are summed over all
readers of all ranks, so that they may exceed the time that passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.data_path import ReadEpoch, ReadingResult
from dlbench.stats.estimates import Estimate, mean_estimate

COLD_SHARE = 0.9
"""An epoch is cold if at least this share of the data set was not in the page cache when it began, or where nobody
looked, if at least this share of its bytes came from storage."""
WARM_SHARE = 0.1
"""And warm if at most this share."""

MAX_EPOCHS = 50
"""Epochs of a table."""

Temperature = Literal["cold", "warm", "mixed", "not known"]


@dataclass(frozen=True, kw_only=True)
class EpochReads:
    """One epoch at one rank count, means over the runs that read it."""

    ranks: int
    nodes: int
    epoch: int
    is_whole: bool
    """Whether every run read all of it."""
    num_runs: int
    temperature: Temperature
    samples: float
    shared_bytes: float
    local_bytes: float
    memory_bytes: float
    storage_bytes: float | None
    """From devices or the network, read-ahead included; None: not counted."""
    cached_bytes: float | None
    """The rest of the bytes of samples: from the page cache."""
    fetch_s: Estimate
    """All readers together, seconds."""
    prepare_s: Estimate
    wait_s: Estimate
    """Wait of a rank for batches, mean over ranks."""
    seconds: Estimate
    """Length of the epoch's steps."""
    bytes_per_s: float | None
    """Bytes of samples over the length."""

    @property
    def sample_bytes(self) -> float:
        """Of all tiers."""
        return self.shared_bytes + self.local_bytes + self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class ReaderChoice:
    """One attempt of the automatic choice of readers at one rank count; medians are the run's own."""

    ranks: int
    nodes: int
    loader_workers: int
    prefetch_batches: int
    computing: bool
    """Whether the training process computed between batches."""
    samples_per_s: float
    """Of the slowest rank while all read."""
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class ReadingPoint:
    """Readers at one rank count."""

    ranks: int
    nodes: int
    num_runs: int
    loader_workers: tuple[int, ...]
    """Reader processes per rank in force; several where runs differ."""
    prefetch_batches: tuple[int, ...]
    fetch_share: Estimate | None
    """Fetching over fetching and preparing (1); None where readers did neither."""
    storage_share: float | None
    """Bytes from storage over bytes of samples, all epochs; None: not counted."""
    cache: tuple[str, ...]
    """What became of data.cache, each text once."""
    cache_in_force: bool
    """Of every run."""
    cached_share: float | None
    """Of the data set's pages when training began, mean over runs."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Reading of a group of runs."""

    asked_cache: str
    """data.cache."""
    points: tuple[ReadingPoint, ...]
    epochs: tuple[EpochReads, ...]
    """By rank count, then epoch; at most `MAX_EPOCHS` of each rank count."""
    choices: tuple[ReaderChoice, ...]


def reading(group: Group, table: RunTable) -> Reading | None:
    """What readers did at each rank count; None where no run says so."""
    found = [(point, known) for point in group.points if (known := results(point, table))]
    if not found:
        return None
    return Reading(
        asked_cache=group.sample.plan.workload.data.cache,
        points=tuple(_point(point, known) for point, known in found),
        epochs=tuple(epoch for point, known in found for epoch in _epochs(point, known)),
        choices=tuple(choice for point, known in found for choice in _choices(point, known)),
    )


def results(point: Point, table: RunTable) -> list[ReadingResult]:
    """What the runs of a point say of their reading."""
    records = (table.runs[run_id].record for run_id in point.run_ids)
    return [record.reading for record in records if record is not None and record.reading is not None]


def fetch_share(known: Sequence[ReadingResult]) -> Estimate | None:
    """Time of fetching over that of fetching and preparing, mean over runs; None where no reader did either."""
    shares = []
    for one in known:
        fetch = sum(epoch.fetch_s for epoch in one.epochs)
        whole = fetch + sum(epoch.prepare_s for epoch in one.epochs)
        if whole > 0:
            shares.append(fetch / whole)
    return mean_estimate(shares, "fraction") if shares else None


def complement(share: Estimate) -> Estimate:
    """1 - share; its ends change places."""
    return share.mapped(lambda value: 1 - value, "fraction")


def storage_share(epochs: Sequence[ReadEpoch]) -> float | None:
    """Bytes that the kernel fetched over bytes of samples; above 1 where it read ahead. None: not counted."""
    known = [(one.storage_bytes, sum(one.tier_bytes.values())) for one in epochs if one.storage_bytes is not None]
    total = sum(samples for _, samples in known)
    return sum(storage for storage, _ in known) / total if total else None


def _point(point: Point, known: Sequence[ReadingResult]) -> ReadingPoint:
    cached = [one.cached_share for one in known if one.cached_share is not None]
    return ReadingPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(known),
        loader_workers=tuple(sorted({one.loader_workers for one in known})),
        prefetch_batches=tuple(sorted({one.prefetch_batches for one in known})),
        fetch_share=fetch_share(known),
        storage_share=storage_share([epoch for one in known for epoch in one.epochs]),
        cache=tuple(dict.fromkeys(one.cache for one in known)),
        cache_in_force=all(one.cache_in_force for one in known),
        cached_share=fmean(cached) if cached else None,
    )


def _epochs(point: Point, known: Sequence[ReadingResult]) -> list[EpochReads]:
    by_number: dict[int, list[ReadEpoch]] = {}
    for one in known:
        for epoch in one.epochs:
            by_number.setdefault(epoch.epoch, []).append(epoch)
    return [_epoch(point, number, by_number[number]) for number in sorted(by_number)[:MAX_EPOCHS]]


def _epoch(point: Point, number: int, reads: Sequence[ReadEpoch]) -> EpochReads:
    tiers = {name: fmean(one.tier_bytes.get(name, 0) for one in reads) for name in ("shared", "local", "memory")}
    total = sum(tiers.values())
    counted = [one.storage_bytes for one in reads if one.storage_bytes is not None]
    storage = fmean(counted) if len(counted) == len(reads) else None
    seconds = mean_estimate([one.seconds for one in reads], "s")
    return EpochReads(
        ranks=point.ranks,
        nodes=point.nodes,
        epoch=number,
        is_whole=all(one.is_whole for one in reads),
        num_runs=len(reads),
        temperature=_temperature(reads),
        samples=fmean(one.samples for one in reads),
        shared_bytes=tiers["shared"],
        local_bytes=tiers["local"],
        memory_bytes=tiers["memory"],
        storage_bytes=storage,
        cached_bytes=None if storage is None else max(0.0, total - storage),
        fetch_s=mean_estimate([one.fetch_s for one in reads], "s"),
        prepare_s=mean_estimate([one.prepare_s for one in reads], "s"),
        wait_s=mean_estimate([one.wait_s for one in reads], "s"),
        seconds=seconds,
        bytes_per_s=total / seconds.value if seconds.value else None,
    )


def _temperature(reads: Sequence[ReadEpoch]) -> Temperature:
    """By the pages that were cached when the epoch began; where nobody looked, by what came from storage."""
    cached = [one.cached_share for one in reads if one.cached_share is not None]
    share = 1 - fmean(cached) if len(cached) == len(reads) else None
    if share is None and all(one.storage_bytes is not None for one in reads):
        share = storage_share(reads)
    if share is None:
        return "not known"
    if share >= COLD_SHARE:
        return "cold"
    return "warm" if share <= WARM_SHARE else "mixed"


def _choices(point: Point, known: Sequence[ReadingResult]) -> list[ReaderChoice]:
    """Of the first run that tried something: others tried the same, on the same machine."""
    tried = next((one for one in known if one.trials), None)
    if tried is None:
        return []
    return [
        ReaderChoice(
            ranks=point.ranks,
            nodes=point.nodes,
            loader_workers=trial.loader_workers,
            prefetch_batches=trial.prefetch_batches,
            computing=trial.computing,
            samples_per_s=trial.samples_per_s,
            is_chosen=(trial.loader_workers, trial.prefetch_batches) == (tried.loader_workers, tried.prefetch_batches),
        )
        for trial in tried.trials
    ]
