"""Training out of core, activations or the optimizer's state elsewhere: to the last bit what training in core gives."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dlbench.errors import RunError
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.out_of_core.disk_tier import DiskTicket, DiskTier
from dlbench.node.out_of_core.executor import OutOfCore, Prefetch
from dlbench.node.out_of_core.host_update import GROUPS, ForwardOrder, HostCopies, HostParameters, HostUpdater
from dlbench.node.out_of_core.planning import checkpoint_bytes
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training.checkpoint import Checkpoint, snapshot
from dlbench.node.training.precision import Precision
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.specs.out_of_core import Decision, PlannedBlock
from dlbench.specs.training import OptimizerSpec, TrainSpec
from tests.node.out_of_core.networks import (
    Task,
    bert_task,
    chain_task,
    cosmoflow_task,
    cut,
    measured_chain,
    planned,
    resnet_task,
    train,
)
from tests.node.out_of_core.test_profile import Pair, UNet, WithPair
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.run_factory import plans

TASKS = {
    "resnet": resnet_task,
    "cosmoflow": cosmoflow_task,
    "bert": partial(bert_task, 4),
    "bert of 24 layers": bert_task,
}
METHODS: list[tuple[Decision, Prefetch]] = [
    ("recompute", "room"),
    ("swap", "room"),
    ("swap", "one-block"),
    ("swap", "blocking"),
    ("recompute-swap", "one-block"),
]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, 8 << 20)
    yield tier
    tier.close()


@pytest.mark.parametrize("name", [*list(TASKS)[:3], pytest.param("bert of 24 layers", marks=pytest.mark.nightly)])
def test_every_method_gives_what_core_gives(name: str, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    task, sent = TASKS[name](), list[str]()
    # What is sent, for on a busy machine nothing may have left before it is wanted back, and then it counts as kept.
    swap_out = tier.swap_out
    monkeypatch.setattr(tier, "swap_out", lambda *args, **named: (sent.append("swap"), swap_out(*args, **named))[1])
    in_core = train(task, task.model(), steps=2, parts=2)
    for decision, prefetch in METHODS:
        model = task.model()
        units = cut(task, model)
        out_of_core = OutOfCore(model, units, planned(units, decision), tier=tier, prefetch=prefetch, verify=True)
        out_of_core.install()
        assert train(task, model, steps=2, parts=2).equals(in_core), (decision, prefetch)
        told = out_of_core.summary()
        assert told["passes"] == 4
        assert (len(sent) > 0) == ("swap" in decision)
        sent.clear()
        out_of_core.remove()


KINDS = st.lists(
    # In core, too, a ReLU in place may only stand behind what does not need its own output again.
    st.sampled_from(["linear", "norm", "linear relu", "norm relu", "gelu", "dropout", "residual", "view"]),
    min_size=3,
    max_size=7,
)
DECISIONS: st.SearchStrategy[Decision] = st.sampled_from(["keep", "swap", "recompute", "recompute-swap"])


@settings(max_examples=25, deadline=None)
@given(kinds=KINDS, data=st.data(), needs_gradient=st.booleans())
def test_any_plan_gives_what_core_gives(
    kinds: list[str], data: st.DataObject, needs_gradient: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    task = chain_task(" ".join(["linear", *kinds, "linear"]).split(), needs_gradient)
    in_core = train(task, task.model(), steps=2, parts=2)
    model = task.model()
    units = cut(task, model)
    starts = [0, *(n for n in range(1, len(units)) if not units[n].joins or data.draw(st.booleans()))]
    blocks = [
        PlannedBlock(first=first, last=after - 1, decision=data.draw(DECISIONS))
        for first, after in zip(starts, [*starts[1:], len(units)], strict=True)
    ]
    budget = data.draw(st.sampled_from([None, 20_000, 60_000]))
    prefetch = data.draw(st.sampled_from(["room", "one-block", "blocking"]))
    tier = DiskTier(tmp_path_factory.getbasetemp(), 1 << 20)
    try:
        counting = OutOfCore(model, units, planned(units, "recompute"), count=True)
        counting.install()
        task.loss(model)
        chain = measured_chain(units, list(counting._room.counted))
        counting.remove()
        model = task.model()
        units = cut(task, model)
        costs = BlockCosts(chain, blocking=prefetch == "blocking").of_plan(blocks)
        out_of_core = OutOfCore(
            *(model, units, blocks), tier=tier, budget_bytes=budget, costs=costs, prefetch=prefetch, verify=True
        )
        out_of_core.install()
        assert train(task, model, steps=2, parts=2).equals(in_core)
    finally:
        tier.close()


def deep_chain() -> Task:
    return chain_task(["linear", "gelu"] * 6)


def test_the_budget_is_kept_and_what_exceeds_it_is_counted(tier: DiskTier) -> None:
    task = deep_chain()
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    counting = OutOfCore(model, units, planned(units, "keep"), count=True)
    counting.install()
    train(task, model, steps=1)
    # Eleven inputs of 8 KiB each that lie between two units, and the output; GELU saves nothing else.
    assert counting.summary()["activation_peak_bytes"] == 12 * 8192
    bytes_ = list(counting._room.counted)
    assert [one.input_saved for one in bytes_] == [False] + [True] * 11
    counting.remove()
    chain = measured_chain(units, bytes_)
    for budget in (6 * 8192, 4 * 8192, 8192):
        for decision in ("swap", "recompute-swap"):
            model = task.model()
            units = cut(task, model)
            blocks = planned(units, decision)  # type: ignore[arg-type]
            costs = BlockCosts(chain).of_plan(blocks)
            limited = OutOfCore(model, units, blocks, tier=tier, budget_bytes=budget, costs=costs)
            limited.install()
            assert train(task, model).equals(in_core)
            told = limited.summary()
            # Input and output are there at a time: a budget below that is exceeded and counted; nothing waits for it.
            assert told["over_budget_bytes"] == max(0, 2 * 8192 - budget)
            assert told["activation_peak_bytes"] <= max(2 * 8192, budget)
            limited.remove()


def test_removed_the_network_is_as_it_was(tier: DiskTier) -> None:
    task = resnet_task()
    model = task.model()
    units = cut(task, model)
    out_of_core = OutOfCore(model, units, planned(units, "swap"), tier=tier)
    out_of_core.install()
    assert any("forward" in vars(module) for module in model.modules())
    out_of_core.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert train(task, model).equals(train(task, task.model()))


def test_blocks_of_several_units_run_once_per_pass(tier: DiskTier) -> None:
    task = bert_task(6)
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    blocks = [
        PlannedBlock(first=0, last=1, decision="recompute"),
        PlannedBlock(first=2, last=4, decision="recompute-swap"),
        PlannedBlock(first=5, last=6, decision="swap"),
        PlannedBlock(first=7, last=7, decision="keep"),
    ]
    calls = []
    OutOfCore(model, units, blocks, tier=tier).install()
    model.layers[1].attention.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, index, operator]
    assert train(task, model).equals(in_core)
    assert len(calls) == 3 * 2  # and once more, to recompute


def test_a_pass_that_ends_midway_harms_no_other(tier: DiskTier) -> None:
    task = deep_chain()
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, ["swap", "recompute"] * 6), tier=tier).install()
    task.loss(model)  # no backward pass follows
    abandoned = task.loss(model)
    fails = model[7].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        task.loss(model)
    fails.remove()
    loss = task.loss(model)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss
    assert train(task, model).equals(in_core)
    abandoned.backward()  # its tensors are still there


def test_activations_are_freed_when_they_are_away(tmp_path: Path, tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier).install()
    others = _tickets()
    loss = task.loss(model)
    all_out(tier)
    sent = _tickets(but=others)
    assert len(sent) >= 10
    assert all(tier.is_out(ticket) and ticket.storage is None for ticket in sent)
    del sent
    loss.backward()
    gc.collect()
    assert _tickets(but=others) == []


def all_out(tier: DiskTier) -> None:
    """Waits until everything that was to go out has gone: the thread does one thing after the other."""
    reached = threading.Event()
    tier._put(0, reached.set)
    assert reached.wait(60)


def _tickets(but: Sequence[DiskTicket] = ()) -> list[DiskTicket]:
    """All that there are, those of other tests too."""
    known = set(map(id, but))
    return [one for one in gc.get_objects() if type(one) is DiskTicket and id(one) not in known]


class Halves(nn.Module):
    """Saves two views of one storage; the second does not begin where that does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return torch.cat([first * first, second * second])


@pytest.mark.parametrize("decision", ["recompute", "swap", "recompute-swap"])
def test_networks_that_are_not_only_a_chain(decision: Decision, tier: DiskTier) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), Halves(), nn.Linear(64, 64))

    for build in (UNet, WithPair, halves, lambda: nn.Sequential(nn.Linear(64, 64), Pair())):
        task = Task(build, lambda: (x,))
        in_core = train(task, task.model())
        model = task.model()
        units = cut(task, model)
        OutOfCore(model, units, planned(units, decision), tier=tier).install()
        assert train(task, model).equals(in_core)


def test_a_changed_byte_is_found_and_named(tmp_path: Path, tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier, verify=True, rank=3).install()
    loss = task.loss(model)
    all_out(tier)
    overwritten = os.pwrite(tier._file, _page(tier._file, lambda page: page[:100] + b"\x01" + page[101:]), 0)
    assert overwritten == 4096
    with pytest.raises(RunError, match=r"rank 3: a swapped tensor of block \d+ \(shape 16x128, float32\) .*checksum"):
        loss.backward()


def _page(file: int, changed):  # type: ignore[no-untyped-def]
    """The first page of a file, changed; in memory that direct I/O can write."""
    import mmap

    memory = mmap.mmap(-1, 4096)
    os.preadv(file, [memory], 0)
    memory[:] = changed(bytes(memory))
    return memory


def test_watched_passes_are_told_operation_by_operation(tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    out_of_core = OutOfCore(model, units, planned(units, ["swap", "recompute", "keep"] * 4), tier=tier)
    out_of_core.install()
    train(task, model, steps=1)
    assert out_of_core.take_spans() == []
    # What has not left when it is needed again stays; here all has left.
    model[-1].register_forward_hook(lambda *_: all_out(tier))  # type: ignore[index]
    out_of_core.watch(True)
    train(task, model, steps=2)
    out_of_core.watch(False)
    train(task, model, steps=1)
    spans = out_of_core.take_spans()
    assert {span.number for span in spans} == {0, 1}
    for number in (0, 1):
        mine = [span for span in spans if span.number == number]
        forward = [span.block for span in mine if span.kind == "forward"]
        backward = list(dict.fromkeys(span.block for span in mine if span.kind == "backward"))
        assert (forward, backward) == (list(range(12)), list(range(11, -1, -1)))
        assert [span.block for span in mine if span.kind == "recompute"] == [10, 7, 4, 1]
        assert {span.block for span in mine if span.lane == "out"} == {3, 6, 9}
        assert sorted(span.block for span in mine if span.lane == "in") == [3, 6, 9]
        assert all(span.start_ns <= span.end_ns for span in mine)
    compute = [span for span in spans if span.lane == "compute"]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(compute))


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
