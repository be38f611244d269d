"""Measurements of collectives in words: labels, verdicts, captions, and how the numbers are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from dlbench.collectives.results.choice import RATE_SHARE, STAY_WITHIN, Best, Fusion, Recommended
from dlbench.collectives.results.fits import Fit
from dlbench.collectives.results.measurements import CollectiveGroup
from dlbench.collectives.results.predictions import Prediction, Predictions
from dlbench.reading.comparability import Condition
from dlbench.report.wording import INTERVALS, figure_text, optional, percent, place_text, runs_text
from dlbench.specs.collectives.network import POOR_MEDIAN, POOR_WORST, LargestHeldOut
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import format_bytes, format_number

TITLE: Final = "dlbench collective benchmark"

MAX_TIED = 3
"""Algorithms that are named where none is clearly faster."""

COLLECTIVE_TITLES = {
    "allreduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "broadcast": "broadcast",
    "all-to-all": "all-to-all",
}


def about(num_bytes: float) -> str:
    """Bytes that are computed, not chosen: three digits."""
    if not math.isfinite(num_bytes):
        return "no size"
    value, unit = format_bytes(num_bytes).split(" ")
    return f"{float(f'{float(value):.3g}'):g} {unit}"


def range_text(low: float, high: float) -> str:
    """A range of sizes, or one size."""
    return format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"


def per_byte_text(seconds_per_byte: float) -> str:
    """Seconds per byte as the rate that they are, GB/s; `free` where bytes cost nothing."""
    return "free" if seconds_per_byte <= 0 else format_number(1e-9 / seconds_per_byte, 3)


# Groups


def label_of(group: CollectiveGroup) -> str:
    """A group in one line: system, collective, type, layout, carriers."""
    plan, layout = group.sample.plan, group.layout
    groups = f" in {layout.num_groups} groups of {layout.group_size}" if layout.num_groups > 1 else ""
    nodes = f" on {plan.layout.nodes} nodes" if plan.layout.nodes > 1 else ""
    carriers = ", ".join(dict.fromkeys(series.carrier for series in group.series))
    what = f"{COLLECTIVE_TITLES[group.collective]} {group.dtype}"
    return f"{plan.system.name}: {what}, {plan.layout.ranks} ranks{groups}{nodes}, over {carriers}"


def conditions_of(group: CollectiveGroup) -> tuple[Condition, ...]:
    """What all runs of a group share."""
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    iterations = sorted({row.iterations for series in group.series for row in series.rows})
    hosts = sorted({host for run in group.runs if run.record for host in run.record.hosts})
    timings = {row.timing for series in group.series for row in series.rows}
    has_servers = any(series.algorithm == "parameter-server" for series in group.series)
    values = (
        ("system", "System", plan.system.name),
        ("launcher", "Launcher", plan.system.launch.launcher),
        ("layout", "Ranks", place_text(plan.layout.ranks, plan.layout.nodes)),
        ("groups", "Groups", f"{group.layout.num_groups} of {group.layout.group_size}"),
        ("cores", "Cores per rank", str(plan.layout.cores_per_rank)),
        ("device", "Device", record.device),
        ("collective", "Collective", COLLECTIVE_TITLES[group.collective]),
        ("dtype", "Type", group.dtype),
        ("timing", "Timing", "in the GPU's stream" if "in-stream" in timings else ""),
        ("shards", "Servers", str(plan.comm.shards or "every rank") if has_servers else ""),
        ("iterations", "Timed iterations", " or ".join(map(str, iterations))),
        ("hosts", "Hosts", ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")),
    )
    return tuple(Condition(name=name, title=title, value=value) for name, title, value in values if value)


def verdict(group: CollectiveGroup, best: Sequence[Best], ranges: Sequence[Recommended]) -> str:
    """What to use at which size, or that nothing is clearly faster; then the rate at the largest size."""
    last = best[-1]
    rate_name = "busbw" if group.layout.ranks > 1 else "algbw"
    fastest = (
        f"Fastest measured at {format_bytes(last.num_bytes)}: {last.title}, {figure_text(last.time)}, "
        f"{figure_text(last.rate)} GB/s {rate_name}."
    )
    return f"{advice(group, ranges)} {fastest}"


def advice(group: CollectiveGroup, ranges: Sequence[Recommended]) -> str:
    """What to use at which size, in a sentence."""
    what = COLLECTIVE_TITLES[group.collective]
    if len({series.title for series in group.series}) == 1:
        return f"Nothing to choose from: only {group.series[0].title} was measured."
    library = keep_text(group)
    if len(group.runs) < MIN_RUNS:
        return (
            f"No advice from {runs_text(len(group.runs))}: an algorithm is recommended from {MIN_RUNS} runs on "
            f"(--repeats {MIN_RUNS}); until then {library}."
        )
    if not any(one.title for one in ranges):
        (worst, *_) = sorted(ranges, key=lambda one: -one.spread)
        return f"No clear winner for {what}: {tied_text(worst)}; {library}."
    parts = [_range(one) for one in ranges]
    keep = f"; where none is clear, {library}" if not all(one.title for one in ranges) else ""
    return f"For {what} use: {'; '.join(parts)}{keep}."


def _range(one: Recommended) -> str:
    return f"{range_text(one.low, one.high)}: {one.title or f'no clear winner ({tied_text(one)})'}"


def prediction_advice(found: Predictions, one: Prediction) -> str:
    """What is predicted to be fastest at which size, or why that is no advice."""
    if one.withheld:
        return f"No prediction for {one.ranks:,} ranks: withheld, because {one.withheld}."
    if len(one.series) == 1:
        return ""
    return f"Predicted fastest {COLLECTIVE_TITLES[found.collective]}: {'; '.join(map(_range, one.ranges))}."


def keep_text(group: CollectiveGroup) -> str:
    """What to do where no algorithm is clearly faster."""
    has_library = any(series.is_library for series in group.series)
    return "keep the library's choice" if has_library else "any of them will do"


def tied_text(found: Recommended) -> str:
    """``ring over mpi, library of mpi within 2 %``."""
    if len(found.tied) == 1:
        return f"{found.tied[0]} is nowhere clearly slower"
    more = f" and {len(found.tied) - MAX_TIED} more" if len(found.tied) > MAX_TIED else ""
    return f"{', '.join(found.tied[:MAX_TIED])}{more} within {percent(max(found.spread, 0.01), 0)}"


def same_text(names: Sequence[str]) -> str:
    """Algorithms that are one at two ranks."""
    return f"{', '.join(names)} send the same messages at 2 ranks: they count as one, {names[0]}."


def fusion_text(found: Fusion | None) -> str:
    """The recommended fusion size with its rule, in one sentence; empty where there is none."""
    if found is None:
        return ""
    if found.num_bytes is None:
        return f"No fusion size: {found.title} costs no more for larger messages as far as it was measured."
    if found.below_measured:
        return (
            f"No fusion size: every size measured reaches {percent(found.share, 0)} of the asymptotic rate of "
            f"{found.title}; measure smaller ones."
        )
    beyond = " That is beyond the largest size measured: an extrapolation." if found.beyond_measured else ""
    return f"{_fusion(found.num_bytes, found.title)}.{beyond}"


def _fusion(num_bytes: float, title: str, basis: str = "measured") -> str:
    return (
        f"Recommended fusion size: {about(num_bytes)}, the smallest message that reaches {percent(RATE_SHARE, 0)} of "
        f"the asymptotic rate of {title} (9 x start-up / time per byte of a line through its {basis} times)"
    )


# Fits and predictions


def fit_caption(fit: Fit) -> str:
    """What stands behind a fit, in a few sentences."""
    if not fit.pieces:
        return "Only libraries were measured: each is a line through its sizes, at the rank counts measured."
    ranks = " and ".join(", ".join(map(str, fit.ranks)).rsplit(", ", 1))
    basis = (
        f"in brackets 95 % intervals over {fit.runs} runs a point"
        if fit.network.draws
        else "too few runs for intervals"
    )
    text = f"Fitted to {fit.num_points} points at {ranks} ranks; {basis}."
    if any(piece.level == "across" for piece in fit.pieces):
        link = "share one link" if fit.shared_link else "have a link each"
        text += f" In the model, ranks of a group {link} to other groups."
    if fit.shared_memory:
        text += " Inside a group the bytes of all its ranks add up: they share memory or processors."
    return f"{text} {largest_text(fit.largest_held_out)} Held out: {fit.held_out_by}."


def largest_text(told: LargestHeldOut | None) -> str:
    """The error at the largest rank count, in a sentence."""
    if told is None:
        return "Error at the largest rank count: not known, the smaller ones do not determine it."
    ranks = " and ".join(", ".join(map(str, told.fitted_ranks)).rsplit(", ", 1))
    bias = told.ratio - 1
    way = "too long" if bias > 0 else "too short"
    return (
        f"Error at the largest rank count, held out ({told.ranks} ranks from {ranks}): {percent(told.median_error)} "
        f"(median; {percent(abs(bias))} {way})."
    )


def layout_text(found: Predictions, one: Prediction) -> str:
    """What is predicted of which layout."""
    groups = one.ranks // one.group_size
    where = f" in {groups} groups of {one.group_size}" if groups > 1 else ""
    return f"{COLLECTIVE_TITLES[found.collective]} {found.dtype}, {one.ranks} ranks{where}"


def extrapolated_text(found: Predictions, one: Prediction) -> tuple[str, ...]:
    """What lies beyond the measured points, and how far the fit was off one step beyond its own."""
    lines = [f"{series.name}: {series.beyond}" for series in one.series if series.beyond]
    if not one.extrapolated and not lines:
        return ()
    beyond = [f"Extrapolated: {'; '.join([*one.extrapolated, *lines])}."]
    if one.extrapolated and any(not series.is_line for series in one.series):
        beyond.append(largest_text(one.largest_held_out))
    return tuple(beyond)


def poor_text(one: Prediction) -> str:
    """Algorithms that the fit misses too far for advice; empty where there is none."""
    poor = [f"{series.name} (by up to {percent(series.poor_error, 0)})" for series in one.series if series.poor_error]
    return f"No advice on {', '.join(poor)}: the fit misses it." if poor else ""


def predicted_fusion_text(found: Predictions, one: Prediction) -> str:
    """The fusion size, and what it makes of all gradients; empty where there is none, or none to be relied on."""
    if one.fusion_bytes is None:
        return ""
    text = _fusion(one.fusion_bytes, one.fusion_of, "measured" if one.fusion_is_measured else "predicted")
    if one.fusion_messages is None or one.fusion_workload_s is None:
        return text + "."
    return (
        f"{text}: {one.fusion_messages:,} messages for {about(found.workload_bytes or 0)} of gradients, together "
        f"{optional(one.fusion_workload_s, 's')} without overlap."
    )


METHODS: tuple[tuple[str, str], ...] = (
    (
        "Which points count",
        "Only points whose result was right on every rank, of runs whose record is valid. A run with a wrong result "
        "anywhere yields no figure. All others are listed with the reason. Warm-up iterations are not recorded.",
    ),
    (
        "Time",
        "An iteration is one operation, or several back to back where one is shorter than 2 ms (fewer where sums of "
        "sums would leave the type's range); its time is divided by them. Ranks meet at the carrier's own barrier "
        "first. On one host the time runs from the last rank's start to the last end, otherwise it is the slowest "
        "rank's. A broadcast on CPUs has a barrier before each operation, outside of the timer. The start skew is how "
        "far apart ranks began an iteration. On GPUs ranks meet by a tiny all-reduce in the stream, and the time is "
        "the slowest rank's between events before and after the operations; a single call is one alone, by the host's "
        "clock, until the device is idle. A run's time is the median over its timed iterations. MPI's all-reduce is "
        "timed in place, and out of place: into a second buffer, as osu_allreduce does; other libraries' in place.",
    ),
    (
        "Medians and intervals",
        f"The run is the experimental unit, not the iteration. Figures are medians over runs. {INTERVALS} With fewer "
        "runs the range is printed, with its level. For a single run it is the middle half of its iterations, labelled "
        "within-run, which says nothing on how runs differ.",
    ),
    (
        "algbw and busbw",
        "By the formulas of nccl-tests, from the time above (there it is the mean over ranks of 20 queued operations): "
        "algbw = bytes / time; busbw = algbw x 2 (p - 1) / p for all-reduce, (p - 1) / p for reduce-scatter, "
        "all-gather and all-to-all, and 1 for broadcast, with p ranks. Bytes are those of each rank's whole buffer: "
        "for all-gather the gathered result, for reduce-scatter the input. GB/s is 1e9 bytes per second.",
    ),
    (
        "Counters",
        "Steps, messages and bytes are counted by the transport while an algorithm runs, and must equal the formulas "
        "exactly; a difference is a warning. Bytes are the largest of any rank. Libraries do not report theirs.",
    ),
    (
        "Fitted costs",
        "A message costs alpha + bytes x beta, by level (within a group, between groups) and message size; a byte "
        "reduced costs gamma. One fit for each system, carrier and type of element, over all collectives, layouts, "
        "algorithms and sizes, with relative errors and robust against outliers. Where groups hold several ranks, "
        "whether these share one link to other groups or have a link each, and whether their bytes inside the group "
        "add up (shared memory or processors), is what predicts held-out points better. Intervals: the fit redone for "
        "resampled runs (stretched to Student's t), with its breaks.",
    ),
    (
        "Predictions",
        "What stands beside a measurement is predicted by a fit that did not see the point; how it was held out is "
        "said with the fit. The error at the largest rank count is of a fit to the smaller ones alone, which chooses "
        "everything anew. Libraries choose their algorithms themselves and are not predicted.",
    ),
    (
        "Recommended",
        f"An algorithm is recommended where every other one is slower by more than {STAY_WITHIN:.0%} and beyond the "
        f"scatter of {MIN_RUNS} runs or more (interval of the ratio of times). Elsewhere there is no clear winner. At "
        "two ranks algorithms with equal steps, messages and bytes are one.",
    ),
    (
        "Where the lead changes",
        "Measured: between sizes with different clear winners, where lines through their times meet on logarithmic "
        "axes. Model: the size from which another algorithm is predicted to be faster; algorithms that the fit misses "
        f"(median error above {POOR_MEDIAN:.0%}, or worst above {POOR_WORST:.0%}) are left out.",
    ),
    (
        "Fusion size",
        f"The smallest message that reaches {RATE_SHARE:.0%} of the asymptotic rate of the series that is fastest at "
        "the largest size by its line: 9 x start-up / time per byte, of a line through its sizes fitted with relative "
        "errors. Smaller "
        "messages waste start-ups; larger ones leave less to overlap with the backward pass.",
    ),
    (
        "Against libraries",
        "Time of the library over time of dlbench's algorithm, in pairs of runs that hold both. Above 1, "
        "the algorithm is faster.",
    ),
)
