"""Pairs of ranks as numbers: time and rate of messages, what congestors make of them, alpha and beta of a level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dlbench.analysis.comparability import Condition
from dlbench.analysis.doubts import Doubt
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
    at: Measurement
    beside: Estimate | None = field(metadata=column("Beside congestors", "beside_s"))  # Median time.
    factor: Estimate | None = field(metadata=column("Factor, mean", text=times_cell, is_brief=True))
    """Mean time of an operation beside congestors over that alone, in pairs of the same run."""
    factor_p99: Estimate | None = field(metadata=column("Factor, 99th percentile", text=times_cell, is_brief=True))


@dataclass(frozen=True, kw_only=True)
class LevelCosts:
    """What a line through the ping-pongs of a level says."""

    level: LevelName
    alpha: Estimate  # Seconds.
    beta: Estimate  # Seconds per byte.


@dataclass(frozen=True, kw_only=True)
class PairsReport(MeasuredGroup):
    """Pairs of ranks at one layout."""

    words: tuple[str, ...]
    figures: tuple[PairFigure, ...]
    ends: tuple[PairFigure, ...]  # Of these the smallest ping-pong of each pair and the largest window.
    costs: tuple[LevelCosts, ...]
    fit: NetworkFit | None  # To collectives of the same system, carrier and type.
    hosts: tuple[str, ...]  # Of each rank.


def pairs_report(
    group: CollectiveGroup, fits: Fits, label: str, conditions: tuple[Condition, ...], doubts: Sequence[Doubt]
) -> PairsReport:
    """The numbers of a group whose points are of pairs of ranks."""
    figures, sizes = tuple(sorted(_figures(group), key=lambda figure: LEVELS.index(figure.level))), group.sizes
    ends = tuple(figure for figure in figures if figure.at.num_bytes == sizes[0 if figure.way == "ping-pong" else -1])
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
        hosts=group.sample.record.hosts if group.sample.record else (),
    )


def _figures(group: CollectiveGroup) -> Iterator[PairFigure]:
    sides_of: dict[tuple[RankPair, str, int], list[dict[RunKey, CommPoint]]] = {}  # Alone, and beside congestors.
    for run in group.runs:
        for point in run.record.points if run.record else ():
            if not why_not(point) and point.pair is not None:
                sides = sides_of.setdefault((point.pair, point.algorithm, point.num_bytes), [{}, {}])
                sides[bool(point.congestors)][run.plan.run_id, 0] = point
    for (pair, way, _), (alone, beside) in sorted(sides_of.items(), key=itemgetter(0)):
        if alone:
            at, hit = (measurement(tuple(side.items()), 0) if side else None for side in (alone, beside))
            assert at is not None
            is_enough = hit is not None and min(at.iterations, hit.iterations) >= LEAST_OPERATIONS
            yield PairFigure(
                ranks=pair,
                pair=f"{pair[0]}:{pair[1]}",
                level=group.layout.level(*pair),
                way=way,
                at=at,
                beside=hit.time if hit else None,
                factor=_factor(beside, alone, np.mean) if hit else None,
                factor_p99=_factor(beside, alone, lambda times: np.percentile(times, 99)) if is_enough else None,
            )


def _factor(beside: Mapping[RunKey, CommPoint], alone: Mapping[RunKey, CommPoint], of: Callable[..., Any]) -> Estimate:
    top, bottom = ({key: float(of(point.times_s)) for key, point in side.items()} for side in (beside, alone))
    return ratio_estimate(top, bottom)


def _costs(figures: Sequence[PairFigure]) -> Iterator[LevelCosts]:
    pings = [figure for figure in figures if figure.way == "ping-pong"]
    for level in dict.fromkeys(ping.level for ping in pings):
        times: dict[RunKey, list[tuple[int, float]]] = {}
        for ping in (ping for ping in pings if ping.level == level):
            for key, seconds in ping.at.by_run.items():
                times.setdefault(key, []).append((ping.at.num_bytes, seconds))
        spread = {key: rows for key, rows in times.items() if len({size for size, _ in rows}) > 1}
        if lines := {key: fit_line(level, 2, *zip(*rows, strict=True)) for key, rows in spread.items()}:
            alpha = median_estimate({key: line.startup_s for key, line in lines.items()}, "s")
            beta = median_estimate({key: line.per_byte_s for key, line in lines.items()})
            yield LevelCosts(level=level, alpha=alpha, beta=beta)


def _words(group: CollectiveGroup, ends: Sequence[PairFigure]) -> Iterator[str]:
    """The slowest pair of each level, then who is hit most."""
    by_time = sorted(ends, key=lambda one: one.at.time.value)
    for level in dict.fromkeys(one.level for one in ends):
        parts = (
            f"{figure_text(one.at.time) if way == 'ping-pong' else f'{figure_text(one.at.algbw)} GB/s'} at "
            f"{format_bytes(one.at.num_bytes)} ({one.pair})"
            for way, one in {one.way: one for one in by_time if one.level == level}.items()
        )
        yield f"{LEVEL_TITLES[level].capitalize()}, slowest pair: {', '.join(parts)}."
    comm = group.sample.plan.comm
    many = f"{len(comm.congestors)} congestor{'s' * (len(comm.congestors) > 1)}"
    for way in comm.algorithms:
        hit = [(one.factor, one) for one in ends if one.factor is not None and one.way == way]
        for factor, one in sorted(hit, key=lambda pair: pair[0].value)[-1:]:
            sure = f"{sum(is_other_than(each, 1.0) for each, _ in hit)} of {len(hit)} victims for certain"
            of = f"a {way} of {format_bytes(one.at.num_bytes)} takes {times_cell(factor)} as long for {one.pair}"
            last = f" ({times_cell(one.factor_p99)} at the 99th percentile)" if one.factor_p99 else ""
            yield f"Beside {many} {of}{last}, hit most; {sure}, by {runs_text(factor.n)}."
