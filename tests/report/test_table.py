"""Columns that dataclass fields name once, and the four shapes of charts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dlbench.report.charts import Axis, ReportSubject, Series, figure_row, finish, intervals, lines, scatter, stacked
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.stats.estimates import Estimate

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
    import altair

    more = altair.Chart(altair.InlineData(values=[{"one": 1}])).mark_rule().encode(x="one:Q")
    spec = spec_of(altair.layer(*drawn.layer, more))
    rows = [spec["datasets"][layer["data"]["name"]] for layer in spec["layer"]]
    assert [len(one) for one in rows] == [2] * len(drawn.layer) + [1]
