"""What a view of the scaling report is: a subject shown for each group of runs, or once for the whole report.

A view is a folder with `numbers` (computes, no text), and a class below that makes a `Section` of them. It is listed in
`dlbench.views.registry`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dlbench.history.page.model import TrendsReport
from dlbench.reading import scaling
from dlbench.reading.doubts import Doubt
from dlbench.reading.run_table import RunTable
from dlbench.records.scan import Scan
from dlbench.report.document import Section
from dlbench.views.model import Group, Report

N = TypeVar("N")


@dataclass(frozen=True, kw_only=True)
class GroupSource:
    """What a view computes its numbers of a group from."""

    group: scaling.Group
    table: RunTable
    doubts: tuple[Doubt, ...]
    """What was found in the runs of the group."""
    views: Mapping[str, object]
    """Numbers of the views before this one, by key."""

    def of(self, kind: type[N]) -> N | None:
        """The numbers of an earlier view, by their type; None where it has nothing to say."""
        return next((found for found in self.views.values() if isinstance(found, kind)), None)

    @property
    def is_crowded(self) -> bool:
        """Whether ranks shared cores, which makes figures of scaling meaningless."""
        return any(doubt.code == "oversubscribed" for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """What a view computes its numbers of the whole report from."""

    scan: Scan
    table: RunTable
    groups: Sequence[scaling.Group]
    history: TrendsReport | None
    """What changed over months; None where the report is made without a history."""


class GroupView:
    """A subject that is shown for each group."""

    id: ClassVar[str]
    """Stable: the anchor in the page, the folder, the start of the names of its tables."""
    title: ClassVar[str]
    key: ClassVar[str] = ""
    """Field of a group in the JSON that holds its numbers; empty: it has none of its own."""

    def numbers(self, source: GroupSource) -> object:
        """What it has found out, dataclasses; None (or empty) where these runs give nothing."""
        return None

    def section(self, group: Group) -> Section | None:
        """What people read of a group; None where there is nothing. Its id becomes unique by the group's."""
        raise NotImplementedError

    def remedy(self, group: Group) -> str:
        """What would produce the data of a group without a section, in a sentence; empty: not worth a line."""
        return ""


class ReportView:
    """A subject that is shown once, about all groups."""

    id: ClassVar[str]
    title: ClassVar[str]
    key: ClassVar[str] = ""
    """Field of the report in the JSON that holds its numbers; empty: it has none of its own."""

    def numbers(self, source: ReportSource) -> object:
        """What it has found out, dataclasses."""
        return None

    def sections(self, report: Report) -> tuple[Section, ...]:
        """What people read; empty where there is nothing."""
        raise NotImplementedError

    def remedy(self, report: Report) -> str:
        """What would produce the data of a report without a section, in a sentence; empty: not worth a line."""
        return ""
