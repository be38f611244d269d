"""What the layers of a network take and hold: watched layer by layer, or of the whole network and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dlbench.errors import IncompleteDataError
from dlbench.records.record import Record
from dlbench.records.rows.spans import COMPUTE, SpanReader
from dlbench.specs.base import Precision
from dlbench.specs.layers import Layer
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import SystemSpec

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # Of an activation.
WEIGHT_BYTES = 4  # Weights, gradients and the optimizer's values are fp32 in every precision of dlbench.


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a sample, by layer, and of an update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_s: float  # The optimizer's update of the whole network.

    @classmethod
    def split(
        cls,
        layers: Sequence[Layer],
        *,
        forward_s: float,
        backward_s: float,
        update_s: float,
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
        return cls(forward=forward, backward=backward, update_s=update_s)


def watched_layers(layers: Sequence[Layer], spans: Path) -> tuple[list[float], list[float]] | None:
    """Forward and backward seconds of each layer in the watched steps of a rank, from its file of spans; None where
    they do not hold every convolution and dense layer that is a module. Products that are in no module (attention,
    a tied decoder) take what the others take for their multiply-adds.
    """
    seen: dict[str, int] = {}
    try:
        reader = SpanReader(path=spans)
        for rows in reader.blocks():
            watched = rows[(rows["lane"] == COMPUTE) & (rows["step"] >= 0)]
            for name, duration in watched[["name", "duration_ns"]].tolist():
                seen[reader.names[name]] = seen.get(reader.names[name], 0) + duration
    except (OSError, IncompleteDataError):
        return None
    known = [number for number, layer in enumerate(layers) if layer.is_product and not layer.shared_weights]
    halves: list[list[float]] = []
    for half in ("forward", "backward"):
        own = [seen.get(f"{half} {layer.name}", 0) for layer in layers]
        macs = [layer.passes(backward=half == "backward") for layer in layers]
        if not all(own[number] > 0 for number in known):
            return None
        pace = sum(own[number] for number in known) / sum(macs[number] for number in known)
        halves.append([seconds or pace * count for seconds, count in zip(own, macs, strict=True)])
    return halves[0], halves[1]


def gamma(layers: Sequence[Layer], plan: RunPlan, record: Record) -> tuple[float, str]:
    """Of a run that shares nothing but samples: activations at its peak over the sum of x and y of all layers (the
    memory-reuse factor of Kahira et al., HPDC 2021), and where it is from. 1 where nothing was measured.
    """
    train = plan.workload.train
    weights = sum(layer.weights for layer in layers) * WEIGHT_BYTES * (2 + train.optimizer.slots)
    elements = sum(layer.inputs + layer.outputs for layer in layers)
    if record.memory is not None:
        peak, source = record.memory.in_core_bytes, "activations of its chain of blocks in core"
    elif any(rank.gpu is not None for rank in record.ranks):
        peak, source = max(rank.peak_memory_bytes for rank in record.ranks), "peak that torch allocated on a GPU"
    else:
        return 1.0, "1: a process's peak on a CPU is not that of its tensors, so activations may be overestimated"
    passes = train.batch_per_rank / train.gradient_accumulation
    held = (peak - weights) / (passes * elements * WEIGHT_BYTES)
    if held <= 0:
        return 1.0, f"1: {source} is less than weights, gradients and optimizer state"
    return held, f"{held:.2f}: {source}"


def limit(given: int | None, system: SystemSpec | None) -> tuple[int | None, str]:
    """Bytes that a rank may hold, and where that is from. `given`: of --memory-limit."""
    if given is not None:
        return given, "--memory-limit"
    device = None if system is None else system.device
    if system is None or device is None or device.memory_bytes is None:
        return None, "no limit is known: --memory-limit 16GiB, or device.memory_bytes of the system file"
    return device.memory_bytes, f"memory of a device of {system.name}: {device.source}"
