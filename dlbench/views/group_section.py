"""The section of a group of runs: its conditions and warnings once, and below them the sections of its views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dlbench.report.document import Section, remark
from dlbench.report.views import Views
from dlbench.report.wording import basis_text, counts_text, figure_text, place_text
from dlbench.specs.engine import engine_title
from dlbench.views.model import ReportGroup

GROUP_COLUMNS = ("group", "label")  # What programs find in front of each row of a group's tables.
_TELLING = ("preset", "engine", "scaling", "precision")
"""Conditions that a short name of a group has where groups of its workload differ in them."""
_TELLING_REST = ("goal", "system", "device", "data", "batch_per_rank", "global_batch")  # Where groups are else alike.


def group_section(group: ReportGroup, name: str, views: Views) -> Section:
    """Returns the section of a group; `name`: what a list of all groups calls it."""
    last = group.largest
    base = group.baseline
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
        sections=tuple(views.group_sections(group)),
        missing=group.missing,
        next_step=group.next_step,
        brief=(_brief_conditions(group), group.verdict, *(controls.text for controls in group.controls)),
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


def _brief_conditions(group: ReportGroup) -> str:
    """Says for the terminal what the label of a group does not say of its conditions."""
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


def short_names(groups: Sequence[ReportGroup]) -> list[str]:
    """The workload of each group and what distinguishes it from others of that workload; labels where that fails."""
    workloads = [group.condition("workload") for group in groups]
    names = [
        _name(group, [one for one, other in zip(groups, workloads, strict=True) if other == workload])
        for group, workload in zip(groups, workloads, strict=True)
    ]
    return names if len(set(names)) == len(names) else [group.label for group in groups]


def _name(group: ReportGroup, alike: Sequence[ReportGroup]) -> str:
    """Of a group among those of the same workload, itself included."""
    settings = Counter(setting for one in alike for setting in one.settings)
    chosen = [f"{key}={value}" for key, value in group.settings if settings[key, value] < len(alike)]
    left = [one for one in alike if one.settings == group.settings]
    telling = []
    for name in (*_TELLING, *_TELLING_REST):
        value = group.condition(name)
        same = [one for one in left if one.condition(name) == value]
        if value and (
            len(same) < len(left) or (name in _TELLING and {one.condition(name) for one in alike} != {value})
        ):
            telling.append(condition_text(name, value))
        left = same
    return ", ".join((group.condition("workload"), *telling, *chosen))


def condition_text(name: str, value: str) -> str:
    """Returns a condition in words that say what it is, e.g. ``ci preset``."""
    if name == "engine":
        return engine_title(value)
    words = {"preset": "{} preset", "scaling": "{} scaling", "batch_per_rank": "batch {}"}
    return {**words, "global_batch": "batch {} in all"}.get(name, "{}").format(value)
