"""Steps of a sweep of fusion side by side: what each hides behind its backward pass, and the least possible."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlbench.records.scan import scan
from dlbench.report.charts import Chart
from dlbench.specs.plan import RunPlan
from dlbench.views.scaling_report import assemble, document_of
from tests.support.run_factory import Story, exchange_result, write_sweep

GRADIENTS = ((40_000, 0.004), (2_000_000, 0.012), (400_000, 0.02), (8_000_000, 0.03), (1_000_000, 0.045))
ALPHA, BETA = 1e-3, 2e-9
GROUPS = {"own:single": (5,), "own:none": (1, 1, 1, 1, 1), "own:1MiB": (2, 2, 1), "own:4MiB": (3, 2)}
BACKWARD_S = GRADIENTS[-1][1]


def sent(groups: Sequence[int]) -> list[tuple[float, float, int, int]]:
    """Begin, end, bytes and gradients of messages that hold so many gradients each, one after the other."""
    found, free, first = [], 0.0, 0
    for count in groups:
        part = GRADIENTS[first : first + count]
        size = sum(num_bytes for num_bytes, _ in part)
        begin = max(free, part[-1][1])
        free, first = begin + ALPHA + size * BETA, first + count
        found.append((begin, free, size, count))
    return found


def exposed_of(groups: Sequence[int]) -> float:
    return sum(max(0.0, end - max(begin, BACKWARD_S)) for begin, end, *_ in sent(groups))


def story(plan: RunPlan, faster: Mapping[str, float] = {}) -> Story:
    """As the model sends; a fusion of `faster` left so much less after the backward pass."""
    spans, fusion = sent(GROUPS[str(plan.sync.fusion)]), str(plan.sync.fusion)
    messages = [
        {"num_bytes": size, "num_tensors": count, "method": "flat", "start_s": begin, "exchange_s": end - begin}
        for begin, end, size, count in spans
    ]
    busy = sum(end - begin for begin, end, *_ in spans)
    exposed = exposed_of(GROUPS[fusion]) - faster.get(fusion, 0.0)
    more = {"messages": messages, "communication_s": busy, "exposed_s": exposed, "hidden_s": busy - exposed}
    told = exchange_result(plan, gradients=GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA, fusion=fusion, **more)
    return Story(exchange=told)


def charts(out: Path, *fusions: str, faster: Mapping[str, float] = {}) -> list[Chart]:
    sweep = {"sync.fusion": fusions}
    write_sweep(out, lambda _: 1.0, engine="ddp", sweep=sweep, story=lambda plan: story(plan, faster), repeats=2)
    sections = [section for section, _ in document_of(assemble(scan(out))).walk()]
    return [chart for section in sections for chart in section.charts() if chart.id.endswith("-overlap")]


def bars(chart: Chart, line: str, kind: str) -> list[dict[str, Any]]:
    return [bar for bar in next(iter(chart.spec["datasets"].values())) if line in bar["name"] and bar["kind"] == kind]


def length(found: Sequence[Mapping[str, float]]) -> float:
    return sum(bar["to"] - bar["from"] for bar in found)


def test_one_step_of_each_way_on_one_axis_with_the_least_marked(tmp_path: Path) -> None:
    (chart,) = charts(tmp_path, *GROUPS)
    best = min(
        exposed_of([len(part) for part in parts]) for size in range(1, 6) for parts in [*partitions(GRADIENTS, size)]
    )
    lines = list(dict.fromkeys(bar["name"] for bar in next(iter(chart.spec["datasets"].values()))))
    # Of the two that merge the one that leaves less: the larger buckets end later.
    assert exposed_of(GROUPS["own:1MiB"]) < exposed_of(GROUPS["own:4MiB"])
    assert lines[::2] == ["no overlap: own:single", "wait-free: own:none", "merged: own:1MiB"]
    for fusion in ("own:single", "own:none", "own:1MiB"):
        spans = sent(GROUPS[fusion])
        exposed = bars(chart, fusion, "message, exposed")
        assert length(exposed) == pytest.approx(exposed_of(GROUPS[fusion]))
        assert length(bars(chart, fusion, "message, hidden")) == pytest.approx(
            sum(end - begin for begin, end, *_ in spans) - exposed_of(GROUPS[fusion])
        )
        (backward,) = bars(chart, fusion, "backward pass")
        assert (backward["from"], backward["to"]) == (0.0, BACKWARD_S)
        (mark,) = bars(chart, fusion, "least possible end")
        assert mark["from"] == pytest.approx(BACKWARD_S + best)
        assert all(bar["from"] >= BACKWARD_S for bar in exposed)
    # All four stand in the table behind it, with the interval of each.
    assert [row.cells[0].text for row in chart.table.rows] == [*lines[:3:2], lines[4], "merged: own:4MiB"]
    assert f"own:single: {1e3 * exposed_of((5,)):.1f} ms exposed" in lines


def partitions(items: Sequence[Any], size: int) -> list[list[Sequence[Any]]]:
    cuts = itertools.combinations(range(1, len(items)), size - 1)
    return [[items[a:b] for a, b in itertools.pairwise((0, *cut, len(items)))] for cut in cuts]


def test_no_mark_where_a_setting_left_less_than_the_model_allows(tmp_path: Path) -> None:
    least = exposed_of((5,)) - 0.001
    (chart,) = charts(tmp_path, "own:single", "own:none", faster={"own:single": least})
    assert not bars(chart, "", "least possible end")
    assert chart.title.endswith("model contradicted by measurement")


def test_one_way_alone_is_not_drawn(tmp_path: Path) -> None:
    assert charts(tmp_path, "own:1MiB", "own:4MiB") == []
