"""Submits scripts to Slurm and asks after them, politely: one call for all jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, ValidationError

from dlbench.errors import EnvironmentLacksError, IncompleteDataError, RunError
from dlbench.jobs.batch import Job, keeps_own_comment, render_job, sbatch_arguments
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_atomic, write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now

CALL_TIMEOUT_S = 60
_MAYBE_QUEUED = "the job may be queued all the same, and its folder was kept"

_LOOKS_S = (0.0, 2.0, 5.0)
"""Pauses before squeue is asked for a job of which sbatch did not say whether it was taken, seconds."""

# The controller's words (slurm_errno.c of Slurm) and sbatch's own for a job that was not taken. After any other
# failure, such as a time-out, it may have been taken.
_REFUSALS = (
    *("invalid partition", "no partition specified", "invalid account", "invalid qos", "invalid wckey"),
    *("access/permission denied", "access denied to requested reservation", "requested reservation is invalid"),
    *("user's group not permitted", "invalid feature specification", "invalid generic resource", "invalid license"),
    *("invalid node name", "node count specification invalid", "job size specification needs"),
    *("more processors requested than permitted", "memory required by task is not available"),
    *("requested nodes not in this partition", "requested node configuration is not available"),
    *("requested partition configuration not available", "required node not available"),
    *("required partition not available", "requested time limit is invalid", "job violates accounting/qos policy"),
    *("job dependency problem", "invalid job id", "invalid job array", "pathname of a file, directory"),
    *("could not establish a configuration source", "unable to process configuration file"),
    *("unrecognized option", "unable to open file", "does not look like a batch script", "batch script is empty"),
)


class RefusedError(RunError):
    """Slurm did not take a job, for certain."""


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


def submit(job: Job, folders: Sequence[RunFolder], python: str, after: str | None, comment: str = "") -> Submission:
    """Writes a job's script into the folder of each of its runs and submits it.

    An sbatch that ends badly may have queued the job all the same ("Socket timed out on send/recv operation"), so that
    Slurm is asked, and the job adopted if it is there.

    Args:
        job: the plans of its runs, in their order.
        folders: their folders, absolute; Slurm's output goes into the first.
        python: as in `render_job`.
        after: as in `sbatch_arguments`.
        comment: no other job has it; not given to sbatch where the system gives one of its own.

    Raises:
        RefusedError: sbatch refused (the message is Slurm's own) or cannot be started; the folders are gone again.
        RunError: sbatch said neither yes nor no, and squeue knows no such job (the folders stay, because it may be
            queued).
    """
    name = job[0].run_id if len(job) == 1 else f"{job[0].run_id} and {len(job) - 1} more runs"
    script = render_job(job, folders, python)
    for folder in folders:
        write_atomic(folder.script, script)
    if keeps_own_comment(job):
        comment = ""
    command = sbatch_arguments(folders[0], after, comment)
    job_id, doubt, refusal = _sbatch(command)
    if refusal:
        for folder in folders:
            shutil.rmtree(folder.path)
        raise RefusedError(f"sbatch refused {name}: {refusal}")
    job_id = job_id or find_job(folders[0], comment)
    if not job_id:
        raise RunError(f"{name}: {doubt}; {_MAYBE_QUEUED}")
    return keep_submission(job, folders, job_id, command)


def _sbatch(command: Sequence[str]) -> tuple[str, str, str]:
    """The job's id; else why it may be queued all the same; else why it was refused for certain."""
    try:
        done = call(command)
    except subprocess.TimeoutExpired:
        return "", f"sbatch gave no answer within {CALL_TIMEOUT_S} s", ""
    except OSError as error:
        return "", "", f"it cannot be started: {error.strerror or error}"
    # Sites' own programs of this name print more than the id.
    answers = [found for line in done.stdout.splitlines() if (found := re.fullmatch(r"(\d+)(;\S+)?", line.strip()))]
    if done.returncode == 0:
        return answers[-1][1] if answers else "", f"sbatch gave an unexpected answer ({done.stdout.strip()!r:.200})", ""
    why = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
    final = why.lower().rpartition("batch job submission failed:")[2]
    if not answers and "timed out" not in final and any(words in final for words in _REFUSALS):
        return "", "", why
    return "", f"sbatch failed: {why:.300}", ""


def keep_submission(job: Job, folders: Sequence[RunFolder], job_id: str, command: Sequence[str]) -> Submission:
    """Writes into the folder of each run of a job which job it is.

    Raises:
        RunError: a file cannot be written.
    """
    submission = Submission(
        job_id=job_id,
        command=tuple(command),
        submitted=utc_now(),
        runs=tuple(plan.run_id for plan in job) if len(job) > 1 else (),
    )
    for folder in folders:
        write_json(folder.submission, submission.model_dump(mode="json"))
    return submission


def find_job(folder: RunFolder, comment: str) -> str:
    """The id of the job that was submitted from a folder, if squeue knows it; empty if not.

    It is asked several times: a controller that is too busy to answer may still be taking the job in.
    """
    for wait_s in _LOOKS_S:
        time.sleep(wait_s)
        queue = queued_jobs()
        if queue is None:
            return ""
        if found := queue.find(folder, comment):
            return found
    return ""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """This user's jobs that squeue knows, those that have ended lately, too."""

    jobs: tuple[tuple[str, str, str], ...]
    """Id, comment and working directory of each."""

    def find(self, folder: RunFolder, comment: str) -> str:
        """The id of the job with this comment, else of the one that was submitted from this folder; empty if none."""
        by_comment = (job for job, said, _ in self.jobs if comment and said == comment)
        by_folder = (job for job, _, place in self.jobs if place == str(folder.path))
        return next(by_comment, "") or next(by_folder, "")


def queued_jobs() -> Queue | None:
    """This user's jobs; None if Slurm does not answer."""
    try:
        done = call(["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%i|%k|%Z"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    jobs = []
    for line in done.stdout.splitlines():
        job, _, rest = line.partition("|")
        comment, bar, place = rest.rpartition("|")  # a comment may hold anything
        if bar:
            jobs.append((job.strip(), comment, place))
    return Queue(jobs=tuple(jobs))


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
        # Of its own session: neither Ctrl-C nor a terminal that closes may cut off a submission.
        start_new_session=True,
    )


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
    queued = _ask("squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(job_ids)}")
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
    except subprocess.TimeoutExpired:
        return JobStates(unanswered=f"{command[0]} gave no answer within {CALL_TIMEOUT_S} s")
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
