"""The lost percent: words, charts, tables and the section of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import EXCHANGE_PHASE
from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, Rows, finish, short, tooltips
from dlbench.report.charts.shapes import Axis, Series, stacked
from dlbench.report.charts.style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Pivot, RowKind, Sheet, Value, cell_of, columns_of
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
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED, ROW_TITLES, Experiment
from dlbench.views.causes.numbers import (
    CausePoint,
    CauseShare,
    Diagnosed,
    LostPercent,
    bound_text,
    lost_percent,
)
from dlbench.views.model import Group
from dlbench.views.view import MEANS, GroupSource, GroupView, place_of

MAX_PLANTED = 8  # Ranks with an injected fault that are named.


def findings(found: Diagnosed, next_step: str) -> Iterator[str]:
    """The diagnosis of each rank count, the largest first, which ends with what the group should do next."""
    if found.fault:
        yield f"A fault was injected on purpose: {found.fault}."
    for point in reversed(found.points):
        advice = f" Next: {next_step}" if next_step and point is found.points[-1] else ""
        yield f"{place_of(point)}: {point.verdict.line}.{advice}"


def remarks(found: Diagnosed) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, injected faults, monitoring, limits."""
    for index, cause in enumerate(found.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        unknown = [point for point in found.points if not point.causes[index].is_measured]
        if unknown:
            where = "" if len(unknown) == len(found.points) else f" at {', '.join(map(place_of, unknown))}"
            reasons = _first(reason for point in unknown for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in found.points for note in point.causes[index].notes]
        # That nothing recomputes, or that the host was ahead, stands among the parts without time.
        is_told = cause.name not in ("launch", "memory", "gather")
        if notes and (is_told or any(point.causes[index].seconds.value for point in found.points)):
            yield f"{title}: {_first(notes)}."
    for point in found.points:
        if point.planted:
            ranks = ", ".join(
                f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:MAX_PLANTED]
            )
            left = len(point.planted) - MAX_PLANTED
            yield f"Planted at {place_of(point)}, per step: {ranks}{f' and {left} more ranks' if left > 0 else ''}."
    cost = found.watch_cost
    if cost is None:
        yield f"Monitoring: {found.watching}."
    else:
        share = figure_text(Estimate(cost.value, cost.low, cost.high, cost.num_runs, "Student t", "fraction"))
        yield f"Monitoring ({found.watching}) cost {share} of a step (accounted, {runs_text(cost.num_runs)})."
    yield from found.limits


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    first, *others = dict.fromkeys(texts)
    return first + (f" (and {len(others)} more reasons in other runs)" if others else "")


@dataclass(frozen=True)
class _Row:
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


def account_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Seconds per step of each part at each rank count, and points lost to it at the largest."""
    last = points[-1] if points else None
    has_loss = last is not None and not last.is_baseline
    rows = [row for point in points for row in _rows(point)]
    shown = _titles_shown(rows)
    if last is not None and has_loss:
        rows += [_Row(last, row.part, row.title, row.part_of, True, row.kind) for row in _rows(last)]

    def cell(row: _Row) -> Value | Cell:
        """Next to lost points seconds stand without their intervals, which programs get."""
        if row.is_lost:
            return lost_cell(row.part.lost)
        return Cell(value_text(row.part.seconds), number=row.part.seconds.value) if has_loss else row.part.seconds

    return Sheet(
        name="parts",
        title="Parts of the mean step",
        columns=_COLUMNS,
        rows=rows,
        pivot=Pivot(
            corner="Part",
            down=lambda row: row.title,
            across=lambda row: f"{'Lost at ' * row.is_lost}{place_of(row.point)}",
            cell=cell,
        ),
        is_shown=lambda row: row.title in shown,
        is_data=lambda row: not row.is_lost,
        kind=lambda row: row.kind,
        caption="" if last is None else _caption(last, points),
    )


def _rows(point: CausePoint) -> Iterator[_Row]:
    """Terms of the sum, each with what it consists of; what is on the wire and waiting stand below their phase."""
    for share in point.causes:
        if share.name == "exchange":
            yield _Row(point, point.exchange_phase, ROW_TITLES[EXCHANGE_PHASE])
        within = EXCHANGE_PHASE if share.name in ("exchange", "straggler") else ""
        yield _Row(point, share, ROW_TITLES[share.name], within, kind="part" if within else "")
        for part in share.parts:
            yield _Row(point, part, ROW_TITLES[part.name], share.name, kind="part")
    yield _Row(point, point.whole, "sum: mean step", kind="sum")


def _titles_shown(rows: Sequence[_Row]) -> set[str]:
    """Lines that take time anywhere; of parts with a single such child not the child, which says the same again.

    Waiting for stragglers and the wire have names of their own in every sentence, and both stand in any case.
    """
    busy = [row for row in rows if row.part.seconds.value > 0]
    parents = {row.part_of for row in busy if row.part_of} - {EXCHANGE_PHASE}
    children = {name: {row.title for row in busy if row.part_of == name} for name in parents}
    lone = {title for titles in children.values() if len(titles) == 1 for title in titles}
    silent = {row.title for row in rows if not row.is_measured}
    return ({row.title for row in busy} | {row.title for row in rows if row.kind == "sum"}) - lone - silent


def _caption(last: CausePoint, points: Sequence[CausePoint]) -> str:
    """With the parts that take no time at any rank count, though they were measured. On CPUs nothing is launched, and
    replicas gather nothing.
    """
    absent = [
        CAUSE_TITLES[share.name]
        for place, share in enumerate(points[0].causes)
        if (share.name not in ("launch", "gather") or share.notes)
        and all(point.causes[place].is_measured and not point.causes[place].seconds.value for point in points)
    ]
    figure = last.whole.seconds if last.is_baseline else last.whole.lost
    text = f"Per step, as ranks on time see it. Intervals: {basis_text(figure)}."
    return f"{text} No time: {', '.join(absent)}." if absent else text


def lost_cell(lost: Estimate) -> Cell:
    """A share of efficiency in points, e.g. ``12.3 points [11.0, 13.9]``."""
    return cell_of(lost.in_unit(POINTS))


def _known(row: _Row, value: Value) -> Value:
    return value if row.is_measured else None


_COLUMNS: tuple[Column[_Row], ...] = (
    *columns_of(_Row, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline"),
    *columns_of(_Row, "part=part.name", "part_of", "is_measured"),
    Column("why_not_measured", "", lambda row: " | ".join(row.share.not_measured) if row.share else ""),
    Column("seconds", "", lambda row: _known(row, row.part.seconds), has_interval=True),
    Column("ideal_seconds", "", lambda row: _known(row, row.part.ideal_seconds)),
    Column("lost_fraction", "", lambda row: _known(row, row.part.lost), has_interval=True),
    *columns_of(_Row, "adjusted_p=share.adjusted_p", "runs=part.seconds.n"),
    *columns_of(_Row, "seconds_interval=part.seconds.kind", "lost_interval=part.lost.kind"),
    Column("remarks", "", lambda row: " | ".join(row.share.notes) if row.share else ""),
)


def lost_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Points lost to each part at each rank count, largest first at the last: the numbers of a chart."""
    last = points[-1]
    order = [share.name for share in sorted(last.causes, key=lambda share: -share.lost.value)]
    rows = [
        *(_Row(point, point.cause(name), CAUSE_TITLES[name]) for name in order for point in points),
        *(_Row(point, point.whole, "in all", kind="sum") for point in points),
    ]
    return Sheet(
        name="lost",
        title="Points lost",
        columns=(),
        rows=rows,
        pivot=Pivot(
            corner="Part",
            down=lambda row: row.title,
            across=lambda row: place_of(row.point),
            cell=lambda row: lost_cell(row.part.lost) if row.is_measured else NOT_MEASURED,
        ),
        is_shown=lambda row: (
            row.kind == "sum" or not row.is_measured or bool(row.part.seconds.value or row.part.lost.value)
        ),
        kind=lambda row: row.kind,
    )


# Experiments

_Try = tuple[CausePoint, Experiment]


def experiment_sheet(points: Sequence[CausePoint]) -> Sheet[_Try]:
    """What to try next at each rank count."""
    rows = [(point, one) for point in points for one in point.verdict.experiments]
    has_bound = any(point.verdict.bound is not None for point, _ in rows)

    def bound(row: _Try) -> Cell | None:
        found = row[0].verdict.bound
        return None if found is None else Cell(bound_text(found), number=found)

    columns: tuple[Column[_Try], ...] = (
        Column("", "At", lambda row: place_of(row[0])),
        *columns_of(CausePoint, "ranks", "nodes", "is_baseline", of=lambda row: row[0]),
        Column("finding", "Found", lambda row: row[0].verdict.name),
        Column("cause", "", lambda row: row[0].verdict.cause),
        Column("experiment", "To try", lambda row: row[1].text),
        Column("limit_throughput_gain_fraction", "Upper bound" * has_bound, lambda row: row[0].verdict.bound, bound),
    )
    return Sheet(
        name="experiments",
        title="What to try next",
        columns=columns,
        rows=rows,
        caption=(
            "Suggestions. Upper bound (computed): throughput gained if all that this part loses were gone. "
            "dlbench project runs RUNS --set sync.KEY=VALUE forecasts another exchange."
        ),
    )


CAUSE_COLOURS = {  # What a phase of the step shows as well has that phase's colour; the others go with them.
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "gather": "#332288",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "launch": "#6b4ea0",
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}

_IDEAL, _MEASURED = "#676d76", "#1769ab"
"""Of whole bars: dark enough for white words in either colour scheme, which leaves these two as they are."""

_ROW = 42  # Of a waterfall: a name and the bar below it, pixels.
_ALONE = 1060  # Plot width of a waterfall with no chart next to it, pixels: as wide as a page of 1400.
_STILL = 350  # Plot width of a waterfall without scripts, pixels: a telephone's.
_ROOM_FOR_WORDS = 45.0  # Percent: where a bar and its interval begin further left, its words stand at its right end.


def account_charts(group: Group, points: tuple[CausePoint, ...]) -> list[Chart]:
    """The waterfall of the largest rank count, and where there are more, lost points over all of them."""
    found = points[1:]
    if not found:
        return []
    if len(found) == 1:
        return [_waterfall(group, found[0], width=_ALONE)]
    return [_waterfall(group, found[-1], width=WIDE), _by_point(group, found)]


def _waterfall(group: Group, point: CausePoint, *, width: int) -> Chart:
    # Losses, the largest first, then gains, the largest last; nothing that is printed as 0.0.
    shares = (one for one in point.causes if one.is_measured and round(100 * one.lost.value, 1))
    drawn = sorted(shares, key=lambda one: (one.lost.value < 0, -abs(one.lost.value)))
    rows = _stairs(point, drawn)
    words = ", ".join(f"{CAUSE_TITLES[one.name]} {lost_text(one.lost)}" for one in drawn) or "nothing"
    return finish(
        alt.layer(*_waterfall_layers(alt, rows)),
        group,
        name="waterfall",
        title=f"From 100 % to {value_text(point.efficiency)} at {place_of(point)}",
        alt=f"Efficiency at {place_of(point)}, {figure_text(point.efficiency)}: {lost_text(point.whole.lost)} lost. "
        f"{words}. Lines: intervals.",
        table=lost_sheet([point]),
        size=(width, _ROW * len(rows)),
        still_width=_STILL,
    )


def _stairs(point: CausePoint, drawn: Sequence[CauseShare]) -> Rows:
    """Bars from 100 % down to the efficiency, and up where something is gained; all ends in percent."""
    rows: Rows = [_bar("ideal", 0.0, 100.0, _IDEAL, "100 %", "100 %", None)]
    level = 100.0
    for one in drawn:
        lost = 100 * one.lost.value
        ends = None
        if one.lost.low is not None and one.lost.high is not None:
            ends = level - 100 * one.lost.high, level - 100 * one.lost.low
        label = f"{'-' if lost > 0 else '+'}{lost_value(one.lost).removeprefix('-').removesuffix(' points')}"
        colour, shown = CAUSE_COLOURS[one.name], lost_text(one.lost)
        rows.append(_bar(CAUSE_TITLES[one.name], level, level - lost, colour, label, shown, ends))
        level -= lost
    efficiency = point.efficiency
    ends = None if efficiency.low is None or efficiency.high is None else (100 * efficiency.low, 100 * efficiency.high)
    label, shown = value_text(efficiency), figure_text(efficiency)
    return [*rows, _bar("measured", 0.0, 100 * efficiency.value, _MEASURED, label, shown, ends)]


def _bar(
    name: str, start: float, end: float, colour: str, label: str, shown: str, ends: tuple[float, float] | None
) -> dict[str, Any]:
    low, high = sorted((start, end))
    reach = (low, high) if ends is None else (min(low, ends[0]), max(high, ends[1]))
    at, side = (reach[1], "right") if reach[0] < _ROOM_FOR_WORDS else (reach[0], "left")
    if start == 0.0:
        at, side = 0.0, "in"
    return {
        "name": name,
        "from": round(low, 2),
        "to": round(high, 2),
        "low": None if ends is None else round(ends[0], 2),
        "high": None if ends is None else round(ends[1], 2),
        "colour": colour,
        "label": label,
        "shown": shown,
        "at": round(at, 2),
        "side": side,
    }


def _waterfall_layers(alt: Any, rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows), *(row["high"] or 0.0 for row in rows))
    start = min(0.0, *(row["low"] or 0.0 for row in rows))
    # Names stand above their bars, which so have the whole width of a narrow window.
    y = alt.Y("name:N", title=None, sort=names, axis=None)
    scale = alt.Scale(domain=[start, end], nice=False)
    axis = alt.Axis(labelExpr="datum.value + ' %'", tickCount=5)
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    tooltip = tooltips({"name:N": "part", "shown:N": "lost or left"})
    colour = alt.Color("name:N", legend=None).scale(domain=names, range=[row["colour"] for row in rows])
    x = alt.X("from:Q", title="scaling efficiency", scale=scale, axis=axis)
    name = base.mark_text(align="left", dy=-11, color=MUTED, fontSize=12).encode(x=alt.value(0), text="name:N")
    bar = base.mark_bar(height=18, yOffset=7).encode(x=x, x2="to:Q", color=colour, tooltip=tooltip)
    layers = [bar, name]
    if any(row["low"] is not None for row in rows):
        known = base.transform_filter("isValid(datum.low)")
        layers.append(known.mark_rule(color=INK, strokeWidth=1.5, yOffset=7).encode(x=alt.X("low:Q"), x2="high:Q"))
    for side, align, offset, ink in (
        ("in", "left", 6, "#ffffff"),
        ("left", "right", -5, INK),
        ("right", "left", 5, INK),
    ):
        text = base.transform_filter(f"datum.side == '{side}'")
        mark = text.mark_text(align=align, dx=offset, dy=7, color=ink, fontSize=12)
        layers.append(mark.encode(x=alt.X("at:Q"), text="label:N"))
    return layers


def _by_point(group: Group, points: Sequence[CausePoint]) -> Chart:
    """Returns the points of efficiency that each part loses at each rank count, stacked."""
    rows: Rows = [
        {
            "place": place_of(point),
            "part": CAUSE_TITLES[share.name],
            "order": order,
            "value": short(share.lost.value * 100),
            "shown": lost_text(share.lost),
        }
        for point in points
        for order, share in enumerate(point.causes)
        if share.is_measured and short(share.lost.value * 100)
    ]
    places = [place_of(point) for point in points]
    axis = Axis("points of efficiency lost; gained left of 0")
    series = Series("part", {one: CAUSE_COLOURS[cause] for cause, one in CAUSE_TITLES.items()})
    bars = stacked(rows, axis, series, {"place": "at", "part": "part", "shown": "causes"}, names=places)
    marks: Rows = [
        {"place": place, "value": short(point.whole.lost.value * 100)}
        for place, point in zip(places, points, strict=True)
    ]
    ticks = alt.Chart(alt.InlineData(values=marks)).mark_tick(color=INK, thickness=2, size=34)
    zero = alt.Chart(alt.InlineData(values=[{"value": 0}])).mark_rule(color=MUTED)
    ticks = ticks.encode(x="value:Q", y=alt.Y("place:N", sort=places), tooltip=tooltips({"value:Q": "tick"}))
    words = "; ".join(f"{place_of(point)}: {lost_text(point.whole.lost)} lost" for point in points)
    return finish(
        alt.layer(*bars.layer, zero.encode(x="value:Q"), ticks),
        group,
        name="causes",
        title="Points lost by part (tick: net)",
        alt=f"By part and rank count. {words}.",
        table=lost_sheet(points),
        size=(WIDE, max(90, 44 * len(points))),
    )


MOST_ALONE = 2  # Rank counts up to which the waterfall is the only chart.

VARIANT = (  # Why a group has no causes.
    "not shown: in these runs something was taken away on purpose; the plain runs next to them have this view, and "
    "dlbench diagnose says what the difference is."
)


class CausesView(GroupView):
    """Where the time of a step goes, and what is lost to it."""

    id = "causes"
    title = "Where the time goes"
    level = "answer"
    key = "causes"
    after = "time-to-train"

    def always(self) -> tuple[Sheet[Any], ...]:
        return (account_sheet(()),)

    def numbers(self, source: GroupSource) -> LostPercent | None:
        return lost_percent(source.group, source.table)

    def shown(self, group: Group, found: LostPercent) -> Section:
        points = found.diagnosed.points
        experiments = experiment_sheet(points)
        return Section(
            caption=MEANS,
            words=tuple(findings(found.diagnosed, group.next_step)),
            charts=lambda: account_charts(group, points),
            charts_per_row=2 if len(points) > MOST_ALONE else 1,
            sheets=(account_sheet(points), *((experiments,) if experiments.rows else ())),
            notes=tuple(remarks(found.diagnosed)),
            where={"sample_unit": group.sample_unit, "scaling": group.scaling, "baseline_ranks": group.baseline.ranks},
        )

    def remedy(self, group: Group) -> str:
        return VARIANT
