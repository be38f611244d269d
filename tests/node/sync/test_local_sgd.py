"""Local SGD against a loop over replicas in one process: ranks are threads, and averages are taken between them.

ZeRO-1 where no training is needed: bytes of its broadcasts, where weights lie, and what it does not go with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dlbench.errors import UserError
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.part import StepSchedule
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Communicators, Engine
from dlbench.node.sync.local_sgd import LocalSgd
from dlbench.node.sync.sharded_update import ShardedUpdate, sharding_setting
from dlbench.node.sync.timing import Clock, tree_bytes
from dlbench.node.training.checks import average_warnings
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting
from dlbench.records.rows.steps import read_steps
from dlbench.specs.choices import refuse_inert
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import OptimizerSpec
from tests.support.forked_runs import run_forked
from tests.support.run_factory import plans, record_of

RANKS, STEPS = 2, 10
MOMENTUM, RATE = 0.9, 0.1


class ThreadRanks(Engine):
    """A library whose ranks are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self._rank, self._barrier, self._table = rank, barrier, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self._rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(torch.stack(self.gather(tensor.clone())).mean(0))

    told: ExchangeResult | None = None  # Of its gradients.

    def exchange_result(self) -> ExchangeResult | None:
        return self.told

    def communicators(self) -> Communicators:
        return cast(Communicators, SimpleNamespace(carrier="gloo", broadcast_parameters=lambda model: None))


def planned(ranks: int = RANKS, engine: str = "ddp", **settings: object) -> RunPlan:
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return plans(points=(ranks,), repeats=1, engine=engine, overrides=overrides)[-1]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, rank: int, step: int) -> None:
    """Of a loss of this rank's samples of a step."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x).square().mean().backward()


def trained(
    plan: RunPlan, momentum: float, between: Callable[[int, Engine, nn.Module], None] = lambda *_: None, first: int = 0
) -> list[tuple[list[Tensor], list[Setting], Any]]:
    """Parameters of every rank after the last step, the settings, and the exchange; `between`: called after steps."""
    barrier, table = threading.Barrier(RANKS), [None] * RANKS

    def rank(number: int) -> tuple[list[Tensor], list[Setting], Any]:
        place = RankPlace(
            rank=number, size=RANKS, local_rank=number, local_size=RANKS, node_rank=0, num_nodes=1, host="h", token="t"
        )
        engine = LocalSgd(ThreadRanks(number, barrier, table), plan, place, torch.device("cpu"))
        model = MODELS[number]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
        engine.prepare(model, optimizer, lambda: None)
        engine.begin_training(first)
        engine.watch(False)
        for step in range(first, STEPS):
            optimizer.zero_grad()
            gradients(model, number, step)
            engine.finish_exchange()
            engine.step(lambda opt: opt.step())
            engine.exchange_parameters()
            between(step + 1, engine, model)
        engine.end_training()
        found = engine.exchange_result()
        return [p.detach().clone() for p in model.parameters()], engine.settings(), found

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


MODELS: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _models() -> None:
    MODELS[:] = [network() for _ in range(RANKS)]


def looped(every: int, momentum: float, *, averages_momentum: bool = True) -> list[Tensor]:
    """The oracle: replicas one after the other, means after every so many updates and at the end."""
    models = [network() for _ in range(RANKS)]
    moments = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    for step in range(STEPS):
        for rank, (model, moment) in enumerate(zip(models, moments, strict=True)):
            model.zero_grad()
            gradients(model, rank, step)
            with torch.no_grad():
                for p, m in zip(model.parameters(), moment, strict=True):
                    assert p.grad is not None
                    m.mul_(momentum).add_(p.grad)
                    p.sub_(RATE * m)
        if (step + 1) % every == 0 or step + 1 == STEPS:
            sets = [[p.detach() for p in model.parameters()] for model in models]
            for alike in (*zip(*sets, strict=True), *(zip(*moments, strict=True) if averages_momentum else ())):
                mean = torch.stack(alike).mean(0)
                for one in alike:
                    one.copy_(mean)
    return [p.detach() for p in models[0].parameters()]


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("averages", [True, False])
def test_four_updates_apart_are_those_of_replicas_in_a_loop(averages: bool) -> None:
    found = trained(planned(sync__average_every=4, sync__average_momentum=averages), MOMENTUM)
    assert apart(found[0][0], found[1][0]) == 0
    assert apart(found[0][0], looped(4, MOMENTUM, averages_momentum=averages)) < 1e-6
    # It tells the three apart.
    others = looped(4, MOMENTUM, averages_momentum=not averages), looped(1, MOMENTUM)
    assert all(apart(found[0][0], other) > 1e-4 for other in others)


def test_plain_sgd_that_averages_after_every_update_is_data_parallel_training() -> None:
    found, model = trained(planned(sync__average_every=1), momentum=0.0), network()
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(RANKS):  # what DDP averages
            gradients(model, rank, step)
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(RATE * p.grad / RANKS)
    assert apart(found[0][0], [p.detach() for p in model.parameters()]) < 1e-6


def test_evaluations_see_the_mean_and_change_nothing() -> None:
    seen: list[list[Tensor]] = []

    def look(done: int, engine: Engine, model: nn.Module) -> None:
        if done == 3:
            with engine.evaluating():
                seen.append([p.detach().clone() for p in model.parameters()])

    found = trained(planned(sync__average_every=4), MOMENTUM, look)
    assert apart(*seen) == 0
    MODELS[:] = [network() for _ in range(RANKS)]
    assert apart(found[0][0], trained(planned(sync__average_every=4), MOMENTUM)[0][0]) == 0


@pytest.mark.parametrize("averages", [True, False])
def test_a_checkpoint_is_what_all_ranks_go_on_from(averages: bool) -> None:
    states: list[Any] = []

    def keep(done: int, engine: Engine, model: nn.Module) -> None:
        if done == 6:
            whole = engine.whole_state(model, cast(Any, engine)._optimizer)
            moments = [value["momentum_buffer"].clone() for value in whole.values.values()]
            states.append([*(value.clone() for value in whole.model.values()), *moments])

    ((_, settings, _), _) = trained(planned(sync__average_every=4, sync__average_momentum=averages), MOMENTUM, keep)
    assert apart(*states) == 0
    assert "2 for checkpoints and the end" in next(one for one in settings if one.key == "sync.average_every").evidence


def test_a_resumed_run_averages_after_the_updates_of_the_whole_training() -> None:
    equal: list[int] = []

    def note(done: int, engine: Engine, model: nn.Module) -> None:
        everyone = engine.gather([p.detach().clone() for p in model.parameters()])
        if apart(*everyone) == 0:
            equal.append(done)

    trained(planned(sync__average_every=4), MOMENTUM, note, first=3)
    assert sorted(set(equal)) == [4, 8]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sync__exchange": "leader", "sync__group_size": 2}, "sync.exchange leader"),
        ({"sync__exchange": "none"}, "sync.exchange none"),
        ({"sync__fusion": "own:single"}, "sync.fusion own:single"),
        ({"sync__wire": "topk"}, "sync.wire topk"),
        ({"sync__wire": "powersgd"}, "sync.wire powersgd"),
        ({"engine__ddp__shard_optimizer": True}, "engine.ddp.shard_optimizer"),
        ({"engine__ddp__static_graph": True}, "engine.ddp.static_graph"),
        ({"train__precision": "fp16"}, "train.precision fp16"),
        ({"train__optimizer_state": "host"}, "train.optimizer_state host"),
        ({"measure__noise_scale": True}, "measure.noise_scale"),
        ({"engine": "horovod", "sync__average_from": 4}, "engine horovod cannot stop exchanging gradients"),
        ({"engine": "fsdp"}, "engine fsdp: .* with sync.average_every"),
        ({"sync__exchange": "hierarchical"}, "needs two groups of two ranks or more"),
        ({"sync__average_every": 0}, "average_every"),
    ],
)
def test_what_does_not_go_with_averages_is_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        planned(4, **{"sync__average_every": 4, **settings})


@pytest.mark.parametrize(
    ("every", "since", "said"),
    [
        (2, 3, []),
        (2, 4, ["average_from 4 lies within the measured steps, 3 to 6"]),
        (3, 3, ["no multiple"]),
        (3, 7, []),
    ],
)
def test_measured_steps_of_two_kinds_are_told(every: int, since: int, said: list[str]) -> None:
    schedule = StepSchedule(first=0, end=7, warmup=3, global_batch=8, steps_per_epoch=None)
    found = average_warnings(planned(sync__average_every=every, sync__average_from=since), schedule)
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("sync.average_from", {}),
        ("sync.average_momentum", {}),
        ("sync.average_momentum", {"sync__average_every": 2, "train__optimizer__name": "sgd", "momentum": 0.0}),
        ("sync.wire", {"sync__average_every": 2, "sync__wire": "bf16"}),
        ("sync.fusion", {"sync__average_every": 2, "sync__fusion": "4MiB"}),
    ],
)
def test_what_acts_in_no_run_is_refused(key: str, settings: dict[str, Any]) -> None:
    if "momentum" in settings:
        settings = {**settings, "train__optimizer__momentum": settings["momentum"]}
        del settings["momentum"]
    with pytest.raises(UserError, match=f"{key}: has no effect"):
        refuse_inert([(key, "--set")], [planned(**settings)])


@pytest.mark.nightly
def test_groups_that_average_after_every_update_train_as_ddp_does(tmp_path: Path) -> None:
    """Four ranks in groups of two; plain SGD, whose update is linear in the gradient."""
    plain = {"name": "sgd", "momentum": 0.0, "clip_norm": "null"}
    settings = {f"train.optimizer.{key}": value for key, value in plain.items()}
    settings |= {"measure.warmup_steps": 3, "measure.measured_steps": 4}
    grouped = {"sync.exchange": "hierarchical", "sync.group_size": 2, "sync.average_every": 1}
    losses, records = [], []
    for name, more in (("ddp", {}), ("grouped", grouped)):
        words = [word for key, value in (settings | more).items() for word in ("--set", f"{key}={value}")]
        asked = ("bert", "--preset", "ci", "--ranks", "4", "--repeats", "1", "--engine", "ddp", *words)
        (run,) = run_forked(*asked, "--out", tmp_path / name)
        records.append(record_of(run))
        losses.append([read_steps(run.folder.steps(rank)).steps["loss"].tolist() for rank in range(4)])
    ddp, found = (one.exchange for one in records)
    assert ddp is not None
    assert found is not None
    for one, other in zip(*losses, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    # In each step gradients in a group of two, a share of the parameters with the other group, and the other share of
    # this one; DDP's ring of four sends 2 (p - 1) / p.
    num_bytes = records[0].gradient_bytes
    assert (found.bytes_inside, found.bytes_across) == (num_bytes + num_bytes / 2, num_bytes / 2)
    assert (ddp.bytes_inside or 0.0) + (ddp.bytes_across or 0.0) == 1.5 * num_bytes
    proof = {one.key: one for one in records[1].settings}["sync.average_every"]
    assert proof.effective == 1
    assert (found.group_size, found.num_groups) == (2, 2)


SHARDED = {"engine.ddp.shard_optimizer": True}


@given(groups=st.integers(1, 4), size=st.integers(1, 4), unit=st.integers(0, 9))
def test_tree_bytes_by_walking_each_tree(groups: int, size: int, unit: int) -> None:
    """In round i the ranks that have it, counted from the root below 2^i, send to those 2^i further on."""
    ranks = groups * size
    shares = [unit * (rank + 1) for rank in range(ranks)]
    sent = {True: 0, False: 0}
    for root, share in enumerate(shares):
        has = [root]
        while len(has) < ranks:
            given_to = [(root + place + len(has)) % ranks for place in range(min(len(has), ranks - len(has)))]
            for sender, receiver in zip(has, given_to, strict=False):
                sent[sender // size == receiver // size] += share
            has += given_to
    inside, across = tree_bytes(shares, groups=groups)
    assert (inside * ranks, across * ranks) == (pytest.approx(sent[True]), pytest.approx(sent[False]))
    assert inside + across == pytest.approx((ranks - 1) / ranks * sum(shares))


def test_channels_last_weights_stay_so_in_the_buckets_of_zero() -> None:
    torch.manual_seed(1)
    spec = OptimizerSpec(name="sgd", learning_rate=0.1, momentum=0.9)
    plain, shared = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    shared.load_state_dict(plain.state_dict())
    for model in (plain, shared):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizers = build_optimizer(plain, spec), ShardedUpdate(build_optimizer(shared, spec), Clock())
        for model, optimizer in zip((plain, shared), optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            model(torch.arange(300.0).view(1, 3, 10, 10)).square().sum().backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    for mine, other in zip(shared.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()
    assert shared[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizers[1].share()[2] == sum(p.nbytes for p in shared.parameters())


@pytest.mark.parametrize(
    ("kept", "is_partial", "words"),
    [
        ([], False, "one rank keeps all"),
        ([0, 0], False, "keeps no state"),
        ([8, 0], False, "largest over mean 2.000"),
        ([6, 2], True, "6 + 2 = 8 (8 B); largest over mean 1.500"),
        ([2] * 9, True, "at most 2, in all = 18"),
    ],
)
def test_sharding_is_in_force_where_no_rank_keeps_all(kept: list[int], is_partial: bool, words: str) -> None:
    setting = sharding_setting(kept)
    assert setting.effective is is_partial
    assert words in setting.evidence


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"sync.fusion": "own:4MiB"}, "own exchange"),
        ({"sync.exchange": "none"}, "sync.exchange none"),
        ({"train.optimizer_state": "host"}, "train.optimizer_state host"),
        ({"train.recompute": "planned", "train.memory.capacity": "8GiB"}, "train.recompute"),
    ],
)
def test_what_does_not_go_with_a_sharded_update_is_refused_by_name(others: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=rf"engine\.ddp\.shard_optimizer: .*{named}.* leave one of them out"):
        plans(workload="bert", preset="ci", engine="ddp", points=(2,), overrides=SHARDED | others)


@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 1), ("horovod", 2), ("fsdp", 2)])
def test_without_others_to_share_with_the_setting_has_no_effect(engine: str, ranks: int) -> None:
    with pytest.raises(UserError, match=r"engine\.ddp\.shard_optimizer: has no effect"):
        plans(workload="bert", preset="ci", engine=engine, points=(ranks,), overrides=SHARDED)
