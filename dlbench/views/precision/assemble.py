"""Runs beside each other become part of the `Report`: precision, differences, systems."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.reading.comparability import group_id
from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.readings import machine_readings
from dlbench.reading.scaling import Group
from dlbench.report.wording import ENGINE_TITLES, basis_text, clean, place_text, times_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.views.differences import numbers as analysis
from dlbench.views.precision import model
from dlbench.views.precision.numbers import PrecisionPair, PrecisionRow, precision_pairs
from dlbench.views.systems.assemble import systems

__all__ = ["differences", "precisions", "systems"]

MAX_VALUES = 12
"""Values of a key that are listed; the rest are counted."""
MAX_DIFFERENCES = 200

_LOSS_CAPTION = "loss: mean over ranks of the last step's, of one batch each, so that it scatters from run to run"


def precisions(groups: Sequence[Group], table: RunTable) -> tuple[model.PrecisionComparison, ...]:
    """Groups that differ in nothing but precision, beside each other."""
    return tuple(_comparison(pair) for pair in precision_pairs(groups, table, machine_readings(table)))


def _comparison(pair: PrecisionPair) -> model.PrecisionComparison:
    plan = pair.groups[0].sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    reference = plan.workload.train.precision
    engine = ENGINE_TITLES[plan.engine.name]
    label = f"{plan.workload.name}, {plan.workload.preset} preset, {engine}, {plan.series.scaling} scaling"
    rows = tuple(_precision_row(row, unit) for row in pair.rows)
    batch = (
        f"{plan.global_batch} {unit} in all"
        if plan.series.scaling == "strong"
        else f"{plan.workload.train.batch_per_rank} {unit} a rank"
    )
    data = "synthetic data" if plan.workload.data.is_synthetic else "real data"
    return model.PrecisionComparison(
        id=pair.id,
        label=label,
        reference=reference,
        groups=tuple(group.id for group in pair.groups),
        sample_unit=unit,
        rows=rows,
        caption=(
            f"{label}; {batch}; {data}; on {plan.system.name}; ratios over {reference} at the same rank count; "
            f"{_LOSS_CAPTION}; {clean(plan.workload.notice)}."
        ),
        verdict=_precision_verdict(pair, reference),
        notes=_precision_notes(pair),
    )


def _precision_row(row: PrecisionRow, unit: str) -> model.PrecisionRow:
    return model.PrecisionRow(
        precision=row.precision,
        in_force=clean("; ".join(row.in_force)),
        ranks=row.ranks,
        nodes=row.nodes,
        is_reference=row.is_reference,
        is_paired=row.is_paired,
        throughput=figure_of(row.throughput, f"{unit}/s"),
        ratio=optional_figure_of(row.ratio, "ratio"),
        peak=figure_of(row.peak_bytes, "bytes"),
        memory_ratio=optional_figure_of(row.memory_ratio, "ratio"),
        energy_per_sample=optional_figure_of(row.joules, "J"),
        energy_of=row.joules_kind or "",
        energy_ratio=optional_figure_of(row.joules_ratio, "ratio"),
        loss=optional_figure_of(row.loss, "loss"),
        num_not_finite=row.num_not_finite,
        quality=optional_figure_of(row.quality, "ratio"),
        num_reached=row.num_reached,
        num_runs=len(row.run_ids),
        overflow_steps=optional_figure_of(row.overflow_steps, "messages"),
    )


def _precision_verdict(pair: PrecisionPair, reference: str) -> str:
    """Of the point with most ranks; an interval that holds 1 decides nothing."""
    last = (pair.rows[-1].ranks, pair.rows[-1].nodes)
    parts = []
    for row in pair.rows:
        if (row.ranks, row.nodes) == last and row.ratio is not None:
            figure = figure_of(row.ratio, "ratio")
            parts.append(
                f"{row.precision} {_judged(row.ratio)} {reference}, {times_text(figure)} ({basis_text(figure)})"
            )
    return f"At {place_text(*last)}: {'; '.join(parts)}."


def _judged(ratio: Estimate) -> str:
    if ratio.kind != "bootstrap 95 %" or ratio.low is None or ratio.high is None:
        return "has too few runs for a verdict against"
    if ratio.low > 1:
        return "is faster than"
    return "is slower than" if ratio.high < 1 else "cannot be told from"


def _precision_notes(pair: PrecisionPair) -> tuple[str, ...]:
    notes = []
    if not all(row.is_paired for row in pair.rows if not row.is_reference):
        notes.append(
            "not all repeats ran interleaved, so drift of the machine is part of these ratios; one sweep interleaves "
            "them: --sweep train.precision=fp32,bf16"
        )
    if any(row.num_not_finite for row in pair.rows):
        notes.append("runs whose loss was not finite are valid in speed only; see the loss column")
    return tuple(notes)


def differences(table: RunTable) -> tuple[model.RunDifference, ...]:
    """In which settings and properties of the environment runs differ."""
    runs = list(table.runs.values())
    groups = {run.plan.run_id: group_id(run) for run in runs}
    found = analysis.run_differences(runs)
    return tuple(_difference(item, groups) for item in found[:MAX_DIFFERENCES])


def _difference(item: analysis.KeyDifference, groups: dict[str, str]) -> model.RunDifference:
    return model.RunDifference(
        kind=item.kind,
        key=clean(item.key, 200),
        expected=item.expected,
        keeps_apart=item.keeps_apart,
        values=tuple(
            model.DifferentValue(
                value=clean(value, 300),
                num_runs=len(run_ids),
                groups=tuple(dict.fromkeys(groups[run_id] for run_id in run_ids)),
            )
            for value, run_ids in item.values[:MAX_VALUES]
        ),
        num_values=len(item.values),
    )
