"""All settings of a sweep at one rank count, before they are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.records.scan import Run
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Pair

Rates = Mapping[RunKey, float]  # By repeat.


@dataclass(frozen=True, kw_only=True)
class SettingRuns:
    """The runs of one setting."""

    runs: tuple[Run, ...]
    measured: tuple[Run, ...]  # Those with figures.
    rates: Rates  # Throughput, samples per second.
    num_reached: int | None  # Runs that met their target; None if runs measure speed.
    speeds: Rates  # The figure that decides: 1 / time to the target (empty if a run missed it), else rates.
    rate_logs: Rates  # Logarithms of the rates over the baseline's, of the repeats that both have.
    logs: Rates  # Logarithms of the speeds over the baseline's.
    gain_logs: Rates  # Logarithms of the rates of a ladder's step over those of the step before; else empty.

    @property
    def plan(self) -> RunPlan:
        return self.runs[0].plan

    @property
    def inert(self) -> tuple[str, ...]:
        records = [run.record for run in self.measured if run.record]
        return tuple(sorted(set().union(*(record.inert for record in records))))


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
        others = [setting for index, setting in enumerate(self.settings) if index != self.base]
        if self.is_ladder:
            return [setting.gain_logs for setting in others]
        logs = [setting.logs for setting in others] + [setting.rate_logs for setting in others]
        return [*logs, *self.contrasts.values()]
