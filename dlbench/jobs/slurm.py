"""Submits scripts to Slurm and asks after them, politely: one call for all jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError

from dlbench.errors import EnvironmentLacksError, IncompleteDataError, RunError
from dlbench.jobs.batch import Job, render_job, sbatch_arguments
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_atomic, write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now

CALL_TIMEOUT_S = 60
_MAYBE_QUEUED = "the job may be queued all the same: look with squeue; its folder was kept"


class Submission(Spec):
    """`submission.json`: how a run went to Slurm."""

    format: Literal["dlbench.submission"] = Field("dlbench.submission", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    job_id: str = Field(description="Slurm's job id, without the cluster.")
    command: tuple[str, ...] = Field(description="The sbatch command line.")
    submitted: str = Field(description="UTC, ISO 8601.")
    runs: tuple[RunName, ...] = Field(
        (),
        description="All runs of the job in their order, where it holds several (submit --ab): Slurm's output lies in "
        "the folder of the first; empty: this run alone.",
    )


def require_slurm() -> None:
    """Proves that jobs can be submitted from here.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise EnvironmentLacksError("sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run")


def submit(job: Job, folders: Sequence[RunFolder], python: str, after: str | None) -> Submission:
    """Writes a job's script into the folder of each of its runs and submits it.

    Args:
        job: the plans of its runs, in their order.
        folders: their folders, absolute; Slurm's output goes into the first.
        python: as in `render_job`.
        after: as in `sbatch_arguments`.

    Raises:
        RunError: sbatch refused (the message is Slurm's own, and the folders of the runs are gone again), or gave no
            answer that can be understood (the folders stay, because the job may be queued).
    """
    name = job[0].run_id if len(job) == 1 else f"{job[0].run_id} and {len(job) - 1} more runs"
    script = render_job(job, folders, python)
    for folder in folders:
        write_atomic(folder.script, script)
    command = sbatch_arguments(folders[0], after)
    try:
        done = call(command)
    except subprocess.TimeoutExpired:
        raise RunError(f"sbatch gave no answer within {CALL_TIMEOUT_S} s to {name}; {_MAYBE_QUEUED}") from None
    if done.returncode != 0:
        for folder in folders:
            shutil.rmtree(folder.path)
        why = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        raise RunError(f"sbatch refused {name}: {why}")
    number = re.match(r"(\d+)(;\S+)?\s*$", done.stdout)
    if number is None:
        raise RunError(f"sbatch gave an unexpected answer to {name}: {done.stdout!r}; {_MAYBE_QUEUED}")
    submission = Submission(
        job_id=number[1],
        command=tuple(command),
        submitted=utc_now(),
        runs=tuple(plan.run_id for plan in job) if len(job) > 1 else (),
    )
    for folder in folders:
        write_json(folder.submission, submission.model_dump(mode="json"))
    return submission


def read_submission(folder: RunFolder) -> Submission | None:
    """How a run was submitted; None for a run that was not.

    Raises:
        IncompleteDataError: the file is damaged.
    """
    try:
        return Submission.model_validate(read_json(folder.submission, MAX_JSON))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise IncompleteDataError(f"{folder.submission}: cannot be read: {error.strerror}") from None
    except (OSError, ValueError, ValidationError) as error:
        why = "not as dlbench writes it" if isinstance(error, ValidationError) else why_unreadable(error)
        raise IncompleteDataError(f"{folder.submission}: damaged: {why}; delete it or restore it from a copy") from None


def call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm and keeps what it says.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: no answer within `CALL_TIMEOUT_S`.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CALL_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def job_states(job_ids: list[str]) -> dict[str, str]:
    """Slurm's states (PENDING, RUNNING, COMPLETED, ...) by job id; jobs that Slurm has forgotten are left out.

    Asks squeue once for all jobs, and sacct once for those it no longer lists, where there is accounting.
    """
    if not job_ids or shutil.which("squeue") is None:
        return {}
    states = _ask("squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(job_ids)}")
    missing = [job for job in job_ids if job not in states]
    if missing and shutil.which("sacct") is not None:
        states |= _ask(
            "sacct", "--noheader", "--parsable2", "-X", "--format=JobID,State", f"--jobs={','.join(missing)}"
        )
    return states


def _ask(*command: str) -> dict[str, str]:
    try:
        done = call(command)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    # sacct writes "CANCELLED by 1000".
    return {job: state.split()[0] for job, state in pairs if state}
