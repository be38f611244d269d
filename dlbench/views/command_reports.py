"""The reports of other commands, made of some views of the scaling report: the diagnosis of all runs under a folder, in
full, how many GPUs a training is worth, and the result that `dlbench run` prints.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from dlbench.analysis.environments import Doubt, merged
from dlbench.analysis.scaling import Point
from dlbench.records.scan import Scan
from dlbench.report.document import Document, Mark, Section, remark
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, place_text
from dlbench.stats.estimates import Estimate
from dlbench.units import counted
from dlbench.views.causes.view import CausesView
from dlbench.views.decomposition import DecompositionView
from dlbench.views.energy import DetailedEnergy, DetailedEnergyView
from dlbench.views.model import Report, ReportGroup, Views
from dlbench.views.quality.numbers import GroupQuality, QualityPoint
from dlbench.views.quality.view import QualityView
from dlbench.views.runs import WithoutFiguresView
from dlbench.views.scaling import loss_text
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stalls import StallsView
from dlbench.views.stragglers import SlowNodesView, StragglersView
from dlbench.views.sweep import SweepView
from dlbench.views.sweep.numbers import Sweep
from dlbench.views.sweep.view import goal_lines
from dlbench.views.telemetry import DetailedTelemetryView
from dlbench.views.time_to_train import TimeToTrainView, TrainingQuestion

DIAGNOSIS_FORMAT = "dlbench.diagnosis"
DIAGNOSIS_TITLE = "dlbench diagnosis"
ESTIMATE_FORMAT = "dlbench.estimate"
RESULT_VIEWS = Views(opening=(SweepView(),), group=(QualityView(), CausesView()))  # Views that the verdicts need.
MAX_NAMED = 6  # Settings up to which their losses are said in words; with more there is the table alone.
MAX_WARNINGS = 5


def diagnosis_views() -> Views:
    """Returns the views of a diagnosis."""
    return Views(
        group=(CausesView(), StragglersView(), DetailedTelemetryView(), DetailedEnergyView()),
        closing=(SlowNodesView(), DecompositionView(), StallsView(), WithoutFiguresView()),
    )


def diagnosis(scan: Scan) -> tuple[Report, Document]:
    """Returns the diagnosis as plain data, and ready for every format."""
    views = diagnosis_views()
    report = assemble(scan, views=views, with_digests=False, samples="all")
    damaged = list(report.damaged)
    for group in report.groups:
        energy = group.of(DetailedEnergy)
        if energy is not None:  # Samples of all runs are read here alone.
            damaged += energy.damaged
    report = dataclasses.replace(
        report,
        format=DIAGNOSIS_FORMAT,
        title=DIAGNOSIS_TITLE,
        methods=(),
        damaged=tuple(dict.fromkeys(damaged)),
        missing=views.missing_of_report(report),
    )
    document = document_of(report, views)
    # Notes and captions of several groups, in order: they are printed once.
    counts: Counter[str] = Counter()
    for section in document.sections:
        if section.is_group:
            counts.update(dict.fromkeys(_small_print(section), 1))
    repeated = tuple(text for text, count in counts.items() if count > 1)
    sections = [_without_repeated(section, repeated) for section in document.sections]
    if repeated:
        common = Section(
            id="all-groups", title="For all groups", level="appendix", notes=repeated, brief=(), in_contents=False
        )
        sections.append(common)
    meta = document.meta
    if not report.groups:
        meta = (*meta, "No run has figures.")
    return report, dataclasses.replace(document, meta=meta, sections=tuple(sections), command="dlbench diagnose RUNS")


def _small_print(group: Section) -> Iterator[str]:
    for section in group.sections:
        yield from section.notes
        yield from (sheet.caption for sheet in section.sheets if sheet.caption)


def _without_repeated(group: Section, repeated: Sequence[str]) -> Section:
    if not group.is_group:
        return group
    sections = []
    findings: list[str] = []
    for section in group.sections:
        sheets = []
        for sheet in section.sheets:
            caption = "" if sheet.caption in repeated else sheet.caption
            sheets.append(dataclasses.replace(sheet, caption=caption))
        notes = tuple(text for text in section.notes if text not in repeated)
        sections.append(dataclasses.replace(section, notes=notes, sheets=tuple(sheets)))
        if section.id.startswith(CausesView.id):
            findings += section.words
    # The findings end with the next step.
    next_step = "" if findings else group.next_step
    return dataclasses.replace(
        group, about=(), facts=(), brief=tuple(findings), next_step=next_step, sections=tuple(sections)
    )


def estimate_views(question: TrainingQuestion | None = None) -> Views:
    """Returns the views of an estimate."""
    return Views(group=(QualityView(), TimeToTrainView(question)))


def estimate(scan: Scan, question: TrainingQuestion) -> tuple[Report, Document]:
    """Returns how many GPUs (or ranks) the training of each group is worth, as data and as a document."""
    views = estimate_views(question)
    report = assemble(scan, views=views, with_digests=False, samples="none")
    report = dataclasses.replace(report, format=ESTIMATE_FORMAT, title="dlbench estimate", methods=(), missing=())
    sections = []
    for group in report.groups:
        section = views.group[-1].section(group)
        if section is not None:
            sections.append(_with_conditions(section, group))
    return report, report.document(*sections, notices=report.notices, command="dlbench estimate RUNS")


def _with_conditions(section: Section, group: ReportGroup) -> Section:
    return dataclasses.replace(
        section,
        id=f"{section.id}-{group.id}",
        title=f"{section.title} {group.label}",
        about=(f"{group.title}, {group.condition('preset')} preset: {group.about}", *section.about),
        sheets=tuple(dataclasses.replace(sheet, caption=group.caption) for sheet in section.sheets),
        marks=tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts),
    )


class ResultRow(NamedTuple):
    """A setting at a rank count."""

    setting: str  # The values by which it differs from other settings of the series; empty for a single setting.
    point: Point
    quality: QualityPoint | None  # None for runs that measure speed.

    @property
    def value(self) -> str:
        return self.setting.partition("=")[2]

    @property
    def place(self) -> str:
        return place_text(self.point.ranks, self.point.nodes)

    @property
    def efficiency(self) -> Estimate | Cell:
        return Cell("baseline") if self.point.is_baseline else self.point.efficiency


def result_of(scan: Scan) -> tuple[Report, Document]:
    """Returns the result of a series as plain data, and ready to be printed."""
    report = assemble(scan, views=RESULT_VIEWS, with_digests=False, samples="none")
    document = Document(title="Result", notices=report.notices, sections=(), data=report)
    if not report.groups:
        return report, document
    run_order = [run.run_id for run in report.runs]
    groups = sorted(report.groups, key=lambda group: min(map(run_order.index, group.baseline.run_ids)))
    settings = _settings(groups)
    rows: list[ResultRow] = []
    for group, setting in zip(groups, settings, strict=True):
        quality = group.of(GroupQuality)
        trained = {(point.ranks, point.nodes): point for point in quality.points} if quality else {}
        rows += [ResultRow(setting, point, trained.get((point.ranks, point.nodes))) for point in group.points]
    doubts = _doubts(groups, settings)
    marks = [remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in doubts if doubt.severity == "serious"]
    cells = chain.from_iterable(sweep.cells for sweep in report.all_of(Sweep))
    brief = [*chain.from_iterable(map(goal_lines, cells)), *_words(groups, settings)]
    brief.append(_counts(len(marks), len(doubts) - len(marks)))
    num_further = len(marks) - MAX_WARNINGS
    if num_further > 0:
        further = Mark(severity="note", text=f"{num_further} more serious warnings are in the report")
        marks = [*marks[:MAX_WARNINGS], further]
    labels = [group.label.split(", ") for group in groups]
    common = [part for part in labels[0] if part in set.intersection(*map(set, labels))]
    result = Section(
        id="result",
        title=", ".join(common),
        sheets=(_sheet(rows, groups[0].sample_unit),),
        brief=tuple(brief),
        marks=tuple(marks),
    )
    return report, dataclasses.replace(document, sections=(result,))


def _counts(num_warnings: int, num_notes: int) -> str:
    counts = [counted(count, noun) for count, noun in ((num_warnings, "warning"), (num_notes, "note")) if count]
    if not counts:
        return "No warnings."
    ending = "" if num_warnings else " the report has them"
    return f"{' and '.join(counts)}:{ending}"


def _settings(groups: Sequence[ReportGroup]) -> list[str]:
    """Returns for each group the settings that differ from others'; labels if these are missing or equal."""
    if len(groups) < 2:
        return [""] * len(groups)
    values = [dict(group.settings) for group in groups]
    common = set.intersection(*(set(group_values.items()) for group_values in values))
    keys = [key for key in dict.fromkeys(chain(*values)) if (key, values[0].get(key)) not in common]

    def setting(group_values: dict[str, str]) -> str:
        return ", ".join(f"{key}={group_values[key]}" for key in keys if key in group_values)

    settings = list(map(setting, values))
    if all(settings) and len(set(settings)) == len(settings):
        return settings
    return [group.label for group in groups]


def _doubts(groups: Sequence[ReportGroup], settings: Sequence[str]) -> list[Doubt]:
    """Returns the warnings of all groups once; of the others each kind once, in the words of its first setting."""
    by_code: dict[str, list[tuple[str, Doubt]]] = {}
    for group, setting in zip(groups, settings, strict=True):
        for doubt in group.doubts:
            by_code.setdefault(doubt.code, []).append((setting, doubt))
    doubts: list[Doubt] = []
    for entries in by_code.values():
        of_code = [doubt for _, doubt in entries]
        counts = Counter(doubt.text for doubt in of_code)
        if all(count == len(groups) for count in counts.values()):
            doubts += merged(of_code)
            continue
        first, *others = dict.fromkeys(setting for setting, _ in entries)
        text = f"{first}: {of_code[0].text}"
        if len(others) == 1:
            text += f"; {others[0]} likewise"
        elif others:
            text += f"; {len(others)} other settings likewise"
        runs = tuple(chain.from_iterable(doubt.runs for doubt in of_code))
        doubts.append(dataclasses.replace(of_code[0], text=text, runs=runs))
    return sorted(doubts, key=lambda doubt: doubt.severity != "serious")


def _words(groups: Sequence[ReportGroup], settings: Sequence[str]) -> list[str]:
    if len(groups) == 1:
        lines = [groups[0].verdict]
    else:
        lines = [f"Intervals: {basis_text(groups[0].largest.throughput)}."]
        losses = [loss_text(group) for group in groups]
        if len(groups) <= MAX_NAMED:
            lines += [f"{setting}: {text}" for setting, text in zip(settings, losses, strict=True) if text]
    # The text behind a colon has figures, which differ.
    steps = {group.next_step.partition(": ")[0] for group in groups}
    if len(steps) == 1 and groups[0].next_step:
        lines.append(f"Next: {groups[0].next_step}")
    return lines


def _sheet(rows: Sequence[ResultRow], unit: str) -> Sheet[ResultRow]:
    columns: list[Column[ResultRow]] = []
    if any(row.setting for row in rows):
        keys = {row.setting.partition("=")[0] for row in rows}
        title, source = "Setting", "setting"
        if len(keys) == 1 and all("=" in row.setting and ", " not in row.setting for row in rows):
            title, source = keys.pop(), "value"
        columns.append(Column("", title, source, is_brief=True))
    columns.append(Column("", "At", "place", is_brief=True))
    columns.append(Column("", f"Throughput, {unit}/s", "point.throughput", is_brief=True))
    if not all(row.point.is_baseline for row in rows):
        columns.append(Column("", "Scaling efficiency", "efficiency", is_brief=True))
    if any(row.quality for row in rows):
        columns.append(Column("", "Time to accuracy", "quality.time", is_brief=True))
        columns.append(Column("", "Reached", "quality.reached_text", is_brief=True))
    columns.append(Column("", "Runs", "point.throughput.n", is_brief=True))
    return Sheet(name="result", title="Result", columns=tuple(columns), rows=rows, in_terminal=True)
