"""Time and memory of the layers of a network: measured by layer, or for the whole network and divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Self

from dlbench.errors import IncompleteDataError
from dlbench.records.record import Record
from dlbench.records.rows.spans import COMPUTE, SpanReader
from dlbench.specs.base import Precision
from dlbench.specs.layers import WEIGHT_BYTES, Layer, cut_layers
from dlbench.specs.plan import RunPlan
from dlbench.specs.rank_memory import backward
from dlbench.specs.system import SystemSpec

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # Bytes of an activation.


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds per sample by layer, and seconds of an update."""

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
        """Divides the seconds of a pass per sample by the times of `watched_layers`, or by multiply-adds."""
        forward = [float(layer.passes(backward=False)) for layer in layers]
        backward = [float(layer.passes(backward=True)) for layer in layers]
        if watched is not None:
            forward, backward = map(list, watched)
        return cls(
            forward=tuple(forward_s * share / sum(forward) for share in forward),
            backward=tuple(backward_s * share / sum(backward) for share in backward),
            update_s=update_s,
        )


def watched_layers(layers: Sequence[Layer], spans: Path, run_id: str) -> tuple[list[float], list[float]] | None:
    """Returns forward and backward times of each layer in the watched steps of a rank, ns; None if a module is missing.
    Products outside of modules (attention, a tied decoder) get the time per multiply-add of the others.
    """
    durations_ns: dict[str, int] = {}
    try:
        reader = SpanReader(path=spans, run_id=run_id)
        for rows in reader.blocks():
            watched = rows[(rows["lane"] == COMPUTE) & (rows["step"] >= 0)]
            for name, duration in watched[["name", "duration_ns"]].tolist():
                durations_ns[reader.names[name]] = durations_ns.get(reader.names[name], 0) + duration
    except (OSError, IncompleteDataError):
        return None
    modules = [number for number, layer in enumerate(layers) if layer.is_product and not layer.shared_weights]
    halves: list[list[float]] = []
    for half in ("forward", "backward"):
        watched_ns = [durations_ns.get(f"{half} {layer.name}", 0) for layer in layers]
        macs = [layer.passes(backward=half == "backward") for layer in layers]
        if not all(watched_ns[number] > 0 for number in modules):
            return None
        pace = sum(watched_ns[number] for number in modules) / sum(macs[number] for number in modules)
        halves.append([seconds or pace * count for seconds, count in zip(watched_ns, macs, strict=True)])
    return halves[0], halves[1]


@dataclass(frozen=True, kw_only=True)
class CountedMemory:
    """Memory of a rank of a run, as factors for other strategies; they are shares of the weights but gamma."""

    gamma: float  # Activations over the sum of x and y, at the peak of the backward pass.
    scratch: float  # Temporary memory of the update.
    buckets: float  # Second copy of the gradients in the buckets of data parallelism.
    clones: float  # Copies by the library: Gloo copies the input of a reduce-scatter.


def by_block(layers: Sequence[Layer], slabs: int = 1) -> tuple[list[float], list[float]]:
    """Returns bytes of x and y of a sample, or of its slab with the planes beyond, and of weights, of each block."""
    elements, weights = [], []
    divided = cut_layers(layers, slabs) if slabs > 1 else ()
    for _, block in groupby(layers, key=attrgetter("block")):
        members = list(block)
        whole = sum(float(layer.inputs + layer.outputs) for layer in members if layer not in divided)
        cut = sum(layer.slab_inputs(slabs) + layer.outputs / slabs for layer in members if layer in divided)
        elements.append(WEIGHT_BYTES * (whole + cut))
        weights.append(WEIGHT_BYTES * sum(float(layer.weights) for layer in members))
    return elements, weights


def counted(layers: Sequence[Layer], plan: RunPlan, record: Record) -> CountedMemory | None:
    """Returns the memory of the rank with most, of a run that shares only samples; None if it was not measured."""
    held = max((rank.held for rank in record.ranks if rank.held is not None), key=attrgetter("peak"), default=None)
    if held is None or plan.strategy not in ("serial", "data"):
        return None
    train, on_gpu = plan.workload.train, any(rank.gpu is not None for rank in record.ranks)
    elements, weights = by_block(layers)
    samples = train.batch_per_rank / train.gradient_accumulation
    stays = held.weights + held.optimizer + held.buffers
    pairs = [(samples * activations, done) for activations, done in backward(elements, weights) if activations]
    return CountedMemory(
        gamma=max(0.0, min((held.passes_peak - stays - done) / activations for activations, done in pairs)),
        scratch=max(0.0, (held.update_peak - stays - held.gradients) / held.weights),
        buckets=0.0 if plan.engine.ddp.views_buckets(on_gpu=on_gpu) else 1.0,
        clones=0.0 if on_gpu else 1.0,
    )


def as_counted(
    layers: Sequence[Layer], memory: CountedMemory, name: str, *, slots: int, batch: int, ranks: int, slabs: int = 1
) -> float:
    """Returns bytes of a rank under serial, data, zero-1, fsdp or, with `slabs` of each volume, spatial by the memory
    of a run without sharding. FSDP, by its order of work in torch 2.13: the root module (first and last block) stays
    gathered over both passes; during a block's backward pass the block before is prefetched, then its gradients are
    reduce-scattered.
    """
    elements, weights = by_block(layers, slabs)
    activations, weight_bytes = [memory.gamma * batch * block_bytes for block_bytes in elements], sum(weights)
    if slabs > 1:
        # Slabs of samples are copied between the planes beyond; a whole sample is read where it is.
        activations[0] += WEIGHT_BYTES * batch * layers[0].slab_inputs(slabs)
    shares = ranks if name == "zero-1" else 1
    if name != "fsdp":
        passes = max(remaining + done for remaining, done in backward(activations, weights))
        buckets = memory.buckets if name != "serial" else 0.0
        return (1 + slots / shares + buckets) * weight_bytes + max(passes, (1 + memory.scratch / shares) * weight_bytes)
    inner_bytes = [0.0, *weights[1:-1], 0.0][: len(weights)]
    root, scattered = weight_bytes - sum(inner_bytes), 1 + memory.clones + 1 / ranks
    gradients = [inner / ranks if inner else edge for inner, edge in zip(inner_bytes, weights, strict=True)]
    peak = sum(inner_bytes) / ranks + scattered * root
    for number, (remaining, done) in zip(
        reversed(range(len(inner_bytes))), backward(activations, gradients), strict=False
    ):
        others = done + root + (inner_bytes[number - 1] if number else 0.0)  # Bytes besides this block's.
        computing = remaining + others + inner_bytes[number]
        scattering = remaining - activations[number] + others + scattered * inner_bytes[number]
        peak = max(peak, computing, scattering)
    return (1 + slots) * weight_bytes / ranks + max(peak, (1 + memory.scratch) * weight_bytes / ranks)


def gamma(layers: Sequence[Layer], plan: RunPlan, record: Record) -> tuple[float, str]:
    """Returns activations at the peak over x and y of all layers (Kahira et al., HPDC 2021; 1: unknown), with basis."""
    train = plan.workload.train
    weights = sum(layer.weights for layer in layers) * WEIGHT_BYTES * (2 + train.optimizer.slots)
    elements = sum(layer.inputs + layer.outputs for layer in layers)
    held_by_rank = [rank.held for rank in record.ranks if rank.held is not None]
    if held_by_rank and plan.strategy in ("serial", "data"):
        largest = max(held_by_rank, key=attrgetter("peak"))
        weights, source = largest.peak - largest.activations, "other memory of ranks at the peak of a step"
        peak = largest.peak
    elif record.memory is not None:
        peak, source = record.memory.in_core_bytes, "activations of its blocks in core"
    elif any(rank.gpu is not None for rank in record.ranks):
        peak, source = max(rank.peak_memory_bytes for rank in record.ranks), "peak that torch allocated on a GPU"
    else:
        return 1.0, "1: memory of steps was not measured, so activations may be overestimated"
    passes = train.batch_per_rank / train.gradient_accumulation
    factor = (peak - weights) / (passes * elements * WEIGHT_BYTES)
    if factor <= 0:
        return 1.0, f"1: {source} is less than weights, gradients and optimizer state"
    return factor, f"{factor:.2f}: {source}"


def limit(limit_bytes: int | None, system: SystemSpec | None) -> tuple[int | None, str]:
    """Returns the memory limit of a rank in bytes, and its source. `limit_bytes`: value of --memory-limit."""
    if limit_bytes is not None:
        return limit_bytes, "--memory-limit"
    device = None if system is None else system.device
    if system is None or device is None or device.memory_bytes is None:
        return None, "no limit is known; give --memory-limit 16GiB, or device.memory_bytes in the system file"
    return device.memory_bytes, f"memory of a device of {system.name}: {device.source}"
