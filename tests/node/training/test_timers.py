"""The two clocks of the measured loop. CUDA's events are faked at the boundary: a stream with a time of its own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from dlbench.node.training.phases import CpuTimer, CudaTimer
from dlbench.records.rows.steps import PHASES


class FakeStream:
    """Work is queued with `work(ms)` and done up to `done_ms`."""

    queued_ms: ClassVar[float] = 0.0
    done_ms: ClassVar[float] = 0.0
    synchronisations: ClassVar[int] = 0


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = FakeStream.queued_ms

    def query(self) -> bool:
        return self.at_ms <= FakeStream.done_ms

    def synchronize(self) -> None:
        FakeStream.done_ms = max(FakeStream.done_ms, self.at_ms)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> type[FakeStream]:
    FakeStream.queued_ms = FakeStream.done_ms = 0.0
    FakeStream.synchronisations = 0

    def synchronise() -> None:
        FakeStream.synchronisations += 1
        FakeStream.done_ms = FakeStream.queued_ms

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronise))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    return FakeStream


def steps(timer: CudaTimer, stream: type[FakeStream], count: int) -> None:
    for step in range(count):
        timer.begin()
        for phase in range(len(PHASES)):
            stream.queued_ms += phase + 1
            timer.mark(phase)
        stream.queued_ms += 0.5  # what lies behind the last mark
        timer.finish(4, torch.tensor(float(step)))


def test_cuda_phases_come_from_events_and_nothing_waits(stream: type[FakeStream]) -> None:
    timer = CudaTimer()
    steps(timer, stream, 3)
    assert timer.collect(wait=False) == []  # the device has done nothing yet
    assert stream.synchronisations == 0
    stream.done_ms = 43.0  # two steps of 21.5 ms
    first = timer.collect(wait=False)
    assert len(first) == 2
    timer.close()
    last = timer.collect(wait=True)
    assert len(last) == 1
    for number, step in enumerate([*first, *last]):
        assert step.phases == tuple((phase + 1) * 1_000_000 for phase in range(len(PHASES)))
        assert step.step_ns == 21_500_000
        assert step.samples == 4
        assert step.loss == number
    assert stream.synchronisations == 0


def test_the_synchronised_mode_waits_at_every_mark(stream: type[FakeStream]) -> None:
    timer = CudaTimer(synchronise=True)
    steps(timer, stream, 2)
    assert stream.synchronisations == 2 * (len(PHASES) + 1)


def test_cpu_steps_are_contiguous() -> None:
    timer = CpuTimer()
    for step in range(3):
        timer.begin()
        for phase in range(len(PHASES)):
            timer.mark(phase)
        timer.finish(2, torch.tensor(float(step)))
    timer.close()
    timer.close()
    done = timer.collect(wait=True)
    assert len(done) == 3
    for step, following in itertools.pairwise(done):
        assert step.start_ns + step.step_ns == following.start_ns
        assert 0 <= sum(step.phases) <= step.step_ns
        assert step.launch == ()
