"""Steps of a GPU on the host's clock, and what the device waited for the host: against a simulated stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.causes import waited_for_host
from dlbench.analysis.measures import UNKNOWN_NS, Launching, RunSteps, kernel_ns
from dlbench.node.training import phases
from dlbench.node.training.phases import CudaTimer, StepTimes
from dlbench.records.rows.steps import LAUNCHED, PHASES
from tests.support.cuda_events import FakeGpu, installed

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
