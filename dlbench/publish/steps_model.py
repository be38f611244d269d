"""The report's plain data on single steps: distribution, outliers, ranks by steps; see `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times of a group by rank count."""

    notes: tuple[str, ...]
