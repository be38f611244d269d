"""Many runs read by several processes: the same numbers, no lost reasons, no process left behind."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlbench import pool
from dlbench.analysis import measures
from dlbench.analysis import table as loading
from dlbench.analysis.causes import causes_of
from dlbench.analysis.digest import digest_of
from dlbench.analysis.measures import RunSteps, load_steps
from dlbench.analysis.table import LoadedRun, RunTable, Wanted, load_runs, tabulate
from dlbench.errors import IncompleteDataError
from dlbench.opening import read_json
from dlbench.records.folder import MAX_JSON
from dlbench.records.record import Record
from dlbench.records.rows import shared
from dlbench.records.rows.shared import file_of
from dlbench.records.scan import scan
from tests.support.run_factory import write_scaling
from tests.support.watch_factory import large_runs

ALL = Wanted(causes=True, digest=True)


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
    alone = load_runs(runs, ALL, processes=1)
    assert [isinstance(one, IncompleteDataError) for one in alone].count(True) == 1
    assert told(load_runs(runs, ALL, processes=2)) == told(alone)
    assert told(load_runs(runs[::-1], ALL, processes=3)) == told(alone)[::-1]
    assert multiprocessing.active_children() == []


def told(found: list[LoadedRun | IncompleteDataError]) -> list[str]:
    """Errors are equal only to themselves."""
    return [repr(one) for one in found]


def test_what_is_loaded_is_what_its_makers_give(out: Path) -> None:
    run = scan(out).runs[-1]
    (found,) = load_runs([run], ALL)
    assert isinstance(found, LoadedRun)
    steps = load_steps(run)
    assert found.causes == causes_of(run, steps)
    assert found.digest == digest_of(run, steps)
    (bare,) = load_runs([run], Wanted())
    assert isinstance(bare, LoadedRun)
    assert (bare.row, bare.parts, bare.causes, bare.digest) == (found.row, found.parts, None, None)


def test_a_nodes_file_is_opened_once_for_all_its_ranks(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = next(run for run in scan(out).runs if run.plan.layout.nodes == 2)
    opened: list[str] = []
    open_file = shared.open_file

    def counted(path: Path, **how: Any) -> Any:
        opened.append(path.name)
        return open_file(path, **how)

    monkeypatch.setattr(shared, "open_file", counted)
    together = load_steps(run)
    assert opened == ["node-0000.steps", "node-0001.steps"]
    # Rank by rank, as files are read that are not alike.
    monkeypatch.setattr(measures, "_ranks_alike", lambda *_: None)
    for one, other in zip(arrays(together), arrays(load_steps(run)), strict=True):
        assert (one == other).all()


def arrays(steps: RunSteps) -> list[Any]:
    return [
        steps.numbers,
        steps.begin_ns,
        steps.end_ns,
        steps.step_ns,
        *steps.phase_ns.values(),
        np.array(steps.unbroken),
    ]


def test_parts_of_a_record_share_what_is_alike(out: Path) -> None:
    run = next(run for run in scan(out).runs if run.plan.layout.nodes == 2)
    assert run.record is not None
    assert run.record.watch is not None
    assert run.statuses == []
    for parts in (run.record.ranks, run.record.watch.nodes):
        assert len({id(part.model_fields_set) for part in parts}) == 1
    assert len({id(node.sources) for node in run.record.watch.nodes}) == 1
    assert run.record == Record.model_validate(read_json(run.folder.record, MAX_JSON))


def test_a_table_is_the_same_with_and_without_processes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tabulate(scan(out), with_causes=True, with_digests=True)
    started: list[int] = []
    start = pool.run

    def counted(*arguments: Any, **settings: Any) -> Any:
        started.append(arguments[2])
        return start(*arguments, **settings)

    monkeypatch.setattr(pool, "run", counted)
    monkeypatch.setattr(loading, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    together = tabulate(scan(out), with_causes=True, with_digests=True)
    assert started == [2]
    assert_same(alone, together)
    assert len(alone.damaged) == 1
    assert len(alone.digests) == len(alone.runs) == 5


def assert_same(one: RunTable, other: RunTable) -> None:
    assert one.figures == other.figures
    assert one.parts == other.parts
    assert (one.causes, one.digests, one.damaged) == (other.causes, other.digests, other.damaged)
    assert [(item.state, item.why) for item in one.without] == [(item.state, item.why) for item in other.without]


def test_few_runs_start_no_process(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Worker", None)
    assert len(load_runs(scan(out).runs, ALL)) == 6


def test_a_defect_comes_with_its_trace(out: Path) -> None:
    without_record = [replace(run, record=None) for run in scan(out).runs[:2]]
    with pytest.raises(RuntimeError, match=r"(?s)cannot be read.*ValueError.*has no figures"):
        load_runs(without_record, ALL, processes=2)
    assert multiprocessing.active_children() == []
