"""One verdict for every comparison: what an estimate says of a margin, judged alone or as one of a family.

What an outcome is called depends on what was asked: `dlbench.stats.verdict_words`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.stats.estimates import MIN_RUNS, Estimate, mean_estimate, means_of, placed
from dlbench.stats.multiplicity import LEVEL, holm, paired_p
from dlbench.stats.pairing import RunKey

Outcome = Literal["better", "worse", "equal", "undecided", "insufficient"]
"""better, worse: a difference beyond chance. equal: the whole interval lies within the margin. undecided: neither.
insufficient: fewer than `MIN_RUNS` runs, or sessions where there are several, allow no verdict."""

Tone = Literal["good", "bad", "open"]
"""What a verdict is for the reader; the severities of marks and the colours of charts follow from it."""


@dataclass(frozen=True)
class Wording:
    """One outcome, or state, of a question."""

    word: str  # In JSON and CSV.
    tone: Tone = "open"
    text: str = ""  # In sentences; empty: the word.
    cell: str = ""  # In a narrow table; empty: as in sentences.

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
    """What the runs say to one question."""

    outcome: Outcome
    estimate: Estimate | None  # What was judged; None where a side has no run.
    margin: float  # Half the width of the region in which a difference does not matter, in the unit of the question.
    family_size: int = 1  # Comparisons that were judged together.
    adjusted_p: float | None = None  # Corrected over the family; None where no test was made.

    @property
    def is_difference(self) -> bool:
        """Whether there is one for certain."""
        return self.outcome in ("better", "worse")

    @property
    def units_wanted(self) -> int:
        """Returns the runs (or sessions) of each side that may decide: `MIN_RUNS`, or twice as many as were not
        enough.
        """
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

    A difference is claimed where the whole interval lies outside of the region or, where `none_at` gives the value of
    no difference at all, where it leaves out that value and `adjusted_p` is below `LEVEL`.
    """
    outcome: Outcome = "undecided"
    where = placed(estimate, centre - margin, centre + margin)
    claimed = where if none_at is None else placed(estimate, none_at, none_at)
    if where == "insufficient":
        outcome = "insufficient"
    elif where == "within":
        outcome = "equal"
    elif claimed in ("below", "above") and (adjusted_p is None or adjusted_p < LEVEL):
        outcome = "worse" if (claimed == "above") == higher_is_worse else "better"
    return Verdict(outcome=outcome, estimate=estimate, margin=margin, family_size=family_size, adjusted_p=adjusted_p)


def judge_tests(
    p_worse: float, p_better: float, levels: tuple[float, float], equivalence: tuple[float, float], edge: float
) -> Outcome:
    """Returns the outcome of two one-sided tests against their levels, and of the tests of equivalence.

    `levels`: what each p must not exceed. `equivalence`: the interval of a ratio by the tests of equivalence, which
    must lie between 1 / `edge` and `edge`; an edge of 1 asks for no equivalence.
    """
    if p_worse <= levels[0]:
        return "worse"
    if p_better <= levels[1]:
        return "better"
    low, high = equivalence
    return "equal" if edge > 1 and 1 / edge <= low and high <= edge else "undecided"


def ratio_of_logs(logs: Mapping[RunKey, float]) -> Estimate:
    """Returns the ratio of which these are the logarithms, over pairs of runs."""
    return mean_estimate(logs).mapped(math.exp, "ratio")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paired comparisons that are judged together by Holm's procedure, so that any false claim is one in twenty."""

    adjusted: Mapping[tuple[float, ...], float]
    size: int  # Comparisons, those too that have too few repeats as yet; what is the same twice over counts once.

    def adjusted_p(self, logs: Mapping[RunKey, float]) -> float:
        """Returns the adjusted p of a comparison; 1 where its repeats, or their sessions, are too few for a claim."""
        return self.adjusted.get(_identity(means_of(logs)), 1.0) if logs else 1.0

    def judge(self, logs: Mapping[RunKey, float], margin: float) -> Verdict | None:
        """Returns the verdict on the ratio of which these are the logarithms; None where there are none."""
        if not logs:
            return None
        p = self.adjusted_p(logs)
        return judge(ratio_of_logs(logs), margin, centre=1.0, none_at=1.0, adjusted_p=p, family_size=self.size)


def family_of(comparisons: Iterable[Mapping[RunKey, float]]) -> Family:
    """Returns the family of these comparisons, each the logarithms of the ratios of its pairs of runs."""
    every = {_identity(means): means for logs in comparisons if logs for means in [means_of(logs)]}
    judged = {key: means for key, means in every.items() if len(means) >= MIN_RUNS}
    adjusted = holm([paired_p(means) for means in judged.values()])
    return Family(adjusted=dict(zip(judged, adjusted, strict=True)), size=len(every))


def _identity(logs: Sequence[float]) -> tuple[float, ...]:
    """Returns the same key for a comparison and for its reverse."""
    sign = -1 if next((value for value in logs if value), 1.0) < 0 else 1
    return tuple(round(sign * value, 12) for value in logs)
