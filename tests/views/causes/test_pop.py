"""Metrics by POP's definition, where they say something else than the account."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.views.causes.numbers import CausePoint, lost_percent
from tests.analysis.test_causes import simulate
from tests.support.run_factory import constant, plans, write_run


def points(folder: Path) -> tuple[CausePoint, ...]:
    table = tabulate(scan(folder), with_causes=True)
    (group,) = groups(table)
    return lost_percent(group, table).diagnosed.points


def test_a_steady_straggler_is_imbalance_by_pops_definition(tmp_path: Path) -> None:
    """100 ms of own work, 8 ms of network at 4 ranks, one rank 25 ms late: 133 ms in all."""
    for plan in plans(points=(1, 4), repeats=5):
        late = simulate(plan, lambda rank, step: {"backward": 75.0} if rank == 3 else {})
        write_run(tmp_path, plan, late if plan.layout.ranks > 1 else constant([5, 0, 30, 50, 0, 10], other=5))
    _, found = points(tmp_path)
    assert found.cause("straggler").lost.value == pytest.approx(25 / 133, rel=1e-3)
    assert found.cause("exchange").lost.value == pytest.approx(8 / 133, rel=1e-3)
    # Useful time of the ranks: 100, 100, 100 and 125 of 133 ms.
    assert found.pop.load_balance.value == pytest.approx(106.25 / 125, rel=1e-3)
    assert found.pop.communication.value == pytest.approx(125 / 133, rel=1e-3)
    assert found.pop.parallel.value == pytest.approx(106.25 / 133, rel=1e-3)


def test_stragglers_in_turns_are_balanced_by_pops_definition(tmp_path: Path) -> None:
    for plan in plans(points=(2,), repeats=5):
        write_run(tmp_path, plan, simulate(plan, lambda rank, step: {"backward": 75.0} if rank == step % 2 else {}))
    (found,) = points(tmp_path)
    assert found.pop.load_balance.value > 0.99
    assert found.cause("straggler").seconds.value > 0.15 * found.whole.seconds.value
