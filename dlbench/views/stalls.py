"""The view `stalls`: what fetching and preparing samples costs, by difference (`dlbench io --tiers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import dlbench
from dlbench.analysis.attribution import about_means
from dlbench.analysis.measures import RunMeasures
from dlbench.analysis.side_by_side import Twins, twins
from dlbench.records.data_path import ReadingResult
from dlbench.records.scan import Run
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import basis_text, figure_text, percent, repeat_text, value_text
from dlbench.specs.plan import Variant
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, mean_estimate, placed
from dlbench.stats.pairing import RunKey
from dlbench.views.decomposition import SeriesPoint, series_facts
from dlbench.views.model import Report
from dlbench.views.readers import WARM_SHARE, storage_cell, storage_share
from dlbench.views.view import ReportSource, ReportView, place_of

Tier = Literal["synthetic", "cached", "cold"]
VARIANTS: Mapping[Tier, Variant] = {"synthetic": "synthetic-input", "cached": "cached-input", "cold": "plain"}

WARM_ENOUGH = 0.05  # Share of bytes from storage that a run may read whose samples are to be in the page cache.

PART_TITLES = {
    "ingestion": "step without input (synthetic data)",
    "preparation": "preparation stall (decode, augment)",
    "fetch": "fetch stall (storage)",
}
TIER_TITLES: dict[Tier, str] = {"synthetic": "synthetic data", "cached": "warm page cache", "cold": "cold page cache"}
NOT_MEASURED = "not measured"
Kinds = Mapping[Tier, Mapping[RunKey, tuple[Run, RunMeasures]]]
NEGLIGIBLE = 0.01  # Share of a step below which a stall, interval and all, costs nothing worth words.
_NAMES = {"preparation": "preparing samples (decode, augment)", "fetch": "fetching them from storage"}


@dataclass(frozen=True, kw_only=True)
class StallPart:
    """One part of the step with cold storage, or of the cached one where cold was not possible."""

    name: Literal["ingestion", "preparation", "fetch"] = field(metadata=column(name="part"))
    seconds: Estimate | None = field(metadata=column("Per step", missing=NOT_MEASURED, is_brief=True))
    """Per step, of geometric means over repeats; None: not measured."""
    share: Estimate | None = field(metadata=column("Share", is_brief=True))
    """Of the whole; shares sum to 1 over the parts that are there."""
    why: str = field(metadata=column(name="why_not_measured"))


@dataclass(frozen=True, kw_only=True)
class TierRuns:
    """The runs of one kind at a scaling point."""

    tier: Tier
    rate: Estimate = field(metadata=column("Samples/s", "samples_per_s", is_brief=True))
    step_s: Estimate = field(metadata=column("Step", is_brief=True))  # Mean step, geometric mean over runs.
    storage_share: float | None
    """Of the bytes read, those that came from storage and not from the page cache; mean over runs, None: not known."""
    epochs: float | None  # Epochs that a run read, the most of any; None: not known.
    cache: str = field(metadata=column("Page cache", value=lambda found: found or None))


@dataclass(frozen=True, kw_only=True)
class Stalls(SeriesPoint):
    """Where steps wait for input at one scaling point of `dlbench io --tiers`."""

    sample_unit: str
    tiers: tuple[TierRuns, ...]  # Kinds of runs with figures, in the order synthetic, cached, cold.
    ceiling: Estimate | None
    """Samples per second that the ranks take where nothing waits for input; None: no run with synthetic data."""
    parts: tuple[StallPart, ...]
    whole_s: Estimate | None  # The step that the parts sum to; None where they sum to nothing.
    whole_is: Tier
    pairs: int  # Repeats in which all that is subtracted was measured.
    missing: tuple[str, ...]
    notes: tuple[str, ...]  # What the figures must not be mistaken for.


@dataclass(frozen=True, kw_only=True)
class IoTiers:
    """What the JSON of `dlbench io --tiers` holds."""

    format: str = "dlbench.io-tiers"
    version: int = 1
    points: tuple[Stalls, ...]


def stalls(runs: Sequence[Run]) -> tuple[Stalls, ...]:
    """Every scaling point whose series has the variants of `dlbench io --tiers`, in order of series, ranks, nodes.

    Only repeats count of which all kinds of runs that are subtracted have figures.
    """
    return tuple(map(_point, twins(runs, VARIANTS.values(), lambda planned: "cached-input" in planned)))


def _point(found: Twins) -> Stalls:
    kinds: Kinds = {tier: found.runs[variant] for tier, variant in VARIANTS.items()}
    reasons = {tier: _why_not(tier, _readings(kinds[tier])) for tier in VARIANTS}
    repeats = found.repeats([variant for tier, variant in VARIANTS.items() if not reasons[tier]])
    plan = found.plan
    rate_unit = f"{plan.workload.sample_unit}/s"
    parts, whole_is = _parts(kinds, repeats, reasons)
    tiers = tuple(_tier(tier, known, rate_unit) for tier, known in kinds.items() if known)
    has_parts = any(part.seconds is not None for part in parts)
    whole = {key: _step_s(kinds[whole_is][key]) for key in repeats} if has_parts else {}
    return Stalls(
        **series_facts(plan),
        sample_unit=plan.workload.sample_unit,
        tiers=tiers,
        ceiling=next((one.rate for one in tiers if one.tier == "synthetic"), None),
        parts=parts,
        whole_s=geometric_mean_estimate(whole, "s") if has_parts else None,
        whole_is=whole_is,
        pairs=len(whole),
        missing=found.missing,
        notes=tuple(_notes(kinds)),
    )


def _step_s(one: tuple[Run, RunMeasures]) -> float:
    return sum(one[1].parts.values())


def _readings(by_repeat: Mapping[RunKey, tuple[Run, RunMeasures]]) -> list[ReadingResult | None]:
    return [run.record.reading for run, _ in by_repeat.values() if run.record is not None]


def _parts(kinds: Kinds, repeats: Sequence[RunKey], reasons: Mapping[Tier, str]) -> tuple[tuple[StallPart, ...], Tier]:
    """The parts of a step over the same repeats, and whose step they sum to."""
    whole_is: Tier = "cold" if not reasons["cold"] else "cached"
    no_pair = "" if repeats else "no repeat has figures of all its runs"

    def steps(tier: Tier) -> list[float]:
        return [one["step"] for one in about_means([{"step": _step_s(kinds[tier][key])} for key in repeats])]

    def part(name: Literal["ingestion", "preparation", "fetch"], tier: Tier, less: Tier | None) -> StallPart:
        why = reasons[tier] or (reasons[less] if less else "") or reasons["synthetic"] or no_pair
        if not why and whole_is == "cached" and reasons["cached"]:
            why = reasons["cached"]
        if why:
            return StallPart(name=name, seconds=None, share=None, why=why)
        own, mean = steps(tier), fmean(steps(whole_is))
        values = own if less is None else [a - b for a, b in zip(own, steps(less), strict=True)]
        # Shares of the mean whole, so that they sum to 1 as the seconds sum to it.
        return StallPart(
            name=name,
            seconds=mean_estimate(dict(zip(repeats, values, strict=True)), "s"),
            share=mean_estimate({k: value / mean for k, value in zip(repeats, values, strict=True)}, "fraction"),
            why="",
        )

    ingestion = part("ingestion", "synthetic", None)
    return (ingestion, part("preparation", "cached", "synthetic"), part("fetch", "cold", "cached")), whole_is


def _why_not(tier: Tier, readings: Sequence[ReadingResult | None]) -> str:
    """Why the runs of a kind say nothing of it; empty if they do."""
    if not readings:
        return f"no run with {'' if tier == 'synthetic' else 'a '}{TIER_TITLES[tier]} has figures"
    if tier == "synthetic":
        return ""
    for reading in readings:
        if reading is None:
            return f"a run with a {TIER_TITLES[tier]} does not say what became of the page cache"
        if not reading.cache_in_force:
            return f"the page cache was not {'warm' if tier == 'cached' else 'cold'}: {reading.cache}"
    return ""


def _tier(tier: Tier, by_repeat: Mapping[RunKey, tuple[Run, RunMeasures]], rate_unit: str) -> TierRuns:
    readings = [one for one in _readings(by_repeat) if one is not None]
    shares = [share for one in readings if (share := storage_share(one.epochs)) is not None]
    return TierRuns(
        tier=tier,
        rate=geometric_mean_estimate({key: one.throughput for key, (_, one) in by_repeat.items()}, rate_unit),
        step_s=geometric_mean_estimate({key: _step_s(one) for key, one in by_repeat.items()}, "s"),
        storage_share=sum(shares) / len(shares) if shares else None,
        epochs=max((float(len(one.epochs)) for one in readings if one.epochs), default=None),
        cache="" if tier == "synthetic" or not readings else readings[0].cache,
    )


def _notes(kinds: Kinds) -> Iterator[str]:
    readings = {tier: [one for one in _readings(kinds[tier]) if one is not None] for tier in kinds}
    cold = [one for one in readings["cold"] if one.cache_in_force]
    # Where nobody saw that samples were not in the page cache, they may have been.
    if any(epoch.cached_share is None or epoch.cached_share > WARM_SHARE for one in cold for epoch in one.epochs[1:]):
        yield (
            "The runs with a cold page cache read more than one epoch: from the second on samples may come from the "
            "page cache, so that the fetch stall is smaller than in the first epoch. Fewer steps, or more data, stay "
            "within one"
        )
    # Where all was cached, the kernel fetched something else, e.g. programs.
    kept = [one for one in readings["cached"] if one.cached_share is None or one.cached_share <= 1 - WARM_ENOUGH]
    warm = [share for one in kept if (share := storage_share(one.epochs)) is not None]
    if warm and max(warm) > WARM_ENOUGH:
        yield (
            f"Of the bytes read in runs with a warm page cache up to {max(warm):.0%} came from storage all the same: "
            "the preparation stall holds some fetching"
        )
    workers = {one.loader_workers for known in readings.values() for one in known}
    if len(workers) > 1:
        yield (
            f"The runs had different numbers of reader processes ({', '.join(map(str, sorted(workers)))} per rank): "
            "set data.loader_workers to one of them"
        )


def _of_point(*picks: str) -> tuple[Column[Any], ...]:
    at: Column[Any] = Column("", "At", place_of, is_brief=True)
    return columns_of(Stalls, *picks, "ranks", "nodes", at, of=itemgetter(0))


def _parts_sheet(found: Sequence[Stalls]) -> Sheet[tuple[Stalls, StallPart]]:
    title: Column[Any] = Column("", "Part of the step", lambda part: PART_TITLES[part.name], is_brief=True)
    part = itemgetter(1)
    return Sheet(
        name="stalls",
        title="Where a step waits for input",
        columns=(
            *_of_point("series=series", "workload=workload"),
            *columns_of(StallPart, "name", title, "seconds", "share", of=part),
            *columns_of(Stalls, "share_of=whole_is", "pairs", of=itemgetter(0)),
            *columns_of(StallPart, "why", of=part),
        ),
        rows=[(point, one) for point in found for one in point.parts],
        caption="Preparation stall: step with a warm page cache less that with synthetic data. Fetch stall: cold less "
        "warm (DS-Analyzer's method).",
        in_terminal=True,
    )


def _runs_sheet(found: Sequence[Stalls]) -> Sheet[tuple[Stalls, TierRuns]]:
    def share(tier: TierRuns) -> Cell:
        if tier.tier == "synthetic":
            return Cell("nothing is read")
        if tier.storage_share is None:
            return Cell("unknown")
        return storage_cell(tier.storage_share)

    title: Column[Any] = Column("", "Runs with", lambda one: TIER_TITLES[one.tier], is_brief=True)
    from_storage: Column[Any] = Column("storage_share", "From storage", "storage_share", share)
    runs: Column[Any] = Column("runs", "Runs", "step_s.n")
    picks = ("tier", title, "rate", "step_s", from_storage, "epochs", runs, "cache")
    return Sheet(
        name="stall-runs",
        title="The same plan with synthetic data, a warm and a cold page cache",
        columns=(*_of_point("series=series"), *columns_of(TierRuns, *picks, of=itemgetter(1))),
        rows=[(point, tier) for point in found for tier in point.tiers],
        caption="Geometric means over runs, all ranks together. Cell of synthetic data: the ingestion ceiling.",
        in_terminal=True,
    )


class StallsView(ReportView):
    """What input costs, over all series that ran with synthetic, cached and cold data."""

    id = "stalls"
    title = "Input stalls"
    key = "stalls"
    after = "slow-nodes"

    def numbers(self, source: ReportSource) -> tuple[Stalls, ...]:
        return stalls(source.scan.runs)

    def sections(self, report: Report) -> tuple[Section, ...]:
        return _sections(report.all_of(Stalls))


def _sections(found: Sequence[Stalls]) -> tuple[Section, ...]:
    if not found:
        return ()
    words, notes = tuple(map(_finding, found)), tuple(text for point in found for text in _remarks(point))
    # What fetching and preparing cost at the largest point.
    point = found[-1]
    names = {"preparation": "preparing", "fetch": "fetching"}
    parts = [
        f"{names[part.name]} {NOT_MEASURED if part.share is None else value_text(part.share)}"
        for part in point.parts
        if part.name in names
    ]
    return (
        Section(
            id=StallsView.id,
            title=StallsView.title,
            headline=f"{place_of(point)}: {', '.join(parts)} of the step",
            words=words,
            brief=(*words, *notes),
            sheets=(_parts_sheet(found), _runs_sheet(found)),
            notes=notes,
        ),
    )


def stalls_document(found: Sequence[Stalls]) -> Document:
    """What `dlbench io --tiers` prints."""
    return Document(
        title="dlbench io: input stalls",
        dlbench_version=dlbench.__version__,
        sections=_sections(found),
        data=IoTiers(points=tuple(found)),
    )


def _finding(point: Stalls) -> str:
    start = f"{point.workload} ({point.preset}, {point.exchanged_by}) at {place_of(point)}: "
    if point.ceiling is None:
        start += "the ingestion ceiling is not measured"
    else:
        start += f"ranks take {figure_text(point.ceiling)} {point.ceiling.unit} where nothing waits for input"
    return "; ".join([start, *(_part(part, point.whole_is) for part in point.parts if part.name != "ingestion")]) + "."


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
    """What must be known to read the figures of a point."""
    first = next((part.seconds for part in point.parts if part.seconds is not None), None)
    if first is not None and not first.is_confident:
        unit = "sessions" if (first.sessions or 1) > 1 else "repeats"
        few = f"{first.units} of {MIN_RUNS} {unit} that an interval of 95 % needs"
        yield f"{place_of(point)}: {few}: {repeat_text(first)}."
    for text in point.notes:
        yield f"{place_of(point)}: {text}."
    for text in point.missing:
        yield f"Left out: {text}."
    cold = next((one for one in point.tiers if one.tier == "cold"), None)
    if cold is not None and cold.cache:
        known = cold.storage_share
        share = "" if known is None else f"; {storage_cell(known).text} of the bytes came from storage"
        yield f"Cold at {place_of(point)}: {cold.cache}{share}."
