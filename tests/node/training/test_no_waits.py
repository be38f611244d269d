"""Nothing of dlbench in a step makes the host wait for the device; how many operations its own searches cost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.models import resnet
from dlbench.node.models.build import build_model, network_of
from dlbench.node.sync.engine import Engine, SingleEngine
from dlbench.node.sync.groups import RankGroup
from dlbench.node.sync.own import buckets
from dlbench.node.sync.wire import OverflowCount, build_wire, magnitudes
from dlbench.node.training.loop import TrainingLoop
from dlbench.node.training.phases import StepTimes
from dlbench.node.training.precision import Precision
from dlbench.node.training.run import Rank
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import Wire
from tests.support.device_waits import DEVICE, Waits, watched
from tests.support.one_rank import context_of
from tests.support.run_factory import plans
from tests.support.training_data import training_data


class NoTimer:
    """Marks nothing; a step's loss is not looked at."""

    clock = "monotonic"

    def __init__(self) -> None:
        self._steps = 0

    def begin(self) -> None: ...
    def hold(self, holds: bool) -> None: ...
    def hold_back(self) -> None: ...
    def mark(self, phase: int) -> None: ...
    def close(self) -> None: ...

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        self._steps += 1

    def collect(self, *, wait: bool) -> list[StepTimes]:
        return []


@pytest.fixture(autouse=True)
def constants_are_forgotten() -> Iterator[None]:
    yield
    resnet._pixel_constants.cache_clear()


def plan_of(workload: str, **overrides: Any) -> RunPlan:
    settings = {"measure.warmup_steps": 1, "measure.measured_steps": 2, "watch.sampler": False, **overrides}
    (plan,) = plans(workload=workload, preset="ci", points=(1,), repeats=1, engine="single", overrides=settings)
    return plan


def steps(plan: RunPlan, engine: Engine, *, warm: int = 1) -> Waits:
    """The steps of a plan on the device that stands for a GPU; those after the first `warm` are watched."""
    timer = cast(Any, NoTimer())
    context = context_of(plan, engine=engine, device=DEVICE)
    seen = Waits()
    with patch("dlbench.node.training.run.parameters_digest", lambda model: ""):  # there are no values to hash
        state = Rank(context, timer).prepare()
    loop = TrainingLoop(state, timer)
    plain = loop._step

    def step(number: int) -> tuple[int, torch.Tensor]:
        with watched() as waits:
            found = plain(number)
        if number >= warm:
            seen.found += waits.found
            seen.launches += waits.launches
            seen.crossings += waits.crossings
        return found

    loop._step = step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        loop.run(Path(folder) / "rank-0.steps")
    return seen


def test_samples_on_the_device_are_not_copied() -> None:
    def copied(where: str) -> int:
        return steps(plan_of("resnet50", **{"data.synthetic_on": where}), SingleEngine()).crossings

    assert copied("host") == 4  # image and label of two steps
    assert copied("device") == 0


def test_samples_on_the_device_are_refused_where_the_device_is_the_cpu() -> None:
    workload = plan_of("resnet50", **{"data.synthetic_on": "device"}).workload
    with pytest.raises(EnvironmentLacksError, match=r"data\.synthetic_on device: .* use host"):
        training_data(workload.model, workload.data, batch_size=1)


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has none for the device that stands in; casts are asynchronous anyway."""
    monkeypatch.setattr(Precision, "autocast", lambda self: nullcontext())


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_a_step_waits_for_nothing(workload: str) -> None:
    seen = steps(plan_of(workload, **{"measure.noise_scale": True, "train.gradient_accumulation": 2}), SingleEngine())
    assert seen.found == []
    assert seen.launches.total() > 100


@pytest.mark.usefixtures("no_autocast")
def test_loss_scaling_adds_no_wait_to_gradscalers_own() -> None:
    overrides = {
        "train.precision": "fp16",
        "train.allow_emulation": True,
        "train.optimizer.name": "lamb",
        "train.optimizer.clip_norm": 1.0,
        "train.gradient_accumulation": 2,
        "measure.noise_scale": True,
    }
    seen = steps(plan_of("resnet50", **overrides), SingleEngine())
    # One in each step, GradScaler's own: with an optimizer that is not fused it must know whether to step.
    assert seen.found == ["aten::_local_scalar_dense: precision.py:update < engine.py:step < loop.py:_update"] * 2


# --- what searching for overflows costs


@pytest.mark.parametrize(("wire", "most"), [("fp32", 0), ("fp16", 4), ("bf16", 2), ("topk", 20), ("int8", 51)])
def test_a_message_waits_for_nothing_and_launches_little(wire: Wire, most: int) -> None:
    """fp16: two casts and two searches, however many gradients are in the message."""
    ranks = SimpleNamespace(ranks=(0, 1), index=0, sum=lambda vector: None, all_to_all=torch.clone)
    ranks.gather_all = lambda tensor, equal=False: [tensor] * (2 if wire == "int8" else 1)
    group = cast(RankGroup, ranks)
    form = build_wire(wire, density=0.1, world_size=2)
    form.reset([[("a", 1000), ("b", 24)]])
    vector = torch.zeros(1024, device=DEVICE)
    form.exchange(0, vector, group.sum, group)
    with watched() as waits:
        form.exchange(0, vector, group.sum, group)
    assert waits.found == []
    assert waits.launches.total() <= most, waits.launches


def test_what_is_counted_on_a_device_is_what_is_counted_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, with slots and countings of several, over tensors of the CPU."""
    infinity, nan = float("inf"), float("nan")
    messages = [
        ([1.0, 2.0], [1.0, 1.0], 0),
        ([1.0, infinity], [1.0, 6e4], 1),
        ([nan, 1.0], [1.0, -1.0], 1),
        ([nan, 1.0], [nan, 1.0], 0),
        ([infinity, 1.0], [1.0, -infinity], 0),
    ]
    count = OverflowCount()
    count._slots = torch.zeros(2, 512)
    expected = 0
    for repeat in range(200):
        for result, own, counted in messages:
            slot, count._used = count._used, count._used + 1
            torch.linalg.vector_norm(torch.tensor(own), infinity, out=count._slots[0, slot])
            count.end(slot, torch.tensor(result, dtype=torch.float16), list)
            expected += counted
        count.settle_step()
        if repeat == 100:
            assert count.total == expected
    assert count.total == expected == 400
    before, after = (torch.tensor([row[i] for row in messages]) for i in (1, 0))
    count.count_all(magnitudes(list(before)), magnitudes(list(after)))
    assert count.total == expected + 2


def test_a_bucket_that_is_taken_at_once_is_the_same_bits() -> None:
    def taken(together: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(1)
        shapes = [(3, 5), (7,), (4, 3, 2, 2), (2, 2)]
        parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        parameters[2] = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        bucket = buckets.Bucket(parameters, 4, torch.full((128,), torch.nan))
        bucket.takes_together = together
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter) if number != 1 else None
        for place in (2, 0, 3, 1):
            bucket.take(place, 1 / 3)
        return bucket.vector, [cast(torch.Tensor, parameter.grad) for parameter in parameters]

    (one, apart), (other, together) = taken(False), taken(True)
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(apart, together, strict=True))


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_an_evaluation_waits_at_its_end_only(workload: str) -> None:
    spec = plan_of(workload).workload
    meter = network_of(spec.model).meter()
    batch = synthetic_batch(spec.model, spec.data, 2, torch.Generator().manual_seed(0))
    batch = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
    with torch.device(DEVICE):
        model = build_model(spec.model)
    outputs, criterion = network_of(spec.model).outputs(spec.model), network_of(spec.model).criterion()
    for is_first in (True, False):
        with watched() as waits, torch.no_grad():
            found = outputs(model, batch)
            meter.add(found, batch, criterion(found, batch))
        assert is_first or waits.found == []
