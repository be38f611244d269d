"""Python's garbage collector does not start in measured steps, and what it would have freed does not pile up."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from dlbench.node.training import pauses
from dlbench.records.rows.steps import read_steps
from tests.support.one_rank import trained
from tests.support.run_factory import record_of

CYCLES = 50


pytestmark = pytest.mark.usefixtures("one_thread")


class Cycle:
    """Garbage that only the collector frees."""

    alive = 0
    most = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1
        Cycle.most = max(Cycle.most, Cycle.alive)

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.fixture
def littered() -> Iterator[None]:
    """Every pass through a layer leaves cycles, enough for the collector to start in each step."""

    def litter(*_: object) -> None:
        for _number in range(CYCLES):
            Cycle()

    Cycle.alive = Cycle.most = 0
    handle = nn.modules.module.register_module_forward_hook(litter)
    yield
    handle.remove()


def test_no_collection_starts_in_a_measured_step(
    tmp_path: Path, littered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "COLLECT_EVERY", 10)
    seen: list[int] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            seen.append(time.monotonic_ns())

    gc.callbacks.append(note)
    try:
        run = trained(tmp_path, 35)
    finally:
        gc.callbacks.remove(note)
    steps = [row for row in read_steps(run.folder.steps(0)).steps if not row["warmup"]]
    times = [(int(row["start_ns"]), int(row["start_ns"] + row["step_ns"])) for row in steps]
    assert [moment for moment in seen if any(start <= moment < end for start, end in times)] == []
    (rank,) = record_of(run).ranks
    # After 10, 20 and 30 steps: what waits is that of 10 steps, however long the run.
    assert rank.garbage_collections == 3
    assert rank.garbage_s is not None
    assert rank.garbage_s > 0
    assert Cycle.most <= Cycle.alive + 12 * CYCLES * 40
    assert len(times) == 35
    # Afterwards the process collects as before.
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collection_that_a_library_starts_in_a_step_is_said(tmp_path: Path) -> None:
    passes = []

    def collect(*_: object) -> None:
        passes.append(0)
        if len(passes) == 200:
            gc.collect()

    handle = nn.modules.module.register_module_forward_hook(collect)
    try:
        run = trained(tmp_path, 30)
    finally:
        handle.remove()
    assert len(passes) > 200
    (warning,) = [text for text in record_of(run).warnings if "garbage" in text]
    assert warning.startswith("a library started Python's garbage collector 1 time within measured steps of rank 0")


def test_the_collector_works_again_after_a_failure(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    passes = []

    def later(*_: object) -> None:
        passes.append(0)
        if len(passes) > 150:
            fail()

    handle = nn.modules.module.register_module_forward_hook(later)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            trained(tmp_path, 30)
    finally:
        handle.remove()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
