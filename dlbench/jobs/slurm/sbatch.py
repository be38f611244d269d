"""sbatch, and what its answers mean."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs.scheduler import Answer
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.call import call
from dlbench.jobs.slurm.environment import job_environment

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


def require_slurm() -> None:
    """Proves that jobs can be submitted from here.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise EnvironmentLacksError("sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run")


def sbatch(job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
    """The job's id; else why it may be queued all the same; else why it was refused for certain.

    Args:
        job: its runs.
        command: the sbatch command line.
        keep_open: as of `dlbench.jobs.scheduler.Scheduler.submit`.
    """
    try:
        done = call(command, job_environment(job.plans), keep_open=keep_open)
    except subprocess.TimeoutExpired as late:
        return Answer(doubt=f"sbatch gave no answer within {late.timeout:g} s")
    except OSError as error:
        return Answer(refusal=f"it cannot be started: {error.strerror or error}")
    # Sites' own programs of this name print more than the id, perhaps other numbers; which is the id, the queue knows.
    answers = {line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S+)?", line.strip())}
    if done.returncode == 0:
        if len(answers) == 1:
            return Answer(job_id=answers.pop())
        return Answer(doubt=f"sbatch gave an unexpected answer ({done.stdout.strip()!r:.200})")
    why = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
    final = why.lower().rpartition("batch job submission failed:")[2]
    if not answers and "timed out" not in final and any(words in final for words in _REFUSALS):
        return Answer(refusal=why, is_full="job submit limit" in final or "maxsubmitjob" in why.lower())
    return Answer(doubt=f"sbatch failed: {why:.300}")
