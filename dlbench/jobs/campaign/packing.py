"""Which runs of a series share a job: few jobs wait less than many, and repeats on the same nodes differ less.

Runs share a job where they ask Slurm for the same things. Inside a job they keep the order of the series, in which
repeats are interleaved over points.

On which nodes the repeats of a point run: on the same ones, or on others in turn.

On the same nodes differences between nodes are in no comparison of points, and a slow node is in all figures. In turn,
every node is used alike over the repeats: differences between nodes average out, stand in the scatter of repeats, and
can be told from those of hosts. The nodes are asked for with --nodelist, which is part of each run's plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from dlbench.errors import UserError
from dlbench.jobs.scripts.job import Job, limit_seconds, requested, time_text
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system.hostlist import compressed, expanded

Mode = Literal["same", "rotate"]


def on_node_sets(plans: Sequence[RunPlan], mode: Mode, hosts: str, *, share_one_job: bool) -> list[RunPlan]:
    """The plans, each with the nodes that it runs on.

    Args:
        plans: of a series.
        mode: `same`: every run on the first of the nodes. `rotate`: repeat k of n nodes begins at node k n, counted on
            from the beginning after the end.
        hosts: the nodes to choose from, as Slurm writes them.
        share_one_job: whether points of different sizes share a job: then they share its nodes.

    Raises:
        UserError: there are too few nodes, or none that Slurm could read, or the system names nodes already.
    """
    option = f"--{mode}-nodes {hosts}"
    try:
        names = list(dict.fromkeys(expanded(hosts)))
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    if named := next((plan.system.slurm.nodelist for plan in plans if plan.system.slurm.nodelist), None):
        raise UserError(f"{option}: the system names nodes already: slurm.nodelist is {named}")
    largest = max(plan.layout.nodes for plan in plans)
    wanted = largest + (mode == "rotate")
    if len(names) < wanted:
        why = "there is nothing to rotate over" if len(names) == largest else f"a run takes {largest}"
        raise UserError(f"{option}: names {len(names)} nodes, and {why}; {wanted} or more are needed")
    found = []
    for plan in plans:
        size = largest if share_one_job else plan.layout.nodes
        begin = plan.series.repeat * size if mode == "rotate" else 0
        chosen = [names[(begin + offset) % len(names)] for offset in range(size)]
        slurm = plan.system.slurm.model_copy(update={"nodelist": compressed(chosen)})
        found.append(plan.model_copy(update={"system": plan.system.model_copy(update={"slurm": slurm})}))
    return found


Packing = Literal["points", "all", "runs"]
"""points: the runs of one number of nodes and ranks share an allocation. all: those of all points share one of the
largest size. runs: each has its own, in job arrays."""

_MOST_ELEMENTS = 1000
"""Of an array, because Slurm numbers up to 1,000 unless a site says otherwise (slurm.conf(5), MaxArraySize 1001)."""

_MINUTE = 60
"""Slurm counts time limits in minutes (sbatch(1), --time)."""


def jobs_of(
    plans: Sequence[LaunchPlan],
    seconds: Mapping[str, float] | None = None,
    *,
    packing: Packing = "points",
    chain: bool = True,
) -> list[Job]:
    """The jobs of a series, in the order of their first runs.

    Args:
        plans: of the series, in their order.
        seconds: what each run is given, by run id; none: its system's time limit. 0 is no limit.
        packing: which runs share a job.
        chain: whether the elements of an array run one at a time.

    Raises:
        UserError: the sides of a comparison cannot share a job, because they ask Slurm for different things, or
            shall not.
    """
    _refuse_apart(plans, packing)
    given = seconds or {plan.run_id: limit_seconds(plan.system.slurm.time_limit) for plan in plans}
    jobs = []
    for group in _groups(plans, packing):
        if packing == "runs":
            jobs += [_array(part, given, chain) for part in _parts(group, _MOST_ELEMENTS)]
        else:
            jobs += [job_of(part, given) for whole in _within(group, given) for part in _fitting(whole)]
    return jobs


def job_of(plans: Sequence[LaunchPlan], seconds: Mapping[str, float] | None = None) -> Job:
    """One allocation for these runs, which must ask for the same; `seconds` as in `jobs_of`."""
    given = seconds or {plan.run_id: limit_seconds(plan.system.slurm.time_limit) for plan in plans}
    return Job(plans=tuple(plans), time_limit=_limit([given[plan.run_id] for plan in plans]))


def _array(plans: Sequence[LaunchPlan], given: Mapping[str, float], chain: bool) -> Job:
    """Jobs of their own, each given what the longest needs."""
    if len(plans) == 1:
        return job_of(plans, given)
    every = [given[plan.run_id] for plan in plans]
    limit = _limit([max(every) if all(every) else 0.0])
    return Job(plans=tuple(plans), time_limit=limit, array_limit=1 if chain else 0)


def _limit(every: Sequence[float]) -> str:
    """The time limit for runs one after the other, in whole minutes; one without a limit has none together."""
    if not all(every):
        return time_text(0)
    return time_text(-int(-sum(every) // _MINUTE) * _MINUTE)


def _groups(plans: Sequence[LaunchPlan], packing: Packing) -> list[list[LaunchPlan]]:
    """Runs that ask for the same things."""
    groups: dict[Hashable, list[LaunchPlan]] = {}
    for plan in plans:
        groups.setdefault(group_of(plan, packing), []).append(plan)
    return list(groups.values())


def group_of(plan: LaunchPlan, packing: Packing) -> Hashable:
    """What a run asks for; runs of which that is equal may share a job."""
    layout = plan.layout
    size = () if packing == "all" else (layout.nodes, layout.ranks)
    return (size, *requested(plan))


def _fitting(group: list[LaunchPlan]) -> list[list[LaunchPlan]]:
    """Runs of a job as they are, or by ranks on a node where the run of the most nodes has fewer than another one."""
    shape = Job(plans=tuple(group), time_limit="").shape
    if all(plan.layout.ranks_per_node <= shape.layout.ranks_per_node for plan in group):
        return [group]
    by_node: dict[int, list[LaunchPlan]] = {}
    for plan in group:
        by_node.setdefault(plan.layout.ranks_per_node, []).append(plan)
    return list(by_node.values())


def _within(group: Sequence[LaunchPlan], given: Mapping[str, float]) -> Iterator[list[LaunchPlan]]:
    """Parts that stay below the longest time of a job, in their order; a pair of sides is never torn."""
    longest = limit_seconds(group[0].system.slurm.max_time)
    part: list[LaunchPlan] = []
    for unit in _units(group):
        total = sum(given[plan.run_id] for plan in (*part, *unit))
        if part and longest and total > longest:
            yield part
            part = []
        part.extend(unit)
    yield part


def _units(group: Sequence[LaunchPlan]) -> Iterator[Sequence[LaunchPlan]]:
    """Runs one by one, those of a comparison by pairs."""
    size = 2 if isinstance(group[0], RunPlan) and group[0].series.side else 1
    return _parts(group, size)


def _parts(group: Sequence[LaunchPlan], size: int) -> Iterator[Sequence[LaunchPlan]]:
    for start in range(0, len(group), size):
        yield group[start : start + size]


def _refuse_apart(plans: Sequence[LaunchPlan], packing: Packing) -> None:
    """Refuses pairs of a comparison that would not share their nodes."""
    for one, other in pairwise(plans):
        if not (isinstance(one, RunPlan) and isinstance(other, RunPlan) and one.series.side):
            return
        if packing == "runs":
            raise UserError("--one-run-per-job: both sides of --ab run on the same nodes, in one job")
        first = dict(requested(one))
        for key, value in requested(other):
            if value != first[key]:
                raise UserError(
                    f"--ab: both sides run in one Slurm job, which has one {key}: they ask for {first[key]} and "
                    f"{value}; give it to --set, or submit two series"
                )
