"""Which processors a rank gets, and which ranks have processors of their own."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.machine.gpus import Gpu
from dlbench.node import ranks as rank_module
from dlbench.node.ranks import RankCores, RankPlace, bind, by_physical_core, check_sharing, deal
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.support.training_data import rank_place


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What binding sets is as before when a test has ended."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")


@given(cores=st.integers(1, 32), threads=st.sampled_from([1, 2, 4]), ranks=st.sampled_from([1, 2, 4]))
def test_an_even_share_holds_whole_cores(cores: int, threads: int, ranks: int) -> None:
    cores *= ranks
    total = cores * threads
    order = by_physical_core(range(total), lambda cpu: ",".join(str(cpu % cores + cores * i) for i in range(threads)))
    share = total // ranks
    used = [{cpu % cores for cpu in order[rank * share : (rank + 1) * share]} for rank in range(ranks)]
    assert sum(len(part) for part in used) == cores


def plan_of(launcher: str, ranks: int, cores_per_rank: int) -> RunPlan:
    wanted = {"layout.cores_per_rank": cores_per_rank}
    request = Request(
        workload="resnet50",
        preset="ci",
        system="example-gpu",
        launcher=launcher,
        points=(1,),
        points_are="nodes",
        ranks_per_node=ranks,
        overrides=wanted,
    )
    (plan,) = expand(request, machine_cores=4)
    return plan


def seats_of(masks: list[list[int]], plan: RunPlan, monkeypatch: pytest.MonkeyPatch, hosts: int = 1) -> list[RankCores]:
    """What each rank does with the mask that its launcher gave it."""
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(set(cores)))
    seats = []
    for rank, mask in enumerate(masks):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, mask=mask: set(mask))
        place = rank_place(rank, len(masks), len(masks) // hosts)
        bound = bind(plan, place)
        assert bound.warnings == ()
        seats.append(
            RankCores(rank=rank, host=place.host, cores=bound.cores, threads=bound.threads, pinned=bound.pinned)
        )
    return seats


@pytest.mark.parametrize("size", [18, 20, 36])
def test_ranks_with_one_mask_for_all_share_cores(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of the planned size, too: then each rank takes the mask for its own share."""
    told_pinned, told_warnings = check_sharing(seats_of([[*range(size)]] * 4, plan_of("srun-gloo", 4, 18), monkeypatch))
    assert told_pinned == frozenset()
    assert told_warnings == (
        f"4 ranks of 18 cores on {size} cores of n0: ranks share cores; figures say nothing about scaling",
    )


def test_a_node_s_whole_mask_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    told_pinned, told_warnings = check_sharing(seats_of([[*range(8)]] * 4, plan_of("srun-gloo", 4, 2), monkeypatch))
    assert (told_pinned, told_warnings) == ({0, 1, 2, 3}, ())


@pytest.mark.parametrize(
    ("asked", "mask", "is_told"),
    [("cores", 8, True), ("quiet,map_cpu:0,2", 8, True), ("cores", 2, False), ("sockets", 8, False), (None, 8, False)],
)
def test_that_srun_did_not_bind_a_rank_is_told(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, mask: int, is_told: bool
) -> None:
    """It only warns, where the cluster has no plugin for that."""
    content = plan_of("srun-gloo", 4, 2).model_dump(mode="json")
    content["system"]["slurm"]["cpu_bind"] = asked
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mask)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    place = rank_place(0, 4)
    warnings = bind(RunPlan.model_validate(content), place).warnings
    assert [f"slurm.cpu_bind {asked} had no effect" in line for line in warnings] == [True] * is_told


def test_that_open_mpi_yields_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = rank_place(0, 4)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    (line,) = bind(plan_of("srun-mpi", 4, 2), place).warnings
    assert "Open MPI yields its core while it waits" in line
    assert bind(plan_of("srun-gloo", 4, 2), place).warnings == ()


@given(
    masks=st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=6),
    threads=st.integers(1, 4),
    bound=st.booleans(),
)
def test_a_rank_is_bound_if_no_other_may_run_there(masks: list[set[int]], threads: int, bound: bool) -> None:
    told_pinned, told_warnings = check_sharing(
        [RankCores(rank=n, host="n0", cores=mask, threads=threads, pinned=bound) for n, mask in enumerate(masks)]
    )
    for rank, mask in enumerate(masks):
        meets = any(mask & other for number, other in enumerate(masks) if number != rank)
        assert (rank in told_pinned) == (not meets and (bound or len(masks) > 1))
    if all(len(mask) >= threads for mask in masks) and len(told_pinned) == len(masks):
        assert told_warnings == ()
    if len(set().union(*masks)) < threads * len(masks):
        assert told_warnings


# Beside the GPU


@st.composite
def nodes_of_gpus(draw: st.DrawFn) -> tuple[list[int], int, list[frozenset[int]]]:
    """Cores in any order, cores of a rank, and for each rank those beside its GPU (none: not known)."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    sets = [frozenset(range(low, high)) for low, high in pairwise(bounds)]
    cores = draw(st.permutations(range(bounds[-1])))
    wanted = draw(st.integers(1, bounds[-1]))
    near = draw(st.lists(st.sampled_from([*sets, frozenset()]), min_size=1, max_size=bounds[-1] // wanted))
    return list(cores), wanted, near


@given(nodes_of_gpus())
def test_every_rank_has_cores_of_its_own_and_those_of_its_gpu_where_they_suffice(
    made: tuple[list[int], int, list[frozenset[int]]],
) -> None:
    cores, wanted, near = made
    dealt = deal(cores, wanted, near)
    assert [len(set(own)) for own in dealt] == [wanted] * len(near)
    assert len(set().union(*dealt)) == wanted * len(near)
    assert set().union(*dealt) <= set(cores)
    for beside in set(near) - {frozenset()}:
        ranks = [rank for rank, other in enumerate(near) if other == beside]
        local = [len(beside.intersection(dealt[rank])) for rank in ranks]
        if len(beside) >= wanted * len(ranks):
            assert local == [wanted] * len(ranks)
        else:  # nobody's cores are left to a rank of another GPU, and they are shared evenly
            assert sum(local) == len(beside)
            assert max(local) - min(local) <= 1


def gpus_at(*nodes: int) -> tuple[Gpu, ...]:
    """GPUs beside these NUMA nodes of four processors each."""
    return tuple(
        Gpu(
            uuid=f"GPU-{number}",
            pci_bus_id=f"0000:{number:02x}:00.0",
            numa_node=node,
            cores=frozenset(range(4 * node, 4 * node + 4)),
        )
        for number, node in enumerate(nodes)
    )


def bound_cores(monkeypatch: pytest.MonkeyPatch, seen: tuple[tuple[Gpu, ...], ...]) -> list[tuple[int, ...]]:
    """Cores of four ranks of two cores on a node of eight, each of which sees these GPUs."""
    monkeypatch.setattr(rank_module, "has_gpu", lambda *_: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: None)
    found = []
    for rank in range(4):
        monkeypatch.setattr(rank_module, "gpus_of_node", lambda environment, root, rank=rank: seen[rank])
        where = {"local_rank": rank, "local_size": 4, "node_rank": 0, "num_nodes": 1}
        binding = bind(plan_of("srun-gloo", 4, 2), RankPlace(rank=rank, size=4, host="n0", token="t", **where))
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        found.append(binding.cores)
    return found


def test_ranks_sit_beside_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many machines the first GPUs are beside the second socket."""
    order = gpus_at(1, 1, 0, 0)
    assert bound_cores(monkeypatch, (order,) * 4) == [(4, 5), (6, 7), (0, 1), (2, 3)]
    assert bound_cores(monkeypatch, ((),) * 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_ranks_that_see_one_gpu_each_find_cores_of_their_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control group hides the others' GPUs, not where they are."""
    order = gpus_at(1, 0, 1, 0)
    places = {gpu.pci_bus_id: (gpu.numa_node, gpu.cores) for gpu in order}
    monkeypatch.setattr(rank_module, "nvidia_buses", lambda root: tuple(places))
    monkeypatch.setattr(rank_module, "place_of", lambda bus, root: places[bus])
    given_by_slurm = tuple((order[number],) for number in (1, 3, 0, 2))
    assert bound_cores(monkeypatch, given_by_slurm) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_each_rank_is_shown_its_own_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would show all of them the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c,MIG-d")
    shown = []

    def seen(environment: os._Environ[str], root: object) -> tuple[Gpu, ...]:
        shown.append(environment["CUDA_VISIBLE_DEVICES"])
        return ()

    monkeypatch.setattr(rank_module, "has_gpu", lambda *_: True)
    monkeypatch.setattr(rank_module, "gpus_of_node", seen)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: None)
    for rank in range(4):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c,MIG-d")
        where = {"local_rank": rank, "local_size": 4, "node_rank": 0, "num_nodes": 1}
        bind(plan_of("srun-gloo", 4, 2), RankPlace(rank=rank, size=4, host="n0", token="t", **where))
    assert shown == ["MIG-a", "MIG-b", "MIG-c", "MIG-d"]
