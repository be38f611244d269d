"""Sessions: runs that share the state of a machine, and so are not independent measurements of it.

Variation between sessions does not show in the scatter within one (Hoefler and Belli, SC'15, rule 5 on variation
between allocations), so a claim about a machine counts sessions, not runs. A session ends with a pause or a reboot. For
comparisons over time the Slurm jobs of one afternoon are one session: they are different allocations of one state of
network and storage.

Runs are of one session while less than `PAUSE_S` pass between the end of one and the end of the next, so that a working
day or a night is one session. It is no longer than `LONGEST_S`, because runs on a machine that is always busy would
otherwise be a single session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from dlbench.records.scan import Run

MIN_SESSIONS = 5
"""With fewer, the scatter is hardly known: to be found at 1 % with 80 % probability, a change must be 4.7 standard
errors with five sessions, 5.5 with four, and 8.0 with three (Student's t)."""
PAUSE_S = 12 * 3600  # Longer than from an evening to the morning after, shorter than from night to night.
LONGEST_S = 24 * 3600


@dataclass(frozen=True)
class Circumstances:
    """Time, job and boot of a run, which decide its session."""

    finished: str  # End of the run, UTC, ISO 8601.
    job: str  # Cluster and id of its Slurm job; empty outside of Slurm.
    boot: str  # Host of rank 0 and the kernel's id of its boot; empty if not known.

    @property
    def moment(self) -> float:
        """The end in seconds since 1970; -inf if it is not known, so that such runs are one session."""
        try:
            return datetime.fromisoformat(self.finished.replace("Z", "+00:00")).timestamp()
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
    """Returns the session of each run for comparisons over time, by run id: the name of the session's first run.

    Runs of one Slurm job are always of one session. Names are valid only among the runs of one call.
    """
    session_by_run: dict[str, str] = {}
    session_by_job: dict[str, str] = {}
    boots: dict[str, str] = {}
    session, first, last = "", 0.0, 0.0
    for run_id in sorted(runs, key=lambda run_id: (runs[run_id].moment, run_id)):
        run, moment = runs[run_id], runs[run_id].moment
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
