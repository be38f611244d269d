"""What happens between steps: the quality is looked at, the state is kept, epochs are noted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from dlbench.node.data.loader import EvaluationSource
from dlbench.node.models.build import criterion_for, outputs_for
from dlbench.node.models.metrics import Meter, Quality, meter_for
from dlbench.node.sync.engine import Engine
from dlbench.node.training.instruments import RankWatch
from dlbench.node.training.pauses.checkpoint import Progress, prune, write_checkpoint
from dlbench.node.training.pauses.events import Events
from dlbench.node.training.pauses.stop_request import StoppedEarlyError, any_was_told
from dlbench.node.training.prepare import SHARED_BY, Prepared, data_identity, trained_identity
from dlbench.records.folder import RunFolder
from dlbench.records.record import Evaluation, QualityResult, meets
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import Workload


def average_statistics(model: torch.nn.Module, engine: Engine) -> None:
    """Gives all ranks the mean of their batch-norm statistics, which training keeps apart and never reads."""
    engine.average([buffer for buffer in model.buffers() if buffer.is_floating_point()])


def evaluate(
    ready: Prepared, workload: Workload, source: EvaluationSource, engine: Engine, beat: Callable[[str], None]
) -> Quality:
    """The quality of the network over all ranks' shares of the validation data; the same on every rank.

    Raises:
        UserError, RunError: the data cannot be read, as for training.
    """
    model, device = ready.model, ready.trainee.device
    outputs_of, criterion = outputs_for(workload.model), criterion_for(workload.model)
    meter: Meter = meter_for(workload.model)()
    model.eval()
    compilation = ready.trainee.compilation
    try:
        with torch.no_grad(), compilation.uncompiled() if compilation is not None else nullcontext():
            for number, batch in enumerate(source.batches()):
                beat(f"batch {number} of an evaluation")
                moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
                with ready.trainee.precision.autocast():
                    outputs = outputs_of(model, moved)
                    loss = criterion(outputs, moved)
                meter.add(outputs, moved, loss)
    finally:
        model.train()
    return meter.combine(engine.gather(meter.told()))


class Pauses:
    """Evaluations and checkpoints of one rank; called by the loop between steps.

    Args:
        plan: the run.
        ready: what is trained.
        engine: averages and gathers.
        events: where moments are noted.
        folder: where checkpoints go.
        source: the validation data; None where nothing is evaluated.
        watch: told of each pause.
        is_first: whether this is rank 0, which writes.
        beat: told what moved, for the watchdog.
    """

    def __init__(
        self,
        plan: RunPlan,
        ready: Prepared,
        engine: Engine,
        events: Events,
        folder: RunFolder,
        source: EvaluationSource | None,
        watch: RankWatch,
        *,
        is_first: bool,
        beat: Callable[[str], None],
    ) -> None:
        self._plan, self._ready, self._engine, self._events = plan, ready, engine, events
        self._folder, self._source, self._is_first, self._beat = folder, source, is_first, beat
        self._watch = watch
        self._meter = meter_for(plan.workload.model)
        self.evaluations: list[Evaluation] = []
        self._trained_before_s = 0.0
        self._predictor_value = math.nan
        self._trained: dict[str, Any] = {
            **trained_identity(plan),
            **data_identity(ready.source),
            SHARED_BY: plan.layout.ranks,
        }
        if ready.resumed is not None:
            progress = ready.resumed.progress
            self.evaluations = list(progress.evaluations)
            self._trained_before_s = progress.train_s
            events.resumed_s = progress.wall_s
        course = ready.course
        if course.steps_per_epoch is not None and course.steps > 0:
            events.add("epoch_start", epoch=course.whole_epochs(course.first) + 1, step=course.first)

    def __call__(self, done: int, spent_s: float) -> bool:
        """After `done` steps; True if training should end: the target is met, or these were all.

        An epoch in which training ends is closed behind the last evaluation, with the samples trained until then.
        """
        course = self._ready.course
        ends, ends_epoch = done >= course.end, course.ends_epoch(done)
        epoch, samples = course.whole_epochs(done), done * course.global_batch
        if ends_epoch:
            self._events.add("epoch_stop", epoch=epoch, step=done, samples=samples)
        if course.evaluates(done):
            with self._watch.pause("evaluation"):
                ends = self._look(done, self._trained_before_s + spent_s) or ends
        if course.saves(done) or (ends and course.checkpoint_every is not None):
            with self._watch.pause("checkpoint"):
                self._save(done, self._trained_before_s + spent_s)
        if ends_epoch and not ends:  # an epoch begins behind the evaluation of the one before, and if it is trained
            self._events.add("epoch_start", epoch=epoch + 1, step=done, samples=samples)
        elif ends and not ends_epoch and course.steps_per_epoch is not None:
            self._events.add("epoch_stop", epoch=epoch + 1, step=done, samples=samples)
        return ends

    def give_way(self, done: int, spent_s: float) -> None:
        """After `done` steps, where training stands still: stops all ranks if any was told to.

        Raises:
            StoppedEarlyError: it was; where the run keeps checkpoints one is written.
        """
        if not any_was_told(self._engine.gather):
            return
        name = None
        if self._ready.course.checkpoint_every is not None or self._source is not None:
            if not self._ready.course.saves(done):
                with self._watch.pause("checkpoint"):
                    self._save(done, self._trained_before_s + spent_s)
            name = self._folder.checkpoint(done).name
        raise StoppedEarlyError(done, name)

    def _look(self, done: int, train_s: float) -> bool:
        assert self._source is not None
        plan, course = self._plan, self._ready.course
        place: dict[str, Any] = {
            "epoch": course.epoch(done),
            "step": done,
            "samples": done * course.global_batch,
        }
        self._events.add("eval_start", **place)
        start = time.monotonic()
        average_statistics(self._ready.model, self._engine)
        seen = evaluate(self._ready, plan.workload, self._source, self._engine, self._beat)
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
        return quality is not None and quality.stop_at_target and self._meets(evaluation)

    def _meets(self, evaluation: Evaluation) -> bool:
        quality = self._plan.workload.quality
        return quality is not None and meets(
            evaluation.value, quality.target, higher_is_better=self._meter.higher_is_better
        )

    def _save(self, done: int, train_s: float) -> None:
        self._beat(f"the checkpoint after step {done}")
        # Afterwards all ranks hold what the file holds, whether training goes on or resumes.
        average_statistics(self._ready.model, self._engine)
        if not self._is_first:
            return
        course = self._ready.course
        progress = Progress(
            step=done,
            samples=done * course.global_batch,
            epoch=course.epoch(done),
            position=self._ready.position(done),
            train_s=train_s,
            wall_s=self._events.wall_s,
            loss_scaling=self._ready.trainee.precision.state(),
            evaluations=tuple(self.evaluations),
        )
        path = self._folder.checkpoint(done)
        write_checkpoint(path, self._ready.model, self._ready.trainee.optimizer, progress, self._trained)
        prune(path.parent, self._plan.checkpoint.keep)

    def checkpoints(self) -> tuple[str, ...]:
        """Names of the checkpoints that are there now."""
        return tuple(sorted(path.name for path in self._folder.checkpoints.glob("step-*")))

    def result(self) -> QualityResult | None:
        """How training to the quality went; None for a run of speed."""
        quality = self._plan.workload.quality
        if quality is None or not self._ready.course.evaluate_every or not self.evaluations:
            return None
        meter = self._meter
        met = next((evaluation for evaluation in self.evaluations if self._meets(evaluation)), None)
        return QualityResult(
            metric=meter.name,
            higher_is_better=meter.higher_is_better,
            target=quality.target,
            reached=met is not None,
            predictor=meter.predictor,
            predictor_value=self._predictor_value,
            evaluations=tuple(self.evaluations),
            train_samples=self._ready.source.num_samples,
            time_to_quality_s=met.wall_s if met else None,
            samples_to_quality=met.samples if met else None,
            epochs_to_quality=met.epoch if met else None,
        )
