"""The view `stalls`: the cost of fetching and preparing samples, by differences of runs (`dlbench io --tiers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import dlbench
from dlbench.analysis.attribution import about_means
from dlbench.analysis.measures import RunMeasures
from dlbench.analysis.scaling import Twins, twins
from dlbench.records.data_path import ReadEpoch, ReadingResult
from dlbench.records.scan import Run
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import basis_text, figure_text, percent, repeat_text, value_text
from dlbench.specs.plan import Variant
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, mean_estimate, of_known, placed
from dlbench.stats.pairing import RunKey
from dlbench.views.decomposition import SeriesPoint, series_facts
from dlbench.views.model import Report, ReportSource, ReportView, known_mean, optional_text, place_of
from dlbench.views.readers import WARM_SHARE, storage_cell, storage_share

Tier = Literal["synthetic", "cached", "cold"]
VARIANTS: Mapping[Tier, Variant] = {"synthetic": "synthetic-input", "cached": "cached-input", "cold": "plain"}

WARM_ENOUGH = 0.05  # Largest share of bytes from storage in a run with a warm page cache.

PartName = Literal["ingestion", "preparation", "fetch"]
PART_TITLES: dict[PartName, str] = {
    "ingestion": "step without input (synthetic data)",
    "preparation": "preparation stall (decode, augment)",
    "fetch": "fetch stall (storage)",
}
TIER_TITLES: dict[Tier, str] = {"synthetic": "synthetic data", "cached": "warm page cache", "cold": "cold page cache"}
NOT_MEASURED = "not measured"
Kinds = Mapping[Tier, Mapping[RunKey, tuple[Run, RunMeasures]]]
NEGLIGIBLE = 0.01  # Share of a step below which a stall, with its interval, is negligible.
_NAMES = {"preparation": "preparing samples (decode, augment)", "fetch": "fetching samples from storage"}
_SHORT_NAMES = {"preparation": "preparing", "fetch": "fetching"}


@dataclass(frozen=True, kw_only=True)
class StallPart:
    """One part of the step with a cold page cache, or with a warm one if cold was not possible."""

    name: PartName = field(metadata=column("Part of the step", "part", text=PART_TITLES.__getitem__, is_brief=True))
    seconds: Estimate | None = field(metadata=column("Per step", missing=NOT_MEASURED, is_brief=True))
    share: Estimate | None = field(metadata=column("Share", is_brief=True))  # Sum: 1.
    why: str = field(metadata=column(name="why_not_measured"))


@dataclass(frozen=True, kw_only=True)
class TierRuns:
    """The runs of one kind at a scaling point."""

    tier: Tier = field(metadata=column("Runs with", text=TIER_TITLES.__getitem__, is_brief=True))
    rate: Estimate = field(metadata=column("Samples/s", "samples_per_s", is_brief=True))
    step_s: Estimate = field(metadata=column("Step", is_brief=True))  # Mean step, geometric mean over runs.
    storage_share: float | None  # Of the bytes read (1), mean over runs; None: not known.
    epochs: float | None  # Most epochs that a run read; None: not known.
    cache: str = field(metadata=column("Page cache", value=optional_text))


@dataclass(frozen=True, kw_only=True)
class Stalls(SeriesPoint):
    """The input stalls of steps at one scaling point of `dlbench io --tiers`."""

    sample_unit: str
    tiers: tuple[TierRuns, ...]  # Kinds of runs with figures, in the order synthetic, cached, cold.
    ceiling: Estimate | None  # Samples per second without waiting for input; None: no run with synthetic data.
    parts: tuple[StallPart, ...]
    whole_s: Estimate | None  # Seconds of the step that the parts sum to; None without measured parts.
    whole_is: Tier  # The kind of runs of this step.
    pairs: int  # Repeats with all kinds of runs that are subtracted.
    missing: tuple[str, ...]
    notes: tuple[str, ...]  # Limits of the figures.


@dataclass(frozen=True, kw_only=True)
class IoTiers:
    """The JSON of `dlbench io --tiers`."""

    format: str = "dlbench.io-tiers"
    version: int = 1
    points: tuple[Stalls, ...]


def stalls(runs: Sequence[Run]) -> tuple[Stalls, ...]:
    """Returns every scaling point with the variants of `dlbench io --tiers`, over repeats in which all have figures."""
    return tuple(map(_point, twins(runs, VARIANTS.values(), lambda planned: "cached-input" in planned)))


def _point(series_point: Twins) -> Stalls:
    kinds: Kinds = {tier: series_point.runs[variant] for tier, variant in VARIANTS.items()}
    reasons = {tier: _why_not(tier, _readings(kinds[tier])) for tier in VARIANTS}
    repeats = series_point.repeats([variant for tier, variant in VARIANTS.items() if not reasons[tier]])
    plan = series_point.plan
    rate_unit = f"{plan.workload.sample_unit}/s"
    parts, whole_is = _parts(kinds, repeats, reasons)
    tiers = [_tier(tier, by_repeat, rate_unit) for tier, by_repeat in kinds.items() if by_repeat]
    steps_s: dict[RunKey, float] = {}
    if any(part.seconds is not None for part in parts):
        steps_s = {key: _step_s(kinds[whole_is][key]) for key in repeats}
    return Stalls(
        **series_facts(plan),
        sample_unit=plan.workload.sample_unit,
        tiers=tuple(tiers),
        ceiling=next((tier_runs.rate for tier_runs in tiers if tier_runs.tier == "synthetic"), None),
        parts=parts,
        whole_s=of_known(geometric_mean_estimate, steps_s, "s"),
        whole_is=whole_is,
        pairs=len(steps_s),
        missing=series_point.missing,
        notes=tuple(_notes(kinds)),
    )


def _step_s(run: tuple[Run, RunMeasures]) -> float:
    _, measures = run
    return sum(measures.parts.values())


def _readings(by_repeat: Mapping[RunKey, tuple[Run, RunMeasures]]) -> list[ReadingResult | None]:
    return [run.record.reading for run, _ in by_repeat.values() if run.record is not None]


def _parts(kinds: Kinds, repeats: Sequence[RunKey], reasons: Mapping[Tier, str]) -> tuple[tuple[StallPart, ...], Tier]:
    """Returns the parts of a step over the same repeats, and the kind of runs whose step they sum to."""
    whole_is: Tier = "cached" if reasons["cold"] else "cold"
    no_pair = "" if repeats else "no repeat has figures of all its runs"

    def steps(tier: Tier) -> list[float]:
        rows = about_means([{"step": _step_s(kinds[tier][key])} for key in repeats])
        return [row["step"] for row in rows]

    def part(name: PartName, tier: Tier, less: Tier | None) -> StallPart:
        why = reasons[tier] or reasons[less or tier] or reasons["synthetic"] or no_pair
        if not why and whole_is == "cached":
            why = reasons["cached"]
        if why:
            return StallPart(name=name, seconds=None, share=None, why=why)
        values, mean = steps(tier), fmean(steps(whole_is))
        if less is not None:
            values = [step - other for step, other in zip(values, steps(less), strict=True)]
        # Shares of the mean step, so that they sum to 1 as the seconds sum to it.
        return StallPart(
            name=name,
            seconds=mean_estimate(dict(zip(repeats, values, strict=True)), "s"),
            share=mean_estimate({key: value / mean for key, value in zip(repeats, values, strict=True)}, "fraction"),
            why="",
        )

    ingestion = part("ingestion", "synthetic", None)
    return (ingestion, part("preparation", "cached", "synthetic"), part("fetch", "cold", "cached")), whole_is


def _why_not(tier: Tier, readings: Sequence[ReadingResult | None]) -> str:
    """Returns why the runs of a kind cannot be used; empty if they can."""
    if tier == "synthetic":
        return "" if readings else f"no run with {TIER_TITLES[tier]} has figures"
    if not readings:
        return f"no run with a {TIER_TITLES[tier]} has figures"
    state = "warm" if tier == "cached" else "cold"
    for reading in readings:
        if reading is None:
            return f"a run with a {TIER_TITLES[tier]} does not record the state of the page cache"
        if not reading.cache_in_force:
            return f"the page cache was not {state}: {reading.cache}"
    return ""


def _tier(tier: Tier, by_repeat: Mapping[RunKey, tuple[Run, RunMeasures]], rate_unit: str) -> TierRuns:
    readings = [reading for reading in _readings(by_repeat) if reading is not None]
    return TierRuns(
        tier=tier,
        rate=geometric_mean_estimate({key: measures.throughput for key, (_, measures) in by_repeat.items()}, rate_unit),
        step_s=geometric_mean_estimate({key: _step_s(run) for key, run in by_repeat.items()}, "s"),
        storage_share=known_mean(storage_share(reading.epochs) for reading in readings),
        epochs=max((float(len(reading.epochs)) for reading in readings if reading.epochs), default=None),
        cache=next((reading.cache for reading in readings if tier != "synthetic"), ""),
    )


def _notes(kinds: Kinds) -> Iterator[str]:
    readings = {tier: [reading for reading in _readings(kinds[tier]) if reading is not None] for tier in kinds}
    later_epochs: list[ReadEpoch] = []
    for reading in readings["cold"]:
        if reading.cache_in_force:
            later_epochs += reading.epochs[1:]
    # If it is not known that samples were not in the page cache, they may have been.
    if any(epoch.cached_share is None or epoch.cached_share > WARM_SHARE for epoch in later_epochs):
        yield (
            "The runs with a cold page cache read more than one epoch: from the second on samples may come from the "
            "page cache, so that the fetch stall is smaller than in the first epoch. Fewer steps, or more data, stay "
            "within one"
        )
    # If all samples were cached, the kernel read other files, e.g. programs.
    highest = 0.0
    for reading in readings["cached"]:
        if reading.cached_share is None or reading.cached_share <= 1 - WARM_ENOUGH:
            highest = max(highest, storage_share(reading.epochs) or 0.0)
    if highest > WARM_ENOUGH:
        yield (
            f"Up to {highest:.0%} of the bytes read in runs with a warm page cache came from storage: the preparation "
            "stall includes some fetching"
        )
    workers = sorted({reading.loader_workers for reading in chain.from_iterable(readings.values())})
    if len(workers) > 1:
        yield (
            f"The runs had different numbers of reader processes ({', '.join(map(str, workers))} per rank): set "
            "data.loader_workers to one of them"
        )


def _of_point(*picks: str) -> tuple[Column[Any], ...]:
    at: Column[Any] = Column("", "At", place_of, is_brief=True)
    return columns_of(Stalls, *picks, "ranks", "nodes", at, of=itemgetter(0))


def _parts_sheet(points: Sequence[Stalls]) -> Sheet[tuple[Stalls, StallPart]]:
    rows = [(point, part) for point in points for part in point.parts]
    return Sheet(
        name="stalls",
        title="Input wait of a step",
        columns=(
            *_of_point("series=series", "workload=workload"),
            *columns_of(StallPart, "name", "seconds", "share", of=itemgetter(1)),
            *columns_of(Stalls, "share_of=whole_is", "pairs", of=itemgetter(0)),
            *columns_of(StallPart, "why", of=itemgetter(1)),
        ),
        rows=rows,
        caption="Preparation stall: step with a warm page cache less that with synthetic data. Fetch stall: cold less "
        "warm (DS-Analyzer's method).",
        in_terminal=True,
    )


def _runs_sheet(points: Sequence[Stalls]) -> Sheet[tuple[Stalls, TierRuns]]:
    from_storage: Column[Any] = Column("storage_share", "From storage", "storage_share", _storage_cell)
    runs: Column[Any] = Column("runs", "Runs", "step_s.n")
    picks = ("tier", "rate", "step_s", from_storage, "epochs", runs, "cache")
    rows = [(point, tier) for point in points for tier in point.tiers]
    return Sheet(
        name="stall-runs",
        title="The same plan with synthetic data, a warm and a cold page cache",
        columns=(*_of_point("series=series"), *columns_of(TierRuns, *picks, of=itemgetter(1))),
        rows=rows,
        caption="Geometric means over runs, all ranks together. Synthetic data: the ingestion ceiling.",
        in_terminal=True,
    )


def _storage_cell(tier: TierRuns) -> Cell:
    if tier.tier == "synthetic":
        return Cell("nothing is read")
    if tier.storage_share is None:
        return Cell("unknown")
    return storage_cell(tier.storage_share)


class StallsView(ReportView):
    """The input stalls of all series that ran with synthetic, cached and cold data."""

    id = "stalls"
    title = "Input stalls"
    key = "stalls"
    after = "slow-nodes"

    def numbers(self, source: ReportSource) -> tuple[Stalls, ...]:
        return stalls(source.scan.runs)

    def sections(self, report: Report) -> tuple[Section, ...]:
        return _sections(report.all_of(Stalls))


def _sections(points: Sequence[Stalls]) -> tuple[Section, ...]:
    if not points:
        return ()
    words, notes = tuple(map(_finding, points)), tuple(chain.from_iterable(map(_remarks, points)))
    last = points[-1]
    costs = []
    for part in last.parts:
        if part.name != "ingestion":
            cost = NOT_MEASURED if part.share is None else value_text(part.share)
            costs.append(f"{_SHORT_NAMES[part.name]} {cost}")
    return (
        Section(
            id=StallsView.id,
            title=StallsView.title,
            headline=f"{place_of(last)}: {', '.join(costs)} of the step",
            words=words,
            brief=(*words, *notes),
            sheets=(_parts_sheet(points), _runs_sheet(points)),
            notes=notes,
        ),
    )


def stalls_document(points: Sequence[Stalls]) -> Document:
    """Returns the document of `dlbench io --tiers`."""
    return Document(
        title="dlbench io: input stalls",
        dlbench_version=dlbench.__version__,
        sections=_sections(points),
        data=IoTiers(points=tuple(points)),
    )


def _finding(point: Stalls) -> str:
    ceiling = "the ingestion ceiling is not measured"
    if point.ceiling is not None:
        ceiling = f"ranks process {figure_text(point.ceiling)} {point.ceiling.unit} without waiting for input"
    start = f"{point.workload} ({point.preset}, {point.exchanged_by}) at {place_of(point)}: {ceiling}"
    costs = [_part(part, point.whole_is) for part in point.parts if part.name != "ingestion"]
    return f"{'; '.join([start, *costs])}."


def _part(part: StallPart, whole_is: Tier) -> str:
    name = _NAMES[part.name]
    if part.seconds is None or part.share is None:
        return f"{name}: {NOT_MEASURED}: {part.why}"
    if placed(part.share, -NEGLIGIBLE, NEGLIGIBLE) == "within":
        return f"{name} costs less than {percent(NEGLIGIBLE, 0)} of a step ({figure_text(part.seconds)})"
    if part.seconds.low is not None and part.seconds.low <= 0 <= (part.seconds.high or 0.0):
        return f"whether {name} costs anything is undecided ({figure_text(part.seconds)} per step)"
    if part.seconds.value < 0:
        return f"{name} costs nothing ({figure_text(part.seconds)} per step)"
    basis = "" if part.seconds.is_confident else f" ({basis_text(part.seconds, 'repeat')})"
    share = f"{figure_text(part.share)} of the step with a {TIER_TITLES[whole_is]}"
    return f"{name} costs {figure_text(part.seconds)} per step, {share}{basis}"


def _remarks(point: Stalls) -> Iterator[str]:
    first = next((part.seconds for part in point.parts if part.seconds is not None), None)
    if first is not None and not first.is_confident:
        unit = "sessions" if (first.sessions or 1) > 1 else "repeats"
        few = f"{first.units} of the {MIN_RUNS} {unit} that an interval of 95 % needs"
        yield f"{place_of(point)}: {few}: {repeat_text(first)}."
    for note in point.notes:
        yield f"{place_of(point)}: {note}."
    for reason in point.missing:
        yield f"Left out: {reason}."
    for tier in point.tiers:
        if tier.tier == "cold" and tier.cache:
            share = ""
            if tier.storage_share is not None:
                share = f"; {storage_cell(tier.storage_share).text} of the bytes came from storage"
            yield f"Cold page cache at {place_of(point)}: {tier.cache}{share}."
