"""Times of steps on a real GPU: they add up to the wall clock, stand on it, and show who waited for whom."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from dlbench.analysis.causes import waited_for_host
from dlbench.node.sync.timing import anchored
from dlbench.node.training import phases
from dlbench.node.training.phases import CudaTimer, StepTimes
from dlbench.records.rows.steps import LAUNCHED, PHASES
from tests.node.training.test_launching import run_steps

pytestmark = pytest.mark.gpu

STEPS = 200
WARMUP = 8
"""Two as they come, three after a standstill, three held back."""
BLOCK, PAIRS = 20, 5
"""Steps that run in one way before the other's turn, and turns of each: a card at its power limit slows both alike."""
DRIFT = 100e-6
"""By which the GPU's clock and the host's, which NTP may slew, run apart at most."""
ANCHORS_NS = 500_000
"""Errors of two anchors: each is half of what a call and its event take, tens of microseconds on a host at rest."""

Work = Callable[[], object]


def small() -> Work:
    """Kernels of a few microseconds, each launched by a call that takes about as long or longer."""
    numbers = torch.zeros(64, device="cuda")

    def work() -> None:
        for _ in range(100):
            numbers.add_(1.0)

    return work


def large() -> Work:
    """A few kernels of milliseconds."""
    left = torch.randn(4096, 4096, device="cuda")
    out = torch.empty_like(left)

    def work() -> None:
        for _ in range(4):
            torch.mm(left, left, out=out)

    return work


def step(timer: CudaTimer, work: Work, loss: torch.Tensor, parts: int) -> None:
    timer.begin()
    timer.mark(phases.INPUT)
    timer.mark(phases.H2D)
    for phase in (*(phases.FORWARD, phases.BACKWARD) * parts, phases.OPTIMIZER):
        timer.hold_back()
        work()
        timer.mark(phase)
    timer.finish(1, loss)


def train(timer: CudaTimer, work: Work, count: int, parts: int = 1) -> list[StepTimes]:
    """Steps between two standstills, each over the parts of a batch."""
    loss = torch.zeros((), device="cuda")
    found: list[StepTimes] = []
    for _ in range(count):
        step(timer, work, loss, parts)
        found += timer.collect(wait=False)
    timer.close()
    return found + timer.collect(wait=True)


def measured(work: Work, parts: int = 1, count: int = STEPS) -> tuple[list[StepTimes], CudaTimer]:
    """`WARMUP` steps, the last ones held back, then `count`."""
    timer = CudaTimer()
    told = train(timer, work, 2, parts) + train(timer, work, 3, parts)
    timer.hold(True)
    told += train(timer, work, 3, parts)
    timer.hold(False)
    told += train(timer, work, count, parts)
    assert len(told) == WARMUP + count
    return told, timer


def whole_s(told: Sequence[StepTimes]) -> float:
    return sum(one.step_ns for one in told) / 1e9


@pytest.mark.parametrize("make", [small, large])
def test_steps_add_up_to_the_wall_clock(make: Callable[[], Work]) -> None:
    work = make()
    timer = CudaTimer()
    train(timer, work, WARMUP)
    torch.cuda.synchronize()
    began = time.monotonic()
    told = train(timer, work, STEPS)
    took = time.monotonic() - began
    # Anchors before and behind the steps are within the wall clock's time: six events each.
    assert whole_s(told) == pytest.approx(took, rel=0.005, abs=0.002)
    for one in told:
        assert 0 <= sum(one.phases) <= one.step_ns + 10_000


def test_phases_alone_take_as_long_as_phases_in_a_row() -> None:
    """Waiting after each phase changes nothing but the gaps: large kernels take what they take. In turns."""
    work = large()
    timers = CudaTimer(), CudaTimer(synchronise=True)
    told: tuple[list[StepTimes], list[StepTimes]] = ([], [])
    for timer in timers:
        train(timer, work, WARMUP)
    for turn in range(2 * PAIRS):
        told[turn % 2].extend(train(timers[turn % 2], work, BLOCK))
    for place in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER):
        row, alone = (statistics.median(one.phases[place] for one in steps) for steps in told)
        assert alone == pytest.approx(row, rel=0.05), PHASES[place]


def test_starts_are_on_the_clock_of_the_host() -> None:
    work = large()
    before = time.monotonic_ns()
    told, timer = measured(work)
    after = time.monotonic_ns()
    # Seen at anchors, the farthest of which lie as far apart as the measured steps last.
    assert 0 < timer.clock_error_ns < ANCHORS_NS + DRIFT * (after - before)
    assert before - timer.clock_error_ns <= told[0].start_ns
    assert told[-1].start_ns + told[-1].step_ns <= after + timer.clock_error_ns
    for one, following in itertools.pairwise(told):
        assert one.start_ns + one.step_ns <= following.start_ns
    for one, following in itertools.pairwise(told[WARMUP:]):
        assert one.start_ns + one.step_ns == following.start_ns


def test_an_event_of_an_idle_device_is_passed_between_the_host_s_calls() -> None:
    torch.cuda.synchronize()
    before = time.monotonic_ns()
    anchor = anchored()
    after = time.monotonic_ns()
    assert before <= anchor.host_ns <= after
    # From a call to the host's knowing: tens of microseconds.
    assert 0 < anchor.delay_ns < 1_000_000


def test_small_kernels_are_bound_by_their_launches_and_large_ones_are_not() -> None:
    told, _ = measured(small())
    steps = run_steps(told, WARMUP)
    found, why = waited_for_host(steps, synchronised=False)
    assert found is not None, why
    assert sum(found.values()) > 0.1 * int(steps.step_ns.sum())
    told, _ = measured(large())
    steps = run_steps(told, WARMUP)
    found, why = waited_for_host(steps, synchronised=False)
    assert found is not None, why
    assert sum(found.values()) < 0.01 * int(steps.step_ns.sum())


@pytest.mark.parametrize("parts", [1, 64])
def test_held_back_steps_show_what_kernels_take_and_do_not_sleep_long(parts: int) -> None:
    told, _ = measured(small(), parts, count=20)
    held, others = told[WARMUP - 3 : WARMUP], told[2 : WARMUP - 3]
    # The device slept until all was queued, so nothing of a phase was waiting; but a host may be interrupted, in one of
    # the steps, and in any where 64 parts make it long.
    for place, phase in enumerate(map(PHASES.index, LAUNCHED)):
        waited = min(one.launch[place] / one.phases[phase] for one in held)
        assert waited == 0 if parts == 1 else waited < 0.05, PHASES[phase]
    plain_ns = statistics.median(one.step_ns for one in others)
    slept_ns = statistics.median(one.phases[phases.INPUT] for one in held)
    assert 0.5 * plain_ns < slept_ns < 4 * plain_ns
