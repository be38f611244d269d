"""Submits scripts to Slurm and asks after them, politely: one call for all jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.jobs.scripts.batch import keeps_own_comment, render_job, sbatch_arguments
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.call import call
from dlbench.jobs.slurm.environment import job_environment
from dlbench.jobs.slurm.queue import find_job
from dlbench.jobs.slurm.submission import keep_submission
from dlbench.records.files import write_atomic
from dlbench.records.folder import RunFolder

_MAYBE_QUEUED = "the job may be queued all the same, and its folder was kept"

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


def require_slurm() -> None:
    """Proves that jobs can be submitted from here.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise EnvironmentLacksError("sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run")


def submit(job: Job, folders: Sequence[RunFolder], python: str, after: str | None, comment: str = "") -> str:
    """Writes a job's script into the folder of each of its runs and submits it; returns Slurm's id.

    An sbatch that ends badly may have queued the job all the same ("Socket timed out on send/recv operation"), so that
    Slurm is asked, and the job adopted if it is there.

    Args:
        job: the runs.
        folders: their folders, absolute; Slurm's output goes into the first.
        python: as in `render_job`.
        after: as in `sbatch_arguments`.
        comment: no other job has it; not given to sbatch where the system gives one of its own.

    Raises:
        RefusedError: sbatch refused (the message is Slurm's own) or cannot be started; the folders are gone again.
        RunError: sbatch said neither yes nor no, and squeue knows no such job (the folders stay, because it may be
            queued).
    """
    name, *others = job.run_ids
    if others:
        name = f"{name} and {len(others)} more run{'s' * (len(others) > 1)}"
    script = render_job(job, folders, python)
    for folder in folders:
        write_atomic(folder.script, script)
    if keeps_own_comment(job):
        comment = ""
    command = sbatch_arguments(job, folders[0], after, comment)
    job_id, doubt, refusal = _sbatch(command, job_environment(job.plans))
    if refusal:
        for folder in folders:
            shutil.rmtree(folder.path)
        raise RefusedError(f"sbatch refused {name}: {refusal}")
    job_id = job_id or find_job(folders[0], comment)
    if not job_id:
        raise RunError(f"{name}: {doubt}; {_MAYBE_QUEUED}")
    keep_submission(job, folders, job_id, command)
    return job_id


def _sbatch(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str, str]:
    """The job's id; else why it may be queued all the same; else why it was refused for certain."""
    try:
        done = call(command, environment)
    except subprocess.TimeoutExpired as late:
        return "", f"sbatch gave no answer within {late.timeout:g} s", ""
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
