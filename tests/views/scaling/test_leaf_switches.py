"""Efficiency by the number of leaf switches, and a warning where runs that are compared differ in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.views.scaling import ScalingView
from dlbench.views.scaling_report import assemble
from tests.support.run_factory import Story, constant, plans, write_run


def write(out: Path, switches_of: Callable[[RunPlan], int]) -> None:
    """Writes runs on 1 and 4 nodes, whose steps take 1.25 times as long on two leaf switches."""
    request = {"system": "box", "points_are": "nodes", "ranks_per_node": 1, "launcher": "mpirun"}
    for plan in plans(**request, points=(1, 4)):
        number = switches_of(plan)

        def of_rank(rank: int, number: int = number) -> dict[str, str]:
            return {"switch": f"root.leaf{rank % number}"} if number else {}

        step_ms = (125 if number > 1 else 100) * (1 + 0.001 * plan.series.repeat)
        write_run(out, plan, constant([0, 0, 0, step_ms, 0, 0]), Story(of_rank=of_rank))


def test_runs_of_one_count_are_told_apart_by_leaf_switches(tmp_path: Path) -> None:
    write(tmp_path, lambda plan: 2 if plan.layout.nodes == 4 and plan.series.repeat % 2 else 1)
    (group,) = assemble(scan(tmp_path)).groups
    points, by_switches = ScalingView().section(group).sheets
    (column,) = (column for column in points.columns if column.title == "Leaf switches")
    assert [column.cell(row).text for row in points.rows] == ["1", "1 or 2"]
    found = [(row.ranks, row.leaf_switches, row.throughput.n, row.efficiency.value) for row in by_switches.rows]
    assert found == [(4, (1,), 3, pytest.approx(1.0, rel=0.01)), (4, (2,), 2, pytest.approx(0.8, rel=0.01))]
    (doubt,) = [doubt for doubt in group.doubts if doubt.code == "leaf-switches"]
    assert doubt.severity == "serious"
    assert "1 at 1 rank; 1 or 2 at 4 ranks" in doubt.text
    assert "--switches=1" in doubt.text


@pytest.mark.parametrize(("on_four", "severity"), [(2, "note"), (1, None), (0, None)])
def test_points_that_differ_have_a_note(tmp_path: Path, on_four: int, severity: str | None) -> None:
    write(tmp_path, lambda plan: on_four if plan.layout.nodes == 4 else 1)
    (group,) = assemble(scan(tmp_path)).groups
    (points,) = ScalingView().section(group).sheets
    assert ("Leaf switches" in [column.title for column in points.columns]) == (severity is not None)
    assert [doubt.severity for doubt in group.doubts if doubt.code == "leaf-switches"] == [severity] * bool(severity)
