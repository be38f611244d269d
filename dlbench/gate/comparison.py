"""Two sides, or the pairs of one folder, become a comparison: every point and metric with its verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from dlbench.errors import UserError
from dlbench.gate.content import KeyDifference, digest
from dlbench.gate.floors import FLOOR, Floor, floors_at
from dlbench.gate.pairs import Match, PairedPoint, match
from dlbench.gate.sides import Side, SidePoint, SideRun, sessions_at
from dlbench.gate.verdicts import Judgement, Rule, Sample, Verdict, judge, overall
from dlbench.reading.metrics import METRICS, Metric
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate
from dlbench.stats.pairing import KnownKey


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """One metric at one point."""

    metric: Metric
    gated: bool
    """Whether it has a part in the verdict; the others are information."""
    a: Estimate | None
    """Geometric mean in the metric's unit, over the units of the ratio where a test was made, so that B / A is the
    ratio, else over runs; None where no run tells."""
    b: Estimate | None
    values_a: tuple[float, ...]
    """One for each run that tells; where paired, equal places are pairs."""
    values_b: tuple[float, ...]
    judgement: Judgement


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """One rank and node count of runs that are comparable."""

    a: SidePoint
    b: SidePoint | None
    """None: B has no runs there."""
    allowed: tuple[KeyDifference, ...]
    """What differs between the sides, because it may."""
    metrics: tuple[ComparedMetric, ...]
    environment: tuple[KeyDifference, ...]
    """Keys of the environment with one value on each side, and not the same."""
    unpaired: int
    """Runs of a paired comparison without their partner, which are left out."""
    sessions: Mapping[str, str]
    """Of the runs of the command, by run id."""
    num_history: int
    """Sessions of the history that tell how far sessions scatter."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole."""

    a: str
    """What side A is called."""
    b: str
    rule: Rule
    paired: bool
    verdict: Verdict
    points: tuple[ComparedPoint, ...]
    only_b: tuple[SidePoint, ...]
    """Points that A does not have, or for which no floor is: nothing is said of them."""
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    history: str
    """What the history is called that tells how far sessions scatter; empty: none was given."""
    num_compared: int
    """Comparisons of the family that Holm's correction counts."""


def compare_sides(
    a: Side,
    b: Side,
    *,
    metrics: Collection[str],
    rule: Rule,
    allowed: Collection[str] = (),
    history: Side | None = None,
    options: tuple[str, str] = ("--where-a", "--where-b"),
    floors: Sequence[Floor] = (),
) -> Comparison:
    """B against A.

    Args:
        a: the baseline.
        b: the candidate.
        metrics: names of the metrics that decide; the others are told as information.
        rule: what counts as a change.
        allowed: keys on which the sides may differ.
        history: earlier runs, which only tell how far sessions scatter.
        options: by which a person chooses the runs of each side, for errors.
        floors: throughputs that B must reach besides.

    Raises:
        UserError: both sides are the same runs, or they are not comparable; names the keys.
    """
    _refuse_same(a, b, options)
    matches, only_b = match(a, b, allowed)
    sessions = sessions_at((*a.points, *b.points, *(() if history is None else history.points)))
    at_least = floors_at(b.points, floors, b.name)
    drafts = [
        _Draft(
            one,
            paired=False,
            metrics=metrics,
            sessions=sessions,
            earlier=_earlier(one, history, sessions),
            floor=at_least.get(id(one.b)),
        )
        for one in matches
    ]
    more, only_b = _of_floors(only_b, at_least, sessions)
    drafts += more
    name = "" if history is None else history.name
    return _whole(a, b, drafts, rule, paired=False, only_b=only_b, history=name)


def compare_floors(b: Side, *, rule: Rule, floors: Sequence[Floor]) -> Comparison:
    """Runs against floors alone.

    Raises:
        UserError: as `dlbench.gate.floors.floors_at`.
    """
    drafts, unasked = _of_floors(b.points, floors_at(b.points, floors, b.name), sessions_at(b.points))
    a = Side(name=f"the floor {'; '.join(floor.text for floor in floors)}", points=(), left_out=(), damaged=())
    return _whole(a, b, drafts, rule, paired=False, only_b=unasked, history="")


def _of_floors(
    points: Sequence[SidePoint], at_least: Mapping[int, float], sessions: Mapping[str, str]
) -> tuple[list[_Draft], list[SidePoint]]:
    """Points that are compared with their floors alone, and those without a floor."""
    drafts = []
    for point in points:
        if floor := at_least.get(id(point)):
            found = Match(a=dataclasses.replace(point, runs=(), tags={}, doubts=()), b=point, allowed=())
            drafts.append(_Draft(found, paired=False, metrics=(), sessions=sessions, floor=floor))
    return drafts, [point for point in points if id(point) not in at_least]


def _refuse_same(a: Side, b: Side, options: tuple[str, str]) -> None:
    """Runs compared with themselves are always equal: a gate would pass for ever."""
    ids = [
        {(run.run_id, run.finished, *sorted(run.figures.items())) for point in side.points for run in point.runs}
        for side in (a, b)
    ]
    if ids[0] == ids[1]:
        raise UserError(
            f"A ({a.name}) and B ({b.name}) are the same {len(ids[0])} run{'s' * (len(ids[0]) > 1)}: nothing to "
            f"compare; give two folders, choose each side with {options[0]} and {options[1]}, or give --paired for "
            "runs of run --ab"
        )


def _earlier(found: Match, history: Side | None, sessions: Mapping[str, str]) -> list[tuple[SideRun, ...]]:
    """Runs of the history at one point by their session, less the sessions that are compared."""
    sides = [side for side in (found.a, found.b) if side is not None]
    compared = {sessions[run.run_id] for side in sides for run in side.runs}
    points = [] if history is None else history.points
    for side in sides:
        like = [one for one in points if one.place == side.place and digest(one.content) == digest(side.content)]
        found_there: dict[str, list[SideRun]] = {}
        for run in (run for point in like for run in point.runs if sessions[run.run_id] not in compared):
            found_there.setdefault(sessions[run.run_id], []).append(run)
        if found_there:
            return [tuple(runs) for runs in found_there.values()]
    return []


def compare_pairs(
    points: Sequence[PairedPoint], *, both: Side, metrics: Collection[str], rule: Rule, floors: Sequence[Floor] = ()
) -> Comparison:
    """Side b against side a of runs that were interleaved (`dlbench run --ab`).

    Args:
        points: as `dlbench.gate.pairs.paired_points` gives them.
        both: the folder with both sides: its name, and what is left out of it.
        metrics: names of the metrics that decide; the others are told as information.
        rule: what counts as a change.
        floors: throughputs that side b must reach besides.
    """
    at_least = floors_at([one.match.b for one in points if one.match.b is not None], floors, both.name)
    sessions = sessions_at(side for one in points for side in (one.match.a, one.match.b) if side is not None)
    drafts = [
        _Draft(
            one.match,
            paired=True,
            metrics=metrics,
            unpaired=one.unpaired,
            sessions=sessions,
            floor=at_least.get(id(one.match.b)),
        )
        for one in points
    ]
    named = Side(name=f"{both.name}, side a", points=(), left_out=(), damaged=())
    other = Side(name=f"{both.name}, side b", points=(), left_out=both.left_out, damaged=both.damaged)
    return _whole(named, other, drafts, rule, paired=True, only_b=[], history="")


def _whole(
    a: Side, b: Side, drafts: Sequence[_Draft], rule: Rule, *, paired: bool, only_b: Sequence[SidePoint], history: str
) -> Comparison:
    gated = [sample for draft in drafts for _, sample, counts in draft.samples if counts]
    judged = iter(judge(gated, rule))
    points = [draft.finished(judged, rule) for draft in drafts]
    return Comparison(
        a=a.name,
        b=b.name,
        rule=rule,
        paired=paired,
        verdict=overall(one.judgement.verdict for point in points for one in point.metrics if one.gated),
        points=tuple(points),
        only_b=tuple(only_b),
        left_out=tuple(dict.fromkeys((*a.left_out, *b.left_out))),
        damaged=tuple(dict.fromkeys((*a.damaged, *b.damaged))),
        history=history,
        num_compared=sum(one.judgement.tested is not None for point in points for one in point.metrics if one.gated),
    )


class _Draft:
    """A point before the verdicts of the whole family are known."""

    def __init__(
        self,
        found: Match,
        *,
        paired: bool,
        metrics: Collection[str],
        sessions: Mapping[str, str],
        unpaired: int = 0,
        earlier: Sequence[Sequence[SideRun]] = (),
        floor: float | None = None,
    ) -> None:
        self.found = found
        self.floor = floor
        self.unpaired = unpaired
        self.sessions = sessions
        self.num_history = len(earlier)
        self.samples: list[tuple[Metric, Sample, bool]] = []
        runs_b = () if found.b is None else found.b.runs
        for metric in METRICS if metrics else ():
            sample = _sample(metric, found.a.runs, runs_b, paired, sessions, earlier)
            # A metric that nobody tells is worth a line only where it was asked for alone.
            if sample.a or sample.b or (metric.name in metrics and len(metrics) < len(METRICS)):
                self.samples.append((metric, sample, metric.name in metrics))
        if floor is not None:
            rates = {run.run_id: run.throughput for run in runs_b if run.throughput is not None}
            unit = f"{found.a.sample_unit}/s"
            sample = Sample(
                a=(),
                b=tuple(1 / rate for rate in rates.values()),
                paired=False,
                sessions_b=tuple(sessions[run_id] for run_id in rates),
                floor=1 / floor,
            )
            self.samples.append((dataclasses.replace(FLOOR, unit=unit), sample, True))

    def finished(self, judged: Iterator[Judgement], rule: Rule) -> ComparedPoint:
        """The point; takes its own verdicts from those of the family."""
        metrics = []
        judgements = [next(judged) if gated else judge([sample], rule)[0] for _, sample, gated in self.samples]
        throughput = self._throughput(judgements, rule)
        for (metric, sample, gated), judgement in zip(self.samples, judgements, strict=True):
            if gated:
                judgement = _not_stalled(metric, self._of_all_runs(metric, judgement), throughput)
            values_a, values_b = (_upright(metric, side) for side in (sample.a, sample.b))
            of_runs = judgement.tested is None or judgement.tested.unit != "session"
            a = _centre(values_a, sample.sessions_a, metric.unit, of_runs=of_runs)
            b = _centre(values_b, sample.sessions_b, metric.unit, of_runs=of_runs)
            if (floor := self.floor) is not None and sample.floor is not None:
                a = by_definition(floor, len(values_b), metric.unit)
                judgement = _upright_judgement(judgement)
                # The interval that decides, so that who reads it beside the floor sees the verdict.
                b = None if judgement.ratio is None else judgement.ratio.mapped(lambda one: floor * one, metric.unit)
            metrics.append(
                ComparedMetric(
                    metric=metric, gated=gated, a=a, b=b, values_a=values_a, values_b=values_b, judgement=judgement
                )
            )
        return ComparedPoint(
            a=self.found.a,
            b=self.found.b,
            allowed=self.found.allowed,
            metrics=tuple(metrics),
            environment=_environment(self.found.a, self.found.b),
            unpaired=self.unpaired,
            sessions=self.sessions,
            num_history=self.num_history,
        )

    def _throughput(self, judgements: Sequence[Judgement], rule: Rule) -> Estimate | None:
        """B / A of the mean step where that left the tolerance and has no verdict of its own; None: neither."""
        for (metric, _, gated), judgement in zip(self.samples, judgements, strict=True):
            if metric.name == "step_mean_s" and not gated and judgement.ratio is not None:
                return judgement.ratio if abs(math.log(judgement.ratio.value)) > math.log1p(rule.tolerance) else None
        return None

    def _of_all_runs(self, metric: Metric, judgement: Judgement) -> Judgement:
        """No good verdict on a time to quality while runs of B that missed the target have none."""
        runs_b = () if self.found.b is None else self.found.b.runs
        if metric.name != "time_to_quality_s" or judgement.verdict not in ("improved", "equivalent"):
            return judgement
        if all(metric.name in run.figures for run in runs_b):
            return judgement
        reason = "some runs of B did not reach the target, which is worse than any time"
        return dataclasses.replace(judgement, verdict="inconclusive", reason=reason)


def _upright_judgement(judgement: Judgement) -> Judgement:
    """B / A of throughputs, of which the test saw the inverse."""
    tested = judgement.tested
    if tested is not None:
        low, high = tested.equivalence
        tested = dataclasses.replace(tested, equivalence=(1 / high, 1 / low))
    ratio = None if judgement.ratio is None else judgement.ratio.inverted("ratio")
    return dataclasses.replace(judgement, ratio=ratio, tested=tested)


def _centre(values: Sequence[float], sessions: Sequence[str] | None, unit: str, *, of_runs: bool) -> Estimate | None:
    """The geometric mean of one side over the units of the ratio: its runs, or each of its sessions as one value."""
    if not values:
        return None
    names = sessions or [""] * len(values)
    found: dict[str, list[float]] = {}
    for value, name in zip(values, names, strict=True):
        found.setdefault(name, []).append(value)
    if len(found) > 1 and not of_runs:
        return geometric_mean_estimate(
            {KnownKey.of(name, 0, name): geometric_mean(runs) for name, runs in found.items()}, unit
        )
    by_run = {KnownKey.of("", i, name): value for i, (value, name) in enumerate(zip(values, names, strict=True))}
    return geometric_mean_estimate(by_run, unit)


def _not_stalled(metric: Metric, judgement: Judgement, throughput: Estimate | None) -> Judgement:
    """No step time is equivalent where the throughput, which has no verdict of its own, is not."""
    if judgement.verdict != "equivalent" or throughput is None or not metric.name.startswith("step_"):
        return judgement
    reason = (
        f"within the tolerance, but the throughput is not: B / A of the mean step is {throughput.value:.3f}; "
        "--metric step_mean_s decides on it"
    )
    return dataclasses.replace(judgement, verdict="inconclusive", reason=reason)


def _sample(
    metric: Metric,
    a: Sequence[SideRun],
    b: Sequence[SideRun],
    paired: bool,
    sessions: Mapping[str, str],
    earlier: Sequence[Sequence[SideRun]],
) -> Sample:
    name = metric.name
    if paired:
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if name in x.figures and name in y.figures]
        a, b = [x for x, _ in pairs], [y for _, y in pairs]
    told_a, told_b = ([run for run in side if name in run.figures] for side in (a, b))
    before = [[run.figures[name] for run in session if name in run.figures] for session in earlier]
    jobs = {run.circumstances.job for run in (*told_a, *told_b)}
    commands = {run.command for run in (*told_a, *told_b)}
    return Sample(
        a=_upright(metric, [run.figures[name] for run in told_a]),
        b=_upright(metric, [run.figures[name] for run in told_b]),
        paired=paired,
        sessions_a=tuple(sessions[run.run_id] for run in told_a),
        sessions_b=tuple(sessions[run.run_id] for run in told_b),
        together=any(len(names) == 1 and "" not in names for names in (jobs, commands)),
        history=tuple(_upright(metric, values) for values in before if values),
    )


def _upright(metric: Metric, values: Sequence[float]) -> tuple[float, ...]:
    """Values of which larger is worse, or such values back."""
    return tuple(values) if metric.higher_is_worse else tuple(1 / value for value in values)


def _environment(a: SidePoint, b: SidePoint | None) -> tuple[KeyDifference, ...]:
    if b is None:
        return ()
    return tuple(
        KeyDifference(key=key, title=key, a=a.environment[key], b=b.environment[key])
        for key in sorted(a.environment.keys() & b.environment.keys())
        if a.environment[key] != b.environment[key]
    )
