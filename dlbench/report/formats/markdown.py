"""A report as Markdown (GitHub's dialect), for pull requests, wikis and step summaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from dlbench.report import tabular
from dlbench.report.model import Group, Report
from dlbench.report.view import Sheet, View
from dlbench.report.wording import baseline_text, place_text, runs_text
from dlbench.views import sheets
from dlbench.views.layers.tables import layers as layers_table
from dlbench.views.quality import tables as training_tables
from dlbench.views.sweep import tables as sweep_tables
from dlbench.views.sweep.numbers import Sweep

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$])")
_LINE_START = re.compile(r"^(\s*\d*)([-+=#.)])(?=\s|#|$)")


def escape(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    return _LINE_START.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


def to_markdown(report: Report) -> str:
    """The report; headings from level 1, one table for each view."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {escape(report.title)}"
    yield ""
    if report.as_of:
        yield f"Newest run finished {escape(report.as_of)}. Made by dlbench {escape(report.dlbench_version)}."
        yield ""
    for notice in report.notices:
        yield f"**{escape(notice)}**"
    yield ""
    yield "## Summary"
    yield ""
    if not report.groups:
        yield "No run has figures."
    for group in report.groups:
        yield f"- {escape(group.verdict)}" + (f" **Next:** {escape(group.next_step)}" if group.next_step else "")
    yield ""
    for sweep in report.sweeps:
        yield from _sweep(sweep)
    for group in report.groups:
        yield from _group(group)
    for view, words, found in sheets.told_of_all(report):
        yield from _view(2, view, words, found)
    for layers in report.layers:
        yield from _section(f"Layers: {escape(layers.title)}", layers_table(layers), layers.layers)
    yield from _section("Runs", tabular.runs(report), report.runs)
    yield from _section("Runs without figures", tabular.without_figures(report), report.without_figures)
    yield from _list("Damaged files", report.damaged)
    yield from _environment(report)
    yield from _list("Not in this report", (f"{one.title}: {one.text}" for one in report.missing))
    yield from _list("How the numbers are made", (f"{name}. {text}" for name, text in report.methods))


def _group(group: Group) -> Iterator[str]:
    yield f"## {escape(group.label)}"
    yield ""
    yield escape(group.about)
    yield ""
    yield f"Baseline: {escape(baseline_text(group))}."
    yield ""
    conditions = "; ".join(f"{condition.title}: {condition.value}" for condition in group.conditions)
    yield escape(conditions) + "."
    yield ""
    for doubt in group.doubts:
        mark = "**Doubt:** " if doubt.severity == "serious" else "Note: "
        where = f" ({runs_text(len(doubt.runs))})" if doubt.runs else ""
        yield f"- {mark}{escape(doubt.text + where)}"
    yield ""
    for title, table, caption in (
        ("Scaling", tabular.scaling(group), group.caption),
        ("Parts of a step", tabular.parts(group), group.parts_caption),
        ("Lost points", tabular.lost(group), group.parts_caption),
        *training_tables.sections(group),
    ):
        if len(table) > 1:
            yield f"### {title}"
            yield ""
            yield from _table(table)
            yield ""
            yield f"*{escape(caption)}*"
            yield ""
    for view, words, found in sheets.told_of(group):
        yield from _view(3, view, words, found)
    yield from _list("What these runs do not tell", (f"{one.title}: {one.text}" for one in group.untold), level=3)


def _view(level: int, view: View, words: Iterable[str], found: Iterable[Sheet]) -> Iterator[str]:
    """A view: its finding in words, then its tables, one heading level deeper."""
    yield f"{'#' * level} {escape(view.title)}"
    yield ""
    for text in words:
        yield escape(text)
        yield ""
    for sheet in found:
        yield f"{'#' * (level + 1)} {escape(sheet.title)}"
        yield ""
        yield from _table(sheet.text)
        yield ""
        if sheet.caption:
            yield f"*{escape(sheet.caption)}*"
            yield ""


def _sweep(sweep: Sweep) -> Iterator[str]:
    yield f"## Settings compared: {escape(sweep.label)}"
    yield ""
    yield from (escape(text) for text in (sweep.verdict, *sweep.idle))
    yield ""
    for cell in sweep.cells:
        yield f"### {place_text(cell.ranks, cell.nodes)}"
        yield ""
        yield from (f"- {escape(text)}" for text in (cell.verdict, cell.interaction, *cell.notes) if text)
        yield f"- **Next:** {escape(cell.advice)}"
        yield ""
        for title, table, caption in sweep_tables.sections(sweep, cell):
            yield f"#### {title}"
            yield ""
            yield from _table(table)
            yield ""
            yield f"*{escape(caption)}*"
            yield ""


def _environment(report: Report) -> Iterator[str]:
    yield "## Environment"
    yield ""
    yield f"Of {runs_text(report.environment.num_runs)} with figures."
    yield ""
    yield from _table(tabular.environment(report.environment))
    yield ""


def _section(title: str, table: tabular.Table, rows: Sequence[object]) -> Iterator[str]:
    if rows:
        yield f"## {title}"
        yield ""
        yield from _table(table)
        yield ""


def _list(title: str, items: Iterable[str], level: int = 2) -> Iterator[str]:
    lines = [f"- {escape(item)}" for item in items]
    if lines:
        yield from (f"{'#' * level} {title}", "", *lines, "")


def _table(table: tabular.Table) -> Iterator[str]:
    header, *rows = table
    yield "| " + " | ".join(map(escape, header)) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(escape, row)) + " |"
