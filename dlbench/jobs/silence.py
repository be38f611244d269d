"""Ranks that all hang at once, which none of their watchdogs can tell: all are stopped, or the whole machine was."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from dlbench.records.folder import RunFolder
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

MARGIN_S = 60.0
"""Beyond the time after which ranks end themselves: from their first status to their watchdogs they import torch."""

_LOOK_S = 5.0
"""How often statuses are looked at; rank 0 tells how far it is about as often."""


class Silence:
    """How long no rank of a run has given a sign of life: written a status, or told the launcher how far it is.

    Args:
        folder: of the run.
        plan: says after what time without progress a rank ends itself.
    """

    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._folder = folder
        self._limit_s = _stall_timeout_s(plan) + MARGIN_S
        self._newest = 0
        self._since = time.monotonic()
        self._next_look = 0.0

    def heard(self) -> None:
        """Rank 0 told something; called from another thread."""
        self._since = max(self._since, time.monotonic())

    def reason(self) -> str:
        """Why the run is given up; empty while it is not."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            # Two times of the file system's own clock are compared, which may differ from this machine's.
            newest = self._newest_change()
            if newest != self._newest:
                self._newest, self._since = newest, now
        silent = now - self._since
        if silent <= self._limit_s:
            return ""
        return f"no rank gave a sign of life for {silent:.0f} s (stall_timeout_s and {MARGIN_S:.0f} s): all hang"

    def _newest_change(self) -> int:
        newest = self._newest
        with suppress(OSError), os.scandir(self._folder.path) as entries:
            for entry in entries:
                if entry.name.endswith(".status.json"):
                    with suppress(OSError):
                        newest = max(newest, entry.stat(follow_symlinks=False).st_mtime_ns)
        return newest


def _stall_timeout_s(plan: LaunchPlan) -> float:
    if isinstance(plan, RunPlan):
        return plan.measure.stall_timeout_s
    if isinstance(plan, CommPlan):
        return plan.stall_timeout_s
    raise TypeError(type(plan).__name__)
