"""The view `reading`: the readers, and the bytes that they read from storage, by cold and warm epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Literal

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import ReadEpoch, ReadingResult
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import percent, place_text
from dlbench.stats.estimates import Estimate, mean_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns

COLD_SHARE = 0.9  # Cold: at least this share of the data set was not cached, or else of its bytes came from storage.
WARM_SHARE = 0.1  # An epoch is warm if that share is at most this.

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
    """Returns a share of bytes that came from storage; it is above 1 with read-ahead and files of the programs."""
    return Cell(percent(min(1.0, share), decimals), number=share)


def _several(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _loader_workers_text(counts: tuple[int, ...]) -> str:
    return "none (training process)" if counts == (0,) else _several(counts)


def rate_cell(bytes_per_s: float) -> Cell:
    """Returns a rate, e.g. ``1.2 GiB/s``."""
    return Cell(f"{format_bytes(bytes_per_s)}/s", number=bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class EpochReading(AtPlace):
    """The bytes and seconds of one epoch at one rank count, means over the runs that read it."""

    epoch: int
    is_whole: bool  # Whether every run read all of it.
    num_runs: int
    temperature: Temperature = field(metadata=column("Cold or warm"))
    samples: float
    shared_bytes: float = field(metadata=column("From the shared file system", unit="bytes"))
    local_bytes: float = field(metadata=column("From node-local disk", unit="bytes"))
    memory_bytes: float = field(metadata=column("From memory of the node", unit="bytes"))
    storage_bytes: float | None = field(metadata=column("Of it from storage", unit="bytes", missing=NOT_COUNTED))
    cached_bytes: float | None = field(
        metadata=column("From the page cache", "page_cache_bytes", unit="bytes", missing=NOT_COUNTED)
    )
    fetch_s: Estimate = field(metadata=column("Fetching"))  # Seconds of all readers together.
    prepare_s: Estimate = field(metadata=column("Preparing"))  # Seconds of all readers together.
    wait_s: Estimate = field(metadata=column("Wait per rank"))  # Seconds of waiting for batches, mean over ranks.
    seconds: Estimate = field(metadata=column("Length", "epoch_s"))  # Length of the epoch's steps.
    bytes_per_s: float | None = field(metadata=column("Rate", text=rate_cell))  # Bytes of samples over the length.

    @property
    def sample_bytes(self) -> float:
        return self.shared_bytes + self.local_bytes + self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class ReadingPoint(AtPlace):
    """The readers at one rank count."""

    num_runs: int
    loader_workers: tuple[int, ...] = field(
        metadata=column("Readers per rank", value=_several, text=_loader_workers_text)
    )
    prefetch_batches: tuple[int, ...]  # Batches that each reader reads ahead; several if runs differ.
    fetch_share: Estimate | None = field(metadata=column("Fetching"))  # Of fetching and preparing (1).
    storage_share: float | None = field(metadata=column("From storage", text=storage_cell, missing=NOT_COUNTED))
    cache: tuple[str, ...]  # State of the page cache by data.cache, each text once.
    cache_in_force: bool = field(metadata=column("Page cache as set"))  # Whether data.cache was in force in all runs.
    cached_share: float | None = field(
        metadata=column("Data set cached at the start", text=storage_cell, missing="unknown")
    )

    @property
    def prepare_share(self) -> Estimate | None:
        return None if self.fetch_share is None else complement(self.fetch_share)


@dataclass(frozen=True, kw_only=True)
class GroupReading:
    """Reading of a group of runs."""

    requested_cache: str  # The value of data.cache.
    points: tuple[ReadingPoint, ...]
    epochs: tuple[EpochReading, ...]  # By rank count, then epoch; at most `MAX_EPOCHS` of each rank count.


def reading(group: scaling.Group, table: RunTable) -> GroupReading | None:
    """Returns the reading of each rank count; None if no run recorded it."""
    points: list[ReadingPoint] = []
    epochs: list[EpochReading] = []
    for point in group.points:
        results = {}
        for run_id in point.run_ids:
            record = table.runs[run_id].record
            if record is not None and record.reading is not None:
                results[table.keys[run_id]] = record.reading
        if not results:
            continue
        points.append(_point(point, results))
        by_number: dict[int, dict[RunKey, ReadEpoch]] = {}
        for key, result in results.items():
            for epoch in result.epochs:
                by_number.setdefault(epoch.epoch, {})[key] = epoch
        epochs += [_epoch(point, number, by_number[number]) for number in sorted(by_number)[:MAX_EPOCHS]]
    if not points:
        return None
    return GroupReading(
        requested_cache=group.sample.plan.workload.data.cache, points=tuple(points), epochs=tuple(epochs)
    )


def fetch_share(results: Mapping[RunKey, ReadingResult]) -> Estimate | None:
    """Returns the time of fetching over that of fetching and preparing, mean over runs; None without either."""
    shares = {}
    for key, result in results.items():
        fetch_s = sum(epoch.fetch_s for epoch in result.epochs)
        total_s = fetch_s + sum(epoch.prepare_s for epoch in result.epochs)
        if total_s > 0:
            shares[key] = fetch_s / total_s
    return of_known(mean_estimate, shares, "fraction")


def complement(share: Estimate) -> Estimate:
    """Returns 1 - share, with its interval."""
    return share.mapped(lambda value: 1 - value, "fraction")


def storage_share(epochs: Sequence[ReadEpoch]) -> float | None:
    """Returns bytes from storage over bytes of samples; above 1 with read-ahead. None: not counted."""
    counted = [epoch for epoch in epochs if epoch.storage_bytes is not None]
    sample_bytes = sum(sum(epoch.tier_bytes.values()) for epoch in counted)
    if not sample_bytes:
        return None
    return sum(epoch.storage_bytes or 0 for epoch in counted) / sample_bytes


def _point(point: Point, results: Mapping[RunKey, ReadingResult]) -> ReadingPoint:
    runs = results.values()
    cached_shares = [result.cached_share for result in runs if result.cached_share is not None]
    return ReadingPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(results),
        loader_workers=tuple(sorted({result.loader_workers for result in runs})),
        prefetch_batches=tuple(sorted({result.prefetch_batches for result in runs})),
        fetch_share=fetch_share(results),
        storage_share=storage_share(list(chain.from_iterable(result.epochs for result in runs))),
        cache=tuple(dict.fromkeys(result.cache for result in runs)),
        cache_in_force=all(result.cache_in_force for result in runs),
        cached_share=fmean(cached_shares) if cached_shares else None,
    )


def _epoch(point: Point, number: int, by_run: Mapping[RunKey, ReadEpoch]) -> EpochReading:
    def mean(name: str) -> Estimate:
        return mean_estimate({key: getattr(epoch, name) for key, epoch in by_run.items()}, "s")

    epochs = list(by_run.values())
    shared, local, memory = (
        fmean(epoch.tier_bytes.get(tier, 0) for epoch in epochs) for tier in ("shared", "local", "memory")
    )
    total = shared + local + memory
    storage_bytes = cached_bytes = bytes_per_s = None
    counted = [epoch.storage_bytes for epoch in epochs if epoch.storage_bytes is not None]
    if len(counted) == len(epochs):
        storage_bytes = fmean(counted)
        cached_bytes = max(0.0, total - storage_bytes)
    seconds = mean("seconds")
    if seconds.value:
        bytes_per_s = total / seconds.value
    return EpochReading(
        ranks=point.ranks,
        nodes=point.nodes,
        epoch=number,
        is_whole=all(epoch.is_whole for epoch in epochs),
        num_runs=len(epochs),
        temperature=_temperature(epochs),
        samples=fmean(epoch.samples for epoch in epochs),
        shared_bytes=shared,
        local_bytes=local,
        memory_bytes=memory,
        storage_bytes=storage_bytes,
        cached_bytes=cached_bytes,
        fetch_s=mean("fetch_s"),
        prepare_s=mean("prepare_s"),
        wait_s=mean("wait_s"),
        seconds=seconds,
        bytes_per_s=bytes_per_s,
    )


def _temperature(epochs: Sequence[ReadEpoch]) -> Temperature:
    """Classifies epochs by the pages that were not cached when they began, else by the bytes from storage."""
    uncached_share = None
    cached_shares = [epoch.cached_share for epoch in epochs if epoch.cached_share is not None]
    if len(cached_shares) == len(epochs):
        uncached_share = 1 - fmean(cached_shares)
    elif all(epoch.storage_bytes is not None for epoch in epochs):
        uncached_share = storage_share(epochs)
    if uncached_share is None:
        return "not known"
    if uncached_share >= COLD_SHARE:
        return "cold"
    return "warm" if uncached_share <= WARM_SHARE else "mixed"


class ReadingView(GroupView):
    """The reading of samples."""

    id = "reading"
    title = "Reading"
    key = "reading"
    after = "staging"

    def numbers(self, source: GroupSource) -> GroupReading | None:
        return reading(source.group, source.table)

    def shown(self, group: ReportGroup, reading: GroupReading) -> Section:
        return Section(
            headline=_headline(reading.points[-1]),
            sheets=with_rows(_readers_sheet(reading), _epochs_sheet(reading.epochs)),
            notes=tuple(_notes(reading)),
        )


def _headline(point: ReadingPoint) -> str:
    if point.fetch_share is None:
        return "not known: the readers recorded no time of fetching or preparing"
    share = point.fetch_share.value
    headline = f"preparing (CPU) takes {percent(1 - share)} of the readers' time"
    if share >= 0.5:
        headline = f"fetching (I/O) takes {percent(share)} of the readers' time"
    if point.storage_share is None:
        return headline
    return f"{headline}; {storage_cell(point.storage_share).text} of the bytes from storage"


def _notes(reading: GroupReading) -> Iterator[str]:
    cache_texts: list[str] = []
    for point in reading.points:
        if reading.requested_cache != "any" and not point.cache_in_force:
            place, reasons = place_text(point.ranks, point.nodes), " | ".join(point.cache)
            yield f"Warning: data.cache {reading.requested_cache} was not in force at {place}: {reasons}."
        elif point.cache_in_force and point.cached_share is None:
            cache_texts += point.cache
    yield from (f"Page cache: {text}." for text in dict.fromkeys(cache_texts) if text)


def _readers_sheet(reading: GroupReading) -> Sheet[ReadingPoint]:

    def prefetch_text(point: ReadingPoint) -> str:
        return "none" if point.loader_workers == (0,) else _several(point.prefetch_batches)

    points = reading.points
    caption, titles = READERS_CAPTION, {}
    if any(point.storage_share is not None for point in points):
        caption += STORAGE_CAPTION
    if reading.requested_cache == "any":
        titles["cache_in_force"] = ""
    if all(point.loader_workers == (0,) for point in points):
        titles["prefetch_batches"] = ""
    columns = columns_of(
        ReadingPoint,
        "loader_workers",
        Column(
            "prefetch_batches",
            "Batches read ahead, each",
            lambda point: _several(point.prefetch_batches),
            prefetch_text,
        ),
        *("fetch_share", Column("prepare_share", "", "prepare_share", has_interval=True)),
        *("storage_share", "cached_share", "cache_in_force", "runs=num_runs"),
        titles=titles,
    )
    return Sheet(
        name="readers",
        title="Readers by rank count",
        columns=drop_empty_columns((*place_columns(), *columns), points),
        rows=points,
        caption=caption,
    )


def _epochs_sheet(epochs: Sequence[EpochReading]) -> Sheet[EpochReading]:
    is_known = any(epoch.temperature in ("cold", "warm", "mixed") for epoch in epochs)
    tiers = ("shared_bytes", "local_bytes", "memory_bytes")
    empty = [name for name in tiers if not any(getattr(epoch, name) for epoch in epochs)]
    caption = EPOCHS_CAPTION
    if not is_known:
        empty.append("temperature")
        caption = ""
    columns = columns_of(
        EpochReading,
        Column("epoch", "Epoch", "epoch", _epoch_cell),
        *("is_whole", "temperature", *tiers, "storage_bytes", "cached_bytes", "fetch_s", "prepare_s", "wait_s"),
        *("seconds", "bytes_per_s", "samples", "runs=num_runs"),
        titles=dict.fromkeys(empty, ""),
    )
    return Sheet(
        name="reads",
        title="Bytes read by epoch",
        columns=drop_empty_columns((*place_columns(), *columns), epochs, keep=("epoch",)),
        rows=epochs,
        caption=caption,
        is_folded=not (is_known and any(epoch.is_whole for epoch in epochs)),
    )


def _epoch_cell(epoch: EpochReading) -> Cell:
    part = "" if epoch.is_whole else " (a part)"
    return Cell(f"{epoch.epoch}{part}", number=epoch.epoch)
