"""`train.optimizer_state host`: the update on the host, during the next forward pass, is the device's bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.out_of_core.host_update import (
    GROUPS,
    ForwardOrder,
    HostCopies,
    HostParameters,
    HostUpdater,
)
from dlbench.node.out_of_core.planning import checkpoint_bytes
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training.checkpoint import Checkpoint, snapshot
from dlbench.node.training.precision import Precision
from dlbench.specs.training import OptimizerSpec, TrainSpec
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.run_factory import plans

OPTIMIZERS = {
    "sgd": OptimizerSpec(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    "lars": OptimizerSpec(name="lars", learning_rate=1.0, weight_decay=0.01, epsilon=1e-9),
    "lamb": OptimizerSpec(name="lamb", learning_rate=0.05, weight_decay=0.01),
}


class Net(nn.Module):
    """Two-dimensional weights and vectors, a tied weight, a parameter of the root, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 90), nn.Tanh(), nn.Linear(90, 24)) for _ in range(5))
        self.norm = nn.LayerNorm(24)
        self.head_bias = nn.Parameter(torch.zeros(40))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.linear(self.norm(x), self.embedding.weight, self.head_bias)


class SlowHost:
    """A host that takes its time for each group, so that a forward pass that does not wait is too early."""

    def __init__(self, inner: HostParameters) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, sent: Any) -> list[Tensor | None]:
        time.sleep(0.002)
        return self._inner.receive(sent)


class PlainLanes:
    """Streams of a device that is a CPU: copies are done when their call returns; notes what was waited for."""

    def __init__(self) -> None:
        self.moments = 0
        self.waited: list[int] = []
        self.joined: list[int] = []
        self.threads: set[str] = set()

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def mark(self) -> int:
        self.moments += 1
        return self.moments

    @contextmanager
    def out(self, since: int) -> Iterator[None]:
        assert since <= self.moments
        yield

    @contextmanager
    def back(self) -> Iterator[None]:
        yield

    def wait(self, moment: int) -> None:
        self.waited.append(moment)

    def join(self, moment: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.joined.append(moment)

    def host_buffer(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num, dtype=dtype)


def host_of(model: nn.Module, kind: str) -> HostParameters:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "copies":
        # Some parameters share a piece, some are larger than one.
        return SlowHost(HostCopies(parameters, PlainLanes(), piece_bytes=4096))  # type: ignore[return-value, arg-type]
    return SlowHost(HostParameters(parameters))  # type: ignore[return-value]


class Training:
    """Steps as `dlbench.node.training.loop` takes them."""

    def __init__(self, spec: OptimizerSpec, *, model: nn.Module | None = None) -> None:
        torch.manual_seed(1)
        self.model = model or Net()
        self.spec = spec
        self.optimizer = build_optimizer(self.model, spec)
        self.host: HostUpdater | None = None
        self.precision = Precision(_train(spec), torch.device("cpu"))

    def on_host(self, kind: str = "same", **settings: Any) -> Training:
        self.host = HostUpdater(self.model, self.optimizer, self.spec, host_of(self.model, kind), **settings)
        return self

    def steps(self, first: int, last: int, *, parts: int = 1, spoil: Callable[[int], bool] = lambda _: False) -> None:
        for step in range(first, last):
            for part in range(parts):
                if self.host is not None:
                    self.host.before_forward()
                tokens = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(10 * step + part))
                loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flip(1).flatten()) / parts
                if self.host is not None:
                    self.host.settle()
                self.precision.backward(loss)
            if spoil(step):
                next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
            self.precision.unscale(self.optimizer)
            for group in self.optimizer.param_groups:
                group["lr"] = self.spec.learning_rate / (1 + step)
            self.precision.update(self.optimizer)
            self.optimizer.zero_grad()
        if self.host is not None:
            self.host.settle()

    def values(self) -> dict[str, Tensor]:
        state = self.optimizer.state_dict()
        tensors = {f"{n} {key}": t for n, one in state["state"].items() for key, t in one.items() if t is not None}
        counts = {f"group {n}": torch.tensor(g.get("step", 0)) for n, g in enumerate(state["param_groups"])}
        return {**{n: p.detach().clone() for n, p in self.model.named_parameters()}, **tensors, **counts}

    def close(self) -> None:
        if self.host is not None:
            self.host.close()


def _train(spec: OptimizerSpec, **more: Any) -> TrainSpec:
    return TrainSpec.model_validate({"batch_per_rank": 1, "optimizer": spec.model_dump(), **more})


def assert_same(one: Training, other: Training) -> None:
    left, right = one.values(), other.values()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("kind", ["same", "copies"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_updates_as_the_device_does(name: str, kind: str) -> None:
    device, host = Training(OPTIMIZERS[name]), Training(OPTIMIZERS[name]).on_host(kind)
    device.steps(0, 5, parts=2)
    host.steps(0, 5, parts=2)
    assert_same(device, host)
    host.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_room_that_is_asked_for_checkpoints_is_what_one_takes(name: str) -> None:
    overrides: Any = {"train.optimizer.name": name, "checkpoint.every_steps": 5}
    plan, *_ = plans(points=(2,), overrides=overrides)
    model = Net()
    model.unused.requires_grad_(False)  # so that no optimizer keeps anything for it
    training = Training(plan.workload.train.at_batch(plan.global_batch).optimizer, model=model)
    training.steps(0, 1)
    progress = progress_at(1)
    assert (
        checkpoint_bytes(plan, 0, model)
        == snapshot(SingleEngine().whole_state(model, training.optimizer), progress, {}).num_bytes
    )
    assert checkpoint_bytes(plan, 1, model) == 0
    assert checkpoint_bytes(plans(points=(1,))[0], 0, model) == 0


@pytest.mark.parametrize(("before", "after"), [("device", "same"), ("copies", "device")])
@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_a_checkpoint_is_the_same_and_either_goes_on_with_it(
    name: str, before: str, after: str, tmp_path: Path
) -> None:
    whole = Training(OPTIMIZERS[name])
    whole.steps(0, 3)
    path = tmp_path / "checkpoint"

    def start(kind: str) -> Training:
        training = Training(OPTIMIZERS[name])
        if path.exists():
            Checkpoint(path).restore(training.model, training.optimizer)
        return training if kind == "device" else training.on_host(kind)

    first = start(before)
    first.steps(0, 3)
    first.close()
    assert_same(whole, first)
    progress = progress_at(3)
    write_checkpoint(path, first.model, first.optimizer, progress, {})
    second = start(after)
    whole.steps(3, 6)
    second.steps(3, 6)
    second.close()
    assert_same(whole, second)


def test_an_update_that_fails_ends_the_next_step() -> None:
    training = Training(OPTIMIZERS["sgd"]).on_host()
    training.steps(0, 1)

    def fails(sent: object) -> list[Tensor | None]:
        raise MemoryError("no room for a moment")

    training.host._host.receive = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room for a moment"):
        training.steps(1, 3)
    training.close()


def test_what_it_did_is_counted_in_measured_steps() -> None:
    training = Training(OPTIMIZERS["sgd"]).on_host("copies")
    assert training.host is not None
    training.steps(0, 2)
    training.host.begin_measuring()
    training.steps(2, 5)
    result = training.host.result()
    num_bytes = sum(p.numel() * 4 for p in training.model.parameters())
    momentum = num_bytes - sum(p.numel() * 4 for p in training.model.unused.parameters())  # type: ignore[union-attr]
    assert result.copied_bytes == 3 * 2 * num_bytes
    # A copy of each parameter, room for each gradient, and the optimizer's state.
    assert result.state_bytes == 2 * num_bytes + momentum
    assert result.update_s > 0
    # The slow host is waited for in the forward passes; the update of the last step was never waited for in one.
    assert result.wait_s > 0
    (setting,) = training.host.settings()
    assert (setting.key, setting.effective) == ("train.optimizer_state", "host")
    assert "copied to page-locked memory" in setting.evidence
    training.close()


# --- the order of the forward pass


@given(calls=st.lists(st.integers(0, 7), max_size=12), silent=st.sets(st.integers(0, 7)))
def test_each_parameter_is_in_one_group_and_waited_for_before_its_use(calls: Sequence[int], silent: set[int]) -> None:
    """Cells are called in any order, some not at all; those of `silent` use their parts' weights without a call."""
    cells = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(8)]
    model = nn.Sequential(*cells)
    reached: list[nn.Module] = []
    used: list[tuple[nn.Parameter, int]] = []
    order = ForwardOrder(model, reached.append)

    def run(number: int, _: Tensor) -> None:
        for linear in cells[number]:
            if number not in silent:
                linear(torch.zeros(1, 2))
            used.append((linear.weight, len(reached)))

    for number, cell in enumerate(cells):
        cell.forward = partial(run, number)  # type: ignore[method-assign]
    model.forward = lambda x: [cells[number](x) for number in calls]  # type: ignore[method-assign]
    model(torch.zeros(1, 2))
    groups = order.groups()
    assert sorted(id(p) for parameters, _ in groups for p in parameters) == sorted(map(id, model.parameters()))
    assert len(groups) <= GROUPS
    for parameter, num_reached in used:
        (modules,) = [modules for parameters, modules in groups if any(p is parameter for p in parameters)]
        assert any(module in modules for module in reached[:num_reached])
    first = [min(map(reached.index, modules)) for _, modules in groups]
    assert first == sorted(first)
    order.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
