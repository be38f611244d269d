"""What happens between steps: quality is evaluated, the state is kept, epochs are noted, and stop requests are heard.

A checkpoint is written by a thread of rank 0 while training goes on, so that steps meanwhile share cores and bandwidth
with it. One is written at a time: the next waits for it, as do the end of training and a stop request.

A run is asked to stop by SIGUSR1, which Slurm sends before a time limit or a preemption (sbatch(1), --signal). The
signal is blocked in every rank and all that ranks start (`dlbench.supervisor`), so that it interrupts nothing and ends
no helper. It stays pending; ranks check for it where training stands still anyway, and where a time limit is warned of,
so often that there is time left to stop in. Some ranks may get it later than others, or not at all: they agree where
they check, and all stop after the same step.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from dlbench.node.data.loader import EvaluationSource
from dlbench.node.data.sharding import Position
from dlbench.node.failures import failure_of
from dlbench.node.garbage import COLLECT_EVERY
from dlbench.node.models.build import Quality, network_of
from dlbench.node.sync.engine import Engine
from dlbench.node.training.checkpoint import (
    SHARED_BY,
    TURN_S,
    CheckpointWriter,
    Progress,
    data_identity,
    follow,
    give_shares,
    trained_identity,
)
from dlbench.node.training.context import TrainState
from dlbench.records.record import Evaluation, QualityResult, meets


def average_statistics(model: torch.nn.Module, engine: Engine) -> None:
    """Gives all ranks the mean of their batch-norm statistics, which training keeps apart and never reads."""
    engine.average([buffer for buffer in model.buffers() if buffer.is_floating_point()])


def evaluate(state: TrainState, source: EvaluationSource) -> Quality:
    """Returns the quality of the network over all replicas' shares of the validation data, the same on every rank."""
    context, model = state.context, state.model
    spec = context.plan.workload.model
    network = network_of(spec)
    outputs_of, criterion, meter = network.outputs(spec), network.criterion(), network.meter()
    model.eval()
    try:
        with torch.no_grad(), context.engine.evaluating(), ExitStack() as evaluating:
            for part in state.parts:
                evaluating.enter_context(part.evaluating())
            for number, batch in enumerate(source.batches()):
                context.beat(f"batch {number} of an evaluation")
                moved = {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}
                with state.precision.autocast():
                    outputs = outputs_of(model, moved)
                    loss = criterion(outputs, moved)
                meter.add(outputs, moved, loss)
    finally:
        model.train()
    return meter.combine(context.engine.gather(meter.sums())[:: len(context.replica.ranks)])


class Pauses:
    """Evaluations and checkpoints of one rank; called by the loop between steps."""

    def __init__(self, state: TrainState, source: EvaluationSource | None) -> None:
        context = state.context
        self._context, self._state, self._source = context, state, source
        self._plan, self._schedule, self._events = context.plan, state.schedule, context.events
        self._meter = network_of(context.plan.workload.model).meter
        self.evaluations: list[Evaluation] = []
        self._trained_before_s = 0.0
        self._predictor_value = math.nan
        self.writer = CheckpointWriter(self._plan.checkpoint.keep, context.beat)  # of rank 0; others write nothing
        self._trained: dict[str, Any] = {
            **trained_identity(context.plan),
            **data_identity(state.source),
            SHARED_BY: context.plan.replicas,
        }
        if state.resumed is not None:
            progress = state.resumed.progress
            self.evaluations = list(progress.evaluations)
            self._trained_before_s = progress.train_s
            self._events.resumed_s = progress.wall_s
        schedule = self._schedule
        if schedule.steps_per_epoch is not None and schedule.steps > 0:
            self._events.add("epoch_start", epoch=schedule.whole_epochs(schedule.first) + 1, step=schedule.first)

    def __call__(self, done: int, spent_s: float) -> bool:
        """After `done` steps; True if training should end: the target is met, or these were all.

        An epoch in which training ends is closed behind the last evaluation, with the samples trained until then.
        """
        schedule = self._schedule
        ends, ends_epoch = done >= schedule.end, schedule.ends_epoch(done)
        epoch, samples = schedule.whole_epochs(done), done * schedule.global_batch
        if ends_epoch:
            self._events.add("epoch_stop", epoch=epoch, step=done, samples=samples)
        if schedule.evaluates(done):
            with self._context.watch.pause("evaluation"):
                ends = self._look(done, self._trained_before_s + spent_s) or ends
        if schedule.saves(done) or (ends and schedule.checkpoint_every is not None):
            with self._context.watch.pause("checkpoint"):
                self._save(done, self._trained_before_s + spent_s)
                if ends:
                    self._await_write()
        if ends_epoch and not ends:  # an epoch begins behind the evaluation of the one before, and if it is trained
            self._events.add("epoch_start", epoch=epoch + 1, step=done, samples=samples)
        elif ends and not ends_epoch and schedule.steps_per_epoch is not None:
            self._events.add("epoch_stop", epoch=epoch + 1, step=done, samples=samples)
        return ends

    def check_preemption(self, done: int, spent_s: float) -> None:
        """After `done` steps, where training stands still: stops all ranks if any was asked to."""
        if not any_stop_requested(self._context.engine.gather):
            return
        name = None
        if self._schedule.checkpoint_every is not None or self._source is not None:
            with self._context.watch.pause("checkpoint"):
                if not self._schedule.saves(done):
                    self._save(done, self._trained_before_s + spent_s)
                self._await_write()
            name = self._context.folder.checkpoint(done).name
        raise StoppedEarlyError(done, name)

    def _look(self, done: int, train_s: float) -> bool:
        assert self._source is not None
        plan, schedule = self._plan, self._schedule
        place: dict[str, Any] = {"epoch": schedule.epoch(done), "step": done, "samples": done * schedule.global_batch}
        self._events.add("eval_start", **place)
        start = time.monotonic()
        average_statistics(self._state.model, self._context.engine)
        seen = evaluate(self._state, self._source)
        self._predictor_value = seen.predictor_value
        value = seen.value if math.isfinite(seen.value) else None
        key = "eval_accuracy" if self._meter.higher_is_better else "eval_error"
        self._events.add(key, value=value, **place)
        self._events.add("eval_stop", **place)
        evaluation = Evaluation(
            **place,
            train_s=train_s,
            wall_s=self._events.wall_s,
            value=value,
            loss=seen.loss if math.isfinite(seen.loss) else None,
            eval_s=time.monotonic() - start,
            eval_samples=seen.samples,
        )
        self.evaluations.append(evaluation)
        quality = plan.workload.quality
        return quality is not None and quality.stop_at_target and self._meets(evaluation, quality.target)

    def _meets(self, evaluation: Evaluation, target: float) -> bool:
        return meets(evaluation.value, target, higher_is_better=self._meter.higher_is_better)

    def _save(self, done: int, train_s: float) -> None:
        self._context.beat(f"the checkpoint after step {done}")
        # Afterwards all ranks hold what the file holds, whether training goes on or resumes.
        average_statistics(self._state.model, self._context.engine)
        self._await_write()
        whole = self._context.engine.whole_state(self._state.model, self._state.optimizer)
        if self._context.place.rank != 0:
            give_shares(whole, self._context.beat)
            return
        schedule, order = self._schedule, self._state.source.order
        progress = Progress(
            step=done,
            samples=done * schedule.global_batch,
            epoch=schedule.epoch(done),
            position=Position() if order is None else order.position(done - schedule.first),
            train_s=train_s,
            wall_s=self._events.wall_s,
            loss_scaling=self._state.precision.state(),
            evaluations=tuple(self.evaluations),
        )
        path = self._context.folder.checkpoint(done)
        self.writer.begin(path, whole, progress, self._trained)

    def _await_write(self, *, alone: bool = False) -> None:
        """All ranks wait until the checkpoint that is being written is whole, alive as long as something is written."""
        gather: Callable[[Any], list[Any]] = (lambda own: [own]) if alone else self._context.engine.gather
        beat = partial(self._context.beat, "a piece of a checkpoint")
        follow(lambda: (self.writer.wait(TURN_S), self.writer.pieces), gather, beat)
        self.writer.require_well()

    def close(self) -> None:
        """Training ended, however it did: what is being written is finished. Raises nothing that would hide why."""
        try:
            self._await_write(alone=True)
        except Exception as error:  # something else ended training already
            print(f"dlbench: while training ended: {failure_of(error).reason}", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        """Returns the fields of `Record` that come of what happened between steps."""
        checkpoints = sorted(path.name for path in self._context.folder.checkpoints.glob("step-*"))
        writes = self.writer.writes
        return {"quality": self.result(), "checkpoints": checkpoints, "checkpoint_writes": writes}

    def result(self) -> QualityResult | None:
        """How training to the quality went; None for a run of speed."""
        quality = self._plan.workload.quality
        if quality is None or not self._schedule.evaluate_every or not self.evaluations:
            return None
        meter = self._meter
        met = next((each for each in self.evaluations if self._meets(each, quality.target)), None)
        return QualityResult(
            metric=meter.name,
            higher_is_better=meter.higher_is_better,
            target=quality.target,
            reached=met is not None,
            predictor=meter.predictor,
            predictor_value=self._predictor_value,
            evaluations=tuple(self.evaluations),
            train_samples=self._state.source.num_samples,
            time_to_quality_s=met.wall_s if met else None,
            samples_to_quality=met.samples if met else None,
            epochs_to_quality=met.epoch if met else None,
        )


LOOKS_IN_WARNING = 4
"""How often ranks look, at least, in the time between warning and limit: most of it is left for the checkpoint."""


class StoppedEarlyError(Exception):
    """Training ended after `step` because it was asked to; all ranks raise it after the same step."""

    def __init__(self, step: int, checkpoint: str | None) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.checkpoint = checkpoint  # Name of the checkpoint that was written; None where the run keeps none.


def any_stop_requested(gather: Callable[[Any], list[Any]]) -> bool:
    """Whether any rank was asked to stop; called by all ranks, between two steps: they wait for each other in it."""
    return any(gather(signal.SIGUSR1 in signal.sigpending()))


def stop_check_interval(warn_before_s: float, step_s: Sequence[float], gather: Callable[[Any], list[Any]]) -> int:
    """Steps between two looks at most; the same on every rank, by the slowest one's step."""
    late = step_s[1:] or step_s
    slowest = max(gather(max(late, default=0.0)))
    fitting = warn_before_s / LOOKS_IN_WARNING / slowest if slowest > 0 else COLLECT_EVERY
    return max(1, min(COLLECT_EVERY, int(fitting)))
