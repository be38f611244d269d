"""`interrupted.json`: a run that stopped in good order on request, and attempts at the same run.

A run that goes on after it, started anew by Slurm in the same folder, is a further attempt: what an earlier one left,
its checkpoints excepted, lies in `attempt-NNNN/`.
"""

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
    """Why and where a run stopped before its end."""

    format: Literal["dlbench.interrupted"] = Field("dlbench.interrupted", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    attempt: Count = Field(description="Which attempt at the run this was, from 1.")
    step: CountOrZero = Field(description="Optimizer steps done then, those before a resume included.")
    checkpoint: str | None = Field(
        None, description="The checkpoint from which the run can go on; null: none was kept."
    )
    at: str = Field(description="UTC, ISO 8601.")

    @property
    def detail(self) -> str:
        """One line."""
        how = f"it can go on from {self.checkpoint}" if self.checkpoint else "it kept no checkpoint, and begins anew"
        return f"interrupted after step {self.step} of attempt {self.attempt}, on request (SIGUSR1); {how}"


def attempt_of(folder: RunFolder) -> int:
    """Which attempt at a run the files in its folder are of, from 1."""
    earlier = (_ATTEMPT.fullmatch(path.name) for path in folder.path.glob("attempt-*"))
    return 1 + max((int(found[1]) for found in earlier if found is not None), default=0)


def last_attempt(folder: RunFolder) -> Interrupted | None:
    """How the attempt before this one ended; None where there was none, or it was killed."""
    before = RunFolder(folder.path / f"attempt-{attempt_of(folder) - 1:04d}")
    try:
        return Interrupted.model_validate(read_json(before.interrupted, MAX_BYTES))
    except (OSError, ValueError):
        return None


def write_interrupted(folder: RunFolder, step: int, checkpoint: str | None) -> None:
    """Says that a run stopped on request. Raises RunError: the file cannot be written."""
    said = Interrupted(attempt=attempt_of(folder), step=step, checkpoint=checkpoint, at=utc_now())
    write_json(folder.interrupted, said.model_dump(mode="json"))
