"""The status of runs and series, from the run folders and the scheduler's answer on their jobs."""

from __future__ import annotations

import platform
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from dlbench.errors import IncompleteDataError
from dlbench.jobs.campaign.completing import EVERY_S, sleep
from dlbench.jobs.campaign.series_file import (
    WRITTEN,
    SubmissionStatus,
    is_held,
    known_jobs,
    never_began,
    scheduler_named,
    submission_status,
)
from dlbench.jobs.scheduler import Queue, QueuedJob, Submission, read_submission
from dlbench.opening import WithheldError
from dlbench.records.comm import read_launched
from dlbench.records.job_log import has_own_end, was_cancelled
from dlbench.records.scan import LaunchedRun
from dlbench.records.status import RankStatus, failure_line
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import plural

_FIRST_PAUSE_S = 2.0  # Each pause is twice the one before, up to the polling interval.

# Job states that are printed although the run itself says why it failed: the job's end explains more.
_EXPLAINING_STATES = frozenset({"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The status of a series and of its runs."""

    submission: SubmissionStatus
    runs: dict[str, RunStatus]  # By run id; without the runs that have no folder yet.
    is_over: bool  # All jobs have ended, and no process submits more of them.

    @property
    def is_valid(self) -> bool:
        run_ids = [run_id for job in self.submission.series.jobs for run_id in job.runs]
        return all(run_id in self.runs and self.runs[run_id].state == "valid" for run_id in run_ids)

    @property
    def text(self) -> str:
        """For example ``series s: 37 of 40 runs valid, 3 PENDING``."""
        return f"series {self.submission.series.id}: {counted(self.submission, self.runs)}"


class SeriesMonitor:
    """Polls the status of a series; a run that has a record is read once."""

    def __init__(self, root: Path, series_id: str) -> None:
        self._root, self._id = root, series_id
        self._recorded: dict[str, RunStatus] = {}
        self._ended: set[str] = set()  # Runs whose job had ended at the last poll without a record: it may come late.

    def poll(self) -> Outcome:
        """Returns the current status; asks the scheduler once."""
        now = submission_status(self._root, self._id)
        run_ids = [run_id for job in now.series.jobs for run_id in job.runs if run_id not in self._recorded]
        folders = [self._root / run_id for run_id in run_ids]
        runs = [read_launched(folder) for folder in folders if (folder / "plan.json").exists()]
        statuses, problems = run_statuses(runs)
        if problems:
            raise IncompleteDataError(problems[0])
        by_id = {status.run_id: status for status in statuses}
        self._recorded |= {run.plan.run_id: by_id[run.plan.run_id] for run in runs if run.recorded is not None}
        ended: set[str] = set()
        is_settled = True
        for run_id in run_ids:
            if run_id in self._recorded:
                continue
            status = by_id.get(run_id)
            if status is not None and status.ahead == "nothing":
                ended.add(run_id)
            # A run without a job counts as settled; below it matters whether a process still submits the series.
            has_no_job = status is None or (not status.job and status.state == "incomplete")
            is_settled = is_settled and (has_no_job or run_id in ended & self._ended)
        self._ended = ended
        is_being_submitted = now.submitted < now.total and is_held(self._root, self._id)
        return Outcome(submission=now, runs={**self._recorded, **by_id}, is_over=is_settled and not is_being_submitted)


def wait(
    root: Path,
    series_id: str,
    check: Callable[[], None],
    notify: Callable[[str], None],
    timeout_s: float,
    every_s: float = EVERY_S,
) -> Outcome:
    """Waits until all jobs of a series have ended, or until the timeout; returns the last status. `check`: called twice
    a second; its exceptions are passed on. `notify`: called with the status text when it changes. `every_s`: polling
    interval in seconds. Raises `UserError`: there is no such series. `IncompleteDataError`: a file is damaged.
    """
    end = time.monotonic() + timeout_s
    monitor = SeriesMonitor(root, series_id)
    pause_s = min(_FIRST_PAUSE_S, every_s)
    last_text = ""
    while True:
        now = monitor.poll()
        if now.is_over or time.monotonic() >= end:
            return now
        if now.text != last_text:
            last_text = now.text
            notify(last_text)
        sleep(min(pause_s, max(end - time.monotonic(), 0.0)), check)
        pause_s = min(2 * pause_s, every_s)


Ahead = Literal["nothing", "comes", "unknown"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of one run."""

    run_id: str
    state: str  # valid, invalid, failed, cancelled, interrupted, incomplete, or Slurm's word.
    job: str = ""  # Slurm job id; empty if it was not submitted.
    detail: str = ""
    reason: str = ""  # Slurm's word for why its job is pending.
    starts: str = ""  # Expected start of its job in the scheduler's local time.
    ahead: Ahead = "nothing"  # Whether its job may still start or run on.

    @property
    def is_failed(self) -> bool:
        """True if it has no valid record and will have none."""
        return self.state in ("failed", "cancelled", "invalid")


def run_statuses(runs: Sequence[LaunchedRun]) -> tuple[list[RunStatus], list[str]]:
    """Returns the status of each run, and the errors of `submission.json` files that cannot be read."""
    submissions: dict[str, Submission] = {}
    unread: list[str] = []
    for run in runs:
        try:
            if submission := read_submission(run.folder):
                submissions[run.plan.run_id] = submission
        except WithheldError:
            continue
        except IncompleteDataError as error:
            unread.append(str(error))
    # Each scheduler is asked once for all jobs, and once for a job that several runs share.
    owners: dict[str, dict[str, str]] = {}  # By scheduler and job id.
    for run in runs:
        if run.recorded is None and run.plan.run_id in submissions:
            submission = submissions[run.plan.run_id]
            owners.setdefault(submission.scheduler, {})[submission.reference] = submission.other_owner
    queues = {}
    for name, owner_by_job in owners.items():
        users = {owner for owner in owner_by_job.values() if owner}
        queues[name] = scheduler_named(name).query([*owner_by_job], sorted(users))
    statuses = []
    for run in runs:
        if run.plan.run_id in submissions:
            submission = submissions[run.plan.run_id]
            statuses.append(_run_status(run, submission, queues.get(submission.scheduler, Queue())))
        else:
            statuses.append(_not_submitted(run))
    return statuses, unread


def _run_status(run: LaunchedRun, submission: Submission, queue: Queue) -> RunStatus:
    queued = next(iter(queue.of(submission.reference)), None)
    if queued is not None and queued.phase == "over":
        return _status_of_ended_job(run, submission, queued)
    if queued is not None:
        return _status_of_active_job(run, submission, queued)
    state, job, detail = run.state, submission.job_id, run.detail
    ahead: Ahead = "nothing"
    log = run.folder.path.parent / submission.log
    if state in ("failed", "incomplete") and not has_own_end(run.folder) and was_cancelled(log):
        detail = f"job {job} was cancelled, as its log says; {detail}"
        return RunStatus(run_id=run.plan.run_id, state="cancelled", job=job, detail=detail)
    if state == "incomplete":
        detail = f"{_unlisted(submission, queue)}; {detail}"
        if queue.unanswered:
            ahead = "unknown"
    return RunStatus(run_id=run.plan.run_id, state=state, job=job, detail=detail, ahead=ahead)


def _status_of_active_job(run: LaunchedRun, submission: Submission, queued: QueuedJob) -> RunStatus:
    run_id, job, detail = run.plan.run_id, submission.job_id, run.detail
    outlook = _outlook(run, submission, queued)
    state = queued.state
    if run.state == "failed" and queued.phase == "waiting":
        # An earlier attempt failed: a pending job has no attempt that runs.
        detail = f"its job was requeued {outlook}".strip() + f"; {detail}"
    elif run.state == "interrupted":
        state = run.state
        detail = f"{detail}; its job was requeued: {queued.state} {outlook}"
    elif run.state == "incomplete":
        detail = outlook
    else:
        return RunStatus(run_id=run_id, state=run.state, job=job, detail=detail)
    return RunStatus(
        run_id=run_id,
        state=state,
        job=job,
        detail=detail.strip(),
        reason=queued.reason,
        starts=queued.starts,
        ahead="nothing" if queued.is_stuck else "comes",
    )


def _status_of_ended_job(run: LaunchedRun, submission: Submission, queued: QueuedJob) -> RunStatus:
    state: str = run.state
    job, detail = submission.job_id, run.detail
    was_job_cancelled = queued.state == "CANCELLED"
    if state in ("failed", "incomplete"):
        state = "cancelled" if was_job_cancelled and not has_own_end(run.folder) else "failed"
    if run.state == "failed" and was_job_cancelled:
        detail = f"{detail}; job {job} was cancelled; {_resume(run, queued)} submits it again"
    elif run.state == "failed" and queued.state in _EXPLAINING_STATES:
        detail = f"{detail}; job {job} ended as {queued.state}"
    elif run.state == "incomplete":
        # If the script itself failed, its log says more than that the run never began.
        if queued.state not in ("COMPLETED", "FAILED") and never_began(run.folder):
            detail = f"job {job} ended as {queued.state} before this run began; {_resume(run, queued)} submits it again"
        else:
            logs = f"launch.log, and {submission.log}" if submission.runs else submission.log
            detail = f"job {job} ended as {queued.state} without a record; {detail}; see {logs}"
            if was_job_cancelled:
                detail = f"{detail}; {_resume(run, queued)} submits it again"
    return RunStatus(run_id=run.plan.run_id, state=state, job=job, detail=detail)


def _resume(run: LaunchedRun, queued: QueuedJob) -> str:
    assert isinstance(run.plan, RunPlan | CommPlan)
    words = ["dlbench", "submit", "--resume", run.plan.series.id]
    if queued.state == "CANCELLED":
        words.append("--cancelled")
    return shlex.join([*words, "--out", str(run.folder.path.parent)])


def _not_submitted(run: LaunchedRun) -> RunStatus:
    run_id, state, detail = run.plan.run_id, run.state, run.detail
    if state == "incomplete" and run.folder.script.exists() and not run.statuses:
        assert isinstance(run.plan, RunPlan | CommPlan)
        if known_jobs(run.folder.path.parent, run.plan.series.id).get(run_id) == WRITTEN:
            return RunStatus(run_id=run_id, state=state, detail="its script was written, and not submitted yet")
        detail = "not started; it is unknown whether its job was submitted"
        return RunStatus(run_id=run_id, state=state, detail=detail, ahead="unknown")
    host = platform.node()
    is_local = state == "incomplete" and bool(run.statuses) and all(status.host == host for status in run.statuses)
    if is_local and not any(map(_is_running, run.statuses)):
        detail = f"none of its processes runs on {host} any more, and it has no record; {detail}"
        return RunStatus(run_id=run_id, state="failed", detail=detail)
    return RunStatus(run_id=run_id, state=state, detail=detail, ahead="unknown" if state == "incomplete" else "nothing")


def _unlisted(submission: Submission, queue: Queue) -> str:
    job = submission.job_id
    if queue.unanswered:
        return f"Slurm did not answer on job {job} ({queue.unanswered})"
    if queue.no_history:
        return f"job {job} is no longer queued, and Slurm did not say how it ended ({queue.no_history})"
    if owner := submission.other_owner:
        return f"job {job} belongs to user {owner}: Slurm no longer knows it, or shows it only to its owner"
    return f"Slurm no longer knows job {job}"


def _outlook(run: LaunchedRun, submission: Submission, queued: QueuedJob) -> str:
    if queued.phase == "waiting":
        parts = []
        if queued.reason:
            parts.append(f"({queued.reason})")
        if queued.advice:
            parts.append(queued.advice)
        if queued.starts:
            parts.append(f"expected start {queued.starts}")
        return ", ".join(parts)
    vanished = [status for status in run.statuses if status.source == "supervisor"]
    if vanished:  # for example with slurmstepd, whose end Slurm itself does not notice
        failure = failure_line(vanished, None, run.counted)
        return f"{failure}, and its job still runs: if it does not end, scancel {submission.job_id} ends it"
    if submission.runs and not run.statuses:
        return (
            f"no rank has started yet; the {len(submission.runs)} runs of job {submission.job_id} run one after the "
            "other"
        )
    return queued.advice


def _is_running(status: RankStatus) -> bool:
    import psutil

    try:
        process = psutil.Process(status.pid)
        # A process that began after the last update of the status has merely got the same pid.
        last_update = datetime.fromisoformat(status.updated).timestamp()
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= last_update + 60)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return True


def counted(series: SubmissionStatus, run_statuses: Mapping[str, RunStatus]) -> str:
    """Returns the progress of a series, e.g. ``37 of 40 runs valid, 1 RUNNING, 2 PENDING``."""
    words = {"missing": "not submitted", "unsure": "not submitted", "written": "script written only"}
    states: dict[str, str] = {}
    for job, job_state in zip(series.series.jobs, series.states, strict=True):
        for run_id in job.runs:
            if run_id in run_statuses:
                states[run_id] = run_statuses[run_id].state
            else:
                states[run_id] = words.get(job_state, "without a folder")
    return tally(states.values())


def tally(states: Iterable[str]) -> str:
    """Returns how many runs are in which state, e.g. ``37 of 40 runs valid, 1 RUNNING, 2 PENDING``."""
    counts = Counter(states)
    total, valid = counts.total(), counts.pop("valid", 0)
    parts = [f"{valid} of {total} {plural('run', total)} valid"]
    parts += [f"{count} {state}" for state, count in counts.items()]
    return ", ".join(parts)
