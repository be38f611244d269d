"""What one record says of training to a quality: until when, and what the time went to."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.costs.training_time import Verdict, consistency
from dlbench.records.record import Evaluation, QualityResult, meets
from dlbench.records.scan import Run
from dlbench.views.utilisation import epoch_samples


def quality_of(run: Run) -> QualityResult:
    """The quality that the record of a run to a quality holds."""
    assert run.record is not None
    assert run.record.quality is not None
    return run.record.quality


def without_staging(run: Run) -> float | None:
    """Seconds to quality outside of staging; None where the target was not met, or nothing was staged."""
    assert run.record is not None
    whole, staging = quality_of(run).time_to_quality_s, run.record.staging
    return None if whole is None or staging is None else max(0.0, whole - staging.seconds)


def until_target(result: QualityResult) -> Sequence[Evaluation]:
    """Evaluations up to the first that met the target; all of them where none did."""
    for index, evaluation in enumerate(result.evaluations):
        if meets_target(result, evaluation):
            return result.evaluations[: index + 1]
    return result.evaluations


def meets_target(result: QualityResult, evaluation: Evaluation) -> bool:
    """Whether an evaluation met the target of its run."""
    return meets(evaluation.value, result.target, higher_is_better=result.higher_is_better)


def resolution(result: QualityResult) -> float | None:
    """Seconds between the evaluation that met the target and the one before, or the start; None if none met it."""
    seen = until_target(result)
    if not (seen and meets_target(result, seen[-1])):
        return None
    return seen[-1].wall_s - (seen[-2].wall_s if len(seen) > 1 else 0.0)


def account(result: QualityResult) -> tuple[float, float, float]:
    """Seconds in all, in training steps and in evaluations, until the target or the end."""
    seen = until_target(result)
    if not seen:
        return 0.0, 0.0, 0.0
    return seen[-1].wall_s, seen[-1].train_s, sum(evaluation.eval_s for evaluation in seen)


def fit(run: Run, throughput: float) -> Verdict | None:
    """Whether throughput, epochs and time in training steps of this run can all be true; None where one is not known.

    Args:
        run: a run with a record of training to a quality.
        throughput: samples per second of its measured steps, all ranks together.
    """
    result, epoch = quality_of(run), epoch_samples(run)
    last = result.evaluations[-1] if result.evaluations else None
    if last is None or not (epoch and last.epoch and last.train_s):
        return None
    epochs, seconds = last.epoch, last.train_s
    if is_resumed(run):
        # What ran before the checkpoint ran at another rate: only what this run trained between two evaluations counts.
        start = next((one for one in result.evaluations if one.samples >= _resumed_at(run)), last)
        epochs, seconds = epochs - start.epoch, seconds - start.train_s
        if epochs <= 0 or seconds <= 0:
            return None
    return consistency(throughput, epoch, epochs, seconds)


def is_resumed(run: Run) -> bool:
    """Whether its training began from a checkpoint."""
    return run.record is not None and bool(run.record.first_step)


def _resumed_at(run: Run) -> int:
    """Samples that were trained before the run."""
    assert run.record is not None
    return run.record.first_step * run.plan.global_batch
