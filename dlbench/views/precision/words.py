"""Sentences on a comparison of precisions: what is compared, under which conditions, and which one is faster."""

from __future__ import annotations

from collections.abc import Mapping

from dlbench.report.wording import ENGINE_TITLES, basis_text, place_text, times_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdicts import placed


def label(plan: RunPlan) -> str:
    """What the groups have in common, in short."""
    return (
        f"{plan.workload.name}, {plan.workload.preset} preset, {ENGINE_TITLES[plan.engine.name]}, "
        f"{plan.series.scaling} scaling"
    )


def caption(plan: RunPlan) -> str:
    """The conditions, with the reference: `plan` is of one of its runs."""
    unit = plan.workload.sample_unit
    batch = (
        f"{plan.global_batch} {unit} global batch"
        if plan.series.scaling == "strong"
        else f"{plan.workload.train.batch_per_rank} {unit} per rank"
    )
    data = "synthetic data" if plan.workload.data.is_synthetic else "real data"
    data += " on the device" * (plan.workload.data.is_synthetic and plan.workload.data.synthetic_on == "device")
    return (
        f"{batch}; {data}; on {plan.system.name}; ratios over {plan.workload.train.precision} at the same rank count."
    )


def verdict(ranks: int, nodes: int, ratios: Mapping[str, Estimate], reference: str) -> str:
    """Of one rank count; an interval that holds 1 decides nothing.

    Args:
        ranks: the rank count.
        nodes: on so many nodes.
        ratios: throughput over the reference's, by precision.
        reference: the precision that the others are compared with.
    """
    parts = [
        f"{precision} {_judged(ratio)} {reference}, {times_text(ratio)} ({basis_text(ratio)})"
        for precision, ratio in ratios.items()
    ]
    return f"At {place_text(ranks, nodes)}: {'; '.join(parts)}."


def _judged(ratio: Estimate) -> str:
    return {
        "insufficient": "has too few runs for a verdict against",
        "above": "is faster than",
        "below": "is slower than",
    }.get(placed(ratio, 1, 1), "cannot be distinguished from")


def notes(*, is_interleaved: bool, is_finite: bool) -> tuple[str, ...]:
    """What weakens the comparison, in phrases."""
    found = []
    if not is_interleaved:
        found.append(
            "repeats did not run interleaved, so drift of the machine is part of these ratios; use --sweep "
            "train.precision=fp32,bf16"
        )
    if not is_finite:
        found.append("runs whose loss was not finite count for throughput alone")
    return tuple(found)
