"""Which files hold what a run said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.submission import read_submission
from dlbench.records.folder import RunFolder

_JOB_LOG = re.compile(r"slurm-\d+(_\d+)?\.out")
_RANK_LOG = re.compile(r"rank-\d+\.log")


def logs_of(folder: RunFolder, rank: int | None = None) -> list[Path]:
    """The logs of a run that are there: of its job, of its launcher, and of its ranks.

    Args:
        folder: the run's.
        rank: the log of this rank alone.

    Raises:
        UserError: there is none (yet).
        IncompleteDataError: `submission.json` is damaged.
    """
    names = sorted(path.name for path in folder.path.iterdir())
    if rank is not None:
        if folder.log(rank).exists():
            return [folder.log(rank)]
        raise UserError(
            f"{folder.path}: has no {folder.log(rank).name}: "
            + (
                _told(name for name in names if _RANK_LOG.fullmatch(name))
                or "its ranks write into one log, see without"
            )
        )
    submission = read_submission(folder)
    job_log = [] if submission is None else [folder.path.parent / submission.log]
    own = [folder.path / name for name in names if _JOB_LOG.fullmatch(name)]
    ranks = [folder.path / name for name in names if _RANK_LOG.fullmatch(name)]
    found = [path for path in dict.fromkeys([*job_log, *own, folder.launch_log, *ranks]) if path.is_file()]
    if not found:
        raise UserError(f"{folder.path}: has no log yet; see `dlbench status {folder.path}`")
    return found


def _told(names: Iterable[str]) -> str:
    there = list(names)
    return f"there are {there[0]} to {there[-1]}" if there else ""
