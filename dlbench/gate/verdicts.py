"""Runs of two sides become a verdict: regressed, improved, equivalent, inconclusive or insufficient; those of one side
against a floor: missed, met, inconclusive or insufficient.

One test decides, and all figures are of it: with the logarithm d of B / A, its standard error s and f degrees of
freedom, p of "no worse than tolerated" is P(t_f > (d - log(1 + tolerance)) / s), the interval is d +- t_f s, and the
smallest slowdown that is found comes of the non-central t. So p is at most a level where, and only where, the interval
at that level lies beyond the tolerance. The tolerance is the null hypothesis: a smaller slowdown is a false alarm like
any other (non-inferiority: Wellek, Testing Statistical Hypotheses of Equivalence, 2010, section 2.2).

Logarithms, because times differ by factors. Student's t and no permutation of the units: with equal code of the same
noise both fail at most as often as they may (outliers, stalls, long tails, one-sided noise, two states, 5 to 20 units),
t has an interval and a power in closed form, and with five or six pairs no permutation attains 1 %.

Where a side has too few sessions of its own, the scatter between those of the other side, and of a history, stands for
it: Student's test with a pooled variance, for one new session against k earlier ones a standard error of
s sqrt(1 + 1/k) (Crawford and Howell, The Clinical Neuropsychologist 12, 1998).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, harmonic_mean, stdev, variance
from typing import Literal

from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, ratio_estimate
from dlbench.stats.multiplicity import POWER, ROUNDING, student_quantile, student_tail, welch_error
from dlbench.stats.pairing import KnownKey
from dlbench.stats.verdict import Question, Verdict, judge_tests
from dlbench.stats.verdict_words import FLOOR, GATE, GATE_ORDER

Unit = Literal["pair", "run", "session"]

MAX_REPEATS = 1000  # More are not looked for.

_WITHIN = "the 90 % interval of the ratio lies within the tolerance"
_REASONS: Mapping[str, str] = {
    "worse": "worse by more than the tolerance, beyond chance",
    "better": "better by more than the tolerance, beyond chance",
    "equal": _WITHIN,
    "equal but changed": f"{_WITHIN} and leaves out 1: a small change is likely",
    "undecided": "neither a change nor its absence is shown: too noisy for so few runs",
    "undecided but changed": "likely changed, but not shown to be within the tolerance or beyond it",
}
"""By outcome; changed: the 90 % interval leaves out 1."""
_FLOOR_REASONS: Mapping[str, str] = {
    "worse": "below the floor, beyond chance",
    "better": "above the floor, beyond chance",
    "undecided": "the floor lies within the interval: more runs narrow it",
}


@dataclass(frozen=True, kw_only=True)
class MetricSample:
    """One metric at one point: a value for each run, larger is worse."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    paired: bool  # Whether equal places are pairs of interleaved runs.
    sessions_a: tuple[str, ...] | None = None  # Session of each run of A; None: each run is one of its own.
    sessions_b: tuple[str, ...] | None = None
    together: bool = False  # Whether one job or one command ran both sides.
    history: tuple[tuple[float, ...], ...] = ()  # Values of further sessions, which only show how far sessions scatter.
    floor: float | None = None  # In place of side A: what B is held against; larger values of B miss it.

    @property
    def fewest(self) -> int:
        """Runs of the side that has fewer."""
        return len(self.b) if self.floor is not None else min(len(self.a), len(self.b))

    @property
    def has_runs(self) -> bool:
        return self.fewest >= MIN_RUNS

    @property
    def sides(self) -> list[tuple[tuple[float, ...], Sequence[str]]]:
        """Values and sessions of the runs of A, and of B."""
        return [
            (values, [f"{side} {i}" for i in range(len(values))] if names is None else names)
            for side, values, names in (("a", self.a, self.sessions_a), ("b", self.b, self.sessions_b))
        ]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The units of both sides, as logarithms, and what their difference is."""

    unit: Unit
    a: tuple[float, ...]  # Mean logarithm of each unit; where paired, equal places are pairs.
    b: tuple[float, ...]
    scatter: float  # Standard deviation over units of these logarithms; of pairs, of their differences.
    error: float  # Standard error of the difference of the means.
    freedom: float  # Degrees of freedom of it.
    is_borrowed: bool = False  # Whether a side has too few units of its own, so that others' scatter stands for it.
    is_of_floor: bool = False  # Whether `a` is no side but the floor.

    @property
    def shift(self) -> float:
        """Mean logarithm of B / A."""
        return fmean(self.b) - fmean(self.a)

    @property
    def test(self) -> str:
        if self.is_borrowed:
            return (
                f"Student's t test on sessions ({self.freedom:g} degrees of freedom: the scatter of all sessions "
                "stands for that of a side with fewer than five)"
            )
        if self.is_of_floor:
            return f"Student's t test of {len(self.b)} {self.unit}s against the floor"
        if self.unit == "pair":
            return f"Student's paired t test of {len(self.a)} pairs"
        return f"Welch's t test of {len(self.a)} and {len(self.b)} {self.unit}s"

    def p_values(self, margin: float) -> tuple[float, float]:
        """One-sided p of a B that is worse, and better, by this margin (a logarithm) and no more."""
        worse, better = (student_tail((sign * self.shift - margin) / self.error, self.freedom) for sign in (1, -1))
        return worse, better

    def ends(self, below: float, above: float) -> tuple[float, float]:
        """Ends of the ratio B / A that leave these chances of a true ratio below and above."""
        low, high = (student_quantile(1 - tail, self.freedom) * self.error for tail in (below, above))
        return math.exp(self.shift - low), math.exp(self.shift + high)

    def detectable(self, level: float, margin: float) -> float:
        """The smallest slowdown beyond a margin that is found with `POWER` if the scatter seen is the true one."""
        return math.expm1(margin + _found(level, self.freedom) * self.error)

    def repeats(self, level: float, beyond: float) -> int | None:
        """Fewest units of each side that find a slowdown so far (a logarithm) beyond the margin; None: `MAX_REPEATS`
        do not, or it is tolerated.
        """
        # Pairs, and runs against a floor, have one scatter.
        sides = 1 if self.unit == "pair" or self.is_of_floor else 2

        def suffices(count: int) -> bool:
            # Of equal scatter Welch's degrees of freedom are one below Student's 2n - 2 on average.
            freedom = sides * (count - 1) - (sides - 1)
            return _found(level, freedom) * self.scatter * math.sqrt(sides / count) <= beyond

        if beyond <= 0 or not suffices(MAX_REPEATS):
            return None
        return bisect_left(range(MAX_REPEATS), True, lo=MIN_RUNS, key=suffices)


@lru_cache(maxsize=4096)
def _found(level: float, freedom: float) -> float:
    """The difference, in standard errors, that a one-sided t test finds with `POWER` (Cohen, Statistical Power
    Analysis, 1988, chapter 12).
    """
    from scipy.special import nctdtrinc

    return float(nctdtrinc(freedom, 1 - POWER, student_quantile(1 - level, freedom)))


def evidence_of(sample: MetricSample) -> Evidence | None:
    """What can be tested; None where nothing says how far sessions scatter."""
    if sample.fewest < 2:
        raise ValueError(f"a test needs two runs per side, got {len(sample.a)} and {len(sample.b)}")
    if sample.floor is not None:
        return _against(sample.floor, *sample.sides[1])
    if sample.paired:
        a, b = _logs(sample.a), _logs(sample.b)
        scatter = max(stdev(y - x for x, y in zip(a, b, strict=True)), ROUNDING)
        return Evidence(unit="pair", a=a, b=b, scatter=scatter, error=scatter / math.sqrt(len(a)), freedom=len(a) - 1)
    if sample.together:
        return _apart(_logs(sample.a), _logs(sample.b), "run")
    sides = [list(_by_session(values, names).values()) for values, names in sample.sides]
    if min(map(len, sides)) >= MIN_SESSIONS:
        return _apart(tuple(map(fmean, sides[0])), tuple(map(fmean, sides[1])), "session")
    groups = [*sides, [_logs(values) for values in sample.history]]
    if max(map(len, groups)) < MIN_SESSIONS:
        return None
    return _borrowed(groups)


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(math.log, values))


def _by_session(values: Sequence[float], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for value, name in zip(values, names, strict=True):
        found.setdefault(name, []).append(math.log(value))
    return {name: tuple(logs) for name, logs in found.items()}


def _against(floor: float, values: tuple[float, ...], names: Sequence[str]) -> Evidence | None:
    """Returns None where `values` are of several sessions, and these are too few."""
    sessions = _by_session(values, names)
    b = _logs(values) if len(sessions) == 1 else tuple(map(fmean, sessions.values()))
    if len(b) < MIN_SESSIONS:
        return None
    scatter = max(stdev(b), ROUNDING)
    return Evidence(
        unit="run" if len(sessions) == 1 else "session",
        a=(math.log(floor),),
        b=b,
        scatter=scatter,
        error=scatter / math.sqrt(len(b)),
        freedom=len(b) - 1,
        is_of_floor=True,
    )


def _apart(a: tuple[float, ...], b: tuple[float, ...], unit: Unit) -> Evidence:
    error, freedom = welch_error(a, b)
    pooled = sum((len(side) - 1) * max(variance(side), ROUNDING**2) for side in (a, b))
    scatter = math.sqrt(pooled / (len(a) + len(b) - 2))
    return Evidence(unit=unit, a=a, b=b, scatter=scatter, error=float(error), freedom=float(freedom))


def _borrowed(groups: Sequence[Sequence[tuple[float, ...]]]) -> Evidence:
    """Student's pooled variance between sessions; a side of smaller sessions has more of the scatter within them."""
    means = [tuple(map(fmean, group)) for group in groups]
    telling = [(group, values) for group, values in zip(groups, means, strict=True) if len(values) > 1]
    freedom = sum(len(values) - 1 for _, values in telling)
    between = max(sum((len(values) - 1) * variance(values) for _, values in telling) / freedom, ROUNDING**2)
    # Pooled variance of runs within their sessions; 0 where every session is one run.
    several = [session for group in groups for session in group if len(session) > 1]
    inner = sum(len(session) - 1 for session in several)
    within = sum((len(session) - 1) * variance(session) for session in several) / inner if inner else 0.0
    usual = harmonic_mean([len(session) for group, _ in telling for session in group])
    square = sum(
        (between + within * max(0.0, 1 / harmonic_mean(list(map(len, group))) - 1 / usual)) / len(group)
        for group in groups[:2]
    )
    return Evidence(
        unit="session",
        a=means[0],
        b=means[1],
        scatter=math.sqrt(between),
        error=math.sqrt(square),
        freedom=freedom,
        is_borrowed=True,
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as a change."""

    tolerance: float = 0.02  # B may be slower by this fraction.
    level: float = 0.01
    """Chance that any comparison of a command is called regressed though B is not slower than tolerated; likewise for
    improved."""
    wanted: float = 0.03  # The slowdown for which the number of repeats is reported (fraction); with floors below 1.


@dataclass(frozen=True, kw_only=True)
class TTest:
    """What the test of one comparison says."""

    method: str
    p_worse: float  # Chance of a B that looks as much worse as this or more, if it is worse by just the tolerance.
    p_better: float
    level_worse: float  # What `p_worse` must not exceed: what Holm's correction over the family leaves it.
    level_better: float
    equivalence: tuple[float, float]  # 90 % interval of the ratio.
    unit: Unit
    scatter: float  # Standard deviation over units of one side's logarithms; where paired, of the ratios' logarithms.
    detectable: float  # Smallest slowdown, or shortfall below a floor, that is found with 80 % probability (fraction).
    wanted: float  # The slowdown, or shortfall, that is asked for (fraction).
    repeats: int | None  # Units of each side that show it with 80 % probability; None: not with 1,000, or tolerated.


@dataclass(frozen=True, kw_only=True)
class Judgement(Verdict):
    """The verdict on one metric of both sides. It is on B / A of geometric means, above 1 is worse; where a test was
    made, over units, and its interval is the one that decides: regressed where it lies above the tolerance, improved
    where it lies below.
    """

    question: Question
    reason: str  # Why, in a sentence without its full stop.
    tested: TTest | None
    awaits_reference: bool = False
    """Whether nothing is wrong with B, and the reference is not there yet: A has fewer than five runs, or there are too
    few sessions."""

    @property
    def verdict(self) -> str:
        """Returns its word in JSON."""
        return self.question[self.outcome].word


def judge(samples: Sequence[MetricSample], rule: Rule) -> list[Judgement]:
    """Verdicts of one family of comparisons, in the order given; `dlbench.gate.report.methods` says how they are made.

    Equivalence needs no correction: that all comparisons of a family are called equivalent though one is not is at
    most as likely as that one is (intersection-union: Berger, Technometrics 24, 1982).

    Floors are of the same family: missed as regressed, met as improved, without tolerance.
    """
    evidence = [evidence_of(sample) if sample.has_runs else None for sample in samples]
    tests = [one for one in evidence if one is not None]
    margins = [0.0 if one.is_of_floor else math.log1p(rule.tolerance) for one in tests]
    p_values = [one.p_values(margin) for one, margin in zip(tests, margins, strict=True)]
    worse, better = zip(*p_values, strict=True) if tests else ((), ())
    levels = zip(_levels(worse, rule.level), _levels(better, rule.level), strict=True)
    tested = zip(tests, margins, p_values, levels, strict=True)
    judged = (_judged(*one, rule, family_size=len(tests)) for one in tested)
    return [
        _untested(sample, rule) if one is None else next(judged) for sample, one in zip(samples, evidence, strict=True)
    ]


def _levels(p_values: Sequence[float], level: float) -> list[float]:
    """Returns the level of each comparison of a family by Holm's procedure: all are held against that of the first
    that does not reject.
    """
    found = [0.0] * len(p_values)
    rejected = 0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        found[place] = level / (len(p_values) - rejected)
        rejected += rejected == rank and p_values[place] <= found[place]
    return found


def _judged(
    evidence: Evidence, margin: float, p: tuple[float, float], level: tuple[float, float], rule: Rule, family_size: int
) -> Judgement:
    n = len(evidence.b) if evidence.is_of_floor else min(len(evidence.a), len(evidence.b))
    low, high = evidence.ends(*level)
    strictest = rule.level / family_size
    # A throughput that is short by a share has steps that are longer by more.
    wanted = -math.log1p(-rule.wanted) if evidence.is_of_floor else math.log1p(rule.wanted) - margin
    equivalence = evidence.ends(0.05, 0.05)
    outcome = judge_tests(*p, level, equivalence, 1.0 if evidence.is_of_floor else 1 + rule.tolerance)
    is_changed = equivalence[0] > 1 or equivalence[1] < 1
    changed = f"{outcome} but changed" if is_changed else outcome
    reasons = _FLOOR_REASONS if evidence.is_of_floor else _REASONS
    return Judgement(
        outcome=outcome,
        question=FLOOR if evidence.is_of_floor else GATE,
        reason=reasons.get(changed, reasons[outcome]),
        estimate=Estimate(math.exp(evidence.shift), low, high, n, "Student t", "ratio", level=1 - sum(level)),
        margin=0.0 if evidence.is_of_floor else rule.tolerance,
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
    reason = _few_sessions(sample)
    if not sample.has_runs:
        unit, count = ("pairs" if sample.paired else "runs per side"), f"{len(sample.a)} and {len(sample.b)}"
        if is_floor:
            unit = "runs"
        if is_floor or sample.paired:
            count = f"{len(sample.b)}"
        reason = f"{count} of the {MIN_RUNS} {unit} that a verdict needs"
    return Judgement(
        outcome="undecided" if sample.has_runs else "insufficient",
        question=FLOOR if is_floor else GATE,
        reason=reason,
        estimate=_ratio_of_runs(sample) if sample.fewest > 0 else None,
        margin=0.0 if is_floor else rule.tolerance,
        tested=None,
        awaits_reference=not is_floor and not sample.paired and len(sample.b) >= MIN_RUNS,
    )


def _few_sessions(sample: MetricSample) -> str:
    a, b = (len(set(names)) for _, names in sample.sides)
    if sample.floor is not None:
        return (
            f"{b} sessions: fewer than {MIN_SESSIONS} do not show how far they scatter; choose the runs of one "
            "(--where-candidate series=NAME)"
        )
    held = "one session a side" if a == b == 1 else f"{a} and {b} sessions"
    return (
        f"{held}: drift between sessions counts as a difference; interleave (--ab), or give a baseline or a history "
        f"of {MIN_SESSIONS} sessions"
    )


def _ratio_of_runs(sample: MetricSample) -> Estimate:
    if (floor := sample.floor) is not None:
        keys = (KnownKey.of("", i, session) for i, session in enumerate(sample.sides[1][1]))
        return geometric_mean_estimate(dict(zip(keys, sample.b, strict=True))).mapped(lambda one: one / floor, "ratio")
    names = ("pair", "pair") if sample.paired else ("a", "b")
    a, b = (
        {KnownKey.of(name, i, session): value for i, (value, session) in enumerate(zip(side, sessions, strict=True))}
        for name, (side, sessions) in zip(names, sample.sides, strict=True)
    )
    return ratio_estimate(b, a)


def overall(verdicts: Iterable[str]) -> str:
    """Returns one verdict of many, all by their words: the first of `GATE_ORDER` that is there."""
    return min(verdicts, key=GATE_ORDER.index, default="insufficient")
