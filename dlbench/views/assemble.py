"""A table of runs becomes a `Report`: foreign text cleaned, figures with units, verdicts in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import dlbench
from dlbench.history.report import TrendsReport
from dlbench.reading import environments, scaling
from dlbench.reading.comparability import (
    AFTER_INTERRUPTION,
    Condition,
    asked_apart,
    chosen_settings,
    comparable_values,
    group_id,
    unique_labels,
)
from dlbench.reading.samples.readings import damage_met
from dlbench.reading.table import RunTable, tabulate
from dlbench.records.registry import KEYS, data_source, data_title, goal, precision
from dlbench.records.scan import Run, Scan
from dlbench.report.wording import clean, counts_text, ranks_text
from dlbench.units import whole_seconds
from dlbench.views import doubts, model, registry
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.controls import controls, is_control
from dlbench.views.methods import METHODS, not_shown
from dlbench.views.next_step import most_ranks, next_step
from dlbench.views.quality.numbers import Quality
from dlbench.views.quality.view import quality_verdict
from dlbench.views.scaling import baseline_note, verdict
from dlbench.views.view import GroupSource, ReportSource, Views, engine_title

TITLE = "dlbench scaling report"


def assemble(
    scan: Scan, history: TrendsReport | None = None, views: Views = registry.SCALING, *, with_digests: bool = True
) -> model.Report:
    """The report of everything found under one folder; equal folders give equal reports.

    Args:
        scan: the runs.
        history: what changed over months, shown beside them; None: no such view.
        views: what it is made of.
        with_digests: whether a view asks for single steps.
    """
    table = tabulate(scan, with_causes=True, with_digests=with_digests)
    measured = list(table.runs.values())
    found = scaling.groups(table)
    # Control runs are no results, unless there are no others.
    results = [group for group in found if not is_control(group.sample)] or found
    beside = controls(scan.runs, [(group.id, group.runs) for group in results])
    asked = asked_apart([(group_id(group.sample), group.sample.plan) for group in results])
    groups = tuple(_group(group, found, table, views, apart) for group, apart in zip(results, asked, strict=True))
    groups = tuple(
        dataclasses.replace(
            group,
            label=label,
            next_step=next_step(group),
            missing=views.missing_of_group(group),
            controls=tuple(one for one in beside if group.id in one.beside),
        )
        for group, label in zip(groups, unique_labels(groups), strict=True)
    )
    source = ReportSource(scan=scan, table=table, groups=found, results=results, history=history)
    report = model.Report(
        title=TITLE,
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        dlbench_version=dlbench.__version__,
        notices=tuple(sorted({clean(run.plan.workload.notice) for run in scan.runs} - {""})),
        groups=groups,
        controls=beside,
        views={view.key: view.numbers(source) for view in views.report if view.key},
        runs=run_rows(scan, table),
        # Behind the views, which read samples and spans.
        damaged=tuple(dict.fromkeys((*table.damaged, *damage_met(table)))),
        environment=_environment(measured),
        methods=METHODS,
        missing=not_shown(groups),
    )
    return dataclasses.replace(report, missing=(*report.missing, *views.missing_of_report(report)))


def _group(
    group: scaling.Group, groups: Sequence[scaling.Group], table: RunTable, views: Views, apart: tuple[Condition, ...]
) -> model.Group:
    plan = group.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    settings = tuple(chosen_settings(group.sample).items())
    found = tuple(doubts.group_doubts(group, table))
    source = GroupSource(group=group, table=table, doubts=found, views={})
    for view in views.group:
        if view.key:
            source = dataclasses.replace(source, views={**source.views, view.key: view.numbers(source)})
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
        caption=_caption(group, "geometric means"),
        parts_caption=_caption(group, "means"),
        verdict=_verdict(source, unit),
        baseline_note=baseline_note(group, groups, table),
        is_sufficient=group.is_sufficient,
        points=group.points,
        most_ranks=most_ranks(plan),
        doubts=found,
        views=source.views,
    )


def _verdict(source: GroupSource, unit: str) -> str:
    """One or two sentences: on quality where the runs trained to one, and on speed."""
    quality = source.of(Quality)
    subject = f"{clean(source.group.sample.plan.workload.title)} ({_short_conditions(source.group)})"
    speed = verdict(
        unit, source.group.points, is_oversubscribed=source.is_oversubscribed, causes=source.of(LostPercent)
    )
    return " ".join([*([quality_verdict(subject, quality)] if quality else []), speed])


def _label(group: scaling.Group, settings: tuple[tuple[str, str], ...]) -> str:
    plan = group.sample.plan
    shown = "".join(f", {key}={value}" for key, value in settings)
    kind = "" if plan.series.variant == "plain" else f", {plan.series.variant}"
    kind += f", side {plan.series.side}" if plan.series.side else ""
    # Not what it was asked for, and nothing to compare.
    kind += f", {precision(group.sample)}" if "emulated" in precision(group.sample) else ""
    what = f"{plan.workload.name}, {plan.workload.preset} preset, {engine_title(plan)}"
    return f"{what}, {group.scaling} scaling{shown}{kind}"


def _batch_text(group: scaling.Group) -> str:
    plan = group.sample.plan
    unit = clean(plan.workload.sample_unit, 40)
    if group.scaling == "strong":
        return f"{plan.global_batch} {unit} in all"
    return f"{plan.workload.train.batch_per_rank} {unit} per rank"


def _short_conditions(group: scaling.Group) -> str:
    plan = group.sample.plan
    parts = (
        f"{plan.workload.preset} preset",
        engine_title(plan),
        precision(group.sample),
        _batch_text(group),
        clean(data_title(group.sample)),
    )
    return ", ".join(parts)


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
    figures = {} if table.figures.empty else table.figures.set_index("run_id").to_dict(orient="index")
    without = {id(item.run): item for item in table.without}
    return tuple(
        _row(run, item.state, item.why, None)
        if (item := without.get(id(run)))
        else _row(run, "valid", "", figures[run.plan.run_id])
        for run in scan.runs
    )


def _row(run: Run, state: str, story: str, figures: dict[Hashable, Any] | None) -> model.RunRow:
    plan = run.plan
    result = run.record.quality if run.record else None

    def number(name: str) -> float | None:
        return None if figures is None else float(figures[name])

    return model.RunRow(
        run_id=plan.run_id,
        group="" if figures is None else str(figures["group"]),
        state=state,
        story=clean(story),
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
            model.EnvironmentDifference(
                key=clean(item.key),
                values=tuple((clean(value), ids) for value, ids in item.values),
                expected=item.expected,
            )
            for item in found.differences
        ),
        num_runs=len(runs),
    )
