"""A table of runs becomes the scaling report, as plain data and as a `Document` of the sections of all views.

A new view is a module and a line in `SCALING`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dlbench.analysis import environments, scaling
from dlbench.analysis.comparability import (
    AFTER_INTERRUPTION,
    Condition,
    chosen_settings,
    comparable_values,
    differing_settings,
    group_id,
    unique_labels,
)
from dlbench.analysis.side_by_side import last_loss
from dlbench.analysis.table import RunTable, tabulate
from dlbench.analysis.telemetry.readings import damage_met
from dlbench.records.registry import KEYS, data_source, data_title, goal, precision
from dlbench.records.scan import Run, Scan
from dlbench.report.document import BaseReport, Document, Level, Section, methods_section, remark
from dlbench.report.table import named_table
from dlbench.report.wording import basis_text, clean, counts_text, figure_text, place_text, ranks_text, runs_text
from dlbench.specs.comm import NetworkModel
from dlbench.units import whole_seconds
from dlbench.views import doubts, model
from dlbench.views.campaign_cost import CampaignCostView
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.causes.tables import account_sheet
from dlbench.views.causes.view import CausesView
from dlbench.views.data_path import DataPathView, epoch_samples
from dlbench.views.energy import EnergyView
from dlbench.views.exchange import ExchangeView
from dlbench.views.forecast import ForecastView
from dlbench.views.history import HistoryView
from dlbench.views.methods import METHODS, not_shown
from dlbench.views.model import Group, Report, controls, is_control
from dlbench.views.next_step import most_ranks, next_step
from dlbench.views.noise import NoiseView
from dlbench.views.out_of_core.view import OutOfCoreView
from dlbench.views.peak_memory import MemoryView
from dlbench.views.precision import PrecisionView
from dlbench.views.quality.numbers import Quality
from dlbench.views.quality.view import LargeBatchView, QualityView, quality_verdict
from dlbench.views.readers import ReadingView
from dlbench.views.runs import DifferencesView, EnvironmentView, RunsView, WithoutFiguresView, runs_sheet
from dlbench.views.scaling import ScalingView, baseline_note, points_sheet, verdict
from dlbench.views.shuffling import ShuffleAuditView, ShufflingView
from dlbench.views.staging import BreakEvenView, StagingView
from dlbench.views.stalls import StallsView
from dlbench.views.steps import RanksView, StepsView
from dlbench.views.stragglers import SlowNodesView, StragglersView
from dlbench.views.summary import SummaryView, short_names
from dlbench.views.sweep.view import SweepView
from dlbench.views.systems import SystemsView
from dlbench.views.telemetry import TelemetryView
from dlbench.views.time_to_train import TimeToTrainView
from dlbench.views.utilisation import UtilisationView
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, Views

SCALING = Views(
    opening=(SummaryView(), SweepView()),
    group=(
        QualityView(),
        ScalingView(),
        TimeToTrainView(),
        CausesView(),
        ForecastView(),
        StragglersView(),
        StepsView(),
        RanksView(),
        ExchangeView(),
        DataPathView(),
        StagingView(),
        ReadingView(),
        ShuffleAuditView(),
        MemoryView(),
        TelemetryView(),
        EnergyView(),
        NoiseView(),
        UtilisationView(),
    ),
    closing=(
        CampaignCostView(),
        SlowNodesView(),
        StallsView(),
        BreakEvenView(),
        ShufflingView(),
        PrecisionView(),
        LargeBatchView(),
        OutOfCoreView(),
        DifferencesView(),
        SystemsView(),
        HistoryView(),
        RunsView(),
        WithoutFiguresView(),
        EnvironmentView(),
    ),
)

TITLE = "dlbench scaling report"


def assemble(
    scan: Scan,
    history: BaseReport | None = None,
    views: Views = SCALING,
    *,
    with_digests: bool = True,
    network: NetworkModel | None = None,
) -> model.Report:
    """The report of everything found under one folder; equal folders give equal reports.

    A history says what changed over months, next to the runs; without digests no view may ask for single steps.
    """
    table = tabulate(scan, with_causes=True, with_digests=with_digests)
    measured = list(table.runs.values())
    found = scaling.groups(table)
    # Control runs are no results, unless there are no others.
    results = [group for group in found if not is_control(group.sample)] or found
    control_runs = controls(scan.runs, [(group.id, group.runs) for group in results])
    asked = differing_settings([(group_id(group.sample), group.sample.plan) for group in results])
    groups = tuple(
        _group_numbers(group, found, table, views, apart, network) for group, apart in zip(results, asked, strict=True)
    )
    groups = tuple(
        dataclasses.replace(
            group,
            label=label,
            next_step=next_step(group),
            missing=views.missing_of_group(group),
            controls=tuple(one for one in control_runs if group.id in one.beside),
        )
        for group, label in zip(groups, unique_labels(groups), strict=True)
    )
    source = ReportSource(scan=scan, table=table, groups=found, results=results, history=history)
    report = model.Report(
        title=TITLE,
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        notices=tuple(sorted({clean(run.plan.workload.notice) for run in scan.runs} - {""})),
        groups=groups,
        controls=control_runs,
        views={view.key: view.numbers(source) for view in views.report if view.key},
        runs=run_rows(scan, table),
        # Behind the views, which read samples and spans.
        damaged=tuple(dict.fromkeys((*table.damaged, *damage_met(table)))),
        environment=_environment(measured),
        methods=METHODS,
        missing=not_shown(groups),
    )
    return dataclasses.replace(report, missing=(*report.missing, *views.missing_of_report(report)))


def _group_numbers(
    group: scaling.Group,
    groups: Sequence[scaling.Group],
    table: RunTable,
    views: Views,
    apart: tuple[Condition, ...],
    network: NetworkModel | None,
) -> model.Group:
    plan = group.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    settings = tuple(chosen_settings(group.sample).items())
    found = tuple(doubts.group_doubts(group, table))
    source = GroupSource(group=group, table=table, doubts=found, views={}, network=network)
    for view in views.group:
        if view.key:
            source = dataclasses.replace(source, views={**source.views, view.key: view.numbers(source)})
    quality = source.of(Quality)
    subject = f"{clean(plan.workload.title)} ({_short_conditions(group)})"
    speed = verdict(unit, group.points, is_oversubscribed=source.is_oversubscribed, causes=source.of(LostPercent))
    return model.Group(
        id=group.id,
        label=_label(group, settings),
        title=plan.workload.title,
        about=plan.workload.about,
        notice=plan.workload.notice,
        scaling=group.scaling,
        sample_unit=unit,
        conditions=(*_conditions(group.sample), *_cleaned(apart)),
        settings=settings,
        caption=" ".join((*_apart(group, unit), _caption(group, "geometric means"))),
        parts_caption=_caption(group, "means"),
        verdict=" ".join([*([quality_verdict(subject, quality)] if quality else []), speed, *_apart(group, unit)]),
        baseline_note=baseline_note(group, groups, table),
        is_sufficient=group.is_sufficient,
        points=group.points,
        most_ranks=most_ranks(plan),
        doubts=found,
        views=source.views,
    )


def _apart(group: scaling.Group, unit: str) -> Iterator[str]:
    """What ranks reached that trained apart between averages: throughput alone says nothing of them."""
    largest = group.points[-1].run_ids
    runs = [run for run in group.runs if run.plan.strategy == "local-sgd" and run.plan.run_id in largest]
    losses = [loss for run in runs if (loss := last_loss(run)) is not None]
    seen = {run.record.steps * run.plan.global_batch for run in runs if run.record is not None}
    if losses:
        found = f"{statistics.median(losses):.5g} after {max(seen):,} {unit}"
        yield f"Its ranks train apart between averages: loss {found}, to be compared with that of averaged gradients."


def _label(group: scaling.Group, settings: tuple[tuple[str, str], ...]) -> str:
    plan = group.sample.plan
    shown = "".join(f", {key}={value}" for key, value in settings)
    kind = "" if plan.series.variant == "plain" else f", {plan.series.variant}"
    kind += f", side {plan.series.side}" if plan.series.side else ""
    # Not what it was asked for, and nothing to compare.
    kind += f", {precision(group.sample)}" if "emulated" in precision(group.sample) else ""
    what = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}"
    return f"{what}, {group.scaling} scaling{shown}{kind}"


def _short_conditions(group: scaling.Group) -> str:
    plan = group.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    batch = f"{plan.workload.train.batch_per_rank} {unit} per rank"
    if group.scaling == "strong":
        batch = f"{plan.global_batch} {unit} in all"
    data = clean(data_title(group.sample))
    return ", ".join((f"{plan.workload.preset} preset", plan.engine_title, precision(group.sample), batch, data))


def _caption(group: scaling.Group, what: str) -> str:
    plan = group.sample.plan
    counts = sorted({len(point.run_ids) for point in group.points})
    nodes = {point.nodes for point in group.points}
    parts = (
        f"{plan.workload.name}, {_short_conditions(group)}",
        f"{group.scaling} scaling on {plan.system.name}" + (" (1 node)" if nodes == {1} else ""),
        f"baseline {ranks_text(group.baseline.ranks)}",
        f"{what} over {counts_text(counts)} run{'s' * (counts[-1] > 1)} per point",
        clean(plan.workload.notice),
    )
    return "; ".join(filter(None, parts))


def _conditions(run: Run) -> tuple[Condition, ...]:
    titles = {key.name: key.title for key in KEYS} | {"global_batch": "Global batch"}
    values = comparable_values(run)
    found = [Condition(name=name, title=titles[name], value=value) for name, value in values.items() if value]
    if run.record is not None and run.record.goes_on:
        found.append(Condition(name="resumed", title="Resumed", value=AFTER_INTERRUPTION))
    return _cleaned([*found, Condition(name="data_set", title="Data set", value=data_title(run))])


def _cleaned(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    return tuple(Condition(name=clean(one.name), title=clean(one.title), value=clean(one.value)) for one in conditions)


def run_rows(scan: Scan, table: RunTable) -> tuple[model.RunRow, ...]:
    """Every run of the scan; figures only for the folder that stands for its run id, not for copies of it."""
    without = {id(item.run): item for item in table.without}
    return tuple(
        _row(run, item.state, item.why, None)
        if (item := without.get(id(run)))
        else _row(run, "valid", "", table.figures[run.plan.run_id])
        for run in scan.runs
    )


def _row(run: Run, state: str, failure_reason: str, figures: dict[str, Any] | None) -> model.RunRow:
    plan = run.plan
    result = run.record.quality if run.record else None
    samples = None if plan.workload.data.is_synthetic else epoch_samples(run)

    def number(name: str) -> float | None:
        return None if figures is None else float(figures[name])

    return model.RunRow(
        run_id=plan.run_id,
        group="" if figures is None else str(figures["group"]),
        state=state,
        failure_reason=clean(failure_reason),
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        precision=precision(run),
        data=clean(data_source(run)),
        batch_per_rank=plan.workload.train.batch_per_rank,
        scaling=plan.series.scaling,
        series=plan.series.id,
        repeat=plan.series.repeat,
        variant=plan.series.variant,
        side=plan.series.side,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        sample_unit=clean(plan.workload.sample_unit, 40),
        steps=None if figures is None else int(figures["steps"]),
        throughput=number("throughput"),
        step_median_s=number("step_median_s"),
        step_p95_s=number("step_p95_s"),
        step_cv=number("step_cv"),
        epoch_s=samples / rate if samples and (rate := number("throughput")) else None,
        finished="" if run.record is None else clean(run.record.finished),
        warnings=tuple(clean(doubt.text) for doubt in doubts.run_doubts(run)),
        goal=goal(run),
        reached=result.reached if result else None,
        time_to_quality_s=result.time_to_quality_s if result else None,
        samples_to_quality=result.samples_to_quality if result else None,
        epochs_to_quality=result.epochs_to_quality if result else None,
    )


def _environment(runs: list[Run]) -> model.Environment:
    found = environments.compare(runs)
    return model.Environment(
        common=tuple((clean(key), clean(value)) for key, value in found.common.items()),
        differences=tuple(
            dataclasses.replace(
                item, key=clean(item.key), values=tuple((clean(value), ids) for value, ids in item.values)
            )
            for item in found.differences
        ),
        num_runs=len(runs),
    )


GROUP_COLUMNS = ("group", "label")

MEANS = "Means over the runs of a point"  # Stands for a group's conditions where its figures are those of parts.

_DEPTH: dict[Level, int] = {"answer": 0, "evidence": 1, "appendix": 2}


def document_of(report: Report, views: Views = SCALING) -> Document:
    """The report, ready for every format; `views` are those it was assembled with."""
    found = [(section, view) for view in views.opening for section in view.sections(report)]
    found.sort(key=lambda one: one[0].level != "answer")  # what was asked for, before the summary of its runs
    opening = [_levelled(*one) for one in found]
    closing = [_levelled(section, view) for view in views.closing for section in view.sections(report)]
    without = len(report.without_figures)
    empty = (points_sheet(()), account_sheet(()))
    names = short_names(report.groups)
    alone = tuple(one.text for one in report.controls if not one.beside)
    missing = Section(
        id="missing", title="Not in this report", level="appendix", missing=report.missing, missing_title="Not shown"
    )
    return report.document(
        *opening,
        *(_group(group, name, views) for group, name in zip(report.groups, names, strict=True)),
        # Control runs without results to which they belong.
        *([Section(id="controls", title="Control runs", words=alone, brief=alone)] if alone else []),
        *closing,
        *methods_section(report.methods),
        *([missing] if report.missing else []),
        meta=(f"{runs_text(len(report.runs))}{f', {without} excluded' if without else ''}.",),
        notices=report.notices,
        always=(
            *(named_table(one.name, one.title, one.columns, GROUP_COLUMNS) for one in empty),
            named_table("runs", "All runs", runs_sheet(()).columns),
        ),
        one_group_at_a_time=True,
    )


def _levelled(section: Section, view: GroupView | ReportView) -> Section:
    return section if section.level == "answer" else dataclasses.replace(section, level=view.level)


def _once(section: Section, group: Group) -> Section:
    """A section of a group without the conditions that the group states for all of them."""

    def without(text: str) -> str:
        left = text.replace(group.parts_caption, MEANS)
        for form in ("{}. ", " {}.", "; {}", "{}.", "{}"):
            left = left.replace(form.replace("{}", group.caption), "")
        return left

    return dataclasses.replace(
        section,
        caption=without(section.caption),
        sheets=tuple(dataclasses.replace(sheet, caption=without(sheet.caption)) for sheet in section.sheets),
        sections=tuple(_once(inner, group) for inner in section.sections),
    )


def _group(group: Group, name: str, views: Views) -> Section:
    last = group.largest
    base = group.baseline
    found = [
        _once(_levelled(section, view), group) for view in views.group if (section := view.section(group)) is not None
    ]
    found.sort(key=lambda section: _DEPTH[section.level])
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        short_title=name,
        level="answer",
        about=(
            f"{group.title}, {group.condition('preset')} preset: {group.about}",
            *(one.text for one in group.controls),
        ),
        caption=group.caption.removesuffix(f"; {group.notice}"),
        facts=(
            (
                "Baseline",
                f"{place_text(base.ranks, base.nodes)}, {figure_text(base.throughput)} {base.throughput.unit} "
                f"({basis_text(base.throughput)})",
            ),
            *((condition.title, condition.value) for condition in group.conditions),
            *group.settings,
        ),
        marks=tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts),
        sections=tuple(dataclasses.replace(section, id=f"{section.id}-{group.id}") for section in found),
        missing=group.missing,
        next_step=group.next_step,
        brief=(_conditions_line(group), group.verdict, *(one.text for one in group.controls)),
        is_group=True,
        overview=(
            ("At", place_text(last.ranks, last.nodes)),
            ("Throughput", f"{figure_text(last.throughput)} {last.throughput.unit}"),
            ("Efficiency", "baseline" if last.is_baseline else figure_text(last.efficiency)),
            ("Step, median", figure_text(last.step)),
            ("Interval", basis_text(last.throughput)),
        ),
        where=dict(zip(GROUP_COLUMNS, (group.id, group.label), strict=True)),
    )


def _conditions_line(group: Group) -> str:
    """What the label of a group does not say of its conditions, for the terminal."""
    counts = sorted({point.throughput.n for point in group.points})
    nodes = sorted({point.nodes for point in group.points})
    batch = f"batch {group.condition('batch_per_rank')} per rank" if group.condition("batch_per_rank") else ""
    parts = (
        group.condition("precision"),
        batch or f"batch {group.condition('global_batch')} in all",
        group.condition("data_set"),
        group.condition("system"),
        f"{counts_text(nodes)} node{'s' * (nodes[-1] > 1)}",
        f"{counts_text(counts)} run{'s' * (counts[-1] > 1)} per point",
    )
    return ", ".join(part for part in parts if part)
