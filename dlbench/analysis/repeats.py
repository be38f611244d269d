"""Independent repeats among the runs of a figure: their sessions, and warnings about differing settings.

Runs of one session share the state of a machine, and so are not independent measurements of it: variation between
sessions does not show in the scatter within one (Hoefler and Belli, SC'15, rule 5), so a claim about a machine counts
sessions, not runs. A session ends with a reboot, or a pause of `PAUSE_S` between the ends of runs, so that a working
day or a night, of one Slurm job or several, is one; it is no longer than `LONGEST_S`, because a machine that is always
busy would otherwise have a single session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from dlbench.analysis.environments import NOT_SET, Difference, Doubt, order_of, side_by_side, without_names
from dlbench.records.scan import Run
from dlbench.specs.plan import LaunchPlan

MIN_SESSIONS = 5
"""With fewer, the scatter is hardly known: to be found at 1 % with 80 % probability, a change must be 4.7 standard
errors with five sessions, 5.5 with four, and 8.0 with three (Student's t)."""

PAUSE_S = 12 * 3600  # Longer than from an evening to the morning after, shorter than from night to night.
LONGEST_S = 24 * 3600
CODE = "unlike-runs"
MAX_KEYS = 6  # Keys that a sentence names; it counts the others, and reports list them all.
MAX_VALUES = 4
MAX_LENGTH = 80  # Characters of a value that are shown.
Facts = Mapping[str, str]  # The recorded environment and settings of a run, by key.
_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_WHERE_LOADED = frozenset({"mpi.library", *(f"variable.{name}" for name in _INTERFACES)})
"""Libraries and networks that a run records only if it uses them: a run without one does not differ."""


class Circumstances(NamedTuple):
    """Time, job and boot of a run, which decide its session."""

    finished: str  # End of the run, UTC, ISO 8601.
    job: str  # Cluster and id of its Slurm job; empty outside of Slurm.
    boot: str  # Host of rank 0 and the kernel's id of its boot; empty if not known.

    @property
    def moment(self) -> float:
        """The end in seconds since 1970; -inf if it is not known, so that such runs are one session."""
        try:
            return datetime.fromisoformat(self.finished).timestamp()
        except (ValueError, OverflowError, OSError):
            return float("-inf")


def circumstances_of(run: Run) -> Circumstances:
    """Returns the circumstances of a run from its record."""
    if run.record is None:
        return Circumstances(finished="", job="", boot="")
    environment = run.record.environment
    return circumstances(run.record.finished, environment.get("variable.SLURM_JOB_ID", ""), environment)


def circumstances(finished: str, job: str, environment: Mapping[str, str]) -> Circumstances:
    """Returns the circumstances of a run from its end, its Slurm job (empty: none) and the environment of rank 0."""
    boot = environment.get("boot_id", "")
    if boot:
        boot = f"{environment.get('host', '')} {boot}"
    if job:
        job = f"{environment.get('variable.SLURM_CLUSTER_NAME', '')}/{job}"
    return Circumstances(finished=finished, job=job, boot=boot)


def wall_s(run: Run) -> float | None:
    """Returns the seconds from the start of rank 0 to the end of the run; None if they are not recorded."""
    if run.record is None:
        return None
    started = Circumstances(finished=run.record.started, job="", boot="").moment
    finished = Circumstances(finished=run.record.finished, job="", boot="").moment
    if not math.isfinite(finished - started):
        return None
    return max(0.0, finished - started)


def sessions_of(runs: Mapping[str, Circumstances]) -> dict[str, str]:
    """Returns the session of each run, by run id: the name of its first run; the runs of a Slurm job share one."""
    session_by_run: dict[str, str] = {}
    session_by_job: dict[str, str] = {}
    boots: dict[str, str] = {}
    session, first, last = "", 0.0, 0.0
    for moment, run_id in sorted((run.moment, run_id) for run_id, run in runs.items()):
        run = runs[run_id]
        host, _, boot = run.boot.rpartition(" ")
        is_other_boot = bool(boot) and boots.get(host, boot) != boot
        if not session or moment - last > PAUSE_S or moment - first > LONGEST_S or is_other_boot:
            session, first, boots = run_id, moment, {}
        last = moment
        if boot:
            boots[host] = boot
        session_by_run[run_id] = session
        if run.job:
            session_by_run[run_id] = session_by_job.setdefault(run.job, session)
    return session_by_run


def allocations_of(runs: Iterable[Run]) -> dict[str, str]:
    """Returns the session of each run within a report, by run id: its Slurm job, or outside of Slurm its session."""
    circumstances_by_run = {run.plan.run_id: circumstances_of(run) for run in runs}
    allocations = {run_id: f"job {run.job}" for run_id, run in circumstances_by_run.items() if run.job}
    return allocations | sessions_of({run_id: run for run_id, run in circumstances_by_run.items() if not run.job})


def mixed_configurations(places: Mapping[str, Mapping[str, Facts]]) -> list[Doubt]:
    """Returns warnings on averages of, or ratios between, different runs; `places`: facts by run, by name of figure."""
    texts = []
    averaged = averaged_unlike(places)
    if averaged:
        texts.append(averaged)
    between = compared_unlike(places)
    if between:
        texts.append(f"compared figures are of different configurations: {named(between)}; their ratio includes that")
    return [Doubt(code=CODE, severity="serious", text=text) for text in texts]


def averaged_unlike(places: Mapping[str, Mapping[str, Facts]]) -> str:
    """Returns the keys that differ within a figure, as a sentence without full stop; empty if none does."""
    inside, places_of_keys = [], []
    for difference, key_places in _differences_with_places(places):
        if key_places:
            inside.append(difference)
            places_of_keys += key_places
    if not inside:
        return ""
    differing_places = [place for place in places if place in places_of_keys]
    where = ""
    if len(differing_places) < len(places):
        where = f" (at {', '.join(differing_places)})"
    return f"runs that are averaged{where} are not repeats: {named(inside)}"


def compared_unlike(places: Mapping[str, Mapping[str, Facts]]) -> list[Difference]:
    """Returns the keys that differ between figures and within none of them."""
    return [difference for difference, key_places in _differences_with_places(places) if not key_places]


def _differences_with_places(places: Mapping[str, Mapping[str, Facts]]) -> list[tuple[Difference, list[str]]]:
    """Returns the differences of all runs, each with the figures within which its key differs."""
    places_by_key: dict[str, list[str]] = {}
    all_runs: dict[str, Facts] = {}
    for place, runs in places.items():
        all_runs |= runs
        for difference in _differences(runs):
            places_by_key.setdefault(difference.key, []).append(place)
    return [(difference, places_by_key.get(difference.key, [])) for difference in _differences(all_runs)]


def named(differences: Iterable[Difference]) -> str:
    """Returns keys with their values and how many runs have each: `kernel: 6.1 in 3, 6.2 in 2`."""
    ordered = sorted(differences, key=lambda difference: order_of(difference.key))
    texts = [f"{difference.key}: {_values(difference)}" for difference in ordered[:MAX_KEYS]]
    if len(ordered) > MAX_KEYS:
        texts.append(f"and {len(ordered) - MAX_KEYS} more keys")
    return "; ".join(texts)


def _values(difference: Difference) -> str:
    texts = []
    for value, runs in difference.values[:MAX_VALUES]:
        text = value if len(value) <= MAX_LENGTH else f"{value[: MAX_LENGTH - 3]}..."
        texts.append(f"{text} in {len(runs)}")
    if len(difference.values) > MAX_VALUES:
        texts.append(f"{len(difference.values) - MAX_VALUES} other values")
    return ", ".join(texts)


def _differences(runs: Mapping[str, Facts]) -> list[Difference]:
    different = []
    for difference in side_by_side({run: without_names(facts) for run, facts in runs.items()}).differences:
        set_values = [value for value, _ in difference.values if value != NOT_SET]
        if difference.key not in _WHERE_LOADED or len(set_values) != 1:
            different.append(difference)
    return different


def shared_nodes(plan: LaunchPlan) -> str:
    """Returns a warning about nodes that are shared with other jobs; empty for exclusive nodes."""
    if plan.system.scheduler == "none" or plan.system.slurm.exclusive:
        return ""
    return (
        "nodes may be shared with other jobs (system.slurm.exclusive is off): their load on cores, memory and network "
        "is part of these figures and changes from run to run"
    )
