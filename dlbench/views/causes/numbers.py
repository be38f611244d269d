"""The one account of the lost percent: what is lost to which part, who was waited for, what to try.

The seconds of each run by part are those of `dlbench.reading.causes`; figures over the runs of a point, and lost shares
that sum to 1 - efficiency, are made by `dlbench.reading.attribution`. Everything that a report says of lost points, in
tables, charts and sentences, is read from here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import Part, attribute, complement
from dlbench.reading.causes import CAUSES, COMPUTE_PARTS, EXCHANGE_PHASE, INPUT_PARTS, WAIT_PARTS, Causes
from dlbench.reading.hosts.slow_nodes import SlowNodes, slow_nodes
from dlbench.reading.late_ranks import Straggler, main_host, main_straggler, ranking
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.views.causes.diagnosis import Verdict, adjusted_p, diagnose
from dlbench.views.causes.experiments import Case


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
    """What it consists of: `compute` of forward, backward and optimizer; `input` of fetching, preparing and the copy,
    or, where runs do not say what their readers did, of the wait and the copy. They sum to its own."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """The causes of a point, what two of them are part of, and their sum."""

    causes: tuple[CauseShare, ...]
    exchange_phase: Part
    whole: CauseShare


@dataclass(frozen=True, kw_only=True)
class Pop:
    """The metrics of the POP project, of one scaling point by itself, fractions; geometric means over runs.

    POP (Performance Optimisation and Productivity, "POP Standard Metrics for Parallel Performance Analysis"; Scalasca
    and Extrae print them) compares whole runs and not steps. With each rank's useful time, outside of communication,

        load balance = mean / maximum useful time, communication efficiency = maximum useful time / run time,

    and parallel efficiency is their product. A rank that is late, now one and now another, is waited for in every step
    and balanced over the run: here it lowers communication efficiency, in the account it is waiting for stragglers.
    """

    load_balance: Estimate
    communication: Estimate
    parallel: Estimate
    """Their product."""


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
    """By `CAUSES`; seconds sum to the mean step, lost shares to 1 - efficiency."""
    exchange_phase: Part
    """The gradient exchange after the backward pass: `exchange`, on the wire, and `straggler`, waiting."""
    whole: CauseShare
    """The mean step; its lost share is 1 - efficiency, with the interval of the efficiency."""
    pop: Pop | None
    """None where some rank does nothing but communicate."""
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

    @property
    def largest(self) -> CauseShare:
        """The cause that loses most, certain or not."""
        return max(self.causes, key=lambda share: share.lost.value)


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """What monitoring cost in the runs of a group."""

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
    """The account of every rank count, and who was waited for."""

    diagnosed: Diagnosed
    nodes: SlowNodes
    """Of this group's hosts only, over all runs of the folder."""

    def at(self, point: Point) -> CausePoint | None:
        """The account of one rank and node count; None where it has none."""
        place = point.ranks, point.nodes
        return next((one for one in self.diagnosed.points if (one.ranks, one.nodes) == place), None)


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
    accounts = _adjusted([_account(point, group.baseline, table) for point in group.points], table)
    own = {host for run in group.runs for host in table.causes[run.plan.run_id].hosts}
    described = describe(group.sample)
    return LostPercent(
        diagnosed=Diagnosed(
            watching=described["watching"],
            fault=described["fault"],
            watch_cost=_watch_cost(group.runs),
            limits=_limits(table.runs[group.points[-1].run_ids[0]]),
            points=tuple(
                _point(point, found, table, history.exclude, network)
                for point, found in zip(group.points, accounts, strict=True)
            ),
        ),
        nodes=dataclasses.replace(history, hosts=tuple(one for one in history.hosts if one.host in own)),
    )


def _adjusted(points: Sequence[Account], table: RunTable) -> list[Account]:
    """The same with p values that are adjusted over the report."""
    cells = table.figures[["group", "ranks", "nodes"]].drop_duplicates()["group"].value_counts()
    measured = [[share for share in one.causes if share.is_measured] for one in points]
    found = adjusted_p(measured, int((cells > 1).sum()))
    return [
        dataclasses.replace(
            one, causes=tuple(dataclasses.replace(share, adjusted_p=by_name.get(share.name)) for share in one.causes)
        )
        for one, by_name in zip(points, found, strict=True)
    ]


def _point(
    point: Point, account: Account, table: RunTable, exclude: tuple[str, ...], network: NetworkModel | None
) -> CausePoint:
    own = [table.causes[run_id] for run_id in point.run_ids]
    runs = tuple(table.runs[run_id] for run_id in point.run_ids)
    ranks, hosts = ranking(own)
    case = Case(
        runs=runs,
        point=point,
        is_baseline=point.is_baseline,
        parts=account.causes,
        whole=account.whole,
        adjusted_p={share.name: share.adjusted_p for share in account.causes if share.adjusted_p is not None},
        compute_parts=account.causes[CAUSES.index("compute")].parts,
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
        causes=account.causes,
        exchange_phase=account.exchange_phase,
        whole=account.whole,
        pop=_pop({table.keys[run_id]: table.causes[run_id] for run_id in point.run_ids}),
        waiting_ranks=ranks,
        waiting_hosts=hosts,
        num_hosts=max(len(set(one.hosts)) for one in own),
        planted=_planted(runs, own),
    )


def _pop(runs: Mapping[RunKey, Causes]) -> Pop | None:
    """POP's metrics over runs of one scaling point; None where some rank of theirs does nothing but communicate."""
    if any(min(run.work_ns) <= 0 for run in runs.values()):
        return None
    times = {
        key: (statistics.fmean(run.work_ns), max(run.work_ns), sum(run.sums_ns.values()) / run.ranks)
        for key, run in runs.items()
    }

    def over_runs(top: int, bottom: int) -> Estimate:
        return geometric_mean_estimate({key: time[top] / time[bottom] for key, time in times.items()}, "fraction")

    return Pop(load_balance=over_runs(0, 1), communication=over_runs(1, 2), parallel=over_runs(0, 2))


def _account(point: Point, baseline: Point, table: RunTable) -> Account:
    """The parts of a point against the baseline."""
    own, base = ([table.causes[run_id] for run_id in one.run_ids] for one in (point, baseline))
    unknown = _reasons([*own, *base])
    knows_readers = all(one.knows_readers for one in (*own, *base))
    inputs = INPUT_PARTS if knows_readers else WAIT_PARTS
    found = attribute(
        _seconds(point, table, unknown),
        _seconds(baseline, table, unknown),
        work=_work(point, baseline, table),
        names=CAUSES,
        beside=(EXCHANGE_PHASE, *COMPUTE_PARTS, *inputs),
        is_baseline=point.is_baseline,
    )
    consists = {"compute": COMPUTE_PARTS, "input": inputs}

    def share(part: Part) -> CauseShare:
        return CauseShare(
            parts=tuple(found.beside[name] for name in consists.get(part.name, ())),
            name=part.name,
            seconds=part.seconds,
            ideal_seconds=part.ideal_seconds,
            lost=part.lost,
            p=part.p,
            is_measured=part.name not in unknown,
            not_measured=unknown.get(part.name, ()),
            notes=_notes(part.name, own),
        )

    # To the last bit what the efficiency is printed from.
    lost = by_definition(0.0, len(own), "fraction") if point.is_baseline else complement(point.efficiency)
    return Account(
        causes=tuple(map(share, found.parts)),
        exchange_phase=found.beside[EXCHANGE_PHASE],
        whole=dataclasses.replace(share(found.whole), lost=lost),
    )


def _seconds(point: Point, table: RunTable, unknown: Collection[str]) -> dict[RunKey, dict[str, float]]:
    keys = table.keys
    return {keys[run_id]: table.causes[run_id].seconds_without(unknown) for run_id in point.run_ids}


def _work(point: Point, baseline: Point, table: RunTable) -> float:
    """Samples per rank and step of a point over those of the baseline, over the runs that the efficiency is made of."""
    rows = table.figures.set_index("run_id")
    samples = rows["samples"] / (rows["ranks"] * rows["steps"])
    keys = table.keys
    own, base = ({keys[run_id]: float(samples[run_id]) for run_id in one.run_ids} for one in (point, baseline))
    return ratio_estimate(own, base).value


def _reasons(runs: Sequence[Causes]) -> dict[str, tuple[str, ...]]:
    """Causes of which some of these runs say nothing, and why, each reason once."""
    return {
        name: reasons
        for name in CAUSES
        if (reasons := tuple(dict.fromkeys(one.not_measured[name] for one in runs if name in one.not_measured)))
    }


def _notes(name: str, runs: Sequence[Causes]) -> tuple[str, ...]:
    """How the runs of a point know a cause, or why it is 0."""
    if name == "input" and any(one.knows_readers for one in runs):
        return ("fetching and preparing share the wait for batches as they share the readers' time",)
    told = {
        "launch": [one.launch_evidence for one in runs],
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
        found.append("Nothing is exchanged: ranks drift apart and nobody waits; that is imbalance between ranks.")
    elif how != "flat":
        found.append(f"In exchange {how} ranks leave at different times, which blurs waiting for stragglers.")
    if record is not None and record.clock == "cuda-events":
        found.append("Phases are times of the training stream: what overlaps on other streams is not charged.")
    elif record is not None and len(record.ranks) > 1:
        found.append(
            "On a CPU the exchange shares the ranks' cores: what it takes from the backward pass is part of compute."
        )
    if record is not None and record.phases == "synchronised":
        found.append("Phases are synchronised: the device is waited for after each, so exchange hides less than usual.")
    return tuple(found)
