"""The prices of strategies: time and memory of layers (measured by layer, or for the whole network and divided), and
messages of groups of ranks while all groups send at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

from dlbench.errors import IncompleteDataError
from dlbench.perfmodels.predictions import features, level_of
from dlbench.perfmodels.schedules import Layout, invalid
from dlbench.records.record import Record
from dlbench.records.rows.spans import COMPUTE, SpanReader
from dlbench.specs.base import Precision
from dlbench.specs.comm import DATA_SHEET, Collective, Level, LevelName, NetworkModel, Piece
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


class MessagePrice(NamedTuple):
    """The price of a message or collective while all groups send theirs."""

    seconds: float = 0.0
    link_seconds: Mapping[LevelName, float] = {}  # Seconds of its bytes on the links that decide, by level.
    phi: float = 1.0  # Flows of a link at once, at least 1.

    def then(self, other: MessagePrice) -> MessagePrice:
        """Returns the price of both, one after the other."""
        link_seconds = dict(self.link_seconds)
        for name, seconds in other.link_seconds.items():
            link_seconds[name] = link_seconds.get(name, 0.0) + seconds
        return MessagePrice(self.seconds + other.seconds, link_seconds, max(self.phi, other.phi))

    def shared_with(self, other: MessagePrice) -> float:
        """Returns the seconds of another message on links that this message uses, by how much of its time it does."""
        if not self.seconds:
            return 0.0
        use = self.link_seconds
        return sum(seconds * use.get(name, 0.0) for name, seconds in other.link_seconds.items()) / self.seconds


Prices = dict[
    tuple[Collective, float, int, int, int], MessagePrice
]  # By collective, bytes, element bytes, size, stride.


class Groups:
    """Groups of `size` ranks, `stride` apart: 1 for neighbours, more for equal indexes in neighbouring groups."""

    def __init__(
        self, layout: Layout, network: NetworkModel, size: int, stride: int = 1, prices: Prices | None = None
    ) -> None:
        self.size, self._stride = size, stride
        self._network = network
        self._prices: Prices = {} if prices is None else prices
        links = tuple((name, level.links) for name, level in network.levels.items())
        self._own, self._phi = _flows_per_link(layout, links, size, stride)
        self.phi = max([1.0, *self._phi.values()])
        """Flows that cross the busiest link at once, at least 1, of a ring and of the priced messages: the contention
        coefficient of Kahira et al., HPDC 2021, section 4."""
        group = max(1, layout.group_size // stride)
        leaf = None
        if layout.leaf_size is not None:
            leaf = max(group, layout.leaf_size // stride // group * group)
        self._layout = Layout(ranks=size, group_size=group, leaf_size=leaf)

    def seconds(self, collective: Collective, num_bytes: float, element_bytes: int) -> float:
        """Returns seconds of a collective of each group, see `message`."""
        return self.message(collective, num_bytes, element_bytes).seconds

    def message(self, collective: Collective, num_bytes: float, element_bytes: int) -> MessagePrice:
        """Returns the price of a collective of each group: by a ring, or, if groups share no link, the fastest."""
        if self.size == 1 or not num_bytes:
            return MessagePrice()
        key = (collective, num_bytes, element_bytes, self.size, self._stride)
        if key not in self._prices:
            self._prices[key] = self._priced(collective, num_bytes, element_bytes)
        price = self._prices[key]
        self.phi = max(self.phi, price.phi)
        return price

    def _priced(self, collective: Collective, num_bytes: float, element_bytes: int) -> MessagePrice:
        whole_bytes = round(num_bytes / element_bytes) * element_bytes
        names = ["ring"]
        if self._own == self._phi:
            measured = (error for error in self._network.errors if error.collective == collective and not error.is_poor)
            names += [error.algorithm for error in measured if error.algorithm not in ("ring", "parameter-server")]
            if self._network.transport == DATA_SHEET and collective == "allreduce":
                names += ["hierarchical", "double-binary-tree"]
        group, network = self._layout.group_size, self._contended
        loads = [
            features(collective, name, whole_bytes, self._layout, network, element_bytes=element_bytes)
            for name in names
            if invalid(collective, name, self.size, group_size=group, shards=None) is None
        ]
        best = min(loads, key=lambda candidate: candidate.seconds(network))
        return MessagePrice(best.seconds(network), best.link_seconds(network), max([1.0, *best.phi.values()]))

    def send(self, num_bytes: float) -> MessagePrice:
        """Returns the price of a message from each rank to the next of its group, over the slowest level."""
        slowest = MessagePrice()
        for name, phi in self._phi.items():
            piece = level_of(self._network, name).piece(num_bytes)
            link_seconds = num_bytes * piece.beta_s_per_byte * phi
            if piece.alpha_s + link_seconds > slowest.seconds:
                slowest = MessagePrice(piece.alpha_s + link_seconds, {name: link_seconds}, phi)
        return slowest

    @cached_property
    def _contended(self) -> NetworkModel:
        """Returns the network for one group: bytes take longer by the flows of the other groups, start-ups do not."""
        longer = {name: phi / self._own.get(name, 1.0) for name, phi in self._phi.items()}
        return scaled(self._network, 1.0, longer)


def scaled(network: NetworkModel, factor: float, longer: Mapping[LevelName, float] | None = None) -> NetworkModel:
    """Returns the network with all costs times a factor, and costs per byte also times `longer` by level."""
    changed: dict[str, Level] = {}
    for name, level in network.levels.items():
        slower = factor * (longer or {}).get(name, 1.0)
        costs = [(piece.alpha_s * factor, piece.beta_s_per_byte * slower, piece.up_to_bytes) for piece in level.pieces]
        pieces = tuple(Piece(alpha_s=alpha, beta_s_per_byte=beta, up_to_bytes=up_to) for alpha, beta, up_to in costs)
        changed[name] = level.model_copy(update={"pieces": pieces})
    return network.model_copy(update={**changed, "gamma_s_per_byte": network.gamma_s_per_byte * factor})


@lru_cache(maxsize=4096)
def _flows_per_link(
    layout: Layout, links: tuple[tuple[LevelName, int | None], ...], size: int, stride: int
) -> tuple[dict[LevelName, float], dict[LevelName, float]]:
    """Returns flows per link by level, at least 1, of one group alone and of all, if each rank sends to the next."""
    import numpy as np

    from dlbench.perfmodels.algorithms import Pattern
    from dlbench.perfmodels.topology import Sharing, loads_of

    rank, sharing = np.arange(layout.ranks), Sharing(**dict(links))
    index = rank // stride % size
    target = rank + np.where(index < size - 1, stride, (1 - size) * stride)
    flows: list[dict[LevelName, float]] = []
    for members in ((rank < size * stride) & (rank % stride == 0), target != rank):
        source = rank[members]
        phi: dict[LevelName, float] = {}
        if size > 1:
            ring = Pattern(source, target[members], 0 * source, np.ones_like(source))
            for load in loads_of(ring, layout, sharing).loads:
                phi[load.level] = max(phi.get(load.level, 1.0), load.phi)
        flows.append(phi)
    return flows[0], flows[1]
