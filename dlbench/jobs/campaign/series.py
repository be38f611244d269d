"""A series that is submitted to Slurm: what it shall hold is on disk before the first job, so that it can be completed.

Below the folder of all runs, `.series/ID.json` lists its jobs and `.series/ID.plans` holds their plans, a line each; a
line in `.series/ID.jobs` follows each job that Slurm took. What is not there was not taken, or nobody knows: then the
run's folder has a script and no `submission.json`, and Slurm is asked.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.jobs.scripts.batch import sbatch_arguments
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.queue import Queue, queued_jobs
from dlbench.jobs.slurm.sbatch import submit
from dlbench.jobs.slurm.submission import keep_submission, read_submission
from dlbench.opening import descriptor, parse_json, read_bytes, read_json, why_unreadable
from dlbench.records.files import is_stream, write_atomic, write_json
from dlbench.records.folder import MAX_JSON, RunFolder, create
from dlbench.records.status import read_statuses
from dlbench.specs.base import Flag, Name, RunName, Spec
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import utc_now

FOLDER = ".series"
"""Below the folder of all runs; what reads runs passes over names that begin with a dot."""

_MAX_PLANS = 1 << 30
"""Bytes of all plans of a series: one has some 10 kB."""


class SeriesJob(Spec):
    """One job of a series."""

    runs: tuple[RunName, ...] = Field(min_length=1, description="Its runs, in their order.")
    time_limit: str = Field(description="What it asks for, as Slurm writes it; of an array, for each run.")
    array_limit: int | None = Field(
        description="null: one allocation for all. Else a job array, of which so many run at a time; 0: any number."
    )
    comment: str = Field(description="By which Slurm finds the job again: sbatch --comment.")


class SeriesFile(Spec):
    """`.series/ID.json`: what a series that was submitted shall hold."""

    format: Literal["dlbench.series"] = Field("dlbench.series", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    id: Name = Field(description="The series.")
    created: str = Field(description="When it was first submitted, UTC, ISO 8601.")
    requests: tuple[str, ...] = Field(description="The commands that asked for it, a line each.")
    chain: Flag = Field(description="Whether each job waits for the one before.")
    python: str = Field(description="Python of the nodes, unless the system names another.")
    jobs: tuple[SeriesJob, ...] = Field(description="All its jobs, in the order in which they are submitted.")


JobState = Literal["submitted", "begun", "unsure", "missing"]
"""unsure: its script was written, and nothing says whether Slurm took it. begun: its ranks wrote, no id is known."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a series has got."""

    series: SeriesFile
    states: tuple[JobState, ...]
    """Of each job."""
    ids: tuple[str, ...]
    """Slurm's; empty where it is not known."""

    @property
    def submitted(self) -> int:
        """Jobs that Slurm took."""
        return sum(state in ("submitted", "begun") for state in self.states)

    @property
    def known(self) -> bool:
        """Whether Slurm took, or may have taken, any job."""
        return any(state != "missing" for state in self.states)

    @property
    def total(self) -> int:
        """Jobs of the series."""
        return len(self.states)

    @property
    def text(self) -> str:
        """E.g. ``5 of 8 jobs submitted, 1 more may be queued``."""
        unsure = self.states.count("unsure")
        more = f", {unsure} more may be queued" if unsure else ""
        return f"{self.submitted} of {self.total} jobs submitted{more}"


def standings(root: Path) -> tuple[list[Standing], list[str]]:
    """Every series below the folder of all runs, and what is damaged, a line each."""
    found, problems = [], []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found.append(standing(root, path.stem))
        except IncompleteDataError as error:
            problems.append(str(error))
    return found, problems


def standing(root: Path, series_id: str) -> Standing:
    """How far one series has got.

    Raises:
        UserError: there is none of this name.
        IncompleteDataError: its file, or that of a run, is damaged.
    """
    path = _file(root, series_id, "json")
    if "/" in series_id:
        raise UserError(f"{series_id}: is no name of a series")
    try:
        series = SeriesFile.model_validate(read_json(path, MAX_JSON))
    except FileNotFoundError:
        raise UserError(f"{root}: holds no series {series_id} that was submitted to Slurm") from None
    except (OSError, ValueError, ValidationError) as error:
        why = "not as dlbench writes it" if isinstance(error, ValidationError) else why_unreadable(error)
        raise IncompleteDataError(f"{path}: damaged: {why}") from None
    known = _known_jobs(root, series_id)
    told = [_state(root, job, known) for job in series.jobs]
    return Standing(
        series=series,
        states=tuple(state for state, _ in told),
        ids=tuple(job_id for _, job_id in told),
    )


def _file(root: Path, series_id: str, suffix: str) -> Path:
    return root / FOLDER / f"{series_id}.{suffix}"


def _known_jobs(root: Path, series_id: str) -> dict[str, str]:
    """Slurm's id of each job that was taken, by the job's first run."""
    known = {}
    with suppress(FileNotFoundError):
        lines = read_bytes(_file(root, series_id, "jobs"), MAX_JSON).decode("utf-8", "replace").split("\n")
        for line in lines[:-1]:  # what follows the last line's end was cut off
            run_id, _, job_id = line.partition(" ")
            known[run_id] = job_id
    return known


def _state(root: Path, job: SeriesJob, known: dict[str, str]) -> tuple[JobState, str]:
    """Of a job, and Slurm's id."""
    if job.runs[0] in known:
        return "submitted", known[job.runs[0]]
    folders = [RunFolder(root / run_id) for run_id in job.runs]
    for folder in folders:
        submission = read_submission(folder)
        if submission is not None:
            return "submitted", submission.job_id.partition("_")[0]  # that of the whole array
    if any(folder.path.is_dir() and read_statuses(folder) for folder in folders):
        return "begun", ""
    return ("unsure" if any(folder.script.exists() for folder in folders) else "missing"), ""


def is_held(root: Path, series_id: str) -> bool:
    """Whether a process is submitting the series now; not where the file system has no locks."""
    try:
        number = descriptor(_file(root, series_id, "plans"))
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(number)
    return False


@contextmanager
def _held(path: Path, series_id: str) -> Iterator[None]:
    """Keeps other processes from submitting the series; where the file system has no locks, nothing does.

    Raises:
        UserError: another one does.
        RunError: the file cannot be made.
    """
    with _appending(path) as file:
        with suppress(OSError):
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"series {series_id} is being submitted by another process") from None
        yield


def begin(root: Path, jobs: Sequence[Job], *, chain: bool, python: str, request: str) -> str:
    """Writes down what a series shall hold, before anything is submitted; returns its name.

    A series that is there already gets more jobs.

    Args:
        root: folder of all runs, absolute.
        jobs: the plans, in the order of submission.
        chain: as in `SeriesFile`.
        python: as in `SeriesFile`.
        request: the command that asks for them.

    Raises:
        UserError: a run of that name exists, or another process submits this series.
        RunError: the files cannot be written.
    """
    series_id = _series_of(jobs[0].plans[0])
    for plan in (plan for job in jobs for plan in job.plans):
        if (root / plan.run_id).exists():
            raise UserError(f"{root / plan.run_id}: exists already; {_OTHER}")
    added = tuple(
        SeriesJob(
            runs=job.run_ids,
            time_limit=job.time_limit,
            array_limit=job.array_limit,
            comment=f"{job.run_ids[0]}/{secrets.token_hex(4)}",
        )
        for job in jobs
    )
    try:
        (root / FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"{root / FOLDER}: cannot be made: {error.strerror or error}") from None
    plans = _file(root, series_id, "plans")
    with _held(plans, series_id):
        before: SeriesFile | None = None
        if _file(root, series_id, "json").exists():
            before = standing(root, series_id).series
            there = {run_id for job in before.jobs for run_id in job.runs}
            for run_id in (run_id for job in added for run_id in job.runs if run_id in there):
                raise UserError(
                    f"{run_id}: is in series {series_id} already: `dlbench complete` goes on with it; or {_OTHER}"
                )
        _append(plans, "".join(plan.model_dump_json() + "\n" for job in jobs for plan in job.plans))
        series = SeriesFile(
            id=series_id,
            created=before.created if before else utc_now(),
            requests=(*(before.requests if before else ()), request),
            chain=chain,
            python=python,
            jobs=(*(before.jobs if before else ()), *added),
        )
        write_json(_file(root, series_id, "json"), series.model_dump(mode="json"))
    return series_id


_OTHER = "choose another --series, runs are never overwritten"


def _series_of(plan: LaunchPlan) -> str:
    if isinstance(plan, RunPlan | CommPlan):
        return plan.series.id
    raise TypeError(type(plan).__name__)


def _appending(path: Path) -> IO[str]:
    """Raises RunError: the file cannot be written."""
    try:
        if is_stream(path):
            raise RunError(f"{path}: cannot be written: is no file")
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def _append(path: Path, text: str) -> None:
    """Raises RunError: the file cannot be written."""
    try:
        with _appending(path) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def jobs_of_series(root: Path, series: SeriesFile) -> list[Job]:
    """The plans of a series' jobs.

    Raises:
        IncompleteDataError: the file of plans is damaged, or lacks one.
    """
    path = _file(root, series.id, "plans")
    plans: dict[str, LaunchPlan] = {}
    try:
        for line in read_bytes(path, _MAX_PLANS).splitlines():
            content = parse_json(line)
            kind = CommPlan if content.get("format") == CommPlan.model_fields["format"].default else RunPlan
            plan = kind.model_validate(content)
            plans[plan.run_id] = plan
        return [
            Job(
                plans=tuple(plans[run_id] for run_id in job.runs),
                time_limit=job.time_limit,
                array_limit=job.array_limit,
            )
            for job in series.jobs
        ]
    except (OSError, ValueError, ValidationError, AttributeError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None
    except KeyError as error:
        raise IncompleteDataError(f"{path}: damaged: it lacks the plan of {error.args[0]}") from None


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """One job that is with Slurm now."""

    number: int
    """From 1, of the jobs of the series."""
    job: Job
    job_id: str
    is_adopted: bool
    """It was there already, and dlbench did not know."""


def complete(
    root: Path, series_id: str, check: Callable[[], None], on_submitted: Callable[[Submitted], None]
) -> Standing:
    """Submits the jobs of a series that are not with Slurm yet; again and again, it does so once for each job.

    Args:
        root: folder of all runs, absolute.
        series_id: the series.
        check: called before each job; what it raises is passed on.
        on_submitted: told each job.

    Raises:
        UserError: there is no such series, or another process submits it.
        RunError: Slurm refused a job, did not say whether it took it, or does not say what is queued. What was
            submitted before stays.
    """
    with _held_if_there(root, series_id):
        now = standing(root, series_id)
        jobs = jobs_of_series(root, now.series)
        queue = _queue_for(now)
        before: str | None = None
        for number, (job, entry, state, job_id) in enumerate(
            zip(jobs, now.series.jobs, now.states, now.ids, strict=True), 1
        ):
            if state in ("submitted", "begun"):
                before = job_id or before
                continue
            check()
            after = before if now.series.chain else None
            folders = _folders(root, job)
            found = queue.find(folders[0], entry.comment) if state == "unsure" and queue is not None else ""
            if found:
                keep_submission(job, folders, found, sbatch_arguments(job, folders[0], after, entry.comment))
            before = found or submit(job, folders, now.series.python, after, entry.comment)
            _append(_file(root, series_id, "jobs"), f"{entry.runs[0]} {before}\n")
            on_submitted(Submitted(number=number, job=job, job_id=before, is_adopted=bool(found)))
        return standing(root, series_id)


@contextmanager
def _held_if_there(root: Path, series_id: str) -> Iterator[None]:
    standing(root, series_id)
    with _held(_file(root, series_id, "plans"), series_id):
        yield


def _queue_for(now: Standing) -> Queue | None:
    """What Slurm has, where that must be known.

    Raises:
        RunError: it does not answer.
    """
    unsure = now.states.count("unsure")
    if not unsure:
        return None
    queue = queued_jobs()
    if queue is None:
        raise RunError(
            f"series {now.series.id}: squeue does not answer, and without it nobody knows whether {unsure} "
            f"job{'s are' if unsure > 1 else ' is'} queued already: nothing was submitted"
        )
    return queue


def give_up(root: Path, series_id: str) -> Standing:
    """Takes the jobs that were never submitted out of a series.

    Raises:
        UserError: there is no such series, or another process submits it.
        RunError: its file cannot be written.
    """
    with _held_if_there(root, series_id):
        now = standing(root, series_id)
        kept = tuple(job for job, state in zip(now.series.jobs, now.states, strict=True) if state != "missing")
        series = now.series.model_copy(update={"jobs": kept})
        write_json(_file(root, series_id, "json"), series.model_dump(mode="json"))
        return standing(root, series_id)


def forget(root: Path, series_id: str) -> None:
    """Removes the files of a series of which no job was taken."""
    for suffix in ("json", "plans", "jobs"):
        with suppress(OSError):
            _file(root, series_id, suffix).unlink(missing_ok=True)
    with suppress(OSError):  # other series
        (root / FOLDER).rmdir()


def _folders(root: Path, job: Job) -> list[RunFolder]:
    """The folders of all runs of a job, with their plans; those that are missing are made, all or none.

    Raises:
        UserError: a folder of that name holds something else.
        RunError: a plan cannot be written.
    """
    made: list[RunFolder] = []
    try:
        return [_folder(root, plan, made) for plan in job.plans]
    except (UserError, RunError):
        for folder in made:
            shutil.rmtree(folder.path)
        raise


def _folder(root: Path, plan: LaunchPlan, made: list[RunFolder]) -> RunFolder:
    """One of them, added to `made` if it was not there."""
    folder = RunFolder(root / plan.run_id)
    if not folder.path.exists():
        made.append(create(root, plan))
    elif not folder.plan.exists() and not any(folder.path.iterdir()):
        write_atomic(folder.plan, plan.to_json())  # cut off between the two
    elif not folder.plan.exists() or read_bytes(folder.plan, MAX_JSON) != plan.to_json().encode():
        raise UserError(f"{folder.path}: exists already, and is not of this series; {_OTHER}")
    return folder
