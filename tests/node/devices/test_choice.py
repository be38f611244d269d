"""Which GPU a rank takes by what is visible, and that no two ranks of a node have the same one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.gpus import Gpu
from dlbench.node.devices.choice import device_for
from dlbench.node.devices.identity import rank_gpu, require_distinct, require_own_gpu
from dlbench.node.ranks import RankPlace
from dlbench.records.record import RankGpu
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request

NAMED = "12345678-1234-1234-1234-123456789012"


def plan_of(request: str, launcher: str = "srun-gloo") -> RunPlan:
    wanted = {"system.slurm.gpu_request": request}
    asked = Request(
        workload="resnet50", preset="ci", system="example-gpu", launcher=launcher, points=(1,), overrides=wanted
    )
    (plan,) = expand(asked, machine_cores=4)
    return plan


def place(local_rank: int, local_size: int = 4) -> RankPlace:
    return RankPlace(
        rank=local_rank,
        size=local_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=0,
        num_nodes=1,
        host="n0",
        token="t",
    )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that sees GPUs: their number, properties, and which cannot reach each other."""
    seen = SimpleNamespace(count=4, name="NVIDIA A100", uuid=NAMED, apart=set(), set=[])
    properties = lambda device: SimpleNamespace(  # noqa: E731
        name=seen.name, uuid=seen.uuid, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    for name, stand_in in {
        "is_available": lambda: seen.count > 0,
        "device_count": lambda: seen.count,
        "set_device": seen.set.append,
        "get_device_properties": properties,
        "can_device_access_peer": lambda own, other: (own, other) not in seen.apart,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return seen


@pytest.mark.parametrize("request_", ["none", "gres", "gpus-per-node", "gpus-per-task"])
@pytest.mark.parametrize("launcher", ["srun-gloo", "srun-mpi", "mpirun"])
def test_the_only_gpu_that_a_rank_sees_is_its_own(cuda: SimpleNamespace, request_: str, launcher: str) -> None:
    cuda.count = 1
    assert [device_for(plan_of(request_, launcher), place(rank)).index for rank in range(4)] == [0, 0, 0, 0]


def test_of_several_gpus_each_rank_takes_that_of_its_place(cuda: SimpleNamespace) -> None:
    assert [device_for(plan_of("gres"), place(rank)).index for rank in range(4)] == [0, 1, 2, 3]
    assert cuda.set == [0, 1, 2, 3]
    cuda.count = 3
    with pytest.raises(EnvironmentLacksError, match="4 ranks per node, but 3 GPUs on n0: ranks must not share one"):
        device_for(plan_of("gres"), place(0))
    cuda.count = 0
    with pytest.raises(EnvironmentLacksError, match=r"slurm\.gpu_request is gres, but torch sees no GPU on n0"):
        device_for(plan_of("gres"), place(0))
    assert device_for(plan_of("none"), place(0)).type == "cpu"


def test_a_gpu_is_named_by_uuid_address_and_whom_it_reaches(cuda: SimpleNamespace) -> None:
    cuda.apart = {(1, 3)}
    found = rank_gpu(torch.device("cuda", 1), None, {})
    assert found == RankGpu(uuid=f"GPU-{NAMED}", pci_bus_id="0000:1b:00.0", visible=4, no_peer_access=(3,))
    told = Gpu(uuid=f"GPU-{NAMED}", pci_bus_id="0000:81:00.0", numa_node=1, cores=frozenset())
    assert (known := rank_gpu(torch.device("cuda", 1), told, {})) is not None
    assert (known.pci_bus_id, known.numa_node) == ("0000:81:00.0", 1)
    wrong = Gpu(uuid="GPU-other", pci_bus_id="0000:81:00.0", numa_node=1, cores=frozenset())
    assert rank_gpu(torch.device("cuda", 1), wrong, {}) == found, "CUDA has the last word"
    assert rank_gpu(torch.device("cpu"), told, {}) is None


def test_a_slice_is_named_as_the_list_of_devices_names_it(cuda: SimpleNamespace) -> None:
    """CUDA's runtime may give a slice the UUID of its board."""
    cuda.count, cuda.name = 1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    found = rank_gpu(torch.device("cuda", 0), None, {"CUDA_VISIBLE_DEVICES": "MIG-7"})
    assert found is not None
    assert (found.uuid, found.is_slice) == ("MIG-7", True)


def test_two_ranks_on_one_gpu_are_named_with_host_and_uuid() -> None:
    ranks = [(0, "n0", "GPU-a", ""), (1, "n0", "GPU-b", ""), (2, "n1", "GPU-a", ""), (3, "n0", "GPU-a", "")]
    with pytest.raises(EnvironmentLacksError, match=r"^ranks 0, 3 share GPU GPU-a of n0: each rank needs one") as error:
        require_distinct(ranks, by_nccl=True)
    assert int(error.value.exit_code) == 5
    require_distinct(ranks[:3], by_nccl=True)


def test_nccl_joins_slices_of_different_gpus_only() -> None:
    same = [(0, "n0", "MIG-a", "0000:1b:00.0"), (1, "n0", "MIG-b", "0000:1b:00.0")]
    with pytest.raises(EnvironmentLacksError, match=r"ranks 0, 1 have MIG slices of one GPU \(0000:1b:00\.0 of n0\)"):
        require_distinct(same, by_nccl=True)
    require_distinct(same, by_nccl=False)
    require_distinct([same[0], (1, "n0", "MIG-b", "0000:1c:00.0")], by_nccl=True)


def test_ranks_are_asked_only_where_there_are_gpus_and_others() -> None:
    asked: list[Any] = []

    def gather(told: Any) -> list[Any]:
        asked.append(told)
        return [told, [1, "n0", "GPU-x", ""]]

    mine = RankGpu(uuid="GPU-x", visible=1)
    require_own_gpu(None, place(0), gather, by_nccl=True)
    require_own_gpu(mine, place(0, 1), gather, by_nccl=True)
    assert asked == []
    with pytest.raises(EnvironmentLacksError, match="ranks 0, 1 share GPU GPU-x"):
        require_own_gpu(mine, place(0, 2), gather, by_nccl=True)
