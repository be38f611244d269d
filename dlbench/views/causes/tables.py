"""The account of the lost percent as tables: parts of the step, points lost to each, and what to try next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import EXCHANGE_PHASE
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value, cell_of, columns_of
from dlbench.report.wording import POINTS, basis_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED, ROW_TITLES, CauseShare, Experiment
from dlbench.views.causes.numbers import CausePoint, bound_text
from dlbench.views.view import place_of

Trial = tuple[CausePoint, Experiment]


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


def _known(row: AccountRow, value: Value) -> Value:
    return value if row.is_measured else None


_COLUMNS: tuple[Column[AccountRow], ...] = (
    *columns_of(AccountRow, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline"),
    *columns_of(AccountRow, "part=part.name", "part_of", "is_measured"),
    Column("why_not_measured", "", lambda row: " | ".join(row.share.not_measured) if row.share else ""),
    Column("seconds", "", lambda row: _known(row, row.part.seconds), has_interval=True),
    Column("ideal_seconds", "", lambda row: _known(row, row.part.ideal_seconds)),
    Column("lost_fraction", "", lambda row: _known(row, row.part.lost), has_interval=True),
    *columns_of(AccountRow, "adjusted_p=share.adjusted_p", "runs=part.seconds.n"),
    *columns_of(AccountRow, "seconds_interval=part.seconds.kind", "lost_interval=part.lost.kind"),
    Column("remarks", "", lambda row: " | ".join(row.share.notes) if row.share else ""),
)


def account_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Seconds per step of each part at each rank count, and points lost to it at the largest."""
    last = points[-1] if points else None
    has_loss = last is not None and not last.is_baseline
    rows = [row for point in points for row in _rows(point)]
    shown = _titles_shown(rows)
    if last is not None and has_loss:
        rows += [AccountRow(last, row.part, row.title, row.part_of, True, row.kind) for row in _rows(last)]

    def cell(row: AccountRow) -> Value | Cell:
        """Next to lost points seconds stand without their intervals, which programs get."""
        if row.is_lost:
            return lost_cell(row.part.lost)
        return Cell(value_text(row.part.seconds), number=row.part.seconds.value) if has_loss else row.part.seconds

    return Sheet(
        name="parts",
        title="Parts of the mean step",
        columns=_COLUMNS,
        rows=rows,
        pivot=Pivot(
            corner="Part",
            down=lambda row: row.title,
            across=lambda row: f"{'Lost at ' * row.is_lost}{place_of(row.point)}",
            cell=cell,
        ),
        is_shown=lambda row: row.title in shown,
        is_data=lambda row: not row.is_lost,
        kind=lambda row: row.kind,
        caption="" if last is None else _caption(last, points),
    )


def _rows(point: CausePoint) -> Iterator[AccountRow]:
    """Terms of the sum, each with what it consists of; what is on the wire and waiting stand below their phase."""
    for share in point.causes:
        if share.name == "exchange":
            yield AccountRow(point, point.exchange_phase, ROW_TITLES[EXCHANGE_PHASE])
        within = EXCHANGE_PHASE if share.name in ("exchange", "straggler") else ""
        yield AccountRow(point, share, ROW_TITLES[share.name], within, kind="part" if within else "")
        for part in share.parts:
            yield AccountRow(point, part, ROW_TITLES[part.name], share.name, kind="part")
    yield AccountRow(point, point.whole, "sum: mean step", kind="sum")


def _titles_shown(rows: Sequence[AccountRow]) -> set[str]:
    """Lines that take time anywhere; of parts with a single such child not the child, which says the same again.

    Waiting for stragglers and the wire have names of their own in every sentence, and both stand in any case.
    """
    busy = [row for row in rows if row.part.seconds.value > 0]
    parents = {row.part_of for row in busy if row.part_of} - {EXCHANGE_PHASE}
    children = {name: {row.title for row in busy if row.part_of == name} for name in parents}
    lone = {title for titles in children.values() if len(titles) == 1 for title in titles}
    silent = {row.title for row in rows if not row.is_measured}
    return ({row.title for row in busy} | {row.title for row in rows if row.kind == "sum"}) - lone - silent


def _caption(last: CausePoint, points: Sequence[CausePoint]) -> str:
    """With the parts that take no time at any rank count, though they were measured. On CPUs nothing is launched, and
    replicas gather nothing.
    """
    absent = [
        CAUSE_TITLES[share.name]
        for place, share in enumerate(points[0].causes)
        if (share.name not in ("launch", "gather") or share.notes)
        and all(point.causes[place].is_measured and not point.causes[place].seconds.value for point in points)
    ]
    figure = last.whole.seconds if last.is_baseline else last.whole.lost
    text = f"Per step, as ranks on time see it. Intervals: {basis_text(figure)}."
    return f"{text} No time: {', '.join(absent)}." if absent else text


def lost_cell(lost: Estimate) -> Cell:
    """A share of efficiency in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Points lost to each part at each rank count, largest first at the last: the numbers of a chart."""
    last = points[-1]
    order = [share.name for share in sorted(last.causes, key=lambda share: -share.lost.value)]
    rows = [
        *(AccountRow(point, point.cause(name), CAUSE_TITLES[name]) for name in order for point in points),
        *(AccountRow(point, point.whole, "in all", kind="sum") for point in points),
    ]
    return Sheet(
        name="lost",
        title="Points lost",
        columns=(),
        rows=rows,
        pivot=Pivot(
            corner="Part",
            down=lambda row: row.title,
            across=lambda row: place_of(row.point),
            cell=lambda row: lost_cell(row.part.lost) if row.is_measured else NOT_MEASURED,
        ),
        is_shown=lambda row: (
            row.kind == "sum" or not row.is_measured or bool(row.part.seconds.value or row.part.lost.value)
        ),
        kind=lambda row: row.kind,
    )


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[Trial]:
    """What to try next at each rank count."""
    rows = [(point, one) for point in points for one in point.verdict.experiments]
    has_bound = any(point.verdict.bound is not None for point, _ in rows)

    def bound(row: Trial) -> Cell | None:
        found = row[0].verdict.bound
        return None if found is None else Cell(bound_text(found), number=found)

    columns: tuple[Column[Trial], ...] = (
        Column("", "At", lambda row: place_of(row[0])),
        *columns_of(CausePoint, "ranks", "nodes", "is_baseline", of=lambda row: row[0]),
        Column("finding", "Found", lambda row: row[0].verdict.name),
        Column("cause", "", lambda row: row[0].verdict.cause),
        Column("experiment", "To try", lambda row: row[1].text),
        Column("limit_throughput_gain_fraction", "Upper bound" * has_bound, lambda row: row[0].verdict.bound, bound),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=columns,
        rows=rows,
        caption=(
            "Suggestions. Upper bound (computed): throughput gained if all that this part loses were gone. "
            "dlbench project runs RUNS --set sync.KEY=VALUE forecasts another exchange."
        ),
    )
