"""Swapping on a GPU, on the stand-in of streams and allocator: what comes back, what is held, and who waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.errors import EnvironmentLacksError, ExitCode
from dlbench.node import page_locked
from dlbench.node.out_of_core import planning
from dlbench.node.out_of_core.device_memory import KEPT_FREED
from dlbench.node.out_of_core.executor import OutOfCore, Prefetch
from dlbench.node.out_of_core.planning import measure_rates
from dlbench.node.out_of_core.tiers import PinnedTier
from dlbench.node.page_locked import pieces, require_room
from dlbench.node.ranks import RankPlace
from dlbench.node.training import activations
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, Schedule
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.specs.out_of_core import Chain, PlannedBlock, TransferRates, Unit
from tests.node.out_of_core.networks import Task, Trained, chain_task, cut, measured_chain, planned, train
from tests.support.gpu_streams import CPU, StreamsGpu
from tests.support.out_of_core import METHODS, ChainTraining, Outcome

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
