"""Computing, communication, memory of a rank and limits of each strategy at one rank count, in seconds and bytes.

By Kahira et al., HPDC 2021 (ParaDL), table 3, corrected by counting: a pass of a pipeline takes the sum of all stages
and (parts - 1) times the longest; filter adds gradients of *inputs*, and the first input has none; channel leaves a
first layer of few channels whole, and sums the last outputs as well; with spatial, two ranks have one neighbour,
strides reach less far on one side, and dense layers are whole; memory has the optimizer's slots. Only the exchange
after the backward pass is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby, product
from operator import add, attrgetter, le
from typing import NamedTuple, Self

from dlbench.perfmodels.out_of_core.planner import CURVE_EFFORT, plan_blocks, scaled
from dlbench.perfmodels.out_of_core.search import DoesNotFitError
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.stages import cut, passed
from dlbench.projection.strategies.layers import CountedMemory, Groups, LayerTimes, MessagePrice, Prices, as_counted
from dlbench.report.table import column
from dlbench.report.wording import percent
from dlbench.specs.comm import Collective, NetworkModel
from dlbench.specs.layers import WEIGHT_BYTES, Layer, cut_bytes, cut_layers
from dlbench.specs.out_of_core import BlockPlan, Chain, TransferRates, Unit
from dlbench.units import counted, format_bytes

BUCKET_BYTES = 25 * 2**20  # Bytes of gradients in one message: the default of DDP's bucket_cap_mb (torch.nn.parallel).
PARTS_PER_STAGE = 4  # Micro-batches per pipeline stage; with more, idle time is small (Huang et al., GPipe (2019)).
AVERAGE_EVERY = 8  # Default of the updates between two averages of local SGD.

FILTER_COLLECTIVES: tuple[Collective, Collective] = ("all-gather", "allreduce")  # Of outputs, and input gradients.
INNER = ("spatial", "pipeline", "filter", "channel", "tensor")  # Strategies that share a model; each may be with data.
WITH_TENSOR = ("fsdp+tensor", "data+pipeline+tensor")  # Strategies of three factors.
STRATEGIES = (
    *("serial", "data", "zero-1", "fsdp", "out-of-core", "local-sgd"),
    *INNER,
    *(f"data+{name}" for name in INNER),
    *WITH_TENSOR,
)


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A strategy at one rank count; by the model only unless `measured_s` is given."""

    strategy: str
    ranks: int
    replicas: int  # p1: groups of ranks / p1 ranks that each hold a model and share the batch.
    tensor_ranks: int = 1  # Neighbouring ranks that share each layer, for fsdp+tensor and data+pipeline+tensor.
    # Most ranks that the strategy can use; None: it is refused altogether.
    limit: int | None = field(metadata=column("Most ranks", text="{:,}".format))
    bound_by: str = field(metadata=column("Limited by"))  # The limiting factor; memory if `fits` is False.
    refused: str = ""  # Reason for a refusal; then all figures are 0.
    # Sum of computing, exposed messages and the other parts of the runs' step.
    step_s: float = field(default=0.0, metadata=column("Step", unit="s"))
    compute_s: float = field(default=0.0, metadata=column("Computing", unit="s"))
    # Time of all messages of a rank, and the part of it that adds to the step.
    communication_s: float = field(default=0.0, metadata=column("Messages", unit="s"))
    exposed_s: float = field(default=0.0, metadata=column("Exposed", unit="s"))
    # Memory of the rank with the most.
    memory_bytes: float = field(default=0.0, metadata=column("Memory", text=format_bytes))
    phi: float = 1.0  # Flows per link of the busiest level.
    # Of a pipeline: share of its passes in which a stage waits, on average, and longest stage over the mean.
    bubble: float | None = field(default=None, metadata=column("Bubble", text=percent))
    imbalance: float | None = field(default=None, metadata=column("Imbalance", text="{:.3f}".format))
    fits: bool | None = None  # None: no limit is known.
    sent_bytes: float | None = field(default=None, metadata=column("Sent per rank", text=format_bytes))
    measured_s: float | None = None  # Measured step, seconds, and its memory and bytes sent.
    measured_memory_bytes: float | None = None
    measured_sent_bytes: float | None = None
    average_every: int = AVERAGE_EVERY  # Updates between two averages of local SGD.
    is_ideal: bool = False  # By data sheets only.
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Returns 1 - |projected / measured - 1|; None: model only."""
        if self.measured_s is None or self.refused:
            return None
        return 1 - abs(self.step_s / self.measured_s - 1)


def best(rows: Sequence[StrategyRow]) -> StrategyRow | None:
    """Returns the row with the shortest step, to three digits, that may fit and trains like data parallelism."""
    possible = (row for row in rows if not row.refused and row.fits is not False and row.strategy != "local-sgd")
    return min(possible, key=lambda row: float(f"{row.step_s:.3g}"), default=None)


class LayerShare(NamedTuple):
    """The share of one rank of a group in a layer (1): in its work, elements and weights."""

    work: float = 1.0
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupModel:
    """One model on a group of ranks, without the exchange of gradients between groups."""

    compute_s: float  # Forward and backward, seconds.
    communication_s: float
    memory_bytes: float
    weights: Sequence[float]  # Weights of a rank by layer, whose gradients it exchanges.
    backward: Sequence[float]  # Seconds of each layer's backward pass, which hides that exchange.
    phi: float
    forward: Sequence[float] = ()  # Seconds of each layer's forward pass.
    messages: Sequence[MessagePrice] = ()  # Messages within the group in each layer's backward pass.
    bubble: float | None = None  # As in `StrategyRow`.
    imbalance: float | None = None
    sent_bytes: float = 0.0  # Bytes that a rank sends: for tensor in its group, for spatial by depth all.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A training on the ranks of `layout`. Pricing raises `UserError` if a level of the network was never measured."""

    layers: tuple[Layer, ...]  # From `Model.layer_table`.
    times: LayerTimes
    network: NetworkModel
    layout: Layout
    batch: int  # Samples of a step of all ranks.
    slots: int  # Values that the optimizer keeps for each weight.
    activation_bytes: int = WEIGHT_BYTES  # Bytes of an activation in messages.
    gamma: float = 1.0  # Activations in memory over the sum of x and y (`layers.gamma`).
    counted: CountedMemory | None = None  # Measured memory of ranks; None: gamma and the formulas of the table.
    memory_limit: int | None = None  # Bytes of a rank; None: not known.
    chain: Chain | None = None  # Blocks measured by an out-of-core run; None: blocks of the network.
    rates: TransferRates | None = None  # Measured likewise; None: blocks are recomputed, not swapped.
    rest_s: float = 0.0  # Other parts of a step.
    average_every: int = AVERAGE_EVERY  # Updates between two averages of local SGD.
    scatter: Collective = "reduce-scatter"  # That of FSDP; Gloo uses an all-reduce.
    cuts_depth: bool = False  # Whether spatial cuts the depth only, as in runs, and not along the fastest grid.

    def at(self, ranks: int, batch: int) -> Self:
        return replace(self, layout=replace(self.layout, ranks=ranks), batch=batch)

    def table(self, strategies: Sequence[str] = STRATEGIES) -> tuple[StrategyRow, ...]:
        """Returns the rows of the strategies; with data a row for each grouping of the ranks."""
        return tuple(chain.from_iterable(map(self._rows, strategies)))

    def _rows(self, name: str) -> Iterator[StrategyRow]:
        """Yields the rows of a strategy: with data or shards outermost one for each grouping of the ranks. Of three
        factors tensor is inside a node, then pipeline.
        """
        ranks, group = self.layout.ranks, self.layout.group_size
        inner = "tensor" if name in WITH_TENSOR else name.removeprefix("data+")
        if inner not in INNER:
            yield self._row(name, 1, 1, "")
            return
        limit, reason = self._most(inner)
        row = StrategyRow(strategy=name, ranks=ranks, replicas=1, limit=None, bound_by=reason)
        if not limit:
            yield replace(row, refused=reason)
            return
        if name == inner:
            yield self._row(name, ranks, limit, reason)
            return
        most_of_group, other_factors, tensor_factors = ranks - 1, range(2, min(limit, ranks) + 1), [1]
        refused = f"no group of 2 to {limit} ranks ({reason}) divides {ranks} ranks and nodes of {group}"
        refusal = replace(row, limit=self.batch * limit, bound_by=f"batch x {reason}", refused=refused)
        if name in WITH_TENSOR:
            refusal = replace(row, refused=f"no such groups divide {ranks} ranks and nodes of {group}")
            tensor_factors = [n for n in range(2, min(limit, group) + 1) if group % n == 0]
            other_factors = range(1, 2)
        if name == "data+pipeline+tensor":
            most_of_group, other_factors = ranks, range(2, len(self._blocks) + 1)
            limit, reason = limit * len(self._blocks), f"blocks x {reason}"
        sizes = [(tensor * other, tensor) for tensor, other in product(tensor_factors, other_factors)]
        sizes = [
            (size, tensor)
            for size, tensor in sizes
            if size <= most_of_group and ranks % size == 0 and (group % size == 0 or size % group == 0)
        ]
        if not sizes:
            yield refusal
        for size, tensor in sizes:
            yield self._row(name, size, limit, reason, tensor)

    def _most(self, inner: str) -> tuple[int, str]:
        """Returns the most ranks of a group and the limiting factor; 0: the strategy is impossible, and the reason."""
        convolutions = [layer for layer in self.layers if layer.kind.startswith("conv")]
        if inner == "pipeline":
            return len(self._blocks), "blocks"
        if inner == "tensor":
            heads = [layer.heads for layer in self.layers if layer.heads]
            if not heads:
                return 0, "it has no attention heads"
            return min(heads), "heads"
        if not convolutions:
            return 0, "it has no convolutions"
        if inner == "spatial" and self.cuts_depth:
            return convolutions[0].extents[0] // 2, "depth"  # Slabs are pooled by 2.
        if inner == "spatial":
            return math.prod(self._extents), "extents"
        if inner == "filter":
            return min(layer.filters for layer in convolutions), "filters"
        # A sample has few channels, so the first layer is not divided (Kahira et al., section 3.2).
        divided = [layer.channels for layer in convolutions if layer.has_gradient]
        if not divided:
            return 0, "it has one convolution"
        return min(divided), "channels"

    @cached_property
    def _extents(self) -> tuple[int, ...]:
        outputs = [_outputs(layer) for layer in self.layers if layer.extents]
        return tuple(map(min, zip(*outputs, strict=True)))

    @cached_property
    def _blocks(self) -> list[list[int]]:
        return [list(numbers) for _, numbers in groupby(range(len(self.layers)), key=lambda n: self.layers[n].block)]

    @cached_property
    def _weights(self) -> int:
        return sum(layer.weights for layer in self.layers)

    @cached_property
    def _prices(self) -> Prices:
        return {}

    def _groups(self, size: int, stride: int = 1) -> Groups:
        """Returns groups of ranks; layers with equal messages are priced once."""
        return Groups(self.layout, self.network, size, stride, self._prices)

    def _row(self, name: str, size: int, limit_of_group: int, reason: str, tensor: int = 1) -> StrategyRow:
        """Returns the row for groups of `size` ranks, of which a model can use `limit_of_group` for that reason.
        `tensor`: ranks that share each layer of a model that is also shared otherwise.
        """
        replicas = {"serial": 1}.get(name, self.layout.ranks) // size
        limit, by = self.batch * limit_of_group, " x ".join(filter(None, ["batch", reason]))
        if name in ("serial", *INNER):
            limit, by = limit_of_group, reason or "one rank"
        row = StrategyRow(
            strategy=name, ranks=self.layout.ranks, replicas=replicas, tensor_ranks=tensor, limit=limit, bound_by=by
        )
        if size > limit_of_group:
            return replace(row, refused=f"{size} ranks share a model, at most {limit_of_group} ({reason}) can")
        if replicas > self.batch:
            return replace(row, refused=f"{replicas} replicas with a batch of {self.batch}; at most one per sample")
        batch = -(-self.batch // replicas)
        model = self._model(name.removeprefix("data+"), size, batch, tensor)
        if model is None:
            return replace(row, refused=f"no grid of {size} ranks divides the extents {self._extents}")
        if name == "out-of-core":
            plan, note = self._planned(batch)
            if plan is None:
                return replace(row, bound_by="memory" if self.memory_limit else row.bound_by, refused=note)
            pass_s, peak_bytes = plan.predicted.pass_s, plan.predicted.peak_bytes
            model = replace(model, compute_s=pass_s, memory_bytes=peak_bytes, notes=(note,))
        row = self._priced(row, model, size, batch)
        if self.memory_limit is None:
            return row
        if row.memory_bytes > self.memory_limit:
            return replace(row, fits=False, bound_by="memory")
        return replace(row, fits=True)

    def _priced(self, row: StrategyRow, model: GroupModel, size: int, batch: int) -> StrategyRow:
        """Returns the row with the figures of a group's model, of the exchange between groups, and of updates."""
        name, replicas, ranks, memory = row.strategy, row.replicas, self.layout.ranks, model.memory_bytes
        is_spatial = name in ("spatial", "data+spatial")
        summed = self._groups(ranks) if is_spatial else self._groups(replicas, size)
        sent, exposed = self._overlapped(model, summed)
        weight_bytes, notes = WEIGHT_BYTES * self._weights, model.notes
        # By rings: an all-reduce is a reduce-scatter and an all-gather.
        once = weight_bytes * (1 - 1 / replicas)
        bytes_sent = {"data": 2 * once, "zero-1": 3 * once, "serial": 0.0, "tensor": model.sent_bytes}.get(name)
        if is_spatial:
            bytes_sent = model.sent_bytes or None
        update = self.times.update_s * sum(model.weights) / self._weights
        if name == "zero-1":
            gathered = summed.seconds("all-gather", weight_bytes, WEIGHT_BYTES)
            sent, exposed, update = sent + gathered, exposed + gathered, update / ranks
            memory -= self.slots * weight_bytes * (1 - 1 / ranks)
        elif name in ("fsdp", "fsdp+tensor"):
            sent, exposed, largest, bytes_sent = self._gathered(model, summed)
            update /= replicas
            bytes_sent += model.sent_bytes
            memory += 2 * largest - (2 + self.slots) * WEIGHT_BYTES * sum(model.weights) * (1 - 1 / replicas)
        elif name == "local-sgd":
            values = 1 + self.slots  # Parameters, and the optimizer's state (sync.average_momentum).
            sent = exposed = summed.seconds("allreduce", values * weight_bytes, WEIGHT_BYTES) / self.average_every
            bytes_sent = 2 * values * once / self.average_every
            notes = (f"an average every {self.average_every} updates; its effect on the loss is not modelled",)
        slabs = size if is_spatial and self.cuts_depth else 1
        if self.counted is not None and (slabs > 1 or name in ("serial", "data", "zero-1", "fsdp")):
            memory = as_counted(
                self.layers, self.counted, name, slots=self.slots, batch=batch, ranks=ranks, slabs=slabs
            )
        return replace(
            row,
            step_s=model.compute_s + update + model.communication_s + exposed + self.rest_s,
            compute_s=model.compute_s + update,
            communication_s=model.communication_s + sent,
            exposed_s=model.communication_s + exposed,
            memory_bytes=memory,
            phi=max(model.phi, summed.phi),
            bubble=model.bubble,
            imbalance=model.imbalance,
            average_every=self.average_every,
            sent_bytes=bytes_sent,
            notes=notes,
        )

    def _model(self, inner: str, size: int, batch: int, tensor: int) -> GroupModel | None:
        if inner in ("filter", "channel"):
            return self._by_parts(inner, size, batch)
        if inner == "spatial":
            # Each rank has a part of the image or volume, and its neighbours send the halo; on the fastest grid.
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            grids = [grid for grid in product(divisors, repeat=len(self._extents)) if math.prod(grid) == size]
            if self.cuts_depth:
                depth_grid = (size, *[1] * (len(self._extents) - 1))
                return self._on_grid(depth_grid, batch) if cut_layers(self.layers, size) else None
            models = [self._on_grid(grid, batch) for grid in grids if all(map(le, grid, self._extents))]
            return min(models, key=lambda model: model.compute_s + model.communication_s, default=None)
        if inner in ("tensor", "fsdp+tensor"):
            return self._tensor(size, batch)
        if inner in ("pipeline", "pipeline+tensor"):
            return self._pipeline(size // tensor, batch, tensor)
        return self._divided(batch, [LayerShare()] * len(self.layers), 0.0, [], self._groups(1))

    def _planned(self, batch: int) -> tuple[BlockPlan | None, str]:
        """Returns the plan and its blocks in words, or None and why there is no plan."""
        if self.memory_limit is None:
            return None, "it needs a memory limit, which is not known"
        state_bytes = WEIGHT_BYTES * (2 + self.slots) * self._weights
        if self.chain is None and state_bytes > self.memory_limit:
            text = f"parameters, gradients and optimizer state alone take {format_bytes(state_bytes)}"
            return None, f"training does not fit into {format_bytes(self.memory_limit)} with any plan: {text}"
        chain = self._chain(batch) if self.chain is None else scaled(self.chain, batch)
        try:
            plan = _best_plan(chain, self.rates, self.memory_limit)
        except DoesNotFitError as error:
            return None, str(error)
        decisions = ", ".join(sorted({block.decision for block in plan.blocks}))
        blocks = "measured blocks" if self.chain else "blocks of the network"
        return plan, f"a plan for {blocks}: {decisions}"

    def _chain(self, batch: int) -> Chain:
        """Returns the blocks of the network as a chain, whose activations can be recomputed."""
        units: list[Unit] = []
        bytes_per_element = batch * self.gamma * WEIGHT_BYTES
        for number, (block, forward, backward) in enumerate(zip(self._blocks, *self._passes(batch), strict=True)):
            activations = bytes_per_element * sum(self.layers[n].inputs + self.layers[n].outputs for n in block)
            entering = min(activations, bytes_per_element * self.layers[block[0]].inputs) if units else 0.0
            sizes = {"saved_bytes": math.ceil(activations - entering), "input_bytes": math.ceil(entering)}
            units.append(
                Unit(name=f"block {number}", forward_s=forward, backward_s=backward, input_saved=True, **sizes)
            )
        state = WEIGHT_BYTES * (2 + self.slots) * self._weights
        return Chain(units=tuple(units), batch=batch, output_bytes=0, state_bytes=state)

    def _passes(self, batch: int) -> list[list[float]]:
        forward = [batch * _sum(self.times.forward, block) for block in self._blocks]
        backward = [batch * _sum(self.times.backward, block) for block in self._blocks]
        return [forward, backward]

    def _overlapped(self, model: GroupModel, groups: Groups) -> tuple[float, float]:
        """Returns the time of messages and its part that adds to the step: what remains after the backward pass, during
        which gradients are summed, and what delays the group's own messages. While both use a link, their bytes add up.
        """
        sent = free = now = bucket = delay = 0.0
        exchange = MessagePrice()
        for number in reversed(range(len(model.weights))):
            now += model.backward[number]
            if model.messages:
                inner = model.messages[number]
                shared = min(max(0.0, free - now), exchange.shared_with(inner))
                now, free, delay = now + inner.seconds + shared, free + shared, delay + shared
            bucket += model.weights[number] * WEIGHT_BYTES
            if bucket and (bucket >= BUCKET_BYTES or number == 0):
                exchange = groups.message("allreduce", bucket, WEIGHT_BYTES)
                sent, free, bucket = sent + exchange.seconds, max(free, now) + exchange.seconds, 0.0
        return sent, delay + max(0.0, free - now)

    def _gathered(self, model: GroupModel, groups: Groups) -> tuple[float, float, float, float]:
        """Returns seconds of FSDP's messages and the exposed part, bytes of the largest block, and bytes sent. While a
        block computes, the next is gathered, and the last scattered; the root module (first and last block) is so once.
        Messages of tensor, alike in both passes, add to the block and, where they share its link, to gathers.
        """
        sizes = [WEIGHT_BYTES * _sum(model.weights, block) for block in self._blocks]
        root, inner_bytes = sum(sizes) - sum(sizes[1:-1]), [0, *sizes[1:-1], 0][: len(sizes)]
        gathers = [groups.message("all-gather", size, WEIGHT_BYTES) for size in (root, *inner_bytes)]
        first, *gather = [message.seconds for message in gathers]
        last, *scatter = [groups.seconds(self.scatter, size, WEIGHT_BYTES) for size in (root, *inner_bytes)]
        inner, shared = [0.0] * len(sizes), [0.0] * len(sizes)
        if model.messages:
            largest = max(gathers, key=attrgetter("seconds"))
            inner = [sum(model.messages[n].seconds for n in block) for block in self._blocks]
            shared = [sum(largest.shared_with(model.messages[n]) for n in block) for block in self._blocks]
        forward, backward = (
            [_sum(half, block) + seconds for block, seconds in zip(self._blocks, inner, strict=True)]
            for half in (model.forward, model.backward)
        )
        fetched = [*gather, *reversed(gather), 0.0, 0.0]
        freed = [0.0] * (len(sizes) + 1) + scatter[::-1]
        loads = zip(
            [*forward, *reversed(backward), 0.0], fetched[1:], freed, [*shared, *reversed(shared), 0.0], strict=True
        )
        end = first + last
        for computed, after, before, shared_s in loads:
            end += max(computed, after + before + shared_s)
        scattered = (2 if self.scatter == "allreduce" else 1) * sum(sizes)
        sent = (1 - 1 / groups.size) * (root + 2 * sum(inner_bytes) + scattered)
        return first + last + sum(fetched) + sum(freed), end - sum(forward) - sum(backward), max(sizes), sent

    def _divided(
        self,
        batch: int,
        shares: Sequence[LayerShare],
        forward_s: float,
        messages: Sequence[MessagePrice],
        groups: Groups,
    ) -> GroupModel:
        """Returns the model of a group whose ranks each work on a share of all layers. `forward_s`: seconds of messages
        in the forward pass; `messages`: those of each layer's backward pass, or none.
        """
        zipped = list(zip(self.layers, shares, strict=True))
        forward = [batch * sample_s * share.work for sample_s, share in zip(self.times.forward, shares, strict=True)]
        backward = [batch * sample_s * share.work for sample_s, share in zip(self.times.backward, shares, strict=True)]
        weights = [layer.weights * share.weights for layer, share in zipped]
        elements = sum(layer.inputs * share.inputs + layer.outputs * share.outputs for layer, share in zipped)
        return GroupModel(
            compute_s=sum(forward) + sum(backward),
            communication_s=forward_s + sum(message.seconds for message in messages),
            memory_bytes=self._held(sum(weights), batch * elements),
            weights=weights,
            backward=backward,
            phi=groups.phi,
            forward=forward,
            messages=messages,
        )

    def _held(self, weights: float, elements: float) -> float:
        return WEIGHT_BYTES * ((2 + self.slots) * weights + self.gamma * elements)

    def _by_parts(self, inner: str, size: int, batch: int) -> GroupModel:
        """Returns the model of filter (a rank computes some outputs, which are gathered) or channel (it reads some
        inputs; outputs are summed). Layers with fewer parts than ranks are whole on each rank.
        """
        by_filter = inner == "filter"
        forth, back = FILTER_COLLECTIVES if by_filter else FILTER_COLLECTIVES[::-1]
        groups, shares, forward_s, width = self._groups(size), [], 0.0, self.activation_bytes
        messages: list[MessagePrice] = []
        last = next(layer for layer in reversed(self.layers) if layer.is_product)
        for layer in self.layers:
            parts = layer.filters if by_filter else layer.channels * layer.has_gradient
            share = 1.0 if layer.is_product else 1 / size
            messages.append(MessagePrice())
            if layer.is_product and parts >= size:
                share = -(-parts // size) / parts
                outputs = 0 if layer is last and by_filter else layer.outputs
                forward_s += groups.seconds(forth, batch * outputs * width, width)
                messages[-1] = groups.message(back, batch * layer.inputs * layer.has_gradient * width, width)
            shares.append(LayerShare(work=share, weights=share))
        return self._divided(batch, shares, forward_s, messages, groups)

    def _tensor(self, size: int, batch: int) -> GroupModel:
        """Returns the model of tensor (Shoeybi et al., Megatron-LM (2019), section 3): heads and features are split."""
        groups = self._groups(size)
        shares, messages = self._tensor_parts(groups, batch)
        model = self._divided(batch, shares, sum(message.seconds for message in messages), messages, groups)
        summed = sum(
            2 * batch * layer.outputs * self.activation_bytes for layer in self.layers if layer.tensor == "row"
        )
        return replace(model, sent_bytes=2 * (1 - 1 / size) * summed)

    def _tensor_parts(self, groups: Groups, samples: float) -> tuple[list[LayerShare], list[MessagePrice]]:
        """Returns the share of a rank in each layer, and the all-reduce of each layer, alike in both passes."""
        size, width = groups.size, self.activation_bytes
        if size == 1:
            return [LayerShare()] * len(self.layers), [MessagePrice()] * len(self.layers)
        shares, messages, nothing = [], [], MessagePrice()
        heads = next(layer.heads for layer in self.layers if layer.heads)
        for layer in self.layers:
            parts = {"column": layer.filters, "row": layer.channels, "head": heads, "": 0}[layer.tensor]
            share = -(-parts // size) / parts if parts else 1.0
            inputs = 1.0 if layer.tensor == "column" else share
            outputs = 1.0 if layer.tensor == "row" else share
            shares.append(LayerShare(share, inputs, outputs, share))
            if layer.tensor == "row":
                messages.append(groups.message("allreduce", samples * layer.outputs * width, width))
            else:
                messages.append(nothing)
        return shares, messages

    def _on_grid(self, grid: tuple[int, ...], batch: int) -> GroupModel:
        """Returns the model of spatial on a grid; neighbours along the last dimension are neighbouring ranks."""
        size, width = math.prod(grid), self.activation_bytes
        lines = [self._groups(n, math.prod(grid[axis + 1 :])) for axis, n in enumerate(grid)]
        groups, shares, forward_s = self._groups(size), [LayerShare()] * len(self.layers), 0.0
        messages = [MessagePrice()] * len(self.layers)
        are_whole, sent_bytes = [not layer.extents for layer in self.layers], 0.0
        if self.cuts_depth:
            are_whole = [number >= len(cut_layers(self.layers, size)) for number in range(len(self.layers))]
            neighbours = 2 * (size - 1) / size
            sent_bytes = batch * sum(cut_bytes(self.layers, size, neighbours=neighbours, element_bytes=width))
            sent_bytes += 2 * WEIGHT_BYTES * self._weights * (1 - 1 / self.layout.ranks)
        for number, layer in enumerate(self.layers):
            if are_whole[number]:
                if number and not are_whole[number - 1]:  # The parts are gathered.
                    forward_s += groups.seconds("all-gather", batch * layer.inputs * width, width)
                continue
            out = _outputs(layer)
            share = math.prod(-(-extent // n) / extent for extent, n in zip(out, grid, strict=True))
            shares[number] = LayerShare(share, share, share)
            before = (layer.kernel - 1) // 2
            reaches = sorted(reach for reach in (before, layer.kernel - layer.stride - before) if reach > 0)
            for axis, (n, line) in enumerate(zip(grid, lines, strict=True)):
                slab = batch * width * n / size
                # Two parts have a neighbour on one side only, a single part has none.
                sides = {1: [], 2: reaches[-1:]}.get(n, reaches)
                for reach in sides:
                    forward_s += line.send(reach * layer.inputs / layer.extents[axis] * slab).seconds
                    if layer.has_gradient:
                        back = -(-reach // layer.stride) * layer.outputs / out[axis]
                        messages[number] = messages[number].then(line.send(back * slab))
        return replace(self._divided(batch, shares, forward_s, messages, groups), sent_bytes=sent_bytes)

    def _pipeline(self, size: int, batch: int, tensor: int) -> GroupModel:
        """Returns the model of a pipeline of `size` stages, which micro-batches pass forward and backward: GPipe (Huang
        et al. 2019), or with `tensor` ranks in each stage 1F1B (Narayanan et al. 2021), which takes as long, but whose
        stages hold no more micro-batches than there are stages behind them.
        """
        halves, width = (self.times.forward, self.times.backward), self.activation_bytes
        work = list(map(sum, zip(*self._passes(1), strict=True)))
        stages = [list(chain.from_iterable(self._blocks[first:last])) for first, last in cut(work, size)]
        parts = max(n for n in range(1, min(batch, PARTS_PER_STAGE * size) + 1) if batch % n == 0)
        groups, samples = self._groups(size, tensor), batch / parts
        shares, messages = self._tensor_parts(self._groups(tensor), samples)
        sends = [groups.send(samples * self.layers[stage[-1]].outputs * width).seconds for stage in stages[:-1]]
        summed = [sum(messages[number].seconds for number in stage) for stage in stages]
        total = alone = 0.0
        busy = [0.0] * size
        for half in halves:
            stage_s = [samples * sum(half[number] * shares[number].work for number in stage) for stage in stages]
            loaded = list(map(add, stage_s, summed))
            alone += passed(stage_s, parts)
            total += passed([*loaded, *sends], parts)
            busy = list(map(add, busy, loaded))
        weights = [layer.weights * share.weights for layer, share in zip(self.layers, shares, strict=True)]
        stage_weights = [_sum(weights, stage) for stage in stages]
        notes, sent = [f"{parts} parts of the batch"], total - alone
        if size > 1 and (shared := sum(layer.shared_weights for layer in self.layers)):
            # The first and the last stage hold them.
            stage_weights[-1] += shared
            sent += 2 * groups.send(shared * WEIGHT_BYTES / 2).seconds  # a ring of two
            notes.append("the first and the last stage hold the same embedding, and sum its gradient")
        held_parts = [parts] * size
        if tensor > 1:
            held_parts = [min(parts, size - number) for number in range(size)]
            notes.append(f"memory by 1F1B: activations of at most {counted(max(held_parts), 'part')}")
        else:
            notes.append("memory by GPipe: activations of all parts")
        layer_elements = [
            layer.inputs * part.inputs + layer.outputs * part.outputs
            for layer, part in zip(self.layers, shares, strict=True)
        ]
        elements = [
            held * samples * _sum(layer_elements, stage) for held, stage in zip(held_parts, stages, strict=True)
        ]
        return GroupModel(
            compute_s=alone,
            communication_s=sent,
            memory_bytes=max(map(self._held, stage_weights, elements)),
            weights=[max(stage_weights)],  # The exchange is not hidden.
            backward=[0.0],
            phi=groups.phi,
            bubble=1 - parts * sum(busy) / (size * total),
            imbalance=max(busy) * size / sum(busy),
            notes=tuple(notes),
        )


@lru_cache(maxsize=64)
def _best_plan(chain: Chain, rates: TransferRates | None, memory_limit: int) -> BlockPlan:
    swap = rates is not None
    return plan_blocks(chain, rates, memory_limit, recompute=True, swap=swap, effort=CURVE_EFFORT)


def _outputs(layer: Layer) -> list[int]:
    return [-(-extent // layer.stride) for extent in layer.extents]


def _sum(by_layer: Sequence[float], numbers: Sequence[int]) -> float:
    return sum(by_layer[number] for number in numbers)
