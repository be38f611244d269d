"""Checks of the machine by ranks: site, TF32, page-locked memory, what may crash a library."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs.preflight.check import plan_of as preflight_plan
from dlbench.machine import environment
from dlbench.machine.storage import file_system_of
from dlbench.node import devices as facts_module
from dlbench.node import ranks
from dlbench.node import site_check as libraries_of
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.devices import torch_facts
from dlbench.node.page_locked import locked_memory, page_lock, page_unlock
from dlbench.node.ranks import (
    CoreBinding,
    RankPlace,
    loader_bytes,
    needs_host_name,
    require_machine,
    require_shared_memory,
)
from dlbench.node.site_check import libraries, scratch
from dlbench.node.training.precision import Precision
from dlbench.specs.choices import choose_system
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from dlbench.specs.system import StorageSpec, TierSpec
from dlbench.specs.training import TrainSpec
from tests.support.run_factory import NOW
from tests.support.training_data import rank_place


def plan_of(workload: str, **request: Any) -> RunPlan:
    asked = {"workload": workload, "points": (2,), "repeats": 1, "series": "s", "preset": "ci", **request}
    return expand(Request(**asked), machine_cores=2, now=NOW)[0]


PLACE = RankPlace(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, num_nodes=1, host="n0", token="")


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_the_bytes_of_a_sample_are_those_of_its_tensors(workload: str) -> None:
    work = plan_of(workload, data="synthetic").workload
    batch = synthetic_batch(work.model, work.data, 3, torch.Generator())
    assert sum(tensor.nbytes for tensor in batch.values()) == 3 * work.model.sample_bytes(work.data)
    assert len(batch) <= ranks._MAX_TENSORS


def room(free: int, size: int) -> Callable[[Path], os.statvfs_result]:
    return lambda path: os.statvfs_result((4096, 4096, size // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))


def test_loaders_need_shared_memory_for_what_they_read_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of("resnet50", data="/data/images", overrides={"data.loader_workers": 2})
    batch = plan.workload.train.batch_per_rank * (3 * plan.workload.model.image_size**2 + 8)  # type: ignore[union-attr]
    needed = loader_bytes(plan)
    # Of each process two that it reads ahead and one in use; and one on its way to a GPU.
    assert 7 * batch <= needed <= 7 * batch + 7 * 7 * 4096
    monkeypatch.setattr(ranks.os, "statvfs", room(2 * needed + 4096, 4 * needed))
    require_shared_memory(plan, PLACE)
    monkeypatch.setattr(ranks.os, "statvfs", room(2 * needed - 4096, 4 * needed))
    with pytest.raises(EnvironmentLacksError) as caught:
        require_shared_memory(plan, PLACE)
    assert str(caught.value).startswith("/dev/shm: ")
    assert "the loader processes of 2 ranks need up to" in str(caught.value)
    assert "--shm-size), or lower data.loader_workers" in str(caught.value)
    monkeypatch.undo()
    with pytest.raises(EnvironmentLacksError, match="No such file"):
        require_shared_memory(plan, PLACE, tmp_path / "shm")


def test_evaluation_has_loaders_of_its_own() -> None:
    overrides = {"data.loader_workers": 1}
    speed = plan_of("resnet50", data="/data/images", overrides=overrides)
    quality = plan_of("resnet50", data="/data/images", overrides={**overrides, "measure.until": "quality"})
    assert loader_bytes(quality) > loader_bytes(speed)


def nameless(*asked: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


def test_a_host_name_that_leads_nowhere_is_said_before_horovod_dies_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "foo.invalid")
    monkeypatch.setattr(environment.socket, "getaddrinfo", nameless)
    horovod, ddp = (plan_of("bert", data="synthetic", engine=engine) for engine in ("horovod", "ddp"))
    assert needs_host_name(horovod)
    with pytest.raises(EnvironmentLacksError) as caught:
        require_machine(horovod, PLACE)
    assert "the host name 'foo.invalid' does not resolve on the machine itself" in str(caught.value)
    assert "/etc/hosts" in str(caught.value)
    assert not needs_host_name(ddp)
    require_machine(ddp, PLACE)


@pytest.mark.parametrize("error", [UnicodeError("label too long"), OSError(5, "Input/output error")])
def test_a_name_that_cannot_even_be_asked_for_leads_nowhere(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def ask(*asked: object) -> None:
        raise error

    monkeypatch.setattr(environment.socket, "gethostname", lambda: "h\udcffx")
    monkeypatch.setattr(environment.socket, "getaddrinfo", ask)
    problem = environment.host_name_problem()
    assert problem.startswith(r"the host name 'h\\xffx' does not resolve")
    problem.encode()


@pytest.mark.parametrize(("rank", "number", "ranks"), [(0, 0, [0, 1]), (3, 1, [2, 3]), (5, 2, [4, 5])])
def test_neighbours_share_a_replica(rank: int, number: int, ranks: list[int]) -> None:
    replica = rank_place(rank, 6).replica(2)
    assert (replica.number, replica.replicas, list(replica.ranks)) == (number, 3, ranks)


def test_a_place_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    found = scratch(StorageSpec(local=TierSpec(path="$HERE/{host}")), "local", {"HERE": str(tmp_path)}, "n1")
    assert "No such file" in found.problem
    (tmp_path / "n1").mkdir()
    found = scratch(StorageSpec(local=TierSpec(path="$HERE/{host}")), "local", {"HERE": str(tmp_path)}, "n1")
    assert (found.problem, found.path) == ("", str(tmp_path / "n1"))
    assert found.free_bytes
    assert found.file_system
    assert list((tmp_path / "n1").iterdir()) == []


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "a b").mkdir()
    place = str(tmp_path / "a b").replace(" ", "\\040")
    lines = (
        "21 1 0:1 / / rw - ext4 /dev/sda rw",
        f"22 21 0:2 / {place} rw,relatime shared:1 - lustre mgs rw",
        f"23 21 0:3 / {place}x rw - nfs x rw",
    )
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    assert file_system_of(tmp_path / "a b", tmp_path) == "lustre"
    assert file_system_of(tmp_path, tmp_path) == "ext4"
    assert file_system_of(tmp_path / "missing", tmp_path) == ""


def test_a_library_that_does_not_import_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenlib.py").write_text("raise ImportError('libnothing.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(libraries_of, "REQUIRED", ("numpy", "brokenlib", "nosuchlib"))
    monkeypatch.setattr(libraries_of, "_OPTIONAL", ())
    versions, broken = libraries()
    assert set(versions) == {"python", "dlbench", "numpy"}
    assert set(broken) == {"brokenlib"}
    assert broken["brokenlib"] == "ImportError: libnothing.so: cannot open"


def test_what_compiling_lacks_is_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = preflight_plan(choose_system("local", {}), 1, machine_cores=1, now=NOW)
    monkeypatch.setattr(libraries_of, "libraries", lambda: ({"torch": "2.13.0"}, {}))
    monkeypatch.setattr(
        libraries_of, "bind", lambda plan, place: CoreBinding(cores=(0,), pinned=True, threads=1, warnings=())
    )
    monkeypatch.setattr(libraries_of, "compiler_lacks", lambda *, on_gpu: ("no gcc", "install it"))
    place = rank_place(0, 1)
    for gpu, said in ((None, ""), ("GPU-0", "no gcc; install it")):
        monkeypatch.setattr(libraries_of, "_gpu", lambda *given, gpu=gpu: (gpu, ""))
        assert libraries_of.check_rank(plan, place).compiler == said


GPU = torch.device("cuda", 0)


def train_of(precision: str, **changes: object) -> TrainSpec:
    given = {"batch_per_rank": 1, "precision": precision, "optimizer": {"name": "sgd", "learning_rate": 1}}
    return TrainSpec.model_validate({**given, **changes})


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    facts_module.set_tf32(False)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize("is_on", [True, False])
def test_both_interfaces_tell_what_was_set(is_on: bool) -> None:
    facts_module.set_tf32(is_on)
    assert facts_module.tf32_products() == {"matmul": is_on, "cudnn": is_on}
    # torch raises here where one interface was written and the other is read.
    assert torch.backends.cuda.matmul.allow_tf32 is is_on
    assert torch.backends.cudnn.allow_tf32 is is_on
    problems: list[str] = []
    facts = torch_facts(problems, GPU)
    word = "on" if is_on else "off"
    assert (facts["torch.tf32.matmul"], facts["torch.tf32.cudnn"]) == (word, word)
    assert not [problem for problem in problems if "tf32" in problem]


@pytest.mark.usefixtures("ampere")
def test_a_precision_switches_it() -> None:
    precision = Precision(train_of("tf32"), GPU)
    assert facts_module.tf32_products() == {"matmul": True, "cudnn": True}
    assert "TF32" in precision.text
    assert Precision(train_of("fp32"), GPU).text == "fp32, TF32 off"
    assert facts_module.tf32_products() == {"matmul": False, "cudnn": False}


@pytest.mark.parametrize("emulates", [False, True])
def test_a_cpu_has_none_and_emulates_none(emulates: bool) -> None:
    with pytest.raises(EnvironmentLacksError, match="TF32 is arithmetic of NVIDIA GPUs since Ampere; use fp32"):
        Precision(train_of("tf32", allow_emulation=emulates), torch.device("cpu"))


def test_older_gpus_and_nvidias_switch_refuse_it(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(facts_module.OVERRIDE, "0")
    with pytest.raises(EnvironmentLacksError, match="NVIDIA_TF32_OVERRIDE=0 switches it off"):
        Precision(train_of("tf32"), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(EnvironmentLacksError, match="Tesla V100 is older: TF32 is"):
        Precision(train_of("tf32"), GPU)


SIZE = 1 << 24
CUDART = """
static _Thread_local int last;
static const void *held;
int cudaHostRegister(const void *address, unsigned long size, unsigned flags) {
    if (!size || flags != 1) return last = 1;
    if (held == address) return last = 712;
    held = address;
    return 0;
}
int cudaHostUnregister(const void *address) {
    if (held != address) return last = 713;
    held = 0;
    return 0;
}
int cudaGetLastError(void) {
    int was = last;
    last = 0;
    return was;
}
"""
TORCH = "int cudaGetLastError(void);\nint check_after_kernel(void) { return cudaGetLastError(); }\n"


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in ranges)


def test_memory_is_unlocked_while_it_is_mapped_and_nothing_else_lies_there() -> None:
    unlocked: list[tuple[int, bool, int]] = []

    def unlock(address: int) -> None:
        was_mapped = is_mapped(address)
        with mmap.mmap(-1, SIZE) as other:  # takes the place, had the memory gone
            there = ctypes.c_char.from_buffer(other)
            unlocked.append((address, was_mapped, ctypes.addressof(there)))
            del there

    memory = locked_memory(SIZE, "test", lock=lambda _first, _size: 0, unlock=unlock)
    address, view = memory.data_ptr(), memory[4096:].view(torch.float32)
    view.fill_(3)
    del memory
    assert not unlocked
    assert float(view[-1]) == 3
    del view
    ((first, was_mapped, other),) = unlocked
    assert (first, was_mapped) == (address, True)
    assert abs(other - address) >= SIZE
    assert not is_mapped(address)


@pytest.fixture
def check_after_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A made CUDA runtime, which keeps each thread's last error, and a made torch that is linked with it."""
    for name, text in {"cudart": CUDART, "torch": TORCH}.items():
        (tmp_path / f"{name}.c").write_text(text, encoding="ascii")
        linked = ["-L", str(tmp_path), "-lcudart", f"-Wl,-rpath,{tmp_path}"] if name == "torch" else []
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / f"lib{name}.so", tmp_path / f"{name}.c", *linked]
        subprocess.run(command, check=True, timeout=120)
    made = ctypes.CDLL(str(tmp_path / "libtorch.so"))
    for call in (made.cudaHostRegister, made.cudaHostUnregister):
        call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint][: 3 if call is made.cudaHostRegister else 1]
    calls = SimpleNamespace(cudaHostRegister=made.cudaHostRegister, cudaHostUnregister=made.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch._C, "__file__", str(tmp_path / "libtorch.so"))
    return lambda: int(made.check_after_kernel())


def test_a_refusal_does_not_end_the_next_kernel(check_after_kernel: Callable[[], int]) -> None:
    assert page_lock(4096, 4096) == 0
    assert page_lock(4096, 4096) == 712
    assert check_after_kernel() == 0
    page_unlock(4096)
    page_unlock(4096)
    assert check_after_kernel() == 0
    with pytest.raises(EnvironmentLacksError, match=r"cannot page-lock .*\(CUDA error 7\)"):
        locked_memory(4096, "test", lock=lambda first, size: page_lock(first, 0) and 7, unlock=page_unlock)
    assert check_after_kernel() == 0
