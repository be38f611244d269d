"""The report's plain data on where the lost percent goes; see `model`."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate
from dlbench.views.causes.diagnosis_model import DiagnosedGroup, NodeHistory


@dataclass(frozen=True, kw_only=True)
class EfficiencyFactor:
    """One factor of the efficiency at one rank count; see `dlbench.views.waterfall.numbers`."""

    name: str
    """One of `dlbench.views.waterfall.numbers.FACTORS`."""
    own: Estimate | None
    """This rank count by itself, a fraction; None for `compute`, which is known against a baseline only."""
    relative: Estimate
    """Against the baseline, a fraction: above 1 where this rank count does better. They multiply to the efficiency."""
    level: float
    """Product of this factor and those before it (1)."""
    step: float
    """What a waterfall takes off here (1); these sum to 1 - efficiency."""


@dataclass(frozen=True, kw_only=True)
class FactoredPoint:
    """The factors of one rank count."""

    ranks: int
    nodes: int
    is_baseline: bool
    factors: tuple[EfficiencyFactor, ...]
    """Empty where a run computes nothing."""
    parallel: Estimate | None
    """Load balance x communication of this rank count by itself: POP's parallel efficiency."""
    efficiency: Estimate
    """Of means: the product of the factors."""


@dataclass(frozen=True, kw_only=True)
class CauseAccount:
    """Efficiency lost by factor and by cause at every rank count, and who was waited for."""

    waterfall: tuple[FactoredPoint, ...]
    """By rank count, the baseline first."""
    diagnosed: DiagnosedGroup
    """Exactly what `dlbench diagnose` says of these runs, without forecasts: those need a network file."""
    nodes: NodeHistory
    """Of this group's hosts only, over all runs of the folder."""

    @property
    def has_loss(self) -> bool:
        """Whether there is a rank count beside the baseline."""
        return len(self.waterfall) > 1
