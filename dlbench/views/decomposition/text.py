"""What a step costs by taking things away, in words and for programs: printed by `run --decompose` and `diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlbench.records.scan import Scan
from dlbench.report.wording import ENGINE_TITLES, PART_TITLES, basis_text, clean, figure_text, percent, place_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.figure import figure_of
from dlbench.units import format_seconds
from dlbench.views.decomposition.numbers import MARGIN, Decomposition, Difference, What, decompositions

_TITLES: Mapping[What, str] = {"input": "input", "exchange": "exchange and waiting for ranks"}
_WITHOUT: Mapping[What, str] = {"input": "with synthetic input", "exchange": "without exchange"}

_COMPUTE = ("forward", "backward", "optimizer")

REASONS: Mapping[tuple[What, bool], tuple[tuple[tuple[str, ...], str], ...]] = {
    ("input", True): (
        (_COMPUTE, "readers take cores and memory bandwidth from the computation, which no wait for input shows"),
        (("exchange",), "ranks whose batch was late let the others wait in the exchange"),
    ),
    ("input", False): (
        (("input",), "tensors made in memory are not free either"),
        (("exchange",), "ranks that wait no more for input wait longer for each other"),
    ),
    ("exchange", True): (
        (
            _COMPUTE,
            "messages under way take cores and memory bandwidth from the computation: the exposed exchange undercounts",
        ),
        (("input",), "the exchange holds up the reading of batches"),
    ),
    ("exchange", False): (
        (("input",), "batches were read while messages were under way: part of the exchange becomes wait for input"),
        (_COMPUTE, "ranks that no longer wait for each other compute at the same moments, and share cores and memory"),
    ),
}
"""Likely reasons of a gap, by what was taken away and whether more time went than its phase holds; by the part of the
step in which most of the gap lies."""


def decomposition_lines(scan: Scan) -> list[str]:
    """A paragraph for each scaling point that has variants of `dlbench run --decompose`; none without such runs.

    Every line but the first of a point is indented by two blanks.
    """
    lines: list[str] = []
    for point in decompositions(scan.runs):
        lines += _lines(point)
    return lines


def decomposition_json(scan: Scan) -> list[dict[str, Any]]:
    """The same for programs: one mapping a scaling point, durations in seconds, shares as fractions."""
    return [
        {
            "series": point.series,
            "workload": point.sample.plan.workload.name,
            "preset": point.sample.plan.workload.preset,
            "engine": point.sample.plan.engine.name,
            "ranks": point.ranks,
            "nodes": point.nodes,
            "step_s": None if point.step_s is None else _estimate(point.step_s),
            "differences": [
                {
                    "what": one.what,
                    "seconds": _estimate(one.seconds),
                    "share": _estimate(one.share),
                    "phase_s": _estimate(one.phase),
                    "gap_s": _estimate(one.gap),
                    "moved_s": {name: _estimate(moved) for name, moved in one.moved.items()},
                    "verdict": one.verdict,
                    "reason": _reason(one),
                }
                for one in point.differences
            ],
            "missing": list(point.missing),
        }
        for point in decompositions(scan.runs)
    ]


def _lines(point: Decomposition) -> list[str]:
    plan = point.sample.plan
    step = "no run as asked for has figures"
    if point.step_s is not None:
        figure = figure_of(point.step_s, "s")
        step = f"a step takes {figure_text(figure)} (mean over ranks; {basis_text(figure)})"
    return [
        f"{clean(plan.workload.name)} ({clean(plan.workload.preset)}), {ENGINE_TITLES[plan.engine.name]}, "
        f"{place_text(point.ranks, point.nodes)}, series {clean(point.series)}: {step}",
        *(f"  {_sentence(one)}" for one in point.differences),
        *(f"  left out: {clean(text)}" for text in point.missing),
    ]


def _sentence(one: Difference) -> str:
    is_less = one.seconds.value < 0
    seconds, share = figure_of(_turned(one.seconds, is_less), "s"), figure_of(_turned(one.share, is_less), "fraction")
    changed = f"{figure_text(seconds)} {'longer' if is_less else 'shorter'}, {figure_text(share)} of it"
    return (
        f"{_TITLES[one.what]}: {_WITHOUT[one.what]} a step is {changed} ({basis_text(share)}); the phase holds "
        f"{figure_text(figure_of(one.phase, 's'))}: {_verdict(one)}"
    )


def _turned(estimate: Estimate, is_turned: bool) -> Estimate:
    """An estimate with the other sign, if `is_turned`."""
    if not is_turned:
        return estimate
    low = None if estimate.high is None else -estimate.high
    high = None if estimate.low is None else -estimate.low
    return Estimate(-estimate.value, low, high, estimate.n, estimate.kind)


def _verdict(one: Difference) -> str:
    is_less = one.gap.value < 0
    amount = figure_text(figure_of(_turned(one.gap, is_less), "s"))
    gap = f"the difference is {amount} {'less' if is_less else 'more'} than the phase"
    if one.verdict == "insufficient":
        return f"{gap}; {one.gap.n} of {MIN_RUNS} pairs of runs that a verdict needs: use --repeats {MIN_RUNS}"
    if one.verdict == "agree":
        return f"both agree (within their scatter, or {percent(MARGIN, 0)} of a step)"
    return f"{gap}; {_reason(one)}"


def _reason(one: Difference) -> str | None:
    """Where most of a gap lies, and what is likely behind it; None where both agree, or nothing can be said."""
    if one.verdict != "differ":
        return None
    is_more = one.gap.value > 0
    sign = 1 if is_more else -1
    part = max(one.moved, key=lambda name: sign * one.moved[name].value)
    amount = format_seconds(abs(one.moved[part].value))
    where = (
        f"{amount} of wait for input is left {_WITHOUT['input']}"
        if part == one.what == "input"
        else f"{PART_TITLES[part]} is {amount} {'shorter' if is_more else 'longer'} {_WITHOUT[one.what]}"
    )
    likely = next((text for parts, text in REASONS[one.what, is_more] if part in parts), None)
    return where if likely is None else f"{where}: {likely}"


def _estimate(estimate: Estimate) -> dict[str, float | int | str | None]:
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
        "kind": estimate.kind,
    }
