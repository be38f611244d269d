"""Tiers of memory, on a CPU and on the stand-in of streams; memory accounts, watched layers, tensors of a step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlbench.errors import EnvironmentLacksError, ExitCode, RunError
from dlbench.node import page_locked
from dlbench.node.out_of_core import planning
from dlbench.node.out_of_core.device_memory import KEPT_FREED, CpuPeaks, StepMemory
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.executor import OutOfCore, Prefetch
from dlbench.node.out_of_core.planning import measure_rates
from dlbench.node.out_of_core.profile import ChainProfile
from dlbench.node.out_of_core.tiers import PinnedTier
from dlbench.node.page_locked import pieces, require_room
from dlbench.node.part import StepSchedule
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.sync.timing import Clock
from dlbench.node.training import activations
from dlbench.node.watching.spans import LayerWatch
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, Schedule
from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.records.record import HeldMemory
from dlbench.specs.out_of_core import Chain, PlannedBlock, Recompute, TransferRates, Unit
from tests.node.out_of_core.networks import (
    Task,
    Trained,
    bert_task,
    chain_task,
    cosmoflow_task,
    cut,
    measured_chain,
    planned,
    resnet_task,
    train,
)
from tests.support.forked_runs import run_forked
from tests.support.gpu_streams import CPU, StreamsGpu
from tests.support.out_of_core import METHODS, ChainTraining, Outcome


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


KIB = 1 << 10


def storage_of(value: float, count: int = 2048) -> torch.UntypedStorage:
    return torch.full((count,), value).untyped_storage()


# One ticket


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["out", "wait", "in", "take", "recall", "discard"]), st.integers(0, 5)), max_size=40
    )
)
def test_whatever_is_called_bytes_are_right_and_no_memory_is_given_away_under_a_copy(
    calls: list[tuple[str, int]],
) -> None:
    gpu = StreamsGpu()
    tier = PinnedTier(CPU, 1 << 16, calls=gpu)
    tickets: dict[int, tuple[Any, float, set[str]]] = {}
    for turn, (call, number) in enumerate(calls):
        ticket, value, done = tickets.get(number, (None, 0.0, set()))
        if call == "out" and ticket is None:
            tickets[number] = (tier.swap_out(storage_of(float(turn)), block=0), float(turn), set())
        elif ticket is None:
            continue
        elif call == "wait":
            tier.wait_out(ticket)
        elif call == "in" and not done:
            tier.swap_in(ticket, block=0)
            done.add("in")
        elif call == "take" and done == {"in"}:
            assert bytes(tier.take(ticket)) == bytes(storage_of(value))
            done.add("take")
        elif call == "recall":
            kept = tier.recall(ticket)
            assert kept is None or bytes(kept) == bytes(storage_of(value))
            del kept
        elif call == "discard":
            tier.discard(ticket)
            del tickets[number]
        del ticket
    for ticket, _, _ in tickets.values():
        tier.discard(ticket)
    tickets.clear()
    assert gpu.held() == 0
    tier.close()
    assert gpu.violations == []


# Training

RATES = TransferRates(tier="test", out_bytes_per_s=8 * KIB / 0.25, in_bytes_per_s=8 * KIB / 0.25)
"""A boundary of the chain below in a quarter of a block's forward pass."""


def deep_chain() -> Task:
    return chain_task(["linear", "gelu"] * 6)


def plan_of(
    task: Task, decisions: Any, rates: TransferRates, budget: int | None, prefetch: Prefetch
) -> tuple[Chain, list[PlannedBlock], Schedule]:
    model = task.model()
    units = cut(task, model)
    counting = OutOfCore(model, units, planned(units, "keep"), count=True)
    counting.install()
    task.loss(model).backward()
    chain = measured_chain(units, list(counting._room.counted))
    counting.remove()
    blocks = planned(units, decisions)
    return chain, blocks, simulate(chain, blocks, rates, budget, prefetch=prefetch)


class Run:
    """Three passes with the host ahead of all copies; what the device held at each weight's gradient."""

    def __init__(self, decisions: Any, budget: int | None, prefetch: Prefetch, rates: TransferRates = RATES) -> None:
        task = deep_chain()
        self.task, self.gpu = task, StreamsGpu()
        chain, blocks, self.schedule = plan_of(task, decisions, rates, budget, prefetch)
        model = task.model()
        units = cut(task, model)
        tier = PinnedTier(CPU, max(1, self.schedule.swapped_bytes), calls=self.gpu)
        blocks_at_work = OutOfCore(
            *(model, units, blocks),
            tier=tier,
            budget_bytes=budget,
            costs=BlockCosts(chain).of_plan(blocks),
            prefetch=prefetch,
            leaving=self.schedule.leaving,
        )
        blocks_at_work.install()
        self.held: list[tuple[int, int]] = []
        for number in range(0, len(units), 2):
            model[number].weight.register_hook(lambda _, at=number: self.held.append((at, self.gpu.held())))  # type: ignore[index, union-attr, operator]
        self.trained: Trained = train(task, model, steps=3)
        self.told = blocks_at_work.summary()
        self.held_after = self.gpu.held()
        tier.close()


@pytest.mark.parametrize(
    ("budget", "prefetch"), [(None, "one-block"), (3 * 8 * KIB, "room"), (6 * 8 * KIB, "room"), (12 * 8 * KIB, "room")]
)
def test_training_is_as_in_core_within_its_budget_and_as_planned(budget: int | None, prefetch: Prefetch) -> None:
    run = Run("swap", budget, prefetch)
    assert run.trained.equals(train(run.task, run.task.model()))
    gpu, told = run.gpu, run.told
    assert gpu.violations == []
    assert "host waits" not in gpu.log[: gpu.log.index("host waits")]
    assert gpu.log.count("host waits") == 1  # closing
    assert run.held_after == 0
    # What left is what the plan says, and each copy is in the count.
    assert told["swapped_out_bytes"] == gpu.copied["out"] == 3 * run.schedule.swapped_bytes
    assert told["swapped_in_bytes"] == gpu.copied["in"] <= gpu.copied["out"]
    assert told["over_budget_bytes"] == 0
    assert gpu.peak <= told["activation_peak_bytes"] <= (budget or 4 * 8 * KIB)
    assert sum(gpu.locked) == max(1, run.schedule.swapped_bytes)
    if budget == 3 * 8 * KIB:
        assert gpu.copied["in"] > 0


@pytest.fixture(scope="module")
def in_core() -> Outcome:
    return ChainTraining(CPU, 256, 128, lambda _: pytest.fail("nothing moves")).by(None)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_trains_by_every_method_as_in_core(method: str, in_core: Outcome) -> None:
    gpus: list[StreamsGpu] = []

    def open_tier(num_bytes: int) -> PinnedTier:
        gpus.append(StreamsGpu())
        return PinnedTier(CPU, num_bytes, calls=gpus[-1])

    done = ChainTraining(CPU, 256, 128, open_tier).by(method)
    assert done.is_as(in_core)
    assert done.told is not None
    assert done.told["over_budget_bytes"] == 0
    assert all(gpu.violations == [] for gpu in gpus)
    assert done.told["swapped_out_bytes"] == 3 * done.predicted_bytes
    if method != "planned":  # which may recompute all that must go
        assert (done.predicted_bytes > 0) == (method != "recompute")


# The measurement of transfers


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> StreamsGpu:
    gpu = StreamsGpu(bytes_per_s=20e9, drag=0.05)
    monkeypatch.setattr(planning, "time", gpu.clock())
    monkeypatch.setattr("dlbench.node.out_of_core.tiers.time", gpu.clock())
    return gpu


def large_chain(num_bytes: int = 64 << 20) -> Chain:
    unit = Unit(
        name="a", forward_s=0.01, backward_s=0.02, saved_bytes=num_bytes, input_bytes=num_bytes // 8, input_saved=True
    )
    return Chain(units=(unit, unit.model_copy(update={"name": "b"})), batch=1, output_bytes=0)


@pytest.mark.parametrize("once_ms", [0.2, 30.0])
def test_drag_is_that_of_copies_and_not_of_waiting_for_them(once_ms: float, clocked: StreamsGpu) -> None:
    gpu, chain = clocked, large_chain()
    tier = PinnedTier(CPU, planning.trial_bytes(chain), calls=gpu)
    alongside: list[str] = []

    def compute() -> None:
        if any(stream.free_ns > gpu.host_ns for stream in gpu._streams[1:]):
            alongside.append("compute")
            since = len(gpu.log) - 1 - gpu.log[::-1].index("host waits")
            alongside.extend(line for line in gpu.log[since:] if line.startswith("compute waits"))
        gpu.busy(round(once_ms * 1e6))

    rates = measure_rates(tier, CPU, chain, compute, lambda _: None, calls=gpu)
    assert set(alongside) == {"compute"}
    assert rates.drag == pytest.approx(0.05, rel=0.02)
    assert rates.out_bytes_per_s == pytest.approx(20e9, rel=0.01)
    assert rates.in_bytes_per_s == pytest.approx(20e9, rel=0.01)
    # It takes no more memory than two of the largest units.
    assert gpu.peak <= 2 * (64 << 20) + (32 << 20)
    assert len(gpu.locked) == 1  # and no page is locked within what is timed
    tier.close()


# Page-locked memory


@given(st.integers(0, 40), st.integers(1, 40))
def test_pieces_cover_a_range_and_cross_no_border(first: int, count: int) -> None:
    size = page_locked.PIECE_BYTES
    begin, num_bytes = first * (size // 8), count * (size // 8)
    found = pieces(begin, num_bytes)
    assert (found[0][0], found[-1][1]) == (begin, begin + num_bytes)
    assert all(one[1] == other[0] for one, other in pairwise(found))
    assert all(a < b and a // size == (b - 1) // size for a, b in found)


def test_a_pool_that_is_too_small_grows_and_says_so() -> None:
    gpu = StreamsGpu()
    tier = PinnedTier(CPU, 8192, calls=gpu)
    for number in range(3):
        tier.swap_out(storage_of(float(number)), block=number)
    assert tier.warnings == ("the pool of page-locked memory grew 2 times: more was swapped than planned",)


def test_memory_that_cannot_be_locked_is_a_lack_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(StreamsGpu):
        def page_lock(self, address: int, num_bytes: int) -> int:
            return 2 if self.locked else super().page_lock(address, num_bytes)

    monkeypatch.setattr(page_locked, "PIECE_BYTES", 4096)
    told = r"^rank 2: swapping: cannot page-lock 12 KiB of host memory, only 4 KiB \(CUDA error 2\)"
    with pytest.raises(EnvironmentLacksError, match=told):
        PinnedTier(CPU, 3 * 4096, rank=2, calls=Refusing())
    monkeypatch.setattr(page_locked, "available_bytes", lambda: 10_000)
    told = r"^rank 2: swapping: 12 KiB of host memory would be .*, but only 9\.766 KiB are available \(MemAvailable"
    with pytest.raises(EnvironmentLacksError, match=told) as caught:
        PinnedTier(CPU, 3 * 4096, rank=2, calls=StreamsGpu())
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("rooms", "later", "refused"),
    [
        ([40, 40, 40, 40], 0, ""),
        ([40, 40, 39, 40], 0, "40 GiB .* on n1 by 2 ranks together, but only 39"),
        ([None] * 4, 0, ""),
        ([None, None, None, 10], 0, "40 GiB .* on n1 by 2 ranks together, but only 10"),
        ([45, 45, 40, 40], 5, ""),
        ([45, 44, 40, 40], 5, "45 GiB .* on n0 by 2 ranks together, 5 GiB of it for checkpoints, but only 44"),
    ],
)
def test_ranks_of_a_node_together_must_have_room(rooms: Sequence[int | None], later: int, refused: str) -> None:
    """Two nodes of two ranks, 20 GiB each, and what rank 0 will lock for checkpoints."""
    gib = 1 << 30
    place = RankPlace(rank=1, size=4, local_rank=1, local_size=2, node_rank=0, num_nodes=2, host="n0", token="t")

    def gather(own: Any) -> list[Any]:
        assert own[::2] == ["n0", later * gib]
        kept = [later * gib, 0, 0, 0]
        return [[f"n{n // 2}", None if room is None else room * gib, kept[n]] for n, room in enumerate(rooms)]

    told = f"^train.swap planned: {refused} GiB are available"
    with pytest.raises(EnvironmentLacksError, match=told) if refused else nullcontext():
        require_room(20 * gib, "train.swap planned", place, gather, checkpoint_bytes=later * gib)


@pytest.mark.parametrize(("kept", "more", "told"), [(True, 1.2, True), (True, 1.0, False), (False, 1.2, False)])
def test_resident_memory_beyond_the_capacity_is_told(
    monkeypatch: pytest.MonkeyPatch, kept: bool, more: float, told: bool
) -> None:
    training = ChainTraining(CPU, 256, 128, lambda num_bytes: PinnedTier(CPU, num_bytes, calls=StreamsGpu()))
    model = training.model()
    own = sum(parameter.numel() * 4 for parameter in model.parameters())
    monkeypatch.setattr(activations, "resident_bytes", lambda: own + (100 << 20))
    memory = training.memory(model, "planned swap", 0.5)
    capacity = memory.memory_plan.plan.capacity_bytes
    assert capacity is not None
    memory._allocator = KEPT_FREED if kept else "as the C library does, which is not glibc"
    monkeypatch.setattr(activations, "peak_bytes", lambda _: round(more * capacity) + (100 << 20))
    assert any("MALLOC_MMAP_THRESHOLD_" in text for text in memory.warnings) == told
    memory.close()
