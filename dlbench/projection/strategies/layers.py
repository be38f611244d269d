"""What each layer of a network takes: watched layer by layer, or measured as a whole and split by multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.spans import COMPUTE, SpanReader
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
        cls,
        layers: Sequence[Layer],
        *,
        forward_s: float,
        backward_s: float,
        update_s: float,
        source: str,
        watched: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> Self:
        """Of a whole pass of a sample, in proportion to what was watched of each layer (`watched_layers`), or to
        multiply-adds: the first layer has one product backward, others two.
        """
        counted = [[layer.passes(backward=half) for layer in layers] for half in (False, True)]
        forward, backward = (
            tuple(seconds * one / sum(shares) for one in shares)
            for seconds, shares in zip((forward_s, backward_s), watched or counted, strict=True)
        )
        return cls(forward=forward, backward=backward, update_s=update_s, source=source)


def watched_layers(layers: Sequence[Layer], spans: Path) -> tuple[list[float], list[float]] | None:
    """Forward and backward seconds of each layer in the watched steps of a rank, from its file of spans; None where
    they do not hold every convolution and dense layer that is a module. Products that are in no module (attention,
    a tied decoder) take what the others take for their multiply-adds.
    """
    try:
        reader = SpanReader(path=spans)
        seen: dict[str, int] = {}
        for rows in reader.blocks():
            for name, duration in rows[(rows["lane"] == COMPUTE) & (rows["step"] >= 0)][
                ["name", "duration_ns"]
            ].tolist():
                seen[reader.names[name]] = seen.get(reader.names[name], 0) + duration
    except (OSError, IncompleteDataError):
        return None
    halves: list[list[float]] = []
    for half in ("forward", "backward"):
        own = [seen.get(f"{half} {layer.name}", 0) for layer in layers]
        macs = [layer.passes(backward=half == "backward") for layer in layers]
        known = [number for number, layer in enumerate(layers) if layer.is_product and not layer.shared_weights]
        if not all(own[number] > 0 for number in known):
            return None
        pace = sum(own[number] for number in known) / sum(macs[number] for number in known)
        halves.append([seconds or pace * count for seconds, count in zip(own, macs, strict=True)])
    return halves[0], halves[1]
