"""Submits what is left of a series: again and again, it does so once for each job.

One job goes to the scheduler, exactly once: whatever sbatch answers, and wherever this process is killed.

The order is what makes it so: plans, script, sbatch, `submission.json`. A folder with a script and nothing else may be
queued; then the scheduler is asked for the job's comment. Nothing is deleted as long as that is not known.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import RunError, UserError, refused
from dlbench.jobs.campaign.campaign import Packing
from dlbench.jobs.campaign.series_file import (
    FOLDER,
    WRITTEN,
    SeriesFile,
    SeriesJob,
    SubmissionStatus,
    append,
    held,
    jobs_of_series,
    owner_of_other,
    read_series,
    require_own,
    series_path,
    submission_status,
    write_series,
)
from dlbench.jobs.scheduler import (
    DoubtError,
    Queue,
    QueueFullError,
    RefusedError,
    UnansweredError,
    keep_submission,
)
from dlbench.jobs.scripts.job import Job
from dlbench.opening import read_bytes
from dlbench.records.files import TEMPORARY_SUFFIX, write_atomic
from dlbench.records.folder import MAX_JSON, RunFolder, create
from dlbench.sharing import make_shared, user_name
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import utc_now, utc_text

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

OTHER_NAME = "choose another --series, runs are never overwritten"

_LOOKS_S = (0.0, 2.0, 5.0)
"""Pauses before the scheduler is asked for a job of which nobody said whether it was taken, seconds: a controller that
is too busy to answer may still be taking the job in."""

_MAYBE_QUEUED = "the job may be queued all the same, and its folder was kept"
EVERY_S = 60.0  # How often the scheduler is asked while a series is waited for, seconds.
_SLICE_S = 0.5


def begin(
    root: Path,
    jobs: Sequence[Job],
    *,
    chain: bool,
    python: str,
    request: str,
    pack: Packing = "points",
    max_jobs: int | None = None,
    max_node_hours: float | None = None,
) -> str:
    """Writes down what a series shall hold, before anything is submitted; returns its name.

    A series of this user that is there already gets more jobs.

    Raises `UserError`: a run of that name exists, the series is another user's, or another process submits it.
    `RunError`: the files cannot be written.
    """
    series_id = _series_of(jobs[0])
    if owner := owner_of_other(root, series_id):
        raise UserError(f"{root}: series {series_id} is of user {owner}; choose another --series")
    for run_id in (run_id for job in jobs for run_id in job.run_ids):
        if (root / run_id).exists():
            raise UserError(f"{root / run_id}: exists already; {OTHER_NAME}")
    try:
        make_shared(root, root / FOLDER)
    except OSError as error:
        raise refused(error, f"{root / FOLDER}: cannot be made: {error.strerror or error}") from None
    with held(root, series_id):
        before = read_series(root, series_id) if series_path(root, series_id, "json").exists() else None
        if before is not None:
            there = {run_id for job in before.jobs for run_id in job.runs}
            if twice := next((run_id for job in jobs for run_id in job.run_ids if run_id in there), None):
                command = shlex.join(["dlbench", "submit", "--resume", before.id, "--out", str(root)])
                raise UserError(
                    f"{twice}: is in series {before.id} already: {command} goes on with it; or {OTHER_NAME}"
                )
        lines = "".join(plan.model_dump_json() + "\n" for job in jobs for plan in job.plans)
        series = SeriesFile(
            id=series_id,
            owner=user_name(),
            created=before.created if before else utc_now(),
            requests=(*(before.requests if before else ()), request),
            scheduler=jobs[0].shape.system.scheduler,
            pack=pack,
            chain=chain,
            max_jobs=max_jobs,
            max_node_hours=max_node_hours,
            python=python,
            jobs=(*(before.jobs if before else ()), *map(entry_of, jobs)),
        )
        try:
            append(series_path(root, series_id, "plans"), lines)
            write_series(root, series)
        except RunError:
            if before is None:
                forget(root, series_id)
            raise
    return series_id


def entry_of(job: Job) -> SeriesJob:
    """A job as a series lists it, with a mark of its own."""
    return SeriesJob(
        runs=job.run_ids,
        time_limit=job.time_limit,
        array_limit=job.array_limit,
        comment=f"{job.run_ids[0]}/{secrets.token_hex(4)}",
    )


def _series_of(job: Job) -> str:
    plan = job.plans[0]
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series.id


def forget(root: Path, series_id: str) -> None:
    """Removes the files of a series of which no job was taken."""
    for suffix in ("json", "plans", "jobs"):
        with suppress(OSError):
            series_path(root, series_id, suffix).unlink(missing_ok=True)
    with suppress(OSError):  # other series
        (root / FOLDER).rmdir()


def submit(
    scheduler: Slurm,
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

    `folders`: their folders, absolute; Slurm's output goes into the first. `comment`: no other job has it.
    Raises `RefusedError`: the scheduler refused (the message is its own) or cannot be started; the folders are gone
    again. `DoubtError`: it said neither yes nor no, and knows no such job (the folders stay, because it may be queued).
    """
    name, *others = job.run_ids
    if others:
        name = f"{name} and {len(others)} more run{'s' * (len(others) > 1)}"
    script = scheduler.render(job, folders, python, comment)
    for folder in folders:
        write_atomic(folder.script, script)
    command = scheduler.command(job, folders[0], after, comment)
    answer = scheduler.submit(job, command, keep_open)
    if answer.refusal:
        for folder in folders:
            take_back(folder)
        kind = QueueFullError if answer.is_full else RefusedError
        raise kind(f"{command[0]} refused {name}: {answer.refusal}")
    job_id = answer.job_id or _find(scheduler, job, folders[0], comment)
    if not job_id:
        raise DoubtError(f"{name}: {answer.doubt}; {_MAYBE_QUEUED}")
    keep_submission(job, folders, job_id, command, scheduler.variables(job))
    return job_id


def _find(scheduler: Slurm, job: Job, folder: RunFolder, comment: str) -> str:
    for wait_s in _LOOKS_S:
        time.sleep(wait_s)
        queue = scheduler.query(clusters=scheduler.clusters(job))
        if queue.unanswered:
            return ""
        if found := queue.find(folder, comment):
            return found
    return ""


def take_back(folder: RunFolder) -> None:
    """Removes what was written for a job that was not taken; anything else in the folder stays, and the folder."""
    folder.script.unlink(missing_ok=True)
    if all(path == folder.plan for path in folder.path.iterdir()):
        folder.plan.unlink(missing_ok=True)
        folder.path.rmdir()


def folders_of(root: Path, job: Job) -> list[RunFolder]:
    """The folders of all runs of a job, with their plans; those that are missing are made, all or none.

    Raises `UserError`: a folder of that name holds something else. `RunError`: a plan cannot be written.
    """
    made: list[RunFolder] = []
    try:
        return [_folder(root, plan, made) for plan in job.plans]
    except (UserError, RunError):
        for folder in made:
            take_back(folder)
        raise


def _folder(root: Path, plan: LaunchPlan, made: list[RunFolder]) -> RunFolder:
    folder = RunFolder(root / plan.run_id)
    if not folder.path.exists():
        made.append(create(root, plan))
        return folder
    if not folder.plan.exists():
        # Its making was cut off before the plan was written.
        paths = list(folder.path.iterdir())
        if any(not path.name.endswith(TEMPORARY_SUFFIX) for path in paths):
            raise UserError(f"{folder.path}: exists already, and is not of this series; {OTHER_NAME}")
        for path in paths:
            with suppress(OSError):
                path.unlink()
        write_atomic(folder.plan, plan.to_json())
    if read_bytes(folder.plan, MAX_JSON) != plan.to_json().encode():
        raise UserError(f"{folder.path}: exists already, and is not of this series; {OTHER_NAME}")
    return folder


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """One job that is with Slurm now."""

    number: int  # From 1, of the jobs of the series.
    job: Job
    job_id: str
    is_adopted: bool  # It was there already, and dlbench did not know.


def complete(
    root: Path,
    series_id: str,
    scheduler: Slurm,
    check: Callable[[], None],
    on_submitted: Callable[[Submitted], None],
    max_jobs: int | None = None,
) -> SubmissionStatus:
    """Submits the jobs of a series that are not with the scheduler yet.

    `check`: called before each job; what it raises is passed on. `max_jobs`: jobs of the series that wait or run at
    most, elements of arrays counted; None: any number.
    Raises `UserError`: there is no such series of this user, or another process submits it; or `max_jobs` is less than
    the elements of one array. `RefusedError`: the scheduler refused a job. What was submitted before stays, here and
    below. `DoubtError`: it did not say whether it took a job. `UnansweredError`: it does not say what is queued.
    """
    require_own(root, series_id)
    with held(root, series_id) as lock:
        now = submission_status(root, series_id)
        if now.submitted == now.total:
            return now
        jobs = jobs_of_series(root, now.series)
        queue = _queue_for(now, jobs, scheduler, is_counted=max_jobs is not None)
        room = _Room(now, queue, max_jobs)
        for number, state in enumerate(now.states):
            if state in ("submitted", "begun"):
                continue
            after = _before(now, number, queue, room) if now.series.chain else None
            job, entry = jobs[number], now.series.jobs[number]
            found = ""
            if now.states[number] in ("unsure", "written"):
                found = queue.find(folders_of(root, job)[0], entry.comment)
            if not found and not room.takes(job):
                break
            check()
            folders = folders_of(root, job)
            if now.states[number] == "written":  # no longer, whatever comes of it
                append(series_path(root, series_id, "jobs"), "".join(f"{run_id} \n" for run_id in entry.runs))
            if found:
                keep_found(root, scheduler, job, entry, found)
            job_id = found or submit(scheduler, job, folders, now.series.python, after, entry.comment, (lock,))
            if not found:
                append(series_path(root, series_id, "jobs"), f"{entry.runs[0]} {job_id}\n")
            room.add(number, job, job_id, is_counted=bool(found))
            on_submitted(Submitted(number=number + 1, job=job, job_id=job_id, is_adopted=bool(found)))
        return submission_status(root, series_id)


def keep_found(root: Path, scheduler: Slurm, job: Job, entry: SeriesJob, job_id: str) -> None:
    """Notes the id of a job that dlbench did not see being taken: it was, at the earliest, when its script was there.

    Raises `RunError`: a file cannot be written.
    """
    folders = [RunFolder(root / run_id) for run_id in entry.runs]
    command = scheduler.command(job, folders[0], None, entry.comment)
    written = ""
    with suppress(OSError):
        written = utc_text(datetime.fromtimestamp(folders[0].script.stat().st_mtime, UTC))
    keep_submission(job, folders, job_id, command, scheduler.variables(job), submitted=written)
    append(series_path(root, _series_of(job), "jobs"), f"{entry.runs[0]} {job_id}\n")


def write_only(
    root: Path, series_id: str, scheduler: Slurm, check: Callable[[], None], *, also_written: bool = False
) -> list[tuple[Job, str]]:
    """Writes the plans and scripts of all jobs of a series that are not there yet; returns these jobs.

    With each, the id of the job of before that it is to wait for, or empty. With `also_written` those that were
    written before and not submitted are among them, and stay as they are.

    Raises `UserError` or `RunError`: as of `complete`.
    """
    require_own(root, series_id)
    written = []
    with held(root, series_id):
        now = submission_status(root, series_id)
        before = ""
        for number, job in enumerate(jobs_of_series(root, now.series)):
            entry = now.series.jobs[number]
            if now.states[number] == "missing":
                check()
                folders = folders_of(root, job)
                script = scheduler.render(job, folders, now.series.python, entry.comment)
                for folder in folders:
                    write_atomic(folder.script, script)
                append(series_path(root, series_id, "jobs"), "".join(f"{run_id} {WRITTEN}\n" for run_id in entry.runs))
            if now.states[number] == "missing" or (also_written and now.states[number] == "written"):
                written.append((job, before if now.series.chain else ""))
            before = now.ids[number]
    return written


def adopt(root: Path, series_id: str, scheduler: Slurm) -> str:
    """Notes the jobs of a series that somebody submitted by hand, as far as their logs or the scheduler show them.

    Returns why the scheduler does not answer, or empty.

    Nothing happens where it is another user's series, or another process is at it.
    """
    with suppress(UserError, RunError):
        require_own(root, series_id)
        with held(root, series_id):
            now = submission_status(root, series_id)
            jobs = jobs_of_series(root, now.series)
            queue = scheduler.query(clusters=sorted({place for job in jobs for place in scheduler.clusters(job)}))
            for job, entry, state, job_id in zip(jobs, now.series.jobs, now.states, now.ids, strict=True):
                found = job_id or queue.find(RunFolder(root / entry.runs[0]), entry.comment)
                if found and state in ("unsure", "written", "begun"):
                    with suppress(RunError):  # a folder is gone
                        keep_found(root, scheduler, job, entry, found)
            return queue.unanswered
    return ""


def missing_jobs(root: Path, series_id: str, scheduler: Slurm) -> list[Job]:
    """The jobs of a series that are not with the scheduler, in their order.

    Raises `UnansweredError`: it does not say whether it has some.
    """
    now = submission_status(root, series_id)
    jobs = jobs_of_series(root, now.series)
    queue = _queue_for(now, jobs, scheduler, is_counted=False)
    return [
        job
        for job, entry, state in zip(jobs, now.series.jobs, now.states, strict=True)
        if state not in ("submitted", "begun") and not queue.find(RunFolder(root / entry.runs[0]), entry.comment)
    ]


class _Room:
    """How many more jobs of the series the queue may hold; and the job that the next one is to wait for."""

    def __init__(self, now: SubmissionStatus, queue: Queue, most: int | None) -> None:
        self._most = most
        self._active = sum(len(queue.active(job_id)) for job_id in now.ids if job_id)
        self.taken: dict[int, str] = {}  # Ids of this time, by the job's number.

    def takes(self, job: Job) -> bool:
        """Whether there is room for one more."""
        if self._most is None:
            return True
        size = len(job.plans) if job.is_array else 1
        if size > self._most:
            raise UserError(f"--max-jobs {self._most}: a job of this series is an array of {size}; give at least that")
        return self._active + size <= self._most

    def add(self, number: int, job: Job, job_id: str, *, is_counted: bool) -> None:
        """Counts a job that is with the scheduler now."""
        self.taken[number] = job_id
        if not is_counted:
            self._active += len(job.plans) if job.is_array else 1


def _before(now: SubmissionStatus, number: int, queue: Queue, room: _Room) -> str | None:
    for earlier in range(number - 1, -1, -1):
        if earlier in room.taken:
            return room.taken[earlier]
        job_id = now.ids[earlier]
        if job_id:
            # A job that has ended may be forgotten, and then some versions refuse to wait for it.
            is_over = not queue.unanswered and not queue.active(job_id)
            return None if is_over else job_id
    return None


def _queue_for(now: SubmissionStatus, jobs: Sequence[Job], scheduler: Slurm, *, is_counted: bool) -> Queue:
    """What the scheduler has, where that must be known. Raises `UnansweredError`: it does not answer."""
    unsure = now.states.count("unsure") + now.states.count("written")
    if not unsure and not (now.submitted and (is_counted or now.series.chain)):
        return Queue(unanswered="not asked")
    queue = scheduler.query(clusters=sorted(now.clusters.union(*map(scheduler.clusters, jobs))))
    if queue.unanswered and unsure:
        raise UnansweredError(
            f"series {now.series.id}: {queue.unanswered}, and without an answer nobody knows whether {unsure} "
            f"job{'s are' if unsure > 1 else ' is'} queued already: nothing was submitted"
        )
    if queue.unanswered and is_counted:
        raise UnansweredError(
            f"series {now.series.id}: {queue.unanswered}, and without an answer nobody knows how many of its jobs are "
            "queued: nothing was submitted"
        )
    return queue


def sleep(seconds: float, check: Callable[[], None]) -> None:
    """Waits, and calls `check` meanwhile."""
    end = time.monotonic() + seconds
    check()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))
        check()
