"""The view `quality`: training to a target, how soon it is reached, and why more ranks are sooner or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, times_cell
from dlbench.report.wording import basis_text, figure_text, number_text, percent, place_text, reached_text
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Group
from dlbench.views.quality.charts import quality_charts
from dlbench.views.quality.numbers import BatchPoint, Curve, Evaluation, Factors, Quality, QualityPoint, group_quality
from dlbench.views.quality.words import goal_text, quality_headline
from dlbench.views.view import GroupSource, GroupView, place_columns

REACHED_CAPTION = "The target was met at most the last interval (since the evaluation before) earlier."
STAGED_CAPTION = " Time to accuracy includes staging."
FACTORS_CAPTION = "Samples needed: the baseline's over those here. Rest: evaluation, checkpoints, warm-up, waits."
NO_SPEEDUP = "No speed-up of the time to accuracy where a run, there or at the baseline, missed the target."


class QualityView(GroupView):
    """Training to a quality; runs that measure speed have no such view."""

    id = "quality"
    title = "Time to accuracy"
    level = "answer"
    key = "quality"

    def numbers(self, source: GroupSource) -> Quality | None:
        """None for runs of speed."""
        return group_quality(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """What was reached and how soon, the factors behind it, and where the time went."""
        found = group.of(Quality)
        if found is None:
            return None
        others = found.points[1:]
        sheets: tuple[Sheet[Any], ...] = (
            reached_sheet(group, found),
            _factors_sheet(found),
            _account_sheet(found),
            _trained_sheet(group, found),
            *([_batches_sheet(found)] if len(found.batches) > 1 else []),
            _evaluations_sheet(found),
        )
        goal = _goal(found)
        return Section(
            id=self.id,
            title=self.title,
            headline=quality_headline(found),
            words=(f"{goal}.", *((NO_SPEEDUP,) if any(point.factors is None for point in others) else ())),
            charts=lambda: quality_charts(group, found, reached_sheet(group, found)),
            sheets=sheets,
            brief=(f"{goal}.",),
        )

    def remedy(self, group: Group) -> str:
        """An option."""
        return (
            "these runs measure throughput. To train to the workload's target, run it on real data with --to-accuracy."
        )


def _goal(found: Quality) -> str:
    """What was wanted, until when, and what no skill reaches."""
    skill = f"{found.predictor}: {number_text(found.predictor_value, found.unit)}"
    return f"Target: {goal_text(found)} within {found.limit} ({skill})"


def reached_sheet(group: Group, found: Quality) -> Sheet[QualityPoint]:
    """What the runs at each rank count reached, and how soon; for programs all figures of these points."""
    columns: tuple[Column[QualityPoint], ...] = (
        Column("sample_unit", "", lambda point: group.sample_unit),
        Column("scaling", "", lambda point: group.scaling),
        *place_columns(),
        Column("global_batch", "Global batch", lambda point: point.global_batch, unit="samples"),
        Column("metric", "", lambda point: found.metric),
        Column("target", "", lambda point: found.target),
        Column("predictor_value", "", lambda point: found.predictor_value),
        Column("runs", "", lambda point: point.num_runs),
        Column("reached", "Reached", lambda point: point.num_reached, _reached, is_brief=True),
        Column("invalid", "", lambda point: point.num_invalid),
        Column("lost", "", lambda point: point.num_lost),
        Column("time_to_quality_s", "Time to accuracy", lambda point: point.time, has_interval=True, is_brief=True),
        *(
            [Column("unstaged_s", "Without staging", lambda point: point.unstaged, has_interval=True, is_brief=True)]
            if any(point.unstaged for point in found.points)
            else []
        ),
        Column("last_interval_s", "Of it, last interval", lambda point: point.resolution, has_interval=True),
        Column("epochs_to_quality", "Epochs", lambda point: point.epochs, has_interval=True, is_brief=True),
        Column("samples_to_quality", "Samples", lambda point: point.samples, has_interval=True),
        Column("best", f"Best {found.metric_title}", lambda point: point.best, has_interval=True, is_brief=True),
        Column("final", "Final", lambda point: point.final, has_interval=True),
        Column("mean_s", "", lambda point: point.whole, has_interval=True),
        Column("training_s", "", lambda point: point.training, has_interval=True),
        Column("evaluation_s", "", lambda point: point.evaluation, has_interval=True),
        Column("other_s", "", lambda point: point.other, has_interval=True),
        _factor("speedup", lambda factors: factors.speedup),
        _factor("throughput_factor", lambda factors: factors.throughput),
        _factor("samples_factor", lambda factors: factors.samples),
        _factor("rest_factor", lambda factors: factors.rest),
        Column("time_interval", "Interval", lambda point: point.time and point.time.kind, _time_basis),
        Column("factor_interval", "", lambda point: point.factors.speedup.kind if point.factors else None),
        Column("caption", "", lambda point: group.caption),
    )
    return Sheet(
        name="quality",
        title="Time to accuracy",
        columns=columns,
        rows=found.points,
        caption=REACHED_CAPTION + (STAGED_CAPTION if any(point.unstaged for point in found.points) else ""),
        in_terminal=True,
    )


def _factor(name: str, pick: Callable[[Factors], Estimate]) -> Column[QualityPoint]:
    """For programs."""
    return Column(name, "", lambda point: pick(point.factors) if point.factors else None, has_interval=True)


def _reached(point: QualityPoint) -> Cell:
    invalid = f", {point.num_invalid} invalid" if point.num_invalid else ""
    return Cell(reached_text(point.num_reached, point.num_runs) + invalid, number=point.num_reached)


def _time_basis(point: QualityPoint) -> str | None:
    return basis_text(point.time) if point.time else None


FACTOR_COLUMNS: tuple[Column[tuple[QualityPoint, Factors]], ...] = (
    Column("", "At", lambda row: place_text(row[0].ranks, row[0].nodes), is_brief=True),
    Column("", "Sooner by", lambda row: row[1].speedup, lambda row: times_cell(row[1].speedup), is_brief=True),
    Column("", "= throughput", lambda row: row[1].throughput, lambda row: times_cell(row[1].throughput), is_brief=True),
    Column("", "x samples needed", lambda row: row[1].samples, lambda row: times_cell(row[1].samples), is_brief=True),
    Column("", "x rest", lambda row: row[1].rest, lambda row: times_cell(row[1].rest), is_brief=True),
    Column("", "Interval", lambda row: basis_text(row[1].speedup)),
)


def _factors_sheet(found: Quality) -> Sheet[tuple[QualityPoint, Factors]]:
    """Why the time to quality differs from the baseline's; no rows unless all runs reached the target."""
    return Sheet(
        name="quality-factors",
        title="Faster steps, more samples",
        columns=FACTOR_COLUMNS,
        rows=[(point, point.factors) for point in found.points[1:] if point.factors],
        caption=FACTORS_CAPTION,
        in_terminal=True,
    )


@dataclass(frozen=True)
class _Share:
    """A part of the time until the target, at one rank count."""

    point: QualityPoint
    title: str
    seconds: Estimate | None
    kind: RowKind = ""


def _account_sheet(found: Quality) -> Sheet[_Share]:
    """What the time until the target (or the end) went to, means over runs; a column for each rank count."""
    rows = [
        row
        for point in found.points
        for row in (
            _Share(point, "training steps", point.training),
            _Share(point, "evaluation", point.evaluation),
            _Share(point, "checkpoints, waits", point.other),
            _Share(point, "sum: until the target or the end", point.whole, "sum"),
        )
    ]
    return Sheet(
        name="quality-time",
        title="Where the time to accuracy goes",
        columns=(),
        rows=rows,
        pivot=Pivot(
            corner="Mean time",
            down=lambda row: row.title,
            across=lambda row: place_text(row.point.ranks, row.point.nodes),
            cell=_seconds_and_share,
        ),
        kind=lambda row: row.kind,
    )


def _seconds_and_share(row: _Share) -> Estimate | str | None:
    whole = row.point.whole
    if row.seconds is None or row.kind == "sum" or whole is None or not whole.value:
        return row.seconds
    return f"{figure_text(row.seconds)}, {percent(row.seconds.value / whole.value)}"


def _trained_sheet(group: Group, found: Quality) -> Sheet[QualityPoint]:
    """Throughput, epochs and time in training steps: each row is one equation that was checked."""
    rates = {(point.ranks, point.nodes): point.throughput for point in group.points}

    def rate(point: QualityPoint) -> Estimate | None:
        return rates.get((point.ranks, point.nodes))

    def checked_rate(point: QualityPoint) -> Estimate | str | None:
        return rate(point) if point.trained else "contradictory, see the warnings"

    columns: tuple[Column[QualityPoint], ...] = (
        *place_columns(),
        Column("throughput_per_s", f"Throughput, {group.sample_unit}/s", rate, checked_rate, has_interval=True),
        Column("trained_epochs", "Epochs trained", lambda point: point.trained_epochs, has_interval=True),
        Column("trained_s", "Time in training steps", lambda point: point.trained, has_interval=True),
    )
    return Sheet(
        name="quality-trained",
        title="Throughput, epochs and time",
        columns=columns,
        rows=found.points,
        is_folded=True,
    )


BATCH_COLUMNS: tuple[Column[BatchPoint], ...] = (
    Column("global_batch", "Global batch", lambda batch: batch.global_batch, unit="samples"),
    Column("runs", "", lambda batch: batch.num_runs),
    Column(
        "reached",
        "Reached",
        lambda batch: batch.num_reached,
        lambda batch: Cell(reached_text(batch.num_reached, batch.num_runs), number=batch.num_reached),
    ),
    Column("epochs_to_quality", "Epochs to accuracy", lambda batch: batch.epochs, has_interval=True),
    Column("samples_to_quality", "Samples to accuracy", lambda batch: batch.samples, has_interval=True),
    Column(
        "against_smallest",
        "Samples, against the smallest",
        lambda batch: batch.against_smallest,
        lambda batch: None if batch.against_smallest is None else f"{batch.against_smallest:.2f}x",
    ),
)


def _batches_sheet(found: Quality) -> Sheet[BatchPoint]:
    """Statistical efficiency: what each global batch needs."""
    return Sheet(
        name="quality-batches",
        title="What each global batch needs",
        columns=BATCH_COLUMNS,
        rows=found.batches,
    )


@dataclass(frozen=True)
class _Evaluated:
    """An evaluation of a run."""

    curve: Curve
    one: Evaluation


def _evaluations_sheet(found: Quality) -> Sheet[_Evaluated]:
    """Every evaluation of every run, for programs: people see the charts."""
    columns: tuple[Column[_Evaluated], ...] = (
        Column("run_id", "", lambda row: row.curve.run_id),
        Column("ranks", "", lambda row: row.curve.ranks),
        Column("nodes", "", lambda row: row.curve.nodes),
        Column("metric", "", lambda row: found.metric),
        Column("target", "", lambda row: found.target),
        Column("samples", "", lambda row: row.one.samples),
        Column("epoch", "", lambda row: row.one.epoch),
        Column("wall_s", "", lambda row: row.one.wall_s),
        Column("train_s", "", lambda row: row.one.train_s),
        Column("eval_s", "", lambda row: row.one.eval_s),
        Column("value", "", lambda row: row.one.value),
        Column("loss", "", lambda row: row.one.loss),
    )
    return Sheet(
        name="evaluations",
        title="Evaluations",
        columns=columns,
        rows=[_Evaluated(curve, one) for curve in found.curves for one in curve.evaluations],
        is_shown=lambda row: False,
    )
