"""The course of a training: number of steps, stop requests, timers, garbage collection, and too little memory."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from dlbench.errors import RunError
from dlbench.node.garbage import COLLECT_EVERY
from dlbench.node.models.build import loss_for
from dlbench.node.out_of_core import device_memory
from dlbench.node.out_of_core.device_memory import BatchFit, largest_batch, missing_state_bytes, out_of_memory
from dlbench.node.part import HELD_STEPS, WATCHED_STEPS, Pacing, StepSchedule, plan_schedule
from dlbench.node.training import pauses
from dlbench.node.training import run as rank_run
from dlbench.node.training.pauses import CHECKS_IN_WARNING, any_stop_requested, stop_check_interval
from dlbench.node.training.phases import CpuTimer, CudaTimer
from dlbench.records.rows.steps import PHASES, read_steps
from dlbench.specs.training import OptimizerSpec
from tests.support.one_rank import trained
from tests.support.run_factory import plans, record_of

pytestmark = pytest.mark.usefixtures("one_thread")


def course_of(*, on_gpu: bool = False, first: int = 0, **seconds: Any) -> StepSchedule:
    overrides = {f"measure.{key}": value for key, value in seconds.items()}
    (plan,) = plans(points=(1,), repeats=1, overrides=overrides)
    return plan_schedule(plan, first=first, batches_per_epoch=None, on_gpu=on_gpu)


def run(
    course: StepSchedule, step_s: Callable[[int], float], others: Sequence[float] = ()
) -> tuple[list[float], Pacing]:
    """Steps of a rank as the loop makes them; `others` are how much faster steps of other ranks seem to be."""

    def gather(own: list[float]) -> list[list[float]]:
        return [own, *([own[0], own[1] / faster] for faster in others)]

    told: list[tuple[int, int]] = []
    pacing = Pacing(course, gather, lambda steps, warmup: told.append((steps, warmup)))
    times: list[float] = []
    step = 0
    while step < course.steps:
        while step <= course.warmup and pacing.is_due(step):
            pacing.agree(times)
        times.append(step_s(step))
        step += 1
    assert not told or told[-1] == (course.steps, course.warmup)
    return times, pacing


@pytest.mark.parametrize("length", [0.004, 0.05, 3.0])
def test_both_last_as_long_as_was_asked_for_and_no_longer_than_needed(length: float) -> None:
    course = course_of(warmup_s=10.0, measured_s=30.0)
    least = course.warmup, course.measured
    # The first steps set things up.
    times, _ = run(course, lambda step: length * (20 if step < 2 else 1))
    warmup, measured = sum(times[1 : course.warmup]), sum(times[course.warmup :])
    assert warmup >= 10.0 or course.warmup > least[0]
    assert 10.0 - length <= warmup <= max(10.0 + 2 * length, least[0] * length + 40 * length)
    assert 30.0 - 1e-9 <= measured <= max(30.0 + length, least[1] * length + 1e-9)


def test_a_first_step_that_compiles_warms_nothing_up() -> None:
    course = course_of(warmup_s=20.0, measured_s=60.0)
    times, _ = run(course, lambda step: 0.1 if step else 90.0)
    assert sum(times[1 : course.warmup]) == pytest.approx(20.0, abs=0.2)


def test_steps_that_were_asked_for_are_made_where_they_take_longer() -> None:
    course = course_of(warmup_s=0.1, measured_s=0.1)
    least = course.warmup, course.measured
    run(course, lambda step: 1.0)
    assert (course.warmup, course.measured) == least


def test_the_rank_with_the_shortest_steps_measures_long_enough() -> None:
    course = course_of(warmup_s=0.0, measured_s=40.0)
    run(course, lambda step: 0.5, others=[1.0, 2.0])
    assert course.measured == 160


def test_without_seconds_nothing_changes_on_a_cpu_and_a_gpu_has_its_own() -> None:
    plain = course_of()
    assert not plain.is_timed
    assert (course_of(on_gpu=True).warmup_s, course_of(on_gpu=True).measured_s) == (20.0, 60.0)
    off = course_of(on_gpu=True, warmup_s=0.0, measured_s=0.0)
    assert (off.warmup, off.end) == (plain.warmup, plain.end)


def test_watched_steps_stay_at_the_end_of_the_warm_up_and_a_resumed_run_counts_its_own() -> None:
    course = course_of(first=1000, warmup_s=5.0, measured_s=5.0)
    run(course, lambda step: 0.1)
    assert course.held == range(course.window.start - HELD_STEPS, course.window.start)
    assert course.window.stop == course.watch_from == course.warmup - WATCHED_STEPS
    assert course.end == 1000 + course.warmup + course.measured


def test_what_was_not_reached_is_said() -> None:
    course = course_of(warmup_s=2.0, measured_s=30.0)
    times, pacing = run(course, lambda step: 0.1 if step < 20 else 0.05)
    (text,) = pacing.warnings(times, on_gpu=True)
    assert "instead of 30 s" in text
    course = course_of(warmup_s=2.0, measured_s=3.0)
    times, pacing = run(course, lambda step: 0.1)
    assert pacing.warnings(times, on_gpu=False) == []
    assert pacing.warnings(times, on_gpu=True)[0].startswith("short-window: measured for 3 s")


STEPS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=6)


def looks_of_all(warning_s: float, ranks: Sequence[Sequence[float]]) -> list[int]:
    """What each rank decides, when all have told their slowest step."""
    told: list[Any] = []

    def tell(value: Any) -> list[Any]:
        told.append(value)
        return [value]

    for steps in ranks:
        stop_check_interval(warning_s, steps, tell)
    return [stop_check_interval(warning_s, steps, lambda _: told) for steps in ranks]


@given(warning_s=st.floats(1, 3600), ranks=st.lists(STEPS, min_size=1, max_size=4))
@example(
    warning_s=120.0, ranks=[[50.0], [0.1, 0.1]]
)  # a first step sets things up, and counts where it is the only one
@example(warning_s=120.0, ranks=[[50.0, 0.4]])
def test_ranks_look_alike_and_often_enough_for_a_checkpoint(warning_s: float, ranks: list[list[float]]) -> None:
    """Whatever the steps of the slowest rank, a warning is seen with three quarters of its time left, or at the next
    step."""
    looks = looks_of_all(warning_s, ranks)
    assert len(set(looks)) == 1
    every = looks[0]
    assert 1 <= every <= COLLECT_EVERY
    slowest = max(max(steps[1:] or steps) for steps in ranks)
    part = warning_s / CHECKS_IN_WARNING
    if every > 1:
        assert every * slowest <= part * (1 + 1e-9)
    # And not more often: a look makes the ranks wait for each other.
    if every < COLLECT_EVERY:
        assert (every + 1) * slowest > part * (1 - 1e-9)


@given(warning_s=st.floats(1, 3600), count=st.integers(0, 3))
def test_without_a_step_that_took_time_the_collector_s_rhythm_is_kept(warning_s: float, count: int) -> None:
    assert stop_check_interval(warning_s, [0.0] * count, lambda value: [value, value]) == COLLECT_EVERY


@given(told=st.lists(st.booleans(), min_size=1, max_size=8))
def test_one_rank_that_was_told_stops_all(told: list[bool]) -> None:
    assert any_stop_requested(lambda _: told) == any(told)


class FakeStream:
    """Work is queued with `work(ms)` and done up to `done_ms`."""

    queued_ms: ClassVar[float] = 0.0
    done_ms: ClassVar[float] = 0.0
    synchronisations: ClassVar[int] = 0


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = FakeStream.queued_ms

    def query(self) -> bool:
        return self.at_ms <= FakeStream.done_ms

    def synchronize(self) -> None:
        FakeStream.done_ms = max(FakeStream.done_ms, self.at_ms)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> type[FakeStream]:
    FakeStream.queued_ms = FakeStream.done_ms = 0.0
    FakeStream.synchronisations = 0

    def synchronise() -> None:
        FakeStream.synchronisations += 1
        FakeStream.done_ms = FakeStream.queued_ms

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronise))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    return FakeStream


def steps(timer: CudaTimer, stream: type[FakeStream], count: int) -> None:
    for step in range(count):
        timer.begin()
        for phase in range(len(PHASES)):
            stream.queued_ms += phase + 1
            timer.mark(phase)
        stream.queued_ms += 0.5  # what lies behind the last mark
        timer.finish(4, torch.tensor(float(step)))


def test_cuda_phases_come_from_events_and_nothing_waits(stream: type[FakeStream]) -> None:
    timer = CudaTimer()
    steps(timer, stream, 3)
    assert timer.collect(wait=False) == []  # the device has done nothing yet
    assert stream.synchronisations == 0
    stream.done_ms = 43.0  # two steps of 21.5 ms
    first = timer.collect(wait=False)
    assert len(first) == 2
    timer.close()
    last = timer.collect(wait=True)
    assert len(last) == 1
    for number, step in enumerate([*first, *last]):
        assert step.phases == tuple((phase + 1) * 1_000_000 for phase in range(len(PHASES)))
        assert step.step_ns == 21_500_000
        assert step.samples == 4
        assert step.loss == number
    assert stream.synchronisations == 0


def test_the_synchronised_mode_waits_at_every_mark(stream: type[FakeStream]) -> None:
    timer = CudaTimer(synchronise=True)
    steps(timer, stream, 2)
    assert stream.synchronisations == 2 * (len(PHASES) + 1)


def test_cpu_steps_are_contiguous() -> None:
    timer = CpuTimer()
    for step in range(3):
        timer.begin()
        for phase in range(len(PHASES)):
            timer.mark(phase)
        timer.finish(2, torch.tensor(float(step)))
    timer.close()
    timer.close()
    done = timer.collect(wait=True)
    assert len(done) == 3
    for step, following in itertools.pairwise(done):
        assert step.start_ns + step.step_ns == following.start_ns
        assert 0 <= sum(step.phases) <= step.step_ns
        assert step.launch == ()


CYCLES = 50


class Cycle:
    """Garbage that only the collector frees."""

    alive = 0
    most = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1
        Cycle.most = max(Cycle.most, Cycle.alive)

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.fixture
def littered() -> Iterator[None]:
    """Every pass through a layer leaves cycles, enough for the collector to start in each step."""

    def litter(*_: object) -> None:
        for _number in range(CYCLES):
            Cycle()

    Cycle.alive = Cycle.most = 0
    handle = nn.modules.module.register_module_forward_hook(litter)
    yield
    handle.remove()


def test_no_collection_starts_in_a_measured_step(
    tmp_path: Path, littered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "COLLECT_EVERY", 10)
    seen: list[int] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            seen.append(time.monotonic_ns())

    gc.callbacks.append(note)
    try:
        run = trained(tmp_path, 35)
    finally:
        gc.callbacks.remove(note)
    steps = [row for row in read_steps(run.folder.steps(0)).steps if not row["warmup"]]
    times = [(int(row["start_ns"]), int(row["start_ns"] + row["step_ns"])) for row in steps]
    assert [moment for moment in seen if any(start <= moment < end for start, end in times)] == []
    (rank,) = record_of(run).ranks
    # After 10, 20 and 30 steps: what waits is that of 10 steps, however long the run.
    assert rank.garbage_collections == 3
    assert rank.garbage_s is not None
    assert rank.garbage_s > 0
    assert Cycle.most <= Cycle.alive + 12 * CYCLES * 40
    assert len(times) == 35
    # Afterwards the process collects as before.
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collection_that_a_library_starts_in_a_step_is_said(tmp_path: Path) -> None:
    passes = []

    def collect(*_: object) -> None:
        passes.append(0)
        if len(passes) == 200:
            gc.collect()

    handle = nn.modules.module.register_module_forward_hook(collect)
    try:
        run = trained(tmp_path, 30)
    finally:
        handle.remove()
    assert len(passes) > 200
    (warning,) = [text for text in record_of(run).warnings if "garbage" in text]
    assert warning.startswith("a library started Python's garbage collector 1 time within measured steps of rank 0")


def test_the_collector_works_again_after_a_failure(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    passes = []

    def later(*_: object) -> None:
        passes.append(0)
        if len(passes) > 150:
            fail()

    handle = nn.modules.module.register_module_forward_hook(later)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            trained(tmp_path, 30)
    finally:
        handle.remove()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@given(most=st.integers(0, 4095), more=st.integers(1, 2000))
def test_the_largest_batch_is_found_by_few_trials(most: int, more: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    upper_bound = min(most + more, 4096)
    fit = largest_batch(fits, upper_bound)
    assert fit == BatchFit(batch=most, is_largest=True, trials=len(tried))
    assert len(tried) <= device_memory.MAX_TRIALS
    assert max(tried, default=0) < upper_bound


def test_a_search_that_takes_too_long_says_what_it_knows() -> None:
    clock = iter(range(0, 1000, 25))
    fit = largest_batch(lambda batch: batch <= 70, 1000, lambda: float(next(clock)))
    assert (fit.is_largest, fit.trials) == (False, 2)
    said = out_of_memory("no room", BatchFit(batch=64, is_largest=False, trials=2), rank=1, batch=128, accumulation=2)
    assert "at least 128 fits" in str(said)
    none = out_of_memory("no room", BatchFit(batch=0, is_largest=True, trials=3), rank=1, batch=8, accumulation=1)
    assert "not even one sample fits" in str(none)
    late = out_of_memory("no room", None, rank=1, batch=8, accumulation=1, startup_bytes=3 << 30)
    assert "train.batch_per_rank 8, which fitted before the measured steps (3 GiB): no room; a smaller" in str(late)
    assert "train.recompute, needs less" in str(out_of_memory("no room", None, rank=1, batch=8, accumulation=1))


def test_the_state_that_is_still_to_come_is_kept_free() -> None:
    model = torch.nn.Linear(10, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    spec = OptimizerSpec.model_validate({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})
    assert missing_state_bytes(model, optimizer, spec) == 4 * 99
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert missing_state_bytes(model, optimizer, spec) == 0


def test_a_run_without_enough_memory_names_the_batch_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def scarce(*arguments: Any) -> Callable[..., torch.Tensor]:
        plain = loss_for(*arguments)

        def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            samples = len(next(iter(batch.values())))
            tried.append(samples)
            if samples > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return plain(model, batch)

        return loss

    def scarce_for(model: Any, label_smoothing: float = 0.0) -> Callable[..., torch.Tensor]:
        return scarce(model, label_smoothing)

    monkeypatch.setattr(rank_run, "loss_for", scarce_for)
    with pytest.raises(RunError) as caught:
        trained(tmp_path, 4, train__batch_per_rank=16)
    assert int(caught.value.exit_code) == 3
    assert not torch.autograd._profiler_enabled()  # Python would crash at its end
    assert str(caught.value) == (
        "rank 0 is out of memory at train.batch_per_rank 16: CUDA out of memory. Tried to allocate 2 GiB; 5 fits (by 4 "
        "trials of forward and backward passes on this rank): set train.batch_per_rank to that, or to a little less, "
        "because fragmentation and exchange buffers need memory too"
    )
    assert tried == [16, 8, 4, 6, 5]
    (folder,) = [path.parent for path in tmp_path.rglob("plan.json")]
    assert list(folder.glob("**/*.steps*")) or list(folder.iterdir())
