"""Tests and verdicts of the gate, for two sides and for one side against a floor.

One test gives all figures: with the logarithm d of B / A, its standard error s and f degrees of freedom, p of "no worse
than tolerated" is P(t_f > (d - log(1 + tolerance)) / s), the interval is d +- t_f s, and the smallest slowdown that is
found follows from the non-central t. So p is at most a level if and only if the interval at that level is beyond the
tolerance, the null hypothesis (non-inferiority: Wellek, Testing Statistical Hypotheses of Equivalence, 2010, section
2.2).

Student's t instead of permutations: with equal noise both fail at most as often as they may (outliers, stalls, long
tails, one-sided noise, two states, 5 to 20 units), t has an interval and a power in closed form, and with five or six
pairs no permutation attains 1 %.

If a side has too few sessions, the scatter between the sessions of the other side and of a history is used: Student's
test with a pooled variance, for one new session against k earlier ones a standard error of s sqrt(1 + 1/k) (Crawford
and Howell, The Clinical Neuropsychologist 12, 1998).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, harmonic_mean, stdev, variance
from typing import Literal

from dlbench.analysis.repeats import MIN_SESSIONS
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, ratio_estimate
from dlbench.stats.multiplicity import POWER, ROUNDING, student_quantile, student_tail, welch_error
from dlbench.stats.pairing import KnownKey, RunKey
from dlbench.stats.verdict import Outcome, Question, Verdict, judge_tests
from dlbench.stats.verdict_words import FLOOR, GATE, GATE_ORDER

Unit = Literal["pair", "run", "session"]

MAX_REPEATS = 1000  # Upper limit of the search for the repeats that find a slowdown.

_WITHIN = "the 90 % interval of the ratio is within the tolerance"
_REASONS: Mapping[str, str] = {  # Reasons by outcome; changed: the 90 % interval excludes 1.
    "worse": "worse by more than the tolerance, beyond chance",
    "better": "better by more than the tolerance, beyond chance",
    "equal": _WITHIN,
    "equal but changed": f"{_WITHIN} and excludes 1: a small change is likely",
    "undecided": "neither a change nor its absence is shown: too noisy for this number of runs",
    "undecided but changed": "likely changed, but not shown to be within the tolerance or beyond it",
}
_FLOOR_REASONS: Mapping[str, str] = {
    "worse": "below the floor, beyond chance",
    "better": "above the floor, beyond chance",
    "undecided": "the floor is within the interval: more runs narrow it",
}


@dataclass(frozen=True, kw_only=True)
class MetricSample:
    """The values of a metric at one point, one for each run; larger is worse."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    paired: bool  # Whether `a` and `b` are pairs of interleaved runs, in equal order.
    sessions_a: tuple[str, ...] | None = None  # Session of each run of A; None: each run is a session.
    sessions_b: tuple[str, ...] | None = None
    together: bool = False  # Whether one job or one command ran both sides.
    history: tuple[tuple[float, ...], ...] = ()  # Values of further sessions, which only show how far sessions scatter.
    floor: float | None = None  # The limit that replaces side A; larger values of B miss it.

    @property
    def fewest(self) -> int:
        """The number of runs of the side that has fewer."""
        return len(self.b) if self.floor is not None else min(len(self.a), len(self.b))

    @property
    def has_runs(self) -> bool:
        return self.fewest >= MIN_RUNS

    @property
    def session_names_a(self) -> Sequence[str]:
        return self.sessions_a or [f"a {i}" for i in range(len(self.a))]

    @property
    def session_names_b(self) -> Sequence[str]:
        return self.sessions_b or [f"b {i}" for i in range(len(self.b))]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The units of both sides as logarithms, and the error of the difference of their means."""

    unit: Unit
    a: tuple[float, ...]  # Mean logarithm of each unit of A; with pairs, in the order of `b`.
    b: tuple[float, ...]
    scatter: float  # Standard deviation over units of these logarithms; of pairs, of their differences.
    error: float  # Standard error of the difference of the means.
    freedom: float  # Degrees of freedom of the error.
    is_borrowed: bool = False  # Whether a side has too few sessions, so that the scatter of others is used.
    is_of_floor: bool = False  # Whether `a` is the floor.

    @property
    def shift(self) -> float:
        return fmean(self.b) - fmean(self.a)

    def margin(self, rule: Rule) -> float:
        """Returns the logarithm of the tolerated slowdown; a floor has no tolerance."""
        return 0.0 if self.is_of_floor else math.log1p(rule.tolerance)

    @property
    def test(self) -> str:
        if self.is_borrowed:
            return (
                f"Student's t test on sessions ({self.freedom:g} degrees of freedom: a side has fewer than five "
                "sessions, and the scatter of all sessions is used)"
            )
        if self.is_of_floor:
            return f"Student's t test of {len(self.b)} {self.unit}s against the floor"
        if self.unit == "pair":
            return f"Student's paired t test of {len(self.a)} pairs"
        return f"Welch's t test of {len(self.a)} and {len(self.b)} {self.unit}s"

    def p_values(self, margin: float) -> tuple[float, float]:
        """Returns the one-sided p of a B at most `margin` (a logarithm) worse, and of one at most `margin` better."""
        p_worse = student_tail((self.shift - margin) / self.error, self.freedom)
        p_better = student_tail((-self.shift - margin) / self.error, self.freedom)
        return p_worse, p_better

    def ends(self, below: float, above: float) -> tuple[float, float]:
        """Returns the interval of the ratio B / A that leaves these probabilities below and above it."""
        low = student_quantile(1 - below, self.freedom) * self.error
        high = student_quantile(1 - above, self.freedom) * self.error
        return math.exp(self.shift - low), math.exp(self.shift + high)

    def detectable(self, level: float, margin: float) -> float:
        """Returns the smallest slowdown beyond a margin that is found with `POWER`, if the measured scatter is true."""
        return math.expm1(margin + _detected_errors(level, self.freedom) * self.error)

    def repeats(self, level: float, beyond: float) -> int | None:
        """Returns the fewest units per side that find a slowdown `beyond` (a logarithm) the margin; None if none do."""
        # Pairs, and runs against a floor, have one scatter.
        sides = 1 if self.unit == "pair" or self.is_of_floor else 2

        def suffices(count: int) -> bool:
            # With equal scatter Welch's degrees of freedom are one below Student's 2n - 2 on average.
            freedom = sides * (count - 1) - (sides - 1)
            return _detected_errors(level, freedom) * self.scatter * math.sqrt(sides / count) <= beyond

        if beyond <= 0 or not suffices(MAX_REPEATS):
            return None
        return bisect_left(range(MAX_REPEATS), True, lo=MIN_RUNS, key=suffices)


@lru_cache(maxsize=4096)
def _detected_errors(level: float, freedom: float) -> float:
    """Returns the difference, in standard errors, that a t test finds with `POWER` (Cohen 1988, chapter 12)."""
    from scipy.special import nctdtrinc

    return float(nctdtrinc(freedom, 1 - POWER, student_quantile(1 - level, freedom)))


def evidence_of(sample: MetricSample) -> Evidence | None:
    """Returns the units of a test; None if there are too few sessions to know how far they scatter."""
    if sample.fewest < 2:
        raise ValueError(f"a test needs two runs per side, got {len(sample.a)} and {len(sample.b)}")
    if sample.floor is not None:
        return _against_floor(sample.floor, sample.b, sample.session_names_b)
    if sample.paired:
        a, b = _logs(sample.a), _logs(sample.b)
        scatter = max(stdev(y - x for x, y in zip(a, b, strict=True)), ROUNDING)
        return Evidence(unit="pair", a=a, b=b, scatter=scatter, error=scatter / math.sqrt(len(a)), freedom=len(a) - 1)
    if sample.together:
        return _independent(_logs(sample.a), _logs(sample.b), "run")
    sessions_a = _logs_by_session(sample.a, sample.session_names_a)
    sessions_b = _logs_by_session(sample.b, sample.session_names_b)
    if min(len(sessions_a), len(sessions_b)) >= MIN_SESSIONS:
        return _independent(tuple(map(fmean, sessions_a)), tuple(map(fmean, sessions_b)), "session")
    groups = [sessions_a, sessions_b, [_logs(values) for values in sample.history]]
    if max(map(len, groups)) < MIN_SESSIONS:
        return None
    return _with_borrowed_scatter(groups)


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(math.log, values))


def _logs_by_session(values: Sequence[float], session_names: Sequence[str]) -> list[tuple[float, ...]]:
    logs_by_session: dict[str, list[float]] = {}
    for value, name in zip(values, session_names, strict=True):
        logs_by_session.setdefault(name, []).append(math.log(value))
    return list(map(tuple, logs_by_session.values()))


def _against_floor(floor: float, values: tuple[float, ...], session_names: Sequence[str]) -> Evidence | None:
    """Returns None if the values are of several sessions that are too few for a test."""
    unit: Unit = "run"
    b = _logs(values)
    if len(set(session_names)) > 1:
        unit = "session"
        b = tuple(map(fmean, _logs_by_session(values, session_names)))
    if len(b) < MIN_SESSIONS:
        return None
    scatter = max(stdev(b), ROUNDING)
    return Evidence(
        unit=unit,
        a=(math.log(floor),),
        b=b,
        scatter=scatter,
        error=scatter / math.sqrt(len(b)),
        freedom=len(b) - 1,
        is_of_floor=True,
    )


def _independent(a: tuple[float, ...], b: tuple[float, ...], unit: Unit) -> Evidence:
    error, freedom = welch_error(a, b)
    pooled = sum((len(side) - 1) * max(variance(side), ROUNDING**2) for side in (a, b))
    scatter = math.sqrt(pooled / (len(a) + len(b) - 2))
    return Evidence(unit=unit, a=a, b=b, scatter=scatter, error=float(error), freedom=float(freedom))


def _with_borrowed_scatter(groups: Sequence[Sequence[tuple[float, ...]]]) -> Evidence:
    """Returns the evidence with Student's pooled variance between sessions, for `groups` of A, B and the history.

    A side with fewer runs per session has more of the variance within sessions in its session means.
    """
    means_by_group = [tuple(map(fmean, group)) for group in groups]
    repeated_means = [means for means in means_by_group if len(means) > 1]
    freedom = sum(len(means) - 1 for means in repeated_means)
    between = max(sum((len(means) - 1) * variance(means) for means in repeated_means) / freedom, ROUNDING**2)
    # Pooled variance of runs within their sessions; 0 if every session is one run.
    repeated_sessions = [session for session in itertools.chain.from_iterable(groups) if len(session) > 1]
    within = 0.0
    if repeated_sessions:
        within_freedom = sum(len(session) - 1 for session in repeated_sessions)
        within = sum((len(session) - 1) * variance(session) for session in repeated_sessions) / within_freedom
    repeated_groups = [group for group in groups if len(group) > 1]
    usual_runs = harmonic_mean(list(map(len, itertools.chain.from_iterable(repeated_groups))))
    squared_error = sum(
        (between + within * max(0.0, 1 / harmonic_mean(list(map(len, group))) - 1 / usual_runs)) / len(group)
        for group in groups[:2]
    )
    return Evidence(
        unit="session",
        a=means_by_group[0],
        b=means_by_group[1],
        scatter=math.sqrt(between),
        error=math.sqrt(squared_error),
        freedom=freedom,
        is_borrowed=True,
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The thresholds of a comparison."""

    tolerance: float = 0.02  # B may be slower by this fraction.
    level: float = 0.01  # Probability that any comparison is wrongly called regressed; also for improved.
    wanted: float = 0.03  # The slowdown for which the number of repeats is reported (fraction); with floors below 1.


@dataclass(frozen=True, kw_only=True)
class TTest:
    """The test of one comparison."""

    method: str
    p_worse: float  # Probability to measure a B at least this much worse if it is worse by just the tolerance.
    p_better: float
    level_worse: float  # Level of `p_worse` after Holm's correction over the family.
    level_better: float
    equivalence: tuple[float, float]  # 90 % interval of the ratio.
    unit: Unit
    scatter: float  # Standard deviation over units of the logarithms of one side; of pairs, of the ratios.
    detectable: float  # Smallest slowdown, or shortfall below a floor, that is found with 80 % probability (fraction).
    wanted: float  # The slowdown, or shortfall, of `--detect` (fraction).
    repeats: int | None  # Units of each side that find `wanted` with 80 % probability; None: over 1,000, or tolerated.


@dataclass(frozen=True, kw_only=True)
class Judgement(Verdict):
    """The verdict on one metric; the estimate is B / A, above 1 is worse (`dlbench.gate.report.MetricResult.ratio`)."""

    question: Question
    reason: str  # Reason for the outcome, a sentence without full stop.
    tested: TTest | None
    reference_incomplete: bool = False  # Whether B has runs enough and only the reference lacks runs or sessions.

    @property
    def verdict(self) -> str:
        return self.question[self.outcome].word


def judge(samples: Sequence[MetricSample], rule: Rule) -> list[Judgement]:
    """Returns the verdicts of one family of comparisons, in the order given; for methods see `gate.report.methods`.

    Equivalence needs no correction: the probability that all comparisons of a family are called equivalent though one
    is not is at most that of a single comparison (intersection-union: Berger, Technometrics 24, 1982). Floors belong to
    the same family: missed as regressed, met as improved, without tolerance.
    """
    family: list[Evidence] = []
    has_test: list[bool] = []
    for sample in samples:
        evidence = evidence_of(sample) if sample.has_runs else None
        has_test.append(evidence is not None)
        if evidence is not None:
            family.append(evidence)
    p_values = [evidence.p_values(evidence.margin(rule)) for evidence in family]
    levels_worse = _holm_levels([p_worse for p_worse, _ in p_values], rule.level)
    levels_better = _holm_levels([p_better for _, p_better in p_values], rule.level)
    tested = (
        _judged(evidence, p, (level_worse, level_better), rule, family_size=len(family))
        for evidence, p, level_worse, level_better in zip(family, p_values, levels_worse, levels_better, strict=True)
    )
    judgements = []
    for sample, is_tested in zip(samples, has_test, strict=True):
        judgements.append(next(tested) if is_tested else _untested(sample, rule))
    return judgements


def _holm_levels(p_values: Sequence[float], level: float) -> list[float]:
    """Returns the levels by Holm's procedure; from the first comparison that does not reject on, all have its level."""
    levels = [0.0] * len(p_values)
    num_rejected = 0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[index] = level / (len(p_values) - num_rejected)
        if num_rejected == rank and p_values[index] <= levels[index]:
            num_rejected += 1
    return levels


def _judged(
    evidence: Evidence, p: tuple[float, float], level: tuple[float, float], rule: Rule, family_size: int
) -> Judgement:
    """Returns the judgement of a test; `p` and `level` are those of worse and of better."""
    margin = evidence.margin(rule)
    low, high = evidence.ends(*level)
    strictest = rule.level / family_size
    equivalence = evidence.ends(0.05, 0.05)
    is_changed = equivalence[0] > 1 or equivalence[1] < 1
    if evidence.is_of_floor:
        question, reasons, tolerance, n = FLOOR, _FLOOR_REASONS, 0.0, len(evidence.b)
        # A throughput that is short by a fraction has steps that are longer by a larger fraction.
        wanted = -math.log1p(-rule.wanted)
    else:
        question, reasons, tolerance = GATE, _REASONS, rule.tolerance
        n = min(len(evidence.a), len(evidence.b))
        wanted = math.log1p(rule.wanted) - margin
    outcome = judge_tests(*p, level, equivalence, 1 + tolerance)
    reason = reasons[outcome]
    if is_changed:
        reason = reasons.get(f"{outcome} but changed", reason)
    return Judgement(
        outcome=outcome,
        question=question,
        reason=reason,
        estimate=Estimate(math.exp(evidence.shift), low, high, n, "Student t", "ratio", level=1 - sum(level)),
        margin=tolerance,
        family_size=family_size,
        tested=TTest(
            method=evidence.test,
            p_worse=p[0],
            p_better=p[1],
            level_worse=level[0],
            level_better=level[1],
            equivalence=equivalence,
            unit=evidence.unit,
            scatter=evidence.scatter,
            detectable=evidence.detectable(strictest, margin),
            wanted=rule.wanted,
            repeats=evidence.repeats(strictest, wanted),
        ),
    )


def _untested(sample: MetricSample, rule: Rule) -> Judgement:
    is_floor = sample.floor is not None
    outcome: Outcome = "undecided"
    reason = _few_sessions(sample)
    if not sample.has_runs:
        outcome = "insufficient"
        reason = f"{_few_runs(sample)} that a verdict needs"
    ratio = _ratio_of_runs(sample) if sample.fewest > 0 else None
    return Judgement(
        outcome=outcome,
        question=FLOOR if is_floor else GATE,
        reason=reason,
        estimate=ratio,
        margin=0.0 if is_floor else rule.tolerance,
        tested=None,
        reference_incomplete=not is_floor and not sample.paired and len(sample.b) >= MIN_RUNS,
    )


def _few_runs(sample: MetricSample) -> str:
    if sample.floor is not None:
        return f"{len(sample.b)} of the {MIN_RUNS} runs"
    if sample.paired:
        return f"{len(sample.b)} of the {MIN_RUNS} pairs"
    return f"{len(sample.a)} and {len(sample.b)} of the {MIN_RUNS} runs per side"


def _few_sessions(sample: MetricSample) -> str:
    num_a, num_b = len(set(sample.session_names_a)), len(set(sample.session_names_b))
    if sample.floor is not None:
        return (
            f"{num_b} sessions: fewer than {MIN_SESSIONS} do not show how far sessions scatter; choose the runs of one "
            "session (--where-candidate series=NAME)"
        )
    sessions = f"{num_a} and {num_b} sessions"
    if num_a == num_b == 1:
        sessions = "one session per side"
    return (
        f"{sessions}: drift between sessions counts as a difference; interleave the runs (--ab), or give a baseline "
        f"or a history of {MIN_SESSIONS} sessions"
    )


def _ratio_of_runs(sample: MetricSample) -> Estimate:
    floor = sample.floor
    if floor is not None:
        return geometric_mean_estimate(_values_by_key(sample.b, "", sample.session_names_b)).mapped(
            lambda value: value / floor, "ratio"
        )
    # Equal blocks make pairs of equal repeats.
    block_a, block_b = "a", "b"
    if sample.paired:
        block_a = block_b = "pair"
    a = _values_by_key(sample.a, block_a, sample.session_names_a)
    b = _values_by_key(sample.b, block_b, sample.session_names_b)
    return ratio_estimate(b, a)


def _values_by_key(values: Sequence[float], block: str, session_names: Sequence[str]) -> dict[RunKey, float]:
    return {
        KnownKey.of(block, i, session): value
        for i, (value, session) in enumerate(zip(values, session_names, strict=True))
    }


def overall(verdicts: Iterable[str]) -> str:
    """Returns the verdict of `GATE_ORDER` that comes first among many."""
    return min(verdicts, key=GATE_ORDER.index, default="insufficient")
