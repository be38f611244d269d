"""Sessions: runs that share the state of a machine, and so are no independent looks at it.

All runs of one allocation meet the same nodes, neighbours, clocks and page cache; all runs of one command the same
night. What differs between sessions does not show in the scatter within one (Hoefler and Belli, SC'15, rule 5 on
variation between allocations), so a claim about a machine counts sessions, not runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlbench.records.scan import Run

MIN_SESSIONS = 5
"""With fewer, their scatter is hardly known: a change must be 4.7 standard errors to be found at 1 % with 80 %
probability where five sessions tell the scatter, 5.5 where four do, and 8.0 where three do (Student's t)."""


def session_of(run: Run) -> str:
    """A name equal for the runs of one allocation: Slurm's job or, outside of one, the command that planned them."""
    return _job_of(run) or _command_of(run)


def sessions_of(runs: Iterable[Run]) -> dict[str, str]:
    """Run id -> session, where runs that share a job or a command share the session.

    For comparisons over time: jobs that one command submitted are different allocations, but of one night.
    """
    of_run = {run.plan.run_id: tuple(filter(None, (_job_of(run), _command_of(run)))) for run in runs}
    joined: dict[str, set[str]] = {}
    for names in of_run.values():
        together = set(names).union(*(joined.get(name, ()) for name in names))
        joined.update(dict.fromkeys(together, together))
    return {run_id: _name(joined[names[0]]) for run_id, names in of_run.items()}


def _name(together: set[str]) -> str:
    """The one job that holds all, else the first command."""
    jobs = sorted(name for name in together if name.startswith("job "))
    return jobs[0] if len(jobs) == 1 else min(together - set(jobs))


def _job_of(run: Run) -> str:
    environment = {} if run.record is None else run.record.environment
    job = environment.get("variable.SLURM_JOB_ID", "")
    return f"job {environment.get('variable.SLURM_CLUSTER_NAME', '')}/{job}" if job else ""


def _command_of(run: Run) -> str:
    """All plans of a command are made at one moment; a series' name may be given again every night."""
    return f"series {run.plan.series.id} of {run.plan.created}"
