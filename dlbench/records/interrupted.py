"""`interrupted.json`: a run that stopped on request. If Slurm restarts it, earlier attempts are in `attempt-NNNN/`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from dlbench.opening import read_json
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.status import MAX_BYTES
from dlbench.specs.base import Count, CountOrZero, Spec
from dlbench.units import utc_now

_ATTEMPT = re.compile(r"attempt-(\d{4})")


class Interrupted(Spec):
    """The step and checkpoint at which a run stopped on request."""

    format: Literal["dlbench.interrupted"] = Field("dlbench.interrupted", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    attempt: Count = Field(description="Number of the attempt, from 1.")
    step: CountOrZero = Field(description="Optimizer steps so far, with those before a resume.")
    checkpoint: str | None = Field(None, description="Checkpoint to resume from; null: none.")
    at: str = Field(description="UTC, ISO 8601.")

    @property
    def detail(self) -> str:
        resume = "it has no checkpoint and must start again"
        if self.checkpoint:
            resume = f"it can resume from {self.checkpoint}"
        return f"interrupted after step {self.step} of attempt {self.attempt}, on request (SIGUSR1); {resume}"


def attempt_of(folder: RunFolder) -> int:
    """Returns the number of the attempt whose files are in a run's folder, from 1."""
    earlier = (_ATTEMPT.fullmatch(path.name) for path in folder.path.glob("attempt-*"))
    return 1 + max((int(match[1]) for match in earlier if match is not None), default=0)


def last_attempt(folder: RunFolder) -> Interrupted | None:
    """Returns the interruption of the attempt before; None if there was none, or it was killed."""
    before = RunFolder(folder.path / f"attempt-{attempt_of(folder) - 1:04d}")
    try:
        return Interrupted.model_validate(read_json(before.interrupted, MAX_BYTES))
    except (OSError, ValueError):
        return None


def write_interrupted(folder: RunFolder, step: int, checkpoint: str | None) -> None:
    """Records that a run stopped on request. Raises RunError: the file cannot be written."""
    content = Interrupted(attempt=attempt_of(folder), step=step, checkpoint=checkpoint, at=utc_now())
    write_json(folder.interrupted, content.model_dump(mode="json"))
