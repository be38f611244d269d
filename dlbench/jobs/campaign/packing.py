"""Which runs of a series share a job."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.errors import UserError
from dlbench.jobs.scripts.job import Job, requested, total_time
from dlbench.specs.plan import LaunchPlan, RunPlan


def jobs_of(plans: Sequence[LaunchPlan]) -> list[Job]:
    """The jobs of a series, in the order of their first runs: one for each run, or for each point of a comparison.

    Raises:
        UserError: the sides of a comparison cannot share a job, because they ask Slurm for different things.
    """
    jobs: dict[object, list[LaunchPlan]] = {}
    for plan in plans:
        is_side = isinstance(plan, RunPlan) and plan.series.side
        key = (plan.layout.ranks, plan.layout.nodes) if is_side else plan.run_id
        jobs.setdefault(key, []).append(plan)
    return [job_of(job) for job in jobs.values()]


def job_of(plans: Sequence[LaunchPlan]) -> Job:
    """One job of these runs, with the system's time limit for each.

    Raises:
        UserError: the sides of a comparison cannot share a job.
    """
    _refuse_two_requests(plans)
    limit = plans[0].system.slurm.time_limit
    return Job(plans=tuple(plans), time_limit=limit if len(plans) == 1 else total_time(limit, len(plans)))


def _refuse_two_requests(plans: Sequence[LaunchPlan]) -> None:
    first = dict(requested(plans[0]))
    for plan in plans[1:]:
        for key, value in requested(plan):
            if value != first[key]:
                raise UserError(
                    f"--ab: both sides run in one Slurm job, which has one {key}: they ask for {first[key]} and "
                    f"{value}; give it to --set, or submit two series"
                )
