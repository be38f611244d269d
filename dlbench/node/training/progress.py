"""Tells how far a run is: the rank's status file, and rank 0's lines for whoever watches."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from dlbench.errors import RunError
from dlbench.node.ranks import RankPlace
from dlbench.records.folder import RunFolder
from dlbench.records.status import (
    PROGRESS_MARK,
    STATUS_PERIOD_S,
    FailureKind,
    RankStatus,
    Stage,
    write_status,
)
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import format_bytes, utc_now

PLAIN_PERIOD_S = 10.0
LAUNCHER_PERIOD_S = 0.5


class Progress:
    """Counts steps of training, or points of the collective benchmark.

    What it writes between stages is written by `tick`, off the measured thread.
    """

    def __init__(self, plan: LaunchPlan, folder: RunFolder, place: RankPlace) -> None:
        self._run_id = plan.run_id
        self._folder = folder
        self._place = place
        self._counted, self._warmup, self._total = _extent(plan)
        self._for_launcher = os.environ.get("DLBENCH_PROGRESS") == "launcher"
        self._told = self._written = 0.0
        self._lock = threading.Lock()
        self.step = -1
        self.stage: Stage = "starting"

    def expect(self, steps: int, warmup: int) -> None:
        """Tells how many steps there will be at most, which not every plan says, and how many are warm-up."""
        self._total, self._warmup = steps, warmup

    def enter(self, stage: Stage, exit_code: int | None = None) -> None:
        """A new stage begins; it is on disk when this returns."""
        with self._lock:
            self.stage = stage
            self._write(exit_code=exit_code)
        self._tell(stage)

    def fail(self, reason: str, exit_code: int, kind: FailureKind) -> None:
        """This rank has failed; that is on disk when this returns. What it said first stands.

        Raises:
            RunError: the status cannot be written.
        """
        failed_at = utc_now()  # before the lock, for which a slow disk may have it wait
        with self._lock:
            if self.stage == "failed":
                return
            self.stage = "failed"
            self._write(reason=reason, exit_code=exit_code, failed_at=failed_at, failure=kind)
        self._tell(f"failed: {reason}")

    def on_step(self, step: int) -> None:
        """A step of training begins."""
        self.step = step
        if step == 0 or step == self._warmup:
            self.enter("warm-up" if step < self._warmup else "measuring")
            return
        self._tell_now_and_then(self.stage)

    def on_staging(self, there: int, needed: int) -> None:
        """So many bytes of those that are needed are staged, over all nodes; 0 of 0 at the start."""
        text = f"staging, {format_bytes(there)} of {format_bytes(needed)}" if needed else "staging"
        if self.stage != "staging":
            self.enter("staging")
            return
        self._tell_now_and_then(text)

    def on_point(self, number: int, of: int, text: str) -> None:
        """Point `number`, from 0, of so many of the collective benchmark begins; `text` says which."""
        self.step, self._total = number, of
        if self.stage != "measuring":
            self.enter("measuring")
            return
        self._tell_now_and_then(text)

    def tick(self) -> None:
        """Writes the status if it has grown old; called about once a second by the watchdog's thread."""
        with self._lock, suppress(RunError):  # a full disk is told by the training thread, which needs it
            if self.stage not in ("done", "failed") and time.monotonic() - self._written > STATUS_PERIOD_S:
                self._write()

    def _write(self, **more: Any) -> None:
        self._written = time.monotonic()
        status = RankStatus(
            rank=self._place.rank,
            host=self._place.host,
            pid=os.getpid(),
            stage=self.stage,
            step=self.step,
            updated=utc_now(),
            **more,
        )
        write_status(self._folder, status)

    def _tell_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._told > (LAUNCHER_PERIOD_S if self._for_launcher else PLAIN_PERIOD_S):
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self._place.rank != 0:
            return
        self._told = time.monotonic()
        if self._for_launcher:
            line = PROGRESS_MARK + json.dumps({"step": self.step + 1, "of": self._total, "stage": text})
        else:
            line = f"dlbench {self._run_id}: {text}, {self._counted} {self.step + 1} of {self._total}"
        print(line, file=sys.stdout, flush=True)


def _extent(plan: LaunchPlan) -> tuple[str, int, int]:
    """What is counted, how many of them are warm-up, and how many there are, as far as the plan says."""
    if isinstance(plan, RunPlan):
        return "step", plan.measure.warmup_steps, plan.measure.warmup_steps + plan.measure.measured_steps
    if isinstance(plan, CommPlan):
        carriers = len(plan.comm.algorithms) + len(plan.comm.backends)
        return "point", 0, carriers * len(plan.comm.sizes)
    raise TypeError(type(plan).__name__)
