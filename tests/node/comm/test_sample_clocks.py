"""Collectives timed in the stream of a GPU, whose events are stood in for: planted costs come out again."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest
import torch

from dlbench.node.comm import contestants
from dlbench.node.comm.contestants import StreamSampleClock, Vectors
from dlbench.node.comm.measure import CollectiveTimer
from dlbench.node.comm.transport import Deadline
from dlbench.node.ranks import RankPlace
from dlbench.node.sync import timing
from dlbench.node.sync.own import route
from dlbench.node.sync.timing import LEAST_SAMPLE_S, MOST_QUEUED
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import CommSpec

CPU = torch.device("cpu")
LAUNCH_S, WAIT_S, BARRIER_S = 3e-6, 30e-6, 400e-6
STARTUP_S, PER_BYTE_S = 15e-6, 1e-9
QUEUE = 1024  # What is launched and not begun yet, at most: a launch beyond that waits.


class Gpu:
    """A host that queues work and a stream that does it in that order, never before it was queued; the calibration's
    clock and group at once. Moments are the stream's.
    """

    marks_are_free = False
    index, ranks = 0, (0, 1)

    def __init__(self, launch_s: float = LAUNCH_S, slow_clock: float = 1.0) -> None:
        """`slow_clock`: how many times shorter the device sleeps than it is asked to, as where its clock sped up."""
        self.host_s = self.stream_s = 1.0
        self.launch_s, self._slow_clock = launch_s, slow_clock
        self._begins_s: deque[float] = deque(maxlen=QUEUE)
        self.marks = 0

    def launch(self, seconds: float) -> None:
        if len(self._begins_s) == QUEUE:
            self.host_s = max(self.host_s, self._begins_s[0])
        self.host_s += self.launch_s
        begin = max(self.stream_s, self.host_s)
        self._begins_s.append(begin)
        self.stream_s = begin + seconds

    def sleep(self, seconds: float) -> None:
        self.launch(seconds / self._slow_clock)

    def meet(self) -> None:
        """The others come when a barrier of hosts has let them go."""
        self.launch(BARRIER_S)

    def mark(self) -> float:
        self.marks += 1
        return self.stream_s

    def give_back(self, moments: list[float]) -> None:
        self.marks -= len(moments)

    def has_passed(self, moment: float) -> bool:
        return moment <= self.host_s

    def between(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        self.host_s = max(self.host_s, self.stream_s) + WAIT_S

    def perf_counter_ns(self) -> int:
        return round(self.host_s * 1e9)

    def perf_counter(self) -> float:
        return self.host_s

    def sum(self, vector: torch.Tensor) -> None:
        self.meet()


class Alone:
    """The other rank does as this one."""

    def barrier(self, what: str) -> None: ...

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value, value]


class Planted:
    algorithm, carrier, counters, is_in_place, chunks = "ring", "torch-nccl", None, False, None

    def __init__(self, gpu: Gpu, startup_s: float = STARTUP_S, kernels: int = 1) -> None:
        """`kernels`: launches of an operation."""
        self._gpu = gpu
        self._startup_s, self._kernels = startup_s, kernels
        self._bytes = 0
        self.calls: list[int] = []

    def bind(self, vectors: Vectors) -> str:
        self._bytes = vectors.data.numel() * 4
        return ""

    def line_up(self) -> None: ...

    def run(self, times: int) -> None:
        self.calls.append(times)
        for _ in range(times * self._kernels):
            self._gpu.launch((self._startup_s + PER_BYTE_S * self._bytes) / self._kernels)


def measured(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, planted: Planted, num_bytes: int) -> CommPoint:
    for module in (contestants, timing):
        monkeypatch.setattr(module, "time", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.settle())
    comm = CommSpec(backends=("nccl",), sizes=(num_bytes,), warmup=1, iterations=5, timeout_s=30.0, check=False)
    place = RankPlace(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, num_nodes=1, host="here", token="t")
    measurement = CollectiveTimer(
        *(comm, place, CPU, cast(Any, Alone()), Deadline(0, 30.0), lambda what: None),
        clock=StreamSampleClock(gpu.meet, cast(Any, gpu)),
    )
    measurement._host_clock._device = torch.device("cuda")
    (point,) = measurement.points([cast(Any, planted)], num_bytes)
    assert point.timing == "in-stream"
    assert gpu.marks == 0, "moments are given back"
    return point


@pytest.mark.parametrize("num_bytes", [4096, 16 * 2**20])
def test_a_time_in_the_stream_is_the_collectives_alone(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    gpu = Gpu()
    planted = Planted(gpu)
    point = measured(monkeypatch, gpu, planted, num_bytes)
    true_s = STARTUP_S + PER_BYTE_S * num_bytes
    assert point.times_s == pytest.approx([true_s] * 5, rel=1e-3)
    assert point.launch_bound == 0
    # A single call by the host holds its launch and its wait.
    assert point.single_call_s == pytest.approx([true_s + LAUNCH_S + WAIT_S] * 5, rel=1e-3)
    assert point.operations * true_s >= LEAST_SAMPLE_S / 1.01
    assert planted.calls.count(1) >= 5


@pytest.mark.parametrize("slow_clock", [1.0, 6.0])
def test_a_collective_shorter_than_its_launch_takes_its_own_time(
    monkeypatch: pytest.MonkeyPatch, slow_clock: float
) -> None:
    """8 us on the device, 20 us of the host's for each call; also where a cycle was timed at a low clock."""
    gpu = Gpu(launch_s=20e-6, slow_clock=slow_clock)
    point = measured(monkeypatch, gpu, Planted(gpu, startup_s=8e-6), 4)
    assert point.times_s == pytest.approx([8e-6] * 5, rel=1e-3)
    assert point.launch_bound == 0
    assert (point.operations, point.is_cut) == (MOST_QUEUED, False)


class Messages(Gpu):
    """What a message is."""

    startup_s, kernels = STARTUP_S, 1

    def exchange(self, number: int, vector: torch.Tensor) -> None:
        for _ in range(self.kernels):
            self.launch((self.startup_s + PER_BYTE_S * 4 * len(vector)) / self.kernels)


@pytest.mark.parametrize(
    ("launch_s", "startup_s", "kernels", "late"),
    [
        (LAUNCH_S, STARTUP_S, 1, False),
        (20e-6, 8e-6, 1, False),
        (20e-6, 16e-6, 30, False),  # 125 messages would be 3,750 launches
        (20e-6, 16e-6, 2000, True),
    ],
)
def test_calibration_in_the_stream_finds_the_planted_line(
    monkeypatch: pytest.MonkeyPatch, launch_s: float, startup_s: float, kernels: int, late: bool
) -> None:
    gpu = Messages(launch_s)
    gpu.startup_s, gpu.kernels = startup_s, kernels
    monkeypatch.setattr(timing, "time", gpu)
    counts = route.sizes_up_to(2**24, 1)
    calibration = route.Calibration(
        exchange=gpu.exchange,
        world=cast(Any, gpu),
        clock=cast(Any, gpu),
        arena=torch.zeros(counts[-1]),
        gather=lambda value: [value],
    )
    line = calibration.measure("planted", counts, budget_s=1000.0)
    assert bool(line.launch_bound) == late
    if not late:
        assert line.startup_s == pytest.approx(startup_s, rel=0.02)
        assert line.per_byte_s == pytest.approx(PER_BYTE_S, rel=0.02)
