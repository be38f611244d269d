"""Tables of the account of lost efficiency: parts of the step, points lost to each, and what to try next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import EXCHANGE_PHASE
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value, cell_of, columns_of, drop_empty_columns
from dlbench.report.wording import POINTS, basis_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED, ROW_TITLES, CauseShare
from dlbench.views.causes.numbers import CausePoint, Diagnosis
from dlbench.views.view import place_of


@dataclass(frozen=True)
class Trial:
    """An experiment at a rank count."""

    point: CausePoint
    text: str


@dataclass(frozen=True)
class AccountRow:
    """A part at one rank count, or the sum of all."""

    point: CausePoint
    part: Part
    title: str
    part_of: str = ""  # The row that it is part of; empty for the terms of the sum.
    is_lost: bool = False  # Whether it is shown as lost points, for people only, and not in seconds.
    kind: RowKind = ""

    @property
    def share(self) -> CauseShare | None:
        return self.part if isinstance(self.part, CauseShare) else None

    @property
    def is_measured(self) -> bool:
        return self.share is None or self.share.is_measured

    @property
    def measured(self) -> Part | None:
        return self.part if self.is_measured else None

    @property
    def place(self) -> str:
        return place_of(self.point)

    @property
    def heading(self) -> str:
        return f"Lost at {self.place}" if self.is_lost else self.place

    @property
    def lost_text(self) -> Cell | str:
        return lost_cell(self.part.lost) if self.is_measured else NOT_MEASURED


_COLUMNS: tuple[Column[AccountRow], ...] = (
    *columns_of(AccountRow, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline"),
    *columns_of(AccountRow, "part=part.name", "part_of", "is_measured", "why_not_measured=share.reasons"),
    Column("seconds", "", "measured.seconds", has_interval=True),
    Column("ideal_seconds", "", "measured.ideal_seconds"),
    Column("lost_fraction", "", "measured.lost", has_interval=True),
    *columns_of(AccountRow, "adjusted_p=share.adjusted_p", "runs=part.seconds.n"),
    *columns_of(AccountRow, "seconds_interval=part.seconds.kind", "lost_interval=part.lost.kind"),
    *columns_of(AccountRow, "remarks=share.remarks"),
)


def account_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Returns seconds per step of each part at each rank count, and points lost to it at the largest."""
    rows = list(itertools.chain.from_iterable(map(_rows, points)))
    titles = _titles_shown(rows)
    has_loss = bool(points) and not points[-1].is_baseline
    if has_loss:
        rows += [dataclasses.replace(row, is_lost=True) for row in _rows(points[-1])]

    def cell(row: AccountRow) -> Value | Cell:
        if row.is_lost:
            return lost_cell(row.part.lost)
        if has_loss:
            # Seconds next to lost points have no intervals; programs get them.
            return Cell(value_text(row.part.seconds), number=row.part.seconds.value)
        return row.part.seconds

    return Sheet(
        name="parts",
        title="Parts of the mean step",
        columns=_COLUMNS,
        rows=rows,
        pivot=Pivot(corner="Part", down="title", across="heading", cell=cell),
        is_shown=lambda row: row.title in titles,
        is_data=lambda row: not row.is_lost,
        kind=attrgetter("kind"),
        caption=_caption(points) if points else "",
    )


def _rows(point: CausePoint) -> Iterator[AccountRow]:
    for share in point.causes:
        if share.name == "exchange":
            yield AccountRow(point, point.exchange_phase, ROW_TITLES[EXCHANGE_PHASE])
        row = AccountRow(point, share, ROW_TITLES[share.name])
        if share.name in ("exchange", "straggler"):
            row = dataclasses.replace(row, part_of=EXCHANGE_PHASE, kind="part")
        yield row
        for part in share.parts:
            yield AccountRow(point, part, ROW_TITLES[part.name], share.name, kind="part")
    yield AccountRow(point, point.whole, "sum: mean step", kind="sum")


def _titles_shown(rows: Sequence[AccountRow]) -> set[str]:
    """Returns the lines that take time anywhere, without those that are the only part of another line."""
    titles = set()
    children: dict[str, set[str]] = {}
    unmeasured = {row.title for row in rows if not row.is_measured}
    for row in rows:
        if row.part.seconds.value > 0 or row.kind == "sum":
            titles.add(row.title)
            if row.part_of and row.part_of != EXCHANGE_PHASE:
                children.setdefault(row.part_of, set()).add(row.title)
    for child_titles in children.values():
        if len(child_titles) == 1:
            titles -= child_titles
    return titles - unmeasured


def _caption(points: Sequence[CausePoint]) -> str:
    last = points[-1]
    absent = []  # Parts that take no time at any rank count, though they were measured.
    for index, share in enumerate(points[0].causes):
        # On CPUs nothing is launched, and replicas gather nothing and have no stages.
        is_possible = share.name not in ("launch", "gather", "bubble") or share.notes
        shares = [point.causes[index] for point in points]
        if is_possible and all(other.is_measured and not other.seconds.value for other in shares):
            absent.append(CAUSE_TITLES[share.name])
    figure = last.whole.seconds if last.is_baseline else last.whole.lost
    text = f"Per step, of the ranks that are on time. Intervals: {basis_text(figure)}."
    if absent:
        text += f" No time: {', '.join(absent)}."
    return text


def lost_cell(lost: Estimate) -> Cell:
    """Returns a share of efficiency in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Returns points lost to each part at each rank count, largest first at the last: the numbers of a chart."""
    rows = []
    for share in sorted(points[-1].causes, key=lambda share: -share.lost.value):
        rows += [AccountRow(point, point.cause(share.name), CAUSE_TITLES[share.name]) for point in points]
    rows += [AccountRow(point, point.whole, "in all", kind="sum") for point in points]

    def is_shown(row: AccountRow) -> bool:
        return row.kind == "sum" or not row.is_measured or bool(row.part.seconds.value or row.part.lost.value)

    return Sheet(
        name="lost",
        title="Points lost",
        columns=(),
        rows=rows,
        pivot=Pivot(corner="Part", down="title", across="place", cell="lost_text"),
        is_shown=is_shown,
        kind=attrgetter("kind"),
    )


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[Trial]:
    """Returns what to try next at each rank count."""
    rows = []
    for point in points:
        rows += [Trial(point, experiment.text) for experiment in point.verdict.experiments]
    columns: tuple[Column[Trial], ...] = (
        *columns_of(CausePoint, Column("", "At", place_of), "ranks", "nodes", "is_baseline", of="point"),
        Column("finding", "Found", "point.verdict.name"),
        Column("cause", "", "point.verdict.cause"),
        Column("experiment", "To try", "text"),
        *columns_of(Diagnosis, "bound", of="point.verdict"),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=drop_empty_columns(columns, rows, keep=("ranks", "nodes", "is_baseline", "finding")),
        rows=rows,
        caption="Suggestions. Upper bound (computed): throughput gained if this part lost nothing. "
        "dlbench project runs RUNS --set sync.KEY=VALUE forecasts another exchange.",
    )
