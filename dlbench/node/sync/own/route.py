"""By which groups, method and format the gradients of a run travel, and what a message costs by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlbench.costs.fit.least_errors import fit_line
from dlbench.costs.overlap import hybrid_threshold
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.clocks import Clock
from dlbench.node.sync.own.buckets import arena_elements
from dlbench.node.sync.own.calibration import ELEMENT_BYTES, calibrate, sizes_up_to
from dlbench.node.sync.own.exchanges import Flat, Hierarchical, Hybrid, Leader, Method
from dlbench.node.sync.own.groups import Communicators, Group, GroupRanks, RankGroups, make_groups, make_world
from dlbench.node.sync.own.network_costs import given_line
from dlbench.node.sync.own.wire import WireFormat, build_wire
from dlbench.node.sync.shared_memory.group import SharedMemoryGroup
from dlbench.specs.collectives.network import LineCost
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import GROUPED, Wire

CALIBRATION_S = 2.0
"""For all lines of a run together; it is spent once, before training."""
SHARED_MEMORY_WAIT_S = 60.0
SLOT_BYTES = 16 * 2**20
"""Of shared memory for what does not lie in it already: casts to 16 bits. Longer vectors go in chunks."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a message goes through."""

    world: Group
    method: Method
    wire: WireFormat
    carrier: str
    """Who moves the bytes, in words."""
    inside: str
    """Who moves them in a group, as in `sync.inside`."""
    group_size: int
    multiple: int
    """Of which the elements of a message must be a multiple."""
    line: LineCost | None
    """What a message of gradients costs; None where nothing asks for it."""
    costs: tuple[LineCost, ...]
    """All lines given or measured."""
    arena: torch.Tensor
    """Room for the buffers of messages, fp32, one-dimensional."""
    shared: SharedMemoryGroup | None

    def exchange(self, number: int, vector: torch.Tensor) -> str:
        """The message of this number becomes the sum over ranks; returns how it went: sparse, or as the method says."""
        return _exchange(self.wire, self.method, self.world, number, vector)

    @property
    def threshold_bytes(self) -> int | None:
        """From which size hybrid is flat, bytes; None for other exchanges."""
        return self.method.threshold_bytes if isinstance(self.method, Hybrid) else None

    def close(self) -> None:
        """Lets go of shared memory."""
        if self.shared is not None:
            self.shared.close()


def _exchange(wire: WireFormat, method: Method, world: Group, number: int, vector: torch.Tensor) -> str:
    ways: list[str] = []

    def dense(tensor: torch.Tensor) -> None:
        ways.append(method.sum(tensor))

    wire.exchange(number, vector, dense, world)
    return ways[-1] if ways else "sparse"


class RouteBuilder:
    """Makes the groups, finds the threshold of hybrid and the cost line of own:mgwfbp."""

    def __init__(
        self,
        plan: RunPlan,
        place: RankPlace,
        device: torch.device,
        *,
        communicators: Communicators,
        clock: Clock,
        gather: Callable[[Any], list[Any]],
        tensor_elements: Sequence[int],
    ) -> None:
        """Everything that is known of the run; `gather` is `Engine.gather`, `tensor_elements` of each gradient."""
        self._plan = plan
        self._place = place
        self._device = device
        self._communicators = communicators
        self._clock = clock
        self._gather = gather
        self._tensor_elements = tensor_elements
        self._gradient_bytes = ELEMENT_BYTES * sum(tensor_elements)
        self._who = GroupRanks(size=place.size, group_size=plan.group_size)
        self._is_grouped = plan.sync.exchange in GROUPED
        self._multiple = plan.group_size if self._is_grouped else 1
        self._costs: list[LineCost] = []

    def build(self) -> Route:
        """The route; all ranks call it together.

        Raises:
            UserError: `sync.network` does not say what is needed of it.
            RunError: ranks that should share memory do not find each other.
        """
        sync = self._plan.sync
        shared = self._shared_memory() if sync.inside == "shared-memory" else None
        carrier = self._communicators.carrier
        groups: RankGroups | None = None
        if self._is_grouped:
            groups = make_groups(self._communicators, self._who, shared)
            world = groups.world
            carrier = carrier if shared is None else f"{carrier}, {shared.carrier} intra-group"
        else:
            world = shared or make_world(self._communicators, self._who)
            carrier = world.carrier
        self._arena = self._room(shared)
        method = self._method(world, groups, carrier)
        wire = self._plan.sync.wire
        return Route(
            world=world,
            method=method,
            wire=self._wire(wire),
            carrier=carrier,
            inside="backend" if shared is None else "shared-memory",
            group_size=self._plan.group_size,
            multiple=self._multiple,
            line=self._line(method, wire, world, carrier) if sync.fusion == "own:mgwfbp" else None,
            costs=tuple(self._costs),
            arena=self._arena,
            shared=shared,
        )

    def _shared_memory(self) -> SharedMemoryGroup:
        """Memory of this rank's group, or of all ranks where the exchange has no groups (they are on one node then)."""
        rank = self._place.rank
        ranks = next(r for r in self._who.inside if rank in r) if self._is_grouped else self._who.world
        return SharedMemoryGroup(
            ranks,
            ranks.index(rank),
            name=f"{self._plan.run_id}-{self._place.token}-{ranks[0]}",
            capacity_bytes=min(self._gradient_bytes + ELEMENT_BYTES * len(ranks), SLOT_BYTES),
            timeout_s=min(SHARED_MEMORY_WAIT_S, self._plan.measure.stall_timeout_s),
        )

    def _room(self, shared: SharedMemoryGroup | None) -> torch.Tensor:
        """Where messages lie: in shared memory already, where there is some, so that they need not be copied there."""
        elements = max(
            arena_elements(self._tensor_elements, self._multiple), sizes_up_to(self._gradient_bytes, self._multiple)[-1]
        )
        if shared is not None:
            return shared.allocate(elements)
        return torch.zeros(elements, dtype=torch.float32, device=self._device)

    def _wire(self, name: Wire) -> WireFormat:
        return build_wire(name, density=self._plan.sync.topk_density, world_size=self._place.size)

    def _method(self, world: Group, groups: RankGroups | None, carrier: str) -> Method:
        flat = Flat(world, self._plan.group_size)
        if groups is None:
            return flat
        sync = self._plan.sync
        if sync.exchange == "leader":
            return Leader(groups, reduce_is_sum=self._communicators.reduce_is_sum and sync.inside == "backend")
        hierarchical = Hierarchical(groups)
        if sync.exchange == "hierarchical":
            return hierarchical
        if sync.hybrid_threshold_bytes is not None:
            return Hybrid(flat, hierarchical, sync.hybrid_threshold_bytes)
        # The method sees what is on the wire, in whatever format, so the lines are those of plain sums.
        lines = [self._line(method, "fp32", world, carrier) for method in (flat, hierarchical)]
        threshold = hybrid_threshold(*lines)
        # Where flat never gets cheaper, every message is below the threshold.
        return Hybrid(flat, hierarchical, self._largest_bytes + 1 if threshold is None else threshold)

    @property
    def _largest_bytes(self) -> int:
        return self._gradient_bytes + ELEMENT_BYTES * self._multiple

    def _line(self, method: Method, wire: Wire, world: Group, carrier: str) -> LineCost:
        """Seconds by bytes of gradients, as `sync.network` says or as timed now."""
        name = f"{carrier} {method.name}" + ("" if wire == "fp32" else f" {wire}")
        counts = sizes_up_to(self._gradient_bytes, self._multiple)
        if self._plan.sync.network is not None:
            line = self._given(name, method, wire, carrier, counts)
        else:
            probe = self._wire(wire)
            probe.reset([[(f"calibration {count}", count)] for count in counts])
            line = calibrate(
                name,
                lambda number, vector: _exchange(probe, method, world, number, vector),
                counts,
                world=world,
                clock=self._clock,
                arena=self._arena,
                budget_s=CALIBRATION_S / self._num_lines,
                gather=self._gather,
            )
        self._costs.append(line)
        return line

    @property
    def _num_lines(self) -> int:
        sync = self._plan.sync
        is_found = sync.exchange == "hybrid" and sync.hybrid_threshold_bytes is None
        return max(1, 2 * is_found + (sync.fusion == "own:mgwfbp"))

    def _given(self, name: str, method: Method, wire: Wire, carrier: str, counts: list[int]) -> LineCost:
        """The line by `sync.network`, for messages `width` times as long as the gradients in them."""
        assert self._plan.sync.network is not None
        width = self._wire(wire).bytes_per_element / ELEMENT_BYTES
        sizes = [count * ELEMENT_BYTES for count in counts]
        lines = {
            part.name: given_line(
                self._plan.sync.network, f"{carrier} {part.name}", part.name, self._who, largest_bytes=sizes[-1]
            )
            for part in (method.parts if isinstance(method, Hybrid) else (method,))
        }
        seconds = [lines[method.way(size * width)].time(size * width) for size in sizes]
        return fit_line(name, self._place.size, sizes, seconds)
