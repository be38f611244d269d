"""A campaign: the jobs of a series before they are submitted, and what they may cost in node-hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.campaign.packing import Packing, group_of, jobs_of
from dlbench.jobs.campaign.walltime import Estimate, estimates
from dlbench.jobs.scripts.job import Job
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """The jobs of a series, and how long their runs should take."""

    plans: tuple[LaunchPlan, ...]
    packing: Packing
    chain: bool
    """Whether each job waits for the one before."""
    estimates: Mapping[str, Estimate]
    """Of each run, by run id."""
    jobs: tuple[Job, ...]

    @property
    def bound(self) -> float | None:
        """Node-hours that all jobs take at most; None where a job has no time limit."""
        each = [job.node_hours for job in self.jobs]
        known = [hours for hours in each if hours is not None]
        return sum(known) if len(known) == len(each) else None

    @property
    def expected(self) -> float | None:
        """Node-hours that they should take, by earlier runs; None where some run has none."""
        hours = 0.0
        for job in self.jobs:
            for plan in job.plans:
                took = self.estimates[plan.run_id].expected_s
                if took is None:
                    return None
                hours += (plan.layout.nodes + held_nodes(job, plan)) * took / 3600
        return hours

    @property
    def is_split(self) -> bool:
        """Whether runs that ask for the same things are in several jobs, because they take too long for one."""
        if self.packing == "runs":
            return False
        # Fewer ranks on each node ask for less, and only smaller runs fit in there.
        asked = [(group_of(job.shape, self.packing), job.shape.layout.ranks_per_node) for job in self.jobs]
        return len(set(asked)) < len(asked)

    @property
    def idle_bound(self) -> float:
        """Node-hours of `bound` in which nodes are held by runs that do not use them."""
        each = ((job, plan) for job in self.jobs for plan in job.plans)
        return sum(held_nodes(job, plan) * self.estimates[plan.run_id].seconds for job, plan in each) / 3600


def held_nodes(job: Job, plan: LaunchPlan) -> int:
    """Nodes that a job holds while one of its runs uses the others."""
    return 0 if job.is_array else job.shape.layout.nodes - plan.layout.nodes


def campaign_of(
    plans: Sequence[LaunchPlan], out: Path, *, packing: Packing = "points", chain: bool = True, time: str | None = None
) -> Campaign:
    """The jobs of a series.

    Args:
        plans: of the series, in their order.
        out: folder of all runs, with earlier ones.
        packing: which runs share a job.
        chain: whether each job waits for the one before.
        time: the time limit of a run that was asked for, as Slurm writes it; none: by earlier runs.

    Raises:
        UserError: the sides of a comparison cannot share a job.
    """
    found = estimates(plans, out, asked=time)
    whole = Campaign(plans=tuple(plans), packing=packing, chain=chain, estimates=found, jobs=())
    return _packed(whole, plans, packing)


def _packed(campaign: Campaign, plans: Sequence[LaunchPlan], packing: Packing) -> Campaign:
    seconds = {run_id: one.seconds for run_id, one in campaign.estimates.items()}
    jobs = jobs_of(plans, seconds, packing=packing, chain=campaign.chain)
    return replace(campaign, plans=tuple(plans), packing=packing, jobs=tuple(jobs))


def refuse_above(campaign: Campaign, most: float) -> None:
    """Refuses a campaign that may cost more.

    Args:
        campaign: as it would be submitted.
        most: node-hours.

    Raises:
        UserError: it may; told with what fits.
    """
    bound = campaign.bound
    if bound is None:
        raise UserError(f"--max-node-hours {most:g}: a job without a time limit has no bound: give --time")
    if bound <= most:
        return
    runs = f"{len(campaign.plans):,} run{'s' * (len(campaign.plans) > 1)}"
    raise UserError(
        f"--max-node-hours {most:g}: {runs} may take {bound:,.4g} node-hours (nodes x time limit); "
        f"{_remedy(campaign, most)}"
    )


def _remedy(campaign: Campaign, most: float) -> str:
    for option, plans, packing in _smaller(campaign):
        bound = _packed(campaign, plans, packing).bound
        if bound is not None and bound <= most:
            return f"{option} fits, with {bound:,.4g}"
    return "no smaller series fits: raise it, or give a shorter --time"


def _smaller(campaign: Campaign) -> Iterator[tuple[str, Sequence[LaunchPlan], Packing]]:
    """Options that make the campaign smaller, the least loss first, with the plans that are left."""
    if campaign.packing == "all":
        yield "--pack points", campaign.plans, "points"
    repeats = max(map(_repeat, campaign.plans)) + 1
    for fewer in range(repeats - 1, 0, -1):
        yield f"--repeats {fewer}", [plan for plan in campaign.plans if _repeat(plan) < fewer], campaign.packing
    counts = sorted({plan.layout.nodes for plan in campaign.plans})
    for most in reversed(counts[:-1]):
        left = [plan for plan in campaign.plans if plan.layout.nodes <= most]
        yield f"at most {most} node{'s' * (most > 1)} a run", left, campaign.packing
    for most in reversed(counts[:-1] if repeats > 1 else []):
        left = [plan for plan in campaign.plans if plan.layout.nodes <= most and _repeat(plan) == 0]
        yield f"--repeats 1 of at most {most} node{'s' * (most > 1)}", left, campaign.packing


def _repeat(plan: LaunchPlan) -> int:
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series.repeat
