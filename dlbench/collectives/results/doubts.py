"""Reasons to doubt measurements of collectives; counters that differ from the formulas first of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from dlbench.collectives.results.measurements import CollectiveGroup, layout_of, name_of, why_not
from dlbench.costs.collectives import Layout, RankCounts, counts
from dlbench.reading.doubts import Doubt, merged
from dlbench.reading.environments import Environments, environment_doubts, side_by_side
from dlbench.reading.hosts.core_load import LOAD_CODES, load_doubts
from dlbench.reading.repeats import shared_nodes, unlike_runs
from dlbench.records.collectives import CommPoint
from dlbench.records.collectives_scan import CommRun
from dlbench.records.watch import NodeLoad
from dlbench.specs.collectives.plan import ELEMENT_BYTES, Collective
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import format_bytes

NOISY = 0.5
"""Where the middle half of the iterations spans more than this share of the median, there is hardly a typical time."""


def group_doubts(group: CollectiveGroup) -> list[Doubt]:
    """All reasons to doubt the figures of a group, serious ones first; equal texts once, with their runs."""
    found = [*_few_repeats(group), *_unlike(group.runs), *_one_hosts_layout(group), *_noise(group.runs)]
    # Noise and the load of cores are told once for all runs.
    found += load_doubts(_loads(group.runs))
    found += merged(
        doubt for run in group.runs for doubt in run_doubts(run) if doubt.code not in ("noisy-iterations", *LOAD_CODES)
    )
    return sorted(found, key=lambda doubt: doubt.severity != "serious")


def run_doubts(run: CommRun) -> list[Doubt]:
    """What one run with a record gives reason to doubt, by itself."""
    record = run.record
    if record is None:
        return []
    ids = (run.plan.run_id,)
    found = [Doubt(code="recorded", severity="serious", text=text, runs=ids) for text in record.warnings]
    if shared := shared_nodes(run.plan):
        found.append(Doubt(code="shared-nodes", severity="serious", text=shared, runs=ids))
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=record.device.startswith("cuda")):
        found.append(Doubt(code=code, severity="serious", text=text, runs=ids))
    for point in record.points:
        if why_not(point):
            continue
        what = f"{name_of(point).title}, {format_bytes(point.num_bytes)}"
        if point.problem:
            found.append(Doubt(code="point", severity="serious", text=f"{what}: {point.problem}", runs=ids))
        problem = counter_problem(run, point)
        if problem:
            found.append(Doubt(code="counters", severity="serious", text=f"{what}: {problem}", runs=ids))
    unchecked = sum(point.correct is None for point in record.points if not why_not(point))
    if unchecked:
        text = f"results of {unchecked} points were not checked: a wrong sum would have gone unseen"
        found.append(Doubt(code="unchecked", severity="serious", text=text, runs=ids))
    return [*found, *load_doubts(_loads([run])), *_noise([run])]


def _loads(runs: Sequence[CommRun]) -> dict[str, tuple[NodeLoad, ...]]:
    return {run.plan.run_id: run.record.load for run in runs if run.record is not None}


def counter_problem(run: CommRun, point: CommPoint) -> str:
    """How what a rank counted differs from what the formulas say; empty where it does not, and for libraries."""
    if name_of(point).is_library:
        return ""
    layout, shards = layout_of(run), run.plan.comm.shards
    expected = _expected(point.collective, point.algorithm, layout, point.num_bytes, ELEMENT_BYTES[point.dtype], shards)
    found = []
    steps = max(rank.steps for rank in expected)
    if point.steps != steps:
        found.append(f"steps: {point.steps} counted, {steps} by the formula")
    for name, counted, wanted in (
        ("messages", point.messages, tuple(rank.messages for rank in expected)),
        ("bytes sent", point.bytes_sent, tuple(rank.bytes_sent for rank in expected)),
        ("bytes to other groups", point.bytes_across, tuple(rank.bytes_across for rank in expected)),
    ):
        if counted == wanted:
            continue
        if len(counted) != len(wanted):
            found.append(f"{name}: counted on {len(counted)} of {len(wanted)} ranks")
            continue
        rank = next(rank for rank, pair in enumerate(zip(counted, wanted, strict=True)) if pair[0] != pair[1])
        found.append(f"{name} of rank {rank}: {counted[rank]:,} counted, {wanted[rank]:,} by the formula")
    return f"counters differ from the formulas: {'; '.join(found)}" if found else ""


@lru_cache(maxsize=4096)
def _expected(
    collective: Collective, algorithm: str, layout: Layout, num_bytes: int, element_bytes: int, shards: int | None
) -> tuple[RankCounts, ...]:
    return counts(collective, algorithm, layout, num_bytes // element_bytes, element_bytes, shards=shards)


def _few_repeats(group: CollectiveGroup) -> Iterator[Doubt]:
    if len(group.runs) < MIN_RUNS:
        count = f"{len(group.runs)} valid run{'s' * (len(group.runs) > 1)}"
        how = "; intervals are those of its iterations and say nothing on how runs differ" * (len(group.runs) == 1)
        yield Doubt(
            code="few-repeats",
            severity="serious",
            text=f"insufficient for a comparison: fewer than {MIN_RUNS} valid runs ({count}){how}",
        )


def _unlike(runs: Sequence[CommRun]) -> list[Doubt]:
    return unlike_runs({"": {run.plan.run_id: run.record.environment for run in runs if run.record is not None}})


def environment(runs: Sequence[CommRun]) -> Environments:
    """The environments (of rank 0) of runs side by side; those without a record are passed over."""
    return side_by_side({run.plan.run_id: run.record.environment for run in runs if run.record is not None})


def _one_hosts_layout(group: CollectiveGroup) -> Iterator[Doubt]:
    plan = group.sample.plan
    hosts = {host for run in group.runs if run.record for host in run.record.hosts}
    if group.layout.num_groups > 1 and (plan.layout.nodes == 1 or len(hosts) == 1):
        yield Doubt(
            code="pretended-groups",
            severity="note",
            text="all groups are on one host: messages across groups cost what those inside cost",
        )


def _noise(runs: Sequence[CommRun]) -> Iterator[Doubt]:
    known = [
        (run.plan.run_id, point)
        for run in runs
        if run.record is not None
        for point in run.record.points
        if not why_not(point)
    ]
    noisy = [run_id for run_id, point in known if _is_noisy(point)]
    if noisy:
        yield Doubt(
            code="noisy-iterations",
            severity="serious",
            text=f"iterations scatter: at {len(noisy)} of {len(known)} points their middle half spans more than "
            f"{NOISY:.0%} of the median",
            runs=tuple(dict.fromkeys(noisy)),
        )


def _is_noisy(point: CommPoint) -> bool:
    import numpy as np

    low, middle, high = np.percentile(point.times_s, [25, 50, 75])
    return bool(high - low > NOISY * middle)
