"""Two sides, the pairs of one folder (`dlbench run --ab`), or runs and a floor become a comparison: every point and
metric with its verdict.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import NoReturn

from dlbench.analysis.metrics import METRICS, Metric
from dlbench.analysis.side_by_side import alike, matched
from dlbench.analysis.table import RunTable
from dlbench.errors import UserError
from dlbench.gate.floors import Floor, floors_at
from dlbench.gate.report import FLOOR, ComparisonReport, MetricResult, PointResult, point_of, report_of
from dlbench.gate.sides import (
    GateSide,
    KeyDifference,
    Match,
    SidePoint,
    SideRun,
    chosen,
    differences,
    digest,
    named,
    points_of,
    refuse_no_figures,
    sessions_at,
    tabulated,
    without,
)
from dlbench.gate.verdicts import Judgement, MetricSample, Rule, judge
from dlbench.records.scan import Scan
from dlbench.report.wording import ranks_text, runs_text
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, is_other_than
from dlbench.stats.pairing import KnownKey


def compare_sides(
    a: GateSide,
    b: GateSide,
    *,
    metrics: Collection[str],
    rule: Rule,
    allowed: Collection[str] = (),
    history: GateSide | None = None,
    options: tuple[str, str] = ("--where-a", "--where-b"),
    floors: Sequence[Floor] = (),
) -> ComparisonReport:
    """B against A, the baseline.

    The metrics of these names decide, the others are reported as information. The sides may differ on `allowed` keys;
    `history` holds earlier runs, which only show how far sessions scatter, and `floors` what B must reach besides.
    `options` choose the runs of each side, for errors.
    """
    # Runs compared with themselves are always equal: a gate would pass for ever.
    ids = [
        {
            (run.run_id, run.circumstances.finished, *sorted(run.figures.items()))
            for point in side.points
            for run in point.runs
        }
        for side in (a, b)
    ]
    if ids[0] == ids[1]:
        raise UserError(
            f"A ({a.name}) and B ({b.name}) are the same {runs_text(len(ids[0]))}: nothing to "
            f"compare; give two folders, choose each side with {options[0]} and {options[1]}, or give --paired for "
            "runs of run --ab"
        )
    matches, only_b = _matches(a, b, allowed)
    sessions = sessions_at((*a.points, *b.points, *(() if history is None else history.points)))
    at_least = floors_at(b.points, floors, b.name)
    drafts = [_Draft(one, metrics, sessions, at_least, earlier=_earlier(one, history, sessions)) for one in matches]
    more, only_b = _of_floors(only_b, at_least, sessions)
    return _whole(a, b, [*drafts, *more], rule, only_b=only_b, history="" if history is None else history.name)


def compare_floors(b: GateSide, *, rule: Rule, floors: Sequence[Floor]) -> ComparisonReport:
    """Runs against floors alone."""
    drafts, unasked = _of_floors(b.points, floors_at(b.points, floors, b.name), sessions_at(b.points))
    a = GateSide(name=f"the floor {'; '.join(floor.text for floor in floors)}", points=(), left_out=(), damaged=())
    return _whole(a, b, drafts, rule, only_b=unasked)


def compare_pairs(
    points: Sequence[Match], *, both: GateSide, metrics: Collection[str], rule: Rule, floors: Sequence[Floor] = ()
) -> ComparisonReport:
    """GateSide b against side a of runs that were interleaved, as `paired_points` gives points and folder; else as
    `compare_sides`.
    """
    at_least = floors_at([one.b for one in points if one.b is not None], floors, both.name)
    sessions = sessions_at(side for one in points for side in (one.a, one.b) if side is not None)
    drafts = [_Draft(one, metrics, sessions, at_least, paired=True) for one in points]
    a = GateSide(name=f"{both.name}, side a", points=(), left_out=(), damaged=())
    return _whole(a, dataclasses.replace(both, name=f"{both.name}, side b"), drafts, rule, paired=True)


def _whole(
    a: GateSide,
    b: GateSide,
    drafts: Sequence[_Draft],
    rule: Rule,
    *,
    paired: bool = False,
    only_b: Sequence[SidePoint] = (),
    history: str = "",
) -> ComparisonReport:
    judged = iter(judge([sample for draft in drafts for _, sample, counts in draft.samples if counts], rule))
    points = [draft.finished(judged, rule, paired=paired) for draft in drafts]
    notices = {draft.found.a.notice for draft in drafts}
    return report_of(a, b, points, rule, paired=paired, only_b=only_b, notices=notices, history=history)


# Which points belong together


def _matches(a: GateSide, b: GateSide, allowed: Collection[str]) -> tuple[list[Match], list[SidePoint]]:
    def same(point: SidePoint) -> Hashable:
        return digest(without(point.content, allowed)), point.place

    def refuse(number: int, one: SidePoint, other: SidePoint) -> NoReturn:
        # What may differ between the sides must not differ within one: its runs would be averaged.
        raise UserError(
            f"{(a, b)[number].name}: holds runs that differ only in what may differ "
            f"({named(differences(one.content, other.content))}); choose those of this side with --where"
        )

    rows = matched((a.points, b.points), same, refuse)
    matches = [
        Match(a=one, b=other, allowed=() if other is None else tuple(differences(one.content, other.content)))
        for one, other in rows
        if one is not None
    ]
    alone = [other for one, other in rows if one is None and other is not None]
    _refuse_unmatched(a, b, matches, alone, allowed)
    return matches, alone


def _refuse_unmatched(
    a: GateSide, b: GateSide, matches: Sequence[Match], alone: Sequence[SidePoint], allowed: Collection[str]
) -> None:
    any_match = any(one.b is not None for one in matches)
    pairs = [
        (_apart(one.a, other, allowed), one.a)
        for one in matches
        for other in alone
        if one.b is None and (not any_match or (one.a.place == other.place and one.a.workload == other.workload))
    ]
    if not pairs:
        return
    found, point = min(pairs, key=lambda pair: len(pair[0]))
    keys = ",".join(one.key for one in found[:3] if one.key not in ("workload", "ranks", "nodes"))
    hint = f"; if that is meant: --allow {keys}" if keys and len(found) <= 3 else ""
    raise UserError(f"{a.name} and {b.name} are not comparable at {ranks_text(point.ranks)}: {named(found)}{hint}")


def _apart(one: SidePoint, other: SidePoint, allowed: Collection[str]) -> list[KeyDifference]:
    places = [
        KeyDifference(key=title.lower(), title=title, a=str(here), b=str(there))
        for title, here, there in zip(("Ranks", "Nodes"), one.place, other.place, strict=True)
        if here != there
    ]
    return places + differences(without(one.content, allowed), without(other.content, allowed))


def _earlier(found: Match, history: GateSide | None, sessions: Mapping[str, str]) -> list[list[SideRun]]:
    """Runs of the history at one point by their session, less the sessions that are compared."""
    sides = [side for side in (found.a, found.b) if side is not None]
    compared = {sessions[run.run_id] for side in sides for run in side.runs}
    points = [] if history is None else history.points
    for side in sides:
        like = [one for one in points if one.place == side.place and digest(one.content) == digest(side.content)]
        runs = [run for point in like for run in point.runs if sessions[run.run_id] not in compared]
        if runs:
            return list(alike(runs, lambda run: sessions[run.run_id]).values())
    return []


# Sides that ran interleaved


def paired_points(scan: Scan, name: str, where: Mapping[str, str]) -> tuple[list[Match], GateSide]:
    """The points of all paired comparisons among some runs, and what was left out of them.

    The sides may differ in what the comparison set on each (`series.sides` of the plan), and in nothing else. Runs are
    pairs where series, time of the plan, swept values and repeat are equal; equal places of both sides are pairs.

    `name` is for errors, `where` as of `dlbench.gate.sides.chosen`.
    """
    runs, left_out = chosen(scan, name, where, "--where")
    sided = [run for run in runs if run.plan.series.side]
    if not sided:
        raise UserError(f"{name}: no run belongs to a paired comparison; `dlbench run --ab A B` makes such runs")
    if len(sided) < len(runs):
        left_out.append(f"{len(runs) - len(sided)} runs that belong to no paired comparison")
    damaged: list[str] = []
    table, more = tabulated(scan, sided)
    left_out += more
    found: list[Match] = []
    # Different comparisons are never mixed.
    comparisons = alike(table.runs.items(), lambda item: json.dumps(item[1].plan.series.sides, sort_keys=True))
    for text, members in comparisons.items():
        of_one = dict(members)
        figures = {run_id: row for run_id, row in table.figures.items() if run_id in of_one}
        found += _of_comparison(json.loads(text), dataclasses.replace(table, runs=of_one, figures=figures), damaged)
    if not found:
        refuse_no_figures(name, (), left_out, table.damaged)
    return found, GateSide(name=name, points=(), left_out=tuple(left_out), damaged=(*table.damaged, *damaged))


def _of_comparison(sides: Mapping[str, Mapping[str, object]], table: RunTable, damaged: list[str]) -> list[Match]:
    allowed = {"side", *(key for settings in sides.values() for key in settings)}

    def refuse(number: int, one: SidePoint, other: SidePoint) -> NoReturn:
        raise UserError(
            f"side {'ab'[number]} at {other.ranks} ranks holds runs of different comparisons "
            f"({named(differences(one.content, other.content))}); choose one with --where series=NAME"
        )

    points = points_of(table, damaged)
    by_side = [[point for point in points if point.content.plan.get("side") == side] for side in "ab"]
    rows = matched(by_side, lambda point: (digest(without(point.content, allowed)), point.place), refuse)
    for one in (one for one, other in rows if one is not None and other is None):
        for two in (other for one, other in rows if one is None and other is not None):
            if one.place == two.place and one.workload == two.workload:
                text = named(differences(without(one.content, allowed), without(two.content, allowed)))
                raise UserError(f"the sides at {one.ranks} ranks differ in more than was set on them: {text}")
    order = {id(point): number for number, point in enumerate(points)}
    rows.sort(key=lambda row: min(order[id(point)] for point in row if point is not None))
    return [_paired(*row) for row in rows]


def _paired(one: SidePoint | None, other: SidePoint | None) -> Match:
    present = one or other
    assert present is not None
    a, b = ({run.pair: run for run in point.runs} if point else {} for point in (one, other))
    keys = sorted(a.keys() & b.keys())
    point_a = dataclasses.replace(one or present, runs=tuple(a[key] for key in keys))
    point_b = dataclasses.replace(other or present, runs=tuple(b[key] for key in keys))
    contents = [without(point.content, {"side"}) for point in (point_a, point_b)]
    return Match(a=point_a, b=point_b, allowed=tuple(differences(*contents)), unpaired=len(a) + len(b) - 2 * len(keys))


def _of_floors(
    points: Sequence[SidePoint], at_least: Mapping[int, float], sessions: Mapping[str, str]
) -> tuple[list[_Draft], list[SidePoint]]:
    drafts = [
        _Draft(Match(a=dataclasses.replace(point, runs=(), tags={}, doubts=()), b=point), (), sessions, at_least)
        for point in points
        if id(point) in at_least
    ]
    return drafts, [point for point in points if id(point) not in at_least]


# The metrics of a point


class _Draft:
    """A point before the verdicts of the whole family are known."""

    def __init__(
        self,
        found: Match,
        metrics: Collection[str],
        sessions: Mapping[str, str],
        at_least: Mapping[int, float],
        *,
        paired: bool = False,
        earlier: Sequence[Sequence[SideRun]] = (),
    ) -> None:
        self.found = found
        self.floor = at_least.get(id(found.b))
        self.sessions = sessions
        self.num_history = len(earlier)
        self.samples: list[tuple[Metric, MetricSample, bool]] = []
        runs_b = () if found.b is None else found.b.runs
        for metric in METRICS if metrics else ():
            sample = _sample(metric, found.a.runs, runs_b, paired, sessions, earlier)
            # A metric that no run has is worth a line only where it was asked for alone.
            if sample.a or sample.b or (metric.name in metrics and len(metrics) < len(METRICS)):
                self.samples.append((metric, sample, metric.name in metrics))
        if self.floor is not None:
            rates = {run.run_id: run.throughput for run in runs_b if run.throughput is not None}
            sample = MetricSample(
                a=(),
                b=tuple(1 / rate for rate in rates.values()),
                paired=False,
                sessions_b=tuple(sessions[run_id] for run_id in rates),
                floor=1 / self.floor,
            )
            self.samples.append((dataclasses.replace(FLOOR, unit=f"{found.a.sample_unit}/s"), sample, True))

    def finished(self, judged: Iterator[Judgement], rule: Rule, *, paired: bool) -> PointResult:
        """Returns the point; takes its own verdicts from those of the family."""
        judgements = [next(judged) if gated else judge([sample], rule)[0] for _, sample, gated in self.samples]
        pairs = list(zip(self.samples, judgements, strict=True))
        ratios = {metric.name: judgement.estimate for (metric, _, _), judgement in pairs}
        throughput, sooner = self._throughput(ratios, rule), self._sooner(ratios)
        metrics = []
        for (metric, sample, gated), judgement in pairs:
            quality = self._quality(metric, judgement, sooner)
            if gated:
                judgement = self._weakened(metric, judgement, throughput, quality)
            values_a, values_b = (_upright(metric, side) for side in (sample.a, sample.b))
            of_runs = judgement.tested is None or judgement.tested.unit != "session"
            a = _centre(values_a, sample.sessions_a, metric.unit, of_runs=of_runs)
            b = _centre(values_b, sample.sessions_b, metric.unit, of_runs=of_runs)
            if self.floor is not None and sample.floor is not None:
                judgement = _of_throughput(judgement)
                a = by_definition(self.floor, len(values_b), metric.unit)
                # The interval that decides, so that who reads it next to the floor sees the verdict.
                ratio = judgement.estimate
                b = None if ratio is None else ratio.scaled(self.floor, metric.unit)
            metrics.append(
                MetricResult(
                    name=metric.name,
                    title=metric.title,
                    about=metric.about,
                    gated=gated,
                    verdict=judgement.verdict if gated else "information",
                    reason=judgement.reason if gated else "",
                    awaits_reference=gated and judgement.awaits_reference,
                    a=a,
                    b=b,
                    ratio=judgement.estimate,
                    tested=judgement.tested,
                    values_a=values_a,
                    values_b=values_b,
                    quality=quality,
                )
            )
        return point_of(self.found, metrics, self.sessions, num_history=self.num_history, paired=paired)

    def _throughput(self, ratios: Mapping[str, Estimate | None], rule: Rule) -> Estimate | None:
        """Returns B / A of the mean step where that left the tolerance and has no verdict of its own; None: neither."""
        is_judged = any(gated for metric, _, gated in self.samples if metric.name == "step_mean_s")
        ratio = None if is_judged else ratios.get("step_mean_s")
        is_beyond = ratio is not None and abs(math.log(ratio.value)) > math.log1p(rule.tolerance)
        return ratio if is_beyond else None

    def _sooner(self, ratios: Mapping[str, Estimate | None]) -> Estimate | None:
        """Returns B / A of the time to quality where all runs met their target, and one side for certain sooner."""
        ratio = ratios.get("time_to_quality_s")
        sides = (self.found.a, self.found.b)
        have_all = all("time_to_quality_s" in run.figures for side in sides if side is not None for run in side.runs)
        is_sure = ratio is not None and ratio.is_confident and is_other_than(ratio, 1)
        return ratio if have_all and is_sure else None

    def _quality(self, metric: Metric, judgement: Judgement, sooner: Estimate | None) -> str:
        """What a ratio leaves open where sides do not train alike, unless the faster one met the target sooner, too."""
        ratio = judgement.estimate
        if ratio is None or metric.name in ("time_to_quality_s", FLOOR.name):
            return ""
        is_known = sooner is not None and (sooner.value < 1) == (ratio.value < 1)
        return "" if is_known else self.found.quality

    def _weakened(self, metric: Metric, judgement: Judgement, throughput: Estimate | None, quality: str) -> Judgement:
        """Returns a judgement that is undecided where another figure of the point speaks against its outcome."""
        a, b = self.found.a, self.found.b
        favoured = {"better": b, "equal": b, "worse": a}.get(judgement.outcome)
        runs_b = () if b is None else b.runs
        reason = ""
        if quality and favoured is not None and favoured.apart:
            reason = "a step of it is not the same training: train both to a target (--to-accuracy)"
        elif metric.name == "time_to_quality_s" and judgement.outcome in ("better", "equal"):
            if not all(metric.name in run.figures for run in runs_b):
                reason = "some runs of B did not reach the target, which is worse than any time"
        elif metric.name.startswith("step_") and judgement.outcome == "equal" and throughput is not None:
            reason = (
                f"within the tolerance, but the throughput is not: B / A of the mean step is {throughput.value:.3f}; "
                "--metric step_mean_s decides on it"
            )
        return dataclasses.replace(judgement, outcome="undecided", reason=reason) if reason else judgement


def _of_throughput(judgement: Judgement) -> Judgement:
    """Returns a judgement on throughputs: the test of a floor saw the inverse of their ratio."""
    tested = judgement.tested
    if tested is not None:
        low, high = tested.equivalence
        shortfall = 1 - 1 / (1 + tested.detectable)
        tested = dataclasses.replace(tested, equivalence=(1 / high, 1 / low), detectable=shortfall)
    ratio = None if judgement.estimate is None else judgement.estimate.inverted("ratio")
    return dataclasses.replace(judgement, estimate=ratio, tested=tested)


def _centre(values: Sequence[float], sessions: Sequence[str] | None, unit: str, *, of_runs: bool) -> Estimate | None:
    """The geometric mean of one side over the units of the ratio: its runs, or each of its sessions as one value."""
    if not values:
        return None
    named_values = list(zip(sessions or [""] * len(values), values, strict=True))
    found = alike(named_values, lambda one: one[0])
    if len(found) > 1 and not of_runs:
        centres = {name: geometric_mean([value for _, value in runs]) for name, runs in found.items()}
        return geometric_mean_estimate({KnownKey.of(name, 0, name): one for name, one in centres.items()}, unit)
    by_run = {KnownKey.of("", i, name): value for i, (name, value) in enumerate(named_values)}
    return geometric_mean_estimate(by_run, unit)


def _sample(
    metric: Metric,
    a: Sequence[SideRun],
    b: Sequence[SideRun],
    paired: bool,
    sessions: Mapping[str, str],
    earlier: Sequence[Sequence[SideRun]],
) -> MetricSample:
    name = metric.name
    if paired:
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if name in x.figures and name in y.figures]
        a, b = [x for x, _ in pairs], [y for _, y in pairs]
    known_a, known_b = ([run for run in side if name in run.figures] for side in (a, b))
    before = [[run.figures[name] for run in session if name in run.figures] for session in earlier]
    jobs = {run.circumstances.job for run in (*known_a, *known_b)}
    commands = {run.command for run in (*known_a, *known_b)}
    return MetricSample(
        a=_upright(metric, [run.figures[name] for run in known_a]),
        b=_upright(metric, [run.figures[name] for run in known_b]),
        paired=paired,
        sessions_a=tuple(sessions[run.run_id] for run in known_a),
        sessions_b=tuple(sessions[run.run_id] for run in known_b),
        together=any(len(names) == 1 and "" not in names for names in (jobs, commands)),
        history=tuple(_upright(metric, values) for values in before if values),
    )


def _upright(metric: Metric, values: Sequence[float]) -> tuple[float, ...]:
    """Values of which larger is worse, or such values back."""
    return tuple(values) if metric.higher_is_worse else tuple(1 / value for value in values)
