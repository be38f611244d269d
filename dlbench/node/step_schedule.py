"""The steps of a run: how many, which of them are warm-up, and after which steps it pauses and for what.

`StepSchedule` is pure arithmetic, the same on every rank. Steps are counted over the whole training: a resumed run
begins at `first`.

**Seconds wanted** (`Pacing`): ranks agree in the warm-up how many steps fill them, so that measured steps wait for
nothing. Before the steps of the warm-up in which something is watched, all ranks say how long theirs took. While the
warm-up is too short, it is lengthened by as many steps as are missing, but no more than were made so far: the first
steps of all are slow ones. Then the number of measured steps is set, for good, from the median of the later steps of
the rank whose steps are the shortest. Whether they filled the seconds is known when they are over.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS
from dlbench.specs.training import MeasureSpec

WATCHED_STEPS = 3  # Last steps of the warm-up in which the exchange is watched closely; measured steps stay untouched.
HELD_STEPS = 3  # Warm-up steps in which a GPU is held back, to show what kernels take; odd, for the median.
_TIMED_STEPS = 4
"""Of the warm-up at least, before those in which something is watched, where seconds are wanted: the later half of them
says how long a step is."""
SHORT_WINDOW_S = 20.0
"""A GPU's power is read once a second and is the mean of one (`dlbench.machine`): twenty values and fewer say little of
energy, and clocks still follow the temperature."""

_LATE_STEPS = 50  # Steps of the warm-up, the last ones, whose median counts.
_SHORT = 0.9  # Share of the wanted seconds below which it is said that they were not reached.


@dataclass(kw_only=True)
class StepSchedule:
    """What happens after which step. Only `lengthen` changes it, for all who hold it."""

    first: int  # Steps done before this run.
    end: int  # Steps done when it ends, at the latest.
    warmup: int  # Steps of this run that are warm-up.
    global_batch: int
    steps_per_epoch: float | None  # None where nothing is known of epochs (synthetic data).
    evaluate_every: float | None = None  # Steps; None: never.
    checkpoint_every: float | None = None
    window_steps: int = 0  # Warm-up steps in which layers are to be watched one by one.
    deciding_steps: int = 0  # First steps by whose times the exchange is arranged or tuned: no layer is watched.
    warmup_s: float = 0.0  # The warm-up lasts so long at least, seconds, as far as is known before its last steps.
    measured_s: float = 0.0  # The measured steps last so long at least, as far as the warm-up shows.

    @property
    def measured(self) -> int:
        return self.steps - self.warmup

    @property
    def is_timed(self) -> bool:
        """Whether seconds are wanted, so that the number of steps is settled in the warm-up."""
        return self.warmup_s > 0 or self.measured_s > 0

    def lengthen(self, *, warmup: int = 0, measured: int = 0) -> None:
        self.warmup += warmup
        self.end += warmup + measured

    @property
    def steps(self) -> int:
        return self.end - self.first

    @property
    def watch_from(self) -> int:
        """The step of this run, from 0, from which the exchange is watched; `warmup` where there is no warm-up."""
        return max(0, self.warmup - WATCHED_STEPS)

    @property
    def window(self) -> range:
        """Steps of this run, from 0, in which layers are watched one by one.

        They lie before those in which the engine watches its exchange, whose times hooks would lengthen. Where the
        warm-up is too short for both, they are its last steps and the engine's as well. Then the first step of all,
        which sets things up, is left out unless it is the only one. Where steps decide on the exchange, none is
        shared: the window may be shorter than asked for, or empty.
        """
        nothing = range(self.warmup, self.warmup)
        if not self.window_steps:
            return nothing
        apart = range(max(1, self.deciding_steps, self.watch_from - self.window_steps), self.watch_from)
        if len(apart) == self.window_steps or self.deciding_steps:
            return apart or nothing
        first = max(min(1, self.warmup - 1), self.warmup - self.window_steps)
        return range(max(0, first), self.warmup)

    @property
    def held(self) -> range:
        """Steps of this run, from 0, in which a GPU is held back until the host has queued their work.

        They lie before all others that are watched; the first two set things up.
        """
        end = min(self.window.start, self.watch_from)
        return range(min(end, max(2, self.deciding_steps, end - HELD_STEPS)), end)

    @property
    def shares_window(self) -> bool:
        """Whether layers are watched in steps from which the engine takes the times of its exchange."""
        return bool(self.window) and self.window.stop > self.watch_from

    @property
    def traced(self) -> range:
        """Steps of this run, from 0, whose messages and reading are kept one by one: to the end of the warm-up."""
        if not self.window_steps:
            return range(self.warmup, self.warmup)
        first = self.window.start if self.window else max(min(1, self.warmup - 1), self.watch_from)
        return range(max(0, first), self.warmup)

    def epoch(self, done: int) -> float:
        """Epochs trained after `done` steps; 0 where epochs are unknown."""
        return done / self.steps_per_epoch if self.steps_per_epoch else 0.0

    def whole_epochs(self, done: int) -> int:
        """Epochs whose end `done` steps have reached; 0 where epochs are unknown."""
        return 0 if self.steps_per_epoch is None else _multiples(done, self.steps_per_epoch)

    def evaluates(self, done: int) -> bool:
        return self.evaluate_every is not None and (done == self.end or _passes(done, self.evaluate_every))

    def saves(self, done: int) -> bool:
        return self.checkpoint_every is not None and (done == self.end or _passes(done, self.checkpoint_every))

    def stops(self, done: int) -> bool:
        """Whether training stands still after `done` steps, for an evaluation or a checkpoint."""
        return self.evaluates(done) or self.saves(done)

    def ends_epoch(self, done: int) -> bool:
        return self.steps_per_epoch is not None and _passes(done, self.steps_per_epoch)


def _passes(done: int, every: float) -> bool:
    return _multiples(done, every) > _multiples(done - 1, every)


def _multiples(done: int, every: float) -> int:
    """Multiples of `every` steps that `done` steps reach."""
    # One like 3 x 33.3... must not be missed for the last bit of a float.
    return math.floor(done * (1 + 1e-9) / every)


def plan_schedule(plan: RunPlan, *, first: int, batches_per_epoch: int | None, on_gpu: bool = False) -> StepSchedule:
    """The schedule of a plan."""
    measure, window_steps = plan.measure, plan.watch.window_steps if plan.watch is not None else 0
    deciding = 0
    if plan.layout.ranks > 1 and plan.engine.autotunes:
        deciding = plan.engine.horovod.autotune_steps
    elif plan.layout.ranks > 1 and plan.sync.fusion.rule == "mgwfbp":
        deciding = MGWFBP_STEPS
    samples = plan.workload.train.schedule.epoch_samples
    batch = plan.global_batch
    steps_per_epoch = samples / batch if samples else None if batches_per_epoch is None else float(batches_per_epoch)
    checkpoint_every: float | None = plan.checkpoint.every_steps
    if plan.checkpoint.every_epochs is not None:
        checkpoint_every = plan.checkpoint.every_epochs * (steps_per_epoch or math.inf)
    quality = plan.goal
    if plan.measure.until == "steps" or quality is None:
        warmup_s, measured_s = measure.wanted_seconds(on_gpu=on_gpu)
        warmup = measure.warmup_steps
        if warmup_s or measured_s:
            warmup = max(warmup, max(_TIMED_STEPS, deciding) + HELD_STEPS + window_steps + WATCHED_STEPS)
        end = first + warmup + measure.measured_steps
        evaluate_every = None
    else:
        assert steps_per_epoch is not None  # the plan refuses synthetic data here
        steps = _ratio(quality.max_epochs, quality.max_samples, steps_per_epoch, batch)
        end = max(1, math.ceil(steps - 1e-9))
        every = _ratio(quality.evaluate_every_epochs, quality.evaluate_every_samples, steps_per_epoch, batch)
        evaluate_every = max(1.0, every)
        warmup, warmup_s, measured_s = min(measure.warmup_steps, max(0, end - first - 1)), 0.0, 0.0
    return StepSchedule(
        first=first,
        end=end,
        warmup=warmup,
        warmup_s=warmup_s,
        measured_s=measured_s,
        global_batch=batch,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        window_steps=window_steps,
        deciding_steps=deciding,
    )


def _ratio(epochs: float | None, samples: int | None, steps_per_epoch: float, batch: int) -> float:
    return epochs * steps_per_epoch if epochs is not None else (samples or 0) / batch


class Pacing:
    """The seconds of one rank's run."""

    def __init__(
        self, schedule: StepSchedule, gather: Callable[[Any], list[Any]], expect: Callable[[int, int], None]
    ) -> None:
        """What is agreed on. `expect`: called with the steps of the run and those of its warm-up."""
        self._schedule, self._gather, self._expect = schedule, gather, expect
        self._is_settled = not schedule.is_timed
        self._step_s: float | None = None

    def is_due(self, step: int) -> bool:
        return not self._is_settled and step == self._schedule.held.start

    def agree(self, step_s: Sequence[float]) -> None:
        """Lengthens the schedule; called by all ranks, between two steps. `step_s`: of every step so far, seconds."""
        schedule = self._schedule
        late = step_s[len(step_s) // 2 :][-_LATE_STEPS:]
        # In the first step the host sets up, or compiles for a minute, and the device cools down: it warms nothing up.
        everyone = self._gather([math.fsum(step_s[1:]), statistics.median(late)])
        # All wait for the slowest of them, so times of one step differ where nothing is exchanged only.
        spent_s, step = min(one[0] for one in everyone), min(one[1] for one in everyone)
        ahead = schedule.warmup - len(step_s)
        missing = math.ceil((schedule.warmup_s - spent_s) / step) - ahead
        if missing > 0:
            schedule.lengthen(warmup=min(missing, len(step_s)))
        else:
            self._is_settled, self._step_s = True, step
            schedule.lengthen(measured=max(0, math.ceil(schedule.measured_s / step) - schedule.measured))
        self._expect(schedule.steps, schedule.warmup)

    def settings(self, measure: MeasureSpec, step_s: Sequence[float]) -> list[Setting]:
        """What was asked for in seconds and what became of it; nothing where steps alone were."""
        schedule = self._schedule
        if not schedule.is_timed:
            return []
        step = f"{self._step_s:.4g} s" if self._step_s else "unknown length"
        warmup, measured = step_s[: schedule.warmup], step_s[schedule.warmup :]
        lasting = (
            ("measure.warmup_s", measure.warmup_s, schedule.warmup_s, warmup, measure.warmup_steps),
            ("measure.measured_s", measure.measured_s, schedule.measured_s, measured, measure.measured_steps),
        )
        return [
            Setting(
                key=key,
                requested=asked,
                effective=wanted,
                evidence=f"{len(own)} steps lasted {math.fsum(own):.4g} s; {least} were planned, and steps of {step} "
                "agreed on by all ranks in the warm-up",
            )
            for key, asked, wanted, own, least in lasting
        ]

    def warnings(self, step_s: Sequence[float], *, on_gpu: bool) -> list[str]:
        lasted = math.fsum(step_s[self._schedule.warmup :])
        wanted = self._schedule.measured_s
        if lasted < _SHORT * wanted:
            return [
                f"measured for {lasted:.3g} s instead of {wanted:.3g} s: measured steps were shorter than those of the "
                "warm-up, from which their number was taken"
            ]
        if on_gpu and lasted < SHORT_WINDOW_S:
            return [
                f"short-window: measured for {lasted:.3g} s, less than {SHORT_WINDOW_S:.0f} s, in which a GPU's clocks "
                "settle and its power is known (measure.measured_s)"
            ]
        return []
