"""The report of the collective benchmark, one fit, and predictions, each as a `Document` with its tables and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlbench.comm.choice import STAY_WITHIN, Best
from dlbench.comm.costs import COST_WORDS, COSTS, Cost, sheet_of
from dlbench.comm.fits import Errors, Fit
from dlbench.comm.measurements import Measurement, Rejected, Series
from dlbench.comm.pairs import LEVEL_TITLES, PairFigure, PairsReport
from dlbench.comm.predictions import CABLES, PredictedSeries, Prediction, Predictions, Price
from dlbench.comm.report import (
    TITLE,
    CollectivesReport,
    GroupReport,
    RunRow,
    about,
    extrapolated_text,
    fit_caption,
    layout_text,
    per_byte_text,
    poor_text,
    predicted_fusion_text,
    prediction_advice,
)
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, figure_row, scatter
from dlbench.report.charts.shapes import Series as Lines
from dlbench.report.charts.style import RANK_COLOURS, WIDE
from dlbench.report.document import (
    MAX_LISTED,
    Card,
    Document,
    Section,
    methods_section,
    remark,
    warnings_cell,
    without_figures,
)
from dlbench.report.table import (
    Cell,
    Column,
    NamedTable,
    Pivot,
    Sheet,
    cell_of,
    columns_of,
    drop_empty_columns,
    named_table,
    text_sheet,
    times_cell,
)
from dlbench.report.wording import basis_text, figure_text, interval_text, optional, percent, runs_text, value_text
from dlbench.specs.comm import LineCost, NetworkModel
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import format_bytes

MOST_DRAWN = 32  # Series of pairs in one chart.
MOST_LABELS = 7  # Of the axis of sizes.
HEIGHT = 260
SIZE_LABEL = "".join(
    f"datum.value >= {2**power} ? format(datum.value / {2**power}, '~r') + ' {unit}' : "
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"))
)
SIZE_LABEL += "datum.value + ' B'"
"""Vega's expression for bytes in the largest unit that is not above them."""

# In front of every row of a group's, or a fit's, tables.
GROUP_COLUMNS = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")
FIT_COLUMNS = ("system", "carrier", "dtype")


class Point(NamedTuple):
    """One series at one size."""

    series: Series
    at: Measurement


def points_of(group: GroupReport | PairsReport) -> list[Point]:
    """The points of each series of a group, by size."""
    return [Point(series, row) for series in group.series for row in series.rows]


_POINTS: tuple[Column[Point], ...] = (
    *columns_of(Series, "carrier", "algorithm", of=lambda one: one.series),
    *columns_of(
        Measurement,
        *("num_bytes", "time", "minimum_s", "algbw", "busbw", "runs=time.n"),
        Column("interval", "Interval", lambda row: row.time.kind, lambda row: basis_text(row.time)),
        *("iterations", "operations", "timing", "single_call_s", "skew_s"),
        *("steps", "messages", "bytes_sent", "bytes_across"),
        *("predicted_s", "predicted_over_measured", "fastest=is_best"),
        of=lambda one: one.at,
    ),
)


def matrix_sheet(group: GroupReport | PairsReport) -> Sheet[Point]:
    """Every time: a line for each size, a column for each series; for programs all that is known of each point."""
    short = short_titles(group.series)
    kinds = dict.fromkeys(basis_text(row.time) for series in group.series for row in series.rows)
    return Sheet(
        name="points",
        title="Times by size and algorithm",
        columns=_POINTS,
        rows=points_of(group),
        order=lambda one: one.at.num_bytes,
        caption=f"* fastest. Intervals: {', '.join(kinds)}.",
        pivot=Pivot(
            corner="Size",
            down=lambda one: format_bytes(one.at.num_bytes),
            across=lambda one: short[one.series.title],
            cell=_time_cell,
        ),
    )


def short_titles(all_series: Sequence[Series]) -> dict[str, str]:
    """What each series is called where all are of one group; algorithms without their carrier where all share it."""
    carriers = {series.carrier for series in all_series if not series.is_library}
    return {
        series.title: series.algorithm if len(carriers) == 1 and not series.is_library else series.title
        for series in all_series
    }


def _time_cell(one: Point) -> Cell:
    cell = cell_of(one.at.time)
    return replace(cell, text=f"{cell.text}{' *' * one.at.is_best}")


_REJECTED: tuple[Column[Rejected], ...] = (
    Column("algorithm", "Series", lambda one: one.title),
    Column("num_bytes", "Size", lambda one: one.num_bytes, unit="bytes"),
    Column("problem", "Why", lambda one: one.why),
    Column("runs", "Runs", lambda one: len(one.runs), lambda one: ", ".join(one.runs)),
)


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """The fastest series of each size; without the carrier where all algorithms have the same."""
    carriers = {series.carrier for series in group.series if not series.is_library}
    carrier = f" over {next(iter(carriers))}" if len(carriers) == 1 else ""
    columns: tuple[Column[Best], ...] = (
        Column("", "Size", lambda one: one.num_bytes, unit="bytes", is_brief=True),
        Column("", "Fastest", lambda one: one.title.removesuffix(carrier), is_brief=True),
        Column("", "Time, median", lambda one: one.time, is_brief=True),
        Column("", "busbw, GB/s" if group.ranks > 1 else "algbw, GB/s", lambda one: one.rate, is_brief=True),
        Column("", "Minimum", lambda one: one.minimum_s, unit="s"),
        Column("", "Next", lambda one: one.second.removesuffix(carrier) or None),
        Column("", "Lead", lambda one: one.lead, lambda one: times_cell(one.lead), is_brief=True),
        Column("", "Clear", lambda one: one.is_clear if one.lead else None, _clear, is_brief=True),
    )
    return Sheet(name="fastest", title="Fastest by size", columns=columns, rows=group.best, in_terminal=True)


def _clear(one: Best) -> str:
    """Returns whether the fastest is clearly so, and if too few runs forbid it, how many there are."""
    if one.lead is not None and one.lead.n < MIN_RUNS:
        return f"no: {runs_text(one.lead.n)}"
    return "yes" if one.is_clear else "no"


_PAIRS = columns_of(
    PairFigure,
    *("pair", "level", "way"),
    *columns_of(Measurement, "num_bytes", "time", "minimum_s", of=lambda one: one.at),
    Column("gb_per_s", "Bandwidth, GB/s", lambda one: one.at.algbw, has_interval=True, is_brief=True),
    *("beside", "factor", "factor_p99", "operations=at.iterations"),
)


class _Costs(NamedTuple):
    """What messages of some sizes cost on one level, or a byte of a reduction."""

    name: str
    messages: str
    up_to_bytes: int | None
    links: int | None
    alpha: Estimate | None
    beta: Estimate

    @property
    def links_text(self) -> str:
        block = {"inside": "group", "across": "group", "beyond": "leaf switch"}.get(self.name)
        if block is None:
            return ""
        return "one per rank" if self.links is None else f"{self.links} per {block}"


_COSTS: tuple[Column[_Costs], ...] = (
    Column("name", "Level", lambda one: one.name, lambda one: LEVEL_TITLES.get(one.name, one.name)),
    Column("up_to_bytes", "Messages", lambda one: one.up_to_bytes, lambda one: one.messages),
    Column("links", "Links", lambda one: one.links, lambda one: one.links_text),
    Column("alpha_s", "alpha", lambda one: one.alpha, has_interval=True),
    Column("s_per_byte", "1/beta, GB/s", lambda one: one.beta, lambda one: _rate(one.beta), has_interval=True),
)


def costs_sheet(network: NetworkModel) -> Sheet[_Costs]:
    """Costs by level and size of a message, and of the reduction; a rate is a cost per byte turned over."""
    rows = []
    for name, level in network.levels.items():
        before = None
        for piece in level.pieces:
            messages = "all sizes" if before is None else f"above {format_bytes(before)}"
            if piece.up_to_bytes is not None:
                messages = f"up to {format_bytes(piece.up_to_bytes)}"
            alpha = _fitted(piece.alpha_s, piece.alpha_interval_s, "s")
            beta = _fitted(piece.beta_s_per_byte, piece.beta_interval_s_per_byte)
            rows.append(_Costs(name, messages, piece.up_to_bytes, level.links, alpha, beta))
            before = piece.up_to_bytes
    if rows:
        rows.append(_Costs("reduction", "all sizes", None, None, None, _fitted(network.gamma_s_per_byte, None)))
    caption = fit_caption(network)
    return Sheet(name="fits", title="Costs of a message", columns=_COSTS, rows=rows, caption=caption)


def _fitted(value: float, ends: tuple[float, float] | None, unit: str = "") -> Estimate:
    low, high = ends or (None, None)
    return Estimate(value, low, high, 1, "fit", unit, level=None if ends is None else 0.95)


def _rate(beta: Estimate) -> Cell:
    if beta.low is None or beta.high is None:
        return Cell(per_byte_text(beta.value))
    fastest = per_byte_text(beta.low) if beta.low > 0 else "∞"
    return Cell(per_byte_text(beta.value), f"[{per_byte_text(beta.high)}, {fastest}]")


_LINES: tuple[Column[LineCost], ...] = (
    Column("name", "Collective", lambda one: one.name),
    Column("ranks", "Ranks", lambda one: one.ranks),
    Column("alpha_s", "Start-up", lambda one: one.startup_s, unit="s"),
    Column(
        "s_per_byte", "Asymptotic algbw, GB/s", lambda one: one.per_byte_s, lambda one: per_byte_text(one.per_byte_s)
    ),
)


_SHOWN = ("state", "collective", "system", "ranks", "nodes", "repeat")
_RUNS: tuple[Column[RunRow], ...] = columns_of(
    RunRow,
    *("run_id", "group", "state", "collective", "dtype", "system", "ranks", "nodes", "repeat"),
    *("finished", "failure_reason"),
    Column("warnings", "Warnings", lambda run: " | ".join(run.warnings), lambda run: warnings_cell(run.warnings)),
    titles={"run_id": "Run"} | {name: name.capitalize() for name in _SHOWN},
)


def always() -> tuple[NamedTable, ...]:
    """Tables for programs that every report has, with all columns that any of its sheets may have."""
    return (
        named_table("points", "Measured points", (*_POINTS, *_REJECTED), GROUP_COLUMNS),
        named_table("pairs", "Pairs of ranks", _PAIRS, ("group",)),
        named_table("costs", "Cost of each algorithm", COSTS, GROUP_COLUMNS),
        named_table("fits", "Fitted costs", (*_LINES[:2], *_COSTS), FIT_COLUMNS),
        named_table("runs", "All runs", _RUNS),
    )


@dataclass(frozen=True)
class _Predicted:
    """One predicted time: of a size, or of all gradients of a step as one message."""

    size: str
    name: str
    price: Price
    is_best: bool


def predictions_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """Predicted times: a line for each size, a column for each algorithm; the fastest of each line has a star."""
    rows = [
        row
        for place, size in enumerate(found.sizes)
        for row in _predicted(format_bytes(size), one, [_at(series, place) for series in one.series])
    ]
    if found.workload_bytes is not None:
        size = f"gradients, {about(found.workload_bytes)}"
        times = [
            Price(each.workload_s or 0.0, each.workload_low_s, each.workload_high_s, each.phi[-1] if each.phi else None)
            for each in one.series
        ]
        rows += _predicted(size, one, times)
    has_ends = any(row.price.low is not None for row in rows)
    return Sheet(
        name="predictions",
        title="Predicted times",
        columns=(),
        rows=rows,
        caption="* fastest"
        + "; in brackets 95 % over runs and wider by the fit's own error, if the model goes on" * has_ends
        + _phi_text(rows)
        + "; (line): through sizes measured at this rank count" * any(s.is_line for s in one.series),
        pivot=Pivot(corner="Size", down=lambda row: row.size, across=lambda row: row.name, cell=_predicted_cell),
    )


def _phi_text(rows: Sequence[_Predicted]) -> str:
    return "; phi: flows that a link carries at once, where more than one" * any(
        (row.price.phi or 0) > 1 for row in rows
    )


def fastest_predicted_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """The fastest of each size alone, for the terminal."""
    series = {series.name: series for series in one.series}
    rows = [
        _Predicted(format_bytes(size), name, _at(series[name], place), False)
        for place, (size, name) in enumerate(zip(found.sizes, one.best, strict=True))
    ]
    columns: tuple[Column[_Predicted], ...] = (
        Column("", "Size", lambda row: row.size),
        Column("", "Predicted fastest", lambda row: row.name),
        Column("", "Time", lambda row: row.price.seconds, _predicted_cell),
    )
    caption = _phi_text(rows).removeprefix("; ")
    return Sheet(
        name="fastest", title="Predicted fastest", columns=columns, rows=rows, caption=caption, in_terminal=True
    )


def _at(series: PredictedSeries, place: int) -> Price:
    low, high = (None if ends is None else ends[place] for ends in (series.low, series.high))
    return Price(series.seconds[place], low, high, series.phi[place] if series.phi else None)


def _predicted(size: str, one: Prediction, prices: list[Price]) -> list[_Predicted]:
    is_usable = [series.poor_error is None for series in one.series]
    best = min(value for (value, *_), usable in zip(prices, is_usable, strict=True) if usable or not any(is_usable))
    return [
        _Predicted(
            size,
            series.name + " (line)" * series.is_line + " (poor fit)" * (series.poor_error is not None),
            price,
            price.seconds == best and (series.poor_error is None or not any(is_usable)),
        )
        for series, price in zip(one.series, prices, strict=True)
    ]


def _predicted_cell(row: _Predicted) -> Cell:
    seconds, low, high, phi = row.price
    many = f" (phi {phi:.3g})" if phi is not None and phi > 1 else ""
    text = f"{optional(seconds, 's')}{' *' * row.is_best}{many}"
    return Cell(text, "" if low is None else f"[{optional(low, 's')}, {optional(high, 's')}]", number=seconds)


def rates_sheet(group: GroupReport | PairsReport) -> Sheet[Point]:
    """Every rate: a line for each size, a column for each series."""
    titles = short_titles(group.series)
    return Sheet(
        name="rates",
        title="busbw, GB/s",
        columns=(),
        rows=points_of(group),
        order=lambda one: one.at.num_bytes,
        pivot=Pivot(
            corner="Size",
            down=lambda one: format_bytes(one.at.num_bytes),
            across=lambda one: titles[one.series.title],
            cell=lambda one: one.at.busbw or one.at.algbw,
        ),
    )


def size_charts(group: GroupReport | PairsReport) -> list[Chart]:
    """Rate and time over size; a table of all numbers behind each."""
    titles = short_titles(group.series)
    colours = {name: RANK_COLOURS[place % len(RANK_COLOURS)] for place, name in enumerate(titles.values())}
    points = points_of(group)
    sizes = sorted({point.at.num_bytes for point in points})
    x = Axis(
        "bytes of a message" if isinstance(group, PairsReport) else "bytes of each rank's buffer",
        field="bytes",
        scale={"type": "log", "base": 2, "domain": [sizes[0] / 1.15, sizes[-1] * 1.15], "nice": False},
        axis={"values": sizes[:: -(-len(sizes) // MOST_LABELS)], "grid": False, "labelExpr": SIZE_LABEL},
    )
    charts = []
    for name, title, y, table in (
        ("busbw", "Bandwidth over size", Axis("busbw, GB/s", scale={"domainMin": 0}), rates_sheet(group)),
        ("time", "Time over size", Axis("time", unit="s", scale={"type": "log"}), matrix_sheet(group)),
    ):
        rows: Rows = [
            {
                "series": titles[point.series.title],
                "bytes": point.at.num_bytes,
                "size": format_bytes(point.at.num_bytes),
                **figure_row(point.at.time if name == "time" else point.at.busbw or point.at.algbw),
            }
            for point in points
        ]
        # At the largest size of each series: enough to hear what the chart shows; the table holds all.
        last = {row["series"]: f"{row['series']} at {row['size']}: {row['shown']}" for row in rows}
        tooltip = {"series": "series", "size": "size", "shown": name, "basis": "interval"}
        charts.append(
            finish(
                scatter(rows, x, y, Lines("series", colours), tooltip, line=1.5),
                group,
                name=name,
                title=title,
                alt=f"{title} of {group.label}. {'; '.join(last.values())}.",
                table=table,
                size=(WIDE, HEIGHT),
            )
        )
    return charts


def document_of(report: CollectivesReport) -> Document:
    """The whole report."""
    empty: tuple[str, ...] = ()
    if not report.groups and not report.pairs:
        more = "Below, each run with the reason." if report.runs else "There are no runs here."
        empty = (f"No run has figures. {more}",)
    cards = (*map(_card, report.groups), *map(_card, report.pairs))
    return report.document(
        Section(id="summary", title="Summary", level="answer", words=empty, cards=cards, brief=empty),
        *map(_group, report.groups),
        *map(_pairs, report.pairs),
        *(_fit(fit, number) for number, fit in enumerate(report.fits)),
        *_runs(report),
        *methods_section(report.methods),
        meta=(f"{runs_text(len(report.runs))}, {len(report.without_figures)} without figures.",),
        always=always(),
        file_prefix="comm-",
        command="dlbench comm report RUNS",
    )


def fit_document(fit: Fit, left_out: Sequence[str] = ()) -> Document:
    """Returns one fit alone, with what was left out of it."""
    section = replace(_fit(fit, 0), marks=tuple(remark("note", f"left out: {text}") for text in left_out))
    return Document(title=TITLE, sections=(section,), data=fit)


def costs_document(title: str, tables: Mapping[str, Sequence[Cost]], num_bytes: int) -> Document:
    """The cost of each algorithm, by layout, at one size."""
    return Document(
        title=title,
        sections=tuple(
            Section(
                id=f"costs-{number}",
                title=where,
                level="answer",
                sheets=(sheet_of(rows, num_bytes),),
                brief=(COST_WORDS,) if number == len(tables) else (),
            )
            for number, (where, rows) in enumerate(tables.items(), 1)
        ),
        data=tuple(tables.items()),
        command="dlbench comm table",
    )


def predictions_document(found: Predictions) -> Document:
    """What a network expects at each layout."""
    network = found.network
    basis = "intervals over runs" if network.draws else "too few runs for intervals"
    title = f"by the fitted costs of {network.system}, {network.transport} ({network.num_points} points; {basis})"
    if network.transport == CABLES:
        title = f"by the cables of {network.system}; nothing here is measured"
    return Document(
        title=f"Predicted {title}",
        sections=tuple(_prediction(found, one) for one in found.predictions),
        data=found,
        command="dlbench comm predict NETWORK --ranks N",
    )


def _pairs(found: PairsReport) -> Section:
    """Pairs of ranks: what was found, who is hit, over size, the numbers, and what a message costs by them."""
    costs = [_Costs(one.level, "pairs, ping-pong", None, None, one.alpha, one.beta) for one in found.costs]
    fitted = costs_sheet(found.fit.network).rows if found.fit else ()
    costs += (one._replace(messages=f"collectives, {one.messages}") for one in fitted)
    of_costs = tuple(replace(one, name="") for one in (*_COSTS[:2], *_COSTS[3:]))
    figures = drop_empty_columns(_PAIRS, found.figures)
    return Section(
        id=f"group-{found.id}",
        title=found.label,
        level="answer",
        caption=f"Medians over {runs_text(found.num_runs)} of single operations. Ping-pong: half of there and back. "
        "Window: one of several messages under way at once, with the answer to all. Congestors send 1 MiB after the "
        "other, first rank to second; factors are of the same runs, percentiles of 100 operations or more.",
        facts=tuple((one.title, one.value) for one in found.conditions),
        marks=tuple(remark(one.severity, one.text, len(one.runs)) for one in found.doubts),
        words=found.words,
        charts=lambda: size_charts(found) if len(found.series) <= MOST_DRAWN else [],
        sheets=(
            Sheet(name="pairs", title="Pairs of ranks", columns=figures, rows=found.figures, max_rows=MAX_LISTED),
            Sheet(name="fits", title="Costs of a message", columns=of_costs, rows=costs, in_terminal=True),
        ),
        brief=(f"{runs_text(found.num_runs)}.", *found.words),
        is_group=True,
        where={"group": found.id},
    )


def _card(group: GroupReport | PairsReport) -> Card:
    if isinstance(group, PairsReport):
        one = max(group.ends, key=lambda one: (one.level, one.way))
        rate, words = one.at.algbw, group.words
        what = f"by {one.way} of {format_bytes(one.at.num_bytes)}, {LEVEL_TITLES[one.level]}"
    else:
        last = group.best[-1]
        rate, words = last.rate, (group.verdict,)
        what = f"{'busbw' if group.ranks > 1 else 'algbw'} at {format_bytes(last.num_bytes)}, {last.title}"
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=value_text(rate),
        small=(f"GB/s {what}", *filter(None, (interval_text(rate), basis_text(rate)))),
        words=words,
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _group(group: GroupReport) -> Section:
    last = group.best[-1]
    shown = {one.name: one.value for one in group.conditions}
    cores = f"{shown['cores']} core{'' if shown['cores'] == '1' else 's'} per rank"
    conditions = (shown["device"], cores, shown["launcher"], f"hosts {shown['hosts']}", runs_text(group.num_runs))
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=tuple((one.title, one.value) for one in group.conditions),
        marks=(
            *(remark(one.severity, one.text, len(one.runs)) for one in group.doubts),
            *(remark("note", f"not measured: {text}") for text in group.not_measured),
        ),
        sections=tuple(_of_group(group)),
        # What the label does not say.
        brief=(", ".join(conditions), group.verdict),
        is_group=True,
        overview=(
            ("At", format_bytes(last.num_bytes)),
            ("Fastest", last.title),
            ("Time, median", figure_text(last.time)),
            ("Rate, GB/s", figure_text(last.rate)),
            ("Interval", basis_text(last.time)),
        ),
        where={name: getattr(group, "id" if name == "group" else name) for name in GROUP_COLUMNS},
    )


def _of_group(group: GroupReport) -> Iterator[Section]:
    least = percent(STAY_WITHIN, 0)
    lead = (
        f"Lead: time of the next over that of the fastest. Clear: more than {least}, and beyond the scatter of "
        f"{MIN_RUNS} runs or more; fewer are too few, whatever the lead."
    )
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice,),
        caption=lead,
        sheets=(best_sheet(group),),
        brief=(),
    )
    is_drawn = len(group.best) > 1
    yield Section(
        id=f"sizes-{group.id}",
        title="Over size",
        level="answer",
        words=() if is_drawn else ("One size only: two or more (--sizes 1KiB:64MiB) are drawn over size.",),
        charts=lambda: size_charts(group) if is_drawn else [],
        brief=(),
    )
    last = group.best[-1]
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        sheets=(
            matrix_sheet(group),
            rates_sheet(group),
            *((sheet_of(group.costs, last.num_bytes),) if group.costs else ()),
        ),
        brief=(),
    )
    if group.rejected:
        yield Section(
            id=f"rejected-{group.id}",
            title="Points without figures",
            headline=f"{len(group.rejected)} points",
            sheets=(Sheet(name="points", title="Points without figures", columns=_REJECTED, rows=group.rejected),),
            brief=(),
        )


def _fit(fit: Fit, number: int) -> Section:
    headline = "lines of libraries"
    if fit.errors:
        poor = sum(one.is_poor for one in fit.errors)
        more = f"; {poor} algorithms missed, no advice from them" * bool(poor)
        headline = f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}{more}"
    columns: tuple[Column[Errors], ...] = (
        Column("", "Points", lambda one: one.scope),
        Column("", "Count", lambda one: one.num_points),
        Column("", "Median error", lambda one: one.median, unit="fraction"),
        Column("", "Worst", lambda one: one.worst, unit="fraction"),
        Column("", "Advice", lambda one: "none: the fit misses it" if one.is_poor else None),
    )
    title, lines = "Each collective as a line", fit.network.collectives
    return Section(
        id=f"fit-{number}",
        title=f"Fitted costs of {fit.title}",
        headline=headline,
        sheets=(
            costs_sheet(fit.network),
            Sheet(name="errors", title="Errors of predictions", columns=columns, rows=fit.errors),
            Sheet(name="fits", title=title, columns=_LINES, rows=lines, is_folded=bool(fit.network.levels)),
        ),
        brief=(),
        where={name: getattr(fit, name) for name in FIT_COLUMNS},
    )


def _runs(report: CollectivesReport) -> Iterator[Section]:
    """What was not fitted, all runs, those without figures, and what they ran in."""
    if report.unfitted:
        marks = tuple(remark("note", text) for text in report.unfitted)
        yield Section(id="not-fitted", title="Not fitted", marks=marks)
    if report.runs:
        sheet = Sheet(
            name="runs", title="All runs", columns=_RUNS, rows=report.runs, is_sortable=True, max_rows=MAX_LISTED
        )
        yield Section(id="runs", title="Runs", level="appendix", sheets=(sheet,))
    yield from without_figures(report.without_figures, report.damaged)
    if report.environment:
        title = "Environment that all runs with figures share"
        folded = replace(text_sheet("environment", title, ("Key", "Value"), report.environment), is_folded=True)
        yield Section(id="environment", title="Environment", level="appendix", sheets=(folded,))


def _prediction(found: Predictions, one: Prediction) -> Section:
    extrapolated = extrapolated_text(found, one)
    advice, fusion = prediction_advice(found, one), predicted_fusion_text(found, one)
    return Section(
        id=f"ranks-{one.ranks}",
        title=layout_text(found, one),
        level="answer",
        about=extrapolated,
        words=(advice, fusion),
        sheets=(fastest_predicted_sheet(found, one),),
        sections=(
            Section(
                id=f"all-{one.ranks}",
                title="Every algorithm",
                sheets=(predictions_sheet(found, one),),
                notes=(poor_text(one),),
            ),
        ),
        brief=(advice, *extrapolated, poor_text(one), fusion),
        is_group=True,
    )
