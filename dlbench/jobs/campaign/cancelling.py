"""Ends a series: its jobs are cancelled, and what was never submitted is taken out. Never a stranger's job.

Whose job it is, the scheduler says: each was submitted with the folder of its first run as its working directory, and
of an array the script that the scheduler holds says which element is which run. Files in a folder of runs may be
anybody's; that one of them names a job proves nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import RunError, UserError
from dlbench.jobs.campaign.completing import forget, keep_found, take_back
from dlbench.jobs.campaign.file import SeriesJob, held, jobs_of_series, require_own, standing, write_series
from dlbench.jobs.scheduler import Queue, QueuedJob, Scheduler, UnansweredError, array_of
from dlbench.jobs.submission import Submission
from dlbench.records.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What became of a series or a run that was cancelled."""

    jobs: tuple[str, ...] = ()
    """Ids of the jobs that were cancelled."""
    over: int = 0
    """Jobs that had ended before."""
    taken_out: int = 0
    """Jobs that were never submitted."""
    unsure: int = 0
    """Jobs of which nobody knows whether they are queued; they stay in the series."""
    strangers: tuple[str, ...] = ()
    """Ids that are another job's by now; they were left alone."""

    @property
    def text(self) -> str:
        """In words, e.g. ``3 jobs cancelled, 1 ended before, 4 never submitted and taken out of the series``."""
        parts = [f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)} cancelled"]
        parts += [f"{self.over} ended before"] * bool(self.over)
        parts += [f"{self.taken_out} never submitted and taken out of the series"] * bool(self.taken_out)
        parts += [f"{self.unsure} may be queued or not"] * bool(self.unsure)
        if self.strangers:
            parts.append(f"left alone, because it is no job of this series: {', '.join(self.strangers)}")
        return ", ".join(parts)


def cancel_series(root: Path, series_id: str, scheduler: Scheduler) -> Cancelled:
    """Cancels what waits or runs of a series, and takes out of it what was never submitted.

    Raises `UserError`: there is no such series of this user, or another process submits it. `UnansweredError`: the
    scheduler does not say whose the jobs are; nothing was cancelled. `RunError`: it did not cancel them.
    """
    require_own(root, series_id)
    with held(root, series_id):
        now = standing(root, series_id)
        kept: list[SeriesJob] = []
        mine: list[str] = []
        strangers: list[str] = []
        unsubmitted: list[RunFolder] = []
        unsure = over = 0
        unknown = [number for number, state in enumerate(now.states) if state in ("unsure", "written")]
        all_jobs = jobs_of_series(root, now.series) if unknown else []
        clusters = {*now.clusters, *(place for number in unknown for place in scheduler.clusters(all_jobs[number]))}
        queue = _queue(scheduler, clusters) if now.known else Queue()
        for number, (entry, state, job_id) in enumerate(zip(now.series.jobs, now.states, now.ids, strict=True)):
            if state == "missing":
                continue
            own = _submitted_from(
                queue, root / entry.runs[0], {entry.comment, *(job.comment for job in queue.of(job_id))}
            )
            if not own and state == "written":
                unsubmitted += [RunFolder(root / run_id) for run_id in entry.runs]
                continue
            kept.append(entry)
            if own and number in unknown:
                keep_found(root, scheduler, all_jobs[number], entry, own[0])
            mine += own
            if not own and _active(queue, job_id):
                strangers.append(job_id)
            elif not own:
                unsure += state == "unsure"
                over += bool(job_id)
        # First what no longer shall come, so that nothing follows what is cancelled.
        taken_out = len(now.series.jobs) - len(kept)
        if taken_out and kept:
            write_series(root, now.series.model_copy(update={"jobs": tuple(kept)}))
        for folder in unsubmitted:
            if folder.path.is_dir():
                take_back(folder)
        _cancel(scheduler, mine, root)
        if not kept:
            forget(root, series_id)
    return Cancelled(jobs=tuple(mine), over=over, taken_out=taken_out, unsure=unsure, strangers=tuple(strangers))


def cancel_run(folder: RunFolder, submission: Submission, scheduler: Scheduler) -> Cancelled:
    """Cancels the job of one run.

    Raises `UserError`: it shares its job with other runs, or is another user's. `UnansweredError`: the scheduler does
    not say whose the job is. `RunError`: it did not cancel it.
    """
    run_id = folder.path.name
    if submission.other_owner:
        raise UserError(f"{run_id}: its job is of user {submission.other_owner}, who alone can cancel it")
    if submission.runs:
        raise UserError(
            f"{run_id}: shares job {submission.job_id} with {len(submission.runs) - 1} other runs; cancel the series, "
            f"or all of them: scancel {submission.job_id}"
        )
    queue = _queue(scheduler, [submission.cluster])
    active = _active(queue, submission.reference)
    if array_of(submission.reference):
        mine = [submission.reference] if active and _is_element(scheduler, submission.reference, folder.path) else []
    else:
        mine = _submitted_from(queue, folder.path)
    if active and not mine:
        return Cancelled(strangers=(submission.job_id,))
    _cancel(scheduler, mine, folder.path.parent)
    return Cancelled(jobs=tuple(mine), over=int(not mine))


def _queue(scheduler: Scheduler, clusters: Collection[str]) -> Queue:
    queue = scheduler.query(clusters=sorted(clusters))
    if queue.unanswered:
        raise UnansweredError(f"{queue.unanswered}: nothing was cancelled; try again")
    return queue


def _active(queue: Queue, job_id: str) -> list[QueuedJob]:
    return [job for job in queue.of(job_id) if job.phase != "over"]


def _submitted_from(queue: Queue, folder: Path, comments: Collection[str] = ()) -> list[str]:
    """Ids of this user's active jobs that, as the scheduler says, were submitted from a folder; an array's once.

    A person may submit others from there by hand: where comments are given, a job carries one of them.
    """
    found = [
        array_of(job.job_id) or job.job_id
        for job in queue.jobs.values()
        if job.phase != "over"
        and (not comments or job.comment in comments)
        and job.folder.rpartition("/")[2] == folder.name
        and _is_same(job.folder, folder)
    ]
    return list(dict.fromkeys(found))


def _is_element(scheduler: Scheduler, job_id: str, folder: Path) -> bool:
    """Whether an element of an array is the run of a folder, by the script that the scheduler holds of it."""
    # Of slurm/job.sbatch.j2: run CONFIGURATION FOLDER, a line each in the order of the array, from 1.
    runs = [line for line in scheduler.script(job_id).splitlines() if line.startswith("run ")]
    try:
        place = int(job_id.partition(";")[0].rpartition("_")[2])
        return place > 0 and _is_same(shlex.split(runs[place - 1])[-1], folder)
    except (ValueError, IndexError):  # no script of dlbench's
        return False


def _is_same(told: str, folder: Path) -> bool:
    return told == str(folder) or os.path.realpath(told) == os.path.realpath(folder)


def _cancel(scheduler: Scheduler, job_ids: Sequence[str], root: Path) -> None:
    said = scheduler.cancel(job_ids) if job_ids else ""
    if said:
        raise RunError(f"{said}; see `{shlex.join(['dlbench', 'status', str(root)])}`, and try again")
