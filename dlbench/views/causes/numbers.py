"""The causes of every scaling point against its baseline: what is lost to which cause, and who was waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import Part, attribute
from dlbench.reading.causes import CAUSES, Causes
from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group, Point
from dlbench.reading.stragglers import Late, Waited, ranking
from dlbench.stats.estimates import RunKey


@dataclass(frozen=True, kw_only=True)
class CausePoint:
    """One scaling point."""

    point: Point
    is_baseline: bool
    parts: tuple[Part, ...]
    """By `CAUSES`; seconds sum to the mean step, lost shares to 1 - efficiency of means."""
    whole: Part
    not_measured: dict[str, tuple[str, ...]]
    """Causes of which some of its runs or of the baseline's do not tell, with each reason once. In all these runs their
    time is part of `compute`: seconds that some tell and others hide in `compute` can be compared by nobody."""
    throttling_evidence: tuple[str, ...]
    """How lowered clocks are known, each once."""
    ranks: tuple[Late, ...]
    """Ranks that were waited for, longest first."""
    hosts: tuple[Late, ...]
    """The same by host."""
    num_hosts: int
    """Hosts of a run, the most of any."""
    main_host: Late | None
    """The host for whose ranks most of the waiting was, of several; None where hosts take turns.

    If s of the ranks are on it, it must hold a share of (1 + s) / 2 of the waiting: half-way from an even share to all.
    """

    def part(self, name: str) -> Part:
        """One of `CAUSES`."""
        return self.parts[CAUSES.index(name)]

    @property
    def main_straggler(self) -> Late | None:
        """The rank for which most of the waiting was; None where ranks take turns.

        With p ranks it must hold a share of (1 + 1/p) / 2 of it: half-way from an even share to all.
        """
        first = self.ranks[0] if self.ranks else None
        return first if first is not None and first.waited_share >= (1 + 1 / self.point.ranks) / 2 else None


def cause_points(group: Group, table: RunTable) -> tuple[CausePoint, ...]:
    """The points of a group, baseline first.

    Args:
        group: comparable runs.
        table: made `with_causes`, of the same runs.
    """
    keys = _keys(table)
    baseline = group.baseline
    return tuple(_point(point, table.causes, keys, baseline, is_baseline=point is baseline) for point in group.points)


def _point(
    point: Point, causes: Mapping[str, Causes], keys: Mapping[str, RunKey], baseline: Point, *, is_baseline: bool
) -> CausePoint:
    own = [causes[run_id] for run_id in point.run_ids]
    not_measured = _reasons([*own, *(causes[run_id] for run_id in baseline.run_ids)])
    account = attribute(
        {keys[run_id]: causes[run_id].seconds_without(not_measured) for run_id in point.run_ids},
        {keys[run_id]: causes[run_id].seconds_without(not_measured) for run_id in baseline.run_ids},
        work=point.batch_per_rank / baseline.batch_per_rank,
        is_baseline=is_baseline,
        names=CAUSES,
    )
    ranks, hosts = ranking([Waited(waiting=one.waiting, hosts=one.hosts, steps=one.steps) for one in own])
    return CausePoint(
        point=point,
        is_baseline=is_baseline,
        parts=account.parts,
        whole=account.whole,
        not_measured=not_measured,
        throttling_evidence=tuple(dict.fromkeys(one.throttling_evidence for one in own if one.throttling_evidence)),
        ranks=ranks,
        hosts=hosts,
        num_hosts=max(len(set(one.hosts)) for one in own),
        main_host=_main_host(hosts, own),
    )


def _main_host(hosts: Sequence[Late], runs: Sequence[Causes]) -> Late | None:
    if not hosts or all(len(set(run.hosts)) == 1 for run in runs):
        return None
    first = hosts[0]
    even = sum(run.hosts.count(first.host) / run.ranks for run in runs) / len(runs)
    return first if first.waited_share >= (1 + even) / 2 else None


def _keys(table: RunTable) -> dict[str, RunKey]:
    """Block and repeat of each run, by run id."""
    rows = zip(table.figures["run_id"], table.figures["block"], table.figures["repeat"], strict=True)
    return {str(run_id): (str(block), int(repeat)) for run_id, block, repeat in rows}


def _reasons(causes: Sequence[Causes]) -> dict[str, tuple[str, ...]]:
    return {
        name: reasons
        for name in CAUSES
        if (reasons := tuple(dict.fromkeys(one.not_measured[name] for one in causes if name in one.not_measured)))
    }
