"""Which runs of two sides are pairs (equal repeats, which ran side by side), and resampled runs for intervals of fits.
fits.

Points of one run share its state (neighbours, clocks, placement), so that it is runs that are drawn, never points or
iterations. Runs with equal keys were interleaved and are drawn together. Percentiles of resamples of few values are
too narrow; so each resample's distance from the centre is stretched, as logarithm, by Student's quantile over the
normal one and by sqrt(n / (n - 1)): for a mean that gives Student's t interval (Hesterberg, The American Statistician
69(4), 2015, expanded percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeVar

from dlbench.lazy import Array, np
from dlbench.stats.multiplicity import student_quantile

RunKey = tuple[str, int]
"""Block (series with its swept values) and repeat: runs with equal keys ran side by side, interleaved."""


class KnownKey(tuple[str, int]):
    """A `RunKey` that knows the session of its run, which takes no part in equality: pairs may be of two jobs."""

    session: str | None = None

    @classmethod
    def of(cls, block: str, repeat: int, session: str) -> RunKey:
        key = cls((block, repeat))
        key.session = session
        return key


def session_of(key: RunKey) -> str | None:
    """The session of a run; None where its key does not know."""
    return key.session if isinstance(key, KnownKey) else None


def in_all(first: Iterable[RunKey], *others: Iterable[RunKey]) -> list[RunKey]:
    """The keys that all sides hold, in their order. Each is of the session of its runs together; plain where a run does
    not know its own.
    """
    sides = [{key: session_of(key) for key in side} for side in (first, *others)]
    found = []
    for key in sorted(set(sides[0]).intersection(*sides[1:])):
        sessions = [session for side in sides if (session := side[key]) is not None]
        found.append(KnownKey.of(*key, ", ".join(sessions)) if len(sessions) == len(sides) else (key[0], key[1]))
    return found


ENOUGH_PAIRS = 5
"""This many pairs carry an interval of their own, however many runs have no partner."""
ENOUGH_SHARE = 0.8
"""Of the smaller side: with fewer pairs than `ENOUGH_PAIRS`, this many of its runs must have a partner. Both sides of
five repeats that lost different runs still pair; sides that share a block by chance do not."""


@dataclass(frozen=True)
class Pairing:
    """The pairs of two sides."""

    keys: tuple[RunKey, ...]
    """Of the pairs, in their order; empty where the sides are to be taken as independent."""
    left_out: int
    """Runs of both sides together that have no partner while others are paired."""

    @property
    def is_paired(self) -> bool:
        return bool(self.keys)

    def of(self, side: Mapping[RunKey, float]) -> list[float]:
        """The values of a side that take part: those of the pairs, or all, in the order of their keys."""
        return [side[key] for key in (self.keys or sorted(side))]


def pairing(top: Mapping[RunKey, object], bottom: Mapping[RunKey, object]) -> Pairing:
    """The runs that both sides hold, where they are `ENOUGH_PAIRS` or `ENOUGH_SHARE` of the smaller side.

    A run that failed has no value, and its partner is left out with it: pairs keep out the drift of the machine, which
    is often larger than what is measured, and one run less costs little.
    """
    shared = sorted(top.keys() & bottom.keys())
    fewer = min(len(top), len(bottom))
    if not shared or (len(shared) < ENOUGH_PAIRS and len(shared) < ENOUGH_SHARE * fewer):
        return Pairing((), 0)
    return Pairing(tuple(shared), len(top) + len(bottom) - 2 * len(shared))


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
