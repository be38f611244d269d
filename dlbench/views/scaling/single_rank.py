"""What the baseline is not: the fastest that one rank can be.

All ranks of a series have the cores that the fullest point leaves each, so a baseline of one rank computes with a part
of the machine. Scaling against a slow baseline looks good (Bailey, Supercomputing Review, August 1991); so the best run
of a single rank stands beside it where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.wording import basis_text, figure_text, place_text, times_text
from dlbench.stats.estimates import ratio_estimate


def baseline_note(group: Group, groups: Sequence[Group], table: RunTable) -> str:
    """What a reader must know of the baseline, in a sentence; empty where nothing holds it back.

    Args:
        group: the runs with several rank counts.
        groups: all of the report, this one too.
        table: what they are made of.
    """
    base, largest = group.baseline, group.points[-1]
    if len(group.points) == 1 or group.sample.plan.series.variant != "plain":
        return ""
    alone = [(point, other) for other in groups for point in other.points if _is_same_work(group, other, point)]
    point, other = max(alone, key=lambda one: one[0].throughput.value, default=(base, group))
    if point.throughput.value > base.throughput_per_rank.value and point is not base:
        plan, unit = other.sample.plan, group.sample.plan.workload.sample_unit
        rates = table.figures.set_index("run_id")["throughput"]
        top, bottom = ({table.keys[run_id]: float(rates[run_id]) for run_id in one.run_ids} for one in (largest, point))
        ratio = ratio_estimate(top, bottom)
        rate = f"{figure_text(point.throughput)} {unit}/s"
        return (
            f"Against the best single-rank run here ({plan.engine.name}, {_cores(other)}; {rate}): {times_text(ratio)} "
            f"with {place_text(largest.ranks, largest.nodes)} ({basis_text(ratio)}); ranks of the baseline have "
            f"{_cores(group)}."
        )
    is_on_cpu = group.sample.record is not None and group.sample.record.ranks[0].device.startswith("cpu")
    if is_on_cpu and largest.ranks * base.nodes > base.ranks * largest.nodes:
        return (
            f"Every rank has the cores that the fullest point leaves it ({_cores(group)}), the "
            "baseline's too: a single rank with all cores may be faster, and was not measured here."
        )
    return ""


def _cores(group: Group) -> str:
    count = group.sample.plan.layout.cores_per_rank
    return f"{count} core{'s' * (count > 1)}"


def _is_same_work(group: Group, other: Group, point: Point) -> bool:
    """Whether a point is of one rank that trains the same, with whatever cores and engine."""
    own, plan = group.sample.plan, other.sample.plan
    batch = own.global_batch if group.scaling == "strong" else group.baseline.batch_per_rank
    return (
        point.ranks == 1
        and point.batch_per_rank == batch
        and plan.series.variant == "plain"
        and plan.fault == own.fault
        and plan.system.name == own.system.name
        and _work(other.sample) == _work(group.sample)
    )


def _work(run: Run) -> dict[str, Any]:
    """What is trained, where on, and nothing of how batches are cut and read."""
    device = run.record.ranks[0].device.split(":")[0] if run.record is not None else ""
    workload = run.plan.workload.model_dump(
        exclude={"train": {"batch_per_rank"}, "data": {"loader_workers", "prefetch_batches"}}
    )
    return {**workload, "device": device, "phases": run.plan.measure.phases}
