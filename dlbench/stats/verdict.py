"""The verdict on an estimate and a margin, alone or as one of a family; its words are in `verdict_words`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.stats.estimates import MIN_RUNS, Estimate, mean_estimate, means_of, placed
from dlbench.stats.multiplicity import LEVEL, holm, paired_p
from dlbench.stats.pairing import RunKey

Outcome = Literal["better", "worse", "equal", "undecided", "insufficient"]
"""better, worse: a difference beyond chance. equal: the whole interval is within the margin. undecided: neither.
insufficient: fewer than `MIN_RUNS` runs, or sessions if there are several, allow no verdict."""

Tone = Literal["good", "bad", "open"]
"""Whether a verdict is good news; it selects the severities of marks and the colours of charts."""


@dataclass(frozen=True)
class Wording:
    """The words of an outcome, or of another state, of a question."""

    word: str  # The word in JSON and CSV.
    tone: Tone = "open"
    text: str = ""  # Words in sentences; empty: `word`.
    cell: str = ""  # Words in a narrow table; empty: `text`, or `word`.

    @property
    def in_sentence(self) -> str:
        """Returns the words in a sentence."""
        return self.text or self.word

    @property
    def in_cell(self) -> str:
        """Returns the words in a narrow table."""
        return self.cell or self.in_sentence


Question = Mapping[str, Wording]
"""The words of each outcome of a question, and of states that allow no comparison."""


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
        """True if a difference is shown."""
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

    `equivalence`: the interval of a ratio by the tests of equivalence, which must be between 1 / `edge` and `edge`;
    with an edge of 1 there is no equivalence.
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
    """Returns the same key for a comparison and for its reverse."""
    first = next((value for value in logs if value), 1.0)
    sign = math.copysign(1, first)
    return tuple(round(sign * value, 12) for value in logs)
