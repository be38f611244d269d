"""All settings of a sweep at one rank count, before they are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.records.scan import Run
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.stats.factors import Pair
from dlbench.stats.pairing import RunKey

Rates = Mapping[RunKey, float]  # By repeat.


@dataclass(frozen=True, kw_only=True)
class SettingRuns:
    """The runs of one setting."""

    runs: tuple[Run, ...]
    measured: tuple[Run, ...]  # Those with figures.
    rates: Rates  # Throughput, samples per second.
    num_reached: int | None  # Runs that met their target; None where runs measure speed.
    speeds: Rates
    """What decides: with a target the reciprocal of the time to it (none where a run missed it), else the rates."""
    rate_logs: Rates  # Logarithms of the rates over the baseline's, of the repeats that both have.
    logs: Rates  # The same of the speeds.
    gain_logs: Rates  # Of a ladder's step: over the one before it; else empty.

    @property
    def plan(self) -> RunPlan:
        """Returns the plan of its first run."""
        return self.runs[0].plan

    @property
    def inert(self) -> tuple[str, ...]:
        """Returns the settings of its runs that had no effect."""
        return tuple(sorted({text for run in self.measured if run.record for text in run.record.inert}))


@dataclass(frozen=True, kw_only=True)
class Draft:
    """All settings at one rank count."""

    settings: tuple[SettingRuns, ...]
    base: int  # The setting that the others are measured against.
    has_default: bool
    is_ladder: bool
    to_target: bool
    first: Sequence[SettingRuns]  # The settings at the smallest rank count.
    levels: Mapping[str, Sequence[AxisValue]]
    contrasts: Mapping[Pair, Rates]

    @property
    def comparisons(self) -> list[Rates]:
        """Returns the log ratios of all that is compared here: settings but the baseline, and pairs of values."""
        others = [one for number, one in enumerate(self.settings) if number != self.base]
        if self.is_ladder:
            return [one.gain_logs for one in others]
        logs = [one.logs for one in others] + [one.rate_logs for one in others]
        return [*logs, *self.contrasts.values()]
