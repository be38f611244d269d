"""Moments of a run as rank 0 saw them, by MLPerf logging's names, and the clocks behind them."""

from __future__ import annotations

import time

from dlbench.records.record import Event


class Events:
    """Collects events; the first is the process's start.

    Args:
        started: monotonic time of the process's start, seconds.
    """

    def __init__(self, started: float) -> None:
        self.all: list[Event] = []
        self._offset = time.time() - time.monotonic()
        self._run_start = started
        self.resumed_s = 0.0
        """Wall time that a resumed run had spent before, seconds."""
        self.add("init_start", moment=started)

    def add(
        self,
        key: str,
        *,
        moment: float | None = None,
        value: float | int | str | None = None,
        epoch: float | None = None,
        step: int | None = None,
        samples: int | None = None,
        status: str | None = None,
    ) -> None:
        """Notes that something happens now, or at a moment of the monotonic clock."""
        time_ms = round(((time.monotonic() if moment is None else moment) + self._offset) * 1000)
        self.all.append(
            Event(key=key, time_ms=time_ms, value=value, epoch=epoch, step=step, samples=samples, status=status)
        )

    def start_run(self) -> None:
        """Initialisation ends and the run begins: from here on data may be touched."""
        self.add("init_stop")
        self._run_start = time.monotonic()
        self.add("run_start")

    @property
    def wall_s(self) -> float:
        """Since run_start, seconds; what was resumed adds up."""
        return time.monotonic() - self._run_start + self.resumed_s
