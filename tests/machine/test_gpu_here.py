"""Whether ranks started here would find a GPU, may open it, and whether a torch can compute on it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlbench.machine import environment, gpus
from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import driver_version, hidden_gpus, is_given_gpu, unusable
from tests.support.gpus import amd_files, gpu_files


@pytest.mark.parametrize("visible", [None, "0", "1,0", " 3", "GPU-8932f937-d72c", "MIG-2a6f", "0,-1"])
@pytest.mark.parametrize("device", ["dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1", "dev/kfd"])
def test_a_driver_s_device_file_is_a_gpu(tmp_path: Path, device: str, visible: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert not has_gpu(tmp_path, environment)
    (amd_files(tmp_path, 90010) / "dev/kfd").unlink()
    (tmp_path / device).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / device).touch()
    assert has_gpu(tmp_path, environment)


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "NoDevFiles", "none"])
def test_a_list_that_names_none_hides_every_gpu(tmp_path: Path, visible: str) -> None:
    gpu_files(tmp_path)
    assert not has_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": visible})
    assert not is_given_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": visible})
    assert has_gpu(tmp_path, {"ROCR_VISIBLE_DEVICES": visible}), "a variable of AMD's hides no NVIDIA GPU"
    (tmp_path / "dev/nvidiactl").unlink()
    assert has_gpu(amd_files(tmp_path, 110000), {})
    assert not has_gpu(tmp_path, {"ROCR_VISIBLE_DEVICES": visible})


def test_a_gpu_that_may_not_be_opened_is_another_job_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm's control groups have it: device files of all GPUs are there, and those of others do not open."""
    gpu_files(tmp_path, boards=2)
    assert is_given_gpu(tmp_path, {})
    assert hidden_gpus(tmp_path, {}) is None
    monkeypatch.setattr(gpus.os, "access", lambda path, mode: False)
    assert has_gpu(tmp_path, {})
    assert not is_given_gpu(tmp_path, {})
    assert hidden_gpus(tmp_path, {}) == (
        "2 NVIDIA GPUs are on the PCI bus, but this job may not open their device files",
        "request GPUs (slurm.gpu_request)",
    )


def test_a_container_without_devices_still_sees_the_bus(tmp_path: Path) -> None:
    gpu_files(tmp_path, boards=8)
    for file in (tmp_path / "dev").iterdir():
        file.unlink()
    found = hidden_gpus(tmp_path, {})
    assert found is not None
    assert found.reason == "8 NVIDIA GPUs are on the PCI bus, but /dev has no device file of a GPU"
    assert found.remedy == (
        "load NVIDIA's driver, or run nvidia-smi once; in a container, give the container its devices "
        "(container.gpu=nvidia; apptainer --nv; docker --gpus all)"
    )
    (tmp_path / ".dockerenv").touch()
    known = hidden_gpus(tmp_path, {})
    assert known is not None
    assert known.remedy.startswith("give the container its devices (container.gpu=nvidia; apptainer --nv; docker --gpu")
    assert hidden_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) is None, "somebody wants the CPU"
    assert hidden_gpus(tmp_path / "none", {}) is None


@pytest.mark.parametrize("installed", ["2.13.0+cu130", "2.13.0+cpu", None])
def test_a_gpu_in_amd_s_processor_is_none_without_torch_for_rocm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    """A PC's /dev/kfd is there and opens for everybody, while its owner has PyPI's torch and trains on the CPU."""
    amd_files(tmp_path, 90012)

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not has_gpu(tmp_path, {})
    assert not is_given_gpu(tmp_path, {})
    assert hidden_gpus(tmp_path, {}) == (
        "AMD's driver (/dev/kfd) shows only a GPU in the processor, and torch is not built for ROCm",
        "install torch for ROCm, from PyTorch's own index, to try that",
    )
    monkeypatch.setattr(environment, "hidden_gpus", lambda: hidden_gpus(tmp_path, {}))
    assert environment.capture([], {})["gpu.unused"].startswith("AMD's driver (/dev/kfd) shows only a GPU")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+rocm7.0")
    assert is_given_gpu(tmp_path, {})
    assert hidden_gpus(tmp_path, {}) is None


def test_an_amd_gpu_whose_group_the_user_is_not_in_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kfd = amd_files(tmp_path, 90402) / "dev/kfd"
    kfd.chmod(0o660)
    monkeypatch.setattr(gpus.os, "access", lambda path, mode: False)
    monkeypatch.setattr(gpus.os, "geteuid", lambda: kfd.stat().st_uid + 1)
    assert not is_given_gpu(tmp_path, {}), "its group does not help: a control group keeps the job off"
    assert unusable("2.13.0+rocm7.0", None, "7.0", tmp_path) is None
    monkeypatch.setattr(gpus.os, "getegid", lambda: kfd.stat().st_gid + 1)
    monkeypatch.setattr(gpus.os, "getgroups", list)
    monkeypatch.setattr(gpus.grp, "getgrgid", lambda number: SimpleNamespace(gr_name="render"))
    assert is_given_gpu(tmp_path, {})
    assert unusable("2.13.0+rocm7.0", None, "7.0", tmp_path) == (
        "/dev/kfd is for group render, which this user is not in",
        "join group render (as root: usermod -aG render USER) and log in again",
    )


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)", "570.86.15"),
        ("NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build", "580.65.06"),
        ("something else", ""),
    ],
)
def test_the_kernel_module_says_which_driver_it_is(tmp_path: Path, line: str, version: str) -> None:
    gpu_files(tmp_path, driver=line)
    assert driver_version(tmp_path) == version
