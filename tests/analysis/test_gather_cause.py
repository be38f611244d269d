"""The cause `gather`: what ranks waited for collectives within passes leaves compute, and sums stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.causes import COMPUTE_PARTS, Causes, causes_of
from dlbench.analysis.measures import load_steps
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import read_run, scan
from tests.support.run_factory import MS, StepTimes, Story, plans, write_run

PHASES_MS = (5.0, 0.0, 30.0, 50.0, 0.0, 10.0)
STEPS = 12


def told(gather: dict[str, float], exchange: dict[str, float]) -> dict[str, Any]:
    """What a rank says of its waits: milliseconds per step, by phase."""
    seconds = [{name: ms * STEPS / 1e3 for name, ms in one.items()} for one in (gather, exchange)]
    return {"waits": {"gather_s": seconds[0], "exchange_s": seconds[1], "evidence": "timed by every rank"}}


def one(
    out: Path, waits: Any, late_ms: float = 0.0, ranks: int = 2, times: StepTimes | None = None, **asked: Any
) -> Causes:
    overrides = {"measure.measured_steps": STEPS}
    (plan,) = plans(points=(ranks,), repeats=1, overrides=overrides, **asked)

    def usual(rank: int, step: int) -> tuple[list[int], int]:
        phases = [round(ms * MS) for ms in PHASES_MS]
        phases[3] += round(late_ms * MS) * (rank == 0)
        phases[4] += round((4.0 + late_ms * (rank > 0)) * MS)
        return phases, 0

    return causes_of(read_run(write_run(out, plan, times or usual, Story(of_rank=waits)).path))


def test_waiting_within_passes_is_gather_or_exchange_and_no_longer_compute(tmp_path: Path) -> None:
    found = one(tmp_path, lambda rank: told({"forward": 3.0, "backward": 5.0}, {"backward": 2.0, "optimizer": 1.0}))
    assert found.seconds["gather"] == pytest.approx(0.008)
    assert found.seconds["exchange"] == pytest.approx(0.004 + 0.003)
    assert found.seconds["compute"] == pytest.approx(0.090 - 0.011)
    assert {name: ns / 2 / STEPS / MS for name, ns in found.compute_ns.items()} == pytest.approx(
        {"forward": 27.0, "backward": 43.0, "optimizer": 9.0}
    )
    assert found.evidence["gather"] == "timed by every rank; without waiting for stragglers"
    # A rank's own work is what it does for itself.
    assert found.work_ns == (84 * STEPS * MS,) * 2


parts = st.dictionaries(st.sampled_from(COMPUTE_PARTS), st.floats(0, 200))


@settings(max_examples=25, derandomize=True)
@given(
    waits=st.lists(st.tuples(parts, parts), min_size=4, max_size=4),
    late=st.sampled_from([0.0, 40.0]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_whatever_ranks_waited_sums_are_exact(
    tmp_path_factory: pytest.TempPathFactory, waits: Any, late: float, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    found = one(folder, lambda rank: told(*waits[rank]), late, ranks)
    (run,) = scan(folder).runs
    assert sum(found.sums_ns.values()) == ranks * int(load_steps(run).step_ns.sum(axis=1).max())
    assert min(found.sums_ns.values()) >= 0
    assert min(found.work_ns) >= 0
    assert sum(found.compute_ns.values()) == found.sums_ns["compute"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("late_in", "late_by", "waits_in", "cause", "take_turns"),
    [
        ("input", "input", "forward", "gather", False),
        ("input", "input", "forward", "exchange", True),
        ("forward", "compute", "backward", "gather", False),
        ("optimizer", "compute", "optimizer", "exchange", False),
    ],
)
def test_others_wait_within_their_passes_for_a_late_rank(
    tmp_path: Path, ranks: int, late_in: str, late_by: str, waits_in: str, cause: str, take_turns: bool
) -> None:
    """Each collective takes 3 ms when all have come, one rank comes 40 ms late: now this one, now that, or rank 0."""

    def times(rank: int, step: int) -> tuple[list[int], int]:
        phases = dict(zip(PHASES, PHASES_MS, strict=True))
        phases[waits_in] += 3
        phases[late_in if rank == take_turns * step % ranks else waits_in] += 40
        return [round(ms * MS) for ms in phases.values()], 0

    def waits(rank: int) -> dict[str, Any]:
        on_time = (ranks - 1) / ranks if take_turns else rank > 0
        waited = {waits_in: 3.0 + 40 * on_time}
        return told(waited, {}) if cause == "gather" else told({}, waited)

    found = one(tmp_path, waits, ranks=ranks, times=times)
    assert found.sums_ns["straggler"] == 40 * MS * ranks * STEPS
    assert found.sums_ns[cause] == 3 * MS * ranks * STEPS
    assert found.sums_ns["input"] == 5 * MS * ranks * STEPS
    late = [(one.rank, one.steps_last, one.late_ns[late_by]) for one in found.waiting.ranks]
    each = STEPS // ranks if take_turns else STEPS
    assert sorted(late) == [(rank, each, 40 * MS * each) for rank in range(ranks if take_turns else 1)]
