"""Runs that differ in nothing but the precision of training, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from dlbench.analysis.comparability import averaged_id
from dlbench.analysis.scaling import (
    ComparedFigure,
    ComparedRow,
    ComparedSet,
    Comparison,
    Group,
    Side,
    at_last_place,
    batch_text,
    best_at_last,
    group_by,
    last_loss,
    pair_key,
    with_train,
)
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.energy import Kind
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, constant, times_cell
from dlbench.report.wording import (
    basis_text,
    figure_text,
    interval_text,
    number_text,
    optional_figure,
    runs_text,
    sentence,
    times_text,
    times_value,
    value_text,
)
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import judge
from dlbench.stats.verdict_words import PRECISION
from dlbench.views.model import Report, ReportSource, ReportView, place_columns, place_of
from dlbench.views.next_step import rerun

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")  # In this order; the first that ran is the reference.

PRECISION_KEYS = ("precision", "allow_emulation", "initial_loss_scale", "loss_scale_growth_steps")
"""Settings of `train` that belong to a precision."""


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """A precision at a rank count, compared with the reference at the same rank count."""

    precision: str = field(metadata=column("Precision", is_brief=True))
    in_force: str  # The precisions in the records, each once.
    ranks: int
    nodes: int
    is_reference: bool
    is_paired: bool = field(metadata=column(name="interleaved"))  # Whether its repeats and the reference's ran so.
    throughput: Estimate = field(metadata=column("Throughput", is_brief=True))
    ratio: Estimate | None = field(metadata=column("Over", "throughput_ratio", text=times_cell, is_brief=True))
    """Throughput over the reference's; None for the reference itself."""
    peak: Estimate = field(metadata=column("Peak memory per rank", "peak_bytes"))  # Of the rank with most.
    memory_ratio: Estimate | None = field(metadata=column("Over", "peak_ratio", text=times_cell))
    energy_per_sample: Estimate | None  # None if it was not measured.
    energy_of: Kind | Literal[""]
    energy_ratio: Estimate | None = field(metadata=column("Over", text=times_cell))
    loss: Estimate | None  # Of the last step, mean over ranks; None if it was finite in no run.
    num_not_finite: int = field(metadata=column(name="runs_not_finite"))  # Runs whose last loss was not finite.
    quality: Estimate | None  # Last evaluation of runs to a quality.
    num_reached: int | None = field(metadata=column(name="runs_reached"))
    """Runs that reached their target; None for runs that measure speed."""
    num_runs: int = field(metadata=column(name="runs"))
    overflow_steps: Estimate | None  # Steps that were skipped because a gradient overflowed; fp16 only.


@dataclass(frozen=True, kw_only=True)
class PrecisionComparison:
    """Groups that differ in nothing but precision."""

    id: str
    label: str
    reference: str
    groups: tuple[str, ...]  # Ids of the groups, by precision, the reference first.
    sample_unit: str
    rows: tuple[PrecisionRow, ...]  # By rank count, then precision, where two or more precisions ran.
    caption: str
    verdict: str
    notes: tuple[str, ...]


def without_precision(run: Run) -> str:
    """Returns a digest that is equal for runs that differ in nothing but the settings of precision."""
    return averaged_id(with_train(run, {key: TrainSpec.model_fields[key].default for key in PRECISION_KEYS}))


def precisions(groups: Sequence[Group], table: RunTable) -> tuple[PrecisionComparison, ...]:
    """Returns all sets of groups with two or more precisions, in the order of the groups."""

    # Two groups of one precision differ in its settings; they are no pair of precisions.
    def key(group: Group) -> tuple[str, str]:
        return without_precision(group.sample), _precision(group)

    distinct = [members[0] for members in group_by(groups, key).values()]

    def runs_of(side: Side) -> PrecisionRuns:
        return PrecisionRuns(side, table)

    comparison = Comparison(
        common_digest=without_precision,
        kind=_precision,
        order=lambda group: (PRECISIONS.index(_precision(group)),),
        figures={
            "throughput": ComparedFigure(lambda side: runs_of(side).speeds),
            "peak": ComparedFigure(lambda side: runs_of(side).peaks),
            "energy": ComparedFigure(lambda side: runs_of(side).energies),
        },
    )
    return tuple(_comparison(compared_set, runs_of) for compared_set in comparison.of(distinct))


def _comparison(compared_set: ComparedSet, runs_of: Callable[[Side], PrecisionRuns]) -> PrecisionComparison:
    plan, reference = compared_set.groups[0].sample.plan, _precision(compared_set.groups[0])
    rows = [_row(compared_row, runs_of) for compared_row in compared_set.rows]
    parts = []
    for row in at_last_place(rows):
        if row.ratio is not None:
            verdict = PRECISION[judge(row.ratio, 0.0, centre=1.0).outcome].in_sentence
            parts.append(f"{row.precision} {verdict} {reference}, {times_text(row.ratio)} ({basis_text(row.ratio)})")
    notes = []
    if not all(row.is_paired for row in rows if not row.is_reference):
        why = "repeats did not run interleaved, so drift of the machine is part of these ratios"
        notes.append(f"{why}; use --sweep train.precision=fp32,bf16")
    if any(row.num_not_finite for row in rows):
        notes.append("runs whose loss was not finite count for throughput alone")
    data = "synthetic data" if plan.workload.data.is_synthetic else "real data"
    if plan.workload.data.is_synthetic and plan.workload.data.synthetic_on == "device":
        data += " on the device"
    over = f"ratios over {plan.workload.train.precision} at the same rank count"
    return PrecisionComparison(
        id=compared_set.id,
        label=f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}, "
        f"{plan.series.scaling} scaling",
        reference=reference,
        groups=tuple(group.id for group in compared_set.groups),
        sample_unit=plan.workload.sample_unit,
        rows=tuple(rows),
        caption=f"{batch_text(plan)}; {data}; on {plan.system.name}; {over}.",
        verdict=f"At {place_of(rows[-1])}: {'; '.join(parts)}.",
        notes=tuple(notes),
    )


def _precision(group: Group) -> str:
    return group.sample.plan.workload.train.precision


class PrecisionRuns:
    """The runs of one precision at one rank count, by block and repeat."""

    def __init__(self, side: Side, table: RunTable) -> None:
        keys = {f"train.{key}" for key in PRECISION_KEYS}
        runs = [table.runs[run_id] for run_id in side.point.run_ids]
        self.runs = {pair_key(run, table.sessions[run.plan.run_id], keys): run for run in runs}
        self.records = {key: run.record for key, run in self.runs.items() if run.record is not None}
        self.speeds = {key: table.rates[run.plan.run_id] for key, run in self.runs.items()}
        self.peaks: dict[RunKey, float] = {}  # Bytes of the rank that held most.
        for key, record in self.records.items():
            self.peaks[key] = float(max(rank.peak_memory_bytes for rank in record.ranks))
        self.energy_of: Kind | Literal[""] = ""
        self.energies: dict[RunKey, float] = {}  # Joules per sample, of GPUs or else of processors.
        for kind in ("GPUs", "processors"):
            if self.energies:
                break
            for key, run in self.runs.items():
                reading = table.readings.get(run.plan.run_id)
                joules = reading.energy.energy_per_sample_j(kind) if reading and reading.energy else None
                if joules:
                    self.energies[key] = joules
                    self.energy_of = kind


def _row(compared_row: ComparedRow, runs_of: Callable[[Side], PrecisionRuns]) -> PrecisionRow:
    runs, base = runs_of(compared_row.side), runs_of(compared_row.reference or compared_row.side)
    point = compared_row.side.point
    losses = {key: last_loss(run) for key, run in runs.runs.items()}
    qualities = {key: record.quality for key, record in runs.records.items() if record.quality is not None}
    values = {key: quality.evaluations[-1].value for key, quality in qualities.items() if quality.evaluations}
    overflows = {key: record.overflow_steps for key, record in runs.records.items()}
    ratio, is_paired = compared_row.ratio("throughput")
    energy_ratio = None
    if runs.energy_of == base.energy_of:
        energy_ratio, _ = compared_row.ratio("energy")
    return PrecisionRow(
        precision=_precision(compared_row.side.group),
        in_force="; ".join(dict.fromkeys(record.precision for record in runs.records.values() if record.precision)),
        ranks=point.ranks,
        nodes=point.nodes,
        is_reference=compared_row.is_reference,
        is_paired=is_paired,
        throughput=point.throughput,
        ratio=ratio,
        peak=median_estimate(runs.peaks, "bytes"),
        memory_ratio=compared_row.ratio("peak")[0],
        energy_per_sample=of_known(geometric_mean_estimate, runs.energies, "J"),
        energy_of=runs.energy_of,
        energy_ratio=energy_ratio,
        loss=of_known(median_estimate, losses, "loss"),
        num_not_finite=sum(loss is None for loss in losses.values()),
        quality=of_known(median_estimate, values, "ratio"),
        num_reached=sum(quality.reached for quality in qualities.values()) if qualities else None,
        num_runs=len(runs.runs),
        overflow_steps=of_known(median_estimate, overflows, "steps"),
    )


def precision_sheet(comparison: PrecisionComparison) -> Sheet[PrecisionRow]:
    """Returns a line per rank count and precision."""
    over = f"Over {comparison.reference}"
    joules = joules_over = quality = ""
    if any(row.energy_per_sample for row in comparison.rows):
        joules, joules_over = "J per sample", over
    if any(row.quality or row.num_reached is not None for row in comparison.rows):
        quality = "Accuracy at the end"
    columns = columns_of(
        PrecisionRow,
        constant("comparison", comparison.id),
        constant("reference", comparison.reference),
        *place_columns(),
        *("precision", "in_force", "throughput", "ratio", "num_runs", "is_paired", "peak", "memory_ratio"),
        Column("energy_per_sample_j", joules, "energy_per_sample", _energy, has_interval=True),
        *("energy_of", "energy_ratio"),
        Column("last_loss", "Loss of the last step", "loss", _loss_text, has_interval=True),
        "num_not_finite",
        Column("last_quality", quality, "quality", _quality, has_interval=True),
        "num_reached",
        titles={
            "throughput": f"Throughput, {comparison.sample_unit}/s",
            "throughput_ratio": over,
            "peak_ratio": over,
            "energy_ratio": joules_over,
        },
    )
    rows, title, caption = comparison.rows, comparison.label, comparison.caption
    return Sheet(name="precision", title=title, columns=columns, rows=rows, caption=caption, in_terminal=True)


def _energy(row: PrecisionRow) -> Cell:
    joules = row.energy_per_sample
    if joules is None:
        return Cell("not measured")
    return Cell(f"{value_text(joules)} ({row.energy_of})", interval_text(joules), number=joules.value)


def _loss_text(row: PrecisionRow) -> str:
    parts = []
    if row.loss is not None:
        parts.append(figure_text(row.loss))
    if row.num_not_finite:
        parts.append(f"not finite in {runs_text(row.num_not_finite)}")
    if row.overflow_steps is not None and row.overflow_steps.value > 0:
        parts.append(f"{number_text(row.overflow_steps.value, 'messages')} steps skipped for overflow")
    return "; ".join(parts) or "unknown"


def _quality(row: PrecisionRow) -> str:
    text = optional_figure(row.quality)
    if row.num_reached is not None:
        text += f"; {row.num_reached} of {runs_text(row.num_runs)} reached"
    return text


class PrecisionView(ReportView):
    """Gain and cost of a lower precision."""

    id = "precision"
    title = "Precision compared"
    key = "precisions"
    after = "shuffling"

    def numbers(self, source: ReportSource) -> tuple[PrecisionComparison, ...]:
        return precisions(source.groups, source.table)

    def shown(self, report: Report, comparisons: tuple[PrecisionComparison, ...]) -> Section:
        first = comparisons[0]
        headline = f"nothing to compare with {first.reference}"
        best = best_at_last(first.rows, attrgetter("ratio"))
        if best is not None:
            ratio, row = best
            headline = f"{row.precision} {times_value(ratio)} the throughput of {first.reference} at {place_of(row)}"
        words = []
        for comparison in comparisons:
            words += [f"{comparison.label}. {text}" for text in (comparison.verdict, *map(sentence, comparison.notes))]
        return Section(headline=headline, words=tuple(words), sheets=tuple(map(precision_sheet, comparisons)))

    def remedy(self, report: Report) -> str:
        if not report.groups:
            return ""
        command = rerun(report.groups[0], "--sweep train.precision=fp32,bf16")
        return f"no two groups differ in precision alone; {command} runs two interleaved."
