"""Stand-ins for CUDA: events and streams of an idle device, and a GPU with one stream, in simulated time.

Kernels run in order, each once the host has sent it.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import pytest
import torch

from dlbench.node.sync import timing
from dlbench.node.training import phases

BEHIND_NS = 7 * 10**9
"""The device's clock began so much later than the host's."""

CALL_NS = 2_000
"""What recording an event takes the host."""

LATENCY_NS = 3_000
"""From a call of the host to the device, and from the device back to a host that waits."""

CYCLE_NS = 0.5
LOADING_NS = 2_000_000
"""What the first launch of the sleeping kernel takes the host, which loads it then (CUDA_MODULE_LOADING=LAZY)."""


class StandInEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.device_ns = 0

    @classmethod
    def at(cls, host_ns: int) -> StandInEvent:
        """An event that the device passed at a moment of the host's monotonic clock."""
        event = cls()
        event.device_ns = host_ns - BEHIND_NS
        return event

    def record(self) -> None:
        self.device_ns = time.monotonic_ns() - BEHIND_NS

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: StandInEvent) -> float:
        return (end.device_ns - self.device_ns) / 1e6


@pytest.fixture
def stand_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda with events and streams that need no GPU."""
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


class FakeGpu:
    """The host's clock and the stream; times are nanoseconds of the host's clock."""

    def __init__(self, *, ppm: float = 0.0, origin_ms: float = 0.0, queue: int = 1024) -> None:
        """`ppm`: how much faster the device's clock runs; `origin_ms`: what it shows at time 0. `queue`: launches that
        may be under way; the next one blocks the host.
        """
        self.host_ns = 1_000_000_000
        self.free_ns = 0
        self.idle_ns = 0
        """In which the device had nothing to do though more was to come, since it was last set to 0."""
        self.slept_ns: list[int] = []
        """How long each sleep of the device was."""
        self._ppm, self._origin_ms = ppm, origin_ms
        self._ends_ns: deque[int] = deque(maxlen=queue)

    def launch(self, call_ns: int, run_ns: int) -> None:
        """The host takes `call_ns` to send a kernel that runs `run_ns`."""
        self.host_ns += call_ns
        self._arrive()
        self.free_ns += run_ns
        self._ends_ns.append(self.free_ns)

    def passed(self) -> int:
        self.launch(CALL_NS, 0)
        return self.free_ns

    def wait(self, moment_ns: int) -> None:
        self.host_ns = max(self.host_ns, moment_ns + LATENCY_NS)

    def device_ms(self, moment_ns: int) -> float:
        return self._origin_ms + moment_ns * (1 + self._ppm / 1e6) / 1e6

    def _arrive(self) -> None:
        if len(self._ends_ns) == self._ends_ns.maxlen:
            self.host_ns = max(self.host_ns, self._ends_ns[0])
        arrival = self.host_ns + LATENCY_NS
        self.idle_ns += max(0, arrival - self.free_ns)
        self.free_ns = max(self.free_ns, arrival)


def installed(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    """torch's CUDA events, sleep and pinned memory, and the clocks of what is tested, are the fake's."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            self.at_ns = -1

        def record(self) -> None:
            self.at_ns = gpu.passed()

        def query(self) -> bool:
            return self.at_ns + LATENCY_NS <= gpu.host_ns

        def synchronize(self) -> None:
            gpu.wait(self.at_ns)

        def elapsed_time(self, end: Event) -> float:
            """A float32, as `cudaEventElapsedTime` gives it."""
            return float(np.float32(gpu.device_ms(end.at_ns) - gpu.device_ms(self.at_ns)))

    loading = [LOADING_NS]

    def sleep(cycles: int) -> None:
        gpu.slept_ns.append(round(cycles * CYCLE_NS))
        gpu.launch(CALL_NS + (loading.pop() if loading else 0), gpu.slept_ns[-1])

    empty = torch.empty
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "_sleep", sleep)
    patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    for module in (phases, timing):
        patch.setattr(module.time, "monotonic_ns", lambda: gpu.host_ns)
