"""The answers of a batch scheduler (`dlbench.jobs.slurm.scheduler`), and `submission.json`, the job of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError
from dlbench.opening import may_not_read, read_json, user_name, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now

if TYPE_CHECKING:
    from dlbench.jobs.scripts.job import Job

Phase = Literal["waiting", "running", "over"]


class RefusedError(RunError):
    """The scheduler refused a job."""


class QueueFullError(RefusedError):
    """The scheduler refused a job because of a limit on the number of jobs; it may accept it later."""


class SubmissionUnknownError(RunError):
    """The answer to a submission was not clear: the job may be queued."""


class SchedulerUnavailableError(RunError):
    """The queue cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a scheduler to a submission: exactly one of the first three fields is set."""

    job_id: str = ""
    doubt: str = ""  # Why it is unknown whether the job was queued.
    refusal: str = ""  # Why the job was refused.
    is_full: bool = False  # It was refused because of a limit on the number of jobs.


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One job, or one element of a job array, as a scheduler lists it."""

    job_id: str  # As sbatch prints it; ARRAY_NUMBER for an element of an array.
    state: str  # Slurm's word, e.g. PENDING.
    phase: Phase
    reason: str = ""  # Slurm's word for why it is pending.
    advice: str = ""  # Meaning of the reason and a remedy; empty if the job will start by itself.
    is_stuck: bool = False  # Its request can never be satisfied.
    starts: str = ""  # Expected start in the scheduler's local time; empty if unknown.
    comment: str = ""
    folder: str = ""  # Working directory.


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The jobs that a scheduler lists, including those that ended recently."""

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)  # By id.
    unanswered: str = ""  # Why jobs may be missing from the list; empty if the scheduler answered.
    no_history: str = ""  # Why accounting does not list ended jobs; empty if it was asked.

    def of(self, job_id: str) -> list[QueuedJob]:
        """Returns the job of an id, or the elements of a job array."""
        if job_id in self.jobs:
            return [self.jobs[job_id]]
        return self._elements.get(job_id, [])

    def active(self, job_id: str) -> list[QueuedJob]:
        """Returns the job or the elements that have not ended."""
        return [job for job in self.of(job_id) if job.phase != "over"]

    def find(self, folder: RunFolder, comment: str) -> str:
        """Returns the id of the job with this comment, else of an active job submitted from this folder, else "". A job
        that has ended may be an earlier one of the run, so that its folder does not count.
        """
        by_comment = [job for job in self.jobs.values() if comment and job.comment == comment]
        by_folder = [job for job in self.jobs.values() if job.folder == str(folder.path) and job.phase != "over"]
        for job in (*by_comment, *by_folder):
            return array_of(job.job_id) or job.job_id
        return ""

    @cached_property
    def _elements(self) -> dict[str, list[QueuedJob]]:
        by_array: dict[str, list[QueuedJob]] = {}
        for job in self.jobs.values():
            if array := array_of(job.job_id):
                by_array.setdefault(array, []).append(job)
        return by_array


def cluster_of(job_id: str) -> str:
    """Returns the cluster of a job id, ``c`` of ``12;c``; empty for the local cluster."""
    return job_id.partition(";")[2]


def array_of(job_id: str) -> str:
    """Returns the array id of an element, ``12`` of ``12_3`` and ``12;c`` of ``12_3;c``; empty for any other job."""
    array, underscore, element = job_id.partition("_")
    if not underscore:
        return ""
    _, semicolon, cluster = element.partition(";")
    return f"{array}{semicolon}{cluster}"


Log = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}/slurm-[A-Za-z0-9._-]{1,100}\.out$")]
"""A log in the folder of a run next to this one. The pattern matters, because the content of the file is printed."""


class Submission(Spec):
    """`submission.json`: the Slurm job of a run."""

    format: Literal["dlbench.submission"] = Field("dlbench.submission", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    job_id: str = Field(description="Slurm's job id without the cluster; ARRAY_NUMBER for an element of an array.")
    cluster: str = Field("", description="The cluster of the job, if sbatch named one.")
    owner: str = Field("", description="Login name of the user who submitted it; empty: unknown.")
    scheduler: str = Field("slurm", description="The scheduler of the job (system.scheduler).")
    command: tuple[str, ...] = Field(description="The sbatch command line.")
    variables: tuple[str, ...] = Field(
        (), description="Names of the environment variables that the job was given (slurm.export); ALL: all."
    )
    submitted: str = Field(description="Time of the submission, UTC, ISO 8601.")
    runs: tuple[RunName, ...] = Field(
        (), description="All runs of the job in their order if there are several; else empty."
    )
    log: Log = Field(description="Slurm's output, from the folder of all runs: RUN/slurm-ID.out.")

    @property
    def other_owner(self) -> str:
        """The user who submitted it; empty if it was this user or is unknown."""
        return "" if self.owner == user_name() else self.owner

    @property
    def reference(self) -> str:
        """The job as Slurm's commands name it: `ID` or `ID;CLUSTER`."""
        return f"{self.job_id};{self.cluster}" if self.cluster else self.job_id


def keep_submission(
    job: Job,
    folders: Sequence[RunFolder],
    job_id: str,
    command: Sequence[str],
    variables: Sequence[str],
    *,
    submitted: str = "",
) -> None:
    """Writes `submission.json` into the folder of each run of a job. `job_id`: `ID` or `ID;CLUSTER`. `submitted`: UTC,
    ISO 8601; empty: now. Raises `RunError`: a file cannot be written.
    """
    now, first_run, owner = submitted or utc_now(), folders[0].path.name, user_name()
    bare_id, _, cluster = job_id.partition(";")
    shares_job = len(folders) > 1 and not job.is_array
    for number, folder in enumerate(folders, 1):
        run_job_id = f"{bare_id}_{number}" if job.is_array else bare_id
        submission = Submission(
            job_id=run_job_id,
            cluster=cluster,
            owner=owner,
            scheduler=job.shape.system.scheduler,
            command=tuple(command),
            variables=tuple(variables),
            submitted=now,
            runs=job.run_ids if shares_job else (),
            log=f"{first_run}/slurm-{run_job_id}.out",
        )
        write_json(folder.submission, submission.model_dump(mode="json"))


def read_submission(folder: RunFolder) -> Submission | None:
    """Reads how a run was submitted; None if it was not. Raises `IncompleteDataError`: the file is damaged."""
    try:
        return Submission.model_validate(read_json(folder.submission, MAX_JSON))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise may_not_read(folder.submission, error) from None
    except (OSError, ValueError) as error:
        raise IncompleteDataError(
            f"{folder.submission}: damaged: {why_unreadable(error)}; delete it or restore it from a copy"
        ) from None
