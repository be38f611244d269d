"""`rank-NNNN.status.json`: how far a rank got. Verdicts on dead runs come from here, not from launchers' exit codes."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.specs.base import CountOrZero, Spec

PROGRESS_MARK = "DLBENCH-PROGRESS "
"""What the lines begin with by which rank 0 tells a launcher, on standard output, how far it is."""

Stage = Literal["starting", "warm-up", "measuring", "finishing", "done", "failed"]


class RankStatus(Spec):
    """The last thing one rank said about itself."""

    format: Literal["dlbench.rank-status"] = "dlbench.rank-status"
    version: Literal[1] = 1
    rank: CountOrZero
    host: str
    pid: CountOrZero
    stage: Stage = Field(description="How far it got.")
    step: int = Field(description="Last step begun when this was written; -1 before the first.")
    updated: str = Field(description="UTC, ISO 8601.")
    reason: str = Field("", description="Why it failed, in one line.")
    exit_code: int | None = Field(None, description="What it exits with; null while it runs.")


def write_status(folder: RunFolder, status: RankStatus) -> None:
    """Replaces the status of a rank.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(folder.status(status.rank), status.model_dump(mode="json"))


def read_statuses(folder: RunFolder) -> list[RankStatus]:
    """All statuses in a run's folder, by rank.

    Raises:
        IncompleteDataError: one of them is damaged.
    """
    result = []
    for path in sorted(folder.path.glob("rank-*.status.json")):
        try:
            result.append(RankStatus.model_validate(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, ValidationError, RecursionError):
            raise IncompleteDataError(f"{path}: damaged; delete it or restore it from a copy") from None
    return sorted(result, key=lambda status: status.rank)
