"""Ends a series: its jobs are cancelled, and what was never submitted is taken out. Never a stranger's job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import RunError, UserError
from dlbench.jobs.campaign.beginning import forget
from dlbench.jobs.campaign.file import SeriesJob, append, held, jobs_of_series, require_own, series_path, write_series
from dlbench.jobs.campaign.standing import standing
from dlbench.jobs.scheduler import Queue, Scheduler, UnansweredError
from dlbench.jobs.submission import Submission, keep_submission
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

    Raises:
        UserError: there is no such series of this user, or another process submits it.
        UnansweredError: the scheduler does not say whose the jobs are; nothing was cancelled.
        RunError: it did not cancel them.
    """
    require_own(root, series_id)
    with held(root, series_id):
        now = standing(root, series_id)
        jobs: list[tuple[str, SeriesJob]] = []
        kept: list[SeriesJob] = []
        unsure = 0
        unknown = [number for number, state in enumerate(now.states) if state == "unsure"]
        all_jobs = jobs_of_series(root, now.series) if unknown else []
        clusters = {*now.clusters, *(place for number in unknown for place in scheduler.clusters(all_jobs[number]))}
        queue = _queue(scheduler, clusters) if now.known else Queue()
        for number, (entry, state, job_id) in enumerate(zip(now.series.jobs, now.states, now.ids, strict=True)):
            if state == "missing":
                continue
            kept.append(entry)
            found = job_id
            if state == "unsure":
                found = queue.find(RunFolder(root / entry.runs[0]), entry.comment)
                unsure += not found
                if found:
                    job = all_jobs[number]
                    folders = [RunFolder(root / run_id) for run_id in entry.runs]
                    command = scheduler.command(job, folders[0], None, entry.comment)
                    keep_submission(job, folders, found, command, scheduler.variables(job))
                    append(series_path(root, series_id, "jobs"), f"{entry.runs[0]} {found}\n")
            if found:
                jobs.append((found, entry))
        # First what no longer shall come, so that nothing follows what is cancelled.
        taken_out = len(now.series.jobs) - len(kept)
        if taken_out and kept:
            write_series(root, now.series.model_copy(update={"jobs": tuple(kept)}))
        mine, over, strangers = [], 0, []
        for job_id, entry in jobs:
            active, is_mine = _told(queue, job_id, entry.comment, root / entry.runs[0])
            over += not active
            mine += [job_id] if active and is_mine else []
            strangers += [job_id] if active and not is_mine else []
        _cancel(scheduler, mine)
        if not kept:
            forget(root, series_id)
    return Cancelled(jobs=tuple(mine), over=over, taken_out=taken_out, unsure=unsure, strangers=tuple(strangers))


def cancel_run(folder: RunFolder, submission: Submission, scheduler: Scheduler) -> Cancelled:
    """Cancels the job of one run.

    Raises:
        UserError: it shares its job with other runs, or is another user's.
        UnansweredError: the scheduler does not say whose the job is.
        RunError: it did not cancel it.
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
    comment = next((word[len("--comment=") :] for word in submission.command if word.startswith("--comment=")), "")
    place = next((word[len("--chdir=") :] for word in submission.command if word.startswith("--chdir=")), "")
    active, is_mine = _told(queue, submission.reference, comment, Path(place) if place else folder.path)
    if active and not is_mine:
        return Cancelled(strangers=(submission.job_id,))
    mine = [submission.reference] if active else []
    _cancel(scheduler, mine)
    return Cancelled(jobs=tuple(mine), over=1 - len(mine))


def _queue(scheduler: Scheduler, clusters: Collection[str]) -> Queue:
    queue = scheduler.query(clusters=sorted(clusters))
    if queue.unanswered:
        raise UnansweredError(f"{queue.unanswered}: nothing was cancelled; try again")
    return queue


def _told(queue: Queue, job_id: str, comment: str, folder: Path) -> tuple[bool, bool]:
    """Whether this user has an active job of this id, and whether it is the one that was submitted from the folder."""
    active = [job for job in queue.of(job_id) if job.phase != "over"]
    is_mine = any((comment and job.comment == comment) or job.folder == str(folder) for job in active)
    return bool(active), is_mine


def _cancel(scheduler: Scheduler, job_ids: Sequence[str]) -> None:
    said = scheduler.cancel(job_ids) if job_ids else ""
    if said:
        raise RunError(f"{said}; see `dlbench status`, and try again")
