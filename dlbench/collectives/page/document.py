"""The report of the collective benchmark, one fit, and predictions, each as a `Document`."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dlbench
from dlbench.collectives.page import tables, words
from dlbench.collectives.page.report import CollectivesReport, GroupReport
from dlbench.collectives.page.tables import Point, points_of, short_titles
from dlbench.collectives.results.choice import STAY_WITHIN
from dlbench.collectives.results.fits import Fit
from dlbench.collectives.results.measurements import Measurement
from dlbench.collectives.results.predictions import Prediction, Predictions
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import IDEAL, MUTED, RANK_COLOURS, WIDE
from dlbench.report.document import Card, Document, Section, remark
from dlbench.report.runs import without_figures
from dlbench.report.table import Cell, Pivot, Sheet, cell_of, text_sheet
from dlbench.report.wording import basis_text, figure_text, interval_text, optional, percent, runs_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes

HEIGHT = 260

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
"""As many as are told apart; one more than there are colours, so that pairs repeat late."""

TOLERANCE = 0.1
"""Half the width of the band around a perfect prediction (fraction)."""


@dataclass(frozen=True)
class _Quantity:
    """What a chart shows over sizes."""

    name: str
    title: str
    axis: str
    value: Callable[[Measurement], Estimate | float | None]
    """None where a measurement has none; a number is predicted over measured."""
    unit: str = ""
    """Behind the value where no header names it."""

    def cell(self, row: Measurement) -> Estimate | Cell | None:
        """What people read."""
        value = self.value(row)
        if not isinstance(value, float):
            return value
        return Cell(f"{value:.2f} ({optional(row.predicted_s, 's')} predicted)")


_RATE = _Quantity("busbw", "Bus bandwidth over size", "busbw, GB/s", lambda row: row.busbw, " GB/s")
_TIME = _Quantity("time", "Time over size", "time", lambda row: row.time)
_PREDICTION = _Quantity(
    "prediction", "Predicted over measured time", "predicted / measured", lambda row: row.predicted_over_measured
)


def group_charts(group: GroupReport) -> list[Chart]:
    """The charts of a group of two sizes or more; none of predictions where there are none."""
    import altair as alt

    charts = []
    for quantity in (_RATE, _TIME, _PREDICTION):
        points = [one for series in group.series for one in points_of(series) if quantity.value(one.at) is not None]
        rows = _rows(group, quantity, points)
        if rows:
            charts.append(
                finish(
                    alt.layer(*_layers(alt, group, rows, quantity)),
                    group,
                    name=quantity.name,
                    title=quantity.title,
                    alt=_words(group, rows, quantity),
                    table=_sheet(quantity, points),
                    size=(WIDE, HEIGHT),
                )
            )
    return charts


def _sheet(quantity: _Quantity, points: list[Point]) -> Sheet[Point]:
    """A line for each size, a column for each series."""
    pivot: Pivot[Point] = Pivot(
        corner="Size",
        down=lambda point: format_bytes(point.at.num_bytes),
        across=lambda point: point.series.title,
        cell=lambda point: quantity.cell(point.at),
    )
    order = operator.attrgetter("at.num_bytes")
    return Sheet(name=quantity.name, title=quantity.axis, columns=(), rows=points, pivot=pivot, order=order)


def _rows(group: GroupReport, quantity: _Quantity, points: list[Point]) -> Rows:
    titles = short_titles(group.series)
    rows: Rows = []
    for series, row in ((point.series, point.at) for point in points):
        value = quantity.value(row)
        rows.append(
            {
                "series": titles[series.title],
                "kind": "library" if series.is_library else "dlbench",
                "bytes": row.num_bytes,
                "size": format_bytes(row.num_bytes),
                "value": value.value if isinstance(value, Estimate) else value,
                "low": value.low if isinstance(value, Estimate) else None,
                "high": value.high if isinstance(value, Estimate) else None,
                "shown": f"{cell_of(quantity.cell(row))}{quantity.unit}",
                "basis": basis_text(row.time),
            }
        )
    return rows


def _layers(alt: Any, group: GroupReport, rows: Rows, quantity: _Quantity) -> list[Any]:
    drawn = {row["series"] for row in rows}
    # Numbered over all series, so that one keeps its colour and shape in every chart.
    looks = [(index, name) for index, name in enumerate(short_titles(group.series).values()) if name in drawn]
    names = [name for _, name in looks]
    kinds = ["dlbench", "library"]
    legend = {"orient": "bottom", "columns": 2, "symbolStrokeWidth": 2, "symbolSize": 60}
    colours = [RANK_COLOURS[index % len(RANK_COLOURS)] for index, _ in looks]
    shapes = [SHAPES[index % len(SHAPES)] for index, _ in looks]
    colour = alt.Color("series:N", title=None, sort=names).scale(domain=names, range=colours).legend(**legend)
    shape = alt.Shape("series:N", title=None, sort=names).scale(domain=names, range=shapes).legend(**legend)
    dash = alt.StrokeDash("kind:N", legend=None).scale(domain=kinds, range=[[1, 0], [6, 4]])
    texts = (("series", "series"), ("size", "size"), ("shown", quantity.axis.partition(",")[0]), ("basis", "interval"))
    tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in texts]
    x = _size_axis(alt, rows)
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
    rule = base.mark_rule(strokeWidth=3, opacity=0.35).encode(y=alt.Y("low:Q"), y2="high:Q", color=colour)
    return [
        *(_perfect(alt, rows) if quantity is _PREDICTION else []),
        base.mark_line(strokeWidth=1.5, opacity=0.85).encode(
            y=_value_axis(alt, rows, quantity), color=colour, strokeDash=dash
        ),
        *([rule] if any(row["low"] is not None for row in rows) else []),
        base.mark_point(filled=True, size=42, opacity=1).encode(
            y=alt.Y("value:Q"), color=colour, shape=shape, tooltip=tooltip
        ),
    ]


def _size_axis(alt: Any, rows: Rows) -> Any:
    sizes = sorted({row["bytes"] for row in rows})
    x = alt.X("bytes:Q", title="bytes of each rank's buffer").scale(
        type="log", base=2, domain=[sizes[0] / 1.15, sizes[-1] * 1.15], nice=False
    )
    powers = [2**k for k in range(50) if sizes[0] <= 2**k <= sizes[-1]]
    # At most seven labels, at powers of two that are evenly apart.
    step = max(1, -(-len(powers) // 7))
    label = _label(("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    return x.axis(values=powers[::step] or sizes[:1], grid=False, labelExpr=label)


def _label(*units: tuple[str, float]) -> str:
    """Vega's expression for a label in the largest unit that is not above the value; units descend."""
    *larger, (smallest, size) = units
    cases = "".join(f"datum.value >= {0.9 * s} ? format(datum.value / {s}, '~r') + ' {name}' : " for name, s in larger)
    return f"{cases}format(datum.value / {size}, '~r') + ' {smallest}'"


def _value_axis(alt: Any, rows: Rows, quantity: _Quantity) -> Any:
    values = [end for row in rows for end in (row["value"], row["low"], row["high"]) if end]
    y = alt.Y("value:Q", title=quantity.axis)
    if quantity is _PREDICTION:
        edge = max(1.3, *(value * 1.05 for value in values), *(1.05 / value for value in values))
        steps = [tick for tick in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10) if 1 / edge <= tick <= edge]
        return y.scale(type="log", domain=[1 / edge, edge], nice=False).axis(values=steps, format="~r")
    if quantity is _TIME:
        domain = [min(values) / 1.3, max(values) * 1.3]
        label = _label(("s", 1), ("ms", 1e-3), ("µs", 1e-6))
        return y.scale(type="log", domain=domain, nice=False).axis(values=_decades(domain), labelExpr=label)
    return y.scale(domain=[0, max(values) * 1.08], nice=False).axis(format=".4~g", tickCount=6)


def _decades(domain: list[float]) -> list[float]:
    """Powers of ten within, and 2 and 5 times these where there are few."""
    powers = range(math.floor(math.log10(domain[0])), math.ceil(math.log10(domain[1])) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [tick for tick in ticks if domain[0] <= tick <= domain[1]]
    tens = [tick for tick in inside if math.isclose(tick, 10.0 ** round(math.log10(tick)))]
    return tens if len(tens) > 2 else inside


def _perfect(alt: Any, rows: Rows) -> list[Any]:
    """A band and a line where a prediction is right; drawn first, so that points lie above."""
    sizes = sorted({row["bytes"] for row in rows})
    ends = [{"bytes": size, "low": 1 - TOLERANCE, "high": 1 + TOLERANCE, "one": 1.0} for size in (sizes[0], sizes[-1])]
    data = alt.Chart(alt.InlineData(values=ends)).encode(x=alt.X("bytes:Q"))
    label = alt.Chart(alt.InlineData(values=ends[:1])).encode(x=alt.X("bytes:Q"))
    return [
        data.mark_area(color=IDEAL, opacity=0.18).encode(y=alt.Y("low:Q"), y2="high:Q"),
        data.mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("one:Q")),
        label.mark_text(color=MUTED, align="left", baseline="bottom", dx=2, dy=-2, fontSize=11, text="± 10 %").encode(
            y=alt.Y("high:Q")
        ),
    ]


def _words(group: GroupReport, rows: Rows, quantity: _Quantity) -> str:
    """At the largest size of each series: enough to hear what the chart shows; the table holds all."""
    last = {row["series"]: row for row in rows}
    found = "; ".join(f"{name} at {row['size']}: {row['shown']}" for name, row in last.items())
    return f"{quantity.title} of {group.label}. {found}."


def document_of(report: CollectivesReport) -> Document:
    """The whole report."""
    return Document(
        title=report.title,
        dlbench_version=report.dlbench_version,
        as_of=report.as_of,
        meta=(f"{runs_text(len(report.runs))}, {len(report.without_figures)} without figures.",),
        sections=(
            _summary(report),
            *map(_group, report.groups),
            *(_fit(fit, number) for number, fit in enumerate(report.fits)),
            *_runs(report),
            Section(
                id="methods",
                title="How the numbers are made",
                level="appendix",
                facts=report.methods,
                are_methods=True,
                brief=(),
            ),
        ),
        data=report,
        always=tables.always(),
        file_prefix="comm-",
        command="dlbench comm report RUNS",
    )


def fit_document(fit: Fit) -> Document:
    """One fit alone."""
    return Document(title=words.TITLE, dlbench_version=dlbench.__version__, sections=(_fit(fit, 0),), data=fit)


def predictions_document(found: Predictions) -> Document:
    """What a network expects at each layout."""
    network = found.network
    basis = "intervals over runs" if network.draws else "too few runs for intervals"
    return Document(
        title=f"Predicted by the fitted costs of {network.system}, {network.transport} "
        f"({network.num_points} points; {basis})",
        dlbench_version=dlbench.__version__,
        sections=tuple(_prediction(found, one) for one in found.predictions),
        data=found,
        command="dlbench comm predict NETWORK --ranks N",
    )


def _summary(report: CollectivesReport) -> Section:
    empty: tuple[str, ...] = ()
    if not report.groups:
        more = "Below, each run with the reason." if report.runs else "There are no runs here."
        empty = (f"No run has figures. {more}",)
    return Section(
        id="summary", title="Summary", level="answer", words=empty, cards=tuple(map(_card, report.groups)), brief=empty
    )


def _card(group: GroupReport) -> Card:
    last = group.best[-1]
    rate_name = "busbw" if group.ranks > 1 else "algbw"
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=value_text(last.rate),
        small=(
            f"GB/s {rate_name} at {format_bytes(last.num_bytes)}, {last.title}",
            *filter(None, (interval_text(last.rate), basis_text(last.rate))),
        ),
        words=(group.verdict,),
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _group(group: GroupReport) -> Section:
    facts = tuple((one.title, one.value) for one in group.conditions)
    last = group.best[-1]
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=facts,
        marks=(
            *(remark(one.severity, one.text, len(one.runs)) for one in group.doubts),
            *(remark("note", f"not measured: {text}") for text in group.not_measured),
        ),
        sections=tuple(_of_group(group)),
        brief=(_conditions_line(group), group.verdict),
        is_group=True,
        overview=(
            ("At", format_bytes(last.num_bytes)),
            ("Fastest", last.title),
            ("Time, median", figure_text(last.time)),
            ("Rate, GB/s", figure_text(last.rate)),
            ("Interval", basis_text(last.time)),
        ),
        where={name: getattr(group, "id" if name == "group" else name) for name in tables.GROUP_COLUMNS},
    )


def _conditions_line(group: GroupReport) -> str:
    """What the label does not say, for the terminal."""
    shown = {one.name: one.value for one in group.conditions}
    cores = f"{shown['cores']} core{'' if shown['cores'] == '1' else 's'} per rank"
    parts = (shown["device"], cores, shown["launcher"], f"hosts {shown['hosts']}", runs_text(group.num_runs))
    return ", ".join(parts)


def _of_group(group: GroupReport) -> Iterator[Section]:
    fusion = words.fusion_text(group.fusion)
    same = tuple(map(words.same_text, group.same_messages))
    least = percent(STAY_WITHIN, 0)
    lead = f"Lead: time of the next over that of the fastest. Clear: beyond scatter, and more than {least}."
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice, fusion),
        caption=lead,
        sheets=(tables.best_sheet(group), *((tables.crossovers_sheet(group),) if group.crossovers else ())),
        notes=same,
        brief=(fusion, *same),
    )
    is_drawn = len(group.best) > 1
    yield Section(
        id=f"sizes-{group.id}",
        title="Over size",
        level="answer",
        caption="In brackets: the interval. Libraries are dashed.",
        words=() if is_drawn else ("One size only: two or more (--sizes 1KiB:64MiB) are drawn over size.",),
        charts=lambda: group_charts(group) if is_drawn else [],
        brief=(),
    )
    kinds = dict.fromkeys(basis_text(row.time) for series in group.series for row in series.rows)
    last = group.best[-1]
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        caption=f"Intervals: {', '.join(kinds)}.",
        sheets=(tables.matrix_sheet(group),),
        brief=(),
    )
    yield from _ratios(group)
    yield Section(
        id=f"series-{group.id}",
        title="Every series",
        level="appendix",
        headline=f"{len(group.series)} series: rates, skew, messages, bytes, predictions",
        about=(
            "Rates in GB/s (1e9 bytes per second). Bytes sent: the most of any rank, counted. Predicted: by a fit "
            "without the point.",
        ),
        sheets=tuple(map(tables.series_sheet, group.series)),
        brief=(),
    )
    if group.rejected:
        yield Section(
            id=f"rejected-{group.id}",
            title="Points without figures",
            headline=f"{len(group.rejected)} points",
            sheets=(tables.rejected_sheet(group),),
            brief=(),
        )


def _ratios(group: GroupReport) -> Iterator[Section]:
    own = list(dict.fromkeys(one.own for one in group.ratios))
    if own:
        # Unfolded is ring, or else the first one.
        shown = next((name for name in own if name.startswith("ring ")), own[0])
        yield Section(
            id=f"ratios-{group.id}",
            title="dlbench's algorithms against libraries",
            headline=_against(group),
            caption="Above 1, the algorithm is faster: time of the library over its own.",
            sheets=tuple(tables.ratio_sheet(group, name, is_shown=name == shown) for name in own),
            brief=(),
        )


def _against(group: GroupReport) -> str:
    """At how many sizes the library is the fastest of all."""
    libraries = {series.title for series in group.series if series.is_library}
    won = sum(one.title in libraries for one in group.best)
    return f"a library is the fastest at {won} of {len(group.best)} sizes"


def _fit(fit: Fit, number: int) -> Section:
    return Section(
        id=f"fit-{number}",
        title=fit.label,
        headline=_fit_headline(fit),
        sheets=(tables.costs_sheet(fit), tables.errors_sheet(fit), tables.lines_sheet(fit)),
        brief=(),
        where={name: getattr(fit, name) for name in tables.FIT_COLUMNS},
    )


def _fit_headline(fit: Fit) -> str:
    if not fit.errors:
        return "lines of libraries"
    poor = sum(one.is_poor for one in fit.errors)
    more = f"; {poor} algorithms missed, no advice from them" * bool(poor)
    return f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}{more}"


def _runs(report: CollectivesReport) -> Iterator[Section]:
    """What was not fitted, all runs, those without figures, and what they ran in."""
    if report.unfitted:
        marks = tuple(remark("note", text) for text in report.unfitted)
        yield Section(id="not-fitted", title="Not fitted", marks=marks)
    if report.runs:
        yield Section(id="runs", title="Runs", level="appendix", sheets=(tables.runs_sheet(report),))
    yield from without_figures(report.without_figures, report.damaged)
    if report.environment:
        title = "Environment that all runs with figures share"
        sheet = text_sheet("environment", title, ("Key", "Value"), report.environment)
        yield Section(
            id="environment",
            title="Environment",
            level="appendix",
            sheets=(dataclasses.replace(sheet, is_folded=True),),
        )


def _prediction(found: Predictions, one: Prediction) -> Section:
    extrapolated = words.extrapolated_text(found, one)
    advice, fusion = words.prediction_advice(found, one), words.predicted_fusion_text(found, one)
    changes = (f"From {words.about(size)}: {after} instead of {before}." for size, before, after in one.crossovers)
    return Section(
        id=f"ranks-{one.ranks}",
        title=words.layout_text(found, one),
        level="answer",
        about=extrapolated,
        words=(advice, fusion),
        sheets=(tables.fastest_predicted_sheet(found, one),) if one.series else (),
        sections=()
        if not one.series
        else (
            Section(
                id=f"all-{one.ranks}",
                title="Every algorithm",
                sheets=(tables.predictions_sheet(found, one),),
                notes=(*changes, words.poor_text(one)),
            ),
        ),
        brief=(advice, *extrapolated, words.poor_text(one), fusion),
        is_group=True,
    )
