"""Pairs of runs of two sides: equal repeats, which ran interleaved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ENOUGH_PAIRS = 5  # With this many pairs sides are paired, however many runs have no partner.
ENOUGH_SHARE = 0.8
"""With fewer pairs, share of the smaller side with a partner: sides that share a block by chance are not paired."""

RunKey = tuple[str, int]  # Block (series with its swept values) and repeat: runs with equal keys ran interleaved.


class KnownKey(tuple[str, int]):
    """A `RunKey` with the session of its run, which does not count for equality: a pair may be of two jobs."""

    session: str | None = None

    @classmethod
    def of(cls, block: str, repeat: int, session: str) -> RunKey:
        key = cls((block, repeat))
        key.session = session
        return key


def session_of(key: RunKey) -> str | None:
    """Returns the session of a run; None for a plain key."""
    return key.session if isinstance(key, KnownKey) else None


def in_all(first: Iterable[RunKey], *others: Iterable[RunKey]) -> list[RunKey]:
    """Returns the keys that all sides have, sorted, with the joined sessions of their runs if all are known."""
    sides = [list(side) for side in (first, *others)]
    sessions_by_key: dict[RunKey, list[str]] = {}
    for key in itertools.chain.from_iterable(sides):
        session = session_of(key)
        if session is not None:
            sessions_by_key.setdefault(key, []).append(session)
    keys: list[RunKey] = []
    for block, repeat in sorted(set(sides[0]).intersection(*sides[1:])):
        sessions = sessions_by_key.get((block, repeat), [])
        if len(sessions) == len(sides):
            keys.append(KnownKey.of(block, repeat, ", ".join(sessions)))
        else:
            keys.append((block, repeat))
    return keys


@dataclass(frozen=True)
class Pairing:
    """The pairs of two sides."""

    keys: tuple[RunKey, ...]  # Keys of the pairs, sorted; empty if the sides are independent.
    left_out: int  # Runs of both sides together without a partner.

    @property
    def is_paired(self) -> bool:
        return bool(self.keys)

    def of(self, side: Mapping[RunKey, float]) -> list[float]:
        """Returns the values of a side's pairs, or all values of independent sides, in the order of their keys."""
        return [side[key] for key in (self.keys or sorted(side))]


def pairing(top: Mapping[RunKey, object], bottom: Mapping[RunKey, object]) -> Pairing:
    """Pairs the runs that both sides have, if they are `ENOUGH_PAIRS` or `ENOUGH_SHARE` of the smaller side.

    The partner of a failed run is left out: the drift that pairs exclude is often larger than the measured difference.
    """
    shared = sorted(top.keys() & bottom.keys())
    fewer = min(len(top), len(bottom))
    if not shared or (len(shared) < ENOUGH_PAIRS and len(shared) < ENOUGH_SHARE * fewer):
        return Pairing((), 0)
    return Pairing(tuple(shared), len(top) + len(bottom) - 2 * len(shared))
