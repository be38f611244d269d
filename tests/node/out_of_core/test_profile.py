"""The chain as it is measured: bytes as the executor counts them, and nothing of the network changed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from dlbench.node.models.build import build_model
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.planning import measure_rates, slowest_chain, slowest_rates
from dlbench.node.out_of_core.profile import ChainProfile, update_growth
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.specs.out_of_core import Chain, TransferRates, Unit
from dlbench.specs.training import OptimizerSpec
from tests.node.out_of_core.networks import (
    Task,
    bert_task,
    chain_task,
    cosmoflow_task,
    cut,
    disk,
    measured_chain,
    planned,
    resnet_task,
)
from tests.support.forked_runs import planned as plans_of

CPU = torch.device("cpu")


def profiled(task: Task, model: nn.Module, *, parts: int = 1) -> Chain:
    profile = ChainProfile(
        model=model, units=cut(task, model), device=CPU, keeps_gradients=parts > 1, beat=lambda _: None
    )
    batch = {str(number): tensor for number, tensor in enumerate(task.inputs())}
    return profile.measure(lambda _: task.loss(model), batch, state_bytes=0)


@pytest.mark.parametrize("task", [resnet_task(), cosmoflow_task(), bert_task(2)], ids=["resnet", "cosmoflow", "bert"])
def test_bytes_are_those_that_the_executor_counts(task: Task) -> None:
    model = task.model()
    chain = profiled(task, model)
    units = cut(task, model)
    counting = OutOfCore(model, units, planned(units, "keep"), count=True)
    counting.install()
    loss = task.loss(model)
    assert counting._pass is not None
    counts = [len(owned) for owned in counting._pass.owned]
    loss.backward()
    counted = measured_chain(units, list(counting._room.counted))
    counting.close()

    def bytes_of(one: Chain) -> list[tuple[object, ...]]:
        return [(unit.name, unit.saved_bytes, unit.input_bytes, unit.input_saved, unit.joins) for unit in one.units]

    assert bytes_of(chain) == bytes_of(counted)
    assert [unit.saved_count for unit in chain.units] == counts
    assert chain.output_bytes == counted.output_bytes
    assert all(unit.forward_s > 0 for unit in chain.units)


def test_what_a_unit_works_with_is_its_own() -> None:
    """A GELU between two linear layers: the gradients of its output and of its input, and no parameters'."""
    task = chain_task(["linear", "gelu", "linear"])
    linear, gelu, last = profiled(task, task.model()).units
    tensor, weights = 16 * 128 * 4, (128 + 1) * 128 * 4
    few = 64  # what the measurement itself takes
    assert gelu.backward_working_bytes == pytest.approx(2 * tensor, abs=few)
    assert gelu.gradient_bytes == gelu.forward_working_bytes == gelu.passing_working_bytes == 0
    assert gelu.piecemeal_bytes == pytest.approx(3 * tensor, abs=few)  # and its input, which comes back
    assert linear.gradient_bytes == last.gradient_bytes == weights
    assert last.backward_working_bytes == pytest.approx(2 * tensor + weights, abs=few)
    assert linear.backward_working_bytes == pytest.approx(
        tensor + weights, abs=few
    )  # nobody wants the gradient of the network's input


class _Searching(torch.autograd.Function):
    """Doubles; a pass over a batch of a size not seen before takes room for trying algorithms, as cuDNN's search."""

    seen: ClassVar[set[tuple[str, int]]] = set()

    @classmethod
    def try_algorithms(cls, what: str, x: Tensor) -> None:
        if (what, len(x)) not in cls.seen:
            cls.seen.add((what, len(x)))
            torch.empty(64 * x.numel())

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Searching.try_algorithms("forward", x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _Searching.try_algorithms("backward", gradients[0])
        return 2 * gradients[0]


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_what_an_update_works_with_is_measured_on_a_copy(name: str) -> None:
    model = nn.Linear(256, 256)
    before = [parameter.clone() for parameter in model.parameters()]
    spec = OptimizerSpec(name=name, learning_rate=0.1, momentum=0.9)  # type: ignore[arg-type]
    growth = update_growth(model, spec, CPU)
    assert 0 <= growth <= 4 * sum(parameter.nbytes for parameter in before)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_of_the_network_changes() -> None:
    """Weights, batch-norm statistics, gradients, random state and the modules' own forward."""
    task = chain_task(["linear", "norm", "relu", "dropout", "residual"])
    model = task.model()
    task.loss(model).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [tensor.clone() for tensor in (*model.state_dict().values(), *(g for g in gradients if g is not None))]
    random = torch.get_rng_state()
    profiled(task, model)
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert [parameter.grad for parameter in model.parameters()] == gradients or all(
        parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )
    assert torch.equal(random, torch.get_rng_state())
    assert not any("forward" in vars(module) for module in model.modules())


def test_rates_of_a_tier_are_of_its_order(tmp_path: Path) -> None:
    """Two gigabytes per second and half of it would both be believed; nothing and infinity would not."""
    chain = Chain(
        units=tuple(
            Unit(name=name, forward_s=0.01, backward_s=0.01, saved_bytes=8 << 20, input_bytes=1 << 20, input_saved=True)
            for name in "ab"
        ),
        batch=1,
        output_bytes=0,
    )
    tier, x = disk(tmp_path, 64 << 20), torch.randn(256, 256)
    rates = measure_rates(tier, CPU, chain, lambda: x @ x, lambda _: None)
    tier.close()
    assert 1e6 < rates.out_bytes_per_s < 1e12
    assert 1e6 < rates.in_bytes_per_s < 1e12
    assert 0 <= rates.latency_s < 1
    assert rates.tier.startswith("file in ")


def chain_of(*forward_s: float, saved: int = 8 << 10) -> Chain:
    return Chain(
        units=tuple(
            Unit(name=str(number), forward_s=s, backward_s=2 * s, saved_bytes=saved, input_bytes=4096, input_saved=True)
            for number, s in enumerate(forward_s)
        ),
        batch=4,
        output_bytes=4096,
    )


def test_the_slowest_of_all_ranks_counts_unit_by_unit() -> None:
    merged = slowest_chain([chain_of(1.0, 5.0), chain_of(3.0, 2.0, saved=16 << 10)])
    assert [unit.forward_s for unit in merged.units] == [3.0, 5.0]
    assert [unit.saved_bytes for unit in merged.units] == [16 << 10] * 2
    fast = TransferRates(tier="t", out_bytes_per_s=2e9, in_bytes_per_s=1e9, latency_s=1e-4, drag=0.1)
    slow = TransferRates(tier="t", out_bytes_per_s=1e9, in_bytes_per_s=2e9, latency_s=1e-5, drag=0.3)
    assert slowest_rates([fast, slow]) == TransferRates(
        tier="t", out_bytes_per_s=1e9, in_bytes_per_s=1e9, latency_s=1e-4, drag=0.3
    )


def exchange_of(*words: str, gpu: bool = False) -> tuple[float, bool]:
    """In gradients, where it is not a whole number of MiB."""
    plans, _ = plans_of("resnet50", "--preset", "ci", *words)
    model = build_model(plans[-1].workload.model)
    size, stays = exchange_memory(plans[-1], model, torch.device("cuda" if gpu else "cpu"))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return size if size % 2**20 == 0 else round(size / whole, 2), stays


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        (("--engine", "single", "--ranks", "1"), True, (0, False)),
        (("--engine", "ddp", "--ranks", "2"), False, (1.0, False)),  # a second copy, as PyTorch has it by default
        (("--engine", "ddp", "--ranks", "1"), False, (1.0, False)),  # it makes buckets for one rank too
        (("--engine", "ddp", "--ranks", "2"), True, (0, True)),  # where gradients are views of the buckets
        (("--engine", "ddp", "--ranks", "2", "--set", "engine.ddp.gradient_as_bucket_view=false"), True, (1.0, False)),
        (("--engine", "ddp", "--ranks", "2", "--set", "sync.exchange=none"), True, (0, False)),
        (("--engine", "horovod", "--ranks", "1"), True, (0, False)),
        (("--engine", "horovod", "--ranks", "2"), True, (128 * 2**20, False)),
        (("--engine", "horovod", "--ranks", "2"), False, (1.0, False)),  # pages that are never used are no memory
        (("--engine", "horovod", "--ranks", "2", "--set", "sync.fusion=2MiB"), True, (2 * 2**20, False)),
        (("--engine", "horovod", "--ranks", "2", "--set", "sync.fusion=none"), True, (0, False)),
        (("--engine", "ddp", "--ranks", "2", "--set", "sync.fusion=own:single"), True, (1.0, False)),
    ],
)
def test_the_exchange_s_buffers_are_in_the_account(
    words: tuple[str, ...], gpu: bool, expected: tuple[float, bool]
) -> None:
    assert exchange_of(*words, gpu=gpu) == expected


def test_ddp_s_buckets_are_as_large_as_the_account_says() -> None:
    plans, _ = plans_of("resnet50", "--preset", "ci", "--engine", "ddp", "--ranks", "2")
    model = build_model(plans[-1].workload.model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(model)
        sizes = module._get_ddp_logging_data()["bucket_sizes"]
        assert sum(map(int, sizes.split(","))) == exchange_memory(plans[-1], model, CPU)[0]
    finally:
        torch.distributed.destroy_process_group()
