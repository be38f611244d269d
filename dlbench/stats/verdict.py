"""The verdict on an estimate and a margin (its words are in `verdict_words`), and the effect of each swept key.

A verdict is alone or one of a family. For the effect of a key two of its values are compared over all combinations of
the other keys with both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlbench.stats.estimates import MIN_RUNS, Estimate, by_definition, mean_estimate, means_of, paired_logs, placed
from dlbench.stats.multiplicity import LEVEL, holm, paired_p
from dlbench.stats.pairing import RunKey

Outcome = Literal["better", "worse", "equal", "undecided", "insufficient"]
"""better, worse: a difference beyond chance. equal: the whole interval is within the margin. undecided: neither.
insufficient: fewer than `MIN_RUNS` runs, or sessions if there are several, allow no verdict."""

Tone = Literal["good", "bad", "open"]  # Selects the severities of marks and the colours of charts.
Pair = tuple[str, Any, Any]  # A key and two of its values; the effect is that of the second over the first.


@dataclass(frozen=True)
class Wording:
    """The words of an outcome, or of another state, of a question."""

    word: str  # The word in JSON and CSV.
    tone: Tone = "open"
    text: str = ""  # Words in sentences; empty: `word`.
    cell: str = ""  # Words in a narrow table; empty: `text`, or `word`.

    @property
    def in_sentence(self) -> str:
        return self.text or self.word

    @property
    def in_cell(self) -> str:
        return self.cell or self.in_sentence


Question = Mapping[str, Wording]  # The words of each outcome of a question, and of states that allow no comparison.


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of the runs to one question."""

    outcome: Outcome
    estimate: Estimate | None  # The judged estimate; None if a side has no run.
    margin: float  # Half the width of the region in which a difference does not matter, in the unit of the question.
    family_size: int = 1  # Comparisons that were judged together.
    adjusted_p: float | None = None  # p corrected over the family; None without a test.

    @property
    def is_difference(self) -> bool:
        return self.outcome in ("better", "worse")

    @property
    def units_wanted(self) -> int:
        """The runs (or sessions) per side that may decide: `MIN_RUNS`, or twice the number that did not suffice."""
        if self.outcome == "insufficient" or self.estimate is None:
            return MIN_RUNS
        return 2 * max(MIN_RUNS, self.estimate.units)


def judge(
    estimate: Estimate,
    margin: float,
    *,
    centre: float = 0.0,
    none_at: float | None = None,
    adjusted_p: float | None = None,
    family_size: int = 1,
    higher_is_worse: bool = False,
) -> Verdict:
    """Returns the verdict of an interval against the region `centre` +- `margin`.

    A difference is claimed if the whole interval is outside of the region or, if `none_at` gives the value of no
    difference, if the interval excludes that value and `adjusted_p` is below `LEVEL`.
    """
    outcome: Outcome = "undecided"
    position = placed(estimate, centre - margin, centre + margin)
    difference = position
    if none_at is not None:
        difference = placed(estimate, none_at, none_at)
    if position == "insufficient":
        outcome = "insufficient"
    elif position == "within":
        outcome = "equal"
    elif difference in ("below", "above") and (adjusted_p is None or adjusted_p < LEVEL):
        outcome = "worse" if (difference == "above") == higher_is_worse else "better"
    return Verdict(outcome=outcome, estimate=estimate, margin=margin, family_size=family_size, adjusted_p=adjusted_p)


def judge_tests(
    p_worse: float, p_better: float, levels: tuple[float, float], equivalence: tuple[float, float], edge: float
) -> Outcome:
    """Returns the outcome of two one-sided tests at their `levels`, and of the tests of equivalence.

    `equivalence`: interval of the ratio, equal if between 1 / `edge` and `edge`; an edge of 1 has no equivalence.
    """
    if p_worse <= levels[0]:
        return "worse"
    if p_better <= levels[1]:
        return "better"
    low, high = equivalence
    if edge > 1 and 1 / edge <= low and high <= edge:
        return "equal"
    return "undecided"


def ratio_of_logs(logs: Mapping[RunKey, float]) -> Estimate:
    """Returns the ratio over pairs of runs from the logarithms of their ratios."""
    return mean_estimate(logs).mapped(math.exp, "ratio")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paired comparisons that are judged together by Holm's procedure: at most 5 % of families have a false claim."""

    adjusted: Mapping[tuple[float, ...], float]  # Adjusted p by the identity of a comparison.
    size: int  # Number of different comparisons, including those with too few repeats.

    def adjusted_p(self, logs: Mapping[RunKey, float]) -> float:
        """Returns the adjusted p of a comparison; 1 where its repeats, or their sessions, are too few for a claim."""
        return self.adjusted.get(_identity(means_of(logs)), 1.0) if logs else 1.0

    def judge(self, logs: Mapping[RunKey, float], margin: float) -> Verdict | None:
        """Returns the verdict on a ratio from the logarithms of its pairs of runs; None without pairs."""
        if not logs:
            return None
        p = self.adjusted_p(logs)
        return judge(ratio_of_logs(logs), margin, centre=1.0, none_at=1.0, adjusted_p=p, family_size=self.size)


def family_of(comparisons: Iterable[Mapping[RunKey, float]]) -> Family:
    """Returns the family of these comparisons, each the logarithms of the ratios of its pairs of runs."""
    unit_logs = [means_of(logs) for logs in comparisons if logs]
    different = {_identity(means): means for means in unit_logs}
    judged = {identity: means for identity, means in different.items() if len(means) >= MIN_RUNS}
    adjusted = holm([paired_p(means) for means in judged.values()])
    return Family(adjusted=dict(zip(judged, adjusted, strict=True)), size=len(different))


def _identity(logs: Sequence[float]) -> tuple[float, ...]:
    first = next((value for value in logs if value), 1.0)
    sign = math.copysign(1, first)
    return tuple(round(sign * value, 12) for value in logs)


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
