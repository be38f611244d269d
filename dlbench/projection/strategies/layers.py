"""What each layer of a network takes: measured layer by layer, or measured as a whole and split by multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dlbench.specs.layers import Layer


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a sample, by layer, and of an update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_s: float  # The optimizer's update of the whole network.
    source: str  # How the shares of the layers are known, in words.

    @classmethod
    def split(
        cls, layers: Sequence[Layer], *, forward_s: float, backward_s: float, update_s: float, source: str
    ) -> Self:
        """Of a whole pass of a sample, by multiply-adds: the first layer has one product backward, others two."""
        halves = []
        for seconds, is_backward in ((forward_s, False), (backward_s, True)):
            macs = [layer.passes(backward=is_backward) for layer in layers]
            halves.append(tuple(seconds * one / sum(macs) for one in macs))
        return cls(forward=halves[0], backward=halves[1], update_s=update_s, source=source)
