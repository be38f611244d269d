"""What is captured of the machine around a run: nothing of it is worth the run, and no secret is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlbench
from dlbench.machine import environment
from dlbench.node.torch_facts import torch_facts


def recorded(variables: dict[str, str], *withheld: str) -> set[str]:
    prefix = "variable."
    return {
        key.removeprefix(prefix)
        for key in environment.capture([], variables, withheld=withheld)
        if key.startswith(prefix)
    }


def test_settings_of_the_libraries_are_recorded() -> None:
    settings = {
        "NCCL_IB_PKEY": "7",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "OMP_NUM_THREADS": "4",
        "OMPI_MCA_btl": "self,tcp",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "LD_PRELOAD": "/nix/store/0c6kzph7l0dcbfmjap64f0czdafn3b7x-jemalloc-5.3.0/lib/libjemalloc.so",
        "HOROVOD_FUSION_THRESHOLD": "134217728",
        "HOROVOD_TIMELINE": "/scratch/timeline.json",
        "OMPI_MCA_hwloc_base": "-p 8080 -pthread --mca compass:3 bypass=1",
    }
    assert recorded(settings) == set(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "/root"),
        ("HOROVOD_TIMELINE", "DYNAMIC"),
        ("MY_SETTING", "1"),
        ("UCX_AUTH", "hunter2"),
        ("UCX_Authorization", "hunter2"),
        ("OMPI_MCA_x_bearer", "hunter2"),
        ("NCCL_TOKEN", "hunter2"),
        ("GLOO_API_KEY", "hunter2"),
        ("GLOO_PASS", "hunter2"),
        ("HOROVOD_SECRET", "hunter2"),
        ("GLOO_URL", "http://user:pass@h"),
        ("GLOO_URL", "tcp://user@h:1"),
        ("UCX_HEADER", "Authorization: Bearer abc"),
        ("OMPI_MCA_x", "password=hunter2"),
        ("OMPI_MCA_x", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln"),
        ("NCCL_X", "ghp_0123456789abcdefghij"),
        ("NCCL_X", "0123456789abcdef0123456789abcdef"),
        ("OMPI_MCA_btl_pw", "hunter2"),
        ("UCX_PW", "hunter2"),
        ("NCCL_AccountKey", "hunter2"),
        ("NCCL_X", "rk_live_51H8abcdEFGHijklMN"),
        ("NCCL_X", "sk_live_51H8abcdEFGH"),
        ("NCCL_X", "DefaultEndpointsProtocol=https;AccountKey=abcd+/==;EndpointSuffix=x"),
        ("NCCL_X", "-u root -phunter2 db"),
        ("NCCL_X", "pw=hunter2"),
        ("UCX_X", '{"user": "ann", "password": "hunter2"}'),
        ("UCX_X", '{"login": "{\\"api_key\\":\\"hunter2\\"}"}'),
        ("UCX_X", "{'token' : 'hunter2'}"),
    ],
)
def test_what_may_be_a_secret_or_says_nothing_is_not(name: str, value: str) -> None:
    assert recorded({name: value, "NCCL_DEBUG": "WARN"}) == {"NCCL_DEBUG"}


def test_what_the_plan_gives_by_reference_is_not() -> None:
    assert recorded({"NCCL_DEBUG": "WARN", "NCCL_X": "1"}, "NCCL_X") == {"NCCL_DEBUG"}


def test_a_variable_that_is_not_utf8_is_shown_with_escapes() -> None:
    problems: list[str] = []
    facts = environment.capture(problems, {"OMP_WEIRD": "a\udcff", "OMP_PLAIN": "ä"})
    assert facts["variable.OMP_WEIRD"] == r"a\xff"
    assert facts["variable.OMP_PLAIN"] == "ä"
    assert problems == []


def test_the_boot_is_told_and_names_the_machine_as_its_host_does() -> None:
    facts = environment.capture([], {})
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert environment.differences({"boot_id": "a", "os": "x"}, {"boot_id": "b", "os": "y"}) == ["os: x, rank 0 has y"]


def test_a_fact_that_cannot_be_asked_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = environment.capture([], {})

    def fail() -> str:
        raise RuntimeError("the driver is out of order")

    monkeypatch.setattr(environment, "_memory_bytes", fail)
    problems: list[str] = []
    facts = environment.capture(problems, {})
    assert facts == {key: value for key, value in whole.items() if key != "memory.bytes"}
    assert problems == ["environment: memory.bytes is not known: RuntimeError: the driver is out of order"]


SHAPING = {
    **dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "MPICH_GPU_SUPPORT_ENABLED"), "1"),
    **dict.fromkeys(("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "PMIX_VERSION"), "0"),
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUDNN_LOGINFO_DBG": "0",
    "FI_PROVIDER": "efa",
    "OFI_NCCL_PROTOCOL": "RDMA",
    "SHARP_COLL_ENABLE_SAT": "1",
    "UCC_TLS": "ucp,cuda",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF,0xF0",
    "SLURM_JOB_QOS": "normal",
    **dict.fromkeys(("SLURM_TOPOLOGY_ADDR", "SLURM_MEM_PER_NODE", "SLURM_TRES_PER_TASK", "APPTAINER_BIND"), "s1.n1"),
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "project1",
    "SLURM_DISTRIBUTION": "block:block",
    **dict.fromkeys(("MALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"), "glibc.malloc.trim_threshold=1"),
    "LOADEDMODULES": "gcc/13.2:cuda/12.4:openmpi/5.0",
}


def test_what_shapes_a_run_on_gpus_is_recorded() -> None:
    assert recorded(SHAPING) == set(SHAPING)


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMIX_SERVER_URI41", "PMIX_SYSTEM_TMPDIR", "MPICH_INTERFACE_HOSTNAME"])
def test_what_a_launcher_tells_its_own_processes_is_not(name: str) -> None:
    assert recorded({name: "3"}) == set()


def test_lists_of_folders_are_told_apart_and_not_written_down() -> None:
    one, other = (
        environment.capture([], {"LD_LIBRARY_PATH": path})["variable.LD_LIBRARY_PATH"]
        for path in ("/home/ann/secret/lib:/opt/lib", "/home/ann/other/lib:/opt/lib")
    )
    assert one != other
    assert one.startswith("2 folders, SHA-256 ")
    assert "ann" not in one


def test_the_version_that_runs_is_recorded() -> None:
    assert environment.capture([], {})["dlbench.version"] == dlbench.__version__


def test_a_loaded_mpi_library_names_itself() -> None:
    pytest.importorskip("mpi4py")
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from dlbench.machine import environment\n"
        "assert 'mpi.library' not in environment.capture([], {})\n"
        "from mpi4py import MPI\n"
        "assert MPI.Get_library_version().startswith(environment.capture([], {})['mpi.library'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_switches_of_torch_are_recorded_for_the_device_on_which_they_act() -> None:
    problems: list[str] = []
    cpu = torch_facts(problems, torch.device("cpu"))
    assert cpu["torch.cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    gpu = torch_facts(problems, torch.device("cuda", 0))
    assert {"torch.tf32.matmul", "torch.tf32.cudnn", "torch.cudnn.benchmark", "torch.sdpa"} <= gpu.keys() - cpu.keys()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        assert "math" not in torch_facts(problems, torch.device("cuda", 0))["torch.sdpa"]
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert problems == []
