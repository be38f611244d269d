"""The sampler of a node (it never fails a run nor outlives it), and what others computed on the cores of the ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.machine.sources import Field
from dlbench.node.ranks import RankPlace
from dlbench.node.watching.agent import (
    COMMAND,
    CoreLoad,
    SamplerProcess,
    node_loads,
    order_for,
    sample_bytes,
    span_bytes,
    window_ranks,
)
from dlbench.node.watching.sampler import PARTS, SLOW_EVERY, SamplerOrder, Sampling
from dlbench.records.folder import RunFolder, create
from dlbench.records.record import RankResult
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.watch import NodeWatch
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WatchSpec
from tests.support.run_factory import plans
from tests.support.training_data import rank_place

SECOND = 1_000_000_000
WAIT_S = 60.0


def plan_of(*, nodes: int = 1, ranks: int = 1, pin: bool = True, **watch: Any) -> RunPlan:
    (plan,) = plans(points=(1,), repeats=1)
    launch = plan.system.launch.model_copy(update={"pin": pin})
    return plan.model_copy(
        update={
            "watch": WatchSpec(**watch),
            "layout": plan.layout.model_copy(update={"nodes": nodes, "ranks": ranks}),
            "system": plan.system.model_copy(update={"launch": launch}),
        }
    )


def place_of(plan: RunPlan, node: int = 0) -> RankPlace:
    """Local rank 0 of a node."""
    local = plan.layout.ranks_per_node
    return rank_place(node * local, plan.layout.ranks, local, token="a-start")


def order_of(folder: Path, **changes: Any) -> SamplerOrder:
    """What a sampler is told; the only one of a run unless said otherwise."""
    told: dict[str, Any] = {
        "run_id": "r",
        "samples": str(folder / "node-0000.samples"),
        "clock": str(folder / "clock.json"),
        "node_rank": 0,
        "num_nodes": 1,
        "host": "n0",
        "token": "t",
        "period_s": 0.1,
        "max_bytes": 1_000_000,
        "cores": (),
        "interface": None,
    }
    return SamplerOrder(**{**told, **changes})


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def rows_of(path: Path) -> tuple[list[Any], SamplesReader]:
    reader = SamplesReader(path=path)
    return [row for block in reader.blocks() for row in block], reader


# Shares


WATCHED = st.builds(
    plan_of,
    nodes=st.integers(1, 40),
    ranks=st.integers(1, 30).map(lambda each: each * 2520 * 4),
    window_ranks=st.integers(1, 300),
    window_steps=st.integers(0, 3),
    max_bytes=st.integers(1, 10**9),
).filter(lambda plan: plan.layout.ranks % plan.layout.nodes == 0)


@given(WATCHED)
def test_all_shares_together_stay_within_the_limit(plan: RunPlan) -> None:
    assert plan.watch is not None
    window = set(window_ranks(plan))
    outside = next((rank for rank in range(plan.layout.ranks) if rank not in window), None)
    spans = sum(span_bytes(plan, rank) for rank in window)
    if outside is not None:
        spans += (plan.layout.ranks - len(window)) * span_bytes(plan, outside)
    assert spans <= plan.watch.max_bytes * 2 / 3
    assert sample_bytes(plan) * plan.layout.nodes <= plan.watch.max_bytes / 3


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 200))
def test_the_window_is_spread_evenly(nodes: int, each: int, wanted: int) -> None:
    plan = plan_of(nodes=nodes, ranks=nodes * each, window_ranks=wanted)
    found = window_ranks(plan)
    assert len(found) == min(wanted, plan.layout.ranks)
    assert found[0] == 0
    assert list(found) == sorted(set(found))
    for part in range(1, len(found) + 1):
        share = part * plan.layout.ranks // len(found)
        assert sum(rank < share for rank in found) == part


def test_without_a_window_or_without_watching() -> None:
    assert window_ranks(plan_of(ranks=4, window_steps=0)) == ()
    unwatched = plan_of().model_copy(update={"watch": None})
    assert (window_ranks(unwatched), sample_bytes(unwatched), span_bytes(unwatched, 0)) == ((), 0, 0)


# What it is told


def test_it_takes_the_cores_that_no_rank_uses() -> None:
    plan = plan_of(ranks=2)
    assert plan.layout.cores_per_rank == 1
    folder = RunFolder(Path("r"))
    assert order_for(plan, folder, place_of(plan), [4, 0, 5, 1]).cores == (5, 1)
    assert order_for(plan, folder, place_of(plan), [4, 0]).cores == (4, 0)
    unpinned = plan_of(ranks=2, pin=False)
    assert order_for(unpinned, folder, place_of(unpinned), [4, 0, 5, 1]).cores == (4, 0, 5, 1)
    with pytest.raises(ValueError, match="no sampler"):
        order_for(plan_of(sampler=False), folder, place_of(plan), [0])


# Sampling


class MadeSource:
    """A source that tells what it is asked, and lets the time of a made clock pass."""

    fields = (Field(name="gpu.0.power_w"), Field(name="gpu.0.energy_j", kind="<f8", is_slow=True))

    def __init__(self, clock: MadeClock, durations: Iterator[int] | None = None) -> None:
        self.unavailable = {"gpu.0.temperature_c": "not supported"}
        self._clock = clock
        self._durations = durations
        self.reads: list[tuple[int, bool]] = []
        self.kept_up: list[int] = []
        self.failures: list[tuple[str, str]] = []
        self.is_closed = False

    def read(self, *, slow: bool) -> list[float]:
        self.reads.append((self._clock.now, slow))
        self._clock.now += next(self._durations, 0) if self._durations is not None else 0
        # Numbers that do not deflate, as measured ones.
        noise = hash((len(self.reads), "w")) % 10**9 / 1e6
        return [noise, noise * 1e5 if slow else float("nan")]

    keep_up_s = math.inf

    def keep_up(self) -> None:
        self.kept_up.append(self._clock.now)

    def drain_failures(self) -> list[tuple[str, str]]:
        found, self.failures = self.failures, []
        return found

    def describe(self) -> dict[str, str]:
        return {"gpu.0.name": "made"}

    def close(self) -> None:
        self.is_closed = True


class MadeClock:
    def __init__(self) -> None:
        self.now = 17 * SECOND

    def __call__(self) -> int:
        return self.now


def follow(sampling: Sampling, clock: MadeClock, samples: int) -> None:
    """Takes samples as the process does: each when it is due."""
    for _ in range(samples):
        clock.now = max(clock.now, sampling.due_ns)
        sampling.take_due()


@given(st.lists(st.integers(0, 5 * SECOND), min_size=1, max_size=60))
def test_samples_keep_their_times_and_say_how_late_they_are(
    tmp_path_factory: pytest.TempPathFactory, durations: list[int]
) -> None:
    """Oracle: walk all due times one by one."""
    folder = tmp_path_factory.mktemp("samples")
    clock = MadeClock()
    source = MadeSource(clock, iter(durations))
    start = clock.now
    with closing(Sampling(order_of(folder, period_s=1.0), source, clock)) as sampling:
        follow(sampling, clock, len(durations))
        sampling.flush()
        account = sampling.summary()

    now, number, expected, skipped = start, 0, [], 0
    for duration in durations:
        while start + (number + 1) * SECOND <= now:
            number += 1
            skipped += 1
        due = start + number * SECOND
        begin = max(now, due)
        expected.append((begin, begin - due))
        now, number = begin + duration, number + 1
    rows, _ = rows_of(folder / "node-0000.samples")
    assert [(int(row["time_ns"]), int(row["late_ns"])) for row in rows] == expected
    assert account["num_samples"] == len(durations)
    assert account["dropped_samples"] == 0
    assert account["late_max_s"] == max(late for _, late in expected) / 1e9
    assert any(f"{skipped} samples were skipped" in text for text in sampling.failures) == (skipped > 0)


def test_slow_sources_are_read_every_tenth_time_and_out_of_turn(tmp_path: Path) -> None:
    clock = MadeClock()
    source = MadeSource(clock)
    with closing(Sampling(order_of(tmp_path), source, clock)) as sampling:
        follow(sampling, clock, 14)
        sampling.take_now()
        follow(sampling, clock, SLOW_EVERY)
    assert [slow for _, slow in source.reads] == [True, *[False] * 9, True, *[False] * 3, True, *[False] * 9, True]
    assert source.is_closed
    rows, reader = rows_of(tmp_path / "node-0000.samples")
    assert [bool(row["gpu.0.energy_j"] == row["gpu.0.energy_j"]) for row in rows] == [s for _, s in source.reads]
    assert reader.header["facts"] == {"gpu.0.name": "made"}
    assert reader.header["unavailable"] == {"gpu.0.temperature_c": "not supported"}
    assert (reader.header["period_s"], reader.header["node_rank"], reader.header["host"]) == (0.1, 0, "n0")


@given(st.integers(600, 20_000), st.integers(1, 50_000))
def test_the_file_stays_within_its_share_and_reaches_far(
    tmp_path_factory: pytest.TempPathFactory, max_bytes: int, duration_s: int
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    path = folder / "node-0000.samples"
    clock = MadeClock()
    begin, asked = clock.now, 3
    with closing(Sampling(order_of(folder, max_bytes=max_bytes, period_s=1.0), MadeSource(clock), clock)) as sampling:
        while sampling.due_ns <= begin + duration_s * SECOND:
            follow(sampling, clock, 1)
            asked += 1
        sampling.take_now()
        sampling.take_now()
        sampling.take_now(is_last=True)
        sampling.flush()
        account = sampling.summary()
    rows, _ = rows_of(path)
    header = len(path.read_bytes().split(b"\n", 1)[0]) + 1
    size = path.stat().st_size
    assert size <= max(max_bytes, header)
    assert len(rows) == account["num_samples"]
    assert account["num_samples"] + account["dropped_samples"] == asked
    period = round(account["period_s"])
    assert period & (period - 1) == 0
    times = [int(row["time_ns"]) for row in rows]
    if max_bytes > header + 500:
        assert times[-3:] == [clock.now] * 3, "room is kept for the edges and the end"
        assert set(times) <= {begin + number * SECOND for number in range(duration_s + 1)}
        assert period == 1 or size - header > (max_bytes - header) / PARTS - 500, "a tenth at the first period"
        gaps = {later - earlier for earlier, later in pairwise(times[:-3])} - {0}
        assert max(gaps, default=SECOND) // SECOND <= 2 * period, "it tells a period at which it read"


def test_a_source_is_looked_at_between_samples_that_are_far_apart(tmp_path: Path) -> None:
    clock = MadeClock()
    source = MadeSource(clock)
    source.keep_up_s = 60.0
    begin = clock.now
    with closing(Sampling(order_of(tmp_path, period_s=150.0), source, clock)) as sampling:
        follow(sampling, clock, 7)
    assert [(now - begin) // SECOND for now, _ in source.reads] == [0, 150, 300]
    assert [(now - begin) // SECOND for now in source.kept_up] == [60, 120, 210, 270]
    rows, _ = rows_of(tmp_path / "node-0000.samples")
    assert len(rows) == 3


def test_a_field_that_fails_is_noted_where_it_failed(tmp_path: Path) -> None:
    clock = MadeClock()
    source = MadeSource(clock)
    with closing(Sampling(order_of(tmp_path), source, clock)) as sampling:
        follow(sampling, clock, 3)
        source.failures = [("gpu.0.power_w", "GPU is lost")]
        follow(sampling, clock, 2)
        sampling.end({"num_samples": 5})
    rows, reader = rows_of(tmp_path / "node-0000.samples")
    assert len(rows) == 5
    assert reader.failures == [
        {"failed": "gpu.0.power_w", "reason": "GPU is lost", "time_ns": 17 * SECOND + 3 * SECOND // 10}
    ]
    assert reader.end == {"num_samples": 5}
    assert sampling.failures == ["gpu.0.power_w: GPU is lost"]


# The process


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def started() -> Iterator[Callable[..., SamplerProcess]]:
    running: list[SamplerProcess] = []

    def start(order: SamplerOrder, command: Sequence[str] = COMMAND) -> SamplerProcess:
        running.append(SamplerProcess(order, command))
        running[-1].start()
        return running[-1]

    yield start
    for sampler in running:
        sampler.stop()


Start = Callable[..., SamplerProcess]


def account_of(sampler: SamplerProcess) -> NodeWatch:
    found = sampler.finish()
    assert found is not None, sampler.problem
    return found


def failures_of(watch: NodeWatch) -> tuple[str, ...]:
    """What failed; without the samples that were skipped because the machine was busy."""
    return tuple(text for text in watch.failures if "samples were skipped" not in text)


def test_one_node_is_sampled_from_start_to_end(tmp_path: Path) -> None:
    plan = plan_of(period_s=0.1)
    folder = create(tmp_path, plan)
    cores = sorted(os.sched_getaffinity(0))
    sampler = SamplerProcess(order_for(plan, folder, place_of(plan), cores))
    sampler.start()
    try:
        path = folder.samples(0)
        wait_until(path.exists)
        sampler.measuring(True)
        time.sleep(0.5)
        sampler.measuring(False)
        pid = sampler.pid
        assert pid is not None
        watch = account_of(sampler)
        assert os.sched_getaffinity(pid) == set(cores[1:] or cores)
        assert sampler.pid == pid, "it lives until it is stopped"
    finally:
        sampler.stop()
    assert sampler.pid is None
    assert is_gone(pid)
    sampler.stop()
    assert sampler.problem == ""

    rows, reader = rows_of(path)
    assert reader.end is not None
    assert NodeWatch.model_validate(reader.end) == watch
    assert watch.num_samples == len(rows) >= 4
    assert watch.sources == tuple(reader.columns)
    assert any(name.startswith("host.cpu.") for name in watch.sources)
    assert watch.unavailable == reader.header["unavailable"]
    assert failures_of(watch) == ()
    assert watch.measured_cpu_s is not None
    assert 0 <= watch.measured_cpu_s <= watch.cpu_s
    assert watch.wall_s >= 0.5
    assert (watch.clock.points, watch.clock.problem, watch.clock.bound_at(0)) == ((), "", 0)
    assert abs(watch.clock.wall_offset_ns - (time.time_ns() - time.monotonic_ns())) < SECOND
    assert not folder.clock.exists(), "one node has nothing to compare its clock with"
    times = [int(row["time_ns"]) for row in rows]
    assert times == sorted(times)
    assert all(int(row["late_ns"]) >= 0 for row in rows)


def test_it_is_light(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from dlbench.node.watching import sampler\n"
        "code = sampler.main()\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'scipy', 'horovod', 'pydantic'} & set(sys.modules)\n"
        "assert code == 0, code\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=order_of(tmp_path).to_line() + b'{"measuring": true}\n{"finish": true}\n{"stop": true}\n',
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert NodeWatch.model_validate_json(done.stdout).num_samples >= 3


RANK = """
import os, sys, time
from dataclasses import replace
from dlbench.node.watching.agent import SamplerProcess
from dlbench.node.watching.sampler import SamplerOrder
order = SamplerOrder.from_line(sys.argv[1].encode())
sampler = SamplerProcess(replace(order, parent=os.getpid()))
sampler.start()
forked = os.fork() if {forks} else -1
if forked == 0:
    os.close(1)
    time.sleep(3600)
print(sampler.pid, forked, flush=True)
{end}
"""


PAUSES_S = (0.3, 2.0, 10.0)
"""How long a sampler is given for its first samples: no block of them is full then, and more where it had no core."""


def rank_killed_beside(order: SamplerOrder, forks: bool, pause_s: float) -> None:
    """Starts a rank that kills itself so long after its sampler has a file, and waits for the sampler's end."""
    end = "while not os.path.exists(order.samples):\n    time.sleep(0.01)\n"
    end += f"time.sleep({pause_s})\nos.kill(os.getpid(), 9)"
    code = RANK.format(forks=forks, end=end)
    rank = subprocess.Popen([sys.executable, "-c", code, order.to_line().decode()], stdout=subprocess.PIPE)
    forked = -1
    try:
        assert rank.stdout is not None
        pid, forked = map(int, rank.stdout.readline().split())
        assert rank.wait(WAIT_S) == -9
        wait_until(lambda: is_gone(pid))
    finally:
        rank.kill()
        rank.communicate()
        if forked > 0:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_rank_leaves_the_rows_that_were_held(tmp_path: Path, forks: bool) -> None:
    """Fewer than a block holds; the kernel tells the sampler by SIGTERM where a forked process holds its input open."""
    for pause_s in PAUSES_S:
        order = order_of(tmp_path, period_s=0.05, samples=str(tmp_path / f"{pause_s}.samples"))
        rank_killed_beside(order, forks, pause_s)
        rows, reader = rows_of(Path(order.samples))
        if rows:
            break
    assert rows
    assert (reader.end, reader.torn_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nonexistent/python"], "could not be started: No such file or directory"),
        ([sys.executable, "-c", "import sys; sys.exit(7)"], "ended with exit code 7 before its summary"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "ended by signal 9 before its summary"),
        ([sys.executable, "-c", "print('{}', flush=True); input(); input(); input()"], "unreadable summary"),
        ([sys.executable, "-c", "import time; time.sleep(3600)"], "sent no summary within 0.5 s and was killed"),
    ],
)
def test_a_sampler_that_fails_is_a_problem_and_no_error(
    tmp_path: Path, started: Start, command: list[str], why: str
) -> None:
    sampler = started(order_of(tmp_path), command)
    sampler.measuring(True)
    assert sampler.finish(0.5 if "sleep" in command[-1] else WAIT_S) is None
    assert sampler.problem.startswith("sampler of n0: ")
    assert why in sampler.problem
    sampler.measuring(False)
    assert sampler.finish() is None
    sampler.stop()
    assert sampler.pid is None


def test_a_source_that_breaks_ends_sampling_and_nothing_else(tmp_path: Path, started: Start) -> None:
    broken = (
        "from dlbench.node.watching import sampler\n"
        "real = sampler.open_sources\n"
        "def open_sources():\n    {how}\n"
        "sampler.open_sources = open_sources\n"
        "sampler.main()\n"
    )
    never = broken.format(how="raise RuntimeError('driver/library version mismatch')")
    watch = account_of(started(order_of(tmp_path), [sys.executable, "-c", never]))
    assert failures_of(watch) == ("sampling ended: RuntimeError: driver/library version mismatch",)
    assert (watch.num_samples, watch.sources) == (0, ())


def test_a_disk_that_is_full_ends_sampling_with_a_reason(tmp_path: Path, started: Start) -> None:
    """RLIMIT_FSIZE: writing beyond it fails as a full disk does, with another number."""
    order = order_of(tmp_path, period_s=0.02)
    limited = (
        "import resource\n"
        "from dlbench.node.watching import sampler\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "sampler.main()\n"
    )
    sampler = started(order, [sys.executable, "-c", limited])
    wait_until(lambda: Path(order.samples).exists() and Path(order.samples).stat().st_size == 6000)
    watch = account_of(sampler)
    (failure,) = failures_of(watch)
    assert failure.startswith("sampling ended: ")
    assert "File too large" in failure
    rows_of(Path(order.samples))  # a torn tail is legal

    taken = started(order_of(tmp_path))
    watch = account_of(taken)
    (failure,) = failures_of(watch)
    assert "already contains rows" in failure


BUSY = "import time\nend = time.monotonic() + 40\nwhile time.monotonic() < end: pass"

MEASURED_CORES = """
import json, os, subprocess, sys, time
from dlbench.node.watching.agent import CoreLoad
load = CoreLoad(sees_node=True)
def ticks(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11])
load.measuring(True)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]]) if not sys.argv[1].isdigit() else None
pid = child.pid if child else int(sys.argv[1])
began, first = time.monotonic(), ticks(pid)
while ticks(pid) - first < 0.3 * os.sysconf("SC_CLK_TCK") and time.monotonic() - began < 30:
    time.sleep(0.05)
load.measuring(False)
if child:
    child.kill()
print(json.dumps(load.summary()))
"""
"""Measures until the busy loop has computed for 0.3 s, however busy this machine is."""


def rank_result(rank: int, cores: tuple[int, ...]) -> RankResult:
    return RankResult.model_construct(rank=rank, node_rank=0, host="n0", cores=cores)


def proc(folder: Path, cores: dict[int, tuple[int, int]], pressure_us: int | None) -> None:
    """Busy and stolen ticks of each core."""
    lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
    lines += [f"cpu{core} {busy - 3} 1 2 400 50 60 70 {steal} 9 9" for core, (busy, steal) in cores.items()]
    (folder / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (folder / "proc/stat").write_text("\n".join([*lines, "intr 0"]))
    if pressure_us is not None:
        text = f"some avg10=1.00 avg60=2.00 avg300=3.00 total={pressure_us}\nfull avg10=0.00 total=0\n"
        (folder / "proc/pressure/cpu").write_text(text)


@pytest.mark.parametrize("beside", [True, False])
def test_a_busy_loop_beside_is_others_time_and_one_of_its_own_is_not(beside: bool) -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, [{core}])\n"
    loop = subprocess.Popen([sys.executable, "-c", pinned + BUSY]) if beside else None
    try:
        words = [sys.executable, "-c", pinned + MEASURED_CORES, str(loop.pid) if loop else pinned + BUSY]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    finally:
        if loop is not None:
            loop.kill()
            loop.wait()
    told = json.loads(done.stdout)
    (load,) = node_loads([told], [rank_result(0, (core,))], [0])
    assert load.problem == ""
    assert load.others_s is not None
    if beside:
        assert load.others_s > 0.2
        assert load.own_s < 0.2
    else:  # whatever else this machine does
        assert load.own_s > 0.2
        assert load.busy_s is not None
        # Two clocks: what a rank used may be counted a tick ahead of what its core was busy.
        assert load.others_s <= max(0.0, load.busy_s - load.own_s) + 1e-9


def test_windows_add_up_and_only_the_ranks_cores_count(tmp_path: Path) -> None:
    first, second = CoreLoad(sees_node=True, root=tmp_path), CoreLoad(sees_node=False, root=tmp_path)
    for busy, steal, pressure in ((100, 0, 0), (150, 3, 200_000), (400, 50, 900_000), (420, 51, 950_000)):
        proc(tmp_path, {0: (busy, steal), 1: (busy, 0), 2: (10 * busy, 0)}, pressure)
        is_edge = busy in (100, 400)
        for load in (first, second):
            load.measuring(is_edge)
    told = [first.summary(), second.summary()]
    told[0] |= {"own_s": 0.5}
    told[1] |= {"own_s": 0.25}
    (load,) = node_loads(told, [rank_result(0, (0,)), rank_result(1, (1,))], [0, 0])
    assert load.cores == (0, 1)
    assert load.busy_s == pytest.approx(1.4)  # 50 and 20 ticks on two cores; the pause between is left out
    assert load.others_s == pytest.approx(0.65)
    assert load.steal_s == pytest.approx(0.04)
    assert load.pressure_s == pytest.approx(0.25)


def test_what_the_kernel_does_not_count_is_not_measured(tmp_path: Path) -> None:
    proc(tmp_path, {0: (100, 0)}, None)
    load = CoreLoad(sees_node=True, root=tmp_path)
    load.measuring(True)
    load.measuring(False)
    (seen,) = node_loads([load.summary()], [rank_result(0, (0,))], [0])
    assert (seen.pressure_s, seen.steal_s) == (None, 0.0)
    nothing = CoreLoad(sees_node=True, root=tmp_path / "none")
    nothing.measuring(True)
    nothing.measuring(False)
    (seen,) = node_loads([nothing.summary()], [rank_result(0, (0,))], [0])
    assert (seen.busy_s, seen.others_s, seen.steal_s) == (None, None, None)
    assert seen.problem.startswith("/proc/stat: ")
