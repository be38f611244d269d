"""The scaling report as a `Document`: the sections of all views, before, of and after the groups."""

from __future__ import annotations

import dataclasses

from dlbench.report.document import Document, Level, Section, remark
from dlbench.report.table import named_table
from dlbench.report.wording import basis_text, counts_text, figure_text, place_text, runs_text
from dlbench.views import registry
from dlbench.views.causes.view import account_sheet
from dlbench.views.model import Group, Report
from dlbench.views.runs import runs_sheet
from dlbench.views.scaling import points_sheet
from dlbench.views.summary import short_names
from dlbench.views.view import GroupView, ReportView, Views

GROUP_COLUMNS = ("group", "label")
"""In front of every row of a group's tables."""


MEANS = "Means over the runs of a point"
"""What stands for the conditions of a group where its figures are those of parts."""


_DEPTH: dict[Level, int] = {"answer": 0, "evidence": 1, "appendix": 2}


def document_of(report: Report, views: Views = registry.SCALING) -> Document:
    """The report, ready for every format; `views` are those it was assembled with."""
    opening = [_levelled(section, view) for view in views.opening for section in view.sections(report)]
    closing = [_levelled(section, view) for view in views.closing for section in view.sections(report)]
    without = len(report.without_figures)
    empty = (points_sheet(()), account_sheet(()))
    names = short_names(report.groups)
    alone = tuple(one.text for one in report.controls if not one.beside)
    methods = Section(
        id="methods",
        title="How the numbers are made",
        facts=report.methods,
        level="appendix",
        are_methods=True,
        brief=(),
    )
    missing = Section(
        id="missing", title="Not in this report", level="appendix", missing=report.missing, missing_title="Not shown"
    )
    return Document(
        title=report.title,
        dlbench_version=report.dlbench_version,
        as_of=report.as_of,
        meta=(f"{runs_text(len(report.runs))}{f', {without} excluded' if without else ''}.",),
        notices=report.notices,
        sections=(
            *opening,
            *(_group(group, name, views) for group, name in zip(report.groups, names, strict=True)),
            # Control runs beside which there are no results.
            *([Section(id="controls", title="Control runs", words=alone, brief=alone)] if alone else []),
            *closing,
            *([methods] if report.methods else []),
            *([missing] if report.missing else []),
        ),
        data=report,
        always=(
            *(named_table(one.name, one.title, one.columns, GROUP_COLUMNS) for one in empty),
            named_table("runs", "All runs", runs_sheet(()).columns),
        ),
        one_group_at_a_time=True,
    )


def _levelled(section: Section, view: GroupView | ReportView) -> Section:
    return dataclasses.replace(section, level=view.level)


def _once(section: Section, group: Group) -> Section:
    """A section of a group without the conditions that the group states for all of them."""

    def without(text: str) -> str:
        left = text.replace(group.parts_caption, MEANS)
        for form in (
            f"{group.caption}. ",
            f" {group.caption}.",
            f"; {group.caption}",
            f"{group.caption}.",
            group.caption,
        ):
            left = left.replace(form, "")
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
