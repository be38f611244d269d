"""What a campaign hears of a batch scheduler, `dlbench.jobs.slurm.scheduler`; and which job a run became.

The job of a run stands in its `submission.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError
from dlbench.jobs.scripts.job import Job
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.sharing import may_not_read, user_name
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now

Phase = Literal["waiting", "running", "over"]


class RefusedError(RunError):
    """The scheduler did not take a job, for certain."""


class QueueFullError(RefusedError):
    """It did not take a job because of a limit on jobs, which others may leave when they end."""


class DoubtError(RunError):
    """The scheduler said neither yes nor no: the job may be queued."""


class UnansweredError(RunError):
    """The scheduler does not say what is queued."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a scheduler said to a submission: one of the first three."""

    job_id: str = ""
    doubt: str = ""  # Why the job may be queued all the same.
    refusal: str = ""  # Why the job was not taken, for certain.
    is_full: bool = False  # It was refused for a limit on the number of jobs.


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One job, or one element of an array, as a scheduler lists it."""

    job_id: str  # As the scheduler printed it when it took the job; of an element of an array ARRAY_NUMBER.
    state: str  # The scheduler's word, e.g. PENDING.
    phase: Phase
    reason: str = ""  # Why it waits, the scheduler's word.
    advice: str = ""  # What the reason means, and what to do; empty where it will start by itself.
    is_stuck: bool = False  # It never starts as it was asked for.
    starts: str = ""  # When the scheduler expects it to start, its local time; empty where it does not say.
    comment: str = ""
    folder: str = ""  # Its working directory.


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What a scheduler says of jobs, those that ended lately, too."""

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)  # By id.
    unanswered: str = ""  # Why jobs that are left out may still be known; empty if the scheduler answered.
    no_history: str = ""  # Why nothing is known of jobs left out, though they have ended; empty if they were asked for.

    def of(self, job_id: str) -> list[QueuedJob]:
        """The job of an id; of an array's, its elements."""
        if job_id in self.jobs:
            return [self.jobs[job_id]]
        return self._elements.get(job_id, [])

    def active(self, job_id: str) -> list[QueuedJob]:
        """Those of them that have not ended."""
        return [job for job in self.of(job_id) if job.phase != "over"]

    def find(self, folder: RunFolder, comment: str) -> str:
        """The id of the job with this comment, else of the one that was submitted from this folder; empty if none.

        By its folder alone no job is found that has ended: the run may have had another one before.
        """
        by_comment = (job for job in self.jobs.values() if comment and job.comment == comment)
        by_folder = (job for job in self.jobs.values() if job.folder == str(folder.path) and job.phase != "over")
        found = next(by_comment, None) or next(by_folder, None)
        return "" if found is None else array_of(found.job_id) or found.job_id

    @cached_property
    def _elements(self) -> dict[str, list[QueuedJob]]:
        found: dict[str, list[QueuedJob]] = {}
        for job in self.jobs.values():
            if array := array_of(job.job_id):
                found.setdefault(array, []).append(job)
        return found


def cluster_of(job_id: str) -> str:
    """The cluster that took a job, e.g. ``c`` of ``12;c``; empty: the one here."""
    return job_id.partition(";")[2]


def array_of(job_id: str) -> str:
    """The id of the array of an element, e.g. ``12`` of ``12_3`` and ``12;c`` of ``12_3;c``; empty of another job."""
    array, mark, rest = job_id.partition("_")
    _, semicolon, cluster = rest.partition(";")
    return f"{array}{semicolon}{cluster}" if mark else ""


Log = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}/slurm-[A-Za-z0-9._-]{1,100}\.out$")]
"""A file in the folder of a run next to this one: what is named here is printed."""


class Submission(Spec):
    """`submission.json`: how a run went to Slurm."""

    format: Literal["dlbench.submission"] = Field("dlbench.submission", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    job_id: str = Field(description="Slurm's job id, without the cluster; of an element of an array, ARRAY_NUMBER.")
    cluster: str = Field("", description="The cluster that took the job, where sbatch named one.")
    owner: str = Field("", description="Login name of who submitted it; empty: not known.")
    scheduler: str = Field("slurm", description="What took the job: system.scheduler.")
    command: tuple[str, ...] = Field(description="The sbatch command line.")
    variables: tuple[str, ...] = Field(
        (), description="Names of the variables that sbatch, and so the job, was given (slurm.export); ALL: every one."
    )
    submitted: str = Field(description="UTC, ISO 8601.")
    runs: tuple[RunName, ...] = Field(
        (), description="All runs of the job in their order, where it holds several; empty: this run alone."
    )
    log: Log = Field(description="Slurm's output, from the folder of all runs: RUN/slurm-ID.out.")

    @property
    def other_owner(self) -> str:
        """Who submitted it; empty if it was this user, or is not known."""
        return "" if self.owner == user_name() else self.owner

    @property
    def reference(self) -> str:
        """The job as the scheduler is asked for it: `ID` or `ID;CLUSTER`."""
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
    """Writes into the folder of each run of a job which job it is.

    `job_id`: as sbatch printed it, `ID` or `ID;CLUSTER`; of an array that of the whole. `variables`: names of those
    that the job was given. `submitted`: UTC, ISO 8601; empty: now.
    Raises `RunError`: a file cannot be written.
    """
    now, first, owner = submitted or utc_now(), folders[0].path.name, user_name()
    bare, _, cluster = job_id.partition(";")
    for number, folder in enumerate(folders, 1):
        own = f"{bare}_{number}" if job.is_array else bare
        submission = Submission(
            job_id=own,
            cluster=cluster,
            owner=owner,
            scheduler=job.shape.system.scheduler,
            command=tuple(command),
            variables=tuple(variables),
            submitted=now,
            runs=job.run_ids if len(folders) > 1 and not job.is_array else (),
            log=f"{first}/slurm-{own}.out",
        )
        write_json(folder.submission, submission.model_dump(mode="json"))


def read_submission(folder: RunFolder) -> Submission | None:
    """How a run was submitted; None for a run that was not. Raises `IncompleteDataError`: the file is damaged."""
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
