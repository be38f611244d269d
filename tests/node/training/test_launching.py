"""Steps of a GPU in simulated time: the host's clock, and that the device waits for the host, never the host for it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlbench.analysis.causes import waited_for_host
from dlbench.analysis.measures import UNKNOWN_NS, Launching, RunSteps, kernel_ns
from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.synthetic import BatchCopier, synthetic_batch
from dlbench.node.models import resnet
from dlbench.node.models.build import build_model, network_of
from dlbench.node.sync.engine import Engine, RankGroup, SingleEngine
from dlbench.node.sync.own import buckets
from dlbench.node.sync.wire import OverflowCount, build_wire, magnitudes
from dlbench.node.training import phases
from dlbench.node.training.loop import TrainingLoop
from dlbench.node.training.phases import CudaTimer, StepTimes
from dlbench.node.training.precision import Precision
from dlbench.node.training.run import Rank
from dlbench.records.rows.steps import LAUNCHED, PHASES, StepFile, read_steps
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import Wire
from tests.support.cuda_events import FakeGpu, installed
from tests.support.device_waits import DEVICE, Waits, watched
from tests.support.one_rank import Work, context_of, empty_training
from tests.support.run_factory import plans
from tests.support.training_data import training_data

US = 1_000
MS = 1_000_000
ROUNDING_NS = 50
"""Per phase: float32 of milliseconds resolves 8 ns in a step of 100 ms."""

Kernels = Sequence[tuple[int, int]]
"""What the host takes to send each kernel, and what it runs, nanoseconds."""


@dataclass
class Trained:
    """What a timer said of some steps, and what the simulated device knows of them."""

    told: list[StepTimes] = field(default_factory=list)
    idle: list[list[int]] = field(default_factory=list)
    """By `LAUNCHED`."""
    busy: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@contextmanager
def gpu_of(**about: float) -> Iterator[FakeGpu]:
    gpu = FakeGpu(**about)
    with pytest.MonkeyPatch.context() as patch:
        installed(patch, gpu)
        yield gpu


def train(gpu: FakeGpu, timer: CudaTimer, steps: Sequence[Sequence[Kernels]], seen: Trained, parts: int = 1) -> None:
    """Steps of forward, backward and optimizer, the first two for each part of a batch, as the loop marks them."""
    for kernels in steps:
        timer.begin()
        seen.starts.append(timer._start.at_ns)  # type: ignore[union-attr]
        idle, busy = dict.fromkeys(LAUNCHED, 0), dict.fromkeys(LAUNCHED, 0)
        for phase in (phases.INPUT, phases.H2D):
            timer.mark(phase)
        order = [phases.FORWARD, phases.BACKWARD] * parts + [phases.OPTIMIZER]
        for number, phase in enumerate(order):
            own = kernels[-1] if phase == phases.OPTIMIZER else kernels[number % 2]
            if phase == phases.OPTIMIZER:
                timer.mark(phases.EXCHANGE)
            timer.hold_back()
            gpu.idle_ns = 0
            for call, run in own:
                gpu.launch(call, run)
            timer.mark(phase)
            idle[PHASES[phase]] += gpu.idle_ns
            busy[PHASES[phase]] += sum(run for _, run in own)
        timer.finish(1, torch.tensor(0.5))
        seen.idle.append(list(idle.values()))
        seen.busy.append(list(busy.values()))
        seen.told += timer.collect(wait=False)


def drain(timer: CudaTimer, seen: Trained) -> None:
    timer.close()
    seen.told += timer.collect(wait=True)


def took(step: StepTimes, phase: str) -> int:
    return step.phases[PHASES.index(phase)]


kernels = st.lists(st.tuples(st.integers(1 * US, 40 * US), st.integers(1 * US, 400 * US)), min_size=1, max_size=12)
steps = st.lists(st.tuples(kernels, kernels, kernels), min_size=1, max_size=4)


@given(steps=steps)
@settings(max_examples=60, deadline=None)
def test_a_phase_idles_no_longer_than_its_bound_and_not_at_all_where_that_is_0(
    steps: Sequence[Sequence[Kernels]],
) -> None:
    with gpu_of() as gpu:
        timer, seen = CudaTimer(), Trained()
        train(gpu, timer, steps, seen)
        drain(timer, seen)
    for told, idle, busy in zip(seen.told, seen.idle, seen.busy, strict=True):
        for place, phase in enumerate(LAUNCHED):
            length, bound = took(told, phase), told.launch[place]
            assert idle[place] - ROUNDING_NS <= bound <= length
            assert length == pytest.approx(busy[place] + idle[place], abs=ROUNDING_NS)
            if bound == 0:
                assert length == pytest.approx(busy[place], abs=ROUNDING_NS)


def run_steps(told: Sequence[StepTimes], warmup: int) -> RunSteps:
    """As `load_steps` makes it of one rank."""
    every = {phase: np.array([took(step, phase) for step in told], np.int64) for phase in PHASES}
    bounds = {phase: np.array([step.launch[place] for step in told]) for place, phase in enumerate(LAUNCHED)}
    is_warmup = np.arange(len(told)) < warmup
    kernels = {phase: np.array([kernel_ns(every[phase], bounds[phase], is_warmup)]) for phase in LAUNCHED}
    return RunSteps(
        numbers=np.arange(warmup, len(told)),
        begin_ns=np.array([told[warmup].start_ns]),
        end_ns=np.array([told[-1].start_ns + told[-1].step_ns]),
        step_ns=np.array([[step.step_ns for step in told[warmup:]]]),
        phase_ns={phase: times[None, warmup:] for phase, times in every.items()},
        unbroken=len(told) - warmup,
        launch=Launching(bound_ns={k: v[None, warmup:] for k, v in bounds.items()}, kernel_ns=kernels),
    )


def measured_after_holding(
    gpu: FakeGpu, step: Sequence[Kernels], *, parts: int = 1, held: int = 3, count: int = 8
) -> Trained:
    """A warm-up of two steps as they come and `held` held back, then `count` measured steps."""
    timer, seen = CudaTimer(), Trained()
    train(gpu, timer, [step] * 2, seen, parts)
    drain(timer, seen)
    timer.hold(held > 0)
    gpu.slept_ns.clear()
    train(gpu, timer, [step] * held, seen, parts)
    drain(timer, seen)
    timer.hold(False)
    train(gpu, timer, [step] * count, seen, parts)
    drain(timer, seen)
    return seen


@given(step=st.tuples(kernels, kernels, kernels), parts=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_with_steps_held_back_the_idle_time_is_that_of_the_device(step: Sequence[Kernels], parts: int) -> None:
    with gpu_of() as gpu:
        seen = measured_after_holding(gpu, step, parts=parts)
    found, why = waited_for_host(run_steps(seen.told, 5), synchronised=False)
    assert found is not None, why
    for place, phase in enumerate(LAUNCHED):
        truth = sum(idle[place] for idle in seen.idle[5:])
        assert found[phase] == pytest.approx(truth, abs=8 * parts * ROUNDING_NS)


def test_a_device_that_is_behind_its_host_is_not_held_back() -> None:
    """With the launch queue full a host takes as long as its device: to sleep for that would say nothing."""
    with gpu_of(queue=60) as gpu:
        seen = measured_after_holding(gpu, [[(20 * US, 5 * MS)] * 40] * 3, parts=4)
    assert gpu.slept_ns == []
    found, why = waited_for_host(run_steps(seen.told, 5), synchronised=False)
    assert found is not None, why
    assert sum(found.values()) < 0.001 * sum(step.step_ns for step in seen.told[5:])


MANY_SMALL: Kernels = [(20 * US, 5 * US)] * 40


def test_without_a_step_held_back_only_a_bound_is_known() -> None:
    with gpu_of() as gpu:
        seen = measured_after_holding(gpu, [MANY_SMALL] * 3, held=0)
    steps = run_steps(seen.told, 2)
    assert steps.launch.kernel_ns["forward"][0] == UNKNOWN_NS
    found, why = waited_for_host(steps, synchronised=False)
    assert found is None
    assert "per step" in why
    found, why = waited_for_host(steps, synchronised=True)
    assert found is None
    assert "synchronised" in why


@pytest.mark.parametrize("ppm", [0.0, 30.0, -30.0])
def test_starts_stand_on_the_clock_of_the_host_within_the_bound_and_leave_no_gaps(ppm: float) -> None:
    """After a day of the device's clock, whose float32 of milliseconds resolves 8 ms, and 200 s of measurement."""
    with gpu_of(ppm=ppm, origin_ms=86_400_000.0) as gpu:
        timer, seen = CudaTimer(), Trained()
        for _ in range(10):
            train(gpu, timer, [[[(30 * US, 20 * MS)], [(30 * US, 60 * MS)], [(30 * US, 20 * MS)]]] * 20, seen)
            drain(timer, seen)
            gpu.host_ns += 5 * MS  # between steps the loop collects garbage
    assert len(seen.told) == 200
    worst = max(abs(step.start_ns - start) for step, start in zip(seen.told, seen.starts, strict=True))
    assert worst <= timer.clock_error_ns
    assert timer.clock_error_ns < 20 * US + abs(ppm) * 2.1 * US
    for place, (step, after) in enumerate(itertools.pairwise(seen.told)):
        end = step.start_ns + step.step_ns
        assert after.start_ns == end if (place + 1) % 20 else after.start_ns > end


WARMUP, MEASURED = 12, 6
HELD = range(6, 9)
"""Of the warm-up, before the three steps in which the exchange is watched."""


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        found = FakeGpu()
        installed(patch, found)
        yield found


class Notes:
    """A watchdog; and what the device slept until each step began, the host's clock with it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.beats: list[str] = []
        self.steps: list[tuple[int, int]] = []
        self.longest_ns = 0
        self._last_ns = gpu.host_ns

    def beat(self, where: str) -> None:
        self.longest_ns, self._last_ns = max(self.longest_ns, self.gpu.host_ns - self._last_ns), self.gpu.host_ns
        self.beats.append(where)
        if where.startswith("the start of step"):
            self.steps.append((self.gpu.host_ns, sum(self.gpu.slept_ns)))


def trained(gpu: FakeGpu, folder: Path, parts: int, call_ns: int, run_ns: int) -> tuple[StepFile, Notes]:
    """Steps whose passes and updates have ten kernels each: `call_ns` of the host, `run_ns` of the device."""

    def work() -> None:
        for _ in range(10):
            gpu.launch(call_ns, run_ns)

    timer, notes = CudaTimer(), Notes(gpu)
    kernels: dict[str, Work] = {"forward": work, "backward": work, "update": work}
    state = empty_training(timer, warmup=WARMUP, measured=MEASURED, parts=parts, watchdog=notes, **kernels)
    notes.beats.clear()
    result = TrainingLoop(state, timer).run(folder / "rank-0.steps")
    assert (result.steps, state.schedule.held) == (WARMUP + MEASURED, HELD)
    return read_steps(folder / "rank-0.steps"), notes


def test_rows_say_how_long_the_device_waited_for_the_host(gpu: FakeGpu, tmp_path: Path) -> None:
    """Whoever runs the loop: the file has the columns that the timer fills."""
    file, _ = trained(gpu, tmp_path, 2, 20 * US, 5 * US)
    assert (file.header["clock"], file.torn_bytes, len(file.steps)) == ("cuda-events", 0, WARMUP + MEASURED)
    for phase in LAUNCHED:
        late, took = file.steps[f"launch_{phase}_ns"], file.steps[f"{phase}_ns"]
        assert (late <= took).all()
        assert (late[-MEASURED:] > 0.7 * took[-MEASURED:]).all()
        assert (late[HELD.start : HELD.stop] == 0).all()
    assert (file.steps["loss"] == 0.5).all()
    assert (file.steps["samples"] == 2).all()


class Delivered:
    """In place of what copies batches to a device."""

    def fetch(self) -> None: ...
    def look_ahead(self) -> bool:
        return False

    def deliver(self) -> dict[str, torch.Tensor]:
        return {"volume": torch.zeros(1, 1)}


def test_peaks_of_measured_steps_are_their_own(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step searches for algorithms in 30 GiB, which torch's allocator keeps; all others need 2."""
    gib = 1 << 30
    held = {"allocated": 0, "reserved": 0}
    passes: list[int] = []
    emptied: list[int] = []

    def forward() -> None:
        needs = 2 * gib if passes else 30 * gib
        passes.append(needs)
        held["allocated"], held["reserved"] = max(held["allocated"], needs), max(held["reserved"], needs)

    def restart(device: torch.device) -> None:
        held["allocated"] = 0  # between steps nothing is held, and what is reserved stays so

    def empty() -> None:
        held["reserved"] = 0
        emptied.append(len(passes))

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["allocated"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restart)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    timer = CudaTimer()
    state = empty_training(timer, warmup=WARMUP, measured=MEASURED, forward=forward)
    state.context.device, state.batch_copier = torch.device("cuda", 0), cast(BatchCopier, Delivered())
    found = TrainingLoop(state, timer).run(tmp_path / "rank-0.steps")
    assert (found.startup_peak_bytes, held) == (30 * gib, {"allocated": 2 * gib, "reserved": 2 * gib})
    assert emptied == [HELD.start]


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


def watched_steps(plan: RunPlan, engine: Engine, *, warm: int = 1) -> Waits:
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
        return watched_steps(plan_of("resnet50", **{"data.synthetic_on": where}), SingleEngine()).crossings

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
    seen = watched_steps(
        plan_of(workload, **{"measure.noise_scale": True, "train.gradient_accumulation": 2}), SingleEngine()
    )
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
    seen = watched_steps(plan_of("resnet50", **overrides), SingleEngine())
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
