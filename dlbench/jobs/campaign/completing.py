"""Submits each job of a series exactly once, whatever sbatch answers and wherever this process is killed. The order of
the files makes it so: plans, script, sbatch, `submission.json`. A run folder with a script and nothing else may belong
to a queued job; then the scheduler is asked for a job with its comment.
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
    jobs_of_series,
    locked,
    owner_of_other,
    read_series,
    require_own,
    series_path,
    submission_status,
    write_series,
)
from dlbench.jobs.scheduler import (
    Queue,
    QueueFullError,
    RefusedError,
    SchedulerUnavailableError,
    SubmissionUnknownError,
    keep_submission,
)
from dlbench.jobs.scripts.job import Job
from dlbench.opening import make_shared, read_bytes, user_name
from dlbench.records.files import TEMPORARY_SUFFIX, write_atomic
from dlbench.records.folder import MAX_JSON, RunFolder, create
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import counted, utc_now, utc_text

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

OTHER_NAME = "choose another --series, runs are never overwritten"

_QUERY_PAUSES_S = (0.0, 2.0, 5.0)
"""Pauses before the scheduler is asked whether it has a job for which sbatch gave no clear answer, in seconds: a
controller that is too busy to answer may still accept the job."""

_MAYBE_QUEUED = "the job may be queued nevertheless, and its folder was kept"
EVERY_S = 60.0  # Seconds between two queries of the scheduler while `dlbench` waits for a series.
_SLICE_S = 0.5


def begin(  # noqa: PLR0913  # what a series file holds, and where it is written
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
    """Writes the jobs of a new or an existing series to disk before anything is submitted; returns the name of the
    series. Raises `UserError`: a run of that name exists, the series belongs to another user, or another process
    submits it. `RunError`: the files cannot be written.
    """
    series_id = _series_of(jobs[0])
    if owner := owner_of_other(root, series_id):
        raise UserError(f"{root}: series {series_id} belongs to user {owner}; choose another --series")
    run_ids = [run_id for job in jobs for run_id in job.run_ids]
    for run_id in run_ids:
        if (root / run_id).exists():
            raise UserError(f"{root / run_id}: exists already; {OTHER_NAME}")
    try:
        make_shared(root, root / FOLDER)
    except OSError as error:
        raise refused(error, f"{root / FOLDER}: cannot be made: {error.strerror or error}") from None
    with locked(root, series_id):
        created = utc_now()
        requests: list[str] = []
        entries: list[SeriesJob] = []
        is_new = not series_path(root, series_id, "json").exists()
        if not is_new:
            existing = read_series(root, series_id)
            _require_new(existing, run_ids, root)
            created = existing.created
            requests += existing.requests
            entries += existing.jobs
        series = SeriesFile(
            id=series_id,
            owner=user_name(),
            created=created,
            requests=(*requests, request),
            scheduler=jobs[0].shape.system.scheduler,
            pack=pack,
            chain=chain,
            max_jobs=max_jobs,
            max_node_hours=max_node_hours,
            python=python,
            jobs=(*entries, *map(entry_of, jobs)),
        )
        lines = "".join(plan.model_dump_json() + "\n" for job in jobs for plan in job.plans)
        try:
            append(series_path(root, series_id, "plans"), lines)
            write_series(root, series)
        except RunError:
            if is_new:
                forget(root, series_id)
            raise
    return series_id


def _require_new(existing: SeriesFile, run_ids: Sequence[str], root: Path) -> None:
    existing_runs = {run_id for job in existing.jobs for run_id in job.runs}
    for run_id in run_ids:
        if run_id in existing_runs:
            command = shlex.join(["dlbench", "submit", "--resume", existing.id, "--out", str(root)])
            raise UserError(
                f"{run_id}: is in series {existing.id} already: continue it with {command}, or {OTHER_NAME}"
            )


def entry_of(job: Job) -> SeriesJob:
    """Returns the entry of a job in the series file, with a comment that no other job has."""
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
    """Removes the files of a series that has no submitted job."""
    for suffix in ("json", "plans", "jobs"):
        with suppress(OSError):
            series_path(root, series_id, suffix).unlink(missing_ok=True)
    with suppress(OSError):  # not empty: other series are in it
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
    """Writes a job's script into the folder of each of its runs and submits it; returns its id. An sbatch that fails
    may have queued the job nevertheless ("Socket timed out on send/recv operation"): then Slurm is asked for it.
    `folders`: absolute, one per run. `comment`: unique to the job. Raises `RefusedError`: the job was refused; the
    folders were removed. `SubmissionUnknownError`: Slurm lists no such job, and it may be queued; the folders stay.
    """
    name, *others = job.run_ids
    if others:
        name = f"{name} and {counted(len(others), 'more run')}"
    script = scheduler.render(job, folders, python, comment)
    for folder in folders:
        write_atomic(folder.script, script)
    command = scheduler.command(job, folders[0], after, comment)
    answer = scheduler.submit(job, command, keep_open)
    if answer.refusal:
        for folder in folders:
            remove_unsubmitted(folder)
        error_type = QueueFullError if answer.is_full else RefusedError
        raise error_type(f"{command[0]} refused {name}: {answer.refusal}")
    job_id = answer.job_id or _find_in_queue(scheduler, job, folders[0], comment)
    if not job_id:
        raise SubmissionUnknownError(f"{name}: {answer.doubt}; {_MAYBE_QUEUED}")
    keep_submission(job, folders, job_id, command, scheduler.variables(job))
    return job_id


def _find_in_queue(scheduler: Slurm, job: Job, folder: RunFolder, comment: str) -> str:
    for wait_s in _QUERY_PAUSES_S:
        time.sleep(wait_s)
        queue = scheduler.query(clusters=scheduler.clusters(job))
        if queue.unanswered:
            return ""
        if job_id := queue.find(folder, comment):
            return job_id
    return ""


def remove_unsubmitted(folder: RunFolder) -> None:
    """Removes the script of a job that was not submitted, and the folder with the plan if it holds nothing else."""
    folder.script.unlink(missing_ok=True)
    if all(path == folder.plan for path in folder.path.iterdir()):
        folder.plan.unlink(missing_ok=True)
        folder.path.rmdir()


def folders_of(root: Path, job: Job) -> list[RunFolder]:
    """Returns the folders of all runs of a job, with their plans; creates the missing ones, all or none."""
    created: list[RunFolder] = []
    try:
        return [_folder(root, plan, created) for plan in job.plans]
    except (UserError, RunError):
        for folder in created:
            remove_unsubmitted(folder)
        raise


def _folder(root: Path, plan: LaunchPlan, created: list[RunFolder]) -> RunFolder:
    folder = RunFolder(root / plan.run_id)
    if not folder.path.exists():
        created.append(create(root, plan))
        return folder
    if not folder.plan.exists():
        # An earlier process was killed before it had written the plan.
        paths = list(folder.path.iterdir())
        if any(not path.name.endswith(TEMPORARY_SUFFIX) for path in paths):
            raise UserError(f"{folder.path}: exists already, and does not belong to this series; {OTHER_NAME}")
        for path in paths:
            with suppress(OSError):
                path.unlink()
        write_atomic(folder.plan, plan.to_json())
    if read_bytes(folder.plan, MAX_JSON) != plan.to_json().encode():
        raise UserError(f"{folder.path}: exists already, and does not belong to this series; {OTHER_NAME}")
    return folder


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job of a series that is queued now."""

    number: int  # Number of the job in the series, from 1.
    job: Job
    job_id: str
    is_adopted: bool  # It was queued already, and dlbench had not recorded it.


def complete(
    root: Path,
    series_id: str,
    scheduler: Slurm,
    check: Callable[[], None],
    on_submitted: Callable[[Submitted], None],
    max_jobs: int | None = None,
) -> SubmissionStatus:
    """Submits the jobs of a series that have not been submitted yet. `check`: called before each job; its exceptions
    are passed on. `max_jobs`: most jobs of the series that wait or run at a time, counting elements of arrays. Raises
    `UserError`: this user has no such series, another process submits it, or `max_jobs` is less than the elements of
    one array. `RefusedError`, `SubmissionUnknownError`: as `submit`. `SchedulerUnavailableError`: the queue cannot be
    read.
    """
    require_own(root, series_id)
    with locked(root, series_id) as lock:
        now = submission_status(root, series_id)
        if now.submitted == now.total:
            return now
        jobs = jobs_of_series(root, now.series)
        queue = _queue_for(now, jobs, scheduler, is_counted=max_jobs is not None)
        limit = _QueueLimit(now, queue, max_jobs)
        for number, state in enumerate(now.states):
            if state in ("submitted", "begun"):
                continue
            job, entry = jobs[number], now.series.jobs[number]
            after = _predecessor(now, number, queue, limit) if now.series.chain else None
            job_id = ""
            if state in ("unsure", "written"):
                job_id = queue.find(folders_of(root, job)[0], entry.comment)
            is_adopted = bool(job_id)
            if not is_adopted and not limit.allows(job):
                break
            check()
            folders = folders_of(root, job)
            if state == "written":  # dlbench submits it now: no longer a script to be submitted by hand
                append(series_path(root, series_id, "jobs"), "".join(f"{run_id} \n" for run_id in entry.runs))
            if is_adopted:
                record_adopted(root, series_id, scheduler, job, entry, job_id)
            else:
                job_id = submit(scheduler, job, folders, now.series.python, after, entry.comment, (lock,))
                append(series_path(root, series_id, "jobs"), f"{entry.runs[0]} {job_id}\n")
            limit.add(number, job, job_id, is_counted=is_adopted)
            on_submitted(Submitted(number=number + 1, job=job, job_id=job_id, is_adopted=is_adopted))
        return submission_status(root, series_id)


def record_adopted(root: Path, series_id: str, scheduler: Slurm, job: Job, entry: SeriesJob, job_id: str) -> None:
    """Records the id of a queued job that dlbench had no answer for; its script's time is the time of submission."""
    folders = [RunFolder(root / run_id) for run_id in entry.runs]
    command = scheduler.command(job, folders[0], None, entry.comment)
    written = ""
    with suppress(OSError):
        written = utc_text(datetime.fromtimestamp(folders[0].script.stat().st_mtime, UTC))
    keep_submission(job, folders, job_id, command, scheduler.variables(job), submitted=written)
    append(series_path(root, series_id, "jobs"), f"{entry.runs[0]} {job_id}\n")


def write_only(
    root: Path, series_id: str, scheduler: Slurm, check: Callable[[], None], *, also_written: bool = False
) -> list[tuple[Job, str]]:
    """Writes the missing plans and scripts of a series without submitting them; returns the jobs, each with the id of
    the job that it has to wait for, or an empty text. `also_written`: also return jobs whose scripts were written
    before. Raises `UserError` and `RunError` as `complete` does.
    """
    require_own(root, series_id)
    written = []
    with locked(root, series_id):
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
    """Records jobs that were submitted by hand; returns why the scheduler does not answer, or an empty text."""
    with suppress(UserError, RunError):
        require_own(root, series_id)
        with locked(root, series_id):
            now = submission_status(root, series_id)
            jobs = jobs_of_series(root, now.series)
            clusters = {cluster for job in jobs for cluster in scheduler.clusters(job)}
            queue = scheduler.query(clusters=sorted(clusters))
            for job, entry, state, known_id in zip(jobs, now.series.jobs, now.states, now.ids, strict=True):
                job_id = known_id or queue.find(RunFolder(root / entry.runs[0]), entry.comment)
                if job_id and state in ("unsure", "written", "begun"):
                    with suppress(RunError):  # the folder was removed
                        record_adopted(root, series_id, scheduler, job, entry, job_id)
            return queue.unanswered
    return ""


def missing_jobs(root: Path, series_id: str, scheduler: Slurm) -> list[Job]:
    """Returns the jobs of a series that have not been submitted, in their order."""
    now = submission_status(root, series_id)
    jobs = jobs_of_series(root, now.series)
    queue = _queue_for(now, jobs, scheduler, is_counted=False)
    return [
        job
        for job, entry, state in zip(jobs, now.series.jobs, now.states, strict=True)
        if state not in ("submitted", "begun") and not queue.find(RunFolder(root / entry.runs[0]), entry.comment)
    ]


class _QueueLimit:
    """The limit on jobs of the series in the queue (--max-jobs), and the jobs that this call has submitted."""

    def __init__(self, now: SubmissionStatus, queue: Queue, max_jobs: int | None) -> None:
        self._max_jobs = max_jobs
        self._active = sum(len(queue.active(job_id)) for job_id in now.ids if job_id)
        self.submitted: dict[int, str] = {}  # Job id by the number of the job in the series.

    def allows(self, job: Job) -> bool:
        if self._max_jobs is None:
            return True
        if job.num_elements > self._max_jobs:
            raise UserError(
                f"--max-jobs {self._max_jobs}: a job of this series is an array of {job.num_elements}; "
                "give at least that"
            )
        return self._active + job.num_elements <= self._max_jobs

    def add(self, number: int, job: Job, job_id: str, *, is_counted: bool) -> None:
        """Counts a job that is queued now, unless the queue showed it before."""
        self.submitted[number] = job_id
        if not is_counted:
            self._active += job.num_elements


def _predecessor(now: SubmissionStatus, number: int, queue: Queue, limit: _QueueLimit) -> str | None:
    for earlier in range(number - 1, -1, -1):
        if earlier in limit.submitted:
            return limit.submitted[earlier]
        job_id = now.ids[earlier]
        if job_id:
            # Slurm may have forgotten a job that has ended, and some versions refuse a dependency on it.
            has_ended = not queue.unanswered and not queue.active(job_id)
            return None if has_ended else job_id
    return None


def _queue_for(now: SubmissionStatus, jobs: Sequence[Job], scheduler: Slurm, *, is_counted: bool) -> Queue:
    """Reads the queue if the next submissions depend on it. Raises `SchedulerUnavailableError`: it cannot be read."""
    num_unsure = now.states.count("unsure") + now.states.count("written")
    if not num_unsure and not (now.submitted and (is_counted or now.series.chain)):
        return Queue(unanswered="not asked")
    queue = scheduler.query(clusters=sorted(now.clusters.union(*map(scheduler.clusters, jobs))))
    if queue.unanswered and num_unsure:
        raise SchedulerUnavailableError(
            f"series {now.series.id}: {queue.unanswered}, so it is unknown whether {counted(num_unsure, 'job')} may be "
            "queued already: nothing was submitted"
        )
    if queue.unanswered and is_counted:
        raise SchedulerUnavailableError(
            f"series {now.series.id}: {queue.unanswered}, so it is unknown how many of its jobs are queued: nothing "
            "was submitted"
        )
    return queue


def sleep(seconds: float, check: Callable[[], None]) -> None:
    """Waits, and calls `check` twice a second; its exceptions are passed on."""
    end = time.monotonic() + seconds
    check()
    while (remaining_s := end - time.monotonic()) > 0:
        time.sleep(min(remaining_s, _SLICE_S))
        check()
