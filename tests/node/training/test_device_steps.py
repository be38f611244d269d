"""The loop over a device that computes what the host queues, in simulated time: rows, held steps, peaks, beats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from dlbench.node.data.batch_copier import BatchCopier
from dlbench.node.training.loop import TrainingLoop
from dlbench.node.training.phases import CudaTimer
from dlbench.records.rows.steps import LAUNCHED, StepFile, read_steps
from tests.support.cuda_events import FakeGpu, installed
from tests.support.one_rank import Work, empty_training

US, MS = 1_000, 1_000_000
WARMUP, MEASURED = 12, 6
HELD = range(6, 9)
"""Of the warm-up, before the three steps in which the exchange is watched."""


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        found = FakeGpu()
        installed(patch, found)
        yield found


class Notes:
    """A watchdog; and what the device slept until each step began, the host's clock with it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.beats: list[str] = []
        self.steps: list[tuple[int, int]] = []
        self.longest_ns = 0
        self._last_ns = gpu.host_ns

    def beat(self, where: str) -> None:
        self.longest_ns, self._last_ns = max(self.longest_ns, self.gpu.host_ns - self._last_ns), self.gpu.host_ns
        self.beats.append(where)
        if where.startswith("the start of step"):
            self.steps.append((self.gpu.host_ns, sum(self.gpu.slept_ns)))


def trained(gpu: FakeGpu, folder: Path, parts: int, call_ns: int, run_ns: int) -> tuple[StepFile, Notes]:
    """Steps whose passes and updates have ten kernels each: `call_ns` of the host, `run_ns` of the device."""

    def work() -> None:
        for _ in range(10):
            gpu.launch(call_ns, run_ns)

    timer, notes = CudaTimer(), Notes(gpu)
    kernels: dict[str, Work] = {"forward": work, "backward": work, "update": work}
    state = empty_training(timer, warmup=WARMUP, measured=MEASURED, parts=parts, watchdog=notes, **kernels)
    notes.beats.clear()
    result = TrainingLoop(state, timer).run(folder / "rank-0.steps")
    assert (result.steps, state.schedule.held) == (WARMUP + MEASURED, HELD)
    return read_steps(folder / "rank-0.steps"), notes


def test_rows_say_how_long_the_device_waited_for_the_host(gpu: FakeGpu, tmp_path: Path) -> None:
    """Whoever runs the loop: the file has the columns that the timer fills."""
    file, _ = trained(gpu, tmp_path, 2, 20 * US, 5 * US)
    assert (file.header["clock"], file.torn_bytes, len(file.steps)) == ("cuda-events", 0, WARMUP + MEASURED)
    for phase in LAUNCHED:
        late, took = file.steps[f"launch_{phase}_ns"], file.steps[f"{phase}_ns"]
        assert (late <= took).all()
        assert (late[-MEASURED:] > 0.7 * took[-MEASURED:]).all()
        assert (late[HELD.start : HELD.stop] == 0).all()
    assert (file.steps["loss"] == 0.5).all()
    assert (file.steps["samples"] == 2).all()


class Delivered:
    """In place of what copies batches to a device."""

    def fetch(self) -> None: ...
    def look_ahead(self) -> bool:
        return False

    def deliver(self) -> dict[str, torch.Tensor]:
        return {"volume": torch.zeros(1, 1)}


def test_peaks_of_measured_steps_are_their_own(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step searches for algorithms in 30 GiB, which torch's allocator keeps; all others need 2."""
    gib = 1 << 30
    held = {"allocated": 0, "reserved": 0}
    passes: list[int] = []
    emptied: list[int] = []

    def forward() -> None:
        needs = 2 * gib if passes else 30 * gib
        passes.append(needs)
        held["allocated"], held["reserved"] = max(held["allocated"], needs), max(held["reserved"], needs)

    def restart(device: torch.device) -> None:
        held["allocated"] = 0  # between steps nothing is held, and what is reserved stays so

    def empty() -> None:
        held["reserved"] = 0
        emptied.append(len(passes))

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["allocated"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restart)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    timer = CudaTimer()
    state = empty_training(timer, warmup=WARMUP, measured=MEASURED, forward=forward)
    state.context.device, state.batch_copier = torch.device("cuda", 0), cast(BatchCopier, Delivered())
    found = TrainingLoop(state, timer).run(tmp_path / "rank-0.steps")
    assert (found.startup_peak_bytes, held) == (30 * gib, {"allocated": 2 * gib, "reserved": 2 * gib})
    assert emptied == [HELD.start]
