"""Collectives and gradient exchange between nodes whose links are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shaped_cluster import shaped_cluster, submit, wait_for
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import scan_comm
from dlbench.records.scan import scan
from tests.slurm_box.box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

BOUND_S = 480


@pytest.fixture(scope="module")
def cluster(slurm_can_run: None) -> Iterator[tuple[Box, Path]]:
    """Four nodes, links of 200 Mbit/s; and the system's file."""
    with shaped_cluster(nodes=4) as found:
        yield found


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 4), (4, 2)])
def test_every_algorithm_between_nodes(
    cluster: tuple[Box, Path], tmp_path: Path, nodes: int, ranks_per_node: int
) -> None:
    box, system = cluster
    submit(
        box,
        *("comm", "submit", "--system", str(system), "--out", str(tmp_path / "runs"), "--backends", "gloo"),
        *("--algorithms", "all", "--sizes", "1000B,256KiB", "--iterations", "1", "--warmup", "0"),
        *("--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)),
    )

    def is_done() -> bool:
        return all(run.state != "incomplete" for run in scan_comm(tmp_path / "runs").runs)

    wait_for(is_done, BOUND_S)
    (run,) = scan_comm(tmp_path / "runs").runs
    assert run.state == "valid", run.detail
    assert len(set(run.record.hosts)) == nodes
    layout = Layout(ranks=8, group_size=ranks_per_node)
    own = [point for point in run.record.points if point.algorithm != "library"]
    assert len(own) == 2 * 10
    for point in own:
        assert point.correct, point
        wanted = counts("allreduce", point.algorithm, layout, point.num_bytes // 4, 4)
        assert point.bytes_sent == tuple(one.bytes_sent for one in wanted), point.algorithm
        assert point.bytes_across == tuple(one.bytes_across for one in wanted), point.algorithm


@pytest.mark.nightly
@pytest.mark.parametrize("exchanges", ["flat,hierarchical", "flat,hierarchical,leader"])
def test_training_goes_by_nodes(cluster: tuple[Box, Path], tmp_path: Path, exchanges: str) -> None:
    box, system = cluster
    submit(
        box,
        *("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", "2", "--ranks-per-node", "2"),
        *("--engine", "ddp", "--data", "synthetic", "--sweep", f"sync.exchange={exchanges}"),
        *("--set", "sync.fusion=own:single", "--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2"),
        *("--set", "layout.cores_per_rank=1"),
        *("--out", str(tmp_path / "runs")),
    )

    def is_done() -> bool:
        runs = scan(tmp_path / "runs").runs
        return len(runs) == len(exchanges.split(",")) and all(run.state != "incomplete" for run in runs)

    wait_for(is_done, BOUND_S)
    found = {}
    for run in scan(tmp_path / "runs").runs:
        assert run.state == "valid", run.detail
        assert run.record.inert == ()
        exchange = run.record.exchange
        assert (exchange.group_size, exchange.num_groups) == (2, 2)
        assert {rank.host for rank in run.record.ranks} <= set(box.node_names)
        found[exchange.exchange] = run.record
    assert set(found) == set(exchanges.split(","))
    for record in found.values():
        assert record.ranks[0].last_loss == pytest.approx(found["flat"].ranks[0].last_loss, rel=1e-5)
