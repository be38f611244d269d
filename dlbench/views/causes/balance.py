"""Losses and gains apart: what parts of a step lose of the efficiency, what others gain, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.attribution import Part
from dlbench.report.wording import points


@dataclass(frozen=True)
class Balance:
    """Fractions of the efficiency; `lost - gained` is `net`, 1 - efficiency."""

    lost: float
    """Sum over the parts that lose."""
    gained: float
    """Sum over the parts that gain, a positive number."""
    net: float

    @property
    def has_gains(self) -> bool:
        """Whether gains are large enough to be printed."""
        return round(100 * self.gained, 1) > 0

    @property
    def lost_text(self) -> str:
        """The losses alone, e.g. `25.3 points`."""
        return points(self.lost if self.has_gains else max(self.lost, self.net))

    @property
    def gains_text(self) -> str:
        """`, 21.7 gained, net 3.6`, so that the printed digits sum as well; empty where nothing is gained."""
        if not self.has_gains:
            return ""
        lost, net = (round(100 * value, 1) for value in (self.lost, self.net))
        return f", {lost - net:.1f} gained, net {net + 0.0:.1f}"

    @property
    def text(self) -> str:
        """`42.4 points lost`, or `25.3 points lost, 21.7 gained, net 3.6`."""
        return f"{self.lost_text} lost{self.gains_text}"


def balance(parts: Sequence[Part], whole: Part) -> Balance:
    """Of parts that sum to the whole."""
    losses = sum(part.lost.value for part in parts if part.lost.value > 0)
    gains = -sum(part.lost.value for part in parts if part.lost.value < 0)
    return Balance(lost=losses, gained=gains, net=whole.lost.value)
