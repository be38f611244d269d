"""The page that ends a check, and the same as JSON: failures with their logs, figures, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.figures import Figure
from dlbench.report.document import BaseReport, Card, Document, Mark, Section
from dlbench.report.table import Column, Sheet, column, columns_of, drop_empty_columns
from tests.gpu.figures import Message, Rate, RunLine

MAX_NAMED = 12
"""Failures that are named at the top; each has its section."""
MAX_ROWS = 300

PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step or a test ended."""

    name: str = field(metadata=column("What", is_brief=True))
    outcome: str = field(metadata=column("Outcome", is_brief=True))
    """passed, failed or not measured."""
    seconds: float | None = field(default=None, metadata=column("Took", unit="s"))
    why: str = field(default="", metadata=column("Why", is_brief=True, limit=300))
    """Where it did not pass: one line."""
    log: tuple[str, ...] = ()
    """The last lines of what it printed, where it did not pass or is worth reading."""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """What torch said in tests, once, with the tests that it said it in."""

    text: str = field(metadata=column("Warning", limit=600))
    tests: tuple[str, ...] = field(metadata=column("Tests", "tests", value=len))


@dataclass(frozen=True, kw_only=True)
class GpuCheck(BaseReport):
    """Everything that a check found."""

    format: str = "dlbench.gpu-check"
    title: str = "dlbench GPU check"
    as_of: str = ""
    created: str
    """When it was written, UTC."""
    machine: str
    """The GPUs, in words."""
    not_measured: str
    """Why nothing was measured; empty where a GPU was."""
    about_s: float
    """Seconds that its steps take by arithmetic."""
    steps: tuple[Outcome, ...]
    tests: tuple[Outcome, ...] = ()
    warnings: tuple[Warned, ...] = ()
    rates: tuple[Rate, ...] = ()
    messages: tuple[Message, ...] = ()
    axes: tuple[Figure, ...] = ()
    runs: tuple[RunLine, ...] = ()
    environment: Mapping[str, str]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(one for one in (*self.steps, *self.tests) if one.outcome == FAILED)


def document_of(found: GpuCheck) -> Document:
    """The page, in the order in which it is read."""
    sections = (
        _result(found),
        *_figures(found),
        *_failures(found),
        *_not_measured(found),
        *_warnings(found),
        *_lists(found),
        *_printed(found),
        Section(
            id="environment", title="Environment", level="appendix", facts=tuple(found.environment.items()),
            headline=found.machine,
        ),
    )  # fmt: skip
    return found.document(*sections, meta=(f"{found.machine}. Written {found.created}.",), file_prefix="gpu-check-")


def _result(found: GpuCheck) -> Section:
    if found.not_measured:
        marks = (Mark(severity="serious", label="Nothing was measured", text=found.not_measured),)
        return Section(id="result", title="Result", level="answer", marks=marks, words=(_next(found),))
    failed = found.failed
    named = [Mark(severity="serious", label="Failed", text=_line(one)) for one in failed[:MAX_NAMED]]
    if more := len(failed) - MAX_NAMED:
        named += [Mark(severity="serious", label="Failed", text=f"and {more} more")] if more > 0 else []
    cards = tuple(_card(title, all_of) for title, all_of in (("Steps", found.steps), ("Tests", found.tests)) if all_of)
    return Section(id="result", title="Result", level="answer", marks=tuple(named), cards=cards, words=(_next(found),))


def _next(found: GpuCheck) -> str:
    if found.not_measured:
        return "What doctor says of this machine stands below, and of every step that it was not run."
    if found.failed:
        return "Every failure has its log below. Please send this page back: it needs nothing else to be read."
    return "Please send this page back: it needs nothing else to be read."


def _line(one: Outcome) -> str:
    return f"{one.name}: {one.why}" if one.why else one.name


def _card(title: str, outcomes: Sequence[Outcome]) -> Card:
    counts = Counter(one.outcome for one in outcomes)
    took = sum(one.seconds or 0.0 for one in outcomes)
    return Card(
        title=title,
        big=f"{counts[PASSED]} of {len(outcomes)}",
        small=("passed",),
        words=(f"{counts[FAILED]} failed, {counts[NOT_MEASURED]} not measured, {took / 60:.0f} minutes.",),
        is_bad=bool(counts[FAILED]),
    )


def _figures(found: GpuCheck) -> Iterator[Section]:
    if found.rates:
        beside = [one.ratio.value for one in found.rates if one.ratio]
        headline = f"{min(beside):.2f} to {max(beside):.2f} of published rates" if beside else "none is published"
        sheet = Sheet(
            name="rates",
            title="Throughput",
            columns=drop_empty_columns(columns_of(Rate), found.rates),
            rows=found.rates,
            caption="Published: another library in another year. A ratio far below 1 asks for a reason.",
        )
        yield Section(id="rates", title="Figures", level="answer", headline=headline, sheets=(sheet,))
    if found.messages:
        sheet_of_messages = Sheet(
            name="messages", title="NCCL's all-reduce", rows=found.messages,
            columns=drop_empty_columns(columns_of(Message), found.messages),
        )  # fmt: skip
        yield Section(id="messages", title="Collectives", level="answer", sheets=(sheet_of_messages,))
    if found.axes:
        known = sum(one.value is not None for one in found.axes)
        yield Section(
            id="axes", title="Axes of precision and speed", sheets=(_axes(found.axes),),
            headline=f"{known} of {len(found.axes)} measured",
        )  # fmt: skip


def _axes(axes: Sequence[Figure]) -> Sheet[Figure]:
    def interval(one: Figure) -> str:
        return "" if one.low is None or one.high is None else f"[{one.low:.3g}, {one.high:.3g}]"

    columns: tuple[Column[Figure], ...] = (
        Column("name", "What", lambda one: one.name, is_brief=True),
        Column("value", "Value", lambda one: one.value, lambda one: one.value and f"{one.value:.3g}", is_brief=True),
        Column("", "Interval", interval),
        Column("low", "", lambda one: one.low),
        Column("high", "", lambda one: one.high),
        Column("unit", "Unit", lambda one: one.unit),
        Column("runs", "Runs", lambda one: one.n if one.value is not None else None),
        Column("goal", "Goal", lambda one: one.goal),
        Column("reason", "Note", lambda one: one.reason),
    )
    return Sheet(name="axes", title="Axes", columns=drop_empty_columns(columns, axes), rows=axes)


def _failures(found: GpuCheck) -> Iterator[Section]:
    for number, one in enumerate(found.failed, 1):
        yield Section(
            id=f"failure-{number}", title=f"Failed: {one.name}", headline=one.why, short_title=one.name,
            log=_log(one), in_contents=number <= MAX_NAMED,
        )  # fmt: skip


def _log(one: Outcome) -> tuple[str, ...]:
    return tuple(line.expandtabs() for line in one.log) or ("nothing was printed",)


def _not_measured(found: GpuCheck) -> Iterator[Section]:
    """By reason, as many have one."""
    reasons: dict[str, list[str]] = {}
    for one in (*found.steps, *found.tests):
        if one.outcome == NOT_MEASURED:
            reasons.setdefault(one.why or "no reason is known", []).append(one.name)
    if not reasons:
        return
    rows = list(reasons.items())
    columns: tuple[Column[tuple[str, list[str]]], ...] = (
        Column("why", "Why", lambda row: row[0], limit=400, is_brief=True),
        Column("what", "What", lambda row: ", ".join(row[1])),
    )
    sheet = Sheet(name="not-measured", title="Not measured", columns=columns, rows=rows)
    count = sum(map(len, reasons.values()))
    headline = f"{count} steps and tests, {len(reasons)} reason{'s' * (len(reasons) > 1)}"
    yield Section(id="not-measured", title="Not measured", headline=headline, sheets=(sheet,))


def _warnings(found: GpuCheck) -> Iterator[Section]:
    if found.warnings:
        sheet = Sheet(name="warnings", title="Warnings", columns=columns_of(Warned), rows=found.warnings)
        headline = f"{len(found.warnings)} of torch and others, in tests; none of them is a failure"
        yield Section(id="warnings", title="Warnings in tests", headline=headline, sheets=(sheet,))


def _lists(found: GpuCheck) -> Iterator[Section]:
    for name, title, rows in (("steps", "All steps", found.steps), ("tests", "All tests", found.tests)):
        if rows:
            sheet = Sheet(
                name=name, title=title, columns=columns_of(Outcome), rows=rows, is_sortable=True, max_rows=MAX_ROWS
            )
            about = f"about {found.about_s / 60:.0f} minutes by arithmetic" if name == "steps" else ""
            yield Section(id=name, title=title, level="appendix", headline=about, sheets=(sheet,))
    if found.runs:
        doubtful = sum(bool(one.warnings) for one in found.runs)
        runs = Sheet(
            name="runs", title="Runs", columns=drop_empty_columns(columns_of(RunLine), found.runs), rows=found.runs,
            is_sortable=True, max_rows=MAX_ROWS,
        )  # fmt: skip
        headline = f"{len(found.runs)} runs, {doubtful} with warnings of dlbench's own"
        yield Section(id="runs", title="Runs", level="appendix", headline=headline, sheets=(runs,))


def _printed(found: GpuCheck) -> Iterator[Section]:
    """Of steps that passed, or could not be run, and printed what is worth reading."""
    for number, one in enumerate((one for one in found.steps if one.log and one.outcome != FAILED), 1):
        title = f"Printed by: {one.name}"
        yield Section(id=f"printed-{number}", title=title, level="appendix", log=_log(one), in_contents=False)
