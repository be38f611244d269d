"""Spans of a rank: stages without gaps, room kept for them, and layers seen without being touched."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.cosmoflow import CosmoFlow
from dlbench.node.models.resnet import ResNet
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import Clock
from dlbench.node.watching import spans as node_spans
from dlbench.node.watching.agent import span_bytes
from dlbench.node.watching.spans import ANCHOR, LayerWatch, ProfileWindow, RankSpans
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import COMPUTE, EXCHANGE, LANES, STAGE, SpanReader
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import plans

PLACE = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="here", token="t")


def plan_of(**overrides: Any) -> RunPlan:
    return plans(points=(1,), repeats=1, engine="single", overrides=overrides)[0]


@dataclass(frozen=True, kw_only=True)
class Seen:
    lane: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    track: int
    num_bytes: int
    queued_ns: int


def read_spans(path: Path) -> list[Seen]:
    reader = SpanReader(path=path)
    return [
        Seen(
            lane=LANES[row["lane"]],
            name=reader.names[row["name"]],
            start_ns=int(row["start_ns"]),
            end_ns=int(row["start_ns"] + row["duration_ns"]),
            step=int(row["step"]),
            track=int(row["track"]),
            num_bytes=int(row["num_bytes"]),
            queued_ns=int(row["queued_ns"]),
        )
        for block in reader.blocks()
        for row in block
    ]


# --- the file of a rank


def test_stages_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    spans = RankSpans(plan_of(), RunFolder(tmp_path), PLACE, start_ns=5)
    spans.stage("building")
    spans.stage("measuring")
    with spans.pause("evaluation"):
        spans.add(EXCHANGE, "one", 7, 9, step=3, track=2, num_bytes=8, queued_ns=1)
    with pytest.raises(KeyError), spans.pause("checkpoint"):
        raise KeyError
    spans.stage("finishing")
    totals = spans.close()
    assert spans.close() == totals
    seen = read_spans(RunFolder(tmp_path).node_spans(0))
    stages = [span for span in seen if span.lane == "stage"]
    assert [span.name for span in stages] == [
        *("starting", "building", "measuring", "evaluation", "measuring", "checkpoint", "measuring", "finishing")
    ]
    assert stages[0].start_ns == 5
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(stages))
    (message,) = (span for span in seen if span.lane == "exchange")
    assert (message.start_ns, message.end_ns, message.step, message.track) == (7, 9, 3, 2)
    assert (message.num_bytes, message.queued_ns) == (8, 1)
    assert (totals["num"], totals["dropped"]) == (len(seen), 0)
    assert totals["bytes"] == num_bytes(RunFolder(tmp_path))
    assert SpanReader(path=RunFolder(tmp_path).node_spans(0)).header["rank"] == 0


def num_bytes(folder: RunFolder) -> int:
    return folder.node_spans(0).stat().st_size


@given(max_bytes=st.integers(5_000, 120_000), num=st.integers(0, 3_000), names=st.integers(1, 200))
def test_the_window_leaves_room_for_stages(
    tmp_path_factory: pytest.TempPathFactory, max_bytes: int, num: int, names: int
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    spans = RankSpans(plan_of(**{"watch.max_bytes": max_bytes}), folder, PLACE)
    spans.stage("warm-up")
    for number in range(num):
        # Times without any pattern, which no compression shrinks.
        start = (number * 2_654_435_761) % 2**40
        spans.add(COMPUTE, f"forward layer {number % names}", start, start + start % 977_777)
    spans.stage("measuring")
    spans.stage("finishing")
    totals = spans.close()
    seen = read_spans(folder.node_spans(0))
    assert [span.name for span in seen if span.lane == "stage"] == ["starting", "warm-up", "measuring", "finishing"]
    assert totals["num"] + totals["dropped"] == num + 4
    assert len(seen) == totals["num"]
    assert num_bytes(folder) == totals["bytes"] <= max_bytes


def test_spans_that_cannot_be_written_end_no_run(tmp_path: Path) -> None:
    spans = RankSpans(plan_of(), RunFolder(tmp_path / "nowhere"), PLACE)
    spans.stage("building")
    spans.add(STAGE, "more", 0, 1)
    totals = spans.close()
    assert spans.problem == "spans could not be written: No such file or directory"
    assert (totals["num"], totals["dropped"], totals["bytes"]) == (0, 3, 0)
    assert spans.close() == totals
    existing = RunFolder(tmp_path)
    existing.node_spans(0).write_bytes(b"what another run has written")
    other = RankSpans(plan_of(), existing, PLACE)
    assert other.close()["dropped"] == 1
    assert "already contains data that no rank wrote" in other.problem
    assert existing.node_spans(0).read_bytes() == b"what another run has written"


@pytest.mark.parametrize("pauses", [3, 30, 127, 128, 400, 3000])
@pytest.mark.parametrize(
    ("ranks", "rank", "max_bytes", "least"), [(2, 1, 20_000_000, 10), (100, 99, 200_000, 0), (1, 0, 5_000, 20)]
)
def test_pauses_leave_room_for_the_last_stages(
    tmp_path: Path, ranks: int, rank: int, max_bytes: int, least: int, pauses: int
) -> None:
    overrides = {"watch.window_ranks": 1, "watch.max_bytes": max_bytes}
    engine = "single" if ranks == 1 else "ddp"
    plan = plans(points=(ranks,), repeats=1, engine=engine, overrides=overrides)[0]
    folder = RunFolder(tmp_path)
    spans = RankSpans(plan, folder, dataclasses.replace(PLACE, rank=rank, size=ranks))
    for name in ("building", "warm-up", "measuring"):
        spans.stage(name)
    for _ in range(pauses):
        with spans.pause("evaluation"):
            pass
    spans.stage("finishing")
    totals = spans.close()
    seen = read_spans(folder.node_spans(0))
    names = [span.name for span in seen]
    kept = names.count("evaluation")
    assert names == ["starting", "building", "warm-up", *["measuring", "evaluation"] * kept, "measuring", "finishing"]
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(seen))
    assert kept == pauses or kept > least
    assert (totals["num"], totals["dropped"]) == (len(seen), 2 * (pauses - kept))
    assert num_bytes(folder) == totals["bytes"] <= span_bytes(plan, rank)


# --- layers


@dataclass
class Ticks:
    """A clock that counts what happens, so that order is exact; moments have meaning only once it has settled."""

    now: int = 0
    said: list[str] = field(default_factory=list)

    def mark(self) -> list[int]:
        self.now += 1
        return [self.now]

    def anchor(self) -> None:
        self.said.append("anchor")

    def settle(self) -> None:
        self.said.append("settle")

    def monotonic_ns(self, moment: list[int]) -> int:
        assert self.said[-1] == "settle"
        return moment[0]


Told = list[tuple[str, int, int, int]]
"""Name, step, start and end of each span."""


def collector(told: Told) -> Callable[..., None]:
    def add(lane: int, name: str, start_ns: int, end_ns: int, *, step: int = -1) -> None:
        assert lane == COMPUTE
        told.append((name, step, start_ns, end_ns))

    return add


class Noting(torch.autograd.Function):
    """Twice the input; notes on a clock when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Ticks, moments: list[int]) -> torch.Tensor:
        ctx.clock, ctx.moments = clock, moments
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.moments.append(ctx.clock.mark()[0])
        return gradient * 2, None, None


class Several(nn.Module):
    """A leaf of several operations, each of which notes its backward pass."""

    def __init__(self, clock: Ticks, operations: int) -> None:
        super().__init__()
        self.clock, self.operations = clock, operations
        self.moments: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.operations):
            x = Noting.apply(x, self.clock, self.moments)  # type: ignore[no-untyped-call]
        return x


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5), steps=st.integers(1, 3))
def test_a_backward_span_holds_exactly_its_own_operations(counts: list[int], steps: int) -> None:
    clock, told = Ticks(), Told()
    model = nn.Sequential(*(Several(clock, count) for count in counts))
    watch = LayerWatch(model, clock, collector(told))
    watch.open()
    for step in range(steps):
        watch.enter(step)
        model(torch.ones(2, requires_grad=True)).sum().backward()
    watch.close()
    assert clock.said == ["anchor", "settle"]
    for number, module in enumerate(model):
        forward = [one for one in told if one[0] == f"forward {number}"]
        backward = [one for one in told if one[0] == f"backward {number}"]
        assert [one[1] for one in forward] == [one[1] for one in backward] == list(range(steps))
        own = [module.moments[step * counts[number] :][: counts[number]] for step in range(steps)]
        for (_, _, start, end), moments in zip(backward, own, strict=True):
            assert [moment for moment in range(start, end + 1) if moment in module.moments] == moments
            others = {moment for other in model if other is not module for moment in other.moments}
            assert not others & set(range(start, end + 1))
        assert all(one[3] < two[2] for one, two in zip(forward, backward, strict=True))


class Odd(nn.Module):
    """What hooks stumble over: in place, twice the same module, tuples, nothing at all, parts without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inplace = nn.ReLU(inplace=True)
        self.twice = nn.Linear(4, 4)
        self.pair = Pair()
        self.nothing = Nothing()
        self.frozen = nn.Linear(4, 4)
        self.same = nn.Identity()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        x = self.inplace((x * 2).view(x.shape)).mean((2, 3))
        x = self.same(self.twice(self.twice(x)))
        one, other, _ = self.pair(x)
        self.nothing(x)
        with torch.no_grad():
            shift = self.frozen(x)
        return one + other["b"] + shift


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], None]:
        return x * 2, {"b": x * 3}, None


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        return None


def test_odd_modules_are_seen_as_often_as_they_are_called() -> None:
    torch.manual_seed(0)
    model, told = Odd(), Told()
    watch = LayerWatch(model, Clock(), collector(told))
    watch.open()
    for step in (4, 5):
        watch.enter(step)
        for _ in range(2):  # parts of a batch
            model(torch.randn(3, 2, 5, 5)).sum().backward()
    watch.leave()
    with torch.no_grad():
        model(torch.randn(3, 2, 5, 5))  # an evaluation
    watch.close()
    counts = Counter(name for name, *_ in told)
    assert counts == {
        **{f"forward {name}": 4 for name in ("conv", "norm", "inplace", "pair", "nothing", "frozen", "same")},
        **{f"backward {name}": 4 for name in ("conv", "norm", "inplace", "pair")},
        "forward twice": 8,
        "backward twice": 8,
    }
    assert Counter(step for _, step, *_ in told) == {4: len(told) / 2, 5: len(told) / 2}
    assert all(start <= end for *_, start, end in told)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_spans, "MAX_HELD_CALLS", 2)
    model, told = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))), Told()
    watch = LayerWatch(model, Clock(), collector(told))
    watch.open()
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 6
    watch.enter(0)
    model(torch.ones(1, 3)).sum().backward()
    watch.enter(1)
    assert len(told) == 6  # not held any longer than that
    late = model(torch.ones(1, 3)).sum()
    watch.close()
    watch.close()
    seen = len(told)
    late.backward()  # a graph that outlives the window
    model(torch.ones(1, 3)).sum().backward()
    watch.close()
    assert len(told) == seen
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def trained(build: Callable[[], nn.Module], inputs: Callable[[], Any], precision: str, *, watched: bool) -> list[Any]:
    """Losses and parameters of four steps of two parts, the middle two of them watched or not."""
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told: Told = []
    watch = LayerWatch(model, Clock(), collector(told))
    losses = []
    for step in range(4):
        if watched and step == 1:
            watch.open()
        if step == 3:
            watch.close()
        if watched:
            watch.enter(step)
        torch.manual_seed(step)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
                outputs = model(*inputs())
            loss = sum(out.float().square().mean() for out in (outputs if isinstance(outputs, tuple) else (outputs,)))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    if watched:
        assert {name.removeprefix("forward ") for name, *_ in told if name.startswith("forward")} <= leaves
        assert {step for _, step, *_ in told} == {1, 2}
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()]


def bert_inputs() -> tuple[torch.Tensor, ...]:
    ids = torch.randint(0, 50, (2, 12))
    return ids, torch.zeros_like(ids), torch.ones_like(ids), torch.randint(0, 12, (2, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "resnet": (lambda: ResNet(5, (1, 1), 8), lambda: (torch.randn(2, 3, 32, 32),)),
    "bert": (lambda: BertForPreTraining(50, 16, 2, 2, 32, dropout=0.1), bert_inputs),
    "cosmoflow": (lambda: CosmoFlow(8, 2, (4, 8), (8,)), lambda: (torch.randn(2, 2, 8, 8, 8),)),
    "odd": (Odd, lambda: (torch.randn(3, 2, 5, 5),)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_the_same_to_the_bit(name: str, precision: str) -> None:
    build, inputs = NETWORKS[name]
    plain, watched = (trained(build, inputs, precision, watched=w) for w in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


# --- the profiler


@pytest.fixture
def profiled(tmp_path: Path) -> tuple[Path, list[tuple[str, int, int]]]:
    path, told = tmp_path / "rank-0000.profile.json", list[tuple[str, int, int]]()

    def add(lane: int, name: str, start_ns: int, end_ns: int) -> None:
        told.append((name, start_ns, end_ns))

    window = ProfileWindow(path, torch.device("cpu"), add)
    window.open()
    torch.randn(64, 64) @ torch.randn(64, 64)
    window.close()
    window.close()
    assert window.problem == ""
    return path, told


def test_a_profile_can_be_set_on_the_clock_of_the_host(profiled: tuple[Path, list[tuple[str, int, int]]]) -> None:
    path, told = profiled
    ((name, start_ns, end_ns),) = told
    assert (name, start_ns <= end_ns) == (ANCHOR, True)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    content = json.loads(path.read_text())
    (anchor,) = (entry for entry in content["traceEvents"] if entry.get("name") == ANCHOR and entry.get("ph") == "X")
    operators = {entry["name"]: entry for entry in content["traceEvents"] if entry.get("cat") == "cpu_op"}
    assert operators["aten::mm"]["ts"] > anchor["ts"]


@pytest.mark.parametrize(("call", "what"), [("start", "could not be started"), ("stop", "could not be ended")])
def test_a_profiler_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str
) -> None:
    path = tmp_path / "x.json"
    window = ProfileWindow(path, torch.device("cpu"), lambda *_, **__: None)
    whole = getattr(window._profile, call)

    def failing() -> None:
        if call == "stop":
            whole()
        raise RuntimeError("no memory\nfor events")

    monkeypatch.setattr(window._profile, call, failing)
    window.open()
    window.stop()
    window.close()
    assert window.problem == f"the profile {what}: no memory for events"
    assert not path.exists()


def test_a_profile_is_written_after_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    window = ProfileWindow(path, torch.device("cpu"), lambda *_, **__: None)
    window.open()
    torch.ones(3).sum()
    window.stop()
    assert not path.exists()
    torch.randn(4, 4) @ torch.randn(4, 4)
    window.close()
    names = {entry.get("name") for entry in json.loads(path.read_text())["traceEvents"]}
    assert "aten::sum" in names
    assert "aten::mm" not in names
