"""What runs recorded becomes the ingredients of a projection: to the nanosecond where it is a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis import scaling
from dlbench.analysis.causes import CAUSES
from dlbench.analysis.table import RunTable, tabulate
from dlbench.errors import UserError
from dlbench.projection.gathering import gathered, with_network
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import reasons
from dlbench.projection.step import project
from dlbench.records.scan import scan
from dlbench.specs.comm import Level, NetworkModel, Piece
from tests.support.run_factory import MS, Story, constant, exchange_result, plans, write_run

NODES: dict[str, Any] = {"system": "box", "points_are": "nodes", "ranks_per_node": 2, "launcher": "mpirun"}
GRADIENTS = ((4_000_000, 0.049), (1_000_000, 0.05))
NETWORK = NetworkModel(
    system="box", transport="torch-gloo", across=Level(pieces=(Piece(alpha_s=1e-5, beta_s_per_byte=1e-9),))
)


def write(
    out: Path, points: tuple[int, ...] = (1, 2, 4), *, slow_host: float = 0.0, others: float = 0.0, **request: Any
) -> None:
    """Steps of 90 ms and 5 ms more of exchange with each doubling of the nodes; the last node is slower. `others`: the
    share of the CPU time of all other nodes' ranks that is seen on each node's cores.
    """
    noise = random.Random(3)
    for plan in plans(**{**NODES, "points": points, "repeats": 3, **request}):
        nodes, last = plan.layout.nodes, plan.layout.ranks - 1

        def times(rank: int, step: int, nodes: int = nodes, last: int = last) -> tuple[list[int], int]:
            late = slow_host if rank == last and nodes > 1 else 0.0
            jitter = noise.gauss(0, 0.1)
            exchange = (10.0 + 5.0 * nodes.bit_length() - late) if nodes * 2 > 1 else 0.0
            phases = [2.0, 0.0, 30.0, 50.0 + late + jitter, exchange - jitter, 5.0]
            return [round(one * MS) for one in phases], round(3.0 * MS)

        result = exchange_result(plan, gradients=GRADIENTS, alpha_s=0.001, beta_s_per_byte=1e-9)
        shared = plan.layout.ranks_per_node
        load = [
            {
                "node_rank": node,
                "host": f"n{node}",
                "cores": [0, 1],
                "window_s": 10.0,
                "busy_s": 0.2 * nodes * (1 + others * (nodes - 1)),
                "own_s": 0.2 * nodes,
                "steal_s": 0.0,
                "pressure_s": None,
            }
            for node in range(nodes)
        ]
        story = Story(
            exchange={**result, "communication_s": 0.02 + 0.001 * plan.series.repeat},
            host=lambda rank, shared=shared: f"n{rank // shared}",
            cores=lambda rank, shared=shared: (rank % shared,),
            record={"load": load},
        )
        write_run(out, plan, times, story)


def read(out: Path, **changes: Any) -> tuple[Ingredients, scaling.Group, RunTable]:
    table = tabulate(scan(out), with_causes=True)
    groups = scaling.groups(table)
    plain = [group for group in groups if group.sample.plan.series.variant == "plain"]
    group = max(plain, key=lambda one: len(one.points))
    return gathered(group, table, groups=groups, source="runs", **changes), group, table


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ingredients, scaling.Group, RunTable]:
    out = tmp_path_factory.mktemp("runs")
    write(out, slow_host=4.0)
    return read(out)


def test_steps_parts_messages_and_nodes_are_those_of_the_account(
    whole: tuple[Ingredients, scaling.Group, RunTable],
) -> None:
    found, group, table = whole
    assert [(point.ranks, point.nodes) for point in found.points] == [(2, 1), (4, 2), (8, 4)]
    for point in found.points:
        for run in point.runs:
            account = table.causes[run.run_id]
            assert run.step_s == pytest.approx(sum(account.seconds.values()), rel=1e-12)
            assert sum(run.parts[name] for name in CAUSES) == pytest.approx(run.step_s, rel=1e-9)
            assert run.parts["forward"] == pytest.approx(0.03)
            assert run.own_work_s == pytest.approx(0.09, rel=0.01)
    assert found.configuration == group.id
    assert found.per_node == 2
    assert found.nodes_of(64) == 32
    assert found.anchor.ranks == 8
    assert found.exchange is not None
    assert found.exchange.communication_s == pytest.approx(0.021)  # Of the run in the middle.
    assert [gradient.num_bytes for gradient in found.exchange.gradients] == [4_000_000, 1_000_000]
    # Without waiting for others, which the account tells.
    assert all(run.communication_s <= 0.022 for run in found.anchor.runs)
    # The slow host is in the scatter of nodes.
    assert found.nodes is not None
    assert len(found.nodes.hosts) == 4
    assert max(found.nodes.hosts) == pytest.approx(0.0435, abs=0.005)  # log(94 / 90)
    assert found.nodes.num_maxima == 3 * 4 * next(iter(table.figures.values()))["steps"]
    text = found.model_dump_json(indent=1)
    assert Ingredients.model_validate_json(text) == found
    assert len(text) < 200_000


def test_nodes_that_share_the_cores_of_one_machine_are_told_by_their_loads(tmp_path: Path) -> None:
    for name, others in (("own", 0.0), ("shared", 0.8)):
        write(tmp_path / name, others=others)
    apart, shared = (read(tmp_path / name)[0] for name in ("own", "shared"))
    assert (apart.shared_cores, shared.shared_cores) == (None, 2)
    steps = 12
    assert shared.anchor.cpu_s == pytest.approx(4 * 0.8 / (8 * steps))
    assert shared.anchor.core_use == pytest.approx(0.8 * (1 + 0.8 * 3) / 20)
    # Messages of more ranks wait for these cores: longer, and less certain.
    costs = NETWORK.model_copy(update={"inside": NETWORK.across})
    longer, plain = (project(with_network(one, costs), [16]).targets[0].step for one in (shared, apart))
    assert longer.median > plain.median
    assert longer.middle(90)[1] / longer.middle(90)[0] > plain.middle(90)[1] / plain.middle(90)[0]


def test_a_network_of_another_machine_is_refused(whole: tuple[Ingredients, scaling.Group, RunTable]) -> None:
    found = with_network(whole[0], NETWORK)
    assert found.network == NETWORK
    with pytest.raises(UserError, match="costs are of system elsewhere, the runs are of box"):
        with_network(found, NETWORK.model_copy(update={"system": "elsewhere"}))


def test_half_filled_nodes_are_left_out_and_other_batches_are_found(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, (2,), ranks_per_node=1, series="s2")
    write(tmp_path, (4,), series="s3", overrides={"train.batch_per_rank": 16})
    found, *_ = read(tmp_path)
    assert [point.ranks for point in found.points] == [2, 4, 8]
    assert any("2 ranks on 2 nodes" in note for note in found.notes)
    assert len({one.batch_per_rank for one in found.batches}) == 2
    assert read(tmp_path, is_whole=False)[0].nodes is None


def test_ranks_that_share_cores_are_refused(tmp_path: Path) -> None:
    for plan in plans(points=(1, 2, 4), repeats=3):
        write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]), Story(threads=2))
    found, *_ = read(tmp_path)
    assert found.is_crowded
    assert "R4" in [one.code for one in reasons(found, 8)]


def test_what_runs_read_is_what_storage_gave(tmp_path: Path) -> None:
    """Twice the demand from two to four nodes, and the same rate: storage gives no more."""
    for plan in plans(**NODES, points=(1, 2, 4), repeats=3):
        wait = {1: 0.0, 2: 0.0, 4: 100.0}[plan.layout.nodes]
        epoch = {
            "epoch": 0,
            "is_whole": True,
            "samples": 100,
            "tier_bytes": {"shared": 100 * 5000},
            "storage_bytes": None,
            "fetch_s": 1.0,
            "prepare_s": 1.0,
            "wait_s": 1.0,
            "seconds": 10.0,
        }
        reading = {"loader_workers": 1, "prefetch_batches": 1, "cache": "", "cache_in_force": True}
        write_run(
            tmp_path,
            plan,
            constant([wait, 0, 0, 100, 0, 0]),
            Story(record={"reading": {**reading, "cached_share": None, "epochs": [epoch]}}),
        )
    found, *_ = read(tmp_path)
    supply = found.supply
    assert supply is not None
    assert supply.sample_bytes == pytest.approx(5000)
    assert supply.is_saturated
    assert not supply.is_per_node


@pytest.mark.parametrize(
    ("leaf_of", "leaves"),
    [
        (lambda node: f"root.leaf{node % 2}", [(0,), (0, 1), (0, 1, 0, 1)]),
        (lambda node: f"root.leaf{node // 2}", [(0,), (0, 0), (0, 0, 1, 1)]),
        (lambda node: "" if node == 3 else "root.leaf0", [(0,), (0, 0), None]),
    ],
)
def test_points_say_below_which_leaf_switch_their_nodes_are(tmp_path: Path, leaf_of: Any, leaves: list[Any]) -> None:
    for plan in plans(**NODES, points=(1, 2, 4), repeats=3):
        story = Story(of_rank=lambda rank: {"switch": leaf_of(rank // 2)})
        write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]), story)
    found, *_ = read(tmp_path)
    assert [point.leaves for point in found.points] == leaves
