"""`submission.json`: which job a run became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError
from dlbench.jobs.scripts.job import Job
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.sharing import may_not_read, user_name
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now

Log = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}/slurm-[A-Za-z0-9._-]{1,100}\.out$")]
"""A file in the folder of a run beside this one: what is named here is printed."""


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
