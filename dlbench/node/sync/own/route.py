"""The route of gradients: groups, all-reduce method and wire format of a run, and the cost of a message."""
# In formulas g is the number of ranks of a group, m of groups, p = g m, and n the bytes of the message.

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import UserError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Communicators, RankGroup
from dlbench.node.sync.own.buckets import arena_elements
from dlbench.node.sync.run_store import GroupRanks, RankGroups, make_groups, make_world
from dlbench.node.sync.timing import LEAST_SAMPLE_S, MOST_QUEUED, Clock, StreamTimer, ring_bytes
from dlbench.node.sync.wire import WireFormat, build_wire
from dlbench.perfmodels.lines import fit_line, hybrid_threshold
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout, block, level_chunks
from dlbench.records.comm import read_network
from dlbench.specs.comm import LineCost
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import GROUPED, Wire

CALIBRATION_S = 2.0  # Time limit for all lines of a run together; spent once, before training.

SMALLEST_BYTES = 4096
_LATE_DIVISOR = 4
"""Divisor of a sample's messages if the device began before all were queued; a message may be tens of calls."""
REPEATS = 5
"""Timed samples of a size, after two messages that are not used: one is cold, one tells how many make a sample."""
ELEMENT_BYTES = 4

_ALGORITHMS = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""The algorithm of `dlbench comm` that predicts each method; libraries sum by a ring (Gloo) or as fast (MPI)."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Groups, method and format by which the messages of a run are exchanged."""

    world: RankGroup
    method: Method
    wire: WireFormat
    carrier: str  # Library that sends the bytes, e.g. gloo.
    group_size: int
    multiple: int  # The number of elements of a message must be a multiple of this.
    line: LineCost | None  # Cost of a message of gradients; None unless own:mgwfbp needs it.
    costs: tuple[LineCost, ...]  # All lines given or measured.
    arena: torch.Tensor  # Memory for the buffers of messages, fp32, one-dimensional.

    def exchange(self, number: int, vector: torch.Tensor) -> str:
        """Replaces message `number` by the sum over ranks; returns the name of the method that ran."""
        return _exchange(self.wire, self.method, self.world, number, vector)

    @property
    def threshold_bytes(self) -> int | None:
        """The size in bytes from which hybrid is flat; None for other exchanges."""
        return self.method.threshold_bytes if isinstance(self.method, Hybrid) else None


def _exchange(wire: WireFormat, method: Method, world: RankGroup, number: int, vector: torch.Tensor) -> str:
    method_names = [wire.method]  # of a message that makes no dense sum

    def dense(tensor: torch.Tensor) -> None:
        method_names.append(method.sum(tensor))

    wire.exchange(number, vector, dense, world)
    return method_names[-1]


@dataclass(kw_only=True)
class RouteBuilder:
    """Makes the groups, and determines the threshold of hybrid and the cost line of own:mgwfbp."""

    plan: RunPlan
    place: RankPlace
    device: torch.device
    communicators: Communicators
    clock: Clock
    gather: Callable[[Any], list[Any]]  # `Engine.gather`.
    tensor_elements: Sequence[int]  # Number of elements of each gradient.

    def __post_init__(self) -> None:
        self._gradient_bytes = ELEMENT_BYTES * sum(self.tensor_elements)
        self._layout = Layout(ranks=self.place.size, group_size=self.plan.group_size)
        self._is_grouped = self.plan.sync.exchange in GROUPED
        self._multiple = self.plan.group_size if self._is_grouped else 1
        self._carrier = self.communicators.carrier
        self._costs: list[LineCost] = []

    def build(self) -> Route:
        """Returns the route; all ranks call it together."""
        group_ranks = GroupRanks(size=self.place.size, group_size=self.plan.group_size)
        groups: RankGroups | None = None
        if self._is_grouped:
            groups = make_groups(self.communicators, group_ranks)
            self._world = groups.world
        else:
            self._world = make_world(self.communicators, group_ranks)
        largest_timed = sizes_up_to(self._gradient_bytes, self._multiple)[-1]
        elements = max(arena_elements(self.tensor_elements, self._multiple), largest_timed)
        self._arena = torch.zeros(elements, dtype=torch.float32, device=self.device)
        method = self._method(groups)
        wire = self.plan.sync.wire
        line = self._line(method, wire) if self.plan.sync.fusion.rule == "mgwfbp" else None
        return Route(
            world=self._world,
            method=method,
            wire=self._wire(wire),
            carrier=self._carrier,
            group_size=self.plan.group_size,
            multiple=self._multiple,
            line=line,
            costs=tuple(self._costs),
            arena=self._arena,
        )

    def _wire(self, name: Wire) -> WireFormat:
        return build_wire(name, density=self.plan.sync.topk_density, world_size=self.place.size)

    def _method(self, groups: RankGroups | None) -> Method:
        flat = Flat(self._world, self.plan.group_size)
        if groups is None:
            return flat
        sync = self.plan.sync
        if sync.exchange == "leader":
            return Leader(groups, reduce_is_sum=self.communicators.reduce_is_sum)
        hierarchical = Hierarchical(groups, partial(level_chunks, self.plan.engine.name, self._carrier, self._layout))
        if sync.exchange == "hierarchical":
            return hierarchical
        if sync.hybrid_threshold_bytes is not None:
            return Hybrid(flat, hierarchical, sync.hybrid_threshold_bytes)
        # The method gets vectors in their wire format, so the lines are those of plain sums.
        threshold_bytes = hybrid_threshold(self._line(flat, "fp32"), self._line(hierarchical, "fp32"))
        if threshold_bytes is None:  # flat never gets cheaper, so every message is below the threshold
            threshold_bytes = self._gradient_bytes + ELEMENT_BYTES * self._multiple + 1
        return Hybrid(flat, hierarchical, threshold_bytes)

    def _line(self, method: Method, wire: Wire) -> LineCost:
        name = f"{self._carrier} {method.name}"
        if wire != "fp32":
            name += f" {wire}"
        counts = sizes_up_to(self._gradient_bytes, self._multiple)
        if self.plan.sync.network is not None:
            line = self._predicted_line(name, method, wire, counts, self.plan.sync.network)
        else:
            probe = self._wire(wire)
            probe.reset([[(f"calibration {count}", count)] for count in counts])
            calibration = Calibration(
                exchange=partial(_exchange, probe, method, self._world),
                world=self._world,
                clock=self.clock,
                arena=self._arena,
                gather=self.gather,
            )
            sync = self.plan.sync
            num_lines = int(sync.fusion.rule == "mgwfbp")
            if sync.exchange == "hybrid" and sync.hybrid_threshold_bytes is None:
                num_lines += 2
            line = calibration.measure(name, counts, CALIBRATION_S / num_lines)
        self._costs.append(line)
        return line

    def _predicted_line(self, name: str, method: Method, wire: Wire, counts: list[int], network: str) -> LineCost:
        width = self._wire(wire).bytes_per_element / ELEMENT_BYTES
        sizes = [count * ELEMENT_BYTES for count in counts]
        lines = {}
        for part in method.parts:
            part_name = f"{self._carrier} {part.name}"
            lines[part.name] = given_line(
                network, part_name, part.name, self._layout, largest_bytes=sizes[-1], chunks=part.chunks
            )
        seconds = [lines[method.name_for(size * width)].time(size * width) for size in sizes]
        return fit_line(name, self.place.size, sizes, seconds)


Sent = tuple[float, float]  # Bytes that a rank sends inside its group and to other groups, mean over ranks.


class Method:
    """A method to sum a message over all ranks, which end with equal bits."""

    name: str

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods that messages may use, depending on their size."""
        return (self,)

    def sum(self, vector: torch.Tensor) -> str:
        """Sums `vector`, shape (n,), over ranks in place, n a multiple of the group size; returns the method's name."""
        raise NotImplementedError

    def name_for(self, num_bytes: float) -> str:
        """Returns the method of a message of `num_bytes` on the wire."""
        return self.name

    def chunks(self, num_bytes: int) -> int | None:
        """Returns the number of chunks of a message of `num_bytes` on the wire; None: the method makes no chunks."""
        return None

    def sent(self, num_bytes: float) -> Sent:
        raise NotImplementedError


class Flat(Method):
    """One all-reduce over all ranks: 2 (p - 1) / p n bytes leave each rank (Patarasuk and Yuan 2009)."""

    name = "flat"

    def __init__(self, world: RankGroup, group_size: int) -> None:
        self._world = world
        self._group_size = group_size

    def sum(self, vector: torch.Tensor) -> str:
        self._world.sum(vector)
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        size = len(self._world.ranks)
        return ring_bytes(num_bytes, ranks=size, groups=size // self._group_size)


class Hierarchical(Method):
    """Reduce-scatter inside the group, all-reduce of each share across groups, all-gather inside (the 2D form)."""

    # In chunks: while the shares of one are all-reduced across groups, the next is scattered and the previous gathered.

    name = "hierarchical"

    def __init__(self, groups: RankGroups, chunks: Callable[[int], int]) -> None:
        self._groups = groups
        self._chunks = chunks

    def sum(self, vector: torch.Tensor) -> str:
        inside, across = self._groups.inside, self._groups.across
        size = len(inside.ranks)
        in_flight: list[tuple[Callable[[], object], torch.Tensor, torch.Tensor]] = []
        chunks = self._chunks(vector.numel() * vector.element_size())
        for chunk in range(chunks):
            first, count = (size * shares for shares in block(vector.numel() // size, chunks, chunk))
            part = vector[first : first + count]
            share = inside.reduce_scatter(part)
            in_flight.append((across.begin_sum(share), share, part))
            if chunk:
                self._gather(*in_flight.pop(0))
        self._gather(*in_flight.pop())
        return self.name

    def _gather(self, wait: Callable[[], object], share: torch.Tensor, part: torch.Tensor) -> None:
        wait()
        self._groups.inside.all_gather(share, part)

    def chunks(self, num_bytes: int) -> int:
        return self._chunks(num_bytes)

    def sent(self, num_bytes: float) -> Sent:
        g, m = len(self._groups.inside.ranks), len(self._groups.across.ranks)
        return 2 * (g - 1) / g * num_bytes, 2 * (m - 1) / m * num_bytes / g


class Leader(Method):
    """Grouped all-reduce (Jia et al. 2018, arXiv 1807.11205): reduce to group leaders, ring of leaders, broadcast."""

    name = "leader"

    def __init__(self, groups: RankGroups, *, reduce_is_sum: bool) -> None:
        """Takes the groups; `reduce_is_sum`: the library has no reduce and sums on every rank of the group instead."""
        self._groups = groups
        self._reduce_rounds = 2.0 if reduce_is_sum else 1.0

    def sum(self, vector: torch.Tensor) -> str:
        groups = self._groups
        groups.inside.reduce(vector, 0)
        if groups.inside.index == 0:
            groups.across.sum(vector)
        groups.inside.broadcast(vector, 0)
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        g, m = len(self._groups.inside.ranks), len(self._groups.across.ranks)
        inside = (self._reduce_rounds + 1) * (g - 1) / g * num_bytes
        return inside, 2 * (m - 1) / m * num_bytes / g


class Hybrid(Method):
    """Hierarchical for small messages, where start-ups dominate, flat for large ones (Jia et al. 2018)."""

    name = "hybrid"

    def __init__(self, flat: Flat, hierarchical: Hierarchical, threshold_bytes: int) -> None:
        self._flat, self._hierarchical = flat, hierarchical
        self.threshold_bytes = threshold_bytes

    @property
    def parts(self) -> tuple[Method, ...]:
        return self._flat, self._hierarchical

    def sum(self, vector: torch.Tensor) -> str:
        return self._for_size(vector.numel() * vector.element_size()).sum(vector)

    def name_for(self, num_bytes: float) -> str:
        return self._for_size(num_bytes).name

    def chunks(self, num_bytes: int) -> int | None:
        return self._for_size(num_bytes).chunks(num_bytes)

    def sent(self, num_bytes: float) -> Sent:
        return self._for_size(num_bytes).sent(num_bytes)

    def _for_size(self, num_bytes: float) -> Method:
        return self._hierarchical if num_bytes < self.threshold_bytes else self._flat


def sizes_up_to(largest_bytes: int, multiple: int) -> list[int]:
    """Returns elements of two or more vectors to time, multiples of `multiple`: from 4 KiB by factors of four."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    if len(sizes) == 1:
        largest_bytes = max(largest_bytes, SMALLEST_BYTES * 4)
    sizes.append(largest_bytes)
    return sorted({-(-size // (ELEMENT_BYTES * multiple)) * multiple for size in sizes})


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measures the cost line of an exchange, equal on all ranks, from the median over repeats of the slowest rank."""

    # Ranks do not leave a barrier at the same moment, so several short messages are timed back to back.

    exchange: Callable[[int, torch.Tensor], object]  # Sums a vector over ranks; takes the number of its size, too.
    world: RankGroup
    clock: Clock
    arena: torch.Tensor
    gather: Callable[[Any], list[Any]]  # `Engine.gather`.

    def measure(self, name: str, counts: Sequence[int], budget_s: float) -> LineCost:
        """Returns the line `name` from messages of `counts` elements: two sizes, and more while `budget_s` lasts."""
        began = time.monotonic()
        flag = torch.zeros(1, device=self.arena.device)
        stream_timer = None
        if not self.clock.marks_are_free:
            stream_timer = StreamTimer(self.clock, partial(self.world.sum, flag))
        times_s: list[list[float]] = []  # of the repeats of each size
        late_sizes: list[int] = []
        for number, count in enumerate(counts):
            repeats_s, is_late = self._time_size(number, count, stream_timer)
            times_s.append(repeats_s)
            if is_late:
                late_sizes.append(count * ELEMENT_BYTES)
            is_over = self.world.index == 0 and time.monotonic() - began > budget_s
            if self._on_any_rank(is_over) and number > 0:
                break
        sizes = [count * ELEMENT_BYTES for count in counts[: len(times_s)]]
        medians_s = [
            statistics.median(map(max, zip(*repeats_by_rank, strict=True)))
            for repeats_by_rank in zip(*self.gather(times_s), strict=True)
        ]
        # Every rank fits the same numbers, and yet rank 0 decides: processors may round differently.
        line = fit_line(name, len(self.world.ranks), sizes, medians_s)
        line = line.model_copy(update={"launch_bound": tuple(late_sizes)})
        return LineCost.model_validate(self.gather(line.model_dump(mode="json"))[0])

    def _time_size(self, number: int, count: int, stream_timer: StreamTimer | None) -> tuple[list[float], bool]:
        most = len(self.arena) // count
        if stream_timer is not None:
            most = min(most, MOST_QUEUED)
        self._sample(number, count, 1, stream_timer)
        # The last rank to start waits for nobody: its time is the message's.
        single_s = min(self.gather(self._sample(number, count, 1, stream_timer)[0]))
        messages = min(most, max(1, math.ceil(LEAST_SAMPLE_S / max(single_s, 1e-9))))
        while True:
            samples = [self._sample(number, count, messages, stream_timer) for _ in range(REPEATS)]
            is_late = stream_timer is not None and self._on_any_rank(any(late for _, late in samples))
            if not is_late or messages == 1:
                return [seconds for seconds, _ in samples], is_late
            messages = max(1, messages // _LATE_DIVISOR)

    def _sample(self, number: int, count: int, messages: int, stream_timer: StreamTimer | None) -> tuple[float, bool]:
        """Returns the mean seconds of messages sent back to back, and whether the device began too early."""
        # New values: sums of sums would overflow.
        vectors = torch.split(self.arena[: messages * count].normal_(), count)

        def send() -> None:
            for vector in vectors:
                self.exchange(number, vector)

        self._on_any_rank(False)  # a barrier
        self.clock.settle()
        if stream_timer is not None:
            seconds, is_late = stream_timer.time(send, messages, number)
            return seconds / messages, is_late
        start = time.monotonic()
        send()
        return (time.monotonic() - start) / messages, False

    def _on_any_rank(self, condition: bool) -> bool:
        flag = torch.full((1,), float(condition), device=self.arena.device)
        self.world.sum(flag)
        return flag.item() > 0


def given_line(
    path: str, name: str, method: str, layout: Layout, *, largest_bytes: int, chunks: Callable[[int], int | None]
) -> LineCost:
    """Returns the line of this name and rank count from a network file, or one fitted to its predictions."""
    network = read_network(Path(path))
    for line in network.collectives:
        if line.name == name and line.ranks == layout.ranks:
            return line
    sizes = [count * ELEMENT_BYTES for count in sizes_up_to(largest_bytes, layout.ranks)]
    try:
        algorithm = _ALGORITHMS[method]
        seconds = [predict("allreduce", algorithm, size, layout, network, chunks=chunks(size)) for size in sizes]
    except UserError as error:
        raise UserError(f"sync.network {path}: {error}") from None
    return fit_line(f"{name}, predicted", layout.ranks, sizes, seconds)
