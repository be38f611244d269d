"""A report of any kind, for every format; text from outside is cleaned when it enters a section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import dlbench
from dlbench import bundled
from dlbench.report.charts import Chart
from dlbench.report.table import Cell, Column, Datum, NamedTable, Sheet, column
from dlbench.report.wording import cleaned, runs_text
from dlbench.specs.files import read_yaml
from dlbench.stats.estimates import MIN_RUNS

Level = Literal["answer", "evidence", "appendix"]  # Read at once; if the headline is of interest; looked up.


MAX_LISTED = 500  # Runs listed in a page, so that it stays small.
FEW_CARDS = 6  # Cards with facts below a wide picture at most; more become lines of a list next to a narrow one.


def _clean(instance: object, *names: str) -> None:
    for name in names:
        object.__setattr__(instance, name, cleaned(getattr(instance, name)))


class _Harmless:
    """A frozen dataclass that cleans all its texts."""

    def __post_init__(self) -> None:
        _clean(self, *vars(self))


@dataclass(frozen=True, kw_only=True)
class Mark(_Harmless):
    """A line that must be noticed."""

    severity: Literal["serious", "note", "good"]
    text: str
    label: str = ""  # E.g. ``Warning``; empty: the mark stands for itself.


def remark(severity: Literal["serious", "note"], text: str, num_runs: int = 0) -> Mark:
    """Returns a warning or note; with the number of runs that it concerns, if these are not all."""
    if num_runs:
        text += f" ({runs_text(num_runs)})"
    labels = {"serious": "Warning", "note": "Note"}
    return Mark(severity=severity, label=labels[severity], text=text)


@dataclass(frozen=True, kw_only=True)
class Missing(_Harmless):
    """A subject that a report lacks because data is missing, and what would produce these data."""

    view: str
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Rating(_Harmless):
    """A judgement of a number against a reference."""

    tone: Literal["good", "low", "unknown"]
    text: str  # A few words: the judgement first, then the reference; without one, how to get it.


@dataclass(frozen=True, kw_only=True)
class Card(_Harmless):
    """One finding at a glance."""

    id: str = ""
    title: str
    link: str = ""  # Anchor of its subject; empty: none.
    big: str  # The number.
    small: tuple[str, ...]  # Says what the number is, a few words per line.
    words: tuple[str, ...] = ()
    rating: Rating | None = None
    facts: tuple[tuple[str, str], ...] = ()  # Names and values, a few words each: machine, throughput, loss.
    next_step: str = ""
    warnings: tuple[str, ...] = ()  # Serious ones; the card shows the first and counts the others.
    warnings_link: str = ""
    is_clear: bool = False  # Whether to say that no serious warning was found.
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A subject, or a group of them. Its contents are printed in the order of these fields."""

    id: str = ""  # Anchor in the page, unique in a document; empty: that of its view, as with the title.
    title: str = ""
    short_title: str = ""  # Title in a list of all sections; empty: the title.
    level: Level = "evidence"
    headline: str = ""  # The finding in at most 100 characters, all that a folded section shows.
    about: tuple[str, ...] = ()  # Small words of introduction.
    facts: tuple[tuple[str, str], ...] = ()  # Names and values: conditions of a group, definitions of the methods.
    are_methods: bool = False  # Whether the facts are definitions, one below the other.
    docs_page: str = ""  # Page of docs/ with these definitions.
    marks: tuple[Mark, ...] = ()
    caption: str = ""  # Conditions of all figures of the section.
    words: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    charts: Callable[[], Sequence[Chart]] = tuple  # Called only by formats that draw charts; none by default.
    charts_per_row: Literal[1, 2, 3] = 2
    sheets: tuple[Sheet[Any], ...] = ()
    notes: tuple[str, ...] = ()  # Small print behind the tables.
    log: tuple[str, ...] = ()  # Printed lines of a program, with their indentation.
    sections: tuple[Section, ...] = ()
    missing: tuple[Missing, ...] = ()
    missing_title: str = "Not measured by these runs"
    next_step: str = ""  # Of a group: what to do next, in a sentence; the terminal's summary ends with it.
    brief: tuple[str, ...] | None = None  # The terminal's summary; None: the words, if it prints a sheet of this.
    is_group: bool = False  # Whether it is a group of runs, of which a long page prints the first ones in full.
    overview: tuple[tuple[str, str], ...] = ()  # Of a group that is not printed in full: titles and cells of its line.
    where: Mapping[str, Datum] | None = None  # Columns for programs in front of its rows.
    in_contents: bool = True

    def __post_init__(self) -> None:
        _clean(self, "title", "short_title", "headline", "caption", "next_step", "about", "words", "notes", "log")
        _clean(self, "facts", "overview", "brief")
        for name in ("about", "words", "notes", "brief"):
            texts = getattr(self, name)
            if texts is not None:
                object.__setattr__(self, name, tuple(filter(None, texts)))


@dataclass(frozen=True, kw_only=True)
class BaseReport:
    """The fields that every report has, first in its JSON."""

    format: str
    version: int = 1
    title: str
    as_of: str  # When the newest run finished, UTC; empty if none did. Not the report's time: equal runs, equal report.
    dlbench_version: str = dlbench.__version__

    def document(self, *sections: Section, runs: Sequence[ListedRun] | None = None, **further_fields: Any) -> Document:
        """Returns the report ready for every format; with `runs`, the line under the title counts them."""
        if runs is not None:
            counts = runs_text(len(runs))
            num_excluded = len(without_figure(runs))
            if num_excluded:
                counts += f", {num_excluded} excluded"
            further_fields["meta"] = (f"{counts}.",)
        return Document(
            title=self.title,
            dlbench_version=self.dlbench_version,
            as_of=self.as_of,
            sections=sections,
            data=self,
            **further_fields,
        )


def definitions(subject: str, **values: object) -> tuple[tuple[str, str], ...]:
    """Returns title and text of each method of a kind of report; `values` are for the names in braces."""
    tables = read_yaml(bundled.folder("reports") / "methods.yaml")
    values |= {"min_runs": MIN_RUNS, "intervals": tables["intervals"].format(min_runs=MIN_RUNS)}
    return tuple((title, text.format(**values)) for title, text in tables[subject].items())


def methods_section(
    methods: Sequence[tuple[str, str]], title: str = "How the numbers are made", docs_page: str = "docs/measuring.md"
) -> tuple[Section, ...]:
    """Returns definitions, name and text, in a section; none if there are no definitions."""
    if not methods:
        return ()
    section = Section(id="methods", title=title, level="appendix", facts=tuple(methods), are_methods=True, brief=())
    return (replace(section, docs_page=docs_page),)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    dlbench_version: str = dlbench.__version__
    meta: tuple[str, ...] = ()  # Lines under the title: how many runs, of when.
    as_of: str = ""  # When the newest run finished, UTC; empty if none did. Equal runs, equal report.
    notices: tuple[str, ...] = ()  # Say what its figures must not be mistaken for.
    sections: tuple[Section, ...]
    data: object  # Dataclasses; what the JSON holds.
    always: tuple[NamedTable, ...] = ()  # Tables that every such report has for programs, if only a header.
    file_prefix: str = ""  # In front of the names of the files that a page offers.
    command: str = "dlbench report RUNS"  # Writes the document; a page names it for tables that are too large for it.
    one_group_at_a_time: bool = False  # Whether a page opens with what precedes the groups, and shows each by itself.

    def __post_init__(self) -> None:
        _clean(self, "as_of", "meta", "notices")

    def walk(self) -> Iterator[tuple[Section, Mapping[str, Datum]]]:
        yield from walk(self.sections, {})

    def units(self, name: str) -> dict[str, str]:
        """Returns the units of columns of estimates of a table for programs: all that its rows have, joined by or."""
        units: dict[str, dict[str, None]] = {}
        for section, _ in self.walk():
            for sheet in section.sheets:
                if sheet.name == name:
                    for name_of_column, unit in sheet.units().items():
                        units.setdefault(name_of_column, {})[unit] = None
        return {name_of_column: " or ".join(names) for name_of_column, names in units.items()}

    def tables(self) -> dict[str, NamedTable]:
        """Returns every table for programs, by name: the rows of all sheets of that name, with sections' columns."""
        tables = {table.name: table for table in self.always}
        for section, where in self.walk():
            for sheet in section.sheets:
                if not sheet.names:
                    continue
                before = tables.get(sheet.name, NamedTable(name=sheet.name, title=sheet.title))
                columns = tuple(dict.fromkeys((*before.columns, *where, *sheet.names)))
                tables[sheet.name] = replace(before, columns=columns, parts=(*before.parts, (where, sheet)))
        return tables


def walk(sections: Sequence[Section], where: Mapping[str, Datum]) -> Iterator[tuple[Section, Mapping[str, Datum]]]:
    """Yields sections and those within them, each with `where` and the columns in front of its rows."""
    for section in sections:
        columns = {**where, **(section.where or {})}
        yield section, columns
        yield from walk(section.sections, columns)


def with_rows(*sheets: Sheet[Any]) -> tuple[Sheet[Any], ...]:
    """Returns the tables that have rows."""
    return tuple(sheet for sheet in sheets if sheet.rows)


def warnings_cell(texts: tuple[str, ...]) -> Cell:
    """Returns the number of warnings of a run, with the texts behind it."""
    return Cell(str(len(texts) or "none"), items=texts, number=len(texts))


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run as reports list it, with or without figures; a report adds its own fields."""

    run_id: str = field(metadata=column("Run"))
    group: str  # Id of its group; empty for runs without figures. Groups of control runs are in no other report.
    state: str = field(metadata=column("State"))
    failure_reason: str  # Why there is no figure; empty if there is one.
    ranks: int = field(metadata=column("Ranks"))
    nodes: int = field(metadata=column("Nodes"))
    repeat: int
    finished: str  # UTC, ISO 8601; empty if it did not end.
    warnings: tuple[str, ...] = field(metadata=column("Warnings", value=" | ".join, text=warnings_cell))


R = TypeVar("R", bound=ListedRun)


def without_figure(runs: Sequence[R]) -> tuple[R, ...]:
    """Returns the runs that yield no figure: those of no group."""
    return tuple(run for run in runs if not run.group)


def runs_sheet_of(columns: tuple[Column[R], ...], runs: Sequence[R], caption: str = "") -> Sheet[R]:
    """Returns the table of all runs, one line each."""
    return Sheet(
        name="runs",
        title="All runs",
        columns=columns,
        rows=runs,
        caption=caption,
        is_sortable=True,
        max_rows=MAX_LISTED,
    )


def without_figures(runs: Sequence[ListedRun], damaged: Sequence[str]) -> tuple[Section, ...]:
    """Returns runs that yield no figure, each with the reason, and damaged files; nothing if there is neither."""
    if not (runs or damaged):
        return ()
    title = "Excluded runs"
    headline = "damaged files"
    brief: list[str] = []
    if runs:
        headline = f"{runs_text(len(runs))} in no figure, each with the reason"
        brief.append(f"{runs_text(len(runs))} excluded:")
        brief += [f"- {run.run_id}: {run.state}: {run.failure_reason}" for run in runs]
    sheet = Sheet[ListedRun](
        name="without-figures",
        title=title,
        columns=(
            Column("", "Run", "run_id"),
            Column("", "State", "state"),
            Column("", "Ranks", "ranks"),
            Column("", "Why", "failure_reason"),
        ),
        rows=runs,
        is_sortable=True,
        max_rows=MAX_LISTED,
    )
    section = Section(
        id="without-figures",
        title=title,
        headline=headline,
        level="appendix",
        marks=tuple(Mark(severity="serious", label="Damaged", text=line) for line in damaged),
        sheets=(sheet,),
        brief=tuple(brief),
    )
    return (section,)
