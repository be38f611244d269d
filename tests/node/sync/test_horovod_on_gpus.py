"""Horovod's engine on GPUs, by a library that stands in for Horovod: what it needs there, and when it may trace."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.failures import failure_of
from dlbench.node.sync.horovod import report
from dlbench.node.sync.horovod.engine import HorovodEngine
from dlbench.records.folder import RunFolder
from tests.support.cuda_events import stand_in_cuda
from tests.support.run_factory import plans
from tests.support.training_data import rank_place

__all__ = ["stand_in_cuda"]


class FakeHorovod(ModuleType):
    """A Horovod over MPI that notes what is asked of it."""

    def __init__(self, *, nccl: bool, mpi: bool, size: int) -> None:
        super().__init__("horovod.torch")
        self.Compression = type("Compression", (), {"none": None, "fp16": None})
        self._nccl, self._mpi, self._size = nccl, mpi, size
        self.variables: dict[str, str] = {}
        self.broadcasts = 0

    def init(self) -> None:
        self.variables = dict(os.environ)

    def nccl_built(self) -> int:
        return 22907 if self._nccl else 0

    def mpi_built(self) -> bool:
        return self._mpi

    def gloo_built(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def broadcast_parameters(self, state: object, root_rank: int) -> None:
        self.broadcasts += 1

    def DistributedOptimizer(self, optimizer: object, **_options: object) -> object:
        return optimizer

    def allgather(self, own: torch.Tensor, name: str) -> torch.Tensor:
        return own.repeat(self._size, *[1] * (own.ndim - 1)) if own.ndim else own.repeat(self._size)


@pytest.fixture
def on_gpu(stand_in_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An engine of rank 0 on a GPU, started; its Horovod knows the variables in force then."""
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(report, "loaded_library", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def start(ranks: int, *, nccl: bool = True, mpi: bool = True) -> tuple[HorovodEngine, FakeHorovod]:
        fake = FakeHorovod(nccl=nccl, mpi=mpi, size=ranks)
        package = ModuleType("horovod")
        package.torch = fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "horovod", package)
        monkeypatch.setitem(sys.modules, "horovod.torch", fake)
        plan = plans(points=(ranks,), repeats=1, engine="horovod", launcher="mpirun")[-1]
        engine = HorovodEngine(plan, RunFolder(tmp_path), rank_place(0, ranks), torch.device("cuda"), None)
        engine.start()
        return engine, fake

    return start


def test_one_rank_needs_no_nccl_and_asks_for_nothing_of_it(on_gpu: Any) -> None:
    engine, fake = on_gpu(1, nccl=False)
    model = nn.Linear(2, 2)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)
    assert fake.broadcasts == 0
    assert "HOROVOD_TIMELINE" not in fake.variables
    (operations,) = [row for row in engine.settings() if row.key == "engine.horovod.operations"]
    assert operations.effective == "mpi"


def test_ranks_without_nccl_are_told_what_a_build_with_it_lacks(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(EnvironmentLacksError) as raised:
        on_gpu(2, nccl=False)
    said = str(raised.value)
    assert "built without NCCL, which 2 ranks on GPUs need; to build one with NCCL, install what is missing: " in said
    assert "of torch's CUDA 99.0" in said or "nvcc of CUDA 99.0 is missing" in said
    assert said.endswith("or use --engine ddp")
    # Where all is there now, what helps is to build.
    monkeypatch.setattr(report, "find_cuda_parts", lambda *_: ("NCCL", "nvcc"))
    with pytest.raises(EnvironmentLacksError, match=r"for one with it, run `dlbench setup horovod`.* --engine ddp"):
        on_gpu(2, nccl=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(EnvironmentLacksError, match="this torch is not built for CUDA"):
        on_gpu(2, nccl=False)


def test_a_horovod_that_would_trace_every_step_runs_without_its_timeline(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "/of/the/caller")
    engine, fake = on_gpu(2)
    assert "HOROVOD_TIMELINE" not in fake.variables
    model = nn.Linear(2, 2)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)
    assert fake.broadcasts == 1
    engine.watch(True)
    engine.watch(False)
    result = engine.exchange_result()
    assert (result.messages, result.window_steps, result.carrier) == ((), 0, "nccl")
    assert result.evidence.startswith("Horovod's timeline: not measured here: ")
    (exchange,) = [row for row in engine.settings() if row.key == "sync.exchange"]
    assert exchange.effective is None
    assert exchange.evidence == report.TRACES_ALWAYS


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_library_that_is_not_found_is_named_with_exit_code_5(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Of Horovod, by its engine; of torch, wherever it is imported first."""
    said = "libnccl.so.2: cannot open shared object file: No such file or directory"
    failure = failure_of(error(said))
    assert int(failure.exit_code) == 5
    assert failure.reason == (
        "libnccl.so.2 is not found at run time: load the module that provides it, or install it again"
    )
    refused = report.require_import(ImportError(said))
    assert int(failure_of(refused).exit_code) == 5
    assert str(refused).startswith("engine horovod: Horovod was built with libnccl.so.2, which the loader does not")
    assert str(report.require_import(ImportError("no\nsuch name"))).startswith(
        "engine horovod: Horovod cannot be imported (no such name); run `dlbench setup horovod`"
    )
