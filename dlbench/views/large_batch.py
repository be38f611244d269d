"""Trainings to one target that differ in the global batch alone, and the optimizer and rate that belong to it.

Batches and rates make groups of their own, so this is across groups. Beside what was measured stands the law of
`dlbench.views.noise`, E = E_min (1 + B / B_n): at the critical batch B_n, the gradient noise scale, samples and steps
are both twice their least. It supposes a rate tuned to each batch, so of several rates the one that needed fewest
samples stands for its batch. Where every run diverged or missed the target there is no figure: that is a point at the
upper edge, never a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from dlbench.analysis.comparability import planned_id
from dlbench.analysis.side_by_side import alike, compared, pair_key, with_train
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.lazy import alt
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, scatter
from dlbench.report.charts.style import HEIGHT, INK, MUTED, RANK_COLOURS, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of, times_cell
from dlbench.report.wording import basis_text, figure_text, place_text, reached_text, sentence, times_text
from dlbench.specs.training import OptimizerSpec
from dlbench.stats.estimates import Estimate, is_other_than, of_known, typical_estimate
from dlbench.views.model import Report
from dlbench.views.noise import model_noise_share, samples_over
from dlbench.views.quality.numbers import quality_of
from dlbench.views.view import ReportSource, ReportView, place_columns

_DIFFER = ("train.batch_per_rank", "train.global_batch", "train.gradient_accumulation", "train.optimizer.")
EDGE = 1.15  # Where points without a figure are drawn, over the largest figure.
LOST = {"diverged": INK, "target missed": MUTED}


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """One batch with one rate at one rank and node count; epochs and time are of the runs that met the target."""

    global_batch: int = field(metadata=column("Global batch", unit="samples", is_brief=True))
    optimizer: str = field(metadata=column("Optimizer"))
    learning_rate: float = field(metadata=column("Learning rate", text=lambda rate: f"{rate:.3g}", is_brief=True))
    ranks: int
    nodes: int
    num_runs: int  # That ended, valid or not.
    num_reached: int
    num_diverged: int  # Whose loss was not finite.
    epochs: Estimate | None = field(metadata=column("Epochs to accuracy", "epochs_to_quality", is_brief=True))
    time: Estimate | None = field(metadata=column("Time to accuracy", "time_to_quality_s", is_brief=True))
    is_best: bool  # All met the target, after fewest samples of all rates.
    ratio: Estimate | None = field(metadata=column("Epochs, over the smallest", "epochs_ratio", text=times_cell))
    """None unless all runs here, and those of the best rate of the smallest batch, met the target."""
    expected: Estimate | None = field(metadata=column("By the noise scale", "expected_ratio", text=times_cell))


@dataclass(frozen=True, kw_only=True)
class LargeBatch:
    """All that differ in nothing else."""

    id: str
    label: str
    critical: Estimate | None  # Samples; None where no run of this network has measured it.
    points: tuple[BatchPoint, ...]  # By batch and rate.
    verdict: str


def large_batches(table: RunTable) -> tuple[LargeBatch, ...]:
    """All sets of two global batches or more."""
    table = without_resumed(table)
    ended = [*table.runs.values(), *(item.run for item in table.without if item.state == "invalid")]
    trained = [run for run in ended if run.plan.measure.until == "quality" and run.record and run.record.quality]
    sets = alike((run for run in trained if run.plan.series.variant == "plain"), _without_batch)
    return tuple(
        _set(name, runs, table) for name, runs in sets.items() if len({run.plan.global_batch for run in runs}) > 1
    )


def _without_batch(run: Run) -> str:
    optimizer = OptimizerSpec(name="sgd", learning_rate=1.0)
    train = {"batch_per_rank": 1, "global_batch": None, "gradient_accumulation": 1, "optimizer": optimizer}
    bare = with_train(run, train)
    series = bare.plan.series.model_copy(update={"scaling": "weak"})
    return planned_id(replace(bare, plan=bare.plan.model_copy(update={"series": series})))


_RECIPE = ("global_batch", "optimizer", "learning_rate", "ranks", "nodes")
_Recipe = tuple[int, str, float, int, int]  # Those; the rate at its peak.


def _recipe(run: Run) -> _Recipe:
    plan, optimizer = run.plan, run.plan.workload.train.optimizer
    rate = optimizer.peak(plan.global_batch)
    return plan.global_batch, optimizer.name, rate, plan.layout.ranks, plan.layout.nodes


def _set(name: str, runs: Sequence[Run], table: RunTable) -> LargeBatch:
    plan = runs[0].plan
    apart = [key for run in runs for key in run.plan.series.axes if key.startswith(_DIFFER)]
    sides = dict(sorted(alike(runs, _recipe).items()))
    met = {
        recipe: {
            pair_key(run, table.sessions[run.plan.run_id], apart): quality_of(run)
            for run in members
            if run.plan.run_id in table.runs and quality_of(run).reached
        }
        for recipe, members in sides.items()
    }
    epochs = {
        recipe: {key: one.epochs_to_quality or 0.0 for key, one in found.items()} for recipe, found in met.items()
    }
    complete = [recipe for recipe in sides if len(met[recipe]) == len(sides[recipe])]
    rates = alike(complete, lambda recipe: (recipe[:2], recipe[3:])).values()
    best = [min(found, key=lambda recipe: fmean(epochs[recipe].values())) for found in rates]
    first = min(best, default=None)
    share = model_noise_share(plan.workload, table)
    points = []
    for recipe, members in sides.items():
        ratio = expected = None
        if recipe in complete and first is not None and recipe != first:
            ratio, _ = compared(epochs[recipe], epochs[first])
            expected = share and samples_over(share, recipe[0], first[0])
        settings: dict[str, Any] = dict(zip(_RECIPE, recipe, strict=True))
        times = {key: one.time_to_quality_s for key, one in met[recipe].items()}
        points.append(
            BatchPoint(
                **settings,
                num_runs=len(members),
                num_reached=len(times),
                num_diverged=sum(not all(r.losses_finite for r in run.record.ranks) for run in members if run.record),
                epochs=of_known(typical_estimate, epochs[recipe], "epochs"),
                time=of_known(typical_estimate, times, "s"),
                is_best=recipe in best,
                ratio=ratio,
                expected=expected,
            )
        )
    is_known = share is not None and share.value > 0 and (share.low is None or share.low > 0)
    critical = share.inverted("samples") if share is not None and is_known else None
    label = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}"
    verdict = _verdict(points, critical)
    return LargeBatch(id=name, label=label, critical=critical, points=tuple(points), verdict=verdict)


def _verdict(points: Sequence[BatchPoint], critical: Estimate | None) -> str:
    reached = reached_text(sum(point.num_reached for point in points), sum(point.num_runs for point in points))
    parts = [f"{reached} met the target: no two batches to compare"]
    known = [point for point in points if point.is_best]
    if known and (ratio := known[-1].ratio) is not None:
        batch, least, law = known[-1].global_batch, known[0].global_batch, known[-1].expected
        sure = "" if ratio.is_confident and is_other_than(ratio, 1) else ", no difference for certain"
        parts = [f"A global batch of {batch:,} needs {times_text(ratio)} the epochs of {least:,}{sure}"]
        parts += [basis_text(ratio), *([f"by the noise scale {times_text(law)}"] if law else [])]
    parts += [f"critical batch by the gradient noise scale: {figure_text(critical)} samples"] if critical else []
    lost = ", ".join(f"{one.learning_rate:.3g} at {one.global_batch:,}" for one in points if one.num_diverged)
    return "; ".join([*parts, *([f"diverged: learning rate {lost}"] if lost else [])]) + "."


def batches_sheet(found: LargeBatch) -> Sheet[BatchPoint]:
    """A line for each batch and rate."""

    def reached(one: BatchPoint) -> str:
        more = f", {one.num_diverged} diverged" if one.num_diverged else ""
        return reached_text(one.num_reached, one.num_runs) + more

    columns = columns_of(
        BatchPoint,
        Column("comparison", "", lambda one: found.id),
        *("global_batch", "optimizer", "learning_rate", "runs=num_runs", "diverged=num_diverged"),
        *place_columns(),
        Column("reached", "Reached", lambda one: one.num_reached, reached, is_brief=True),
        *("epochs", "time", "best=is_best", "ratio", "expected"),
        titles={} if any(one.expected for one in found.points) else {"expected_ratio": ""},
    )
    return Sheet(name="large-batch", title=found.label, columns=columns, rows=found.points, in_terminal=True)


def _charts(number: int, found: LargeBatch) -> list[Chart]:
    """Epochs and time over the batch."""
    places = len({(one.ranks, one.nodes) for one in found.points}) > 1
    charts = []
    for name, title in (("epochs", "epochs to accuracy"), ("time", "time to accuracy, s")):
        rows: Rows = []
        for point in found.points:
            figure: Estimate | None = getattr(point, name)
            by = point.optimizer + f", {place_text(point.ranks, point.nodes)}" * places
            lost = "diverged" if point.num_diverged else "target missed"
            row = figure_row(figure) if figure else {"low": None, "high": None, "shown": lost, "basis": ""}
            row |= {"batch": point.global_batch, "kind": by if figure else lost, "rate": f"{point.learning_rate:.3g}"}
            # A line joins the rates that stand for their batches.
            rows.append({**row, "detail": by if point.is_best else str(len(rows))})
        known = [row["high"] or row["value"] for row in rows if "value" in row]
        if not known:
            continue
        edge = max(known) * EDGE
        rows = [{"value": edge, **row} for row in rows]
        kinds = sorted({row["kind"] for row in rows} - LOST.keys())
        batches = sorted({row["batch"] for row in rows})
        reach = sorted([*batches, *([found.critical.value] if found.critical else [])])
        scale = {"type": "log", "base": 2, "domain": [reach[0] / 1.2, reach[-1] * 1.2], "nice": False}
        drawn = scatter(
            rows,
            Axis("global batch, samples", "batch", format="~s", scale=scale, axis={"values": batches, "grid": False}),
            Axis(title, scale={"domain": [0, edge * 1.05], "nice": False}),
            Series("kind", dict(zip(kinds, itertools.cycle(RANK_COLOURS), strict=False)) | LOST, columns=3),
            {"batch:Q:,": "global batch", "rate": "learning rate", "shown": title, "basis": "interval"},
            detail="detail",
            line=1.5,
        )
        ends = alt.Chart(alt.InlineData(values=[row for row in rows if row["low"] is not None]))
        layers = [ends.mark_rule(color=INK, opacity=0.5).encode(x="batch:Q", y="low:Q", y2="high:Q"), *drawn.layer]
        if found.critical is not None:
            at = alt.Chart(alt.InlineData(values=[{"batch": found.critical.value, "label": "critical batch"}]))
            words = at.mark_text(color=MUTED, align="left", baseline="bottom", dx=4)
            layers.append(at.mark_rule(color=INK, strokeDash=[5, 4]).encode(x="batch:Q"))
            layers.append(words.encode(x="batch:Q", y=alt.value(HEIGHT), text="label:N"))
        charts.append(
            finish(
                alt.layer(*layers),
                ReportSubject(id=f"report-{number}", label=found.label),
                name=f"batch-{name}",
                title=f"{sentence(title.removesuffix(', s'))[:-1]} over the global batch",
                alt=f"{found.verdict} At the upper edge: rates that diverged or missed the target.",
                table=batches_sheet(found),
                size=(WIDE, HEIGHT),
            )
        )
    return charts


class LargeBatchView(ReportView):
    """What a larger global batch costs in epochs, and saves in time."""

    id = "large-batch"
    title = "Large batch"
    key = "large_batches"

    def numbers(self, source: ReportSource) -> tuple[LargeBatch, ...]:
        return large_batches(source.table)

    def shown(self, report: Report, found: tuple[LargeBatch, ...]) -> Section:
        return Section(
            headline=found[0].verdict.partition(";")[0].removesuffix("."),
            words=tuple(f"{one.label}. {one.verdict}" for one in found),
            charts=lambda: [chart for number, one in enumerate(found) for chart in _charts(number, one)],
            sheets=tuple(map(batches_sheet, found)),
        )
