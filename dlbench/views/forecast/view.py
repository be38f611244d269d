"""The view `forecast`: scaling laws, published figures and forecasts; none of them is measured.

Forecasts never share a line style, a column or a headline with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlbench.reading.scaling import Point
from dlbench.report.charts.chart import Chart, Rows, finish, tooltips
from dlbench.report.charts.style import FORECAST, HEIGHT, MEASURED, MUTED, PUBLISHED, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, figure_text, percent, place_text, points
from dlbench.views.forecast.laws import TEXTS, ForecastPoint, Law, LawPoint, efficiency_at
from dlbench.views.forecast.numbers import Anchor, Forecast, forecast
from dlbench.views.model import Group
from dlbench.views.next_step import second_rank
from dlbench.views.view import GroupSource, GroupView, place_columns


def law_title(law: Law) -> str:
    """`Law: Amdahl + linear`."""
    return f"Law: {law.name}"


def coefficients_text(law: Law) -> str:
    """Each coefficient with its interval."""
    letters = [TEXTS[name][0] for name in law.terms]
    # Without a unit, because `ratio` is printed in so many digits as differ from 1.
    texts = [figure_text(one.in_unit("")) for one in law.coefficients]
    return ", ".join(f"{letter} = {text}" for letter, text in zip(letters, texts, strict=True))


def law_sheet(law: Law) -> Sheet[LawPoint]:
    """The law against the measured points."""
    has_fraction = any(point.serial_fraction for point in law.points)
    columns: tuple[Column[LawPoint], ...] = (
        Column("law", "", lambda point: law.name),
        Column("formula", "", lambda point: law.formula),
        Column("coefficients", "", lambda point: " | ".join(f"{one.value:.6g}" for one in law.coefficients)),
        *place_columns(),
        Column("efficiency_measured", "Efficiency, measured", lambda point: point.measured, has_interval=True),
        Column("efficiency_fitted", law_title(law), lambda point: point.fitted, unit="fraction"),
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
        title=f"{law_title(law)} against the measured points",
        columns=columns,
        rows=law.points,
        is_drawn=True,
    )


def forecast_sheet(group: Group, found: Forecast) -> Sheet[ForecastPoint]:
    """What the law says of more ranks."""
    unit = f"{group.sample_unit}/s"
    columns: tuple[Column[ForecastPoint], ...] = (
        Column("law", "", lambda one: law_name),
        Column("ranks", "At", lambda one: one.ranks, lambda one: f"{one.ranks} ranks"),
        Column("forecast_efficiency", "Efficiency by the law", lambda one: one.share, has_interval=True),
        Column("forecast_throughput_per_s", f"Throughput by the law, {unit}", lambda one: one.rate, has_interval=True),
    )
    assert found.law is not None
    law_name = found.law.name
    return Sheet(
        name="forecast",
        title="Forecast, not measured",
        columns=columns,
        rows=found.forecasts,
        caption=" ".join(["In brackets: 95 %, if a law that the points do not rule out goes on.", *found.notes]),
    )


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
        title="Published references of the same work",
        columns=ANCHOR_COLUMNS,
        rows=same_work,
        caption="Weak-scaling efficiency on other hardware.",
    )


CURVE = 33
"""Points of the law's line."""


@dataclass(frozen=True)
class _Drawn:
    """A measured point, or a forecast one."""

    point: Point | None
    coming: ForecastPoint | None = None

    @property
    def place(self) -> str:
        if self.point is None:
            return f"{self.coming.ranks} ranks" if self.coming else ""
        return place_text(self.point.ranks, self.point.nodes)


COLUMNS: tuple[Column[_Drawn], ...] = (
    Column("", "At", lambda row: row.place),
    Column("", "Efficiency, measured", lambda row: row.point.efficiency if row.point else ""),
    Column("", "Efficiency, forecast", lambda row: row.coming.share if row.coming else ""),
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
            "value": one.efficiency,
            "low": one.low,
            "high": one.high,
            "place": f"{one.ranks} ranks",
            "shown": f"{figure_text(one.share)}, forecast",
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
    tooltip = tooltips({"place:N": "at", "shown:N": "efficiency", "basis:N": "interval"})
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


class ForecastView(GroupView):
    """What the measured points let expect of more ranks."""

    id = "forecast"
    title = "Scaling laws and forecast"
    key = "forecast"

    def numbers(self, source: GroupSource) -> Forecast | None:
        return forecast(source.group, source.table, is_oversubscribed=source.is_oversubscribed)

    def section(self, group: Group) -> Section | None:
        found = group.of(Forecast)
        if found is None or (found.law is None and not found.same_work):
            return None
        sheets: list[Sheet[Any]] = []
        if found.law is not None:
            sheets.append(law_sheet(found.law))
            if found.forecasts:
                sheets.append(forecast_sheet(group, found))
        if found.same_work:
            sheets.append(anchor_sheet(found.same_work))
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            words=(found.why_no_law,) if found.law is None else (_law_text(found.law), found.why_no_forecast),
            charts=lambda: forecast_charts(group, found),
            sheets=tuple(sheets),
        )

    def remedy(self, group: Group) -> str:
        found = group.of(Forecast)
        if found is not None:
            return found.why_no_law
        return second_rank(group, "one rank count only")


def _headline(found: Forecast) -> str:
    """The forecast that reaches furthest, or why there is none."""
    if found.forecasts:
        last = found.forecasts[-1]
        return f"forecast, not measured: {figure_text(last.share)} efficiency at {last.ranks:,} ranks"
    if found.law is not None:
        return "no law fits the measured points" if found.law.is_ruled_out else f"{found.law.name} fits; no forecast"
    one = found.same_work[0]
    return f"published for the same work: {percent(one.efficiency)} at {one.ranks:,} ranks"


def _law_text(law: Law) -> str:
    """The law, its coefficients, and how well it holds, in one or two sentences."""
    missed = points(law.worst_residual)
    text = f"{law.name}: {law.formula} with {coefficients_text(law)} (k: ranks over the baseline's); within {missed}."
    if law.is_ruled_out:
        text = f"No law fits; the nearest, {law.name}, misses a measured point by {missed}."
    return f"{text} Fitted without {law.hindcast_ranks} ranks it misses them by {points(abs(law.hindcast_error))}."
