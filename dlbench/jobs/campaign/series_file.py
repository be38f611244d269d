"""The files of a series: what it shall hold is on disk before the first job, so that it can be resumed.

Below the folder of all runs, `.series/ID.json` lists its jobs and `.series/ID.plans` holds their plans, a line each; a
line in `.series/ID.jobs` follows each job that the scheduler took.
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
from dlbench.opening import descriptor, parse_json, read_bytes, read_end, read_json, why_unreadable
from dlbench.records.files import is_stream, write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.records.scan import refused_file
from dlbench.sharing import WithheldError, may_not_read, other_owner, user_name
from dlbench.specs.base import Flag, Name, RunName, Spec
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

if TYPE_CHECKING:
    from dlbench.jobs.slurm.scheduler import Slurm

JobState = Literal["submitted", "begun", "unsure", "written", "missing"]
"""unsure: its script was written, and nothing says whether Slurm took it. written: likewise, and it was to be submitted
by hand. begun: its ranks wrote, no id is known."""

WRITTEN = "-"  # Instead of a job's id in `ID.jobs`, a line for each of its runs: its script was written, not submitted.

_LOG = re.compile(r"slurm-(\d+)(_\d+)?\.out")
_ANY_LOG = re.compile(rf"(earlier-)?{_LOG.pattern}")
_EARLIER = re.compile(r"attempt-\d{4}|checkpoints")
_WROTE = re.compile(r"(rank|node)-\d+\..*|record\.json|comm\.json|rendezvous\.json|launch\.log")

FOLDER = ".series"  # Below the folder of all runs; what reads runs passes over names that begin with a dot.
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.05
_MAX_PLANS = 1 << 30  # Bytes of all plans of a series: one has some 10 kB.


@dataclass(frozen=True, kw_only=True)
class SubmissionStatus:
    """How far a series has got."""

    series: SeriesFile
    states: tuple[JobState, ...]  # Of each job.
    ids: tuple[str, ...]  # Slurm's; empty where it is not known.

    @property
    def submitted(self) -> int:
        """Jobs that Slurm took."""
        return sum(state in ("submitted", "begun") for state in self.states)

    @property
    def clusters(self) -> set[str]:
        """Those that took its jobs; an empty name: the one here."""
        return {cluster_of(job_id) for job_id in self.ids if job_id}

    @property
    def known(self) -> bool:
        """Whether Slurm took, or may have taken, any job."""
        return any(state != "missing" for state in self.states)

    @property
    def total(self) -> int:
        return len(self.states)

    @property
    def text(self) -> str:
        """E.g. ``5 of 8 jobs submitted, 1 more may be queued``."""
        unsure, written = self.states.count("unsure"), self.states.count("written")
        more = f", {unsure} more may be queued" if unsure else ""
        more += f", {written} written only" if written else ""
        return f"{self.submitted} of {self.total} jobs submitted{more}"


def standings(root: Path) -> tuple[list[SubmissionStatus], list[str]]:
    """Every series below the folder of all runs, and what is damaged, a line each."""
    found, problems = [], []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found.append(submission_status(root, path.stem))
        except WithheldError:
            continue  # so are its runs, of which that is said
        except IncompleteDataError as error:
            problems.append(str(error))
    return found, problems


def submission_status(root: Path, series_id: str) -> SubmissionStatus:
    """How far one series has got.

    Raises `UserError`: there is none of this name. `IncompleteDataError`: its file, or that of a run, is damaged.
    """
    series = read_series(root, series_id)
    known = known_jobs(root, series_id)
    states, ids = zip(*(_state(root, job, known) for job in series.jobs), strict=True) if series.jobs else ((), ())
    return SubmissionStatus(series=series, states=tuple(states), ids=tuple(ids))


def _state(root: Path, job: SeriesJob, known: dict[str, str]) -> tuple[JobState, str]:
    noted = known.get(job.runs[0], "")
    if noted not in ("", WRITTEN):
        return "submitted", noted
    folders = [RunFolder(root / run_id) for run_id in job.runs]
    for folder in folders:
        submission = read_submission(folder)
        if submission is not None:
            own = submission.reference
            return "submitted", own if job.array_limit is None else array_of(own)
    wrote, job_id = _wrote(folders)
    if wrote:
        return "begun", job_id
    if not any(folder.script.exists() for folder in folders):
        return "missing", ""
    return ("written" if noted == WRITTEN else "unsure"), ""


def _wrote(folders: Sequence[RunFolder]) -> tuple[bool, str]:
    """Whether a job left anything in the folders of its runs, and the id that its log is named by."""
    wrote = False
    for folder in folders:
        try:
            names = [path.name for path in folder.path.iterdir()]
        except OSError:
            continue
        for name in names:
            if found := _LOG.fullmatch(name):
                return True, found[1]
            wrote = wrote or _WROTE.fullmatch(name) is not None
    return wrote, ""


def never_began(folder: RunFolder) -> bool:
    """Whether nothing lies in a run's folder but what its submission wrote, and what the scheduler says of its job.

    What an earlier attempt at the run left does not count.
    """
    submitted = {folder.plan.name, folder.script.name, folder.submission.name, folder.accounting.name}
    try:
        names = {path.name for path in folder.path.iterdir()}
    except OSError:
        return False
    left = (name for name in names - submitted if not _ANY_LOG.fullmatch(name) and not _EARLIER.fullmatch(name))
    return folder.plan.name in names and next(left, None) is None


class SeriesJob(Spec):
    """One job of a series."""

    runs: tuple[RunName, ...] = Field(min_length=1, description="Its runs, in their order.")
    time_limit: str = Field(description="What it asks for, as Slurm writes it; of an array, for each run.")
    array_limit: int | None = Field(
        description="null: one allocation for all. Else a job array, of which this many run at a time; 0: any number."
    )
    comment: str = Field(description="By which Slurm finds the job again: sbatch --comment.")


class SeriesFile(Spec):
    """`.series/ID.json`: what a series that was submitted shall hold."""

    format: Literal["dlbench.series"] = Field("dlbench.series", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    id: Name = Field(description="The series.")
    owner: str = Field(description="Login name of who submitted it; nobody else adds to it.")
    created: str = Field(description="When it was first submitted, UTC, ISO 8601.")
    requests: tuple[str, ...] = Field(description="The commands that asked for it, a line each.")
    scheduler: str = Field("slurm", description="What takes its jobs: system.scheduler.")
    pack: Packing = Field("points", description="Which runs share a job: points, all, runs (none); of the newest.")
    chain: Flag = Field(description="Whether each job waits for the one before.")
    max_jobs: int | None = Field(None, description="Jobs of it in the queue at most; null: any number.")
    max_node_hours: float | None = Field(None, description="What the newest request might cost at most; null: any.")
    python: str = Field(description="Python of the nodes, unless the system names another.")
    jobs: tuple[SeriesJob, ...] = Field(description="All its jobs, in the order in which they are submitted.")


def series_path(root: Path, series_id: str, suffix: str) -> Path:
    """A file of a series: `json`, `plans` or `jobs`."""
    return root / FOLDER / f"{series_id}.{suffix}"


def read_series(root: Path, series_id: str) -> SeriesFile:
    """The file of one series. Raises `UserError`: there is none of this name. `IncompleteDataError`: it is damaged."""
    path = series_path(root, series_id, "json")
    if "/" in series_id or not series_id:
        raise UserError(f"{series_id!a}: is no name of a series")
    try:
        return SeriesFile.model_validate(read_json(path, MAX_JSON))
    except FileNotFoundError:
        raise UserError(f"{root}: holds no series {series_id} that was submitted to Slurm") from None
    except PermissionError as error:
        raise may_not_read(path, error) from None
    except (OSError, ValueError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None


def write_series(root: Path, series: SeriesFile) -> None:
    """Replaces it. Raises `RunError`: it cannot be written."""
    write_json(series_path(root, series.id, "json"), series.model_dump(mode="json"))


def known_jobs(root: Path, series_id: str) -> dict[str, str]:
    """The scheduler's id of each job that was taken, by the job's first run."""
    known = {}
    with suppress(FileNotFoundError):
        lines = read_bytes(series_path(root, series_id, "jobs"), MAX_JSON).decode("utf-8", "replace").split("\n")
        for line in lines[:-1]:  # what follows the last line's end was cut off
            run_id, _, job_id = line.partition(" ")
            known[run_id] = job_id
    return known


def jobs_of_series(root: Path, series: SeriesFile) -> list[Job]:
    """The plans of a series' jobs.

    Raises `IncompleteDataError`: the file of plans is damaged, lacks one, or is of an earlier dlbench.
    """
    path = series_path(root, series.id, "plans")
    plans: dict[str, LaunchPlan] = {}
    try:
        for line in read_bytes(path, _MAX_PLANS).split(b"\n")[:-1]:
            content = parse_json(line)
            kind = CommPlan if content.get("format") == CommPlan.model_fields["format"].default else RunPlan
            plan = kind.model_validate(content)
            plans[plan.run_id] = plan
        return [
            Job(plans=tuple(plans[one] for one in job.runs), time_limit=job.time_limit, array_limit=job.array_limit)
            for job in series.jobs
        ]
    except ValidationError as error:
        raise refused_file(path, kind, error) from None
    except (OSError, ValueError, AttributeError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None
    except KeyError as error:
        raise IncompleteDataError(f"{path}: damaged: it lacks the plan of {error.args[0]}") from None


def is_held(root: Path, series_id: str) -> bool:
    """Whether a process is submitting the series; not where the file system has no locks."""
    try:
        number = descriptor(series_path(root, series_id, "plans"))
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other is of a file system without locks
        return isinstance(error, BlockingIOError)
    finally:
        os.close(number)
    return False


def require_own(root: Path, series_id: str) -> SeriesFile:
    """The file of a series of this user.

    Raises `UserError`: there is none of this name, or it is another user's. `IncompleteDataError`: it is damaged.
    """
    if owner := owner_of_other(root, series_id):
        raise UserError(f"{root}: series {series_id} is of user {owner}, who alone can go on with it")
    return read_series(root, series_id)


def owner_of_other(root: Path, series_id: str) -> str:
    """Who submitted the series of this name; empty if it was this user, or nobody."""
    path = series_path(root, series_id, "json")
    if not path.exists():
        return ""
    if owner := other_owner(path):
        return owner
    owner = read_series(root, series_id).owner
    return "" if owner == user_name() else owner


@contextmanager
def held(root: Path, series_id: str) -> Iterator[int]:
    """Keeps other processes from submitting the series; where the file system has no locks, nothing does.

    Yields a descriptor: a program that inherits it keeps the lock as long as it runs.
    Raises `UserError`: another one does. `RunError`: the file cannot be made.
    """
    with _appending(series_path(root, series_id, "plans")) as file:
        for left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Who only looks (`is_held`) has it for a moment, too.
                if not left:
                    raise UserError(f"series {series_id} is being submitted by another process") from None
                time.sleep(_LOCK_PAUSE_S)
            except OSError:  # no locks
                break
        yield file.fileno()


def append(path: Path, text: str) -> None:
    """Adds whole lines; the rest of a line that was cut off is taken away first.

    Raises `RunError`: the file cannot be written.
    """
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
            raise RunError(f"{path}: cannot be written: is no file")
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None


def _slurm() -> Slurm:
    from dlbench.jobs.slurm.scheduler import Slurm

    return Slurm()


SCHEDULERS: dict[str, Callable[[], Slurm]] = {"slurm": _slurm}


def scheduler_named(name: str) -> Slurm:
    """The scheduler of a name. Raises `UserError`: there is none."""
    if name not in SCHEDULERS:
        raise UserError(f"no scheduler {name}; {nearest(name, SCHEDULERS)}")
    return SCHEDULERS[name]()
