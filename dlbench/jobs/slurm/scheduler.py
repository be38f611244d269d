"""Slurm, as a campaign speaks to it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from dlbench.jobs.scheduler import Answer, Queue
from dlbench.jobs.scripts.batch import keeps_own_comment, render_job, sbatch_arguments
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.call import call
from dlbench.jobs.slurm.environment import exported_names
from dlbench.jobs.slurm.queue import ask
from dlbench.jobs.slurm.sbatch import require_slurm, sbatch
from dlbench.records.folder import RunFolder

_AT_ONCE = 5_000
"""Ids of one scancel: their text stays far below what Linux takes for arguments."""


class Slurm:
    """Implements `dlbench.jobs.scheduler.Scheduler`."""

    name = "Slurm"

    def require(self) -> None:
        """Raises EnvironmentLacksError: sbatch is not on PATH."""
        require_slurm()

    def render(self, job: Job, folders: Sequence[RunFolder], python: str) -> str:
        """The batch script."""
        return render_job(job, folders, python)

    def command(self, job: Job, folder: RunFolder, after: str | None, comment: str) -> list[str]:
        """The sbatch command; where the site has a comment of its own, the folder tells the job."""
        after = None if after is None else after.partition(";")[0]
        return sbatch_arguments(job, folder, after, "" if keeps_own_comment(job) else comment)

    def variables(self, job: Job) -> Sequence[str]:
        """As `slurm.export` says."""
        return exported_names(job.plans)

    def submit(self, job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
        """Runs sbatch."""
        return sbatch(job, command, keep_open)

    def query(self, job_ids: Sequence[str] = (), users: Sequence[str] = ()) -> Queue:
        """One squeue, and at most one sacct."""
        return ask(job_ids, users)

    def cancel(self, job_ids: Sequence[str]) -> str:
        """One scancel for some thousand ids."""
        said = []
        for start in range(0, len(job_ids), _AT_ONCE):
            chunk = [job.partition(";")[0] for job in job_ids[start : start + _AT_ONCE]]
            try:
                done = call(["scancel", *chunk])
            except subprocess.TimeoutExpired as late:
                said.append(f"scancel gave no answer within {late.timeout:g} s")
            except OSError as error:
                said.append(f"scancel cannot be started: {error.strerror or error}")
            else:
                if done.returncode != 0:
                    said.append(" ".join(done.stderr.split())[:300] or f"scancel ended with {done.returncode}")
        return "; ".join(said)
