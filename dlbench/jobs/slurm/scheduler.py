"""Slurm, as a campaign speaks to it."""

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

_AT_ONCE = 5_000  # Ids of one scancel: their text stays far below what Linux takes for arguments.


class Slurm:
    """What a campaign asks for; tests have another one."""

    def require(self) -> None:
        """Proves that jobs can be submitted from here. Raises `EnvironmentLacksError`: sbatch is not on PATH."""
        if shutil.which("sbatch") is None:
            raise EnvironmentLacksError(
                "sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run"
            )

    def render(self, job: Job, folders: Sequence[RunFolder], python: str, comment: str) -> str:
        """The batch script of a job.

        `python`: Python of the nodes, unless the system names another. `comment`: by which the job is found again;
        where the site has one of its own, the folder identifies the job.
        """
        return render_job(job, folders, python, comment)

    def command(self, job: Job, folder: RunFolder, after: str | None, comment: str) -> list[str]:
        """The command that submits a script; `after`: id of the job that must have ended before, None: none."""
        if after is not None:
            after = after.partition(";")[0]
        return sbatch_arguments(job, folder, after, comment)

    def variables(self, job: Job) -> Sequence[str]:
        """Names of the environment variables that a job is given."""
        return exported_names(job.plans)

    def clusters(self, job: Job) -> Sequence[str]:
        """Names of the clusters that a job may go to; an empty one for the cluster here."""
        return job.shape.system.slurm.clusters or ("",)

    def submit(self, job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
        """Runs that command; returns the id, else why the job may be queued all the same, else why it was refused.

        `keep_open`: descriptors that hold the series' lock until it ends, kill or not.
        """
        try:
            done = call(command, {**job_environment(job.plans), SUBMITTED: "1"}, keep_open=keep_open)
        except subprocess.TimeoutExpired as late:
            return Answer(doubt=f"sbatch gave no answer within {late.timeout:g} s")
        except OSError as error:
            return Answer(refusal=f"it cannot be started: {error.strerror or error}")
        # Sites' own programs of this name print more than the id, perhaps other numbers: which is it, the queue knows.
        lines = map(str.strip, done.stdout.splitlines())
        answers = {line for line in lines if re.fullmatch(r"\d+(;\S+)?", line)}
        if done.returncode == 0:
            if len(answers) == 1:
                return Answer(job_id=answers.pop())
            return Answer(doubt=f"sbatch gave an unexpected answer ({done.stdout.strip()!r:.200})")
        why = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        final = why.lower().rpartition("batch job submission failed:")[2]
        if not answers and "timed out" not in final and any(words in final for words in _REFUSALS):
            return Answer(refusal=why, is_full="job submit limit" in final or "maxsubmitjob" in why.lower())
        return Answer(doubt=f"sbatch failed: {why:.300}")

    def query(self, job_ids: Sequence[str] = (), users: Sequence[str] = (), clusters: Sequence[str] = ()) -> Queue:
        """This user's jobs: one squeue, and at most one sacct; where jobs are on other clusters, as many for those.

        `job_ids`: jobs that are asked for where the queue has forgotten them, too. `users`: whose jobs besides this
        user's. `clusters`: asked besides those of the ids; where there is neither, the one here.
        """
        return ask(job_ids, users, clusters)

    def script(self, job_id: str) -> str:
        """What scontrol writes of it; of an element of an array the script is the array's."""
        bare, _, cluster = job_id.partition(";")
        bare = bare.partition("_")[0]
        done = asked(["scontrol", *on_cluster(cluster), "write", "batch_script", bare, "-"])
        return "" if isinstance(done, str) or done.returncode else done.stdout

    def cancel(self, job_ids: Sequence[str]) -> str:
        """One scancel for some thousand ids of a cluster; returns what it said against it, empty if nothing."""
        by_cluster: dict[str, list[str]] = {}
        for job in job_ids:
            by_cluster.setdefault(cluster_of(job), []).append(job.partition(";")[0])
        said = []
        for cluster, ids in by_cluster.items():
            for start in range(0, len(ids), _AT_ONCE):
                done = asked(["scancel", *on_cluster(cluster), *ids[start : start + _AT_ONCE]])
                if isinstance(done, str):
                    said.append(done)
                elif done.returncode != 0:
                    said.append(" ".join(done.stderr.split())[:300] or f"scancel ended with {done.returncode}")
        return "; ".join(filter(None, said))
