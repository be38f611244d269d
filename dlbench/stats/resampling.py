"""Resampled runs for intervals of fits.

Points of one run share its state, so runs are drawn, never points or iterations; runs with equal keys were interleaved
and are drawn together. Each resample's distance from the centre is stretched, as logarithm, by Student's quantile over
the normal one and by sqrt(n / (n - 1)): for a mean that gives Student's t interval (Hesterberg, The American
Statistician 69(4), 2015, expanded percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import Literal, TypeVar

from dlbench.lazy import Array, np
from dlbench.stats.multiplicity import student_quantile

Key = TypeVar("Key", bound=Hashable)

SEED = 20_150_815  # Fixed, so that the same runs give the same interval, byte for byte.
RESAMPLES = 200  # Resamples per fit: enough for the ends of a 95 % interval to within their own scatter.
LEAST_RUNS = 3  # Runs per point that an interval needs: for two, Student's quantile is 12.7.


def stretch(runs: int) -> float:
    """Returns the factor by which deviations of resamples of this many runs (two or more) are stretched."""
    return student_quantile(0.975, runs - 1) / NormalDist().inv_cdf(0.975) * math.sqrt(runs / (runs - 1))


def resampled(
    points: Sequence[Mapping[Key, float]], *, centre: Literal["median", "geometric mean"], resamples: int = RESAMPLES
) -> Array | None:
    """Returns the centre over runs of each point in each resample, shape (resamples, points).

    `points`: for each point a positive value per run, by a key that interleaved runs share; None with too few runs.
    """
    if min(map(len, points), default=0) < LEAST_RUNS:
        return None
    middle = np.nanmedian if centre == "median" else np.nanmean
    centres_by_point = np.empty((resamples, len(points)))
    for number, (keys, members) in enumerate(_linked_points(points)):
        column_by_key = {key: column for column, key in enumerate(keys)}
        logs = np.full((len(members), len(keys)), np.nan)
        for row, member in enumerate(members):
            for key, value in points[member].items():
                logs[row, column_by_key[key]] = math.log(value)
        picks = np.random.default_rng([SEED, number]).integers(0, len(keys), size=(resamples, len(keys)))
        centres = middle(logs, axis=1)
        drawn = logs[:, picks]
        # A point with fewer runs, none of which was drawn, keeps its centre.
        missed = np.isnan(drawn).all(axis=2)
        drawn[missed, 0] = np.broadcast_to(centres[:, None], missed.shape)[missed]
        factor = np.array([stretch(len(points[member])) for member in members])[:, None]
        centres_by_point[:, members] = np.exp(centres[:, None] + factor * (middle(drawn, axis=2) - centres[:, None])).T
    return centres_by_point


def _linked_points(points: Sequence[Mapping[Key, float]]) -> list[tuple[list[Key], list[int]]]:
    """Returns groups of points that share keys, directly or by other points: the keys and the indices of the points."""
    groups: list[tuple[set[Key], list[int]]] = []
    for index, point in enumerate(points):
        keys, members = set(point), [index]
        unlinked = []
        for group_keys, group_members in groups:
            if keys & group_keys:
                keys, members = keys | group_keys, [*group_members, *members]
            else:
                unlinked.append((group_keys, group_members))
        groups = [*unlinked, (keys, members)]
    return [(sorted(keys, key=repr), members) for keys, members in groups]
