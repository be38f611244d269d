"""Horovod's autotuner: what it is started with, what its log says, what it cost.

Its chain of parameters is the fusion threshold (0 to 64 MiB) with the cycle time (1 to 100 ms), searched together, and
four switches (parameter_manager.cc of Horovod 0.28). A variable that is set leaves the search, so threshold and cycle
time are not set, and the switches are: two act on no CPU build and would double the search each, the cache is on by
default. The default threshold of 128 MiB lies outside of what is searched, and the search begins with cycles of 5 to
50 ms: tuning steps are slow ones.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.records.exchange import AutotuneResult, ExchangeResult
from dlbench.specs.engine import HorovodSettings

SEARCHED = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")
"""Variables that must not be set, or Horovod does not search their values."""


def tuning_variables(settings: HorovodSettings, log: Path) -> dict[str, str]:
    """Environment of a run with the autotuner on."""
    return {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": str(settings.autotune_warmup_samples),
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(settings.autotune_steps_per_sample),
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(settings.autotune_max_samples),
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_CACHE_CAPACITY": "1024",
    }


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One row of the log."""

    cycle_time_ms: float
    fusion_threshold_bytes: float
    score: float
    """Bytes per microsecond."""


def parse_log(text: str) -> tuple[TuningRow, ...]:
    """The complete rows of a log; a row that is still being written is left out.

    Horovod writes a blank after one comma of its rows, but not of its header.
    """
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = []
    for row in csv.DictReader(lines, skipinitialspace=True):
        try:
            found = TuningRow(
                cycle_time_ms=float(row["cycle_time_ms"]),
                fusion_threshold_bytes=float(row["tensor_fusion_threshold"]) * 2**20,
                score=float(row["score"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        rows.append(found)
    return tuple(rows)


class TuningWatch:
    """Follows the log on rank 0, from step to step."""

    def __init__(self, settings: HorovodSettings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._size = -1
        self._rows: tuple[TuningRow, ...] = ()
        self._settled_step: int | None = None

    @property
    def _evaluations(self) -> int:
        """Settings that a whole search tries; its log then holds one row more, with the choice."""
        return self._settings.autotune_max_samples + 1

    @property
    def has_settled(self) -> bool:
        """Whether the search is over."""
        return self._settled_step is not None

    def look(self, steps: int) -> None:
        """Reads what the log has got since, after so many steps of the run."""
        if self.has_settled or not self._log.exists():
            return
        size = self._log.stat().st_size
        if size == self._size:
            return
        self._size = size
        self._rows = parse_log(self._log.read_text(encoding="utf-8", errors="replace"))
        if len(self._rows) > self._evaluations:
            self._settled_step = steps

    def result(self) -> AutotuneResult:
        """As of the last look; the cost is not known here (see `tuning_cost_s`)."""
        chosen = self._rows[-1] if self.has_settled else None
        return AutotuneResult(
            evaluations=min(len(self._rows), self._evaluations),
            planned_steps=self._settings.autotune_steps,
            finished=self.has_settled,
            settled_step=self._settled_step,
            fusion_threshold_bytes=None if chosen is None else chosen.fusion_threshold_bytes,
            cycle_time_ms=None if chosen is None else chosen.cycle_time_ms,
            score=None if chosen is None or not math.isfinite(chosen.score) else chosen.score,
        )


def tuning_cost_s(step_s: Sequence[float], settled_step: int | None) -> float | None:
    """What tuning took beyond training: its steps, less as many at the median of those afterwards; not below zero.

    Args:
        step_s: times of all steps of the run, in order, seconds.
        settled_step: steps until the search was over; None: it was not.
    """
    if settled_step is None or not step_s[settled_step:]:
        return None
    after = statistics.median(step_s[settled_step:])
    return max(0.0, sum(step_s[:settled_step]) - settled_step * after)


def with_tuning_cost(exchange: ExchangeResult | None, step_s: Sequence[float]) -> ExchangeResult | None:
    """A run's exchange with what the autotuner took from its steps."""
    if exchange is None or exchange.autotune is None:
        return exchange
    cost_s = tuning_cost_s(step_s, exchange.autotune.settled_step)
    return exchange.model_copy(update={"autotune": exchange.autotune.model_copy(update={"cost_s": cost_s})})
