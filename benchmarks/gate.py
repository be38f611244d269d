"""The gate against what is known: simulated runs with and without a slowdown, and equal runs really made here.

Simulated noise, as on shared machines: runs scatter by 2 % (one in twenty is an outlier, by some 10 % more), steps by
5 % with an autocorrelation of 0.5 between neighbours, and one step in fifty is an outlier. Pairs share half of the
variance between runs: that is the drift which interleaving is for.

Side by side on the same data: Mann-Whitney's test on pooled steps at the same level; a fixed threshold of 5 % on the
medians; and the rule of airspeed velocity (asv compare, asv continuous), which calls a benchmark worse where the
medians differ by its default factor of 1.1 and Mann-Whitney's test on all samples has p < 0.002 (`asv/statistics.py`,
`is_different`, and `--factor` in `asv/commands/common_args.py` of its repository; its samples are timings, pooled over
processes, so that steps are their like).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.figures import Figure
from dlbench.analysis.metrics import DEFAULT_METRICS, metrics_by_run
from dlbench.analysis.table import tabulate
from dlbench.gate.verdicts import MetricSample, Rule, judge
from dlbench.records.scan import scan

Array = npt.NDArray[np.float64]

RULE = Rule()
STEPS = 100
TRIALS_EQUAL = 3000
TRIALS_SLOWER = 1000
RUN_SD, STEP_SD, AUTOCORRELATION = 0.02, 0.05, 0.5
OUTLIER_RUNS, OUTLIER_STEPS = 0.05, 0.02

PAIRS = 20
"""Pairs of real runs."""
WINDOW = 5
"""Runs a side of an A/A comparison of neighbouring runs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of comparison."""

    name: str
    slowdown: float
    repeats: int
    paired: bool
    goal: str
    met: Callable[[float], bool] | None


CASES = (
    *(
        Case(
            name=f"false alarms, {kind}, {repeats} repeats",
            slowdown=0.0,
            repeats=repeats,
            paired=kind == "pairs",
            goal="at most 1",
            met=lambda value: value <= 1.0,
        )
        for kind in ("separate sides", "pairs")
        for repeats in (5, 10)
    ),
    *(
        Case(
            name=f"slowdowns of {slowdown:.0%} found, {kind}, {repeats} repeats",
            slowdown=slowdown,
            repeats=repeats,
            paired=kind == "pairs",
            goal="none",
            met=None,
        )
        for kind in ("separate sides", "pairs")
        for slowdown, repeats in ((0.03, 10), (0.05, 5))
    ),
)


def figures() -> Iterator[Figure]:
    """False alarms and power on simulated runs, then A/A comparisons of real ones."""
    for number, case in enumerate(CASES):
        yield from simulated(case, seed=number)
    yield from real_pairs()


def simulated(case: Case, *, seed: int, trials: int | None = None) -> Iterator[Figure]:
    """Share of trials in which the gate, and each other rule, calls B slower."""
    count = trials or (TRIALS_EQUAL if case.slowdown == 0 else TRIALS_SLOWER)
    generator = np.random.default_rng([20_260_301, seed])
    drift = generator.normal(0, RUN_SD * np.sqrt(0.5), (count, case.repeats)) if case.paired else None
    a = run_steps(generator, (count, case.repeats), drift)
    b = run_steps(generator, (count, case.repeats), drift) * (1 + case.slowdown)
    medians_a, medians_b = np.median(a, axis=-1), np.median(b, axis=-1)
    found = {
        "dlbench check": np.array(
            [is_regressed(x, y, paired=case.paired) for x, y in zip(medians_a, medians_b, strict=True)]
        ),
        "Mann-Whitney on steps, 1 %": _steps_p(a, b, "greater") <= RULE.level,
        "threshold of 5 %": np.median(medians_b, axis=1) > 1.05 * np.median(medians_a, axis=1),
        "asv's rule": (_steps_p(a, b, "two-sided") < 0.002)
        & (np.median(b.reshape(count, -1), axis=1) > 1.1 * np.median(a.reshape(count, -1), axis=1)),
    }
    for rule, calls in found.items():
        value, low, high = share(int(calls.sum()), count)
        ours = rule == "dlbench check"
        yield Figure(
            name=f"{case.name}: {rule}",
            value=value,
            low=low,
            high=high,
            n=count,
            unit="% of comparisons",
            goal=case.goal if ours else "side by side",
            met=case.met(value) if ours and case.met is not None else None,
        )


def run_steps(generator: np.random.Generator, shape: tuple[int, int], drift: Array | None) -> Array:
    """Step times around 1 of runs: trials x repeats x steps."""
    own = RUN_SD if drift is None else RUN_SD * np.sqrt(0.5)
    runs = generator.normal(0, own, shape) + (0 if drift is None else drift)
    runs += np.log1p((generator.random(shape) < OUTLIER_RUNS) * generator.exponential(0.08, shape))
    steps = np.empty((*shape, STEPS))
    steps[..., 0] = generator.normal(0, STEP_SD, shape)
    fresh = STEP_SD * np.sqrt(1 - AUTOCORRELATION**2)
    for step in range(1, STEPS):
        steps[..., step] = AUTOCORRELATION * steps[..., step - 1] + generator.normal(0, fresh, shape)
    late = 1 + (generator.random(steps.shape) < OUTLIER_STEPS) * generator.exponential(1.0, steps.shape)
    times: Array = np.exp(steps + runs[..., None]) * late
    return times


def is_regressed(a: Sequence[float] | Array, b: Sequence[float] | Array, *, paired: bool) -> bool:
    """What the gate says, by the function that the command calls."""
    (found,) = judge([MetricSample(a=tuple(map(float, a)), b=tuple(map(float, b)), paired=paired)], RULE)
    return found.verdict == "regressed"


def _steps_p(a: Array, b: Array, alternative: str) -> Array:
    """P of Mann-Whitney's test on the pooled steps of all runs of a side, for every trial."""
    count = len(a)
    found = stats.mannwhitneyu(
        b.reshape(count, -1), a.reshape(count, -1), alternative=alternative, axis=1, method="asymptotic"
    )
    return np.asarray(found.pvalue)


def share(count: int, of: int) -> tuple[float, float, float]:
    """Percent with its 95 % interval (Clopper and Pearson, Biometrika 26, 1934)."""
    interval = stats.binomtest(count, of).proportion_ci(method="exact")
    return 100 * count / of, 100 * interval.low, 100 * interval.high


def share_figure(
    name: str, count: int, of: int, goal: str, is_met: Callable[[float], bool], reason: str = ""
) -> Figure:
    """Returns the figure of a `share`; `is_met` says of its percent whether they meet the goal."""
    value, low, high = share(count, of)
    return Figure(
        name=name, value=value, low=low, high=high, n=of, unit="%", goal=goal, met=is_met(value), reason=reason
    )


def real_pairs(pairs: int = PAIRS) -> Iterator[Figure]:
    """False alarms among comparisons of equal runs, really made one after the other on this machine."""
    about = {"unit": "% of comparisons", "goal": "at most 1"}
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        command = [sys.executable, "-m", "dlbench", "run", "cosmoflow", "--preset", "ci", "--data", "synthetic"]
        command += ["--engine", "single", "--no-progress", "--ab", "plain", "plain", "--repeats", str(pairs)]
        command += ["--set", "layout.cores_per_rank=1", "--set", "train.batch_per_rank=1"]
        command += ["--set", "measure.warmup_steps=5", "--set", "measure.measured_steps=30", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            yield Figure(name="A/A comparisons of real runs", value=None, reason=last, **about)
            return
        table = tabulate(scan(out))
        values = metrics_by_run(table, wanted=DEFAULT_METRICS)
        ordered = sorted(table.runs.values(), key=lambda run: run.record.finished if run.record else "")
        times = [values[run.plan.run_id]["step_median_s"] for run in ordered]
        sides = {
            side: [
                values[run.plan.run_id]["step_median_s"]
                for run in sorted(ordered, key=lambda run: run.plan.series.repeat)
                if run.plan.series.side == side
            ]
            for side in ("a", "b")
        }
    scatter = float(np.std(np.log(times), ddof=1))
    what = f"cosmoflow ci, 1 rank, single, {len(times)} runs here; scatter of runs {scatter:.1%}"
    yield _alarms(
        f"A/A, {WINDOW} runs against the next {WINDOW}",
        [
            (times[start : start + WINDOW], times[start + WINDOW : start + 2 * WINDOW])
            for start in range(len(times) - 2 * WINDOW + 1)
        ],
        paired=False,
        what=f"{what}; overlapping windows, both directions",
    )
    for size in (WINDOW, 2 * WINDOW):
        windows = range(len(sides["a"]) - size + 1)
        if not windows:
            continue
        yield _alarms(
            f"A/A, {size} interleaved pairs",
            [(sides["a"][start : start + size], sides["b"][start : start + size]) for start in windows],
            paired=True,
            what=f"{what}; overlapping windows, both directions",
        )


def _alarms(name: str, comparisons: Sequence[tuple[list[float], list[float]]], *, paired: bool, what: str) -> Figure:
    """Each comparison is made in both directions: equal runs are slower in neither."""
    calls = [
        (is_regressed(x, y, paired=paired), np.median(y) > 1.05 * np.median(x))
        for a, b in comparisons
        for x, y in ((a, b), (b, a))
    ]
    alarms = sum(ours for ours, _ in calls)
    value, low, high = share(alarms, len(calls))
    beside = sum(bool(other) for _, other in calls)
    return Figure(
        name=name,
        value=value,
        low=low,
        high=high,
        n=len(calls),
        unit="% of comparisons",
        goal="at most 1",
        met=value <= 1.0,
        reason=f"{alarms} of {len(calls)} alarms, a threshold of 5 % gives {beside}; {what}",
    )
