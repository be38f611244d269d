"""Which GPUs CUDA will show, and where they are: a made NVML, and files under a made /sys. Whether ranks started here
would find a GPU, may open it, and whether a torch can compute on it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlbench.machine import environment, gpus
from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import (
    Gpu,
    adapters,
    bus_of_nvml,
    cpu_list,
    driver_version,
    fabric_adapters,
    hidden_gpus,
    is_given_gpu,
    numa_nodes_of,
    nvidia_buses,
    place_of,
    unusable,
    visible,
)
from tests.support.gpus import amd_files, gpu_files
from tests.support.nvml_library import build, variables


def gpu(number: int, uuid: str = "") -> Gpu:
    name = uuid or f"GPU-{number}{number}"
    return Gpu(uuid=name, pci_bus_id=f"0000:{0x10 + number:02x}:00.0", numa_node=number // 2, cores=frozenset())


GPUS = [gpu(number) for number in range(4)]
SLICES = [gpu(3, "MIG-a1"), gpu(3, "MIG-a2")]


def made_machine(root: Path, gpus: int = 2) -> Path:
    """Two NUMA nodes of four processors; GPU n is beside node n % 2, an adapter beside node 1."""
    files = {
        "dev/nvidiactl": "",
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/class/infiniband/mlx5_0/device/numa_node": "1",
        "sys/class/infiniband/rxe0/device/numa_node": "-1",
        "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100",
        "sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086",
    }
    for number in range(gpus):
        device = f"sys/bus/pci/devices/0000:{0x10 + number:02x}:00.0"
        files |= {
            f"{device}/class": "0x030200",
            f"{device}/vendor": "0x10de",
            f"{device}/numa_node": str(number % 2),
            f"{device}/local_cpulist": ("0-3", "4-7")[number % 2],
        }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("2,0", ["GPU-22", "GPU-00"]),
        (" 1 , 0", ["GPU-11", "GPU-00"]),
        ("0,9,1", ["GPU-00"]),  # CUDA cuts the list at what there is not
        ("0,0", ["GPU-00"]),
        ("GPU-2,GPU-00", ["GPU-22", "GPU-00"]),
        ("gpu-1", ["GPU-11"]),
        ("GPU-", []),  # of several
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("MIG-a2,MIG-a1", ["MIG-a2"]),  # one slice a process
        ("3", ["MIG-a1"]),  # a GPU in MIG mode computes in its slices alone
        (None, ["GPU-00", "GPU-11", "GPU-22"]),
    ],
)
def test_a_list_of_visible_devices_is_read_as_cuda_reads_it(listed: str | None, expected: list[str]) -> None:
    assert [one.uuid for one in visible(listed, GPUS, SLICES)] == expected


def test_where_things_are_is_told_by_the_kernel(tmp_path: Path) -> None:
    root = made_machine(tmp_path)
    assert nvidia_buses(root) == ("0000:10:00.0", "0000:11:00.0")
    assert place_of("0000:11:00.0", root) == (1, frozenset({4, 5, 6, 7}))
    assert place_of("0000:99:00.0", root) == (None, frozenset())
    assert numa_nodes_of([3, 4], root) == (0, 1)
    assert adapters(root) == {"mlx5_0": 1}
    assert fabric_adapters(root) == {}, "none has an active port"
    (root / "sys/bus/pci/devices/0000:10:00.0/numa_node").write_text("-1\n")
    assert place_of("0000:10:00.0", root) == (None, frozenset())


def test_addresses_and_lists_of_processors() -> None:
    assert bus_of_nvml("00000000:1B:00.0") == "0000:1b:00.0"
    assert bus_of_nvml("00010000:1B:00.0") == "10000:1b:00.0"
    assert cpu_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("") == cpu_list("x-3") == frozenset()


ASK = """
import json, os, sys
from pathlib import Path
from dlbench.machine.gpus import gpu_trouble, gpus_of_node
found = gpus_of_node(os.environ, Path(sys.argv[1]))
told = [[one.uuid, one.pci_bus_id, one.numa_node, sorted(one.cores), one.is_slice] for one in found]
print(json.dumps([told, gpu_trouble(found[0].uuid) if found else ""]))
"""


def asked(folder: Path, root: Path, **switches: object) -> tuple[list[list[object]], str]:
    """In a process of its own, by the real nvidia-ml-py; torch is not loaded."""
    shown = {key: str(switches.pop(key)) for key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if key in switches}
    before = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    environment = {**before, **variables(folder, **switches), **shown}
    words = [sys.executable, "-P", "-c", ASK, str(root)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    told, trouble = json.loads(done.stdout)
    return told, trouble


def test_gpus_are_found_by_nvml_with_their_place(tmp_path: Path) -> None:
    folder, root = build(tmp_path), made_machine(tmp_path / "root", 3)
    told, trouble = asked(folder, root, gpus=3, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="2,1")
    assert [one[1:4] for one in told] == [["0000:12:00.0", 0, [0, 1, 2, 3]], ["0000:11:00.0", 1, [4, 5, 6, 7]]]
    assert trouble == ""
    # In CUDA's own order numbers say nothing; of one GPU there is but one order.
    assert asked(folder, root, gpus=3, CUDA_VISIBLE_DEVICES="2,1")[0] == []
    assert len(asked(folder, root, gpus=1)[0]) == 1
    split, _ = asked(folder, root, gpus=2, mig=0, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="0")
    assert [one[4] for one in split] == [True]
    assert asked(folder, root, gpus=2, init=9)[0] == []
    _, lost = asked(folder, root, gpus=2, lost="0=4", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert lost


def test_adapters_of_fast_networks_are_found_by_kind_and_only_where_a_link_is_active(tmp_path: Path) -> None:
    made = {  # name: driver, state, link layer
        "mlx5_0": ("mlx5_core", "4: ACTIVE", "InfiniBand"),
        "mlx5_1": ("mlx5_core", "1: DOWN", "InfiniBand"),
        "mlx5_2": ("mlx5_core", "4: ACTIVE", "Ethernet"),
        "rdmap16s27": ("efa", "4: ACTIVE", "Unspecified"),
        "hfi1_0": ("hfi1", "4: ACTIVE", "InfiniBand"),
        "rxe0": ("", "4: ACTIVE", "Ethernet"),  # made by software: it belongs to no device
    }
    for name, (driver, state, layer) in made.items():
        adapter = tmp_path / "sys/class/infiniband" / name
        (adapter / "ports/1").mkdir(parents=True)
        (adapter / "ports/1/state").write_text(f"{state}\n")
        (adapter / "ports/1/link_layer").write_text(f"{layer}\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (adapter / "device").mkdir()
            (adapter / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert fabric_adapters(tmp_path) == {
        "mlx5_0": "InfiniBand",
        "mlx5_2": "RoCE",
        "rdmap16s27": "EFA",
        "hfi1_0": "Omni-Path",
        "cxi0": "Slingshot",
    }


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
