"""By which groups, method and format the gradients of a run travel, and what a message costs by them.

A message is summed over all ranks flat, in two levels, through leaders, or by size one way or the other. In what
follows g is the number of ranks of a group, m of groups, p = g m, and n the bytes of the message. Every rank ends with
the same bits: each element is summed by one rank (or, in an all-reduce, by the library in one order) and then only
copied.

Bytes are those of the ring and of the least that a reduce, a scatter or a broadcast can send, as means over ranks; a
library may send more. Ranks lie in blocks, so a flat ring crosses from group to group m times and g - 1 of g ranks send
inside theirs.
"""

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
from dlbench.node.sync.groups import Communicators, GroupRanks, RankGroup, RankGroups, make_groups, make_world
from dlbench.node.sync.own.buckets import arena_elements
from dlbench.node.sync.timing import LEAST_SAMPLE_S, MOST_QUEUED, Clock, StreamTimer, ring_bytes
from dlbench.node.sync.wire import WireFormat, build_wire
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.overlap import hybrid_threshold
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout, block, level_chunks
from dlbench.records.comm import read_network
from dlbench.specs.comm import LineCost
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import GROUPED, Wire

CALIBRATION_S = 2.0  # For all lines of a run together; it is spent once, before training.

SMALLEST_BYTES = 4096
_FEWER = 4  # Times fewer messages where the device came to them before all were queued; some may be tens of calls.
REPEATS = 5  # Timed samples of a size, after two messages that are not: one is cold, one gives how many make a sample.
ELEMENT_BYTES = 4

_ALGORITHMS = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""By which algorithm of `dlbench comm` an exchange is predicted; libraries sum by a ring (Gloo) or as fast (MPI)."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a message goes through."""

    world: RankGroup
    method: Method
    wire: WireFormat
    carrier: str  # Who moves the bytes, in words.
    group_size: int
    multiple: int  # Of which the elements of a message must be a multiple.
    line: LineCost | None  # What a message of gradients costs; None where nothing asks for it.
    costs: tuple[LineCost, ...]  # All lines given or measured.
    arena: torch.Tensor  # Room for the buffers of messages, fp32, one-dimensional.

    def exchange(self, number: int, vector: torch.Tensor) -> str:
        """The message of this number becomes the sum over ranks; returns how it went: sparse, or as the method says."""
        return _exchange(self.wire, self.method, self.world, number, vector)

    @property
    def threshold_bytes(self) -> int | None:
        """From which size hybrid is flat, bytes; None for other exchanges."""
        return self.method.threshold_bytes if isinstance(self.method, Hybrid) else None


def _exchange(wire: WireFormat, method: Method, world: RankGroup, number: int, vector: torch.Tensor) -> str:
    ways: list[str] = []

    def dense(tensor: torch.Tensor) -> None:
        ways.append(method.sum(tensor))

    wire.exchange(number, vector, dense, world)
    return ways[-1] if ways else "sparse"


@dataclass(kw_only=True)
class RouteBuilder:
    """Makes the groups, finds the threshold of hybrid and the cost line of own:mgwfbp."""

    plan: RunPlan
    place: RankPlace
    device: torch.device
    communicators: Communicators
    clock: Clock
    gather: Callable[[Any], list[Any]]  # `Engine.gather`.
    tensor_elements: Sequence[int]  # Of each gradient.

    def __post_init__(self) -> None:
        self._gradient_bytes = ELEMENT_BYTES * sum(self.tensor_elements)
        self._who = GroupRanks(size=self.place.size, group_size=self.plan.group_size)
        self._layout = Layout(ranks=self.place.size, group_size=self.plan.group_size)
        self._is_grouped = self.plan.sync.exchange in GROUPED
        self._multiple = self.plan.group_size if self._is_grouped else 1
        self._costs: list[LineCost] = []

    def build(self) -> Route:
        """Returns the route; all ranks call it together."""
        sync = self.plan.sync
        carrier = self.communicators.carrier
        groups = make_groups(self.communicators, self._who) if self._is_grouped else None
        world = make_world(self.communicators, self._who) if groups is None else groups.world
        elements = max(
            arena_elements(self.tensor_elements, self._multiple), sizes_up_to(self._gradient_bytes, self._multiple)[-1]
        )
        self._arena = torch.zeros(elements, dtype=torch.float32, device=self.device)
        method = self._method(world, groups, carrier)
        wire = self.plan.sync.wire
        return Route(
            world=world,
            method=method,
            wire=self._wire(wire),
            carrier=carrier,
            group_size=self.plan.group_size,
            multiple=self._multiple,
            line=self._line(method, wire, world, carrier) if sync.fusion.rule == "mgwfbp" else None,
            costs=tuple(self._costs),
            arena=self._arena,
        )

    def _wire(self, name: Wire) -> WireFormat:
        return build_wire(name, density=self.plan.sync.topk_density, world_size=self.place.size)

    def _method(self, world: RankGroup, groups: RankGroups | None, carrier: str) -> Method:
        flat = Flat(world, self.plan.group_size)
        if groups is None:
            return flat
        sync = self.plan.sync
        if sync.exchange == "leader":
            return Leader(groups, reduce_is_sum=self.communicators.reduce_is_sum)
        hierarchical = Hierarchical(groups, partial(level_chunks, self.plan.engine.name, carrier, self._layout))
        if sync.exchange == "hierarchical":
            return hierarchical
        if sync.hybrid_threshold_bytes is not None:
            return Hybrid(flat, hierarchical, sync.hybrid_threshold_bytes)
        # The method sees what is on the wire, in whatever format, so the lines are those of plain sums.
        lines = [self._line(method, "fp32", world, carrier) for method in (flat, hierarchical)]
        threshold = hybrid_threshold(*lines)
        # Where flat never gets cheaper, every message is below the threshold.
        if threshold is None:
            threshold = self._gradient_bytes + ELEMENT_BYTES * self._multiple + 1
        return Hybrid(flat, hierarchical, threshold)

    def _line(self, method: Method, wire: Wire, world: RankGroup, carrier: str) -> LineCost:
        """Seconds by bytes of gradients, as `sync.network` says or as timed now."""
        name = f"{carrier} {method.name}" + ("" if wire == "fp32" else f" {wire}")
        counts = sizes_up_to(self._gradient_bytes, self._multiple)
        if self.plan.sync.network is not None:
            line = self._given(name, method, wire, carrier, counts)
        else:
            sync, num_lines = self.plan.sync, 0
            if sync.exchange == "hybrid" and sync.hybrid_threshold_bytes is None:
                num_lines += 2
            if sync.fusion.rule == "mgwfbp":
                num_lines += 1
            probe = self._wire(wire)
            probe.reset([[(f"calibration {count}", count)] for count in counts])
            line = calibrate(
                name,
                lambda number, vector: _exchange(probe, method, world, number, vector),
                counts,
                world=world,
                clock=self.clock,
                arena=self._arena,
                budget_s=CALIBRATION_S / num_lines,
                gather=self.gather,
            )
        self._costs.append(line)
        return line

    def _given(self, name: str, method: Method, wire: Wire, carrier: str, counts: list[int]) -> LineCost:
        """The line by `sync.network`, for messages `width` times as long as the gradients in them."""
        assert self.plan.sync.network is not None
        width = self._wire(wire).bytes_per_element / ELEMENT_BYTES
        sizes = [count * ELEMENT_BYTES for count in counts]
        lines = {
            part.name: given_line(
                self.plan.sync.network,
                f"{carrier} {part.name}",
                part.name,
                self._layout,
                largest_bytes=sizes[-1],
                chunks=part.chunks,
            )
            for part in (method.parts if isinstance(method, Hybrid) else (method,))
        }
        seconds = [lines[method.way(size * width)].time(size * width) for size in sizes]
        return fit_line(name, self.place.size, sizes, seconds)


Sent = tuple[float, float]  # Bytes that a rank sends inside its group and to other groups, mean over ranks.


class Method:
    """One way to sum a message over all ranks."""

    name: str

    def sum(self, vector: torch.Tensor) -> str:
        """`vector` becomes the sum over all ranks, in place. Returns how it went: flat, hierarchical or leader.
        `vector`: (n,), floating; n must be a multiple of the group size where the method has groups.
        """
        raise NotImplementedError

    def way(self, num_bytes: float) -> str:
        return self.name

    def chunks(self, num_bytes: int) -> int | None:
        """In how many chunks a message of so many bytes on the wire goes; None: as a whole."""
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
    """Two levels: reduce-scatter inside, all-reduce of each share across groups, all-gather inside.

    2 (g - 1) / g n bytes inside and 2 (m - 1) / m n / g across for each rank (the 2D form; Horovod's hierarchical and
    torus all-reduce on GPUs). A message goes in chunks: while the shares of one travel across groups, the next is
    scattered and the one before gathered.
    """

    name = "hierarchical"

    def __init__(self, groups: RankGroups, chunks: Callable[[int], int]) -> None:
        self._groups = groups
        self._chunks = chunks

    def sum(self, vector: torch.Tensor) -> str:
        inside, across = self._groups.inside, self._groups.across
        size = len(inside.ranks)
        under_way: list[tuple[Callable[[], object], torch.Tensor, torch.Tensor]] = []
        chunks = self._chunks(vector.numel() * vector.element_size())
        for chunk in range(chunks):
            first, count = (size * shares for shares in block(vector.numel() // size, chunks, chunk))
            part = vector[first : first + count]
            share = inside.reduce_scatter(part)
            under_way.append((across.begin_sum(share), share, part))
            if chunk:
                self._gather(*under_way.pop(0))
        self._gather(*under_way.pop())
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
    """Jia et al. 2018 (arXiv 1807.11205), grouped all-reduce: reduce to the group's first rank, ring among these,
    broadcast. 2 (g - 1) n bytes inside a group and 2 (m - 1) / m n from each leader across.
    """

    name = "leader"

    def __init__(self, groups: RankGroups, *, reduce_is_sum: bool) -> None:
        """`reduce_is_sum`: the library has no reduce and sums on every rank of the group instead."""
        self._groups = groups
        self._reduce_share = 2.0 if reduce_is_sum else 1.0

    def sum(self, vector: torch.Tensor) -> str:
        groups = self._groups
        groups.inside.reduce(vector, 0)
        if groups.inside.index == 0:
            groups.across.sum(vector)
        groups.inside.broadcast(vector, 0)
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        g, m = len(self._groups.inside.ranks), len(self._groups.across.ranks)
        inside = (self._reduce_share + 1) * (g - 1) / g * num_bytes
        return inside, 2 * (m - 1) / m * num_bytes / g


class Hybrid(Method):
    """Small messages hierarchical, where start-ups decide, large ones flat (Jia et al. 2018, hybrid all-reduce)."""

    name = "hybrid"

    def __init__(self, flat: Flat, hierarchical: Hierarchical, threshold_bytes: int) -> None:
        self.parts = (flat, hierarchical)
        self.threshold_bytes = threshold_bytes

    def sum(self, vector: torch.Tensor) -> str:
        return self._chosen(vector.numel() * vector.element_size()).sum(vector)

    def way(self, num_bytes: float) -> str:
        return self._chosen(num_bytes).name

    def chunks(self, num_bytes: int) -> int | None:
        return self._chosen(num_bytes).chunks(num_bytes)

    def sent(self, num_bytes: float) -> Sent:
        return self._chosen(num_bytes).sent(num_bytes)

    def _chosen(self, num_bytes: float) -> Method:
        flat, hierarchical = self.parts
        return hierarchical if num_bytes < self.threshold_bytes else flat


def sizes_up_to(largest_bytes: int, multiple: int) -> list[int]:
    """Elements of the vectors to time: a factor of four apart from 4 KiB to the largest, each a multiple of `multiple`.
    At least two, as a line needs.
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    sizes.append(max(largest_bytes, sizes[-1] * 4 if len(sizes) == 1 else 0))
    return sorted({-(-size // (ELEMENT_BYTES * multiple)) * multiple for size in sizes})


def calibrate(
    name: str,
    exchange: Callable[[int, torch.Tensor], object],
    counts: list[int],
    *,
    world: RankGroup,
    clock: Clock,
    arena: torch.Tensor,
    budget_s: float,
    gather: Callable[[Any], list[Any]],
) -> LineCost:
    """The cost line of an exchange, the same on all ranks.

    A time is that of the slowest rank, from a start in step; of the repeats of a size the median. Ranks do not leave
    that start at once: short messages are timed several back to back, each in a place of the arena of its own. On a GPU
    the stream is held back until all are queued; where so many are too many for that, fewer are taken. Larger sizes are
    left out once rank 0 has used the budget; two sizes are always timed.
    """
    began = time.monotonic()
    timed: list[list[float]] = []
    late_sizes: list[int] = []
    flag = torch.zeros(1, device=arena.device)
    in_stream = None if clock.marks_are_free else StreamTimer(clock, lambda: world.sum(flag))
    for number, count in enumerate(counts):

        def sample(messages: int, number: int = number, count: int = count) -> tuple[float, bool]:
            vectors = torch.split(arena[: messages * count].normal_(), count)  # sums of sums would overflow
            _any(world, arena.device, False)
            clock.settle()
            return _time_of_one(partial(exchange, number), vectors, in_stream, number)

        # The last rank to start waits for nobody: its time is the message's.
        single = min(gather([sample(1), sample(1)][1][0]))
        most = min(len(arena) // count, math.inf if in_stream is None else MOST_QUEUED)
        messages = int(min(most, max(1, math.ceil(LEAST_SAMPLE_S / max(single, 1e-9)))))
        while True:
            samples = [sample(messages) for _ in range(REPEATS)]
            is_late = in_stream is not None and _any(world, arena.device, any(late for _, late in samples))
            if not is_late or messages == 1:
                break
            messages = max(1, messages // _FEWER)
        timed.append([seconds for seconds, _ in samples])
        late_sizes += [count * ELEMENT_BYTES] * is_late
        is_over = world.index == 0 and time.monotonic() - began > budget_s
        if _any(world, arena.device, is_over) and number > 0:
            break
    everyone = gather(timed)
    slowest = [
        statistics.median(max(repeat) for repeat in zip(*(times[size] for times in everyone), strict=True))
        for size in range(len(timed))
    ]
    sizes = [count * ELEMENT_BYTES for count in counts[: len(timed)]]
    # Every rank fits the same numbers, and yet rank 0 decides: processors may round differently.
    line = fit_line(name, len(world.ranks), sizes, slowest).model_copy(update={"launch_bound": tuple(late_sizes)})
    return LineCost.model_validate(gather(line.model_dump(mode="json"))[0])


def _time_of_one(
    exchange: Callable[[torch.Tensor], object],
    vectors: Sequence[torch.Tensor],
    in_stream: StreamTimer | None,
    number: int,
) -> tuple[float, bool]:
    """Returns the seconds of a message of several back to back, and whether the stream did not wait for all of them."""

    def send() -> None:
        for vector in vectors:
            exchange(vector)

    if in_stream is not None:
        seconds, is_late = in_stream.time(send, len(vectors), number)
        return seconds / len(vectors), is_late
    start = time.monotonic()
    send()
    return (time.monotonic() - start) / len(vectors), False


def _any(world: RankGroup, device: torch.device, here: bool) -> bool:
    """Whether it is so on any rank; all ranks leave together."""
    flag = torch.full((1,), float(here), device=device)
    world.sum(flag)
    return flag.item() > 0


def given_line(
    path: str, name: str, method: str, layout: Layout, *, largest_bytes: int, chunks: Callable[[int], int | None]
) -> LineCost:
    """The line of an exchange: of its name and rank count if the file has it, else through predictions."""
    network = read_network(Path(path))
    for line in network.collectives:
        if line.name == name and line.ranks == layout.ranks:
            return line
    sizes = [count * ELEMENT_BYTES for count in sizes_up_to(largest_bytes, layout.ranks)]
    try:
        seconds = [
            predict("allreduce", _ALGORITHMS[method], size, layout, network, chunks=chunks(size)) for size in sizes
        ]
    except UserError as error:
        raise UserError(f"sync.network {path}: {error}") from None
    return fit_line(f"{name}, predicted", layout.ranks, sizes, seconds)
