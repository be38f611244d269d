"""Training to a quality: words, charts, tables and the section of a group, and the section of large batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from dlbench.report.chart_style import HEIGHT, IDEAL, INK, MUTED, RANK_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Rows, Series, finish, layer, scatter
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, columns_of, constant, drop_empty_columns, never, times_cell
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
from dlbench.views.model import (
    GroupSource,
    GroupView,
    Report,
    ReportGroup,
    ReportSource,
    ReportView,
    place_columns,
    place_of,
)
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

MAX_RUNS = 8  # Runs drawn at each rank count.
MAX_MARKS = 60  # Evaluations drawn of a run; the first, the last and evenly spaced ones between.
WORTH_SAYING = 0.01  # Factors nearer to 1 are called none.


def quality_verdict(subject: str, quality: GroupQuality) -> str:
    """Returns how many runs reached the target, how soon, and why; no speed-up unless all did."""
    base, last = quality.points[0], quality.points[-1]
    if quality.num_reached < quality.num_runs:
        return f"{subject}: {_not_reached(quality)}"
    reached = last.reached_text
    if last.best is not None:
        reached += f", best value {number_text(last.best.value, quality.unit)}"
    time = f"{_time_at(last)} ({reached})"
    if last.factors is None or len(quality.points) == 1:
        basis = f"; {basis_text(last.time)}" if last.num_reached > 1 and last.time is not None else ""
        return f"{subject}: target {quality.goal} met in {time}{basis}."
    factor = last.factors.speedup
    ending = "s" if last.ranks == 1 else ""  # The verb agrees with the number of ranks.
    if factor.value >= 1:
        comparison = f"get{ending} there {times_text(factor)} sooner than"
    else:
        comparison = f"need{ending} {times_text(factor.inverted('ratio'))} as long as"
    return (
        f"{subject}: all {runs_text(quality.num_runs)} met the target {quality.goal}. {place_of(last)} {comparison} "
        f"{place_of(base)} ({basis_text(factor)}): {_why(last.factors)}. Time to accuracy: {_time_at(base)}, {time}."
    )


def quality_headline(quality: GroupQuality) -> str:
    """Returns how many runs met the target, or how soon, in at most 100 characters."""
    sign = ">=" if quality.higher_is_better else "<="
    goal = f"{quality.metric_title} {sign} {number_text(quality.target, quality.unit)}"
    last = quality.points[-1]
    if quality.num_reached < quality.num_runs or last.time is None:
        return f"{reached_text(quality.num_reached, quality.num_runs)} met {goal}"
    return f"{goal} in {value_text(last.time)} at {place_of(last)} ({runs_text(last.num_runs)})"


def _not_reached(quality: GroupQuality) -> str:
    goal, num_runs = quality.goal, quality.num_runs
    if quality.num_reached == 0:
        return _none_reached(quality)
    counts = ", ".join(f"{point.num_reached} of {point.num_runs} at {place_of(point)}" for point in quality.points)
    times = "; ".join(f"{_time_at(point)} ({point.num_reached} of {point.num_runs})" for point in quality.points)
    base, *others = quality.points
    where = ""
    if base.num_reached == base.num_runs and others:  # Otherwise all points have no speed-up.
        where = f" at {', '.join(place_of(point) for point in others if point.factors is None)}"
    return (
        f"{reached_text(quality.num_reached, num_runs)} met the target {goal} within {quality.limit} ({counts}): no "
        f"speed-up of the time to accuracy{where}. Median time of those that did: {times}."
    )


def _none_reached(quality: GroupQuality) -> str:
    num_runs = quality.num_runs
    runs = "the run" if num_runs == 1 else f"all {num_runs} runs"
    text = f"{runs} missed the target {quality.goal} within {quality.limit}"
    points = [point for point in quality.points if point.best]
    if not points:
        return f"{text}."
    points.sort(key=attrgetter("best.value"), reverse=quality.higher_is_better)
    point = points[0]
    assert point.best is not None
    if num_runs == 1:
        return f"{text}: it reached {figure_text(point.best)}."
    return f"{text}: the best they reached is {figure_text(point.best)} at {place_of(point)} (median of its runs)."


def _time_at(point: QualityPoint) -> str:
    time = figure_text(point.time) if point.time else "none"
    return f"{time} at {place_of(point)}"


def _why(factors: Factors) -> str:
    is_faster, needs_more = factors.throughput.value >= 1, factors.samples.value < 1
    text = f"throughput is {times_text(factors.throughput)}"
    if not is_faster:
        text += " only"
    text += ", but " if is_faster is (factors.samples.value < 1 - WORTH_SAYING) else ", and "
    samples = factors.samples
    if abs(samples.value - 1) < WORTH_SAYING and judge(samples, WORTH_SAYING, centre=1.0).outcome != "undecided":
        text += "as many samples were needed"
    else:
        only = "" if needs_more else "only "
        text += f"{only}{times_text(samples.inverted('ratio'))} as many samples were needed{_noise(samples)}"
    rest_factor = factors.rest
    if abs(rest_factor.value - 1) >= WORTH_SAYING:
        verb = "cost" if rest_factor.value < 1 else "gain"
        factor = times_text(rest_factor).replace("x", "")
        text += f"; evaluation, checkpoints and waits {verb} a factor of {factor}{_noise(rest_factor)}"
    return text


def _noise(factor: Estimate) -> str:
    if factor.low is not None and factor.high is not None and factor.low <= 1 <= factor.high:
        return " (perhaps by chance)"
    return ""


def quality_charts(group: ReportGroup, quality: GroupQuality, table: Sheet[QualityPoint]) -> list[Chart]:
    """Returns the metric over samples (statistical efficiency) and over time (both); `table` has the times reached."""
    rows = list(_rows(quality))
    if not rows:
        return []
    metric = quality.metric_title[0].upper() + quality.metric_title[1:]

    def chart(axis: str, name: str, axis_title: str) -> Chart:
        return finish(
            [*_rules(quality), *_lines(quality, rows, axis, axis_title)],
            group,
            name=f"quality-{name}",
            title=f"{metric} over {name}",
            alt=_words(quality, axis),
            table=table,
            size=(WIDE, HEIGHT),
        )

    over_samples = chart("samples", "samples", f"{group.sample_unit} trained")
    return [over_samples, chart("wall_s", "time", "time since the start of training, s")]


def _rows(quality: GroupQuality) -> Iterator[dict[str, Any]]:
    num_drawn: Counter[tuple[int, int]] = Counter()
    for curve in quality.curves:
        place = (curve.ranks, curve.nodes)
        num_drawn[place] += 1
        if num_drawn[place] > MAX_RUNS:
            continue
        evaluations = [evaluation for evaluation in curve.evaluations if evaluation.value is not None]
        stride = max(1, -(-len(evaluations) // MAX_MARKS))
        # From the end, so that the last one is drawn.
        for evaluation in reversed(evaluations[::-stride]):
            yield {
                "run": curve.run_id,
                "place": place_text(*place),
                "samples": evaluation.samples,
                "wall_s": evaluation.wall_s,
                "value": evaluation.value,
                "shown": number_text(evaluation.value or 0.0, quality.unit),
                "epoch": evaluation.epoch,
            }


def _lines(quality: GroupQuality, rows: Rows, axis: str, axis_title: str) -> list[dict[str, Any]]:
    places = map(place_of, quality.points)
    values = [row["value"] for row in rows] + [quality.target, quality.predictor_value]
    low, high = min(values), max(values)
    margin = (high - low or 1.0) * 0.08
    floor, labels = max(0.0, low - margin), "~g"
    if quality.unit == "fraction":
        floor, labels = 0.0, ".0%"
    ends = {"domain": [floor, high + margin], "nice": False, "zero": False}
    return scatter(
        rows,
        Axis(axis_title, axis, format="~s"),
        Axis(quality.metric_title, format=labels, scale=ends, axis={"tickCount": 6}),
        Series("place", dict(zip(places, itertools.cycle(RANK_COLOURS))), columns=3, legend={"symbolStrokeWidth": 2}),
        {
            "place": "at",
            "shown": quality.metric_title,
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


def _rules(quality: GroupQuality) -> Iterator[dict[str, Any]]:
    marks = ((quality.target, "target", INK, [6, 3]), (quality.predictor_value, "no skill", IDEAL, [2, 3]))
    for number, name, colour, dash in marks:
        rows = [{"value": number, "label": f"{name} {number_text(number, quality.unit)}"}]
        yield layer(rows, "rule", {"y": "value:Q"}, color=colour, strokeDash=dash, strokeWidth=1.5)
        words = {"x": {"value": 0}, "y": "value:Q", "text": "label:N"}
        yield layer(rows, "text", words, color=MUTED, align="left", baseline="bottom", dx=4, dy=-2, fontSize=11)


def _words(quality: GroupQuality, axis: str) -> str:
    points = []
    for point in quality.points:
        text = f"{place_of(point)}: {point.reached_text} reached it"
        if axis == "samples" and point.samples:
            text += f" after {value_text(point.samples)} samples"
        elif axis != "samples" and point.time:
            text += f" after {value_text(point.time)}"
        points.append(text)
    goal, skill = (number_text(value, quality.unit) for value in (quality.target, quality.predictor_value))
    return f"{quality.metric_title} of every run; the target is {goal}, no skill {skill}. {'; '.join(points)}."


class QualityView(GroupView):
    """Training to a quality; runs that measure speed have no such view."""

    id = "quality"
    title = "Time to accuracy"
    level = "answer"
    key = "quality"
    after = "start"
    lack = "these runs measure throughput. To train to the workload's target, run it on real data with --to-accuracy."

    def numbers(self, source: GroupSource) -> GroupQuality | None:
        return group_quality(source.group, source.table)

    def shown(self, group: ReportGroup, quality: GroupQuality) -> Section:
        reached = reached_sheet(group, quality)
        skill = f"{quality.predictor}: {number_text(quality.predictor_value, quality.unit)}"
        return Section(
            headline=quality_headline(quality),
            words=(f"Target: {quality.goal} within {quality.limit} ({skill}).",),
            charts=partial(quality_charts, group, quality, reached),
            sheets=with_rows(reached, _factors_sheet(quality), _evaluations_sheet(quality)),
        )


def reached_sheet(group: ReportGroup, quality: GroupQuality) -> Sheet[QualityPoint]:
    """Returns how many runs at each rank count met the target, and how soon; for programs all figures of the points."""

    def reached(point: QualityPoint) -> Cell:
        text = point.reached_text
        if point.num_invalid:
            text += f", {point.num_invalid} invalid"
        return Cell(text, number=point.num_reached)

    def interval(point: QualityPoint) -> str | None:
        return basis_text(point.time) if point.time else None

    caption = "The target was met at most the last interval (since the evaluation before) earlier."
    unstaged = []
    if any(point.unstaged for point in quality.points):
        unstaged = ["unstaged"]
        caption += " Time to accuracy includes staging."
    columns: tuple[Column[QualityPoint], ...] = (
        constant("sample_unit", group.sample_unit),
        constant("scaling", group.scaling),
        *place_columns(),
        *columns_of(QualityPoint, "global_batch"),
        constant("metric", quality.metric),
        constant("target", quality.target),
        constant("predictor_value", quality.predictor_value),
        Column("runs", "", "num_runs"),
        Column("reached", "Reached", "num_reached", reached, is_brief=True),
        *columns_of(
            QualityPoint,
            *("invalid=num_invalid", "lost=num_lost", "time", *unstaged, "resolution"),
            *("epochs", "samples", "best", "final", "whole", "training", "evaluation", "other"),
            titles={"best": f"Best {quality.metric_title}"},
        ),
        *columns_of(Factors, "speedup", "throughput", "samples", "rest", of="factors"),
        Column("time_interval", "Interval", "time.kind", interval),
        *columns_of(QualityPoint, "factor_interval=factors.speedup.kind"),
        constant("caption", group.caption),
    )
    title, points = "Time to accuracy", quality.points
    return Sheet(name="quality", title=title, columns=columns, rows=points, caption=caption, in_terminal=True)


def _factors_sheet(quality: GroupQuality) -> Sheet[QualityPoint]:

    def factor(title: str, name: str) -> Column[QualityPoint]:
        return Column(
            "", title, f"factors.{name}", lambda point: times_cell(getattr(point.factors, name)), is_brief=True
        )

    def interval(point: QualityPoint) -> str:
        assert point.factors is not None
        return basis_text(point.factors.speedup)

    return Sheet(
        name="quality-factors",
        title="Faster steps, more samples",
        columns=(
            Column("", "At", place_of, is_brief=True),
            *(factor("Sooner by", "speedup"), factor("= throughput", "throughput")),
            *(factor("x samples needed", "samples"), factor("x rest", "rest")),
            Column("", "Interval", interval),
        ),
        rows=[point for point in quality.points[1:] if point.factors],
        caption="Samples needed: the baseline's over those here. Rest: evaluation, checkpoints, warm-up, waits.",
        in_terminal=True,
    )


def _evaluations_sheet(quality: GroupQuality) -> Sheet[tuple[QualityCurve, QualityEvaluation]]:
    columns: tuple[Column[tuple[QualityCurve, QualityEvaluation]], ...] = (
        *columns_of(QualityCurve, "run_id", "ranks", "nodes", of=itemgetter(0)),
        constant("metric", quality.metric),
        constant("target", quality.target),
        *columns_of(QualityEvaluation, *(field.name for field in fields(QualityEvaluation)), of=itemgetter(1)),
    )
    rows = [(curve, evaluation) for curve in quality.curves for evaluation in curve.evaluations]
    # People see the charts.
    return Sheet(name="evaluations", title="Evaluations", columns=columns, rows=rows, is_shown=never)


class LargeBatchView(ReportView):
    """The cost of a larger global batch in epochs, and its gain in time."""

    id = "large-batch"
    title = "Large batch"
    key = "large_batches"
    after = "precision"

    def numbers(self, source: ReportSource) -> tuple[LargeBatch, ...]:
        return large_batches(source.table)

    def shown(self, report: Report, comparisons: tuple[LargeBatch, ...]) -> Section:
        return Section(
            headline=batch_verdict(comparisons[0]).partition(";")[0].removesuffix("."),
            words=tuple(f"{comparison.label}. {batch_verdict(comparison)}" for comparison in comparisons),
            sheets=tuple(map(_batches_sheet, comparisons)),
        )


def batch_verdict(comparison: LargeBatch) -> str:
    """Returns the samples of the largest batch over those of the smallest, each with its best rate, in words."""
    best = [point for point in comparison.points if point.is_best]
    if len({point.global_batch for point in best}) < 2 or best[-1].ratio is None:
        num_reached = sum(point.num_reached for point in comparison.points)
        num_runs = sum(point.num_runs for point in comparison.points)
        parts = [f"{reached_text(num_reached, num_runs)} met the target: no two batches to compare"]
    else:
        smallest, largest, ratio = best[0].global_batch, best[-1], best[-1].ratio
        text = f"A global batch of {largest.global_batch:,} needs {times_text(ratio)} the samples of {smallest:,}"
        if not (ratio.is_confident and (largest.adjusted_p or 0.0) < LEVEL):
            text += ", no difference for certain"
        parts = [text, basis_text(ratio)]
        if len(best) < len(comparison.points):
            # The best of several rates is partly the luckiest, and its interval does not include that.
            parts.append("of several rates the best by these same runs: the interval is not corrected, certainty is")
    if comparison.critical:
        parts.append(f"critical batch by the gradient noise scale: {figure_text(comparison.critical)} samples")
    return f"{'; '.join(parts)}."


def _batches_sheet(comparison: LargeBatch) -> Sheet[BatchPoint]:
    columns = columns_of(
        BatchPoint,
        constant("comparison", comparison.id),
        *("global_batch", "optimizer", "learning_rate"),
        *place_columns(),
        *("num_runs", "num_reached", "num_diverged", "epochs", "time", "is_best", "ratio", "adjusted_p", "expected"),
    )
    columns = drop_empty_columns(columns, comparison.points)
    return Sheet(name="large-batch", title=comparison.label, columns=columns, rows=comparison.points, in_terminal=True)
