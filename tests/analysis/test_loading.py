"""Many runs read by several processes: the same numbers, no lost reasons, no process left behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlbench.analysis.causes import causes_of
from dlbench.analysis.measures import RunSteps, load_steps
from dlbench.analysis.table import LoadedRun, RunTable, digest_of, load_runs
from dlbench.errors import IncompleteDataError
from dlbench.records.rows.shared import file_of
from dlbench.records.scan import scan
from tests.support.run_factory import write_scaling
from tests.support.watch_factory import large_runs

ALL = {"with_causes": True, "with_digests": True}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of several sizes; one of them is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    write_scaling(folder, repeats=2)
    large_runs(folder, ranks=8, steps=40, ranks_per_node=4, runs=2)
    damaged = file_of(scan(folder).runs[1].folder.steps(0))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    return folder


def test_several_processes_give_what_one_gives(out: Path) -> None:
    runs = scan(out).runs
    alone = load_runs(runs, **ALL, processes=1)
    assert [isinstance(one, IncompleteDataError) for one in alone].count(True) == 1
    assert told(load_runs(runs, **ALL, processes=2)) == told(alone)
    assert told(load_runs(runs[::-1], **ALL, processes=3)) == told(alone)[::-1]
    assert multiprocessing.active_children() == []


def told(found: list[LoadedRun | IncompleteDataError]) -> list[str]:
    """Errors are equal only to themselves."""
    return [repr(one) for one in found]


def test_what_is_loaded_is_what_its_makers_give(out: Path) -> None:
    run = scan(out).runs[-1]
    (found,) = load_runs([run], **ALL)
    assert isinstance(found, LoadedRun)
    steps = load_steps(run)
    assert found.causes == causes_of(run, steps)
    assert found.digest == digest_of(run, steps)
    (bare,) = load_runs([run])
    assert isinstance(bare, LoadedRun)
    assert (bare.row, bare.parts, bare.causes, bare.digest) == (found.row, found.parts, None, None)


def arrays(steps: RunSteps) -> list[Any]:
    return [
        steps.numbers,
        steps.begin_ns,
        steps.end_ns,
        steps.step_ns,
        *steps.phase_ns.values(),
        np.array(steps.unbroken),
    ]


def assert_same(one: RunTable, other: RunTable) -> None:
    assert one.figures == other.figures
    assert one.parts == other.parts
    assert (one.causes, one.digests, one.damaged) == (other.causes, other.digests, other.damaged)
    assert [(item.state, item.why) for item in one.without] == [(item.state, item.why) for item in other.without]
