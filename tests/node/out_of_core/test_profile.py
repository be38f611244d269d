"""The chain of a network: its units, their times and bytes as they are measured, and parts of a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dlbench.cli import cli
from dlbench.errors import UserError
from dlbench.node.models.build import build_model
from dlbench.node.out_of_core.cut import UnitModule, find_units
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.planning import measure_rates, slowest_chain, slowest_rates
from dlbench.node.out_of_core.profile import ChainProfile, update_growth
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.training import layer_parts
from dlbench.records.out_of_core import LayerOrder, LayerPartTimes, PartTimes
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
from tests.support.programs import answer_with, one_line
from tests.support.run_factory import plans


def cut_of(model: nn.Module, *inputs: Tensor) -> tuple[UnitModule, ...]:
    return find_units(model, lambda: model(*inputs))


def names(units: tuple[UnitModule, ...]) -> list[str]:
    return [unit.name for unit in units]


def test_resnet_is_one_chain_from_image_to_logits() -> None:
    task = resnet_task()
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    stages = ["stages.0.0", "stages.1.0", "stages.1.1", "stages.2.0"]
    assert names(units) == ["stem_conv", "stem_norm", "stem_pool", *stages, "mean", "classifier"]
    # The stem's ReLU overwrites what the normalisation returns: one unit.
    assert [len(unit.modules) for unit in units] == [1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert [unit.joins for unit in units] == [False] + [True] * 8


def test_cosmoflow_is_divided_into_its_layers() -> None:
    task = cosmoflow_task()
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    assert names(units)[:4] == ["features.0", "features.1", "features.2", "features.3"]
    flattened = next(unit for unit in units if len(unit.modules) == 2)
    assert flattened.name == "features.8"  # pooling, and the flat view of what it returns
    assert all(unit.joins for unit in units[1:])


def test_bert_is_a_chain_of_its_layers_with_embeddings_and_heads_outside() -> None:
    task = bert_task(3)
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    assert names(units) == ["embedding_norm", "dropout", "layers.0", "layers.1", "layers.2"]
    # The first layer is given a mask that the dropout before it is not given.
    assert [unit.joins for unit in units] == [False, True, False, True, True]
    assert not any(unit.shared for unit in units)  # nobody else holds what is given to it, nor the sum of embeddings


def test_a_network_that_asks_for_gradients_in_its_forward_pass_is_divided() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.chain = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, given: Tensor) -> Tensor:
            out = self.chain(self.first(given)).pow(2).sum()
            (slope,) = torch.autograd.grad(out, self.first.weight, create_graph=True)
            return out + slope.pow(2).sum()

    assert names(cut_of(Penalised(), torch.randn(2, 4)))[-2:] == ["chain.1", "chain.2"]


def test_looking_changes_neither_buffers_nor_random_numbers() -> None:
    task = chain_task(["linear", "norm", "dropout", "linear"])
    model = task.model()
    torch.manual_seed(7)
    before = [buffer.clone() for buffer in model.buffers()]
    find_units(model, lambda: task.loss(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


class UNet(nn.Module):
    """Down, down, up with a skip connection around the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        y = self.up(self.middle(skipped))
        return self.last(y) + skipped


def test_a_boundary_that_others_use_is_not_within_a_block() -> None:
    units = cut_of(UNet(), torch.randn(4, 64))
    assert names(units) == ["down", "middle", "up", "last"]
    assert [unit.joins for unit in units] == [False, False, True, True]


class Entered(UNet):
    """What enters the chain is made by the network; `saved`: and what made it needs it again."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self._saved = saved

    def forward(self, x: Tensor) -> Tensor:
        entering = self.last(x) * 2
        return self.up(self.middle(self.down(torch.tanh(entering) if self._saved else entering)))


@pytest.mark.parametrize("saved", [False, True])
def test_the_first_input_is_shared_if_what_is_before_the_chain_holds_it(saved: bool) -> None:
    units = cut_of(Entered(saved=saved), torch.randn(4, 64))
    assert names(units) == ["down", "middle", "up"]
    assert [unit.shared for unit in units] == [saved, False, False]


class Twice(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.up(self.middle(self.down(x)))))


def test_a_module_called_twice_is_no_unit() -> None:
    with pytest.raises(UserError, match=r"no chain of modules.*middle: called more than once"):
        cut_of(Twice(), torch.randn(4, 64))


class Glued(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.middle(self.down(x) * 2) + 1)


def test_a_network_without_a_chain_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="none of its modules takes the tensor that another one returns"):
        cut_of(Glued(), torch.randn(4, 64))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.mean()


class WithPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(64, 64), Pair(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y, extra = self.pair(self.first(x))
        return self.last(y) + extra


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


class CountedWork:
    """Takes the place of torch's timer; a sample is the number of FLOPs of a call."""

    def __init__(self, _statement: str, **settings: Any) -> None:
        self._call = settings["globals"]["call"]

    def blocked_autorange(self, min_run_time: float) -> CountedWork:
        with FlopCounterMode(display=False) as counter:
            self._call()
        self.mean = float(counter.get_total_flops())
        return self


ALL = {"filters", "channels", "extent"}
LAST: dict[str, Any] = {"model.memory_format": "channels-last"}


@pytest.mark.parametrize(
    ("workload", "layer", "cuts", "overrides"),
    [
        ("cosmoflow", "features.3", ALL, {"model.input_size": 32}),
        ("resnet50", "stages.1.0.conv2", ALL, {}),  # stride 2
        ("resnet50", "stem_conv", {"filters", "extent"}, LAST),  # 3 channels; no gradient of the input
        ("bert", "layers.0.expand", ALL, {}),  # as many vectors a sample as words
        ("resnet50", "classifier", {"channels"}, {"model.num_classes": 10}),  # one vector a sample
    ],
)
def test_each_part_does_its_share_of_the_work(
    monkeypatch: pytest.MonkeyPatch, workload: str, layer: str, cuts: set[str], overrides: dict[str, Any]
) -> None:
    monkeypatch.setattr(layer_parts, "Timer", CountedWork)
    small = {"train.batch_per_rank": 1, **overrides}
    (plan,) = plans(workload=workload, preset="ci", points=(1,), repeats=1, engine="single", overrides=small)
    order = LayerOrder(plan=plan, layer=layer, counts=(4,), repeats=2)
    whole, *parts = layer_parts.time_parts(order, torch.device("cpu"), "cpu").parts
    assert whole.cut == "whole"
    assert whole.seconds.keys() == {"forward", "backward"}
    assert {part.cut for part in parts} == cuts
    for part in parts:
        assert part.seconds["split"] == part.seconds["join"] == (0, 0)
        for phase in ("forward", "backward"):
            first, second = part.seconds[phase]
            assert 4 * first == 4 * second == whole.seconds[phase][0] > 0


def test_a_table_and_a_json_of_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {"forward": (1.0,) * 4 + (3.0,), "backward": (2.0,) * 4 + (6.0,)}
    part = {"forward": (0.5,) * 4 + (1.5,), "backward": (1.5,) * 4 + (4.5,), "split": (0.1,) * 5, "join": (0.2,) * 5}
    answer = LayerPartTimes(
        device="cpu, 1 thread",
        parts=(
            PartTimes.model_validate({"cut": "whole", "count": 1, "seconds": seconds}),
            PartTimes.model_validate({"cut": "filters", "count": 2, "seconds": part}),
        ),
        warnings=("cores are shared",),
    )
    answer_with(monkeypatch, tmp_path / "layer.py", f"print({answer.model_dump_json()!r})")
    words = ["layer", "resnet50", "--preset", "ci", "--layer", "classifier", "--parts", "2"]
    shown = CliRunner().invoke(cli, words).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "75.0 %" in shown
    assert "cores are shared" in shown
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    (whole, half) = found["parts"]
    assert whole["efficiency"] is None
    assert half["speedup"]["value"] == pytest.approx(1.5)  # of each repeat, also of the slow one
    assert half["efficiency"]["value"] == half["efficiency"]["low"] == pytest.approx(0.75)
    assert found["measured"]["parts"][1]["seconds"]["join"] == [0.2] * 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("resnet50", "--preset", "ci", "--layer", "stages.1.0.conv9"), "did you mean stages.1.0.conv"),
        (("paced",), "no convolution or dense layer of paced; there are none"),
    ],
)
def test_what_cannot_be_timed_is_refused(words: tuple[str, ...], reason: str) -> None:
    assert reason in one_line(CliRunner().invoke(cli, ["layer", *words]))
