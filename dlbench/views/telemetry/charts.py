"""One run over time: small charts under each other that share one axis, with the stages of the run above them.

Each chart has one quantity and one y axis. Where samples are missing a line ends and begins anew.
"""

from __future__ import annotations

import textwrap
from typing import Any

from dlbench.report.charts.chart import Chart
from dlbench.report.charts.style import MUTED, RANK_COLOURS, STAGE_COLOURS, SUBTITLE_PIXELS, si_label
from dlbench.report.wording import percent, place_text
from dlbench.units import format_number, format_seconds
from dlbench.views.model import Group
from dlbench.views.telemetry.numbers import Stretch, Telemetry
from dlbench.views.telemetry.tables import timeline_sheet
from dlbench.views.telemetry.timeline import Line, Panel, Timeline

_WIDTH = 640
_HEIGHT = 58
_BAR = 15

_IN_WORDS = {"power_w": "a GPU's power"}
"""Panels whose title does not read well in a sentence, by name."""

MIN_SAMPLES = 3
"""Samples in the measured window below which there is no series to draw."""

_ALIKE = 0.02
"""Means that differ by less are one number in words."""

_THROTTLED = "#d55e00"


def telemetry_charts(group: Group, found: Telemetry) -> list[Chart]:
    """The run in the middle of the point with most ranks; none without a series of samples."""
    timeline = found.timeline
    if timeline is None or not is_series(timeline):
        return []
    import altair as alt

    ends = _ends(timeline)
    strips = [_strip(alt, "Stages", timeline.stages, ends, _stage_colour(alt, timeline))]
    if timeline.throttled:
        held = alt.value(_THROTTLED)
        strips.append(_strip(alt, "Throttled", timeline.throttled, ends, held))
    lines = [_panel(alt, panel, timeline, ends, is_first=not place) for place, panel in enumerate(timeline.panels)]
    stack = alt.vconcat(*strips, *lines, spacing=6).resolve_scale(color="independent")
    words = finding(timeline)
    place = place_text(timeline.ranks, timeline.nodes)
    spec: dict[str, Any] = stack.properties(description=words).to_dict()
    spec.pop("config", None)
    _label_last(spec)
    title = f"One run over time at {place}"
    spec["title"] = {
        "text": title,
        "subtitle": textwrap.wrap(f"{timeline.run_id}, {group.label}", int(_WIDTH / SUBTITLE_PIXELS), max_lines=3),
    }
    spec["usermeta"] = {"axes": "", "series": None}
    table = timeline_sheet(timeline).people()
    return [Chart(id=f"chart-{group.id}-telemetry", title=title, alt=words, spec=spec, table=table)]


def is_series(timeline: Timeline) -> bool:
    """Whether some line has samples enough in the measured window to be drawn over time."""
    return any(
        sum(value is not None and 0 <= t <= timeline.window_s for t, value in line.points) >= MIN_SAMPLES
        for panel in timeline.panels
        for line in panel.lines
    )


def finding(timeline: Timeline) -> str:
    """What the lines show, in words."""
    parts = [text for panel in timeline.panels if (text := _means(panel))]
    held: dict[str, float] = {}
    for (lane, _), share in timeline.throttled_shares().items():
        held[lane] = held.get(lane, 0.0) + share
    clocks = [f"{lane} was throttled in {percent(share)} of it" for lane, share in held.items()]
    has_gaps = any(line.num_gaps for panel in timeline.panels for line in panel.lines)
    broken = ["gaps in the lines are times without samples"] if has_gaps else []
    means = f"Means over {format_seconds(timeline.window_s)}: {'; '.join(parts)}" if parts else ""
    return "".join(f"{text[0].upper()}{text[1:]}. " for text in (means, *clocks, *broken) if text).rstrip()


def _means(panel: Panel) -> str:
    """The mean of a panel's lines, or the lowest and the highest where they differ."""
    means = sorted((line.mean, line.lane) for line in panel.lines if line.mean is not None)
    if not means:
        return ""
    title = _IN_WORDS.get(panel.name, panel.title)
    (low, first), (high, last) = means[0], means[-1]
    if high - low <= _ALIKE * abs(high):
        return f"{title} {format_number(high, 3)} {panel.unit}"
    ends = f"{format_number(low, 3)} {panel.unit} at {first} to {format_number(high, 3)} {panel.unit} at {last}"
    return f"{title} {ends}"


def _ends(timeline: Timeline) -> list[float]:
    """Begin and end of the axis: a little more than the measured window and the stages around it."""
    begins = [0.0, *(one.begin_s for one in timeline.stages)]
    ends = [timeline.window_s, *(one.end_s for one in timeline.stages)]
    # A long building would leave no room for what is measured.
    first = max(min(begins), -timeline.window_s)
    last = min(max(ends), 2 * timeline.window_s)
    return [round(first, 3), round(last, 3)]


def _x(alt: Any, field: str, ends: list[float]) -> Any:
    return (
        alt.X(field, title=None)
        .scale(domain=ends, nice=False, clamp=True)
        .axis(labels=False, ticks=False, domain=False, grid=False)
    )


def _label_last(spec: dict[str, Any]) -> None:
    """Only the lowest chart says what time it is."""
    for unit in spec["vconcat"][-1]["layer"]:
        encoding = unit.get("encoding", {}).get("x")
        if encoding is not None and "axis" in encoding:
            encoding["axis"] = {"grid": False, "tickCount": 8, "labelExpr": si_label("s")}
            encoding["title"] = "time since the measured steps began"


def _strip(alt: Any, title: str, stretches: tuple[Stretch, ...], ends: list[float], colour: Any) -> Any:
    lanes = list(dict.fromkeys(one.lane for one in stretches))
    rows = [
        {
            "lane": one.lane,
            "from": max(ends[0], round(one.begin_s, 3)),
            "to": min(ends[1], round(one.end_s, 3)),
            "what": one.name,
            "for": format_seconds(one.end_s - one.begin_s),
        }
        for one in stretches
        if one.end_s > ends[0] and one.begin_s < ends[1]
    ]
    tooltip = [
        alt.Tooltip("lane:N", title="at"),
        alt.Tooltip("what:N", title=title.lower()),
        alt.Tooltip("for:N", title="for"),
    ]
    y = alt.Y("lane:N", title=None, sort=lanes).axis(ticks=False, domain=False, labelLimit=150)
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.8})
        .encode(x=_x(alt, "from:Q", ends), x2="to:Q", y=y, color=colour, tooltip=tooltip)
        .properties(width=_WIDTH, height=_BAR * max(1, len(lanes)), title=_headline(alt, title))
    )


def _headline(alt: Any, text: str) -> Any:
    return alt.TitleParams(text, fontSize=11, fontWeight="normal", color=MUTED, anchor="start", offset=3)


def _stage_colour(alt: Any, timeline: Timeline) -> Any:
    present = [stage for stage in STAGE_COLOURS if any(one.name == stage for one in timeline.stages)]
    others = list(dict.fromkeys(one.name for one in timeline.stages if one.name not in STAGE_COLOURS))
    scale = {
        "domain": [*present, *others],
        "range": [*(STAGE_COLOURS[name] for name in present), *[MUTED] * len(others)],
    }
    return alt.Color("what:N", title=None).scale(**scale).legend(orient="top", columns=6, offset=2)


def _panel(alt: Any, panel: Panel, timeline: Timeline, ends: list[float], *, is_first: bool) -> Any:
    window = alt.Chart(alt.InlineData(values=[{"from": 0, "to": round(timeline.window_s, 3)}]))
    colours = _colours(timeline)
    layers = [
        window.mark_rect(color=MUTED, opacity=0.1).encode(x=_x(alt, "from:Q", ends), x2="to:Q"),
        *(layer for line in panel.lines for layer in _line(alt, panel, line, ends, colours[line.lane])),
    ]
    if is_first and len(panel.lines) > 1:
        layers.append(_legend(alt, {line.lane: colours[line.lane] for line in panel.lines}))
    return alt.layer(*layers).properties(
        width=_WIDTH, height=_HEIGHT, title=_headline(alt, f"{panel.title}, {panel.unit}")
    )


def _colours(timeline: Timeline) -> dict[str, str]:
    """One colour for one lane; a node has that of its first GPU."""
    found: dict[str, str] = {}
    for lane in timeline.lanes:
        of_node = [colour for other, colour in found.items() if other.endswith(f" of {lane}")]
        found[lane] = of_node[0] if of_node else RANK_COLOURS[len(set(found.values())) % len(RANK_COLOURS)]
    return found


def _legend(alt: Any, colours: dict[str, str]) -> Any:
    """Nothing is drawn: lines have colours of their own, so that their data need not name them in each row."""
    legend = alt.Legend(
        orient="top", columns=3, title=None, offset=2, symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=2
    )
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    rows = alt.InlineData(values=[{"lane": lane} for lane in colours])
    return alt.Chart(rows).mark_point(opacity=0).encode(color=alt.Color("lane:N", legend=legend, scale=scale))


def _line(alt: Any, panel: Panel, line: Line, ends: list[float], colour: str) -> list[Any]:
    drawn = [(t, value) for t, value in line.points if ends[0] <= t <= ends[1]]
    data = alt.InlineData(values=[{"t": t, "v": value} for t, value in drawn])
    y = alt.Y("v:Q", title=None).scale(**_domain(panel)).axis(tickCount=3, labelExpr="format(datum.value, ',.4~g')")
    tooltip = [alt.Tooltip("t:Q", title="second", format=".4~g"), alt.Tooltip("v:Q", title=panel.title, format=".4~g")]
    x = _x(alt, "t:Q", ends)
    layers = [alt.Chart(data).mark_line(strokeWidth=1.3, color=colour).encode(x=x, y=y, tooltip=tooltip)]
    lonely = _lonely(drawn)
    if lonely:
        rows = alt.InlineData(values=[{"t": t, "v": value} for t, value in lonely])
        layers.append(alt.Chart(rows).mark_point(filled=True, size=9, opacity=1, color=colour).encode(x=x, y=y))
    return layers


def _domain(panel: Panel) -> dict[str, Any]:
    """From zero, but for clocks, whose changes are a small part of them."""
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    if panel.unit == "%":
        return {"domain": [0, 100], "nice": False}
    top = max(values, default=0.0) or 1.0
    if panel.unit == "MHz":
        return {"domain": [min(values, default=0.0) * 0.98, top * 1.03], "nice": False, "zero": False}
    return {"domain": [0, top * 1.1], "nice": False}


def _lonely(points: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Samples with a gap on either side: no line would show them."""
    found = []
    for place, (t, value) in enumerate(points):
        before = points[place - 1][1] if place else None
        after = points[place + 1][1] if place + 1 < len(points) else None
        if value is not None and before is None and after is None:
            found.append((t, value))
    return found
