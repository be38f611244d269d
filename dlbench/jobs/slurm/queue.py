"""This user's jobs, as squeue lists them, and the one that a folder was submitted as."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

from dlbench.jobs.slurm.call import call
from dlbench.records.folder import RunFolder

_LOOKS_S = (0.0, 2.0, 5.0)
"""Pauses before squeue is asked for a job of which sbatch did not say whether it was taken, seconds."""


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
        found = next(by_comment, "") or next(by_folder, "")
        return found.partition("_")[0]  # of an array squeue lists elements


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
