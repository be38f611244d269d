"""Equal code in sessions really run on this machine: how often does the gate call one side changed?

Each command `dlbench run --ab plain plain` of five pairs is taken for a session, though all are of one day, which
dlbench itself would call one. Interleaved comparisons are within a session.
Those that are not take side a of some sessions and side b of later ones, as a baseline and a candidate of another night
would be. Beside each stands the rule of before: runs as the unit, a test of "no difference" and a ratio of medians
beyond the tolerance, on the median step.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure
from benchmarks.gate import share
from dlbench.analysis.metrics import DEFAULT_METRICS
from dlbench.analysis.repeats import MIN_SESSIONS
from dlbench.analysis.table import tabulate
from dlbench.gate.sides import SideRun, points_of
from dlbench.gate.verdicts import Evidence, MetricSample, Rule, evidence_of, judge, overall
from dlbench.records.scan import Scan
from tests.support.forked_runs import run_forked

SESSIONS = 20
PAIRS = 5
RULE = Rule()

Session = dict[str, list[SideRun]]
"""Runs of one session by side, in the order of their repeats."""


def figures(count: int = SESSIONS) -> Iterator[Figure]:
    """Rates of verdicts over all comparisons that the sessions allow."""
    with tempfile.TemporaryDirectory() as temporary:
        sessions = [_session(Path(temporary) / f"session{number:02d}") for number in range(count)]
    yield _spread(sessions)
    yield from _rates(f"{PAIRS} interleaved pairs of one session", [(one, one) for one in sessions], paired=True)
    windows = {
        "one session against the next": (1, 1),
        f"one session against {MIN_SESSIONS} before it": (MIN_SESSIONS, 1),
        f"{MIN_SESSIONS} sessions against the next {MIN_SESSIONS}": (MIN_SESSIONS, MIN_SESSIONS),
    }
    for name, (before, after) in windows.items():
        places = range(count - before - after + 1)
        chosen = [
            (_pooled(sessions[at : at + before]), _pooled(sessions[at + before : at + before + after])) for at in places
        ]
        if chosen:
            yield from _rates(name, chosen, paired=False)


def _rates(name: str, comparisons: Sequence[tuple[Session, Session]], *, paired: bool) -> Iterator[Figure]:
    """Each is made in both directions: equal runs are slower in neither, so that improved is regressed once more."""
    verdicts: Counter[str] = Counter()
    before = 0
    for first, second in comparisons:
        for a, b in ((first["a"], second["b"]), (second["b"], first["a"])):
            samples = [_sample(metric, a, b, paired=paired) for metric in DEFAULT_METRICS]
            verdicts[overall(one.verdict for one in judge(samples, RULE))] += 1
            before += _before(samples[0])
    made = 2 * len(comparisons)
    value, low, high = share(verdicts["regressed"], made)
    told = ", ".join(f"{100 * verdicts[one] / made:.3g} % {one}" for one in ("equivalent", "inconclusive"))
    yield Figure(
        name=f"A/A, {name}: regressed",
        value=value,
        low=low,
        high=high,
        n=made,
        unit="% of comparisons",
        goal="at most 1",
        met=value <= 1.0,
        reason=f"{told}; regressed by the rule of before: {100 * before / made:.3g} %",
    )


def _spread(sessions: Sequence[Session]) -> Figure:
    """How far sessions scatter beyond what their runs do."""
    together = _pooled(sessions)
    runs = [*together["a"], *together["b"]]
    of_sessions = evidence_of(_sample("step_median_s", runs, runs, paired=False))
    each = [math.log(run.figures["step_median_s"]) for run in runs]
    mean = sum(each) / len(each)
    scatter = math.sqrt(sum((one - mean) ** 2 for one in each) / (len(each) - 1))
    return Figure(
        name="scatter between sessions of the median step",
        value=None if of_sessions is None else 100 * of_sessions.scatter,
        n=len(sessions),
        unit="%",
        goal="none",
        reason=f"of all runs {scatter:.2%}" + ("; fewer than five sessions" if of_sessions is None else ""),
    )


def _sample(metric: str, a: Sequence[SideRun], b: Sequence[SideRun], *, paired: bool) -> MetricSample:
    return MetricSample(
        a=tuple(run.figures[metric] for run in a),
        b=tuple(run.figures[metric] for run in b),
        paired=paired,
        sessions_a=tuple(run.command for run in a),
        sessions_b=tuple(run.command for run in b),
    )


def _before(sample: MetricSample) -> bool:
    """The rule of before."""
    alone: Evidence | None = evidence_of(MetricSample(a=sample.a, b=sample.b, paired=sample.paired))
    assert alone is not None
    is_worse = alone.p_values(0.0)[0] <= RULE.level
    return is_worse and median(sample.b) > (1 + RULE.tolerance) * median(sample.a)


def _pooled(sessions: Sequence[Session]) -> Session:
    return {side: [run for session in sessions for run in session[side]] for side in ("a", "b")}


def _session(out: Path) -> Session:
    """Runs as `dlbench run` makes them, but for the seconds in which each would import torch."""
    runs = run_forked(
        *("cosmoflow", "--preset", "ci", "--data", "synthetic", "--engine", "single", "--ab", "plain", "plain"),
        *("--repeats", str(PAIRS), "--set", "layout.cores_per_rank=1", "--set", "train.batch_per_rank=1"),
        *("--set", "measure.warmup_steps=3", "--set", "measure.measured_steps=30"),
        *("--set", "watch.window_steps=0", "--set", "watch.sampler=false", "--out", out),
    )
    table = tabulate(Scan(root=out, runs=runs))
    sides = {run.plan.run_id: run.plan.series.side for run in runs}
    told = sorted((run for point in points_of(table, []) for run in point.runs), key=lambda run: run.pair)
    return {side: [run for run in told if sides[run.run_id] == side] for side in ("a", "b")}
