"""Rates of the reader benchmark `dlbench io`, and the number of accelerators that they can feed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Literal

import dlbench
from dlbench.perfmodels.data_sheets import Demand
from dlbench.records.data_path import ReadingRate
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, reader
from dlbench.report.wording import basis_text, ranks_text
from dlbench.stats.estimates import MIN_RUNS, Estimate, mean_estimate, median_estimate
from dlbench.units import format_number, format_seconds
from dlbench.views.readers import complement, storage_cell

FORMAT = "dlbench.io"

Cache = Literal["cold", "warm"]
Limit = Literal["fetch", "prepare"]

LIMIT_TITLES: dict[Limit, str] = {"fetch": "fetching", "prepare": "preparing"}
_NEEDS_TITLE = "Needs of one accelerator"
_MB = 1e6
MAX_SIZE_FACTOR = 1.5  # Largest ratio of sizes of samples here and in the published set without a remark.
_NOT_MEASURED = "not measured"


def _count_cell(figure: Estimate) -> Cell:
    """Returns a number of whole accelerators, with the figure itself if it is small."""
    value = figure.value
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f"[{format_number(figure.low, 2)}, {format_number(figure.high, 2)}]"
    if value < 1:
        return Cell(f"{format_number(value, 2)} of one", interval, number=value)
    if value < 100:
        return Cell(f"{math.floor(value)} ({format_number(value, 2)})", interval, number=value)
    return Cell(f"{math.floor(value):,}", interval, number=value)


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The rates of the readers in one state of the page cache."""

    ranks: int = field(metadata=column("Ranks", is_brief=True))  # Processes that read at the same time, as ranks do.
    cache: Cache = field(metadata=column("Page cache", is_brief=True))
    in_force: bool  # Whether the page cache was in that state; otherwise there are no figures.
    told: str = field(metadata=column(name="cache_state"))  # State of the page cache, in words.
    loader_workers: int = field(metadata=column("Readers per rank"))
    prefetch_batches: int
    samples_per_s: Estimate | None = field(metadata=column("Samples/s", missing=_NOT_MEASURED, is_brief=True))
    bytes_per_s: Estimate | None = field(
        metadata=column("MB/s", "mb_per_s", value=lambda rate: rate.scaled(1 / _MB, "MB/s"), is_brief=True)
    )
    sample_bytes: float | None  # Stored bytes per sample, mean.
    fetch_share: Estimate | None  # Fetching over fetching and preparing (1).
    prepare_share: Estimate | None  # Preparing over fetching and preparing (1).
    fetching: Estimate | None = field(metadata=column("Fetching", "fetch_time_share", is_brief=True))
    preparing: Estimate | None = field(metadata=column("Preparing", "prepare_time_share", is_brief=True))
    neither: Estimate | None = field(metadata=column("Other", "other_time_share", is_brief=True))
    storage_share: float | None  # Bytes from devices or the network over bytes of samples; None: not counted.
    fetch_samples_per_s: Estimate | None  # Rate of as many readers if preparing took no time.
    limit: Limit | None  # The larger of fetching and preparing.
    opens_per_s: Estimate | None = field(metadata=column("Opens/s", is_brief=True))
    stats_per_s: Estimate | None = field(metadata=column("Stats/s", is_brief=True))
    names_per_s: Estimate | None = field(metadata=column("Names listed/s", is_brief=True))
    num_files: int
    names_from: str | None  # Source of the names of files; None for a data set of few files.
    open_s: float  # Seconds until the names were known.
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fed:
    """The number of accelerators that one supply feeds."""

    ranks: int = field(metadata=column("Ranks", is_brief=True))
    cache: Cache = field(metadata=column("Page cache", is_brief=True))
    accelerators: Estimate = field(metadata=column("How many", text=_count_cell, is_brief=True))
    by_fetching: Estimate | None = field(metadata=column("By fetching alone", text=_count_cell, is_brief=True))
    limit: Limit = field(metadata=column("Limited by", text=LIMIT_TITLES.__getitem__, is_brief=True))


@dataclass(frozen=True, kw_only=True)
class Need:
    """The demand of one accelerator, and the supplies that feed it."""

    demand: Demand
    bytes_per_s: float | None  # Demand with the mean sample of this data set; None if its size is not known.
    fed: tuple[Fed, ...]


@dataclass(frozen=True, kw_only=True)
class Io:
    """The JSON of `dlbench io` without training."""

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
    """Returns the rates of a reader benchmark; raises ValueError if it left the page cache as it was."""
    if answer.cache == "any":
        raise ValueError("the reader benchmark ran with the page cache as it was")
    repeats = [repeat.together for repeat in answer.repeats if answer.cache_in_force and repeat.together.samples]
    readers = answer.processes * max(1, answer.loader_workers)
    busy = [rates for rates in repeats if rates.fetch_s + rates.prepare_s > 0]
    shares = [rates.fetch_s / (rates.fetch_s + rates.prepare_s) for rates in busy]
    fetching = [rates.fetch_s / (rates.seconds * readers) for rates in repeats]
    preparing = [rates.prepare_s / (rates.seconds * readers) for rates in repeats]
    neither = [1 - fetch - prepare for fetch, prepare in zip(fetching, preparing, strict=True)]
    fetched_per_s = [rates.samples * readers / rates.fetch_s for rates in repeats if rates.fetch_s]
    counted = [rates for rates in repeats if rates.storage_bytes is not None]
    counted_bytes = sum(rates.raw_bytes for rates in counted)
    num_samples = sum(rates.samples for rates in repeats)
    fetch_share = _estimate(shares, "fraction", mean_estimate)
    prepare_share = sample_bytes = storage_share = None
    limit: Limit | None = None
    if fetch_share is not None:
        prepare_share = complement(fetch_share)
        limit = "fetch" if fetch_share.value >= 0.5 else "prepare"
    if num_samples:
        sample_bytes = sum(rates.raw_bytes for rates in repeats) / num_samples
    if counted_bytes:
        storage_share = sum(rates.storage_bytes or 0 for rates in counted) / counted_bytes
    return Supply(
        ranks=answer.processes,
        cache=answer.cache,
        in_force=bool(repeats),
        told=answer.cache_state,
        loader_workers=answer.loader_workers,
        prefetch_batches=answer.prefetch_batches,
        samples_per_s=_estimate([rates.samples_per_s for rates in repeats], "samples/s"),
        bytes_per_s=_estimate([rates.bytes_per_s for rates in repeats], "bytes/s"),
        sample_bytes=sample_bytes,
        fetch_share=fetch_share,
        prepare_share=prepare_share,
        storage_share=storage_share,
        fetching=_estimate(fetching, "fraction", mean_estimate),
        preparing=_estimate(preparing, "fraction", mean_estimate),
        neither=_estimate(neither, "fraction", mean_estimate),
        fetch_samples_per_s=_estimate(fetched_per_s, "samples/s"),
        limit=limit,
        opens_per_s=_estimate([rates.opens_per_s for rates in repeats if rates.opens_per_s], "opens/s"),
        stats_per_s=_estimate([rates.stats_per_s for rates in repeats if rates.stats_per_s], "stats/s"),
        names_per_s=_estimate([rates.names_per_s for rates in repeats if rates.names_per_s], "names/s"),
        **{name: getattr(answer, name) for name in ("num_files", "names_from", "open_s", "warnings")},
    )


def _estimate(
    values: Sequence[float], unit: str, make: Callable[[Sequence[float], str], Estimate] = median_estimate
) -> Estimate | None:
    return make(values, unit) if values else None


def need_of(demand: Demand, supplies: Sequence[Supply]) -> Need:
    """Returns a demand with all supplies that have figures."""
    per_accelerator = 1 / demand.samples_per_s
    fed = []
    for supply in supplies:
        if supply.samples_per_s is None or supply.limit is None:
            continue
        by_fetching = supply.fetch_samples_per_s
        if by_fetching is not None:
            by_fetching = by_fetching.scaled(per_accelerator, "accelerators")
        fed.append(
            Fed(
                ranks=supply.ranks,
                cache=supply.cache,
                accelerators=supply.samples_per_s.scaled(per_accelerator, "accelerators"),
                by_fetching=by_fetching,
                limit=supply.limit,
            )
        )
    sample_bytes = _sample_bytes(supplies)
    bytes_per_s = None if sample_bytes is None else demand.samples_per_s * sample_bytes
    return Need(demand=demand, bytes_per_s=bytes_per_s, fed=tuple(fed))


def _sample_bytes(supplies: Sequence[Supply]) -> float | None:
    return next((supply.sample_bytes for supply in supplies if supply.sample_bytes is not None), None)


def io_document(io: Io) -> Document:
    """Returns the rates and needs as a document for every format."""
    supplies = columns_of(
        Supply,
        *("cache", "ranks", "samples_per_s", "bytes_per_s", "fetch_share", "prepare_share"),
        *("fetching", "preparing", "neither"),
        Column("storage_share", "From storage", "storage_share", _storage_cell, is_brief=True),
        *("loader_workers", "prefetch_batches", "limit", "told"),
    )
    sheets: list[Sheet[Any]] = [
        Sheet(
            name="io-gives",
            title="Rates of the readers",
            columns=supplies,
            rows=io.supplies,
            caption="Reading and preparing without training, all ranks together. Shares of the readers' time: fetching "
            "is reading stored bytes, preparing is decoding and augmenting, other is handing samples over and waiting.",
            in_terminal=True,
        )
    ]
    with_names = [supply for supply in io.supplies if supply.names_per_s is not None]
    if with_names:
        columns = columns_of(Supply, "cache", "ranks", "opens_per_s", "stats_per_s", "names_per_s")
        sheets.append(Sheet(name="io-calls", title="Opening files", columns=columns, rows=with_names, in_terminal=True))
    words = tuple(_supply_words(io))
    sections = [Section(id="gives", title=sheets[0].title, words=words, brief=words, sheets=tuple(sheets))]
    if io.needs:
        words = tuple(_need_words(io))
        sections.append(
            Section(id="needs", title=_NEEDS_TITLE, words=words, brief=words, sheets=tuple(_needs_sheets(io)))
        )
    return Document(
        title=f"dlbench io: {io.workload} ({io.preset}), {io.kind}, {io.num_samples:,} samples",
        dlbench_version=dlbench.__version__,
        sections=tuple(sections),
        data=io,
    )


def _storage_cell(supply: Supply) -> Cell | None:
    if supply.samples_per_s is None:
        return None
    if supply.storage_share is None:
        return Cell("not counted")
    return storage_cell(supply.storage_share, 0)


def _supply_words(io: Io) -> Iterator[str]:
    yield f"Read from {io.source}."
    for supply in io.supplies:
        if not supply.in_force:
            yield f"{supply.cache.capitalize()} at {ranks_text(supply.ranks)}: {_NOT_MEASURED}: {supply.told}."
    measured = [supply for supply in io.supplies if supply.samples_per_s is not None]
    if measured:
        last = measured[-1]
        assert last.samples_per_s is not None
        workers = "reads in the rank itself (data.loader_workers 0)"
        if last.loader_workers == 1:
            workers = "has 1 reader process (data.loader_workers)"
        elif last.loader_workers > 1:
            workers = f"has {last.loader_workers} reader processes (data.loader_workers)"
        basis = basis_text(last.samples_per_s, "repeat")
        if not last.samples_per_s.is_confident:
            basis += f"; --repeats {MIN_RUNS} gives an interval of 95 %"
        yield (
            f"Each rank {workers}, on {io.host}; in brackets: {basis}. "
            f"Samples of {last.sample_bytes or 0:,.0f} bytes on average."
        )
        yield from _listing_words(measured[0])  # Cold, at the fewest ranks, if cold was in force.
    warnings = chain.from_iterable(supply.warnings for supply in measured)
    yield from dict.fromkeys(f"{warning.rstrip('.')}." for warning in warnings)


def _listing_words(supply: Supply) -> Iterator[str]:
    if supply.names_from is None or supply.names_per_s is None:
        return
    clauses = (clause for clause in supply.told.split("; ") if clause.startswith("names and"))
    cache = next(clauses, "names may be cached")
    listing_s = supply.num_files * supply.ranks / supply.names_per_s.value
    yield (
        f"The names of {supply.num_files:,} files came from {supply.names_from} in {format_seconds(supply.open_s)}; "
        f"listing them would take one rank {format_seconds(listing_s)}, by the {supply.cache} listing rate ({cache})."
    )


def _needs_sheets(io: Io) -> Iterator[Sheet[Any]]:
    yield Sheet(
        name="io-needs",
        title=_NEEDS_TITLE,
        columns=(
            Column("accelerator", "One", "demand.accelerator", is_brief=True),
            Column("samples_per_s", "Samples/s", "demand.samples_per_s", unit="samples/s", is_brief=True),
            _rate_column("published_mb_per_s", "MB/s, published set", "demand.bytes_per_s"),
            _rate_column("mb_per_s", "MB/s, this set", "bytes_per_s"),
            Column("source", "Source", "demand.source"),
        ),
        rows=io.needs,
        in_terminal=True,
    )
    if all(supply.samples_per_s is None for supply in io.supplies):
        return
    rows = [(need, fed) for need in io.needs for fed in need.fed]
    accelerator: Column[Any] = Column("accelerator", "Feeds", "demand.accelerator", is_brief=True)
    yield Sheet(
        name="io-feeds",
        title="Number of accelerators that can be fed",
        columns=(
            *columns_of(Need, accelerator, of=itemgetter(0)),
            *columns_of(Fed, "ranks", "cache", "accelerators", "limit", "by_fetching", of=itemgetter(1)),
        ),
        rows=rows,
        in_terminal=True,
    )


def _rate_column(name: str, title: str, path: str) -> Column[Need]:
    """Returns a column of bytes per second, given by their path, in MB/s."""
    bytes_per_s = reader(path)

    def megabytes(need: Need) -> float | None:
        value: float | None = bytes_per_s(need)
        return None if value is None else value / _MB

    def cell(need: Need) -> Cell | None:
        value = megabytes(need)
        return None if value is None else Cell(format_number(value, 3), number=bytes_per_s(need))

    return Column(name, title, megabytes, cell, is_brief=True)


def _need_words(io: Io) -> Iterator[str]:
    if any(need.fed for need in io.needs):
        yield "By fetching alone: the number if preparing took no time, roughly the number / Fetching."
    for need in io.needs:
        yield f"{need.demand.accelerator}: {need.demand.source}."
    sample_bytes = _sample_bytes(io.supplies)
    published = [need.demand.sample_bytes for need in io.needs if need.demand.sample_bytes is not None]
    if sample_bytes is not None and published:
        factor = sample_bytes / published[0]
        if not 1 / MAX_SIZE_FACTOR <= factor <= MAX_SIZE_FACTOR:
            yield (
                f"Samples here are {format_number(factor, 2)} times as large as those of the published figures: the "
                "numbers are valid for this data set only."
            )
    if io.preset != "full" and published:
        yield (
            f"The published figures are of the full workload; preset {io.preset} trains something smaller. The rate of "
            "the preset is that of a run with --data synthetic (--like RUN)."
        )
