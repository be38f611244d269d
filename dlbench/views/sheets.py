"""The tables of all views by name, and what the views do not tell: gathered once, for every format alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlbench.report.model import Group, Report, Untold
from dlbench.report.view import Sheet, View
from dlbench.stats.figure import Cell
from dlbench.views.registry import VIEWS

_OF_GROUP = ("group", "label")


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table for programs over the whole report: the sheets of one name of all groups below each other."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]


Told = tuple[View, tuple[str, ...], list[Sheet]]
"""A view, its words, its tables."""


def told_of(group: Group) -> Iterator[Told]:
    """Views that have words or tables about a group, in order."""
    for view in VIEWS:
        if view.place == "group" and view.is_for(group):
            told = (view, view.words(group), view.sheets(group))
            if told[1] or told[2]:
                yield told


def told_of_all(report: Report) -> Iterator[Told]:
    """Views that have words or tables about the whole report, in order."""
    for view in VIEWS:
        if view.place != "group" and view.is_shown(report):
            told = (view, view.report_words(report), view.report_sheets(report))
            if told[1] or told[2]:
                yield told


def named_tables(report: Report) -> dict[str, NamedTable]:
    """Every table for programs that a view of this report has, by name.

    Sheets of one name in several groups are rows of one table, each with the id and the label of its group. Columns
    that only some of them have are empty for the others.
    """
    found: dict[str, NamedTable] = {}
    for _, _, sheets in told_of_all(report):
        for sheet in sheets:
            _add(found, sheet, {})
    for group in report.groups:
        for _, _, sheets in told_of(group):
            for sheet in sheets:
                _add(found, sheet, dict(zip(_OF_GROUP, (group.id, group.label), strict=True)))
    return found


def _add(found: dict[str, NamedTable], sheet: Sheet, whose: Mapping[str, Cell]) -> None:
    if not sheet.columns:
        return
    before = found.get(sheet.name)
    columns = _joined(before.columns if before else (*whose,), sheet.columns)
    rows = tuple({**whose, **row} for row in sheet.rows)
    found[sheet.name] = NamedTable(
        name=sheet.name,
        title=before.title if before else sheet.title,
        columns=columns,
        rows=(*(before.rows if before else ()), *rows),
    )


def _joined(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def untold(group: Group) -> tuple[Untold, ...]:
    """What no view tells of a group, with what would produce it."""
    return tuple(
        Untold(view=view.id, title=view.title, text=text)
        for view in VIEWS
        if view.place == "group" and not view.is_for(group) and (text := view.remedy(group))
    )


def report_untold(report: Report) -> tuple[Untold, ...]:
    """The same of the whole report."""
    return tuple(
        Untold(view=view.id, title=view.title, text=text)
        for view in VIEWS
        if view.place != "group" and not view.is_shown(report) and (text := view.report_remedy(report))
    )
