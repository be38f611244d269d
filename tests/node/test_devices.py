"""Which GPU a rank takes by what is visible, and that no two ranks of a node have the same one.

What is read from NCCL's own log. Lines have the forms that NCCL 2.18 to 2.27 writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlbench.errors import EnvironmentLacksError, ExitCode
from dlbench.machine.gpus import Gpu
from dlbench.node import devices
from dlbench.node.devices import (
    SUBSYSTEMS,
    NcclLog,
    device_for,
    joined_transport,
    parsed,
    rank_gpu,
    require_distinct,
    require_own_gpu,
)
from dlbench.node.failures import failure_of
from dlbench.node.ranks import RankPlace
from dlbench.records.record import RankGpu
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.support.gpus import gpu_files
from tests.support.training_data import rank_place

NAMED = "12345678-1234-1234-1234-123456789012"


def plan_of(request: str, launcher: str = "srun-gloo") -> RunPlan:
    wanted = {"system.slurm.gpu_request": request}
    asked = Request(
        workload="resnet50", preset="ci", system="example-gpu", launcher=launcher, points=(1,), overrides=wanted
    )
    (plan,) = expand(asked, machine_cores=4)
    return plan


def place(local_rank: int, local_size: int = 4) -> RankPlace:
    return rank_place(local_rank, local_size)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that sees GPUs: their number, properties, and which cannot reach each other."""
    seen = SimpleNamespace(count=4, name="NVIDIA A100", uuid=NAMED, apart=set(), set=[], capability=(8, 0), boards=0)
    seen.built_for = ["sm_75", "sm_80", "sm_90", "sm_120", "compute_120"]
    properties = lambda device: SimpleNamespace(  # noqa: E731
        name=seen.name, uuid=seen.uuid, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    for name, stand_in in {
        "is_available": lambda: seen.count > 0,
        "init": lambda: seen.set.append("init"),
        "device_count": lambda: seen.count if "init" in seen.set else seen.boards or seen.count,
        "set_device": seen.set.append,
        "get_arch_list": lambda: seen.built_for,
        "get_device_capability": lambda device: seen.capability,
        "get_device_name": lambda device: seen.name,
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
    assert cuda.set == ["init", 0, "init", 1, "init", 2, "init", 3]
    cuda.count = 3
    with pytest.raises(EnvironmentLacksError, match="4 ranks per node, but 3 GPUs on n0: ranks must not share one"):
        device_for(plan_of("gres"), place(0))
    cuda.count = 0
    with pytest.raises(EnvironmentLacksError, match=r"slurm\.gpu_request is gres, but torch sees no GPU on n0"):
        device_for(plan_of("gres"), place(0))
    assert device_for(plan_of("none"), place(0)).type == "cpu"


def test_ranks_refuse_more_gpus_than_slurm_granted(cuda: SimpleNamespace) -> None:
    for plan in (plan_of("gres"), plan_of("gpus-per-task", "mpirun"), plan_of("none")):
        with pytest.raises(EnvironmentLacksError, match="Slurm granted 2 of the GPUs of n0, but torch sees 4: the oth"):
            device_for(plan, place(0, 2), environment={"SLURM_GPUS_ON_NODE": "2"})
    for granted in ("4", "8", ""):
        assert device_for(plan_of("gres"), place(3), environment={"SLURM_GPUS_ON_NODE": granted}).index == 3


@pytest.fixture
def blind(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyPI's torch of CUDA 13, which sees no GPU, and no list of devices."""
    cuda.count = 0
    for name, value in (("__version__", "2.13.0+cu130"), ("version.cuda", "13.0"), ("version.hip", None)):
        monkeypatch.setattr(f"torch.{name}", value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return cuda


@pytest.mark.parametrize("request_", ["none", "gres"])
def test_a_gpu_that_torch_cannot_use_is_no_cpu_run(
    blind: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    root = gpu_files(tmp_path)
    with pytest.raises(EnvironmentLacksError) as raised:
        device_for(plan_of(request_), place(0), root)
    assert str(raised.value) == (
        "n0 has a GPU that torch cannot use: torch 2.13.0+cu130 is built for CUDA 13.0, which needs driver 580 or "
        "newer, and the driver is 535.183.01; pip install torch==2.13.0+cu126 with PIP_EXTRA_INDEX_URL set to "
        "PyTorch's index for cu126, or load the site's torch, or hide the GPU with CUDA_VISIBLE_DEVICES= to train on "
        "the CPU"
    )
    failure = failure_of(raised.value, place(0))
    assert (failure.exit_code, failure.reason) == (ExitCode.ENVIRONMENT, str(raised.value)), "no word is cut off"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if request_ == "none":
        assert device_for(plan_of(request_), place(0), root).type == "cpu"
    else:
        with pytest.raises(EnvironmentLacksError, match="torch sees no GPU on n0: check the driver and CUDA_VISIBLE_"):
            device_for(plan_of(request_), place(0), root)


def test_a_gpu_that_cuda_does_not_begin_on_is_said_in_its_words(
    blind: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. boards with NVSwitch whose fabric manager does not run."""

    def init() -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount().\n Error 802: system not yet initialized")

    monkeypatch.setattr(torch.cuda, "init", init)
    root = gpu_files(tmp_path, driver="NVIDIA UNIX x86_64 Kernel Module  580.65.06  x")
    with pytest.raises(EnvironmentLacksError) as raised:
        device_for(plan_of("none"), place(0), root)
    assert str(raised.value).startswith(
        "n0 has a GPU that torch cannot use: torch 2.13.0+cu130 for CUDA 13.0, driver 580.65.06: Unexpected error from "
        "cudaGetDeviceCount(). Error 802: system not yet initialized; run nvidia-smi"
    )


@pytest.mark.parametrize(
    ("capability", "built_for", "said"),
    [
        ((7, 0), None, "it has 7.5, 8.0, 9.0, 12.0): pip install torch==2.13.0+cu126 with PIP_EXTRA_INDEX_URL"),
        ((10, 0), ["sm_80", "sm_90"], "it has 8.0, 9.0): install a newer torch, or hide the GPU"),
        ((8, 6), None, ""),  # what sm_80 is built for runs on it
        ((12, 1), ["compute_120"], ""),  # the driver compiles for it
        ((9, 0), ["sm_90a"], ""),
        ((9, 0), [], ""),  # torch does not say
        ((9, 0), ["gfx90a"], ""),
    ],
)
def test_a_torch_without_kernels_for_a_gpu_is_refused(
    blind: SimpleNamespace, capability: tuple[int, int], built_for: list[str] | None, said: str
) -> None:
    """PyPI's wheel of CUDA 13 has none for V100 and older: torch sees the GPU, and its first kernel would fail."""
    blind.count, blind.capability, blind.built_for = 1, capability, built_for or blind.built_for
    if built_for == []:
        blind.built_for = []
    if not said:
        assert device_for(plan_of("none"), place(0)).type == "cuda"
        return
    with pytest.raises(EnvironmentLacksError) as raised:
        device_for(plan_of("none"), place(0))
    assert "n0: torch 2.13.0+cu130 has no kernels for NVIDIA A100 (compute capability" in str(raised.value)
    assert said in str(raised.value)


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
    assert (found.uuid, found.is_slice) == ("MIG-7", True)


def test_two_ranks_on_one_gpu_are_named_with_host_and_uuid() -> None:
    ranks = [(0, "n0", "GPU-a", ""), (1, "n0", "GPU-b", ""), (2, "n1", "GPU-a", ""), (3, "n0", "GPU-a", "")]
    with pytest.raises(
        EnvironmentLacksError, match=r"^ranks 0, 3 share GPU GPU-a of n0: each rank needs its own"
    ) as error:
        require_distinct(ranks, by_nccl=True)
    assert int(error.value.exit_code) == 5
    require_distinct(ranks[:3], by_nccl=True)


def test_nccl_joins_slices_of_different_gpus_only() -> None:
    same = [(0, "n0", "MIG-a", "0000:1b:00.0"), (1, "n0", "MIG-b", "0000:1b:00.0")]
    with pytest.raises(EnvironmentLacksError, match=r"ranks 0, 1 have MIG slices of one GPU \(0000:1b:00\.0 of n0\)"):
        require_distinct(same, by_nccl=True)
    require_distinct(same, by_nccl=False)
    with pytest.raises(EnvironmentLacksError, match=r"ranks 0, 1 share slice MIG-a of n0: .* list a slice for each"):
        require_distinct([same[0], (1, "n0", "MIG-a", "0000:1b:00.0")], by_nccl=False)
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


NVLINK = """\
n01:7614:7614 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0
n01:7614:7614 [0] NCCL INFO Bootstrap : Using ib0:10.1.94.2<0>
n01:7614:7614 [0] NCCL INFO cudaDriverVersion 12080
n01:7614:7614 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n01:7614:7691 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_2:1/IB [RO]; OOB ib0:10.1.94.2<0>
n01:7614:7691 [0] NCCL INFO P2P plugin v9 IBext_v9
n01:7614:7691 [0] NCCL INFO Using network IBext_v9
n01:7614:7691 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
n01:7614:7691 [0] NCCL INFO comm 0x573f9cb382e0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
n01:7614:7691 [0] NCCL INFO Channel 00/16 : 0 1 2 3 4 5 6 7 8
n01:7614:7691 [0] NCCL INFO Channel 01/16 :    0   1   2
n01:7614:7691 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1
n01:7614:7691 [0] NCCL INFO 16 coll channels, 16 collnet channels, 12 nvls channels, 16 p2p channels
n01:7614:7694 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n01:7614:7694 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n01:7614:7694 [0] NCCL INFO Channel 07/0 : 8[0] -> 0[0] [receive] via NET/IBext_v9/3/GDRDMA
n01:7614:7694 [0] NCCL INFO Channel 07/0 : 0[0] -> 8[0] [send] via NET/IBext_v9/2(0)/GDRDMA
n01:7614:7694 [0] NCCL INFO Connected all rings
"""
SHARED = """\
ruijie:1122:1663 [1] NCCL INFO Channel 32 : 1[c3000] -> 0[3000] via SHM/direct/direct comm 0x557519a97630 nRanks 02
ruijie:1122:1663 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
[2026-04-28 14:14:47] ruijie:1122:1663 [1] NCCL INFO Using network Socket
ruijie:1122:1663 [1] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
ruijie:1122:1663 [1] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error
"""


def test_ways_network_and_channels_are_read() -> None:
    told = parsed(NVLINK.splitlines())
    assert told.version == "2.27.3+cuda12.9"
    assert (told.network, told.plugin) == ("IBext_v9", "IBext_v9")
    assert told.channels == {"NET/IBext_v9/GDRDMA": 1, "P2P/CUMEM": 1, "P2P/CUMEM/read": 1}
    assert (told.collective_channels, told.nvls_channels, told.nvls) == (16, 12, True)
    assert (told.rings, told.trees) == (16, 2)
    assert told.has_peer_access


def test_ranks_add_up_and_a_rank_without_a_log_takes_nothing_away() -> None:
    one, other = (parsed(text.splitlines()).model_dump(mode="json") for text in (NVLINK, SHARED))
    both = joined_transport(
        [{**one, "adapters": {"mlx5_0": "InfiniBand"}}, None, other, {**other, "adapters": {"efa_0": "EFA"}}]
    )
    assert both.adapters == {"mlx5_0": "InfiniBand", "efa_0": "EFA"}
    assert both.channels["SHM/direct/direct"] == 4
    assert (both.network, both.rings, both.nvls, both.collective_channels) == ("IBext_v9, Socket", 16, True, 16)
    assert joined_transport([None, None]) is None


def test_the_log_is_asked_for_read_and_the_variables_are_the_user_s_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "fabric_adapters", lambda: {"mlx5_0": "InfiniBand"})
    variables = {"NCCL_DEBUG_SUBSYS": "COLL"}
    log = NcclLog(variables)
    file = Path(variables["NCCL_DEBUG_FILE"])
    assert variables == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(file)}
    assert "TUNING" not in SUBSYSTEMS, "it writes a line for each collective of each step"
    file.write_text(NVLINK)
    told = log.read()
    assert told["rings"] == 16
    assert told["adapters"] == {"mlx5_0": "InfiniBand"}, "those of the node, whether NCCL used them or not"
    assert variables == {"NCCL_DEBUG_SUBSYS": "COLL"}
    log.close()
    assert not file.parent.exists()


def test_warnings_of_a_rank_that_fails_are_in_its_own_log(capfd: pytest.CaptureFixture[str]) -> None:
    variables = dict[str, str]()
    log = NcclLog(variables)
    Path(variables["NCCL_DEBUG_FILE"]).write_text(SHARED)
    log.close(failed=True)
    assert capfd.readouterr().err == "NCCL WARN NET/IB : Got async event : port error\n"
    assert "NCCL_DEBUG" not in os.environ
