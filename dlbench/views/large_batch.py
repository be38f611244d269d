"""Trainings to one target that differ in the global batch alone, and the optimizer and rate that belong to it.

Batches and rates make groups of their own, so this is across groups. Beside what was measured stands the law of
`dlbench.views.noise`, E = E_min (1 + B / B_n): at the critical batch B_n, the gradient noise scale, samples and steps
are both twice their least. It supposes a rate tuned to each batch, so of several rates the one that needed fewest
samples stands for its batch. Where every run diverged or missed the target there is no figure: that is a point at the
upper edge, never a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from dlbench.analysis.comparability import planned_id
from dlbench.analysis.side_by_side import alike, compared, pair_key, with_train
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.lazy import alt
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, finish, tooltips
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
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
    ratio: Estimate | None = field(metadata=column("Samples, over the smallest", "samples_ratio", text=times_cell))
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
    batches = {name: {run.plan.global_batch for run in runs} for name, runs in sets.items()}
    return tuple(_set(name, runs, table) for name, runs in sets.items() if len(batches[name]) > 1)


def _without_batch(run: Run) -> str:
    optimizer = OptimizerSpec(name="sgd", learning_rate=1.0)
    train = {"batch_per_rank": 1, "global_batch": None, "gradient_accumulation": 1, "optimizer": optimizer}
    bare = with_train(run, train)
    series = bare.plan.series.model_copy(update={"scaling": "weak"})
    return planned_id(replace(bare, plan=bare.plan.model_copy(update={"series": series})))


_RECIPE = ("global_batch", "optimizer", "learning_rate", "ranks", "nodes")


def _recipe(run: Run) -> tuple[int, str, float, int, int]:
    plan, optimizer = run.plan, run.plan.workload.train.optimizer
    rate = optimizer.peak(plan.global_batch)
    return plan.global_batch, optimizer.name, rate, plan.layout.ranks, plan.layout.nodes


def _set(name: str, runs: Sequence[Run], table: RunTable) -> LargeBatch:
    plan, apart = runs[0].plan, [key for run in runs for key in run.plan.series.axes if key.startswith(_DIFFER)]
    sides = dict(sorted(alike(runs, _recipe).items()))
    met = {
        recipe: {
            pair_key(run, table.sessions[run.plan.run_id], apart): quality_of(run)
            for run in members
            if run.plan.run_id in table.runs and quality_of(run).reached
        }
        for recipe, members in sides.items()
    }
    samples = {
        recipe: {key: float(one.samples_to_quality or 0) for key, one in found.items()}
        for recipe, found in met.items()
        if len(found) == len(sides[recipe])
    }
    rates = alike(samples, lambda recipe: (recipe[:2], recipe[3:])).values()
    best = [min(found, key=lambda recipe: fmean(samples[recipe].values())) for found in rates]
    first = min(best, default=None)
    share = model_noise_share(plan.workload, table)
    points = []
    for recipe, members in sides.items():
        other = first if recipe in samples and recipe != first else None
        settings: dict[str, Any] = dict(zip(_RECIPE, recipe, strict=True))
        epochs = {key: one.epochs_to_quality for key, one in met[recipe].items()}
        times = {key: one.time_to_quality_s for key, one in met[recipe].items()}
        points.append(
            BatchPoint(
                **settings,
                num_runs=len(members),
                num_reached=len(times),
                num_diverged=sum(not all(r.losses_finite for r in run.record.ranks) for run in members if run.record),
                epochs=of_known(typical_estimate, epochs, "epochs"),
                time=of_known(typical_estimate, times, "s"),
                is_best=recipe in best,
                ratio=compared(samples[recipe], samples[other])[0] if other else None,
                expected=samples_over(share, recipe[0], other[0]) if share and other else None,
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
        parts = [f"A global batch of {batch:,} needs {times_text(ratio)} the samples of {least:,}{sure}"]
        # The winner of several rates is partly the luckiest, and its interval does not know that.
        tried = max(sum(one.global_batch == other for one in points) for other in (batch, least))
        chosen = [f"best of up to {tried} recipes a batch, chosen by these same runs: not corrected for the choice"]
        parts += [
            basis_text(ratio),
            *(chosen if tried > 1 else []),
            *([f"by the noise scale {times_text(law)}"] if law else []),
        ]
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
    """Epochs and time over the batch: a line through the rates that stand for their batches, the others as rings."""
    places = len({(one.ranks, one.nodes) for one in found.points}) > 1
    charts = []
    for name, title in (("epochs", "epochs to accuracy"), ("time", "time to accuracy, s")):
        rows: Rows = []
        for point in found.points:
            figure: Estimate | None = getattr(point, name)
            kind = point.optimizer + f", {place_text(point.ranks, point.nodes)}" * places
            lost = "" if figure else "diverged" if point.num_diverged else "target missed"
            row = {"batch": point.global_batch, "kind": kind, "rate": f"{point.learning_rate:.3g}", "lost": lost}
            rows.append(row | (figure_row(figure) if figure else {"shown": lost}) | {"is_best": point.is_best})
        best, others = ([row for row in rows if row["is_best"] is which] for which in (True, False))
        edge = 1.15 * max((row["high"] or row["value"] for row in rows if not row["lost"]), default=0.0)
        if not edge:
            continue
        others = [{"value": edge, **row} for row in others]
        colours = dict(zip(sorted({row["kind"] for row in best}), RANK_COLOURS * len(best), strict=False))
        tooltip = {"kind": "optimizer", "batch:Q:,": "global batch", "rate": "learning rate", "shown": title}
        reach = [row["batch"] for row in rows] + ([found.critical.value] if found.critical else [])
        y = Axis(title, scale={"domain": [0, edge * 1.1], "nice": False})
        drawn = lines(best, y, Series("kind", colours), tooltip, x="batch", title="global batch, samples", reach=reach)
        ring = alt.Chart(alt.InlineData(values=others)).encode(x="batch:Q", y="value:Q", tooltip=tooltips(tooltip))
        layers = [*drawn.layer, ring.mark_point(color=INK, size=60)]
        layers.append(ring.mark_text(color=MUTED, align="left", dx=8).encode(text="lost:N"))
        if found.critical is not None:
            at = alt.Chart(alt.InlineData(values=[{"batch": found.critical.value, "label": "critical batch"}]))
            layers.append(at.mark_rule(color=INK, strokeDash=[5, 4]).encode(x="batch:Q"))
            words = at.mark_text(color=MUTED, align="left", baseline="bottom", dx=4)
            layers.append(words.encode(x="batch:Q", y=alt.value(HEIGHT), text="label:N"))
        charts.append(
            finish(
                alt.layer(*layers),
                ReportSubject(id=f"report-{number}", label=found.label),
                name=f"batch-{name}",
                title=f"{sentence(title.removesuffix(', s'))[:-1]} over the global batch",
                alt=f"{found.verdict} Rings: other rates, at the upper edge those that diverged or missed the target.",
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
