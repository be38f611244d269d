"""The view `campaign-cost`: what the runs of a report cost on a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.report.document import Section
from dlbench.report.runs import MAX_LISTED
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import number_text, optional, percent, place_text, runs_text
from dlbench.views.campaign_cost.numbers import CampaignCost, Part, PartName, PointCost, RunCost, campaign_cost
from dlbench.views.columns import telling
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

_PARTS: dict[PartName, str] = {
    "measured": "Measured steps",
    "overhead": "Start, warm-up, evaluation, end of these runs",
    "lost": "Attempts that were preempted or failed before",
    "no_figure": "Runs without a figure",
    "idle": "Nodes idle beside a smaller run",
    "between": "Job outside its runs",
    "unknown": "Not told apart",
}
_MANY_JOULES = 1e6


class CampaignCostView(ReportView):
    """Node-hours asked for, used and wasted."""

    id = "campaign-cost"
    title = "What this campaign cost"
    key = "campaign_cost"

    def numbers(self, source: ReportSource) -> CampaignCost | None:
        """All runs, those without figures too."""
        return campaign_cost(source.scan.runs)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """Where node-hours went, and what a result cost."""
        found = report.of(CampaignCost)
        return () if found is None else (cost_section(found),)

    def remedy(self, report: Report) -> str:
        """Jobs that have ended."""
        return "unknown: of no Slurm job of these runs Slurm told anything; `dlbench cost RUNS` asks it, and says why."


def cost_section(found: CampaignCost) -> Section:
    """The whole view."""
    return Section(
        id=CampaignCostView.id,
        title=CampaignCostView.title,
        headline=_headline(found),
        words=tuple(_words(found)),
        sheets=(_parts_sheet(found), _points_sheet(found), _runs_sheet(found)),
        notes=tuple(_notes(found)),
    )


def jobs_text(count: int) -> str:
    """E.g. ``2 jobs``."""
    return f"{count:,} job{'s' * (count != 1)}"


def _hours(value: float) -> str:
    return f"{value:,.3g}"


def _headline(found: CampaignCost) -> str:
    # Slurm tells whole seconds.
    wait = "not known" if found.median_wait_s is None else f"{number_text(round(found.median_wait_s), 's')} (median)"
    return (
        f"{_hours(found.node_hours)} node-hours in {jobs_text(found.jobs)}, {percent(found.share_measured, 0)} in "
        f"measured steps; queue wait {wait}"
    )


def _words(found: CampaignCost) -> Iterator[str]:
    asked = "Asked for: not told."
    if found.asked_node_hours is not None:
        asked = f"Asked for {_hours(found.asked_node_hours)} node-hours (nodes x time limit)"
        if found.asked_node_hours:
            asked += f", of which {percent(found.node_hours / found.asked_node_hours, 0)} were held"
        asked += "."
    each = f", {_hours(found.node_hours / found.results)} node-hours each" if found.results else ""
    yield f"{asked} {runs_text(found.results)} with figures{each}."
    if found.longest_wait_s is not None and found.jobs > 1:
        yield f"Longest queue wait: {number_text(found.longest_wait_s, 's')}."
    if found.energy_j is not None:
        yield f"Energy of the nodes by Slurm: {_energy_text(found.energy_j)}."
    elif found.why_no_energy:
        yield f"Energy: not measured: {found.why_no_energy}."
    sets = max(point.node_sets for point in found.points)
    if max(point.results for point in found.points) > 1:
        yield (
            "All runs of a point had the same nodes: a slow node is in all of them (submit --rotate-nodes)."
            if sets == 1
            else f"Runs of a point had up to {sets} sets of nodes: differences between nodes are in their scatter."
        )
    if found.untold:
        yield f"{runs_text(found.untold)} left out: not ended, or Slurm tells nothing (`dlbench cost` says)."


def _energy_text(joules: float | None) -> str:
    if joules is None:
        return optional(None, "")
    return f"{joules / 3.6e6:,.3g} kWh" if joules >= _MANY_JOULES else f"{joules:,.3g} J"


def _notes(found: CampaignCost) -> Iterator[str]:
    sources = " and ".join(sorted({run.source for run in found.runs}))
    yield (
        f"Source: {sources}, in whole seconds; measured steps: the runs' records. Queue wait: from when a job could "
        "have started, all its starts added. Memory: resident memory of the largest task of srun, as often as Slurm "
        "looked; a task is a rank with all that it started, or under mpirun all ranks of a node but the first."
    )
    if found.partial_jobs:
        yield f"Not all runs of {jobs_text(found.partial_jobs)} are here: these count with what the runs here took."
    told = "" if found.energy_j is not None else found.why_no_energy
    missing = dict.fromkeys(reason for run in found.runs for reason in run.not_measured if reason != told)
    yield from (f"Not measured: {reason}." for reason in missing)


def _parts_sheet(found: CampaignCost) -> Sheet[Part]:
    columns: tuple[Column[Part], ...] = (
        Column("part", "Node-hours went into", lambda part: part.name, lambda part: _PARTS[part.name]),
        Column("node_hours", "Node-hours", lambda part: part.node_hours, lambda part: _hours(part.node_hours)),
        Column("share", "Share", lambda part: part.node_hours / found.node_hours, unit="fraction"),
    )
    return Sheet(name="cost-parts", title="Where it went", columns=columns, rows=found.parts, in_terminal=True)


def _points_sheet(found: CampaignCost) -> Sheet[PointCost]:
    labels = {point.label for point in found.points}
    columns: tuple[Column[PointCost], ...] = (
        Column("configuration", "Runs of" if len(labels) > 1 else "", lambda point: point.label, is_brief=True),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("", "At", lambda point: place_text(point.ranks, point.nodes), is_brief=True),
        Column("runs", "", lambda point: point.runs),
        Column("results", "", lambda point: point.results),
        Column("", "Figures", lambda point: f"{point.results} of {point.runs}", is_brief=True),
        Column("node_hours", "Node-hours", lambda point: point.node_hours, lambda p: _optional_hours(p.node_hours)),
        Column(
            "node_hours_per_result",
            "Each",
            lambda point: point.node_hours_per_result,
            lambda point: _optional_hours(point.node_hours_per_result),
            is_brief=True,
        ),
        Column("queue_wait_s", "Wait", lambda point: point.waited_s, unit="s", is_brief=True),
        Column("max_rss_bytes", "Memory", lambda point: point.max_rss_bytes, unit="bytes", is_brief=True),
        Column("energy_j", "Energy", lambda point: point.energy_j, lambda point: _energy_text(point.energy_j)),
        Column("node_sets", "Node sets", lambda point: point.node_sets, is_brief=True),
        Column("most_leaf_switches", "Switches", lambda point: point.most_switches, is_brief=True),
    )
    return Sheet(
        name="cost-points",
        title="What a result cost",
        columns=telling(columns, found.points, keep=("queue_wait_s",)),
        rows=found.points,
        in_terminal=True,
        caption="Each: node-hours for a run with figures. Wait: median over jobs. Switches: leaf switches a run spans.",
    )


def _optional_hours(value: float | None) -> str:
    return optional(None, "") if value is None else _hours(value)


def _runs_sheet(found: CampaignCost) -> Sheet[RunCost]:
    columns: tuple[Column[RunCost], ...] = (
        Column("run_id", "Run", lambda run: run.run_id),
        Column("state", "State", lambda run: run.state),
        Column("job_id", "Job", lambda run: run.job_id),
        Column("job_state", "Job's state", lambda run: run.job_state),
        Column("exit_code", "Exit", lambda run: run.exit_code),
        Column("source", "", lambda run: run.source),
        Column("queue_wait_s", "Wait", lambda run: run.waited_s, unit="s"),
        Column("elapsed_s", "Elapsed", lambda run: run.elapsed_s, unit="s"),
        Column("node_hours", "Node-hours", lambda run: run.node_hours, lambda run: _optional_hours(run.node_hours)),
        Column("max_rss_bytes", "Memory", lambda run: run.max_rss_bytes, unit="bytes"),
        Column("energy_j", "Energy", lambda run: run.energy_j, lambda run: _energy_text(run.energy_j)),
        Column("node_list", "Nodes", lambda run: run.node_list, limit=80),
        Column("leaf_switches", "Switches", lambda run: ",".join(run.switches), limit=80),
        Column("not_measured", "", lambda run: "; ".join(run.not_measured)),
    )
    return Sheet(
        name="cost-runs",
        title="Run by run",
        columns=telling(columns, found.runs),
        rows=found.runs,
        is_sortable=True,
        is_folded=True,
        max_rows=MAX_LISTED,
    )
