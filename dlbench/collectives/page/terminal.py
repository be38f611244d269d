"""The report of the collective benchmark for the terminal. Fits 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dlbench.collectives.page import tabular as comm_tabular
from dlbench.collectives.page.model import CommGroup, CommReport, FitTable, SeriesTable
from dlbench.collectives.page.wording import (
    about,
    basis_text,
    count_text,
    rate_text,
    ratio_text,
    seconds_text,
    size_text,
    time_text,
)
from dlbench.report.formats.terminal import shorten
from dlbench.report.tabular import Table, aligned
from dlbench.report.wording import runs_text

WIDTH = 80


def to_text(report: CommReport, width: int = WIDTH) -> str:
    """The report as plain lines of at most `width` columns (a single longer word stays whole)."""
    lines = [report.title, ""]
    for group in report.groups:
        lines += [*_group(group, width), ""]
    for fit in report.fits:
        lines += [*_fit(fit, width), ""]
    for line in report.unfitted:
        lines += _item("- ", line, width)
    return "\n".join([*lines, *_endings(report, width)]).rstrip() + "\n"


def fit_text(fit: FitTable, width: int = WIDTH) -> str:
    """One fit as plain lines of at most `width` columns."""
    return "\n".join(_fit(fit, width)) + "\n"


def _group(group: CommGroup, width: int) -> Iterator[str]:
    yield from (*_wrapped(group.label, width), *_wrapped(group.verdict, width), "")
    for found in group.series:
        yield from (*_wrapped(found.title, width), *_series(found, width), "")
    yield from (*_wrapped(_intervals(group), width), "")
    fastest: Table = [("size", "fastest", "time", "lead", "clear")]
    fastest += [(*row[:3], *row[4:]) for row in comm_tabular.best(group)[1:]]
    yield from _titled("Fastest by size; lead: time of the next over it, clear: beyond scatter", fastest, width)
    yield from _titled("Recommended", comm_tabular.recommended(group), width)
    yield from _crossovers(group, width)
    fusion = comm_tabular.fusion_text(group)
    if fusion:
        yield from (*_wrapped(fusion, width), "")
    yield from _ratios(group, width)
    for row in group.rejected:
        yield from _item("! ", f"no figure: {row.title}, {size_text(row.num_bytes)}: {row.why}", width)
    for text in group.not_measured:
        yield from _item("- ", f"not measured: {text}", width)
    for doubt in group.doubts:
        where = f" ({runs_text(len(doubt.runs))})" if doubt.runs else ""
        yield from _item("! " if doubt.severity == "serious" else "- ", doubt.text + where, width)
    yield from _wrapped("; ".join(f"{one.title}: {one.value}" for one in group.conditions) + ".", width)


def _series(found: SeriesTable, width: int) -> list[str]:
    """The table of a series; what the width does not hold is left out: first algbw, then the intervals."""
    header = ("size", "time", "algbw", "busbw", "steps", "sent", "predicted", "p/m")
    rows: Table = [header]
    rows += [
        (
            size_text(row.num_bytes),
            time_text(row.time),
            rate_text(row.algbw.value),
            rate_text(None if row.busbw is None else row.busbw.value),
            count_text(row.steps),
            size_text(row.bytes_sent),
            seconds_text(row.predicted_s),
            ratio_text(row.predicted_over_measured),
        )
        for row in found.rows
    ]
    kept = [index for index in range(len(header)) if any(row[index] != "–" for row in rows[1:])]
    rows = [tuple(row[index] for index in kept) for row in rows]
    if _is_wide(rows, width):
        rows = [(*row[:2], *row[3:]) for row in rows]
    return aligned(_fitting(rows, width))


def _intervals(group: CommGroup) -> str:
    kinds = dict.fromkeys(basis_text(row.time) for found in group.series for row in found.rows)
    told = "Rates in GB/s (1e9 bytes); sent: most bytes of a rank, counted; p/m: predicted over measured"
    return f"Intervals: {', '.join(kinds)}. {told}, by a fit without the point."


def _crossovers(group: CommGroup, width: int) -> Iterator[str]:
    for row in group.crossovers:
        between = (
            "" if row.low is None or row.high is None else f" (between {size_text(row.low)} and {size_text(row.high)})"
        )
        doubt = " (within scatter)" if row.is_clear is False else ""
        told = f"{row.source}: from {about(row.num_bytes)}{between} {row.after} instead of {row.before}{doubt}"
        yield from _item("- ", told, width)
    if group.crossovers:
        yield ""


def _ratios(group: CommGroup, width: int) -> Iterator[str]:
    """Ring against the libraries, or the first algorithm where there is no ring; other formats hold all."""
    owns = list(dict.fromkeys(row.own for row in group.ratios))
    if owns:
        shown = next((own for own in owns if own.startswith("ring ")), owns[0])
        title = f"Speed of {shown} relative to"
        yield from _titled(title, comm_tabular.ratios_of(group, shown), width)


def _fit(fit: FitTable, width: int) -> Iterator[str]:
    yield from _wrapped(fit.label, width)
    if fit.pieces:
        yield from aligned(_fitting(comm_tabular.pieces(fit), width))
        yield from _wrapped(comm_tabular.fit_caption(fit), width)
    if fit.errors:
        yield from ("", *aligned(comm_tabular.errors(fit)))
    if len(fit.lines) > 1 or not fit.pieces:
        yield from ("", "Each collective as a line", *aligned(_fitting(comm_tabular.lines(fit), width)))


def _endings(report: CommReport, width: int) -> Iterator[str]:
    if not report.groups:
        yield "No run has figures."
    without = report.without_figures
    if without:
        yield f"{runs_text(len(without))} without figures:"
        for run in without:
            yield from _item("- ", f"{run.run_id}: {run.state}: {run.story}", width)
    for line in report.damaged:
        yield from _item("! ", f"damaged: {line}", width)


def _titled(title: str, rows: Table, width: int) -> Iterator[str]:
    if len(rows) > 1:
        yield from (*_wrapped(title, width), *aligned(_fitting(rows, width)), "")


def _fitting(rows: Table, width: int) -> Table:
    """The rows, without intervals where the width does not hold them, and shortened where that is not enough."""
    for change in (lambda cell: cell, _without_interval, lambda cell: shorten(_without_interval(cell), 24)):
        fitted = [tuple(map(change, row)) for row in rows]
        if not _is_wide(fitted, width):
            return fitted
    return [tuple(shorten(cell, max(4, width // len(row) - 2)) for cell in row) for row in fitted]


def _without_interval(cell: str) -> str:
    return cell.partition(" [")[0]


def _is_wide(rows: Table, width: int) -> bool:
    return max(map(len, aligned(rows))) > width


def _item(mark: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=mark, subsequent_indent="  ")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)
