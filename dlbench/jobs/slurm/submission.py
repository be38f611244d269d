"""`submission.json`: which job a run became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError
from dlbench.jobs.scripts.batch import Job
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.specs.base import RunName, Spec
from dlbench.units import utc_now


class Submission(Spec):
    """`submission.json`: how a run went to Slurm."""

    format: Literal["dlbench.submission"] = Field("dlbench.submission", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    job_id: str = Field(description="Slurm's job id, without the cluster.")
    command: tuple[str, ...] = Field(description="The sbatch command line.")
    submitted: str = Field(description="UTC, ISO 8601.")
    runs: tuple[RunName, ...] = Field(
        (),
        description="All runs of the job in their order, where it holds several (submit --ab): Slurm's output lies in "
        "the folder of the first; empty: this run alone.",
    )


def keep_submission(job: Job, folders: Sequence[RunFolder], job_id: str, command: Sequence[str]) -> Submission:
    """Writes into the folder of each run of a job which job it is.

    Raises:
        RunError: a file cannot be written.
    """
    submission = Submission(
        job_id=job_id,
        command=tuple(command),
        submitted=utc_now(),
        runs=tuple(plan.run_id for plan in job) if len(job) > 1 else (),
    )
    for folder in folders:
        write_json(folder.submission, submission.model_dump(mode="json"))
    return submission


def read_submission(folder: RunFolder) -> Submission | None:
    """How a run was submitted; None for a run that was not.

    Raises:
        IncompleteDataError: the file is damaged.
    """
    try:
        return Submission.model_validate(read_json(folder.submission, MAX_JSON))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise IncompleteDataError(f"{folder.submission}: cannot be read: {error.strerror}") from None
    except (OSError, ValueError, ValidationError) as error:
        why = "not as dlbench writes it" if isinstance(error, ValidationError) else why_unreadable(error)
        raise IncompleteDataError(f"{folder.submission}: damaged: {why}; delete it or restore it from a copy") from None
