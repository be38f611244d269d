"""Slow links: a host whose exchanges end late, told apart from one that works slowly, as far as clocks are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.measures import load_steps
from dlbench.analysis.slow_nodes import ACCUSED, HostSessions, SlowNodes, slow_nodes, verdicts_of
from dlbench.analysis.stragglers import largest_by_host
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import MS, Story, plans, write_run
from tests.support.watch_factory import clock_line, node_watch, watch_result

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
