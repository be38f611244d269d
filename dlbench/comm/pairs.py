"""Pairs of ranks: time and rate of messages, slowdown next to congestors, alpha and beta of each level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from dlbench.analysis.comparability import Condition
from dlbench.analysis.environments import Doubt
from dlbench.comm.fits import Fits, NetworkFit
from dlbench.comm.measurements import CollectiveGroup, MeasuredGroup, Measurement, measurement, why_not
from dlbench.lazy import np
from dlbench.perfmodels.lines import fit_line
from dlbench.records.comm import CommPoint
from dlbench.report.table import column, times_cell
from dlbench.report.wording import figure_text, runs_text
from dlbench.specs.comm import LEVELS, LevelName, RankPair
from dlbench.stats.estimates import Estimate, is_other_than, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import counted, format_bytes

LEAST_OPERATIONS = 100  # Operations of a run needed for a 99th percentile.
LEVEL_TITLES = {"inside": "within a group", "across": "between groups", "beyond": "between leaf switches"}


@dataclass(frozen=True, kw_only=True)
class PairFigure:
    """Messages of one size between two ranks, measured in one way."""

    ranks: RankPair
    pair: str = field(metadata=column("Ranks", is_brief=True))
    level: LevelName = field(metadata=column("Where", text=lambda level: LEVEL_TITLES[level]))
    way: str = field(metadata=column("Measured by", is_brief=True))
    at: Measurement
    beside: Estimate | None = field(default=None, metadata=column("With congestors", "beside_s"))  # Median time.
    factor: Estimate | None = field(default=None, metadata=column("Factor, mean", text=times_cell, is_brief=True))
    """Mean time of an operation with congestors over that without, in pairs of the same run."""
    factor_p99: Estimate | None = field(
        default=None, metadata=column("Factor, 99th percentile", text=times_cell, is_brief=True)
    )


@dataclass(frozen=True, kw_only=True)
class LevelCosts:
    """Start-up and time per byte of a level, by a line through its ping-pongs."""

    level: LevelName
    alpha: Estimate  # Seconds.
    beta: Estimate  # Seconds per byte.


@dataclass(frozen=True, kw_only=True)
class PairsReport(MeasuredGroup):
    """Pairs of ranks at one layout."""

    words: tuple[str, ...]
    figures: tuple[PairFigure, ...]
    ends: tuple[PairFigure, ...]  # The smallest ping-pong and the largest window of each pair.
    costs: tuple[LevelCosts, ...]
    fit: NetworkFit | None  # Fit to collectives of the same system, carrier and type.
    hosts: tuple[str, ...]  # Host of each rank.


def pairs_report(
    group: CollectiveGroup, fits: Fits, label: str, conditions: tuple[Condition, ...], doubts: Sequence[Doubt]
) -> PairsReport:
    """Returns the report of a group that measured pairs of ranks."""
    figures, sizes = tuple(sorted(_figures(group), key=lambda figure: LEVELS.index(figure.level))), group.sizes
    end_sizes = {"ping-pong": sizes[0]}
    ends = tuple(figure for figure in figures if figure.at.num_bytes == end_sizes.get(figure.way, sizes[-1]))
    hosts: tuple[str, ...] = ()
    if group.sample.record is not None:
        hosts = group.sample.record.hosts
    return PairsReport(
        id=group.id,
        label=label,
        conditions=conditions,
        doubts=tuple(doubts),
        words=tuple(_words(group, ends)),
        num_runs=len(group.runs),
        series=group.series,
        figures=figures,
        ends=ends,
        costs=tuple(_costs(figures)),
        fit=fits.of(group, group.series[0].carrier),
        hosts=hosts,
    )


Points = dict[RunKey, CommPoint]


def _figures(group: CollectiveGroup) -> Iterator[PairFigure]:
    # Points without and with congestors, by pair, kind of operation and size.
    points: dict[tuple[RankPair, str, int], tuple[Points, Points]] = {}
    for run in group.runs:
        if run.record is None:
            continue
        for point in run.record.points:
            if not why_not(point) and point.pair is not None:
                alone, congested = points.setdefault((point.pair, point.algorithm, point.num_bytes), ({}, {}))
                (congested if point.congestors else alone)[run.plan.run_id, 0] = point
    for (pair, operation, _), (alone, congested) in sorted(points.items(), key=itemgetter(0)):
        if not alone:
            continue
        figure = PairFigure(
            ranks=pair,
            pair=f"{pair[0]}:{pair[1]}",
            level=group.layout.level(*pair),
            way=operation,
            at=measurement(tuple(alone.items()), 0),
        )
        if congested:
            slowed = measurement(tuple(congested.items()), 0)
            figure = replace(figure, beside=slowed.time, factor=_factor(congested, alone, np.mean))
            if min(figure.at.iterations, slowed.iterations) >= LEAST_OPERATIONS:
                figure = replace(figure, factor_p99=_factor(congested, alone, partial(np.percentile, q=99)))
        yield figure


def _factor(congested: Points, alone: Points, statistic: Callable[..., Any]) -> Estimate:
    slow = {key: float(statistic(point.times_s)) for key, point in congested.items()}
    fast = {key: float(statistic(point.times_s)) for key, point in alone.items()}
    return ratio_estimate(slow, fast)


def _costs(figures: Sequence[PairFigure]) -> Iterator[LevelCosts]:
    pings = [figure for figure in figures if figure.way == "ping-pong"]
    for level in dict.fromkeys(ping.level for ping in pings):
        times: dict[RunKey, list[tuple[int, float]]] = {}
        for ping in pings:
            if ping.level == level:
                for key, seconds in ping.at.by_run.items():
                    times.setdefault(key, []).append((ping.at.num_bytes, seconds))
        lines = {}
        for key, rows in times.items():
            sizes, seconds_by_size = zip(*rows, strict=True)
            if len(set(sizes)) > 1:
                lines[key] = fit_line(level, 2, sizes, seconds_by_size)
        if lines:
            alpha = median_estimate({key: line.startup_s for key, line in lines.items()}, "s")
            beta = median_estimate({key: line.per_byte_s for key, line in lines.items()})
            yield LevelCosts(level=level, alpha=alpha, beta=beta)


def _words(group: CollectiveGroup, ends: Sequence[PairFigure]) -> Iterator[str]:
    by_time = sorted(ends, key=attrgetter("at.time.value"))
    for level in dict.fromkeys(figure.level for figure in ends):
        slowest = {figure.way: figure for figure in by_time if figure.level == level}
        parts = []
        for operation, figure in slowest.items():
            value = f"{figure_text(figure.at.algbw)} GB/s"
            if operation == "ping-pong":
                value = figure_text(figure.at.time)
            parts.append(f"{value} at {format_bytes(figure.at.num_bytes)} ({figure.pair})")
        yield f"{LEVEL_TITLES[level].capitalize()}, slowest pair: {', '.join(parts)}."
    comm = group.sample.plan.comm
    for operation in comm.algorithms:
        factors = [(figure.factor, figure) for figure in ends if figure.factor is not None and figure.way == operation]
        if not factors:
            continue
        factor, worst = max(factors, key=lambda item: item[0].value)
        certain = sum(is_other_than(estimate, 1.0) for estimate, _ in factors)
        p99 = ""
        if worst.factor_p99 is not None:
            p99 = f" ({times_cell(worst.factor_p99)} at the 99th percentile)"
        yield (
            f"With {counted(len(comm.congestors), 'congestor')} a {operation} of {format_bytes(worst.at.num_bytes)} "
            f"takes {times_cell(factor)} as long for {worst.pair}{p99}, the pair affected most; {certain} of "
            f"{len(factors)} pairs are certainly affected, over {runs_text(factor.n)}."
        )
