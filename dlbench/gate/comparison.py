"""Compares two sides, the pairs of one folder (`dlbench run --ab`), or runs with a floor, by point and metric."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import NoReturn

from dlbench.analysis.metrics import METRICS, Metric
from dlbench.analysis.scaling import group_by, match_by
from dlbench.analysis.table import RunTable
from dlbench.errors import UserError
from dlbench.gate.baseline import Floor, floors_at
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
from dlbench.stats.pairing import KnownKey, RunKey


def compare_sides(  # noqa: PLR0913 - the options of `dlbench compare`
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
    """Compares B with A, the baseline, which may differ on `allowed` keys; the metrics of these names decide.

    `history` only shows how far sessions scatter; `options` choose the runs of each side, for errors.
    """
    if history is None:
        history = GateSide(name="", points=(), left_out=(), damaged=())
    # Runs compared with themselves are always equal: such a gate would always pass.
    runs_a, runs_b = _identities(a), _identities(b)
    if runs_a == runs_b:
        raise UserError(
            f"A ({a.name}) and B ({b.name}) are the same {runs_text(len(runs_a))}: nothing to "
            f"compare; give two folders, choose each side with {options[0]} and {options[1]}, or give --paired for "
            "runs of run --ab"
        )
    matches, points_only_in_b = _matches(a, b, allowed)
    sessions = sessions_at((*a.points, *b.points, *history.points))
    at_least = floors_at(b.points, floors, b.name)
    drafts = [
        _Draft(match, metrics, sessions, at_least, earlier=_earlier_runs(match, history, sessions)) for match in matches
    ]
    floor_drafts, points_only_in_b = _floor_drafts(points_only_in_b, at_least, sessions)
    return _judged_report(a, b, [*drafts, *floor_drafts], rule, points_only_in_b=points_only_in_b, history=history.name)


def _identities(side: GateSide) -> set[tuple[object, ...]]:
    runs = itertools.chain.from_iterable(point.runs for point in side.points)
    return {(run.run_id, run.circumstances.finished, *sorted(run.figures.items())) for run in runs}


def compare_floors(b: GateSide, *, rule: Rule, floors: Sequence[Floor]) -> ComparisonReport:
    """Compares runs with floors alone."""
    drafts, without_floor = _floor_drafts(b.points, floors_at(b.points, floors, b.name), sessions_at(b.points))
    a = GateSide(name=f"the floor {'; '.join(floor.text for floor in floors)}", points=(), left_out=(), damaged=())
    return _judged_report(a, b, drafts, rule, points_only_in_b=without_floor)


def compare_pairs(
    points: Sequence[Match], *, both: GateSide, metrics: Collection[str], rule: Rule, floors: Sequence[Floor] = ()
) -> ComparisonReport:
    """Compares side b with side a of interleaved runs; `points` and `both` are those of `paired_points`."""
    at_least = floors_at([match.b for match in points if match.b is not None], floors, both.name)
    sessions = sessions_at(itertools.chain.from_iterable(match.points for match in points))
    drafts = [_Draft(match, metrics, sessions, at_least, paired=True) for match in points]
    a = GateSide(name=f"{both.name}, side a", points=(), left_out=(), damaged=())
    return _judged_report(a, dataclasses.replace(both, name=f"{both.name}, side b"), drafts, rule, paired=True)


def _judged_report(
    a: GateSide,
    b: GateSide,
    drafts: Sequence[_Draft],
    rule: Rule,
    *,
    paired: bool = False,
    points_only_in_b: Sequence[SidePoint] = (),
    history: str = "",
) -> ComparisonReport:
    judged = iter(judge([sample for draft in drafts for _, sample, counts in draft.samples if counts], rule))
    points = [draft.finished(judged, rule, paired=paired) for draft in drafts]
    notices = {draft.match.a.notice for draft in drafts}
    return report_of(
        a, b, points, rule, paired=paired, points_only_in_b=points_only_in_b, notices=notices, history=history
    )


def _matches(a: GateSide, b: GateSide, allowed: Collection[str]) -> tuple[list[Match], list[SidePoint]]:
    def key(point: SidePoint) -> Hashable:
        return digest(without(point.content, allowed)), point.place

    def refuse(number: int, point: SidePoint, second: SidePoint) -> NoReturn:
        # What may differ between the sides must not differ within one: its runs would be averaged.
        raise UserError(
            f"{(a, b)[number].name}: holds runs that differ only in allowed keys "
            f"({named(differences(point.content, second.content))}); choose the runs of this side with --where"
        )

    matches: list[Match] = []
    points_only_in_b: list[SidePoint] = []
    for point_a, point_b in match_by((a.points, b.points), key, refuse):
        if point_a is not None and point_b is not None:
            matches.append(Match(a=point_a, b=point_b, allowed=tuple(differences(point_a.content, point_b.content))))
        elif point_a is not None:
            matches.append(Match(a=point_a, b=None))
        elif point_b is not None:
            points_only_in_b.append(point_b)
    _refuse_unmatched(a, b, matches, points_only_in_b, allowed)
    return matches, points_only_in_b


def _refuse_unmatched(
    a: GateSide, b: GateSide, matches: Sequence[Match], points_only_in_b: Sequence[SidePoint], allowed: Collection[str]
) -> None:
    """Raises an error if a point of each side is alone that the other should have: all points, if nothing matched."""
    any_match = any(match.b is not None for match in matches)
    pairs = [
        (_all_differences(match.a, point, allowed), match.a)
        for match, point in itertools.product(matches, points_only_in_b)
        if match.b is None and (not any_match or (match.a.place == point.place and match.a.workload == point.workload))
    ]
    if not pairs:
        return
    differing, nearest_point = min(pairs, key=lambda pair: len(pair[0]))
    hint = ""
    if len(differing) <= 3:
        keys = [difference.key for difference in differing if difference.key not in ("workload", "ranks", "nodes")]
        hint = f"; to compare them anyway: --allow {','.join(keys)}" if keys else ""
    raise UserError(
        f"{a.name} and {b.name} are not comparable at {ranks_text(nearest_point.ranks)}: {named(differing)}{hint}"
    )


def _all_differences(a: SidePoint, b: SidePoint, allowed: Collection[str]) -> list[KeyDifference]:
    places = [
        KeyDifference(key=title.lower(), title=title, a=str(count_a), b=str(count_b))
        for title, count_a, count_b in zip(("Ranks", "Nodes"), a.place, b.place, strict=True)
        if count_a != count_b
    ]
    return places + differences(without(a.content, allowed), without(b.content, allowed))


def _earlier_runs(match: Match, history: GateSide, sessions: Mapping[str, str]) -> list[list[SideRun]]:
    """Returns the runs of the history at one point by their session, without the sessions that are compared."""
    compared = {sessions[run.run_id] for run in match.runs}
    for point in match.points:
        content = digest(point.content)
        runs = [
            run
            for earlier in history.points
            if earlier.place == point.place and digest(earlier.content) == content
            for run in earlier.runs
            if sessions[run.run_id] not in compared
        ]
        if runs:
            return list(group_by(runs, lambda run: sessions[run.run_id]).values())
    return []


def paired_points(scan: Scan, name: str, where: Mapping[str, str]) -> tuple[list[Match], GateSide]:
    """Returns the points of all paired comparisons among some runs, and a side with the runs that were left out.

    The sides may differ in the settings of the comparison (`series.sides`) only. Runs are pairs if series, time of the
    plan, swept values and repeat are equal, and are in equal order.
    """
    runs, left_out = chosen(scan, name, where, "--where")
    sided = [run for run in runs if run.plan.series.side]
    if not sided:
        raise UserError(f"{name}: no run belongs to a paired comparison; `dlbench run --ab A B` makes such runs")
    if len(sided) < len(runs):
        left_out.append(f"{runs_text(len(runs) - len(sided))} without a paired comparison")
    damaged: list[str] = []
    table, without_figures = tabulated(scan, sided)
    left_out += without_figures
    matches: list[Match] = []
    # Different comparisons are never mixed.
    comparisons = group_by(table.runs.items(), lambda item: json.dumps(item[1].plan.series.sides, sort_keys=True))
    for text, members in comparisons.items():
        runs_by_id = dict(members)
        figures = {run_id: row for run_id, row in table.figures.items() if run_id in runs_by_id}
        compared = dataclasses.replace(table, runs=runs_by_id, figures=figures)
        matches += _paired_matches(json.loads(text), compared, damaged)
    if not matches:
        refuse_no_figures(name, (), left_out, table.damaged)
    return matches, GateSide(name=name, points=(), left_out=tuple(left_out), damaged=(*table.damaged, *damaged))


def _paired_matches(sides: Mapping[str, Mapping[str, object]], table: RunTable, damaged: list[str]) -> list[Match]:
    allowed = {"side"}.union(*sides.values())

    def refuse(number: int, point: SidePoint, second: SidePoint) -> NoReturn:
        raise UserError(
            f"side {'ab'[number]} at {ranks_text(second.ranks)} holds runs of different comparisons "
            f"({named(differences(point.content, second.content))}); choose one with --where series=NAME"
        )

    points = points_of(table, damaged)
    points_a = [point for point in points if point.content.plan.get("side") == "a"]
    points_b = [point for point in points if point.content.plan.get("side") == "b"]
    rows = match_by((points_a, points_b), lambda point: (digest(without(point.content, allowed)), point.place), refuse)
    only_a = [a for a, b in rows if a is not None and b is None]
    points_only_in_b = [b for a, b in rows if b is not None and a is None]
    for a, b in itertools.product(only_a, points_only_in_b):
        if a.place == b.place and a.workload == b.workload:
            text = named(differences(without(a.content, allowed), without(b.content, allowed)))
            raise UserError(f"the sides at {ranks_text(a.ranks)} differ in more than the settings of --ab: {text}")
    order = {id(point): number for number, point in enumerate(points)}
    rows.sort(key=lambda row: min(order[id(point)] for point in row if point is not None))
    return [_paired_match(*row) for row in rows]


def _paired_match(a: SidePoint | None, b: SidePoint | None) -> Match:
    """Returns the runs of both sides that have a partner; a side that did not run takes the other's description."""
    present = a or b
    assert present is not None
    a = a or dataclasses.replace(present, runs=())
    b = b or dataclasses.replace(present, runs=())
    runs_a = {run.pair: run for run in a.runs}
    runs_b = {run.pair: run for run in b.runs}
    keys = sorted(runs_a.keys() & runs_b.keys())
    return Match(
        a=dataclasses.replace(a, runs=tuple(runs_a[key] for key in keys)),
        b=dataclasses.replace(b, runs=tuple(runs_b[key] for key in keys)),
        allowed=tuple(differences(without(a.content, {"side"}), without(b.content, {"side"}))),
        unpaired=len(runs_a) + len(runs_b) - 2 * len(keys),
    )


def _floor_drafts(
    points: Sequence[SidePoint], at_least: Mapping[int, float], sessions: Mapping[str, str]
) -> tuple[list[_Draft], list[SidePoint]]:
    drafts = [
        _Draft(Match(a=dataclasses.replace(point, runs=(), tags={}, doubts=()), b=point), (), sessions, at_least)
        for point in points
        if id(point) in at_least
    ]
    return drafts, [point for point in points if id(point) not in at_least]


class _Draft:
    def __init__(
        self,
        match: Match,
        metrics: Collection[str],
        sessions: Mapping[str, str],
        at_least: Mapping[int, float],
        *,
        paired: bool = False,
        earlier: Sequence[Sequence[SideRun]] = (),
    ) -> None:
        self.match = match
        self.floor = at_least.get(id(match.b))
        self.sessions = sessions
        self.num_history = len(earlier)
        self.samples: list[tuple[Metric, MetricSample, bool]] = []
        candidates = METRICS if metrics else ()
        for metric in candidates:
            sample = _sample(metric, match.a.runs, match.runs_b, paired, sessions, earlier)
            # A metric that no run has is listed only if the user chose it among others.
            if sample.a or sample.b or (metric.name in metrics and len(metrics) < len(METRICS)):
                self.samples.append((metric, sample, metric.name in metrics))
        if self.floor is not None:
            rates = {run.run_id: run.throughput for run in match.runs_b if run.throughput is not None}
            sample = MetricSample(
                a=(),
                b=tuple(1 / rate for rate in rates.values()),
                paired=False,
                sessions_b=tuple(sessions[run_id] for run_id in rates),
                floor=1 / self.floor,
            )
            self.samples.append((dataclasses.replace(FLOOR, unit=f"{match.a.sample_unit}/s"), sample, True))

    def finished(self, judged: Iterator[Judgement], rule: Rule, *, paired: bool) -> PointResult:
        judgements = []
        for _, sample, gated in self.samples:
            judgements.append(next(judged) if gated else judge([sample], rule)[0])
        ratios = {
            metric.name: judgement.estimate for (metric, _, _), judgement in zip(self.samples, judgements, strict=True)
        }
        throughput_change = self._throughput_change(ratios, rule)
        sooner = self._time_to_quality_ratio(ratios)
        metrics = []
        for (metric, sample, gated), judgement in zip(self.samples, judgements, strict=True):
            quality = self._quality(metric, judgement, sooner)
            verdict, reason = "information", ""
            if gated:
                judgement = self._weakened(metric, judgement, throughput_change, quality)
                verdict, reason = judgement.verdict, judgement.reason
            values_a = _larger_is_worse(metric, sample.a)
            values_b = _larger_is_worse(metric, sample.b)
            of_runs = judgement.tested is None or judgement.tested.unit != "session"
            a = _centre(values_a, sample.sessions_a, metric.unit, of_runs=of_runs)
            b = _centre(values_b, sample.sessions_b, metric.unit, of_runs=of_runs)
            if self.floor is not None and sample.floor is not None:
                judgement = _of_throughput(judgement)
                a = by_definition(self.floor, len(values_b), metric.unit)
                # The interval that decides: next to the floor it shows the verdict.
                b = None
                if judgement.estimate is not None:
                    b = judgement.estimate.scaled(self.floor, metric.unit)
            metrics.append(
                MetricResult(
                    name=metric.name,
                    title=metric.title,
                    about=metric.about,
                    gated=gated,
                    verdict=verdict,
                    reason=reason,
                    reference_incomplete=gated and judgement.reference_incomplete,
                    a=a,
                    b=b,
                    ratio=judgement.estimate,
                    tested=judgement.tested,
                    values_a=values_a,
                    values_b=values_b,
                    quality=quality,
                )
            )
        return point_of(self.match, metrics, self.sessions, num_history=self.num_history, paired=paired)

    def _throughput_change(self, ratios: Mapping[str, Estimate | None], rule: Rule) -> Estimate | None:
        """Returns B / A of the mean step if it is beyond the tolerance and gets no verdict itself."""
        ratio = ratios.get("step_mean_s")
        if ratio is None or any(gated for metric, _, gated in self.samples if metric.name == "step_mean_s"):
            return None
        is_beyond = abs(math.log(ratio.value)) > math.log1p(rule.tolerance)
        return ratio if is_beyond else None

    def _time_to_quality_ratio(self, ratios: Mapping[str, Estimate | None]) -> Estimate | None:
        """Returns B / A of the time to quality if all runs met their target and the interval excludes 1."""
        ratio = ratios.get("time_to_quality_s")
        if ratio is None or not ratio.is_confident or not is_other_than(ratio, 1):
            return None
        have_all = all("time_to_quality_s" in run.figures for run in self.match.runs)
        return ratio if have_all else None

    def _quality(self, metric: Metric, judgement: Judgement, sooner: Estimate | None) -> str:
        """Returns a caveat if the sides train differently, unless the faster side also met the target sooner."""
        ratio = judgement.estimate
        if ratio is None or metric.name in ("time_to_quality_s", FLOOR.name):
            return ""
        if sooner is not None and (sooner.value < 1) == (ratio.value < 1):
            return ""
        return self.match.quality

    def _weakened(
        self, metric: Metric, judgement: Judgement, throughput_change: Estimate | None, quality: str
    ) -> Judgement:
        """Returns the judgement, undecided if another figure of the point contradicts its outcome."""
        a, b = self.match.a, self.match.b
        favoured = {"better": b, "equal": b, "worse": a}.get(judgement.outcome)
        if quality and favoured is not None and favoured.apart:
            reason = "its steps do not train the same: train both to a target (--to-accuracy)"
        elif metric.name == "time_to_quality_s" and judgement.outcome in ("better", "equal"):
            if all(metric.name in run.figures for run in self.match.runs_b):
                return judgement
            reason = "some runs of B did not reach the target, which is worse than any time"
        elif metric.name.startswith("step_") and judgement.outcome == "equal" and throughput_change is not None:
            reason = (
                "within the tolerance, but the throughput is not: B / A of the mean step is "
                f"{throughput_change.value:.3f}; --metric step_mean_s judges it"
            )
        else:
            return judgement
        return dataclasses.replace(judgement, outcome="undecided", reason=reason)


def _of_throughput(judgement: Judgement) -> Judgement:
    tested = judgement.tested
    if tested is not None:
        low, high = tested.equivalence
        shortfall = 1 - 1 / (1 + tested.detectable)
        tested = dataclasses.replace(tested, equivalence=(1 / high, 1 / low), detectable=shortfall)
    ratio = judgement.estimate
    if ratio is not None:
        ratio = ratio.inverted("ratio")
    return dataclasses.replace(judgement, estimate=ratio, tested=tested)


def _centre(values: Sequence[float], sessions: Sequence[str] | None, unit: str, *, of_runs: bool) -> Estimate | None:
    """Returns the geometric mean of one side over the units of the ratio: its runs, or its sessions."""
    if not values:
        return None
    session_names = sessions or [""] * len(values)
    by_unit: dict[RunKey, float] = {}
    if len(set(session_names)) > 1 and not of_runs:
        values_by_session: dict[str, list[float]] = {}
        for name, value in zip(session_names, values, strict=True):
            values_by_session.setdefault(name, []).append(value)
        for name, session_values in values_by_session.items():
            by_unit[KnownKey.of(name, 0, name)] = geometric_mean(session_values)
    else:
        for i, (name, value) in enumerate(zip(session_names, values, strict=True)):
            by_unit[KnownKey.of("", i, name)] = value
    return geometric_mean_estimate(by_unit, unit)


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
        pairs = [
            (run_a, run_b) for run_a, run_b in zip(a, b, strict=True) if name in run_a.figures and name in run_b.figures
        ]
        a, b = [run_a for run_a, _ in pairs], [run_b for _, run_b in pairs]
    runs_a = [run for run in a if name in run.figures]
    runs_b = [run for run in b if name in run.figures]
    jobs = {run.circumstances.job for run in (*runs_a, *runs_b)}
    commands = {run.command for run in (*runs_a, *runs_b)}
    history = []
    for session_runs in earlier:
        values = [run.figures[name] for run in session_runs if name in run.figures]
        if values:
            history.append(_larger_is_worse(metric, values))
    return MetricSample(
        a=_larger_is_worse(metric, [run.figures[name] for run in runs_a]),
        b=_larger_is_worse(metric, [run.figures[name] for run in runs_b]),
        paired=paired,
        sessions_a=tuple(sessions[run.run_id] for run in runs_a),
        sessions_b=tuple(sessions[run.run_id] for run in runs_b),
        together=any(len(names) == 1 and "" not in names for names in (jobs, commands)),
        history=tuple(history),
    )


def _larger_is_worse(metric: Metric, values: Sequence[float]) -> tuple[float, ...]:
    """Returns the values, inverted if lower ones are worse; applied twice it gives the values back."""
    if metric.higher_is_worse:
        return tuple(values)
    return tuple(1 / value for value in values)
