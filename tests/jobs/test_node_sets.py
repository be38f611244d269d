"""Node sets of repeats: the same nodes, or all of them in turn."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.cli import cli as command_line
from dlbench.errors import UserError
from dlbench.jobs.campaign.campaign import jobs_of, on_node_sets
from dlbench.specs.hostlist import expanded
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import plans


def series(repeats: int, nodes: tuple[int, ...] = (1, 2), **request: Any) -> list[RunPlan]:
    return plans(points=nodes, points_are="nodes", repeats=repeats, system="box", **request)


def hosts_of(plan: RunPlan) -> list[str]:
    return list(expanded(plan.system.slurm.nodelist or ""))


def test_the_same_nodes_for_every_repeat() -> None:
    found = on_node_sets(series(3), "same", "n[1-4]", share_one_job=False)
    assert {(plan.layout.nodes, plan.system.slurm.nodelist) for plan in found} == {(1, "n1"), (2, "n[1-2]")}
    assert len(jobs_of(found)) == 2


@settings(max_examples=20)
@given(pool=st.integers(3, 9), size=st.integers(1, 2), turns=st.integers(1, 2))
def test_in_turn_every_node_is_used_alike(pool: int, size: int, turns: int) -> None:
    found = on_node_sets(series(pool * turns, (size,)), "rotate", f"n[1-{pool}]", share_one_job=False)
    used = Counter(host for plan in found for host in hosts_of(plan))
    assert set(used.values()) == {size * turns}
    assert len(used) == pool
    assert all(len(set(hosts_of(plan))) == size for plan in found)
    # Neighbouring repeats never run on the same nodes, and so not in one job.
    assert all(hosts_of(one) != hosts_of(other) for one, other in pairwise(found))


def test_brackets_anywhere_in_a_name_are_counted() -> None:
    (first, second) = on_node_sets(series(2, (2,)), "rotate", "rack[0-1]n[1-2]", share_one_job=False)
    assert hosts_of(first) == ["rack0n1", "rack0n2"]
    assert hosts_of(second) == ["rack1n1", "rack1n2"]
    (one,) = on_node_sets(series(1, (2,)), "same", "n[09-10]-ib", share_one_job=False)
    assert one.system.slurm.nodelist == "n09-ib,n10-ib"


def test_points_that_share_a_job_share_its_nodes() -> None:
    found = on_node_sets(series(2), "rotate", "n[1-3]", share_one_job=True)
    assert {(plan.series.repeat, plan.system.slurm.nodelist) for plan in found} == {(0, "n[1-2]"), (1, "n[1,3]")}
    assert len(jobs_of(found, packing="all")) == 2


@pytest.mark.parametrize(
    ("mode", "hosts", "words"),
    [
        ("same", "n1", "names 1 nodes, and a run takes 2"),
        ("rotate", "n[1-2]", "nothing to rotate over; 3 or more"),
        ("same", "n[3-1]", "--same-nodes n[3-1]: 'n[3-1]': '3-1' is no number and no range"),
        ("same", "n[1-2-3]", "'1-2-3' is no number"),
        ("same", "n[,]", "is no number"),
        ("same", "n[1-2", "has no other"),
        ("same", "n[1-999999999]", "stands for more than 65,536 hosts"),
        ("same", "r[1-999]n[1-999]", "stands for more than 65,536 hosts"),
    ],
)
def test_too_few_nodes_are_refused(mode: Any, hosts: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        on_node_sets(series(2), mode, hosts, share_one_job=False)


def test_nodes_that_the_system_names_are_not_overruled() -> None:
    named = series(2, overrides={"system.slurm.nodelist": "n7"})
    with pytest.raises(UserError, match=r"slurm\.nodelist is n7"):
        on_node_sets(named, "same", "n[1-2]", share_one_job=False)


def test_submit_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1", "--repeats", "2", "--dry-run")
    told = CliRunner().invoke(command_line, [*words, "--rotate-nodes", "n[1-2]", "--all-scripts"])
    assert told.exit_code == 0, told.output
    assert [f"--nodelist=n{number}" in told.stdout for number in (1, 2, 3)] == [True, True, False]
    refused = CliRunner().invoke(command_line, [*words, "--rotate-nodes", "n[1-2]", "--same-nodes", "n1"])
    assert "exclude each other" in str(refused.exception)
