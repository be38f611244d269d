"""Assembles the scaling report of a table of runs: the numbers of each group of comparable runs (its label, its
conditions, and the numbers of its views) as plain data, and the sections of all views as a `Document`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import methodcaller

import dlbench.views
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
from dlbench.analysis.scaling import group_by, last_loss
from dlbench.analysis.table import tabulate
from dlbench.analysis.telemetry.readings import Samples
from dlbench.records.registry import KEYS, data_title, precision
from dlbench.records.scan import Run, Scan
from dlbench.report.document import BaseReport, Document, Missing, Section, definitions, methods_section, remark
from dlbench.report.views import Views, collect
from dlbench.report.wording import basis_text, clean, figure_text, place_text, ranks_text, span_text
from dlbench.specs.comm import NetworkModel
from dlbench.specs.engine import engine_title
from dlbench.units import plural
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.doubts import group_doubts
from dlbench.views.model import Controls, GroupSource, Report, ReportGroup, ReportSource, controls_of, is_control
from dlbench.views.next_step import most_ranks, next_step
from dlbench.views.quality.numbers import GroupQuality
from dlbench.views.quality.view import quality_verdict
from dlbench.views.runs import newest_end, notices_of, run_rows
from dlbench.views.scaling import baseline_note, verdict
from dlbench.views.systems import environment_of

GROUP_COLUMNS = ("group", "label")  # Columns for programs in front of each row of a group's tables.
_FIRST_CONDITIONS = ("preset", "engine", "scaling", "precision")  # In a short name if groups differ in them.
_MORE_CONDITIONS = ("goal", "system", "device", "data", "batch_per_rank", "global_batch")  # If names are equal.
TITLE = "dlbench scaling report"


def not_shown(groups: tuple[ReportGroup, ...]) -> tuple[Missing, ...]:
    """Returns subjects that no view is about, and what would produce them."""
    missing: list[Missing] = []
    if groups and all(len(group.points) == 1 for group in groups):
        text = "needs the same workload at two or more rank counts, e.g. --ranks 1,2,4."
        missing.append(Missing(view="scaling", title="Scaling", text=text))
    text = "not measured by training runs: dlbench comm run measures every algorithm and library on the same ranks."
    missing.append(Missing(view="collectives", title="Collective bandwidth", text=text))
    return tuple(missing)


def group_numbers(
    source: ReportSource, views: Views, control_runs: Sequence[Controls], network: NetworkModel | None
) -> tuple[ReportGroup, ...]:
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
) -> ReportGroup:
    plan = group.sample.plan
    table = of_report.table
    unit = clean(plan.workload.sample_unit, 40)
    warnings = tuple(group_doubts(group, table))
    source = views.with_group_numbers(GroupSource(group=group, table=table, doubts=warnings, views={}, network=network))
    settings = tuple(chosen_settings(group.sample).items())
    loss_note = tuple(_local_sgd_note(group, unit))
    conditions_line = " ".join((*loss_note, _conditions_line(group, "geometric means")))
    verdicts = [verdict(unit, group.points, is_oversubscribed=source.is_oversubscribed, causes=source.of(LostPercent))]
    quality = source.of(GroupQuality)
    if quality is not None:
        verdicts.insert(0, quality_verdict(f"{clean(plan.workload.title)} ({_short_conditions(group)})", quality))
    return ReportGroup(
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
        doubts=warnings,
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


def group_section(group: ReportGroup, name: str, views: Views) -> Section:
    """Returns the section of a group; `name` is its short name in a list of all groups."""
    last, base = group.largest, group.baseline
    baseline = f"{place_text(base.ranks, base.nodes)}, {figure_text(base.throughput)} {base.throughput.unit}"
    conditions = tuple((condition.title, condition.value) for condition in group.conditions)
    efficiency = "baseline" if last.is_baseline else figure_text(last.efficiency)
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        short_title=name,
        level="answer",
        about=(
            f"{group.title}, {group.condition('preset')} preset: {group.about}",
            *(controls.text for controls in group.controls),
        ),
        caption=group.conditions_line,
        facts=(("Baseline", f"{baseline} ({basis_text(base.throughput)})"), *conditions, *group.settings),
        marks=tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts),
        sections=tuple(views.group_sections(group)),
        missing=group.missing,
        next_step=group.next_step,
        brief=(_brief_conditions(group), group.verdict, *(controls.text for controls in group.controls)),
        is_group=True,
        overview=(
            ("At", place_text(last.ranks, last.nodes)),
            ("Throughput", f"{figure_text(last.throughput)} {last.throughput.unit}"),
            ("Efficiency", efficiency),
            ("Step, median", figure_text(last.step)),
            ("Interval", basis_text(last.throughput)),
        ),
        where=dict(zip(GROUP_COLUMNS, (group.id, group.label), strict=True)),
    )


def _brief_conditions(group: ReportGroup) -> str:
    """Returns the conditions that are not in the label of a group, for the terminal."""
    run_counts = sorted({point.throughput.n for point in group.points})
    nodes = sorted({point.nodes for point in group.points})
    batch = f"batch {group.condition('global_batch')} in all"
    if group.condition("batch_per_rank"):
        batch = f"batch {group.condition('batch_per_rank')} per rank"
    parts = (
        group.condition("precision"),
        batch,
        group.condition("data_set"),
        group.condition("system"),
        f"{span_text(nodes[0], nodes[-1])} {plural('node', nodes[-1])}",
        f"{span_text(run_counts[0], run_counts[-1])} {plural('run', run_counts[-1])} per point",
    )
    return ", ".join(part for part in parts if part)


def short_names(groups: Sequence[ReportGroup]) -> list[str]:
    """Returns the workload of each group and what distinguishes it; labels if such names are not unique."""
    by_workload = group_by(groups, methodcaller("condition", "workload"))
    names = [_name(group, by_workload[group.condition("workload")]) for group in groups]
    if len(set(names)) < len(names):
        return [group.label for group in groups]
    return names


def _name(group: ReportGroup, of_workload: Sequence[ReportGroup]) -> str:
    num_by_setting = Counter(chain.from_iterable(member.settings for member in of_workload))
    settings = [f"{key}={value}" for key, value in group.settings if num_by_setting[key, value] < len(of_workload)]
    same_name = [member for member in of_workload if member.settings == group.settings]
    conditions = []
    for name in (*_FIRST_CONDITIONS, *_MORE_CONDITIONS):
        value = group.condition(name)
        same = [member for member in same_name if member.condition(name) == value]
        is_different = name in _FIRST_CONDITIONS and any(member.condition(name) != value for member in of_workload)
        if value and (len(same) < len(same_name) or is_different):
            conditions.append(condition_text(name, value))
        same_name = same
    return ", ".join((group.condition("workload"), *conditions, *settings))


def condition_text(name: str, value: str) -> str:
    """Returns a condition in words that say what it is, e.g. ``ci preset``."""
    if name == "engine":
        return engine_title(value)
    words = {"preset": "{} preset", "scaling": "{} scaling", "batch_per_rank": "batch {}"}
    return {**words, "global_batch": "batch {} in all"}.get(name, "{}").format(value)


@functools.cache
def scaling_views() -> Views:
    """Returns all views of the scaling report, in the order of its page."""
    return collect(dlbench.views, without=dlbench.views.NO_VIEW)


def assemble(
    scan: Scan,
    history: BaseReport | None = None,
    views: Views | None = None,
    *,
    with_digests: bool = True,
    samples: Samples = "some",
    network: NetworkModel | None = None,
) -> Report:
    """Returns the report of all runs of one folder, by default with the views of the scaling report. Without digests no
    view may read single steps; `samples` says of how many nodes the samples are read.
    """
    if views is None:
        views = scaling_views()
    table = tabulate(scan, with_causes=True, with_digests=with_digests, samples=samples)
    all_groups = scaling.groups(table)
    # Control runs are results only if there are no others.
    results = [group for group in all_groups if not is_control(group.sample)] or all_groups
    source = ReportSource(scan=scan, table=table, groups=all_groups, results=results, history=history)
    control_runs = controls_of(scan.runs, [(group.id, group.runs) for group in source.results])
    groups = group_numbers(source, views, control_runs, network)
    damaged_samples = [reading.problem for reading in table.readings.values() if reading.problem]
    report = Report(
        title=TITLE,
        as_of=newest_end(table.runs.values()),
        notices=notices_of(scan.runs),
        groups=groups,
        controls=control_runs,
        views=views.report_numbers(source),
        runs=run_rows(scan, table),
        damaged=tuple(dict.fromkeys((*table.damaged, *damaged_samples))),
        environment=environment_of(list(table.runs.values())),
        methods=definitions("scaling"),
        missing=not_shown(groups),
    )
    return dataclasses.replace(report, missing=(*report.missing, *views.missing_of_report(report)))


def document_of(report: Report, views: Views | None = None) -> Document:
    """Returns the report ready for every format; `views` are those it was assembled with."""
    if views is None:
        views = scaling_views()
    names = short_names(report.groups)
    groups = [group_section(group, name, views) for group, name in zip(report.groups, names, strict=True)]
    sections = [*views.opening_sections(report), *groups]
    without_results = tuple(controls.text for controls in report.controls if not controls.beside)
    if without_results:
        sections.append(Section(id="controls", title="Control runs", words=without_results, brief=without_results))
    sections += [*views.closing_sections(report), *methods_section(report.methods)]
    if report.missing:
        title = "Not in this report"
        sections.append(
            Section(id="missing", title=title, level="appendix", missing=report.missing, missing_title="Not shown")
        )
    return report.document(
        *sections,
        runs=report.runs,
        notices=report.notices,
        always=views.always(GROUP_COLUMNS),
        one_group_at_a_time=True,
    )
