"""Training to a quality: words, charts, tables and the section of a group; and that of large batches across groups."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, Series, scatter
from dlbench.report.charts.style import HEIGHT, IDEAL, INK, MUTED, RANK_COLOURS, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, columns_of, drop_empty_columns, times_cell
from dlbench.report.wording import (
    basis_text,
    figure_text,
    number_text,
    place_text,
    reached_text,
    runs_text,
    times_text,
    value_text,
)
from dlbench.stats.estimates import Estimate
from dlbench.stats.multiplicity import LEVEL
from dlbench.stats.verdict import judge
from dlbench.views.model import Report, ReportGroup
from dlbench.views.quality.numbers import (
    BatchPoint,
    Factors,
    GroupQuality,
    LargeBatch,
    QualityCurve,
    QualityEvaluation,
    QualityPoint,
    group_quality,
    large_batches,
)
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, place_columns, place_of

MAX_RUNS = 8  # Runs drawn at each rank count.
MAX_MARKS = 60  # Evaluations drawn of a run; the first, the last and evenly spaced ones between.
WORTH_SAYING = 0.01  # Factors nearer to 1 are called none.


def quality_verdict(subject: str, quality: GroupQuality) -> str:
    """How many runs reached the target, how soon, and why; no speed-up unless all did.

    `subject`: the workload in words, with preset, engine, precision, batch and data source.
    """
    base, last = quality.points[0], quality.points[-1]
    if quality.num_reached < quality.num_runs:
        return f"{subject}: {_not_reached(quality)}"
    best = "" if last.best is None else f", best value {number_text(last.best.value, quality.unit)}"
    sooner = f"{_time_at(last)} ({reached_text(last.num_reached, last.num_runs)}{best})"
    if last.factors is None or len(quality.points) == 1:
        basis = f"; {basis_text(last.time)}" if last.num_reached > 1 and last.time is not None else ""
        return f"{subject}: target {quality.goal} met in {sooner}{basis}."
    factor, s = last.factors.speedup, "s" if last.ranks == 1 else ""
    how = f"need{s} {times_text(factor.inverted('ratio'))} as long as"
    if factor.value >= 1:
        how = f"get{s} there {times_text(factor)} sooner than"
    return (
        f"{subject}: all {runs_text(quality.num_runs)} met the target {quality.goal}. {place_of(last)} {how} "
        f"{place_of(base)} ({basis_text(factor)}): {_why(last.factors)}. Time to accuracy: {_time_at(base)}, {sooner}."
    )


def quality_headline(quality: GroupQuality) -> str:
    """How many runs met the target, or how soon, in at most 100 characters."""
    sign = ">=" if quality.higher_is_better else "<="
    goal = f"{quality.metric_title} {sign} {number_text(quality.target, quality.unit)}"
    last = quality.points[-1]
    if quality.num_reached < quality.num_runs or last.time is None:
        return f"{reached_text(quality.num_reached, quality.num_runs)} met {goal}"
    return f"{goal} in {value_text(last.time)} at {place_of(last)} ({runs_text(last.num_runs)})"


def _not_reached(quality: GroupQuality) -> str:
    goal, reached, runs = quality.goal, quality.num_reached, quality.num_runs
    counts = ", ".join(f"{point.num_reached} of {point.num_runs} at {place_of(point)}" for point in quality.points)
    if reached == 0:
        known = [(point.best, point) for point in quality.points if point.best]
        text = f"{'the run' if runs == 1 else f'all {runs} runs'} missed the target {goal} within {quality.limit}"
        if not known:
            return f"{text}."
        best, at = (max if quality.higher_is_better else min)(known, key=lambda one: one[0].value)
        if runs == 1:
            return f"{text}: it reached {figure_text(best)}."
        return f"{text}: the best they reached is {figure_text(best)} at {place_of(at)} (median of its runs)."
    times = "; ".join(f"{_time_at(point)} ({point.num_reached} of {point.num_runs})" for point in quality.points)
    # Where it is missing; no words where the baseline did not get there, because then it is missing everywhere.
    base, *others = quality.points
    where = ""
    if base.num_reached == base.num_runs and others:
        where = f" at {', '.join(place_of(point) for point in others if point.factors is None)}"
    return (
        f"{reached_text(reached, runs)} met the target {goal} within {quality.limit} ({counts}): no speed-up of the "
        f"time to accuracy{where}. Median time of those that did: {times}."
    )


def _time_at(point: QualityPoint) -> str:
    return f"{'none' if point.time is None else figure_text(point.time)} at {place_of(point)}"


def _why(factors: Factors) -> str:
    faster = factors.throughput.value >= 1
    first = f"throughput is {times_text(factors.throughput)}" + ("" if faster else " only")
    samples = factors.samples
    if abs(samples.value - 1) < WORTH_SAYING and judge(samples, WORTH_SAYING, centre=1.0).outcome != "undecided":
        second = "as many samples were needed"
    else:
        only = "" if samples.value < 1 else "only "
        second = f"{only}{times_text(samples.inverted('ratio'))} as many samples were needed{_noise(samples)}"
    joint = ", and " if (samples.value < 1 - WORTH_SAYING) is not faster else ", but "
    rest, third = factors.rest, ""
    if abs(rest.value - 1) >= WORTH_SAYING:
        verb = f"{'cost' if rest.value < 1 else 'gain'} a factor of {times_text(rest).replace('x', '')}"
        third = f"; evaluation, checkpoints and waits {verb}{_noise(rest)}"
    return f"{first}{joint}{second}{third}"


def _noise(factor: Estimate) -> str:
    within = factor.low is not None and factor.high is not None and factor.low <= 1 <= factor.high
    return " (perhaps by chance)" if within else ""


def quality_charts(group: ReportGroup, found: GroupQuality, table: Sheet[QualityPoint]) -> list[Chart]:
    """The metric over samples (statistical efficiency) and over time (both); `table`: what was reached."""
    if not any(one.value is not None for curve in found.curves for one in curve.evaluations):
        return []
    metric = found.metric_title[0].upper() + found.metric_title[1:]
    axes = (
        ("samples", "samples", f"{group.sample_unit} trained"),
        ("wall_s", "time", "time since the start of training, s"),
    )
    return [
        finish(
            alt.layer(*_rules(found), *_lines(found, _rows(found), axis, axis_title).layer),
            group,
            name=f"quality-{name}",
            title=f"{metric} over {name}",
            alt=_words(found, axis),
            table=table,
            size=(WIDE, HEIGHT),
        )
        for axis, name, axis_title in axes
    ]


def _rows(found: GroupQuality) -> Rows:
    drawn: dict[tuple[int, int], int] = {}
    rows: Rows = []
    for curve in found.curves:
        place = (curve.ranks, curve.nodes)
        drawn[place] = drawn.get(place, 0) + 1
        if drawn[place] > MAX_RUNS:
            continue
        known = [one for one in curve.evaluations if one.value is not None]
        step = max(1, -(-len(known) // MAX_MARKS))
        kept = known[::-step][::-1] if known else []
        rows += [
            {
                "run": curve.run_id,
                "place": place_text(*place),
                "samples": one.samples,
                "wall_s": one.wall_s,
                "value": one.value,
                "shown": number_text(one.value or 0.0, found.unit),
                "epoch": one.epoch,
            }
            for one in kept
        ]
    return rows


def _lines(found: GroupQuality, rows: Rows, axis: str, axis_title: str) -> Any:
    places = map(place_of, found.points)
    values = [row["value"] for row in rows] + [found.target, found.predictor_value]
    low, high = min(values), max(values)
    margin = (high - low or 1.0) * 0.08
    floor = 0.0 if found.unit == "fraction" else max(0.0, low - margin)
    ends = {"domain": [floor, high + margin], "nice": False, "zero": False}
    form = ".0%" if found.unit == "fraction" else "~g"
    return scatter(
        rows,
        Axis(axis_title, axis, format="~s"),
        Axis(found.metric_title, format=form, scale=ends, axis={"tickCount": 6}),
        Series("place", dict(zip(places, itertools.cycle(RANK_COLOURS))), columns=3, legend={"symbolStrokeWidth": 2}),
        {
            "place": "at",
            "shown": found.metric_title,
            "samples:Q:,": "samples",
            "epoch:Q:.3~g": "epochs",
            "wall_s:Q:,.4~g": "seconds",
            "run": "run",
        },
        detail="run",
        line=1.5,
        size=34,
        opacity=0.9,
    )


def _rules(found: GroupQuality) -> list[Any]:
    layers: list[Any] = []
    marks = ((found.target, "target", INK, [6, 3]), (found.predictor_value, "no skill", IDEAL, [2, 3]))
    for number, name, colour, dash in marks:
        mark = {"value": number, "label": f"{name} {number_text(number, found.unit)}"}
        data = alt.Chart(alt.InlineData(values=[mark])).encode(y=alt.Y("value:Q"))
        layers.append(data.mark_rule(color=colour, strokeDash=dash, strokeWidth=1.5))
        words = data.mark_text(color=MUTED, align="left", baseline="bottom", dx=4, dy=-2, fontSize=11)
        layers.append(words.encode(x=alt.value(0), text=alt.Text("label:N")))
    return layers


def _words(found: GroupQuality, axis: str) -> str:
    points = []
    for point in found.points:
        figure, unit = (point.samples, " samples") if axis == "samples" else (point.time, "")
        after = "" if figure is None else f" after {value_text(figure)}{unit}"
        points.append(f"{place_of(point)}: {reached_text(point.num_reached, point.num_runs)} reached it{after}")
    goal, skill = (number_text(value, found.unit) for value in (found.target, found.predictor_value))
    return f"{found.metric_title} of every run; the target is {goal}, no skill {skill}. {'; '.join(points)}."


class QualityView(GroupView):
    """Training to a quality; runs that measure speed have no such view."""

    id = "quality"
    title = "Time to accuracy"
    level = "answer"
    key = "quality"
    after = "start"

    def numbers(self, source: GroupSource) -> GroupQuality | None:
        return group_quality(source.group, source.table)

    def shown(self, group: ReportGroup, found: GroupQuality) -> Section:
        sheets: tuple[Sheet[Any], ...] = (reached_sheet(group, found), _factors_sheet(found), _evaluations_sheet(found))
        skill = f"{found.predictor}: {number_text(found.predictor_value, found.unit)}"
        goal = f"Target: {found.goal} within {found.limit} ({skill})"
        return Section(
            headline=quality_headline(found),
            words=(f"{goal}.",),
            charts=lambda: quality_charts(group, found, reached_sheet(group, found)),
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: ReportGroup) -> str:
        return (
            "these runs measure throughput. To train to the workload's target, run it on real data with --to-accuracy."
        )


def reached_sheet(group: ReportGroup, found: GroupQuality) -> Sheet[QualityPoint]:
    """What the runs at each rank count reached, and how soon; for programs all figures of these points."""

    def reached(point: QualityPoint) -> Cell:
        invalid = f", {point.num_invalid} invalid" if point.num_invalid else ""
        return Cell(reached_text(point.num_reached, point.num_runs) + invalid, number=point.num_reached)

    is_staged = any(point.unstaged for point in found.points)
    columns: tuple[Column[QualityPoint], ...] = (
        Column("sample_unit", "", lambda point: group.sample_unit),
        Column("scaling", "", lambda point: group.scaling),
        *place_columns(),
        *columns_of(QualityPoint, "global_batch"),
        Column("metric", "", lambda point: found.metric),
        Column("target", "", lambda point: found.target),
        Column("predictor_value", "", lambda point: found.predictor_value),
        Column("runs", "", lambda point: point.num_runs),
        Column("reached", "Reached", lambda point: point.num_reached, reached, is_brief=True),
        *columns_of(
            QualityPoint,
            *("invalid=num_invalid", "lost=num_lost", "time", *(("unstaged",) if is_staged else ()), "resolution"),
            *("epochs", "samples", "best", "final", "whole", "training", "evaluation", "other"),
            titles={"best": f"Best {found.metric_title}"},
        ),
        *columns_of(Factors, "speedup", "throughput", "samples", "rest", of=lambda point: point.factors),
        Column(
            "time_interval",
            "Interval",
            lambda point: point.time and point.time.kind,
            lambda point: point.time and basis_text(point.time),
        ),
        *columns_of(QualityPoint, "factor_interval=factors.speedup.kind"),
        Column("caption", "", lambda point: group.caption),
    )
    return Sheet(
        name="quality",
        title="Time to accuracy",
        columns=columns,
        rows=found.points,
        caption="The target was met at most the last interval (since the evaluation before) earlier."
        f"{' Time to accuracy includes staging.' if is_staged else ''}",
        in_terminal=True,
    )


def _factors_sheet(found: GroupQuality) -> Sheet[tuple[QualityPoint, Factors]]:
    """Why the time to quality differs from the baseline's; no rows unless all runs reached the target."""

    def factor(title: str, name: str) -> Column[tuple[QualityPoint, Factors]]:
        return Column("", title, lambda row: None, lambda row: times_cell(getattr(row[1], name)), is_brief=True)

    return Sheet(
        name="quality-factors",
        title="Faster steps, more samples",
        columns=(
            Column("", "At", lambda row: place_of(row[0]), is_brief=True),
            *(factor("Sooner by", "speedup"), factor("= throughput", "throughput")),
            *(factor("x samples needed", "samples"), factor("x rest", "rest")),
            Column("", "Interval", lambda row: basis_text(row[1].speedup)),
        ),
        rows=[(point, point.factors) for point in found.points[1:] if point.factors],
        caption="Samples needed: the baseline's over those here. Rest: evaluation, checkpoints, warm-up, waits.",
        in_terminal=True,
    )


def _evaluations_sheet(found: GroupQuality) -> Sheet[tuple[QualityCurve, QualityEvaluation]]:
    columns: tuple[Column[tuple[QualityCurve, QualityEvaluation]], ...] = (
        *columns_of(QualityCurve, "run_id", "ranks", "nodes", of=lambda row: row[0]),
        Column("metric", "", lambda row: found.metric),
        Column("target", "", lambda row: found.target),
        *columns_of(QualityEvaluation, *(one.name for one in fields(QualityEvaluation)), of=lambda row: row[1]),
    )
    return Sheet(
        name="evaluations",
        title="Evaluations",
        columns=columns,
        rows=[(curve, one) for curve in found.curves for one in curve.evaluations],
        is_shown=lambda row: False,  # people see the charts
    )


class LargeBatchView(ReportView):
    """What a larger global batch costs in epochs, and saves in time."""

    id = "large-batch"
    title = "Large batch"
    key = "large_batches"
    after = "precision"

    def numbers(self, source: ReportSource) -> tuple[LargeBatch, ...]:
        return large_batches(source.table)

    def shown(self, report: Report, found: tuple[LargeBatch, ...]) -> Section:
        return Section(
            headline=batch_verdict(found[0]).partition(";")[0].removesuffix("."),
            words=tuple(f"{one.label}. {batch_verdict(one)}" for one in found),
            sheets=tuple(map(_batches_sheet, found)),
        )


def batch_verdict(found: LargeBatch) -> str:
    """What the largest batch needs over the smallest, each with its best rate."""
    best, critical = [point for point in found.points if point.is_best], found.critical
    if len({point.global_batch for point in best}) < 2 or (ratio := best[-1].ratio) is None:
        reached, runs = (sum(getattr(one, name) for one in found.points) for name in ("num_reached", "num_runs"))
        parts = [f"{reached_text(reached, runs)} met the target: no two batches to compare"]
    else:
        least, last = best[0].global_batch, best[-1]
        sure = "" if ratio.is_confident and (last.adjusted_p or 0.0) < LEVEL else ", no difference for certain"
        # The winner of several rates is partly the luckiest, and its interval does not know that.
        chosen = "; of several rates the best by these same runs: the interval is not corrected, certainty is"
        parts = [
            f"A global batch of {last.global_batch:,} needs {times_text(ratio)} the samples of {least:,}{sure}",
            basis_text(ratio) + chosen * (len(best) < len(found.points)),
        ]
    parts += [f"critical batch by the gradient noise scale: {figure_text(critical)} samples"] if critical else []
    return f"{'; '.join(parts)}."


def _batches_sheet(found: LargeBatch) -> Sheet[BatchPoint]:
    columns = columns_of(
        BatchPoint,
        Column("comparison", "", lambda point: found.id),
        *("global_batch", "optimizer", "learning_rate"),
        *place_columns(),
        *("num_runs", "num_reached", "num_diverged", "epochs", "time", "is_best", "ratio", "adjusted_p", "expected"),
    )
    shown = drop_empty_columns(columns, found.points)
    return Sheet(name="large-batch", title=found.label, columns=shown, rows=found.points, in_terminal=True)
