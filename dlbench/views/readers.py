"""The view `reading`: which readers, what they read from where, cold and warm epochs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import ReadEpoch, ReadingResult
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import percent, place_text
from dlbench.stats.estimates import Estimate, mean_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.model import ReportGroup
from dlbench.views.view import GroupSource, GroupView, place_columns

COLD_SHARE = 0.9
"""An epoch is cold if at least this share of the data set was not in the page cache when it began, or where nobody
looked, if at least this share of its bytes came from storage."""
WARM_SHARE = 0.1  # And warm if at most this share.

MAX_EPOCHS = 50  # Epochs of a table.

Temperature = Literal["cold", "warm", "mixed", "not known"]

NOT_COUNTED = "not counted"
READERS_CAPTION = "Fetching: getting the stored bytes of a sample (I/O); the rest is preparing (decode, augment)."
STORAGE_CAPTION = (
    " From storage: bytes fetched from devices or the network, read-ahead included, over bytes of samples read."
)
EPOCHS_CAPTION = (
    f"Cold: at least {COLD_SHARE * 100:.0f} % of the data set was not in the page cache when the epoch began; warm: at "
    f"most {WARM_SHARE * 100:.0f} %. Fetching and preparing: sums over all readers."
)


def storage_cell(share: float, decimals: int = 1) -> Cell:
    """Returns a share of bytes that came from storage; above 1 it holds read-ahead, and the programs' own files."""
    return Cell(percent(min(1.0, share), decimals), number=share)


def _several(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, kw_only=True)
class EpochReading:
    """One epoch at one rank count, means over the runs that read it."""

    ranks: int
    nodes: int
    epoch: int
    is_whole: bool  # Whether every run read all of it.
    num_runs: int
    temperature: Temperature = field(metadata=column("Cold or warm"))
    samples: float
    shared_bytes: float = field(metadata=column("From the shared file system", unit="bytes"))
    local_bytes: float = field(metadata=column("From node-local disk", unit="bytes"))
    memory_bytes: float = field(metadata=column("From memory of the node", unit="bytes"))
    storage_bytes: float | None = field(metadata=column("Of it from storage", unit="bytes", missing=NOT_COUNTED))
    """From devices or the network, read-ahead included; None: not counted."""
    cached_bytes: float | None = field(  # The rest of the bytes of samples: from the page cache.
        metadata=column("From the page cache", "page_cache_bytes", unit="bytes", missing=NOT_COUNTED)
    )
    fetch_s: Estimate = field(metadata=column("Fetching"))  # All readers together, seconds.
    prepare_s: Estimate = field(metadata=column("Preparing"))
    wait_s: Estimate = field(metadata=column("Wait per rank"))  # For batches, mean over ranks.
    seconds: Estimate = field(metadata=column("Length", "epoch_s"))  # Length of the epoch's steps.
    bytes_per_s: float | None = field(  # Bytes of samples over the length.
        metadata=column("Rate", text=lambda rate: Cell(f"{format_bytes(rate)}/s", number=rate))
    )

    @property
    def sample_bytes(self) -> float:
        return self.shared_bytes + self.local_bytes + self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class ReadingPoint:
    """Readers at one rank count."""

    ranks: int
    nodes: int
    num_runs: int
    loader_workers: tuple[int, ...] = field(  # Reader processes per rank in force; several where runs differ.
        metadata=column(
            "Readers per rank",
            value=_several,
            text=lambda found: "none (training process)" if found == (0,) else _several(found),
        )
    )
    prefetch_batches: tuple[int, ...]
    fetch_share: Estimate | None = field(metadata=column("Fetching"))
    """Fetching over fetching and preparing (1); None where readers did neither."""
    storage_share: float | None = field(metadata=column("From storage", text=storage_cell, missing=NOT_COUNTED))
    """Bytes from storage over bytes of samples, all epochs; None: not counted."""
    cache: tuple[str, ...]  # What became of data.cache, each text once.
    cache_in_force: bool = field(metadata=column("Page cache as asked"))  # Of every run.
    cached_share: float | None = field(  # Of the data set's pages when training began, mean over runs.
        metadata=column("Data set cached at the start", text=storage_cell, missing="unknown")
    )

    @property
    def prepare_share(self) -> Estimate | None:
        return None if self.fetch_share is None else complement(self.fetch_share)


@dataclass(frozen=True, kw_only=True)
class GroupReading:
    """Reading of a group of runs."""

    asked_cache: str  # data.cache.
    points: tuple[ReadingPoint, ...]
    epochs: tuple[EpochReading, ...]  # By rank count, then epoch; at most `MAX_EPOCHS` of each rank count.


def reading(group: scaling.Group, table: RunTable) -> GroupReading | None:
    """What readers did at each rank count; None where no run says so."""
    found = []
    for point in group.points:
        records = ((table.keys[run_id], table.runs[run_id].record) for run_id in point.run_ids)
        known = {key: record.reading for key, record in records if record is not None and record.reading is not None}
        if known:
            found.append((point, known))
    if not found:
        return None
    epochs: list[EpochReading] = []
    for point, known in found:
        by_number: dict[int, dict[RunKey, ReadEpoch]] = {}
        for key, one in known.items():
            for epoch in one.epochs:
                by_number.setdefault(epoch.epoch, {})[key] = epoch
        epochs += [_epoch(point, number, by_number[number]) for number in sorted(by_number)[:MAX_EPOCHS]]
    return GroupReading(
        asked_cache=group.sample.plan.workload.data.cache,
        points=tuple(_point(point, known) for point, known in found),
        epochs=tuple(epochs),
    )


def fetch_share(known: Mapping[RunKey, ReadingResult]) -> Estimate | None:
    """Time of fetching over that of fetching and preparing, mean over runs; None where no reader did either."""
    shares = {}
    for key, one in known.items():
        fetch = sum(epoch.fetch_s for epoch in one.epochs)
        whole = fetch + sum(epoch.prepare_s for epoch in one.epochs)
        if whole > 0:
            shares[key] = fetch / whole
    return mean_estimate(shares, "fraction") if shares else None


def complement(share: Estimate) -> Estimate:
    """1 - share; its ends change places."""
    return share.mapped(lambda value: 1 - value, "fraction")


def storage_share(epochs: Sequence[ReadEpoch]) -> float | None:
    """Bytes that the kernel fetched over bytes of samples; above 1 where it read ahead. None: not counted."""
    known = [(one.storage_bytes, sum(one.tier_bytes.values())) for one in epochs if one.storage_bytes is not None]
    total = sum(samples for _, samples in known)
    return sum(storage for storage, _ in known) / total if total else None


def _point(point: Point, known: Mapping[RunKey, ReadingResult]) -> ReadingPoint:
    runs = known.values()
    cached = [one.cached_share for one in runs if one.cached_share is not None]
    return ReadingPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(known),
        loader_workers=tuple(sorted({one.loader_workers for one in runs})),
        prefetch_batches=tuple(sorted({one.prefetch_batches for one in runs})),
        fetch_share=fetch_share(known),
        storage_share=storage_share([epoch for one in runs for epoch in one.epochs]),
        cache=tuple(dict.fromkeys(one.cache for one in runs)),
        cache_in_force=all(one.cache_in_force for one in runs),
        cached_share=fmean(cached) if cached else None,
    )


def _epoch(point: Point, number: int, by_run: Mapping[RunKey, ReadEpoch]) -> EpochReading:
    def mean(name: str) -> Estimate:
        return mean_estimate({key: getattr(one, name) for key, one in by_run.items()}, "s")

    reads = list(by_run.values())
    tiers = {name: fmean(one.tier_bytes.get(name, 0) for one in reads) for name in ("shared", "local", "memory")}
    total = sum(tiers.values())
    counted = [one.storage_bytes for one in reads if one.storage_bytes is not None]
    storage = fmean(counted) if len(counted) == len(reads) else None
    seconds = mean("seconds")
    return EpochReading(
        ranks=point.ranks,
        nodes=point.nodes,
        epoch=number,
        is_whole=all(one.is_whole for one in reads),
        num_runs=len(reads),
        temperature=_temperature(reads),
        samples=fmean(one.samples for one in reads),
        **{f"{name}_bytes": value for name, value in tiers.items()},
        storage_bytes=storage,
        cached_bytes=None if storage is None else max(0.0, total - storage),
        fetch_s=mean("fetch_s"),
        prepare_s=mean("prepare_s"),
        wait_s=mean("wait_s"),
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


class ReadingView(GroupView):
    """What readers did."""

    id = "reading"
    title = "Reading"
    key = "reading"
    after = "staging"

    def numbers(self, source: GroupSource) -> GroupReading | None:
        return reading(source.group, source.table)

    def shown(self, group: ReportGroup, found: GroupReading) -> Section:
        sheets: tuple[Sheet[Any], ...] = (_readers_sheet(found), _epochs_sheet(found.epochs))
        last = found.points[-1]
        headline = "unknown what readers spent their time on"
        if last.fetch_share is not None:
            share = last.fetch_share.value
            headline = f"preparing (CPU) takes {percent(1 - share)} of the readers' time"
            if share >= 0.5:
                headline = f"fetching (I/O) takes {percent(share)} of the readers' time"
            if last.storage_share is not None:
                headline += f"; {storage_cell(last.storage_share).text} of the bytes from storage"
        notes = []
        for point in found.points:
            if found.asked_cache != "any" and not point.cache_in_force:
                where, told = place_text(point.ranks, point.nodes), " | ".join(point.cache)
                notes.append(f"Warning: data.cache {found.asked_cache} was not in force at {where}: {told}.")
        in_force = (point for point in found.points if point.cache_in_force and point.cached_share is None)
        kept = dict.fromkeys(text for point in in_force for text in point.cache if text)
        return Section(
            headline=headline,
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
            notes=(*notes, *(f"Page cache: {text}." for text in kept)),
        )


def _readers_sheet(found: GroupReading) -> Sheet[ReadingPoint]:
    points = found.points
    prefetch = Column[ReadingPoint](
        "prefetch_batches",
        "Batches read ahead, each" * any(point.loader_workers != (0,) for point in points),
        lambda point: _several(point.prefetch_batches),
        lambda point: "none" if point.loader_workers == (0,) else _several(point.prefetch_batches),
    )
    prepare = Column[ReadingPoint]("prepare_share", "", lambda point: point.prepare_share, has_interval=True)
    columns = columns_of(
        ReadingPoint,
        *("loader_workers", prefetch, "fetch_share", prepare),
        *("storage_share", "cached_share", "cache_in_force", "runs=num_runs"),
        titles={"cache_in_force": ""} if found.asked_cache == "any" else {},
    )
    is_stored = any(point.storage_share is not None for point in points)
    return Sheet(
        name="readers",
        title="Readers by rank count",
        columns=drop_empty_columns((*place_columns(), *columns), points),
        rows=points,
        caption=READERS_CAPTION + STORAGE_CAPTION * is_stored,
    )


def _epochs_sheet(epochs: Sequence[EpochReading]) -> Sheet[EpochReading]:
    is_known = any(one.temperature in ("cold", "warm", "mixed") for one in epochs)
    tiers = ("shared_bytes", "local_bytes", "memory_bytes")
    epoch = Column[EpochReading](
        "epoch",
        "Epoch",
        lambda one: one.epoch,
        lambda one: Cell(str(one.epoch) + " (a part)" * (not one.is_whole), number=one.epoch),
    )
    empty = [name for name in tiers if not any(getattr(one, name) for one in epochs)]
    columns = columns_of(
        EpochReading,
        *(epoch, "is_whole", "temperature", *tiers, "storage_bytes", "cached_bytes", "fetch_s", "prepare_s", "wait_s"),
        *("seconds", "bytes_per_s", "samples", "runs=num_runs"),
        titles=dict.fromkeys(empty, "") | ({} if is_known else {"temperature": ""}),
    )
    return Sheet(
        name="reads",
        title="What was read, epoch by epoch",
        columns=drop_empty_columns((*place_columns(), *columns), epochs, keep=("epoch",)),
        rows=epochs,
        caption=EPOCHS_CAPTION if is_known else "",
        is_folded=not (is_known and any(one.is_whole for one in epochs)),
    )
