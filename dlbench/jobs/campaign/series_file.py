"""The files of a series, written before the first job is submitted, so that a series can be resumed: `.series/ID.json`
lists its jobs, `.series/ID.plans` holds one plan per line, and `.series/ID.jobs` gets one line per submitted job.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError, RunError, UserError, nearest, refused
from dlbench.jobs.campaign.campaign import Packing
from dlbench.jobs.scheduler import array_of, cluster_of, read_submission
from dlbench.jobs.scripts.job import Job
from dlbench.opening import (
    WithheldError,
    descriptor,
    may_not_read,
    other_owner,
    parse_json,
    read_bytes,
    read_end,
    read_json,
    user_name,
    why_unreadable,
)
from dlbench.records.files import is_stream, write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.records.scan import refused_file
from dlbench.specs.base import Flag, Name, RunName, Spec
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

JobState = Literal["submitted", "begun", "unsure", "written", "missing"]
"""unsure: the script was written, and it is unknown whether Slurm queued the job. written: the same, but the user was
to submit it by hand. begun: a rank wrote files, the job id is unknown. missing: no script was written."""

WRITTEN = "-"  # In `ID.jobs` in place of a job id, one line per run: the script was written, not submitted.

_LOG = re.compile(r"slurm-(\d+)(_\d+)?\.out")
_ANY_LOG = re.compile(rf"(earlier-)?{_LOG.pattern}")
_EARLIER = re.compile(r"attempt-\d{4}|checkpoints")
_WROTE = re.compile(r"(rank|node)-\d+\..*|record\.json|comm\.json|rendezvous\.json|launch\.log")

FOLDER = ".series"  # In the folder of all runs; reading runs skips names that begin with a dot.
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.05
_MAX_PLANS = 1 << 30  # Bytes of all plans of a series; one plan has some 10 kB.


@dataclass(frozen=True, kw_only=True)
class SubmissionStatus:
    """The submission state of each job of a series."""

    series: SeriesFile
    states: tuple[JobState, ...]  # One per job.
    ids: tuple[str, ...]  # Slurm's id of each job; empty if unknown.

    @property
    def submitted(self) -> int:
        """Number of jobs that Slurm accepted."""
        return sum(state in ("submitted", "begun") for state in self.states)

    @property
    def clusters(self) -> set[str]:
        """Names of the clusters of its jobs, empty for the local cluster."""
        return {cluster_of(job_id) for job_id in self.ids if job_id}

    @property
    def known(self) -> bool:
        """True if Slurm accepted, or may have accepted, any job."""
        return any(state != "missing" for state in self.states)

    @property
    def total(self) -> int:
        return len(self.states)

    @property
    def text(self) -> str:
        """For example ``5 of 8 jobs submitted, 1 more may be queued``."""
        parts = [f"{self.submitted} of {self.total} jobs submitted"]
        if num_unsure := self.states.count("unsure"):
            parts.append(f"{num_unsure} more may be queued")
        if num_written := self.states.count("written"):
            parts.append(f"{num_written} with a script only")
        return ", ".join(parts)


def standings(root: Path) -> tuple[list[SubmissionStatus], list[str]]:
    """Returns the status of every series in the folder of all runs, and the errors of damaged files."""
    statuses, problems = [], []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            statuses.append(submission_status(root, path.stem))
        except WithheldError:
            continue  # its runs are not readable either, which is reported for them
        except IncompleteDataError as error:
            problems.append(str(error))
    return statuses, problems


def submission_status(root: Path, series_id: str) -> SubmissionStatus:
    """Reads how many jobs of a series have been submitted."""
    series = read_series(root, series_id)
    known_ids = known_jobs(root, series_id)
    jobs = [_state(root, job, known_ids.get(job.runs[0], "")) for job in series.jobs]
    states, ids = tuple(state for state, _ in jobs), tuple(job_id for _, job_id in jobs)
    return SubmissionStatus(series=series, states=states, ids=ids)


def _state(root: Path, job: SeriesJob, known_id: str) -> tuple[JobState, str]:
    """Returns the state and the id of a job. `known_id`: its id in `ID.jobs`, `WRITTEN`, or empty."""
    if known_id not in ("", WRITTEN):
        return "submitted", known_id
    folders = [RunFolder(root / run_id) for run_id in job.runs]
    for folder in folders:
        submission = read_submission(folder)
        if submission is not None and job.array_limit is None:
            return "submitted", submission.reference
        if submission is not None:
            return "submitted", array_of(submission.reference)
    has_begun, job_id = _has_begun(folders)
    if has_begun:
        return "begun", job_id
    if not any(folder.script.exists() for folder in folders):
        return "missing", ""
    return ("written" if known_id == WRITTEN else "unsure"), ""


def _has_begun(folders: Sequence[RunFolder]) -> tuple[bool, str]:
    has_begun = False
    for folder in folders:
        try:
            names = [path.name for path in folder.path.iterdir()]
        except OSError:
            continue
        for name in names:
            if match := _LOG.fullmatch(name):
                return True, match[1]
            has_begun = has_begun or _WROTE.fullmatch(name) is not None
    return has_begun, ""


def never_began(folder: RunFolder) -> bool:
    """Returns whether a run's folder holds only files of its submission, Slurm's logs, and earlier attempts."""
    submission_names = {folder.plan.name, folder.script.name, folder.submission.name, folder.accounting.name}
    try:
        names = {path.name for path in folder.path.iterdir()}
    except OSError:
        return False
    rank_files = [
        name for name in names - submission_names if not _ANY_LOG.fullmatch(name) and not _EARLIER.fullmatch(name)
    ]
    return folder.plan.name in names and not rank_files


class SeriesJob(Spec):
    """One job of a series."""

    runs: tuple[RunName, ...] = Field(min_length=1, description="Run ids, in the order in which they run.")
    time_limit: str = Field(description="Time limit as Slurm writes it; for an array, of each run.")
    array_limit: int | None = Field(
        description="null: one allocation for all runs. Else a job array with at most this many running; 0: no maximum."
    )
    comment: str = Field(description="Identifies the job in the queue (sbatch --comment).")


class SeriesFile(Spec):
    """`.series/ID.json`: the planned jobs of a series."""

    format: Literal["dlbench.series"] = Field("dlbench.series", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    id: Name = Field(description="The series.")
    owner: str = Field(description="Login name of the user who submitted it; nobody else adds to it.")
    created: str = Field(description="Time of the first submission, UTC, ISO 8601.")
    requests: tuple[str, ...] = Field(description="The commands that submitted it, a line each.")
    scheduler: str = Field("slurm", description="The scheduler of its jobs (system.scheduler).")
    pack: Packing = Field("points", description="Which runs share a job: points, all, runs (none).")
    chain: Flag = Field(description="Whether each job waits for the one before.")
    max_jobs: int | None = Field(None, description="Most of its jobs in the queue; null: no limit.")
    max_node_hours: float | None = Field(None, description="Limit of the newest request; null: no limit.")
    python: str = Field(description="Python of the nodes, unless the system names another.")
    jobs: tuple[SeriesJob, ...] = Field(description="All its jobs, in the order in which they are submitted.")


def series_path(root: Path, series_id: str, suffix: str) -> Path:
    """Returns the path of a file of a series, with suffix `json`, `plans` or `jobs`."""
    return root / FOLDER / f"{series_id}.{suffix}"


def read_series(root: Path, series_id: str) -> SeriesFile:
    """Reads `ID.json`. Raises `UserError`: there is no such series. `IncompleteDataError`: the file is damaged."""
    path = series_path(root, series_id, "json")
    if "/" in series_id or not series_id:
        raise UserError(f"{series_id!a}: is not the name of a series")
    try:
        return SeriesFile.model_validate(read_json(path, MAX_JSON))
    except FileNotFoundError:
        raise UserError(f"{root}: holds no series {series_id} that was submitted to Slurm") from None
    except PermissionError as error:
        raise may_not_read(path, error) from None
    except (OSError, ValueError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None


def write_series(root: Path, series: SeriesFile) -> None:
    """Replaces `ID.json`. Raises `RunError`: it cannot be written."""
    write_json(series_path(root, series.id, "json"), series.model_dump(mode="json"))


def known_jobs(root: Path, series_id: str) -> dict[str, str]:
    """Reads `ID.jobs`: the id of each submitted job, by the job's first run."""
    ids = {}
    with suppress(FileNotFoundError):
        lines = read_bytes(series_path(root, series_id, "jobs"), MAX_JSON).decode("utf-8", "replace").split("\n")
        for line in lines[:-1]:  # without a last line that was not written completely
            run_id, _, job_id = line.partition(" ")
            ids[run_id] = job_id
    return ids


def jobs_of_series(root: Path, series: SeriesFile) -> list[Job]:
    """Returns the jobs of a series with their plans."""
    path = series_path(root, series.id, "plans")
    plans: dict[str, LaunchPlan] = {}
    try:
        for line in read_bytes(path, _MAX_PLANS).split(b"\n")[:-1]:
            content = parse_json(line)
            is_comm = content.get("format") == CommPlan.model_fields["format"].default
            plan_type = CommPlan if is_comm else RunPlan
            plan = plan_type.model_validate(content)
            plans[plan.run_id] = plan
        plans_by_job = [tuple(map(plans.__getitem__, job.runs)) for job in series.jobs]
    except ValidationError as error:
        raise refused_file(path, plan_type, error) from None
    except (OSError, ValueError, AttributeError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None
    except KeyError as error:
        raise IncompleteDataError(f"{path}: damaged: it lacks the plan of {error.args[0]}") from None
    return [
        Job(plans=job_plans, time_limit=job.time_limit, array_limit=job.array_limit)
        for job, job_plans in zip(series.jobs, plans_by_job, strict=True)
    ]


def is_held(root: Path, series_id: str) -> bool:
    """Returns whether a process is submitting the series; False on a file system without locks."""
    try:
        number = descriptor(series_path(root, series_id, "plans"))
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # errors other than BlockingIOError come from a file system without locks
        return isinstance(error, BlockingIOError)
    finally:
        os.close(number)
    return False


def require_own(root: Path, series_id: str) -> SeriesFile:
    """Reads the file of a series of this user."""
    if owner := owner_of_other(root, series_id):
        raise UserError(f"{root}: series {series_id} belongs to user {owner}, who alone can continue it")
    return read_series(root, series_id)


def owner_of_other(root: Path, series_id: str) -> str:
    """Returns the user who submitted the series, if it is another user; else empty."""
    path = series_path(root, series_id, "json")
    if not path.exists():
        return ""
    if owner := other_owner(path):
        return owner
    owner = read_series(root, series_id).owner
    return "" if owner == user_name() else owner


@contextmanager
def locked(root: Path, series_id: str) -> Iterator[int]:
    """Keeps other processes from submitting the series, if the file system has locks. Yields a file descriptor: a
    program that inherits it holds the lock. Raises `UserError`: another process submits the series. `RunError`: the
    file cannot be created.
    """
    with _appending(series_path(root, series_id, "plans")) as file:
        for remaining_tries in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A process that only checks (`is_held`) holds the lock for a moment.
                if not remaining_tries:
                    raise UserError(f"series {series_id} is being submitted by another process") from None
                time.sleep(_LOCK_PAUSE_S)
            except OSError:  # no locks
                break
        yield file.fileno()


def append(path: Path, text: str) -> None:
    """Appends whole lines; first removes a last line that was not written completely."""
    try:
        with _appending(path) as file:
            if read_end(path, 1) not in (b"", b"\n"):
                file.truncate(read_bytes(path, _MAX_PLANS).rfind(b"\n") + 1)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None


def _appending(path: Path) -> IO[str]:
    try:
        if is_stream(path):
            raise RunError(f"{path}: cannot be written: is not a regular file")
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None


def _slurm() -> Slurm:
    from dlbench.jobs.slurm.scheduler import Slurm

    return Slurm()


SCHEDULERS: dict[str, Callable[[], Slurm]] = {"slurm": _slurm}


def scheduler_named(name: str) -> Slurm:
    """Returns the scheduler of a name. Raises `UserError`: there is none."""
    if name not in SCHEDULERS:
        raise UserError(f"no scheduler {name}; {nearest(name, SCHEDULERS)}")
    return SCHEDULERS[name]()
