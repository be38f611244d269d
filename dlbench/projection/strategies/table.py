"""What each strategy would take at one rank count: computing, communication, memory of a rank, and its limits.

The table of Kahira et al., HPDC 2021 (ParaDL), table 3, with what counting showed to be otherwise:

- pipeline: stages are unequal, so a pass takes the sum of all stages and (parts - 1) times the longest, not (stages +
  parts - 1) times the longest; parts travel while others are computed; the update is once a step (an erratum).
- filter: the backward pass adds gradients of the *inputs* of layers, which poolings and strides make smaller than the
  outputs; the first layer's input has no gradient. Channel: a first layer whose channels are too few is whole on each
  rank, and outputs of the last layer are summed as well.
- spatial: two ranks have one neighbour, not two; windows with a stride reach less far on one side; the first layer's
  backward pass needs no halo; dense layers behind the last convolution are computed whole by each rank.
- memory has the optimizer's slots; activations count once (gamma says how much of them is held).

Collectives are rings unless the network was measured to be better at another algorithm. Where a gradient is exchanged
within the backward pass, only what sticks out is exposed. Seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, product

from dlbench.perfmodels.memory.planner import CURVE_EFFORT, plan_blocks, scaled
from dlbench.perfmodels.memory.search import DoesNotFitError
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.strategies.layers import LayerTimes
from dlbench.projection.strategies.memory import chain_of
from dlbench.projection.strategies.network import Groups
from dlbench.specs.comm import Collective, NetworkModel
from dlbench.specs.layers import Layer
from dlbench.specs.memory import Chain, TransferRates

BUCKET_BYTES = 25 * 2**20  # Gradients that travel together: the default of DDP's bucket_cap_mb (torch.nn.parallel).
PARTS_PER_STAGE = (
    4  # Parts of a batch in a pipeline: from there on its idle time is small (Huang et al., GPipe (2019)).
)
AVERAGE_EVERY = 8  # Steps between two averages of local SGD (`sync.average_every`), where nothing else is said.

INNER = ("spatial", "pipeline", "filter", "channel", "tensor")  # Strategies that share a model, each next to data.
STRATEGIES = (
    "serial",
    "data",
    "zero-1",
    "fsdp",
    "out-of-core",
    "local-sgd",
    *INNER,
    *(f"data+{name}" for name in INNER),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy at one rank count. No run has shown it unless `measured_s` is there."""

    strategy: str
    ranks: int
    replicas: int  # p1: groups that each hold a model and share the batch; of p2 = ranks / p1 ranks each.
    limit: int | None  # Most ranks that the strategy can use; None: not known, for it is refused altogether.
    bound_by: str  # What limits it, e.g. the smallest convolution's filters; with `fits` False, memory.
    refused: str = ""  # Why there is no such thing at this rank count; then all that follows is 0.
    compute_s: float = 0.0
    communication_s: float = 0.0  # All messages of a rank, one after the other.
    exposed_s: float = 0.0  # What they add to the step.
    memory_bytes: float = 0.0  # Of the rank that holds most.
    redundant_bytes: float = 0.0  # Weights that all ranks hold together beyond one copy of the network.
    phi: float = 1.0  # Flows over links of the busiest level, of the groups that exchange most at once.
    fits: bool | None = None  # None: no limit is known.
    rest_s: float = 0.0  # What a step has besides: input, host, waiting for others; as it was measured.
    step_s: float = 0.0  # Computing, exposed messages and the rest.
    measured_s: float | None = None  # The step as runs had it.
    is_ideal: bool = False  # Of data sheets alone.
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """1 - |projected / measured - 1|; None: model only."""
        return None if self.measured_s is None or self.refused else 1 - abs(self.step_s / self.measured_s - 1)


def table(
    layers: Sequence[Layer],
    times: LayerTimes,
    network: NetworkModel,
    layout: Layout,
    *,
    batch: int,
    optimizer_slots: int,
    element_bytes: int = 4,
    activation_bytes: int | None = None,
    gamma: float = 1.0,
    memory_limit: int | None = None,
    chain: Chain | None = None,
    rates: TransferRates | None = None,
    rest_s: float = 0.0,
    average_every: int = AVERAGE_EVERY,
    strategies: Sequence[str] = STRATEGIES,
    sharing: bool = True,
) -> tuple[Row, ...]:
    """Every strategy at `layout.ranks`; of a strategy next to data one row for each way to group the ranks.

    `layers`: of `Model.layer_table`. `times`: of each layer. `network`: costs of messages. `layout`: ranks, those of
    a node, those below a leaf switch. `batch`: samples of a step of all ranks. `optimizer_slots`: values that the
    optimizer keeps for each weight. `element_bytes`: of a weight or gradient. `activation_bytes`: of an element of an
    activation where it travels; None: the same. `gamma`: activations held over sum of x and y (`memory.gamma`).
    `memory_limit`: bytes of a rank; None: not known. `chain` and `rates`: as a run of out-of-core training measured
    them; None: blocks of the network, which are recomputed. `rest_s`: what a step has besides. `average_every`: H of
    local SGD. `strategies`: which of `STRATEGIES`. `sharing`: whether flows share links (phi); without, each has a
    port of its own. Raises `UserError`: a level of the network that is needed was never measured; `ValueError`: no
    layers, or times of others.
    """
    if not layers or len(layers) != len(times.forward):
        raise ValueError(f"{len(layers)} layers with times of {len(times.forward)}")
    if not sharing:
        network = network.model_copy(
            update={str(name): level.model_copy(update={"links": None}) for name, level in network.levels.items()}
        )
    model = _Model(
        layers=tuple(layers),
        times=times,
        network=network,
        layout=layout,
        batch=batch,
        slots=optimizer_slots,
        width=element_bytes,
        activation_width=activation_bytes or element_bytes,
        gamma=gamma,
        limit=memory_limit,
        chain=chain,
        rates=rates,
        average_every=average_every,
    )
    rows = []
    for row in (row for name in strategies for row in model.rows(name)):
        if not row.refused:
            fits = None if memory_limit is None else row.memory_bytes <= memory_limit
            step = row.compute_s + row.exposed_s + rest_s
            row = replace(row, fits=fits, rest_s=rest_s, step_s=step)
            row = replace(row, bound_by="memory") if fits is False else row
        rows.append(row)
    return tuple(rows)


def best(rows: Sequence[Row]) -> Row | None:
    """The shortest step of those that fit, or that are not known not to, and that train as data parallelism does, which
    local SGD does not; None: there is none.
    """
    able = (row for row in rows if not row.refused and row.fits is not False and row.strategy != "local-sgd")
    return min(able, key=lambda row: row.step_s, default=None)


@dataclass(frozen=True)
class _Share:
    """What one rank of a group has of a layer (1): of its work, elements and weights."""

    work: float = 1.0
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Inner:
    """One model on a group of ranks, without the exchange of gradients between groups."""

    compute_s: float  # Forward and backward.
    update_share: float  # Of the update of a whole network (1).
    communication_s: float
    memory_bytes: float
    weights: tuple[float, ...]  # Elements of each layer whose gradients a rank exchanges.
    backward: tuple[float, ...]  # Seconds of each layer's backward pass.
    group_weights: float  # Elements that all ranks of the group hold.
    groups: Groups
    sums_over_all: bool = False  # Whether gradients are summed over all ranks, those of the group included.
    is_overlapped: bool = True  # Whether that begins within the backward pass.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Model:
    layers: tuple[Layer, ...]
    times: LayerTimes
    network: NetworkModel
    layout: Layout
    batch: int
    slots: int
    width: int
    activation_width: int
    gamma: float
    limit: int | None
    chain: Chain | None
    rates: TransferRates | None
    average_every: int

    # --- which groups there are, and how far they go

    def rows(self, name: str) -> Iterator[Row]:
        inner = name.removeprefix("data+")
        if inner not in INNER:
            yield self._plain(name)
            return
        most, reason = self.most(inner)
        ranks, group = self.layout.ranks, self.layout.group_size
        if not most:
            yield Row(strategy=name, ranks=ranks, replicas=1, limit=None, bound_by=reason, refused=reason)
        elif name == inner:
            yield self._shared(name, inner, ranks, most, reason)
        else:
            sizes = [n for n in range(2, ranks) if ranks % n == 0 and (group % n == 0 or n % group == 0)]
            rows = [self._shared(name, inner, size, most, reason) for size in sizes if size <= most]
            total, by = self.batch * most, f"batch x {reason}"
            if not rows:
                why = f"no group of 2 to {most} ranks ({reason}) divides {ranks} ranks and nodes of {group}"
                rows = [Row(strategy=name, ranks=ranks, replicas=1, limit=total, bound_by=by, refused=why)]
            yield from rows

    def most(self, inner: str) -> tuple[int, str]:
        """Most ranks of a group, and what limits them; 0: the network has nothing to divide so, and why."""
        convolutions = [layer for layer in self.layers if layer.kind.startswith("conv")]
        if inner == "pipeline":
            return len({layer.block for layer in self.layers}), "blocks"
        if inner == "tensor":
            heads = [layer.heads for layer in self.layers if layer.heads]
            return (min(heads), "heads") if heads else (0, "it has no attention heads")
        if not convolutions:
            return 0, "it has no convolutions"
        if inner == "spatial":
            return math.prod(self._extents()), "smallest extents"
        if inner == "filter":
            return min(layer.filters for layer in convolutions), "fewest filters of a convolution"
        # The sample's own channels are few: the first layer stays whole (Kahira et al., section 3.2).
        divided = [layer.channels for layer in convolutions if layer.has_gradient]
        return (min(divided), "fewest channels of a convolution") if divided else (0, "it has one convolution")

    def _extents(self) -> tuple[int, ...]:
        """Of each dimension the fewest elements of a layer, its output included."""
        spatial = [layer for layer in self.layers if layer.extents]
        return tuple(
            min(-(-layer.extents[axis] // layer.stride) for layer in spatial) for axis in range(len(spatial[0].extents))
        )

    # --- strategies that hold a whole model on each rank

    def _plain(self, name: str) -> Row:
        ranks = 1 if name == "serial" else self.layout.ranks
        bounds = (1, "one rank") if name == "serial" else (self.batch, "batch")
        row = Row(strategy=name, ranks=self.layout.ranks, replicas=ranks, limit=bounds[0], bound_by=bounds[1])
        if ranks > self.batch:
            return replace(row, refused=f"{ranks} ranks, and a batch of {self.batch}: at most one rank per sample")
        batch, groups = -(-self.batch // ranks), Groups(self.layout, self.network, ranks)
        weights = sum(layer.weights for layer in self.layers)
        activations = self._activations(batch, [_Share()] * len(self.layers))
        forward, backward = ([batch * one for one in half] for half in (self.times.forward, self.times.backward))
        update, held, notes = self.times.update_s, (2.0 + self.slots) * weights, list[str]()
        sent = groups.seconds("allreduce", weights * self.width, self.width) / self.average_every
        exposed = sent
        computed = sum(forward) + sum(backward)
        if name in ("data", "zero-1", "out-of-core"):
            sizes = [layer.weights * self.width for layer in self.layers]
            sent, exposed = self._overlapped(sizes, backward, groups)
        if name == "zero-1":
            gathered = groups.seconds("all-gather", weights * self.width, self.width)
            sent, exposed = sent + gathered, exposed + gathered
            update, held = update / ranks, (2 + self.slots / ranks) * weights
        elif name == "fsdp":
            sent, exposed, largest = self._gathered(forward, backward, groups)
            update, held = update / ranks, (2 + self.slots) * weights / ranks + 2 * largest
        elif name == "out-of-core":
            chain = self._chain(batch, held, activations)
            if self.limit is None:
                return replace(row, refused="it plans for a memory limit, and none is known")
            try:
                swap = self.rates is not None
                plan = plan_blocks(chain, self.rates, self.limit, recompute=True, swap=swap, effort=CURVE_EFFORT)
            except DoesNotFitError as error:
                return replace(row, bound_by="memory", refused=str(error))
            computed, held, activations = plan.predicted.pass_s, 0.0, plan.predicted.peak_bytes
            done = sorted({block.decision for block in plan.blocks})
            notes.append(
                f"a plan for {'measured blocks' if self.chain else 'blocks of the network'}: {', '.join(done)}"
            )
        elif name == "local-sgd":
            notes.append(f"an average every {self.average_every} steps; what it does to the loss has no model")
        held_weights = weights if name == "fsdp" else ranks * weights
        return replace(
            row,
            compute_s=computed + update,
            communication_s=sent,
            exposed_s=exposed,
            memory_bytes=self.width * held + activations,
            redundant_bytes=self.width * (held_weights - weights),
            phi=groups.phi,
            notes=tuple(notes),
        )

    def _chain(self, batch: int, held: float, activations: float) -> Chain:
        if self.chain is not None:
            return scaled(self.chain, batch)
        elements = batch * sum(layer.inputs + layer.outputs for layer in self.layers)
        return chain_of(
            self.layers, self.times, batch=batch, state_bytes=self.width * held, element_bytes=activations / elements
        )

    def _overlapped(self, sizes: Sequence[float], backward: Sequence[float], groups: Groups) -> tuple[float, float]:
        """Gradients summed within the backward pass, from the last layer on, as many at a time as a bucket holds: on
        the wire, and past its end.
        """
        sent = free = now = held = 0.0
        for number in reversed(range(len(sizes))):
            now += backward[number]
            held += sizes[number]
            if held and (held >= BUCKET_BYTES or number == 0):
                cost = groups.seconds("allreduce", held, self.width)
                sent, free, held = sent + cost, max(free, now) + cost, 0.0
        return sent, max(0.0, free - now)

    def _gathered(
        self, forward: Sequence[float], backward: Sequence[float], groups: Groups
    ) -> tuple[float, float, float]:
        """FSDP: weights of a block are gathered before each of its passes, one block ahead; gradients are scattered
        behind the backward pass of the block. On the wire, exposed, and the elements of the largest block.
        """
        numbers = [list(one) for _, one in groupby(range(len(self.layers)), key=lambda n: self.layers[n].block)]
        blocks = [
            [sum(values[n] for n in block) for values in (forward, backward, [one.weights for one in self.layers])]
            for block in numbers
        ]
        gather = [groups.seconds("all-gather", block[2] * self.width, self.width) for block in blocks]
        scatter = [groups.seconds("reduce-scatter", block[2] * self.width, self.width) for block in blocks]
        order = [(n, 0) for n in range(len(blocks))] + [(n, 1) for n in reversed(range(len(blocks)))]
        free = begun = done = 0.0  # When the channel is free, and when the last pass of a block began and ended.
        waiting: float | None = None  # Gradients of the block before, which go behind the weights of the next.
        for n, half in order:
            free = max(free, begun) + gather[n]
            arrived = free
            if waiting is not None:
                free = max(free, done) + waiting
            begun = max(done, arrived)
            done = begun + blocks[n][half]
            waiting = scatter[n] if half else None
        end = max(free, done) + scatter[0]
        busy = sum(forward) + sum(backward)
        return 2 * sum(gather) + sum(scatter), end - busy, max(block[2] for block in blocks)

    # --- strategies that share a model

    def _shared(self, name: str, inner: str, size: int, most: int, reason: str) -> Row:
        ranks = self.layout.ranks
        replicas = ranks // size
        limit, by = (self.batch * most, f"batch x {reason}") if name != inner else (most, reason)
        row = Row(strategy=name, ranks=ranks, replicas=replicas, limit=limit, bound_by=by)
        if size > most:
            return replace(row, refused=f"{size} ranks share a model, and it has {most} ({reason})")
        if replicas > self.batch:
            return replace(row, refused=f"{replicas} groups, and a batch of {self.batch}: at most one per sample")
        one: _Inner | None = getattr(self, f"_{inner}")(size, -(-self.batch // replicas))
        if one is None:
            return replace(row, refused=f"{size} ranks make no grid that the extents {self._extents()} hold")
        together = (ranks, 1) if one.sums_over_all else (replicas, size)
        summed = Groups(self.layout, self.network, *together)
        sizes = [weights * self.width for weights in one.weights]
        if one.is_overlapped:
            sent, exposed = self._overlapped(sizes, one.backward, summed)
        else:
            sent = exposed = summed.seconds("allreduce", sum(sizes), self.width)
        return replace(
            row,
            compute_s=one.compute_s + self.times.update_s * one.update_share,
            communication_s=one.communication_s + sent,
            exposed_s=one.communication_s + exposed,
            memory_bytes=one.memory_bytes,
            redundant_bytes=self.width * (replicas * one.group_weights - sum(layer.weights for layer in self.layers)),
            phi=max(one.groups.phi, summed.phi),
            notes=one.notes,
        )

    def _activations(self, batch: int, shares: Sequence[_Share]) -> float:
        elements = sum(
            layer.inputs * share.inputs + layer.outputs * share.outputs
            for layer, share in zip(self.layers, shares, strict=True)
        )
        return self.gamma * self.width * batch * elements

    def _divided(
        self,
        batch: int,
        shares: Sequence[_Share],
        communication_s: float,
        groups: Groups,
        *,
        sums_over_all: bool = False,
    ) -> _Inner:
        """A group whose ranks all work on all layers, each on its share of them."""
        backward = tuple(
            batch * seconds * share.work for seconds, share in zip(self.times.backward, shares, strict=True)
        )
        forward = sum(batch * seconds * share.work for seconds, share in zip(self.times.forward, shares, strict=True))
        weights = tuple(layer.weights * share.weights for layer, share in zip(self.layers, shares, strict=True))
        held = sum(weights)
        return _Inner(
            compute_s=forward + sum(backward),
            update_share=held / sum(layer.weights for layer in self.layers),
            communication_s=communication_s,
            memory_bytes=self.width * (2 + self.slots) * held + self._activations(batch, shares),
            weights=weights,
            backward=backward,
            group_weights=groups.size * held,
            groups=groups,
            sums_over_all=sums_over_all,
        )

    def _filter(self, size: int, batch: int) -> _Inner:
        """Each rank computes some of a layer's outputs: they are gathered, gradients of inputs are summed."""
        return self._by_parts(size, batch, lambda layer: layer.filters, ("all-gather", "allreduce"))

    def _channel(self, size: int, batch: int) -> _Inner:
        """Each rank reads some of a layer's inputs: outputs are summed, gradients of inputs are gathered."""
        parts = lambda layer: layer.channels if layer.has_gradient else 0  # noqa: E731
        return self._by_parts(size, batch, parts, ("allreduce", "all-gather"))

    def _by_parts(
        self, size: int, batch: int, parts: Callable[[Layer], int], exchange: tuple[Collective, Collective]
    ) -> _Inner:
        """A layer with fewer parts than ranks (a dense layer, or the first of channels) is whole on each of them; what
        the last one computes is needed nowhere else in full where it was computed by outputs.
        """
        groups, shares, seconds = Groups(self.layout, self.network, size), [], 0.0
        last = max(number for number, layer in enumerate(self.layers) if layer.is_product)
        for number, layer in enumerate(self.layers):
            if not layer.is_product:
                shares.append(_Share(work=1 / size, weights=1 / size))
            elif parts(layer) < size:
                shares.append(_Share())
            else:
                share = -(-parts(layer) // size) / parts(layer)
                shares.append(_Share(work=share, weights=share))
                both = (
                    (exchange[0], 0 if number == last and exchange[0] == "all-gather" else layer.outputs),
                    (exchange[1], layer.inputs * layer.has_gradient),
                )
                for collective, elements in both:
                    sent = batch * elements * self.activation_width
                    seconds += groups.seconds(collective, sent, self.activation_width)
        return self._divided(batch, shares, seconds, groups)

    def _tensor(self, size: int, batch: int) -> _Inner:
        """Heads and inner features are divided; what two divided layers make is summed, forward and backward.

        Each pair of a layer divided by its outputs and one divided by its inputs costs two sums of what enters it
        (Shoeybi et al., Megatron-LM (2019), section 3).
        """
        groups, shares, seconds = Groups(self.layout, self.network, size), [], 0.0
        heads = next(layer.heads for layer in self.layers if layer.heads)
        for layer in self.layers:
            parts = layer.filters if layer.tensor == "column" else layer.channels if layer.tensor == "row" else heads
            share = -(-parts // size) / parts if layer.tensor else 1.0
            shares.append(
                _Share(
                    work=share,
                    inputs=1.0 if layer.tensor == "column" else share,
                    outputs=1.0 if layer.tensor == "row" else share,
                    weights=share,
                )
            )
            if layer.tensor == "row":
                sent = batch * layer.outputs * self.activation_width
                seconds += 2 * groups.seconds("allreduce", sent, self.activation_width)
        return self._divided(batch, shares, seconds, groups)

    def _spatial(self, size: int, batch: int) -> _Inner | None:
        """Each rank has a part of the image or volume, and asks its neighbours for what its windows need beyond."""
        extents = self._extents()
        options = product(*([n for n in range(1, size + 1) if size % n == 0 and n <= most] for most in extents))
        found = [self._on_grid(grid, batch) for grid in options if math.prod(grid) == size]
        return min(found, key=lambda one: one.compute_s + one.communication_s, default=None)

    def _on_grid(self, grid: tuple[int, ...], batch: int) -> _Inner:
        """Neighbours along the last dimension are neighbouring ranks."""
        size = math.prod(grid)
        lines = [Groups(self.layout, self.network, n, math.prod(grid[axis + 1 :])) for axis, n in enumerate(grid)]
        groups, shares, seconds, is_split = Groups(self.layout, self.network, size), [], 0.0, True
        for layer in self.layers:
            if not layer.extents:
                if is_split:  # what was divided is put together before the first layer that needs all of it
                    sent = batch * layer.inputs * self.activation_width
                    seconds += groups.seconds("all-gather", sent, self.activation_width)
                is_split = False
                shares.append(_Share())
                continue
            out = [-(-extent // layer.stride) for extent in layer.extents]
            share = math.prod(-(-extent // n) / extent for extent, n in zip(out, grid, strict=True))
            shares.append(_Share(work=share, inputs=share, outputs=share))
            before = (layer.kernel - 1) // 2
            reaches = sorted(one for one in (before, layer.kernel - layer.stride - before) if one > 0)
            for axis, (n, line) in enumerate(zip(grid, lines, strict=True)):
                slab = batch * self.activation_width / math.prod(grid[:axis] + grid[axis + 1 :])
                # Two parts have a neighbour on one side only.
                for reach in reaches if n > 2 else reaches[-1:] if n == 2 else []:
                    seconds += line.send_seconds(reach * layer.inputs / layer.extents[axis] * slab)
                    if layer.has_gradient:
                        back = -(-reach // layer.stride) * layer.outputs / out[axis]
                        seconds += line.send_seconds(back * slab)
        return self._divided(batch, shares, seconds, groups, sums_over_all=True)

    def _pipeline(self, size: int, batch: int) -> _Inner:
        """GPipe (Huang et al. 2019): the parts of a batch go through all stages, and back; then it updates."""
        blocks = [list(one) for _, one in groupby(range(len(self.layers)), key=lambda n: self.layers[n].block)]
        work = [sum(self.times.forward[n] + self.times.backward[n] for n in block) for block in blocks]
        stages = [[n for block in blocks[first:last] for n in block] for first, last in cut(work, size)]
        parts = max(n for n in range(1, min(batch, PARTS_PER_STAGE * size) + 1) if batch % n == 0)
        groups, share = Groups(self.layout, self.network, size), batch / parts
        sends = [
            groups.send_seconds(share * self.layers[stage[-1]].outputs * self.activation_width) for stage in stages[:-1]
        ]
        whole = alone = 0.0
        for times in (self.times.forward, self.times.backward):
            each = [share * sum(times[n] for n in stage) for stage in stages]
            alone += _passed(each, parts)
            whole += _passed([*each, *sends], parts)
        held = [sum(float(self.layers[n].weights) for n in stage) for stage in stages]
        notes = [f"{parts} parts of the batch"]
        shared = sum(layer.shared_weights for layer in self.layers)
        sent = whole - alone
        if shared and size > 1:  # the first stage has them for its own layer, the last one holds them as well
            held[-1] += shared
            sent += 2 * groups.send_seconds(shared * self.width / 2)  # a ring of two
            notes.append("the first and the last stage hold the same embedding, and sum its gradient")
        total = sum(layer.weights for layer in self.layers)
        memory = (
            self.width * (2 + self.slots) * weights
            + self.gamma * self.width * batch * sum(self.layers[n].inputs + self.layers[n].outputs for n in stage)
            for weights, stage in zip(held, stages, strict=True)
        )
        return _Inner(
            compute_s=alone,
            update_share=max(held) / total,
            communication_s=sent,
            memory_bytes=max(memory),
            weights=(max(held),),
            backward=(0.0,),
            group_weights=sum(held),
            groups=groups,
            is_overlapped=False,
            notes=tuple(notes),
        )


def cut(work: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Consecutive pieces (first, behind last), none empty, whose largest sum is least. Raises `ValueError`: more parts
    than values.
    """
    if not 1 <= parts <= len(work):
        raise ValueError(f"{len(work)} blocks cannot be cut into {parts} parts")
    sums = [0.0, *accumulate(work)]
    # Of the first n blocks in so many parts: the least largest sum, and where the last part begins.
    least = [[(sums[n], 0) for n in range(len(sums))]]
    for part in range(2, parts + 1):
        before = least[-1]
        least.append(
            [
                min((max(before[at][0], sums[n] - sums[at]), at) for at in range(part - 1, n))
                if n >= part
                else (math.inf, 0)
                for n in range(len(sums))
            ]
        )
    ends = [len(work)]
    for row in reversed(least):
        ends.append(row[ends[-1]][1])
    return tuple(pairwise(reversed(ends)))


def _passed(times: Sequence[float], parts: int) -> float:
    """Seconds in which equal parts pass through stages, one behind the other: a flow shop without waiting for room."""
    return sum(times) + (parts - 1) * max(times)
