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
    advice: Advice
    num_runs: int
    """Runs that looked for it."""
    num_unknown: int
    """Runs of these that found none."""
    small_batch: int
    large_batch: int
    steps: int
    """Fewest steps that a run's estimate is made of."""


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
    scale = median_estimate(known) if known else None
    share = batch / scale.value if scale else None
    return NoisePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        global_batch=batch,
        noise_scale=scale,
        share=share,
        advice=advice(share),
        num_runs=len(measured),
        num_unknown=len(measured) - len(known),
        small_batch=measured[0].small_batch,
        large_batch=measured[0].large_batch,
        steps=min(found.steps for found in measured),
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
