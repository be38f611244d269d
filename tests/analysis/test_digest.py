"""What is kept of single steps, against loops over every one; many runs read by several processes give the same."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.causes import causes_of
from dlbench.analysis.measures import RunSteps, load_steps
from dlbench.analysis.table import (
    MAX_MAP_COLUMNS,
    MAX_MAP_ROWS,
    MAX_OUTLIERS,
    QUANTILES,
    LoadedRun,
    RankStepMap,
    RunTable,
    StepDigest,
    digest_of,
    load_runs,
    tabulate,
)
from dlbench.errors import IncompleteDataError
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import Run, read_run, scan
from tests.support.run_factory import MS, Story, plans, write_run, write_scaling
from tests.support.watch_factory import large_runs

OfRanks = Callable[[Sequence[str]], Run]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> OfRanks:
    (plan,) = plans(points=(1,), repeats=1)
    folder = write_run(tmp_path_factory.mktemp("run"), plan, lambda rank, step: ([MS] * len(PHASES), 0))
    run = read_run(folder.path)
    record, rank = run.record, run.record.ranks[0]

    def made(hosts: Sequence[str]) -> Run:
        ranks = tuple(rank.model_copy(update={"rank": number, "host": host}) for number, host in enumerate(hosts))
        return replace(run, record=record.model_copy(update={"ranks": ranks}))

    return made


def run_steps(table: np.ndarray, first: int = 0) -> RunSteps:
    """Times of phases and of the rest, shape (ranks, steps, parts)."""
    return RunSteps(
        numbers=np.arange(first, first + table.shape[1]),
        begin_ns=np.zeros(len(table), np.int64),
        end_ns=table.sum(axis=(1, 2)),
        step_ns=table.sum(axis=2),
        phase_ns={name: table[:, :, i].copy() for i, name in enumerate(PHASES)},
        unbroken=table.shape[1],
    )


def random_steps(seed: int, ranks: int, steps: int, largest: int, first: int = 0) -> RunSteps:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, largest, (ranks, steps, len(PHASES) + 1))
    table[rng.random((ranks, steps)) < 0.03] *= 20
    table[:, :, -1] += 1
    return run_steps(table, first)


shapes = st.tuples(st.integers(1, 70), st.integers(1, 210))
largest = st.sampled_from([1, 3, 1000, 10**10])


def quantile(ordered: Sequence[float], share: Fraction) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * float(place - below)


@given(seed=st.integers(0, 2**32), shape=shapes, most=largest, first=st.integers(0, 50))
def test_quantiles_fence_and_outliers(
    run_of: OfRanks, seed: int, shape: tuple[int, int], most: int, first: int
) -> None:
    steps = random_steps(seed, *shape, most, first)
    hosts = [f"n{rank // 3}" for rank in range(shape[0])]
    found = digest_of(run_of(hosts), steps)

    slowest = [max(column) / 1e9 for column in zip(*steps.step_ns.tolist(), strict=True)]
    ordered = sorted(slowest)
    wanted = [quantile(ordered, Fraction(index, QUANTILES - 1)) for index in range(QUANTILES)]
    assert found.quantiles_s == pytest.approx(wanted, rel=1e-12)
    lower, upper = (quantile(ordered, Fraction(share, 4)) for share in (1, 3))
    assert found.fence_s == pytest.approx(upper + 3 * (upper - lower), rel=1e-12)
    assert found.num_steps == shape[1]

    beyond = [column for column, seconds in enumerate(slowest) if seconds > found.fence_s]
    assert found.num_outliers == len(beyond)
    longest = sorted(beyond, key=lambda column: (-slowest[column], column))[:MAX_OUTLIERS]
    assert [one.step - first for one in found.outliers] == longest
    for one in found.outliers:
        column = one.step - first
        assert one.seconds == slowest[column]
        assert one.ratio == pytest.approx(slowest[column] / statistics.median(slowest))
        own = [int(steps.step_ns[rank, column] - steps.phase_ns["exchange"][rank, column]) for rank in range(shape[0])]
        assert one.rank == own.index(max(own))
        assert one.host == hosts[one.rank]
        assert one.phase == grown_most(steps, one.rank, column)


def grown_most(steps: RunSteps, rank: int, column: int) -> str:
    parts = {**steps.phase_ns, "other": steps.step_ns - sum(steps.phase_ns.values())}
    grown = {name: times[rank, column] - statistics.median(times[rank].tolist()) for name, times in parts.items()}
    return next(name for name in parts if grown[name] == max(grown.values()))


@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 200), st.integers(1, 310)),
    most=largest,
    first=st.integers(0, 50),
)
def test_a_cell_is_the_largest_mean_of_its_ranks(
    run_of: OfRanks, seed: int, shape: tuple[int, int], most: int, first: int
) -> None:
    steps = random_steps(seed, *shape, most, first)
    found = digest_of(run_of(["n0"] * shape[0]), steps).map
    own = (steps.step_ns - steps.phase_ns["exchange"]).tolist()
    median = statistics.median(value for row in own for value in row)
    rows, columns = borders(found)
    assert len(rows) <= MAX_MAP_ROWS
    assert len(columns) <= MAX_MAP_COLUMNS
    assert len(found.cells) == len(rows)
    for (begin, end), cells in zip(rows, found.cells, strict=True):
        assert len(cells) == len(columns)
        for (left, right), cell in zip(columns, cells, strict=True):
            wanted = max(sum(own[rank][left - first : right - first]) / (right - left) for rank in range(begin, end))
            assert cell == pytest.approx(wanted / max(1, median), rel=1e-12)


def borders(found: RankStepMap) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Begin and end of rows and columns, which leave nothing out; all but the last are equally large."""
    pieces = []
    for starts, end in ((found.rank_starts, found.num_ranks), (found.step_starts, found.last_step + 1)):
        edges = [*starts, end]
        sizes = [after - before for before, after in itertools.pairwise(edges)]
        assert min(sizes) >= 1
        assert len({*sizes[:-1]}) <= 1
        assert sizes[-1] <= sizes[0]
        pieces.append(list(itertools.pairwise(edges)))
    return pieces[0], pieces[1]


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60), most=largest)
def test_autocorrelation_is_that_of_the_definition(run_of: OfRanks, seed: int, steps: int, most: int) -> None:
    drawn = random_steps(seed, 1, steps, most)
    found = digest_of(run_of(["n0"]), drawn).autocorrelation
    values = [Fraction(value) for value in drawn.step_ns[0].tolist()]
    mean = sum(values) / len(values)
    apart = [value - mean for value in values]
    if steps < 10 or len(set(values)) == 1:
        assert found is None
        return
    products = sum(a * b for a, b in itertools.pairwise(apart))
    assert found == pytest.approx(float(products / sum(a * a for a in apart)), abs=1e-9)


def test_steps_of_real_files_are_counted_with_warm_up(tmp_path: Path) -> None:
    plan = plans(points=(2,), repeats=1)[0]
    host = Story(host=lambda rank: f"n{rank}")
    folder = write_run(tmp_path, plan, lambda rank, step: ([MS * (rank + 1)] * len(PHASES), step), host)
    run = read_run(folder.path)
    warmup = plan.measure.warmup_steps
    found = digest_of(run, load_steps(run))
    assert warmup > 0
    assert found.map.step_starts[0] == warmup
    assert found.map.last_step == warmup + plan.measure.measured_steps - 1
    assert found.map.row_hosts == ("n0", "n1")
    table = tabulate(scan(tmp_path), with_digests=True)
    assert table.digests == {plan.run_id: found}
    assert isinstance(found, StepDigest)
    assert tabulate(scan(tmp_path)).digests == {}


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
