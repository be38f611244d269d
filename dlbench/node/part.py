"""The steps of a run, and `TrainingPart`, the interface of optional features of training, with hooks for its stages.
Steps: their number, which are warm-up, and after which the run evaluates or saves. They are counted over the whole
training: a resumed run begins at `first`. If a plan gives seconds, ranks agree on the number of steps in the warm-up
(`Pacing`), so that measured steps need no agreement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlbench.records.record import RankResult, RankSummary, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS
from dlbench.specs.training import MeasureSpec

WATCHED_STEPS = 3  # Last steps of the warm-up, in which the exchange is timed message by message.
HELD_STEPS = 3  # Steps of the warm-up in which a GPU is held back, to time its kernels; odd, for the median.
_TIMED_STEPS = 4  # Least number of warm-up steps before the watched ones if a plan gives seconds.
# Seconds below which a run warns: a GPU's power is read once a second, and clocks still follow the temperature.
SHORT_WINDOW_S = 20.0
_LATE_STEPS = 50  # Number of last warm-up steps whose median counts.
_SHORT = 0.9  # Share of the planned seconds below which a run warns.
Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(kw_only=True)
class StepSchedule:
    """The number of steps, and the steps after which something happens. Only `lengthen` changes it."""

    first: int  # Steps before this run.
    end: int  # Steps at its end, at most.
    warmup: int  # Steps of this run that are warm-up.
    global_batch: int
    steps_per_epoch: float | None  # None for synthetic data, which has no epochs.
    evaluate_every: float | None = None  # Steps between two evaluations; None: no evaluation.
    checkpoint_every: float | None = None  # Steps between two checkpoints; None: no checkpoint.
    window_steps: int = 0  # Warm-up steps in which layers are profiled.
    deciding_steps: int = 0  # First steps, whose times choose or tune the exchange; no layer is profiled in them.
    warmup_s: float = 0.0  # Least duration of the warm-up, seconds.
    measured_s: float = 0.0  # Least duration of the measured steps, seconds, as predicted from the warm-up.

    @property
    def measured(self) -> int:
        return self.steps - self.warmup

    @property
    def is_timed(self) -> bool:
        """True if the plan gives seconds, so that ranks agree on the number of steps in the warm-up."""
        return self.warmup_s > 0 or self.measured_s > 0

    def lengthen(self, *, warmup: int = 0, measured: int = 0) -> None:
        self.warmup += warmup
        self.end += warmup + measured

    @property
    def steps(self) -> int:
        return self.end - self.first

    @property
    def watch_from(self) -> int:
        """The first step of this run, from 0, in which the exchange is watched; `warmup` if there is no warm-up."""
        return max(0, self.warmup - WATCHED_STEPS)

    @property
    def window(self) -> range:
        """Steps of this run, from 0, in which layers are profiled: before those in which the exchange is watched.

        A warm-up that is too short for both shares its last steps, except the first one of all; if first steps choose
        the exchange, none is shared, and the window may be shorter than requested, or empty.
        """
        empty = range(self.warmup, self.warmup)
        if not self.window_steps:
            return empty
        separate = range(max(1, self.deciding_steps, self.watch_from - self.window_steps), self.watch_from)
        if len(separate) == self.window_steps or self.deciding_steps:
            return separate or empty
        first = max(min(1, self.warmup - 1), self.warmup - self.window_steps)
        return range(max(0, first), self.warmup)

    @property
    def held(self) -> range:
        """Steps of this run, from 0, in which a GPU is held back: before other watched steps, after the first two."""
        end = min(self.window.start, self.watch_from)
        return range(min(end, max(2, self.deciding_steps, end - HELD_STEPS)), end)

    @property
    def shares_window(self) -> bool:
        return bool(self.window) and self.window.stop > self.watch_from

    @property
    def traced(self) -> range:
        """Steps of this run, from 0, with a span of each message and read batch: to the end of the warm-up."""
        if not self.window_steps:
            return range(self.warmup, self.warmup)
        first = self.window.start if self.window else max(min(1, self.warmup - 1), self.watch_from)
        return range(max(0, first), self.warmup)

    def epoch(self, done: int) -> float:
        """Returns the epochs trained after `done` steps; 0 if epochs are unknown."""
        return 0.0 if not self.steps_per_epoch else done / self.steps_per_epoch

    def whole_epochs(self, done: int) -> int:
        """Returns the number of epochs completed after `done` steps; 0 if epochs are unknown."""
        return 0 if self.steps_per_epoch is None else _multiples(done, self.steps_per_epoch)

    def evaluates(self, done: int) -> bool:
        return self.evaluate_every is not None and (done == self.end or _passes(done, self.evaluate_every))

    def saves(self, done: int) -> bool:
        return self.checkpoint_every is not None and (done == self.end or _passes(done, self.checkpoint_every))

    def stops(self, done: int) -> bool:
        """Tells whether training is interrupted after `done` steps, for an evaluation or a checkpoint."""
        return self.evaluates(done) or self.saves(done)

    def ends_epoch(self, done: int) -> bool:
        return self.steps_per_epoch is not None and _passes(done, self.steps_per_epoch)


def _passes(done: int, every: float) -> bool:
    return _multiples(done, every) > _multiples(done - 1, every)


def _multiples(done: int, every: float) -> int:
    """Returns how many multiples of `every` steps `done` steps have reached."""
    # The factor keeps rounding from missing one like 3 x 33.3...
    return math.floor(done * (1 + 1e-9) / every)


def plan_schedule(plan: RunPlan, *, first: int, batches_per_epoch: int | None, on_gpu: bool = False) -> StepSchedule:
    """Returns the schedule of a plan. `first` is the number of steps before this run."""
    measure, window_steps, deciding = plan.measure, 0, 0
    if plan.watch is not None:
        window_steps = plan.watch.window_steps
    if plan.layout.ranks > 1 and plan.engine.autotunes:
        deciding = plan.engine.horovod.autotune_steps
    elif plan.layout.ranks > 1 and plan.sync.fusion.rule == "mgwfbp":
        deciding = MGWFBP_STEPS
    samples = plan.workload.train.schedule.epoch_samples
    batch = plan.global_batch
    steps_per_epoch = None
    if samples:
        steps_per_epoch = samples / batch
    elif batches_per_epoch is not None:
        steps_per_epoch = float(batches_per_epoch)
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
    """Returns a number of steps that is given in epochs or in samples."""
    return epochs * steps_per_epoch if epochs is not None else (samples or 0) / batch


class Pacing:
    """Fixes the number of steps of a run whose plan gives seconds."""

    def __init__(
        self, schedule: StepSchedule, gather: Callable[[Any], list[Any]], expect: Callable[[int, int], None]
    ) -> None:
        """`expect` is called with the number of steps of the run and of its warm-up whenever they change."""
        self._schedule, self._gather, self._expect = schedule, gather, expect
        self._is_fixed = not schedule.is_timed
        self._step_s: float | None = None  # Time of a step that ranks agreed on, seconds.

    def is_due(self, step: int) -> bool:
        return not self._is_fixed and step == self._schedule.held.start

    def agree(self, step_s: Sequence[float]) -> None:
        """Lengthens the schedule; called by all ranks between two steps. `step_s` holds the times of all steps, s."""
        schedule = self._schedule
        late = step_s[len(step_s) // 2 :][-_LATE_STEPS:]
        # The first step does not count: the host sets up, or compiles for a minute, and the device cools down.
        everyone = self._gather([math.fsum(step_s[1:]), statistics.median(late)])
        # In an exchange ranks wait for the slowest, so that their times differ only without one.
        spent_s, agreed_s = map(min, zip(*everyone, strict=True))
        ahead = schedule.warmup - len(step_s)
        missing = math.ceil((schedule.warmup_s - spent_s) / agreed_s) - ahead
        if missing > 0:
            schedule.lengthen(warmup=min(missing, len(step_s)))
        else:
            self._is_fixed, self._step_s = True, agreed_s
            schedule.lengthen(measured=max(0, math.ceil(schedule.measured_s / agreed_s) - schedule.measured))
        self._expect(schedule.steps, schedule.warmup)

    def settings(self, measure: MeasureSpec, step_s: Sequence[float]) -> list[Setting]:
        schedule = self._schedule
        if not schedule.is_timed:
            return []
        warmup = self._evidence(step_s[: schedule.warmup], measure.warmup_steps)
        measured = self._evidence(step_s[schedule.warmup :], measure.measured_steps)
        rows = (
            ("measure.warmup_s", measure.warmup_s, schedule.warmup_s, warmup),
            ("measure.measured_s", measure.measured_s, schedule.measured_s, measured),
        )
        return [
            Setting(key=key, requested=requested, effective=effective, evidence=evidence)
            for key, requested, effective, evidence in rows
        ]

    def _evidence(self, step_s: Sequence[float], planned_steps: int) -> str:
        agreed = f"steps of {self._step_s:.4g} s" if self._step_s else "steps of unknown length"
        return (
            f"{len(step_s)} steps lasted {math.fsum(step_s):.4g} s; {planned_steps} were planned, and {agreed} agreed "
            "on by all ranks in the warm-up"
        )

    def warnings(self, step_s: Sequence[float], *, on_gpu: bool) -> list[str]:
        measured_s = math.fsum(step_s[self._schedule.warmup :])
        planned_s = self._schedule.measured_s
        if measured_s < _SHORT * planned_s:
            return [
                f"measured for {measured_s:.3g} s instead of {planned_s:.3g} s: measured steps were shorter than those "
                "of the warm-up, which determined their number"
            ]
        if on_gpu and measured_s < SHORT_WINDOW_S:
            return [
                f"short-window: measured for {measured_s:.3g} s, less than the {SHORT_WINDOW_S:.0f} s that a GPU's "
                "clocks and power readings need to settle (measure.measured_s)"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class TrialPasses:
    """A network with passes over synthetic batches, for parts that profile it before training."""

    model: nn.Module
    loss_of: Callable[[Batch], torch.Tensor]  # Forward pass and loss, in the precision of training.
    batch_of: Callable[[int], Batch]  # Makes that many samples of the shapes of training, on the device.
    samples: int  # Samples of one forward pass in training.
    beat: Callable[[str], None]
    stage: Callable[[str], None]


class TrainingPart:
    """One optional part of a rank's training, called on all ranks alike; hooks do nothing unless overridden."""

    peak_before: int = 0  # Peak of the device's memory that the part reset in the warm-up, bytes.

    @property
    def early_warnings(self) -> Sequence[str]:
        """Warnings that are known before the first step, each a sentence."""
        return ()

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings that are known after the last step, each a sentence."""
        return ()

    def before_wrap(self, passes: TrialPasses) -> None:
        """Prepares the network, which the engine has not wrapped yet."""

    def after_wrap(self, passes: TrialPasses, wrapped: nn.Module) -> None:
        """Prepares the network after the engine has wrapped it, before the first step."""

    def around_loss(self, loss: Loss) -> Loss:
        """Returns the loss that training calls in place of `loss`."""
        return loss

    def around_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns the batches that training uses in place of `batches`."""
        return batches

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Prepares a step of the warm-up, counted from 0, between two steps."""

    def close_window(self) -> None:
        """Stops watching steps: the warm-up is over, or training ended in it."""

    def begin_measuring(self) -> None:
        """Starts to count: measured steps begin."""

    def before_forward(self) -> None:
        """Is called within a step, before each forward pass."""

    def settle(self) -> None:
        """Waits for work that a step began in the background; called after a forward pass and between two steps."""

    def before_update(self, loss_scale: torch.Tensor | None) -> None:
        """Is called within a step, with gradients exchanged and not scaled; `loss_scale` is that of the step."""

    def end_step(self) -> None:
        """Is called at the end of each step, outside of its phases."""

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settings(self) -> list[Setting]:
        """Returns the settings as requested and as effective, after the last step."""
        return []

    def rank_result(self) -> dict[str, Any]:
        """Returns fields of `RankResult`, after the last step."""
        return {}

    def summary(self, result: RankResult) -> dict[str, Any]:
        """Returns fields of `RankSummary`; `result` is that of this rank."""
        return {}

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        """Returns fields of `Record`, on rank 0, from the summaries of all ranks in order."""
        return {}

    def record_warnings(self, summaries: Sequence[RankSummary]) -> list[str]:
        """Returns warnings that the summaries of all ranks show, on rank 0, each a sentence."""
        return []

    def close(self) -> None:
        """Ends threads and removes hooks from the network; a second call does nothing."""


def hooks_of(parts: Sequence[TrainingPart], name: str) -> tuple[Callable[..., None], ...]:
    """Returns the hooks of one name, from the parts that override it."""
    overriding = [part for part in parts if getattr(type(part), name) is not getattr(TrainingPart, name)]
    return tuple(getattr(part, name) for part in overriding)
