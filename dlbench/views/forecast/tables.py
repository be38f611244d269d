"""Tables of laws, published anchors and forecasts; measured and forecast figures never share a column."""

from __future__ import annotations

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, interval_text, number_text, points, value_text
from dlbench.views.forecast.laws import ForecastPoint, Law, LawPoint
from dlbench.views.forecast.numbers import Anchor, Forecast
from dlbench.views.model import Group
from dlbench.views.view import place_columns


def law_sheet(group: Group, law: Law) -> Sheet[LawPoint]:
    """The law against the measured points."""
    ideal = "below 0 the law is taken at f = 0, the ideal; " if law.fraction.value < 0 else ""
    has_fraction = any(point.serial_fraction for point in law.points)
    columns: tuple[Column[LawPoint], ...] = (
        Column("law", "", lambda point: law.name),
        Column("fraction", "", lambda point: law.fraction, has_interval=True),
        *place_columns(),
        Column("efficiency_measured", "Efficiency, measured", lambda point: point.measured, has_interval=True),
        Column("", "Interval", lambda point: basis_text(point.measured)),
        Column("efficiency_fitted", f"{law.name}'s law", lambda point: point.fitted, unit="fraction"),
        Column(
            "residual",
            "Residual",
            lambda point: point.residual,
            lambda point: Cell(points(point.residual), number=point.residual),
        ),
        Column(
            "serial_fraction",
            "Karp-Flatt fraction" if has_fraction else "",
            lambda point: point.serial_fraction,
            has_interval=True,
        ),
        Column("runs", "", lambda point: point.measured.n),
    )
    return Sheet(
        name="laws",
        title=f"{law.name}'s law against the measured points",
        columns=columns,
        rows=law.points,
        caption=f"f = {value_text(law.fraction)} {interval_text(law.fraction)}; {ideal}residual: measured less "
        f"fitted, points of the ideal. {group.caption}.",
    )


def forecast_sheet(group: Group, found: Forecast, law: Law) -> Sheet[ForecastPoint]:
    """What the law says of more ranks."""
    unit = f"{group.sample_unit}/s"
    columns: tuple[Column[ForecastPoint], ...] = (
        Column("law", "", lambda one: law.name),
        Column("ranks", "At", lambda one: one.ranks, _at),
        Column("forecast_efficiency", f"Efficiency by {law.name}'s law", lambda one: one.efficiency, efficiency_cell),
        Column("forecast_efficiency_low", "", lambda one: one.low),
        Column("forecast_efficiency_high", "", lambda one: one.high),
        Column(
            "forecast_throughput_per_s",
            f"Throughput by the law, {unit}",
            lambda one: one.throughput,
            lambda one: _between(one.throughput, one.throughput_low, one.throughput_high, unit),
        ),
        Column("forecast_throughput_per_s_low", "", lambda one: one.throughput_low),
        Column("forecast_throughput_per_s_high", "", lambda one: one.throughput_high),
    )
    notes = "".join(f"{note} " for note in found.notes)
    return Sheet(
        name="forecast",
        title="Forecast, not measured",
        columns=columns,
        rows=found.forecasts,
        caption="In brackets: the law at the ends of its fraction's interval, widened by what it missed of the "
        f"measured points, times how far it is extrapolated. {notes}Forecast from: {group.caption}.",
    )


def _at(one: ForecastPoint) -> str:
    return f"{one.ranks} ranks"


def efficiency_cell(one: ForecastPoint) -> Cell:
    """The forecast efficiency with its ends."""
    return _between(one.efficiency, one.low, one.high, "fraction")


def _between(value: float, low: float, high: float, unit: str) -> Cell:
    ends = [number_text(end, unit).removesuffix(" %") for end in (low, high)]
    return Cell(number_text(value, unit), f"[{', '.join(ends)}]", number=value)


ANCHOR_COLUMNS: tuple[Column[Anchor], ...] = (
    Column("title", "Published", lambda anchor: anchor.title),
    Column("published_efficiency", "Efficiency", lambda anchor: anchor.efficiency, unit="fraction"),
    Column("ranks", "At", lambda anchor: anchor.ranks, lambda anchor: f"{anchor.ranks:,} ranks"),
    Column("baseline", "Baseline", lambda anchor: anchor.baseline),
    Column("hardware", "Hardware", lambda anchor: anchor.hardware),
    Column("recipe", "How", lambda anchor: anchor.recipe),
    Column("source", "Source", lambda anchor: anchor.source, lambda anchor: f"{anchor.source}, {anchor.address}"),
    Column("address", "", lambda anchor: anchor.address),
)


def anchor_sheet(same_work: tuple[Anchor, ...]) -> Sheet[Anchor]:
    """Published figures of the same work."""
    return Sheet(
        name="anchors",
        title="Published figures of the same work",
        columns=ANCHOR_COLUMNS,
        rows=same_work,
        caption="Weak-scaling efficiency as published: same network, batch, precision class and kind of data, other "
        "hardware.",
    )
