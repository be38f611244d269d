"""What a rank holds: the share of all activations that is held at once, the limit, and the chain that plans are for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from dlbench.projection.strategies.layers import LayerTimes
from dlbench.records.record import Record
from dlbench.specs.base import Precision
from dlbench.specs.layers import Layer
from dlbench.specs.memory import Chain, Unit
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import SystemSpec

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # Of an activation.
WEIGHT_BYTES = 4  # Weights, gradients and the optimizer's values are fp32 in every precision of dlbench.


def gamma(layers: Sequence[Layer], plan: RunPlan, record: Record, element_bytes: int) -> tuple[float, str]:
    """Of a run that shares nothing but samples: activations at its peak over the sum of x and y of all layers (the
    memory-reuse factor of Kahira et al., HPDC 2021), and where it is from. 1 where nothing was measured.
    """
    weights = sum(layer.weights for layer in layers) * element_bytes * (2 + plan.workload.train.optimizer.slots)
    passes = plan.workload.train.batch_per_rank / plan.workload.train.gradient_accumulation
    elements = sum(layer.inputs + layer.outputs for layer in layers)
    if record.memory is not None:
        peak, source = record.memory.in_core_bytes, "activations of its chain of blocks in core"
    elif any(rank.gpu is not None for rank in record.ranks):
        peak, source = max(rank.peak_memory_bytes for rank in record.ranks), "peak that torch allocated on a GPU"
    else:
        return 1.0, "1: a process's peak on a CPU is not that of its tensors, so activations may be overestimated"
    held = (peak - weights) / (passes * elements * element_bytes)
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


def chain_of(
    layers: Sequence[Layer], times: LayerTimes, *, batch: int, state_bytes: float, element_bytes: float
) -> Chain:
    """The blocks of a network as a chain, whose activations can be recomputed. `element_bytes`: held of an element of x
    and y, gamma included.
    """
    units: list[Unit] = []
    for block, members in groupby(range(len(layers)), key=lambda number: layers[number].block):
        numbers = list(members)
        held = batch * element_bytes * sum(layers[n].inputs + layers[n].outputs for n in numbers)
        entering = min(held, batch * element_bytes * layers[numbers[0]].inputs) if units else 0.0
        units.append(
            Unit(
                name=f"block {block}",
                forward_s=batch * sum(times.forward[n] for n in numbers),
                backward_s=batch * sum(times.backward[n] for n in numbers),
                saved_bytes=math.ceil(held - entering),
                input_bytes=math.ceil(entering),
                input_saved=True,
            )
        )
    return Chain(units=tuple(units), batch=batch, output_bytes=0, state_bytes=math.ceil(state_bytes))
