"""Tables and words of laws, published anchors and forecasts; measured and forecast figures never share a column."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    interval_text,
    number_text,
    percent,
    place_text,
    points,
    value_text,
)
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.forecast.laws import ForecastPoint, Law
from dlbench.views.forecast.numbers import Forecast


def forecast_words(group: Group) -> tuple[str, ...]:
    """What the law says, whether anything follows from it, and what was published of the same work."""
    found = group.outlook
    if found is None:
        return ()
    words = [found.why_no_law] if found.law is None else [law_text(found.law)]
    if found.law is not None and found.why_no_forecast:
        words.append(found.why_no_forecast)
    same = [anchor for anchor in found.anchors if anchor.is_same_work]
    words += [
        f"Published of the same work: {anchor.title}, {percent(anchor.efficiency)} at {anchor.ranks:,} ranks "
        f"({anchor.hardware}; baseline: {anchor.baseline}; {anchor.source})."
        for anchor in same
    ]
    return (*words, *([found.why_no_anchor] if found.why_no_anchor else []))


def law_text(law: Law) -> str:
    """The law, its fraction, and how well it holds, in one or two sentences."""
    fraction = figure_text(law.fraction)
    named = f"{law.name}'s law ({law.formula}, k: ranks over the baseline's)"
    if law.doubt:
        ideal = " (taken as f = 0, the ideal)" if law.fraction.value < 0 else ""
        return (
            f"{named} does not fit: least squares gives f = {fraction} ({basis_text(law.fraction)}), and it{ideal} "
            f"misses a measured point by {points(law.worst_residual)} of efficiency."
        )
    text = (
        f"{named} fits with f = {fraction} ({basis_text(law.fraction)}) and misses no measured point by more than "
        f"{points(law.worst_residual)} of efficiency."
    )
    if law.hindcast_error is not None:
        text += (
            f" Fitted without the largest point, it would have missed {law.hindcast_ranks} ranks by "
            f"{points(abs(law.hindcast_error))}."
        )
    return text


def forecast_sheets(group: Group) -> list[Sheet]:
    """The fit, the forecast and the published figures of a group, each a table of its own."""
    found = group.outlook
    if found is None:
        return []
    made = [_law_sheet(group, found.law)] if found.law else []
    if found.forecasts:
        made.append(_forecast_sheet(group, found))
    if any(anchor.is_same_work for anchor in found.anchors):
        made.append(_anchor_sheet(found))
    return made


def _law_sheet(group: Group, law: Law) -> Sheet:
    header = ("At", "Efficiency, measured", "Interval", f"{law.name}'s law", "Residual")
    with_fraction = any(point.serial_fraction for point in law.points)
    ideal = "below 0 the law is taken at f = 0, the ideal; " if law.fraction.value < 0 else ""
    rows = [
        (
            place_text(point.ranks, point.nodes),
            figure_text(point.measured),
            basis_text(point.measured),
            percent(point.fitted),
            points(point.residual),
            *([figure_text(point.serial_fraction) if point.serial_fraction else DASH] if with_fraction else []),
        )
        for point in law.points
    ]
    plain: list[dict[str, Cell]] = [
        {
            "law": law.name,
            **figure_columns("fraction", law.fraction),
            "ranks": point.ranks,
            "nodes": point.nodes,
            **figure_columns("efficiency_measured", point.measured),
            "efficiency_fitted": point.fitted,
            "residual": point.residual,
            **figure_columns("serial_fraction", point.serial_fraction),
            "runs": point.measured.n,
        }
        for point in law.points
    ]
    return Sheet(
        name="laws",
        title=f"{law.name}'s law against the measured points",
        text=[(*header, *(["Karp-Flatt fraction"] if with_fraction else [])), *rows],
        caption=f"f = {value_text(law.fraction)} {interval_text(law.fraction)}; {ideal}residual: measured less "
        f"fitted, points of the ideal. {group.caption}.",
        columns=tuple(plain[0]),
        rows=tuple(plain),
    )


def _forecast_sheet(group: Group, found: Forecast) -> Sheet:
    assert found.law is not None
    unit = f"{group.sample_unit}/s"
    rows = [
        (
            f"{one.ranks} ranks",
            _between(one.efficiency, one.low, one.high, "fraction"),
            _between(one.throughput, one.throughput_low, one.throughput_high, unit),
        )
        for one in found.forecasts
    ]
    notes = "".join(f"{note} " for note in found.notes)
    return Sheet(
        name="forecast",
        title="Forecast, not measured",
        text=[("At", f"Efficiency by {found.law.name}'s law", f"Throughput by the law, {unit}"), *rows],
        caption="In brackets: the law at the ends of its fraction's interval, widened by what it missed of the "
        f"measured points, times how far it is extrapolated. {notes}Forecast from: {group.caption}.",
        columns=("law", *_COLUMNS),
        rows=tuple({"law": found.law.name, **_columns(one)} for one in found.forecasts),
    )


_COLUMNS = (
    *("ranks", "forecast_efficiency", "forecast_efficiency_low", "forecast_efficiency_high"),
    *("forecast_throughput_per_s", "forecast_throughput_per_s_low", "forecast_throughput_per_s_high"),
)


def _columns(one: ForecastPoint) -> dict[str, Cell]:
    values = (one.ranks, one.efficiency, one.low, one.high)
    more = (one.throughput, one.throughput_low, one.throughput_high)
    return dict(zip(_COLUMNS, (*values, *more), strict=True))


def _between(value: float, low: float, high: float, unit: str) -> str:
    ends = [number_text(end, unit).removesuffix(" %") for end in (low, high)]
    return f"{number_text(value, unit)} [{', '.join(ends)}]"


def _anchor_sheet(found: Forecast) -> Sheet:
    same = [anchor for anchor in found.anchors if anchor.is_same_work]
    header = ("Published", "Efficiency", "At", "Baseline", "Hardware", "How", "Source")
    rows = [
        (
            anchor.title,
            percent(anchor.efficiency),
            f"{anchor.ranks:,} ranks",
            anchor.baseline,
            anchor.hardware,
            anchor.recipe,
            f"{anchor.source}, {anchor.address}",
        )
        for anchor in same
    ]
    plain: list[dict[str, Cell]] = [
        {
            "title": anchor.title,
            "published_efficiency": anchor.efficiency,
            "ranks": anchor.ranks,
            "baseline": anchor.baseline,
            "hardware": anchor.hardware,
            "recipe": anchor.recipe,
            "source": anchor.source,
            "address": anchor.address,
        }
        for anchor in same
    ]
    return Sheet(
        name="anchors",
        title="Published figures of the same work",
        text=[header, *rows],
        caption="Weak-scaling efficiency as published: same network, batch, precision class and kind of data, other "
        "hardware.",
        columns=tuple(plain[0]),
        rows=tuple(plain),
    )
