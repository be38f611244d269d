"""Tiers of memory, memory accounts, watched layers and tensors that a step holds."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlbench.errors import RunError
from dlbench.node.out_of_core.device_memory import KEPT_FREED, CpuPeaks
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.held import StepMemory
from dlbench.node.out_of_core.profile import ChainProfile
from dlbench.node.part import StepSchedule
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.sync.timing import Clock
from dlbench.node.watching.spans import LayerWatch
from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.records.record import HeldMemory
from dlbench.specs.out_of_core import PlannedBlock, Recompute
from tests.node.out_of_core.networks import (
    Task,
    bert_task,
    chain_task,
    cosmoflow_task,
    cut,
    planned,
    resnet_task,
    train,
)
from tests.support.forked_runs import run_forked


@pytest.fixture
def close() -> Iterator[Callable[[DiskTier], DiskTier]]:
    opened: list[DiskTier] = []

    def note(tier: DiskTier) -> DiskTier:
        opened.append(tier)
        return tier

    yield note
    for tier in opened:
        tier.close()


Note = Callable[[DiskTier], DiskTier]


def storage(count: int, seed: int = 0) -> torch.UntypedStorage:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).untyped_storage()


def test_bytes_come_back_and_no_file_has_a_name(tmp_path: Path, close: Note) -> None:
    tier = close(DiskTier(tmp_path, 64 << 20))
    assert list(tmp_path.iterdir()) == []
    sent = [storage(count, seed) for seed, count in enumerate((1, 1023, 1024, 1025, 3_000_001))]
    wanted = [bytes(one) for one in sent[:4]]
    tickets = [tier.swap_out(one, block=n) for n, one in enumerate(sent)]
    for ticket in reversed(tickets):
        tier.swap_in(ticket, block=0)
    back = [tier.take(ticket) for ticket in tickets]
    assert [bytes(one)[: len(text)] for one, text in zip(back, wanted, strict=False)] == wanted
    large = torch.empty(0).set_(back[4], 0, (3_000_001,), (1,))
    assert torch.equal(large, torch.rand(3_000_001, generator=torch.Generator().manual_seed(4)))
    assert os.fstat(tier._file).st_size == 64 << 20


def test_direct_io_that_is_refused_is_replaced_and_told(
    tmp_path: Path, close: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **by_name: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # nor files without a name: made and unlinked at once
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **by_name)

    monkeypatch.setattr(os, "open", refusing)
    tier = close(DiskTier(tmp_path, 1 << 20))
    assert list(tmp_path.iterdir()) == []
    assert tier.words == f"file in {tmp_path} (through the page cache, pages dropped again)"
    assert "no direct I/O" in " ".join(tier.warnings)
    ticket = tier.swap_out(storage(5000), block=0)
    tier.swap_in(ticket, block=0)
    assert bytes(tier.take(ticket))[:20000] == bytes(storage(5000))


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_midway_ends_training_with_one_line(
    call: str, tmp_path: Path, close: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = close(DiskTier(tmp_path, 1 << 20, rank=4))
    task = chain_task(["linear", "gelu"] * 6)
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier, prefetch="one-block", rank=4).install()
    train(task, model, steps=1)
    real, left = getattr(os, call), [5]

    def failing(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        return int(real(*arguments))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(RunError, match=rf"^rank 4: swap file in {tmp_path}: input/output error$"):
        train(task, model, steps=20)


def test_closing_ends_its_threads(tmp_path: Path) -> None:
    import threading

    tier = DiskTier(tmp_path, 1 << 20)
    tier.swap_out(storage(5000), block=0)
    assert any(thread.name == "swap out" for thread in threading.enumerate())
    tier.close()
    tier.close()
    assert not any(thread.name.startswith("swap ") for thread in threading.enumerate())


def test_offload_on_a_gpu_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Seen(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            asked.append(pin_memory)
            super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor)

    monkeypatch.setattr("dlbench.node.out_of_core.executor.save_on_cpu", Seen)
    task = chain_task(["linear", "gelu"] * 2)
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=None, prefetch="blocking").install()
    assert train(task, model, steps=1).equals(train(task, task.model(), steps=1))
    assert asked == [True] * len(units)


TASKS = {"resnet": resnet_task, "cosmoflow": cosmoflow_task, "bert": lambda: bert_task(3)}


def told_and_live(task: Task, recompute: Recompute) -> tuple[int, int]:
    """The peak of a pass, parameters and batch included: by the chain, and by every allocation of a real pass."""
    model, batch = task.model(), task.inputs()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    units = cut(task, model)
    profile = ChainProfile(
        model=model, units=units, device=torch.device("cpu"), keeps_gradients=False, beat=lambda _: None
    )
    named = {str(number): tensor for number, tensor in enumerate(batch)}
    chain = profile.measure(lambda _: task.loss(model), named, state_bytes=held)
    blocks = OutOfCore(model, units, planned(units, "keep" if recompute == "none" else "recompute"))
    blocks.install()
    task.loss(model).backward()
    model.zero_grad()
    with CpuPeaks() as meter:
        meter.mark("pass")
        task.loss(model).backward()
    live = held + sum(tensor.nbytes for tensor in batch) + meter.intervals()["pass"].peak
    return fixed_plan(chain, None, recompute, "none").predicted.peak_bytes, live


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_told_bytes_are_live_bytes(name: str, recompute: Recompute) -> None:
    told, live = told_and_live(TASKS[name](), recompute)
    assert told == pytest.approx(live, rel=0.05)


_PROGRAM = """
import json
import resource
import torch
from dlbench.node.out_of_core.device_memory import keep_freed

found = keep_freed()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    tensors = [torch.ones(12 << 20) for _ in range(2)]  # 48 MiB each: by itself glibc maps them one by one

for _ in range(20):  # glibc before 2.38 gives aligned memory from larger pieces than were freed
    fill()
before = faults()
fill()
print(json.dumps([found, faults() - before]))
"""


def _kept(**variables: str) -> Any:
    """In a process of its own: what other tests have freed is used again."""
    command, clean = [sys.executable, "-c", _PROGRAM], {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=clean | variables)
    return json.loads(done.stdout)


def test_pages_of_freed_tensors_are_used_again() -> None:
    found, faults = _kept()
    if "not glibc" in found:
        pytest.skip(found)
    assert found == KEPT_FREED
    assert faults < (96 << 20) // 4096 // 4


def test_an_allocator_of_the_environment_stays_as_it_is() -> None:
    found, faults = _kept(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert found == "as MALLOC_MMAP_THRESHOLD_ of the rank's environment set it"
    assert faults >= (96 << 20) // 4096 // 2


CPU = torch.device("cpu")
ROWS, WIDTH = 64, 256
WEIGHTS = 2 * WIDTH * WIDTH * 4


def weighed(optimizer: type[torch.optim.Optimizer], exchange: tuple[int, bool] = (0, False), at: int = 0) -> HeldMemory:
    """Of a step of a network of two square layers, a buffer of ten floats and a sigmoid between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH, bias=False))
    model.register_buffer("ten", torch.zeros(10))
    update = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    held, batch = StepMemory(SingleEngine().watch_memory, model, update, CPU, exchange), torch.randn(ROWS, WIDTH)
    schedule = StepSchedule(first=0, end=9, warmup=9, global_batch=1, steps_per_epoch=None)
    for step in range(3):
        held.before_warmup(step - at, schedule)
        model(batch).sum().backward()
        update.step()
        update.zero_grad()
    held.close()
    assert held.result is not None
    return held.result


def test_kinds_are_those_counted_by_hand_and_sum_to_the_peak() -> None:
    found = weighed(torch.optim.AdamW)
    steps = 2 * 4  # AdamW counts its updates in a tensor for each parameter
    assert (found.weights, found.gradients, found.buffers) == (WEIGHTS, WEIGHTS, 40)
    assert found.optimizer == 2 * WEIGHTS + steps
    kinds = found.weights + found.gradients + found.optimizer + found.buffers + found.activations
    assert kinds == found.peak == max(found.passes_peak, found.update_peak)
    assert found.host is None
    assert found.retries is None


def test_buffers_of_the_exchange_count_and_gradients_in_them_do_not_count_twice() -> None:
    alone, beside = weighed(torch.optim.SGD), weighed(torch.optim.SGD, exchange=(5000, False))
    assert (beside.buffers, beside.peak) == (alone.buffers + 5000, alone.peak + 5000)
    assert beside.activations == alone.activations


def test_sharding_halves_weights_and_optimizer_state_and_frees_what_it_gathers(tmp_path: Path) -> None:
    asked = ("--preset", "ci", "--ranks", "2", "--repeats", "1", "--set", "measure.measured_steps=1")
    found: dict[str, tuple[HeldMemory, HeldMemory]] = {}
    for engine in ("ddp", "fsdp"):
        (run,) = run_forked("bert", *asked, "--engine", engine, "--out", tmp_path)  # of three warm-up steps
        assert run.record is not None
        first, second = (rank.held for rank in run.record.ranks)
        assert first is not None
        assert second is not None
        found[engine] = first, second
    whole = found["ddp"][0]
    assert whole.weights == whole.gradients == whole.buffers  # of a CPU's buckets
    for kind in ("weights", "gradients", "optimizer"):
        both = sum(getattr(one, kind) for one in found["fsdp"])
        assert getattr(whole, kind) <= both <= 1.02 * getattr(whole, kind)  # rows that no rank count divides
    for one in (*found["ddp"], *found["fsdp"]):
        assert one.weights + one.gradients + one.optimizer + one.buffers + one.activations == one.peak
        assert "not seen" not in one.evidence
    assert all(one.peak < whole.peak for one in found["fsdp"])


def test_layers_of_blocks_are_told_once_a_pass() -> None:
    task = chain_task(["linear", "gelu", "residual", "linear", "gelu"])
    model = task.model()
    units = cut(task, model)
    assert len(units) == 5
    blocks = [PlannedBlock(first=0, last=2, decision="recompute"), PlannedBlock(first=3, last=4, decision="keep")]
    executor = OutOfCore(model, units, blocks)
    executor.install()
    told: list[tuple[str, int, int, int]] = []
    watch = LayerWatch(
        model,
        Clock(),
        lambda _lane, name, start, end, *, step: told.append((name, step, start, end)),
        executor.computes,
    )
    watch.open()
    for step in (1, 2):
        watch.enter(step)
        task.loss(model).backward()
        watch.leave()
    watch.close()
    executor.close()

    count = Counter((name, step) for name, step, *_ in told)
    for step in (1, 2):
        for name in ("0", "1", "2.inner", "2.norm", "3", "4"):
            assert count[f"forward {name}", step] == 1
            assert count[f"backward {name}", step] == 1
        assert count["recompute 0", step] == count["recompute 1", step] == 1
        assert not count["recompute 3", step]
    assert all(start <= end for *_, start, end in told)
