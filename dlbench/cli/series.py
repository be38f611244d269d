"""A series on its way to the scheduler: submitted, gone on with, fed; for several commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli import options as shared
from dlbench.errors import RunError, UserError

if TYPE_CHECKING:
    from dlbench.jobs.campaign.completing import Submitted
    from dlbench.jobs.campaign.reopening import Reopened
    from dlbench.jobs.interruption import Interruption
    from dlbench.jobs.scripts.job import Job


def root_of(out: Path) -> Path:
    """The folder of all runs, absolute.

    Raises:
        UserError: there is none.
    """
    if not out.is_dir():
        raise UserError(f"--out {out}: no such folder")
    return out.absolute()


def resume_series(
    series: str, out: Path, *, max_jobs: int | None, follow: bool, every_s: float, with_cancelled: bool = False
) -> None:
    """`dlbench submit --resume SERIES`: submits what is left of a series, as often as it is called.

    Args:
        series: its name.
        out: folder of all runs.
        max_jobs: as of `submit_rest`, as are the next two.
        follow: as above.
        every_s: as above.
        with_cancelled: whether runs whose job was cancelled before they began are submitted, too.

    Raises:
        UserError: there is no such series of this user, or another process submits it.
        RunError: as of `submit_rest`.
    """
    from dlbench.jobs.campaign.file import require_own
    from dlbench.jobs.campaign.reopening import reopen
    from dlbench.jobs.interruption import Interruption
    from dlbench.jobs.known_schedulers import scheduler_named
    from dlbench.records.folder import prepare_output

    root = root_of(out)
    file = require_own(root, series)
    scheduler_named(file.scheduler).require()
    prepare_output(out)
    _say_reopened(series, out, reopen(root, series, scheduler_named(file.scheduler), with_cancelled=with_cancelled))
    with Interruption() as interruption:
        submit_rest(root, series, out, interruption, max_jobs=max_jobs or file.max_jobs, follow=follow, every_s=every_s)


def _say_reopened(series: str, out: Path, done: Reopened) -> None:
    """What became of runs that never began, and what the new jobs may cost."""
    from dlbench.cli.dry_run import cost_lines

    if done.campaign is not None:
        whose = "its job" if done.runs == 1 else "their job"
        runs = f"{done.runs} run{'s' * (done.runs > 1)}"
        _say(f"series {series}: {runs} never began before {whose} ended, and will be submitted again")
        for line in cost_lines(done.campaign):
            _say(line)
    if done.begun:
        count = len(done.begun)
        runs = f"{count} run{'s' * (count > 1)} that had begun before being cancelled"
        which = f"{done.begun[0]}{f' and {count - 1} more' * (count > 1)}"
        _say(f"series {series}: {runs} stay{'s' * (count == 1)} so: {which}; run again with another --series")
    if done.cancelled:
        count, jobs = len(done.cancelled), done.cancelled_jobs
        are, them = ("are", "them") if count > 1 else ("is", "it")
        command = _command("submit", "--resume", series, "--cancelled", "--out", str(out))
        _say(
            f"series {series}: {count} run{'s' * (count > 1)} of cancelled job{'s' * (len(jobs) > 1)} "
            f"{', '.join(jobs)} never began and {are} left out; {command} submits {them} again"
        )


def submit_rest(
    root: Path,
    series: str,
    out: Path,
    interruption: Interruption,
    *,
    max_jobs: int | None = None,
    follow: bool = False,
    every_s: float = 60.0,
) -> None:
    """Submits what is left of a series; of each job its id on standard output, and then how far the series is.

    Args:
        root: folder of all runs, absolute.
        series: its name.
        out: the folder as the person gave it.
        interruption: asked before each job.
        max_jobs: jobs of it in the queue at most.
        follow: whether to wait for room, until all of it is submitted.
        every_s: seconds between two looks at the queue.

    Raises:
        UserError: there is no such series, or another process submits it.
        RunError: Slurm refused a job, did not say whether it took it, or does not say what is queued.
        KeyboardInterrupt: on a signal.
    """
    from dlbench.jobs.campaign.completing import complete, feed, forget
    from dlbench.jobs.campaign.file import feeding, read_series, standing
    from dlbench.jobs.known_schedulers import scheduler_named
    from dlbench.jobs.scheduler import RefusedError

    scheduler = scheduler_named(read_series(root, series).scheduler)
    tell = _teller(standing(root, series).total)
    try:
        if follow:
            with feeding(root, series):
                feed(root, series, scheduler, interruption.check, tell, _say, max_jobs, every_s)
        else:
            complete(root, series, scheduler, interruption.check, tell, max_jobs)
        interruption.check()  # of a signal during the last sbatch
    except KeyboardInterrupt:
        _say(left(root, series, out))
        raise
    except RunError as error:
        if isinstance(error, RefusedError) and not standing(root, series).known:
            forget(root, series)
            raise
        raise type(error)(f"{error}; {left(root, series, out)}") from None
    _say(f"{left(root, series, out)}; next: {_command('status', str(out))}")


def left(root: Path, series: str, out: Path) -> str:
    """How far a series is, and what submits the rest."""
    from dlbench.jobs.campaign.file import standing

    now = standing(root, series)
    if now.submitted == now.total:
        return f"series {series}: {now.text}"
    return f"series {series}: {now.text}; the rest: {resume_command(series, out)}"


def resume_command(series: str, out: Path) -> str:
    """The command that submits the rest of a series."""
    return _command("submit", "--resume", series, "--out", str(out))


def _command(*words: str) -> str:
    from dlbench.jobs.scripts.launch import quoted

    return quoted(["dlbench", *words])


def _teller(total: int) -> Callable[[Submitted], None]:
    def tell(done: Submitted) -> None:
        how = ", found in the queue" if done.is_adopted else ""
        _say(f"[{done.number}/{total}] job {done.job_id}{how}: {_describe_job(done.job)}")
        with suppress(OSError):
            click.echo(done.job_id.partition(";")[0])

    return tell


def _say(text: str) -> None:
    # A terminal that has closed must not end the series between two jobs.
    with suppress(OSError):
        click.echo(text, err=True)


def _describe_job(job: Job) -> str:
    first = shared.describe_plan(job.plans[0])
    if len(job.plans) == 1:
        return first
    return f"{'array' if job.is_array else 'job'} of {len(job.plans)} runs, the first {first}"
