"""Verdicts of a comparison in words, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.gate.comparison import Comparison
from dlbench.gate.labels import versus
from dlbench.gate.page.assemble import MetricResult, PointResult
from dlbench.report.table import Cell, times_cell
from dlbench.report.wording import value_text
from dlbench.stats.estimates import MIN_RUNS, Estimate


def headline(verdict: str, points: Sequence[PointResult], tolerance: float) -> str:
    """The overall verdict, and the comparison that stands for it."""
    every = [(point, metric) for point in points for metric in point.gated]
    same = [(point, metric) for point, metric in every if metric.verdict == verdict]
    if not same:
        return f"{verdict}: nothing was compared."
    point, metric = max(same, key=lambda one: _size(one[1]))
    sides = versus(point.allowed)
    told = f"{metric.title} at {point.label}{f', {sides}' if sides else ''}: {change_text(metric)}"
    count = f"{len(same)} of {len(every)} comparisons {verdict}" if len(every) > 1 else verdict
    return f"{count}; {'the largest change is ' if len(same) > 1 else ''}{told}; tolerance {share_text(tolerance)}."


def _size(metric: MetricResult) -> float:
    return 0.0 if metric.ratio is None else abs(metric.ratio.value - 1)


def change_text(metric: MetricResult) -> str:
    """The ratio as a change, e.g. ``5.2 % worse, 1.052x [1.041, 1.064]``; its digits follow the interval, too."""
    if metric.ratio is None:
        return "no ratio"
    word = "worse" if metric.ratio.value >= 1 else "better"
    change = value_text(metric.ratio.mapped(lambda ratio: ratio - 1, "fraction")).removeprefix("-")
    held = ", within one session" if metric.ratio.sessions == 1 and metric.ratio.low is not None else ""
    return f"{change} {word}, {ratio_text(metric.ratio)}{held}"


def ratio_cell(ratio: Estimate | None) -> Cell:
    """A ratio near 1 with as many digits as a gate needs, e.g. ``1.052x [1.041, 1.064]``."""
    return times_cell(ratio, 3)


def ratio_text(ratio: Estimate) -> str:
    """The same on one line."""
    return str(ratio_cell(ratio))


def share_text(fraction: float) -> str:
    """A share without needless digits, e.g. ``2 %``, ``2.5 %``."""
    return f"{fraction * 100:.4g} %"


def p_against(p: float, level: float) -> str:
    """A p and what it is held against, with two significant digits, e.g. ``0.0031 (at most 0.005)``."""
    return f"{p:.2g} (at most {level:.2g})"


def power_text(metric: MetricResult) -> str:
    """What the comparison could have seen, in a sentence; empty with too few runs."""
    test = metric.tested
    if test is None:
        return ""
    wanted, seen = share_text(test.wanted), share_text(round(test.detectable, 4))
    if test.repeats is None:
        needed = f"{wanted}: within the tolerance, or more than 1,000 {test.unit}s"
    else:
        needed = f"{wanted} needs {test.repeats} {test.unit}s{'' if test.unit == 'pair' else ' per side'}"
    scatter = share_text(round(test.scatter, 5))
    return f"Smallest slowdown found with 80 % probability: {seen}; {needed} (scatter of {test.unit}s {scatter})."


def _correction(num_compared: int) -> str:
    if num_compared < 2:
        return "; no correction, as there is no second comparison"
    return f" for all {num_compared} comparisons of this command together, by Holm's correction"


def methods(found: Comparison) -> tuple[tuple[str, str], ...]:
    """How the verdicts were made, heading and text."""
    rule = found.rule
    if found.paired:
        test = "Student's t test of the mean logarithm of B / A over pairs."
        unit = "The pair of interleaved runs: what drifts falls on both sides alike."
    else:
        test = (
            "Welch's t test of the difference of mean logarithms over units, with the standard error of a pooled "
            "variance where the sides have unlike many units and that is larger. A side of fewer than five sessions: "
            "Student's t test with the scatter between the sessions of the other side and of the history, "
            "s sqrt(1 + 1/k) for one against k."
        )
        unit = (
            "The session, because its runs share the machine's state: the mean logarithm of its runs. Runs are of one "
            "session while less than 12 h pass between them, for a day at most, unless the host was started anew; one "
            "Slurm job is one session. Where one job or one command ran both sides, the run."
        )
    tolerated = share_text(rule.tolerance)
    return (
        ("Unit", f"{unit} Every run gives one number for each metric; steps of one run are not independent."),
        (
            "Ratio",
            "Geometric mean over units of B by that of A, turned so that above 1 is worse. Its interval is the test's: "
            "its ends leave the level that the test has below and above. Without a test the interval is over runs, "
            f"within the session they ran in, and with fewer than {MIN_RUNS} runs a side their range.",
        ),
        (
            "Test",
            f'{test} B is divided by {1 + rule.tolerance:.4g} first: p is of "no more than {tolerated} worse". Level '
            f"{share_text(rule.level)}{_correction(found.num_compared)}. "
            "With one-sided or two-state noise equal on both sides it fails no more often; where one side is noisier "
            "and slowed now and then, 5 % and more.",
        ),
        (
            "Verdicts",
            f"regressed: p at most {share_text(rule.level)}; improved: the mirror image; equivalent: the 90 % interval "
            f"of the ratio within {tolerated} (TOST at 5 %); else inconclusive, as without sessions enough for a test. "
            f"Fewer than {MIN_RUNS} runs on a side: insufficient.",
        ),
    )
