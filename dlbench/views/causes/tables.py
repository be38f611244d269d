"""Tables of the account: seconds and lost points by part, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import Part
from dlbench.reading.causes import EXCHANGE_PHASE
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value, cell_of
from dlbench.report.wording import POINTS, basis_text, place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.diagnosis import NextExperiment, bound_text, experiment_gain
from dlbench.views.causes.numbers import CausePoint, CauseShare
from dlbench.views.causes.titles import CAUSE_TITLES, NOT_MEASURED, ROW_TITLES


@dataclass(frozen=True)
class _Row:
    """A part at one rank count, or the sum of all."""

    point: CausePoint
    part: Part
    title: str
    part_of: str = ""
    """The row that it is part of; empty for the terms of the sum."""
    is_lost: bool = False
    """Whether it is shown as lost points, for people only, and not in seconds."""
    kind: RowKind = ""

    @property
    def share(self) -> CauseShare | None:
        """The cause, where the row is one."""
        return self.part if isinstance(self.part, CauseShare) else None

    @property
    def is_measured(self) -> bool:
        """Whether all runs say something of it."""
        return self.share is None or self.share.is_measured


def account_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Seconds per step of each part at each rank count, and points lost to it at the largest."""
    last = points[-1] if points else None
    has_loss = last is not None and not last.is_baseline
    rows = [row for point in points for row in _rows(point)]
    shown = _titles_shown(rows)
    if last is not None and has_loss:
        rows += [_Row(last, row.part, row.title, row.part_of, True, row.kind) for row in _rows(last)]
    return Sheet(
        name="parts",
        title="Parts of the mean step",
        columns=_COLUMNS,
        rows=rows,
        pivot=Pivot(
            corner="Part", down=lambda row: row.title, across=_across, cell=lambda row: _cell(row, has_loss=has_loss)
        ),
        is_shown=lambda row: row.title in shown,
        is_data=lambda row: not row.is_lost,
        kind=lambda row: row.kind,
        caption="" if last is None else _caption(last, absent_titles(points)),
    )


def _rows(point: CausePoint) -> list[_Row]:
    return [*_parts(point), _Row(point, point.whole, "sum: mean step", kind="sum")]


def _parts(point: CausePoint) -> Iterator[_Row]:
    """Terms of the sum, each with what it consists of; what is on the wire and waiting stand below their phase."""
    for share in point.causes:
        if share.name == "exchange":
            yield _Row(point, point.exchange_phase, ROW_TITLES[EXCHANGE_PHASE])
        within = EXCHANGE_PHASE if share.name in ("exchange", "straggler") else ""
        yield _Row(point, share, ROW_TITLES[share.name], within, kind="part" if within else "")
        for part in share.parts:
            yield _Row(point, part, ROW_TITLES[part.name], share.name, kind="part")


def _titles_shown(rows: Sequence[_Row]) -> set[str]:
    """Lines that take time anywhere; of parts with a single such child not the child, which says the same again.

    Waiting for stragglers and the wire have names of their own in every sentence, and both stand in any case.
    """
    busy = [row for row in rows if row.part.seconds.value > 0]
    parents = {row.part_of for row in busy if row.part_of} - {EXCHANGE_PHASE}
    children = {name: {row.title for row in busy if row.part_of == name} for name in parents}
    lone = {title for titles in children.values() if len(titles) == 1 for title in titles}
    silent = {row.title for row in rows if not row.is_measured}
    return ({row.title for row in busy} | {row.title for row in rows if row.kind == "sum"}) - lone - silent


def absent_titles(points: Sequence[CausePoint]) -> list[str]:
    """Parts that take no time at any rank count, though they were measured; on CPUs nothing is launched."""
    return [
        CAUSE_TITLES[share.name]
        for place, share in enumerate(points[0].causes)
        if (share.name != "launch" or share.notes)
        and all(point.causes[place].is_measured and not point.causes[place].seconds.value for point in points)
    ]


def _caption(last: CausePoint, absent: Sequence[str]) -> str:
    figure = last.whole.seconds if last.is_baseline else last.whole.lost
    text = f"Per step, as ranks on time see it. Intervals: {basis_text(figure)}."
    return f"{text} No time: {', '.join(absent)}." if absent else text


def _place(point: CausePoint) -> str:
    return place_text(point.ranks, point.nodes)


def _across(row: _Row) -> str:
    return f"Lost at {_place(row.point)}" if row.is_lost else _place(row.point)


def _cell(row: _Row, *, has_loss: bool) -> Value | Cell:
    """Beside lost points seconds stand without their intervals, which programs get."""
    if row.is_lost:
        return lost_cell(row.part.lost)
    return Cell(value_text(row.part.seconds), number=row.part.seconds.value) if has_loss else row.part.seconds


def lost_cell(lost: Estimate) -> Cell:
    """A share of efficiency in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def _known(row: _Row, value: Value) -> Value:
    return value if row.is_measured else None


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("ranks", "", lambda row: row.point.ranks),
    Column("nodes", "", lambda row: row.point.nodes),
    Column("is_baseline", "", lambda row: row.point.is_baseline),
    Column("part", "", lambda row: row.part.name),
    Column("part_of", "", lambda row: row.part_of),
    Column("is_measured", "", lambda row: row.is_measured),
    Column("why_not_measured", "", lambda row: " | ".join(row.share.not_measured) if row.share else ""),
    Column("seconds", "", lambda row: _known(row, row.part.seconds), has_interval=True),
    Column("ideal_seconds", "", lambda row: _known(row, row.part.ideal_seconds)),
    Column("lost_fraction", "", lambda row: _known(row, row.part.lost), has_interval=True),
    Column("adjusted_p", "", lambda row: row.share.adjusted_p if row.share else None),
    Column("runs", "", lambda row: row.part.seconds.n),
    Column("seconds_interval", "", lambda row: row.part.seconds.kind),
    Column("lost_interval", "", lambda row: row.part.lost.kind),
    Column("remarks", "", lambda row: " | ".join(row.share.notes) if row.share else ""),
)


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Points lost to each part at each rank count, largest first at the last: the numbers of a chart."""
    last = points[-1]
    order = [share.name for share in sorted(last.causes, key=lambda share: -share.lost.value)]
    rows = [
        *(_Row(point, point.cause(name), CAUSE_TITLES[name]) for name in order for point in points),
        *(_Row(point, point.whole, "in all", kind="sum") for point in points),
    ]
    return Sheet(
        name="lost",
        title="Points lost",
        columns=(),
        rows=rows,
        pivot=Pivot(
            corner="Part",
            down=lambda row: row.title,
            across=lambda row: _place(row.point),
            cell=lambda row: lost_cell(row.part.lost) if row.is_measured else NOT_MEASURED,
        ),
        is_shown=lambda row: (
            row.kind == "sum" or not row.is_measured or bool(row.part.seconds.value or row.part.lost.value)
        ),
        kind=lambda row: row.kind,
    )


# Experiments

_Try = tuple[CausePoint, NextExperiment]


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[_Try]:
    """What to try next at each rank count; a forecast has a column of its own."""
    rows = [(point, one) for point in points for one in point.verdict.experiments]
    is_forecast = any(one.forecast_gain is not None or one.basis for _, one in rows)
    has_bound = any(point.verdict.bound is not None for point, _ in rows)
    columns: tuple[Column[_Try], ...] = (
        Column("", "At", lambda row: place_text(row[0].ranks, row[0].nodes)),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("is_baseline", "", lambda row: row[0].is_baseline),
        Column("finding", "Found", lambda row: row[0].verdict.name),
        Column("cause", "", lambda row: row[0].verdict.cause),
        Column("experiment", "To try", lambda row: row[1].text),
        Column(
            "forecast_throughput_gain_fraction",
            "Forecast (nothing measured)" if is_forecast else "",
            lambda row: row[1].forecast_gain,
            _forecast,
        ),
        Column("forecast_throughput_gain_fraction_low", "", lambda row: row[1].forecast_low),
        Column("forecast_throughput_gain_fraction_high", "", lambda row: row[1].forecast_high),
        Column(
            "forecast_basis",
            "Forecast from, or why there is none" if is_forecast else "",
            lambda row: row[1].basis,
            lambda row: row[1].basis or None,
        ),
        Column("limit_throughput_gain_fraction", "Upper bound" * has_bound, lambda row: row[0].verdict.bound, _bound),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=columns,
        rows=rows,
        caption=(
            "Suggestions. Upper bound (computed): throughput gained if all that this part loses were gone. Forecasts "
            "need fitted costs of the network: dlbench diagnose RUNS --network FILE."
        ),
    )


def _bound(row: _Try) -> Cell | None:
    bound = row[0].verdict.bound
    return None if bound is None else Cell(bound_text(bound), number=bound)


def _forecast(row: _Try) -> Cell | None:
    gain = row[1].forecast_gain
    return None if gain is None else Cell(f"forecast {experiment_gain(row[1])}", number=gain)
