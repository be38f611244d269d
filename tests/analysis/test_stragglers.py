"""Who waits for whom: against a plain reading of the definition, on nodes of known slowness, and behind slow links.

A host with a slow link, whose exchanges end late, is told apart from one that works slowly, as far as clocks are known.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.causes import CAUSES, Causes
from dlbench.analysis.measures import RunSteps, load_steps
from dlbench.analysis.slow_nodes import ACCUSED, HostSessions, SlowNodes, ranking, slow_nodes, verdicts_of
from dlbench.analysis.stragglers import (
    WORK,
    WORK_PHASES,
    LateRank,
    Waiting,
    largest_by_host,
    num_slowest,
    saved_without_slowest,
    waiting,
)
from dlbench.analysis.table import tabulate
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import FaultSpec
from tests.support.run_factory import MS, Story, plans, write_run
from tests.support.watch_factory import clock_line, node_watch, watch_result

Row = Sequence[int]
"""Nanoseconds of each phase and of the rest of one step of one rank."""


def run_steps(rows: Sequence[Sequence[Row]]) -> RunSteps:
    table = np.array(rows, dtype=np.int64)
    phases = {name: table[:, :, i].copy() for i, name in enumerate(PHASES)}
    ends = table.sum(axis=(1, 2))
    return RunSteps(
        numbers=np.arange(table.shape[1]),
        begin_ns=np.zeros_like(ends),
        end_ns=ends,
        step_ns=table.sum(axis=2),
        phase_ns=phases,
        unbroken=table.shape[1],
    )


@dataclass
class Read:
    """The definition, read out for one run: exact numbers."""

    waited: int = 0
    credit: dict[int, Fraction] = field(default_factory=dict)
    """Waiting owed by each rank."""
    late: dict[int, list[Fraction]] = field(default_factory=dict)
    """Own work charged to each rank, by `WORK`."""
    last: dict[int, int] = field(default_factory=dict)


def work_of(rows: Sequence[Sequence[Row]], rank: int, step: int) -> tuple[int, int, int]:
    now = rows[rank][step]
    before = rows[rank][step - 1] if step else [0] * 7
    return now[0] + now[1], now[2] + now[3] + before[5], before[6]


def by_definition(rows: Sequence[Sequence[Row]]) -> Read:
    """Step by step and rank by rank; the means of the ranks in time rounded down, nothing else."""
    read = Read()
    ranks = range(len(rows))
    for step in range(len(rows[0])):
        exchange = [rows[r][step][4] for r in ranks]
        wait = [x - min(exchange) for x in exchange]
        if max(wait) == 0:
            continue
        work = [work_of(rows, r, step) for r in ranks]
        in_time = [r for r in ranks if wait[r] >= Fraction(max(wait), 2)]
        whole = sum(wait[i] for i in in_time) // len(in_time)
        late_by = {r: whole - wait[r] for r in ranks if r not in in_time}
        read.waited += sum(wait)
        last = max((r for r in ranks if wait[r] == 0), key=lambda r: (sum(work[r]), -r))
        read.last[last] = read.last.get(last, 0) + 1
        for r, late in late_by.items():
            read.credit[r] = read.credit.get(r, Fraction(0)) + Fraction(sum(wait) * late, sum(late_by.values()))
            means = [sum(work[i][part] for i in in_time) // len(in_time) for part in range(3)]
            excess = [max(0, work[r][part] - means[part]) for part in range(3)]
            scale = min(Fraction(1), Fraction(late, max(1, sum(excess))))
            so_far = read.late.setdefault(r, [Fraction(0)] * 3)
            read.late[r] = [one + scale * more for one, more in zip(so_far, excess, strict=True)]
    return read


@st.composite
def some_rows(draw: st.DrawFn) -> list[list[list[int]]]:
    """Of all sizes, and of few nanoseconds, so that ranks often tie and means are no whole numbers."""
    ranks, steps = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, draw(st.sampled_from([3, 100, 2_000_000_000]))), min_size=7, max_size=7)
    return [[draw(row) for _ in range(steps)] for _ in range(ranks)]


@given(some_rows())
def test_waiting_is_what_the_definition_says(rows: list[list[list[int]]]) -> None:
    found, read = waiting(run_steps(rows)), by_definition(rows)
    steps = len(rows[0])
    assert found.waited_ns == read.waited
    assert sum(one.waited_ns for one in found.ranks) == read.waited
    assert {one.rank for one in found.ranks} == set(read.late)
    for one in found.ranks:
        # What is scaled down or shared out is rounded to whole nanoseconds once a step.
        assert one.late_ns == pytest.approx(
            dict(zip(WORK, map(float, read.late[one.rank]), strict=True)), rel=0, abs=1.01 * steps
        )
        assert one.waited_ns == pytest.approx(float(read.credit[one.rank]), rel=0, abs=1.01 * steps)
        assert one.steps_last == read.last.get(one.rank, 0)
        assert min(one.late_ns.values()) >= 0
    for name in WORK:
        assert sum(one.late_ns[name] for one in found.ranks) == found.moved_ns[name]
        own = [found.moved_phases_ns[phase] for phase in WORK_PHASES[name]]
        assert sum(own) == found.moved_ns[name]
        assert min(own) >= 0
    assert [one.waited_ns for one in found.ranks] == sorted((one.waited_ns for one in found.ranks), reverse=True)


@given(some_rows())
def test_nobody_is_charged_beyond_its_lateness(rows: list[list[list[int]]]) -> None:
    """One step: own work and waiting together are at most W of each rank."""
    one_step = [[steps[0]] for steps in rows]
    found = waiting(run_steps(one_step))
    wait = [steps[0][4] - min(other[0][4] for other in one_step) for steps in one_step]
    in_time = [w for w in wait if 2 * w >= max(wait)]
    assert found.total_ns <= len(rows) * sum(in_time) / len(in_time)


SHARES = [(2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 2), (8, 4), (8, 7), (16, 1), (16, 2), (16, 8), (16, 15)]
"""Ranks, and how many of them are late: one, two, half, all but one."""


@pytest.mark.parametrize(("ranks", "num_late"), SHARES)
def test_ranks_that_are_late_together_cost_what_one_costs(ranks: int, num_late: int) -> None:
    """100 ns late in their backward pass: the step is 100 ns longer, however many they are."""
    rows = [
        [[5, 0, 30, 50 + 100 * (r < num_late), 8 + 100 * (r >= num_late), 10, 5] for _ in range(3)]
        for r in range(ranks)
    ]
    found = waiting(run_steps(rows))
    assert found.total_ns == 3 * ranks * 100
    assert found.waited_ns == 3 * (ranks - num_late) * 100
    assert found.moved_ns == {"input": 0, "compute": 3 * num_late * 100, "host": 0}
    assert found.moved_phases_ns["backward"] == 3 * num_late * 100
    assert sorted(one.rank for one in found.ranks) == list(range(num_late))
    assert {one.late_ns["compute"] for one in found.ranks} == {300}
    assert sum(one.waited_ns for one in found.ranks) == found.waited_ns
    even = found.waited_ns / num_late
    # Shared out step by step in whole nanoseconds.
    assert all(abs(one.waited_ns - even) <= 3 for one in found.ranks)
    assert sum(one.steps_last for one in found.ranks) == 3


def test_lateness_of_seconds_does_not_overflow() -> None:
    """Two excesses of 40 s of which half shows as waiting: their product does not fit into 64 bits."""
    second = 1_000_000_000
    late = [40 * second, 0, 40 * second, 0, 0, 0, 0]
    other = [0, 0, 0, 0, 40 * second, 0, 0]
    found = waiting(run_steps([[late], [other]]))
    assert found.waited_ns == 40 * second
    assert found.moved_ns == {"input": 20 * second, "compute": 20 * second, "host": 0}
    assert found.moved_phases_ns["forward"] == 20 * second


def test_what_holds_a_rank_up_after_an_exchange_makes_it_late_for_the_next() -> None:
    """Rank 0 is held up once, behind the first step; the others wait in the second."""
    rows = [
        [[0, 0, 30, 50, 10, 5, 40], [0, 0, 30, 50, 10, 5, 0]],
        [[0, 0, 30, 50, 10, 5, 0], [0, 0, 30, 50, 50, 5, 0]],
        [[0, 0, 30, 50, 10, 5, 0], [0, 0, 30, 50, 50, 5, 0]],
    ]
    found = waiting(run_steps(rows))
    assert found.waited_ns == 80
    assert found.moved_ns == {"input": 0, "compute": 0, "host": 40}
    assert found.ranks == (
        LateRank(rank=0, steps_last=1, waited_ns=80, late_ns={"input": 0, "compute": 0, "host": 40}),
    )


@given(st.integers(2, 45).flatmap(lambda ranks: st.lists(st.lists(st.integers(0, 99), min_size=ranks, max_size=ranks))))
def test_steps_without_their_slowest_ranks_are_exact(work_of_steps: list[list[int]]) -> None:
    saved = 0
    for work in work_of_steps:
        waited_for = sorted(work)[: -max(1, int(0.05 * len(work) + 1e-9))]
        assert len(work) - len(waited_for) == num_slowest(len(work))
        saved += max(work) - max(waited_for)
    if work_of_steps:
        assert saved_without_slowest(np.array(work_of_steps, dtype=np.int64).T) == saved


def waited(found: Waiting, hosts: tuple[str, ...], steps: int) -> Causes:
    """A run of which only the waiting is known."""
    return Causes(
        ranks=len(hosts),
        steps=steps,
        sums_ns=dict.fromkeys(CAUSES, 0),
        compute_ns={},
        taken_ns={},
        input_ns={},
        not_measured={},
        evidence={},
        waiting=found,
        work_ns=(0,) * len(hosts),
        hosts=hosts,
    )


def test_ranking_over_runs_tells_hosts_apart() -> None:
    def late(rank: int, waited_ns: int) -> Waiting:
        one = LateRank(rank=rank, steps_last=1, waited_ns=waited_ns, late_ns={"input": 7, "compute": 1, "host": 0})
        return Waiting(waited_ns=waited_ns, ranks=(one,))

    runs = [
        waited(late(1, 600), ("a", "b"), 2),
        waited(late(1, 300), ("b", "a"), 2),
        waited(late(0, 100), ("b", "a"), 2),
    ]
    ranks, hosts = ranking(runs)
    assert [(one.rank, one.host, one.waited_share) for one in ranks] == [(1, "b", 0.6), (1, "a", 0.3), (0, "b", 0.1)]
    assert [(one.rank, one.host) for one in hosts] == [(None, "b"), (None, "a")]
    assert [one.waited_share for one in hosts] == pytest.approx([0.7, 0.3])
    assert ranks[0].waited_s == pytest.approx(600 / 2 / 6 / 1e9)
    assert ranks[0].last_share == pytest.approx(1 / 6)
    assert ranks[0].late_by == "input"


def test_a_host_owes_what_its_ranks_owe_and_is_as_late_as_they_are_on_average() -> None:
    rows = [[[5, 0, 30, 50 + 100 * (r < 2), 8 + 100 * (r >= 2), 10, 5]] for r in range(4)]
    ranks, hosts = ranking([waited(waiting(run_steps(rows)), ("a", "a", "b", "b"), 1)])
    assert [(one.rank, one.host, one.waited_share) for one in ranks] == [(0, "a", 0.5), (1, "a", 0.5)]
    (host,) = hosts
    assert (host.rank, host.host, host.waited_share, host.last_share) == (None, "a", 1.0, 1.0)
    assert host.waited_s == pytest.approx(50e-9)
    assert (host.input_s, host.compute_s, host.host_s) == (0.0, pytest.approx(100e-9), 0.0)


# Slow nodes


def write_history(
    out: Path,
    *,
    runs: int = 6,
    slow: dict[str, float] | None = None,
    noise: float = 0.01,
    hosts: Sequence[str] = ("n0", "n1", "n2", "n3"),
    fault: FaultSpec | None = None,
    jobs: bool = True,
) -> SlowNodes:
    """Runs of four ranks on two of the hosts, which change from run to run; each run as a whole drifts by half.

    Each is a job, or all are one session.
    """
    rng = random.Random(5)
    for plan in plans(points=(4,), repeats=runs):
        changed = plan.model_copy(update={"fault": fault})
        first = plan.series.repeat % len(hosts)
        pair = hosts[first], hosts[(first + 1) % len(hosts)]
        drift = 1 + 0.5 * rng.random()

        def times(
            rank: int, step: int, pair: tuple[str, str] = pair, drift: float = drift
        ) -> tuple[Sequence[int], int]:
            factor = drift * (slow or {}).get(pair[rank // 2], 1.0) * (1 + noise * rng.random())
            return [round(x * MS * factor) for x in (5, 0, 30, 50)] + [10 * MS, round(10 * MS * factor)], 0

        job = str(plan.series.repeat) if jobs else ""
        write_run(out, changed, times, Story(host=lambda rank, pair=pair: pair[rank // 2], job=job))
    return slow_nodes(tabulate(scan(out), with_causes=True))


def test_a_slow_host_is_found_wherever_its_ranks_are(tmp_path: Path) -> None:
    found = write_history(tmp_path, runs=12, slow={"n2": 1.1})
    assert found.exclude == ("n2",)
    assert found.hosts[0].host == "n2"
    assert found.hosts[0].verdict == "slow"
    assert found.hosts[0].ratio.value == pytest.approx(1.1, abs=0.02)
    assert found.hosts[0].ratio.n == found.hosts[0].num_runs == 6
    assert {one.verdict for one in found.hosts[1:]} == {"not shown to be slow"}
    assert (found.num_runs, found.num_sessions) == (12, 12)


def test_equal_hosts_are_not_accused(tmp_path: Path) -> None:
    found = write_history(tmp_path, runs=12, noise=0.1)
    assert found.exclude == ()
    assert {one.verdict for one in found.hosts} == {"not shown to be slow"}


def test_few_runs_make_a_suspect_at_most(tmp_path: Path) -> None:
    found = write_history(tmp_path, runs=6, slow={"n2": 1.1})
    assert found.exclude == ()
    assert (found.hosts[0].host, found.hosts[0].verdict, found.hosts[0].ratio.n) == ("n2", "suspected", 3)


def test_runs_of_one_job_are_one_look_at_its_hosts(tmp_path: Path) -> None:
    """A neighbour, or heat, slows a host for as long as the job lasts, however often it repeats its run."""
    found = write_history(tmp_path, runs=40, slow={"n2": 1.1}, jobs=False)
    assert (found.num_runs, found.num_sessions) == (40, 1)
    assert found.exclude == ()
    assert (found.hosts[0].host, found.hosts[0].verdict, found.hosts[0].ratio.n) == ("n2", "suspected", 1)
    assert found.hosts[0].num_runs == 20


def test_planted_faults_accuse_no_host(tmp_path: Path) -> None:
    found = write_history(tmp_path, runs=12, slow={"n2": 1.1}, fault=FaultSpec(ranks=(2,), compute_factor=1.1))
    assert (found.hosts, found.num_runs, found.num_faulty) == ((), 0, 12)


def test_names_that_are_no_words_for_an_option_are_left_out(tmp_path: Path) -> None:
    found = write_history(tmp_path, runs=12, slow={"n2;reboot": 1.2, "n0": 1.2}, hosts=("n0", "n1", "n2;reboot", "n3"))
    assert found.exclude == ("n0",)
    assert found.unsafe == ("n2;reboot",)


HOSTS = ("n0", "n1", "n2", "n3")
FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = 30 * MS, 50 * MS, 10 * MS, 10 * MS
SKEW = (0, 7_000_000_000, -3_000_000_000, 40_000_000_000)
"""How far each node's clock is ahead of node 0's, nanoseconds."""


def write_job(
    out: Path,
    plan: RunPlan,
    *,
    slow: Sequence[float] = (1.0,) * 4,
    late_ns: Sequence[int] = (0,) * 4,
    bound_ns: int = 20_000,
    pause: int | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """A rank on each of four nodes, stepping together: an exchange ends `EXCHANGE` after the last rank has come.

    Args:
        out: folder of runs.
        plan: of four ranks; its repeat names the job.
        slow: by how much longer the own work of each rank takes.
        late_ns: by how much later than the others each rank has what the exchange brings.
        bound_ns: error bound of the clocks of nodes 1 to 3.
        pause: step before which n3 pauses 50 ms longer than the others, which no step counts.
        record: further keys of the record.
    """
    noise = np.random.default_rng(plan.series.repeat)
    steps = plan.measure.warmup_steps + plan.measure.measured_steps
    starts = np.full(4, 10**9)
    begin = starts.copy()
    table = np.zeros((4, steps, 6), dtype=np.int64)
    for step in range(steps):
        factor = np.asarray(slow) * noise.normal(1, 0.002, 4)
        table[:, step, 2], table[:, step, 3] = FORWARD * factor, BACKWARD * factor
        arrived = starts + table[:, step, 2] + table[:, step, 3]
        left = arrived.max() + EXCHANGE + np.asarray(late_ns)
        table[:, step, 4], table[:, step, 5] = left - arrived, OPTIMIZER
        starts = left + OPTIMIZER
        if step == plan.measure.warmup_steps - 1:
            # All ranks begin to measure together.
            starts = np.full(4, starts.max())
            begin = starts.copy()
    ahead = np.asarray(SKEW)
    # Warm-up steps come before; only the first measured step must lie right.
    first = begin - table[:, : plan.measure.warmup_steps].sum(axis=(1, 2)) + ahead
    end = int(starts.max())
    nodes = [
        node_watch(
            node_rank=node,
            host=HOSTS[node],
            clock=clock_line(
                node,
                HOSTS[node],
                points=[
                    {
                        "local_ns": at + int(ahead[node]),
                        "offset_ns": -int(ahead[node]),
                        "bound_ns": bound_ns,
                        "num_exchanges": 9,
                    }
                    for at in (0, end)
                    if node
                ],
            ),
        )
        for node in range(4)
    ]
    write_run(
        out,
        plan,
        lambda rank, step: ([int(value) for value in table[rank, step]], 0),
        Story(
            host=lambda rank: HOSTS[rank],
            begin_ns=lambda rank: int(first[rank]),
            job=str(plan.series.repeat),
            pause_ns=lambda rank, step: 50 * MS if (rank, step) == (3, pause) else 0,
            record={"watch": watch_result(nodes=nodes), **(record or {})},
        ),
    )


def write_jobs(out: Path, count: int = 6, **about: Any) -> SlowNodes:
    for plan in plans(system="box", points=(4,), ranks_per_node=1, repeats=count):
        write_job(out, plan, **about)
    return slow_nodes(tabulate(scan(out), with_causes=True))


LATE = (0, 0, 4 * MS, 0)


def test_a_host_is_suspected_only_where_sessions_are_too_few_for_a_test() -> None:
    slow, odd = [1.2, 1.21, 1.19, 1.2, 1.2], [1.0, 1.1, 1.0, 1.1, 1.0]
    hosts = {
        "slow": HostSessions(work=slow),
        "both": HostSessions(work=slow, at_least=[0.1, 0.11, 0.1, 0.09, 0.1]),
        "odd": HostSessions(work=odd),
        "few": HostSessions(work=odd[1:2]),
        "new": HostSessions(work=odd[:1]),
    }
    words = ["slow", "slow and slow link", "not shown to be slow", "suspected", "too few sessions"]
    assert list(verdicts_of(hosts).values()) == words


def test_a_slow_link_is_named_and_is_no_slow_host(tmp_path: Path) -> None:
    found = write_jobs(tmp_path, late_ns=LATE)
    first = found.hosts[0]
    assert (first.host, first.verdict) == ("n2", "slow link")
    # Whether it is its own link, or that of the host it receives from, nobody knows.
    assert found.exclude == ()
    assert first.ratio.value == pytest.approx(1, abs=0.003)
    # 4 of 100 + 4 ms: the step is as much longer for all.
    assert first.later.value == pytest.approx(4 / 104, rel=0.01)
    assert {one.verdict for one in found.hosts[1:]} == {"not shown to be slow"}


def test_a_slow_host_has_no_slow_link(tmp_path: Path) -> None:
    found = write_jobs(tmp_path, slow=(1.0, 1.07, 1.0, 1.0))
    assert found.exclude == ("n1",)
    assert [one.verdict for one in found.hosts] == ["slow", *["not shown to be slow"] * 3]
    assert all(one.later is not None and abs(one.later.value) < 0.001 for one in found.hosts)


@pytest.mark.parametrize(
    "about",
    [
        pytest.param({"bound_ns": 2 * MS}, id="clocks are off by as much as is left"),
        pytest.param({"late_ns": (0, 0, 2 * MS, 0)}, id="less than 3 % of a step"),
        pytest.param({"count": 4}, id="too few jobs"),
        pytest.param({"record": {"watch": None}}, id="clocks are not known"),
    ],
)
def test_a_link_is_not_accused_of_what_is_not_certain(tmp_path: Path, about: dict[str, Any]) -> None:
    found = write_jobs(tmp_path, **{"late_ns": LATE, **about})
    assert not {one.verdict for one in found.hosts} & set(ACCUSED)


def test_clocks_of_events_count_as_long_as_they_may_be_trusted(tmp_path: Path) -> None:
    """CUDA events may drift by 500 millionths: what they say of a few steps is certain to 1.5 % of a step."""
    found = write_jobs(tmp_path / "a", late_ns=(0, 0, 7 * MS, 0), record={"clock": "cuda-events"})
    assert (found.hosts[0].host, found.hosts[0].verdict) == ("n2", "slow link")


def test_steps_behind_a_pause_do_not_count(tmp_path: Path) -> None:
    """Only lengths of steps are known, and how long each rank paused is none of them."""
    found = write_jobs(tmp_path, late_ns=LATE, pause=8)
    assert (found.hosts[0].host, found.hosts[0].verdict) == ("n2", "slow link")
    run = scan(tmp_path).runs[0]
    assert load_steps(run).unbroken == 8 - run.plan.measure.warmup_steps


# Ranks become hosts


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e9)), min_size=1, max_size=8))
def test_a_host_counts_with_the_largest_of_as_many_ranks_as_any_has(ranks: list[tuple[str, float]]) -> None:
    hosts, values = [host for host, _ in ranks], [value for _, value in ranks]
    found = largest_by_host(hosts, values)
    fewest = min(hosts.count(host) for host in set(hosts))
    for host in set(hosts):
        own = [value for name, value in ranks if name == host]
        chosen = [max(some) for some in itertools.combinations(own, fewest)]
        assert found[host] == pytest.approx(sum(chosen) / len(chosen))
