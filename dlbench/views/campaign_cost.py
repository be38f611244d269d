"""The view `campaign-cost`: what the runs of a report cost on a Slurm cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import dlbench
from dlbench.analysis.sessions import wall_s
from dlbench.records.accounting import RunAccounting
from dlbench.records.scan import Run
from dlbench.report.document import MAX_LISTED, Document, Section
from dlbench.report.table import Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import number_text, percent, runs_text
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView, place_columns

PartName = Literal["measured", "overhead", "lost", "no_figure", "idle", "between", "unknown", "start", "rest"]

_PARTS: dict[PartName, str] = {
    "measured": "Measured steps",
    "overhead": "Start, warm-up, evaluation, end of these runs",
    "lost": "Attempts that were preempted or failed before",
    "no_figure": "Runs without a figure",
    "idle": "Nodes idle during a smaller run",
    "between": "Job outside its runs",
    "unknown": "Not measured: Slurm reports the job as a whole only",
}

_RECORDED: dict[PartName, str] = {
    "start": "in their start",
    "measured": "in measured steps",
    "rest": "in warm-up, evaluation and end",
}


def _hours(value: float) -> str:
    return f"{value:,.3g}"


def _energy_text(joules: float) -> str:
    return f"{joules / 3.6e6:,.3g} kWh" if joules >= 1e6 else f"{joules:,.3g} J"


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """One run of a job that has ended."""

    run_id: str = field(metadata=column("Run"))
    state: str = field(metadata=column("State"))
    job_id: str = field(metadata=column("Job"))
    job_state: str = field(metadata=column("Job's state"))
    exit_code: str = field(metadata=column("Exit"))  # Of its last step, else of its job; empty: not reported.
    source: str = field(metadata=column())
    waited_s: float | None = field(metadata=column("Wait", "queue_wait_s", unit="s"))
    elapsed_s: float | None = field(metadata=column("Elapsed", unit="s"))
    node_hours: float | None = field(metadata=column("Node-hours", text=_hours))
    """Nodes of the job, while the run was in it."""
    max_rss_bytes: float | None = field(metadata=column("Memory", unit="bytes"))
    energy_j: float | None = field(metadata=column("Energy", text=_energy_text))
    node_list: str = field(metadata=column("Nodes", limit=80))
    switches: tuple[str, ...] = field(metadata=column("Switches", "leaf_switches", value=",".join, limit=80))
    """Leaf switches of its nodes, by their paths from the root; empty where Slurm reports none."""
    not_measured: tuple[str, ...] = field(metadata=column(value="; ".join))  # Why figures are missing, each a sentence.


@dataclass(frozen=True, kw_only=True)
class PointCost:
    """The runs of one configuration at one number of ranks and nodes."""

    label: str = field(metadata=column("Runs of", "configuration", is_brief=True))
    ranks: int
    nodes: int
    runs: int
    results: int  # Runs with figures.
    node_hours: float | None = field(metadata=column("Node-hours", text=_hours))
    """None where that of a run is not known."""
    waited_s: float | None = field(metadata=column("Wait", "queue_wait_s", unit="s", is_brief=True))
    """Median over its jobs."""
    max_rss_bytes: float | None = field(metadata=column("Memory", unit="bytes", is_brief=True))
    energy_j: float | None = field(metadata=column("Energy", text=_energy_text))
    node_sets: int = field(metadata=column("Node sets", is_brief=True))
    """Different sets of nodes that its runs with figures had."""
    most_switches: int = field(metadata=column("Switches", "most_leaf_switches", is_brief=True))
    """Leaf switches that a run spans at most; 0: not reported."""

    @property
    def node_hours_per_result(self) -> float | None:
        """What a run with figures cost, those without included."""
        return None if self.node_hours is None or not self.results else self.node_hours / self.results


@dataclass(frozen=True, kw_only=True)
class CostPart:
    """Where node-hours went."""

    name: PartName = field(metadata=column("Node-hours went into", "part", text=lambda name: _PARTS[name]))
    node_hours: float = field(metadata=column("Node-hours", text=_hours))


@dataclass(frozen=True, kw_only=True)
class CampaignCost:
    """Of all runs of the report whose jobs have ended."""

    jobs: int
    untold: int  # Runs of Slurm jobs of which nothing is known; they are in no figure.
    results: int
    asked_node_hours: float | None  # Nodes x time limit; None where a job has no limit, or not all its runs are here.
    node_hours: float  # Nodes times elapsed time.
    parts: tuple[CostPart, ...]
    median_wait_s: float | None
    longest_wait_s: float | None
    energy_j: float | None
    why_no_energy: str
    points: tuple[PointCost, ...]
    runs: tuple[RunCost, ...]
    partial_jobs: int  # Jobs of which not all runs are here: counted with what these runs took.
    recorded: tuple[CostPart, ...]
    """What runs with figures say of their own time, from the start of rank 0 on: start, measured, rest."""
    why_not_apart: str  # Why Slurm does not separate some runs from the rest of their job; else empty.

    @property
    def share_measured(self) -> float | None:
        """Of the node-hours of which Slurm reports the use, those in measured steps; None: of none."""
        hours = {part.name: part.node_hours for part in self.parts}
        known = self.node_hours - hours.get("unknown", 0.0)
        return hours.get("measured", 0.0) / known if known > 0 else None


def campaign_cost(runs: Sequence[Run]) -> CampaignCost | None:
    """The cost of runs of Slurm jobs; None where nothing of any is known. Copies of a run count once."""
    accounted: dict[str, tuple[Run, RunAccounting]] = {}
    for run in runs:
        if run.accounting is not None:
            accounted.setdefault(run.plan.run_id, (run, run.accounting))
    if not accounted:
        return None
    jobs: dict[str, list[tuple[Run, RunAccounting]]] = {}
    for run, one in accounted.values():
        jobs.setdefault(one.job_id, []).append((run, one))
    partial = [job for job, held in jobs.items() if len(held) < len(held[0][1].job_runs)]
    parts = _parts(jobs, partial)
    waits = [wait for held in jobs.values() if (wait := held[0][1].waited_s) is not None]
    why_no_energy = (
        one.not_measured.get("energy_j", "")
        for _, one in accounted.values()
        if one.energy_j is None and not one.never_started
    )
    energies = [
        _sum_of_all([one.energy_j for _, one in held]) if job in partial else held[0][1].job_energy_j
        for job, held in jobs.items()
        if not held[0][1].never_started
    ]
    # Of all attempts: a job that is requeued asks for its nodes again.
    attempts = [attempt for held in jobs.values() for attempt in held[0][1].attempts]
    asked = _sum_of_all([None if one.time_limit_s is None else one.nodes * one.time_limit_s for one in attempts])
    groups: dict[tuple[str, int, int], list[tuple[Run, RunAccounting]]] = {}
    for run, one in accounted.values():
        label = f"{run.plan.workload.name} ({run.plan.workload.preset}), {run.plan.engine.name}"
        groups.setdefault((label, run.plan.layout.ranks, run.plan.layout.nodes), []).append((run, one))
    return CampaignCost(
        jobs=len(jobs),
        untold=sum(run.plan.system.scheduler == "slurm" and run.accounting is None for run in runs),
        results=sum(run.state == "valid" for run, _ in accounted.values()),
        asked_node_hours=asked / 3600 if asked is not None and not partial else None,
        node_hours=sum(parts.values()) / 3600,
        parts=tuple(CostPart(name=name, node_hours=seconds / 3600) for name, seconds in parts.items() if seconds),
        median_wait_s=median(waits) if waits else None,
        longest_wait_s=max(waits, default=None),
        energy_j=_sum_of_all(energies),
        why_no_energy=next(why_no_energy, ""),
        points=tuple(_point(*key, held) for key, held in sorted(groups.items())),
        runs=tuple(_run_cost(run, one) for run, one in accounted.values()),
        partial_jobs=len(partial),
        recorded=recorded_parts(run for run, _ in accounted.values()),
        why_not_apart=next(
            (one.not_measured.get("run_s", "") for run, one in accounted.values() if _node_s(run, one) is None), ""
        ),
    )


def recorded_parts(runs: Iterable[Run]) -> tuple[CostPart, ...]:
    """What runs with figures say of their own time, whatever Slurm says; none where there is no such run."""
    hours: dict[PartName, float] = dict.fromkeys(("start", "measured", "rest"), 0.0)
    for run in runs:
        if run.record is None or run.state != "valid":
            continue
        ranks = run.record.ranks
        start, measured = (max(getattr(rank, name) for rank in ranks) for name in ("startup_s", "measured_s"))
        # The record counts whole seconds.
        seconds = start, measured, max(0.0, (wall_s(run) or 0.0) - start - measured)
        for name, value in zip(hours, seconds, strict=True):
            hours[name] += run.plan.layout.nodes * value / 3600
    return tuple(CostPart(name=name, node_hours=value) for name, value in hours.items()) if any(hours.values()) else ()


def recorded_text(parts: Sequence[CostPart]) -> str:
    """The same in a sentence."""
    whole = sum(part.node_hours for part in parts)
    shares = ", ".join(f"{percent(part.node_hours / whole, 0)} {_RECORDED[part.name]}" for part in parts)
    return f"By their own records the runs with figures took {_hours(whole)} node-hours: {shares}."


def _sum_of_all(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _parts(jobs: Mapping[str, Sequence[tuple[Run, RunAccounting]]], partial: Sequence[str]) -> dict[PartName, float]:
    """Node-seconds of each part, largest meaning first."""
    names: tuple[PartName, ...] = ("measured", "overhead", "lost", "no_figure", "idle", "between", "unknown")
    parts = dict.fromkeys(names, 0.0)
    for job, held in jobs.items():
        of_runs = [_run_parts(run, one) for run, one in held]
        known = [own for own in of_runs if own is not None]
        for name, value in (item for own in known for item in own.items()):
            parts[name] += value
        if job not in partial:
            rest = max(0.0, held[0][1].job_node_s - sum(sum(own.values()) for own in known))
            parts["unknown" if None in of_runs else "between"] += rest
    return parts


def _run_parts(run: Run, one: RunAccounting) -> dict[PartName, float] | None:
    """Node-seconds of what the job held while a run was in it; None where that is not reported."""
    whole, seconds, nodes = _node_s(run, one), one.run_s, run.plan.layout.nodes
    if whole is None:
        return None
    if seconds is None:
        return {}
    used = min(whole, nodes * seconds)
    parts: dict[PartName, float] = {"idle": whole - used}
    if run.state != "valid" or run.record is None:
        return {**parts, "no_figure": used}
    earlier = one.steps[:-1] if one.steps else one.attempts[:-1]
    lost = min(used, nodes * sum(each.elapsed_s for each in earlier))
    # Slurm counts whole seconds: a run cannot have measured for longer than it ran.
    measured = min(used - lost, nodes * max(rank.measured_s for rank in run.record.ranks))
    return {**parts, "lost": lost, "measured": measured, "overhead": used - lost - measured}


def _node_s(run: Run, one: RunAccounting) -> float | None:
    """Node-seconds of its job while a run was in it; None where that is not reported.

    Without a step of its own a run that srun was to start never began, and took nothing.
    """
    has_steps = one.source == "sacct" and run.plan.system.launch.launcher.startswith("srun")
    never_began = one.never_started or (has_steps and run.record is None)
    return 0.0 if one.run_node_s is None and never_began else one.run_node_s


def _point(label: str, ranks: int, nodes: int, held: Sequence[tuple[Run, RunAccounting]]) -> PointCost:
    costs = [_run_cost(run, one) for run, one in held]
    hours = [cost.node_hours for cost in costs]
    energies = [cost.energy_j for cost in costs if cost.node_hours != 0]
    waits = {one.job_id: one.waited_s for _, one in held if one.waited_s is not None}
    return PointCost(
        label=label,
        ranks=ranks,
        nodes=nodes,
        runs=len(held),
        results=sum(run.state == "valid" for run, _ in held),
        node_hours=None if None in hours else sum(one for one in hours if one is not None),
        waited_s=median(waits.values()) if waits else None,
        max_rss_bytes=max((cost.max_rss_bytes for cost in costs if cost.max_rss_bytes is not None), default=None),
        energy_j=_sum_of_all(energies),
        node_sets=len({cost.node_list for cost in costs if cost.state == "valid"}),
        most_switches=max(len(cost.switches) for cost in costs),
    )


def _run_cost(run: Run, one: RunAccounting) -> RunCost:
    last = one.attempts[-1]
    ranks = run.record.ranks if run.record is not None else ()
    hosts = sorted({rank.host for rank in ranks})
    node_s = _node_s(run, one)
    return RunCost(
        run_id=run.plan.run_id,
        state=run.state,
        job_id=one.job_id,
        job_state=last.state,
        exit_code=(one.steps[-1].exit_code if one.steps else last.exit_code) or "",
        source=one.source,
        waited_s=one.waited_s,
        elapsed_s=one.run_s,
        node_hours=None if node_s is None else node_s / 3600,
        max_rss_bytes=one.max_rss_bytes,
        energy_j=one.energy_j,
        node_list=",".join(hosts) or (one.steps[-1].node_list if one.steps else last.node_list),
        switches=tuple(sorted({rank.switch for rank in ranks if rank.switch})),
        not_measured=tuple(dict.fromkeys(one.not_measured.values())),
    )


def cost_document(found: CampaignCost) -> Document:
    """One section, open, for every format."""
    section = cost_section(found)
    words = (f"{section.headline}.", *section.words)  # no line stands for an open section
    return Document(
        title=f"Cost of {runs_text(len(found.runs))} in {_jobs_text(found.jobs)}",
        dlbench_version=dlbench.__version__,
        sections=(dataclasses.replace(section, level="answer", headline="", words=words),),
        data=found,
        file_prefix="cost-",
        command="dlbench cost RUNS",
    )


class CampaignCostView(ReportView):
    """Node-hours asked for, used and wasted."""

    id = "campaign-cost"
    title = "What this campaign cost"
    key = "campaign_cost"
    after = "groups"

    def numbers(self, source: ReportSource) -> CampaignCost | None:
        return campaign_cost(source.scan.runs)

    def shown(self, report: Report, found: CampaignCost) -> Section:
        return cost_section(found)

    def remedy(self, report: Report) -> str:
        return "unknown: Slurm reported nothing of the jobs of these runs; `dlbench cost RUNS` asks it, and says why."


def cost_section(found: CampaignCost) -> Section:
    """The whole view, which `dlbench cost` prints alone."""
    # Slurm reports whole seconds.
    wait = "not known" if found.median_wait_s is None else f"{number_text(round(found.median_wait_s), 's')} (median)"
    share = found.share_measured
    steps = ", share of measured steps not measured" if found.node_hours else ""
    if share is not None:
        some = " of what Slurm reports separately" if found.why_not_apart else ""
        steps = f", {percent(share, 0)}{some} in measured steps"
    went_into = Column[CostPart]("share", "Share", lambda part: part.node_hours / found.node_hours, unit="fraction")
    columns = (*columns_of(CostPart), went_into)
    parts = Sheet(name="cost-parts", title="Where it went", columns=columns, rows=found.parts, in_terminal=True)
    runs = Sheet(
        name="cost-runs",
        title="Run by run",
        columns=drop_empty_columns(columns_of(RunCost), found.runs),
        rows=found.runs,
        is_sortable=True,
        is_folded=True,
        max_rows=MAX_LISTED,
    )
    return Section(
        id=CampaignCostView.id,
        title=CampaignCostView.title,
        headline=f"{_hours(found.node_hours)} node-hours in {_jobs_text(found.jobs)}{steps}; queue wait {wait}",
        words=tuple(_words(found)),
        sheets=(parts, _points_sheet(found), runs),
        notes=tuple(_notes(found)),
    )


def _jobs_text(count: int) -> str:
    return f"{count:,} job{'s' * (count != 1)}"


def _words(found: CampaignCost) -> Iterator[str]:
    asked = "Asked for: not reported."
    if found.asked_node_hours is not None:
        asked = f"Asked for {_hours(found.asked_node_hours)} node-hours (nodes x time limit)"
        if found.asked_node_hours:
            share = found.node_hours / found.asked_node_hours
            past = f"; jobs ran past their time limit and held {_hours(found.node_hours)}"
            asked += past if share > 1 else f", of which {percent(share, 0)} were held"
        asked += "."
    each = f", {_hours(found.node_hours / found.results)} node-hours each" if found.results else ""
    yield f"{asked} {runs_text(found.results)} with figures{each}."
    if found.why_not_apart:
        energy = " and their energy are" if found.why_no_energy == found.why_not_apart else " is"
        yield f"What the time of some runs went into{energy} not measured: {found.why_not_apart}."
        if found.recorded:
            yield recorded_text(found.recorded)
    if found.longest_wait_s is not None and found.jobs > 1:
        yield f"Longest queue wait: {number_text(found.longest_wait_s, 's')}."
    if found.energy_j is not None:
        yield f"Energy of the nodes by Slurm: {_energy_text(found.energy_j)}."
    elif found.why_no_energy not in ("", found.why_not_apart):
        yield f"Energy: not measured: {found.why_no_energy}."
    sets = max(point.node_sets for point in found.points)
    if max(point.results for point in found.points) > 1:
        yield (
            "All runs of a point had the same nodes: a slow node is in all of them (submit --rotate-nodes)."
            if sets == 1
            else f"Runs of a point had up to {sets} sets of nodes: differences between nodes are in their scatter."
        )
    if found.untold:
        yield f"{runs_text(found.untold)} left out: not ended, or Slurm reports nothing of their jobs."


def _notes(found: CampaignCost) -> Iterator[str]:
    sources = " and ".join(sorted({run.source for run in found.runs}))
    yield (
        f"Source: {sources}, in whole seconds; measured steps: the runs' records. Queue wait: from when a job could "
        "have started, all its starts added. Memory: resident memory of the largest task of srun, as often as Slurm "
        "looked; a task is a rank with all that it started, or under mpirun all ranks of a node but the first."
    )
    if found.partial_jobs:
        yield f"Not all runs of {_jobs_text(found.partial_jobs)} are here: these count with what the runs here took."
    said = {found.why_not_apart, "" if found.energy_j is not None else found.why_no_energy}
    missing = dict.fromkeys(reason for run in found.runs for reason in run.not_measured if reason not in said)
    yield from (f"Not measured: {reason}." for reason in missing)


def _points_sheet(found: CampaignCost) -> Sheet[PointCost]:
    labels = {point.label for point in found.points}
    columns = (
        *columns_of(PointCost, "label", titles={} if len(labels) > 1 else {"configuration": ""}),
        *place_columns(),
        *columns_of(
            PointCost,
            *("runs", "results"),
            Column("", "Figures", lambda point: f"{point.results} of {point.runs}", is_brief=True),
            "node_hours",
            Column(
                "node_hours_per_result",
                "Each",
                lambda point: point.node_hours_per_result,
                lambda point: None if point.node_hours_per_result is None else _hours(point.node_hours_per_result),
                is_brief=True,
            ),
            *("waited_s", "max_rss_bytes", "energy_j", "node_sets", "most_switches"),
        ),
    )
    return Sheet(
        name="cost-points",
        title="What a result cost",
        columns=drop_empty_columns(columns, found.points, keep=("queue_wait_s",)),
        rows=found.points,
        in_terminal=True,
        caption="Each: node-hours for a run with figures. Wait: median over jobs. Switches: leaf switches a run spans.",
    )
