"""`rank-NNNN.status.json`: how far a rank got. Verdicts on dead runs come from here, not from launchers' exit codes."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.specs.base import CountOrZero, Spec

PROGRESS_MARK = "DLBENCH-PROGRESS "
"""What the lines begin with by which rank 0 tells a launcher, on standard output, how far it is."""

MAX_BYTES = 1 << 20
"""Of a status at most: it holds one line."""

_STATUS = re.compile(r"rank-.*\.status\.json", re.DOTALL)

Stage = Literal["starting", "warm-up", "measuring", "finishing", "done", "failed"]


class RankStatus(Spec):
    """The last thing one rank said about itself."""

    format: Literal["dlbench.rank-status"] = Field("dlbench.rank-status", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    rank: CountOrZero = Field(description="The rank, from 0.")
    host: str = Field(description="Host name; under Slurm the node's name.")
    pid: CountOrZero = Field(description="Process id on that host.")
    stage: Stage = Field(description="How far it got.")
    step: int = Field(description="Last step begun when this was written; -1 before the first.")
    updated: str = Field(description="UTC, ISO 8601.")
    reason: str = Field("", description="Why it failed, in one line.")
    exit_code: int | None = Field(None, description="What it exits with; null while it runs.")


class Failure(Spec):
    """`failure.json`: why a launcher gave a run up."""

    format: Literal["dlbench.failure"] = Field("dlbench.failure", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    reason: str = Field(description="What the launcher saw, in one line.")


def write_failure(folder: RunFolder, reason: str) -> None:
    """Says why a run was given up.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(folder.failure, Failure(reason=reason).model_dump(mode="json"))


def write_status(folder: RunFolder, status: RankStatus) -> None:
    """Replaces the status of a rank.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(folder.status(status.rank), status.model_dump(mode="json"))


def read_statuses(folder: RunFolder, *, is_over: bool = False) -> list[RankStatus]:
    """All statuses in a run's folder, by rank.

    Args:
        folder: the run's.
        is_over: whether a record says what became of the run; then a status that may not be read is passed over.

    Raises:
        IncompleteDataError: one of them is damaged, or may not be read.
    """
    result = []
    try:
        names = [entry.name for entry in os.scandir(folder.path) if _STATUS.fullmatch(entry.name)]
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    # Names are sorted and not paths, which compare part by part: a large run has a thousand of them.
    for name in sorted(names):
        path = folder.path / name
        try:
            result.append(RankStatus.model_validate(read_json(path, MAX_BYTES)))
        except PermissionError as error:
            if not is_over:
                raise IncompleteDataError(f"{path}: cannot be read: {error.strerror}") from None
        except (OSError, ValueError, ValidationError) as error:
            why = "not as dlbench writes it" if isinstance(error, ValidationError) else why_unreadable(error)
            raise IncompleteDataError(f"{path}: damaged: {why}; delete it or restore it from a copy") from None
    return sorted(result, key=lambda status: status.rank)
