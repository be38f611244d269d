"""What a view of the scaling report is: a subject shown for each group of runs, or once for the whole report.

A view computes numbers (dataclasses, no text), and its class below makes a `Section` of them. It is listed in
`dlbench.views.scaling_report`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_type_hints

from dlbench.analysis import scaling
from dlbench.analysis.doubts import Doubt
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Scan
from dlbench.report.document import BaseReport, Level, Missing, Section
from dlbench.report.formats.json import schema_of
from dlbench.report.table import Column
from dlbench.report.wording import place_text
from dlbench.specs.comm import NetworkModel
from dlbench.views.model import Group, HasViews, Report


@dataclass(frozen=True, kw_only=True)
class GroupSource(HasViews):
    """What a view computes its numbers of a group from."""

    group: scaling.Group
    table: RunTable
    doubts: tuple[Doubt, ...]
    views: Mapping[str, object]  # Numbers of the views before this one, by key.
    network: NetworkModel | None = None  # Fitted costs of the network, where they were given.

    @property
    def is_oversubscribed(self) -> bool:
        """Whether ranks shared cores, which makes figures of scaling meaningless."""
        return any(doubt.code == "oversubscribed" for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """What a view computes its numbers of the whole report from."""

    scan: Scan
    table: RunTable
    groups: Sequence[scaling.Group]  # All groups, those of control runs too.
    results: Sequence[scaling.Group]
    history: BaseReport | None  # What changed over months; None where the report is made without a history.


def place_of(row: Any) -> str:
    """Of a row with `ranks` and `nodes`, e.g. ``4 ranks on 2 nodes``."""
    return place_text(row.ranks, row.nodes)


def place_columns() -> tuple[Column[Any], ...]:
    """Of rows with `ranks` and `nodes`: two columns for programs, and one for people."""
    return (
        Column("ranks", "", lambda row: row.ranks),
        Column("nodes", "", lambda row: row.nodes),
        Column("", "At", place_of, is_brief=True),
    )


class View:
    """A subject of the report."""

    id: ClassVar[str]  # Stable: the anchor in the page, the start of the names of its tables.
    title: ClassVar[str]
    level: ClassVar[Level] = "evidence"
    key: ClassVar[str] = ""  # Field of a group, or of the report, in its JSON; empty: it has no numbers of its own.

    def shown(self, source: Any, found: Any) -> Section | None:
        """What people read of its numbers, of a group or a report; None: nothing. Id and title are the view's own."""
        raise NotImplementedError

    def _of_numbers(self, source: HasViews) -> Section | None:
        found = source.views.get(self.key)
        section = self.shown(source, found) if found else None
        return section and replace(section, id=section.id or self.id, title=section.title or self.title)


class GroupView(View):
    """A subject that is shown for each group."""

    def numbers(self, source: GroupSource) -> object:
        """What it has found out, dataclasses; None (or empty) where these runs give nothing."""
        return None

    def section(self, group: Group) -> Section | None:
        """What people read of a group; None where there is nothing. Its id becomes unique by the group's."""
        return self._of_numbers(group)

    def remedy(self, group: Group) -> str:
        """What would produce the data of a group without a section, in a sentence; empty: not worth a line."""
        return ""


class ReportView(View):
    """A subject that is shown once, about all groups."""

    def numbers(self, source: ReportSource) -> object:
        """What it has found out, dataclasses."""
        return None

    def sections(self, report: Report) -> tuple[Section, ...]:
        """What people read; empty where there is nothing."""
        return () if (section := self._of_numbers(report)) is None else (section,)

    def remedy(self, report: Report) -> str:
        """What would produce the data of a report without a section, in a sentence; empty: not worth a line."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Views:
    """What a document about runs is made of, in the order of the page."""

    opening: tuple[ReportView, ...] = ()
    group: tuple[GroupView, ...]
    closing: tuple[ReportView, ...] = ()

    @property
    def report(self) -> tuple[ReportView, ...]:
        """Of the whole report."""
        return (*self.opening, *self.closing)

    def missing_of_group(self, group: Group) -> tuple[Missing, ...]:
        """Views without a section for a group, with what would produce it."""
        return tuple(
            Missing(view=view.id, title=view.title, text=text)
            for view in self.group
            if view.section(group) is None and (text := view.remedy(group))
        )

    def missing_of_report(self, report: Report) -> tuple[Missing, ...]:
        """The same of the whole report."""
        return tuple(
            Missing(view=view.id, title=view.title, text=text)
            for view in self.report
            if not view.sections(report) and (text := view.remedy(report))
        )

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a report made of these views; each says by the type of `numbers` what it adds."""
        inline: dict[type, dict[str, Any]] = {
            owner: {view.key: get_type_hints(type(view).numbers)["return"] for view in views if view.key}
            for owner, views in ((Group, self.group), (Report, self.report))
        }
        return schema_of(Report, inline)
