"""Plans the Slurm jobs of a series, and the node-hours that they may cost. A few jobs wait less in the queue than many:
runs that request the same resources share a job, in the order of the series, in which repeats are interleaved over
points. The repeats of a point run on the same nodes (`same`), which keeps differences between nodes out of comparisons,
or start on a different node each time (`rotate`), which averages these differences.
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
from dlbench.specs.launch import EARLY_S, compressed, expanded
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import counted, format_seconds

Mode = Literal["same", "rotate"]

_MAX_ARRAY_SIZE = 1000  # Elements of a job array by default (slurm.conf(5): MaxArraySize is 1001, exclusive).
_MINUTE = 60  # Seconds; Slurm counts time limits in minutes (sbatch(1), --time).
MARGIN = 1.5  # Times the longest earlier run: a run that is stopped is lost, unused time is not charged.
START_S = 60.0  # Seconds added to each run for its start: its record begins when rank 0 has started.
MOST_READ = 500  # Earlier runs that are read at most, the last by name: each one costs a file.

_NOT_DECIDING = (
    *("run_id", "created", "dlbench_version", "dlbench_code", "series", "overrides", "tags"),
    *("system", "layout"),  # in part
)
"""Keys of a plan that have no influence on the duration of the run."""

_LENGTH = ("warmup_steps", "measured_steps", "warmup_s", "measured_s")
"""Keys of `measure` that set the number of steps, and nothing else."""


def on_node_sets(plans: Sequence[RunPlan], mode: Mode, hosts: str, *, share_one_job: bool) -> list[RunPlan]:
    """Returns the plans with the nodes that each one runs on (`slurm.nodelist`). `mode`: `same`: the first nodes;
    `rotate`: repeat k of a run on n nodes begins at node k n, modulo the number of nodes. `hosts`: the nodes to choose
    from, as a Slurm host list. `share_one_job`: whether points of different sizes share a job. Raises `UserError`:
    there are too few nodes, or the system file names nodes already.
    """
    option = f"--{mode}-nodes {hosts}"
    try:
        names = list(dict.fromkeys(expanded(hosts)))
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    for plan in plans:
        if plan.system.slurm.nodelist:
            raise UserError(f"{option}: the system names nodes already: slurm.nodelist is {plan.system.slurm.nodelist}")
    largest = max(plan.layout.nodes for plan in plans)
    needed = largest + 1 if mode == "rotate" else largest
    if len(names) < needed:
        reason = f"a run takes {largest}"
        if len(names) == largest:
            reason = "there is no other node to rotate to"
        raise UserError(f"{option}: names {len(names)} nodes, and {reason}; {needed} or more are needed")
    placed_plans = []
    for plan in plans:
        size = largest if share_one_job else plan.layout.nodes
        first = plan.series.repeat * size if mode == "rotate" else 0
        hosts_of_run = [names[(first + offset) % len(names)] for offset in range(size)]
        slurm = plan.system.slurm.model_copy(update={"nodelist": compressed(hosts_of_run)})
        placed_plans.append(plan.model_copy(update={"system": plan.system.model_copy(update={"slurm": slurm})}))
    return placed_plans


Packing = Literal["points", "all", "runs"]
"""points: the runs with equal numbers of nodes and ranks share an allocation. all: the runs of all points share one
allocation of the largest size. runs: each run has its own allocation, as an element of a job array."""


def jobs_of(
    plans: Sequence[LaunchPlan],
    seconds: Mapping[str, float] | None = None,
    *,
    packing: Packing = "points",
    chain: bool = True,
) -> list[Job]:
    """Returns the jobs of a series, in the order of their first runs. `seconds`: time limit of each run by run id, 0
    for no limit; None: that of its system. `chain`: whether the elements of an array run one at a time. Raises
    `UserError`: the two sides of --ab cannot share a job.
    """
    _require_common_job(plans, packing)
    limits_s = seconds or _system_limits(plans)
    jobs = []
    groups: dict[Hashable, list[LaunchPlan]] = {}
    for plan in plans:
        groups.setdefault(group_of(plan, packing), []).append(plan)
    for group in groups.values():
        if packing == "runs":
            jobs += [_array(part, limits_s, chain) for part in _parts(group, _MAX_ARRAY_SIZE)]
            continue
        for part in _within_max_time(group, limits_s):
            jobs += [job_of(job_plans, limits_s) for job_plans in _split_by_ranks_per_node(part)]
    return jobs


def job_of(plans: Sequence[LaunchPlan], seconds: Mapping[str, float] | None = None) -> Job:
    """Returns one allocation for runs that request the same resources; `seconds` as in `jobs_of`."""
    limits_s = seconds or _system_limits(plans)
    return Job(plans=tuple(plans), time_limit=_limit([limits_s[plan.run_id] for plan in plans]))


def _system_limits(plans: Sequence[LaunchPlan]) -> dict[str, float]:
    return {plan.run_id: limit_seconds(plan.system.slurm.time_limit) for plan in plans}


def _array(plans: Sequence[LaunchPlan], limits_s: Mapping[str, float], chain: bool) -> Job:
    if len(plans) == 1:
        return job_of(plans, limits_s)
    limits = [limits_s[plan.run_id] for plan in plans]
    element_limit_s = max(limits) if all(limits) else 0.0
    return Job(plans=tuple(plans), time_limit=_limit([element_limit_s]), array_limit=1 if chain else 0)


def _limit(seconds: Sequence[float]) -> str:
    """Returns the time limit for runs one after the other, in whole minutes; no limit if one of them has none (0)."""
    if not all(seconds):
        return time_text(0)
    return time_text(-int(-sum(seconds) // _MINUTE) * _MINUTE)


def group_of(plan: LaunchPlan, packing: Packing) -> Hashable:
    """Returns the resources that a run requests; runs for which they are equal may share a job."""
    size = () if packing == "all" else (plan.layout.nodes, plan.layout.ranks)
    return (size, *requested(plan))


def _split_by_ranks_per_node(group: list[LaunchPlan]) -> list[list[LaunchPlan]]:
    """Splits the runs of a job by ranks per node, if the run with the most nodes has fewer of them than another run."""
    shape = Job(plans=tuple(group), time_limit="").shape
    if all(plan.layout.ranks_per_node <= shape.layout.ranks_per_node for plan in group):
        return [group]
    by_node: dict[int, list[LaunchPlan]] = {}
    for plan in group:
        by_node.setdefault(plan.layout.ranks_per_node, []).append(plan)
    return list(by_node.values())


def _within_max_time(group: Sequence[LaunchPlan], limits_s: Mapping[str, float]) -> Iterator[list[LaunchPlan]]:
    """Yields consecutive parts whose runs take at most `slurm.max_time` together; a pair of --ab stays together."""
    longest_s = limit_seconds(group[0].system.slurm.max_time)
    part: list[LaunchPlan] = []
    is_pair = isinstance(group[0], RunPlan) and group[0].series.side
    for unit in _parts(group, 2 if is_pair else 1):
        total_s = sum(limits_s[plan.run_id] for plan in (*part, *unit))
        if part and longest_s and total_s > longest_s:
            yield part
            part = []
        part.extend(unit)
    yield part


def _parts(group: Sequence[LaunchPlan], size: int) -> Iterator[Sequence[LaunchPlan]]:
    for start in range(0, len(group), size):
        yield group[start : start + size]


def _require_common_job(plans: Sequence[LaunchPlan], packing: Packing) -> None:
    for plan_a, plan_b in pairwise(plans):
        if not (isinstance(plan_a, RunPlan) and isinstance(plan_b, RunPlan) and plan_a.series.side):
            return
        if packing == "runs":
            raise UserError("--one-run-per-job: both sides of --ab run on the same nodes, in one job")
        request_a = dict(requested(plan_a))
        for key, value in requested(plan_b):
            if value != request_a[key]:
                raise UserError(
                    f"--ab: both sides run in one Slurm job, which has one {key}: they request {request_a[key]} and "
                    f"{value}; give it to --set, or submit two series"
                )


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """The time limit of one run, and the earlier runs that it is based on."""

    seconds: float  # Time limit of the run within its job; 0: no limit.
    expected_s: float | None = None  # Median duration of earlier runs; None if there is no earlier run.
    earlier: int = 0  # Number of earlier runs that the estimate is based on.
    longest_s: float = 0.0  # Duration of the longest earlier run, scaled to the steps of this run.
    warning_s: int = 0  # Seconds added to its job, so that Slurm's warning does not come before the runs have ended.

    @property
    def text(self) -> str:
        """The source of the time limit, for the terminal."""
        if not self.earlier:
            return f"time limit of {format_seconds(self.seconds)} per run" if self.seconds else "no time limit"
        longest = f"{format_seconds(self.longest_s)} per run"
        if self.earlier > 1:
            longest = f"the longest {longest}"
        start = f"{START_S:g} s for its start"
        if self.seconds < MARGIN * self.longest_s + START_S:
            start += ", within system.slurm.max_time"
        if self.warning_s:
            start += f"; a job gets {self.warning_s} s more, because Slurm may warn that long before the limit"
        sources = counted(self.earlier, "earlier run")
        return f"estimated from {sources}: {longest}, margin {MARGIN:g}, and {start}"


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    total_s: float
    steps: int  # 0: unknown, or the duration does not scale with the steps.
    step_s: float
    length: tuple[object, ...]  # Values of the keys `_LENGTH` of its plan.

    def scaled(self, plan: LaunchPlan) -> float:
        """Returns the duration with the number of steps of `plan`, in seconds."""
        if not isinstance(plan, RunPlan) or not self.steps or self.length == _length(plan.measure.model_dump()):
            return self.total_s
        steps = plan.measure.warmup_steps + plan.measure.measured_steps
        training_s = max(steps * self.step_s, plan.least_training_s)
        return max(0.0, self.total_s - self.steps * self.step_s) + training_s


def estimates(plans: Sequence[LaunchPlan], out: Path, *, asked: str | None = None) -> dict[str, TimeEstimate]:
    """Returns the time limit of each run of a series, by run id. `out`: folder of all runs, which need not exist.
    `asked`: the user's time limit of a run, as Slurm writes it; None: that of the plan's settings, else an estimate
    from earlier runs.
    """
    if asked is not None:
        return {plan.run_id: TimeEstimate(seconds=limit_seconds(asked)) for plan in plans}
    configurations = {plan.run_id: _configuration(plan.model_dump(mode="json")) for plan in plans if not _is_set(plan)}
    earlier = _earlier_runs(out, {*configurations.values()})
    return {plan.run_id: _estimate(plan, earlier.get(configurations.get(plan.run_id, ""), [])) for plan in plans}


def _earlier_runs(out: Path, configurations: set[str]) -> dict[str, list[_Earlier]]:
    earlier: dict[str, list[_Earlier]] = {}
    names: list[str] = []
    if configurations:
        with suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(out) if not entry.name.startswith("."))
    for name in names[-MOST_READ:]:
        folder = RunFolder(out / name)
        # A run that cannot be read does not count.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            plan = read_json(folder.plan, MAX_JSON)
            configuration = _configuration(plan)
            if configuration in configurations:
                earlier.setdefault(configuration, []).append(_earlier(folder, plan))
    return earlier


def _is_set(plan: LaunchPlan) -> bool:
    settings = [plan.overrides]
    if isinstance(plan, RunPlan):
        settings += [plan.series.axes, *plan.series.sides.values()]
    return any("system.slurm.time_limit" in values for values in settings)


def _estimate(plan: LaunchPlan, earlier: Sequence[_Earlier]) -> TimeEstimate:
    if not earlier:
        return TimeEstimate(seconds=limit_seconds(plan.system.slurm.time_limit))
    durations_s = sorted(run.scaled(plan) for run in earlier)
    limit_s = MARGIN * durations_s[-1] + START_S
    max_time_s = limit_seconds(plan.system.slurm.max_time)
    # The margin must not push a run that fits above the longest time that the site allows.
    if max_time_s and durations_s[-1] + START_S <= max_time_s < limit_s:
        limit_s = max_time_s
    return TimeEstimate(
        seconds=limit_s,
        expected_s=durations_s[len(durations_s) // 2],
        earlier=len(durations_s),
        longest_s=durations_s[-1],
        warning_s=_warned_ahead_s(plan),
    )


def _warned_ahead_s(plan: LaunchPlan) -> int:
    """Returns how long before the time limit Slurm may warn a job, in seconds; 0: no warning."""
    warning_s = plan.system.slurm.warning_s
    return warning_s + EARLY_S if warning_s else 0


def _earlier(folder: RunFolder, plan: Mapping[str, Any]) -> _Earlier:
    """Raises OSError or ValueError if the run has no record, or a record of its last attempt only."""
    if "comm" in plan:
        record = read_json(folder.comm, MAX_JSON)
        return _Earlier(total_s=_seconds(record), steps=0, step_s=0.0, length=())
    record = read_json(folder.record, MAX_JSON)
    if plan["measure"]["until"] == "quality" and record["attempt"] > 1 and record["first_step"]:
        raise ValueError("resumed after an interruption: the record covers the last attempt only")
    length = _length(plan["measure"])
    steps = int(record["steps"])
    measured_steps = steps - int(plan["measure"]["warmup_steps"])
    # Also required of a run that is not scaled: a record without ranks does not count.
    measured_s = max(float(rank["measured_s"]) for rank in record["ranks"])
    if plan["measure"]["until"] != "steps" or measured_steps <= 0:
        return _Earlier(total_s=_seconds(record), steps=0, step_s=0.0, length=length)
    return _Earlier(total_s=_seconds(record), steps=steps, step_s=measured_s / measured_steps, length=length)


def _seconds(record: Mapping[str, Any]) -> float:
    started, finished = (datetime.fromisoformat(record[key]) for key in ("started", "finished"))
    return max(0.0, (finished - started).total_seconds())


def _length(measure: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(measure.get(name) for name in _LENGTH)


def _configuration(plan: Mapping[str, Any]) -> str:
    """Returns the part of a plan that decides how long a step takes, as JSON."""
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
    """The jobs of a series, and the estimated durations of their runs."""

    plans: tuple[LaunchPlan, ...]
    packing: Packing
    chain: bool  # Whether each job waits for the one before.
    estimates: Mapping[str, TimeEstimate]  # By run id.
    jobs: tuple[Job, ...]

    @property
    def bound(self) -> float | None:
        """Node-hours that all jobs use at most; None if a job has no time limit."""
        total_hours = 0.0
        for job in self.jobs:
            if job.node_hours is None:
                return None
            total_hours += job.node_hours
        return total_hours

    @property
    def expected(self) -> float | None:
        """Node-hours that all jobs should use, by earlier runs; None if a run has no earlier run."""
        hours = 0.0
        for job in self.jobs:
            for plan in job.plans:
                expected_s = self.estimates[plan.run_id].expected_s
                if expected_s is None:
                    return None
                hours += (plan.layout.nodes + idle_nodes(job, plan)) * expected_s / 3600
        return hours

    @property
    def idle_bound(self) -> float:
        """Node-hours of `bound` in which nodes are allocated while a smaller run leaves them idle."""
        idle_s = 0.0
        for job in self.jobs:
            idle_s += sum(idle_nodes(job, plan) * self.estimates[plan.run_id].seconds for plan in job.plans)
        return idle_s / 3600


def idle_nodes(job: Job, plan: LaunchPlan) -> int:
    """Returns how many nodes of a job are idle while one of its runs uses the others."""
    return 0 if job.is_array else job.shape.layout.nodes - plan.layout.nodes


def campaign_of(
    plans: Sequence[LaunchPlan], out: Path, *, packing: Packing = "points", chain: bool = True, time: str | None = None
) -> Campaign:
    """Plans the jobs of a series. `out`: folder of all runs. `time`: the user's time limit of a run, as Slurm writes
    it; None: estimated from earlier runs. Raises `UserError`: the two sides of --ab cannot share a job, or the time
    limit of a job is so short that Slurm's warning would stop its runs.
    """
    time_estimates = estimates(plans, out, asked=time)
    seconds = {run_id: estimate.seconds for run_id, estimate in time_estimates.items()}
    jobs = []
    for job in jobs_of(plans, seconds, packing=packing, chain=chain):
        warning_s = max(time_estimates[run_id].warning_s for run_id in job.run_ids)
        limit_s = limit_seconds(job.time_limit)
        longest_s = limit_seconds(job.shape.system.slurm.max_time) or math.inf
        if warning_s and limit_s and limit_s < longest_s:
            jobs.append(replace(job, time_limit=_limit([min(limit_s + warning_s, longest_s)])))
        else:
            jobs.append(job)
        _require_late_warning(jobs[-1], time_estimates)
    return Campaign(plans=tuple(plans), packing=packing, chain=chain, estimates=time_estimates, jobs=tuple(jobs))


def _require_late_warning(job: Job, time_estimates: Mapping[str, TimeEstimate]) -> None:
    """Raises `UserError` if Slurm's warning may come before a run without checkpoints can have ended."""
    ahead_s = _warned_ahead_s(job.shape)
    seconds = limit_seconds(job.time_limit)
    needed_s = 0.0
    for plan in job.plans:
        if isinstance(plan, RunPlan) and not plan.checkpoint.is_on:
            needed_s = max(needed_s, plan.least_training_s, time_estimates[plan.run_id].longest_s)
    if not ahead_s or not seconds or seconds > needed_s + ahead_s:
        return
    needs = f", and a run needs {format_seconds(needed_s)} or more" if needed_s else ""
    raise UserError(
        f"time limit {job.time_limit} of job {job.name}: Slurm may warn {ahead_s} s before it "
        f"(slurm.warn_before_s {ahead_s - EARLY_S}, up to {EARLY_S} s early), which leaves "
        f"{max(0, seconds - ahead_s)} s{needs}: attempts may be stopped before they end; give more than "
        f"{time_text(math.ceil(needed_s + ahead_s))} (--time, slurm.time_limit), or a shorter slurm.warn_before_s"
    )


def refuse_above(campaign: Campaign, max_node_hours: float) -> None:
    """Raises `UserError` if a campaign may use more node-hours."""
    bound = campaign.bound
    if bound is None:
        raise UserError(f"--max-node-hours {max_node_hours:g}: a job has no time limit: give --time")
    if bound <= max_node_hours:
        return
    runs = counted(len(campaign.plans), "run")
    raise UserError(
        f"--max-node-hours {max_node_hours:g}: {runs} may take {bound:,.4g} node-hours (nodes x time limit); "
        "raise it, give fewer --repeats or nodes, or a shorter --time"
    )
