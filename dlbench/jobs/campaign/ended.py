"""Cancels a series, or puts runs whose jobs have ended into new jobs; never touches a job of anyone else. Only the
scheduler can say which jobs are the series' own: each was submitted with the folder of its first run as working
directory, and the script of an array names the run of each element. A run whose job ended before the run began gets a
new job. Runs of a cancelled job do so only on request; if they had begun they become a new attempt, as after a
requeue.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dlbench.errors import RunError, UserError, refused
from dlbench.jobs.campaign.campaign import Campaign, campaign_of
from dlbench.jobs.campaign.completing import entry_of, forget, record_adopted, remove_unsubmitted
from dlbench.jobs.campaign.series_file import (
    SeriesJob,
    SubmissionStatus,
    append,
    jobs_of_series,
    locked,
    never_began,
    require_own,
    series_path,
    submission_status,
    write_series,
)
from dlbench.jobs.scheduler import Queue, SchedulerUnavailableError, Submission, array_of, read_submission
from dlbench.jobs.scripts.job import Job
from dlbench.records.folder import RunFolder
from dlbench.records.job_log import was_cancelled
from dlbench.records.status import attempt_of
from dlbench.units import counted

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

_LOG = re.compile(r"slurm-[0-9_]+\.out")
_STAYS = re.compile(r"(earlier-)?slurm-[0-9_]+\.out|attempt-\d{4}|checkpoints")


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """The result of cancelling a series or a run."""

    jobs: tuple[str, ...] = ()  # Ids of the cancelled jobs.
    num_ended: int = 0  # Jobs that had ended before.
    num_removed: int = 0  # Jobs that were never submitted, and are no longer part of the series.
    num_unsure: int = 0  # Jobs that may be queued or not; they stay in the series.
    foreign_jobs: tuple[str, ...] = ()  # Recorded ids that belong to another job by now; these were not cancelled.

    @property
    def text(self) -> str:
        """For example ``3 jobs cancelled, 1 ended before, 4 never submitted and removed from the series``."""
        parts = [f"{counted(len(self.jobs), 'job')} cancelled"]
        if self.num_ended:
            parts.append(f"{self.num_ended} ended before")
        if self.num_removed:
            parts.append(f"{self.num_removed} never submitted and removed from the series")
        if self.num_unsure:
            parts.append(f"{self.num_unsure} may or may not be queued")
        if self.foreign_jobs:
            parts.append(f"not cancelled, because it is no job of this series: {', '.join(self.foreign_jobs)}")
        return ", ".join(parts)


def cancel_series(root: Path, series_id: str, scheduler: Slurm) -> Cancelled:
    """Cancels the jobs of a series that wait or run, and removes those from it that were never submitted."""
    require_own(root, series_id)
    with locked(root, series_id):
        now = submission_status(root, series_id)
        unknown_jobs = _unknown_jobs(root, now)
        clusters = now.clusters.union(*map(scheduler.clusters, unknown_jobs.values()))
        queue = _queue(scheduler, clusters) if now.known else Queue()
        entries: list[SeriesJob] = []
        own_ids: list[str] = []
        foreign_ids: list[str] = []
        unsubmitted: list[RunFolder] = []
        num_unsure = num_ended = 0
        for number, (entry, state, job_id) in enumerate(zip(now.series.jobs, now.states, now.ids, strict=True)):
            if state == "missing":
                continue
            comments = {entry.comment, *(job.comment for job in queue.of(job_id))}
            queued_ids = _submitted_from(queue, root / entry.runs[0], comments)
            if not queued_ids and state == "written":
                unsubmitted += [RunFolder(root / run_id) for run_id in entry.runs if (root / run_id).is_dir()]
                continue
            entries.append(entry)
            if queued_ids:
                own_ids += queued_ids
                if number in unknown_jobs:
                    record_adopted(root, series_id, scheduler, unknown_jobs[number], entry, queued_ids[0])
            elif queue.active(job_id):
                foreign_ids.append(job_id)
            elif state == "unsure":
                num_unsure += 1
            elif job_id:
                num_ended += 1
        # Unsubmitted jobs go first, so that nobody submits them after the others were cancelled.
        num_removed = len(now.series.jobs) - len(entries)
        if num_removed and entries:
            write_series(root, now.series.model_copy(update={"jobs": tuple(entries)}))
        for folder in unsubmitted:
            remove_unsubmitted(folder)
        _cancel(scheduler, own_ids, root)
        if not entries:
            forget(root, series_id)
    return Cancelled(
        jobs=tuple(own_ids),
        num_ended=num_ended,
        num_removed=num_removed,
        num_unsure=num_unsure,
        foreign_jobs=tuple(foreign_ids),
    )


def _unknown_jobs(root: Path, now: SubmissionStatus) -> dict[int, Job]:
    numbers = [number for number, state in enumerate(now.states) if state in ("unsure", "written")]
    if not numbers:
        return {}
    jobs = jobs_of_series(root, now.series)
    return {number: jobs[number] for number in numbers}


def cancel_run(folder: RunFolder, submission: Submission, scheduler: Slurm) -> Cancelled:
    """Cancels the job of one run."""
    run_id = folder.path.name
    if submission.other_owner:
        raise UserError(f"{run_id}: its job belongs to user {submission.other_owner}, who alone can cancel it")
    if submission.runs:
        raise UserError(
            f"{run_id}: shares job {submission.job_id} with {len(submission.runs) - 1} other runs; cancel the series, "
            f"or all of them: scancel {submission.job_id}"
        )
    queue = _queue(scheduler, [submission.cluster])
    active = queue.active(submission.reference)
    if array_of(submission.reference):
        own_ids = []
        if active and _is_element(scheduler, submission.reference, folder.path):
            own_ids = [submission.reference]
    else:
        own_ids = _submitted_from(queue, folder.path)
    if own_ids:
        _cancel(scheduler, own_ids, folder.path.parent)
        return Cancelled(jobs=tuple(own_ids))
    if active:
        return Cancelled(foreign_jobs=(submission.job_id,))
    return Cancelled(num_ended=1)


def _queue(scheduler: Slurm, clusters: Collection[str]) -> Queue:
    queue = scheduler.query(clusters=sorted(clusters))
    if queue.unanswered:
        raise SchedulerUnavailableError(f"{queue.unanswered}: nothing was cancelled; try again")
    return queue


def _submitted_from(queue: Queue, folder: Path, comments: Collection[str] = ()) -> list[str]:
    """Returns the ids of active jobs submitted from a folder, with one of the comments if any are given."""
    job_ids = []
    for job in queue.jobs.values():
        if job.phase == "over" or (comments and job.comment not in comments):
            continue
        if job.folder.rpartition("/")[2] == folder.name and _is_same(job.folder, folder):
            job_ids.append(array_of(job.job_id) or job.job_id)
    return list(dict.fromkeys(job_ids))


def _is_element(scheduler: Slurm, job_id: str, folder: Path) -> bool:
    """Returns whether an array element is the run of a folder, by the job script that the scheduler holds."""
    # slurm/job.sbatch.j2 has lines `run CONFIGURATION FOLDER` in the order of the array, from 1.
    run_lines = [line for line in scheduler.script(job_id).splitlines() if line.startswith("run ")]
    try:
        index = int(job_id.partition(";")[0].rpartition("_")[2])
        return index > 0 and _is_same(shlex.split(run_lines[index - 1])[-1], folder)
    except (ValueError, IndexError):  # not a script of dlbench
        return False


def _is_same(path: str, folder: Path) -> bool:
    return path == str(folder) or os.path.realpath(path) == os.path.realpath(folder)


def _cancel(scheduler: Slurm, job_ids: Sequence[str], root: Path) -> None:
    if not job_ids:
        return
    if problem := scheduler.cancel(job_ids):
        raise RunError(f"{problem}; see `{shlex.join(['dlbench', 'status', str(root)])}`, and try again")


@dataclass(frozen=True, kw_only=True)
class Reopened:
    """The runs without a record whose jobs have ended."""

    campaign: Campaign | None = None  # The new jobs; None if there are none.
    cancelled: tuple[str, ...] = ()  # Run ids that got no new job, because their jobs were cancelled.
    cancelled_jobs: tuple[str, ...] = ()  # Ids of these jobs.
    begun: tuple[str, ...] = ()  # Run ids in new jobs that had begun before.

    @property
    def runs(self) -> int:
        """Number of runs in new jobs."""
        return 0 if self.campaign is None else len(self.campaign.plans)


@dataclass(frozen=True, kw_only=True)
class _UnfinishedRun:
    run_id: str
    job_id: str  # For an element of an array the id of the element.
    log: Path | None  # Log of its job; None if the job has not written one, and so has not started.
    has_begun: bool  # Its folder holds files of a rank, not only those of the submission and Slurm's log.


def reopen(
    root: Path, series_id: str, scheduler: Slurm, *, with_cancelled: bool = False, dry_run: bool = False
) -> Reopened:
    """Puts runs that never began, and whose jobs have ended but not in state COMPLETED, into new jobs of their series.
    Does nothing if the scheduler does not answer. `with_cancelled`: also take runs whose jobs were cancelled, even if
    they had begun. Raises `UserError`: this user has no such series, or another process submits it. `RunError`: a file
    cannot be written. `IncompleteDataError`: a file of the series is damaged.
    """
    require_own(root, series_id)
    with locked(root, series_id):
        now = submission_status(root, series_id)
        unfinished: list[_UnfinishedRun] = []
        for job, job_id in zip(now.series.jobs, now.ids, strict=True):
            if job_id:
                unfinished += _unfinished(root, job, job_id)
        if not unfinished:
            return Reopened()
        queue = scheduler.query(list(dict.fromkeys(run.job_id for run in unfinished)))
        if queue.unanswered:
            return Reopened()
        cancelled = []
        renewed: dict[str, _UnfinishedRun] = {}
        for run in unfinished:
            end = _end(queue, run)
            if end == "cancelled":
                cancelled.append(run)
            elif end == "cut off" and not run.has_begun:
                renewed[run.run_id] = run
        if with_cancelled:
            renewed |= {run.run_id: run for run in cancelled}
            cancelled = []
        campaign = _renew(root, now, renewed, dry_run=dry_run) if renewed else None
        return Reopened(
            campaign=campaign,
            cancelled=tuple(run.run_id for run in cancelled),
            cancelled_jobs=tuple(dict.fromkeys(run.job_id.partition(";")[0] for run in cancelled)),
            begun=tuple(run.run_id for run in renewed.values() if run.has_begun),
        )


def _unfinished(root: Path, job: SeriesJob, series_job_id: str) -> Iterator[_UnfinishedRun]:
    for run_id in job.runs:
        folder = RunFolder(root / run_id)
        if folder.record.exists() or folder.comm.exists() or not folder.plan.exists():
            continue
        submission = read_submission(folder)
        job_id = series_job_id
        log: Path | None = None
        if submission is not None:
            job_id = submission.reference
            if (root / submission.log).exists():
                log = root / submission.log
        yield _UnfinishedRun(run_id=run_id, job_id=job_id, log=log, has_begun=not never_began(folder))


def _end(queue: Queue, run: _UnfinishedRun) -> Literal["cut off", "cancelled", ""]:
    """Returns how the job of an unfinished run ended; empty if it has not ended, was completed, or is unknown."""
    jobs = queue.of(run.job_id)
    if not jobs:
        if run.log is None:
            return ""
        return "cancelled" if was_cancelled(run.log) else "cut off"
    if any(job.phase != "over" for job in jobs) or all(job.state == "COMPLETED" for job in jobs):
        return ""
    return "cancelled" if any(job.state == "CANCELLED" for job in jobs) else "cut off"


def _renew(root: Path, now: SubmissionStatus, runs: Collection[str], *, dry_run: bool) -> Campaign:
    """Moves runs into new jobs of their series."""
    # The folders are cleared first and the series file is written last, so that another call continues after a kill.
    series = now.series
    plans = [plan for job in jobs_of_series(root, series) for plan in job.plans if plan.run_id in runs]
    campaign = campaign_of(
        sorted(plans, key=attrgetter("series.position")), root, packing=series.pack, chain=series.chain
    )
    if dry_run:
        return campaign
    for run_id in sorted(runs):
        _clear(RunFolder(root / run_id))
    # `ID.jobs` names a job by its first run: the id moves to the first run that stays in the job.
    remaining_jobs = []
    lines = []
    for job, job_id in zip(series.jobs, now.ids, strict=True):
        run_ids = tuple(run_id for run_id in job.runs if run_id not in runs)
        if run_ids:
            remaining_jobs.append(job.model_copy(update={"runs": run_ids}))
        if run_ids and job_id:
            lines.append(f"{run_ids[0]} {job_id}\n")
    lines += [f"{job.run_ids[0]} \n" for job in campaign.jobs]
    append(series_path(root, series.id, "jobs"), "".join(lines))
    write_series(root, series.model_copy(update={"jobs": (*remaining_jobs, *map(entry_of, campaign.jobs))}))
    return campaign


def _clear(folder: RunFolder) -> None:
    """Removes the files of the submission from a run's folder; those of ranks move to `attempt-NNNN/`."""
    try:
        if not never_began(folder):
            attempt_folder = folder.path / f"attempt-{attempt_of(folder):04d}"
            attempt_folder.mkdir()
            # `submission.json` comes last: until then the run still belongs to its old job.
            for path in sorted(folder.path.iterdir(), key=lambda path: path == folder.submission):
                if path not in (folder.plan, attempt_folder) and not _STAYS.fullmatch(path.name):
                    path.rename(attempt_folder / path.name)
        # The accounting of the old job would be read as that of the new one.
        for path in (folder.submission, folder.script, folder.accounting):
            path.unlink(missing_ok=True)
        for path in list(folder.path.iterdir()):
            if _LOG.fullmatch(path.name):
                path.rename(path.with_name(f"earlier-{path.name}"))
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be written: {error.strerror or error}") from None
