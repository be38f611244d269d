"""The section of a group of runs: its conditions and warnings, and below them the sections of its views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import methodcaller

from dlbench.analysis.scaling import group_by
from dlbench.report.document import Section, remark
from dlbench.report.views import Views
from dlbench.report.wording import basis_text, figure_text, place_text, span_text
from dlbench.specs.engine import engine_title
from dlbench.units import plural
from dlbench.views.model import ReportGroup

GROUP_COLUMNS = ("group", "label")  # Columns for programs in front of each row of a group's tables.
_FIRST_CONDITIONS = ("preset", "engine", "scaling", "precision")  # In a short name if groups differ in them.
_MORE_CONDITIONS = ("goal", "system", "device", "data", "batch_per_rank", "global_batch")  # If names are equal.


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
