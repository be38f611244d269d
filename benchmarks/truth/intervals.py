"""Coverage: how often do the intervals of dlbench hold the true value, by kind, noise and number of runs?

Noise of runs: lognormal; heavy-tailed (Student's t with three degrees of freedom); two equally likely states of the
machine, 10 % apart, with little scatter within each; and one-sided (exponential), which only ever slows a run. The
intervals are made by the functions that `dlbench.stats.estimates` calls, on many experiments at once; parts of a step,
sessions and single estimates by what the views call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.figures import Figure
from dlbench.analysis.attribution import attribute
from dlbench.stats.estimates import (
    LEVEL,
    MIN_RUNS,
    Estimate,
    difference_estimate,
    interval_of_difference,
    interval_of_mean,
    mean_estimate,
    median_estimate,
    places,
    range_level,
    rank_sum_level,
    rank_sums,
    ratio_estimate,
    shift_estimate,
)
from dlbench.stats.pairing import KnownKey, RunKey

Array = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Array]
Ends = tuple[Array, Array]
Experiments = Callable[[Noise, np.random.Generator, int, int], tuple[Ends, float]]

RUNS = range(3, 21)
TRIALS = 10_000
FEW_TRIALS = 400
"""Of what is made one experiment at a time."""
SLACK = 1.5
"""Points that coverage may lack of the level that is printed."""
OTHER_SIDE = 8
"""Runs of the other side where the sides are unequal."""


def lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Logarithms with a standard deviation of 3 %."""
    return 0.03 * rng.standard_normal(shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A run in a hundred is 9 % off or more."""
    return 0.02 * rng.standard_t(3, shape)


def two_states(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Half of the runs meet a machine that is 10 % slower."""
    return 0.05 * rng.choice([-1.0, 1.0], shape) + 0.003 * rng.standard_normal(shape)


def one_sided(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Delays of 3 % on average, about their mean."""
    return 0.03 * (rng.standard_exponential(shape) - 1)


NOISES: dict[str, Noise] = {
    "lognormal": lognormal,
    "heavy-tailed": heavy,
    "two states": two_states,
    "one-sided": one_sided,
}

SAID: dict[tuple[str, str], float] = {
    **{(kind, "two states"): 0.91 for kind in ("mean of runs", "ratio without pairs, a quiet other side")},
    **{(kind, "one-sided"): 0.87 for kind in ("mean of runs", "ratio without pairs, a quiet other side")},
}
"""What is said beside 95 % of intervals by Student's t of one side's noise (`intervals` of reports/methods.yaml)."""
ONE_SIDED_RANGE = 0.06
"""What the range of few values lacks of its level where noise is one-sided, as `docs/measuring.md` says."""


# Experiments at once: the ends of the interval of each, around a truth of 0, and the level that is printed


def _mean(noise: Noise, rng: np.random.Generator, n: int, trials: int) -> tuple[Ends, float]:
    values = noise(rng, (trials, n))
    if n < MIN_RUNS:
        return (values.min(axis=1), values.max(axis=1)), range_level(n)
    return interval_of_mean(values), LEVEL


def _median(noise: Noise, rng: np.random.Generator, n: int, trials: int) -> tuple[Ends, float]:
    ordered = np.sort(noise(rng, (trials, n)), axis=1)
    k, level = (1, range_level(n)) if n < MIN_RUNS else places(n)
    return (ordered[:, k - 1], ordered[:, n - k]), level


def _pairs(noise: Noise, rng: np.random.Generator, n: int, trials: int) -> tuple[Ends, float]:
    """Logarithms of ratios of pairs, each side with noise of its own: the mean of their differences."""
    return _mean(lambda rng, shape: noise(rng, shape) - noise(rng, shape), rng, n, trials)


def _apart(other: int | None = None, quiet: float = 1.0) -> Experiments:
    def made(noise: Noise, rng: np.random.Generator, n: int, trials: int) -> tuple[Ends, float]:
        a, b = noise(rng, (trials, n)), quiet * noise(rng, (trials, other or n))
        if n < MIN_RUNS:
            return (a.min(axis=1) - b.max(axis=1), a.max(axis=1) - b.min(axis=1)), range_level(min(n, other or n))
        return interval_of_difference(a, b), LEVEL

    return made


def _shift(noise: Noise, rng: np.random.Generator, n: int, trials: int) -> tuple[Ends, float]:
    a, b = noise(rng, (trials, n)), noise(rng, (trials, n))
    if n < MIN_RUNS:
        return (a.min(axis=1) - b.max(axis=1), a.max(axis=1) - b.min(axis=1)), range_level(n)
    return rank_sums(a, b, LEVEL), rank_sum_level(n, n, LEVEL)


KINDS: dict[str, Experiments] = {
    "median of runs": _median,
    "mean of runs": _mean,
    "ratio in pairs": _pairs,
    "ratio without pairs": _apart(),
    f"ratio without pairs, {OTHER_SIDE} runs on the other side": _apart(OTHER_SIDE),
    "ratio without pairs, a quiet other side": _apart(quiet=0.1),
    "shift of nights": _shift,
}


def attained(kind: str, noise: str, n: int, trials: int = TRIALS) -> tuple[int, float]:
    """In how many of so many experiments the interval held the truth, and the level that is told of it."""
    rng = np.random.default_rng([list(KINDS).index(kind), list(NOISES).index(noise), n])
    (low, high), level = KINDS[kind](NOISES[noise], rng, n, trials)
    if n >= MIN_RUNS:
        level = min(level, SAID.get((kind, noise), level))
    elif noise == "one-sided" and kind != "median of runs":
        level -= ONE_SIDED_RANGE
    truth = -0.03 * (1 - np.log(2)) if (kind, noise) == ("median of runs", "one-sided") else 0.0
    return int(np.count_nonzero((low <= truth) & (high >= truth))), level


# What views make of several parts, one experiment at a time


def _keyed(values: Array, block: str) -> dict[RunKey, float]:
    return {(block, repeat): float(value) for repeat, value in enumerate(values)}


def _part(noise: Noise, rng: np.random.Generator, n: int, block: str) -> tuple[Estimate, float]:
    """The share that a step of 100 ms loses to an exchange of 20 ms, each with noise of its own; and the truth."""
    own = {
        ("own", k): {"backward": 0.08 * (1 + x), "exchange": 0.02 * (1 + y)}
        for k, (x, y) in enumerate(noise(rng, (n, 2)))
    }
    base = {(block, k): {"backward": 0.08 * (1 + x), "exchange": 0.0} for k, x in enumerate(noise(rng, (n,)))}
    found = attribute(own, base, work=1.0, names=("backward", "exchange"))
    return found.parts[1].lost, 0.2


PARTS = {"lost points of a part": _part}
SOME_RUNS = (3, 5, 7, 10, 20)


# Figures


def figures() -> Iterator[Figure]:
    """For every kind of interval and noise the number of runs at which coverage lacks most of what is printed."""
    for kind in KINDS:
        for noise in NOISES:
            rows = [(n, *attained(kind, noise, n)) for n in RUNS]
            yield _worst(f"coverage, {kind}, {noise}", rows, TRIALS)
    for kind, made in PARTS.items():
        for pairs, block in (("in pairs", "own"), ("without pairs", "baseline")):
            for noise in ("lognormal", "heavy-tailed", "two states"):
                rows = [(n, *_one_by_one(made, noise, n, block)) for n in SOME_RUNS]
                yield _worst(f"coverage, {kind} {pairs}, {noise}", rows, FEW_TRIALS)
    yield agreement()
    yield from over_sessions()
    yield from _unseen()
    yield from _lost_runs()


def _one_by_one(
    made: Callable[[Noise, np.random.Generator, int, str], tuple[Estimate, float]], noise: str, n: int, block: str
) -> tuple[int, float]:
    rng = np.random.default_rng([len(block), list(NOISES).index(noise), n])
    hits, level = 0, 0.0
    for _ in range(FEW_TRIALS):
        found, truth = made(NOISES[noise], rng, n, block)
        assert found.low is not None
        assert found.high is not None
        assert found.level is not None
        hits, level = hits + (found.low <= truth <= found.high), found.level
    return hits, level


def _worst(name: str, rows: list[tuple[int, int, float]], trials: int) -> Figure:
    n, hits, level = min(rows, key=lambda row: row[1] / trials - row[2])
    chance = stats.binomtest(hits, trials).proportion_ci(method="exact")
    return Figure(
        name=name,
        value=100 * hits / trials,
        unit="% of experiments",
        low=100 * chance.low,
        high=100 * chance.high,
        n=trials,
        goal=f"at least the {100 * level:.4g} % told less {SLACK} points",
        # Of so many rows the worst is worse than it is; a row fails where its interval does.
        met=bool(100 * chance.high >= 100 * level - SLACK),
        reason=f"worst of {rows[0][0]} to {rows[-1][0]} runs: {n} runs",
    )


def agreement() -> Figure:
    """Experiments at once against the functions that the program calls, one by one."""
    rng = np.random.default_rng(7)
    worst = 0.0
    for n in (5, 8, 13):
        a, b = (np.exp(lognormal(rng, (50, n))) for _ in range(2))
        at_once: list[tuple[Ends, Callable[[Array, Array], Estimate]]] = [
            (interval_of_mean(a), lambda x, _: mean_estimate(x.tolist())),
            (_ends(interval_of_mean(np.log(a / b))), lambda x, y: ratio_estimate(_keyed(x, "s"), _keyed(y, "s"))),
            (
                _ends(interval_of_difference(np.log(a), np.log(b))),
                lambda x, y: ratio_estimate(_keyed(x, "s"), _keyed(y, "t")),
            ),
            (interval_of_difference(a, b), lambda x, y: difference_estimate(_keyed(x, "s"), _keyed(y, "t"))),
            (_ends(rank_sums(np.log(a), np.log(b), LEVEL)), lambda x, y: shift_estimate(x.tolist(), y.tolist())),
            (
                (np.sort(a)[:, places(n)[0] - 1], np.sort(a)[:, n - places(n)[0]]),
                lambda x, _: median_estimate(x.tolist()),
            ),
        ]
        for (low, high), single in at_once:
            for row in range(len(a)):
                found = single(a[row], b[row])
                assert found.low is not None
                assert found.high is not None
                worst = max(worst, abs(found.low - low[row]), abs(found.high - high[row]))
    return Figure(
        name="intervals of many experiments at once against those of single estimates",
        value=worst,
        unit="largest difference of an end",
        n=900,
        goal="at most 1e-9",
        met=bool(worst <= 1e-9),
    )


def _ends(logs: Ends) -> Ends:
    return np.exp(logs[0]), np.exp(logs[1])


SESSION_SD = RUN_SD = 0.01


def over_sessions(trials: int = 2000) -> Iterator[Figure]:
    """Runs of 1 % in sessions that differ by 1 %: what is printed of one session holds within it, of more over them."""
    for name, sizes, correlation in (
        *((f"{n} runs of one session", (n,), 0.0) for n in (5, 7, 10)),
        *((f"{n} runs of one session, neighbours correlated by 0.8", (n,), 0.8) for n in (5, 7, 10)),
        *((f"{count} sessions of 5 runs", (5,) * count, 0.0) for count in (2, 3, 4, 5, 7)),
        ("5 sessions of 5 runs, neighbours correlated by 0.8", (5,) * 5, 0.8),
        ("5 sessions of 10, 1, 1, 1 and 1 runs", (10, 1, 1, 1, 1), 0.0),
    ):
        rng = np.random.default_rng([len(name), *sizes])
        over, within = 0, 0
        for _ in range(trials):
            states = rng.normal(0, SESSION_SD, len(sizes))
            values = {
                KnownKey.of("", 100 * place + run, str(place)): float(value)
                for place, size in enumerate(sizes)
                for run, value in enumerate(states[place] + _neighbours(rng, size, correlation))
            }
            found = mean_estimate(values)
            assert found.low is not None
            assert found.high is not None
            assert found.level is not None
            level = found.level
            over += found.low <= 0 <= found.high
            within += found.low <= states[0] <= found.high
        is_within = len(sizes) == 1
        hits = within if is_within else over
        chance = stats.binomtest(hits, trials).proportion_ci(method="exact")
        is_goal = not is_within or correlation == 0
        yield Figure(
            name=f"coverage {'within the session' if is_within else 'over sessions'}, mean of {name}",
            value=100 * hits / trials,
            unit="% of experiments",
            low=100 * chance.low,
            high=100 * chance.high,
            n=trials,
            goal=f"at least the {100 * level:.4g} % printed less {SLACK} points" if is_goal else "none",
            met=bool(100 * chance.high >= 100 * level - SLACK) if is_goal else None,
            reason=f"over sessions {100 * over / trials:.3g}: the text says that it holds within one" * is_within,
        )


def _neighbours(rng: np.random.Generator, size: int, correlation: float) -> Array:
    """Runs one after the other, each like the one before by so much."""
    values = rng.normal(0, RUN_SD, size)
    for run in range(1, size):
        values[run] = correlation * values[run - 1] + np.sqrt(1 - correlation**2) * values[run]
    return values


def _unseen() -> Iterator[Figure]:
    """A slow state in one run of ten: what no interval over so few runs can know."""
    for n in (5, 10, 20):
        rng = np.random.default_rng(n)
        is_slow = rng.random((TRIALS, n)) < 0.1
        values = 0.1 * is_slow + 0.003 * rng.standard_normal((TRIALS, n))
        low, high = interval_of_mean(values)
        hits = int(np.count_nonzero((low <= 0.01) & (high >= 0.01)))
        unseen = int(np.count_nonzero(~is_slow.any(axis=1)))
        chance = stats.binomtest(hits, TRIALS).proportion_ci(method="exact")
        yield Figure(
            name=f"coverage, mean of {n} runs, one run of ten 10 % slower",
            value=100 * hits / TRIALS,
            unit="% of experiments",
            low=100 * chance.low,
            high=100 * chance.high,
            n=TRIALS,
            goal="none: no method knows a state that no run has met",
            reason=f"no run met the slow state in {100 * unseen / TRIALS:.0f} %",
        )


def _lost_runs() -> Iterator[Figure]:
    """How far a ratio moves when one run of ten interleaved pairs is lost, in half widths of its own interval."""
    for drift in (0.0, 0.2):
        rng = np.random.default_rng(11)
        moves = []
        for _ in range(FEW_TRIALS):
            machine = 1 + drift * np.linspace(0, 1, 10)
            a, b = (_keyed(machine * scale * rng.lognormal(0, 0.005, 10), "s") for scale in (1.05, 1.0))
            whole = ratio_estimate(a, b)
            del b["s", int(rng.integers(10))]
            assert whole.low is not None
            assert whole.high is not None
            moves.append(2 * abs(ratio_estimate(a, b).value - whole.value) / (whole.high - whole.low))
        yield Figure(
            name=f"move of a ratio when one run of ten pairs is lost, drift of {drift:.0%}",
            value=max(moves),
            unit="half widths of its interval, at most",
            n=FEW_TRIALS,
            goal="at most 1",
            met=bool(max(moves) <= 1),
        )
