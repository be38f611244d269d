"""Versions, build parts and arithmetic of the machine's libraries."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from dlbench.machine import environment
from dlbench.machine.arithmetic import lacking_arithmetic, native_precisions
from dlbench.machine.cuda_parts import Nccl, Nvcc, find_cuda_parts
from dlbench.node.devices import torch_facts


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


def test_a_fact_that_cannot_be_asked_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = environment.capture([], {})

    def fail() -> str:
        raise RuntimeError("the driver is out of order")

    monkeypatch.setitem(environment._SINGLE, "memory.bytes", fail)
    problems: list[str] = []
    facts = environment.capture(problems, {})
    assert facts == {key: value for key, value in whole.items() if key != "memory.bytes"}
    assert problems == ["environment: memory.bytes is not known: RuntimeError: the driver is out of order"]


def test_lists_of_folders_are_told_apart_and_not_written_down() -> None:
    one, other = (
        environment.capture([], {"LD_LIBRARY_PATH": path})["variable.LD_LIBRARY_PATH"]
        for path in ("/home/ann/secret/lib:/opt/lib", "/home/ann/other/lib:/opt/lib")
    )
    assert one != other
    assert one.startswith("2 folders, SHA-256 ")
    assert "ann" not in one


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


def nccl_in(home: Path, *, library: str = "lib/libnccl.so.2", patch: int = 7) -> Path:
    (home / "include").mkdir(parents=True)
    (home / "include/nccl.h").write_text(
        f'#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH {patch}\n#define NCCL_SUFFIX ""\n'
    )
    if library:
        (home / library).parent.mkdir(parents=True, exist_ok=True)
        (home / library).touch()
    return home


def nvcc_in(home: Path, version: str = "13.0.88", *, runtime: bool = True) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir(exist_ok=True)
    program = home / "bin/nvcc"
    program.write_text(
        "#!/bin/sh\ncase $1 in --list-gpu-code) echo 'sm_80 sm_90 sm_90a';;\n"
        f"*) echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'release 13, V{version}';; esac\n"
    )
    program.chmod(0o755)
    if runtime:
        (home / "include/cuda_runtime.h").touch()
    return home


def found(root: Path, cuda: str = "13.0", **environment: str) -> tuple[Nccl, Nvcc]:
    parts = find_cuda_parts(cuda, root / "packages", environment, root)
    assert not isinstance(parts, str), parts
    return parts


def lacking(root: Path, cuda: str = "13.0", **environment: str) -> str:
    parts = find_cuda_parts(cuda, root / "packages", environment, root)
    assert isinstance(parts, str)
    assert "\n" not in parts
    return parts


def test_torchs_own_packages_are_found(tmp_path: Path) -> None:
    home = nccl_in(tmp_path / "packages/nvidia/nccl")
    nccl_in(tmp_path / "usr", library="lib/x86_64-linux-gnu/libnccl.so")
    nvcc_in(tmp_path / "packages/nvidia/cu13")
    nccl, nvcc = found(tmp_path)
    # One NCCL in a process: torch's, though the system has another one.
    assert nccl == Nccl(home=home, library=home / "lib/libnccl.so.2", version="2.29.7")
    assert nvcc == Nvcc(home=tmp_path / "packages/nvidia/cu13", version="13.0.88", architectures=("80", "90"))


@pytest.mark.parametrize("place", ["usr", "usr/local/cuda"])
@pytest.mark.parametrize("library", ["lib64/libnccl_static.a", "lib/x86_64-linux-gnu/libnccl.so"])
def test_the_systems_are_found(tmp_path: Path, place: str, library: str) -> None:
    nvcc_in(tmp_path / "usr/local/cuda")
    if place != "usr/local/cuda":
        nccl_in(tmp_path / place, library=library)
    else:
        (tmp_path / place / "include/nccl.h").touch()
        (tmp_path / place / library).parent.mkdir(parents=True)
        (tmp_path / place / library).touch()
    nccl, nvcc = found(tmp_path)
    assert nccl.library == tmp_path / place / library
    assert nvcc.home == tmp_path / "usr/local/cuda"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    said = lacking(tmp_path)
    assert "nccl.h is missing" in said
    assert "nvcc of CUDA 13.0 is missing" in said
    assert "pip install 'nvidia-cuda-nvcc==13.0.*'" in said
    # Before CUDA 13 pip's packages hold no nvcc.
    assert "pip" not in lacking(tmp_path, "12.8")
    nccl_in(tmp_path / "packages/nvidia/nccl", library="")
    assert lacking(tmp_path).startswith("libnccl.so is missing next to ")
    (tmp_path / "packages/nvidia/nccl/lib").mkdir()
    (tmp_path / "packages/nvidia/nccl/lib/libnccl.so.2").touch()
    assert "nccl" not in lacking(tmp_path)
    old = nvcc_in(tmp_path / "usr/local/cuda", "12.4.1")
    assert lacking(tmp_path) == f"nvcc 12.4.1 in {old} is not of torch's CUDA 13.0"
    bare = nvcc_in(tmp_path / "bare", runtime=False)
    assert lacking(tmp_path, CUDA_HOME=str(bare)) == f"cuda_runtime.h is missing next to nvcc 13.0.88 in {bare}"


AVX512 = "fpu avx2 f16c avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"


def machine(folder: Path, flags: str, key: str = "flags\t\t") -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{key}: {flags}\nbugs\t\t: none\n\n")
    return folder


@pytest.mark.parametrize(
    ("architecture", "flags", "found"),
    [
        ("x86_64", AVX512, set()),
        ("x86_64", f"{AVX512} avx512_bf16", {"bf16"}),
        ("x86_64", f"{AVX512} amx_bf16 amx_tile amx_int8", {"bf16"}),
        ("x86_64", f"{AVX512} avx512_bf16 avx512_fp16", {"bf16", "fp16"}),
        ("x86_64", "fpu avx2 avx_ne_convert", set()),
        ("aarch64", "fp asimd fphp asimdhp", {"fp16"}),
        ("aarch64", "fp asimd fphp asimdhp sve bf16 i8mm", {"bf16", "fp16"}),
        ("aarch64", "fp asimd", set()),
    ],
)
def test_arithmetic_is_what_the_flags_show(
    architecture: str, flags: str, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    root = machine(tmp_path, flags, "Features\t" if architecture == "aarch64" else "flags\t\t")
    assert native_precisions(root) == found
    for precision in ("bf16", "fp16"):
        assert (lacking_arithmetic(precision, root) == "") == (precision in found)
    assert lacking_arithmetic("fp32", root) == ""


def test_what_the_flags_do_not_show_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert native_precisions(machine(tmp_path, AVX512)) is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert native_precisions(tmp_path / "none") is None
    assert lacking_arithmetic("bf16", tmp_path / "none") == ""


def test_the_reason_names_the_flags_and_a_gpu_is_asked_by_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    root = machine(tmp_path, AVX512)
    assert lacking_arithmetic("bf16", root) == (
        "this CPU has no bf16 arithmetic (/proc/cpuinfo shows no avx512_bf16 or amx_bf16)"
    )
    (root / "dev").mkdir()
    (root / "dev/nvidiactl").touch()
    # Hidden, it computes nothing.
    assert lacking_arithmetic("bf16", root) != ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert lacking_arithmetic("bf16", root) == ""
