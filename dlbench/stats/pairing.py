"""Which runs of two sides are pairs: those of equal repeats, which ran side by side and so drift together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RunKey = tuple[str, int]
"""Block (series with its swept values) and repeat: runs with equal keys ran side by side, interleaved."""

ENOUGH_PAIRS = 5
"""So many pairs carry an interval of their own, however many runs have no partner."""
ENOUGH_SHARE = 0.8
"""Of the smaller side: with fewer pairs than `ENOUGH_PAIRS`, so many of its runs must have a partner. Both sides of
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
        """Whether the sides are compared pair by pair."""
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
