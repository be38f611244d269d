"""The states of many jobs: one call of squeue, and one of sacct for those that it has forgotten."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field

from dlbench.jobs.slurm.call import call


@dataclass(frozen=True, kw_only=True)
class JobStates:
    """What Slurm says of some jobs."""

    states: dict[str, str] = field(default_factory=dict)
    """PENDING, RUNNING, COMPLETED, ... by job id; jobs that Slurm has forgotten are left out."""
    unanswered: str = ""
    """Why what is left out is not known to be forgotten; empty if Slurm answered."""


def job_states(job_ids: list[str]) -> JobStates:
    """The states of jobs.

    Asks squeue once for all jobs, and sacct once for those it no longer lists, where there is accounting.
    """
    if not job_ids:
        return JobStates()
    if shutil.which("squeue") is None:
        return JobStates(unanswered="squeue is not on PATH")
    queued = _ask("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T", f"--jobs={','.join(job_ids)}")
    states = {**queued.states}
    missing = [job for job in job_ids if job not in states]
    if missing and shutil.which("sacct") is not None:
        # Highest exit code of the steps: 0:125 is Slurm's own for a step that ran out of memory.
        form = "--format=JobID,State,DerivedExitCode"
        states |= _ask("sacct", "--noheader", "--parsable2", "-X", form, f"--jobs={','.join(missing)}").states
    return JobStates(states=states, unanswered=queued.unanswered)


def _ask(*command: str) -> JobStates:
    try:
        done = call(command)
    except subprocess.TimeoutExpired as late:
        return JobStates(unanswered=f"{command[0]} gave no answer within {late.timeout:g} s")
    except OSError as error:
        return JobStates(unanswered=f"{command[0]} cannot be started: {error.strerror or error}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if "|" in line]
    # sacct writes "CANCELLED by 1000".
    states = {job: state.split()[0] for job, state, *_ in rows if state.strip()}
    states |= {row[0]: "OUT_OF_MEMORY" for row in rows if row[2:] == ["0:125"]}
    said = " ".join(done.stderr.split())
    # squeue's only word for jobs that it has forgotten.
    if done.returncode != 0 and not states and "invalid job id" not in said.lower():
        return JobStates(unanswered=f"{command[0]} failed: {said[:200] or f'it ended with {done.returncode}'}")
    return JobStates(states=states)
