"""One job goes to the scheduler, exactly once: whatever sbatch answers, and wherever this process is killed.

The order is what makes it so: plans, script, sbatch, `submission.json`. A folder with a script and nothing else may be
queued; then the scheduler is asked for the job's comment. Nothing is deleted as long as that is not known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dlbench.errors import RunError, UserError
from dlbench.jobs.campaign.beginning import OTHER_NAME
from dlbench.jobs.scheduler import DoubtError, QueueFullError, RefusedError, Scheduler
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.submission import keep_submission
from dlbench.opening import read_bytes
from dlbench.records.files import TEMPORARY_SUFFIX, write_atomic
from dlbench.records.folder import MAX_JSON, RunFolder, create
from dlbench.specs.plan import LaunchPlan

_LOOKS_S = (0.0, 2.0, 5.0)
"""Pauses before the scheduler is asked for a job of which nobody said whether it was taken, seconds: a controller that
is too busy to answer may still be taking the job in."""

_MAYBE_QUEUED = "the job may be queued all the same, and its folder was kept"


def submit(
    scheduler: Scheduler,
    job: Job,
    folders: Sequence[RunFolder],
    python: str,
    after: str | None = None,
    comment: str = "",
    keep_open: Sequence[int] = (),
) -> str:
    """Writes a job's script into the folder of each of its runs and submits it; returns its id.

    An sbatch that ends badly may have queued the job all the same ("Socket timed out on send/recv operation"), so that
    Slurm is asked, and the job adopted if it is there.

    Args:
        scheduler: takes it.
        job: the runs.
        folders: their folders, absolute; Slurm's output goes into the first.
        python: as of `Scheduler.render`.
        after: as of `Scheduler.command`.
        comment: no other job has it.
        keep_open: as of `Scheduler.submit`.

    Raises:
        RefusedError: the scheduler refused (the message is its own) or cannot be started; the folders are gone again.
        DoubtError: it said neither yes nor no, and knows no such job (the folders stay, because it may be queued).
    """
    name, *others = job.run_ids
    if others:
        name = f"{name} and {len(others)} more run{'s' * (len(others) > 1)}"
    script = scheduler.render(job, folders, python)
    for folder in folders:
        write_atomic(folder.script, script)
    command = scheduler.command(job, folders[0], after, comment)
    answer = scheduler.submit(job, command, keep_open)
    if answer.refusal:
        for folder in folders:
            _take_back(folder)
        kind = QueueFullError if answer.is_full else RefusedError
        raise kind(f"{command[0]} refused {name}: {answer.refusal}")
    job_id = answer.job_id or _find(scheduler, job, folders[0], comment)
    if not job_id:
        raise DoubtError(f"{name}: {answer.doubt}; {_MAYBE_QUEUED}")
    keep_submission(job, folders, job_id, command, scheduler.variables(job))
    return job_id


def _find(scheduler: Scheduler, job: Job, folder: RunFolder, comment: str) -> str:
    """The id of the job that was submitted from a folder, if the scheduler knows it; empty if not."""
    for wait_s in _LOOKS_S:
        time.sleep(wait_s)
        queue = scheduler.query(clusters=scheduler.clusters(job))
        if queue.unanswered:
            return ""
        if found := queue.find(folder, comment):
            return found
    return ""


def _take_back(folder: RunFolder) -> None:
    """Removes what was written for a job that was not taken; anything else in the folder stays, and the folder."""
    folder.script.unlink(missing_ok=True)
    if all(path == folder.plan for path in folder.path.iterdir()):
        folder.plan.unlink(missing_ok=True)
        folder.path.rmdir()


def folders_of(root: Path, job: Job) -> list[RunFolder]:
    """The folders of all runs of a job, with their plans; those that are missing are made, all or none.

    Raises:
        UserError: a folder of that name holds something else.
        RunError: a plan cannot be written.
    """
    made: list[RunFolder] = []
    try:
        return [_folder(root, plan, made) for plan in job.plans]
    except (UserError, RunError):
        for folder in made:
            _take_back(folder)
        raise


def _folder(root: Path, plan: LaunchPlan, made: list[RunFolder]) -> RunFolder:
    """One of them, added to `made` if it was not there."""
    folder = RunFolder(root / plan.run_id)
    if not folder.path.exists():
        made.append(create(root, plan))
        return folder
    if not folder.plan.exists():
        _finish(folder, plan)
    if read_bytes(folder.plan, MAX_JSON) != plan.to_json().encode():
        raise UserError(f"{folder.path}: exists already, and is not of this series; {OTHER_NAME}")
    return folder


def _finish(folder: RunFolder, plan: LaunchPlan) -> None:
    """Writes the plan of a folder whose making was cut off before that."""
    there = list(folder.path.iterdir())
    if any(not path.name.endswith(TEMPORARY_SUFFIX) for path in there):
        raise UserError(f"{folder.path}: exists already, and is not of this series; {OTHER_NAME}")
    for path in there:
        with suppress(OSError):
            path.unlink()
    write_atomic(folder.plan, plan.to_json())
