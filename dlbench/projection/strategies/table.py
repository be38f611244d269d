"""What each strategy would take at one rank count: computing, communication, memory of a rank, and its limits.

The table of Kahira et al., HPDC 2021 (ParaDL), table 3, with what counting showed to be otherwise:

- pipeline: stages are unequal, so a pass takes the sum of all stages and (parts - 1) times the longest, not (stages +
  parts - 1) times the longest; parts travel while others are computed; the update is once a step (an erratum).
- filter: the backward pass adds gradients of the *inputs* of layers, which poolings and strides make smaller than the
  outputs; the first layer's input has no gradient. Channel: a first layer whose channels are too few is whole on each
  rank, and outputs of the last layer are summed as well.
- spatial: two ranks have one neighbour, not two; windows with a stride reach less far on one side; the first layer's
  backward pass needs no halo; dense layers behind the last convolution are computed whole by each rank.
- memory has the optimizer's slots; activations count once (gamma says how much of them is held). Where a run was
  watched for memory, data, ZeRO-1 and FSDP are counted moment by moment (`as_counted`): activations go while gradients
  come, DDP's buckets are a second copy of these on a CPU, and FSDP holds its root module and blocks in turn.

Collectives are rings unless the network was measured to be better at another algorithm, or is by data sheet, where an
all-reduce is the best of those that libraries have. Where a gradient is exchanged
within the backward pass, only what sticks out is exposed. Seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise, product
from typing import NamedTuple, Self

from dlbench.perfmodels.out_of_core.planner import CURVE_EFFORT, plan_blocks, scaled
from dlbench.perfmodels.out_of_core.search import DoesNotFitError
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.strategies.layers import WEIGHT_BYTES, CountedMemory, LayerTimes, as_counted
from dlbench.projection.strategies.network import Groups
from dlbench.report.table import column
from dlbench.specs.comm import Collective, NetworkModel
from dlbench.specs.layers import Layer
from dlbench.specs.out_of_core import BlockPlan, Chain, TransferRates, Unit
from dlbench.units import format_bytes

BUCKET_BYTES = 25 * 2**20  # Gradients that travel together: the default of DDP's bucket_cap_mb (torch.nn.parallel).
PARTS_PER_STAGE = 4  # Of a batch in a pipeline: from there on its idle time is small (Huang et al., GPipe (2019)).
AVERAGE_EVERY = 8  # Updates between two averages of local SGD, where no run says otherwise.

INNER = ("spatial", "pipeline", "filter", "channel", "tensor")  # Strategies that share a model, each next to data.
STRATEGIES = (
    *("serial", "data", "zero-1", "fsdp", "out-of-core", "local-sgd"),
    *INNER,
    *(f"data+{name}" for name in INNER),
)


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A strategy at one rank count. No run has shown it unless `measured_s` is there."""

    strategy: str
    ranks: int
    replicas: int  # p1: groups that each hold a model and share the batch; of p2 = ranks / p1 ranks each.
    # Most ranks that the strategy can use; None: not known, for it is refused altogether.
    limit: int | None = field(metadata=column("Most ranks", text="{:,}".format))
    bound_by: str = field(metadata=column("Limited by"))  # What limits it; with `fits` False, memory.
    refused: str = ""  # Why there is no such thing at this rank count; then all that follows is 0.
    # Computing, exposed messages, what runs hold besides.
    step_s: float = field(default=0.0, metadata=column("Step", unit="s"))
    compute_s: float = field(default=0.0, metadata=column("Computing", unit="s"))
    # All messages of a rank, one after the other; and what they add to the step.
    communication_s: float = field(default=0.0, metadata=column("Messages", unit="s"))
    exposed_s: float = field(default=0.0, metadata=column("Exposed", unit="s"))
    # Of the rank that holds most.
    memory_bytes: float = field(default=0.0, metadata=column("Memory", text=format_bytes))
    phi: float = 1.0  # Flows over links of the busiest level, of the groups that exchange most at once.
    fits: bool | None = None  # None: no limit is known.
    sent_bytes: float | None = field(default=None, metadata=column("Sent per rank", text=format_bytes))  # In a step.
    measured_s: float | None = None  # The step as runs had it, and what they held and sent.
    measured_memory_bytes: float | None = None
    measured_sent_bytes: float | None = None
    average_every: int = AVERAGE_EVERY  # Of local SGD.
    is_ideal: bool = False  # Of data sheets alone.
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """1 - |projected / measured - 1|; None: model only."""
        return None if self.measured_s is None or self.refused else 1 - abs(self.step_s / self.measured_s - 1)


def best(rows: Sequence[StrategyRow]) -> StrategyRow | None:
    """The shortest step of those that fit, or that are not known not to, and that train as data parallelism does, which
    local SGD does not; of steps that print alike the first of `STRATEGIES`. None: there is none.
    """
    able = (row for row in rows if not row.refused and row.fits is not False and row.strategy != "local-sgd")
    return min(able, key=lambda row: float(f"{row.step_s:.3g}"), default=None)


class LayerShare(NamedTuple):
    """What one rank of a group has of a layer (1): of its work, elements and weights."""

    work: float = 1.0
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupModel:
    """One model on a group of ranks, without the exchange of gradients between groups."""

    compute_s: float  # Forward and backward.
    communication_s: float
    memory_bytes: float
    weights: Sequence[float]  # Elements of a rank by layer, whose gradients it exchanges.
    backward: Sequence[float]  # Seconds of each layer's backward pass, behind which that exchange hides.
    phi: float
    sent_bytes: float = 0.0  # By a rank, within its group, where it is counted.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A training on the ranks of `layout`. Pricing raises `UserError`: a level of the network that is needed was never
    measured.
    """

    layers: tuple[Layer, ...]  # Of `Model.layer_table`.
    times: LayerTimes
    network: NetworkModel
    layout: Layout
    batch: int  # Samples of a step of all ranks.
    slots: int  # Values that the optimizer keeps for each weight.
    activation_bytes: int = WEIGHT_BYTES  # Of an element of an activation where it travels.
    gamma: float = 1.0  # Activations held over the sum of x and y (`layers.gamma`).
    counted: CountedMemory | None = None  # What ranks were seen to hold; None: gamma and the formulas of the table.
    memory_limit: int | None = None  # Of a rank; None: not known.
    chain: Chain | None = None  # As a run out of core measured it; None: blocks of the network.
    rates: TransferRates | None = None  # Likewise; None: blocks are recomputed, not swapped.
    rest_s: float = 0.0  # What a step has besides.
    average_every: int = AVERAGE_EVERY  # Updates between two averages of local SGD.
    scatter: Collective = "reduce-scatter"  # What FSDP's is; Gloo makes an all-reduce of it.

    def at(self, ranks: int, batch: int) -> Self:
        """The same with so many ranks, and samples of a step."""
        return replace(self, layout=replace(self.layout, ranks=ranks), batch=batch)

    def table(self, strategies: Sequence[str] = STRATEGIES) -> tuple[StrategyRow, ...]:
        """Every strategy; of one next to data a row for each way to group the ranks."""
        return tuple(row for name in strategies for row in self._rows(name))

    # --- which groups there are, and how far they go

    def _rows(self, name: str) -> Iterator[StrategyRow]:
        inner, ranks, group = name.removeprefix("data+"), self.layout.ranks, self.layout.group_size
        if inner not in INNER:
            yield self._row(name, 1, 1, "")
            return
        most, reason = self._most(inner)
        row = StrategyRow(strategy=name, ranks=ranks, replicas=1, limit=None, bound_by=reason)
        if not most:
            yield replace(row, refused=reason)
        elif name == inner:
            yield self._row(name, ranks, most, reason)
        else:
            sizes = [n for n in range(2, ranks) if ranks % n == 0 and (group % n == 0 or n % group == 0) and n <= most]
            yield from (self._row(name, size, most, reason) for size in sizes)
            if not sizes:
                why = f"no group of 2 to {most} ranks ({reason}) divides {ranks} ranks and nodes of {group}"
                yield replace(row, limit=self.batch * most, bound_by=f"batch x {reason}", refused=why)

    def _most(self, inner: str) -> tuple[int, str]:
        """Most ranks of a group, and what limits them; 0: the network has nothing to divide so, and why."""
        convolutions = [layer for layer in self.layers if layer.kind.startswith("conv")]
        if inner == "pipeline":
            return len(self._blocks), "blocks"
        if inner == "tensor":
            heads = [layer.heads for layer in self.layers if layer.heads]
            return (min(heads), "heads") if heads else (0, "it has no attention heads")
        if not convolutions:
            return 0, "it has no convolutions"
        if inner == "spatial":
            return math.prod(self._extents), "extents"
        if inner == "filter":
            return min(layer.filters for layer in convolutions), "filters"
        # The sample's own channels are few: the first layer stays whole (Kahira et al., section 3.2).
        divided = [layer.channels for layer in convolutions if layer.has_gradient]
        return (min(divided), "channels") if divided else (0, "it has one convolution")

    @cached_property
    def _extents(self) -> tuple[int, ...]:
        """Of each dimension the fewest elements of a layer, its output included."""
        outputs = ([-(-one // layer.stride) for one in layer.extents] for layer in self.layers if layer.extents)
        return tuple(map(min, zip(*outputs, strict=True)))

    @cached_property
    def _blocks(self) -> list[list[int]]:
        """Numbers of the layers of each block."""
        return [list(one) for _, one in groupby(range(len(self.layers)), key=lambda n: self.layers[n].block)]

    @cached_property
    def _weights(self) -> int:
        return sum(layer.weights for layer in self.layers)

    # --- what a group takes, and what all groups together

    def _limited(self, name: str, replicas: int, most: int, reason: str) -> StrategyRow:
        """Returns the row of a strategy with what limits its ranks, before anything is priced."""
        limit, by = self.batch * most, f"batch x {reason}" if reason else "batch"
        if name in ("serial", *INNER):
            limit, by = most, reason or "one rank"
        return StrategyRow(strategy=name, ranks=self.layout.ranks, replicas=replicas, limit=limit, bound_by=by)

    def _row(self, name: str, size: int, most: int, reason: str) -> StrategyRow:
        """Of groups of `size` ranks, of which a model can use `most` for that reason."""
        inner, ranks = name.removeprefix("data+"), 1 if name == "serial" else self.layout.ranks
        replicas = ranks // size
        row = self._limited(name, replicas, most, reason)
        if size > most:
            return replace(row, refused=f"{size} ranks share a model, and it has {most} ({reason})")
        if replicas > self.batch:
            return replace(row, refused=f"{replicas} replicas, and a batch of {self.batch}: at most one per sample")
        batch = -(-self.batch // replicas)
        model = self._model(inner, size, batch)
        if model is None:
            return replace(row, refused=f"{size} ranks make no grid that the extents {self._extents} hold")
        summed = Groups(self.layout, self.network, *((ranks, 1) if inner == "spatial" else (replicas, size)))
        sent, exposed = self._overlapped(model, summed)
        compute, held, notes = model.compute_s, model.memory_bytes, model.notes
        # By rings: an all-reduce is a reduce-scatter and an all-gather.
        once = WEIGHT_BYTES * self._weights * (1 - 1 / replicas)
        bytes_sent = {"data": 2 * once, "zero-1": 3 * once, "serial": 0.0, "tensor": model.sent_bytes}.get(name)
        update = self.times.update_s * sum(model.weights) / self._weights
        whole = WEIGHT_BYTES * self._weights
        if name == "zero-1":
            gathered = summed.seconds("all-gather", whole, WEIGHT_BYTES)
            sent, exposed, update = sent + gathered, exposed + gathered, update / ranks
            held -= self.slots * whole * (1 - 1 / ranks)
        elif name == "fsdp":
            sent, exposed, largest, bytes_sent = self._gathered(batch, summed)
            update /= ranks
            held += 2 * largest - (2 + self.slots) * whole * (1 - 1 / ranks)
        elif name == "local-sgd":
            held_apart = 1 + self.slots  # Parameters, and the optimizer's state (sync.average_momentum).
            sent = exposed = summed.seconds("allreduce", held_apart * whole, WEIGHT_BYTES) / self.average_every
            bytes_sent = 2 * held_apart * once / self.average_every
            notes = (f"an average every {self.average_every} updates; what it does to the loss has no model",)
        elif name == "out-of-core":
            if self.memory_limit is None:
                return replace(row, refused="it plans for a memory limit, and none is known")
            try:
                plan = self._planned(batch, self.memory_limit)
            except DoesNotFitError as error:
                return replace(row, bound_by="memory", refused=str(error))
            compute, held = plan.predicted.pass_s, plan.predicted.peak_bytes
            notes = (self._plan_note(plan),)
        if self.counted is not None and name in ("serial", "data", "zero-1", "fsdp"):
            held = as_counted(self.layers, self.counted, name, slots=self.slots, batch=batch, ranks=ranks)
        fits = None if self.memory_limit is None else held <= self.memory_limit
        return replace(
            row,
            bound_by="memory" if fits is False else row.bound_by,
            step_s=compute + update + model.communication_s + exposed + self.rest_s,
            compute_s=compute + update,
            communication_s=model.communication_s + sent,
            exposed_s=model.communication_s + exposed,
            memory_bytes=held,
            phi=max(model.phi, summed.phi),
            average_every=self.average_every,
            sent_bytes=bytes_sent,
            fits=fits,
            notes=notes,
        )

    def _model(self, inner: str, size: int, batch: int) -> GroupModel | None:
        if inner in ("filter", "channel"):
            return self._by_parts(inner, size, batch)
        if inner == "spatial":
            # Each rank has a part of the image or volume, and asks its neighbours for what its windows need beyond; on
            # the grid that is fastest.
            grids = product(*([n for n in range(1, size + 1) if size % n == 0 and n <= most] for most in self._extents))
            found = [self._on_grid(grid, batch) for grid in grids if math.prod(grid) == size]
            return min(found, key=lambda one: one.compute_s + one.communication_s, default=None)
        if inner == "tensor":
            return self._tensor(size, batch)
        if inner == "pipeline":
            return self._pipeline(size, batch)
        return self._divided(batch, [LayerShare()] * len(self.layers), 0.0, Groups(self.layout, self.network, 1))

    def _planned(self, batch: int, memory_limit: int) -> BlockPlan:
        """Returns the plan out of core. Raises `DoesNotFitError`: there is none within the limit."""
        chain = self._chain(batch) if self.chain is None else scaled(self.chain, batch)
        swap = self.rates is not None
        return plan_blocks(chain, self.rates, memory_limit, recompute=True, swap=swap, effort=CURVE_EFFORT)

    def _plan_note(self, plan: BlockPlan) -> str:
        decisions = ", ".join(sorted({block.decision for block in plan.blocks}))
        return f"a plan for {'measured blocks' if self.chain else 'blocks of the network'}: {decisions}"

    def _chain(self, batch: int) -> Chain:
        """The blocks of the network as a chain, whose activations can be recomputed."""
        units: list[Unit] = []
        each = batch * self.gamma * WEIGHT_BYTES
        for number, (block, forward, backward) in enumerate(zip(self._blocks, *self._passes(batch), strict=True)):
            held = each * sum(self.layers[n].inputs + self.layers[n].outputs for n in block)
            entering = min(held, each * self.layers[block[0]].inputs) if units else 0.0
            sizes = {"saved_bytes": math.ceil(held - entering), "input_bytes": math.ceil(entering)}
            units.append(
                Unit(name=f"block {number}", forward_s=forward, backward_s=backward, input_saved=True, **sizes)
            )
        state = WEIGHT_BYTES * (2 + self.slots) * self._weights
        return Chain(units=tuple(units), batch=batch, output_bytes=0, state_bytes=state)

    def _passes(self, batch: int) -> list[list[float]]:
        """Forward and backward seconds of each block."""
        halves = self.times.forward, self.times.backward
        return [[batch * sum(half[n] for n in block) for block in self._blocks] for half in halves]

    def _overlapped(self, model: GroupModel, groups: Groups) -> tuple[float, float]:
        """Gradients summed within the backward pass, from the last layer on, as many at a time as a bucket holds: on
        the wire, and past its end.
        """
        sent = free = now = held = 0.0
        for number in reversed(range(len(model.weights))):
            now += model.backward[number]
            held += model.weights[number] * WEIGHT_BYTES
            if held and (held >= BUCKET_BYTES or number == 0):
                cost = groups.seconds("allreduce", held, WEIGHT_BYTES)
                sent, free, held = sent + cost, max(free, now) + cost, 0.0
        return sent, max(0.0, free - now)

    def _gathered(self, batch: int, groups: Groups) -> tuple[float, float, float, float]:
        """FSDP: while a pass of a block computes, gradients of the block before are scattered (backward), and weights
        of the next are gathered. On the wire, exposed, the bytes of the largest block, and those that a rank sends.

        The first and the last block are the root module: gathered once, before the first pass, and scattered last.
        """
        sizes = [WEIGHT_BYTES * sum(self.layers[n].weights for n in block) for block in self._blocks]
        root, own = sum(sizes) - sum(sizes[1:-1]), [0, *sizes[1:-1], 0][: len(sizes)]
        (first, *gather), (last, *scatter) = (
            [groups.seconds(collective, size, WEIGHT_BYTES) for size in (root, *own)]
            for collective in ("all-gather", self.scatter)
        )
        forward, backward = self._passes(batch)
        fetched = [*gather, *reversed(gather), 0.0, 0.0]
        freed = [0.0] * (len(sizes) + 1) + scatter[::-1]
        pairs = zip([*forward, *reversed(backward), 0.0], fetched[1:], freed, strict=True)
        end = first + sum(max(computed, after + before) for computed, after, before in pairs) + last
        scattered = (2 if self.scatter == "allreduce" else 1) * sum(sizes)
        sent = (1 - 1 / groups.size) * (root + 2 * sum(own) + scattered)
        return first + last + sum(fetched) + sum(freed), end - sum(forward) - sum(backward), max(sizes), sent

    # --- strategies that share a model

    def _divided(self, batch: int, shares: Sequence[LayerShare], seconds: float, groups: Groups) -> GroupModel:
        """A group whose ranks all work on all layers, each on its share of them, and exchange for so many seconds."""
        zipped = list(zip(self.layers, shares, strict=True))
        forward, backward = (
            [batch * one * share.work for one, share in zip(half, shares, strict=True)]
            for half in (self.times.forward, self.times.backward)
        )
        weights = [layer.weights * share.weights for layer, share in zipped]
        elements = sum(layer.inputs * share.inputs + layer.outputs * share.outputs for layer, share in zipped)
        return GroupModel(
            compute_s=sum(forward) + sum(backward),
            communication_s=seconds,
            memory_bytes=self._held(sum(weights), batch * elements),
            weights=weights,
            backward=backward,
            phi=groups.phi,
        )

    def _held(self, weights: float, elements: float) -> float:
        """Bytes of weights with gradients and the optimizer's values, and of activations."""
        return WEIGHT_BYTES * ((2 + self.slots) * weights + self.gamma * elements)

    def _by_parts(self, inner: str, size: int, batch: int) -> GroupModel:
        """Filter: each rank computes some of a layer's outputs, which are gathered; gradients of inputs are summed.
        Channel: each reads some of its inputs; outputs are summed, gradients of inputs gathered.

        A layer with fewer parts than ranks (a dense layer, or the first of channels) is whole on each of them. Outputs
        of the last one are needed nowhere else in full.
        """
        by_filter = inner == "filter"
        forth: Collective = "all-gather" if by_filter else "allreduce"
        back: Collective = "allreduce" if by_filter else "all-gather"
        groups, shares, seconds, width = Groups(self.layout, self.network, size), [], 0.0, self.activation_bytes
        last = next(layer for layer in reversed(self.layers) if layer.is_product)
        for layer in self.layers:
            parts = layer.filters if by_filter else layer.channels * layer.has_gradient
            share = 1.0 if layer.is_product else 1 / size
            if layer.is_product and parts >= size:
                share = -(-parts // size) / parts
                outputs = 0 if layer is last and by_filter else layer.outputs
                seconds += groups.seconds(forth, batch * outputs * width, width)
                seconds += groups.seconds(back, batch * layer.inputs * layer.has_gradient * width, width)
            shares.append(LayerShare(work=share, weights=share))
        return self._divided(batch, shares, seconds, groups)

    def _tensor(self, size: int, batch: int) -> GroupModel:
        """Heads and inner features are divided; what two divided layers make is summed, forward and backward.

        Each pair of a layer divided by its outputs and one divided by its inputs costs two sums of what enters it
        (Shoeybi et al., Megatron-LM (2019), section 3).
        """
        groups, shares, seconds, width = Groups(self.layout, self.network, size), [], 0.0, self.activation_bytes
        summed = 0.0
        heads = next(layer.heads for layer in self.layers if layer.heads)
        for layer in self.layers:
            parts = {"column": layer.filters, "row": layer.channels, "head": heads, "": 0}[layer.tensor]
            share = -(-parts // size) / parts if parts else 1.0
            inputs, outputs = (1.0 if layer.tensor == whole else share for whole in ("column", "row"))
            shares.append(LayerShare(share, inputs, outputs, share))
            if layer.tensor == "row":
                seconds += 2 * groups.seconds("allreduce", batch * layer.outputs * width, width)
                summed += 2 * batch * layer.outputs * width
        return replace(self._divided(batch, shares, seconds, groups), sent_bytes=2 * (1 - 1 / size) * summed)

    def _on_grid(self, grid: tuple[int, ...], batch: int) -> GroupModel:
        """Neighbours along the last dimension are neighbouring ranks."""
        size, width = math.prod(grid), self.activation_bytes
        lines = [Groups(self.layout, self.network, n, math.prod(grid[axis + 1 :])) for axis, n in enumerate(grid)]
        groups, shares, seconds = Groups(self.layout, self.network, size), [LayerShare()] * len(self.layers), 0.0
        for number, layer in enumerate(self.layers):
            if not layer.extents:
                if number and self.layers[number - 1].extents:  # what was divided is put together
                    seconds += groups.seconds("all-gather", batch * layer.inputs * width, width)
                continue
            out = [-(-extent // layer.stride) for extent in layer.extents]
            share = math.prod(-(-extent // n) / extent for extent, n in zip(out, grid, strict=True))
            shares[number] = LayerShare(share, share, share)
            before = (layer.kernel - 1) // 2
            reaches = sorted(one for one in (before, layer.kernel - layer.stride - before) if one > 0)
            for axis, (n, line) in enumerate(zip(grid, lines, strict=True)):
                slab = batch * width * n / size
                # Two parts have a neighbour on one side only.
                for reach in reaches if n > 2 else reaches[-1:] if n == 2 else []:
                    seconds += line.send_seconds(reach * layer.inputs / layer.extents[axis] * slab)
                    if layer.has_gradient:
                        back = -(-reach // layer.stride) * layer.outputs / out[axis]
                        seconds += line.send_seconds(back * slab)
        return self._divided(batch, shares, seconds, groups)

    def _pipeline(self, size: int, batch: int) -> GroupModel:
        """GPipe (Huang et al. 2019): the parts of a batch go through all stages, and back; then it updates."""
        halves, width = (self.times.forward, self.times.backward), self.activation_bytes
        work = list(map(sum, zip(*self._passes(1), strict=True)))
        stages = [[n for block in self._blocks[first:last] for n in block] for first, last in cut(work, size)]
        parts = max(n for n in range(1, min(batch, PARTS_PER_STAGE * size) + 1) if batch % n == 0)
        groups, share = Groups(self.layout, self.network, size), batch / parts
        sends = [groups.send_seconds(share * self.layers[stage[-1]].outputs * width) for stage in stages[:-1]]
        whole = alone = 0.0
        for half in halves:
            each = [share * sum(half[n] for n in stage) for stage in stages]
            alone += _passed(each, parts)
            whole += _passed([*each, *sends], parts)
        held = [sum(float(self.layers[n].weights) for n in stage) for stage in stages]
        notes, sent = [f"{parts} parts of the batch"], whole - alone
        if size > 1 and (shared := sum(layer.shared_weights for layer in self.layers)):
            # The first stage has them for its own layer, the last one holds them as well.
            held[-1] += shared
            sent += 2 * groups.send_seconds(shared * WEIGHT_BYTES / 2)  # a ring of two
            notes.append("the first and the last stage hold the same embedding, and sum its gradient")
        elements = [sum(self.layers[n].inputs + self.layers[n].outputs for n in stage) for stage in stages]
        return GroupModel(
            compute_s=alone,
            communication_s=sent,
            memory_bytes=max(map(self._held, held, [batch * one for one in elements])),
            weights=[max(held)],  # which no backward pass hides
            backward=[0.0],
            phi=groups.phi,
            notes=tuple(notes),
        )


def cut(work: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Consecutive pieces (first, behind last), none empty, whose largest sum is least."""
    sums = [0.0, *accumulate(work)]
    # Of the first n blocks in so many parts: the least largest sum, and where the parts end.
    least: dict[int, tuple[float, tuple[int, ...]]] = {n: (sums[n], (n,)) for n in range(1, len(sums))}
    for part in range(2, parts + 1):
        least = {
            n: min((max(least[at][0], sums[n] - sums[at]), (*least[at][1], n)) for at in range(part - 1, n))
            for n in range(part, len(sums))
        }
    return tuple(pairwise((0, *least[len(work)][1])))


def _passed(times: Sequence[float], parts: int) -> float:
    """Seconds in which equal parts pass through stages, one behind the other: a flow shop without waiting for room."""
    return sum(times) + (parts - 1) * max(times)
