"""Memory of ranks by kind: redundant copies are what ranks hold beyond one copy, and kinds make up the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.records.record import HeldMemory
from dlbench.records.scan import scan
from dlbench.views.peak_memory import HeldPoint, Memory
from dlbench.views.scaling_report import assemble
from tests.support.run_factory import Story, constant, plans, write_run

PARAMETERS = 1200
WHOLE = {"weights": 4 * PARAMETERS, "gradients": 4 * PARAMETERS, "optimizer": 8 * PARAMETERS}
STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {"engine": "ddp"},
    "zero-1": {"engine": "ddp", "overrides": {"engine.ddp.shard_optimizer": True}},
    "fsdp": {"engine": "fsdp"},
    "local-sgd": {"engine": "ddp", "overrides": {"sync.average_every": 4}},
}
SHARED = {"data": (), "zero-1": ("optimizer",), "fsdp": tuple(WHOLE), "local-sgd": ()}


def planted(out: Path, strategy: str, watched: int = 4) -> Memory:
    """Three rank counts of a strategy; ranks below `watched` know what they held, rank 0 of most."""
    for plan in plans(points=(1, 2, 4), points_are="ranks", repeats=1, **STRATEGIES[strategy]):
        ranks = plan.layout.ranks
        parts = {kind: size // (ranks if kind in SHARED[strategy] else 1) for kind, size in WHOLE.items()}

        def of_rank(rank: int, parts: dict[str, int] = parts) -> dict[str, Any]:
            kinds = {**parts, "buffers": 100, "activations": 1000 - rank}
            held = {**dict.fromkeys(HeldMemory.model_fields, 0), **kinds, "peak": sum(kinds.values()), "retries": rank}
            return {"held": {**held, "evidence": "planted"}} if rank < watched else {}

        record = {"num_parameters": PARAMETERS, "gradient_bytes": 4 * PARAMETERS}
        write_run(out, plan, constant((5.0, 0.0, 30.0, 45.0, 10.0, 10.0)), Story(of_rank=of_rank, record=record))
    (group,) = assemble(scan(out)).groups
    found = group.of(Memory)
    assert found is not None
    return found


def copies(point: HeldPoint) -> int | None:
    return None if point.copies is None else sum(point.copies.values())


@pytest.mark.parametrize("strategy", ["data", "zero-1", "fsdp"])
def test_copies_of_all_ranks_are_what_they_hold_beyond_one(tmp_path: Path, strategy: str) -> None:
    found = planted(tmp_path, strategy)
    for point in found.kinds:
        every = point.ranks * (point.weights + point.gradients + point.optimizer)
        assert point.ranks * (copies(point) or 0) == every - sum(WHOLE.values())
        assert point.weights + point.gradients + point.optimizer + point.buffers + point.activations == point.peak


def test_ranks_that_train_apart_hold_no_copies(tmp_path: Path) -> None:
    assert [copies(point) for point in planted(tmp_path, "local-sgd").kinds] == [0, None, None]


def test_copies_are_not_known_where_a_rank_was_not_watched(tmp_path: Path) -> None:
    found = planted(tmp_path, "data", watched=3).kinds
    assert [copies(point) for point in found] == [0, sum(WHOLE.values()) // 2, None]
    assert found[-1].retries == 2
