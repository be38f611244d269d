"""The view `summary`: all groups against the ideal in one picture, and a card for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from dlbench.analysis.scaling import Point
from dlbench.report.chart_style import IDEAL, MEASURED, MUTED
from dlbench.report.charts import Chart, ReportSubject, Rows, channel, figure_row, finish, layer, tooltips
from dlbench.report.document import FEW_CARDS, Card, Rating, Section
from dlbench.report.wording import basis_text, interval_text, percent, ranks_text, units_text, value_text
from dlbench.stats.estimates import placed
from dlbench.units import counted
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent, loss_in_brief
from dlbench.views.exchange import ExchangePoint
from dlbench.views.forecast import published_for
from dlbench.views.model import Report, ReportGroup, ReportView, place_of
from dlbench.views.quality.numbers import GroupQuality
from dlbench.views.scaling_report import condition_text, short_names
from dlbench.views.systems import SystemDescription

if TYPE_CHECKING:
    from dlbench.history.series import Trend
    from dlbench.history.tables import TrendsReport

STEP = "step_median_s"  # Metric of the history that describes the speed of a group.

_LABEL_ROOM = 125  # Width of the words right of the intervals, pixels.
_VALUE_ROOM = 75  # Width of values alone, as in a picture of many groups, pixels.
_STILL = 390  # Width of the picture without scripts, names included, pixels: a telephone's.
_CHARACTER = 6.5  # Width of a character of a name, pixels, roughly.
_LABEL = 230  # Longest name in a picture of many groups, pixels: the list next to it has whole names.
_LEAST_ROW = 9  # Height of a row, pixels.
_PICTURE = 600  # Height of a picture of many groups, pixels: with the head of the page it fits a screen of 900.
_ROOM = 190  # Height of a picture of few groups, pixels: their cards fit the same screen.
_NO_GPU = "none"  # Begin of the GPU field of a system without GPUs.


def rating(group: ReportGroup, report: Report) -> Rating | None:
    """Returns a judgement of the efficiency at the largest point, by the model, a published figure or the history."""
    last = group.largest
    reference = _efficiency_reference(group)
    if reference is not None:
        return _against(last, *reference)
    history = cast("TrendsReport | None", report.views.get("history"))
    key = (group.id, last.ranks, last.nodes, STEP)
    for trend in history.series if history else ():
        if (trend.group, trend.ranks, trend.nodes, trend.metric) == key and len(trend.nights) > 1:
            return _usual(trend)
    if len(group.points) == 1:
        return None
    return Rating(tone="unknown", text="no rating: no earlier runs to compare with")


def _efficiency_reference(group: ReportGroup) -> tuple[float, str] | None:
    if len(group.points) == 1:
        return None
    last = group.largest
    for exchange in group.all_of(ExchangePoint):
        if (exchange.ranks, exchange.nodes) == (last.ranks, last.nodes) and exchange.prediction is not None:
            attainable = exchange.prediction.efficiency.value
            text = f"if only the exchange cost time, merged at its best, efficiency would be {percent(attainable)}"
            return attainable, text
    anchors = published_for(group, "efficiency")
    if not anchors:
        return None
    text = f"{percent(anchors[0].value)} was published for this work at {ranks_text(anchors[0].ranks)}"
    return anchors[0].value, text


def _against(point: Point, reference: float, text: str) -> Rating:
    """Rates by the interval if it decides, else by the value and says so; a loss not worth explaining is no loss."""
    lowest_good = reference - WORTH_EXPLAINING
    position = placed(point.efficiency, lowest_good, max(1.0, reference))
    if position == "insufficient":
        return Rating(tone="unknown", text=f"no rating yet ({units_text(point.efficiency)}): {text}")
    is_good = position in ("within", "above") or (position != "below" and point.efficiency.value >= lowest_good)
    tone: Literal["good", "low"] = "good" if is_good else "low"
    noise = " (within the noise)" if position == "undecided" else ""
    return Rating(tone=tone, text=f"{tone}{noise}: {text}")


def _usual(trend: Trend) -> Rating:
    from dlbench.history.change_points import MIN_NIGHTS
    from dlbench.history.series import percent_change

    num_nights = len(trend.nights)
    newest = trend.newest
    if trend.standing == "too few nights":
        return Rating(tone="unknown", text=f"unknown: {num_nights} of the {MIN_NIGHTS} nights that show what is usual")
    if trend.standing == "worse":
        change = trend.open_regressions[-1]
        text = f"slower: step {percent_change(change.ratio.value)} {change.since}, not acknowledged"
        return Rating(tone="low", text=text)
    if trend.standing == "odd" and newest is not None:
        nights = "newest night" if newest.num_outside == 1 else f"newest {newest.num_outside} nights"
        text = f"unknown: {nights} {newest.ratio:.2f}x the usual step; {newest.wait_for} more decide"
        return Rating(tone="unknown", text=text)
    speed = "faster than" if newest else "as"
    text = f"{speed} usual in {num_nights} nights"
    acknowledged = [change for change in trend.changes if change.acknowledged]
    if acknowledged:
        change = acknowledged[-1]
        text += f"; {percent_change(change.ratio.value)} {change.since}, acknowledged"
    return Rating(tone="good", text=text)


def _efficiency_chart(groups: Sequence[ReportGroup], names: Sequence[str]) -> list[Chart]:
    if all(len(group.points) == 1 for group in groups):
        return []
    is_wide = len(groups) <= FEW_CARDS
    rows: Rows = []
    for group, name in zip(groups, names, strict=True):
        rows += _rows(group, name, is_wide=is_wide)
    words = "; ".join(f"{row['group']}, {row['place']}: {row['shown']}" for row in rows if row["is_last"])
    header = ("Group", "At", "Scaling efficiency", "Interval")
    lines = [(row["group"], row["place"], row["shown"], row["basis"]) for row in rows]
    most_points = max(len(group.points) - 1 for group in groups)
    width, height = 260, max(_PICTURE, _LEAST_ROW * len(groups))
    if is_wide:
        width, height = 900, min(_ROOM, len(groups) * max(44, 16 * most_points))
    chart = finish(
        _layers(rows, list(names), offset=is_wide and most_points > 1),
        ReportSubject("all-groups", "Share of the ideal throughput; each group's fewest ranks are its 100 %"),
        name="efficiency",
        title="Scaling efficiency",
        alt=f"Scaling efficiency of every group, with the ideal (100 %) as a line. {words}.",
        table=(header, *lines),
        size=(width, height),
        still_width=max(_LABEL_ROOM + 75, round(_STILL - _CHARACTER * max(map(len, names)))),
    )
    return [chart]


def _rows(group: ReportGroup, name: str, *, is_wide: bool) -> Iterator[dict[str, Any]]:
    if len(group.points) == 1:
        place, ranks = place_of(group.baseline), group.baseline.ranks
        lone = {"value": None, "low": None, "high": None, "shown": "not measured", "basis": "", "is_last": True}
        yield {"group": name, "place": place, "ranks": ranks, "label": f"{place} only", "at": 0.0, **lone}
        return
    for point in group.points:
        if point.is_baseline:
            continue
        label = value_text(point.efficiency)
        if is_wide:
            label += f" at {ranks_text(point.ranks)}"
        yield {
            "group": name,
            "place": place_of(point),
            "ranks": point.ranks,
            **figure_row(point.efficiency),
            "is_last": point is group.largest,
            "label": label,
            "at": point.efficiency.high or point.efficiency.value,
        }


def _layers(rows: Rows, names: list[str], *, offset: bool) -> list[dict[str, Any]]:
    measured = [row for row in rows if row["value"] is not None]
    top = max(1.0, *(row["at"] for row in measured))
    labelled, label_room, label_limit = rows, _LABEL_ROOM, 260
    if len(names) > FEW_CARDS:
        labelled, label_room, label_limit = [row for row in rows if row["is_last"]], _VALUE_ROOM, _LABEL
    # Room on the right for labels, whatever the width.
    right = {"expr": f"width - {label_room}"}
    scale = {"domain": [0, top], "range": [0, right], "nice": False}
    values = [k / 5 for k in range(int(top * 5) + 1)]
    x = channel("value:Q", title=None, scale=scale, axis={"format": ".0%", "values": values, "grid": True})
    axis = {"labelLimit": label_limit, "ticks": False, "domain": False}
    place = {"y": channel("group:N", title=None, sort=names, axis=axis)}
    if offset:
        place["yOffset"] = channel("ranks:O", sort="ascending")
    shade = {"condition": {"test": "datum.is_last", "value": 1}, "value": 0.45}
    titles = {"group": "group", "place": "at", "shown": "efficiency", "basis": "interval"}
    dots = {**place, "x": x, "opacity": shade, "tooltip": tooltips(titles)}
    ends, label = {**place, "x": "low:Q", "x2": "high"}, {**place, "x": {"value": right}, "text": "label:N"}
    ideal, name = [{"ideal": 1.0}], {"x": "ideal:Q", "y": {"value": 0}}
    return [
        layer(ideal, "rule", {"x": "ideal:Q"}, color=IDEAL, strokeWidth=2, strokeDash=[5, 4]),
        layer(measured, "rule", ends, color=MEASURED, strokeWidth=4, opacity=0.4),
        layer(measured, "point", dots, color=MEASURED, filled=True, size=70),
        # All in one column, where no interval reaches.
        layer(labelled, "text", label, color=MUTED, align="left", dx=9, fontSize=12),
        layer(ideal, "text", name, color=MUTED, align="right", dx=-5, dy=-6, fontSize=12, text="ideal"),
    ]


class SummaryView(ReportView):
    """All groups at a glance."""

    id = "summary"
    title = "Summary"
    level = "answer"
    after = "start"

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.groups:
            details = "Below, each run with the reason." if report.runs else "There are no runs here."
            words = (f"No run has figures. {details}",)
            return (Section(id=self.id, title=self.title, words=words, brief=("No run has figures.",)),)
        names = short_names(report.groups)
        cards = [_card(group, name, report) for group, name in zip(report.groups, names, strict=True)]
        section = Section(
            id=self.id,
            title=self.title,
            about=(_shared_conditions(report),),
            charts=partial(_efficiency_chart, report.groups, names),
            charts_per_row=1,
            cards=tuple(cards),
            brief=(),
        )
        return (section,)


def _shared_conditions(report: Report) -> str:
    """Returns the conditions that hold for all groups, since their names do not say them."""
    texts = []
    for name in ("preset", "engine", "precision", "scaling", "goal"):
        values = {group.condition(name) for group in report.groups}
        if len(values) == 1 and any(values):
            texts.append(condition_text(name, *values))
    if not texts:
        return ""
    prefix = "All groups: " if len(report.groups) > 1 else ""
    return f"{prefix}{', '.join(texts)}."


def _card(group: ReportGroup, name: str, report: Report) -> Card:
    big, small = _headline(group)
    last = group.largest
    throughput = f"{value_text(last.throughput)} {last.throughput.unit}"
    facts = [("Machine", _machine(group, report)), ("Throughput", throughput)]
    lost = group.of(LostPercent)
    loss = loss_in_brief(lost.at(last)) if lost else ""
    if loss:
        facts.append(("Loss", loss))
    return Card(
        title=name,
        link=f"group-{group.id}",
        big=big,
        small=small,
        rating=rating(group, report),
        facts=tuple(facts),
        next_step=group.next_step,
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _headline(group: ReportGroup) -> tuple[str, tuple[str, ...]]:
    quality = group.of(GroupQuality)
    if quality is not None:
        return quality.headline[0], (quality.headline[1],)
    last = group.largest
    if len(group.points) == 1:
        return value_text(last.throughput), (f"{last.throughput.unit} at {place_of(last)}",)
    interval = interval_text(last.efficiency) or f"({basis_text(last.efficiency)})"
    return value_text(last.efficiency), (interval, f"scaling efficiency at {place_of(last)}")


def _machine(group: ReportGroup, report: Report) -> str:
    name = group.condition("system")
    system = next((system for system in report.all_of(SystemDescription) if system.name == name), None)
    nodes = counted(group.largest.nodes, "node")
    if system is None:
        return f"{nodes} of {name}" if name else nodes
    fields = dict(system.fields)
    gpu, num_gpus = fields.get("GPU", ""), fields.get("GPUs in use per node", "")
    if gpu and not gpu.startswith(_NO_GPU):
        gpus = f"{num_gpus} x {gpu}" if num_gpus else gpu
        return f"{nodes}, {gpus}"
    parts = [nodes, fields.get("Processor", "")]
    if "Processor threads per node" in fields:
        parts.append(f"{fields['Processor threads per node']} threads")
    return ", ".join(filter(None, parts))
