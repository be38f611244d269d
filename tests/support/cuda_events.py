"""What stands in for CUDA's events and streams: a device that is idle, with a clock of its own."""

from __future__ import annotations

import time

import pytest
import torch

BEHIND_NS = 7 * 10**9
"""The device's clock began so much later than the host's."""


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
