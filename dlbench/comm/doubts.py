"""Warnings on the figures of the collective benchmark, for one run and for a group of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from dlbench.analysis.environments import (
    LOAD_CODES,
    Doubt,
    Severity,
    environment_doubts,
    load_doubts,
    loads_of,
    merged,
    network_doubts,
)
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.comm.measurements import CollectiveGroup, layout_of, name_of, why_not
from dlbench.lazy import np
from dlbench.perfmodels.algorithms import counts
from dlbench.records.comm import CommPoint, CommRecord, CommRun
from dlbench.specs.comm import ELEMENT_BYTES
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import counted, format_bytes

COUNTERS = {"messages": "messages", "bytes_sent": "bytes sent", "bytes_across": "bytes to other groups"}
NOISY = 0.5  # Share of the median that the middle half of iterations may span before a point is called noisy.


def group_doubts(group: CollectiveGroup) -> list[Doubt]:
    """Returns all warnings of a group, serious ones first; equal texts once, with their runs."""
    doubts = [*_layout_doubts(group), *mixed_configurations({"": environments_of(group.runs)}), *_noise(group.runs)]
    # Noise and the load of cores are reported once for all runs.
    doubts += load_doubts(loads_of(group.runs))
    of_runs = chain.from_iterable(map(run_doubts, group.runs))
    doubts += merged([doubt for doubt in of_runs if doubt.code not in ("noisy-iterations", *LOAD_CODES)])
    return sorted(doubts, key=lambda doubt: doubt.severity != "serious")


def run_doubts(run: CommRun) -> list[Doubt]:
    """Returns the warnings of one run; none without a record."""
    if run.record is None:
        return []
    doubts = [
        Doubt(code=code, severity=severity, text=text, runs=(run.plan.run_id,))
        for code, severity, text in _record_doubts(run, run.record)
    ]
    return [*doubts, *load_doubts(loads_of([run])), *_noise([run])]


def _record_doubts(run: CommRun, record: CommRecord) -> Iterator[tuple[str, Severity, str]]:
    for warning in record.warnings:
        yield "recorded", "serious", warning
    if shared := shared_nodes(run.plan):
        yield "shared-nodes", "serious", shared
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=record.device.startswith("cuda")):
        yield code, "serious", text
    if record.nccl is not None:
        yield from network_doubts(record.nccl, record.environment)
    points = [point for point in record.points if not why_not(point)]
    for point in points:
        point_title = f"{name_of(point).title}, {format_bytes(point.num_bytes)}"
        for code, severity, text in _point_doubts(run, point):
            yield code, severity, f"{point_title}: {text}"
    unchecked = sum(point.correct is None for point in points)
    if unchecked:
        text = f"results of {unchecked} points were not checked, so a wrong sum would not have been noticed"
        yield "unchecked", "serious", text


def _point_doubts(run: CommRun, point: CommPoint) -> Iterator[tuple[str, Severity, str]]:
    if point.problem:
        yield "point", "serious", point.problem
    if point.launch_bound:
        text = (
            f"in {point.launch_bound} of {len(point.times_s)} iterations the GPU reached the operations before the "
            "host had queued all of them: the time may be that of the host's calls"
        )
        yield "launch-bound", "serious", text
    if point.is_cut:
        text = (
            f"samples of only {point.operations} operations, because the GPU reached larger samples before the host "
            "had queued them: the time may include differences between the starts of ranks"
        )
        yield "short-samples", "note", text
    problem = counter_problem(run, point)
    if problem:
        yield "counters", "serious", problem


def counter_problem(run: CommRun, point: CommPoint) -> str:
    """Returns how the counters of ranks differ from the formulas; empty if they agree, and for libraries."""
    if name_of(point).is_library or point.pair is not None:
        return ""
    width = ELEMENT_BYTES[point.dtype]
    ranks = counts(
        point.collective,
        point.algorithm,
        layout_of(run),
        point.num_bytes // width,
        width,
        shards=run.plan.comm.shards,
        chunks=point.chunks,
    )
    problems = []
    steps = max(rank.steps for rank in ranks)
    if point.steps != steps:
        problems.append(f"steps: {point.steps} counted, {steps} by the formula")
    for name, title in COUNTERS.items():
        counts_by_rank = getattr(point, name)
        if len(counts_by_rank) != len(ranks):
            problems.append(f"{title}: counted on {len(counts_by_rank)} of {len(ranks)} ranks")
            continue
        for rank, (count, formula) in enumerate(zip(counts_by_rank, map(attrgetter(name), ranks), strict=True)):
            if count != formula:
                problems.append(f"{title} of rank {rank}: {count:,} counted, {formula:,} by the formula")
                break
    if not problems:
        return ""
    return f"counters differ from the formulas: {'; '.join(problems)}"


def _layout_doubts(group: CollectiveGroup) -> Iterator[Doubt]:
    if len(group.runs) < MIN_RUNS:
        num_runs = counted(len(group.runs), "valid run")
        text = f"insufficient for a comparison: fewer than {MIN_RUNS} valid runs ({num_runs})"
        if len(group.runs) == 1:
            text += "; its intervals are those of iterations and do not show how runs differ"
        yield Doubt(code="few-repeats", severity="serious", text=text)
    hosts = set(chain.from_iterable(run.record.hosts for run in group.runs if run.record is not None))
    if group.layout.num_groups > 1 and (group.sample.plan.layout.nodes == 1 or len(hosts) == 1):
        text = "all groups are on one host: messages between groups cost the same as messages within a group"
        yield Doubt(code="pretended-groups", severity="note", text=text)


def environments_of(runs: Sequence[CommRun]) -> dict[str, Mapping[str, str]]:
    """Returns the environment of rank 0 by run id, of runs with a record."""
    return {run.plan.run_id: run.record.environment for run in runs if run.record is not None}


def _noise(runs: Sequence[CommRun]) -> Iterator[Doubt]:
    num_points = 0
    noisy = []
    for run in runs:
        if run.record is None:
            continue
        points = [point for point in run.record.points if not why_not(point)]
        num_points += len(points)
        for point in points:
            low, middle, high = np.percentile(point.times_s, [25, 50, 75])
            if high - low > NOISY * middle:
                noisy.append(run.plan.run_id)
    if noisy:
        text = (
            f"iterations scatter: at {len(noisy)} of {num_points} points their middle half spans more than "
            f"{NOISY:.0%} of the median"
        )
        yield Doubt(code="noisy-iterations", severity="serious", text=text, runs=tuple(dict.fromkeys(noisy)))
