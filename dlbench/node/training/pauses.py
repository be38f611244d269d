"""Work between steps: evaluations, checkpoints, epoch events and stop requests.

One checkpoint is written at a time, by a thread of rank 0 during training; the next one, the end of training and a stop
request wait for it.

SIGUSR1 asks a run to stop; Slurm sends it before a time limit or a preemption (sbatch(1), --signal). It is blocked in
every rank and its child processes (`dlbench.supervisor`) and stays pending until ranks check for it, where training is
interrupted anyway. Ranks may get it at different times or not at all, so they agree, and all stop after the same step.
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


def finite_or_none(number: float) -> float | None:
    """Returns a number; None for infinities and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None


def average_statistics(model: torch.nn.Module, engine: Engine) -> None:
    """Gives all ranks the mean of their batch-norm statistics, which differ by rank during training."""
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
        self.writer = CheckpointWriter(self._plan.checkpoint.keep, context.beat)  # used on rank 0 only
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
        """Acts after `done` steps; returns True if training should end: the target is met, or these were all steps.

        An epoch in which training ends is closed after the last evaluation, with the samples trained until then.
        """
        schedule = self._schedule
        ends, ends_epoch = done >= schedule.end, schedule.ends_epoch(done)
        epoch, samples = schedule.whole_epochs(done), done * schedule.global_batch
        if ends_epoch:
            self._events.add("epoch_stop", epoch=epoch, step=done, samples=samples)
        if schedule.evaluates(done):
            with self._context.watch.pause("evaluation"):
                ends = self._evaluate(done, self._trained_before_s + spent_s) or ends
        if schedule.saves(done) or (ends and schedule.checkpoint_every is not None):
            with self._context.watch.pause("checkpoint"):
                self._save(done, self._trained_before_s + spent_s)
                if ends:
                    self._await_write(self._context.engine.gather)
        if ends_epoch and not ends:  # an epoch begins after the evaluation of the one before, if training continues
            self._events.add("epoch_start", epoch=epoch + 1, step=done, samples=samples)
        elif ends and not ends_epoch and schedule.steps_per_epoch is not None:
            self._events.add("epoch_stop", epoch=epoch + 1, step=done, samples=samples)
        return ends

    def check_preemption(self, done: int, spent_s: float) -> None:
        """Stops all ranks after `done` steps if any was asked to; called when training is interrupted."""
        if not any_stop_requested(self._context.engine.gather):
            return
        name = None
        if self._schedule.checkpoint_every is not None or self._source is not None:
            with self._context.watch.pause("checkpoint"):
                if not self._schedule.saves(done):
                    self._save(done, self._trained_before_s + spent_s)
                self._await_write(self._context.engine.gather)
            name = self._context.folder.checkpoint(done).name
        raise StoppedEarlyError(done, name)

    def _evaluate(self, done: int, train_s: float) -> bool:
        """Evaluates the network; returns True if training should end because the target is met."""
        assert self._source is not None
        plan, schedule = self._plan, self._schedule
        place: dict[str, Any] = {"epoch": schedule.epoch(done), "step": done, "samples": done * schedule.global_batch}
        self._events.add("eval_start", **place)
        start = time.monotonic()
        average_statistics(self._state.model, self._context.engine)
        measured = evaluate(self._state, self._source)
        self._predictor_value = measured.predictor_value
        value = finite_or_none(measured.value)
        key = "eval_accuracy" if self._meter.higher_is_better else "eval_error"
        self._events.add(key, value=value, **place)
        self._events.add("eval_stop", **place)
        evaluation = Evaluation(
            **place,
            train_s=train_s,
            wall_s=self._events.wall_s,
            value=value,
            loss=finite_or_none(measured.loss),
            eval_s=time.monotonic() - start,
            eval_samples=measured.samples,
        )
        self.evaluations.append(evaluation)
        quality = plan.workload.quality
        return quality is not None and quality.stop_at_target and self._meets(evaluation, quality.target)

    def _meets(self, evaluation: Evaluation, target: float) -> bool:
        return meets(evaluation.value, target, higher_is_better=self._meter.higher_is_better)

    def _save(self, done: int, train_s: float) -> None:
        self._context.beat(f"the checkpoint after step {done}")
        # Afterwards all ranks have the statistics of the file, so that a resumed run trains like one that continues.
        average_statistics(self._state.model, self._context.engine)
        self._await_write(self._context.engine.gather)
        state = self._context.engine.whole_state(self._state.model, self._state.optimizer)
        if self._context.place.rank != 0:
            give_shares(state, self._context.beat)
            return
        schedule, order = self._schedule, self._state.source.order
        position = Position()
        if order is not None:
            position = order.position(done - schedule.first)
        progress = Progress(
            step=done,
            samples=done * schedule.global_batch,
            epoch=schedule.epoch(done),
            position=position,
            train_s=train_s,
            wall_s=self._events.wall_s,
            loss_scaling=self._state.precision.state(),
            evaluations=tuple(self.evaluations),
        )
        path = self._context.folder.checkpoint(done)
        self.writer.begin(path, state, progress, self._trained)

    def _await_write(self, gather: Callable[[Any], list[Any]]) -> None:
        """Makes all ranks wait until the checkpoint is written; the stall timeout starts again with each piece."""
        follow(self._write_progress, gather, partial(self._context.beat, "a piece of a checkpoint"))
        self.writer.require_well()

    def _write_progress(self) -> tuple[bool, int]:
        return self.writer.wait(TURN_S), self.writer.pieces

    def close(self) -> None:
        """Waits for this rank's checkpoint, however training ended; prints an error instead of raising it."""
        try:
            self._await_write(_gather_from_self)
        except Exception as error:  # something else ended training already
            print(f"dlbench: while training ended: {failure_of(error).reason}", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        """Returns the fields of `Record` about quality and checkpoints."""
        checkpoints = sorted(path.name for path in self._context.folder.checkpoints.glob("step-*"))
        writes = self.writer.writes
        return {"quality": self.result(), "checkpoints": checkpoints, "checkpoint_writes": writes}

    def result(self) -> QualityResult | None:
        """Returns the result of training to a target; None for a run that trains a number of steps."""
        quality = self._plan.workload.quality
        if quality is None or not self._schedule.evaluate_every or not self.evaluations:
            return None
        meter = self._meter
        fields: dict[str, Any] = {}
        for evaluation in self.evaluations:
            if self._meets(evaluation, quality.target):
                fields["time_to_quality_s"] = evaluation.wall_s
                fields["samples_to_quality"] = evaluation.samples
                fields["epochs_to_quality"] = evaluation.epoch
                break
        return QualityResult(
            metric=meter.name,
            higher_is_better=meter.higher_is_better,
            target=quality.target,
            reached=bool(fields),
            predictor=meter.predictor,
            predictor_value=self._predictor_value,
            evaluations=tuple(self.evaluations),
            train_samples=self._state.source.num_samples,
            **fields,
        )


def _gather_from_self(content: Any) -> list[Any]:
    return [content]


CHECKS_IN_WARNING = 4
"""Least number of checks for a stop request between warning and time limit, so that most of it is left for the
checkpoint."""


class StoppedEarlyError(Exception):
    """Training ended after `step` because a stop was requested; all ranks raise it after the same step."""

    def __init__(self, step: int, checkpoint: str | None) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.checkpoint = checkpoint  # Name of the checkpoint that was written; None where the run keeps none.


def any_stop_requested(gather: Callable[[Any], list[Any]]) -> bool:
    """Tells whether any rank was asked to stop; called by all ranks between two steps."""
    return any(gather(signal.SIGUSR1 in signal.sigpending()))


def stop_check_interval(warn_before_s: float, step_s: Sequence[float], gather: Callable[[Any], list[Any]]) -> int:
    """Returns the steps between two checks for a stop request, from the slowest rank's step; equal on every rank."""
    later_s = step_s[1:] or step_s  # the first step is longer
    slowest_s = max(gather(max(later_s, default=0.0)))
    if slowest_s <= 0:
        return COLLECT_EVERY
    return max(1, min(COLLECT_EVERY, int(warn_before_s / CHECKS_IN_WARNING / slowest_s)))
