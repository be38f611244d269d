"""What `dlbench run` ends with: a line per setting and rank count, the largest cause, warnings, and what to do next.

The figures are those of the scaling report, made by the same `assemble` of fewer views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from dlbench.analysis.doubts import Doubt, merged
from dlbench.analysis.scaling import Point
from dlbench.records.scan import Scan
from dlbench.report.document import Document, Mark, Section, remark
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, place_text, reached_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.view import CausesView
from dlbench.views.model import Report, ReportGroup
from dlbench.views.quality.numbers import GroupQuality, QualityPoint
from dlbench.views.quality.view import QualityView
from dlbench.views.scaling import loss_text
from dlbench.views.scaling_report import assemble
from dlbench.views.sweep.numbers import Sweep
from dlbench.views.sweep.view import SweepView, goal_lines
from dlbench.views.view import Views

VIEWS = Views(opening=(SweepView(),), group=(QualityView(), CausesView()))  # What the verdicts speak of.

MAX_NAMED = 6  # Settings of a sweep whose losses are said in words; one of more has the table alone.
MAX_WARNINGS = 5


class ResultRow(NamedTuple):
    """One setting at one rank count."""

    setting: str  # The values by which it differs from other settings of the series; empty where there is one setting.
    point: Point
    quality: QualityPoint | None  # None for runs of speed.


def result_of(scan: Scan) -> tuple[Report, Document]:
    """The result of a series as plain data, and ready to be printed."""
    report = assemble(scan, views=VIEWS, with_digests=False, samples="none")
    first = {run.run_id: number for number, run in reversed([*enumerate(report.runs)])}
    # In the order in which they ran first.
    groups = sorted(report.groups, key=lambda group: min(first[name] for name in group.baseline.run_ids))
    settings = _settings(groups)
    rows = []
    for group, setting in zip(groups, settings, strict=True):
        quality = group.of(GroupQuality)
        trained = {(one.ranks, one.nodes): one for one in (quality.points if quality else ())}
        rows += [ResultRow(setting, point, trained.get((point.ranks, point.nodes))) for point in group.points]
    doubts = _doubts(groups, settings)
    marks = [remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in doubts if doubt.severity == "serious"]
    more = len(marks) - MAX_WARNINGS
    rest = [Mark(severity="note", text=f"{more} more serious warnings are in the report")] if more > 0 else []
    num_notes = len(doubts) - len(marks)
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((len(marks), "warning"), (num_notes, "note")) if n]
    counted = f"{' and '.join(counts)}{':' if marks else ': the report has them'}" if doubts else "No warnings."
    parts = [group.label.split(", ") for group in groups]
    result = Section(
        id="result",
        # What all groups have in common of their labels.
        title=", ".join(part for part in (parts[0] if parts else ()) if all(part in other for other in parts)),
        sheets=(_sheet(rows, groups[0].sample_unit),) if groups else (),
        brief=(
            *(line for sweep in report.all_of(Sweep) for cell in sweep.cells for line in goal_lines(cell)),
            *_words(groups, settings),
            counted,
        ),
        marks=(*marks[:MAX_WARNINGS], *rest),
    )
    document = Document(title="Result", notices=report.notices, sections=(result,) if groups else (), data=report)
    return report, document


def _settings(groups: Sequence[ReportGroup]) -> list[str]:
    """Of each group the settings that others have otherwise, and, where there are none, its label."""
    if len(groups) < 2:
        return [""] * len(groups)
    values = [dict(group.settings) for group in groups]
    keys = [key for key in {key: None for own in values for key in own} if len({own.get(key) for own in values}) > 1]
    found = [", ".join(f"{key}={own[key]}" for key in keys if key in own) for own in values]
    return found if len(set(found)) == len(found) and all(found) else [group.label for group in groups]


def _doubts(groups: Sequence[ReportGroup], settings: Sequence[str]) -> list[Doubt]:
    """Those of all groups once; of the others each kind once, in the words of the first setting that has it."""
    by_code: dict[str, list[tuple[str, Doubt]]] = {}
    for group, setting in zip(groups, settings, strict=True):
        for doubt in group.doubts:
            by_code.setdefault(doubt.code, []).append((setting, doubt))
    found: list[Doubt] = []
    for alike_ones in by_code.values():
        alike = merged(doubt for _, doubt in alike_ones)
        if all(sum(one.text == doubt.text for _, one in alike_ones) == len(groups) for doubt in alike):
            found += alike
            continue
        where = list(dict.fromkeys(setting for setting, _ in alike_ones))
        also = f"; {len(where) - 1} other settings likewise" if len(where) > 2 else f"; {where[-1]} likewise"
        first = alike_ones[0][1]
        runs = tuple(run for _, doubt in alike_ones for run in doubt.runs)
        found.append(dataclasses.replace(first, text=f"{where[0]}: {first.text}{also * (len(where) > 1)}", runs=runs))
    return sorted(found, key=lambda doubt: doubt.severity != "serious")


def _words(groups: Sequence[ReportGroup], settings: Sequence[str]) -> list[str]:
    """The verdict of a single setting; of several what each lost, and what all of them should do next."""
    if len(groups) == 1:
        lines = [groups[0].verdict]
    else:
        lines = [f"Intervals: {basis_text(groups[0].largest.throughput)}."]
        lost = [loss_text(group) for group in groups]
        if len(groups) <= MAX_NAMED:
            lines += [f"{setting}: {text}" for setting, text in zip(settings, lost, strict=True) if text]
    # Of several settings only what all of them should do; what differs behind a colon are figures.
    steps = {group.next_step.partition(": ")[0] for group in groups}
    return [*lines, *([f"Next: {groups[0].next_step}"] if len(steps) == 1 and groups[0].next_step else [])]


def _sheet(rows: Sequence[ResultRow], unit: str) -> Sheet[ResultRow]:

    def efficiency(row: ResultRow) -> Estimate | Cell:
        return Cell("baseline") if row.point.is_baseline else row.point.efficiency

    def reached(row: ResultRow) -> str | None:
        return reached_text(row.quality.num_reached, row.quality.num_runs) if row.quality else None

    columns: list[Column[ResultRow]] = []
    if any(row.setting for row in rows):
        keys = {row.setting.partition("=")[0] for row in rows if ", " not in row.setting}
        # The values of a single swept key stand below its name.
        is_short = len(keys) == 1 and all(", " not in row.setting and "=" in row.setting for row in rows)
        title = keys.pop() if is_short else "Setting"
        shown = (lambda row: row.setting.partition("=")[2]) if is_short else (lambda row: row.setting)
        columns.append(Column("", title, shown, is_brief=True))
    columns += [
        Column("", "At", lambda row: place_text(row.point.ranks, row.point.nodes), is_brief=True),
        Column("", f"Throughput, {unit}/s", lambda row: row.point.throughput, is_brief=True),
    ]
    if not all(row.point.is_baseline for row in rows):
        columns.append(Column("", "Scaling efficiency", lambda row: row.point.efficiency, efficiency, is_brief=True))
    if any(row.quality for row in rows):
        columns += [
            Column("", "Time to accuracy", lambda row: row.quality.time if row.quality else None, is_brief=True),
            Column("", "Reached", reached, is_brief=True),
        ]
    columns.append(Column("", "Runs", lambda row: row.point.throughput.n, is_brief=True))
    return Sheet(name="result", title="Result", columns=tuple(columns), rows=rows, in_terminal=True)
