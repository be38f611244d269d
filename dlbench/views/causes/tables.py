"""Tables of the lost percent: lost points and seconds by cause, and what to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value
from dlbench.report.wording import basis_text, percent, place_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.diagnosis import NextExperiment, experiment_gain
from dlbench.views.causes.numbers import CausePoint, CauseShare
from dlbench.views.causes.words import CAUSE_TITLES, INPUT_TITLES, NOT_MEASURED
from dlbench.views.parts.tables import lost_cell


@dataclass(frozen=True)
class _Row:
    """A cause at one rank count, or the sum of all."""

    point: CausePoint
    share: CauseShare
    title: str
    kind: RowKind = ""
    is_efficiency: bool = False
    """Whether it is what the sum leaves of the ideal: for people only."""


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Points of the ideal lost to each cause; for programs seconds as well, and the baseline."""
    others = [point for point in points if not point.is_baseline]
    return Sheet(
        name="causes",
        title="Points of the ideal lost to each cause",
        columns=_COLUMNS,
        rows=[row for point in points for row in _rows(point, "sum: lost")],
        pivot=Pivot(corner="Cause", down=lambda row: row.title, across=_place, cell=_lost),
        is_shown=lambda row: not row.point.is_baseline,
        is_data=lambda row: not row.is_efficiency,
        kind=lambda row: row.kind,
        caption=f"Intervals: {bases((point, point.whole.lost) for point in others)}. "
        "Causes sum to the loss, 100 % - efficiency of means; one is found only after correction over all of them.",
        is_drawn=True,
    )


def seconds_sheet(points: Sequence[CausePoint], *, has_data: bool) -> Sheet[_Row]:
    """Seconds per step of each cause.

    Args:
        points: baseline first.
        has_data: whether programs get the rows from this sheet, because there is no `lost_sheet`.
    """
    return Sheet(
        name="causes" if has_data else "cause-seconds",
        title="Mean step by cause",
        columns=_COLUMNS if has_data else (),
        rows=[row for point in points for row in _rows(point, "sum: mean step")],
        pivot=Pivot(corner="Cause", down=lambda row: row.title, across=_place, cell=_seconds),
        is_shown=lambda row: not row.is_efficiency,
        is_data=lambda row: not row.is_efficiency,
        kind=lambda row: row.kind,
        caption=f"Intervals: {bases((point, point.whole.seconds) for point in points)}. "
        "The causes sum to the mean step.",
    )


def _rows(point: CausePoint, sum_title: str) -> list[_Row]:
    return [
        *(row for share in point.causes for row in _with_parts(point, share)),
        _Row(point, point.whole, sum_title, "sum"),
        _Row(point, point.whole, "efficiency (of means)", "sum", is_efficiency=True),
    ]


def _with_parts(point: CausePoint, share: CauseShare) -> Iterator[_Row]:
    """A cause, and what it consists of where that is known."""
    yield _Row(point, share, CAUSE_TITLES[share.name])
    for part in share.parts:
        made = CauseShare(
            name=f"{share.name}: {part.name}",
            seconds=part.seconds,
            ideal_seconds=part.ideal_seconds,
            lost=part.lost,
            p=part.p,
            is_measured=True,
            not_measured=(),
            notes=(),
        )
        yield _Row(point, made, INPUT_TITLES[part.name], "part")


def _place(row: _Row) -> str:
    return place_text(row.point.ranks, row.point.nodes)


def _seconds(row: _Row) -> Value | Cell:
    return row.share.seconds if row.share.is_measured else NOT_MEASURED


def _lost(row: _Row) -> Value | Cell:
    if row.is_efficiency:
        return percent(1 - row.share.lost.value)
    return lost_cell(row.share.lost) if row.share.is_measured else NOT_MEASURED


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("ranks", "", lambda row: row.point.ranks),
    Column("nodes", "", lambda row: row.point.nodes),
    Column("is_baseline", "", lambda row: row.point.is_baseline),
    Column("cause", "", lambda row: row.share.name),
    Column("is_part", "", lambda row: row.kind == "part"),
    Column("is_measured", "", lambda row: row.share.is_measured),
    Column("why_not_measured", "", lambda row: " | ".join(row.share.not_measured)),
    Column("seconds", "", lambda row: row.share.seconds if row.share.is_measured else None, has_interval=True),
    Column("ideal_seconds", "", lambda row: row.share.ideal_seconds if row.share.is_measured else None),
    Column("lost_fraction", "", lambda row: row.share.lost if row.share.is_measured else None, has_interval=True),
    Column("adjusted_p", "", lambda row: row.share.adjusted_p),
    Column("runs", "", lambda row: row.share.seconds.n),
    Column("seconds_interval", "", lambda row: row.share.seconds.kind),
    Column("lost_interval", "", lambda row: row.share.lost.kind),
    Column("remarks", "", lambda row: " | ".join(row.share.notes)),
)


def bases(estimates: Iterable[tuple[CausePoint, Estimate]]) -> str:
    """What the intervals of a table are, each kind once, with the places where they are not all alike."""
    places: dict[str, list[str]] = {}
    for point, estimate in estimates:
        places.setdefault(basis_text(estimate), []).append(place_text(point.ranks, point.nodes))
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{basis} ({', '.join(where)})" for basis, where in places.items())


# Experiments

_Try = tuple[CausePoint, NextExperiment]


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[_Try]:
    """What to try next at each rank count; a forecast has a column of its own."""
    rows = [(point, one) for point in points for one in point.verdict.experiments]
    is_forecast = any(one.forecast_gain is not None or one.basis for _, one in rows)
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
        Column("limit_throughput_gain_fraction", "", lambda row: row[0].verdict.bound),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=columns,
        rows=rows,
        caption=(
            "Nothing here is measured. A forecast needs fitted costs of the network: dlbench diagnose RUNS --network "
            "FILE; without them only the limit above is known, the gain if all of a cause's time were gone."
        ),
    )


def _forecast(row: _Try) -> Cell | None:
    gain = row[1].forecast_gain
    return None if gain is None else Cell(f"forecast {experiment_gain(row[1])}", number=gain)
