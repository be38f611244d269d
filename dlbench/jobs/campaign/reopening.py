"""Runs whose job ended before it came to them, at its time limit say, become jobs of their series again."""

from __future__ import annotations

import re
from pathlib import Path

from dlbench.errors import RunError
from dlbench.jobs.campaign.beginning import entry_of
from dlbench.jobs.campaign.campaign import campaign_of
from dlbench.jobs.campaign.file import append, held, jobs_of_series, require_own, series_path, write_series
from dlbench.jobs.campaign.standing import Standing, never_began, standing
from dlbench.jobs.scheduler import Queue, Scheduler
from dlbench.jobs.submission import read_submission
from dlbench.records.folder import RunFolder
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

_LOG = re.compile(r"slurm-[0-9_]+\.out")


def reopen(root: Path, series_id: str, scheduler: Scheduler) -> int:
    """Takes runs that never began, of jobs that have ended, into new jobs of their series; returns how many runs.

    Nothing happens while the scheduler does not answer. Runs that began are left to themselves, and so are all of a
    job that it says was completed.

    Args:
        root: folder of all runs, absolute.
        series_id: the series.
        scheduler: took its jobs.

    Raises:
        UserError: there is no such series of this user, or another process submits it.
        RunError: a file cannot be written.
        IncompleteDataError: a file of the series is damaged.
    """
    require_own(root, series_id)
    with held(root, series_id):
        now = standing(root, series_id)
        waiting = {number: _not_begun(root, now, number) for number in range(now.total) if now.ids[number]}
        if not any(waiting.values()):
            return 0
        queue = scheduler.query([now.ids[number] for number, runs in waiting.items() if runs])
        if queue.unanswered:
            return 0
        left = {
            number: runs
            for number, runs in waiting.items()
            if runs and _was_cut_off(queue, now.ids[number], has_log=_has_log(root, runs[0]))
        }
        if left:
            _renew(root, now, left)
        return sum(map(len, left.values()))


def _not_begun(root: Path, now: Standing, number: int) -> list[str]:
    """The runs of a job in whose folders nothing lies but what a submission wrote, and Slurm's log."""
    runs = now.series.jobs[number].runs
    return [run_id for run_id in runs if never_began(RunFolder(root / run_id))]


def _has_log(root: Path, run_id: str) -> bool:
    """Whether the job of a run wrote anything, and so began."""
    submission = read_submission(RunFolder(root / run_id))
    return submission is not None and (root / submission.log).exists()


def _was_cut_off(queue: Queue, job_id: str, *, has_log: bool) -> bool:
    """Whether a job has ended, and not by itself; one that the scheduler has forgotten must have begun."""
    jobs = queue.of(job_id)
    if not jobs:
        return has_log
    return all(job.phase == "over" for job in jobs) and any(not job.state.startswith("COMPLETED") for job in jobs)


def _renew(root: Path, now: Standing, left: dict[int, list[str]]) -> None:
    """Whatever is cut off here is found again by the next call: folders are cleared first, the series is last."""
    series = now.series
    runs = {run_id for of_job in left.values() for run_id in of_job}
    plans = [plan for job in jobs_of_series(root, series) for plan in job.plans if plan.run_id in runs]
    made = campaign_of(sorted(plans, key=_position), root, packing=series.pack, chain=series.chain).jobs
    for run_id in sorted(runs):
        _clear(RunFolder(root / run_id))
    # A job goes by its first run: the ids of old ones are no longer theirs.
    append(series_path(root, series.id, "jobs"), "".join(f"{job.run_ids[0]} \n" for job in made))
    rest = [job.model_copy(update={"runs": tuple(one for one in job.runs if one not in runs)}) for job in series.jobs]
    kept = [job for job in rest if job.runs]
    write_series(root, series.model_copy(update={"jobs": (*kept, *map(entry_of, made))}))


def _position(plan: LaunchPlan) -> int:
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series.position


def _clear(folder: RunFolder) -> None:
    """Takes away what would say that the run is submitted; what its job said stays, under another name.

    Raises:
        RunError: a file cannot be removed.
    """
    try:
        for path in (folder.submission, folder.script, folder.accounting):  # that of the job before
            path.unlink(missing_ok=True)
        for path in folder.path.iterdir():
            if _LOG.fullmatch(path.name):
                path.rename(path.with_name(f"earlier-{path.name}"))
    except OSError as error:
        raise RunError(f"{folder.path}: cannot be written: {error.strerror or error}") from None
