"""Warnings on what runs say of accuracy, of the noise scale and of the hardware's use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dlbench.reading.doubts import Severity
from dlbench.reading.scaling import Group
from dlbench.records.interrupted import last_attempt
from dlbench.records.record import QualityResult, Record
from dlbench.records.scan import Run
from dlbench.report.wording import ranks_text
from dlbench.units import format_seconds, seconds_between
from dlbench.views.quality.numbers import Quality, QualityPoint, fit, is_resumed, meets_target, until_target
from dlbench.views.utilisation import utilisation

Found = tuple[str, Severity, str]
"""Code, severity and text."""

MANY_OVERFLOWS = 0.05
"""Share of steps above which overflow is more than the loss scale finding its place."""


def run_doubts(run: Run, record: Record, throughput: float) -> Iterator[Found]:
    """What one run gives reason to doubt; its throughput (samples/s) is that of its measured steps."""
    if run.plan.measure.noise_scale:
        yield (
            "noise-scale",
            "serious",
            "step times include reading every gradient (measure.noise_scale): no throughput to compare",
        )
    if record.overflow_steps:
        yield (
            "overflow-steps",
            "serious" if record.overflow_steps > MANY_OVERFLOWS * record.steps else "note",
            f"{record.overflow_steps} of {record.steps} steps were skipped because a gradient overflowed",
        )
    if record.attempt > 1:
        yield _of_attempt(run, record)
    elif record.first_step:
        of_what = record.resumed_from or "a checkpoint"
        yield (
            "resumed",
            "serious" if record.quality else "note",
            f"resumed at step {record.first_step:,} from {of_what}: losses and times include what ran before",
        )
    if record.quality is not None:
        yield from _of_quality(run, record.quality, throughput)


def _of_attempt(run: Run, record: Record) -> Found:
    """That earlier attempts at the run ended before their end, and what of them is in its figures."""
    told = f"after interruption (attempt {record.attempt})"
    if not record.goes_on:
        return "attempt", "note", f"begun anew {told}: nothing of earlier attempts is in its figures"
    before = last_attempt(run.folder)
    lost, gap = "", ""
    if before is not None:
        lost = f" of {before.step:,} done"
        gap = f", which took {format_seconds(seconds_between(before.at, record.started))} and is in no figure"
    resumed = f"resumed {told} at step {record.first_step:,}{lost}"
    if record.quality is None:
        return "resumed", "note", f"{resumed}: all measured steps are of this attempt"
    return (
        "resumed",
        "serious",
        f"{resumed}: times add up over the attempts, from checkpoint to checkpoint, without the time between them{gap}",
    )


def _of_quality(run: Run, result: QualityResult, throughput: float) -> Iterator[Found]:
    wanted = run.plan.workload.quality
    seen = until_target(result)
    if not seen:
        yield "no-evaluation", "serious", "the accuracy was never evaluated: evaluate more often, or run longer"
        return
    count = seen[-1].eval_samples
    if wanted is not None and wanted.evaluate_samples == count:
        error = _standard_error(result, count)
        yield (
            "part-evaluated",
            "note",
            f"evaluated on {count:,} samples (quality.evaluate_samples)"
            + (f": standard error near the target about {error * 100:.1f} points" if error else ""),
        )
    if len(seen) == 1 and meets_target(result, seen[0]):
        yield (
            "first-evaluation",
            "serious",
            f"met the target at the first evaluation, after {seen[0].samples:,} samples: time to accuracy is an upper "
            "bound; evaluate more often",
        )
    if not (
        result.target > result.predictor_value if result.higher_is_better else result.target < result.predictor_value
    ):
        yield (
            "target-without-skill",
            "serious",
            f"the target {result.target:g} is no better than {result.predictor} ({result.predictor_value:.4g}): "
            "meeting it shows nothing",
        )
    yield from _contradictions(run, result, throughput)


def _standard_error(result: QualityResult, count: int) -> float | None:
    """Of a share of `count` independent samples, near the target (binomial); None for other metrics."""
    share = result.target
    return math.sqrt(share * (1 - share) / count) if result.metric == "top1" and 0 < share < 1 else None


def _contradictions(run: Run, result: QualityResult, throughput: float) -> Iterator[Found]:
    """Throughput, epochs and time in training steps must fit each other, or one of them is wrong."""
    verdict = fit(run, throughput)
    if verdict is None:
        if not is_resumed(run):
            yield (
                "contradiction",
                "serious",
                "the last evaluation records no epochs or no time: its figures cannot be checked",
            )
    elif verdict.status != "fits":
        hint = " (warm-up steps are in the time, not in the rate)" if verdict.status == "unexplained" else ""
        yield (
            "contradiction",
            "serious",
            f"contradiction: training took {format_seconds(verdict.stated_s)}, but at {throughput:,.4g} samples/s its "
            f"epochs take {format_seconds(verdict.expected_s)}{hint}",
        )


def group_doubts(group: Group, quality: Quality | None) -> Iterator[Found]:
    """What the runs of a group together give reason to doubt."""
    used = utilisation(group)
    for point in used.points if used else ():
        if point.mfu and point.mfu.value > 1:
            yield (
                "impossible-utilisation",
                "serious",
                f"MFU above 100 % at {ranks_text(point.ranks)}: the peak (node.peak_tflops) or the count of FLOPs is "
                "wrong",
            )
    if quality is None:
        return
    yield from _not_reached(quality.points)
    for at in quality.points:
        if at.num_lost:
            yield (
                "runs-lost",
                "serious",
                f"{at.num_lost} further run{'s' * (at.num_lost > 1)} at {ranks_text(at.ranks)} ended without a record: "
                "the share that met the target may be lower",
            )
        if at.best is not None and not _better(quality, at.best.value):
            yield (
                "no-skill",
                "serious",
                f"at {ranks_text(at.ranks)} the best value is no better than {quality.predictor} "
                f"({quality.predictor_value:.4g})",
            )


def _better(quality: Quality, value: float) -> bool:
    return value > quality.predictor_value if quality.higher_is_better else value < quality.predictor_value


def _not_reached(points: Sequence[QualityPoint]) -> Iterator[Found]:
    missing = [point for point in points if not point.all_reached]
    if missing:
        counts = ", ".join(
            f"{point.num_runs - point.num_reached} of {point.num_runs} at {ranks_text(point.ranks)}"
            for point in missing
        )
        yield (
            "target-not-reached",
            "serious",
            f"runs missed the target ({counts}): times to accuracy are of the others alone, and yield no speed-up",
        )
