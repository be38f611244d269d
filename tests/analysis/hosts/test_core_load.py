"""Others on the cores of the ranks are a warning; what was not measured is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.environments import load_doubts, loads_of
from dlbench.records.scan import read_run
from tests.support.run_factory import Story, constant, plans, write_run

TIMES = constant([5.0, 0.0, 30.0, 45.0, 10.0, 10.0])


def node_load(**changes: Any) -> dict[str, Any]:
    """Two cores that the ranks had for themselves, for 10 s."""
    quiet = {"node_rank": 0, "host": "n0", "cores": [0, 1], "window_s": 10.0, "busy_s": 19.5, "own_s": 19.0}
    return {**quiet, "steal_s": 0.1, "pressure_s": None, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"busy_s": None, "steal_s": None}, None),
        ({"busy_s": 18.0}, None),  # ticks of the kernel may lie below what processes used
        ({"busy_s": 20.0, "own_s": 7.2}, "other processes used 1.3 of the 2 cores of node n0 (64 %): repeat on an "),
        ({"cores": [3], "busy_s": 9.0, "own_s": 8.0}, "other processes used 0.1 of the core of node n0 (10 %): "),
        ({"steal_s": 5.0}, "the hypervisor took 0.5 of the 2 cores of node n0 away (25 %, steal time): repeat on an "),
        ({"window_s": 0.2, "busy_s": 0.09, "own_s": 0.04, "steal_s": 0.0}, None),  # less than the kernel's ticks tell
    ],
)
def test_load_of_others_is_a_warning(changes: dict[str, Any], text: str | None, tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    run = read_run(write_run(tmp_path, plan, TIMES, Story(record={"load": [node_load(**changes)]})).path)
    found = list(load_doubts(loads_of([run])))
    assert len(found) == (text is not None)
    if text is not None:
        assert found[0].text.startswith(text)
        assert found[0].runs == (plan.run_id,)


def test_a_node_is_named_once_for_all_runs_with_the_worst(tmp_path: Path) -> None:
    runs = []
    for plan, busy_s in zip(plans(points=(1,), repeats=3), (19.2, 22.0, 25.0), strict=True):
        story = Story(record={"load": [node_load(busy_s=busy_s)]})
        runs.append(read_run(write_run(tmp_path, plan, TIMES, story).path))
    (doubt,) = load_doubts(loads_of(runs))
    assert doubt.text.startswith("other processes used up to 0.6 of the 2 cores of node n0 (30 %)")
    assert doubt.runs == tuple(run.plan.run_id for run in runs[1:])
