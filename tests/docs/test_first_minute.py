"""The lines that docs/gpu.md says a first run on a GPU ends with are those that dlbench prints, word by word."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlbench.cli.options import expand_request
from dlbench.errors import DlbenchError, ExitCode
from dlbench.jobs import local
from dlbench.machine import gpus
from dlbench.machine.cuda_parts import compiler_lacks
from dlbench.machine.gpus import Gpu
from dlbench.node import devices, failures
from dlbench.node.__main__ import _fail
from dlbench.node.failures import failure_of
from dlbench.node.training import programs
from dlbench.specs.requests import Request
from tests.analysis.test_numbers import MLX, doubts_of_network
from tests.docs.test_docs import DOCS, FENCE
from tests.node.test_devices import plan_of
from tests.support.gpus import gpu_files
from tests.support.training_data import rank_place

AREA = "## A rank's first minute on a GPU\n"


def said_by_the_page() -> list[str]:
    """Each printed line of the page, which wraps them, with single blanks."""
    area = (DOCS / "gpu.md").read_text(encoding="utf-8").split(AREA)[1].split("\n## ")[0]
    return [" ".join(match["body"].split()) for match in FENCE.finditer(area) if match["language"] == "text"]


class AcceleratorError(RuntimeError):
    """As torch 2.8 and newer raise it."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight GPUs with driver 535, a torch for CUDA 13, and no list of devices; where the files are."""
    for name, value in (("__version__", "2.13.0+cu130"), ("version.cuda", "13.0"), ("version.hip", None)):
        monkeypatch.setattr(f"torch.{name}", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_files(tmp_path, boards=8)


def without_devices(root: Path) -> Path:
    for file in (root / "dev").iterdir():
        file.unlink()
    (root / ".dockerenv").touch()
    return root


def old_driver(root: Path, patch: pytest.MonkeyPatch) -> None:
    devices.device_for(plan_of("none"), rank_place(0, 1), root)


def old_card(root: Path, patch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": True,
        "init": None,
        "device_count": 1,
        "set_device": None,
        "get_arch_list": ["sm_75", "sm_80", "sm_90", "sm_120", "compute_120"],
        "get_device_capability": (7, 0),
        "get_device_name": "Tesla V100-SXM2-16GB",
    }.items():
        patch.setattr(torch.cuda, name, lambda *given, value=value: value)
    devices.device_for(plan_of("none"), rank_place(0, 1), root)


def sockets(root: Path, patch: pytest.MonkeyPatch) -> None:
    severity, text = doubts_of_network(root / "run", {"NET/Socket": 8}, MLX)["nccl-socket"]
    assert severity == "serious"
    print(text, file=sys.stderr)


def exclusive(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failures, "restricted_mode", lambda uuid: "exclusive process mode, used by process 4711")
    raise AcceleratorError(
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevicesUnavailable' in "
        "https://docs.nvidia.com/x for more information.\nCUDA kernel errors might be asynchronously reported at x.\n"
    )


def one_slice(root: Path, patch: pytest.MonkeyPatch) -> None:
    devices.require_distinct([(rank, "n0", "MIG-7f2a", "0000:1b:00.0") for rank in range(2)], by_nccl=True)


def two_slices(root: Path, patch: pytest.MonkeyPatch) -> None:
    devices.require_distinct([(rank, "n0", f"MIG-{rank}", "0000:1b:00.0") for rank in range(2)], by_nccl=True)


def container_of_a_job(root: Path, patch: pytest.MonkeyPatch) -> None:
    devices.device_for(plan_of("gres"), rank_place(0, 1), without_devices(root))


def preset_for_gpus(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(local, "hidden_gpus", functools.partial(gpus.hidden_gpus, root=without_devices(root)))
    patch.setattr(local, "has_gpu", lambda: False)
    expand_request(Request(workload="resnet50", preset="gpu"))


def container_here(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(local, "hidden_gpus", functools.partial(gpus.hidden_gpus, root=without_devices(root)))
    expand_request(Request(workload="resnet50", preset="ci"))


def no_compiler(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(programs, "compiler_lacks", functools.partial(compiler_lacks, environment={"PATH": str(root)}))
    patch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    programs.require_compiler(torch.device("cuda"), "train.optimizer.implementation fused", "set it to foreach")


CASES = (
    *(old_driver, old_card, sockets, exclusive, one_slice, two_slices),
    *(container_of_a_job, preset_for_gpus, container_here, no_compiler),
)


@pytest.mark.parametrize(
    ("said", "case"), list(zip(said_by_the_page(), CASES, strict=True)), ids=[case.__name__ for case in CASES]
)
def test_what_the_page_says_is_printed_is_printed(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    case: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    place = rank_place(1 if case is exclusive else 0, 2)
    try:
        case(machine, monkeypatch)
    except (DlbenchError, AcceleratorError) as error:
        gpu = Gpu(uuid="GPU-5d3c", pci_bus_id="0000:81:00.0", numa_node=None, cores=frozenset())
        failure = failure_of(error, place, gpu)
        assert failure.exit_code == (ExitCode.USAGE if case is preset_for_gpus else ExitCode.ENVIRONMENT)
        _fail(None, failure)
    assert " ".join(capsys.readouterr().err.split()) == said
