"""The gradient noise scale beside the global batch: whether a larger batch would still save steps.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): with B the global batch and B_n the noise scale,
training to a quality takes S = S_min (1 + B_n/B) steps and E = E_min (1 + B/B_n) samples. At B = B_n both are twice
their least. What is measured is their simple noise scale, tr(Sigma)/|G|^2, which equals B_n only where
all directions curve alike; it grows during training, and is a mean over the run here. The law holds for learning rates
that are tuned to each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.scaling import Group, Point
from dlbench.records.record import NoiseScale
from dlbench.records.scan import Run
from dlbench.report.wording import percent, runs_text
from dlbench.stats.estimates import Estimate, median_estimate

Advice = Literal["pays", "balanced", "wasteful", "unknown"]

PAYS_BELOW = 0.5
"""Share of the noise scale below which a doubled batch saves a third of the steps or more."""
WASTEFUL_ABOVE = 2.0
"""Share above which it saves less than a sixth of them."""


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """The noise scale at one scaling point."""

    ranks: int
    nodes: int
    global_batch: int
    noise_scale: Estimate | None
    """Samples, median over the runs that found one."""
    share: float | None
    """Global batch over noise scale (1)."""
    advice: str
    """What that means for a larger batch, or why it is not known, in words."""
    basis: str
    """Batch sizes behind the estimate, and the fewest steps behind that of a run, in words."""


def noise_points(group: Group) -> tuple[NoisePoint, ...]:
    """The noise scale at each point where it was asked for."""
    runs = {run.plan.run_id: run for run in group.runs}
    return tuple(
        _point(point, measured, runs[point.run_ids[0]].plan.global_batch)
        for point in group.points
        if (measured := _measured([runs[run_id] for run_id in point.run_ids]))
    )


def _measured(runs: Sequence[Run]) -> list[NoiseScale]:
    return [run.record.noise_scale for run in runs if run.record and run.record.noise_scale]


def _point(point: Point, measured: Sequence[NoiseScale], batch: int) -> NoisePoint:
    known = [found.noise_scale for found in measured if found.noise_scale]
    scale = median_estimate(known, "samples") if known else None
    share = batch / scale.value if scale else None
    first, steps = measured[0], min(found.steps for found in measured)
    return NoisePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        global_batch=batch,
        noise_scale=scale,
        share=share,
        advice=_advice_text(share, len(measured), len(measured) - len(known)),
        basis=f"batches of {first.small_batch:,} and {first.large_batch:,} samples, {steps:,} steps per run",
    )


def _advice_text(share: float | None, num_runs: int, num_unknown: int) -> str:
    """Args: the share, the runs that looked for the noise scale, and how many of them found none."""
    if share is None:
        return (
            f"unknown: no estimate of the squared gradient or of its variance is positive in {runs_text(num_runs)}; "
            "more steps, or batches further apart, may give one"
        )
    steps, samples = doubled_batch(share)
    word = {
        "pays": "larger batches still pay",
        "balanced": "a larger batch trades samples for steps about evenly",
        "wasteful": "larger batches mostly cost samples",
    }[advice(share)]
    unknown = f"; {num_unknown} of {num_runs} runs found none" if num_unknown else ""
    return (
        f"the global batch is {share:.2g} of the noise scale: {word} (twice the batch: "
        f"{percent(1 - steps, 0)} fewer steps, {percent(samples - 1, 0)} more samples to the same quality){unknown}"
    )


def advice(share: float | None) -> Advice:
    """What a global batch of `share` noise scales means for a larger one."""
    if share is None:
        return "unknown"
    if share < PAYS_BELOW:
        return "pays"
    return "balanced" if share <= WASTEFUL_ABOVE else "wasteful"


def doubled_batch(share: float) -> tuple[float, float]:
    """What twice the batch does at `share` noise scales: steps and samples to the same quality, as ratios.

    From S = S_min (1 + 1/share) and E = E_min (1 + share).
    """
    return (1 + 1 / (2 * share)) / (1 + 1 / share), (1 + 2 * share) / (1 + share)
