"""Verdicts: undecided where the runs decide nothing, one claim in twenty that is false, a best that is not flattered.

All runs are simulated: five repeats unless said otherwise, log-normal noise of independent runs, sides in pairs.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure
from benchmarks.gate import share
from dlbench.analysis.attribution import attribute
from dlbench.analysis.causes import CAUSES
from dlbench.analysis.scaling import Group
from dlbench.analysis.scaling import groups as scaling_groups
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.stats.estimates import gain_of_best, paired_logs, ratio_estimate
from dlbench.stats.multiplicity import LEVEL, holm, paired_p, pooled_freedom, repeats_for
from dlbench.stats.verdict import Combination, contrasts, family_of, levels_of
from dlbench.stats.verdict_words import SETTING_MARGIN as MARGIN
from dlbench.views.causes.experiments import Case
from dlbench.views.causes.numbers import WORTH_EXPLAINING, adjusted_p, diagnose, stands_out
from dlbench.views.decomposition import OWN_PARTS, difference
from dlbench.views.scaling import verdict
from tests.support.run_factory import constant, plans, write_run

Array = npt.NDArray[np.float64]

SEED = 20_261_122
REPEATS = 5
SETTINGS = 15
MOST_FALSE = 5.0
"""Percent of cases in which a verdict may be false."""
LEAST_COVERED = 93.5
"""Percent: 95 less what such simulations scatter."""
LEAST_POWER = 78.5
"""Percent: 80 likewise."""

STEP: Mapping[str, float] = {
    "exchange": 0.10,
    "straggler": 0.03,
    "gather": 0.0,
    "input": 0.05,
    "host": 0.02,
    "launch": 0.01,
    "throttling": 0.01,
    "memory": 0.01,
    "compute": 0.75,
    "rest": 0.02,
}
"""Share of each cause of a step."""


def figures() -> Iterator[Figure]:
    """All verdicts that are read from intervals."""
    yield from decompositions()
    yield from best_of_sweeps()
    yield families()
    yield from causes()
    yield from diagnoses()
    yield from advised_repeats()


def rate(
    name: str, calls: Sequence[bool], goal: str, *, most: float | None = None, least: float | None = None
) -> Figure:
    """Percent of trials, met unless its whole 95 % interval lies beyond the goal."""
    value, low, high = share(sum(calls), len(calls))
    met = None
    if most is not None or least is not None:
        met = (most is None or low <= most) and (least is None or high >= least)
    return Figure(name=name, value=value, low=low, high=high, n=len(calls), unit="%", goal=goal, met=met)


# Decomposition


def decompositions(trials: int = 300) -> Iterator[Figure]:
    """How often difference and phase are said to agree, by how far they are truly apart."""
    for gap, scatter in ((0.0, 0.003), *itertools.product((0.0, 0.02, 0.05), (0.02, 0.05))):
        generator = np.random.default_rng([SEED, round(1000 * gap), round(1000 * scatter)])
        calls = [decomposed(generator, gap, scatter) for _ in range(trials)]
        counts = Counter(calls)
        name = f"decomposition, gap {gap:.0%} of a step, scatter {100 * scatter:g}%: called"
        beside = ", ".join(f"{verdict} {count / trials:.0%}" for verdict, count in sorted(counts.items()))
        wrong = "differ" if gap == 0 else "agree"
        figure = rate(f"{name} {wrong}", [call == wrong for call in calls], f"at most {MOST_FALSE:g}", most=MOST_FALSE)
        yield Figure(**{**vars(figure), "reason": beside})


def decomposed(generator: np.random.Generator, gap: float, scatter: float) -> str:
    """The verdict on input that takes 10 % of a step, and whose absence saves so much more."""
    plain, without = generator.lognormal(0, scatter, (2, REPEATS))
    none = dict.fromkeys(OWN_PARTS, 0.0)
    pairs = [
        ({**none, "input": 0.1 * p, "forward": 0.9 * p}, {**none, "forward": (0.9 - gap) * v})
        for p, v in zip(plain.tolist(), without.tolist(), strict=True)
    ]
    return difference("input", {("", repeat): pair for repeat, pair in enumerate(pairs)}).verdict


# Sweeps

TRUTHS: Mapping[str, Array] = {
    "15 settings all +3 %": np.full(SETTINGS, math.log(1.03)),
    "15 settings, one +6 %": np.array([math.log(1.06), *[0.0] * (SETTINGS - 1)]),
    "60 settings, one +6 %": np.array([math.log(1.06), *[0.0] * 59]),
}


def best_of_sweeps(trials: int = 1000) -> Iterator[Figure]:
    """What is printed of the fastest setting, against what it truly gains."""
    for number, (name, truth) in enumerate(TRUTHS.items()):
        generator = np.random.default_rng([SEED, number])
        covered, errors, widths, flattered = [], [], [], []
        for _ in range(trials):
            logs = log_ratios(generator, truth, REPEATS)
            best = int(logs.mean(axis=1).argmax())
            found = gain_of_best(logs.tolist(), best)
            assert found.low is not None
            assert found.high is not None
            covered.append(found.low <= math.exp(truth[best]) <= found.high)
            errors.append(100 * (found.value - math.exp(truth[best])))
            flattered.append(100 * (math.exp(logs[best].mean()) - math.exp(truth[best])))
            widths.append(100 * (found.high - found.low))
        figure = rate(f"best of {name}: covered by its interval", covered, "at least 95", least=LEAST_COVERED)
        yield Figure(**{**vars(figure), "reason": f"mean width {fmean(widths):.1f} points"})
        bias = fmean(errors)
        error = 1.96 * math.sqrt(variance(errors) / trials)
        yield Figure(
            name=f"best of {name}: printed less true gain",
            value=bias,
            low=bias - error,
            high=bias + error,
            n=trials,
            unit="points",
            goal="at most 1",
            met=bias <= 1,
            reason=f"as measured {fmean(flattered):.2f}",
        )


def log_ratios(generator: np.random.Generator, truth: Array, repeats: int, scatter: float = 0.02) -> Array:
    """Settings x repeats: each setting over a baseline that scatters as they do."""
    noise = generator.normal(0, scatter, (len(truth) + 1, repeats))
    ratios: Array = truth[:, None] + noise[1:] - noise[0]
    return ratios


def families(trials: int = 400) -> Figure:
    """Sweeps of 16 equal settings (4 x 4 values) at four rank counts: the chance of any claimed difference."""
    generator = np.random.default_rng([SEED, 7])
    calls = []
    for _ in range(trials):
        comparisons = [logs for _ in range(4) for logs in equal_settings(generator)]
        family = family_of(comparisons)
        calls.append(any(family.adjusted_p(logs) < LEVEL for logs in comparisons))
    return rate("sweep of 15 settings x 4 rank counts, all equal: any false claim", calls, "at most 5", most=MOST_FALSE)


def equal_settings(generator: np.random.Generator) -> list[Mapping[tuple[str, int], float]]:
    """All that is compared at one rank count whose settings are all equal."""
    keys = [("", k) for k in range(REPEATS)]
    rates = [
        dict(zip(keys, np.exp(generator.normal(0, 0.02, REPEATS)).tolist(), strict=True)) for _ in range(SETTINGS + 1)
    ]
    combinations = [
        Combination(values={"one": i // 4, "other": i % 4}, acting=frozenset({"one", "other"}), rates=rates[i])
        for i in range(len(rates))
    ]
    levels = levels_of(combinations, combinations[0].values)
    return [*(paired_logs(one, rates[0]) for one in rates[1:]), *contrasts(combinations, levels).values()]


def advised_repeats(trials: int = 200) -> Iterator[Figure]:
    """A sweep of five repeats decides nothing; as many as it advises find the setting that is faster by the margin."""
    for settings in (1, SETTINGS):
        generator = np.random.default_rng([SEED, 11, settings])
        truth = np.array([math.log1p(MARGIN), *[0.0] * (settings - 1)])
        calls, counts = [], []
        for _ in range(trials):
            pilot = log_ratios(generator, truth, REPEATS)
            scatter = math.sqrt(fmean(map(variance, pilot.tolist())))
            repeats = max(REPEATS, repeats_for(scatter, MARGIN, settings, pooled_freedom(settings, REPEATS)))
            logs = log_ratios(generator, truth, repeats)
            calls.append(holm([paired_p(row) for row in logs.tolist()])[0] < LEVEL)
            counts.append(repeats)
        figure = rate(
            f"advised repeats, {settings} settings, one faster by {MARGIN:.0%}: found",
            calls,
            "at least 80, within the scatter of the trials",
            least=LEAST_POWER,
        )
        yield Figure(**{**vars(figure), "reason": f"{fmean(counts):.0f} repeats on average"})


# Causes


def causes(trials: int = 250) -> Iterator[Figure]:
    """Reports of three rank counts that lose nothing: how often any cause is found."""
    for scatter, is_paired in itertools.product((0.01, 0.02, 0.03), (True, False)):
        generator = np.random.default_rng([SEED, 13, round(1000 * scatter), is_paired])
        calls = [any_cause(generator, scatter, is_paired=is_paired) for _ in range(trials)]
        kind = "pairs" if is_paired else "separate runs"
        yield rate(
            f"causes, nothing lost at 3 rank counts, scatter {scatter:.0%}, {kind}: one found",
            calls,
            "at most 5",
            most=MOST_FALSE,
        )


def any_cause(generator: np.random.Generator, scatter: float, *, is_paired: bool) -> bool:
    """Whether a report of equal runs finds a cause at any rank count."""
    baseline = steps(generator, scatter, "a")
    found = [
        attribute(steps(generator, scatter, "a" if is_paired else f"b{i}"), baseline, work=1, names=CAUSES)
        for i in range(3)
    ]
    adjusted = adjusted_p([one.parts for one in found])
    return any(
        one.whole.lost.value >= WORTH_EXPLAINING and any(stands_out(part, p[part.name]) for part in one.parts)
        for one, p in zip(found, adjusted, strict=True)
    )


def steps(
    generator: np.random.Generator, scatter: float, block: str, repeats: int = REPEATS
) -> dict[tuple[str, int], dict[str, float]]:
    """Seconds per step of each cause in each run: whole runs scatter, and each cause by as much again."""
    runs = generator.lognormal(0, scatter, repeats).tolist()
    noise = generator.lognormal(0, scatter, (repeats, len(CAUSES))).tolist()
    return {
        (block, k): {name: STEP[name] * run * own for name, own in zip(CAUSES, noise[k], strict=True)}
        for k, run in enumerate(runs)
    }


# What is said of a loss

CLAIMS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "a cause is named": (0.0, ("likely cause: ", "main cause: ", "certain: ")),
    "the baseline is blamed": (0.0, ("the baseline ran with a handicap",)),
    "no loss is claimed": (0.03, ("no loss worth explaining", "nothing is lost")),
}
"""What a sentence claims, with the true loss (a fraction) that makes it false, and the words that claim it."""


def diagnoses(trials: int = 400, scatter: float = 0.02) -> Iterator[Figure]:
    """How often the sentences on a point claim what is not so, by the number of its repeats."""
    with tempfile.TemporaryDirectory() as folder:
        group = one_group(Path(folder))
        for repeats in (1, 2, 3, 4, 5, 10):
            for loss in (0.0, 0.03):
                generator = np.random.default_rng([SEED, 17, repeats, round(1000 * loss)])
                texts = [said(generator, group, repeats, scatter, loss) for _ in range(trials)]
                for claim, (false_at, words) in CLAIMS.items():
                    if false_at == loss:
                        yield rate(
                            f"{repeats} repeats, scatter {scatter:.0%}, truly lost {loss:.0%}: {claim}",
                            [any(one in text for one in words) for text in texts],
                            "at most 5",
                            most=MOST_FALSE,
                        )


def one_group(folder: Path) -> Group:
    """Runs at one and two ranks, as points to give figures to."""
    for plan in plans(points=(1, 2), repeats=1):
        write_run(folder, plan, constant((5.0, 0.0, 30.0, 50.0, 5.0, 10.0)))
    (group,) = scaling_groups(tabulate(scan(folder)))
    return group


def said(generator: np.random.Generator, group: Group, repeats: int, scatter: float, loss: float) -> str:
    """The diagnosis of a point of equal parts that all lose the same share, and the verdict of its report."""
    baseline, own = (steps(generator, scatter, "a", repeats) for _ in range(2))
    own = {key: {name: value / (1 - loss) for name, value in parts.items()} for key, parts in own.items()}
    found = attribute(own, baseline, work=1, names=CAUSES)
    (adjusted,) = adjusted_p([found.parts])
    base, last = group.points
    whole = [{key: sum(parts.values()) for key, parts in side.items()} for side in (baseline, own)]
    last = replace(last, efficiency=ratio_estimate(whole[0], whole[1], "fraction"))
    case = Case(
        runs=group.runs[-1:],
        point=last,
        is_baseline=False,
        parts=found.parts,
        whole=found.whole,
        adjusted_p=adjusted,
        compute_parts=(),
        hosts=(),
        main_straggler=None,
        exclude=(),
    )
    return f"{diagnose(case).line} {verdict('images', (base, last), is_oversubscribed=False)}"
