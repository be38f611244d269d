"""What a CUDA build needs: found where it may lie, and named where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.machine.cuda_parts import Nccl, Nvcc, find_cuda_parts


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
