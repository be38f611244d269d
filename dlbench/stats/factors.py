"""The effect of each swept key: two of its values are compared over all combinations of other keys with both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.stats.estimates import Estimate, by_definition, paired_logs
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Outcome, Verdict

Pair = tuple[str, Any, Any]  # A key and two of its values; the effect is that of the second over the first.


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A combination of the values of all keys, with its runs."""

    values: Mapping[str, Any]
    acting: frozenset[str]  # Keys that have an effect in this combination.
    rates: Mapping[RunKey, float]  # Throughput of each run.

    def other_values(self, key: str) -> tuple[str, ...]:
        return tuple(repr(value) for name, value in self.values.items() if name != key)


@dataclass(frozen=True, kw_only=True)
class KeyEffect:
    """The effect of one key on the rate."""

    key: str
    values: Sequence[Any]  # The first is the reference of the others.
    effects: tuple[Estimate | None, ...]  # Rate of each value over that of the first; None if no combination has both.
    outcome: Outcome  # `better` if any two values differ.
    widest: tuple[Pair, Estimate] | None  # The values with the largest difference; None if no two can be compared.


def is_same(first: object, second: object) -> bool:
    """Returns whether two values are equal in value and type: 1 is neither true nor 1.0."""
    return repr(first) == repr(second)


def levels_of(combinations: Sequence[Combination], references: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of every key that acts anywhere and has two or more, its reference first."""
    levels: dict[str, list[Any]] = {}
    for key, reference in references.items():
        # Each value once, in the order of first appearance.
        acting = [combination.values[key] for combination in combinations if key in combination.acting]
        values = {repr(value): value for value in acting}
        if len(values) > 1:
            levels[key] = sorted(values.values(), key=lambda value: not is_same(value, reference))
    return levels


def contrasts(
    combinations: Sequence[Combination], levels: Mapping[str, Sequence[Any]]
) -> dict[Pair, dict[RunKey, float]]:
    """Returns the log ratios of the rates of every pair of values of every key, one for each repeat."""
    ratios: dict[Pair, dict[RunKey, float]] = {}
    for key, values in levels.items():
        for a, b in itertools.combinations(values, 2):
            ratios[key, a, b] = _contrast(combinations, key, b, a)
    return ratios


def _contrast(combinations: Sequence[Combination], key: str, top: Any, bottom: Any) -> dict[RunKey, float]:
    """Returns the mean log ratio of two values of a key over all combinations that ran with both, by repeat."""
    top_rates: dict[tuple[str, ...], Mapping[RunKey, float]] = {}
    bottom_rates: dict[tuple[str, ...], Mapping[RunKey, float]] = {}
    for combination in combinations:
        if key not in combination.acting:
            continue
        if is_same(combination.values[key], top):
            top_rates[combination.other_values(key)] = combination.rates
        elif is_same(combination.values[key], bottom):
            bottom_rates[combination.other_values(key)] = combination.rates
    logs: dict[RunKey, list[float]] = {}
    for other_values in top_rates.keys() & bottom_rates.keys():
        for repeat, ratio in paired_logs(top_rates[other_values], bottom_rates[other_values]).items():
            logs.setdefault(repeat, []).append(ratio)
    # The mean of a repeat without some combination would be over other settings.
    full_count = max(map(len, logs.values()), default=0)
    return {
        repeat: math.fsum(ratios) / full_count for repeat, ratios in sorted(logs.items()) if len(ratios) == full_count
    }


def key_effect(key: str, values: Sequence[Any], verdicts: Mapping[Pair, Verdict | None]) -> KeyEffect:
    """Returns the effect of a key; `verdicts`: of each pair of its values, None where no combination ran with both."""
    known_verdicts = {pair: verdict for pair, verdict in verdicts.items() if verdict is not None}
    ratios = {pair: verdict.estimate for pair, verdict in known_verdicts.items() if verdict.estimate is not None}
    outcomes = {verdict.outcome for verdict in known_verdicts.values()}
    outcome: Outcome = "undecided"
    if not outcomes or "insufficient" in outcomes:
        outcome = "insufficient"
    elif outcomes & {"better", "worse"}:
        outcome = "better"
    elif len(known_verdicts) == len(verdicts) and outcomes == {"equal"}:
        outcome = "equal"
    count = max((ratio.n for ratio in ratios.values()), default=0)
    widest = max(ratios.items(), key=lambda item: abs(math.log(item[1].value)), default=None)
    others = (ratios.get((key, values[0], value)) for value in values[1:])
    return KeyEffect(
        key=key, values=values, effects=(by_definition(1.0, count), *others), outcome=outcome, widest=widest
    )
