"""What the layers of a network take and hold: watched layer by layer, or of the whole network and split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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


def watched_layers(layers: Sequence[Layer], spans: Path, run_id: str) -> tuple[list[float], list[float]] | None:
    """Forward and backward seconds of each layer in the watched steps of a rank, from its file of spans; None where
    they do not hold every convolution and dense layer that is a module. Products that are in no module (attention,
    a tied decoder) take what the others take for their multiply-adds.
    """
    seen: dict[str, int] = {}
    try:
        reader = SpanReader(path=spans, run_id=run_id)
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


@dataclass(frozen=True, kw_only=True)
class CountedMemory:
    """What a rank of a run was seen to hold, as other strategies would; of weights where nothing else is said."""

    gamma: float  # Activations over the sum of x and y, at the moment of the backward pass that holds most.
    scratch: float  # What operations of the update take meanwhile.
    buckets: float  # Second copy of the gradients in the buckets of data parallelism.
    clones: float  # Copies that the library makes of what it sums: Gloo, of a reduce-scatter's input.


def backward(held: Sequence[float], gradients: Sequence[float]) -> Iterator[tuple[float, float]]:
    """What is left of activations, and what there is of gradients, before the backward pass of each block, from the
    last one on; both arguments by block, in the order of the forward pass.
    """
    left, done = sum(held), 0.0
    for activations, gradient in zip(reversed(held), reversed(gradients), strict=True):
        yield left, done
        left, done = left - activations, done + gradient
    yield 0.0, done


def by_block(layers: Sequence[Layer]) -> tuple[list[float], list[float]]:
    """Bytes of x and y of a sample, and of weights, of each block."""
    blocks = [list(block) for _, block in groupby(layers, key=lambda layer: layer.block)]
    return (
        [WEIGHT_BYTES * sum(float(layer.inputs + layer.outputs) for layer in block) for block in blocks],
        [WEIGHT_BYTES * sum(float(layer.weights) for layer in block) for block in blocks],
    )


def counted(layers: Sequence[Layer], plan: RunPlan, record: Record) -> CountedMemory | None:
    """Of the rank that held most of a run that shares nothing but samples; None where none was watched for it."""
    found = max((rank.held for rank in record.ranks if rank.held is not None), key=lambda one: one.peak, default=None)
    if found is None or plan.strategy not in ("serial", "data"):
        return None
    train, on_gpu = plan.workload.train, any(rank.gpu is not None for rank in record.ranks)
    elements, weights = by_block(layers)
    samples = train.batch_per_rank / train.gradient_accumulation
    stays = found.weights + found.optimizer + found.buffers
    pairs = [(samples * left, done) for left, done in backward(elements, weights) if left]
    return CountedMemory(
        gamma=max(0.0, min((found.passes_peak - stays - done) / left for left, done in pairs)),
        scratch=max(0.0, (found.update_peak - stays - found.gradients) / found.weights),
        buckets=0.0 if plan.engine.ddp.views_buckets(on_gpu=on_gpu) else 1.0,
        clones=0.0 if on_gpu else 1.0,
    )


def as_counted(layers: Sequence[Layer], seen: CountedMemory, name: str, *, slots: int, batch: int, ranks: int) -> float:
    """Bytes of a rank under serial, data, zero-1 or fsdp: the more of what passes and update hold, as a run without
    sharding was seen to. `slots`: values of the optimizer for each weight; `batch`: samples of a rank.

    FSDP, by its order of work in torch 2.13: the first and the last block (the root module) stay gathered over both
    passes, and their gradients whole until the end. While another block's backward pass computes, the block before is
    gathered ahead; then its parameters are freed, and its gradients are the input of a reduce-scatter.
    """
    elements, weights = by_block(layers)
    held, whole = [seen.gamma * batch * one for one in elements], sum(weights)
    shares = ranks if name == "zero-1" else 1
    if name != "fsdp":
        passes = max(left + done for left, done in backward(held, weights))
        buckets = seen.buckets if name != "serial" else 0.0
        return (1 + slots / shares + buckets) * whole + max(passes, (1 + seen.scratch / shares) * whole)
    own = [0.0, *weights[1:-1], 0.0][: len(weights)]
    root, scattered = whole - sum(own), 1 + seen.clones + 1 / ranks
    gradients = [one / ranks if one else edge for one, edge in zip(own, weights, strict=True)]
    most = sum(own) / ranks + scattered * root
    for number, (left, done) in zip(reversed(range(len(own))), backward(held, gradients), strict=False):
        beside = done + root + (own[number - 1] if number else 0.0)
        most = max(most, left + beside + own[number], left - held[number] + beside + scattered * own[number])
    return (1 + slots) * whole / ranks + max(most, (1 + seen.scratch) * whole / ranks)


def gamma(layers: Sequence[Layer], plan: RunPlan, record: Record) -> tuple[float, str]:
    """Of a run that shares nothing but samples: activations at its peak over the sum of x and y of all layers (the
    memory-reuse factor of Kahira et al., HPDC 2021), and where it is from. 1 where nothing was measured.
    """
    train = plan.workload.train
    weights = sum(layer.weights for layer in layers) * WEIGHT_BYTES * (2 + train.optimizer.slots)
    elements = sum(layer.inputs + layer.outputs for layer in layers)
    seen = [rank.held for rank in record.ranks if rank.held is not None]
    if seen and plan.strategy in ("serial", "data"):
        most = max(seen, key=lambda one: one.peak)
        weights, source = most.peak - most.activations, "what ranks held besides at the peak of a step"
        peak = most.peak
    elif record.memory is not None:
        peak, source = record.memory.in_core_bytes, "activations of its chain of blocks in core"
    elif any(rank.gpu is not None for rank in record.ranks):
        peak, source = max(rank.peak_memory_bytes for rank in record.ranks), "peak that torch allocated on a GPU"
    else:
        return 1.0, "1: no step was watched for memory, so activations may be overestimated"
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
