"""The report of the collective benchmark as a `Document`: a section per group and per fit, and the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from dlbench.comm.costs import COST_WORDS, COSTS, Cost, sheet_of
from dlbench.comm.fits import NetworkFit, PredictionErrors
from dlbench.comm.measurements import MeasuredGroup, Measurement, Rejected, rate
from dlbench.comm.pairs import LEVEL_TITLES, PairFigure, PairsReport
from dlbench.comm.report import TITLE, CollectivesReport, GroupReport, RunRow
from dlbench.comm.wording import STAY_WITHIN, Best, fit_caption, per_byte_text
from dlbench.report.chart_style import RANK_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Series, figure_row, finish, scatter
from dlbench.report.document import (
    MAX_LISTED,
    Card,
    Document,
    Mark,
    Section,
    methods_section,
    remark,
    runs_sheet_of,
    without_figures,
)
from dlbench.report.table import (
    Cell,
    Column,
    Pivot,
    Sheet,
    Value,
    cell_of,
    column,
    columns_of,
    drop_empty_columns,
    named_table,
    text_sheet,
    times_cell,
)
from dlbench.report.wording import basis_text, figure_text, interval_text, percent, runs_text, value_text
from dlbench.specs.comm import LineCost, NetworkModel
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import counted, format_bytes

MOST_DRAWN = 32  # Series of pairs in one chart.
MOST_LABELS = 7  # Labels of the axis of sizes.
HEIGHT = 260  # Of charts, pixels.
SIZE_LABEL = "".join(
    f"datum.value >= {2**power} ? format(datum.value / {2**power}, '~r') + ' {unit}' : "
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"))
)
SIZE_LABEL += "datum.value + ' B'"
"""Vega's expression for bytes in the largest unit that is not above them."""

# Columns in front of every row of the tables of a group and of a fit.
GROUP_COLUMNS = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")
FIT_COLUMNS = ("system", "carrier", "dtype")

POINT_COLUMNS = columns_of(
    Measurement,
    *("carrier=series.carrier", "algorithm=series.algorithm", "num_bytes", "time", "minimum_s", "algbw", "busbw"),
    *("runs=time.n", "interval=time.kind", "iterations", "operations", "timing", "single_call_s", "skew_s"),
    *("steps", "messages", "bytes_sent", "bytes_across", "predicted_s", "predicted_over_measured", "fastest=is_best"),
)
REJECTED_COLUMNS = columns_of(Rejected)
PAIR_COLUMNS = columns_of(
    PairFigure,
    *("pair", "level", "way"),
    *columns_of(Measurement, "num_bytes", "time", "minimum_s", of=attrgetter("at")),
    Column("gb_per_s", "Bandwidth, GB/s", attrgetter("at.algbw"), has_interval=True, is_brief=True),
    *("beside", "factor", "factor_p99", "operations=at.iterations"),
)
RUN_COLUMNS: tuple[Column[RunRow], ...] = columns_of(
    RunRow,
    *("run_id", "group", "state", "collective", "dtype", "system", "ranks", "nodes", "repeat"),
    *("finished", "failure_reason", "warnings"),
    titles={"repeat": "Repeat"},
)
LINE_COLUMNS: tuple[Column[LineCost], ...] = columns_of(
    LineCost,
    *("name", "ranks"),
    Column("alpha_s", "Start-up", attrgetter("startup_s"), unit="s"),
    Column("s_per_byte", "Asymptotic algbw, GB/s", "per_byte_s", lambda line: per_byte_text(line.per_byte_s)),
    titles={"name": "Collective", "ranks": "Ranks"},
)


def _per_byte_cell(beta: Estimate) -> Cell:
    if beta.low is None or beta.high is None:
        return Cell(per_byte_text(beta.value))
    fastest = per_byte_text(beta.low) if beta.low > 0 else "∞"
    return Cell(per_byte_text(beta.value), f"[{per_byte_text(beta.high)}, {fastest}]")


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """The cost of messages of some sizes on one level, or of a reduced byte."""

    name: str = field(metadata=column("Level", text=lambda name: LEVEL_TITLES.get(name, name)))
    messages: str = field(metadata=column("Messages", ""))
    up_to_bytes: int | None = None
    links: int | None = None
    links_text: str = field(default="", metadata=column("Links", ""))
    alpha: Estimate | None = field(default=None, metadata=column("alpha", "alpha_s"))
    beta: Estimate = field(metadata=column("1/beta, GB/s", "s_per_byte", text=_per_byte_cell))


COST_COLUMNS = columns_of(MessageCost, "name", "messages", "up_to_bytes", "links", "links_text", "alpha", "beta")


def document_of(report: CollectivesReport) -> Document:
    """Returns the whole report."""
    groups: tuple[GroupReport | PairsReport, ...] = (*report.groups, *report.pairs)
    reason = "The reason for each run is below." if report.runs else "There are no runs here."
    empty = () if groups else (f"No run has figures. {reason}",)
    cards = tuple(map(_card, groups))
    return report.document(
        Section(id="summary", title="Summary", level="answer", words=empty, cards=cards, brief=empty),
        *map(_group, report.groups),
        *map(_pairs, report.pairs),
        *(_fit(fit, number) for number, fit in enumerate(report.fits)),
        *_runs(report),
        *methods_section(report.methods, docs_page="docs/communication.md"),
        runs=report.runs,
        always=(
            named_table("points", "Measured points", (*POINT_COLUMNS, *REJECTED_COLUMNS), GROUP_COLUMNS),
            named_table("pairs", "Pairs of ranks", PAIR_COLUMNS, ("group",)),
            named_table("costs", "Cost of each algorithm", COSTS, GROUP_COLUMNS),
            named_table("fits", "Fitted costs", (*LINE_COLUMNS[:2], *COST_COLUMNS), FIT_COLUMNS),
            named_table("runs", "All runs", RUN_COLUMNS),
        ),
        file_prefix="comm-",
        command="dlbench comm report RUNS",
    )


def fit_document(fit: NetworkFit) -> Document:
    """Returns a document of one fit, with the points that were left out of it."""
    section = replace(_fit(fit, 0), marks=tuple(remark("note", f"left out: {text}") for text in fit.left_out))
    return Document(title=TITLE, sections=(section,), data=fit)


def costs_document(title: str, tables: Mapping[str, Sequence[Cost]], num_bytes: int) -> Document:
    """Returns the cost of each algorithm at one size, with a section for each layout."""
    sections = [
        Section(id=f"costs-{number}", title=layout, level="answer", sheets=(sheet_of(rows, num_bytes),), brief=())
        for number, (layout, rows) in enumerate(tables.items(), 1)
    ]
    sections[-1] = replace(sections[-1], brief=(COST_WORDS,))
    return Document(title=title, sections=tuple(sections), data=tuple(tables.items()), command="dlbench comm table")


def _card(group: GroupReport | PairsReport) -> Card:
    if isinstance(group, PairsReport):
        end = max(group.ends, key=attrgetter("level", "way"))
        card_rate, words = end.at.algbw, group.words
        caption = f"GB/s by {end.way} of {format_bytes(end.at.num_bytes)}, {LEVEL_TITLES[end.level]}"
    else:
        last = group.best[-1]
        card_rate, words = last.rate, (group.verdict,)
        caption = f"GB/s {group.rate_name} at {format_bytes(last.num_bytes)}, {last.title}"
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=value_text(card_rate),
        small=(caption, *filter(None, (interval_text(card_rate), basis_text(card_rate)))),
        words=words,
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _facts(group: MeasuredGroup) -> tuple[tuple[str, str], ...]:
    return tuple((condition.title, condition.value) for condition in group.conditions)


def _doubt_marks(group: MeasuredGroup) -> tuple[Mark, ...]:
    return tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts)


def _group(group: GroupReport) -> Section:
    last = group.best[-1]
    values = {condition.name: condition.value for condition in group.conditions}
    cores = f"{counted(int(values['cores']), 'core')} per rank"
    conditions = (values["device"], cores, values["launcher"], f"hosts {values['hosts']}", runs_text(group.num_runs))
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=_facts(group),
        marks=(*_doubt_marks(group), *(remark("note", f"not measured: {text}") for text in group.not_measured)),
        sections=tuple(_sections(group)),
        brief=(", ".join(conditions), group.verdict),
        is_group=True,
        overview=(
            ("At", format_bytes(last.num_bytes)),
            ("Fastest", last.title),
            ("Time, median", figure_text(last.time)),
            ("Rate, GB/s", figure_text(last.rate)),
            ("Interval", basis_text(last.time)),
        ),
        where={"group": group.id} | {name: getattr(group, name) for name in GROUP_COLUMNS[1:]},
    )


def _sections(group: GroupReport) -> Iterator[Section]:
    last = group.best[-1]
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice,),
        caption=f"Lead: time of the next algorithm over that of the fastest. Clear: the lead is above "
        f"{percent(STAY_WITHIN, 0)}, beyond the scatter of at least {MIN_RUNS} runs.",
        sheets=(best_sheet(group),),
        brief=(),
    )
    over_size = Section(id=f"sizes-{group.id}", title="Over size", level="answer", brief=())
    if len(group.best) > 1:
        yield replace(over_size, charts=partial(size_charts, group))
    else:
        yield replace(over_size, words=("Only one size: two or more (--sizes 1KiB:64MiB) are drawn over size.",))
    sheets: list[Sheet[Any]] = [times_sheet(group), rates_sheet(group)]
    if group.costs:
        sheets.append(sheet_of(group.costs, last.num_bytes))
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        sheets=tuple(sheets),
        brief=(),
    )
    if group.rejected:
        title = "Points without figures"
        sheet = Sheet(name="points", title=title, columns=REJECTED_COLUMNS, rows=group.rejected)
        headline = f"{len(group.rejected)} points"
        yield Section(id=f"rejected-{group.id}", title=title, headline=headline, sheets=(sheet,), brief=())


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """Returns time, rates and lead of the fastest series of each size; rates need no interval of their own."""
    short = group.short_titles
    columns: list[Column[Best]] = [
        Column("", "Size", "num_bytes", unit="bytes", is_brief=True),
        Column("", "Fastest", lambda best: short[best.title], is_brief=True),
        Column("", "Time, median", "time", is_brief=True),
        Column("", "algbw, GB/s", lambda best: value_text(rate(best.time, best.num_bytes))),
        Column("", "Next", lambda best: short.get(best.second)),
        Column("", "Lead", "lead", lambda best: times_cell(best.lead), is_brief=True),
        Column("", "Clear", "is_clear", _clear_text, is_brief=True),
    ]
    if group.rate_name == "busbw":
        columns.insert(4, Column("", "busbw, GB/s", lambda best: value_text(best.rate), is_brief=True))
    intervals = dict.fromkeys(basis_text(best.time) for best in group.best)
    return Sheet(
        name="fastest",
        title="Fastest by size",
        columns=tuple(columns),
        rows=group.best,
        caption=f"Intervals: {', '.join(intervals)}.",
        in_terminal=True,
    )


def _clear_text(best: Best) -> str:
    if best.is_clear:
        return "yes"
    if best.lead is not None and best.lead.n < MIN_RUNS:
        return f"no: {runs_text(best.lead.n)}"
    return "no"


def times_sheet(group: MeasuredGroup) -> Sheet[Measurement]:
    """Returns every time; for programs every field of each point."""
    intervals = dict.fromkeys(basis_text(point.time) for point in group.points)
    return replace(
        _sheet_by_size(group, "points", "Times by size and algorithm", _time_cell),
        columns=POINT_COLUMNS,
        caption=f"* fastest. Intervals: {', '.join(intervals)}.",
    )


def _time_cell(point: Measurement) -> Cell:
    cell = cell_of(point.time)
    if point.is_best:
        return replace(cell, text=f"{cell.text} *")
    return cell


def rates_sheet(group: MeasuredGroup) -> Sheet[Measurement]:
    """Returns every rate."""
    return _sheet_by_size(group, "rates", "busbw, GB/s", attrgetter("rate"))


def _sheet_by_size(
    group: MeasuredGroup, name: str, title: str, cell: Callable[[Measurement], Value | Cell]
) -> Sheet[Measurement]:
    """Returns a folded table with a line per size and a column per series, which the terminal leaves out."""
    short = group.short_titles
    return Sheet(
        name=name,
        title=title,
        columns=(),
        rows=group.points,
        order=attrgetter("num_bytes"),
        pivot=Pivot(
            corner="Size",
            down=lambda point: format_bytes(point.num_bytes),
            across=lambda point: short[point.series.title],
            cell=cell,
        ),
        is_folded=True,
    )


def size_charts(group: MeasuredGroup) -> list[Chart]:
    """Returns the charts of rate and time over size."""
    rate_axis, time_axis = Axis("busbw, GB/s", scale={"domainMin": 0}), Axis("time", unit="s", scale={"type": "log"})
    return [
        _size_chart(group, "busbw", "Bandwidth over size", rate_axis, "rate", rates_sheet(group)),
        _size_chart(group, "time", "Time over size", time_axis, "time", times_sheet(group)),
    ]


def _size_chart(group: MeasuredGroup, name: str, title: str, y: Axis, figure: str, table: Sheet[Measurement]) -> Chart:
    short = group.short_titles
    colours = {series: RANK_COLOURS[number % len(RANK_COLOURS)] for number, series in enumerate(short.values())}
    sizes = sorted({point.num_bytes for point in group.points})
    size_title = "bytes of each rank's buffer"
    if isinstance(group, PairsReport):
        size_title = "bytes of a message"
    x = Axis(
        size_title,
        field="bytes",
        scale={"type": "log", "base": 2, "domain": [sizes[0] / 1.15, sizes[-1] * 1.15], "nice": False},
        axis={"values": sizes[:: -(-len(sizes) // MOST_LABELS)], "grid": False, "labelExpr": SIZE_LABEL},
    )
    rows = [
        {
            "series": short[point.series.title],
            "bytes": point.num_bytes,
            "size": format_bytes(point.num_bytes),
            **figure_row(getattr(point, figure)),
        }
        for point in group.points
    ]
    # The largest size of each series is enough for a screen reader; the table has all.
    last = {row["series"]: f"{row['series']} at {row['size']}: {row['shown']}" for row in rows}
    tooltip = {"series": "series", "size": "size", "shown": name, "basis": "interval"}
    return finish(
        scatter(rows, x, y, Series("series", colours), tooltip, line=1.5),
        group,
        name=name,
        title=title,
        alt=f"{title} of {group.label}. {'; '.join(last.values())}.",
        table=table,
        size=(WIDE, HEIGHT),
    )


def _pairs(group: PairsReport) -> Section:
    figures = drop_empty_columns(PAIR_COLUMNS, group.figures)
    charts: Callable[[], Sequence[Chart]] = tuple
    if len(group.series) <= MOST_DRAWN:
        charts = partial(size_charts, group)
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"Medians over {runs_text(group.num_runs)} of single operations. Ping-pong: half of a round trip. "
        "Window: one of several messages in flight, with one answer to all. Congestors send messages of 1 MiB without "
        "pause, first rank to second; factors are of the same runs, percentiles of 100 operations or more.",
        facts=_facts(group),
        marks=_doubt_marks(group),
        words=group.words,
        charts=charts,
        sheets=(
            Sheet(name="pairs", title="Pairs of ranks", columns=figures, rows=group.figures, max_rows=MAX_LISTED),
            _pair_costs_sheet(group),
        ),
        brief=(f"{runs_text(group.num_runs)}.", *group.words),
        is_group=True,
        where={"group": group.id},
    )


def _pair_costs_sheet(group: PairsReport) -> Sheet[MessageCost]:
    costs = [
        MessageCost(name=level.level, messages="pairs, ping-pong", alpha=level.alpha, beta=level.beta)
        for level in group.costs
    ]
    if group.fit is not None:
        fitted = costs_sheet(group.fit.network).rows
        costs += (replace(cost, messages=f"collectives, {cost.messages}") for cost in fitted)
    columns = columns_of(MessageCost, "name", "messages", "alpha", "beta")
    columns = tuple(replace(column_of_cost, name="") for column_of_cost in columns)
    return Sheet(name="fits", title="Costs of a message", columns=columns, rows=costs, in_terminal=True)


def _fit(fit: NetworkFit, number: int) -> Section:
    headline = "lines of libraries"
    if fit.errors:
        headline = f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}"
        poor = sum(errors.is_poor for errors in fit.errors)
        if poor:
            headline += f"; errors of {counted(poor, 'algorithm')} are too large for a recommendation"
    lines = fit.network.collectives
    return Section(
        id=f"fit-{number}",
        title=f"Fitted costs of {fit.title}",
        headline=headline,
        sheets=(
            costs_sheet(fit.network),
            Sheet(name="errors", title="Errors of predictions", columns=columns_of(PredictionErrors), rows=fit.errors),
            Sheet(
                name="fits",
                title="Each collective as a line",
                columns=LINE_COLUMNS,
                rows=lines,
                is_folded=bool(fit.network.levels),
            ),
        ),
        brief=(),
        where={name: getattr(fit, name) for name in FIT_COLUMNS},
    )


def costs_sheet(network: NetworkModel) -> Sheet[MessageCost]:
    """Returns the costs by level and size of a message, and of the reduction; 1/beta is a rate."""
    rows = []
    for name, level in network.levels.items():
        block = {"inside": "group", "across": "group", "beyond": "leaf switch"}[name]
        links_text = "one per rank"
        if level.links is not None:
            links_text = f"{level.links} per {block}"
        above = "all sizes"
        for piece in level.pieces:
            messages = above
            if piece.up_to_bytes is not None:
                end = format_bytes(piece.up_to_bytes)
                messages, above = f"up to {end}", f"above {end}"
            cost = MessageCost(
                name=name,
                messages=messages,
                up_to_bytes=piece.up_to_bytes,
                links=level.links,
                links_text=links_text,
                alpha=_fitted(piece.alpha_s, piece.alpha_interval_s, "s"),
                beta=_fitted(piece.beta_s_per_byte, piece.beta_interval_s_per_byte),
            )
            rows.append(cost)
    if rows:
        rows.append(MessageCost(name="reduction", messages="all sizes", beta=_fitted(network.gamma_s_per_byte, None)))
    caption = fit_caption(network)
    return Sheet(name="fits", title="Costs of a message", columns=COST_COLUMNS, rows=rows, caption=caption)


def _fitted(value: float, ends: tuple[float, float] | None, unit: str = "") -> Estimate:
    if ends is None:
        return Estimate(value, None, None, 1, "fit", unit, level=None)
    return Estimate(value, *ends, 1, "fit", unit, level=0.95)


def _runs(report: CollectivesReport) -> Iterator[Section]:
    if report.unfitted:
        marks = tuple(remark("note", text) for text in report.unfitted)
        yield Section(id="not-fitted", title="Not fitted", marks=marks)
    if report.runs:
        yield Section(id="runs", title="Runs", level="appendix", sheets=(runs_sheet_of(RUN_COLUMNS, report.runs),))
    yield from without_figures(report.without_figures, report.damaged)
    if report.environment:
        title = "Environment that all runs with figures share"
        folded = replace(text_sheet("environment", title, ("Key", "Value"), report.environment), is_folded=True)
        yield Section(id="environment", title="Environment", level="appendix", sheets=(folded,))
