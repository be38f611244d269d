"""What engines' own exchanges did, from their traces: Horovod's timeline and tuning log, DDP's hook, the window."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from dlbench.errors import EnvironmentLacksError
from dlbench.node.sync import timing
from dlbench.node.sync.ddp import WatchedHook, hook_for_ddp, summarise
from dlbench.node.sync.horovod.report import TuningWatch, tuning_cost_s
from dlbench.node.sync.horovod.timeline import TimelineWindow, parse_timeline
from dlbench.node.sync.run_store import require_sum
from dlbench.node.sync.timing import BackwardWatch, CudaClock, WatchedStep, covered
from dlbench.node.sync.wire import CheckedFp16, OverflowCount
from dlbench.specs.engine import HorovodSettings
from tests.support.cuda_events import StandInEvent, stand_in_cuda
from tests.support.paths import DATA

__all__ = ["stand_in_cuda"]

SAMPLE = DATA / "horovod-timeline.json"
"""Rank 0 of 2 over Gloo, two steps of CosmoFlow `ci` with a threshold of 300,000 bytes; most cycle marks cut out."""

CPU = torch.device("cpu")


# --- Horovod's timeline


def test_a_captured_timeline() -> None:
    timeline = parse_timeline(SAMPLE.read_text())
    assert not timeline.is_torn
    assert timeline.methods == {"GLOO_ALLREDUCE": 12}
    assert timeline.types == ("float32",)
    assert timeline.epoch_us == 1795279094364855
    assert timeline.cycle_us is not None
    for number in (0, 1):
        messages = timeline.step(number)
        assert len(messages) == 6
        # CosmoFlow `ci` has 1,218,676 parameters in 16 tensors.
        assert sum(message.wire_bytes or 0 for message in messages) == 4 * 1218676
        names = [name for message in messages for name in message.tensors]
        assert len(names) == len(set(names)) == 16
        assert not any(name.startswith("allreduce.") for name in names)
        fused = [message.wire_bytes or 0 for message in messages if len(message.tensors) > 1]
        assert fused
        assert max(fused) <= 300_032  # rounded up to ranks of a node x 512
        assert max(message.wire_bytes or 0 for message in messages) == 3538944
    moments = [(message.begin_us, message.end_us) for message in timeline.messages]
    assert all(begin < end for begin, end in moments)
    assert moments == sorted(moments)
    assert timeline.step(2) == ()


@given(cut=st.integers(0, len(SAMPLE.read_text())))
def test_a_torn_timeline_keeps_what_was_whole(cut: int) -> None:
    text = SAMPLE.read_text()
    whole, part = parse_timeline(text), parse_timeline(text[:cut])
    assert [(m.tensors, m.method, m.begin_us) for m in part.messages] == [
        (m.tensors, m.method, m.begin_us) for m in whole.messages[: len(part.messages)]
    ]
    # A last message without the end of its spans has no size, but all before it have.
    assert all(message.wire_bytes is not None for message in part.messages[:-1])


def trace(steps: list[list[list[tuple[str, int]]]], element: str = "float32", start_us: int = 1000) -> str:
    """A timeline as Horovod would write it: steps of messages of tensors (name, elements)."""
    pids: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    now = start_us
    for message in (message for step in steps for message in step):
        for name, _ in message:
            if name not in pids:
                pids[name] = len(pids) + 1
                entries.append(
                    {"name": "process_name", "ph": "M", "pid": pids[name], "args": {"name": f"allreduce.{name}"}}
                )
            entries.append({"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": now, "pid": pids[name]})
            entries.append({"ph": "E", "ts": now, "pid": pids[name]})
        activities = ["GLOO_ALLREDUCE"]
        if len(message) > 1:
            activities = ["MEMCPY_IN_FUSION_BUFFER", *activities, "MEMCPY_OUT_FUSION_BUFFER"]
        for activity in ["ALLREDUCE", *activities]:
            entries += [{"ph": "B", "name": activity, "ts": now, "pid": pids[name]} for name, _ in message]
            now += 10
            if activity != "ALLREDUCE":
                entries += [{"ph": "E", "ts": now, "pid": pids[name]} for name, _ in message]
        for name, elements in message:
            shape = {"dtype": element, "shape": f"[{elements}]"}
            entries.append({"ph": "E", "ts": now, "pid": pids[name], "args": shape})
    return "[\n" + ",".join(map(json.dumps, entries)) + "]"


@st.composite
def fusions(draw: st.DrawFn) -> list[list[list[tuple[str, int]]]]:
    """Some steps; each puts the same tensors into messages of its own choice."""
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
    tensors = [(f"layer.{number}", size) for number, size in enumerate(sizes)]
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(tensors))
        cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=len(order))) | {0, len(order)})
        pairs = itertools.pairwise(cuts)
        steps.append([order[first:last] for first, last in pairs])
    return steps


@given(steps=fusions(), element=st.sampled_from(["float32", "float16"]))
def test_every_fusion_is_found_again(steps: list[list[list[tuple[str, int]]]], element: str) -> None:
    timeline = parse_timeline(trace(steps, element))
    size = {"float32": 4, "float16": 2}[element]
    for number, step in enumerate(steps):
        found = timeline.step(number)
        assert [message.tensors for message in found] == [tuple(name for name, _ in message) for message in step]
        assert [message.wire_bytes for message in found] == [size * sum(n for _, n in message) for message in step]
        assert {message.types for message in found} == {(element,)}
    assert not timeline.is_torn


# --- the window on rank 0


class FakeHorovod:
    """A library that writes a timeline prepared before."""

    def __init__(self) -> None:
        self.text = ""
        self.path = Path()

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        self.path = Path(path)

    def stop_timeline(self) -> None:
        self.path.write_text(self.text)


def watched_steps(model: nn.Module, number: int) -> BackwardWatch:
    """A closed window with steps of 1 s: 0.6 s of backward pass, then 0.4 s of waiting; gradients 0.1 s apart."""
    watch = BackwardWatch(CPU)
    watch.attach(model)
    for step in range(number):
        begin = time.monotonic_ns() + step * 10**9
        ready = {name: begin + (index + 1) * 10**8 for index, name in enumerate(watch.gradient_bytes)}
        watch.steps.append(
            WatchedStep(begin=begin, ready=ready, backward_end=begin + 6 * 10**8, exchange_end=begin + 10**9)
        )
    return watch


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def summary_of(watch: BackwardWatch, shift_s: float = 0.0) -> Any:
    return window_of(watch, shift_s).summary()


def window_of(watch: BackwardWatch, shift_s: float = 0.0) -> TimelineWindow:
    """A window whose Horovod exchanged biases from 0.3 to 0.4 s and weights from 0.5 to 0.8 s of each step."""
    window = TimelineWindow(watch)
    window.initialised()
    offset_us = (time.time_ns() - time.monotonic_ns()) // 1000
    entries: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": offset_us}}
    ]
    names = list(watch.gradient_bytes)
    for number, name in enumerate([*names, "dlbench.average"], start=1):
        entries.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"allreduce.{name}"}})
    groups = [(0.3, 0.4, [2, 4]), (0.5, 0.8, [1, 3]), (0.81, 0.95, [5])]
    for step in watch.steps:
        for begin_s, end_s, pids in groups:
            begin, end = (
                watch.clock.monotonic_ns(step.begin) / 1e3 + (moment + shift_s) * 1e6 for moment in (begin_s, end_s)
            )
            for kind, name, moment in (("B", "ALLREDUCE", begin), ("B", "GLOO_ALLREDUCE", begin), ("E", "", end)):
                entries += [{"ph": kind, "name": name, "ts": moment, "pid": pid} for pid in pids]
            entries += [{"ph": "E", "ts": end, "pid": p, "args": {"dtype": "float32", "shape": "[2]"}} for p in pids]
    library = FakeHorovod()
    library.text = json.dumps(entries)
    window.open(library)
    window.close(library)
    assert not library.path.exists()
    return window


def test_communication_has_an_exposed_and_a_hidden_part() -> None:
    seen = summary_of(watched_steps(small_net(), 3))
    assert seen.counts == (2, 2, 2)  # the average of an evaluation is no gradient
    assert seen.communication_s == pytest.approx(0.4)
    assert seen.exposed_s == pytest.approx(0.2, abs=1e-3)
    assert seen.hidden_s == pytest.approx(0.2, abs=1e-3)
    biases, weights = seen.messages
    assert (biases.num_tensors, biases.num_bytes) == (2, 4 * 8)
    assert weights.num_bytes == 4 * 35
    # Ready with the later of its gradients, sent later still.
    assert biases.ready_s == pytest.approx(0.4)
    assert weights.start_s == pytest.approx(0.5, abs=1e-3)
    assert weights.exchange_s == pytest.approx(0.3)


def test_clocks_that_do_not_agree_are_not_believed() -> None:
    seen = summary_of(watched_steps(small_net(), 2), shift_s=3.0)
    assert seen.communication_s == pytest.approx(0.4)
    assert (seen.exposed_s, seen.hidden_s) == (None, None)
    assert "clocks do not agree" in seen.reason


def test_horovods_messages_have_places_on_the_monotonic_clock() -> None:
    watch = watched_steps(small_net(), 2)
    spans = window_of(watch).spans()
    assert [(span.step, span.number, span.num_tensors, span.num_bytes) for span in spans] == [
        (step, number, 2, num_bytes) for step in (0, 1) for number, num_bytes in enumerate((32, 140))
    ]
    for span, (ready, start, end) in zip(spans, [(3, 3, 4), (3, 5, 8)] * 2, strict=True):
        begin = watch.steps[span.step].begin
        # The biases' last gradient is ready at 0.4 s, later than their exchange seems to begin: then with it.
        assert span.ready_ns - begin == pytest.approx(ready * 1e8, abs=1e6)
        assert span.start_ns - begin == pytest.approx(start * 1e8, abs=1e6)
        assert span.end_ns - begin == pytest.approx(end * 1e8, abs=1e6)
        assert span.method == "GLOO_ALLREDUCE"
    assert window_of(watch, shift_s=3.0).spans() == []
    assert TimelineWindow(watch).spans() == []


def watched_on_gpu(model: nn.Module, number: int) -> BackwardWatch:
    """The steps of `watched_steps` in moments of a device's clock."""
    watch = BackwardWatch(torch.device("cuda"))
    watch.clock.anchor()
    host = watched_steps(model, number)
    watch.attach(model)
    for step in host.steps:
        ready = {name: StandInEvent.at(moment) for name, moment in step.ready.items()}
        begin, backward_end, exchange_end = map(StandInEvent.at, (step.begin, step.backward_end, step.exchange_end))
        watch.steps.append(WatchedStep(begin=begin, ready=ready, backward_end=backward_end, exchange_end=exchange_end))
    return watch


def test_on_a_gpu_communication_has_both_parts_by_the_anchored_clock(stand_in_cuda: None) -> None:
    watch = watched_on_gpu(small_net(), 3)
    seen = summary_of(watch)
    assert seen.reason == ""
    assert seen.exposed_s == pytest.approx(0.2, abs=1e-3)
    assert seen.hidden_s == pytest.approx(0.2, abs=1e-3)
    assert seen.messages[1].start_s == pytest.approx(0.5, abs=1e-3)
    assert 0 < seen.clock_error_s < 1e-3
    spans = window_of(watch).spans()
    assert [span.end_ns - span.start_ns for span in spans] == pytest.approx([1e8, 3e8] * 3, rel=1e-3)
    # An operation that lies outside of its step tells that the clocks do not agree, on a GPU as well.
    shifted = summary_of(watch, shift_s=3.0)
    assert (shifted.exposed_s, shifted.hidden_s) == (None, None)
    assert window_of(watch, shift_s=3.0).spans() == []


def test_a_devices_clock_is_anchored_to_the_hosts(stand_in_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tries, the shortest counts; two anchors tell how the rates differ."""
    host_ns = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: host_ns[0])
    waits = iter([9_000, 2_000, 5_000, 7_000, 3_000] * 2)

    def wait(event: StandInEvent) -> None:
        took = next(waits)
        event.device_ns = round((host_ns[0] + took / 2 - 5e8) * 1.001)
        host_ns[0] += took

    monkeypatch.setattr(StandInEvent, "synchronize", wait)
    clock = CudaClock(torch.device("cuda"))
    clock.anchor()
    assert clock.error_s == 1e-6
    host_ns[0] = 10**9
    clock.anchor()
    for real_ns in (5 * 10**8, 10**9):
        event = StandInEvent()
        event.device_ns = round((real_ns - 5e8) * 1.001)
        assert clock.monotonic_ns(event) == pytest.approx(real_ns, abs=10)  # type: ignore[arg-type]


# --- sums of times and bytes


@given(intervals=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8), split=st.integers(0, 40))
def test_covered_time_counts_each_moment_once(intervals: list[tuple[int, int]], split: int) -> None:
    ways = [(float(min(pair)), float(max(pair))) for pair in intervals]
    cells = {cell for first, last in ways for cell in range(int(first), int(last))}
    assert covered(ways) == len(cells)
    assert covered(ways, end=split) == len([cell for cell in cells if cell < split])
    assert covered(ways, begin=split) == len([cell for cell in cells if cell >= split])


# --- gradients


def test_gradients_are_timed_in_the_window_only() -> None:
    model = small_net()
    watch = BackwardWatch(CPU)
    watch.attach(model)

    def step() -> None:
        watch.begin()
        model(torch.ones(2, 4)).sum().backward()
        watch.backward_ended()
        watch.exchange_ended()

    step()
    watch.open()
    step()
    step()
    watch.begin()  # a step that never ends does not count
    watch.close()
    step()
    assert len(watch.steps) == 2
    gradients = watch.gradients()
    assert {gradient.name: gradient.num_bytes for gradient in gradients} == {
        name: 4 * parameter.numel() for name, parameter in model.named_parameters()
    }
    # The last layer's gradients are ready first.
    assert {gradient.name for gradient in gradients[:2]} == {"1.weight", "1.bias"}
    backward_s = watch.backward_s()
    assert backward_s is not None
    assert 0 < gradients[0].ready_s <= gradients[-1].ready_s
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


# --- fp16 on the wire


@pytest.mark.horovod
def test_horovods_compression_is_checked(horovod_installed: None) -> None:
    from horovod.torch.compression import Compression

    count = OverflowCount()
    checked = CheckedFp16(Compression.fp16, count)
    for value, after in ((1000.0, 0), (40000.0, 1)):
        narrow, context = checked.compress(torch.full((4,), value))
        assert narrow.dtype == torch.float16
        result = checked.decompress(narrow + narrow, context)
        assert result.dtype == torch.float32
        assert count.total == after


# A group must not end in its own worker thread, which may hold the last callback: the process would abort.
LEFT: list[object] = []


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    LEFT.append(dist.distributed_c10d._get_default_group())
    yield
    dist.destroy_process_group()


def train(wire: str, *, steps: int = 4, scale: float = 1.0, watch_from: int = 2) -> tuple[WatchedHook, BackwardWatch]:
    """Steps of a DDP module in one process, with small buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    watch = BackwardWatch(CPU)
    watch.attach(model)
    marks: list[int] = []
    hook = WatchedHook(wire, 1, "gloo", watch, lambda: marks.append(1))
    module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    module.register_comm_hook(None, hook_for_ddp(hook))
    for step in range(steps):
        if step == watch_from:
            watch.open()
        watch.begin()
        (module(torch.ones(4, 64)).sum() * scale).backward()
        watch.exchange_ended()
        module.zero_grad()
    watch.close()
    assert len(marks) == steps
    return hook, watch


@pytest.mark.parametrize(("wire", "share"), [("fp32", 1.0), ("fp16", 0.5), ("bf16", 0.5)])
def test_every_bucket_of_ddp_is_noted(wire: str, share: float, alone: None) -> None:
    hook, watch = train(wire)
    seen = summarise(watch)
    spans = list(timing.spans([step.messages for step in watch.steps], watch.clock))
    assert [(span.step, span.number) for span in spans] == [
        (step, number) for step in range(2) for number in range(len(seen.messages))
    ]
    for step in range(2):
        own = [span for span in spans if span.step == step]
        assert sum(span.num_bytes for span in own) == sum(watch.gradient_bytes.values())
        assert all(watch.steps[step].begin <= span.ready_ns == span.start_ns <= span.end_ns for span in own)
        assert all(span.end_ns <= watch.steps[step].exchange_end for span in own)
    assert seen.num_steps == 2
    assert len(seen.messages) > 1
    total = sum(watch.gradient_bytes.values())
    assert sum(message.num_bytes for message in seen.messages) == total
    assert sum(message.num_tensors for message in seen.messages) == 6
    assert seen.wire_bytes == share * total
    assert hook.wire_in_force == wire
    assert hook.overflows.total == 0
    assert seen.times["communication_s"] is not None
    assert seen.times["exposed_s"] is not None
    assert seen.times["hidden_s"] is not None
    assert seen.times["communication_s"] > 0
    starts = [message.start_s for message in seen.messages]
    assert starts == sorted(starts, key=lambda start: start or 0)


def test_powersgd_counts_what_it_sends(alone: None) -> None:
    hook, watch = train("powersgd", steps=5)
    seen = summarise(watch)
    assert hook.wire_in_force == "powersgd"
    # Matrices of 64 x 64 go as 64 + 64 numbers, the one of 2 x 64 would save too little (and biases nothing).
    assert seen.wire_bytes == 4 * (2 * 128 + 128 + 64 + 64 + 2)
    assert {message.method for message in seen.messages} == {"gloo all-reduces of PowerSGD"}
    assert "for 8450, by its own count" not in hook.compression_text
    assert f"PowerSGD sent {3 * 514} elements for {3 * 8450}" in hook.compression_text


@pytest.mark.parametrize(("wire", "counted"), [("fp32", False), ("fp16", True), ("bf16", False)])
def test_an_overflow_is_fp16s(wire: str, counted: bool, alone: None) -> None:
    hook, _ = train(wire, scale=1e6)
    assert (hook.overflows.total > 0) == counted


def test_a_back_end_that_does_not_sum_a_format_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    require_sum("bf16", "gloo", CPU, 1)

    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("Invalid scalar type\nmore")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    with pytest.raises(EnvironmentLacksError, match=r"sync.wire bf16: gloo .* does not sum it \(Invalid scalar type\)"):
        require_sum("bf16", "gloo", CPU, 1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.zero_())
    with pytest.raises(EnvironmentLacksError, match="sums it wrongly"):
        require_sum("fp16", "gloo", CPU, 1)
    require_sum("fp32", "gloo", CPU, 1)


# --- the autotuner's log

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score\n"
)
ROWS = ["0,0,0, 1,5,4,12.5\n", "0,0,0, 1,50,32,3\n", "0,0,0, 1,25,16,8.5\n", "0,0,0, 1,5,4,12.5\n"]


def test_the_log_is_followed_until_the_search_is_over(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    settings = HorovodSettings.model_validate(
        {"autotune": True, "autotune_max_samples": 2, "autotune_warmup_samples": 1, "autotune_steps_per_sample": 1}
    )
    watch = TuningWatch(settings, log)
    watch.read_log(0)
    for number in range(len(ROWS)):
        log.write_text(HEADER + "".join(ROWS[:number]))
        watch.read_log(number * 5)
        assert not watch.has_settled
        assert watch.result().evaluations == number
        assert watch.result().fusion_threshold_bytes is None
    log.write_text(HEADER + "".join(ROWS)[:-1])  # the last row is still being written
    watch.read_log(19)
    assert not watch.has_settled
    log.write_text(HEADER + "".join(ROWS))
    watch.read_log(20)
    watch.read_log(25)
    result = watch.result()
    assert (result.evaluations, result.finished, result.settled_step) == (3, True, 20)
    assert (result.fusion_threshold_bytes, result.cycle_time_ms, result.score) == (4 * 2**20, 5.0, 12.5)
    assert result.planned_steps == settings.autotune_steps == 24


@given(
    slow=st.lists(st.floats(0.5, 2), min_size=1, max_size=20),
    fast=st.lists(st.floats(0.1, 0.4), min_size=1, max_size=9),
)
def test_tuning_costs_what_its_steps_took_beyond_later_ones(slow: list[float], fast: list[float]) -> None:
    cost = tuning_cost_s([*slow, *fast], len(slow))
    assert cost is not None
    low, high = (sum(slow) - len(slow) * extreme(fast) for extreme in (max, min))
    assert low - 1e-9 <= cost <= high + 1e-9
    assert tuning_cost_s([*slow, *fast], None) is None
    assert tuning_cost_s(slow, len(slow)) is None
    assert tuning_cost_s([*fast, *slow], len(fast)) == 0
