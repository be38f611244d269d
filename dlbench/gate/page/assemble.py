"""A comparison becomes a `ComparisonReport`: every number beside its verdict, the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import dlbench
from dlbench.gate.comparison import ComparedMetric, ComparedPoint, Comparison
from dlbench.gate.content import KeyDifference
from dlbench.gate.labels import point_label
from dlbench.gate.page import model
from dlbench.gate.page.words import headline, methods
from dlbench.gate.sides import SidePoint, SideRun
from dlbench.report.wording import runs_text
from dlbench.units import whole_seconds

DAY_S = 86_400

T = TypeVar("T")


def assemble(found: Comparison) -> model.ComparisonReport:
    """The report of a comparison; equal comparisons give equal reports."""
    points = _with_unique_labels(tuple(_point(point, found) for point in found.points))
    environment = _of_all([point.environment for point in points])
    cautions = _of_all([point.cautions for point in points])
    points = tuple(
        dataclasses.replace(
            point,
            environment=tuple(one for one in point.environment if one not in environment),
            cautions=tuple(one for one in point.cautions if one not in cautions),
        )
        for point in points
    )
    return model.ComparisonReport(
        dlbench_version=dlbench.__version__,
        a=found.a,
        b=found.b,
        paired=found.paired,
        history=found.history,
        verdict=found.verdict,
        headline=headline(found.verdict, points, found.rule.tolerance),
        tolerance=found.rule.tolerance,
        level=found.rule.level,
        num_compared=found.num_compared,
        points=points,
        environment=environment,
        cautions=cautions,
        only_b=tuple(point_label(point) for point in found.only_b),
        left_out=found.left_out,
        damaged=found.damaged,
        notices=tuple(sorted({point.a.notice for point in found.points} - {""})),
        methods=methods(found),
    )


def _with_unique_labels(points: tuple[model.PointResult, ...]) -> tuple[model.PointResult, ...]:
    """Points of equal labels are counted: a CI server takes test cases of one name for one."""
    seen: dict[str, int] = {}
    result = []
    for point in points:
        seen[point.label] = number = seen.get(point.label, 0) + 1
        result.append(dataclasses.replace(point, label=f"{point.label} ({number})") if number > 1 else point)
    return tuple(result)


def _of_all(lists: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """What is in every list, in the order of the first."""
    return tuple(one for one in lists[0] if all(one in other for other in lists[1:])) if lists else ()


def _point(found: ComparedPoint, whole: Comparison) -> model.PointResult:
    a, b = found.a, found.b
    runs_b = () if b is None else b.runs
    return model.PointResult(
        label=point_label(a, {one.key for one in found.allowed}),
        caption=_caption(a, found.allowed),
        workload=a.content.registered["workload"],
        ranks=a.ranks,
        nodes=a.nodes,
        runs_a=tuple(run.run_id for run in a.runs),
        runs_b=tuple(run.run_id for run in runs_b),
        sessions_a=_sessions(a.runs, found),
        sessions_b=_sessions(runs_b, found),
        sessions_history=found.num_history,
        finished_a=_span(a.runs),
        finished_b=_span(runs_b),
        tags_a=_tags(a.tags),
        tags_b=_tags({} if b is None else b.tags),
        allowed=found.allowed,
        environment=found.environment,
        cautions=tuple(_cautions(found, whole)),
        metrics=tuple(_metric(one) for one in found.metrics),
    )


def _caption(point: SidePoint, allowed: Sequence[KeyDifference]) -> str:
    """Conditions that both sides share; what differs on purpose is told apart."""
    # Most runs are of speed: only a target is worth words.
    told = {name: value for name, value in point.content.registered.items() if value and value != "speed"}
    unit = point.sample_unit
    # Before and behind the value; never a pattern, for units and values are text of workload files.
    around = {
        "precision": ("", ""),
        "batch_per_rank": ("", f" {unit} per rank"),
        "global_batch": ("", f" {unit} in all"),
        "data": ("", " data" if told.get("data") == "synthetic" else ""),
        "exchange": ("exchange ", ""),
        "goal": ("", ""),
        "system": ("on ", ""),
        "device": ("", ""),
        "watching": ("monitoring ", ""),
        "fault": ("injected fault ", ""),
    }
    different = {one.key for one in allowed}
    shown = [
        f"{before}{told[name]}{behind}"
        for name, (before, behind) in around.items()
        if name in told and name not in different
    ]
    return "; ".join(["geometric means", *shown, *([point.notice] if point.notice else [])])


def _sessions(runs: Sequence[SideRun], found: ComparedPoint) -> int:
    return len({found.sessions[run.run_id] for run in runs})


def _span(runs: Sequence[SideRun]) -> tuple[str, str]:
    ends = sorted(whole_seconds(run.finished) for run in runs)
    return (ends[0], ends[-1]) if ends else ("", "")


def _tags(tags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(tags.items()))


def _metric(found: ComparedMetric) -> model.MetricResult:
    judged, metric = found.judgement, found.metric
    return model.MetricResult(
        name=metric.name,
        title=metric.title,
        about=metric.about,
        gated=found.gated,
        verdict=judged.verdict if found.gated else "information",
        reason=judged.reason if found.gated else "",
        a=found.a,
        b=found.b,
        ratio=judged.ratio,
        tested=judged.tested,
        values_a=found.values_a,
        values_b=found.values_b,
    )


def _cautions(found: ComparedPoint, whole: Comparison) -> Iterator[str]:
    if found.b is None:
        yield "B has no run with figures here: nothing is compared."
        return
    for side, point in (("A", found.a), ("B", found.b)):
        yield from (f"{side}: {text}." for text in point.doubts)
    if found.unpaired:
        yield f"{runs_text(found.unpaired)} without a partner on the other side left out."
    shared = {run.run_id for run in found.a.runs} & {run.run_id for run in found.b.runs}
    if shared:
        yield f"{runs_text(len(shared))} on both sides: a run is compared with itself."
    if not whole.paired:
        yield from filter(None, [_spacing(found)])
    for one in found.metrics:
        counts = len(one.values_a), len(one.values_b)
        wanted = len(found.a.runs), len(found.b.runs)
        if one.gated and counts != wanted:
            told = " and ".join(f"{n} of {of} runs of {side}" for n, of, side in zip(counts, wanted, "AB", strict=True))
            yield f"{one.metric.title}: in {told}."


def _spacing(found: ComparedPoint) -> str:
    """How far apart in time the sides were run, because a machine drifts; empty where that is accounted for."""
    advice = "`dlbench run --ab` interleaves them, and --paired compares the pairs."
    sides = found.a.runs, found.b.runs if found.b else ()
    times = [[moment for run in side if math.isfinite(moment := run.circumstances.moment)] for side in sides]
    if not all(times):
        return f"When the runs ended is not known; a drift of the machine would count as a difference. {advice}"
    first, second = sorted(times, key=min)
    gap = min(second) - max(first)
    if gap <= 0:
        return f"The runs were not compared as pairs; {advice}"
    # Sessions that lie as far apart as the sides have its drift in their scatter.
    spans = [max(ends) - min(ends) for ends, side in zip(times, sides, strict=True) if _sessions(side, found) > 1]
    if gap <= max(spans, default=0.0):
        return ""
    days = gap / DAY_S
    far = (
        f"{days:.0f} days apart"
        if days >= 2
        else f"{gap / 3600:.0f} hours apart"
        if gap >= 7200
        else "one after the other"
    )
    return f"The sides were run {far}: a drift of the machine in between counts as a difference; {advice}"
