"""What staging took on each node, and after how many epochs it has paid.

Break-even epochs = T_stage / (epoch in place - epoch staged), of groups that differ in nothing but the settings of
staging. Its interval is made of the ends of both: the shortest staging over the largest gain, and the longest over the
smallest; where the smallest is no gain there is no upper end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import about_means
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.data_path import StagingResult
from dlbench.stats.estimates import (
    Estimate,
    difference_estimate,
    geometric_mean_estimate,
    median_estimate,
    ratio_estimate,
)
from dlbench.stats.pairing import RunKey, pairing
from dlbench.views.data_path.epochs import STAGING_KEYS, alike, epoch_times


@dataclass(frozen=True, kw_only=True)
class StagingPoint:
    """Staging at one rank count; over its runs that say something of it."""

    ranks: int
    nodes: int
    strategy: str
    tier: str
    method: str
    streams: int
    seconds: Estimate
    """Until all nodes were ready; over runs that copied everything, where there are some, else over all."""
    num_reused: int
    """Runs that found some or all of it of an earlier run."""
    num_runs: int
    needed_bytes: int
    """On the node that needed most."""
    free_bytes: int
    """On the node that had least, before the first byte was copied."""
    copied_bytes: int
    """By all nodes of a run, the most of any."""
    slowest_bytes_per_s: float | None
    """Of a node, over all runs; None where nothing was copied before training."""
    fastest_bytes_per_s: float | None
    kept: bool
    paths: tuple[str, ...]
    verified: str


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Staging of a group of runs."""

    points: tuple[StagingPoint, ...]


def staged(group: Group, table: RunTable) -> Staged | None:
    """Staging at each rank count; None where no run staged."""
    points = tuple(found for point in group.points if (found := _point(point, table)) is not None)
    return Staged(points=points) if points else None


def _results(point: Point, table: RunTable) -> list[StagingResult]:
    records = (table.runs[run_id].record for run_id in point.run_ids)
    return [record.staging for record in records if record is not None and record.staging is not None]


def _point(point: Point, table: RunTable) -> StagingPoint | None:
    results = _results(point, table)
    if not results:
        return None
    first = results[0]
    nodes = [node for result in results for node in result.nodes]
    rates = [node.copied_bytes / node.seconds for node in nodes if node.copied_bytes and node.seconds]
    return StagingPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        strategy=first.strategy,
        tier=first.tier,
        method=", ".join(dict.fromkeys(result.method for result in results)),
        streams=first.streams,
        seconds=_seconds(results),
        num_reused=sum(_has_reused(result) for result in results),
        num_runs=len(results),
        needed_bytes=max((node.needed_bytes for node in nodes), default=0),
        free_bytes=min((node.free_bytes for node in nodes), default=0),
        copied_bytes=max(sum(node.copied_bytes for node in result.nodes) for result in results),
        slowest_bytes_per_s=min(rates, default=None),
        fastest_bytes_per_s=max(rates, default=None),
        kept=any(result.kept for result in results),
        paths=tuple(dict.fromkeys(node.path for node in nodes)),
        verified=" | ".join(dict.fromkeys(result.verified for result in results)),
    )


def _has_reused(result: StagingResult) -> bool:
    return any(node.reused_bytes for node in result.nodes)


def _seconds(results: Sequence[StagingResult]) -> Estimate:
    """Runs that found samples of an earlier run say nothing of what copying takes."""
    whole = [result.seconds for result in results if not _has_reused(result)]
    return median_estimate(whole or [result.seconds for result in results], "s")


# Against reading in place


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """A staged group against the one that reads in place, at one rank count."""

    ranks: int
    nodes: int
    label: str
    """What the runs are."""
    staged_group: str
    """Id."""
    unstaged_group: str
    strategy: str
    tier: str
    staging: Estimate
    """Seconds until all nodes were ready."""
    unstaged_epoch: Estimate
    """Seconds of an epoch, reading in place."""
    staged_epoch: Estimate
    gain: Estimate
    """Of an epoch: seconds in place less seconds staged."""
    factor: Estimate
    """Epoch in place over epoch staged: above 1, staged epochs are faster."""
    is_paired: bool
    """Whether both ran in the same repeats of one series."""
    epochs: float | None
    """Break-even epochs; None: never, by these means, or nothing is copied before training."""
    epochs_low: float | None
    epochs_high: float | None
    """None: no upper end."""
    is_lazy: bool
    """Nothing is copied before training: there is nothing to pay back."""


def break_evens(groups: Sequence[Group], table: RunTable) -> tuple[BreakEven, ...]:
    """Every staged group beside the one that differs in nothing but staging, by rank count."""
    rows = []
    for members in alike(groups, STAGING_KEYS):
        in_place = next((group for group in members if _strategy(group) == "none"), None)
        if in_place is None:
            continue
        for group in members:
            if group is not in_place:
                rows += _against(group, in_place, table)
    return tuple(rows)


def _strategy(group: Group) -> str:
    return group.sample.plan.workload.data.staging


def _against(group: Group, in_place: Group, table: RunTable) -> list[BreakEven]:
    others = {(point.ranks, point.nodes): point for point in in_place.points}
    found = []
    for point in group.points:
        other = others.get((point.ranks, point.nodes))
        results = _results(point, table)
        if other is None or not results:
            continue
        own, reference = epoch_times(point, table), epoch_times(other, table)
        if own and reference:
            found.append(_row((group, in_place), point, _seconds(results), own, reference))
    return found


def _about_mean(epochs: Mapping[RunKey, float]) -> dict[RunKey, float]:
    return {key: one["s"] for key, one in zip(epochs, about_means([{"s": s} for s in epochs.values()]), strict=True)}


def _row(
    groups: tuple[Group, Group],
    point: Point,
    staging: Estimate,
    own: Mapping[RunKey, float],
    reference: Mapping[RunKey, float],
) -> BreakEven:
    plan = groups[0].sample.plan
    gain = difference_estimate(_about_mean(reference), _about_mean(own), "s")
    is_lazy = plan.workload.data.staging == "lazy"
    low, value, high = (None, None, None) if is_lazy else break_even_epochs(staging, gain)
    return BreakEven(
        ranks=point.ranks,
        nodes=point.nodes,
        label=f"{plan.workload.name}, {plan.workload.preset} preset",
        staged_group=groups[0].id,
        unstaged_group=groups[1].id,
        strategy=plan.workload.data.staging,
        tier=plan.workload.data.staging_tier,
        staging=staging,
        unstaged_epoch=geometric_mean_estimate(list(reference.values()), "s"),
        staged_epoch=geometric_mean_estimate(list(own.values()), "s"),
        gain=gain,
        factor=ratio_estimate(reference, own),
        is_paired=pairing(reference, own).is_paired,
        epochs=value,
        epochs_low=low,
        epochs_high=high,
        is_lazy=is_lazy,
    )


def break_even_epochs(staging: Estimate, gain: Estimate) -> tuple[float | None, float | None, float | None]:
    """Low end, value and high end of the epochs after which staging has paid; None where there is none.

    Args:
        staging: seconds of staging.
        gain: seconds that an epoch gains.
    """
    value = staging.value / gain.value if gain.value > 0 else None
    low = high = None
    if gain.high is not None and gain.high > 0:
        low = (staging.low if staging.low is not None else staging.value) / gain.high
    if gain.low is not None and gain.low > 0:
        high = (staging.high if staging.high is not None else staging.value) / gain.low
    return low, value, high
