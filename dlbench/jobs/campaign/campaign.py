"""A campaign: the jobs of a series before they are submitted, and what they may cost in node-hours.

Few jobs wait less than many, and repeats on the same nodes differ less: runs share a job where they ask Slurm for the
same things. Inside a job they keep the order of the series, in which repeats are interleaved over points.

The repeats of a point run on the same nodes, or on others in turn. On the same nodes differences between nodes are in
no comparison of points, and a slow node is in all figures. In turn, every node is used alike over the repeats:
differences between nodes average out, stand in the scatter of repeats, and are separable from those of hosts. The
nodes are asked for with --nodelist, which is part of each run's plan.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dlbench.errors import UserError
from dlbench.jobs.scripts.job import Job, limit_seconds, requested, time_text
from dlbench.opening import read_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.specs.hostlist import compressed, expanded
from dlbench.specs.launch import EARLY_S
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import format_seconds

Mode = Literal["same", "rotate"]

_MOST_ELEMENTS = 1000  # Of an array: Slurm numbers up to 1,000 by default (slurm.conf(5), MaxArraySize 1001).
_MINUTE = 60  # Slurm counts time limits in minutes (sbatch(1), --time).
MARGIN = 1.5  # On the longest earlier run: what is stopped is lost, what is left over is not charged.
START_S = 60.0  # Given to each run besides that: its record begins when rank 0 has started.
MOST_READ = 500  # Earlier runs that are looked at, by name the last: each costs a file.

_NOT_DECIDING = (
    *("run_id", "created", "dlbench_version", "dlbench_code", "series", "overrides", "tags"),
    *("system", "layout"),  # in part
)
"""Keys of a plan that do not decide how long it takes."""

_LENGTH = ("warmup_steps", "measured_steps", "warmup_s", "measured_s")
"""Keys of `measure` that decide how many steps there are, and nothing else."""


def on_node_sets(plans: Sequence[RunPlan], mode: Mode, hosts: str, *, share_one_job: bool) -> list[RunPlan]:
    """The plans, each with the nodes that it runs on.

    `mode`: `same`: every run on the first of the nodes; `rotate`: repeat k of n nodes begins at node k n, counted on
    from the beginning after the end. `hosts`: the nodes to choose from, as Slurm writes them. `share_one_job`: whether
    points of different sizes share a job: then they share its nodes. Raises `UserError`: there are too few nodes, or
    none that Slurm could read, or the system names nodes already.
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


def jobs_of(
    plans: Sequence[LaunchPlan],
    seconds: Mapping[str, float] | None = None,
    *,
    packing: Packing = "points",
    chain: bool = True,
) -> list[Job]:
    """The jobs of a series, in the order of their first runs.

    `seconds`: what each run is given, by run id; none: its system's time limit. 0 is no limit. `chain`: whether the
    elements of an array run one at a time. Raises `UserError`: the sides of a comparison cannot share a job, because
    they ask Slurm for different things, or shall not.
    """
    _refuse_apart(plans, packing)
    given = seconds or {plan.run_id: limit_seconds(plan.system.slurm.time_limit) for plan in plans}
    jobs = []
    groups: dict[Hashable, list[LaunchPlan]] = {}
    for plan in plans:
        groups.setdefault(group_of(plan, packing), []).append(plan)
    for group in groups.values():
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
    size = 2 if isinstance(group[0], RunPlan) and group[0].series.side else 1
    for unit in _parts(group, size):
        total = sum(given[plan.run_id] for plan in (*part, *unit))
        if part and longest and total > longest:
            yield part
            part = []
        part.extend(unit)
    yield part


def _parts(group: Sequence[LaunchPlan], size: int) -> Iterator[Sequence[LaunchPlan]]:
    for start in range(0, len(group), size):
        yield group[start : start + size]


def _refuse_apart(plans: Sequence[LaunchPlan], packing: Packing) -> None:
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


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Of one run."""

    seconds: float  # What a job is given for it; 0: no limit.
    expected_s: float | None = None  # What it should take; None where there is no earlier run.
    earlier: int = 0  # How many earlier runs it is estimated from.
    longest_s: float = 0.0  # The longest of them, with the steps of this run.
    warning_s: int = 0  # Seconds that its job is given besides: Slurm's warning must not come before the runs' end.

    @property
    def text(self) -> str:
        """Where it comes from, in words."""
        if not self.earlier:
            return f"time limit of {format_seconds(self.seconds)} a run" if self.seconds else "no time limit"
        of = f"{self.earlier} earlier run{'s' * (self.earlier > 1)}"
        longest = "the longest " if self.earlier > 1 else ""
        within = "" if self.seconds >= MARGIN * self.longest_s + START_S else ", within system.slurm.max_time"
        start = f"{START_S:g} s for its start{within}"
        if self.warning_s:
            start += f"; a job gets {self.warning_s} s more, because Slurm may warn so long before the limit"
        return f"estimated from {of}: {longest}{format_seconds(self.longest_s)} a run, margin {MARGIN:g}, and {start}"


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    total_s: float
    steps: int  # 0: not known, or not to be scaled.
    step_s: float
    length: tuple[object, ...]  # Its part of `measure` that the configuration leaves out.

    def scaled(self, plan: LaunchPlan) -> float:
        """Seconds that a run of the same configuration takes with the steps of `plan`."""
        if not isinstance(plan, RunPlan) or not self.steps or self.length == _length(plan.measure.model_dump()):
            return self.total_s
        steps = plan.measure.warmup_steps + plan.measure.measured_steps
        training_s = max(steps * self.step_s, plan.least_training_s)
        return max(0.0, self.total_s - self.steps * self.step_s) + training_s


def estimates(plans: Sequence[LaunchPlan], out: Path, *, asked: str | None = None) -> dict[str, TimeEstimate]:
    """How long each run of a series may take, by run id.

    `out`: folder of all runs, which need not exist. `asked`: a time limit for each run, as Slurm writes it, that was
    asked for; None: what earlier runs took, unless the plans have one that was set for them.
    """
    if asked is not None:
        return {plan.run_id: TimeEstimate(seconds=limit_seconds(asked)) for plan in plans}
    wanted = {plan.run_id: "" if _is_set(plan) else _key(plan.model_dump(mode="json")) for plan in plans}
    asked_for = {key for key in wanted.values() if key}
    earlier: dict[str, list[_Earlier]] = {}
    names: list[str] = []
    if asked_for:
        with suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(out) if not entry.name.startswith("."))
    for name in names[-MOST_READ:]:
        folder = RunFolder(out / name)
        # What cannot be read is no history.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(folder.plan, MAX_JSON)
            key = _key(content)
            if key in asked_for:
                earlier.setdefault(key, []).append(_earlier(folder, content))
    return {plan.run_id: _estimate(plan, earlier.get(wanted[plan.run_id], [])) for plan in plans}


def _is_set(plan: LaunchPlan) -> bool:
    series = plan.series if isinstance(plan, RunPlan) else None
    sides = () if series is None else (series.axes, *series.sides.values())
    return any("system.slurm.time_limit" in settings for settings in (plan.overrides, *sides))


def _estimate(plan: LaunchPlan, earlier: Sequence[_Earlier]) -> TimeEstimate:
    if not earlier:
        return TimeEstimate(seconds=limit_seconds(plan.system.slurm.time_limit))
    took = sorted(one.scaled(plan) for one in earlier)
    seconds, longest = MARGIN * took[-1] + START_S, limit_seconds(plan.system.slurm.max_time)
    return TimeEstimate(
        # No margin makes a run too long for its site that fits.
        seconds=longest if longest and took[-1] + START_S <= longest < seconds else seconds,
        expected_s=took[len(took) // 2],
        earlier=len(took),
        longest_s=took[-1],
        warning_s=_warned_ahead_s(plan),
    )


def _warned_ahead_s(plan: LaunchPlan) -> int:
    """Returns how long before the time limit Slurm may warn a job, in seconds; 0: it is not warned."""
    warning_s = plan.system.slurm.warning_s
    return warning_s + EARLY_S if warning_s else 0


def _earlier(folder: RunFolder, plan: Mapping[str, Any]) -> _Earlier:
    """Raises OSError or a kind of ValueError: it has no record, or one of its last part alone."""
    if "comm" in plan:
        record = read_json(folder.comm, MAX_JSON)
        return _Earlier(total_s=_seconds(record), steps=0, step_s=0.0, length=())
    record = read_json(folder.record, MAX_JSON)
    if plan["measure"]["until"] == "quality" and record["attempt"] > 1 and record["first_step"]:
        raise ValueError("resumed after an interruption: the record is of its last part")
    steps = int(record["steps"])
    measured = steps - int(plan["measure"]["warmup_steps"])
    measured_s = max(float(rank["measured_s"]) for rank in record["ranks"])
    scales = plan["measure"]["until"] == "steps" and measured > 0
    return _Earlier(
        total_s=_seconds(record),
        steps=steps if scales else 0,
        step_s=measured_s / measured if scales else 0.0,
        length=_length(plan["measure"]),
    )


def _seconds(record: Mapping[str, Any]) -> float:
    begun, ended = (datetime.fromisoformat(record[key]) for key in ("started", "finished"))
    return max(0.0, (ended - begun).total_seconds())


def _length(measure: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(measure.get(name) for name in _LENGTH)


def _key(plan: Mapping[str, Any]) -> str:
    content = {key: value for key, value in plan.items() if key not in _NOT_DECIDING}
    if "measure" in content:
        content["measure"] = {key: value for key, value in content["measure"].items() if key not in _LENGTH}
    content["layout"] = {key: value for key, value in plan["layout"].items() if key != "node_cores"}
    system = plan["system"]
    content["system"] = {key: system[key] for key in ("name", "node", "launch")}
    content["partition"] = [system["slurm"].get(key) for key in ("partition", "constraint", "gpu_type", "reservation")]
    return json.dumps(content, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """The jobs of a series, and how long their runs should take."""

    plans: tuple[LaunchPlan, ...]
    packing: Packing
    chain: bool  # Whether each job waits for the one before.
    estimates: Mapping[str, TimeEstimate]  # Of each run, by run id.
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

    `out`: folder of all runs, with earlier ones. `time`: the time limit of a run that was asked for, as Slurm writes
    it; none: by earlier runs. Raises `UserError`: the sides of a comparison cannot share a job, or a job's time is so
    short that Slurm's warning would stop its runs.
    """
    found = estimates(plans, out, asked=time)
    seconds = {run_id: estimate.seconds for run_id, estimate in found.items()}
    jobs = []
    for job in jobs_of(plans, seconds, packing=packing, chain=chain):
        # With the seconds besides those of its runs, if its time is estimated and may be that long.
        warning_s = max(found[run_id].warning_s for run_id in job.run_ids)
        limit_s = limit_seconds(job.time_limit)
        longest_s = limit_seconds(job.shape.system.slurm.max_time) or math.inf
        if warning_s and limit_s and limit_s < longest_s:
            jobs.append(replace(job, time_limit=_limit([min(limit_s + warning_s, longest_s)])))
        else:
            jobs.append(job)
        _refuse_warned_too_early(jobs[-1], found)
    return Campaign(plans=tuple(plans), packing=packing, chain=chain, estimates=found, jobs=tuple(jobs))


def _refuse_warned_too_early(job: Job, given: Mapping[str, TimeEstimate]) -> None:
    """Refuses a job whose warning comes before one of its runs can have ended. Raises `UserError`.

    Runs that keep checkpoints go on after the warning: of these only the start counts.
    """
    ahead_s = _warned_ahead_s(job.shape)
    seconds = limit_seconds(job.time_limit)
    needed_s = 0.0
    for plan in job.plans:
        if isinstance(plan, RunPlan) and not plan.checkpoint.is_on:
            needed_s = max(needed_s, plan.least_training_s, given[plan.run_id].longest_s)
    if not ahead_s or not seconds or seconds > needed_s + ahead_s:
        return
    needs = f", and a run needs {format_seconds(needed_s)} or more" if needed_s else ""
    raise UserError(
        f"time limit {job.time_limit} of job {job.name}: Slurm may warn {ahead_s} s before it "
        f"(slurm.warn_before_s {ahead_s - EARLY_S}, up to {EARLY_S} s early), which leaves "
        f"{max(0, seconds - ahead_s)} s{needs}: attempts may be stopped before they end; give more than "
        f"{time_text(math.ceil(needed_s + ahead_s))} (--time, slurm.time_limit), or a shorter slurm.warn_before_s"
    )


def refuse_above(campaign: Campaign, most: float) -> None:
    """Refuses a campaign that may cost more. Raises `UserError`: it may; names what fits."""
    bound = campaign.bound
    if bound is None:
        raise UserError(f"--max-node-hours {most:g}: a job without a time limit has no bound: give --time")
    if bound <= most:
        return
    runs = f"{len(campaign.plans):,} run{'s' * (len(campaign.plans) > 1)}"
    raise UserError(
        f"--max-node-hours {most:g}: {runs} may take {bound:,.4g} node-hours (nodes x time limit); "
        "raise it, give fewer --repeats or nodes, or a shorter --time"
    )
