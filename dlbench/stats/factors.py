"""The effect of each swept key, all else equal: a contrast of two of its values is a mean over all combinations of the
other keys that ran with both, by repeat.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.stats.estimates import Estimate, by_definition, paired_logs
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Outcome, Verdict

Pair = tuple[str, Any, Any]  # A key and two of its values: the second over the first.


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One combination of the values of all keys."""

    values: Mapping[str, Any]
    acting: frozenset[str]  # Keys that act in this combination.
    rates: Mapping[RunKey, float]


@dataclass(frozen=True, kw_only=True)
class KeyEffect:
    """What one key does to the rate."""

    key: str
    values: Sequence[Any]  # The first is the one that the others are measured against.
    effects: tuple[Estimate | None, ...]
    """The rate of each value over that of the first (ratio); None where no combination ran with both."""
    outcome: Outcome  # `better` where any two values differ.
    widest: tuple[Pair, Estimate] | None  # The values that are furthest apart; None where no two can be compared.


def is_same(one: object, other: object) -> bool:
    """Returns whether two values are equal in value and type: 1 is not true, and 1.0 is not 1 where a person wrote
    them apart.
    """
    return repr(one) == repr(other)


def levels_of(combinations: Sequence[Combination], references: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of every key that acts anywhere and has two of them or more, the reference first.

    `references`: the value of each key that its others are compared with.
    """
    levels: dict[str, list[Any]] = {}
    for key, reference in references.items():
        # Each value once, in the order of first appearance.
        values = list({repr(one.values[key]): one.values[key] for one in combinations if key in one.acting}.values())
        if len(values) > 1:
            levels[key] = sorted(values, key=lambda value: not is_same(value, reference))
    return levels


def contrasts(
    combinations: Sequence[Combination], levels: Mapping[str, Sequence[Any]]
) -> dict[Pair, dict[RunKey, float]]:
    """Returns the log ratios of the rates of every pair of values of every key, one for each repeat."""
    return {
        (key, a, b): _contrast(combinations, key, b, a)
        for key, values in levels.items()
        for a, b in itertools.combinations(values, 2)
    }


def _contrast(combinations: Sequence[Combination], key: str, top: Any, bottom: Any) -> dict[RunKey, float]:
    sides: list[dict[tuple[str, ...], Mapping[RunKey, float]]] = []
    for value in (top, bottom):
        acting = [one for one in combinations if is_same(one.values[key], value) and key in one.acting]
        sides.append({tuple(repr(one.values[k]) for k in one.values if k != key): one.rates for one in acting})
    logs: dict[RunKey, list[float]] = {}
    for others in sides[0].keys() & sides[1].keys():
        for repeat, ratio in paired_logs(sides[0][others], sides[1][others]).items():
            logs.setdefault(repeat, []).append(ratio)
    # Repeats that lack a combination would compare something else.
    most = max(map(len, logs.values()), default=0)
    return {repeat: math.fsum(ratios) / most for repeat, ratios in sorted(logs.items()) if len(ratios) == most}


def key_effect(key: str, values: Sequence[Any], verdicts: Mapping[Pair, Verdict | None]) -> KeyEffect:
    """Returns the effect of a key; `verdicts`: of each pair of its values, None where no combination ran with both."""
    known = {pair: one for pair, one in verdicts.items() if one is not None}
    ratios = {pair: one.estimate for pair, one in known.items() if one.estimate is not None}
    outcomes = {one.outcome for one in known.values()}
    outcome: Outcome = "undecided"
    if not outcomes or "insufficient" in outcomes:
        outcome = "insufficient"
    elif outcomes & {"better", "worse"}:
        outcome = "better"
    elif len(known) == len(verdicts) and outcomes == {"equal"}:
        outcome = "equal"
    count = max((ratio.n for ratio in ratios.values()), default=0)
    widest = max(ratios.items(), key=lambda item: abs(math.log(item[1].value)), default=None)
    others = (ratios.get((key, values[0], value)) for value in values[1:])
    return KeyEffect(
        key=key, values=values, effects=(by_definition(1.0, count), *others), outcome=outcome, widest=widest
    )
