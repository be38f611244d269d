"""The least memory that a rank of a plan needs, by the layer table of its network; smaller devices are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from dlbench.specs.layers import WEIGHT_BYTES, Layer, cut_layers
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, format_bytes


def backward(activations: Sequence[float], gradients: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yields the activations and gradients in memory before the backward pass of each block, from the last one on."""
    remaining, done = sum(activations), 0.0
    for block_activations, gradient in zip(reversed(activations), reversed(gradients), strict=True):
        yield remaining, done
        remaining, done = remaining - block_activations, done + gradient
    yield 0.0, done


def memory_problem(plan: RunPlan, limit_bytes: float, limit_source: str) -> str:
    """Returns why a rank surely has too little memory for a plan, with the bytes; empty if it may have enough.
    `limit_bytes`: memory of a rank. Counted is what no implementation does without: the shares of parameters,
    gradients and optimizer state, and the outputs of convolutions and dense layers, which the backward pass reads.
    """
    workload, layers = plan.workload, plan.workload.model.layer_table(plan.workload.data)
    train, fsdp = workload.train, plan.engine.fsdp
    if not layers or (plan.engine.name == "fsdp" and fsdp.offload):
        return ""
    slabs = plan.engine.spatial_ranks  # Ranks that share volumes have all parameters each.
    state_share = slots_share = slabs / plan.ranks_per_replica
    if plan.engine.name == "fsdp":
        ranks = plan.layout.ranks_per_node if fsdp.shard_ranks == "node" else plan.layout.ranks
        state_share = slots_share = 1 / max(ranks, plan.ranks_per_replica)
    elif plan.strategy == "zero-1":
        slots_share = 1 / plan.layout.ranks
    slots = train.optimizer.slots * slots_share
    gradients_share = state_share
    if train.optimizer_state == "host":
        slots = gradients_share = 0.0  # The host updates block by block.
    samples = slabs * train.batch_per_rank // train.gradient_accumulation
    activations, weights = _by_block(layers, samples * _saved_bytes(plan), slabs)
    parameters = sum(weights) / WEIGHT_BYTES
    state_bytes = (state_share + gradients_share + slots) * sum(weights)
    passes_bytes = max(
        remaining + done for remaining, done in backward(activations, [gradients_share * block for block in weights])
    )
    needed_bytes = (state_share + slots) * sum(weights) + passes_bytes
    if needed_bytes <= limit_bytes:
        return ""
    number = f"{parameters / 1e6:.4g} million"
    if parameters >= 1e9:
        number = f"{parameters / 1e9:.4g} billion"
    share = "a rank's share of " if state_bytes < WEIGHT_BYTES * parameters * (2 + train.optimizer.slots) else ""
    return (
        f"a rank needs at least {format_bytes(needed_bytes)}: {format_bytes(state_bytes)} for {share}parameters, "
        f"gradients and optimizer state of {number} parameters, and up to "
        f"{format_bytes(sum(activations))} for activations of {counted(samples, 'sample')}; it has "
        f"{format_bytes(limit_bytes)} ({limit_source})"
    )


def _saved_bytes(plan: RunPlan) -> int:
    """Returns the bytes of a saved activation; 0 if activations may be recomputed, moved, or without padding."""
    train = plan.workload.train
    may_be_saved = train.is_in_core and train.activation_budget is None
    if not may_be_saved or plan.workload.model.padding == "unpadded" or "pipeline" in plan.strategy:
        return 0
    return 2 if train.precision in ("bf16", "fp16") else WEIGHT_BYTES


def _by_block(layers: Sequence[Layer], bytes_per_element: int, slabs: int) -> tuple[list[float], list[float]]:
    """Returns bytes of saved outputs, of a slab where layers are cut, and bytes of weights by block."""
    activations, weights = [], []
    shares = dict.fromkeys(cut_layers(layers, slabs), 1 / slabs)
    for _, block in groupby(layers, key=attrgetter("block")):
        members = list(block)
        saved_elements = sum(layer.outputs * shares.get(layer, 1.0) for layer in members if layer.is_product)
        activations.append(bytes_per_element * saved_elements)
        weights.append(float(WEIGHT_BYTES * sum(layer.weights for layer in members)))
    return activations, weights
