"""The gate keeps its promises: what is tolerated passes, stalls are found, sessions are the unit, 80 % means 80 %.

Runs scatter lognormally. `dlbench check` is asked by the function that it calls, with the default rule: tolerance 2 %,
level 1 %. Beside some rows stands what the same runs give if sessions are taken for nothing and runs for the unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure
from benchmarks.gate import share
from dlbench.analysis.repeats import Circumstances, sessions_of
from dlbench.gate.verdicts import Evidence, MetricSample, Rule, Unit, judge

Array = npt.NDArray[np.float64]

RULE = Rule()
SEED = 20_260_315
TRIALS = 2000
STEPS = 100
RUN_SD = 0.01
SESSION_SDS = (0.0, 0.005, 0.01, 0.02, 0.03)
SESSIONS = 5
"""Sessions of a side, or of a baseline; each of `REPEATS` runs."""
REPEATS = 5


def figures() -> Iterator[Figure]:
    """Every promise, at the default rule."""
    yield from tolerated()
    yield from shapes()
    yield from equivalences()
    yield from slowdowns()
    yield from stalls()
    yield from sessions()
    yield from days()
    yield from powers()


def rate(name: str, calls: Sequence[bool], goal: str, met: Callable[[float], bool] | None, reason: str = "") -> Figure:
    """Share of comparisons with its interval of Clopper and Pearson."""
    value, low, high = share(sum(calls), len(calls))
    return Figure(
        name=name,
        value=value,
        low=low,
        high=high,
        n=len(calls),
        unit="% of comparisons",
        goal=goal,
        met=None if met is None else met(value),
        reason=reason,
    )


def regressed(*samples: MetricSample) -> bool:
    """Whether the gate fails."""
    return any(one.verdict == "regressed" for one in judge(samples, RULE))


def sides(generator: np.random.Generator, count: int, scatter: float, slowdown: float, *, paired: bool) -> MetricSample:
    """Two sides of independent runs, or of pairs whose ratios have this scatter."""
    own = scatter / math.sqrt(2) if paired else scatter
    a, b = generator.normal(0, own, (2, count))
    return MetricSample(a=told(a), b=told(b + math.log1p(slowdown)), paired=paired)


def told(logs: Array) -> tuple[float, ...]:
    """Step times around 0.1 s."""
    return tuple((0.1 * np.exp(logs)).tolist())


def tolerated(trials: int = TRIALS) -> Iterator[Figure]:
    """A slowdown within the tolerance fails at most 1 % of times."""
    for seed, (paired, scatter, count, slowdown) in enumerate(
        (paired, scatter, count, slowdown)
        for paired in (False, True)
        for scatter in (0.005, 0.01)
        for count in (5, 10)
        for slowdown in (0.01, 0.015, 0.019)
    ):
        generator = np.random.default_rng([SEED, 1, seed])
        calls = [regressed(sides(generator, count, scatter, slowdown, paired=paired)) for _ in range(trials)]
        kind = "pairs" if paired else "separate sides"
        yield rate(
            f"fails at +{slowdown:.1%}, {kind}, {count} a side, sd {scatter:.1%}",
            calls,
            "at most 1",
            lambda value: value <= 1.0,
        )


NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "one run of ten an outlier": lambda rng, shape: (
        0.01 * rng.standard_normal(shape) + (rng.random(shape) < 0.1) * rng.exponential(0.1, shape)
    ),
    "one run of five 5 % slower": lambda rng, shape: (
        0.005 * rng.standard_normal(shape) + 0.05 * (rng.random(shape) < 0.2)
    ),
    "t with two degrees of freedom": lambda rng, shape: 0.01 * rng.standard_t(2, shape),
    "two states 10 % apart": lambda rng, shape: (
        0.05 * rng.choice([-1.0, 1.0], shape) + 0.003 * rng.standard_normal(shape)
    ),
    "one-sided (exponential)": lambda rng, shape: 0.03 * rng.standard_exponential(shape),
}
"""Of logarithms, equal on both sides."""


def shapes(trials: int = TRIALS) -> Iterator[Figure]:
    """A slowdown just within the tolerance under noise that is not normal: the designs that fail most often."""
    designs = [(True, n, n) for n in (5, 7, 10, 20)] + [(False, a, b) for a in (5, 10, 20) for b in (5, 10, 20)]
    for place, (name, noise) in enumerate(NOISES.items()):
        found = []
        for number, (paired, a, b) in enumerate(designs):
            rng = np.random.default_rng([SEED, 9, place, number])
            drawn = [
                MetricSample(a=told(noise(rng, (a,))), b=told(noise(rng, (b,)) + math.log(1.019)), paired=paired)
                for _ in range(trials // 4)
            ]
            found.append(([regressed(one) for one in drawn], f"{'pairs' if paired else 'sides'} of {a} and {b}"))
        calls, design = max(found, key=lambda one: sum(one[0]))
        every = [call for some, _ in found for call in some]
        yield rate(
            f"fails at +1.9%, {name}, {len(designs)} designs of 5 to 20 units",
            every,
            "at most 1",
            lambda value: value <= 1.0,
            f"most with {design}: {100 * sum(calls) / len(calls):.2g}",
        )


def equivalences(trials: int = TRIALS) -> Iterator[Figure]:
    """A slowdown of the whole tolerance is called equivalent in at most 5 % of cases (TOST)."""
    for seed, (paired, count) in enumerate((paired, count) for paired in (False, True) for count in (5, 10)):
        generator = np.random.default_rng([SEED, 8, seed])
        drawn = [sides(generator, count, 0.005, RULE.tolerance, paired=paired) for _ in range(trials)]
        yield rate(
            f"equivalent at +{RULE.tolerance:.1%}, {'pairs' if paired else 'separate sides'}, {count} a side, sd 0.5%",
            [judge([one], RULE)[0].verdict == "equivalent" for one in drawn],
            "at most 6",
            lambda value: value <= 6.0,
        )


def slowdowns(trials: int = TRIALS // 4) -> Iterator[Figure]:
    """How often larger ones are found."""
    for seed, (slowdown, count) in enumerate((slowdown, count) for slowdown in (0.03, 0.05) for count in (5, 10)):
        generator = np.random.default_rng([SEED, 2, seed])
        calls = [regressed(sides(generator, count, 0.01, slowdown, paired=False)) for _ in range(trials)]
        yield rate(f"found at +{slowdown:.0%}, separate sides, {count} a side, sd 1.0%", calls, "none", None)


def stalls(trials: int = TRIALS // 10) -> Iterator[Figure]:
    """Some steps much longer, the others as they were: throughput falls and the median step does not."""
    for seed, (part, factor) in enumerate(((0.10, 5.0), (0.25, 2.0))):
        generator = np.random.default_rng([SEED, 3, seed])
        alone, both = [], []
        for _ in range(trials):
            steps = np.exp(generator.normal(0, RUN_SD, (2, 10, 1)) + generator.normal(0, 0.05, (2, 10, STEPS)))
            stalled = generator.random((10, STEPS)) < part
            steps[1] *= np.where(stalled, factor, 1.0)
            median, mean = (
                MetricSample(a=tuple(value[0].tolist()), b=tuple(value[1].tolist()), paired=False)
                for value in (np.median(steps, axis=2), steps.mean(axis=2))
            )
            alone.append(regressed(median))
            both.append(regressed(median, mean))
        yield rate(
            f"{part:.0%} of steps {factor:g}x longer, found",
            both,
            "at least 99",
            lambda value: value >= 99.0,
            f"by the median step alone: {100 * sum(alone) / trials:.3g}",
        )


def sessions(trials: int = TRIALS // 2) -> Iterator[Figure]:
    """Equal sides on a machine whose sessions differ."""
    shapes: dict[str, tuple[int, int, int]] = {
        # Name -> sessions of A, of B, of the history; 0 and 0: pairs within one session.
        "interleaved pairs in one session": (0, 0, 0),
        "one session a side": (1, 1, 0),
        "one session a side, a history of 5": (1, 1, SESSIONS),
        "5 sessions a side": (SESSIONS, SESSIONS, 0),
        "one session against a baseline of 5": (SESSIONS, 1, 0),
    }
    for name, (num_a, num_b, earlier) in shapes.items():
        for seed, spread in enumerate(SESSION_SDS):
            generator = np.random.default_rng([SEED, 4, list(shapes).index(name), seed])
            drawn = [of_sessions(generator, spread, num_a, num_b, earlier) for _ in range(trials)]
            naive = sum(regressed(MetricSample(a=one.a, b=one.b, paired=one.paired)) for one in drawn)
            yield rate(
                f"equal sides, {name}, sd between sessions {spread:.1%}",
                [regressed(one) for one in drawn],
                "at most 1",
                lambda value: value <= 1.0,
                f"runs as the unit: {100 * naive / trials:.3g}",
            )
        generator = np.random.default_rng([SEED, 5, list(shapes).index(name)])
        slower = [of_sessions(generator, 0.01, num_a, num_b, earlier, slowdown=0.1) for _ in range(trials // 2)]
        yield rate(f"found at +10%, {name}, sd between sessions 1.0%", [regressed(one) for one in slower], "none", None)


def days(trials: int = TRIALS // 4) -> Iterator[Figure]:
    """Commands of days that differ by 2 %, outside Slurm, by the sessions that dlbench makes of them."""
    for name, (per_day, num_days) in {"five commands of one day": (5, 1), "a command a day for five": (1, 5)}.items():
        generator = np.random.default_rng([SEED, 12, num_days])
        calls: list[bool] = []
        verdicts: Counter[str] = Counter()
        for _ in range(trials):
            when = {
                f"{side}{day} {command} {run}": Circumstances(
                    f"2026-{month:02d}-{day + 1:02d}T{9 + command:02d}:{run:02d}:00Z", "", "host boot"
                )
                for month, side in ((3, "a"), (4, "b"))
                for day in range(num_days)
                for command in range(per_day)
                for run in range(REPEATS)
            }
            session = sessions_of(when)
            states = {key: generator.normal(0, 0.02) for key in {run.split()[0] for run in when}}
            logs = {run: states[run.split()[0]] + generator.normal(0, RUN_SD) for run in when}
            a, b = ([run for run in when if run[0] == side] for side in "ab")
            (found,) = judge(
                [
                    MetricSample(
                        a=told(np.array([logs[run] for run in a])),
                        b=told(np.array([logs[run] for run in b])),
                        paired=False,
                        sessions_a=tuple(session[run] for run in a),
                        sessions_b=tuple(session[run] for run in b),
                    )
                ],
                RULE,
            )
            verdicts[found.verdict] += 1
            calls.append(found.verdict in ("regressed", "improved"))
        beside = ", ".join(f"{verdict} {100 * count / trials:.3g}" for verdict, count in verdicts.items())
        yield rate(
            f"equal sides, {name} a side, sd between days 2.0%: regressed or improved",
            calls,
            "at most 2",
            lambda value: value <= 2.0,
            beside,
        )


def of_sessions(
    generator: np.random.Generator, spread: float, num_a: int, num_b: int, earlier: int, slowdown: float = 0.0
) -> MetricSample:
    """Runs of some sessions a side, which differ by `spread`; see `sessions`."""
    if num_a == 0:
        state = generator.normal(0, spread)
        a, b = state + generator.normal(0, RUN_SD, (2, 2 * REPEATS))
        return MetricSample(a=told(a), b=told(b + math.log1p(slowdown)), paired=True)

    def runs(count: int) -> Array:
        return generator.normal(0, spread, (count, 1)) + generator.normal(0, RUN_SD, (count, REPEATS))

    a, b, history = runs(num_a), runs(num_b) + math.log1p(slowdown), runs(earlier)
    return MetricSample(
        a=told(a.ravel()),
        b=told(b.ravel()),
        paired=False,
        sessions_a=tuple(f"a{i}" for i in range(num_a) for _ in range(REPEATS)),
        sessions_b=tuple(f"b{i}" for i in range(num_b) for _ in range(REPEATS)),
        history=tuple(told(session) for session in history),
    )


def powers(trials: int = TRIALS) -> Iterator[Figure]:
    """The slowdown that is told to be found with 80 % probability is, at the scatter told."""
    kinds: tuple[tuple[Unit, int, int], ...] = (
        *(("session", count, count) for count in (5, 6, 7, 10)),
        *(("pair", count, count) for count in (5, 7, 10)),
        ("session", 5, 1),
    )
    for seed, (unit, num_a, num_b) in enumerate(kinds):
        generator = np.random.default_rng([SEED, 6, seed])
        slowdown = known(unit, num_a, num_b).detectable(RULE.level, math.log1p(RULE.tolerance))
        found = [regressed(drawn(generator, unit, num_a, num_b, slowdown)) for _ in range(trials)]
        counts = f"{num_a} pairs" if unit == "pair" else f"{num_a} and {num_b} sessions"
        yield rate(
            f"smallest slowdown told with 80 % probability, {counts}",
            found,
            "77 to 83",
            lambda value: 77.0 <= value <= 83.0,
            f"+{slowdown:.2%} at sd 1%",
        )
    for unit in ("pair", "session"):
        generator = np.random.default_rng([SEED, 7, len(unit)])
        needed = known(unit, 5, 5).repeats(RULE.level, math.log1p(0.04) - math.log1p(RULE.tolerance))
        assert needed is not None
        found = [regressed(drawn(generator, unit, needed, needed, 0.04)) for _ in range(trials)]
        yield rate(f"{unit}s told to find +4%: {needed}", found, "at least 77", lambda value: value >= 77.0, "at sd 1%")


def known(unit: Unit, num_a: int, num_b: int) -> Evidence:
    """Units whose scatter is 1 % by construction."""
    return Evidence(
        unit=unit,
        a=(0.0,) * num_a,
        b=(0.0,) * num_b,
        scatter=RUN_SD,
        error=RUN_SD * math.sqrt(1 / num_a if unit == "pair" else 1 / num_a + 1 / num_b),
        # Those of Welch, of sides of equal scatter on average; of a borrowed scatter Student's.
        freedom=num_a - 1 if unit == "pair" else num_a + num_b - (3 if num_b >= SESSIONS else 2),
        is_borrowed=num_b < SESSIONS,
    )


def drawn(generator: np.random.Generator, unit: Unit, num_a: int, num_b: int, slowdown: float) -> MetricSample:
    """Units that scatter by 1 %, slower by so much."""
    if num_b >= SESSIONS:
        return sides(generator, num_a, RUN_SD, slowdown, paired=unit == "pair")
    # One number a session, but five runs, so that there are enough for a verdict.
    a, b = generator.normal(0, RUN_SD, num_a), generator.normal(0, RUN_SD, num_b) + math.log1p(slowdown)
    return MetricSample(
        a=told(np.repeat(a, REPEATS)),
        b=told(np.repeat(b, REPEATS)),
        paired=False,
        sessions_a=tuple(np.repeat([f"a{i}" for i in range(num_a)], REPEATS).tolist()),
        sessions_b=tuple(np.repeat([f"b{i}" for i in range(num_b)], REPEATS).tolist()),
    )
