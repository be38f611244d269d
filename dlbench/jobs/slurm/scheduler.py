"""The interface to Slurm's commands: sbatch, squeue, sacct, scontrol and scancel."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs.scheduler import Answer, Queue, cluster_of
from dlbench.jobs.scripts.job import SUBMITTED, Job
from dlbench.jobs.scripts.launch import render_job, sbatch_arguments
from dlbench.jobs.slurm.accounting import ask
from dlbench.jobs.slurm.environment import asked, call, exported_names, job_environment, on_cluster
from dlbench.records.folder import RunFolder

# Messages of the controller (slurm_errno.c of Slurm) and of sbatch for a job that was refused. After any other failure,
# such as a timeout, the job may be queued.
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

_IDS_PER_SCANCEL = 5_000  # Stays far below Linux's limit on the length of arguments.


class Slurm:
    """Submits, lists and cancels jobs; tests use a substitute."""

    def require(self) -> None:
        """Raises `EnvironmentLacksError` if sbatch is not on PATH."""
        if shutil.which("sbatch") is None:
            raise EnvironmentLacksError(
                "sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run"
            )

    def render(self, job: Job, folders: Sequence[RunFolder], python: str, comment: str) -> str:
        """Returns the batch script of a job; `comment`: identifies it in the queue."""
        return render_job(job, folders, python, comment)

    def command(self, job: Job, folder: RunFolder, after: str | None, comment: str) -> list[str]:
        """Returns the command that submits a script; `after`: id of the job that must have ended before, or None."""
        if after is not None:
            after = after.partition(";")[0]
        return sbatch_arguments(job, folder, after, comment)

    def variables(self, job: Job) -> Sequence[str]:
        """Returns the names of the environment variables that a job is given."""
        return exported_names(job.plans)

    def clusters(self, job: Job) -> Sequence[str]:
        """Returns the names of the clusters that a job may run on; an empty name is the local cluster."""
        return job.shape.system.slurm.clusters or ("",)

    def submit(self, job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
        """Runs the submission command; returns the job id, or why the job was refused or may be queued. `keep_open`:
        file descriptors that sbatch inherits: it holds the lock of the series even if dlbench is killed.
        """
        try:
            done = call(command, {**job_environment(job.plans), SUBMITTED: "1"}, keep_open=keep_open)
        except subprocess.TimeoutExpired as late:
            return Answer(doubt=f"sbatch gave no answer within {late.timeout:g} s")
        except OSError as error:
            return Answer(refusal=f"it cannot be started: {error.strerror or error}")
        # A wrapper of the site named sbatch may print more than the id, even other numbers: then the queue decides.
        lines = [line.strip() for line in done.stdout.splitlines()]
        job_ids = {line for line in lines if re.fullmatch(r"\d+(;\S+)?", line)}
        if done.returncode == 0:
            if len(job_ids) == 1:
                return Answer(job_id=job_ids.pop())
            return Answer(doubt=f"sbatch gave an unexpected answer ({done.stdout.strip()!r:.200})")
        message = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        reason = message.lower().rpartition("batch job submission failed:")[2]
        if not job_ids and "timed out" not in reason and any(refusal in reason for refusal in _REFUSALS):
            return Answer(refusal=message, is_full="job submit limit" in reason or "maxsubmitjob" in message.lower())
        return Answer(doubt=f"sbatch failed: {message:.300}")

    def query(self, job_ids: Sequence[str] = (), users: Sequence[str] = (), clusters: Sequence[str] = ()) -> Queue:
        """Returns this user's jobs and those of `users`; `job_ids`: to ask sacct for if squeue lacks them."""
        return ask(job_ids, users, clusters)

    def script(self, job_id: str) -> str:
        """Returns the batch script of a job, or of the array of an element, from scontrol; empty if it fails."""
        bare_id, _, cluster = job_id.partition(";")
        array_id = bare_id.partition("_")[0]
        done = asked(["scontrol", *on_cluster(cluster), "write", "batch_script", array_id, "-"])
        if isinstance(done, str) or done.returncode:
            return ""
        return done.stdout

    def cancel(self, job_ids: Sequence[str]) -> str:
        """Cancels jobs; returns the errors of scancel, empty if there were none."""
        ids_by_cluster: dict[str, list[str]] = {}
        for job_id in job_ids:
            ids_by_cluster.setdefault(cluster_of(job_id), []).append(job_id.partition(";")[0])
        problems = []
        for cluster, ids in ids_by_cluster.items():
            for start in range(0, len(ids), _IDS_PER_SCANCEL):
                done = asked(["scancel", *on_cluster(cluster), *ids[start : start + _IDS_PER_SCANCEL]])
                if isinstance(done, str):
                    problems.append(done)
                elif done.returncode != 0:
                    problems.append(" ".join(done.stderr.split())[:300] or f"scancel ended with {done.returncode}")
        return "; ".join(filter(None, problems))
