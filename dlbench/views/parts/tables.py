"""Tables of the parts of a step: seconds, and points of the ideal lost, by rank count."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.reading.attribution import Part
from dlbench.reading.scaling import Point
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, cell_of
from dlbench.report.wording import PART_TITLES, POINTS, place_text
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Group


@dataclass(frozen=True)
class _Row:
    """A part of the step at one rank count."""

    point: Point
    title: str
    seconds: Estimate
    lost: Estimate | None
    part: Part | None
    """None for the share of the exchange that is waiting: no part of the step beside the others."""
    kind: RowKind = ""


def parts_sheet(group_points: tuple[Point, ...]) -> Sheet[_Row]:
    """Seconds per step of each part; for people a column for each rank count, and the sum as the last line."""
    columns: tuple[Column[_Row], ...] = (
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("part", "", lambda row: row.part.name if row.part else ""),
        Column("seconds", "", lambda row: row.seconds, has_interval=True),
        Column("ideal_seconds", "", lambda row: row.part.ideal_seconds if row.part else None),
        Column("lost_fraction", "", lambda row: row.lost, has_interval=True),
        Column("runs", "", lambda row: row.seconds.n),
        Column("interval", "", lambda row: row.seconds.kind),
    )
    return Sheet(
        name="parts",
        title="Parts of a step",
        columns=columns,
        rows=[row for point in group_points for row in _rows(point)],
        pivot=Pivot(corner="Part", down=lambda row: row.title, across=_place, cell=lambda row: row.seconds),
        is_data=lambda row: row.kind == "",
        kind=lambda row: row.kind,
        is_drawn=True,
    )


def lost_sheet(group: Group) -> Sheet[_Row]:
    """Points of the ideal lost to each part, against the baseline."""
    return Sheet(
        name="parts-lost",
        title="Points lost to each part",
        columns=(),
        rows=[row for point in group.points[1:] for row in _rows(point) if row.lost is not None],
        pivot=Pivot(corner="Part", down=lambda row: row.title, across=_place, cell=_points),
        kind=lambda row: row.kind,
        is_drawn=True,
    )


def lost_cell(lost: Estimate) -> Cell:
    """A share of the ideal in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def _points(row: _Row) -> Cell:
    assert row.lost is not None
    return lost_cell(row.lost)


def _place(row: _Row) -> str:
    return place_text(row.point.ranks, row.point.nodes)


def _rows(point: Point) -> list[_Row]:
    rows = []
    for part in point.parts:
        rows.append(_Row(point, PART_TITLES[part.name], part.seconds, part.lost, part))
        if part.name == "exchange":
            rows.append(_Row(point, "of it waiting for slower ranks", point.exchange_wait, None, None, "part"))
    return [*rows, _Row(point, "sum: mean step", point.whole.seconds, point.whole.lost, point.whole, "sum")]
