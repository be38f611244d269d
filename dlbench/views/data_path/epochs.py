"""Epoch times of groups that differ in how samples are staged or shuffled, and in nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dlbench.reading.comparability import averaged_id_without
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.stats.pairing import KnownKey, RunKey

STAGING_KEYS = ("staging", "staging_tier", "staging_streams", "keep_staged")
SHUFFLE_KEYS = ("shuffle", "partition")


def alike(groups: Sequence[Group], keys: Collection[str]) -> list[list[Group]]:
    """Groups of real data that differ in nothing but some keys of `data`, in sets of two or more, in their order."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if not group.sample.plan.workload.data.is_synthetic:
            found.setdefault(averaged_id_without(group.sample, keys), []).append(group)
    return [members for members in found.values() if len(members) > 1]


def epoch_samples(run: Run) -> int | None:
    """Samples of an epoch over all ranks; None where the record names no size of the data set."""
    data = {} if run.record is None else run.record.data
    size, dropped = data.get("num_samples"), data.get("dropped_per_epoch")
    if not isinstance(size, int) or size <= 0:
        return None
    return max(1, size - dropped) if isinstance(dropped, int) else size


def epoch_times(point: Point, table: RunTable) -> dict[RunKey, float]:
    """Seconds that an epoch takes at the measured rate of each run, by series and repeat.

    Runs of one series and repeat ran beside each other, whatever the group.
    """
    rates = table.figures.set_index("run_id")["throughput"]
    found: dict[RunKey, float] = {}
    for run_id in point.run_ids:
        run = table.runs[run_id]
        samples = epoch_samples(run)
        if samples is not None:
            place = run.plan.series
            key = KnownKey.of(f"{run.plan.created} {place.id}", place.repeat, table.sessions[run_id])
            found[key] = samples / float(rates[run_id])
    return found
