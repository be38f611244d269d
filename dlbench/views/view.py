"""Sources of the numbers of views about training runs (see `dlbench.report.views`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.environments import Doubt
from dlbench.analysis.table import RunTable
from dlbench.records.record import RankResult
from dlbench.records.scan import Run, Scan
from dlbench.report.document import BaseReport
from dlbench.report.table import Column
from dlbench.report.views import GroupView, HasViews, ReportView, Views
from dlbench.report.wording import place_text
from dlbench.specs.comm import NetworkModel

__all__ = ["MEANS", "GroupSource", "GroupView", "ReportSource", "ReportView", "Views", "place_columns", "place_of"]

MEANS = "Means over the runs of a point."  # Caption of a section whose figures are parts of a whole.


@dataclass(frozen=True, kw_only=True)
class GroupSource(HasViews):
    """The runs of a group, from which a view computes its numbers."""

    group: scaling.Group
    table: RunTable
    doubts: tuple[Doubt, ...]
    views: Mapping[str, object]  # Numbers of the views before this one, by key.
    network: NetworkModel | None = None  # Fitted costs of the network, if they were given.

    @property
    def is_oversubscribed(self) -> bool:
        """True if ranks shared cores, which makes figures of scaling meaningless."""
        return any(doubt.code == "oversubscribed" for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """The runs of a whole report, from which a view computes its numbers."""

    scan: Scan
    table: RunTable
    groups: Sequence[scaling.Group]  # All groups, also those of control runs.
    results: Sequence[scaling.Group]  # Groups that are not of control runs.
    history: BaseReport | None  # Changes over months; None if the report is made without a history.


def place_of(row: Any) -> str:
    """Returns ranks and nodes of a row that has both, e.g. ``4 ranks on 2 nodes``."""
    return place_text(row.ranks, row.nodes)


def ranks_of(run: Run) -> Sequence[RankResult]:
    """Returns the results of a run's ranks; empty without a record."""
    return () if run.record is None else run.record.ranks


def known_mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def optional_text(text: str) -> str | None:
    """Returns the text; None for an empty one, which tables show as a dash."""
    return text or None


def place_columns() -> tuple[Column[Any], ...]:
    """Returns columns of rows with `ranks` and `nodes`: two for programs, and one for people."""
    return (
        Column("ranks", "", "ranks"),
        Column("nodes", "", "nodes"),
        Column("", "At", place_of, is_brief=True),
    )
