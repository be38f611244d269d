"""The numbers of a group of comparable runs: its label, its conditions, and the numbers of its views."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

from dlbench.analysis import scaling
from dlbench.analysis.comparability import (
    AFTER_INTERRUPTION,
    Condition,
    chosen_settings,
    comparable_values,
    differing_settings,
    group_id,
    unique_labels,
)
from dlbench.analysis.scaling import last_loss
from dlbench.analysis.table import RunTable
from dlbench.records.registry import KEYS, data_title, precision
from dlbench.records.scan import Run, Scan
from dlbench.report.document import BaseReport
from dlbench.report.views import Views
from dlbench.report.wording import clean, ranks_text, span_text
from dlbench.specs.comm import NetworkModel
from dlbench.units import plural
from dlbench.views import doubts, model
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.controls import Controls, is_control
from dlbench.views.next_step import most_ranks, next_step
from dlbench.views.quality.numbers import GroupQuality
from dlbench.views.quality.view import quality_verdict
from dlbench.views.scaling import baseline_note, verdict
from dlbench.views.view import GroupSource, ReportSource


def report_source(scan: Scan, table: RunTable, history: BaseReport | None) -> ReportSource:
    """Returns the source of all views. Control runs are results only if there are no others."""
    groups = scaling.groups(table)
    results = [group for group in groups if not is_control(group.sample)] or groups
    return ReportSource(scan=scan, table=table, groups=groups, results=results, history=history)


def group_numbers(
    source: ReportSource, views: Views, control_runs: Sequence[Controls], network: NetworkModel | None
) -> tuple[model.ReportGroup, ...]:
    """Returns the groups of a report that are results."""
    differing = differing_settings([(group_id(group.sample), group.sample.plan) for group in source.results])
    numbers = [
        _numbers(group, source, views, conditions, network)
        for group, conditions in zip(source.results, differing, strict=True)
    ]
    groups = []
    for group, label in zip(numbers, unique_labels(numbers), strict=True):
        own = tuple(controls for controls in control_runs if group.id in controls.beside)
        missing, step = views.missing_of_group(group), next_step(group)
        groups.append(dataclasses.replace(group, label=label, next_step=step, missing=missing, controls=own))
    return tuple(groups)


def _numbers(
    group: scaling.Group,
    of_report: ReportSource,
    views: Views,
    differing: tuple[Condition, ...],
    network: NetworkModel | None,
) -> model.ReportGroup:
    plan = group.sample.plan
    table = of_report.table
    unit = clean(plan.workload.sample_unit, 40)
    group_doubts = tuple(doubts.group_doubts(group, table))
    source = views.with_group_numbers(
        GroupSource(group=group, table=table, doubts=group_doubts, views={}, network=network)
    )
    settings = tuple(chosen_settings(group.sample).items())
    loss_note = tuple(_local_sgd_note(group, unit))
    conditions_line = " ".join((*loss_note, _conditions_line(group, "geometric means")))
    verdicts = [verdict(unit, group.points, is_oversubscribed=source.is_oversubscribed, causes=source.of(LostPercent))]
    quality = source.of(GroupQuality)
    if quality is not None:
        verdicts.insert(0, quality_verdict(f"{clean(plan.workload.title)} ({_short_conditions(group)})", quality))
    return model.ReportGroup(
        id=group.id,
        label=_label(group, settings),
        title=plan.workload.title,
        about=plan.workload.about,
        notice=plan.workload.notice,
        scaling=group.scaling,
        sample_unit=unit,
        conditions=(*_conditions(group.sample), *_cleaned(differing)),
        settings=settings,
        conditions_line=conditions_line,
        caption=_with_notice(conditions_line, group),
        parts_caption=_with_notice(_conditions_line(group, "means"), group),
        verdict=" ".join((*verdicts, *loss_note)),
        baseline_note=baseline_note(group, of_report.groups, table),
        is_sufficient=group.is_sufficient,
        points=group.points,
        most_ranks=most_ranks(plan),
        doubts=group_doubts,
        views=source.views,
    )


def _local_sgd_note(group: scaling.Group, unit: str) -> Iterator[str]:
    """Says which loss local SGD reached, because its throughput alone is no result."""
    largest = group.points[-1].run_ids
    runs = [run for run in group.runs if run.plan.strategy == "local-sgd" and run.plan.run_id in largest]
    losses = [loss for loss in map(last_loss, runs) if loss is not None]
    samples = [run.record.steps * run.plan.global_batch for run in runs if run.record is not None]
    if losses:
        loss = f"loss {statistics.median(losses):.5g} after {max(samples):,} {unit}"
        yield f"Its ranks train separately between averages: {loss}, to compare with the loss of averaged gradients."


def _label(group: scaling.Group, settings: tuple[tuple[str, str], ...]) -> str:
    plan = group.sample.plan
    parts = [f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}", f"{group.scaling} scaling"]
    parts += [f"{key}={value}" for key, value in settings]
    if plan.series.variant != "plain":
        parts.append(plan.series.variant)
    if plan.series.side:
        parts.append(f"side {plan.series.side}")
    if "emulated" in precision(group.sample):
        parts.append(precision(group.sample))
    return ", ".join(parts)


def _short_conditions(group: scaling.Group) -> str:
    plan = group.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    batch = f"{plan.workload.train.batch_per_rank} {unit} per rank"
    if group.scaling == "strong":
        batch = f"{plan.global_batch} {unit} in all"
    data = clean(data_title(group.sample))
    return ", ".join((f"{plan.workload.preset} preset", plan.engine_title, precision(group.sample), batch, data))


def _conditions_line(group: scaling.Group, averages: str) -> str:
    """Returns the conditions of all figures of a group in one line; `averages` over runs are e.g. ``means``."""
    plan = group.sample.plan
    run_counts = sorted({len(point.run_ids) for point in group.points})
    system = f"{group.scaling} scaling on {plan.system.name}"
    if all(point.nodes == 1 for point in group.points):
        system += " (1 node)"
    runs = f"{averages} over {span_text(run_counts[0], run_counts[-1])} {plural('run', run_counts[-1])} per point"
    workload, baseline = f"{plan.workload.name}, {_short_conditions(group)}", ranks_text(group.baseline.ranks)
    return f"{workload}; {system}; baseline {baseline}; {runs}"


def _with_notice(conditions_line: str, group: scaling.Group) -> str:
    notice = clean(group.sample.plan.workload.notice)
    return "; ".join(filter(None, (conditions_line, notice)))


def _conditions(run: Run) -> tuple[Condition, ...]:
    titles = {**{key.name: key.title for key in KEYS}, "global_batch": "Global batch"}
    values = comparable_values(run)
    conditions = [Condition(name=name, title=titles[name], value=value) for name, value in values.items() if value]
    if run.record is not None and run.record.goes_on:
        conditions.append(Condition(name="resumed", title="Resumed", value=AFTER_INTERRUPTION))
    return _cleaned([*conditions, Condition(name="data_set", title="Data set", value=data_title(run))])


def _cleaned(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    return tuple(
        Condition(name=clean(condition.name), title=clean(condition.title), value=clean(condition.value))
        for condition in conditions
    )
