"""The view `summary`: all groups against the ideal in one picture, and what each says at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dlbench.analysis.scaling import Point
from dlbench.history.change_points import MIN_NIGHTS
from dlbench.history.report import TrendsReport
from dlbench.history.series import Trend
from dlbench.history.words import percent_change
from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, ReportSubject, finish, tooltips
from dlbench.report.charts.shapes import figure_row
from dlbench.report.charts.style import IDEAL, MEASURED, MUTED
from dlbench.report.document import FEW_CARDS, Card, Rating, Section
from dlbench.report.wording import basis_text, interval_text, percent, ranks_text, units_text, value_text
from dlbench.stats.estimates import placed
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent, loss_in_brief
from dlbench.views.exchange import ExchangePoint
from dlbench.views.forecast import Forecast
from dlbench.views.group_section import condition_text, short_names
from dlbench.views.model import Report, ReportGroup
from dlbench.views.quality.numbers import GroupQuality
from dlbench.views.systems import SystemDescription
from dlbench.views.view import ReportView, place_of

STEP = "step_median_s"  # The metric of the history that says most of a group's speed.

_LABEL_ROOM = 125  # Of the words right of the intervals, pixels.
_VALUE_ROOM = 75  # Of values alone, which stand there in a picture of many groups.
_STILL = 390  # Width of the picture without scripts, names included, pixels: a telephone's.
_CHARACTER = 6.5  # Width of one of a name, pixels, roughly.
_LABEL = 230  # Longest name in a picture of many groups, pixels: the list next to it has them whole.
_LEAST_ROW = 9
_PICTURE = 600  # Height of a picture of many groups, pixels: with the head of the page it fits a screen of 900.
_ROOM = 190  # Height of a picture of few groups, pixels: their cards fit the same screen.
_NO_GPU = "none"


def rating(group: ReportGroup, report: Report) -> Rating | None:
    """How good the efficiency at the largest point is, against the first reference that there is.

    References in order: what the exchange model leaves attainable, a published figure of the same work, the usual range
    of the same point in the history of the report. None for a single rank count without any.
    """
    last, history = group.largest, report.of(TrendsReport)
    if len(group.points) > 1:
        for bound in group.all_of(ExchangePoint):
            if (bound.ranks, bound.nodes) == (last.ranks, last.nodes) and bound.prediction is not None:
                most = bound.prediction.efficiency.value
                alone = "if only the exchange cost time, merged at its best, efficiency would be"
                return _against(last, most, f"{alone} {percent(most)}")
        for one in forecast.same_work if (forecast := group.of(Forecast)) else ():
            shown = f"{percent(one.efficiency)} was published for this work at {ranks_text(one.ranks)}"
            return _against(last, one.efficiency, shown)
    wanted = (group.id, last.ranks, last.nodes, STEP)
    for trend in history.series if history else ():
        if (trend.group, trend.ranks, trend.nodes, trend.metric) == wanted and len(trend.nights) > 1:
            return _usual(trend)
    if len(group.points) == 1:
        return None
    return Rating(tone="unknown", text="no rating: no earlier runs to compare with")


def _against(point: Point, reference: float, text: str) -> Rating:
    """By the interval where it decides, else by the value, which is said; a loss not worth explaining is none."""
    least = reference - WORTH_EXPLAINING
    where = placed(point.efficiency, least, max(1.0, reference))
    if where == "insufficient":
        return Rating(tone="unknown", text=f"no rating yet ({units_text(point.efficiency)}): {text}")
    is_good = where in ("within", "above") or (where != "below" and point.efficiency.value >= least)
    word: Literal["good", "low"] = "good" if is_good else "low"
    doubt = " (within the noise)" if where == "undecided" else ""
    return Rating(tone=word, text=f"{word}{doubt}: {text}")


def _usual(trend: Trend) -> Rating:
    """By `Trend.standing`, by which `dlbench history trends --fail-on-regression` goes, too."""
    nights = len(trend.nights)
    newest = trend.newest
    if trend.standing == "too few nights":
        return Rating(tone="unknown", text=f"unknown: {nights} of the {MIN_NIGHTS} nights that show what is usual")
    if trend.standing == "worse":
        change = trend.open_regressions[-1]
        text = f"slower: step {percent_change(change.ratio.value)} {change.since}, not acknowledged"
        return Rating(tone="low", text=text)
    if trend.standing == "odd" and newest is not None:
        which = "newest night" if newest.num_beyond == 1 else f"newest {newest.num_beyond} nights"
        text = f"unknown: {which} {newest.ratio:.2f}x the usual step; {newest.wait_for} more decide"
        return Rating(tone="unknown", text=text)
    known = next((one for one in reversed(trend.changes) if one.acknowledged), None)
    since = f"; {percent_change(known.ratio.value)} {known.since}, acknowledged" if known else ""
    return Rating(tone="good", text=f"{'as' if newest is None else 'faster than'} usual in {nights} nights{since}")


def _efficiency_chart(groups: Sequence[ReportGroup], names: Sequence[str]) -> list[Chart]:
    """The picture; none where no group has a second rank count."""
    if all(len(group.points) == 1 for group in groups):
        return []
    is_wide = len(groups) <= FEW_CARDS
    rows = [row for group, name in zip(groups, names, strict=True) for row in _rows(group, name, is_wide=is_wide)]
    words = "; ".join(f"{row['group']}, {row['place']}: {row['shown']}" for row in rows if row["is_last"])
    header = ("Group", "At", "Scaling efficiency", "Interval")
    lines = [(row["group"], row["place"], row["shown"], row["basis"]) for row in rows]
    most = max(len(group.points) - 1 for group in groups)
    height = min(_ROOM, len(groups) * max(44, 16 * most)) if is_wide else max(_PICTURE, _LEAST_ROW * len(groups))
    return [
        finish(
            alt.layer(*_layers(alt, rows, list(names), offset=is_wide and most > 1)),
            ReportSubject("all-groups", "Share of the ideal throughput; each group's fewest ranks are its 100 %"),
            name="efficiency",
            title="Scaling efficiency",
            alt=f"Scaling efficiency of every group, with the ideal (100 %) as a line. {words}.",
            table=(header, *lines),
            size=(900 if is_wide else 260, height),
            still_width=max(_LABEL_ROOM + 75, round(_STILL - _CHARACTER * max(map(len, names)))),
        )
    ]


def _rows(group: ReportGroup, name: str, *, is_wide: bool) -> list[dict[str, Any]]:
    """Every rank count but the baseline, which is 100 % by definition; a group without one says so."""
    if len(group.points) == 1:
        only, ranks = place_of(group.baseline), group.baseline.ranks
        lone = {"value": None, "low": None, "high": None, "shown": "not measured", "basis": "", "is_last": True}
        return [{"group": name, "place": only, "ranks": ranks, "label": f"{only} only", "at": 0.0, **lone}]
    return [
        {
            "group": name,
            "place": place_of(point),
            "ranks": point.ranks,
            **figure_row(point.efficiency),
            "is_last": point is group.largest,
            "label": value_text(point.efficiency) + (f" at {ranks_text(point.ranks)}" if is_wide else ""),
            "at": point.efficiency.high or point.efficiency.value,
        }
        for point in group.points
        if not point.is_baseline
    ]


def _layers(alt: Any, rows: list[dict[str, Any]], names: list[str], *, offset: bool) -> list[Any]:
    measured = [row for row in rows if row["value"] is not None]
    top = max(1.0, *(row["at"] for row in measured))
    # Room on the right for labels, whatever the width.
    right = alt.ExprRef(f"width - {_LABEL_ROOM if len(names) <= FEW_CARDS else _VALUE_ROOM}")
    scale = alt.Scale(domain=[0, top], range=[0, right], nice=False)
    values = [k / 5 for k in range(int(top * 5) + 1)]
    x = alt.X("value:Q", title=None, scale=scale, axis=alt.Axis(format=".0%", values=values, grid=True))
    axis = alt.Axis(labelLimit=260 if len(names) <= FEW_CARDS else _LABEL, ticks=False, domain=False)
    y = alt.Y("group:N", title=None, sort=names, axis=axis)
    place = {"y": y, **({"yOffset": alt.YOffset("ranks:O", sort="ascending")} if offset else {})}
    tooltip = tooltips({"group": "group", "place": "at", "shown": "efficiency", "basis": "interval"})
    base = alt.Chart(alt.InlineData(values=measured)).encode(**place)
    shade = alt.condition("datum.is_last", alt.value(1), alt.value(0.45))
    ideal = alt.Chart(alt.InlineData(values=[{"ideal": 1.0}]))
    labelled = [row for row in rows if row["is_last"]] if len(names) > FEW_CARDS else rows
    labels = alt.Chart(alt.InlineData(values=labelled)).encode(**place)
    return [
        ideal.mark_rule(color=IDEAL, strokeWidth=2, strokeDash=[5, 4]).encode(x=alt.X("ideal:Q")),
        base.mark_rule(color=MEASURED, strokeWidth=4, opacity=0.4).encode(x=alt.X("low:Q"), x2="high:Q"),
        base.mark_point(color=MEASURED, filled=True, size=70).encode(x=x, opacity=shade, tooltip=tooltip),
        # All in one column, where no interval reaches.
        labels.mark_text(color=MUTED, align="left", dx=9, fontSize=12).encode(x=alt.value(right), text="label:N"),
        ideal.mark_text(color=MUTED, align="right", dx=-5, dy=-6, fontSize=12, text="ideal").encode(
            x=alt.X("ideal:Q"), y=alt.value(0)
        ),
    ]


class SummaryView(ReportView):
    """What the report says, at a glance."""

    id = "summary"
    title = "Summary"
    level = "answer"
    after = "start"

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.groups:
            more = "Below, each run with the reason." if report.runs else "There are no runs here."
            words = (f"No run has figures. {more}",)
            return (Section(id=self.id, title=self.title, words=words, brief=("No run has figures.",)),)
        names = short_names(report.groups)
        # What holds for all groups, since their names do not say it.
        conditions = {
            name: {one.condition(name) for one in report.groups}
            for name in ("preset", "engine", "precision", "scaling", "goal")
        }
        shared = [
            condition_text(name, *values) for name, values in conditions.items() if len(values) == 1 and any(values)
        ]
        about = f"{'All groups: ' * (len(report.groups) > 1)}{', '.join(shared)}."
        return (
            Section(
                id=self.id,
                title=self.title,
                about=(about,) if shared else (),
                charts=lambda: _efficiency_chart(report.groups, names),
                charts_per_row=1,
                cards=tuple(_card(group, name, report) for group, name in zip(report.groups, names, strict=True)),
                brief=(),
            ),
        )


def _card(group: ReportGroup, name: str, report: Report) -> Card:
    big, small = _headline(group)
    last = group.largest
    lost = group.of(LostPercent)
    point = lost.at(last) if lost else None
    loss = loss_in_brief(point) if point else ""
    return Card(
        title=name,
        link=f"group-{group.id}",
        big=big,
        small=small,
        rating=rating(group, report),
        facts=(
            ("Machine", _machine(group, report)),
            ("Throughput", f"{value_text(last.throughput)} {last.throughput.unit}"),
            *([("Loss", loss)] if loss else []),
        ),
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
    """Nodes, GPU or CPU model and cores, as far as the runs' records say."""
    name = group.condition("system")
    found = next((one for one in report.all_of(SystemDescription) if one.name == name), None)
    nodes = group.largest.nodes
    counted = f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
    if found is None:
        return f"{counted} of {name}" if name else counted
    fields = dict(found.fields)
    gpu, cpu, threads = fields.get("GPU", ""), fields.get("Processor", ""), fields.get("Processor threads per node", "")
    if gpu and not gpu.startswith(_NO_GPU):
        each = fields.get("GPUs in use per node", "")
        return f"{counted}, {f'{each} x ' if each else ''}{gpu}"
    return ", ".join((counted, *([cpu] if cpu else []), *([f"{threads} threads"] if threads else [])))
