"""Ends a series, or takes runs of ended jobs into new ones. Never a stranger's job.

A series is ended: its jobs are cancelled, and what was never submitted is taken out. Whose job it is, the scheduler
says: each was submitted with the folder of its first run as its working directory, and of an array the script that the
scheduler holds says which element is which run. Files in a folder of runs may be anybody's; that one of them names a
job proves nothing.

Runs whose job ended before it came to them, at its time limit say, become jobs of their series again. Those of a job
that was cancelled do not, unless they are asked for: whoever ran scancel did not want them. Of these, a run that had
begun is a further attempt then; what the one before left lies in `attempt-NNNN/`, as after a requeue.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dlbench.errors import RunError, UserError, refused
from dlbench.jobs.campaign.campaign import Campaign, campaign_of
from dlbench.jobs.campaign.completing import entry_of, forget, keep_found, take_back
from dlbench.jobs.campaign.series_file import (
    SeriesJob,
    SubmissionStatus,
    append,
    held,
    jobs_of_series,
    never_began,
    require_own,
    series_path,
    submission_status,
    write_series,
)
from dlbench.jobs.scheduler import Queue, Submission, UnansweredError, array_of, read_submission
from dlbench.records.folder import RunFolder
from dlbench.records.interrupted import attempt_of
from dlbench.records.job_log import was_cancelled
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

_LOG = re.compile(r"slurm-[0-9_]+\.out")
_STAYS = re.compile(r"(earlier-)?slurm-[0-9_]+\.out|attempt-\d{4}|checkpoints")


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What became of a series or a run that was cancelled."""

    jobs: tuple[str, ...] = ()  # Ids of the jobs that were cancelled.
    over: int = 0  # Jobs that had ended before.
    taken_out: int = 0  # Jobs that were never submitted.
    unsure: int = 0  # Jobs of which nobody knows whether they are queued; they stay in the series.
    strangers: tuple[str, ...] = ()  # Ids that are another job's by now; they were left alone.

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


def cancel_series(root: Path, series_id: str, scheduler: Slurm) -> Cancelled:
    """Cancels what waits or runs of a series, and takes out of it what was never submitted.

    Raises `UserError`: there is no such series of this user, or another process submits it. `UnansweredError`: the
    scheduler does not say whose the jobs are; nothing was cancelled. `RunError`: it did not cancel them.
    """
    require_own(root, series_id)
    with held(root, series_id):
        now = submission_status(root, series_id)
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
            comments = {entry.comment, *(job.comment for job in queue.of(job_id))}
            own = _submitted_from(queue, root / entry.runs[0], comments)
            if not own and state == "written":
                unsubmitted += [RunFolder(root / run_id) for run_id in entry.runs]
                continue
            kept.append(entry)
            if own and number in unknown:
                keep_found(root, scheduler, all_jobs[number], entry, own[0])
            mine += own
            if not own and queue.active(job_id):
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


def cancel_run(folder: RunFolder, submission: Submission, scheduler: Slurm) -> Cancelled:
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
    active = queue.active(submission.reference)
    if array_of(submission.reference):
        mine = [submission.reference] if active and _is_element(scheduler, submission.reference, folder.path) else []
    else:
        mine = _submitted_from(queue, folder.path)
    if active and not mine:
        return Cancelled(strangers=(submission.job_id,))
    _cancel(scheduler, mine, folder.path.parent)
    return Cancelled(jobs=tuple(mine), over=int(not mine))


def _queue(scheduler: Slurm, clusters: Collection[str]) -> Queue:
    queue = scheduler.query(clusters=sorted(clusters))
    if queue.unanswered:
        raise UnansweredError(f"{queue.unanswered}: nothing was cancelled; try again")
    return queue


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


def _is_element(scheduler: Slurm, job_id: str, folder: Path) -> bool:
    """Whether an element of an array is the run of a folder, by the script that the scheduler holds of it."""
    # Of slurm/job.sbatch.j2: run CONFIGURATION FOLDER, a line each in the order of the array, from 1.
    runs = [line for line in scheduler.script(job_id).splitlines() if line.startswith("run ")]
    try:
        place = int(job_id.partition(";")[0].rpartition("_")[2])
        return place > 0 and _is_same(shlex.split(runs[place - 1])[-1], folder)
    except (ValueError, IndexError):  # no script of dlbench's
        return False


def _is_same(known: str, folder: Path) -> bool:
    return known == str(folder) or os.path.realpath(known) == os.path.realpath(folder)


def _cancel(scheduler: Slurm, job_ids: Sequence[str], root: Path) -> None:
    said = scheduler.cancel(job_ids) if job_ids else ""
    if said:
        raise RunError(f"{said}; see `{shlex.join(['dlbench', 'status', str(root)])}`, and try again")


@dataclass(frozen=True, kw_only=True)
class Reopened:
    """Runs without a record, whose jobs have ended."""

    campaign: Campaign | None = None  # Of those that are in new jobs now; None if there are none.
    cancelled: tuple[str, ...] = ()  # Those that were left alone, because their jobs were cancelled.
    cancelled_jobs: tuple[str, ...] = ()  # Ids of these.
    begun: tuple[str, ...] = ()  # Of those that are in new jobs now: what had begun.

    @property
    def runs(self) -> int:
        """How many are in new jobs now."""
        return 0 if self.campaign is None else len(self.campaign.plans)


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    run_id: str
    job_id: str  # Of an element of an array its own.
    log: Path | None  # Of its job, if that wrote anything, and so began.
    has_begun: bool  # Something lies in its folder besides what a submission wrote, and Slurm's log.


def reopen(
    root: Path, series_id: str, scheduler: Slurm, *, with_cancelled: bool = False, dry_run: bool = False
) -> Reopened:
    """Takes runs that never began, of jobs that have ended, into new jobs of their series.

    Nothing happens while the scheduler does not answer. Runs that began are left to themselves, but for those of
    cancelled jobs where these are asked for; and so are all of a job that it says was completed.

    `with_cancelled`: whether runs of jobs that were cancelled are taken, too, those that had begun included. Raises
    `UserError`: there is no such series of this user, or another process submits it. `RunError`: a file cannot be
    written. `IncompleteDataError`: a file of the series is damaged.
    """
    require_own(root, series_id)
    with held(root, series_id):
        now = submission_status(root, series_id)
        unfinished = [one for number in range(now.total) if now.ids[number] for one in _unfinished(root, now, number)]
        if not unfinished:
            return Reopened()
        queue = scheduler.query(list(dict.fromkeys(one.job_id for one in unfinished)))
        if queue.unanswered:
            return Reopened()
        ended = [(one, _end(queue, one)) for one in unfinished]
        cancelled = [one for one, end in ended if end == "cancelled"]
        left = {one.run_id: one for one, end in ended if end == "cut off" and not one.has_begun}
        if with_cancelled:
            left |= {one.run_id: one for one in cancelled}
            cancelled = []
        return Reopened(
            campaign=_renew(root, now, left, dry_run=dry_run) if left else None,
            cancelled=tuple(one.run_id for one in cancelled),
            cancelled_jobs=tuple(dict.fromkeys(one.job_id.partition(";")[0] for one in cancelled)),
            begun=tuple(one.run_id for one in left.values() if one.has_begun),
        )


def _unfinished(root: Path, now: SubmissionStatus, number: int) -> list[_Waiting]:
    found = []
    for run_id in now.series.jobs[number].runs:
        folder = RunFolder(root / run_id)
        if folder.record.exists() or folder.comm.exists() or not folder.plan.exists():
            continue
        submission = read_submission(folder)
        job_id: str = now.ids[number]
        log: Path | None = None
        if submission is not None:
            job_id = submission.reference
            if (root / submission.log).exists():
                log = root / submission.log
        found.append(_Waiting(run_id=run_id, job_id=job_id, log=log, has_begun=not never_began(folder)))
    return found


def _end(queue: Queue, one: _Waiting) -> Literal["cut off", "cancelled", ""]:
    """How the job of a run ended without it; empty where it goes on, or nobody knows.

    Of a job that the scheduler has forgotten its log says: it must have begun.
    """
    jobs = queue.of(one.job_id)
    if not jobs:
        if one.log is None:
            return ""
        return "cancelled" if was_cancelled(one.log) else "cut off"
    if any(job.phase != "over" for job in jobs) or all(job.state == "COMPLETED" for job in jobs):
        return ""
    return "cancelled" if any(job.state == "CANCELLED" for job in jobs) else "cut off"


def _renew(root: Path, now: SubmissionStatus, runs: Collection[str], *, dry_run: bool) -> Campaign:
    """Whatever is cut off here is found again by the next call: folders are cleared first, the series is last."""
    series = now.series
    plans = [plan for job in jobs_of_series(root, series) for plan in job.plans if plan.run_id in runs]
    campaign = campaign_of(sorted(plans, key=_position), root, packing=series.pack, chain=series.chain)
    made = campaign.jobs
    if dry_run:
        return campaign
    for run_id in sorted(runs):
        _clear(RunFolder(root / run_id))
    rest = [job.model_copy(update={"runs": tuple(one for one in job.runs if one not in runs)}) for job in series.jobs]
    # A job goes by its first run: the ids of old ones are no longer theirs, but those of the runs that stay.
    lines = [f"{job.runs[0]} {job_id}\n" for job, job_id in zip(rest, now.ids, strict=True) if job.runs and job_id]
    lines += [f"{job.run_ids[0]} \n" for job in made]
    append(series_path(root, series.id, "jobs"), "".join(lines))
    kept = [job for job in rest if job.runs]
    write_series(root, series.model_copy(update={"jobs": (*kept, *map(entry_of, made))}))
    return campaign


def _position(plan: LaunchPlan) -> int:
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series.position


def _clear(folder: RunFolder) -> None:
    """Takes away what would say that the run is submitted; what its job said stays, under another name.

    What a run left that had begun goes aside, as slurm/earlier.j2 does it when Slurm starts a job again.
    """
    try:
        if not never_began(folder):
            aside = folder.path / f"attempt-{attempt_of(folder):04d}"
            aside.mkdir()
            # Last what says which job it was.
            for path in sorted(folder.path.iterdir(), key=lambda path: path == folder.submission):
                if path not in (folder.plan, aside) and not _STAYS.fullmatch(path.name):
                    path.rename(aside / path.name)
        # What accounting says is of the job that ended, and would be taken for the new one's.
        for path in (folder.submission, folder.script, folder.accounting):
            path.unlink(missing_ok=True)
        for path in list(folder.path.iterdir()):
            if _LOG.fullmatch(path.name):
                path.rename(path.with_name(f"earlier-{path.name}"))
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be written: {error.strerror or error}") from None
