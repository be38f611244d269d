"""Emulated workers: updates against stored versions of the weights, and synchronous ones against real ranks. An engine
is one module: a subclass of `Engine` and its entry in `ENGINES`, and it trains.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dlbench.errors import UserError
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.sync.emulated import EmulatedEngine
from dlbench.node.sync.engine import Engine
from dlbench.perfmodels.asynchrony import drawn_times, emulate
from dlbench.records.record import Setting
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.specs.engine import ENGINES, EmulatedSettings, EngineKind
from dlbench.specs.plan import RunPlan
from tests.conftest import Cli
from tests.support.forked_runs import mean_losses, run_forked
from tests.support.one_rank import trained as trained_run
from tests.support.run_factory import plans

WORKERS, STEPS = 4, 6
RATE, MOMENTUM, NORM = 0.1, 0.9, 0.5
WORK_S, EXCHANGE_S = ((1.0, 2.0, 9.0), (1.5, 1.7)), 0.25


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module, part: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(part))
    (model(x).square().mean() / WORKERS).backward()


def engine_for(**settings: Any) -> EmulatedEngine:
    optimizer = SimpleNamespace(clip_norm=NORM)
    plan = SimpleNamespace(
        engine=SimpleNamespace(emulated=EmulatedSettings(work_s=WORK_S, exchange_s=EXCHANGE_S, **settings)),
        emulated_workers=WORKERS,
        workload=SimpleNamespace(train=SimpleNamespace(optimizer=optimizer, seed=3)),
        series=SimpleNamespace(repeat=0),
    )
    return EmulatedEngine(cast(RunPlan, plan))


def trained(**settings: Any) -> tuple[list[Tensor], EmulatedEngine]:
    """Parameters after all steps, as the loop calls the engine; the rate changes with each step."""
    engine, model = engine_for(**settings), network()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), lambda: None)
    for step in range(STEPS):
        engine.begin_step(RATE / (1 + step))
        for part in range(WORKERS - 1):
            with engine.hold_exchange():
                backward(model, step * WORKERS + part)
        backward(model, step * WORKERS + WORKERS - 1)
        engine.clip(model.parameters(), NORM)
        engine.step(lambda optimizer: optimizer.step())
    return [parameter.detach() for parameter in model.parameters()], engine


def with_versions(**settings: Any) -> list[Tensor]:
    """The oracle: a version of the weights for each update, and each gradient at the version that its worker read."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    versions = [[parameter.detach().clone() for parameter in model.parameters()]]
    read: dict[int, tuple[int, int]] = {}  # Version and number of the part, by worker.
    draws = drawn_times(WORK_S, "3 0")
    parts = itertools.count()
    for event in emulate(EmulatedSettings(exchange_s=EXCHANGE_S, **settings), WORKERS, draws):
        if event.starts is not None:
            part = next(parts)
            if part == STEPS * WORKERS:
                return versions[-1]
            read[event.starts] = len(versions) - 1, part
        if not event.applied:
            continue
        sums = [torch.zeros_like(weights) for weights in versions[-1]]
        for worker in event.applied:
            version, part = read[worker]
            replica = network()
            for parameter, weights in zip(replica.parameters(), versions[version], strict=True):
                parameter.data.copy_(weights)
            backward(replica, part)
            for total, parameter in zip(sums, replica.parameters(), strict=True):
                total += parameter.grad
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total * (WORKERS / len(event.applied))
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        step = (max(part for _, part in read.values())) // WORKERS
        optimizer.param_groups[0]["lr"] = RATE / (1 + step) * len(event.applied) / WORKERS
        optimizer.step()
        versions.append([parameter.detach().clone() for parameter in model.parameters()])
    raise AssertionError


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "asp"},
        {"policy": "ssp", "staleness": 1},
        {"policy": "groups", "group_size": 2},
        {"policy": "backup", "wait_share": 0.75},
    ],
)
def test_gradients_are_those_of_the_weights_that_a_worker_read(settings: dict[str, Any]) -> None:
    parameters, engine = trained(**settings)
    for parameter, expected in zip(parameters, with_versions(**settings), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-7)
    emulation = engine.emulation()
    assert sum(emulation.staleness) + emulation.dropped <= STEPS * WORKERS
    assert bool(emulation.dropped) == (settings["policy"] == "backup")
    assert len(emulation.staleness) <= settings.get("staleness", STEPS) + 1
    assert all(setting.requested == setting.effective for setting in engine.settings())


def test_without_staleness_each_bit_is_that_of_synchronous_training() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(WORKERS):
            backward(model, step * WORKERS + part)
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.param_groups[0]["lr"] = RATE / (1 + step)
        optimizer.step()
    for settings in ({"policy": "bsp"}, {"policy": "ssp", "staleness": 0}):
        parameters, engine = trained(**settings)
        assert all(map(torch.equal, parameters, (parameter.detach() for parameter in model.parameters())))
        assert engine.emulation().updates == tuple(range(1, STEPS + 1))


def test_parts_of_a_batch_are_the_batches_of_as_many_ranks() -> None:
    (whole,) = [ShardedOrder(50, batch_size=12, rank=0, world_size=1, seed=2)]
    whole.workers = 3
    ranks = [ShardedOrder(50, batch_size=4, rank=rank, world_size=3, seed=2).batches() for rank in range(3)]
    for batch in itertools.islice(whole.batches(), 9):
        assert batch == list(itertools.chain.from_iterable(map(next, ranks)))


SLOW = ("--set", "fault.ranks=1", "--set", "fault.compute_factor=5.0")
SMALL = (
    *("cosmoflow", "--preset", "ci", "--repeats", "1", "--set", "watch.sampler=false", "--set", "watch.profiler=false"),
    *("--set", "model.input_size=16", "--set", "model.conv_channels=[4,4,4]", "--set", "measure.warmup_steps=2"),
    *("--set", "measure.measured_steps=6"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two real ranks, and two workers that are emulated from their steps: bsp and asp."""
    out = tmp_path_factory.mktemp("emulated") / "runs"
    (real,) = run_forked(
        *SMALL, "--ranks", "2", "--engine", "ddp", "--set", "train.batch_per_rank=2", *SLOW, "--out", out
    )
    emulated = run_forked(
        *(*SMALL, "--ranks", "1", "--engine", "emulated", "--set", "train.batch_per_rank=4", "--out", out),
        *("--set", "train.gradient_accumulation=2", "--set", f"engine.emulated.steps_from={real.folder.path}"),
        *("--sweep", "engine.emulated.policy=bsp,asp"),
    )
    return [real, *emulated]


def test_bsp_has_the_losses_of_real_ranks(runs: list[Run]) -> None:
    real, bsp, asp = runs
    losses = mean_losses(real)
    assert np.allclose(mean_losses(bsp), losses, rtol=1e-5)
    for run in (bsp, asp):
        assert run.record is not None
        assert run.record.emulation is not None
        assert not run.record.inert
        assert len(run.record.emulation.end_s) == len(losses)
    recorded = bsp.plan.engine.emulated
    steps = [read_steps(real.folder.steps(rank)).measured for rank in range(2)]
    own_s = [(times["step_ns"] - times["exchange_ns"]) / 1e9 for times in steps]
    assert np.allclose(recorded.work_s, own_s)
    least_ns = np.minimum(*(times["exchange_ns"] for times in steps))
    assert recorded.exchange_s == pytest.approx(np.median(least_ns) / 1e9)


def test_the_report_calls_them_emulated_and_doubts_their_times(cli: Cli, runs: list[Run]) -> None:
    folder = str(runs[0].folder.path.parent)
    report = json.loads(cli("report", folder, "--format", "json").stdout)
    (compared,) = report["asynchrony"]
    assert [row["policy"] for row in compared["policies"]] == ["bsp", "asp"]
    assert compared["policies"][0]["staleness_max"] == 0
    codes = {group["label"]: {doubt["code"] for doubt in group["doubts"]} for group in report["groups"]}
    assert [("emulated" in found) for label, found in codes.items()] == ["emulated" in label for label in codes]
    page = cli("report", folder, "--format", "md", "--full").stdout
    assert "Asynchrony, emulated" in page


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine.emulated.steps_from": None}, "set engine.emulated.steps_from to the folder of a run"),
        ({"train.gradient_accumulation": 1}, "set train.gradient_accumulation to the number of workers, 2"),
        ({"engine.emulated.policy": "groups", "engine.emulated.group_size": 3}, "engine.emulated.group_size 3: does"),
        ({"engine.emulated.policy": "backup"}, "set it to 0.75 or less"),
        ({"engine.emulated.staleness": 2}, "only policy ssp reads it"),
        ({"train.precision": "fp16"}, "cannot be combined with train.precision fp16"),
        ({"checkpoint.every_steps": 2}, "checkpoints do not contain gradients"),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_the_plan(settings: dict[str, Any], said: str) -> None:
    asked = {"train.gradient_accumulation": 4, "train.batch_per_rank": 8, "engine.emulated.steps_from": "/runs/a"}
    overrides = {key: value for key, value in (asked | settings).items() if value is not None}
    with pytest.raises(UserError, match=said):
        plans(points=(1,), repeats=1, engine="emulated", overrides=overrides)


class CountingEngine(Engine):
    """Synchronises nothing, and counts what it was told of: what an engine needs beside the defaults."""

    def __init__(self, *of_plan: object) -> None:
        super().__init__(*of_plan)
        self.steps = 0

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        self.steps += 1
        super().step(update)

    def settings(self) -> list[Setting]:
        return [Setting(key="engine.counting.steps", requested=None, effective=self.steps, evidence="counted")]


@pytest.fixture
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = EngineKind(title="Counting steps", on_ranks=f"{__name__}:CountingEngine")
    monkeypatch.setitem(ENGINES, "counting", kind)


@pytest.mark.usefixtures("_counting")
def test_an_engine_of_one_module_trains_and_its_proof_is_in_the_record(tmp_path: Path) -> None:
    run = trained_run(tmp_path, 3, engine="counting")
    assert (run.record.state, run.plan.engine.name) == ("valid", "counting")
    (proof,) = [one for one in run.record.settings if one.key == "engine.counting.steps"]
    assert proof.effective == 4 + 3
    assert run.plan.engine_title == "Counting steps"


def test_an_engine_that_is_not_entered_is_refused_with_those_that_are() -> None:
    names = "horovod, ddp, fsdp, pipeline, emulated or single"
    with pytest.raises(UserError, match=rf"engine\.name: must be {names}, got 'counting'"):
        plans(workload="cosmoflow", preset="ci", engine="counting")


@pytest.mark.usefixtures("_counting")
def test_it_takes_ranks_settings_of_sync_and_groups_like_the_others() -> None:
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(4,), repeats=1, engine="counting")
    assert (plan.engine.settings, plan.engine_words) == (None, "counting")
