"""The collective benchmark on real ranks: right results, exact counters, and what becomes of runs that go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs.scripts.launch import local_environments, rank_environment
from dlbench.node.comm.execution import Execution
from dlbench.node.comm.inputs import DTYPES, EXACT, Inputs, check
from dlbench.node.comm.transport import Counters, Operation, Transport, start_mpi
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import LEAST_SAMPLE_S, enough_operations, over_ranks
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.schedules import Layout, ScheduleStep, Transfer
from dlbench.records.comm import CommRecord
from dlbench.specs.base import Precision
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, CommPlan, CommSeries, CommSpec
from dlbench.specs.launch import LaunchSpec
from dlbench.specs.plan import LayoutSpec
from dlbench.specs.system import SystemSpec
from tests.support import collective_ranks
from tests.support.forks import run_ranks
from tests.support.paths import ROOT
from tests.support.training_data import rank_place

TOKEN = "a-test"
LIMIT_S = 600
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
COLLECTIVES: tuple[Collective, ...] = tuple(ALGORITHMS)


def plan_for(ranks: int, launcher: Any = "local", **comm: Any) -> CommPlan:
    timeouts = {"timeout_s": 60.0, "warmup": 1, "iterations": 3, "sizes": (4096,)}
    return CommPlan(
        run_id="a-run",
        created="2026-01-01T00:00:00Z",
        dlbench_version="0",
        layout=LayoutSpec(nodes=1, ranks=ranks, cores_per_rank=1),
        system=SystemSpec(
            name="test", title="a test", launch=LaunchSpec(launcher=launcher, environment={"OMP_NUM_THREADS": "1"})
        ),
        series=CommSeries(id="a-series", repeat=0, repeats=1, position=0),
        comm=CommSpec(**{**timeouts, **comm}),
    )


@dataclass
class Ended:
    """What became of the ranks."""

    codes: list[int]
    errors: list[str]
    """Standard error of each rank; of all together under mpirun."""
    folder: Path

    def check(self) -> Ended:
        assert set(self.codes) == {0}, self.errors
        return self

    @property
    def record(self) -> CommRecord:
        return CommRecord.model_validate_json((self.folder / "comm.json").read_text(encoding="utf-8"))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Task:
    """What the ranks of a launch do: a method of `tests.support.collective_ranks.Rank` and its options."""

    plan: CommPlan
    task: str = "measure"
    options: dict[str, Any] = field(default_factory=dict)


def start_all(folder: Path, tasks: dict[str, Task]) -> dict[str, Ended]:
    """Starts the ranks of the first plan, which do one task after the other, each in the folder of its name."""
    for name, task in tasks.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "plan.json").write_text(task.plan.to_json(), encoding="utf-8")
    (folder / "tasks.json").write_text(
        json.dumps([(name, task.task, task.options) for name, task in tasks.items()]), encoding="utf-8"
    )
    plan = next(iter(tasks.values())).plan
    if plan.system.launch.launcher == "mpirun":
        codes, errors = _by_mpirun(plan, folder)
    else:
        ranks = local_environments(plan, TOKEN)
        codes, errors = run_ranks(collective_ranks.main, [str(folder)], ranks, folder, limit_s=LIMIT_S)
    return {name: Ended(codes, errors, folder / name) for name in tasks}


def _by_mpirun(plan: CommPlan, folder: Path) -> tuple[list[int], list[str]]:
    words = ["mpirun", "-np", str(plan.layout.ranks), "--oversubscribe", "--bind-to", "none"]
    words += [sys.executable, "-m", "tests.support.collective_ranks", str(folder)]
    done = subprocess.run(
        words,
        env={**os.environ, "DLBENCH_LAUNCH_TOKEN": TOKEN, **rank_environment(plan), **AS_ROOT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        check=False,
    )
    return [done.returncode], [done.stderr]


def start(folder: Path, plan: CommPlan, task: str = "measure", **options: Any) -> Ended:
    return start_all(folder, {"": Task(plan, task, options)})[""]


def needs_mpi() -> None:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs Open MPI and mpi4py")


# Executor


def check_all_algorithms(ended: Ended, ranks: int, group_size: int, elements: list[int]) -> None:
    """Every rank's results were right, and its counters are those of the closed forms' schedules."""
    ended.check()
    layout = Layout(ranks=ranks, group_size=group_size)
    seen = 0
    for rank in range(ranks):
        for collective, algorithm, size, problem, counters in ended.json(f"found-{rank}.json")["found"]:
            assert problem == "", (rank, collective, algorithm, size)
            wanted = counts(collective, algorithm, layout, size, 4)[rank]
            assert Counters(**counters) == Counters(
                steps=wanted.steps,
                messages=wanted.messages,
                bytes_sent=wanted.bytes_sent,
                bytes_across=wanted.bytes_across,
            ), (rank, collective, algorithm, size)
            seen += 1
    names = sum(map(len, ALGORITHMS.values())) - (0 if 1 < group_size < ranks else len(GROUPED_ALGORITHMS))
    assert seen == ranks * names * len(elements)


GLOO_ELEMENTS = [1, 2, 5, 16, 101, 257]


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All algorithms, a run of two of them beside gloo, and a pair beside congestors, by one start of four ranks."""
    # Segments of 7 elements: most messages travel in several, and not in equal ones.
    every = {"elements": GLOO_ELEMENTS, "group_size": 2, "segment_bytes": 28}
    run = plan_for(4, algorithms=("ring", "direct"), backends=("gloo", "nccl"), sizes=(4, 96, 400_004), group_size=1)
    pair = {"collective": "p2p", "algorithms": ("ping-pong", "window"), "sizes": (65536,)}
    pairs = plan_for(4, pairs=((0, 2),), congestors=((1, 3),), iterations=1, warmup=0, **pair)
    tasks = {
        "every algorithm": Task(plan_for(4, algorithms=("ring",)), "execute", every),
        "run": Task(run),
        "pairs": Task(pairs),
    }
    return start_all(tmp_path_factory.mktemp("gloo"), tasks)


@pytest.mark.slow
def test_every_algorithm_is_right_and_counted_exactly_over_gloo(over_gloo: dict[str, Ended]) -> None:
    check_all_algorithms(over_gloo["every algorithm"], 4, 2, GLOO_ELEMENTS)


MPI_ELEMENTS = [1, 3, 100, 10_001]


@pytest.fixture(scope="module")
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All algorithms, and runs of all collectives, by three ranks under one mpirun."""
    needs_mpi()
    every = Task(
        plan_for(3, "mpirun", algorithms=("ring",), transport="mpi"),
        "execute",
        {"elements": MPI_ELEMENTS, "group_size": 1, "segment_bytes": 4096},
    )
    halves = plan_for(3, "mpirun", algorithms=("ring",), backends=("mpi",), transport="mpi", dtype="fp16")
    runs = {
        collective: plan_for(
            3, "mpirun", collective=collective, algorithms=ALGORITHMS[collective][:1], backends=("gloo", "mpi"),
            sizes=(4, 24, 400), dtype="fp16" if collective == "broadcast" else "fp32", iterations=2, warmup=0,
        )
        for collective in COLLECTIVES if collective != "allreduce"
    }  # fmt: skip
    tasks = {"every algorithm": every, "halves": Task(halves), **{name: Task(plan) for name, plan in runs.items()}}
    return start_all(tmp_path_factory.mktemp("mpi"), tasks)


@pytest.mark.slow
def test_every_algorithm_is_right_and_counted_exactly_over_mpi(over_mpi: dict[str, Ended]) -> None:
    check_all_algorithms(over_mpi["every algorithm"], 3, 1, MPI_ELEMENTS)


class Loopback(Transport):
    """A rank that sends to itself: what the executor does in which order, without processes."""

    rank, size, group_size, carrier = 0, 2, 1, "loopback"

    def __init__(self, segment_bytes: int | None, early: bool) -> None:
        self.segment_bytes, self.early = segment_bytes, early
        self.counters = Counters()
        self._sent: list[list[torch.Tensor]] = []
        """What each send reads; and its copy, once it was waited for."""
        self._received: list[tuple[torch.Tensor, list[bool]]] = []

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        """Reads and writes as late as a real library may: when it is waited for."""
        under_way: list[Any] = []

        def begin() -> None:
            under_way.append([run] if sends else (run, [False]))
            (self._sent if sends else self._received).append(under_way[-1])

        def finish() -> None:
            mine = under_way.pop()
            if sends:
                mine.append(run.clone())
            while not sends and not mine[1][0]:
                target, done = self._received.pop(0)
                target.copy_(self._sent.pop(0)[-1])
                done[0] = True

        return begin, finish, under_way.clear


@given(data=st.data())
def test_a_step_reads_the_buffer_as_it_was_when_it_began(data: st.DataObject) -> None:
    """Random steps of one rank with itself, overlapping as they like, against a copy of the buffer for each step."""
    elements = data.draw(st.integers(1, 24))
    runs = st.tuples(st.integers(0, elements - 1), st.integers(1, elements)).map(
        lambda run: (run[0], min(run[1], elements - run[0]))
    )
    steps, wanted = [], torch.arange(1, elements + 1, dtype=torch.float32)
    buffer = wanted.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        reduce = data.draw(st.booleans())
        sends, receives = [], []
        before, taken = wanted.clone(), [False] * elements
        for first, count in data.draw(st.lists(runs, max_size=3)):
            at = data.draw(st.integers(0, elements - count))
            if not reduce and any(taken[at : at + count]):
                continue  # two arrivals put in one place have no order
            taken[at : at + count] = [True] * count
            sends.append(Transfer(1, first, count))
            receives.append(Transfer(1, at, count, reduce))
            arrived = before[first : first + count]
            wanted[at : at + count] = wanted[at : at + count] + arrived if reduce else arrived
        steps.append(ScheduleStep(sends=tuple(sends), receives=tuple(receives)))
    transport = Loopback(data.draw(st.sampled_from([None, 4, 12, 1024])), early=data.draw(st.booleans()))
    if transport.segment_bytes is None:
        transport.early = False  # as NCCL
    execution = Execution(tuple(steps), buffer, transport)
    execution.run()
    assert torch.equal(buffer, wanted)
    assert transport.counters.steps == len(steps)
    assert transport.counters.messages == sum(len(step.sends) for step in steps)
    assert transport.counters.bytes_sent == 4 * sum(send.count for step in steps for send in step.sends)


# Inputs and verdicts


@given(
    collective=st.sampled_from(COLLECTIVES),
    ranks=st.integers(1, 9),
    elements=st.integers(1, 60),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    data=st.data(),
)
def test_what_must_come_out_is_what_all_inputs_give(
    collective: Collective, ranks: int, elements: int, dtype: Precision, data: st.DataObject
) -> None:
    everyone = [Inputs(collective, rank, ranks, elements, dtype) for rank in range(ranks)]
    given_by = [inputs.source() for inputs in everyone]
    total = torch.stack(given_by).to(torch.float64).sum(dim=0).to(DTYPES[dtype])
    for inputs in everyone:
        assert inputs.tolerance == 0
        places = [i for part in inputs.expected() for i in range(part.at, part.at + part.count)]
        if inputs.is_sum:
            result = total.clone()
            assert not check(inputs, result).problem
            if ranks > 1 and places:  # with fewer elements than ranks, some have none to be wrong
                assert check(inputs, given_by[inputs.rank]).problem
                for other in range(ranks):  # one rank left out, or counted twice
                    assert check(inputs, total - given_by[other]).problem
        else:
            result = torch.full((elements,), float("nan"), dtype=DTYPES[dtype])
            for part in inputs.expected():
                source = next(r for r in range(ranks) if torch.equal(everyone[r].table(r), part.table))
                result[part.at : part.at + part.count] = given_by[source][part.first : part.first + part.count]
            assert not check(inputs, result).problem
        if places:
            spoilt = result.clone()
            index = data.draw(st.sampled_from(places))
            spoilt[index] += 1
            verdict = check(inputs, spoilt)
            assert f"1 wrong elements of {elements}; element {index} is" in verdict.problem
            assert verdict.max_error is not None
            assert verdict.max_error > 0


def test_rounding_is_allowed_only_where_sums_cannot_be_exact() -> None:
    ranks = 200  # more than half of what bf16 counts exactly
    everyone = [Inputs("allreduce", rank, ranks, 50, "bf16") for rank in range(ranks)]
    assert everyone[0].tolerance == pytest.approx(ranks / (2 * EXACT["bf16"]))
    total = torch.zeros(50, dtype=torch.bfloat16)
    for inputs in everyone:
        total += inputs.source()
    assert not check(everyone[0], total).problem
    assert check(everyone[0], total * 2).problem


def test_an_overflow_is_called_so() -> None:
    beyond_fp16 = torch.full((100,), 3 * 60_000.0).to(torch.float16)
    verdict = check(Inputs("allreduce", 0, 3, 100, "fp16"), beyond_fp16)
    assert verdict.max_error is None
    assert verdict.problem.startswith("fp16 overflow: ")
    assert "65504" in verdict.problem


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64])
def test_sums_of_sums_stay_finite_and_are_checked(ranks: int, dtype: Precision) -> None:
    """As many in one buffer as may be; one sum too many or too few, and one rank's part missing, are seen."""
    everyone = [Inputs("allreduce", rank, ranks, 50, dtype) for rank in range(ranks)]
    chain = everyone[0].longest_chain
    assert chain is not None
    buffers = [inputs.source() for inputs in everyone]
    for done in range(1, chain + 1):
        before = buffers
        total = torch.zeros(50, dtype=DTYPES[dtype])
        for buffer in before:
            total += buffer
        assert bool(torch.isfinite(total).all())
        assert not check(everyone[0], total, done).problem
        assert check(everyone[0], total, done + 1).problem
        if ranks < 16:
            assert check(everyone[0], total - before[-1], done).problem
        buffers = [total] * ranks


# Samples


@given(
    starts=st.lists(st.integers(0, 10**6), min_size=2, max_size=5),
    operations=st.integers(1, 1000),
    each=st.integers(1, 10**6),
)
def test_an_early_rank_does_not_lengthen_the_time_on_one_clock(starts: list[int], operations: int, each: int) -> None:
    """Ranks end together, `operations` after the last of them began: what they waited for each other is no part."""
    end = max(starts) + operations * each
    durations = [end - start for start in starts]
    sample = over_ranks(starts, durations, operations, from_last_start=True, one_clock=True)
    assert sample.seconds == pytest.approx(each / 1e9)
    assert sample.skew_s == pytest.approx((max(starts) - min(starts)) / 1e9)
    # Clocks that have nothing to do with each other: the slowest rank's own time, and the same skew.
    apart = [start + 10**12 * number for number, start in enumerate(starts)]
    sample = over_ranks(apart, durations, operations, from_last_start=True, one_clock=False)
    assert sample.seconds == pytest.approx(max(durations) / operations / 1e9)
    assert sample.skew_s == pytest.approx((max(starts) - min(starts)) / 1e9)


@given(seconds=st.floats(1e-7, 1.0), first=st.floats(0, 1e-3), most=st.integers(1, 1000))
def test_samples_are_long_enough_with_as_few_operations_as_may_be(seconds: float, first: float, most: int) -> None:
    """Trials of an operation that takes `seconds`, with `first` more for what ranks wait before the first one."""
    operations = 1
    for _ in range(10):
        wanted = enough_operations(first + seconds * operations, operations, most)
        if wanted == operations:
            break
        operations = wanted
    else:
        pytest.fail("the trials do not end")
    assert 1 <= operations <= most
    assert operations == most or first + seconds * operations >= LEAST_SAMPLE_S
    assert operations == 1 or operations * seconds <= 2 * LEAST_SAMPLE_S + 2 * seconds


# Whole runs


@pytest.mark.slow
def test_a_run_measures_checks_and_counts_every_point(over_gloo: dict[str, Ended]) -> None:
    ended = over_gloo["run"].check()
    record = ended.record
    assert (record.state, record.device, len(record.hosts)) == ("valid", "cpu", 4)
    who = (("ring", "torch-gloo"), ("direct", "torch-gloo"), ("library", "torch-gloo"))
    points = [(p.num_bytes, p.algorithm, p.carrier) for p in record.points]
    assert points == [(size, *one) for size in (4, 96, 400_004) for one in who]
    for point in record.points:
        assert (point.correct, point.max_error, point.problem) == (True, 0, "")
        assert len(point.times_s) == len(point.skew_s) == 3
        assert min(point.times_s) > 0
        if point.algorithm == "library":
            assert (point.steps, point.messages, point.bytes_sent, point.bytes_across) == (None, (), (), ())
            continue
        wanted = counts("allreduce", point.algorithm, Layout(ranks=4, group_size=1), point.num_bytes // 4, 4)
        assert point.steps == wanted[0].steps
        assert point.messages == tuple(rank.messages for rank in wanted)
        assert point.bytes_sent == point.bytes_across == tuple(rank.bytes_sent for rank in wanted)
    assert record.started < record.finished
    assert record.not_measured == ("nccl: needs buffers on a GPU, and they are on the CPU here",)
    assert ended.json("progress.json")["points"] == [
        [0, 9, "allreduce of 4 B"],
        [3, 9, "allreduce of 96 B"],
        [6, 9, "allreduce of 390.6 KiB"],
    ]


@pytest.mark.slow
def test_pairs_beside_congestors(over_gloo: dict[str, Ended]) -> None:
    """A pair and its congestors, and nobody waits for ever."""
    record = over_gloo["pairs"].check().record
    assert [(point.pair, point.correct, point.problem) for point in record.points] == [((0, 2), True, "")] * 4
    for point in record.points:
        assert 1 <= len(point.times_s) <= 10
        assert min(point.times_s) > 0
        assert point.operations == (1 if point.algorithm == "ping-pong" else 64)
    # In turns: alone, and beside a congestor that did send.
    assert [len(point.congestors) for point in record.points] == [0, 1] * 2
    assert all(rate > 0 for point in record.points for rate in point.congestors)


@pytest.mark.slow
def test_every_collective_beside_gloo_and_mpi(over_mpi: dict[str, Ended]) -> None:
    for collective in COLLECTIVES:
        if collective == "allreduce":
            continue
        record = over_mpi[collective].check().record
        assert (record.state, record.not_measured) == ("valid", ())
        assert {p.carrier for p in record.points} == {"torch-gloo", "mpi"}
        for point in record.points:
            if point.problem:
                assert collective in ("all-gather", "scatter", "gather")
                assert (point.carrier, point.times_s, point.correct) == ("torch-gloo", (), None)
                assert "3 ranks do not divide" in point.problem
            else:
                assert (point.correct, len(point.times_s)) == (True, 2)


@pytest.mark.slow
def test_mpi_sums_no_half_precision_and_says_so(over_mpi: dict[str, Ended]) -> None:
    record = over_mpi["halves"].check().record
    assert record.not_measured == ("allreduce of fp16 by mpi: MPI has no 16-bit floating type to sum",)
    (point,) = record.points
    assert (point.algorithm, point.carrier, point.correct) == ("ring", "mpi", True)


@pytest.mark.slow
def test_a_rank_that_starts_late_makes_no_operation_longer_and_is_told(tmp_path: Path) -> None:
    late_s = 0.2
    plan = plan_for(2, backends=("gloo",), sizes=(1024,))
    for point in start(tmp_path, plan, "start_late", rank=1, seconds=late_s).check().record.points:
        assert min(point.times_s) < late_s / 2
        # gloo's own barrier, right before the timer, has the early rank wait.
        assert min(point.skew_s) < late_s / 2


@pytest.mark.slow
def test_short_operations_are_timed_several_at_once(tmp_path: Path) -> None:
    plan = plan_for(1, algorithms=("ring",), backends=("gloo",), sizes=(1024,))
    for attempt in range(3):
        points = start(tmp_path, plan).check().record.points
        if attempt == 2 or all(point.operations > 1 for point in points):
            break  # where the rank's core was taken from it in every trial, an operation was no short one
    # One rank exchanges nothing.
    assert [(point.correct, point.messages) for point in points] == [(True, (0,)), (True, ())]
    assert all(point.operations > 1 for point in points)


# Runs that go wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "what"), [(3, "allreduce library-in-place (mpi) of 4 KiB, trial"), (0, "end of the run")]
)
def test_a_library_that_waits_for_ever_is_ended_with_a_reason(tmp_path: Path, call: int, what: str) -> None:
    """MPI's blocking calls know no deadline, its last one neither, and mpirun does not see a rank that stands still."""
    needs_mpi()
    plan = plan_for(2, "mpirun", backends=("mpi",), timeout_s=5.0)
    ended = start(tmp_path, plan, "stand_still", rank=1, call=call)
    assert ended.codes[0] == 124, ended.errors
    reason = f"rank 0, {what}: not done within 5 s; another rank is gone or stuck"
    assert f"dlbench: error: {reason}" in ended.errors[0]
    assert f"on_stuck: {reason}" in ended.errors[0]


# What is missing


def place(size: int = 2) -> RankPlace:
    return rank_place(0, size, host="here", token=TOKEN)


def test_mpi_needs_its_launcher() -> None:
    with pytest.raises(EnvironmentLacksError, match="needs launcher mpirun or srun-mpi, this run was started by local"):
        start_mpi(place(), "local")


@pytest.mark.slow
def test_other_threads_go_on_while_mpi_waits_for_its_ranks(tmp_path: Path) -> None:
    """A thread of rank 0 answers the others until they come; rank 1 waits for its word here before it starts MPI."""
    needs_mpi()
    for name in ("asked", "answered"):
        os.mkfifo(tmp_path / name)
    code = (
        "import os, sys, threading, time\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from dlbench.node.comm.transport import start_mpi, stop_mpi\n"
        "from tests.real.test_collectives import place\n"
        "asked, answered = Path('asked'), Path('answered')\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "def answer():\n    asked.read_text()\n    answered.write_text('a')\n"
        "if rank:\n    time.sleep(1)\n    asked.write_text('q')\n    answered.read_text()\n"
        "else:\n    threading.Thread(target=answer).start()\n"
        "mpi = start_mpi(replace(place(2), rank=rank), 'mpirun')\n"
        "assert mpi.COMM_WORLD.Get_errhandler() == mpi.ERRORS_RETURN\n"
        "stop_mpi(mpi)\n"
    )
    done = subprocess.run(
        ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, "-c", code],
        env={**os.environ, **AS_ROOT, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, timeout=LIMIT_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_of_nothing_that_can_be_had_is_an_error(tmp_path: Path) -> None:
    ended = start(tmp_path, plan_for(2, backends=("nccl",)))
    assert ended.codes == [5, 5], ended.errors
    assert "nothing in the plan can be measured here: nccl: " in ended.errors[0]
