"""Trends and slow nodes as documents with charts: a series over time, own work of slow hosts by month."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

from dlbench.analysis.slow_nodes import ACCUSED
from dlbench.history.series import (
    Change,
    LevelStretch,
    Night,
    Trend,
    amount_text,
    change_cell,
    day,
    evidence_text,
    level_text,
    nights_text,
    percent_change,
    ratio_cell,
)
from dlbench.history.slow_months import SlowMonths
from dlbench.history.tables import ChangeOfSeries, TrendsReport, changes_sheet, hosts_sheet, nights_sheet, series_sheet
from dlbench.report.chart_style import HEIGHT, MEASURED, MUTED, RANK_COLOURS, TONE_COLOURS
from dlbench.report.charts import Chart, ReportSubject, Rows, channel, figure_row, finish, layer, tooltips
from dlbench.report.document import Card, Document, Level, Mark, Section, methods_section
from dlbench.report.wording import basis_text, clean, runs_text
from dlbench.stats.verdict_words import TREND
from dlbench.units import counted, first_of

WIDTH = 1000  # Plot width of a series over time, pixels.
MAX_DRAWN_HOSTS = 6
MAX_TOOLTIP_HOSTS = 4  # Hosts of a night that the tooltip names.
MAX_POINTS = 1_500  # Maximum runs that are drawn as points; of a longer series the nights are drawn.
MAX_NIGHTS = 600
"""Maximum nights in a chart and its table. A longer series is divided into stretches, and the nights with the lowest
and the highest value of each are drawn, so that no outlier is missing."""

_SHAPES = {"worse": "triangle-up", "better": "triangle-down"}
_KINDS = {TREND[outcome].word: (TONE_COLOURS[TREND[outcome].tone], shape) for outcome, shape in _SHAPES.items()}
"""Colour and shape of each kind of change."""

_LEVEL_COLOUR = "#e69f00"
MAX_CHARTED = 20  # Series with a chart, those with the newest changes; all are in the tables.
MIN_DRAWN = 2  # Minimum nights of a series with a chart.
MAX_LINES = 20  # Unchanged series that the terminal names; all are in the tables.
MAX_NAMED = 3  # Slow hosts in a headline.
MAX_HEADLINE = 80
MAX_CARDS = 4


def series_chart(series: Trend) -> Chart:
    """Draws runs over time, levels as lines with their intervals, changes as labelled vertical rules."""
    series = dataclasses.replace(series, nights=_drawn(series))
    factor, unit = _scale(series)
    points, levels = _points(series, factor), [_level_row(level, factor) for level in series.levels]
    values = [row["value"] for row in points]
    for row in levels:
        values += [row[name] for name in ("low", "high", "at_first") if row[name] is not None]
    margin = (max(values) - min(values)) * 0.12 or max(values) * 0.05
    domain = [min(values) - margin, max(values) + 2 * margin]
    scale = {"domain": domain, "nice": False, "zero": False}
    y = channel("value:Q", title=f"{series.subject}, {unit}", scale=scale)
    stretch = {"x": _time("first"), "x2": "last"}
    line = {**stretch, "y": "at_first:Q", "y2": "value", "tooltip": tooltips({"shown": "level", "basis": "interval"})}
    titles = {"run": "run", "shown": "value", "time": "finished", "commit": "commit", "hosts": "hosts"}
    nights = {"x": _time(), "y": y, "tooltip": tooltips(titles)}
    layers = [
        layer(levels, "rect", {**stretch, "y": "low:Q", "y2": "high"}, color=_LEVEL_COLOUR, opacity=0.3),
        layer(levels, "rule", line, color=_LEVEL_COLOUR, strokeWidth=3),
        layer(points, "point", nights, filled=True, size=18, opacity=0.75, color=MEASURED),
    ]
    if series.changes:
        layers += _change_layers([_change_row(change, domain[1]) for change in series.changes])
    return finish(
        layers,
        series,
        name="trend",
        title=f"{series.title} over time",
        alt=f"{series.label}. {series.verdict}",
        table=nights_sheet((series,), is_for_people=True),
        size=(WIDTH, HEIGHT),
    )


def _scale(series: Trend) -> tuple[float, str]:
    largest = max(night.value for night in series.nights)
    if series.unit != "s" or largest >= 1:
        return 1.0, series.unit
    if largest >= 1e-3:
        return 1e3, "ms"
    return 1e6, "µs"


def _drawn(series: Trend) -> tuple[Night, ...]:
    nights, changed = series.nights, {change.time for change in series.changes}
    if len(nights) <= MAX_NIGHTS:
        return nights
    num_stretches = MAX_NIGHTS // 2
    edges = [round(len(nights) * i / num_stretches) for i in range(num_stretches + 1)]
    values = [night.value for night in nights]
    indices = {i for i, night in enumerate(nights) if night.time in changed} | {len(nights) - 1}
    for start, end in pairwise(edges):
        indices.add(min(range(start, end), key=values.__getitem__))
        indices.add(max(range(start, end), key=values.__getitem__))
    return tuple(nights[i] for i in sorted(indices))


def _time(name: str = "time") -> dict[str, Any]:
    # UTC, so that the page says the same in every country.
    axis = {"format": "%d %b %Y", "grid": False}
    return channel(f"{name}:T", title="end of the night's last run, UTC", scale={"type": "utc"}, axis=axis)


def _points(series: Trend, factor: float) -> Rows:
    by_run = series.num_runs <= MAX_POINTS
    rows: Rows = []
    for night in series.nights:
        common = {
            "time": night.time,
            "commit": ", ".join(night.commits) or "not known",
            "hosts": first_of(night.hosts, MAX_TOOLTIP_HOSTS),
        }
        value_by_name = {night.series: night.value}
        if by_run:
            value_by_name = dict(zip(night.run_ids, night.values, strict=True))
        for name, value in value_by_name.items():
            rows.append({**common, "run": name, "value": value * factor, "shown": amount_text(value, series.unit)})
    return rows


def _level_row(level: LevelStretch, factor: float) -> dict[str, Any]:
    row = figure_row(level.value, factor) | {"basis": level.basis, "shown": level_text(level.value)}
    if level.is_drift:
        # The interval of a drift is valid only at its last night: no band.
        row |= {"low": None, "high": None, "shown": f"{level_text(level.value)} at its end"}
    return row | {"first": level.first, "last": level.last, "at_first": level.at_first * factor}


def _change_row(change: Change, top: float) -> dict[str, Any]:
    return {
        "time": change.time,
        "kind": change.kind,
        "label": percent_change(change.ratio.value),
        "shown": str(change_cell(change.ratio)),
        "commit": change.commits,
        "top": top,
    }


def _change_layers(changes: Rows) -> list[dict[str, Any]]:
    colours, shapes = map(list, zip(*_KINDS.values(), strict=True))
    legend = {"orient": "bottom", "symbolSize": 90}
    colour, shape = _legends("kind", list(_KINDS), colours, shapes, legend)
    titles = {"kind": "change", "shown": "by", "time": "first night after", "commit": "code"}
    top = {"x": _time(), "y": "top:Q"}
    mark = {**top, "color": colour, "shape": shape, "tooltip": tooltips(titles)}
    words: dict[str, Any] = {"align": "left", "baseline": "top", "dx": 9, "dy": 1, "fontSize": 12, "color": MUTED}
    return [
        layer(changes, "rule", {"x": _time()}, strokeDash=[4, 3], color=MUTED),
        layer(changes, "point", mark, filled=True, size=110, opacity=1, yOffset=7),
        layer(changes, "text", {**top, "text": "label:N"}, **words),
    ]


def _legends(
    name: str, values: list[str], colours: list[str], shapes: list[str], legend: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the colours and the shapes of a field's values, which have one legend."""
    colour = channel(f"{name}:N", title=None, scale={"domain": values, "range": colours}, legend=legend)
    return colour, {**colour, "scale": {"domain": values, "range": shapes}}


def host_charts(nodes: SlowMonths) -> list[Chart]:
    """Draws the work ratios of the slowest hosts by month; nothing for fewer than two months."""
    drawn = [host for host in nodes.hosts if host.verdict in (*ACCUSED, "suspected")][:MAX_DRAWN_HOSTS]
    if not drawn or len(nodes.months) < 2:
        return []
    rows = []
    for host in drawn:
        for month in host.months:
            basis = basis_text(month.ratio, "night")
            rows.append({**figure_row(month.ratio), "host": host.host, "month": month.month, "basis": basis})
    names = [host.host for host in drawn]
    shapes = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
    legend = {"orient": "bottom", "symbolSize": 70}
    colour, shape = _legends("host", names, list(RANK_COLOURS[: len(names)]), shapes[: len(names)], legend)
    months = list(nodes.months)
    x = channel("month:O", title="month (UTC)", sort=months, scale={"domain": months}, axis={"labelAngle": 0})
    y = channel("value:Q", title="own work, other hosts = 1", scale={"zero": False})
    shared = {"x": x, "color": colour}
    titles = {"host": "host", "month": "month", "shown": "ratio", "basis": "interval"}
    dots = {**shared, "y": y, "shape": shape, "tooltip": tooltips(titles)}
    layers = [
        layer([{"one": 1.0}], "rule", {"y": "one:Q"}, color=MUTED, strokeDash=[5, 4]),
        layer(rows, "line", {**shared, "y": y}, strokeWidth=1.5),
        layer(rows, "rule", {**shared, "y": "low:Q", "y2": "high"}, strokeWidth=3, opacity=0.4),
        layer(rows, "point", dots, filled=True, size=60, opacity=1),
    ]
    words = "; ".join(f"{host.host}: {ratio_cell(host.current)}" for host in drawn if host.current)
    chart = finish(
        layers,
        ReportSubject("nodes", "Mean over the nights of a month; 1: as fast as the others; bars: intervals"),
        name="hosts",
        title="Own work of slow hosts by month",
        alt=f"Own work relative to the other hosts of the same runs, now: {words}; since {day(drawn[0].since)} for "
        f"{drawn[0].host}.",
        table=hosts_sheet(nodes, drawn, most_months=None),
        size=(WIDTH, HEIGHT),
    )
    return [chart]


def trends_document(report: TrendsReport) -> Document:
    """Returns the changes over months, the series, and the slow nodes."""
    followed = [series for series in report.by_newest_change if len(series.nights) >= MIN_DRAWN]
    sections = [_series(series, is_drawn=number < MAX_CHARTED) for number, series in enumerate(followed)]
    return report.document(
        _changes(report),
        *(section for section in sections if section.level == "answer"),
        _all_series(report),
        *(section for section in sections if section.level != "answer"),
        nodes_section(report.nodes),
        *_damaged(report.damaged),
        *methods_section(report.methods, docs_page="docs/history.md"),
        meta=(f"{runs_text(report.num_runs)} with figures, {report.num_without} without.",),
        file_prefix="trends-",
        command="dlbench history trends",
    )


def nodes_document(nodes: SlowMonths) -> Document:
    """Returns the slow nodes by month."""
    return Document(
        title="dlbench history: slow nodes",
        as_of=nodes.as_of,
        sections=(nodes_section(nodes), *_damaged(nodes.damaged)),
        data=nodes,
        command="dlbench history slow-nodes",
    )


def nodes_section(nodes: SlowMonths) -> Section:
    """Returns the nodes over months: which are slow now, and the option that excludes them from jobs."""
    level: Level = "answer"
    if not nodes.hosts:
        headline = ""
        words = [
            f"No run compares hosts: {runs_text(nodes.num_without)} on one host, or with an injected fault. Run on "
            "two nodes or more, for example dlbench submit WORKLOAD --system SYSTEM --nodes 2."
        ]
        brief = words
    else:
        headline = _slow_hosts(nodes)
        about = (
            f"{runs_text(nodes.num_runs)} on two hosts or more, {counted(len(nodes.hosts), 'host')}; "
            f"{runs_text(nodes.num_without)} that compare no hosts."
        )
        words = [about]
        brief = [about, "Ratio: own work of a host's slowest rank, other hosts of the same runs = 1; mean over nights."]
        if nodes.exclude:
            brief.append(f"sbatch {nodes.exclude_option}")
            words.insert(0, f"To exclude the slow nodes from jobs: {brief[-1]}")
        elif not nodes.unsafe:
            brief.append("No node is shown to be slow now.")
            words.insert(0, brief[-1])
        if not nodes.slow:
            level = "evidence"
    slow_texts = ["; ".join([host.sentence, *map(str, host.changes)]) + "." for host in nodes.slow]
    return Section(
        id="nodes",
        title="Slow nodes",
        level=level,
        headline=headline,
        marks=tuple(Mark(severity="serious", text=line) for line in (*slow_texts, *nodes.unsafe_lines)),
        words=tuple(words),
        charts=lambda: host_charts(nodes),
        charts_per_row=1,
        sheets=(hosts_sheet(nodes, nodes.hosts),),
        brief=tuple(brief),
    )


def _slow_hosts(nodes: SlowMonths) -> str:
    if not nodes.slow:
        return "no host is shown to be slow"
    names = ", ".join(host.host for host in nodes.slow[:MAX_NAMED])
    headline = clean(f"{len(nodes.slow)} of {len(nodes.hosts)} hosts slow now: {names}", MAX_HEADLINE)
    if len(nodes.slow) > MAX_NAMED:
        headline += f" and {len(nodes.slow) - MAX_NAMED} more"
    return headline


def _changes(report: TrendsReport) -> Section:
    marks = []
    for series in report.series:
        if series.newest is not None:
            severity: Literal["serious", "note"] = "serious" if series.newest.is_worse else "note"
            marks.append(Mark(severity=severity, text=f"{series.label}: {series.newest_nights_text}"))
    return Section(
        id="changes",
        title="What changed",
        level="answer",
        marks=tuple(marks),
        words=(report.finding,),
        cards=tuple(_card(row) for row in report.changes[:MAX_CARDS]),
        # Few changes are completely described by their cards.
        sheets=(dataclasses.replace(changes_sheet(report), is_folded=len(report.changes) <= MAX_CARDS),),
        brief=(report.finding,),
    )


def _card(row: ChangeOfSeries) -> Card:
    series, change = row
    return Card(
        title=f"{change.words.capitalize()} {change.when}",
        link=f"series-{series.id}",
        big=percent_change(change.ratio.value),
        small=(f"{series.subject}, {change_cell(change.ratio)}", change.basis, evidence_text(change.evidence)),
        words=(
            f"{series.label}: {level_text(change.before)} before, {level_text(change.after)} since; changed "
            f"{change.between}.",
            *(f"{line}." for line in series.details(change)),
        ),
        is_bad=change in series.open_regressions,
    )


def _all_series(report: TrendsReport) -> Section:
    notes = []
    count = sum(len(series.nights) >= MIN_DRAWN for series in report.series)
    if count > MAX_CHARTED:
        notes.append(
            f"{MAX_CHARTED} of {count} trends are drawn, those with the newest changes first; --where and --metric "
            "choose others."
        )
    changed = sum(bool(series.changes) for series in report.series)
    unchanged = [series for series in report.by_newest_change if not series.changes]
    lines = [
        f"- {series.short_verdict}, level {level_text(series.level.value)}: {series.label}"
        for series in unchanged[:MAX_LINES]
    ]
    if len(unchanged) > MAX_LINES:
        lines.append(f"... and {counted(len(unchanged) - MAX_LINES, 'more trend')}")
    return Section(
        id="series",
        title="All trends",
        headline=f"{counted(len(report.series), 'trend')}, {changed} with changes",
        words=() if report.series else ("None.",),
        sheets=(series_sheet(report), nights_sheet(report.series, is_for_people=False)),
        notes=tuple(notes),
        brief=tuple(lines),
    )


def _series(series: Trend, *, is_drawn: bool) -> Section:
    lines: list[str] = []
    for change in reversed(series.changes):
        lines += _lines(ChangeOfSeries(series, change))
    notes = [
        f"{series.caption}. {runs_text(series.num_runs)}, {nights_text(len(series.nights))}. Bands: interval of each "
        "level over nights (order statistics)."
    ]
    if is_drawn and len(series.nights) > MAX_NIGHTS:
        notes.append(
            f"About {MAX_NIGHTS} nights are drawn, the fastest and slowest of every few; the CSV contains all."
        )
    return Section(
        id=f"series-{series.id}",
        title=f"{series.label} (system {clean(series.system)})",
        level="answer" if series.changes else "evidence",
        headline=series.short_verdict,
        words=(series.verdict, series.newest_nights_text),
        charts=lambda: [series_chart(series)] if is_drawn else [],
        charts_per_row=1,
        notes=tuple(notes),
        # Series without a change are lines of `_all_series`.
        brief=(series.verdict, *lines) if lines else (),
        in_contents=is_drawn,
    )


def _lines(row: ChangeOfSeries) -> Iterator[str]:
    """Yields a change for the terminal: the finding, then the differences as items."""
    series, change = row
    mark = "!" if change.kind == "regression" else "+"
    levels = f"{level_text(change.before)} to {level_text(change.after)}"
    yield (
        f"{mark} {day(change.time)} {change.words}: {change_cell(change.ratio)}, {levels}; {change.basis}; "
        f"{evidence_text(change.evidence)}"
    )
    for line in (change.between, *series.details(change)):
        yield f"- {line}"


def _damaged(runs: Sequence[str]) -> tuple[Section, ...]:
    if not runs:
        return ()
    marks = tuple(Mark(severity="serious", text=line) for line in runs)
    return (Section(id="damaged", title="Damaged", level="answer", marks=marks),)
