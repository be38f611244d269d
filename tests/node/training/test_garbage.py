"""Python's garbage collector does not start in measured steps, and what it would have freed does not pile up."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from dlbench.node.garbage import HeldGarbage
from dlbench.node.training import pauses, run_record
from dlbench.node.training import run as run_module
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
    assert warning.startswith("Python's garbage collector was started 1 times within measured steps of rank 0")


def test_pauses_collect_as_they_like_and_leave_nothing_behind() -> None:
    held = HeldGarbage()
    held.begin_measuring()
    try:
        assert not gc.isenabled()
        with held.between_steps():
            assert gc.isenabled()
            gc.collect()
            Cycle.alive = 0
            Cycle()
        assert Cycle.alive == 0
        assert not gc.isenabled()
        assert (held.collections, held.in_steps) == (1, 0)
        gc.collect()
        assert held.in_steps == 1
    finally:
        held.release()
    held.release()
    assert gc.isenabled()
    assert held._seen not in gc.callbacks


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


def test_hashing_the_parameters_is_in_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `run_start`, and not part of the time to the first step."""
    plain = run_module.parameters_digest
    hashed: list[float] = []

    def slow(model: nn.Module) -> str:
        time.sleep(0.4)
        hashed.append(time.time() * 1000)
        return plain(model)

    for module in (run_module, run_record):
        monkeypatch.setattr(module, "parameters_digest", slow)
    run = trained(tmp_path, 2)
    record = record_of(run)
    at = {event.key: event.time_ms for event in record.events}
    assert hashed[0] <= at["run_start"] + 1
    assert at["run_stop"] <= hashed[1]
    first_ms = int(read_steps(run.folder.steps(0)).steps[0]["start_ns"]) / 1e6 + (time.time() - time.monotonic()) * 1e3
    assert record.ranks[0].startup_s * 1e3 <= first_ms - at["init_start"] - 390
