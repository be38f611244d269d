"""The report of the collective benchmark as Markdown, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from dlbench.collectives.page import tabular as comm_tabular
from dlbench.collectives.page.model import CommGroup, CommReport, FitTable
from dlbench.report.formats.csv import write_table
from dlbench.report.formats.markdown import escape
from dlbench.report.model import as_plain
from dlbench.report.tabular import Table
from dlbench.report.wording import runs_text
from dlbench.stats.figure import Cell, figure_columns

TableName = Literal["points", "ratios", "fits", "runs"]


def to_json(report: CommReport) -> str:
    """The whole structure of `comm_model`; `format` and `version` come first."""
    return json.dumps(as_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# CSV


_GROUP = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")

POINT_COLUMNS: tuple[str, ...] = (
    *_GROUP,
    *("carrier", "algorithm", "num_bytes", "time_s", "time_s_low", "time_s_high", "algbw_gb_per_s"),
    *("algbw_gb_per_s_low", "algbw_gb_per_s_high", "busbw_gb_per_s", "busbw_gb_per_s_low", "busbw_gb_per_s_high"),
    *("runs", "interval", "iterations", "steps", "messages", "bytes_sent", "bytes_across", "predicted_s"),
    *("predicted_over_measured", "fastest", "problem"),
)

RATIO_COLUMNS: tuple[str, ...] = (
    *_GROUP,
    *("num_bytes", "own", "library", "speed", "speed_low", "speed_high", "runs", "interval", "paired"),
)

FIT_COLUMNS: tuple[str, ...] = (
    *("system", "carrier", "dtype", "name", "ranks", "up_to_bytes", "alpha_s", "alpha_s_low", "alpha_s_high"),
    *("s_per_byte", "s_per_byte_low", "s_per_byte_high"),
)

RUN_COLUMNS: tuple[str, ...] = (
    *("run_id", "group", "state", "collective", "dtype", "system", "ranks", "nodes", "repeat", "finished", "story"),
    "warnings",
)


def to_csv(report: CommReport, table: TableName = "points") -> str:
    """One table as CSV: raw numbers, units in the column names (see `delimited.write_table`)."""
    header, rows = _TABLES[table]
    return write_table(header, rows(report))


def _of_group(group: CommGroup) -> dict[str, Cell]:
    return {"group": group.id, **{name: getattr(group, name) for name in _GROUP[1:]}}


def _points(report: CommReport) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for found in group.series:
            for row in found.rows:
                yield {
                    **_of_group(group),
                    "carrier": found.carrier,
                    "algorithm": found.algorithm,
                    "num_bytes": row.num_bytes,
                    **figure_columns("time_s", row.time),
                    **figure_columns("algbw_gb_per_s", row.algbw),
                    **figure_columns("busbw_gb_per_s", row.busbw),
                    "runs": row.time.n,
                    "interval": row.time.kind,
                    "iterations": row.iterations,
                    "steps": row.steps,
                    "messages": row.messages,
                    "bytes_sent": row.bytes_sent,
                    "bytes_across": row.bytes_across,
                    "predicted_s": row.predicted_s,
                    "predicted_over_measured": row.predicted_over_measured,
                    "fastest": row.is_best,
                    "problem": "",
                }
        for one in group.rejected:
            empty: dict[str, Cell] = dict.fromkeys(POINT_COLUMNS)
            told: dict[str, Cell] = {"algorithm": one.title, "num_bytes": one.num_bytes, "problem": one.why}
            yield {**empty, **_of_group(group), **told, "runs": len(one.runs)}


def _ratios(report: CommReport) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for row in group.ratios:
            yield {
                **_of_group(group),
                "num_bytes": row.num_bytes,
                "own": row.own,
                "library": row.library,
                **figure_columns("speed", row.speed),
                "runs": row.speed.n,
                "interval": row.speed.kind,
                "paired": row.paired,
            }


def _fits(report: CommReport) -> Iterator[Mapping[str, Cell]]:
    """Levels by piece, the reduction, and lines of whole collectives; each a start-up and seconds per byte."""
    for fit in report.fits:
        of_fit: dict[str, Cell] = dict.fromkeys(FIT_COLUMNS)
        of_fit |= {"system": fit.system, "carrier": fit.carrier, "dtype": fit.dtype}
        for piece in fit.pieces:
            yield {
                **of_fit,
                "name": piece.level,
                "up_to_bytes": piece.up_to_bytes,
                "alpha_s": piece.alpha_s,
                "alpha_s_low": piece.alpha_low_s,
                "alpha_s_high": piece.alpha_high_s,
                "s_per_byte": piece.beta_s_per_byte,
                "s_per_byte_low": piece.beta_low_s_per_byte,
                "s_per_byte_high": piece.beta_high_s_per_byte,
            }
        if fit.pieces:
            yield {**of_fit, "name": "reduction", "s_per_byte": fit.gamma_s_per_byte}
        for line in fit.lines:
            costs: dict[str, Cell] = {"alpha_s": line.startup_s, "s_per_byte": line.per_byte_s}
            yield {**of_fit, "name": line.name, "ranks": line.ranks, **costs}


def _runs(report: CommReport) -> Iterator[Mapping[str, Cell]]:
    for run in report.runs:
        row: dict[str, Cell] = {name: getattr(run, name) for name in RUN_COLUMNS if name != "warnings"}
        yield {**row, "warnings": " | ".join(run.warnings)}


_TABLES = {
    "points": (POINT_COLUMNS, _points),
    "ratios": (RATIO_COLUMNS, _ratios),
    "fits": (FIT_COLUMNS, _fits),
    "runs": (RUN_COLUMNS, _runs),
}


# Markdown


def to_markdown(report: CommReport) -> str:
    """The report; headings from level 1."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: CommReport) -> Iterator[str]:
    yield from (f"# {escape(report.title)}", "")
    if report.as_of:
        yield f"Newest run finished {escape(report.as_of)}. Made by dlbench {escape(report.dlbench_version)}."
        yield ""
    if not report.groups:
        yield from ("No run has figures.", "")
    for group in report.groups:
        yield from _group(group)
    for fit in report.fits:
        yield from _fit(fit)
    yield from _list("Not fitted", report.unfitted)
    if report.runs:
        yield from _section("## Runs", comm_tabular.runs(report))
    if report.without_figures:
        yield from _section("## Runs without figures", comm_tabular.without_figures(report))
    yield from _list("Damaged files", report.damaged)
    yield from _section("## Environment", [("Key", "Value"), *report.environment])
    yield from _list("How the numbers are made", [f"{name}. {text}" for name, text in report.methods])


def _group(group: CommGroup) -> Iterator[str]:
    yield from (f"## {escape(group.label)}", "", escape(group.verdict), "")
    yield escape("; ".join(f"{one.title}: {one.value}" for one in group.conditions)) + "."
    yield ""
    for doubt in group.doubts:
        mark = "**Doubt:** " if doubt.severity == "serious" else "Note: "
        where = f" ({runs_text(len(doubt.runs))})" if doubt.runs else ""
        yield f"- {mark}{escape(doubt.text + where)}"
    yield ""
    yield from _section("### Fastest by size", comm_tabular.best(group), group.caption)
    yield from _section("### Where the lead changes", comm_tabular.crossovers(group), group.caption)
    yield from _section("### Recommended", comm_tabular.recommended(group), comm_tabular.fusion_text(group))
    for library in comm_tabular.libraries(group):
        title = f"### Speed relative to {escape(library)}"
        yield from _section(title, comm_tabular.ratios(group, library), group.caption)
    for found in group.series:
        yield from _section(f"### {escape(found.title)}", comm_tabular.series(found), group.caption)
    yield from _section("### Points without figures", comm_tabular.rejected(group))
    yield from _list("Not measured", group.not_measured, level=3)


def _fit(fit: FitTable) -> Iterator[str]:
    yield from (f"## {escape(fit.label)}", "")
    if fit.pieces:
        yield from _section("### Costs of a message", comm_tabular.pieces(fit), comm_tabular.fit_caption(fit))
        yield from _section("### Errors of predictions", comm_tabular.errors(fit))
    yield from _section("### Each collective as a line", comm_tabular.lines(fit))


def _section(title: str, table: Table, caption: str = "") -> Iterator[str]:
    if len(table) > 1:
        header, *rows = table
        yield from (title, "", "| " + " | ".join(map(escape, header)) + " |", "|" + " --- |" * len(header))
        yield from ("| " + " | ".join(map(escape, row)) + " |" for row in rows)
        yield ""
        if caption:
            yield from (f"*{escape(caption)}*", "")


def _list(title: str, items: Iterable[str], level: int = 2) -> Iterator[str]:
    lines = [f"- {escape(item)}" for item in items]
    if lines:
        yield from ("#" * level + f" {title}", "", *lines, "")
