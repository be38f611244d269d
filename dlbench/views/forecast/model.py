"""The report's plain data on laws, published anchors and forecasts; none of them is measured; see `model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class LawPoint:
    """A measured point and what the law says of it."""

    ranks: int
    nodes: int
    measured: Estimate
    """Efficiency."""
    fitted: float
    """Efficiency by the law (fraction); the ideal for a fraction below 0."""
    residual: float
    """Measured less fitted (fraction)."""
    serial_fraction: Estimate | None
    """Karp and Flatt's, of this point alone; None under weak scaling."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """A scaling law fitted to the measured points."""

    name: Literal["Amdahl", "Gustafson"]
    formula: str
    fraction: Estimate
    """The part that does not scale, by the fit."""
    worst_residual: float
    """Largest residual without its sign (fraction)."""
    hindcast_ranks: int | None
    hindcast_error: float | None
    """Measured less what the law, fitted without the largest point, would have said of it (fraction)."""
    doubt: str
    """Why the points do not follow it, in a sentence; empty where they do."""
    points: tuple[LawPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a law says of a rank count that nobody measured."""

    ranks: int
    efficiency: float
    low: float
    high: float
    """Efficiency (fraction), widened by how far the law missed what was measured."""
    throughput: float
    throughput_low: float
    throughput_high: float
    """Samples a second."""


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A published figure for the same kind of network."""

    title: str
    efficiency: float
    """Share of the ideal (fraction)."""
    ranks: int
    baseline: str
    hardware: str
    recipe: str
    source: str
    address: str
    differences: tuple[str, ...]
    """What the runs do otherwise; empty: the same work, and only then is it drawn."""

    @property
    def is_same_work(self) -> bool:
        """Whether it may stand beside the measured figures."""
        return not self.differences


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Fits of scaling laws, published figures for the same work, and forecasts."""

    law: Law | None
    why_no_law: str
    forecasts: tuple[Forecast, ...]
    why_no_forecast: str
    anchors: tuple[Anchor, ...]
    why_no_anchor: str
    notes: tuple[str, ...]
    """What limits the forecasts."""
