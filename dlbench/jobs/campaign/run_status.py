"""What is to be expected of runs: what lies in their folders, joined with what the scheduler says of their jobs."""

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
from dlbench.records.comm import read_launched
from dlbench.records.job_log import has_own_end, was_cancelled
from dlbench.records.scan import LaunchedRun
from dlbench.records.status import RankStatus, failure_line
from dlbench.sharing import WithheldError
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan

_FIRST_S = 2.0  # The first pause; each is twice the one before, up to what was asked for.

# Of a run that says itself that it failed, worth saying besides that.
_TOLD_CAUSES = frozenset({"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a series stands."""

    submission: SubmissionStatus
    runs: dict[str, RunStatus]  # By run id; a run that was not submitted has none.
    is_over: bool  # Nothing more is to come.

    @property
    def is_valid(self) -> bool:
        """Every run of it is there and valid."""
        wanted = [run_id for job in self.submission.series.jobs for run_id in job.runs]
        return all(run_id in self.runs and self.runs[run_id].state == "valid" for run_id in wanted)

    @property
    def text(self) -> str:
        """E.g. ``series s: 37 of 40 runs valid, 3 PENDING``."""
        return f"series {self.submission.series.id}: {counted(self.submission, self.runs)}"


class Watch:
    """Looks at a series again and again; what has a record is read once."""

    def __init__(self, root: Path, series_id: str) -> None:
        self._root, self._id = root, series_id
        self._recorded: dict[str, RunStatus] = {}
        self._ended: set[str] = set()  # Runs whose job ended without a record at the look before: it may come late.

    def look(self) -> Outcome:
        """How the series stands now; the scheduler is asked once.

        Raises `UserError`: there is no such series. `IncompleteDataError`: its file, or that of a run, is damaged.
        """
        now = submission_status(self._root, self._id)
        wanted = [run_id for job in now.series.jobs for run_id in job.runs]
        left = [run_id for run_id in wanted if run_id not in self._recorded]
        folders = [self._root / run_id for run_id in left]
        read = [read_launched(folder) for folder in folders if (folder / "plan.json").exists()]
        found, problems = run_statuses(read)
        if problems:
            raise IncompleteDataError(problems[0])
        by_id = {one.run_id: one for one in found}
        self._recorded |= {run.plan.run_id: by_id[run.plan.run_id] for run in read if run.recorded is not None}
        open_runs = [run_id for run_id in left if run_id not in self._recorded]
        ended = {run_id for run_id in open_runs if run_id in by_id and by_id[run_id].ahead == "nothing"}
        # Where a run was never submitted, or nobody knows, whoever submits the series is looked for apart.
        unknown = {
            run_id
            for run_id in open_runs
            if run_id not in by_id or (not by_id[run_id].job and by_id[run_id].state == "incomplete")
        }
        is_settled = (ended & self._ended | unknown).issuperset(open_runs)
        self._ended = ended
        return Outcome(
            submission=now,
            runs={**self._recorded, **by_id},
            is_over=is_settled and not (now.submitted < now.total and is_held(self._root, self._id)),
        )


def wait(
    root: Path,
    series_id: str,
    check: Callable[[], None],
    notify: Callable[[str], None],
    timeout_s: float,
    every_s: float = EVERY_S,
) -> Outcome:
    """Waits for a series; returns how it stands when it is over, or after the time.

    `check`: called twice a second; what it raises is passed on. `notify`: called with how the series stands, when that
    changes. `every_s`: seconds between two looks, of which each asks the scheduler once. Raises `UserError`: there is
    no such series. `IncompleteDataError`: its file, or that of a run, is damaged.
    """
    end = time.monotonic() + timeout_s
    watch, pause, notified = Watch(root, series_id), min(_FIRST_S, every_s), ""
    while True:
        now = watch.look()
        if now.is_over or time.monotonic() >= end:
            return now
        if now.text != notified:
            notified = now.text
            notify(notified)
        sleep(min(pause, max(end - time.monotonic(), 0.0)), check)
        pause = min(2 * pause, every_s)


Ahead = Literal["nothing", "comes", "unknown"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run."""

    run_id: str
    state: str  # valid, invalid, failed, cancelled, interrupted, incomplete, or the scheduler's word.
    job: str = ""
    detail: str = ""
    reason: str = ""  # Why its job waits, the scheduler's word.
    starts: str = ""  # When its job should start, the scheduler's local time.
    ahead: Ahead = "nothing"  # Whether something is still to come.

    @property
    def is_failed(self) -> bool:
        """It has no valid record and will have none."""
        return self.state in ("failed", "cancelled", "invalid")


def run_statuses(runs: Sequence[LaunchedRun]) -> tuple[list[RunStatus], list[str]]:
    """One of each run, and which submissions cannot be read: without its own a waiting run seems not submitted."""
    jobs: dict[str, Submission] = {}
    unread: list[str] = []
    for run in runs:
        try:
            submission = read_submission(run.folder)
        except WithheldError:
            submission = None
        except IncompleteDataError as error:
            submission = None
            unread.append(str(error))
        if submission is not None:
            jobs[run.plan.run_id] = submission
    # Each scheduler is asked once for all jobs, and runs that share a job ask once.
    asked: dict[str, dict[str, str]] = {}
    for waiting in (jobs[run.plan.run_id] for run in runs if run.recorded is None and run.plan.run_id in jobs):
        asked.setdefault(waiting.scheduler, {})[waiting.reference] = waiting.other_owner
    queues = {
        name: scheduler_named(name).query([*owners], sorted(filter(None, {*owners.values()})))
        for name, owners in asked.items()
    }
    found = []
    for run in runs:
        one = jobs.get(run.plan.run_id)
        found.append(_run_status(run, one, Queue() if one is None else queues.get(one.scheduler, Queue())))
    return found, unread


def _run_status(run: LaunchedRun, submission: Submission | None, queue: Queue) -> RunStatus:
    run_id, detail, state = run.plan.run_id, run.detail, run.state
    if submission is None:
        return _not_submitted(run)
    job = submission.job_id
    queued = next(iter(queue.of(submission.reference)), None)

    def ahead_of(queued: QueuedJob, state: str, detail: str) -> RunStatus:
        ahead: Ahead = "nothing" if queued.is_stuck else "comes"
        known = {"reason": queued.reason, "starts": queued.starts, "detail": detail.strip()}
        return RunStatus(run_id=run_id, state=state, job=job, ahead=ahead, **known)

    def over(detail: str, state: str = state, ahead: Ahead = "nothing") -> RunStatus:
        return RunStatus(run_id=run_id, state=state, job=job, detail=detail, ahead=ahead)

    ended = "failed"
    if state in ("failed", "incomplete") and _is_cancelled(run, submission, queued):
        ended = "cancelled"
    if queued is None:
        if ended == "cancelled":
            return over(f"job {job} was cancelled, as its log says; {detail}", ended)
        if state != "incomplete":
            return over(detail)
        return over(f"{_unlisted(submission, queue)}; {detail}", ahead="unknown" if queue.unanswered else "nothing")
    expected = _expected(run, submission, queued)
    if state == "failed" and queued.phase == "waiting":
        # What failed was an earlier attempt: a job that waits has none that is under way.
        return ahead_of(queued, queued.state, f"its job was requeued {expected}".strip() + f"; {detail}")
    if state == "failed" and queued.state == "CANCELLED":
        return over(f"{detail}; job {job} was cancelled; {_resume(run, queued)} submits it again", ended)
    if state == "failed" and queued.state in _TOLD_CAUSES:
        return over(f"{detail}; job {job} ended as {queued.state}")
    if state == "interrupted" and queued.phase != "over":
        return ahead_of(queued, state, f"{detail}; its job was requeued: {queued.state} {expected}")
    if state != "incomplete":
        return over(detail)
    if queued.phase != "over":
        return ahead_of(queued, queued.state, expected)
    # Of a script that failed by itself, its log says more.
    if queued.state not in ("COMPLETED", "FAILED") and never_began(run.folder):
        why = f"job {job} ended as {queued.state} before this run began; {_resume(run, queued)} submits it again"
        return over(why, ended)
    log = f"see launch.log, and {submission.log}" if submission.runs else f"see {submission.log}"
    why = f"job {job} ended as {queued.state} without a record; {detail}; {log}"
    return over(why + (f"; {_resume(run, queued)} submits it again" if queued.state == "CANCELLED" else ""), ended)


def _is_cancelled(run: LaunchedRun, submission: Submission, queued: QueuedJob | None) -> bool:
    if has_own_end(run.folder):
        return False
    if queued is None:
        return was_cancelled(run.folder.path.parent / submission.log)
    return queued.state == "CANCELLED"


def _resume(run: LaunchedRun, queued: QueuedJob) -> str:
    assert isinstance(run.plan, RunPlan | CommPlan)
    words = ["dlbench", "submit", "--resume", run.plan.series.id, *["--cancelled"] * (queued.state == "CANCELLED")]
    return shlex.join([*words, "--out", str(run.folder.path.parent)])


def _not_submitted(run: LaunchedRun) -> RunStatus:
    run_id, state, detail = run.plan.run_id, run.state, run.detail
    if state == "incomplete" and run.folder.script.exists() and not run.statuses:
        assert isinstance(run.plan, RunPlan | CommPlan)
        if known_jobs(run.folder.path.parent, run.plan.series.id).get(run_id) == WRITTEN:
            return RunStatus(run_id=run_id, state=state, detail="its script was written, and not submitted yet")
        detail = "not started; nobody knows whether its job was submitted"
        return RunStatus(run_id=run_id, state=state, detail=detail, ahead="unknown")
    here = platform.node()
    is_here = state == "incomplete" and bool(run.statuses) and all(status.host == here for status in run.statuses)
    if is_here and not any(map(_lives, run.statuses)):
        detail = f"none of its processes is left on {here}, and no record; {detail}"
        return RunStatus(run_id=run_id, state="failed", detail=detail)
    return RunStatus(run_id=run_id, state=state, detail=detail, ahead="unknown" if state == "incomplete" else "nothing")


def _unlisted(submission: Submission, queue: Queue) -> str:
    job = submission.job_id
    if queue.unanswered:
        return f"Slurm did not say what became of job {job} ({queue.unanswered})"
    if queue.no_history:
        return f"job {job} is no longer queued, and Slurm did not say how it ended ({queue.no_history})"
    if owner := submission.other_owner:
        return f"job {job} is of user {owner}: Slurm no longer knows it, or shows it to its owner alone"
    return f"Slurm no longer knows job {job}"


def _expected(run: LaunchedRun, submission: Submission, queued: QueuedJob) -> str:
    if queued.phase == "waiting":
        parts = [f"({queued.reason})"] * bool(queued.reason) + [queued.advice] * bool(queued.advice)
        parts += [f"expected start {queued.starts}"] * bool(queued.starts)
        return " ".join(parts[:1]) + "".join(f", {part}" for part in parts[1:])
    vanished = [status for status in run.statuses if status.source == "supervisor"]
    if vanished:  # e.g. with the daemon of Slurm's that started them, which Slurm itself does not notice
        why = failure_line(vanished, None, run.counted)
        return f"{why}, and its job goes on: if it does not end, scancel {submission.job_id} ends it"
    if submission.runs and not run.statuses:
        return (
            f"no rank has said anything yet; the {len(submission.runs)} runs of job {submission.job_id} go one after "
            "the other"
        )
    return queued.advice


def _lives(status: RankStatus) -> bool:
    import psutil

    try:
        process = psutil.Process(status.pid)
        # A process that began after the rank's last word only has its number.
        last_sign = datetime.fromisoformat(status.updated).timestamp()
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= last_sign + 60)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return True


def counted(series: SubmissionStatus, found: Mapping[str, RunStatus]) -> str:
    """How far a series is, e.g. ``37 of 40 runs valid, 1 RUNNING, 2 PENDING``.

    `found`: run_statuses by run id, of more runs, too.
    """
    runs = {run_id: state for job, state in zip(series.series.jobs, series.states, strict=True) for run_id in job.runs}
    absent = {"missing": "not submitted", "unsure": "not submitted", "written": "written only"}
    return tally(
        found[run_id].state if run_id in found else absent.get(state, "whose folder is gone")
        for run_id, state in runs.items()
    )


def tally(states: Iterable[str]) -> str:
    """Returns how many runs are in which state, e.g. ``37 of 40 runs valid, 1 RUNNING, 2 PENDING``."""
    counts = Counter(states)
    total, valid = counts.total(), counts.pop("valid", 0)
    runs = "run" if total == 1 else "runs"
    return ", ".join([f"{valid} of {total} {runs} valid", *(f"{count} {state}" for state, count in counts.items())])
