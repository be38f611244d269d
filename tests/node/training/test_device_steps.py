"""The loop over a device that computes what the host queues, in simulated time: rows, held steps, peaks, beats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from dlbench.node.data.delivery import Delivery
from dlbench.node.training.loop import TrainingLoop
from dlbench.node.training.phases import CudaTimer
from dlbench.records.rows.steps import LAUNCHED, StepFile, read_steps
from tests.support.empty_training import Work, empty_training
from tests.support.fake_gpu import FakeGpu, installed

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
    context, state = empty_training(timer, warmup=WARMUP, measured=MEASURED, parts=parts, watchdog=notes, **kernels)
    notes.beats.clear()
    result = TrainingLoop(context, state, timer).run(folder / "rank-0.steps")
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


@pytest.mark.parametrize("parts", [1, 64])
@pytest.mark.parametrize(("call_ns", "run_ns"), [(20 * US, 5 * US), (20 * US, 19 * US), (20 * US, 2 * MS)])
def test_a_held_step_sleeps_for_a_few_steps_of_the_host_at_most(
    gpu: FakeGpu, tmp_path: Path, parts: int, call_ns: int, run_ns: int
) -> None:
    file, notes = trained(gpu, tmp_path, parts, call_ns, run_ns)
    host_ns, slept_ns = zip(*notes.steps, strict=True)
    host_step_ns = host_ns[HELD.start] - host_ns[HELD.start - 1]  # of the step before those that are held back
    for step in HELD:
        slept = slept_ns[step + 1] - slept_ns[step]
        assert slept <= 4 * host_step_ns
        assert (slept > 0) == (run_ns < call_ns)
    # What the kernels of a phase take alone is known afterwards, of all its parts.
    for phase in LAUNCHED:
        shows = file.steps[file.steps[f"launch_{phase}_ns"] == 0]
        assert len(shows)
        kernels_ns = 10 * run_ns * (1 if phase == "optimizer" else parts)
        assert shows[f"{phase}_ns"] == pytest.approx([kernels_ns] * len(shows), rel=1e-3, abs=200)


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
    context, state = empty_training(timer, warmup=WARMUP, measured=MEASURED, forward=forward)
    context.device, state.delivery = torch.device("cuda", 0), cast(Delivery, Delivered())
    found = TrainingLoop(context, state, timer).run(tmp_path / "rank-0.steps")
    assert (found.startup_peak_bytes, held) == (30 * gib, {"allocated": 2 * gib, "reserved": 2 * gib})
    assert emptied == [HELD.start]


def test_a_long_step_beats_in_each_of_its_parts(tmp_path: Path) -> None:
    """Steps of a minute, whose parts take a second, on a device that is behind its host by its launch queue."""
    gpu = FakeGpu(queue=40)
    with pytest.MonkeyPatch.context() as patch:
        installed(patch, gpu)
        file, notes = trained(gpu, tmp_path, 64, 20 * US, 50 * MS)
    assert file.steps["step_ns"].min() > 60_000 * MS
    assert len(notes.steps) == WARMUP + MEASURED
    assert notes.longest_ns < 3_000 * MS
