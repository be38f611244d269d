"""What a report says of the gradient exchange: what ran, what was exposed, how little must be, and what did nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.records.exchange import Message
from dlbench.records.scan import scan
from dlbench.report.charts import Chart
from dlbench.report.document import Document
from dlbench.report.formats import html, terminal
from dlbench.report.table import Sheet
from dlbench.specs.comm import LineCost
from dlbench.specs.plan import RunPlan
from dlbench.views import model
from dlbench.views.exchange import ExchangePoint, exchange_charts, exchange_points, times
from dlbench.views.exchange_bound import fitted_line
from dlbench.views.scaling_report import assemble, document_of
from tests.support.run_factory import Story, constant, edit_json, exchange_result, plans, write_run, write_sweep

SIZES = (40_000, 2_000_000, 400_000, 8_000_000, 1_000_000, 100_000)
GRADIENTS = tuple(zip(SIZES, (0.004, 0.012, 0.018, 0.03, 0.038, 0.045), strict=True))
ALPHA, BETA = 1e-3, 2e-9
STEP_MS = (5.0, 0.0, 30.0, 45.0, 0.0, 10.0)

Change = Callable[[RunPlan], dict[str, Any]]


def write_exchange(
    out: Path, change: Change = lambda plan: {}, *, gradients: Sequence[tuple[int, float]] = GRADIENTS, **request: Any
) -> list[RunPlan]:
    """A weak series whose steps at several ranks are longer by 20 ms of exposed exchange. `change` gives further keys
    of the exchange's result; its key `inert` goes to the record.
    """
    made = plans(**request)
    for plan in made:
        many = plan.layout.ranks > 1
        more = change(plan) if many else {}
        inert = more.pop("inert", ())
        told = {**exchange_result(plan, gradients=gradients, alpha_s=ALPHA, beta_s_per_byte=BETA), **more}
        times = [*STEP_MS[:4], 20.0 if many else 0.0, STEP_MS[5]]
        write_run(out, plan, constant(times), Story(exchange=told if many else None, inert=inert))
    return made


def point_of(out: Path) -> Any:
    table = tabulate(scan(out))
    (group,) = groups(table)
    (point,) = exchange_points(group, table)
    return point


def report_of(out: Path) -> tuple[Document, model.ReportGroup]:
    report = assemble(scan(out))
    (group,) = report.groups
    return document_of(report), group


def points_of(group: model.ReportGroup) -> tuple[ExchangePoint, ...]:
    return group.all_of(ExchangePoint)


def rows_of(sheet: Sheet[Any]) -> list[dict[str, str]]:
    table = sheet.to_display()
    return [dict(zip(table.header, map(str, row.cells), strict=True)) for row in table.rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exchange") / "runs"
    write_exchange(out)
    return out


@pytest.fixture(scope="module")
def made(runs: Path) -> model.Report:
    return assemble(scan(runs))


# Numbers


def exposed_of(groups_of: Sequence[int], line: LineCost) -> float:
    """Exposed communication of messages that hold so many gradients each, one after the other."""
    free, first = 0.0, 0
    for count in groups_of:
        part = GRADIENTS[first : first + count]
        free = max(free, part[-1][1]) + line.time(sum(size for size, _ in part))
        first += count
    return max(0.0, free - GRADIENTS[-1][1])


def all_mergings() -> list[list[int]]:
    found = []
    for cuts in itertools.product((False, True), repeat=len(GRADIENTS) - 1):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        found.append(sizes)
    return found


def test_shares_of_the_step_are_means_of_the_runs_shares(tmp_path: Path) -> None:
    """Repeat k of 2 and 4 ranks is exposed k ms longer, in a step of 110 ms."""

    def more(plan: RunPlan) -> dict[str, Any]:
        return {"hidden_s": 0.02, "exposed_s": 0.01 + plan.series.repeat / 1000, "communication_s": None}

    write_exchange(tmp_path, more, points=(1, 2, 4))
    _, group = report_of(tmp_path)
    for point in points_of(group):
        assert point.hidden_share.value == pytest.approx(0.02 / 0.11)
        assert point.exposed_share.value == pytest.approx(0.012 / 0.11)
        assert point.exposed_share.low < 0.012 / 0.11 < point.exposed_share.high


def test_least_exposed_is_the_best_of_all_mergings(runs: Path) -> None:
    point = point_of(runs)
    line = LineCost(name="true", startup_s=ALPHA, per_byte_s=BETA, ranks=2)
    best = min(exposed_of(merging, line) for merging in all_mergings())
    found = point.prediction
    assert found.is_fitted
    assert (found.startup_s, found.per_byte_s) == pytest.approx((ALPHA, BETA), rel=1e-6)
    assert found.best_exposed.value == pytest.approx(best, rel=1e-6)
    assert exposed_of([1] * len(GRADIENTS), line) > best
    # The factory sends as the model does, so the model must find what was measured.
    assert found.as_ran.value == pytest.approx(point.exposed.value, rel=1e-6)
    assert found.num_messages.value in {len(m) for m in all_mergings() if exposed_of(m, line) <= best + 1e-12}


def test_attainable_efficiency_is_the_baseline_and_the_least_exposed(runs: Path) -> None:
    point = point_of(runs)
    best = point.prediction.best_exposed.value
    assert point.prediction.compute_s == pytest.approx(sum(STEP_MS) / 1e3)
    assert point.prediction.efficiency.value == pytest.approx(0.09 / (0.09 + best))
    assert point.efficiency.value == pytest.approx(0.09 / 0.11)


def test_measured_line_goes_before_a_fitted_one(tmp_path: Path) -> None:
    lines = [
        {"name": "hierarchical", "startup_s": 2e-3, "per_byte_s": 4e-9, "ranks": 2},
        {"name": "flat", "startup_s": 1e-4, "per_byte_s": 1e-10, "ranks": 2},
        {"name": "of other ranks", "startup_s": 0.0, "per_byte_s": 0.0, "ranks": 8},
    ]
    write_exchange(tmp_path, lambda plan: {"costs": lines})
    found = point_of(tmp_path).prediction
    assert not found.is_fitted
    assert found.line.startswith("flat: ")
    line = LineCost(name="flat", startup_s=1e-4, per_byte_s=1e-10, ranks=2)
    assert found.best_exposed.value == pytest.approx(min(exposed_of(merging, line) for merging in all_mergings()))


def timed(sizes: Sequence[int], slow: float = 1.0) -> list[Message]:
    return [
        Message(num_bytes=n, num_tensors=1, method="flat", exchange_s=(ALPHA + BETA * n) * (slow if i == 0 else 1.0))
        for i, n in enumerate(sizes)
    ]


def test_line_needs_sizes_apart() -> None:
    assert fitted_line(timed([1000, 100_000]), 2, "flat") is None
    assert fitted_line(timed([1000, 1100, 1200]), 2, "flat") is None
    assert fitted_line([m.model_copy(update={"exchange_s": None}) for m in timed([1, 10, 100])], 2, "flat") is None
    line = fitted_line(timed([1000, 50_000, 400_000, 1_000_000, 9_000_000], slow=3.0), 2, "flat")
    assert (line.startup_s, line.per_byte_s) == pytest.approx((ALPHA, BETA), rel=0.01)  # one outlier moves it little


def late(out: Path, wait_ms: float) -> None:
    """Rank 1 is late by so much in every step: rank 0's messages that begin when they are ready hold that wait."""
    for plan in plans():
        many = plan.layout.ranks > 1
        result = exchange_result(plan, gradients=GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA)
        free = 0.0
        for message in result["messages"]:
            if message["ready_s"] >= free:
                message["exchange_s"] += wait_ms / 1e3
            free = message["start_s"] = max(free, message["ready_s"])
            free += message["exchange_s"]
        result["exposed_s"] = free - GRADIENTS[-1][1]

        def times(rank: int, step: int, many: bool = many) -> tuple[list[int], int]:
            waits = wait_ms if many and rank == 0 else 0.0
            own = wait_ms * many - waits
            in_ms = [*STEP_MS[:3], STEP_MS[3] + own, 20.0 * many + waits, STEP_MS[5]]
            return [round(1e6 * ms) for ms in in_ms], 0

        write_run(out, plan, times, Story(exchange=result if many else None))


def test_waiting_for_late_ranks_is_not_in_the_line(tmp_path: Path) -> None:
    late(tmp_path, 15.0)
    found = point_of(tmp_path).prediction
    assert found.waiting.value == pytest.approx(0.015)
    assert (found.startup_s, found.per_byte_s) == pytest.approx((ALPHA, BETA), rel=1e-3)


def test_a_run_that_did_better_than_the_model_contradicts_it(tmp_path: Path) -> None:
    """A line that was measured apart, and too slow: there is no bound, in no format."""
    slow = [{"name": "flat", "startup_s": 0.1, "per_byte_s": 1e-8, "ranks": 2}]
    write_exchange(tmp_path, lambda plan: {"costs": slow, "exposed_s": 0.2, "communication_s": 0.3})
    report, group = report_of(tmp_path)
    (point,) = points_of(group)
    assert point.prediction is None
    assert point.why == (
        "model contradicted by measurement: 5 of 5 runs took less time after the backward pass than the model's best"
    )
    assert "Least after backward" not in html.to_html(report)


def test_an_efficiency_above_the_model_contradicts_it(tmp_path: Path) -> None:
    for plan in plans():
        many = plan.layout.ranks > 1
        told = exchange_result(plan, gradients=GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA)
        step = [5.0, 0.0, 20.0, 25.0, 5.0, 10.0] if many else list(STEP_MS)
        write_run(tmp_path, plan, constant(step), Story(exchange=told if many else None))
    point = point_of(tmp_path)
    assert point.prediction is None
    assert point.why.startswith("model contradicted by measurement: it allows ")


def test_the_efficiency_of_the_model_has_the_noise_of_the_baseline(tmp_path: Path) -> None:
    """A baseline that scatters by itself, unlike the point, widens the interval."""
    for name, repeats in (("paired", (0, 0)), ("apart", (0, 7))):
        for ranks, first in zip((1, 2), repeats, strict=True):
            for plan in plans(points=(ranks,), series=f"{name}-{first}"):
                many = ranks > 1
                told = exchange_result(plan, gradients=GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA)
                step = [*STEP_MS[:3], STEP_MS[3] * (1 + 0.1 * plan.series.repeat), 20.0 * many, STEP_MS[5]]
                write_run(tmp_path / name, plan, constant(step), Story(exchange=told if many else None))
    paired, apart = (point_of(tmp_path / name).prediction.efficiency for name in ("paired", "apart"))
    assert apart.high - apart.low > 3 * (paired.high - paired.low)


# What is not known


def test_unknown_is_said_with_the_reason(tmp_path: Path) -> None:
    write_exchange(tmp_path / "when", lambda plan: {"gradients": []}, repeats=1)
    write_exchange(tmp_path / "cost", gradients=GRADIENTS[:2], repeats=1)
    unknown = {"communication_s": None, "exposed_s": None, "hidden_s": None}
    write_exchange(tmp_path / "times", lambda plan: unknown, repeats=1)
    for name, reason in (("when", "when each gradient was ready"), ("cost", "do not determine a line")):
        _, group = report_of(tmp_path / name)
        (point,) = points_of(group)
        assert point.prediction is None
        assert reason in point.why
        assert "Least after backward" not in rows_of(times(points_of(group)))[0]
    _, group = report_of(tmp_path / "times")
    row = rows_of(times(points_of(group)))[0]
    assert [row[title] for title in ("Messages under way", "during backward", "after backward")] == ["not measured"] * 3


# The report


def test_timeline_holds_every_message(made: model.Report) -> None:
    (group,) = made.groups
    (chart,) = exchange_charts(group, points_of(group))
    rows = [row for rows in chart.spec["datasets"].values() for row in rows if "kind" in row]
    under_way = [row for row in rows if row["kind"] == "under way"]
    assert len(under_way) == len(GRADIENTS)
    for message, row in zip(points_of(group)[0].timeline, under_way, strict=True):
        assert (row["from"], row["to"]) == (message.start_s, message.start_s + message.exchange_s)
    assert [row["to"] for row in rows if row["kind"] == "backward pass"] == [GRADIENTS[-1][1]]
    waits = [row for row in rows if row["kind"] == "ready, waits"]
    assert all(row["from"] in {ready for _, ready in GRADIENTS} for row in waits)
    assert waits


def test_collectives_in_the_passes_are_not_called_exchange_behind_them(tmp_path: Path) -> None:
    """FSDP: gathers apart from messages of gradients, and what is exposed is waited for, not behind the pass."""
    ways = ("all-gather", "all-gather", "reduce-scatter")
    sent = [{"num_bytes": 400, "num_tensors": 2, "method": how} for how in ways]
    more = {"messages": sent, "gradients": [], "backward_s": None, "hidden_s": 0.0, "exposed_s": 0.05}
    plan = plans(points=(2,), repeats=1, engine="fsdp")[0]
    told = {**exchange_result(plan, gradients=GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA), **more}
    folder = write_run(tmp_path, plan, constant(STEP_MS), Story(exchange={**told, "communication_s": 0.05}))
    waits = {"gather_s": {"forward": 0.1}, "exchange_s": {"backward": 0.1}, "evidence": "planted"}
    content = json.loads(folder.record.read_text(encoding="utf-8"))
    edit_json(folder.record, ranks=[{**rank, "waits": waits} for rank in content["ranks"]])
    document, group = report_of(tmp_path)
    (point,) = points_of(group)
    assert (point.num_messages.value, point.num_others.value, point.is_in_passes) == (1, 2, True)
    text = " ".join(terminal.to_text(document, full=True).split())
    assert "Collectives take 50 ms per step at 2 ranks, 50 ms of it waited for" in text
    assert "during backward" not in text
    assert "after backward" not in text


SWEPT_GRADIENTS = ((40_000, 0.004), (2_000_000, 0.012), (400_000, 0.02), (8_000_000, 0.03), (1_000_000, 0.045))
GROUPS = {"own:single": (5,), "own:none": (1, 1, 1, 1, 1), "own:1MiB": (2, 2, 1), "own:4MiB": (3, 2)}
BACKWARD_S = SWEPT_GRADIENTS[-1][1]


def sent(groups: Sequence[int]) -> list[tuple[float, float, int, int]]:
    """Begin, end, bytes and gradients of messages that hold so many gradients each, one after the other."""
    found, free, first = [], 0.0, 0
    for count in groups:
        part = SWEPT_GRADIENTS[first : first + count]
        size = sum(num_bytes for num_bytes, _ in part)
        begin = max(free, part[-1][1])
        free, first = begin + ALPHA + size * BETA, first + count
        found.append((begin, free, size, count))
    return found


def exposed_if_sent(groups: Sequence[int]) -> float:
    return sum(max(0.0, end - max(begin, BACKWARD_S)) for begin, end, *_ in sent(groups))


def story(plan: RunPlan, faster: Mapping[str, float] = {}) -> Story:
    """As the model sends; a fusion of `faster` left so much less after the backward pass."""
    spans, fusion = sent(GROUPS[str(plan.sync.fusion)]), str(plan.sync.fusion)
    messages = [
        {"num_bytes": size, "num_tensors": count, "method": "flat", "start_s": begin, "exchange_s": end - begin}
        for begin, end, size, count in spans
    ]
    busy = sum(end - begin for begin, end, *_ in spans)
    exposed = exposed_if_sent(GROUPS[fusion]) - faster.get(fusion, 0.0)
    more = {"messages": messages, "communication_s": busy, "exposed_s": exposed, "hidden_s": busy - exposed}
    told = exchange_result(plan, gradients=SWEPT_GRADIENTS, alpha_s=ALPHA, beta_s_per_byte=BETA, fusion=fusion, **more)
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
        exposed_if_sent([len(part) for part in parts])
        for size in range(1, 6)
        for parts in [*partitions(SWEPT_GRADIENTS, size)]
    )
    lines = list(dict.fromkeys(bar["name"] for bar in next(iter(chart.spec["datasets"].values()))))
    # Of the two that merge the one that leaves less: the larger buckets end later.
    assert exposed_if_sent(GROUPS["own:1MiB"]) < exposed_if_sent(GROUPS["own:4MiB"])
    assert lines[::2] == ["no overlap: own:single", "wait-free: own:none", "merged: own:1MiB"]
    for fusion in ("own:single", "own:none", "own:1MiB"):
        spans = sent(GROUPS[fusion])
        exposed = bars(chart, fusion, "message, exposed")
        assert length(exposed) == pytest.approx(exposed_if_sent(GROUPS[fusion]))
        assert length(bars(chart, fusion, "message, hidden")) == pytest.approx(
            sum(end - begin for begin, end, *_ in spans) - exposed_if_sent(GROUPS[fusion])
        )
        (backward,) = bars(chart, fusion, "backward pass")
        assert (backward["from"], backward["to"]) == (0.0, BACKWARD_S)
        (mark,) = bars(chart, fusion, "least possible end")
        assert mark["from"] == pytest.approx(BACKWARD_S + best)
        assert all(bar["from"] >= BACKWARD_S for bar in exposed)
    # All four stand in the table behind it, with the interval of each.
    assert [row.cells[0].text for row in chart.table.rows] == [*lines[:3:2], lines[4], "merged: own:4MiB"]
    assert f"own:single: {1e3 * exposed_if_sent((5,)):.1f} ms exposed" in lines


def partitions(items: Sequence[Any], size: int) -> list[list[Sequence[Any]]]:
    cuts = itertools.combinations(range(1, len(items)), size - 1)
    return [[items[a:b] for a, b in itertools.pairwise((0, *cut, len(items)))] for cut in cuts]


def test_no_mark_where_a_setting_left_less_than_the_model_allows(tmp_path: Path) -> None:
    least = exposed_if_sent((5,)) - 0.001
    (chart,) = charts(tmp_path, "own:single", "own:none", faster={"own:single": least})
    assert not bars(chart, "", "least possible end")
    assert chart.title.endswith("model contradicted by measurement")


def test_one_way_alone_is_not_drawn(tmp_path: Path) -> None:
    assert charts(tmp_path, "own:1MiB", "own:4MiB") == []
