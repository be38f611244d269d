"""What monitoring costs (`dlbench run --watch-cost`): watched runs against their unwatched twins, run interleaved.

The experimental unit is the run (see `dlbench.stats.estimates`). Of each run the mean step counts, measured time
over steps: a sampler that disturbs one step in ten leaves the median step as it is. The cost is the ratio of the
geometric means over runs, in pairs, less one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.measures import measured_or_why
from dlbench.reading.sessions import allocations_of
from dlbench.records.scan import Run
from dlbench.records.watch import WatchOverhead
from dlbench.report.wording import basis_text, interval_text, place_text, value_text
from dlbench.specs.variants import MIN_WATCH_REPEATS
from dlbench.stats.estimates import Estimate, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey

PointKey = tuple[str, str, int, int]
"""Creation and id of the series, ranks, nodes."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """What watching cost at one scaling point of one series."""

    series: str
    ranks: int
    nodes: int
    watched: tuple[Run, ...]
    """Watched runs with figures, by repeat."""
    overhead: WatchOverhead | None
    """None where fewer than two pairs have figures."""
    why: str
    """Why there is none, in a sentence; else empty."""


def watch_costs(runs: Sequence[Run]) -> list[MeasuredCost]:
    """The cost of watching at each scaling point that has unwatched twins, in order of series, ranks and nodes.

    Runs without figures, and twins whose partner has none, are left out and counted. A copy is no repeat.
    """
    points: dict[PointKey, list[Run]] = {}
    for run in runs:
        plan = run.plan
        key = plan.created, plan.series.id, plan.layout.ranks, plan.layout.nodes
        points.setdefault(key, []).append(run)
    sessions = allocations_of(runs)
    return [
        _cost(key, found, sessions)
        for key, found in sorted(points.items())
        if any(run.plan.series.variant == "unwatched" for run in found)
    ]


def _cost(key: PointKey, runs: Sequence[Run], sessions: Mapping[str, str]) -> MeasuredCost:
    watched: dict[RunKey, float] = {}
    unwatched: dict[RunKey, float] = {}
    kept: dict[RunKey, Run] = {}
    reasons: list[str] = []
    sides = {"plain": watched, "unwatched": unwatched}
    for run in runs:
        side = sides.get(run.plan.series.variant)
        of_run = KnownKey.of("", run.plan.series.repeat, sessions[run.plan.run_id])
        if side is None or of_run in side:  # a copied folder
            continue
        found, reason = measured_or_why(run)
        if found is None:
            reasons.append(reason)
        else:
            side[of_run] = found.measured_s / found.steps
            if side is watched:
                kept[of_run] = run
    pairs = watched.keys() & unwatched.keys()
    overhead, why = None, ""
    if len(pairs) >= MIN_WATCH_REPEATS:
        overhead = _overhead(*({k: v for k, v in side.items() if k in pairs} for side in (watched, unwatched)))
    else:
        first = f": {reasons[0]}" if reasons else ""
        why = f"{len(pairs)} of {MIN_WATCH_REPEATS} pairs of runs that an interval needs have figures{first}"
    return MeasuredCost(
        series=key[1],
        ranks=key[2],
        nodes=key[3],
        watched=tuple(kept[k] for k in sorted(kept)),
        overhead=overhead,
        why=why,
    )


def _overhead(watched: Mapping[RunKey, float], unwatched: Mapping[RunKey, float]) -> WatchOverhead:
    """Of mean steps of the same repeats, seconds."""
    ratio = ratio_estimate(watched, unwatched)
    assert ratio.low is not None  # two pairs or more
    assert ratio.high is not None
    return WatchOverhead(
        value=ratio.value - 1,
        low=ratio.low - 1,
        high=ratio.high - 1,
        num_pairs=ratio.n,
        method="measured",
        evidence=(
            f"mean steps of {ratio.n} pairs of runs with and without monitoring, interleaved; interval: "
            f"{basis_text(ratio, 'pair')}"
        ),
    )


def watch_cost_lines(costs: Sequence[MeasuredCost]) -> list[str]:
    """A line per scaling point."""
    return [f"monitoring at {place_text(cost.ranks, cost.nodes)}: {_cost_text(cost)}" for cost in costs]


def _cost_text(cost: MeasuredCost) -> str:
    overhead = cost.overhead
    if overhead is None:
        return f"cost unknown: {cost.why}"
    figure = Estimate(overhead.value, overhead.low, overhead.high, overhead.num_pairs, "Student t", "fraction")
    return f"{f'{value_text(figure)} of a step {interval_text(figure)}'.rstrip()}; {overhead.evidence}"
