"""Parts of training against oracles: the course, checkpoints, precision, noise scale, metrics, the sample order."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dlbench.errors import EnvironmentLacksError, IncompleteDataError, UserError
from dlbench.node.data.loader import RECENT_READS
from dlbench.node.data.sharding import Position, ShardedOrder, evaluation_batches
from dlbench.node.models.bert import MaskedLmAccuracy
from dlbench.node.models.cosmoflow import MeanAbsoluteError
from dlbench.node.models.optimizers import Lamb, LearningRate
from dlbench.node.models.resnet import Top1
from dlbench.node.part import WATCHED_STEPS, StepSchedule, plan_schedule
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training import checkpoint, precision
from dlbench.node.training.checkpoint import Checkpoint, find_checkpoint
from dlbench.node.training.optional_parts import NoiseProbe, estimate_noise_scale
from dlbench.node.training.pauses import Pauses
from dlbench.records.record import Evaluation
from dlbench.specs.training import OptimizerSpec, ScheduleSpec, TrainSpec
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.one_rank import trained as run_of_one_rank
from tests.support.paths import DATA
from tests.support.run_factory import plans, record_of

# --- the course of a run


def course_of(**changes: Any) -> StepSchedule:
    fields = {"first": 0, "end": 100, "warmup": 0, "global_batch": 8, "steps_per_epoch": None}
    return StepSchedule(**{**fields, **changes})


@given(first=st.integers(0, 50), steps=st.integers(1, 200), every=st.floats(1, 60))
def test_pauses_come_once_each_multiple_and_at_the_end(first: int, steps: int, every: float) -> None:
    course = course_of(first=first, end=first + steps, evaluate_every=every)
    pauses = [done for done in range(first + 1, first + steps + 1) if course.evaluates(done)]
    assert pauses[-1] == first + steps
    assert not any(course.saves(done) for done in range(first, first + steps + 1))
    # Not more than one each multiple of `every` and one at the end; never further apart than a multiple, rounded up.
    assert len(pauses) <= math.ceil((first + steps) / every) - math.floor(first / every) + 1
    assert all(later - sooner <= math.ceil(every) for sooner, later in itertools.pairwise(pauses))


def noted(course: StepSchedule, *, met_after: int | None = None) -> list[str]:
    """Keys of the events between the steps of a course, whose target is met after a number of steps."""
    events: list[str] = []

    class Noted(Pauses):
        def _evaluate(self, done: int, train_s: float) -> bool:
            events.append("evaluation")
            return done == met_after

        def _save(self, done: int, train_s: float) -> None:
            events.append("checkpoint")

    def note(key: str, **more: Any) -> None:
        events.append(f"{key} {more['epoch']}")

    (plan,) = plans(points=(1,), repeats=1)
    context = SimpleNamespace(
        plan=plan,
        engine=SingleEngine(),
        beat=lambda what: None,
        watch=SimpleNamespace(pause=lambda what: nullcontext()),
        events=SimpleNamespace(add=note),
        place=SimpleNamespace(rank=0),
    )
    state = SimpleNamespace(context=context, schedule=course, resumed=None, source=SimpleNamespace(order=None))
    pauses = Noted(cast(Any, state), None)
    for done in range(course.first + 1, course.end + 1):
        events.append("step")
        if (course.stops(done) or course.ends_epoch(done)) and pauses(done, 0.0):
            break
    return events


@given(
    first=st.integers(0, 12),
    steps=st.integers(0, 20),
    per_epoch=st.floats(1, 6),
    every=st.floats(1, 6),
    saves=st.booleans(),
    met_after=st.integers(1, 30),
)
def test_every_epoch_that_begins_is_trained_and_none_begins_before_the_last_was_evaluated(
    first: int, steps: int, per_epoch: float, every: float, saves: bool, met_after: int
) -> None:
    saved = every if saves else None
    course = course_of(
        first=first, end=first + steps, steps_per_epoch=per_epoch, evaluate_every=every, checkpoint_every=saved
    )
    found = noted(course, met_after=met_after)
    for before, event, after in zip(["", *found], found, [*found[1:], ""], strict=False):
        if event.startswith("epoch_start"):
            assert after == "step"
            assert before == "" or before.startswith(("epoch_stop", "evaluation", "checkpoint"))
    epochs = [event for event in found if event.startswith("epoch_")]
    # Also one in which training ends, so that no log lacks the end of its only epoch.
    for start, stop in zip(epochs[::2], epochs[1::2], strict=True):
        assert (start.split(), stop.split()) == (["epoch_start", start.split()[1]], ["epoch_stop", start.split()[1]])


@pytest.mark.parametrize(
    ("warmup", "window_steps", "window"),
    [(1, 3, [0]), (3, 3, [1, 2]), (6, 3, [3, 4, 5]), (9, 3, [3, 4, 5]), (5, 1, [1]), (4, 1, [3]), (9, 0, [])],
)
def test_the_watched_window_leaves_the_first_step_out(warmup: int, window_steps: int, window: list[int]) -> None:
    course = course_of(first=7, warmup=warmup, window_steps=window_steps)
    assert list(course.window) == window


@given(warmup=st.integers(0, 40), window_steps=st.integers(0, 64), deciding=st.sampled_from([0, 4, 12]))
def test_layers_are_watched_where_they_disturb_no_figure(warmup: int, window_steps: int, deciding: int) -> None:
    course = course_of(warmup=warmup, window_steps=window_steps, deciding_steps=deciding)
    window, exchange = set(course.window), set(range(course.watch_from, warmup))
    assert window <= set(range(warmup))
    assert len(window) <= window_steps
    assert course.shares_window == bool(window & exchange)
    if deciding:
        assert not window & (exchange | set(range(deciding)))
    if warmup >= max(1, deciding) + window_steps + WATCHED_STEPS:
        assert len(window) == window_steps
        assert not window & exchange
    elif not deciding:
        assert bool(window) == bool(warmup and window_steps)
    # Messages and reading: from the layers on, without a gap, to the end.
    assert bool(course.traced) == bool(warmup and window_steps)
    assert course.traced.stop == warmup
    assert window <= set(course.traced)
    assert len(course.traced) <= RECENT_READS


@pytest.mark.parametrize(
    ("ranks", "engine", "settings", "window"),
    [
        (2, "ddp", {}, [4, 5, 6]),
        (2, "ddp", {"sync.fusion": "own:mgwfbp"}, [4, 5, 6]),
        (2, "ddp", {"sync.fusion": "own:mgwfbp", "measure.warmup_steps": 8}, [4]),
        (2, "ddp", {"sync.fusion": "own:mgwfbp", "measure.warmup_steps": 4}, []),
        (2, "horovod", {"engine.horovod.autotune": True, "measure.warmup_steps": 2000}, [1994, 1995, 1996]),
        (1, "single", {"measure.warmup_steps": 4}, [1, 2, 3]),
    ],
)
def test_no_layer_is_watched_while_the_exchange_is_decided(
    ranks: int, engine: str, settings: dict[str, Any], window: list[int]
) -> None:
    overrides = {"measure.warmup_steps": 10, **settings}
    plan = plans(points=(ranks,), repeats=1, engine=engine, overrides=overrides)[0]
    assert list(plan_schedule(plan, first=0, batches_per_epoch=None).window) == window


# --- the learning rate


def train_spec(batch: int = 8, **settings: Any) -> TrainSpec:
    optimizer = OptimizerSpec.model_validate({"name": "sgd", "learning_rate": 0.1, **settings.pop("optimizer", {})})
    schedule = ScheduleSpec.model_validate(settings.pop("schedule", {}))
    return TrainSpec.model_validate({"batch_per_rank": batch, "optimizer": optimizer, "schedule": schedule, **settings})


def test_cosmoflows_published_schedule() -> None:
    # SGD, 0.001 at 64 scaled linearly, warm-up of 4 epochs from 0.001, x0.25 after epoch 32, x0.125 after 64.
    spec = train_spec(
        optimizer={"learning_rate": 0.001, "learning_rate_scaling": "linear", "reference_batch": 64},
        schedule={
            "warmup_epochs": 4.0,
            "warmup_from": "unscaled",
            "decay": "step",
            "epoch_boundaries": [32.0, 64.0],
            "step_factors": [0.25, 0.125],
        },
    )
    per_epoch = 524_288 / 512
    rate = LearningRate(spec, global_batch=512, steps_per_epoch=per_epoch)
    assert rate.peak == pytest.approx(0.008)
    assert rate.at(0) == pytest.approx(0.001 + 0.007 / (4 * per_epoch))
    assert rate.at(int(4 * per_epoch) - 1) == pytest.approx(0.008)
    assert rate.at(int(31.9 * per_epoch)) == pytest.approx(0.008)
    assert rate.at(int(32 * per_epoch)) == pytest.approx(0.002)
    assert rate.at(int(64 * per_epoch)) == pytest.approx(0.001)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 16), ("sqrt", 4)])
def test_rates_scale_with_the_global_batch(scaling: str, factor: float) -> None:
    spec = train_spec(optimizer={"learning_rate_scaling": scaling, "reference_batch": 32})
    assert LearningRate(spec, global_batch=512, steps_per_epoch=None).at(0) == pytest.approx(0.1 * factor)


@given(
    warmup=st.integers(0, 30),
    steps=st.integers(1, 200),
    end=st.sampled_from([0.0, 0.01]),
    at=st.floats(0, 1),
    start=st.booleans(),
)
def test_a_cosine_decay_is_that_of_sgdr(warmup: int, steps: int, end: float, at: float, start: bool) -> None:
    """Loshchilov and Hutter 2017, equation 5, with one period: from the peak to the end, half-way in between."""
    total, step = warmup + steps, warmup + int(at * steps)
    schedule = {"warmup_steps": warmup, "decay": "cosine", "total_steps": total, "end_learning_rate": end}
    schedule["decay_from"] = "start" if start else "warmup"
    rate = LearningRate(train_spec(schedule=schedule), global_batch=8, steps_per_epoch=None)
    began = 0 if start else warmup
    period = (step - began) / (total - began)
    expected = end + 0.5 * (0.1 - end) * (1 + math.cos(math.pi * period))
    assert rate.at(step) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert rate.at(total) == rate.at(total + 5) == end
    if warmup and not start:
        assert rate.at(warmup - 1) == pytest.approx(0.1)
        assert rate.at(warmup) == pytest.approx(0.1)


def test_nvidias_published_bert_schedule() -> None:
    """Rate x (1 - s / T) ** 0.5 counted from step 0, beneath a warm-up of 2,000 steps: schedulers.py of its phase 1."""
    point = {"batch": 65_536, "learning_rate": 0.006, "warmup_steps": 2000, "total_steps": 7038}
    spec = train_spec(
        optimizer={
            "name": "lamb",
            "learning_rate": 0.006,
            "learning_rate_scaling": "table",
            "reference_batch": 65_536,
            "learning_rate_table": [point],
        },
        schedule={"decay": "polynomial", "power": 0.5, "total_steps": 7038, "decay_from": "start"},
    )
    rate = LearningRate(spec, global_batch=65_536, steps_per_epoch=None)
    assert rate.at(1999) == pytest.approx(0.006)
    assert rate.at(2000) == pytest.approx(0.006 * (1 - 2000 / 7038) ** 0.5)
    assert rate.at(7037) == pytest.approx(0.006 * (1 / 7038) ** 0.5)
    # Half the batch: as many samples of warm-up and in all, and the rate falls with the root.
    half = LearningRate(spec, global_batch=32_768, steps_per_epoch=None)
    assert half.at(3999) == pytest.approx(0.006 / 2**0.5)
    assert half.at(2 * 7038) == 0


# --- the sample order over a resume


@given(
    num=st.integers(1, 300),
    batch=st.integers(1, 9),
    world=st.integers(1, 5),
    taken=st.integers(0, 60),
    other=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_a_position_goes_on_with_any_number_of_ranks(
    num: int, batch: int, world: int, taken: int, other: int, seed: int
) -> None:
    if num < batch * max(world, other):
        return
    before = [ShardedOrder(num, batch_size=batch, rank=r, world_size=world, seed=seed) for r in range(world)]
    position = before[0].position(taken)
    assert all(order.position(taken) == position for order in before)
    streams = [order.batches() for order in before]
    seen = [key for _ in range(taken) for stream in streams for key in next(stream)]
    now = Counter(index for epoch, index in seen if epoch == position.epoch)
    assert len([1 for epoch, _ in seen if epoch == position.epoch]) == position.place
    # The rest of the epoch is dealt out by other ranks: still no sample twice, and none left but the remainder.
    after = [
        ShardedOrder(num, batch_size=batch, rank=r, world_size=other, seed=seed, start=position) for r in range(other)
    ]
    for order in after:
        for keys in order.batches():
            if keys[0][0] != position.epoch:
                break
            now.update(index for _, index in keys)
    assert not now or max(now.values()) == 1
    assert num - sum(now.values()) < batch * max(world, other) or position.place == 0


@given(num=st.integers(1, 200), batch=st.integers(1, 9), world=st.integers(1, 6))
def test_an_evaluation_sees_each_sample_once(num: int, batch: int, world: int) -> None:
    passes = [list(evaluation_batches(num, batch_size=batch, rank=r, world_size=world)) for r in range(world)]
    assert sorted(index for one in passes for keys in one for _, index in keys) == list(range(num))
    assert all(len(keys) <= batch for one in passes for keys in one)


# --- checkpoints

PROGRESS = progress_at(7, samples=56, epoch=0.5, position=Position(epoch=0, place=56))
TRAINED = {"model.family": "cosmoflow", "train.seed": 0}


def trained(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight if model[0].weight.shape == model[2].weight.shape else model[2].weight
    return model


@pytest.mark.parametrize("kind", ["sgd", "lamb"])
def test_a_checkpoint_holds_all_that_goes_on(tmp_path: Path, kind: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, Lamb(model.parameters(), lr=0.1, weight_decay=0.01)

    model, optimizer = build()
    trained(3, model, optimizer)
    path = tmp_path / "checkpoints" / "step-00000003.safetensors"
    write_checkpoint(path, model, optimizer, PROGRESS, TRAINED)
    trained(4, model, optimizer)

    other, fresh = build()
    read = Checkpoint(find_checkpoint(tmp_path))
    read.require(TRAINED)
    read.restore(other, fresh)
    assert read.progress == PROGRESS
    trained(4, other, fresh)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_checkpoints_of_form_1_still_read() -> None:
    """A sample of every form that was ever written; see tests/data/formats."""
    read = Checkpoint(DATA / "formats" / "checkpoint" / "v1" / "step-00000003.safetensors")
    evaluation = Evaluation(
        step=2, epoch=0.25, samples=16, train_s=0.5, wall_s=1.0, value=0.125, loss=2.5, eval_s=0.25, eval_samples=8
    )
    expected = progress_at(
        3, samples=24, epoch=0.375, position=Position(epoch=0, place=24), train_s=0.75, wall_s=1.5,
        loss_scaling={"scale": 1024.0}, evaluations=(evaluation, evaluation.model_copy(update={"value": None})),
    )  # fmt: skip
    assert read.progress == expected
    read.require({"model.family": "cosmoflow", "train.seed": 0, "train.optimizer.name": "sgd"})
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    read.restore(model, optimizer)
    # Steps of gradient (1, 2) and 1 from nothing: velocities 1, 1.5, 1.75 of it; rate 0.25, so -1.0625 in all.
    assert model.weight.tolist() == [[-1.0625, -2.125]]
    assert model.bias.tolist() == [-1.0625]
    assert [s["momentum_buffer"].tolist() for s in optimizer.state_dict()["state"].values()] == [[[1.75, 3.5]], [1.75]]


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    model = net()
    path = tmp_path / "step-00000001.safetensors"
    write_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1), PROGRESS, TRAINED)
    with pytest.raises(UserError, match=r"was trained with train\.seed 0, the plan has 1"):
        Checkpoint(path).require({**TRAINED, "train.seed": 1})


@pytest.mark.parametrize("damage", ["flipped", "truncated", "foreign", "empty"])
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    model = net()
    path = tmp_path / "step-00000001.safetensors"
    write_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1), PROGRESS, TRAINED)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-3] ^= 0x10
    elif damage == "truncated":
        content = content[:-20]
    elif damage == "foreign":
        content = bytearray(b"PK\x03\x04 something else")
    else:
        content = bytearray()
    path.write_bytes(content)
    with pytest.raises(IncompleteDataError, match=r"step-00000001\.safetensors: (damaged|not a re)") as told:
        Checkpoint(path)
    assert "\n" not in str(told.value)


def rewrite(path: Path, *, with_digest: bool, **changes: object) -> None:
    """The checkpoint with another header, under a digest that fits it or not."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["dlbench"]) | changes
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if with_digest:
        header["sha256"] = checkpoint._digest(header, tensors)
    save_file(tensors, path, metadata={"dlbench": json.dumps(header)})


HEADERS: list[dict[str, object]] = [
    {"step": "x"},
    {"step": -5},
    {"position": ["a", None]},
    {"epoch": float("nan")},
    {"trained": None},
    {"unknown": 1},
    {"evaluations": [{"step": 1}]},
]


@pytest.mark.parametrize("with_digest", [False, True])
@pytest.mark.parametrize("change", HEADERS, ids=lambda change: ",".join(change))
def test_a_header_is_under_the_checksum_and_checked(
    tmp_path: Path, change: dict[str, object], with_digest: bool
) -> None:
    model = net()
    path = tmp_path / "step-00000001.safetensors"
    write_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1), PROGRESS, TRAINED)
    rewrite(path, with_digest=with_digest, **change)
    what = next(iter(change)) if with_digest else "do not have the SHA-256"
    with pytest.raises(IncompleteDataError, match=rf"step-00000001\.safetensors: damaged: .*{what}") as told:
        Checkpoint(path)
    assert "\n" not in str(told.value)


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "step-00000001.safetensors"
    write_checkpoint(path, model, optimizer, PROGRESS, TRAINED)
    with pytest.raises(IncompleteDataError, match=r"step-00000001\.safetensors: does not fit"):
        Checkpoint(path).restore(nn.Linear(2, 1), optimizer)
    rewrite(path, with_digest=True, group_steps=[])
    with pytest.raises(IncompleteDataError, match=r"00001\.safetensors: .*steps of 0 parameter groups"):
        Checkpoint(path).restore(model, optimizer)


# --- precision

CPU = torch.device("cpu")


def flags_show(native: set[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(precision, "native_precisions", lambda: native)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_what_a_cpu_cannot_do_is_refused_with_the_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever oneDNN says of itself: it offers bf16 on every AVX-512 CPU."""
    flags_show(set(), monkeypatch)
    with pytest.raises(EnvironmentLacksError, match=rf"this CPU has no {kind} arithmetic.*allow_emulation=true"):
        precision.Precision(train_spec(precision=kind), CPU)
    allowed = precision.Precision(train_spec(precision=kind, allow_emulation=True), CPU)
    assert allowed.is_emulated
    assert "speed is not meaningful" in allowed.early_warnings[0]
    assert ", emulated in fp32 arithmetic" in allowed.text
    flags_show({kind}, monkeypatch)
    native = precision.Precision(train_spec(precision=kind, allow_emulation=True), CPU)
    assert (native.is_emulated, native.early_warnings) == (False, [])
    assert "emulated" not in native.text


def test_fp16_counts_overflows_leaves_their_steps_out_and_lowers_the_scale() -> None:
    spec = train_spec(precision="fp16", allow_emulation=True, initial_loss_scale=2.0**24)
    fp16 = precision.Precision(spec, CPU)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.weight.detach().clone()
    for step in range(12):
        with fp16.autocast():
            # Above fp16's 65,504 once scaled; the true gradient is small.
            loss = (model(torch.ones(4, 8)) * 3).float().mean()
        fp16.backward(loss)
        fp16.unscale(optimizer)
        fp16.update(optimizer)
        optimizer.zero_grad()
        if step == 0:
            assert torch.equal(model.weight, before)
    assert 0 < fp16.overflow_steps < 12
    assert fp16.scale == 2.0**24 / 2**fp16.overflow_steps
    assert not torch.equal(model.weight, before)
    assert torch.isfinite(model.weight).all()
    assert model.weight.dtype == torch.float32
    again = precision.Precision(spec, CPU)
    again.restore(fp16.state())
    assert again.scale == fp16.scale


# --- gradient noise scale


def test_the_noise_scale_of_known_gradients() -> None:
    # Gradients of one sample: a true gradient plus independent noise of known covariance.
    generator = np.random.default_rng(0)
    true, sigma, size = generator.normal(size=50), 2.0, 50
    small, large, ranks, steps = 4, 32, 8, 400
    told: list[list[list[float]]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        local = true + generator.normal(0, sigma, (ranks, small, size)).mean(1)
        both = float((local.mean(0) ** 2).sum())
        for rank in range(ranks):
            told[rank].append([float((local[rank] ** 2).sum()), both])
    found = estimate_noise_scale(told, small_batch=small, large_batch=large)
    expected = sigma**2 * size / float((true**2).sum())
    assert found.noise_scale == pytest.approx(expected, rel=0.25)
    assert found.covariance_trace == pytest.approx(sigma**2 * size, rel=0.15)
    assert (found.steps, len(found.history)) == (steps, steps)


def test_the_probe_sees_each_part_before_the_exchange() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    probe = NoiseProbe(4, small_batch=2, large_batch=8)
    probe.before_wrap(SimpleNamespace(model=model))
    batch = torch.randn(8, 6)
    norms = []
    for part in batch.split(2):
        alone = torch.autograd.grad(model(part).square().mean(), list(model.parameters()))
        norms.append(sum(float(g.square().sum()) for g in alone))
    probe._local.clear()  # the oracle's own passes went through the hooks as well
    scale = 128.0
    for part in batch.split(2):
        (model(part).square().mean() / 4 * scale).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= scale
    probe.before_update(torch.tensor(scale))
    whole = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    ((small, large),) = probe.squared_norms()
    assert small == pytest.approx(np.mean(norms), rel=1e-5)
    assert large == pytest.approx(whole, rel=1e-5)


def test_what_a_plan_adds_acts_in_every_step_and_is_in_the_record(tmp_path: Path) -> None:
    added = {"measure__noise_scale": True, "fault__step_delay_s": 0.01, "train__optimizer_state": "host"}
    record = record_of(run_of_one_rank(tmp_path, 3, train__batch_per_rank=4, train__gradient_accumulation=2, **added))
    assert record.noise_scale is not None
    assert (record.noise_scale.steps, record.noise_scale.small_batch, record.noise_scale.large_batch) == (7, 2, 4)
    assert record.host_update is not None
    assert 0.03 <= record.ranks[0].planted_s < 0.07  # of measured steps alone
    assert [s.key for s in record.settings if s.key.startswith("train.")] == ["train.optimizer_state"]


# --- metrics


@given(seed=st.integers(0, 50), split=st.integers(1, 19))
def test_accuracy_is_the_same_however_the_samples_are_shared_out(seed: int, split: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, label = torch.randn(20, 5, generator=generator), torch.randint(5, (20,), generator=generator)
    parts = []
    for rows in (slice(None, split), slice(split, None)):
        meter = Top1()
        meter.add((logits[rows],), {"label": label[rows]}, torch.tensor(float(rows == slice(None, split))))
        parts.append(meter.sums())
    found = Top1.combine(parts)
    assert found.value == pytest.approx(float((logits.argmax(1) == label).float().mean()))
    assert found.loss == pytest.approx(split / 20)
    assert found.samples == 20
    assert found.predictor_value == max(Counter(label.tolist()).values()) / 20


def test_masked_accuracy_leaves_unused_places_out() -> None:
    meter = MaskedLmAccuracy()
    logits = torch.zeros(2, 3, 7)
    logits[0, 0, 4] = logits[0, 1, 5] = logits[1, 0, 4] = 1.0
    batch = {
        "masked_ids": torch.tensor([[4, 6, 0], [4, 0, 0]]),
        "masked_weights": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    }
    meter.add((logits, torch.zeros(2, 2)), batch, torch.tensor(1.0))
    found = MaskedLmAccuracy.combine([meter.sums()])
    assert found.value == pytest.approx(2 / 3)
    assert found.predictor_value == pytest.approx(2 / 3)  # token 4 is two of the three
    assert not MaskedLmAccuracy.name.startswith("top")


def test_the_mean_error_and_the_mean_predictors() -> None:
    targets, predictions = torch.rand(6, 4) * 2 - 1, torch.rand(6, 4)
    parts = []
    for rows in (slice(0, 1), slice(1, 6)):
        meter = MeanAbsoluteError()
        meter.add((predictions[rows],), {"target": targets[rows]}, torch.tensor(0.5))
        parts.append(meter.sums())
    found = MeanAbsoluteError.combine(parts)
    assert found.value == pytest.approx(float((predictions - targets).abs().mean()))
    assert found.predictor_value == pytest.approx(float((targets - targets.mean(0)).abs().mean()), rel=1e-6)
    with pytest.raises(ValueError, match="no sample"):
        MeanAbsoluteError.combine([MeanAbsoluteError().sums()])
