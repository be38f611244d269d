"""Where the lost share of the ideal goes, at first order: each part of a step against the baseline's.

A step of the ideal machine takes, part by part, what the baseline's step takes for the same number
of samples a rank. With T = sum of the parts (mean seconds a step), T_ideal likewise:

    1 - E = (T - T_ideal) / T = sum over parts of (part - part_ideal) / T

so the lost points sum to the loss exactly. First order: a part is charged with the time it holds,
whatever its cause; a slow rank, for example, shows as exchange time of the ranks that wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.analysis.measures import PARTS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step at one scaling point."""

    name: str
    """One of `dlbench.analysis.measures.PARTS`."""
    seconds: float
    """Mean over runs of the run's mean seconds a step."""
    ideal_seconds: float
    """The same at the baseline, for the same number of samples a rank."""
    lost: float
    """Share of the ideal that is lost here (1); negative where the part became faster."""


def attribute(own: pd.DataFrame, baseline: pd.DataFrame, *, work: float) -> tuple[Part, ...]:
    """The parts of a point against its baseline.

    Means over runs, not medians, because only means of parts sum to the mean of the whole.

    Args:
        own: seconds a step, one row a run, a column for each of `PARTS`.
        baseline: the same for the baseline's runs.
        work: samples a rank and step of this point / of the baseline (1 under weak scaling).
    """
    means, reference = own.mean(), baseline.mean()
    total = float(sum(means[name] for name in PARTS))
    result = []
    for name in PARTS:
        seconds, ideal = float(means[name]), float(reference[name]) * work
        result.append(Part(name=name, seconds=seconds, ideal_seconds=ideal, lost=(seconds - ideal) / total))
    return tuple(result)


def largest_loss(parts: tuple[Part, ...]) -> Part:
    """The part that costs most of the ideal."""
    return max(parts, key=lambda part: part.lost)
