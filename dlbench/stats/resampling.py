"""Resampled runs for intervals of fits.

Points of one run share its state (neighbours, clocks, placement), so that it is runs that are drawn, never points or
iterations. Runs with equal keys were interleaved and are drawn together. Percentiles of resamples of few values are
too narrow; so each resample's distance from the centre is stretched, as logarithm, by Student's quantile over the
normal one and by sqrt(n / (n - 1)): for a mean that gives Student's t interval (Hesterberg, The American Statistician
69(4), 2015, expanded percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import Literal, TypeVar

from dlbench.lazy import Array, np
from dlbench.stats.multiplicity import student_quantile

Key = TypeVar("Key", bound=Hashable)

SEED = 20_150_815
"""Fixed, so that the same runs give the same interval, byte for byte."""
RESAMPLES = 200
"""Of a fit: enough for the ends of 95 % to within their own scatter, and a fit takes milliseconds."""
LEAST_RUNS = 3
"""Fewer runs of a point give no interval: for two, Student's quantile is 12.7."""


def stretch(runs: int) -> float:
    """By how much deviations of resamples of this many runs (two or more) are stretched."""
    return student_quantile(0.975, runs - 1) / NormalDist().inv_cdf(0.975) * math.sqrt(runs / (runs - 1))


def resampled(
    points: Sequence[Mapping[Key, float]], *, centre: Literal["median", "geometric mean"], resamples: int = RESAMPLES
) -> Array | None:
    """The centre over runs of each point in each resample, shape (resamples, points). `points`: of each point a
    positive value for each run, by a key that interleaved runs of different points share. `centre`: what is made of the
    runs. Returns None where a point has fewer than `LEAST_RUNS` runs.
    """
    if min(map(len, points), default=0) < LEAST_RUNS:
        return None
    middle = np.nanmedian if centre == "median" else np.nanmean
    found = np.empty((resamples, len(points)))
    for number, (keys, members) in enumerate(_drawn_together(points)):
        places = {key: place for place, key in enumerate(keys)}
        values = np.full((len(members), len(keys)), np.nan)
        for row, member in enumerate(members):
            for key, value in points[member].items():
                values[row, places[key]] = math.log(value)
        picks = np.random.default_rng([SEED, number]).integers(0, len(keys), size=(resamples, len(keys)))
        centres = middle(values, axis=1)
        drawn = values[:, picks]
        missed = np.isnan(drawn).all(axis=2)  # a point of fewer runs, and none of them drawn: it stays where it is
        drawn[missed, 0] = np.broadcast_to(centres[:, None], missed.shape)[missed]
        factor = np.array([stretch(len(points[member])) for member in members])[:, None]
        found[:, members] = np.exp(centres[:, None] + factor * (middle(drawn, axis=2) - centres[:, None])).T
    return found


def _drawn_together(points: Sequence[Mapping[Key, float]]) -> list[tuple[list[Key], list[int]]]:
    """Keys that are linked by points, and these points."""
    groups: list[tuple[set[Key], list[int]]] = []
    for index, point in enumerate(points):
        keys, members = set(point), [index]
        apart = []
        for other, others in groups:
            if keys & other:
                keys, members = keys | other, [*others, *members]
            else:
                apart.append((other, others))
        groups = [*apart, (keys, members)]
    return [(sorted(keys, key=repr), members) for keys, members in groups]
