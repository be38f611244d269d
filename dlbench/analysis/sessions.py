"""Sessions: runs that share the state of a machine, and so are no independent looks at it.

What differs between sessions does not show in the scatter within one (Hoefler and Belli, SC'15, rule 5 on variation
between allocations), so a claim about a machine counts sessions, not runs. A session begins where the state can be
another: after a pause, after a reboot, in another Slurm job. For comparisons over time jobs of one afternoon are one
session all the same: they are different allocations of one state of network and storage.

Runs belong together while less than `PAUSE_S` pass between the end of one and the end of the next, which keeps a
working day or a night whole, but no longer than `LONGEST_S`: on a machine that never rests, such a chain alone would be
one session for ever, and no gate would ever have a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from dlbench.records.scan import Run

MIN_SESSIONS = 5
"""With fewer, their scatter is hardly known: a change must be 4.7 standard errors to be found at 1 % with 80 %
probability where five sessions give the scatter, 5.5 where four do, and 8.0 where three do (Student's t)."""
PAUSE_S = 12 * 3600  # Longer than from an evening to the morning after, shorter than from night to night.
LONGEST_S = 24 * 3600


@dataclass(frozen=True)
class Circumstances:
    """What the session of a run follows from."""

    finished: str  # When it ended, UTC, ISO 8601.
    job: str  # Cluster and id of its Slurm job; empty outside of one.
    boot: str  # Host of rank 0 and the kernel's id of its boot; empty where a run does not know.

    @property
    def moment(self) -> float:
        """Seconds; -inf where the end is not known, so that such runs are one session."""
        try:
            return datetime.fromisoformat(self.finished.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError):
            return float("-inf")


def circumstances_of(run: Run) -> Circumstances:
    """Those of a run, as in its record."""
    if run.record is None:
        return Circumstances(finished="", job="", boot="")
    environment = run.record.environment
    return circumstances(run.record.finished, environment.get("variable.SLURM_JOB_ID", ""), environment)


def circumstances(finished: str, job: str, environment: Mapping[str, str]) -> Circumstances:
    """Returns those of a run that ended then, in that Slurm job (empty: in none), by what its rank 0 recorded."""
    boot = environment.get("boot_id", "")
    return Circumstances(
        finished=finished,
        job=f"{environment.get('variable.SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        boot=f"{environment.get('host', '')} {boot}" if boot else "",
    )


def wall_s(run: Run) -> float | None:
    """From the start of rank 0 to the end of the run, seconds; None where its record does not say."""
    if run.record is None:
        return None
    times = (run.record.started, run.record.finished)
    started, finished = (Circumstances(finished=time, job="", boot="").moment for time in times)
    return max(0.0, finished - started) if math.isfinite(finished - started) else None


def sessions_of(runs: Mapping[str, Circumstances]) -> dict[str, str]:
    """Run -> its session, for comparisons over time: the name of the session's first run.

    Runs of one Slurm job are always of one session; the names hold among the runs that were given together.
    """
    session_by_run: dict[str, str] = {}
    of_job: dict[str, str] = {}
    boots: dict[str, str] = {}
    session, begun, last = "", 0.0, 0.0
    for moment, run_id in sorted((when.moment, run_id) for run_id, when in runs.items()):
        run = runs[run_id]
        host, _, boot = run.boot.rpartition(" ")
        is_other_boot = bool(boot) and boots.get(host, boot) != boot
        if not session or moment - last > PAUSE_S or moment - begun > LONGEST_S or is_other_boot:
            session, begun, boots = run_id, moment, {}
        last = moment
        if boot:
            boots[host] = boot
        session_by_run[run_id] = of_job.setdefault(run.job, session) if run.job else session
    return session_by_run


def allocations_of(runs: Iterable[Run]) -> dict[str, str]:
    """Run -> what is one look at a machine within a report: its Slurm job, or outside of one its session."""
    circumstances_by_run = {run.plan.run_id: circumstances_of(run) for run in runs}
    sessions = sessions_of({run_id: one for run_id, one in circumstances_by_run.items() if not one.job})
    return {run_id: f"job {one.job}" if one.job else sessions[run_id] for run_id, one in circumstances_by_run.items()}
