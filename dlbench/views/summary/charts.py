"""One picture of all groups: their scaling efficiency at every rank count, against the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.report.charts.chart import Chart, finish
from dlbench.report.charts.style import IDEAL, MEASURED, MUTED
from dlbench.report.document import FEW_CARDS
from dlbench.report.wording import basis_text, figure_text, place_text, value_text
from dlbench.views.model import Group

_LABEL = 230
"""Longest name in a picture of many groups, pixels: the list beside it has them whole."""
_LEAST_ROW = 9
_PICTURE = 600
"""Height of a picture of many groups, pixels: with the head of the page it fits a screen of 900."""
_ROOM = 190
"""Height of a picture of few groups, pixels: their cards fit the same screen."""


@dataclass(frozen=True)
class _AllGroups:
    """What the picture is about."""

    id: str = "all-groups"
    label: str = "Share of the ideal throughput; each group's fewest ranks are its 100 %"


def efficiency_chart(groups: Sequence[Group], names: Sequence[str]) -> list[Chart]:
    """The picture; none where no group has a second rank count.

    Args:
        groups: all of the report.
        names: of the groups, short and unique.
    """
    if all(len(group.points) == 1 for group in groups):
        return []
    import altair as alt

    rows = [row for group, name in zip(groups, names, strict=True) for row in _rows(group, name)]
    words = "; ".join(f"{row['group']}, {row['place']}: {row['shown']}" for row in rows if row["is_last"])
    header = ("Group", "At", "Scaling efficiency", "Interval")
    lines = [(row["group"], row["place"], row["shown"], row["basis"]) for row in rows]
    is_wide = len(groups) <= FEW_CARDS
    most = max(len(group.points) - 1 for group in groups)
    height = min(_ROOM, len(groups) * max(44, 16 * most)) if is_wide else max(_PICTURE, _LEAST_ROW * len(groups))
    return [
        finish(
            alt.layer(*_layers(alt, rows, list(names), offset=is_wide and most > 1)),
            _AllGroups(),
            name="efficiency",
            title="Scaling efficiency",
            alt=f"Scaling efficiency of every group, with the ideal (100 %) as a line. {words}.",
            table=(header, *lines),
            size=(820 if is_wide else 260, height),
        )
    ]


def _rows(group: Group, name: str) -> list[dict[str, Any]]:
    """Every rank count but the baseline, which is 100 % by definition; a group without one says so."""
    if len(group.points) == 1:
        only = place_text(group.baseline.ranks, group.baseline.nodes)
        lone = {"value": None, "low": None, "high": None, "shown": "not measured", "basis": "", "is_last": True}
        return [
            {"group": name, "place": only, "ranks": group.baseline.ranks, "label": f"{only} only", "at": 0.0, **lone}
        ]
    return [
        {
            "group": name,
            "place": place_text(point.ranks, point.nodes),
            "ranks": point.ranks,
            "value": point.efficiency.value,
            "low": point.efficiency.low,
            "high": point.efficiency.high,
            "shown": figure_text(point.efficiency),
            "basis": basis_text(point.efficiency),
            "is_last": point is group.largest,
            "label": f"{value_text(point.efficiency)} at {place_text(point.ranks, point.nodes)}",
            "at": point.efficiency.high or point.efficiency.value,
        }
        for point in group.points
        if not point.is_baseline
    ]


def _layers(alt: Any, rows: list[dict[str, Any]], names: list[str], *, offset: bool) -> list[Any]:
    measured = [row for row in rows if row["value"] is not None]
    top = max(1.0, *(row["at"] for row in measured))
    # Room on the right for labels.
    scale = alt.Scale(domain=[0, top * (1.22 if len(names) <= FEW_CARDS else 1.45)], nice=False)
    values = [k / 5 for k in range(int(top * 5) + 1)]
    x = alt.X("value:Q", title=None, scale=scale, axis=alt.Axis(format=".0%", values=values, grid=True))
    y = alt.Y(
        "group:N",
        title=None,
        sort=names,
        axis=alt.Axis(labelLimit=260 if len(names) <= FEW_CARDS else _LABEL, ticks=False, domain=False),
    )
    place = {"y": y, **({"yOffset": alt.YOffset("ranks:O", sort="ascending")} if offset else {})}
    tooltip = [
        alt.Tooltip("group:N", title="group"),
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("shown:N", title="efficiency"),
        alt.Tooltip("basis:N", title="interval"),
    ]
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
        labels.mark_text(color=MUTED, align="left", dx=9, fontSize=12).encode(
            x=alt.datum(top), text=alt.Text("label:N")
        ),
        ideal.mark_text(color=MUTED, align="right", dx=-5, dy=-6, fontSize=12, text="ideal").encode(
            x=alt.X("ideal:Q"), y=alt.value(0)
        ),
    ]
