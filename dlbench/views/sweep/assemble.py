"""Swept series become part of the `Report`: settings side by side, and the verdict."""

from __future__ import annotations

from dlbench.reading.run_table import RunTable
from dlbench.report.wording import DASH, clean, percent, place_text
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.views.exchange import model
from dlbench.views.sweep import numbers as analysis
from dlbench.views.sweep import words as sweep_words
from dlbench.views.sweep.axes import Axis
from dlbench.views.sweep.cells import Cell, Setting
from dlbench.views.sweep.settings import Autotuned, Losses


def sweeps(table: RunTable) -> tuple[model.Sweep, ...]:
    """All swept series with figures."""
    return tuple(_sweep(sweep, number) for number, sweep in enumerate(analysis.sweeps(table), start=1))


def _sweep(sweep: analysis.Sweep, number: int) -> model.Sweep:
    plan = sweep.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    cells = tuple(_cell(cell, unit) for cell in sweep.cells)
    batch = f"{plan.workload.train.batch_per_rank} {unit} a rank"
    if plan.series.scaling == "strong":
        batch = f"{plan.global_batch} {unit} in all"
    return model.Sweep(
        id=f"sweep-{number}",
        label=f"{plan.workload.name}: {' x '.join(sweep.keys)} (series {sweep.series})",
        series=sweep.series,
        keys=sweep.keys,
        sample_unit=unit,
        headline=sweep_words.headline(sweep.cells[-1]) if cells else (DASH, "no swept key acts"),
        verdict=cells[-1].verdict if cells else "The swept keys act at no rank count that was run.",
        cells=cells,
        idle=tuple(
            f"At {place_text(ranks, nodes)} no swept key acts; settings differ by up to {percent(spread)} there, "
            "which is the scatter of the machine."
            for ranks, nodes, spread in sweep.idle
        ),
        caption=f"{plan.workload.name}, {batch}, {plan.series.scaling} scaling on {plan.system.name}; medians over "
        f"runs; ratios in pairs of interleaved repeats; {clean(plan.workload.notice)}",
    )


def _cell(cell: Cell, unit: str) -> model.SweepCell:
    data = "synthetic data" if cell.data == "synthetic" else clean(cell.data)
    return model.SweepCell(
        ranks=cell.ranks,
        nodes=cell.nodes,
        conditions=f"{cell.preset} preset, {cell.precision}, {data}",
        baseline=sweep_words.baseline(cell),
        has_default=cell.has_default,
        settings=tuple(_setting(setting, cell, unit) for setting in cell.settings),
        axes=tuple(map(_axis, cell.axes)),
        interaction=sweep_words.interaction_words(cell.interaction),
        best="" if cell.best is None else sweep_words.label(cell.best.values),
        verdict=sweep_words.verdict(cell),
        advice=sweep_words.advice(cell),
        needed_repeats=cell.needed_repeats,
        notes=tuple(map(clean, cell.notes)),
    )


def _setting(setting: Setting, cell: Cell, unit: str) -> model.SweepSetting:
    values = setting.values.items()
    tuned = setting.autotune
    return model.SweepSetting(
        values=tuple((key, sweep_words.value_text(key, value)) for key, value in values),
        label=sweep_words.label(setting.values),
        is_baseline=setting.is_baseline,
        throughput=optional_figure_of(setting.throughput, f"{unit}/s"),
        ratio=optional_figure_of(setting.ratio, "ratio"),
        adjusted_p=setting.adjusted_p,
        verdict=setting.verdict,
        num_runs=len(setting.run_ids),
        num_planned=setting.num_planned,
        why=clean(setting.why),
        changes=setting.changes,
        inert=tuple(map(clean, setting.inert)),
        autotune=None if tuned is None else _autotune(tuned, is_faster=setting.verdict == "faster"),
        losses=None if setting.losses is None else _losses(setting.losses),
        options=sweep_words.options(setting),
        run_ids=setting.run_ids,
    )


def _autotune(found: Autotuned, *, is_faster: bool) -> model.Autotune:
    return model.Autotune(
        num_runs=found.num_runs,
        num_finished=found.num_finished,
        planned_steps=found.planned_steps,
        settled_step=found.settled_step,
        evaluations=found.evaluations,
        cost=optional_figure_of(found.cost_s, "s"),
        chosen=tuple(sweep_words.chosen_texts(found)),
        gain_s=found.gain_s,
        break_even_steps=found.break_even_steps,
        words=sweep_words.autotune_words(found, is_faster=is_faster),
    )


def _losses(found: Losses) -> model.Losses:
    return model.Losses(
        own=optional_figure_of(found.own, "loss"),
        reference=optional_figure_of(found.reference, "loss"),
        reference_label=sweep_words.label(found.reference_values),
        difference=optional_figure_of(found.difference, "loss"),
        why=clean(found.why),
    )


def _axis(axis: Axis) -> model.SweepAxis:
    return model.SweepAxis(
        key=axis.key,
        levels=tuple(
            model.SweepLevel(
                value=sweep_words.value_text(axis.key, level.value),
                effect=None if level.effect is None else figure_of(level.effect, "ratio"),
            )
            for level in axis.levels
        ),
        verdict=axis.verdict,
        words=sweep_words.axis_words(axis),
    )
