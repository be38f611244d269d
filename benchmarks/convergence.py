"""Does training learn? Each workload to its quality on made data, with the `ci` preset, by one and by two ranks.

Runs are those of a user: `dlbench data make`, then `dlbench run --to-accuracy`. The global batch is the same for one
and two ranks, so that both should need the same number of samples; seeds say how much of a difference is chance.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, timed
from dlbench.records.record import QualityResult
from dlbench.records.scan import scan

SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one made data set."""

    workload: str
    make: tuple[str, ...]
    global_batch: int
    """Samples of one step over all ranks."""
    settings: tuple[str, ...]
    skill: float
    """What the metric must be of the no-skill predictor's: at least so many times, or at most that share."""


CASES = (
    Case(
        workload="resnet50",
        make=("images", "--samples", "640", "--validation", "200", "--size", "128x128"),
        global_batch=16,
        settings=("quality.target=0.5", "quality.evaluate_every_samples=160", "quality.evaluate_every_epochs=null"),
        skill=5.0,
    ),
    Case(
        workload="bert",
        make=("text",),
        global_batch=32,
        settings=("quality.target=0.1", "quality.evaluate_every_samples=1600"),
        skill=2.0,
    ),
    Case(
        workload="cosmoflow",
        make=("density", "--samples", "768", "--validation", "96", "--size", "32"),
        global_batch=16,
        settings=("quality.target=0.3", "quality.evaluate_every_epochs=0.5", "quality.max_epochs=12.0"),
        skill=0.6,
    ),
)


def figures() -> Iterator[Figure]:
    """All figures of convergence."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in CASES:
            data = folder / case.make[0]
            timed("data", "make", case.make[0], str(data), *case.make[1:])
            yield from _case(case, data, folder / "runs")
        yield from _large_batch(folder / "images", folder / "runs")


def _trained(
    out: Path, series: str, workload: str, data: Path, ranks: int, settings: Sequence[str]
) -> list[QualityResult]:
    """The qualities of one run a seed; a run that fails ends the benchmark."""
    words = [word for setting in settings for word in ("--set", setting)]
    seeds = ",".join(map(str, SEEDS))
    timed(
        *("run", workload, "--preset", "ci", "--data", str(data), "--to-accuracy", "--ranks", str(ranks)),
        *("--engine", "horovod" if ranks > 1 else "single", "--sweep", f"train.seed={seeds}", "--series", series),
        *("--out", str(out), "--no-progress"),
        *words,
    )
    runs = [run for run in scan(out).runs if run.plan.series.id == series]
    found = [run.record.quality for run in runs if run.state == "valid" and run.record is not None]
    if len(found) != len(SEEDS) or any(quality is None for quality in found):
        raise RuntimeError(f"{series}: {[run.detail for run in runs]}")
    return [quality for quality in found if quality is not None]


def _case(case: Case, data: Path, out: Path) -> Iterator[Figure]:
    samples: dict[int, list[float]] = {}
    for ranks in (1, 2):
        if ranks > len(os.sched_getaffinity(0)):
            yield Figure(name=f"{case.workload}, {ranks} ranks", value=None, unit="", goal="learns", reason="one core")
            return
        settings = (*case.settings, f"train.batch_per_rank={case.global_batch // ranks}")
        found = _trained(out, f"{case.workload}-{ranks}", case.workload, data, ranks, settings)
        yield _skill(case, ranks, found)
        samples[ranks] = [float(quality.samples_to_quality or math.inf) for quality in found]
    ratios = sorted(two / one for one in samples[1] for two in samples[2])
    yield Figure(
        name=f"{case.workload} ci, samples to the target, 2 ranks against 1",
        value=math.exp(sum(math.log(r) for r in ratios) / len(ratios)) if ratios[-1] < math.inf else math.inf,
        low=ratios[0],
        high=ratios[-1],
        n=len(SEEDS),
        unit="ratio (range over pairs of seeds)",
        goal="1 within the seeds' range",
        met=ratios[0] <= 1 <= ratios[-1],
        reason=f"1 rank: {samples[1]}, 2 ranks: {samples[2]} samples",
    )


def _skill(case: Case, ranks: int, found: list[QualityResult]) -> Figure:
    """The worst seed's last value against the no-skill predictor's."""
    ratios = [quality.evaluations[-1].value / quality.predictor_value for quality in found]  # type: ignore[operator]
    higher = found[0].higher_is_better
    worst = min(ratios) if higher else max(ratios)
    values = ", ".join(
        f"{quality.evaluations[-1].value:.3f} after {quality.evaluations[-1].samples} samples "
        f"({quality.evaluations[-1].train_s:.0f} s)"
        for quality in found
    )
    return Figure(
        name=f"{case.workload} ci, {ranks} rank{'s' * (ranks > 1)}, {found[0].metric} / {found[0].predictor}",
        value=worst,
        unit=f"times (worst of {len(found)} seeds)",
        n=len(found),
        goal=f"at {'least' if higher else 'most'} {case.skill:g}",
        met=worst >= case.skill if higher else worst <= case.skill,
        reason=f"{values}; no skill {found[0].predictor_value:.3f}",
    )


def _large_batch(data: Path, out: Path) -> Iterator[Figure]:
    """LARS at eight times the batch against SGD, on the same images, to the same top-1."""
    common = ("quality.target=0.7", "quality.evaluate_every_epochs=0.5", "quality.max_epochs=6.0")
    sgd = _trained(out, "sgd", "resnet50", data, 1, (*common, "train.batch_per_rank=8"))
    lars = _trained(
        out,
        "lars",
        "resnet50",
        data,
        1,
        (
            *common,
            "train.batch_per_rank=64",
            "train.optimizer.name=lars",
            "train.optimizer.epsilon=0.0",
            "train.optimizer.learning_rate=10.0",
            "train.schedule.warmup_steps=10",
            "train.schedule.decay=polynomial",
            "train.schedule.total_epochs=6.0",
        ),
    )
    best = [[max(e.value or 0.0 for e in quality.evaluations) for quality in found] for found in (sgd, lars)]
    needed = [[quality.samples_to_quality for quality in found] for found in (sgd, lars)]
    yield Figure(
        name="resnet50 ci, top-1 of LARS at batch 64 against SGD at batch 8",
        value=min(best[1]) / min(best[0]),
        unit=f"ratio of the worst of {len(SEEDS)} seeds, each up to 0.7 or 6 epochs",
        n=len(SEEDS),
        goal="LARS reaches 0.7 where SGD does",
        met=all(lars_one.reached or not sgd_one.reached for sgd_one, lars_one in zip(sgd, lars, strict=True)),
        reason=f"SGD {best[0]} (samples to 0.7: {needed[0]}), LARS {best[1]} (samples to 0.7: {needed[1]})",
    )
