"""The causes of every scaling point against its baseline: what is lost to which cause, who was waited for, what to try.

The seconds of each run by cause are those of `dlbench.reading.causes`; means over the runs of a point and lost shares
are made as in `dlbench.reading.attribution`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import Part, attribute
from dlbench.reading.causes import CAUSES, INPUT_PARTS, Causes
from dlbench.reading.scaling import Group, Point
from dlbench.reading.slow_nodes import SlowNodes, slow_nodes
from dlbench.reading.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.certainty import adjusted_p
from dlbench.views.causes.diagnosis import Verdict, diagnose
from dlbench.views.causes.experiments import Case
from dlbench.views.stragglers.numbers import Straggler, main_host, main_straggler, ranking
from dlbench.views.waterfall.numbers import FactoredPoint, waterfall


@dataclass(frozen=True, kw_only=True)
class CauseShare(Part):
    """One cause at one scaling point; `step` for their sum."""

    is_measured: bool
    """Whether all runs of the point and of the baseline say something of it. If not, its time is part of `compute` in
    all of them, because seconds that some report and others hide cannot be compared; its 0 s here mean nothing."""
    not_measured: tuple[str, ...]
    """Why some of these runs say nothing of it, each reason once."""
    notes: tuple[str, ...]
    """How runs know it, or why it is 0."""
    adjusted_p: float | None = None
    """Of its loss, after Holm over the causes of all rank counts of the group and Bonferroni over the groups of the
    report; None at the baseline, and for what is not measured."""
    parts: tuple[Part, ...] = ()
    """Of `input` in runs that say what their readers did: `INPUT_PARTS`; seconds and lost shares sum to its own."""


Shares = tuple[tuple[CauseShare, ...], CauseShare]
"""The causes of a point, and their sum."""


@dataclass(frozen=True, kw_only=True)
class CausePoint:
    """One rank count of a group."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...]
    verdict: Verdict
    efficiency: Estimate
    """A fraction, as in the view `scaling`."""
    causes: tuple[CauseShare, ...]
    """By `CAUSES`; seconds sum to the mean step, lost shares to 1 - efficiency of means."""
    whole: CauseShare
    waiting_ranks: tuple[Straggler, ...]
    """Ranks that were waited for, longest first."""
    waiting_hosts: tuple[Straggler, ...]
    """The same by host."""
    num_hosts: int
    """Hosts of a run, the most of any."""
    planted: tuple[tuple[int, float], ...]
    """Ranks slowed on purpose, and what that added, seconds per step, mean over runs."""

    def cause(self, name: str) -> CauseShare:
        """One of `CAUSES`."""
        return self.causes[CAUSES.index(name)]


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """What watching cost in the runs of a group."""

    value: float
    """Fraction of the step time. Measured: of the newest series that was, at its largest rank count. Accounted: median
    over runs."""
    low: float
    """Accounted: least low end of any run."""
    high: float
    """Accounted: largest high end of any run."""
    method: str
    """`measured` if that was done for any run, else `accounted`."""
    ranks: int | None
    """Where it was measured; None if accounted, over all rank counts."""
    num_runs: int
    """Runs behind it: pairs of watched and unwatched ones if measured."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """The causes of all rank counts of a group."""

    watching: str
    fault: str
    """A fault planted on purpose; empty for none."""
    watch_cost: WatchCost | None
    limits: tuple[str, ...]
    """What blurs the causes of these runs, each a sentence."""
    points: tuple[CausePoint, ...]
    """The baseline first."""


@dataclass(frozen=True, kw_only=True)
class LostPercent:
    """Efficiency lost by factor and by cause at every rank count, and who was waited for."""

    waterfall: tuple[FactoredPoint, ...]
    """By rank count, the baseline first."""
    diagnosed: Diagnosed
    nodes: SlowNodes
    """Of this group's hosts only, over all runs of the folder."""


def lost_percent(group: Group, table: RunTable, network: NetworkModel | None = None) -> LostPercent | None:
    """Where the lost percent goes.

    None where the table was made without causes, and for runs with something taken away on purpose: a run without
    exchange has no exchange to blame, and is read beside the plain runs.

    Args:
        group: comparable runs.
        table: made `with_causes`, of the same runs.
        network: fitted costs, for forecasts; None: only bounds.
    """
    if not table.causes or group.sample.plan.series.variant != "plain":
        return None
    history = slow_nodes(table)
    shares = _adjusted([_shares(point, group.baseline, table) for point in group.points], table)
    own = {host for run in group.runs for host in table.causes[run.plan.run_id].hosts}
    described = describe(group.sample)
    return LostPercent(
        waterfall=waterfall(group, table),
        diagnosed=Diagnosed(
            watching=described["watching"],
            fault=described["fault"],
            watch_cost=_watch_cost(group.runs),
            limits=_limits(table.runs[group.points[-1].run_ids[0]]),
            points=tuple(
                _point(point, found, table, history.exclude, network)
                for point, found in zip(group.points, shares, strict=True)
            ),
        ),
        nodes=dataclasses.replace(history, hosts=tuple(one for one in history.hosts if one.host in own)),
    )


def _adjusted(points: Sequence[Shares], table: RunTable) -> list[Shares]:
    """The same with p values that are adjusted over the report."""
    cells = table.figures[["group", "ranks", "nodes"]].drop_duplicates()["group"].value_counts()
    found = adjusted_p([[share for share in parts if share.is_measured] for parts, _ in points], int((cells > 1).sum()))
    return [
        (tuple(dataclasses.replace(share, adjusted_p=by_name.get(share.name)) for share in parts), whole)
        for (parts, whole), by_name in zip(points, found, strict=True)
    ]


def _point(
    point: Point, shares: Shares, table: RunTable, exclude: tuple[str, ...], network: NetworkModel | None
) -> CausePoint:
    own = [table.causes[run_id] for run_id in point.run_ids]
    runs = tuple(table.runs[run_id] for run_id in point.run_ids)
    parts, whole = shares
    ranks, hosts = ranking(own)
    case = Case(
        runs=runs,
        point=point,
        is_baseline=point.is_baseline,
        parts=parts,
        whole=whole,
        adjusted_p={share.name: share.adjusted_p for share in parts if share.adjusted_p is not None},
        hosts=hosts,
        main_straggler=main_straggler(ranks, point.ranks) or main_host(hosts, own),
        exclude=exclude,
    )
    return CausePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=point.is_baseline,
        run_ids=point.run_ids,
        verdict=diagnose(case, network),
        efficiency=point.efficiency,
        causes=parts,
        whole=whole,
        waiting_ranks=ranks,
        waiting_hosts=hosts,
        num_hosts=max(len(set(one.hosts)) for one in own),
        planted=_planted(runs, own),
    )


def _shares(point: Point, baseline: Point, table: RunTable) -> Shares:
    """The causes of a point, and their sum."""
    keys = table.keys
    own = [table.causes[run_id] for run_id in point.run_ids]
    unknown = _reasons([*own, *(table.causes[run_id] for run_id in baseline.run_ids)])
    attribution = attribute(
        {keys[run_id]: table.causes[run_id].seconds_without(unknown) for run_id in point.run_ids},
        {keys[run_id]: table.causes[run_id].seconds_without(unknown) for run_id in baseline.run_ids},
        work=point.batch_per_rank / baseline.batch_per_rank,
        is_baseline=point.is_baseline,
        names=CAUSES,
    )

    input_parts = _input_parts(point, baseline, table)

    def share(part: Part) -> CauseShare:
        return CauseShare(
            parts=input_parts if part.name == "input" else (),
            name=part.name,
            seconds=part.seconds,
            ideal_seconds=part.ideal_seconds,
            lost=part.lost,
            p=part.p,
            is_measured=part.name not in unknown,
            not_measured=unknown.get(part.name, ()),
            notes=_notes(part.name, own),
        )

    return tuple(map(share, attribution.parts)), share(attribution.whole)


def _input_parts(point: Point, baseline: Point, table: RunTable) -> tuple[Part, ...]:
    """`INPUT_PARTS` at a point; empty unless all its runs and the baseline's say what their readers did."""
    keys = table.keys
    if not all(table.causes[run_id].input_ns for run_id in (*point.run_ids, *baseline.run_ids)):
        return ()

    def seconds(run_id: str) -> dict[str, float]:
        found = table.causes[run_id]
        return {**found.input_seconds, "beside": sum(found.seconds.values()) - found.seconds["input"]}

    attribution = attribute(
        {keys[run_id]: seconds(run_id) for run_id in point.run_ids},
        {keys[run_id]: seconds(run_id) for run_id in baseline.run_ids},
        work=point.batch_per_rank / baseline.batch_per_rank,
        is_baseline=point.is_baseline,
        names=(*INPUT_PARTS, "beside"),
    )
    return attribution.parts[:-1]


def _reasons(runs: Sequence[Causes]) -> dict[str, tuple[str, ...]]:
    """Causes of which some of these runs say nothing, and why, each reason once."""
    return {
        name: reasons
        for name in CAUSES
        if (reasons := tuple(dict.fromkeys(one.not_measured[name] for one in runs if name in one.not_measured)))
    }


def _notes(name: str, runs: Sequence[Causes]) -> tuple[str, ...]:
    """How the runs of a point know a cause, or why it is 0."""
    if name == "input" and any(one.input_ns for one in runs):
        return ("the wait for batches is shared out as readers shared their time; the copy is measured",)
    told = {
        "throttling": [one.throttling_evidence for one in runs],
        "memory": [one.memory_evidence for one in runs],
    }
    return tuple(dict.fromkeys(filter(None, told.get(name, ()))))


def _planted(runs: Sequence[Run], causes: Sequence[Causes]) -> tuple[tuple[int, float], ...]:
    """Ranks with a planted fault and seconds per step that it added, mean over the runs."""
    added: dict[int, float] = {}
    for run, found in zip(runs, causes, strict=True):
        assert run.record is not None
        for rank in run.record.ranks:
            if rank.planted_s:
                added[rank.rank] = added.get(rank.rank, 0.0) + rank.planted_s / found.steps / len(runs)
    return tuple(sorted(added.items()))


def _watch_cost(runs: Sequence[Run]) -> WatchCost | None:
    """Measured, if that was done for any run; all runs of a series and rank count carry the same figure then."""
    found = [(run.plan, run.watch_overhead) for run in runs]
    measured = [(plan, one) for plan, one in found if one is not None and one.method == "measured"]
    if measured:
        plan, newest = max(measured, key=lambda pair: (pair[0].created, pair[0].layout.ranks, pair[0].series.position))
        return WatchCost(
            value=newest.value,
            low=newest.low,
            high=newest.high,
            method="measured",
            ranks=plan.layout.ranks,
            num_runs=newest.num_pairs,
        )
    accounted = [one for _, one in found if one is not None]
    if not accounted:
        return None
    return WatchCost(
        value=statistics.median(one.value for one in accounted),
        low=min(one.low for one in accounted),
        high=max(one.high for one in accounted),
        method="accounted",
        ranks=None,
        num_runs=len(accounted),
    )


def _limits(sample: Run) -> tuple[str, ...]:
    """What blurs the causes of these runs, each a sentence."""
    record = sample.record
    found = []
    result = None if record is None else record.exchange
    how = sample.plan.sync.exchange if result is None else result.exchange
    if how == "none":
        found.append("Nothing is exchanged: ranks drift apart and nobody waits; what is late shows in the rest.")
    elif how != "flat":
        found.append(f"In exchange {how} ranks leave at different times: waiting for late ranks is blurred by that.")
    if record is not None and record.clock == "cuda-events":
        found.append("Phases are times of the training stream: what overlaps on other streams is not charged.")
    elif record is not None and len(record.ranks) > 1:
        found.append(
            "On a CPU the exchange shares the ranks' cores: what it takes from the backward pass shows as compute."
        )
    if record is not None and record.phases == "synchronised":
        found.append("Phases are synchronised: the device is waited for after each, so exchange hides less than usual.")
    return tuple(found)
