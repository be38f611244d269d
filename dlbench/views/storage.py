"""Rates of the pure reader benchmark, and how many accelerators they can feed.

A sample is fetched (storage) and prepared (CPU). With R readers, n samples and f the time that all of them spent in
fetching, fetching alone would give n R / f samples per second: what storage gives to that many readers where preparing
takes no time. It says nothing of more readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import dlbench
from dlbench.perfmodels.storage_demand import Demand
from dlbench.records.data_path import ReadingRate
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import basis_text, ranks_text
from dlbench.stats.estimates import MIN_RUNS, Estimate, mean_estimate, median_estimate
from dlbench.units import format_number, format_seconds
from dlbench.views.readers import complement, storage_cell

FORMAT = "dlbench.io"

Cache = Literal["cold", "warm"]
Limit = Literal["fetch", "prepare"]

LIMIT_TITLES: dict[Limit, str] = {"fetch": "fetching", "prepare": "preparing"}
_MB = 1e6
MAX_SIZE_FACTOR = 1.5  # By so much samples may be larger or smaller than the published ones without a word.
_NOT_MEASURED = "not measured"


def _count(figure: Estimate) -> Cell:
    """Whole accelerators, and the figure itself where it is small."""
    value = figure.value
    ends = ""
    if figure.low is not None and figure.high is not None:
        ends = f"[{format_number(figure.low, 2)}, {format_number(figure.high, 2)}]"
    if value < 1:
        text = f"{format_number(value, 2)} of one"
    else:
        text = f"{math.floor(value)} ({format_number(value, 2)})" if value < 100 else f"{math.floor(value):,}"
    return Cell(text, ends, number=value)


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the readers gave, in one state of the page cache."""

    ranks: int = field(metadata=column("Ranks", is_brief=True))  # Processes that read at the same time, as ranks do.
    cache: Cache = field(metadata=column("Page cache", is_brief=True))
    in_force: bool  # Whether the page cache was in that state; where not, there are no figures.
    told: str = field(metadata=column(name="cache_told"))  # What became of the page cache, in words.
    loader_workers: int = field(metadata=column("Readers per rank"))
    prefetch_batches: int
    samples_per_s: Estimate | None = field(metadata=column("Samples/s", missing=_NOT_MEASURED, is_brief=True))
    bytes_per_s: Estimate | None = field(
        metadata=column("MB/s", "mb_per_s", value=lambda rate: rate.scaled(1 / _MB, "MB/s"), is_brief=True)
    )
    sample_bytes: float | None  # Stored bytes per sample, mean.
    fetch_share: Estimate | None  # Of the time in fetching and preparing, a fraction; as the next.
    prepare_share: Estimate | None
    fetching: Estimate | None = field(metadata=column("Fetching", "fetch_time_share", is_brief=True))
    """Share of all time of the readers, a fraction, as the next two; together 1."""
    preparing: Estimate | None = field(metadata=column("Preparing", "prepare_time_share", is_brief=True))
    neither: Estimate | None = field(metadata=column("Neither", "other_time_share", is_brief=True))
    storage_share: float | None  # Bytes from devices or the network over bytes of samples; None: not counted.
    fetch_samples_per_s: Estimate | None  # What fetching alone would give to as many readers.
    limit: Limit | None
    opens_per_s: Estimate | None = field(metadata=column("Opens/s", is_brief=True))
    stats_per_s: Estimate | None = field(metadata=column("Stats/s", is_brief=True))
    names_per_s: Estimate | None = field(metadata=column("Names listed/s", is_brief=True))
    num_files: int
    names_from: str | None  # Where the names of files were from; none: of a kind of few files.
    open_s: float  # Until they were known.
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fed:
    """How many accelerators one supply feeds."""

    ranks: int = field(metadata=column("Ranks", is_brief=True))
    cache: Cache = field(metadata=column("Page cache", is_brief=True))
    accelerators: Estimate = field(metadata=column("How many", text=_count, is_brief=True))
    by_fetching: Estimate | None = field(metadata=column("By fetching alone", text=_count, is_brief=True))
    """If the readers spent all their time in fetching."""
    limit: Limit = field(metadata=column("Limited by", text=LIMIT_TITLES.__getitem__, is_brief=True))


@dataclass(frozen=True, kw_only=True)
class Need:
    """One accelerator's demand next to what the readers give."""

    demand: Demand
    bytes_per_s: float | None  # With the mean sample of this data set; None where it is not known.
    fed: tuple[Fed, ...]


@dataclass(frozen=True, kw_only=True)
class Io:
    """All that `dlbench io` says without training."""

    format: str = FORMAT
    version: int = 1
    workload: str
    preset: str
    source: str
    kind: str
    num_samples: int
    sample_unit: str
    host: str
    supplies: tuple[Supply, ...]
    needs: tuple[Need, ...]


def supply_of(answer: ReadingRate) -> Supply:
    """An answer of the reader benchmark with cache cold or warm. Raises ValueError: it was asked for neither."""
    if answer.cache == "any":
        raise ValueError("the reader benchmark ran with the page cache as it was")
    together = [one.together for one in answer.repeats if one.together.samples] if answer.cache_in_force else []
    busy = [(one.fetch_s, one.fetch_s + one.prepare_s) for one in together]
    shares = [fetch / whole for fetch, whole in busy if whole > 0]
    share = _mean(shares)
    counted = [(one.storage_bytes, one.raw_bytes) for one in together if one.storage_bytes is not None]
    raw = sum(size for _, size in counted)
    readers = answer.processes * max(1, answer.loader_workers)
    fetching = [one.fetch_s / (one.seconds * readers) for one in together]
    preparing = [one.prepare_s / (one.seconds * readers) for one in together]
    neither = [1 - fetch - prepare for fetch, prepare in zip(fetching, preparing, strict=True)]
    fetched = [one.samples * readers / one.fetch_s for one in together if one.fetch_s]
    samples = sum(one.samples for one in together)
    return Supply(
        ranks=answer.processes,
        cache=answer.cache,
        in_force=bool(together),
        told=answer.cache_told,
        loader_workers=answer.loader_workers,
        prefetch_batches=answer.prefetch_batches,
        samples_per_s=_median([one.samples_per_s for one in together], "samples/s"),
        bytes_per_s=_median([one.bytes_per_s for one in together], "bytes/s"),
        sample_bytes=sum(one.raw_bytes for one in together) / samples if samples else None,
        fetch_share=share,
        prepare_share=None if share is None else complement(share),
        storage_share=sum(storage for storage, _ in counted) / raw if raw else None,
        fetching=_mean(fetching),
        preparing=_mean(preparing),
        neither=_mean(neither),
        fetch_samples_per_s=_median(fetched, "samples/s"),
        limit=None if share is None else "fetch" if share.value >= 0.5 else "prepare",
        opens_per_s=_median([one.opens_per_s for one in together if one.opens_per_s], "opens/s"),
        stats_per_s=_median([one.stats_per_s for one in together if one.stats_per_s], "stats/s"),
        names_per_s=_median([one.names_per_s for one in together if one.names_per_s], "names/s"),
        num_files=answer.num_files,
        names_from=answer.names_from,
        open_s=answer.open_s,
        warnings=answer.warnings,
    )


def _mean(shares: Sequence[float]) -> Estimate | None:
    return mean_estimate(shares, "fraction") if shares else None


def _median(values: Sequence[float], unit: str) -> Estimate | None:
    return median_estimate(values, unit) if values else None


def need_of(demand: Demand, supplies: Sequence[Supply]) -> Need:
    """One demand next to all supplies with figures."""
    sizes = [one.sample_bytes for one in supplies if one.sample_bytes is not None]
    fed = tuple(
        Fed(
            ranks=one.ranks,
            cache=one.cache,
            accelerators=one.samples_per_s.scaled(1 / demand.samples_per_s, "accelerators"),
            by_fetching=one.fetch_samples_per_s
            and one.fetch_samples_per_s.scaled(1 / demand.samples_per_s, "accelerators"),
            limit=one.limit,
        )
        for one in supplies
        if one.samples_per_s is not None and one.limit is not None
    )
    return Need(demand=demand, bytes_per_s=demand.samples_per_s * sizes[0] if sizes else None, fed=fed)


def io_document(found: Io) -> Document:
    """The answer for every format; its data is `found`."""

    def storage(one: Supply) -> Cell | None:
        if one.samples_per_s is None:
            return None
        if one.storage_share is None:
            return Cell("not counted")
        return storage_cell(one.storage_share, 0)

    gives = columns_of(
        Supply,
        *("cache", "ranks", "samples_per_s", "bytes_per_s", "fetch_share", "prepare_share"),
        *("fetching", "preparing", "neither"),
        Column("storage_share", "From storage", "storage_share", storage, is_brief=True),
        *("loader_workers", "prefetch_batches", "limit", "told"),
    )
    sheets: list[Sheet[Any]] = [
        Sheet(
            name="io-gives",
            title="What the readers give",
            columns=gives,
            rows=found.supplies,
            caption="Reading and preparing without training, all ranks together. Shares of the readers' time: fetching "
            "is getting stored bytes, preparing is decoding and augmenting, neither is handing them over and waiting.",
            in_terminal=True,
        )
    ]
    if called := [one for one in found.supplies if one.names_per_s is not None]:
        columns = columns_of(Supply, "cache", "ranks", "opens_per_s", "stats_per_s", "names_per_s")
        sheets.append(Sheet(name="io-calls", title="Opening files", columns=columns, rows=called, in_terminal=True))
    words = tuple(_gives(found))
    sections = [Section(id="gives", title=sheets[0].title, words=words, brief=words, sheets=tuple(sheets))]
    if found.needs:
        words, title = tuple(_needs(found)), "What an accelerator needs"
        sections.append(Section(id="needs", title=title, words=words, brief=words, sheets=_needs_sheets(found)))
    return Document(
        title=f"dlbench io: {found.workload} ({found.preset}), {found.kind}, {found.num_samples:,} samples",
        dlbench_version=dlbench.__version__,
        sections=tuple(sections),
        data=found,
    )


def _gives(found: Io) -> Iterator[str]:
    yield f"Read from {found.source}."
    for one in found.supplies:
        if not one.in_force:
            yield f"{one.cache.capitalize()} at {ranks_text(one.ranks)}: {_NOT_MEASURED}: {one.told}."
    known = [one for one in found.supplies if one.samples_per_s is not None]
    if known:
        last = known[-1]
        assert last.samples_per_s is not None
        count = last.loader_workers
        workers = f"has {count} reader process{'es' * (count > 1)} (data.loader_workers)"
        if not count:
            workers = "reads by itself (data.loader_workers 0)"
        few = "" if last.samples_per_s.is_confident else f"; --repeats {MIN_RUNS} gives an interval of 95 %"
        yield (
            f"Each rank {workers}, on {found.host}; in brackets: {basis_text(last.samples_per_s, 'repeat')}{few}. "
            f"Samples of {last.sample_bytes or 0:,.0f} bytes on average."
        )
        one = known[0]  # cold, at the fewest ranks, where cold was in force
        if one.names_from is not None and one.names_per_s is not None:
            told = next((part for part in one.told.split("; ") if part.startswith("names and")), "names may be cached")
            listing_s = one.num_files * one.ranks / one.names_per_s.value
            yield (
                f"The names of {one.num_files:,} files were from {one.names_from} in {format_seconds(one.open_s)}; "
                f"listing them would take one rank {format_seconds(listing_s)}, by what it listed {one.cache} ({told})."
            )
    yield from (f"{text}." for text in dict.fromkeys(text.rstrip(".") for one in known for text in one.warnings))


def _needs_sheets(found: Io) -> tuple[Sheet[Any], ...]:
    """What one accelerator needs and, where the readers have figures, how many of them can be fed."""

    def rate(name: str, title: str, value: Callable[[Need], float | None]) -> Column[Need]:
        def in_mb(need: Need) -> float | None:
            return None if (found := value(need)) is None else found / _MB

        def cell(need: Need) -> Cell | None:
            return None if (found := in_mb(need)) is None else Cell(format_number(found, 3), number=value(need))

        return Column(name, title, in_mb, cell, is_brief=True)

    columns: tuple[Column[Need], ...] = (
        Column("accelerator", "One", "demand.accelerator", is_brief=True),
        Column("samples_per_s", "Samples/s", "demand.samples_per_s", unit="samples/s", is_brief=True),
        rate("published_mb_per_s", "MB/s, published set", lambda need: need.demand.bytes_per_s),
        rate("mb_per_s", "MB/s, this set", lambda need: need.bytes_per_s),
        Column("source", "Source", "demand.source"),
    )
    title = "What one accelerator needs"
    needs = Sheet(name="io-needs", title=title, columns=columns, rows=found.needs, in_terminal=True)
    if all(one.samples_per_s is None for one in found.supplies):
        return (needs,)
    accelerator: Column[Any] = Column("accelerator", "Feeds", lambda row: row[0].demand.accelerator, is_brief=True)
    feeds = columns_of(Fed, "ranks", "cache", "accelerators", "limit", "by_fetching", of=itemgetter(1))
    fed = Sheet(
        name="io-feeds",
        title="How many accelerators can be fed",
        columns=(accelerator, *feeds),
        rows=[(need, one) for need in found.needs for one in need.fed],
        in_terminal=True,
    )
    return needs, fed


def _needs(found: Io) -> Iterator[str]:
    """What the tables do not say of the figures of accelerators."""
    if any(need.fed for need in found.needs):
        yield "By fetching alone: as if the readers spent all their time in fetching, roughly how many / Fetching."
    for need in found.needs:
        yield f"{need.demand.accelerator}: {need.demand.source}."
    here = next((one.sample_bytes for one in found.supplies if one.sample_bytes is not None), None)
    there = next((need.demand.sample_bytes for need in found.needs if need.demand.sample_bytes is not None), None)
    if here is not None and there is not None and not 1 / MAX_SIZE_FACTOR <= here / there <= MAX_SIZE_FACTOR:
        yield (
            f"Samples here are {format_number(here / there, 2)} times as large as those of the published figures: the "
            "counts hold for this data set alone."
        )
    if found.preset != "full" and any(need.demand.sample_bytes is not None for need in found.needs):
        yield (
            f"The published figures are of the full workload; preset {found.preset} trains something smaller: its own "
            "rate is that of a run with --data synthetic (--like RUN)."
        )
