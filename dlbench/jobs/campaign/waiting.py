"""Waits until nothing more is to come of a series."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import IncompleteDataError
from dlbench.jobs.campaign.completing import EVERY_S, sleep
from dlbench.jobs.campaign.file import is_held
from dlbench.jobs.campaign.outlook import Outlook, counted, outlooks
from dlbench.jobs.campaign.standing import Standing, standing
from dlbench.records.collectives_scan import read_launched
from dlbench.records.scan import LaunchedRun

_FIRST_S = 2.0
"""The first pause; each is twice the one before, up to what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a series stands."""

    standing: Standing
    runs: dict[str, Outlook]
    """By run id; a run that was not submitted has none."""
    is_over: bool
    """Nothing more is to come."""

    @property
    def is_valid(self) -> bool:
        """Every run of it is there and valid."""
        wanted = [run_id for job in self.standing.series.jobs for run_id in job.runs]
        return all(run_id in self.runs and self.runs[run_id].state == "valid" for run_id in wanted)

    @property
    def text(self) -> str:
        """E.g. ``series s: 37 of 40 runs valid, 3 PENDING``."""
        return f"series {self.standing.series.id}: {counted(self.standing, self.runs)}"


class Watch:
    """Looks at a series again and again; what has a record is read once."""

    def __init__(self, root: Path, series_id: str) -> None:
        self._root, self._id = root, series_id
        self._recorded: dict[str, Outlook] = {}
        self._ended: set[str] = set()
        """Runs whose job had ended without a record at the look before: the record may come late."""

    def look(self) -> Outcome:
        """How the series stands now; the scheduler is asked once.

        Raises:
            UserError: there is no such series.
            IncompleteDataError: its file, or that of a run, is damaged.
        """
        now = standing(self._root, self._id)
        wanted = [run_id for job in now.series.jobs for run_id in job.runs]
        left = [run_id for run_id in wanted if run_id not in self._recorded]
        read = [run for run in map(self._read, left) if run is not None]
        found, problems = outlooks(read)
        if problems:
            raise IncompleteDataError(problems[0])
        told = {one.run_id: one for one in found}
        self._recorded |= {run.plan.run_id: told[run.plan.run_id] for run in read if run.recorded is not None}
        open_runs = [run_id for run_id in left if run_id not in self._recorded]
        ended = {run_id for run_id in open_runs if run_id in told and told[run_id].ahead == "nothing"}
        is_settled = all(run_id in ended & self._ended or self._is_given_up(told.get(run_id)) for run_id in open_runs)
        self._ended = ended
        return Outcome(
            standing=now,
            runs={**self._recorded, **told},
            is_over=is_settled and not (now.submitted < now.total and is_held(self._root, self._id)),
        )

    def _read(self, run_id: str) -> LaunchedRun | None:
        path = self._root / run_id
        return read_launched(path) if (path / "plan.json").exists() else None

    def _is_given_up(self, one: Outlook | None) -> bool:
        """Whether a run was never submitted, or nobody knows: whoever submits the series is looked for apart."""
        return one is None or (not one.job and one.state == "incomplete")


def wait(
    root: Path,
    series_id: str,
    check: Callable[[], None],
    tell: Callable[[str], None],
    timeout_s: float,
    every_s: float = EVERY_S,
) -> Outcome:
    """Waits for a series; returns how it stands when it is over, or after the time.

    Args:
        root: folder of all runs, absolute.
        series_id: the series.
        check: called twice a second; what it raises is passed on.
        tell: told how the series stands, when that changes.
        timeout_s: seconds at most.
        every_s: seconds between two looks, of which each asks the scheduler once.

    Raises:
        UserError: there is no such series.
        IncompleteDataError: its file, or that of a run, is damaged.
    """
    end = time.monotonic() + timeout_s
    watch, pause, told = Watch(root, series_id), min(_FIRST_S, every_s), ""
    while True:
        now = watch.look()
        if now.is_over or time.monotonic() >= end:
            return now
        if now.text != told:
            told = now.text
            tell(told)
        sleep(min(pause, max(end - time.monotonic(), 0.0)), check)
        pause = min(2 * pause, every_s)
