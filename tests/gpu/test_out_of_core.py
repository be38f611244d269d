"""Out of core on a real GPU: the same bits, within the capacity, beside computing, and never a wait of the host.

Sizes are such that a linear layer's forward pass takes about as long as its input to the host and back does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dlbench.node import page_locked
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.host_update import CudaLanes, HostCopies, HostUpdater
from dlbench.node.out_of_core.tiers import BACKWARD, FORWARD, IN, OUT, RECOMPUTE, PinnedTier
from dlbench.node.page_locked import locked_memory, page_lock, page_unlock
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.specs.training import OptimizerSpec
from tests.node.out_of_core.networks import Task, cut, measured_chain, planned
from tests.support.out_of_core import METHODS, ChainTraining, Outcome

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda

ROWS, WIDTH = 8192, 4096
TENSOR = 4 * ROWS * WIDTH
NEEDS_BYTES = 40 * TENSOR  # 5 GiB: in core 11 of them, parameters, gradients and momentum, twice for good measure
AHEAD_CYCLES = 1_000_000_000  # half a second and more at a GPU's clock, before which nothing that follows begins


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < NEEDS_BYTES:
        pytest.skip(f"{free / 2**30:.1f} GiB of the GPU are free, this needs {NEEDS_BYTES / 2**30:.0f} GiB")
    # Workspaces of cuBLAS, one a thread that computes, are there from now on.
    one = nn.Linear(64, 64, device=device)
    one(torch.ones(64, 64, device=device)).sum().backward()
    del one
    return device


@pytest.fixture
def training(device: torch.device) -> ChainTraining:
    return ChainTraining(device, ROWS, WIDTH, lambda num_bytes: PinnedTier(device, num_bytes))


def result(training: ChainTraining, method: str | None, share: float = 0.4) -> tuple[Outcome, int]:
    """What training by a method gave, and the most that it took, its input included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(training.device) - training.x.nbytes
    done = training.by(method, share)
    return done, done.peak_bytes - before


def test_every_method_gives_the_bits_of_core_and_a_plan_keeps_its_capacity(training: ChainTraining) -> None:
    in_core, most = result(training, None)
    assert all(torch.isfinite(one).all() for one in in_core.parameters)
    for method in METHODS:
        done, peak = result(training, method)
        assert done.is_as(in_core), method
        assert done.told is not None
        assert done.told["over_budget_bytes"] == 0, method
        assert "grew" not in " ".join(done.warnings), method
        if done.capacity_bytes is not None:
            assert done.capacity_bytes < most
            assert peak <= 1.05 * done.capacity_bytes, method
            assert done.told["device_reserved_bytes"] >= done.told["device_peak_bytes"]
        if method in ("streamed", "planned swap"):
            assert peak < most, method
            assert 0 < done.told["swapped_in_bytes"] <= done.told["swapped_out_bytes"]
            # Every copy that is ordered is counted, and these are the plan's.
            assert done.told["swapped_out_bytes"] == 3 * done.predicted_bytes, method


def test_transfers_run_beside_computing_and_hardly_slow_it_down(training: ChainTraining) -> None:
    done, _ = result(training, "streamed")
    assert done.rates is not None
    assert done.rates.drag < 0.2
    assert done.rates.out_bytes_per_s > 1e9
    assert done.rates.in_bytes_per_s > 1e9
    computing = [(one.start_ns, one.end_ns) for one in done.spans if one.kind in (FORWARD, BACKWARD, RECOMPUTE)]
    for lane in (OUT, IN):
        moving = [(one.start_ns, one.end_ns) for one in done.spans if one.lane == lane]
        assert len(moving) >= 5, lane
        assert overlap(moving, computing) > 0.2 * sum(end - begin for begin, end in moving), lane


def overlap(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds that two lanes share; operations of one lane follow each other."""
    known = list(others)
    return sum(max(0, min(end, last) - max(begin, first)) for begin, end in some for first, last in known)


def test_three_passes_with_the_host_ahead_hold_nothing_behind(device: torch.device) -> None:
    """The device sleeps while the host orders a whole pass: nothing may wait for it, nor be held because of it."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    kinds: list[type[nn.Module]] = [nn.GELU] * 5

    def network() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for kind in kinds:
            layers += [kind(), nn.Linear(WIDTH, WIDTH)]
        return nn.Sequential(*layers).to(device)

    task = Task(network, lambda: (x,))

    def loss_of(model: nn.Module) -> Tensor:
        return cast("Tensor", model(x).square().mean())

    model = task.model()
    wanted = [loss_of(model).item() for _ in range(3)]
    units = cut(task, model)
    counting = OutOfCore(model, units, planned(units, "keep"), count=True)
    counting.install()
    torch.autograd.backward(loss_of(model))
    chain = measured_chain(units, list(counting._room.counted))
    counting.remove()
    blocks, budget = planned(units, "swap"), 4 * TENSOR
    tier = PinnedTier(device, 16 * TENSOR)
    swapping = OutOfCore(
        *(model, units, blocks), tier=tier, budget_bytes=budget, costs=BlockCosts(chain).of_plan(blocks)
    )
    swapping.install()
    torch.autograd.backward(loss_of(model))  # the allocator has what it needs from now on
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    losses = []
    swapping.begin_measuring()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(device)
        cuda._sleep(AHEAD_CYCLES)
        asleep = cuda.Event()
        asleep.record()
        loss = loss_of(model)
        torch.autograd.backward(loss)
        host_is_ahead = not asleep.query()
        held = torch.cuda.memory_allocated(device) - before
        peak = torch.cuda.max_memory_allocated(device) - before
        losses.append(loss.item())
        assert host_is_ahead
        assert held <= 1 << 20  # the loss itself
        # Activations within the budget; and a weight's new gradient, and what head and loss, or a unit's backward pass,
        # work with: in core it were eleven tensors and that.
        assert peak <= budget + 4 * WIDTH * WIDTH + 4 * TENSOR
        del loss
    assert losses == wanted
    told = swapping.summary()
    assert told["swapped_in_bytes"] > 0
    assert told["over_budget_bytes"] == 0
    swapping.close()


def test_memory_that_has_left_may_be_overwritten_at_once(device: torch.device) -> None:
    """Its copy waits behind a sleeping device when the next tensor is made in the same memory."""
    count = 32 << 20
    tier = PinnedTier(device, 4 * count)
    for number in range(3):
        values = torch.full((count,), number + 1, dtype=torch.uint8, device=device)
        cuda._sleep(AHEAD_CYCLES // 4)
        ticket = tier.swap_out(values.untyped_storage(), block=0)
        address = values.data_ptr()
        tier.wait_out(ticket)
        del values
        others = torch.full((count,), 77, dtype=torch.uint8, device=device)
        assert others.data_ptr() == address
        tier.swap_in(ticket, block=0)
        back = torch.empty(0, dtype=torch.uint8, device=device).set_(tier.take(ticket))
        assert bool((back == number + 1).all())
        assert bool((others == 77).all())
        tier.discard(ticket)
        del back, others
    tier.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    size = 8 << 20
    monkeypatch.setattr(page_locked, "PIECE_BYTES", size)
    return size


def test_memory_locked_in_pieces_serves_copies_across_their_borders(device: torch.device, small_pieces: int) -> None:
    memory = locked_memory(3 * small_pieces + 4096, "test")
    assert memory.is_pinned()
    assert memory[small_pieces:].is_pinned()
    tier = PinnedTier(device, 3 * small_pieces)
    kept = [torch.rand(num // 4, device=device) for num in (small_pieces // 2, small_pieces * 2, 4096)]
    tickets = [tier.swap_out(one.clone().untyped_storage(), block=0) for one in kept]
    for one, ticket in zip(kept, tickets, strict=True):
        tier.wait_out(ticket)
        tier.swap_in(ticket, block=0)
        assert torch.equal(torch.empty(0, device=device).set_(tier.take(ticket), 0, one.shape, (1,)), one)
        tier.discard(ticket)
    tier.close()


def test_a_refusal_to_page_lock_does_not_end_the_next_kernel(device: torch.device) -> None:
    memory, other = locked_memory(1 << 20, "test"), torch.empty(1 << 20, dtype=torch.uint8)
    assert page_lock(memory.data_ptr(), memory.nbytes) == 712  # cudaErrorHostMemoryAlreadyRegistered
    assert torch.ones(3, device=device).sum().item() == 3
    page_unlock(other.data_ptr())  # was never locked
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1 << 20])
def test_parameters_that_the_host_updates_are_the_devices(piece_bytes: int, device: torch.device) -> None:
    """Copies are bits; the update is the host's arithmetic, which may round a product and a sum once where the
    device's rounds them twice."""
    spec = OptimizerSpec(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)

    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 30 * 30, 32)]
        layers[0] = layers[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return nn.Sequential(*layers).to(device)

    def train(model: nn.Module, host: HostUpdater | None, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            if host is not None:
                host.before_forward()
            loss = model(x).square().mean()
            if host is not None:
                host.settle()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if host is not None:
            host.settle()
        torch.cuda.synchronize(device)

    plain, hosted = network(), network()
    train(plain, None, build_optimizer(plain, spec))
    parameters = HostCopies(list(hosted.parameters()), CudaLanes(device), piece_bytes)
    assert all(one.is_pinned() for one in parameters.tensors.values())
    optimizer = build_optimizer(hosted, spec)
    host = HostUpdater(hosted, optimizer, spec, parameters)
    train(hosted, host, optimizer)
    for one, other in zip(plain.parameters(), hosted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        # The device has what the host has, bit by bit.
        assert torch.equal(other.detach().cpu(), parameters.tensors[other].detach())
    assert all(tensor.device.type == "cpu" for state in optimizer.state.values() for tensor in state.values())
    host.close()
