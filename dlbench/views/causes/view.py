"""Lost efficiency: words, tables, charts (a waterfall of the largest rank count, and points lost at all rank counts)
and the section of a group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import EXCHANGE_PHASE
from dlbench.report.chart_style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Rows, Series, channel, finish, layer, short, stacked, tooltips
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value, cell_of, columns_of, drop_empty_columns
from dlbench.report.wording import (
    POINTS,
    basis_text,
    figure_text,
    lost_text,
    lost_value,
    number_text,
    runs_text,
    value_text,
)
from dlbench.stats.estimates import Estimate
from dlbench.units import first_of
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED, ROW_TITLES, CauseShare
from dlbench.views.causes.numbers import CausePoint, Diagnosed, Diagnosis, LostPercent, lost_percent
from dlbench.views.model import MEANS, GroupSource, GroupView, ReportGroup, place_of

CAUSE_COLOURS = {  # A cause that is also a phase of the step has that phase's colour.
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "gather": "#332288",
    "bubble": "#999933",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "launch": "#6b4ea0",
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}
_IDEAL, _MEASURED = "#676d76", "#1769ab"  # Dark enough for white words in both colour schemes.
_ROW = 42  # Height of a row of a waterfall, a name and the bar below it, pixels.
_ALONE = 1060  # Plot width of a waterfall without a chart next to it, pixels: as wide as a page of 1400.
_STILL = 350  # Plot width of a waterfall without scripts, pixels: a telephone's.
_ROOM_FOR_WORDS = 45.0  # Percent: the words of a bar that begins further left, with its interval, are at its right end.
MOST_ALONE = 2  # Rank counts up to which the waterfall is the only chart.
VARIANT = (  # Remedy of a group without causes.
    "not shown: in these runs something was taken away on purpose; the plain runs next to them have this view, and "
    "dlbench diagnose says what the difference is."
)
MAX_PLANTED = 8  # Ranks with an injected fault that are named.


@dataclass(frozen=True)
class Trial:
    """An experiment at a rank count."""

    point: CausePoint
    text: str


@dataclass(frozen=True)
class AccountRow:
    """A part at one rank count, or the sum of all."""

    point: CausePoint
    part: Part
    title: str
    part_of: str = ""  # The row that it is part of; empty for the terms of the sum.
    is_lost: bool = False  # Whether it is shown as lost points, for people only, and not in seconds.
    kind: RowKind = ""

    @property
    def share(self) -> CauseShare | None:
        return self.part if isinstance(self.part, CauseShare) else None

    @property
    def is_measured(self) -> bool:
        return self.share is None or self.share.is_measured

    @property
    def measured(self) -> Part | None:
        return self.part if self.is_measured else None

    @property
    def place(self) -> str:
        return place_of(self.point)

    @property
    def heading(self) -> str:
        return f"Lost at {self.place}" if self.is_lost else self.place

    @property
    def lost_text(self) -> Cell | str:
        return lost_cell(self.part.lost) if self.is_measured else NOT_MEASURED


_COLUMNS: tuple[Column[AccountRow], ...] = (
    *columns_of(AccountRow, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline"),
    *columns_of(AccountRow, "part=part.name", "part_of", "is_measured", "why_not_measured=share.reasons"),
    Column("seconds", "", "measured.seconds", has_interval=True),
    Column("ideal_seconds", "", "measured.ideal_seconds"),
    Column("lost_fraction", "", "measured.lost", has_interval=True),
    *columns_of(AccountRow, "adjusted_p=share.adjusted_p.value", "runs=part.seconds.n"),
    *columns_of(AccountRow, "seconds_interval=part.seconds.kind", "lost_interval=part.lost.kind"),
    *columns_of(AccountRow, "remarks=share.remarks"),
)


def account_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Returns seconds per step of each part at each rank count, and points lost to it at the largest."""
    rows = list(itertools.chain.from_iterable(map(_rows, points)))
    titles = _titles_shown(rows)
    has_loss = bool(points) and not points[-1].is_baseline
    if has_loss:
        rows += [dataclasses.replace(row, is_lost=True) for row in _rows(points[-1])]

    def cell(row: AccountRow) -> Value | Cell:
        if row.is_lost:
            return lost_cell(row.part.lost)
        if has_loss:
            # Seconds next to lost points have no intervals; programs get them.
            return Cell(value_text(row.part.seconds), number=row.part.seconds.value)
        return row.part.seconds

    return Sheet(
        name="parts",
        title="Parts of the mean step",
        columns=_COLUMNS,
        rows=rows,
        pivot=Pivot(corner="Part", down="title", across="heading", cell=cell),
        is_shown=lambda row: row.title in titles,
        is_data=lambda row: not row.is_lost,
        kind=attrgetter("kind"),
        caption=_caption(points) if points else "",
    )


def _rows(point: CausePoint) -> Iterator[AccountRow]:
    for share in point.causes:
        if share.name == "exchange":
            yield AccountRow(point, point.exchange_phase, ROW_TITLES[EXCHANGE_PHASE])
        row = AccountRow(point, share, ROW_TITLES[share.name])
        if share.name in ("exchange", "straggler"):
            row = dataclasses.replace(row, part_of=EXCHANGE_PHASE, kind="part")
        yield row
        for part in share.parts:
            yield AccountRow(point, part, ROW_TITLES[part.name], share.name, kind="part")
    yield AccountRow(point, point.whole, "sum: mean step", kind="sum")


def _titles_shown(rows: Sequence[AccountRow]) -> set[str]:
    """Returns the lines that take time anywhere, without those that are the only part of another line."""
    titles = set()
    children: dict[str, set[str]] = {}
    unmeasured = {row.title for row in rows if not row.is_measured}
    for row in rows:
        if row.part.seconds.value > 0 or row.kind == "sum":
            titles.add(row.title)
            if row.part_of and row.part_of != EXCHANGE_PHASE:
                children.setdefault(row.part_of, set()).add(row.title)
    for child_titles in children.values():
        if len(child_titles) == 1:
            titles -= child_titles
    return titles - unmeasured


def _caption(points: Sequence[CausePoint]) -> str:
    last = points[-1]
    absent = []  # Parts that take no time at any rank count, though they were measured.
    for index, share in enumerate(points[0].causes):
        # On CPUs nothing is launched, and replicas gather nothing and have no stages.
        is_possible = share.name not in ("launch", "gather", "bubble") or share.notes
        shares = [point.causes[index] for point in points]
        if is_possible and all(other.is_measured and not other.seconds.value for other in shares):
            absent.append(CAUSE_TITLES[share.name])
    figure = last.whole.seconds if last.is_baseline else last.whole.lost
    text = f"Per step, of the ranks that are on time. Intervals: {basis_text(figure)}."
    if absent:
        text += f" No time: {', '.join(absent)}."
    return text


def lost_cell(lost: Estimate) -> Cell:
    """Returns a share of efficiency in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[AccountRow]:
    """Returns points lost to each part at each rank count, largest first at the last: the numbers of a chart."""
    rows = []
    for share in sorted(points[-1].causes, key=lambda share: -share.lost.value):
        rows += [AccountRow(point, point.cause(share.name), CAUSE_TITLES[share.name]) for point in points]
    rows += [AccountRow(point, point.whole, "in all", kind="sum") for point in points]

    def is_shown(row: AccountRow) -> bool:
        return row.kind == "sum" or not row.is_measured or bool(row.part.seconds.value or row.part.lost.value)

    return Sheet(
        name="lost",
        title="Points lost",
        columns=(),
        rows=rows,
        pivot=Pivot(corner="Part", down="title", across="place", cell="lost_text"),
        is_shown=is_shown,
        kind=attrgetter("kind"),
    )


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[Trial]:
    """Returns what to try next at each rank count."""
    rows = [Trial(point, experiment.text) for point in points for experiment in point.verdict.experiments]
    columns: tuple[Column[Trial], ...] = (
        *columns_of(CausePoint, Column("", "At", place_of), "ranks", "nodes", "is_baseline", of="point"),
        Column("finding", "Found", "point.verdict.name"),
        Column("cause", "", "point.verdict.cause"),
        Column("experiment", "To try", "text"),
        *columns_of(Diagnosis, "bound", of="point.verdict"),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=drop_empty_columns(columns, rows, keep=("ranks", "nodes", "is_baseline", "finding")),
        rows=rows,
        caption="Suggestions. Upper bound (computed): throughput gained if this part lost nothing. "
        "dlbench project runs RUNS --set sync.KEY=VALUE forecasts another exchange.",
    )


def account_charts(group: ReportGroup, points: tuple[CausePoint, ...]) -> list[Chart]:
    """Returns the waterfall of the largest rank count, and if there are more, lost points of all of them."""
    _, *compared = points
    if not compared:
        return []
    if len(compared) == 1:
        return [_waterfall(group, compared[0], width=_ALONE)]
    return [_waterfall(group, compared[-1], width=WIDE), _by_point(group, compared)]


def _waterfall(group: ReportGroup, point: CausePoint, *, width: int) -> Chart:
    # Losses, the largest first, then gains, the largest last; nothing that is printed as 0.0.
    shares = [share for share in point.causes if share.is_measured and round(100 * share.lost.value, 1)]
    shares.sort(key=lambda share: (share.lost.value < 0, -abs(share.lost.value)))
    rows = _stairs(point, shares)
    words = ", ".join(f"{CAUSE_TITLES[share.name]} {lost_text(share.lost)}" for share in shares) or "nothing"
    return finish(
        _waterfall_layers(rows),
        group,
        name="waterfall",
        title=f"From 100 % to {value_text(point.efficiency)} at {place_of(point)}",
        alt=f"Efficiency at {place_of(point)}, {figure_text(point.efficiency)}: {lost_text(point.whole.lost)} lost. "
        f"{words}. Lines: intervals.",
        table=lost_sheet([point]),
        size=(width, _ROW * len(rows)),
        still_width=_STILL,
    )


def _stairs(point: CausePoint, shares: Sequence[CauseShare]) -> Rows:
    rows: Rows = [_bar("ideal", 0.0, 100.0, _IDEAL, ("100 %", "100 %"), None)]
    level = 100.0
    for share in shares:
        lost = 100 * share.lost.value
        interval_ends = None
        if share.lost.low is not None and share.lost.high is not None:
            interval_ends = level - 100 * share.lost.high, level - 100 * share.lost.low
        sign = "-" if lost > 0 else "+"
        label = sign + lost_value(share.lost).removeprefix("-").removesuffix(" points")
        colour, texts = CAUSE_COLOURS[share.name], (label, lost_text(share.lost))
        rows.append(_bar(CAUSE_TITLES[share.name], level, level - lost, colour, texts, interval_ends))
        level -= lost
    efficiency = point.efficiency
    interval_ends = None
    if efficiency.low is not None and efficiency.high is not None:
        interval_ends = 100 * efficiency.low, 100 * efficiency.high
    texts = value_text(efficiency), figure_text(efficiency)
    return [*rows, _bar("measured", 0.0, 100 * efficiency.value, _MEASURED, texts, interval_ends)]


def _bar(
    name: str, start: float, end: float, colour: str, texts: tuple[str, str], interval_ends: tuple[float, float] | None
) -> dict[str, Any]:
    low, high = sorted((start, end))
    bar_left, bar_right = low, high  # Of the bar with its interval.
    interval: dict[str, float | None] = {"low": None, "high": None}
    if interval_ends is not None:
        bar_left, bar_right = min(low, interval_ends[0]), max(high, interval_ends[1])
        interval = {"low": round(interval_ends[0], 2), "high": round(interval_ends[1], 2)}
    label_x, side = bar_left, "left"
    if start == 0.0:
        label_x, side = 0.0, "in"
    elif bar_left < _ROOM_FOR_WORDS:
        label_x, side = bar_right, "right"
    label, tooltip = texts
    return {
        "name": name,
        "from": round(low, 2),
        "to": round(high, 2),
        **interval,
        "colour": colour,
        "label": label,
        "shown": tooltip,
        "at": round(label_x, 2),
        "side": side,
    }


def _waterfall_layers(rows: Rows) -> list[dict[str, Any]]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows), *(row["high"] or 0.0 for row in rows))
    start = min(0.0, *(row["low"] or 0.0 for row in rows))
    # Names are above their bars, which so have the whole width of a narrow window.
    shared = {"y": channel("name:N", title=None, sort=names, axis=None)}
    axis = {"labelExpr": "datum.value + ' %'", "tickCount": 5}
    x = channel("from:Q", title="scaling efficiency", scale={"domain": [start, end], "nice": False}, axis=axis)
    colours = {"domain": names, "range": [row["colour"] for row in rows]}
    colour = channel("name:N", legend=None, scale=colours)
    bar = {
        **shared,
        "x": x,
        "x2": "to",
        "color": colour,
        "tooltip": tooltips({"name": "part", "shown": "lost or left"}),
    }
    name = {**shared, "x": {"value": 0}, "text": "name:N"}
    layers = [
        layer(rows, "bar", bar, height=18, yOffset=7),
        layer(rows, "text", name, align="left", dy=-11, color=MUTED, fontSize=12),
    ]
    if any(row["low"] is not None for row in rows):
        interval = {**shared, "x": "low:Q", "x2": "high"}
        rule = layer(rows, "rule", interval, color=INK, strokeWidth=1.5, yOffset=7)
        layers.append({**rule, "transform": [{"filter": "isValid(datum.low)"}]})
    sides = (("in", "left", 6, "#ffffff"), ("left", "right", -5, INK), ("right", "left", 5, INK))
    label = {**shared, "x": "at:Q", "text": "label:N"}
    for side, align, offset, ink in sides:
        text = layer(rows, "text", label, align=align, dx=offset, dy=7, color=ink, fontSize=12)
        layers.append({**text, "transform": [{"filter": f"datum.side == '{side}'"}]})
    return layers


def _by_point(group: ReportGroup, points: Sequence[CausePoint]) -> Chart:
    rows: Rows = []
    marks: Rows = []
    for point in points:
        place = place_of(point)
        marks.append({"place": place, "value": short(point.whole.lost.value * 100)})
        for order, share in enumerate(point.causes):
            value = short(share.lost.value * 100)
            if share.is_measured and value:
                part, text = CAUSE_TITLES[share.name], lost_text(share.lost)
                rows.append({"place": place, "part": part, "order": order, "value": value, "shown": text})
    places = [row["place"] for row in marks]
    axis = Axis("points of efficiency lost; gained left of 0")
    series = Series("part", {title: CAUSE_COLOURS[cause] for cause, title in CAUSE_TITLES.items()})
    bars = stacked(rows, axis, series, {"place": "at", "part": "part", "shown": "causes"}, names=places)
    zero = layer([{"value": 0}], "rule", {"x": "value:Q"}, color=MUTED)
    net = {"x": "value:Q", "y": channel("place:N", sort=places), "tooltip": tooltips({"value:Q": "tick"})}
    ticks = layer(marks, "tick", net, color=INK, thickness=2, size=34)
    words = "; ".join(f"{place_of(point)}: {lost_text(point.whole.lost)} lost" for point in points)
    return finish(
        [*bars, zero, ticks],
        group,
        name="causes",
        title="Points lost by part (tick: net)",
        alt=f"By part and rank count. {words}.",
        table=lost_sheet(points),
        size=(WIDE, max(90, 44 * len(points))),
    )


def findings(diagnosed: Diagnosed, next_step: str) -> Iterator[str]:
    """Yields the diagnosis of each rank count, the largest first, which ends with the group's next step."""
    if diagnosed.fault:
        yield f"A fault was injected on purpose: {diagnosed.fault}."
    for point in reversed(diagnosed.points):
        text = f"{place_of(point)}: {point.verdict.line}."
        if next_step and point is diagnosed.points[-1]:
            text += f" Next: {next_step}"
        yield text


def remarks(diagnosed: Diagnosed) -> Iterator[str]:
    """Yields notes on the causes: unmeasured ones and why, injected faults, monitoring, limits."""
    for index, cause in enumerate(diagnosed.points[0].causes):
        yield from _cause_remarks(CAUSE_TITLES[cause.name], cause.name, index, diagnosed.points)
    for point in diagnosed.points:
        if point.planted:
            parts = [f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted]
            yield f"Planted at {place_of(point)}, per step: {first_of(parts, MAX_PLANTED)}."
    cost = diagnosed.watch_cost
    if cost is None:
        yield f"Monitoring: {diagnosed.watching}."
    else:
        share = figure_text(Estimate(cost.value, cost.low, cost.high, cost.num_runs, "Student t", "fraction"))
        yield f"Monitoring ({diagnosed.watching}) cost {share} of a step (accounted, {runs_text(cost.num_runs)})."
    yield from diagnosed.limits


def _cause_remarks(title: str, name: str, index: int, points: Sequence[CausePoint]) -> Iterator[str]:
    unmeasured = [point for point in points if not point.causes[index].is_measured]
    if unmeasured:
        where = ""
        if len(unmeasured) < len(points):
            where = f" at {', '.join(map(place_of, unmeasured))}"
        reasons = _first(chain.from_iterable(point.causes[index].not_measured for point in unmeasured))
        yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
    notes = list(chain.from_iterable(point.causes[index].notes for point in points))
    takes_time = any(point.causes[index].seconds.value for point in points)
    # That these take no time is said in the table's caption.
    if notes and (takes_time or name not in ("launch", "memory", "gather", "bubble")):
        yield f"{title}: {_first(notes)}."


def _first(texts: Iterable[str]) -> str:
    first, *others = dict.fromkeys(texts)
    if not others:
        return first
    return f"{first} (and {len(others)} more reasons in other runs)"


class CausesView(GroupView):
    """The parts of a step, and the efficiency lost to each."""

    id = "causes"
    title = "Where the time goes"
    level = "answer"
    key = "causes"
    after = "time-to-train"
    lack = VARIANT

    def always(self) -> tuple[Sheet[Any], ...]:
        return (account_sheet(()),)

    def numbers(self, source: GroupSource) -> LostPercent | None:
        return lost_percent(source.group, source.table)

    def shown(self, group: ReportGroup, lost: LostPercent) -> Section:
        points = lost.diagnosed.points
        return Section(
            caption=MEANS,
            words=tuple(findings(lost.diagnosed, group.next_step)),
            charts=partial(account_charts, group, points),
            charts_per_row=2 if len(points) > MOST_ALONE else 1,
            sheets=with_rows(account_sheet(points), experiment_sheet(points)),
            notes=tuple(remarks(lost.diagnosed)),
            where={"sample_unit": group.sample_unit, "scaling": group.scaling, "baseline_ranks": group.baseline.ranks},
        )
