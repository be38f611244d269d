"""The view `campaign-cost`: what the runs of a report cost on a Slurm cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Literal

import dlbench
from dlbench.analysis.repeats import wall_s
from dlbench.analysis.scaling import group_by
from dlbench.records.accounting import Attempt, RunAccounting
from dlbench.records.scan import Run
from dlbench.report.document import MAX_LISTED, Document, Section
from dlbench.report.table import Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import number_text, percent, runs_text
from dlbench.units import counted
from dlbench.views.model import Report, ReportSource, ReportView, place_columns

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
    if joules >= 1e6:
        return f"{joules / 3.6e6:,.3g} kWh"
    return f"{joules:,.3g} J"


@dataclass(frozen=True)
class _JobRun:
    run: Run
    accounting: RunAccounting

    @property
    def is_result(self) -> bool:
        return self.run.state == "valid"

    @property
    def node_s(self) -> float | None:
        """Node-seconds of the job while the run was in it; None if Slurm does not report them, 0 if it never began."""
        has_steps = self.accounting.source == "sacct" and self.run.plan.system.launch.launcher.startswith("srun")
        never_began = self.accounting.never_started or (has_steps and self.run.record is None)
        if never_began and self.accounting.run_node_s is None:
            return 0.0
        return self.accounting.run_node_s


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
    node_hours: float | None = field(metadata=column("Node-hours", text=_hours))  # Over its time in the job.
    max_rss_bytes: float | None = field(metadata=column("Memory", unit="bytes"))
    energy_j: float | None = field(metadata=column("Energy", text=_energy_text))
    node_list: str = field(metadata=column("Nodes", limit=80))
    switches: tuple[str, ...] = field(metadata=column("Switches", "leaf_switches", value=",".join, limit=80))
    not_measured: tuple[str, ...] = field(metadata=column(value="; ".join))  # Why figures are missing, each a sentence.


@dataclass(frozen=True, kw_only=True)
class PointCost:
    """The runs of one configuration at one number of ranks and nodes."""

    label: str = field(metadata=column("Runs of", "configuration", is_brief=True))
    ranks: int
    nodes: int
    runs: int
    results: int  # Runs with figures.
    node_hours: float | None = field(metadata=column("Node-hours", text=_hours))  # None if that of a run is not known.
    waited_s: float | None = field(metadata=column("Wait", "queue_wait_s", unit="s", is_brief=True))
    max_rss_bytes: float | None = field(metadata=column("Memory", unit="bytes", is_brief=True))
    energy_j: float | None = field(metadata=column("Energy", text=_energy_text))
    node_sets: int = field(metadata=column("Node sets", is_brief=True))  # Sets of nodes of runs with figures.
    most_switches: int = field(metadata=column("Switches", "most_leaf_switches", is_brief=True))

    @property
    def node_hours_per_result(self) -> float | None:
        return self.node_hours / self.results if self.node_hours is not None and self.results else None


@dataclass(frozen=True, kw_only=True)
class CostPart:
    """Node-hours that went into one kind of work or loss."""

    name: PartName = field(metadata=column("Use of node-hours", "part", text=_PARTS.__getitem__))
    node_hours: float = field(metadata=column("Node-hours", text=_hours))


@dataclass(frozen=True, kw_only=True)
class CampaignCost:
    """The cost of all runs of the report whose jobs have ended."""

    jobs: int
    unaccounted_runs: int  # Runs of Slurm jobs that Slurm reports nothing of; they are in no figure.
    results: int
    requested_node_hours: (
        float | None
    )  # Nodes x time limit; None where a job has no limit, or not all its runs are here.
    node_hours: float  # Nodes times elapsed time.
    parts: tuple[CostPart, ...]
    median_wait_s: float | None
    longest_wait_s: float | None
    energy_j: float | None
    why_no_energy: str
    points: tuple[PointCost, ...]
    runs: tuple[RunCost, ...]
    partial_jobs: int  # Jobs of which not all runs are here: counted with what these runs took.
    recorded: tuple[CostPart, ...]  # By the records of runs with figures: start, measured, rest.
    why_not_separate: str  # Why Slurm does not separate some runs from their job; empty if it separates all.

    @property
    def share_measured(self) -> float | None:
        """Measured steps over the node-hours whose use Slurm reports (1); None if it reports the use of none."""
        hours = {part.name: part.node_hours for part in self.parts}
        reported = self.node_hours - hours.get("unknown", 0.0)
        if reported <= 0:
            return None
        return hours.get("measured", 0.0) / reported


@dataclass(frozen=True)
class _Job:
    """A Slurm job, with those of its runs that the report has."""

    runs: Sequence[_JobRun]

    @property
    def accounting(self) -> RunAccounting:
        return self.runs[0].accounting

    @property
    def is_partial(self) -> bool:
        """True if runs of the job are not in the report."""
        return len(self.runs) < len(self.accounting.job_runs)

    @property
    def energy_j(self) -> float | None:
        """Joules of the whole job, or of the runs in the report; None if not reported."""
        if self.is_partial:
            return _sum_of_all([job_run.accounting.energy_j for job_run in self.runs])
        return self.accounting.job_energy_j


def campaign_cost(runs: Sequence[Run]) -> CampaignCost | None:
    """Returns the cost of runs of Slurm jobs, each run once; None if Slurm reports nothing of any."""
    by_id: dict[str, _JobRun] = {}
    for run in runs:
        if run.accounting is not None:
            by_id.setdefault(run.plan.run_id, _JobRun(run, run.accounting))
    if not by_id:
        return None
    job_runs = list(by_id.values())
    jobs = [_Job(members) for members in group_by(job_runs, attrgetter("accounting.job_id")).values()]
    num_partial = sum(job.is_partial for job in jobs)
    parts = _parts(jobs)
    accountings = [job_run.accounting for job_run in job_runs]
    without_energy = (
        accounting.not_measured
        for accounting in accountings
        if accounting.energy_j is None and not accounting.never_started
    )
    not_separate = (job_run.accounting.not_measured for job_run in job_runs if job_run.node_s is None)
    waits = [job.accounting.waited_s for job in jobs if job.accounting.waited_s is not None]
    # Of all attempts: a job that is requeued asks for its nodes again.
    attempts = chain.from_iterable(job.accounting.attempts for job in jobs)
    requested_node_hours = None if num_partial else _sum_of_all([_asked_node_hours(attempt) for attempt in attempts])
    return CampaignCost(
        jobs=len(jobs),
        unaccounted_runs=sum(run.plan.system.scheduler == "slurm" and run.accounting is None for run in runs),
        results=sum(job_run.is_result for job_run in job_runs),
        requested_node_hours=requested_node_hours,
        node_hours=sum(parts.values()) / 3600,
        parts=tuple(CostPart(name=name, node_hours=seconds / 3600) for name, seconds in parts.items() if seconds),
        median_wait_s=_median(waits),
        longest_wait_s=max(waits, default=None),
        energy_j=_sum_of_all([job.energy_j for job in jobs if not job.accounting.never_started]),
        why_no_energy=next((reasons.get("energy_j", "") for reasons in without_energy), ""),
        points=tuple(_point(*key, members) for key, members in sorted(group_by(job_runs, _configuration).items())),
        runs=tuple(map(_run_cost, job_runs)),
        partial_jobs=num_partial,
        recorded=recorded_parts(job_run.run for job_run in job_runs),
        why_not_separate=next((reasons.get("run_s", "") for reasons in not_separate), ""),
    )


def _configuration(job_run: _JobRun) -> tuple[str, int, int]:
    plan = job_run.run.plan
    label = f"{plan.workload.name} ({plan.workload.preset}), {plan.engine.name}"
    return label, plan.layout.ranks, plan.layout.nodes


def _asked_node_hours(attempt: Attempt) -> float | None:
    return None if attempt.time_limit_s is None else attempt.nodes * attempt.time_limit_s / 3600


def recorded_parts(runs: Iterable[Run]) -> tuple[CostPart, ...]:
    """Returns node-hours by the records of the runs with figures, which need no accounting; empty without such runs."""
    hours: dict[PartName, float] = dict.fromkeys(("start", "measured", "rest"), 0.0)
    for run in runs:
        if run.record is None or run.state != "valid":
            continue
        start_s = max(rank.startup_s for rank in run.record.ranks)
        measured_s = max(rank.measured_s for rank in run.record.ranks)
        # The record counts whole seconds.
        rest_s = max(0.0, (wall_s(run) or 0.0) - start_s - measured_s)
        for name, seconds in zip(hours, (start_s, measured_s, rest_s), strict=True):
            hours[name] += run.plan.layout.nodes * seconds / 3600
    if not any(hours.values()):
        return ()
    return tuple(CostPart(name=name, node_hours=node_hours) for name, node_hours in hours.items())


def recorded_text(parts: Sequence[CostPart]) -> str:
    """Returns a sentence with the node-hours of `recorded_parts` and the share of each part."""
    total = sum(part.node_hours for part in parts)
    shares = ", ".join(f"{percent(part.node_hours / total, 0)} {_RECORDED[part.name]}" for part in parts)
    return f"By their own records the runs with figures took {_hours(total)} node-hours: {shares}."


def _sum_of_all(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return sum(numbers)


def _median(values: Collection[float]) -> float | None:
    return median(values) if values else None


def _parts(jobs: Sequence[_Job]) -> dict[PartName, float]:
    """Returns the node-seconds of each part, the part that tells most first."""
    parts = dict.fromkeys(_PARTS, 0.0)
    for job in jobs:
        parts_of_runs = [_run_parts(job_run) for job_run in job.runs]
        in_runs_s = 0.0
        for name, node_s in chain.from_iterable(parts.items() for parts in filter(None, parts_of_runs)):
            in_runs_s += node_s
            parts[name] += node_s
        if not job.is_partial:
            outside: PartName = "unknown" if None in parts_of_runs else "between"
            parts[outside] += max(0.0, job.accounting.job_node_s - in_runs_s)
    return parts


def _run_parts(job_run: _JobRun) -> dict[PartName, float] | None:
    """Returns the node-seconds of each part while the run was in its job; None if Slurm does not report them."""
    run, accounting = job_run.run, job_run.accounting
    held_s, nodes = job_run.node_s, run.plan.layout.nodes
    if held_s is None:
        return None
    if accounting.run_s is None:
        return {}
    used_s = min(held_s, nodes * accounting.run_s)
    parts: dict[PartName, float] = {"idle": held_s - used_s}
    if run.state != "valid" or run.record is None:
        return {**parts, "no_figure": used_s}
    earlier = accounting.steps[:-1] if accounting.steps else accounting.attempts[:-1]
    lost_s = min(used_s, nodes * sum(attempt.elapsed_s for attempt in earlier))
    # Slurm counts whole seconds: a run cannot have measured for longer than it ran.
    measured_s = min(used_s - lost_s, nodes * max(rank.measured_s for rank in run.record.ranks))
    return {**parts, "lost": lost_s, "measured": measured_s, "overhead": used_s - lost_s - measured_s}


def _point(label: str, ranks: int, nodes: int, job_runs: Sequence[_JobRun]) -> PointCost:
    costs = [_run_cost(job_run) for job_run in job_runs]
    accountings = [job_run.accounting for job_run in job_runs]
    waits = {accounting.job_id: accounting.waited_s for accounting in accountings if accounting.waited_s is not None}
    return PointCost(
        label=label,
        ranks=ranks,
        nodes=nodes,
        runs=len(job_runs),
        results=sum(job_run.is_result for job_run in job_runs),
        node_hours=_sum_of_all([cost.node_hours for cost in costs]),
        waited_s=_median(waits.values()),
        max_rss_bytes=max((cost.max_rss_bytes for cost in costs if cost.max_rss_bytes is not None), default=None),
        energy_j=_sum_of_all([cost.energy_j for cost in costs if cost.node_hours != 0]),
        node_sets=len({cost.node_list for cost in costs if cost.state == "valid"}),
        most_switches=max(len(cost.switches) for cost in costs),
    )


def _run_cost(job_run: _JobRun) -> RunCost:
    run, accounting = job_run.run, job_run.accounting
    last_attempt = accounting.attempts[-1]
    last = accounting.steps[-1] if accounting.steps else last_attempt
    ranks = run.record.ranks if run.record is not None else ()
    hosts = sorted({rank.host for rank in ranks})
    return RunCost(
        run_id=run.plan.run_id,
        state=run.state,
        job_id=accounting.job_id,
        job_state=last_attempt.state,
        exit_code=last.exit_code or "",
        source=accounting.source,
        waited_s=accounting.waited_s,
        elapsed_s=accounting.run_s,
        node_hours=None if job_run.node_s is None else job_run.node_s / 3600,
        max_rss_bytes=accounting.max_rss_bytes,
        energy_j=accounting.energy_j,
        node_list=",".join(hosts) or last.node_list,
        switches=tuple(sorted({rank.switch for rank in ranks if rank.switch})),
        not_measured=tuple(dict.fromkeys(accounting.not_measured.values())),
    )


def cost_document(cost: CampaignCost) -> Document:
    """Returns the cost as a document of one section, which is open in every format."""
    section = cost_section(cost)
    words = (f"{section.headline}.", *section.words)  # An open section has no line of its own for the headline.
    return Document(
        title=f"Cost of {runs_text(len(cost.runs))} in {counted(cost.jobs, 'job')}",
        dlbench_version=dlbench.__version__,
        sections=(dataclasses.replace(section, level="answer", headline="", words=words),),
        data=cost,
        file_prefix="cost-",
        command="dlbench cost RUNS",
    )


class CampaignCostView(ReportView):
    """Node-hours asked for, used and wasted."""

    id = "campaign-cost"
    title = "What this campaign cost"
    key = "campaign_cost"
    after = "groups"
    lack = "unknown: Slurm reported nothing of the jobs of these runs; `dlbench cost RUNS` asks Slurm, and says why."

    def numbers(self, source: ReportSource) -> CampaignCost | None:
        return campaign_cost(source.scan.runs)

    def shown(self, report: Report, cost: CampaignCost) -> Section:
        return cost_section(cost)


def cost_section(cost: CampaignCost) -> Section:
    """Returns the section of a report that `dlbench cost` prints alone."""
    wait = "not known"
    if cost.median_wait_s is not None:
        wait = f"{number_text(round(cost.median_wait_s), 's')} (median)"  # Slurm reports whole seconds.
    steps = ""
    if cost.share_measured is not None:
        basis = " of what Slurm reports separately" if cost.why_not_separate else ""
        steps = f", {percent(cost.share_measured, 0)}{basis} in measured steps"
    elif cost.node_hours:
        steps = ", share of measured steps not measured"
    share = Column[CostPart]("share", "Share", lambda part: part.node_hours / cost.node_hours, unit="fraction")
    columns = (*columns_of(CostPart), share)
    parts = Sheet(name="cost-parts", title="Where node-hours went", columns=columns, rows=cost.parts, in_terminal=True)
    runs = Sheet(
        name="cost-runs",
        title="Cost of each run",
        columns=drop_empty_columns(columns_of(RunCost), cost.runs),
        rows=cost.runs,
        is_sortable=True,
        is_folded=True,
        max_rows=MAX_LISTED,
    )
    return Section(
        id=CampaignCostView.id,
        title=CampaignCostView.title,
        headline=f"{_hours(cost.node_hours)} node-hours in {counted(cost.jobs, 'job')}{steps}; queue wait {wait}",
        words=tuple(_words(cost)),
        sheets=(parts, _points_sheet(cost), runs),
        notes=tuple(_notes(cost)),
    )


def _words(cost: CampaignCost) -> Iterator[str]:
    each = f", {_hours(cost.node_hours / cost.results)} node-hours each" if cost.results else ""
    yield f"{_asked_text(cost)} {runs_text(cost.results)} with figures{each}."
    if cost.why_not_separate:
        energy = " and their energy are" if cost.why_no_energy == cost.why_not_separate else " is"
        yield f"The use of the node-hours of some runs{energy} not measured: {cost.why_not_separate}."
        if cost.recorded:
            yield recorded_text(cost.recorded)
    if cost.longest_wait_s is not None and cost.jobs > 1:
        yield f"Longest queue wait: {number_text(cost.longest_wait_s, 's')}."
    if cost.energy_j is not None:
        yield f"Energy of the nodes, reported by Slurm: {_energy_text(cost.energy_j)}."
    elif cost.why_no_energy not in ("", cost.why_not_separate):
        yield f"Energy: not measured: {cost.why_no_energy}."
    most_node_sets = max(point.node_sets for point in cost.points)
    has_repeats = max(point.results for point in cost.points) > 1
    if has_repeats and most_node_sets == 1:
        yield "All runs of a point used the same nodes, so a slow node slows all of them (submit --rotate-nodes)."
    elif has_repeats:
        sets = f"{most_node_sets} sets of nodes"
        yield f"Runs of a point used up to {sets}: differences between nodes are part of their scatter."
    if cost.unaccounted_runs:
        yield f"{runs_text(cost.unaccounted_runs)} left out: not ended, or Slurm reports nothing of their jobs."


def _asked_text(cost: CampaignCost) -> str:
    if cost.requested_node_hours is None:
        return "Requested: not reported."
    asked = f"Requested: {_hours(cost.requested_node_hours)} node-hours (nodes x time limit)"
    if not cost.requested_node_hours:
        return f"{asked}."
    share = cost.node_hours / cost.requested_node_hours
    if share > 1:
        return f"{asked}; jobs exceeded their time limit and used {_hours(cost.node_hours)}."
    return f"{asked}, {percent(share, 0)} of them used."


def _notes(cost: CampaignCost) -> Iterator[str]:
    sources = " and ".join(sorted({run.source for run in cost.runs}))
    yield (
        f"Source: {sources}, in whole seconds; measured steps: the runs' records. Queue wait: from when a job could "
        "have started, summed over all its starts. Memory: largest resident memory of a task of srun, sampled by "
        "Slurm; a task is a rank with its child processes, or under mpirun all ranks of a node other than the first."
    )
    if cost.partial_jobs:
        yield (
            f"Not all runs of {counted(cost.partial_jobs, 'job')} are in this report: these jobs count with what the "
            "runs in the report took."
        )
    stated = {cost.why_not_separate}
    if cost.energy_j is None:
        stated.add(cost.why_no_energy)
    reasons = chain.from_iterable(run.not_measured for run in cost.runs)
    yield from (f"Not measured: {reason}." for reason in dict.fromkeys(reasons) if reason not in stated)


def _points_sheet(cost: CampaignCost) -> Sheet[PointCost]:
    titles = {}
    if len({point.label for point in cost.points}) == 1:
        titles["configuration"] = ""
    columns = (
        *columns_of(PointCost, "label", titles=titles),
        *place_columns(),
        *columns_of(
            PointCost,
            *("runs", "results"),
            Column("", "Figures", lambda point: f"{point.results} of {point.runs}", is_brief=True),
            "node_hours",
            Column(
                "node_hours_per_result", "Node-hours each", "node_hours_per_result", _hours_each_text, is_brief=True
            ),
            *("waited_s", "max_rss_bytes", "energy_j", "node_sets", "most_switches"),
        ),
    )
    return Sheet(
        name="cost-points",
        title="Cost of a result",
        columns=drop_empty_columns(columns, cost.points, keep=("queue_wait_s",)),
        rows=cost.points,
        in_terminal=True,
        caption="Node-hours each: of all runs, over the runs with figures. Wait: median over jobs. Switches: the most "
        "leaf switches that one run spans.",
    )


def _hours_each_text(point: PointCost) -> str | None:
    return None if point.node_hours_per_result is None else _hours(point.node_hours_per_result)
