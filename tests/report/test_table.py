"""Columns of tables, digits of their figures, shapes of charts, and the order of views."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlbench.report.charts import (
    Axis,
    ReportSubject,
    Series,
    figure_row,
    finish,
    intervals,
    layer,
    lines,
    scatter,
    stacked,
)
from dlbench.report.table import Column, Sheet, cell_of, column, columns_of, times_cell, unit_cell
from dlbench.report.views import ReportView, in_order
from dlbench.report.wording import (
    basis_text,
    estimate_parts,
    figure_text,
    interval_text,
    is_point,
    times_text,
    value_text,
)
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate
from dlbench.views.scaling_report import scaling_views

TIME = Estimate(2.0, 1.0, 3.0, 3, "bootstrap", "s")


@dataclass(frozen=True, kw_only=True)
class Point:
    ranks: int
    time: Estimate | None = field(metadata=column("Step", "step_s", missing="none", is_brief=True))
    hosts: tuple[str, ...] = field(metadata=column("Hosts", value=" ".join))
    note: str = field(default="", metadata=column("Note", "", limit=4))

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)


@dataclass(frozen=True)
class Row:
    point: Point | None


def test_fields_with_a_column_are_the_columns() -> None:
    sheet = Sheet(
        name="s",
        title="S",
        columns=columns_of(Point),
        rows=[Point(ranks=2, time=TIME, hosts=("a", "b"), note="longer"), Point(ranks=4, time=None, hosts=())],
    )
    assert list(sheet.records()) == [
        {"step_s": 2.0, "step_s_low": 1.0, "step_s_high": 3.0, "hosts": "a b"},
        {"step_s": None, "step_s_low": None, "step_s_high": None, "hosts": ""},
    ]
    table = sheet.to_display()
    assert table.header == ("Step", "Hosts", "Note")
    assert [row.cells[0].text for row in table.rows] == ["2.0 s", "none"]
    assert table.rows[0].cells[1].text == "a b"
    assert table.rows[0].cells[2].text.startswith("lon")
    assert table.rows[0].cells[2].text != "longer"
    assert sheet.to_display(brief=True).header == ("Step",)


def test_picks_order_name_and_reach_into_rows() -> None:
    made = columns_of(
        Point,
        "ranks",
        "num_hosts",
        "runs=time.n",
        Column("first", "First", lambda point: point.hosts[0]),
        "time",
        of=lambda row: row.point,
        titles={"step_s": ""},
    )
    sheet = Sheet(name="s", title="S", columns=made, rows=[Row(Point(ranks=2, time=TIME, hosts=("a",))), Row(None)])
    assert sheet.names == ("ranks", "num_hosts", "runs", "first", "step_s", "step_s_low", "step_s_high")
    first, second = sheet.records()
    assert tuple(first.values()) == (2, 1, 3, "a", 2.0, 1.0, 3.0)
    assert set(second.values()) == {None}
    assert sheet.to_display().header == ("First",)


def spec_of(drawn: Any) -> dict[str, Any]:
    chart = finish(
        drawn, ReportSubject("r", "R"), name="n", title="T", alt="A", table=(("a",), ("b",)), size=(300, 200)
    )
    return chart.spec


ROWS = [
    {"ranks": 1, "place": "1 rank", "kind": "b", "order": 0, **figure_row(TIME)},
    {"ranks": 4, "place": "4 ranks", "kind": "a", "order": 1, **figure_row(TIME, 2.0)},
]
SERIES = Series("kind", {"a": "#000000", "b": "#ffffff", "c": "#777777"})


def test_lines_have_intervals_and_a_logarithmic_axis() -> None:
    layers = spec_of(lines(ROWS, Axis("time", unit="s"), SERIES, {"place": "at", "value:Q:.2f": "s"}))["layer"]
    assert [layer["mark"]["type"] for layer in layers] == ["line", "rule", "point"]
    encoding = layers[0]["encoding"]
    assert encoding["x"]["scale"] == {"type": "log", "base": 2, "domain": [1 / 1.2, 4.8], "nice": False}
    assert encoding["color"]["scale"] == {"domain": ["a", "b"], "range": ["#000000", "#ffffff"]}
    assert [tip.get("format") for tip in layers[2]["encoding"]["tooltip"]] == [None, ".2f"]
    alone = [{**row, "low": None, "high": None} for row in ROWS]
    assert len(spec_of(lines(alone, Axis("time"), "#000000", {}))["layer"]) == 2


def test_bars_and_dots_stand_in_the_order_of_rows() -> None:
    spec = spec_of(intervals(ROWS, Axis("time"), SERIES, {}, y="place", reference=1.0))
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["rule", "point", "rule"]
    assert spec["layer"][0]["encoding"]["y"]["sort"] == ["1 rank", "4 ranks"]
    bars = spec_of(stacked(ROWS, Axis("time"), SERIES, {}))["layer"][0]["encoding"]
    assert bars["x"]["stack"] == "zero"
    assert bars["order"]["field"] == "order"


@pytest.mark.parametrize(
    "drawn",
    [
        lines(ROWS, Axis("time"), SERIES, {}),
        stacked(ROWS, Axis("time"), SERIES, {}),
        intervals(ROWS, Axis("time"), SERIES, {}, y="place"),
        scatter(ROWS, Axis("step", "ranks"), Axis("time"), SERIES, {}),
    ],
    ids=["lines", "stacked", "intervals", "scatter"],
)
def test_layers_keep_their_rows_among_others(drawn: Any) -> None:
    spec = spec_of([*drawn, layer([{"one": 1}], "rule", {"x": "one:Q"})])
    rows = [spec["datasets"][drawn_layer["data"]["name"]] for drawn_layer in spec["layer"]]
    assert [len(one) for one in rows] == [2] * len(drawn) + [1]


UNITS = ("images/s", "fraction", "points", "ratio", "GB/s", "J", "messages", "epochs", "ms of nothing")
SHARES = ("fraction", "points", "ratio")
FACTOR = {"fraction": 100.0, "points": 100.0}


def figure(value: float, low: float, high: float, unit: str = "images/s", **more: object) -> Estimate:
    return Estimate(value, low, high, 5, "Student t", unit, 0.95, **more)  # type: ignore[arg-type]


@st.composite
def figures(draw: st.DrawFn) -> Estimate:
    """Figures whose interval is wide or narrow, of any size and unit."""
    value = draw(st.floats(-1, 1)) * 10.0 ** draw(st.integers(-6, 9))
    below, above = (abs(draw(st.floats(1e-9, 3))) * max(abs(value), 1e-9) for _ in range(2))
    return figure(value, value - below, value + above, draw(st.sampled_from(UNITS)))


@given(figures())
def test_value_and_ends_stop_at_one_place_and_the_interval_is_kept(one: Estimate) -> None:
    assume(not is_point(one))
    text, interval, _ = estimate_parts(one)
    numbers = [part.replace(",", "") for part in (text, *interval.strip("[]").split(", "))]
    places = {len(number.partition(".")[2]) for number in numbers}
    assert len(places) == 1
    assert one.low is not None
    assert one.high is not None
    factor, half_a_place = FACTOR.get(one.unit, 1.0), 0.5 * 10.0 ** -places.pop()
    for number, true in zip(numbers, (one.value, one.low, one.high), strict=True):
        # Neither value nor ends are moved by more, so the interval is neither narrowed nor shifted by more.
        assert abs(float(number) - factor * true) <= half_a_place * (1 + 1e-6) + 1e-12 * abs(factor * true)
    assert float(numbers[1]) <= float(numbers[0]) <= float(numbers[2])
    assert not any(re.fullmatch(r"-0(\.0*)?", number) for number in numbers)


@given(figures())
def test_half_the_interval_has_one_or_two_digits(one: Estimate) -> None:
    assume(not is_point(one))
    places = len(value_text(one).replace(",", "").partition(".")[2].removesuffix(" %").removesuffix(" points"))
    half = FACTOR.get(one.unit, 1.0) * (one.high - one.low) / 2
    if one.unit == "ratio" and one.low > 0:
        half = min(half, one.low)
    significant = places + 1 + math.floor(math.log10(half))
    # Shares have the digits of their whole: of nearly nothing there are fewer.
    largest = FACTOR.get(one.unit, 1.0) * max(abs(one.value), abs(one.low), abs(one.high), one.unit in SHARES)
    # At least whole numbers, at most five digits in all.
    assert significant in (1, 2) or (places == 0 and significant > 2) or largest * 10**places > 5e3
    assert interval_text(one)
    low, high = re.findall(r"-?[\d,.]+\d|-?\d", interval_text(one).replace(", ", " "))
    assert low != high


@given(st.floats(0.1, 2e5), st.floats(1e-4, 0.5))
def test_durations_have_one_unit_in_value_and_ends(seconds: float, share: float) -> None:
    text, interval, unit = estimate_parts(figure(seconds, seconds * (1 - share), seconds * (1 + share), "s"))
    if unit:
        assert re.fullmatch(r"[\d,.]+", text)
        assert re.fullmatch(r"\[[\d,.]+, [\d,.]+\]", interval)
    else:
        marks = {re.sub(r"\d+", "", part) for part in (text, *interval.strip("[]").split(", "))}
        assert len(marks) == 1


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (figure(95.29, 15.09, 342.4), "95 [15, 342]"),
        (figure(0.595, 0.094, 2.14, "fraction"), "60 % [9, 214]"),
        (figure(1234.5, 1219.2, 1249.9), "1,234 [1,219, 1,250]"),
        (figure(0.0123, 0.0119, 0.0129, "s"), "12.3 ms [11.9, 12.9]"),
        (figure(0.95, 0.9, 1.05, "s"), "950 ms [900, 1,050]"),
        (figure(125.0, 110.0, 4000.0, "s"), "2 min 05 s [1 min 50 s, 66 min 40 s]"),
        (figure(64.0, 60.0, 50580.0, "s"), "1 min 04 s [1 min 00 s, 14 h 03 min]"),
        (figure(245.0, 238.0, 251.0, "s"), "4 min 05 s [3 min 58 s, 4 min 11 s]"),
        (figure(155.2 * 2**20, 150 * 2**20, 1100 * 2**20, "bytes"), "155 MiB [150, 1,100]"),
        (figure(0.0, 0.0, 0.0, "s"), "0 s"),
        (figure(1234567.0, 1234540.0, 1234590.0, "samples"), "1,234,567 [1,234,540, 1,234,590]"),
        (figure(500.0 * 2**20, 500.0 * 2**20, 500.001 * 2**20, "bytes"), "500 MiB"),
        (Estimate(50.0, 49.9, 50.2, 2, "range", "images/s", 0.5), "50.00 (49.90 to 50.20)"),
        (Estimate(50.0, None, None, 1, "single run", "images/s"), "50.00"),
    ],
)
def test_what_people_read(one: Estimate, text: str) -> None:
    assert figure_text(one) == text
    assert str(cell_of(one)) == text


def test_all_ways_to_print_a_factor_follow_one_rule() -> None:
    one = figure(1.80412, 1.7512, 1.8634, "ratio")
    assert times_text(one) == str(times_cell(one)) == "1.80x [1.75, 1.86]"
    assert figure_text(one) == "1.80 [1.75, 1.86]"
    # A wide interval does not take the digits of a ratio's lower end, which is never 0.
    assert times_text(figure(2.1, 0.4, 10.2, "ratio")) == "2.1x [0.4, 10.2]"
    assert str(unit_cell(figure(24.31, 24.1, 24.5, "J"))) == "24.31 [24.10, 24.50] J"
    assert times_text(figure(1.00412, 1.0031, 1.0049, "ratio")) == "1.0041x [1.0031, 1.0049]"


def test_equal_runs_claim_no_confidence() -> None:
    for make in (mean_estimate, median_estimate):
        same = make([0.943] * 5, "fraction")
        assert interval_text(same) == ""
        assert basis_text(same) == "5 runs, all equal"


def test_two_runs_have_a_range_and_its_level() -> None:
    two = mean_estimate([50.0, 50.2], "images/s")
    assert interval_text(two).startswith("(")
    assert " to " in interval_text(two)
    assert basis_text(two) == "range of 2 runs, 50 %"


ORDER = (
    "summary sweep quality scaling time-to-train causes forecast stragglers steps ranks exchange data-path staging "
    "reading shuffle-audit memory telemetry energy noise utilisation campaign-cost slow-nodes stalls break-even "
    "shuffling precision asynchrony large-batch out-of-core differences systems history runs without-figures "
    "environment"
)


def test_the_order_of_the_scaling_report() -> None:
    views = scaling_views()
    assert " ".join(view.id for view in (*views.opening, *views.group, *views.closing)) == ORDER


def _views(**after: str) -> list[ReportView]:
    return [type(name, (ReportView,), {"id": name, "after": behind})() for name, behind in after.items()]


def test_a_new_view_stands_directly_behind_the_one_that_it_names() -> None:
    ordered = in_order(_views(c="b", new="a", b="a", a="start"), "start")
    assert [view.id for view in ordered[0]] == ["a", "new", "b", "c"]


@pytest.mark.parametrize("views", [_views(a="start", b="no"), _views(a="b", b="a"), 2 * _views(a="start")])
def test_a_view_without_a_place_is_an_error(views: list[ReportView]) -> None:
    with pytest.raises(ValueError, match="view"):
        in_order(views, "start")


def test_an_interval_is_drawn_from_low_to_high() -> None:
    layers = lines([{"ranks": 1, "value": 2.0, "low": 1.0, "high": 3.0}], Axis("s"), "#000000", {})
    (rule,) = (layer["encoding"] for layer in layers if layer["mark"]["type"] == "rule")
    assert (rule["y"]["field"], rule["y2"]["field"]) == ("low", "high")
