"""The cause `launch`: what devices idled for their host leaves compute, and sums stay exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlbench.analysis.causes import causes_of
from dlbench.analysis.measures import load_steps, measure
from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.records.scan import read_run, scan
from dlbench.views.causes.numbers import lost_percent
from tests.support.run_factory import LAUNCH_MS, MS, Story, constant, plans, write_launch_bound, write_run

WAITS = (8.0, 10.0, 4.0)


def test_what_a_device_waited_for_its_host_is_no_longer_compute(tmp_path: Path) -> None:
    (plan,) = write_launch_bound(tmp_path, lambda plan: WAITS, points=(1,), repeats=1)
    run = read_run(tmp_path / plan.run_id)
    found = causes_of(run)
    assert found.seconds["launch"] == pytest.approx(sum(WAITS) / 1e3)
    kernels = sum(LAUNCH_MS[name] for name in ("forward", "backward", "optimizer"))
    assert found.seconds["compute"] == pytest.approx(kernels / 1e3)
    assert found.taken_ns["launch"]["forward"] / found.steps == pytest.approx(WAITS[0] * MS)
    assert "kernels alone" in found.evidence["launch"]
    # To the nanosecond.
    longest = int(load_steps(run).step_ns.sum(axis=1).max())
    assert sum(found.sums_ns.values()) == found.ranks * longest
    assert sum(found.seconds.values()) == pytest.approx(sum(measure(run).parts.values()), rel=1e-12)


def test_a_host_that_is_ahead_makes_nothing_wait(tmp_path: Path) -> None:
    (plan,) = write_launch_bound(tmp_path, lambda plan: (0.0, 0.0, 0.0), points=(1,), repeats=1)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.seconds["launch"] == 0
    assert "launch" not in found.not_measured
    assert found.evidence["launch"] == "the host was ahead of the device in every phase of every step"


@pytest.mark.parametrize(
    ("record", "why"), [({}, "5 ms per step"), ({"phases": "synchronised"}, "waits? for the host after every")]
)
def test_a_bound_alone_is_told_and_charged_to_nobody(tmp_path: Path, record: dict[str, str], why: str) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    story = Story(device="cuda:0 (NVIDIA H200)", launch=lambda rank, step: (5 * MS, 0, 0), record=record)
    write_run(tmp_path, plan, constant((1, 1, 10, 10, 1, 5)), story)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.sums_ns["launch"] == 0
    assert found.seconds["compute"] == pytest.approx(0.025)
    assert re.search(why, found.not_measured["launch"])


def test_waiting_that_grows_with_ranks_is_found_and_answered(tmp_path: Path) -> None:
    """Under weak scaling two ranks share a host's cores: launching takes longer."""
    write_launch_bound(tmp_path, lambda plan: tuple(ms * (plan.layout.ranks - 1) for ms in WAITS), points=(1, 2))
    table = tabulate(scan(tmp_path), with_causes=True)
    (group,) = groups(table)
    (_, last) = lost_percent(group, table).diagnosed.points
    assert last.verdict.name == "launch-bound"
    assert last.cause("launch").lost.value == pytest.approx(last.whole.lost.value, rel=0.01)
    texts = " ".join(experiment.text for experiment in last.verdict.experiments)
    for option in ("train.batch_per_rank=", "train.compile=reduce-overhead", "train.cuda_graphs=network"):
        assert option in texts
