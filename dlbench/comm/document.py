"""The report of the collective benchmark as a `Document`: a section for each group, each fit, and the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from dlbench.comm.choice import STAY_WITHIN, Best
from dlbench.comm.costs import COST_WORDS, COSTS, Cost, sheet_of
from dlbench.comm.fits import NetworkFit, PredictionErrors
from dlbench.comm.measurements import MeasuredGroup, Measurement, Rejected
from dlbench.comm.pairs import LEVEL_TITLES, PairFigure, PairsReport
from dlbench.comm.report import TITLE, CollectivesReport, GroupReport, RunRow
from dlbench.comm.wording import fit_caption, per_byte_text
from dlbench.report.charts.chart import Chart, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, scatter
from dlbench.report.charts.style import RANK_COLOURS, WIDE
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
    Column(
        "s_per_byte",
        "Asymptotic algbw, GB/s",
        attrgetter("per_byte_s"),
        lambda line: per_byte_text(line.per_byte_s),
    ),
    titles={"name": "Collective", "ranks": "Ranks"},
)


def _per_byte_cell(beta: Estimate) -> Cell:
    if beta.low is None or beta.high is None:
        return Cell(per_byte_text(beta.value))
    fastest = per_byte_text(beta.low) if beta.low > 0 else "∞"
    return Cell(per_byte_text(beta.value), f"[{per_byte_text(beta.high)}, {fastest}]")


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """What messages of some sizes cost on one level, or a byte of a reduction."""

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
    empty: tuple[str, ...] = ()
    if not groups:
        more = "Below, each run with the reason." if report.runs else "There are no runs here."
        empty = (f"No run has figures. {more}",)
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
    """Returns one fit alone, with what was left out of it."""
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
        rate, words = end.at.algbw, group.words
        what = f"by {end.way} of {format_bytes(end.at.num_bytes)}, {LEVEL_TITLES[end.level]}"
    else:
        last = group.best[-1]
        rate, words = last.rate, (group.verdict,)
        what = f"{group.rate_name} at {format_bytes(last.num_bytes)}, {last.title}"
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


def _facts(group: MeasuredGroup) -> tuple[tuple[str, str], ...]:
    return tuple((condition.title, condition.value) for condition in group.conditions)


def _doubt_marks(group: MeasuredGroup) -> tuple[Mark, ...]:
    return tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts)


def _group(group: GroupReport) -> Section:
    last = group.best[-1]
    values = {condition.name: condition.value for condition in group.conditions}
    cores = f"{values['cores']} core{'' if values['cores'] == '1' else 's'} per rank"
    conditions = (values["device"], cores, values["launcher"], f"hosts {values['hosts']}", runs_text(group.num_runs))
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=_facts(group),
        marks=(*_doubt_marks(group), *(remark("note", f"not measured: {text}") for text in group.not_measured)),
        sections=tuple(_sections(group)),
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


def _sections(group: GroupReport) -> Iterator[Section]:
    """Yields which algorithm to use, rate and time over size, all times and costs, and points without a right time."""
    last = group.best[-1]
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice,),
        caption=f"Lead: time of the next over that of the fastest. Clear: more than {percent(STAY_WITHIN, 0)}, and "
        f"beyond the scatter of {MIN_RUNS} runs or more; fewer are too few, whatever the lead.",
        sheets=(best_sheet(group),),
        brief=(),
    )
    is_drawn = len(group.best) > 1
    yield Section(
        id=f"sizes-{group.id}",
        title="Over size",
        level="answer",
        words=() if is_drawn else ("One size only: two or more (--sizes 1KiB:64MiB) are drawn over size.",),
        charts=lambda: size_charts(group) if is_drawn else (),
        brief=(),
    )
    costs = (sheet_of(group.costs, last.num_bytes),) if group.costs else ()
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        sheets=(times_sheet(group), rates_sheet(group), *costs),
        brief=(),
    )
    if group.rejected:
        title = "Points without figures"
        sheet = Sheet(name="points", title=title, columns=REJECTED_COLUMNS, rows=group.rejected)
        headline = f"{len(group.rejected)} points"
        yield Section(id=f"rejected-{group.id}", title=title, headline=headline, sheets=(sheet,), brief=())


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """Returns the fastest series of each size; without the carrier where all algorithms have the same."""
    short = group.short_titles
    columns: tuple[Column[Best], ...] = (
        Column("", "Size", attrgetter("num_bytes"), unit="bytes", is_brief=True),
        Column("", "Fastest", lambda best: short[best.title], is_brief=True),
        Column("", "Time, median", attrgetter("time"), is_brief=True),
        Column("", f"{group.rate_name}, GB/s", attrgetter("rate"), is_brief=True),
        Column("", "Minimum", attrgetter("minimum_s"), unit="s"),
        Column("", "Next", lambda best: short.get(best.second)),
        Column("", "Lead", attrgetter("lead"), lambda best: times_cell(best.lead), is_brief=True),
        Column("", "Clear", attrgetter("is_clear"), _clear_text, is_brief=True),
    )
    return Sheet(name="fastest", title="Fastest by size", columns=columns, rows=group.best, in_terminal=True)


def _clear_text(best: Best) -> str:
    """Returns whether the fastest is clearly so, and if too few runs forbid it, how many there are."""
    if best.lead is not None and best.lead.n < MIN_RUNS:
        return f"no: {runs_text(best.lead.n)}"
    return "yes" if best.is_clear else "no"


def times_sheet(group: MeasuredGroup) -> Sheet[Measurement]:
    """Returns every time, and for programs all that is known of each point."""
    intervals = dict.fromkeys(basis_text(point.time) for point in group.points)
    return replace(
        _sheet_by_size(group, "points", "Times by size and algorithm", _time_cell),
        columns=POINT_COLUMNS,
        caption=f"* fastest. Intervals: {', '.join(intervals)}.",
    )


def _time_cell(point: Measurement) -> Cell:
    cell = cell_of(point.time)
    return replace(cell, text=f"{cell.text} *") if point.is_best else cell


def rates_sheet(group: MeasuredGroup) -> Sheet[Measurement]:
    """Returns every rate."""
    return _sheet_by_size(group, "rates", "busbw, GB/s", attrgetter("rate"))


def _sheet_by_size(
    group: MeasuredGroup, name: str, title: str, cell: Callable[[Measurement], Value | Cell]
) -> Sheet[Measurement]:
    """Returns a line for each size, a column for each series."""
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
    )


def size_charts(group: MeasuredGroup) -> list[Chart]:
    """Returns rate and time over size; a table of all numbers behind each."""
    rate, time = Axis("busbw, GB/s", scale={"domainMin": 0}), Axis("time", unit="s", scale={"type": "log"})
    return [
        _size_chart(group, "busbw", "Bandwidth over size", rate, "rate", rates_sheet(group)),
        _size_chart(group, "time", "Time over size", time, "time", times_sheet(group)),
    ]


def _size_chart(group: MeasuredGroup, name: str, title: str, y: Axis, figure: str, table: Sheet[Measurement]) -> Chart:
    """Returns one field of the points of a group over size."""
    short = group.short_titles
    colours = {series: RANK_COLOURS[number % len(RANK_COLOURS)] for number, series in enumerate(short.values())}
    sizes = sorted({point.num_bytes for point in group.points})
    x = Axis(
        "bytes of a message" if isinstance(group, PairsReport) else "bytes of each rank's buffer",
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
    # At the largest size of each series: enough to hear what the chart shows; the table holds all.
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
    """Returns what was found, who is hit, over size, the numbers, and what a message costs by them."""
    figures = drop_empty_columns(PAIR_COLUMNS, group.figures)
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"Medians over {runs_text(group.num_runs)} of single operations. Ping-pong: half of there and back. "
        "Window: one of several messages under way at once, with the answer to all. Congestors send 1 MiB after the "
        "other, first rank to second; factors are of the same runs, percentiles of 100 operations or more.",
        facts=_facts(group),
        marks=_doubt_marks(group),
        words=group.words,
        charts=lambda: size_charts(group) if len(group.series) <= MOST_DRAWN else [],
        sheets=(
            Sheet(name="pairs", title="Pairs of ranks", columns=figures, rows=group.figures, max_rows=MAX_LISTED),
            _pair_costs_sheet(group),
        ),
        brief=(f"{runs_text(group.num_runs)}.", *group.words),
        is_group=True,
        where={"group": group.id},
    )


def _pair_costs_sheet(group: PairsReport) -> Sheet[MessageCost]:
    """Returns costs by the pairs next to those fitted to collectives; for people alone."""
    costs = [
        MessageCost(name=level.level, messages="pairs, ping-pong", alpha=level.alpha, beta=level.beta)
        for level in group.costs
    ]
    if group.fit is not None:
        fitted = costs_sheet(group.fit.network).rows
        costs += (replace(cost, messages=f"collectives, {cost.messages}") for cost in fitted)
    columns = columns_of(MessageCost, "name", "messages", "alpha", "beta")
    columns = tuple(replace(one, name="") for one in columns)
    return Sheet(name="fits", title="Costs of a message", columns=columns, rows=costs, in_terminal=True)


def _fit(fit: NetworkFit, number: int) -> Section:
    headline = "lines of libraries"
    if fit.errors:
        headline = f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}"
        poor = sum(errors.is_poor for errors in fit.errors)
        if poor:
            headline += f"; {poor} algorithms missed, no advice from them"
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
    """Returns costs by level and size of a message, and of the reduction; a rate is a cost per byte turned over."""
    rows = []
    for name, level in network.levels.items():
        block = {"inside": "group", "across": "group", "beyond": "leaf switch"}[name]
        links_text = "one per rank" if level.links is None else f"{level.links} per {block}"
        above = "all sizes"
        for piece in level.pieces:
            messages = above
            if piece.up_to_bytes is not None:
                messages, above = (f"{side} {format_bytes(piece.up_to_bytes)}" for side in ("up to", "above"))
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
    low, high = ends or (None, None)
    return Estimate(value, low, high, 1, "fit", unit, level=None if ends is None else 0.95)


def _runs(report: CollectivesReport) -> Iterator[Section]:
    """Yields what was not fitted, all runs, those without figures, and what they ran in."""
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
