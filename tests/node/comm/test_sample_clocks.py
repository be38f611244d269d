"""Collectives timed in the stream of a GPU, whose events are stood in for: planted costs come out again."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dlbench.node.comm import contestants
from dlbench.node.comm.contestants import StreamSampleClock, Vectors
from dlbench.node.comm.control import Deadline
from dlbench.node.comm.measure import Measurement
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.own import route
from dlbench.node.sync.timing import LEAST_SAMPLE_S
from dlbench.specs.comm import CommSpec

CPU = torch.device("cpu")
LAUNCH_S, WAIT_S, BARRIER_S = 3e-6, 30e-6, 400e-6
STARTUP_S, PER_BYTE_S = 15e-6, 1e-9


class Gpu:
    """A host that orders work and a stream that does it, in the order of ordering."""

    def __init__(self) -> None:
        self.host_s = self.stream_s = 1.0
        self.events = 0

    def launch(self, seconds: float) -> None:
        self.host_s += LAUNCH_S
        self.stream_s = max(self.stream_s, self.host_s) + seconds

    def event(self) -> Event:
        self.events += 1
        return Event(self)

    def meet(self) -> None:
        """The others come when a barrier of hosts has let them go."""
        self.launch(BARRIER_S)

    def perf_counter_ns(self) -> int:
        return round(self.host_s * 1e9)

    def synchronise(self) -> None:
        self.host_s = max(self.host_s, self.stream_s) + WAIT_S


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, 0.0

    def record(self) -> None:
        self._at = self._gpu.stream_s

    def synchronize(self) -> None:
        self._gpu.synchronise()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


class Alone:
    """The other rank does as this one."""

    def agree(self, what: str, point: Any) -> None: ...
    def barrier(self, what: str) -> None: ...

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value, value]


class Planted:
    algorithm, carrier, counters, is_in_place = "ring", "torch-nccl", None, False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._bytes = 0
        self.calls: list[int] = []

    def bind(self, vectors: Vectors) -> str:
        self._bytes = vectors.data.numel() * 4
        return ""

    def line_up(self) -> None: ...
    def settle(self) -> None: ...

    def run(self, times: int) -> None:
        self.calls.append(times)
        for _ in range(times):
            self._gpu.launch(STARTUP_S + PER_BYTE_S * self._bytes)


@pytest.mark.parametrize("num_bytes", [4096, 16 * 2**20])
def test_a_time_in_the_stream_is_the_collectives_alone(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    gpu = Gpu()
    monkeypatch.setattr(contestants, "time", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.synchronise())
    comm = CommSpec(backends=("nccl",), sizes=(num_bytes,), warmup=1, iterations=5, timeout_s=30.0, check=False)
    place = RankPlace(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, num_nodes=1, host="here", token="t")
    measurement = Measurement(
        *(comm, place, CPU, cast(Any, Alone()), Deadline(0, 30.0), lambda what: None),
        clock=StreamSampleClock(gpu.meet, gpu.event),
    )
    measurement._host_clock._device = torch.device("cuda")
    planted = Planted(gpu)
    (point,) = measurement.points([cast(Any, planted)], num_bytes)
    true_s = STARTUP_S + PER_BYTE_S * num_bytes
    assert point.timing == "in-stream"
    assert point.times_s == pytest.approx([true_s] * 5, rel=1e-3)
    # A single call by the host holds its launch and its wait.
    assert point.single_call_s == pytest.approx([true_s + LAUNCH_S + WAIT_S] * 5, rel=1e-3)
    assert point.operations * true_s >= LEAST_SAMPLE_S / 1.01
    assert gpu.events == 2  # made once
    assert planted.calls.count(1) >= 5


class StreamOfMessages(Gpu):
    """The calibration's clock and group at once, over the same stand-in."""

    marks_are_free = False
    index, ranks = 0, (0, 1)

    def settle(self) -> None:
        self.synchronise()

    def mark(self) -> float:
        return self.stream_s

    def between(self, first: float, last: float) -> float:
        return last - first

    def sum(self, vector: torch.Tensor) -> None:
        self.meet()

    def exchange(self, number: int, vector: torch.Tensor) -> None:
        self.launch(STARTUP_S + PER_BYTE_S * 4 * len(vector))


def test_calibration_in_the_stream_finds_the_planted_line() -> None:
    gpu = StreamOfMessages()
    counts = route.sizes_up_to(2**24, 1)
    line = route.calibrate(
        "planted",
        gpu.exchange,
        counts,
        world=cast(Any, gpu),
        clock=cast(Any, gpu),
        arena=torch.zeros(counts[-1]),
        budget_s=1000.0,
        gather=lambda value: [value],
    )
    assert line.startup_s == pytest.approx(STARTUP_S, rel=0.02)
    assert line.per_byte_s == pytest.approx(PER_BYTE_S, rel=0.02)
