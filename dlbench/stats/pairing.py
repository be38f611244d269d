"""Which runs of two sides are pairs: equal repeats, which ran side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ENOUGH_PAIRS = 5
"""This many pairs carry an interval of their own, however many runs have no partner."""
ENOUGH_SHARE = 0.8
"""Of the smaller side: with fewer pairs than `ENOUGH_PAIRS`, this many of its runs must have a partner. Both sides of
five repeats that lost different runs still pair; sides that share a block by chance do not."""

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
