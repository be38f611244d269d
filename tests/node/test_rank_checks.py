"""What is asked of a machine before a library dies of it: shared memory for loaders, the host's own name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine import environment
from dlbench.node import rank_checks
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.rank_checks import loader_bytes, needs_host_name, require_machine, require_shared_memory
from dlbench.node.ranks import RankPlace
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.support.rank_places import rank_place
from tests.support.run_factory import NOW


def plan_of(workload: str, **request: Any) -> RunPlan:
    asked = {"workload": workload, "points": (2,), "repeats": 1, "series": "s", "preset": "ci", **request}
    return expand(Request(**asked), machine_cores=2, now=NOW)[0]


PLACE = RankPlace(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, num_nodes=1, host="n0", token="")


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_the_bytes_of_a_sample_are_those_of_its_tensors(workload: str) -> None:
    work = plan_of(workload, data="synthetic").workload
    batch = synthetic_batch(work.model, work.data, 3, torch.Generator())
    assert sum(tensor.nbytes for tensor in batch.values()) == 3 * work.model.sample_bytes(work.data)
    assert len(batch) <= rank_checks._MAX_TENSORS


def room(free: int, size: int) -> Callable[[Path], os.statvfs_result]:
    return lambda path: os.statvfs_result((4096, 4096, size // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))


def test_loaders_need_shared_memory_for_what_they_read_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of("resnet50", data="/data/images", overrides={"data.loader_workers": 2})
    batch = plan.workload.train.batch_per_rank * (3 * plan.workload.model.image_size**2 + 8)  # type: ignore[union-attr]
    needed = loader_bytes(plan)
    # Of each process two that it reads ahead and one in use; and one on its way to a GPU.
    assert 7 * batch <= needed <= 7 * batch + 7 * 7 * 4096
    monkeypatch.setattr(rank_checks.os, "statvfs", room(2 * needed + 4096, 4 * needed))
    require_shared_memory(plan, PLACE)
    monkeypatch.setattr(rank_checks.os, "statvfs", room(2 * needed - 4096, 4 * needed))
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
