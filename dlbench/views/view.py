"""What the views of reports about training runs compute their numbers from (see `dlbench.report.views`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.doubts import Doubt
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Scan
from dlbench.report.document import BaseReport
from dlbench.report.table import Column
from dlbench.report.views import GroupView, HasViews, ReportView, Views
from dlbench.report.wording import place_text
from dlbench.specs.comm import NetworkModel

__all__ = ["MEANS", "GroupSource", "GroupView", "ReportSource", "ReportView", "Views", "place_columns", "place_of"]

MEANS = "Means over the runs of a point."  # Caption of a section whose figures are parts of a whole.


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
