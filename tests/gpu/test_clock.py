"""Times of steps on a real GPU: they add up to the wall clock, stand on it, and show who waited for whom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from dlbench.analysis.launching import waited_for_host
from dlbench.node.sync.timing import anchored
from dlbench.node.training import phases
from dlbench.node.training.phases import CudaTimer, StepTimes
from dlbench.records.rows.steps import PHASES
from tests.node.training.test_launching import run_steps

pytestmark = pytest.mark.gpu

STEPS = 200
WARMUP = 8
"""Two as they come, three after a standstill, three held back."""

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


def step(timer: CudaTimer, work: Work, loss: torch.Tensor) -> None:
    timer.begin()
    timer.mark(phases.INPUT)
    timer.mark(phases.H2D)
    for phase in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER):
        timer.hold_back()
        work()
        timer.mark(phase)
    timer.finish(1, loss)


def train(timer: CudaTimer, work: Work, count: int) -> list[StepTimes]:
    """Steps between two standstills."""
    loss = torch.zeros((), device="cuda")
    found: list[StepTimes] = []
    for _ in range(count):
        step(timer, work, loss)
        found += timer.collect(wait=False)
    timer.close()
    return found + timer.collect(wait=True)


def measured(work: Work, *, synchronise: bool = False) -> tuple[list[StepTimes], CudaTimer]:
    """`WARMUP` steps, the last ones held back, then `STEPS`."""
    timer = CudaTimer(synchronise=synchronise)
    told = train(timer, work, 2) + train(timer, work, 3)
    timer.hold(True)
    told += train(timer, work, 3)
    timer.hold(False)
    told += train(timer, work, STEPS)
    assert len(told) == WARMUP + STEPS
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
    """Waiting after each phase changes nothing but the gaps: large kernels take what they take."""
    work = large()
    overlapped, _ = measured(work)
    synchronised, _ = measured(work, synchronise=True)
    for place in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER):
        alone, row = (
            sorted(one.phases[place] for one in told[WARMUP:])[STEPS // 2] for told in (synchronised, overlapped)
        )
        assert alone == pytest.approx(row, rel=0.05), PHASES[place]


def test_starts_are_on_the_clock_of_the_host() -> None:
    work = large()
    before = time.monotonic_ns()
    told, timer = measured(work)
    after = time.monotonic_ns()
    assert 0 < timer.clock_error_ns < 1_000_000
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


def test_held_back_steps_show_what_kernels_take() -> None:
    told, _ = measured(small())
    held = told[WARMUP - 3 : WARMUP]
    # The device slept until all was queued, so nothing of the phases was waiting.
    assert all(bound == 0 for one in held for bound in one.launch)
    assert all(one.phases[phases.INPUT] > 0 for one in held)
