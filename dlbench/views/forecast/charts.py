"""The chart of laws, forecasts and published anchors; a forecast is hollow, dotted, of its own colour, and named so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlbench.reading.scaling import Point
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import FORECAST, HEIGHT, MEASURED, MUTED, PUBLISHED, WIDE
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import basis_text, figure_text, percent, place_text
from dlbench.views.forecast.laws import ForecastPoint, Law, efficiency_at
from dlbench.views.forecast.numbers import Forecast
from dlbench.views.model import Group

CURVE = 33
"""Points of the law's line."""


@dataclass(frozen=True)
class _Drawn:
    """A measured point, or a forecast one."""

    point: Point | None
    coming: ForecastPoint | None = None

    @property
    def place(self) -> str:
        """Where it is."""
        if self.point is None:
            return f"{self.coming.ranks} ranks" if self.coming else ""
        return place_text(self.point.ranks, self.point.nodes)


COLUMNS: tuple[Column[_Drawn], ...] = (
    Column("", "At", lambda row: row.place),
    Column("", "Efficiency, measured", lambda row: row.point.efficiency if row.point else ""),
    Column("", "Efficiency, forecast", lambda row: row.coming.efficiency if row.coming else ""),
    Column("", "Interval", lambda row: basis_text(row.point.efficiency) if row.point else "forecast, not measured"),
)


def forecast_charts(group: Group, found: Forecast) -> list[Chart]:
    """Efficiency as measured, by the law, and as forecast; none without a law."""
    import altair as alt

    if found.law is None:
        return []
    rows, coming = _measured(group), _forecast(found)
    measured = "; ".join(f"{row['place']}: {row['shown']}" for row in rows)
    then = "; ".join(f"{row['place']}: {row['shown']}" for row in coming) or found.why_no_forecast
    published = "; ".join(f"{anchor.title}: {percent(anchor.efficiency)}" for anchor in found.same_work)
    return [
        finish(
            alt.layer(*_layers(alt, group, found, found.law)),
            group,
            name="forecast",
            title="Efficiency: measured, and by the law" if coming else "Efficiency: measured, against the law",
            alt=f"Measured efficiency over ranks (filled, solid): {measured}. Not measured but by the law "
            f"({found.law.name}; hollow, dotted): {then}."
            + (f" Published for the same work: {published}." if published else ""),
            table=Sheet(
                name="forecast-chart",
                title="Efficiency",
                columns=COLUMNS,
                rows=[*map(_Drawn, group.points), *(_Drawn(None, one) for one in found.forecasts)],
            ),
            size=(WIDE, HEIGHT),
        )
    ]


def _measured(group: Group) -> Rows:
    return [
        {
            "ranks": point.ranks,
            "value": point.efficiency.value,
            "low": point.efficiency.low,
            "high": point.efficiency.high,
            "place": place_text(point.ranks, point.nodes),
            "shown": figure_text(point.efficiency),
            "basis": basis_text(point.efficiency),
        }
        for point in group.points
    ]


def _forecast(found: Forecast) -> Rows:
    return [
        {
            "ranks": one.ranks,
            "value": one.efficiency.value,
            "low": one.efficiency.low,
            "high": one.efficiency.high,
            "place": f"{one.ranks} ranks",
            "shown": f"{figure_text(one.efficiency)}, forecast",
            "basis": "forecast, not measured",
        }
        for one in found.forecasts
    ]


def _curve(group: Group, law: Law, last: int) -> Rows:
    """The law from the baseline to the last rank count drawn."""
    base = group.baseline.ranks
    steps = [base * (last / base) ** (number / (CURVE - 1)) for number in range(CURVE)]
    found = []
    for ranks in steps:
        ratio = ranks / base
        found.append({"ranks": round(ranks, 4), "value": round(efficiency_at(law, ratio), 6)})
    return found


def _layers(alt: Any, group: Group, found: Forecast, law: Law) -> list[Any]:
    rows, coming = _measured(group), _forecast(found)
    counts = sorted({row["ranks"] for row in (*rows, *coming)})
    ends = [counts[0] / 1.2, counts[-1] * max(2.0, counts[-1] / counts[0]) ** 0.2]
    scale = alt.Scale(type="log", base=2, domain=ends, nice=False)
    x = alt.X("ranks:Q", title="ranks", scale=scale, axis=alt.Axis(values=counts, grid=False, format="d"))
    top = max(1.0, *(row["high"] or row["value"] for row in (*rows, *coming)))
    scale = alt.Scale(domain=[0, top * 1.12], nice=False)
    y = alt.Y("value:Q", title="scaling efficiency", scale=scale, axis=alt.Axis(format=".0%", tickCount=6))
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("shown:N", title="efficiency"),
        alt.Tooltip("basis:N", title="interval"),
    ]
    measured = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y)
    curve = alt.Chart(alt.InlineData(values=_curve(group, law, counts[-1]))).encode(x=alt.X("ranks:Q"), y=y)
    layers = [
        curve.mark_line(color=FORECAST, strokeDash=[1, 4], strokeCap="round", strokeWidth=2),
        measured.mark_line(color=MEASURED, strokeWidth=2),
        measured.mark_point(color=MEASURED, filled=True, size=60, opacity=1).encode(tooltip=tooltip),
    ]
    if coming:
        hollow = alt.Chart(alt.InlineData(values=coming)).encode(x=alt.X("ranks:Q"), y=alt.Y("value:Q"))
        layers += [
            hollow.mark_rule(color=FORECAST, strokeDash=[1, 4], strokeWidth=2).encode(y=alt.Y("low:Q"), y2="high:Q"),
            hollow.mark_point(color=FORECAST, filled=False, shape="diamond", size=90, strokeWidth=2, opacity=1).encode(
                tooltip=tooltip
            ),
            alt.Chart(alt.InlineData(values=coming[-1:]))
            .mark_text(color=MUTED, align="right", dx=8, dy=-16, fontSize=12, text="forecast")
            .encode(x=alt.X("ranks:Q"), y=alt.Y("high:Q")),
        ]
    for anchor in found.same_work:
        line = alt.Chart(alt.InlineData(values=[{"value": anchor.efficiency, "title": f"{anchor.title}, published"}]))
        layers += [
            line.mark_rule(color=PUBLISHED, strokeDash=[8, 3, 2, 3], strokeWidth=1.5).encode(y=alt.Y("value:Q")),
            line.mark_text(color=PUBLISHED, align="left", dx=4, dy=-6, fontSize=11, x=0).encode(
                y=alt.Y("value:Q"), text="title:N"
            ),
        ]
    return layers
