"""Pairs of ranks as numbers: time and rate of messages, what congestors make of them, alpha and beta of a level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis.comparability import Condition
from dlbench.analysis.doubts import Doubt
from dlbench.comm.fits import Fit, Fits
from dlbench.comm.measurements import CollectiveGroup, Series, name_of, why_not
from dlbench.lazy import np
from dlbench.perfmodels.lines import fit_line
from dlbench.records.comm import CommPoint, CommRun
from dlbench.report.table import column, times_cell
from dlbench.report.wording import figure_text
from dlbench.specs.comm import LEVELS, LevelName, RankPair
from dlbench.stats.estimates import MIN_RUNS, Estimate, is_other_than, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes

LEAST_OPERATIONS = 100  # Of a run, without which nobody knows the slowest hundredth of them.
LEVEL_TITLES = {"inside": "within a group", "across": "between groups", "beyond": "between leaf switches"}


@dataclass(frozen=True, kw_only=True)
class PairFigure:
    """Messages of one size between two ranks, measured in one way."""

    ranks: RankPair
    pair: str = field(metadata=column("Ranks", is_brief=True))
    level: LevelName = field(metadata=column("Where", text=lambda level: LEVEL_TITLES[level]))
    way: str = field(metadata=column("Measured by", is_brief=True))
    num_bytes: int = field(metadata=column("Size", unit="bytes", is_brief=True))
    time: Estimate = field(metadata=column("Time, median", "time_s", is_brief=True))
    least_s: float = field(metadata=column("Minimum", unit="s"))
    rate: Estimate = field(metadata=column("GB/s", "gb_per_s", is_brief=True))
    beside: Estimate | None = field(metadata=column("Beside congestors", "beside_s"))  # Median time, as `time`.
    factor: Estimate | None = field(metadata=column("Factor, mean", text=times_cell, is_brief=True))
    """Mean time of an operation beside congestors over that alone, in pairs of the same run."""
    factor_p99: Estimate | None = field(metadata=column("Factor, 99th percentile", text=times_cell, is_brief=True))
    operations: int = field(metadata=column("Operations", unit="count"))  # Of each run, at least.


@dataclass(frozen=True, kw_only=True)
class LevelCosts:
    """What a line through the ping-pongs of a level says."""

    level: LevelName
    alpha: Estimate  # Seconds.
    beta: Estimate  # Seconds per byte.


@dataclass(frozen=True, kw_only=True)
class PairsReport:
    """Pairs of ranks at one layout."""

    id: str
    label: str
    conditions: tuple[Condition, ...]
    doubts: tuple[Doubt, ...]
    words: tuple[str, ...]
    congestors: tuple[RankPair, ...]
    num_runs: int
    series: tuple[Series, ...]
    figures: tuple[PairFigure, ...]
    costs: tuple[LevelCosts, ...]
    fit: Fit | None  # To collectives of the same system, carrier and type.
    hosts: tuple[str, ...]  # Of each rank.


def pairs_report(
    group: CollectiveGroup, fits: Fits, label: str, conditions: tuple[Condition, ...], doubts: Sequence[Doubt]
) -> PairsReport:
    """The numbers of a group whose points are of pairs of ranks."""
    congestors, record = group.sample.plan.comm.congestors, group.sample.record
    figures = _figures(group)
    told = ", ".join(f"{first}:{second}" for first, second in congestors)
    return PairsReport(
        id=group.id,
        label=label,
        conditions=(
            *(one for one in conditions if one.name != "collective"),
            *([Condition(name="congestors", title="Congestors", value=told)] if told else []),
        ),
        doubts=tuple(doubts),
        words=tuple(_words(figures, len(congestors), len(group.runs))),
        congestors=congestors,
        num_runs=len(group.runs),
        series=group.series,
        figures=figures,
        costs=tuple(_costs(group)),
        fit=next((fit for one in group.series if (fit := fits.of(group, one.carrier)) is not None), None),
        hosts=record.hosts if record is not None else (),
    )


def _level(run: CommRun, pair: RankPair) -> LevelName:
    assert run.record is not None
    group, switches = run.record.group_size, run.record.switches
    if pair[0] // group == pair[1] // group:
        return "inside"
    return "beyond" if switches and switches[pair[0]] != switches[pair[1]] else "across"


def _points(group: CollectiveGroup) -> dict[tuple[RankPair, str, int, bool], dict[RunKey, CommPoint]]:
    """By pair, way, size and whether beside congestors: those with figures, by run."""
    found: dict[tuple[RankPair, str, int, bool], dict[RunKey, CommPoint]] = {}
    for run in group.runs:
        for one in run.record.points if run.record else ():
            if not why_not(one) and one.pair is not None:
                key = one.pair, one.algorithm, one.num_bytes, bool(one.congestors)
                found.setdefault(key, {})[run.plan.run_id, 0] = one
    return found


def _figures(group: CollectiveGroup) -> tuple[PairFigure, ...]:
    points, figures = _points(group), []
    for (pair, way, size, is_beside), alone in points.items():
        beside = points.get((pair, way, size, True))
        row, hit = (
            None if one is None else group.at(name_of(next(iter(one.values()))).title, size) for one in (alone, beside)
        )
        if is_beside or row is None:
            continue

        def factor(of: Callable[[Any], Any]) -> Estimate | None:
            top, bottom = (
                {key: float(of(one.times_s)) for key, one in side.items()}
                for side in (beside or {}, alone)  # noqa: B023
            )
            return ratio_estimate(top, bottom) if top else None

        operations = min(len(one.times_s) for one in (*alone.values(), *(beside or alone).values()))
        figures.append(
            PairFigure(
                ranks=pair,
                pair=f"{pair[0]}:{pair[1]}",
                level=_level(group.sample, pair),
                way=way,
                num_bytes=size,
                time=row.time,
                least_s=min(min(one.times_s) for one in alone.values()),
                rate=row.algbw,
                beside=None if hit is None else hit.time,
                factor=factor(np.mean),
                factor_p99=factor(lambda times: np.percentile(times, 99)) if operations >= LEAST_OPERATIONS else None,
                operations=operations,
            )
        )
    return tuple(sorted(figures, key=lambda one: (LEVELS.index(one.level), one.ranks, one.way, one.num_bytes)))


def _costs(group: CollectiveGroup) -> list[LevelCosts]:
    times: dict[LevelName, dict[RunKey, list[tuple[int, float]]]] = {}
    for (pair, way, size, is_beside), alone in _points(group).items():
        for key, one in alone.items():
            if way == "ping-pong" and not is_beside:
                rows = times.setdefault(_level(group.sample, pair), {}).setdefault(key, [])
                rows.append((size, float(np.median(one.times_s))))
    found = []
    for level in LEVELS:
        by_run = {key: rows for key, rows in times.get(level, {}).items() if len({size for size, _ in rows}) > 1}
        lines = {key: fit_line(level, 2, *zip(*rows, strict=True)) for key, rows in by_run.items()}
        if lines:
            alpha = median_estimate({key: line.startup_s for key, line in lines.items()}, "s")
            beta = median_estimate({key: line.per_byte_s for key, line in lines.items()})
            found.append(LevelCosts(level=level, alpha=alpha, beta=beta))
    return found


def _words(figures: Sequence[PairFigure], congestors: int, runs: int) -> Iterator[str]:
    """Of each level the slowest pair, by the smallest ping-pong and the largest window; then who is hit most."""
    shown: dict[str, list[PairFigure]] = {}
    for way, end in (("ping-pong", min), ("window", max)):
        sizes = [one.num_bytes for one in figures if one.way == way]
        shown[way] = [one for one in figures if one.way == way and one.num_bytes == end(sizes)]
    for level in LEVELS:
        parts = []
        for way, found in shown.items():
            for one in sorted((one for one in found if one.level == level), key=lambda one: one.time.value)[-1:]:
                figure = figure_text(one.time) if way == "ping-pong" else f"{figure_text(one.rate)} GB/s"
                parts.append(f"{figure} at {format_bytes(one.num_bytes)} ({one.pair})")
        if parts:
            yield f"{LEVEL_TITLES[level].capitalize()}, slowest pair: {', '.join(parts)}."
    for way, found in shown.items():
        hit = sorted(((one.factor.value, one) for one in found if one.factor is not None), key=lambda pair: pair[0])
        for _, one in hit[-1:]:
            certain = sum(one.factor is not None and is_other_than(one.factor, 1.0) for _, one in hit)
            sure = f"{certain} of {len(hit)} victims for certain" if runs >= MIN_RUNS else f"{runs} runs are no verdict"
            last = f" and {times_cell(one.factor_p99)} at the 99th percentile" if one.factor_p99 else ""
            yield (
                f"Beside {congestors} congestor{'s' * (congestors > 1)}, a {way} of {format_bytes(one.num_bytes)} "
                f"takes {times_cell(one.factor)} as long on average{last} of {one.operations} operations for "
                f"{one.pair}, hit most; {sure}."
            )
