"""Groups of ranks: the few collectives of which every all-reduce of gradients is made, here over torch.distributed.

Over gloo, reduce-scatter and all-gather are made of point-to-point messages: PyTorch's ProcessGroupGloo sums the
whole vector on every rank to give each its share (twice the bytes), and gathers through a buffer of its own. Here each
rank sends every other rank its share directly: (p - 1) / p of the vector leaves a rank, in p - 1 messages, which is the
least that is possible.

Plain values of all ranks are gathered as JSON bytes in tensors, not by the libraries' own functions for objects
(`all_gather_object`, `allgather_object`): those unpickle what the other ranks send, so that who gets into one rank's
place runs code in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dlbench.errors import RunError

_TAG = 17  # Of direct messages; those of a pair of ranks arrive in the order of sending.
MAX_BYTES = 2**30  # Of one rank's value; more is a mistake, or nonsense from the network.


class RankGroup(Protocol):
    """A communicator. All its ranks make every call in the same order; it returns when this rank's part is done.
    Vectors are one-dimensional, contiguous and of a floating type; sums are not divided by the number of ranks.
    """

    ranks: tuple[int, ...]  # Its ranks in the run, ascending.
    index: int  # Position of this rank among them.
    carrier: str  # What moves the bytes, e.g. gloo, mpi, nccl.

    def sum(self, vector: torch.Tensor) -> None:
        """All-reduce: `vector` becomes the sum over ranks, in place."""

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        """Begins `sum`; what it returns waits for its end. Two may be under way."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's share (shape: n / ranks) of the sum; n must divide by the number of ranks."""

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """`vector` (n) becomes the shares (n / ranks each) of all ranks, by index."""

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes the sum on the rank with index `root`; undefined elsewhere."""

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes that of the rank with index `root`."""

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of equal lengths, by index."""


class Communicators(Protocol):
    """A started library that makes groups of its ranks."""

    carrier: str  # What moves the bytes, e.g. gloo, mpi, nccl.
    reduce_is_sum: bool  # Whether the library knows no reduce to one rank and its groups sum on every rank instead.

    def group(self, ranks: Sequence[int]) -> RankGroup | None:
        """A group of some ranks, ascending; None where this rank is not among them. All ranks of the run make all
        groups, in the same order.
        """

    def broadcast_parameters(self, model: nn.Module) -> None:
        """All ranks' parameters and buffers become those of rank 0."""


@dataclass(frozen=True, kw_only=True)
class GroupRanks:
    """Who is in which group, for ranks laid out in blocks: rank = group x group size + place in the group."""

    size: int  # Ranks of the run.
    group_size: int  # Ranks of a group; divides `size`.

    @property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        step = self.group_size
        return tuple(tuple(range(first, first + step)) for first in range(0, self.size, step))

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each place in a group, the ranks with that place; the first are the leaders."""
        return tuple(tuple(range(place, self.size, self.group_size)) for place in range(self.group_size))


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups that one rank is in."""

    world: RankGroup
    inside: RankGroup  # Ranks of its group.
    across: RankGroup  # Ranks with its place in every group. That of place 0 is the group of leaders.


def make_world(communicators: Communicators, who: GroupRanks) -> RankGroup:
    """All ranks."""
    world = communicators.group(range(who.size))
    assert world is not None  # every rank is in it
    return world


def make_groups(communicators: Communicators, who: GroupRanks) -> RankGroups:
    """Every group of the run, made by all ranks in the same order; returns those of this rank."""
    world = make_world(communicators, who)
    inside = [communicators.group(ranks) for ranks in who.inside]
    across = [communicators.group(ranks) for ranks in who.across]
    return RankGroups(world=world, inside=next(filter(None, inside)), across=next(filter(None, across)))


class TorchGroup:
    """One process group."""

    def __init__(self, ranks: tuple[int, ...], index: int, carrier: str, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self.process_group = group  # None: all ranks of the run
        self._arrived: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def sum(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector, group=self.process_group)

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        return partial(_wait, dist.all_reduce(vector, group=self.process_group, async_op=True))

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """As in the protocol; over gloo the share is a part of `vector`, whose other parts keep this rank's values."""
        length = vector.numel() // len(self.ranks)
        if self.carrier != "gloo":
            share = torch.empty(length, dtype=vector.dtype, device=vector.device)
            dist.reduce_scatter_tensor(share, vector, group=self.process_group)
            return share
        key = (length, vector.dtype)
        if key not in self._arrived:  # kept: fresh memory for every message would cost page faults
            self._arrived[key] = torch.empty(len(self.ranks) - 1, length, dtype=vector.dtype)
        arrived = self._arrived[key]
        parts = vector.view(len(self.ranks), length)
        others = [i for i in range(len(self.ranks)) if i != self.index]
        receiving = [
            dist.irecv(row, src=self.ranks[i], group=self.process_group, tag=_TAG)
            for row, i in zip(arrived, others, strict=True)
        ]
        sending = [self._send(parts[i], i) for i in self._others_onward()]
        for work, row in zip(receiving, arrived, strict=True):
            _wait(work)
            parts[self.index].add_(row)
        for work in sending:
            _wait(work)
        return parts[self.index]

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        if self.carrier != "gloo":
            dist.all_gather_into_tensor(vector, share, group=self.process_group)
            return
        parts = vector.view(len(self.ranks), share.numel())
        receiving = [
            dist.irecv(parts[i], src=self.ranks[i], group=self.process_group, tag=_TAG)
            for i in range(len(self.ranks))
            if i != self.index
        ]
        sending = [self._send(share, i) for i in self._others_onward()]
        if parts[self.index].data_ptr() != share.data_ptr():
            parts[self.index].copy_(share)
        for work in (*receiving, *sending):
            _wait(work)

    def _send(self, tensor: torch.Tensor, index: int) -> dist.Work | None:
        return dist.isend(tensor, dst=self.ranks[index], group=self.process_group, tag=_TAG)

    def _others_onward(self) -> list[int]:
        """The other indices, beginning after the own one, so that not all ranks send to the same one first."""
        size = len(self.ranks)
        return [(self.index + step) % size for step in range(1, size)]

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        dist.reduce(vector, dst=self.ranks[root], group=self.process_group)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        dist.broadcast(vector, src=self.ranks[root], group=self.process_group)

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(gathered, tensor, group=self.process_group)
        return gathered


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # None only for ranks outside of the group
    work.wait()


class TorchCommunicators:
    """torch.distributed, its default process group joined already."""

    reduce_is_sum = False

    def __init__(self) -> None:
        self.carrier = str(dist.get_backend())
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()

    def group(self, ranks: Sequence[int]) -> TorchGroup | None:
        chosen = tuple(ranks)
        made = None if len(chosen) == self._size else dist.new_group(list(chosen))
        if self._rank not in chosen:
            return None
        return TorchGroup(chosen, chosen.index(self._rank), self.carrier, made)

    def broadcast_parameters(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def gather_json(value: Any, num_ranks: int, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """`value` of every rank, by rank; tuples come back as lists, keys as text."""
    own = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(own)], dtype=torch.int64)).tolist()
    if len(sizes) != num_ranks or not all(0 < size <= MAX_BYTES for size in sizes):
        raise RunError(
            f"ranks sent values of {sizes[:8]} bytes to each other; expected {num_ranks} of 1 to {MAX_BYTES}"
        )
    padded = torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8)
    everyone = all_gather(padded).reshape(num_ranks, -1).numpy()
    try:
        return [json.loads(everyone[rank, :size].tobytes()) for rank, size in enumerate(sizes)]
    except ValueError:
        raise RunError("a rank sent bytes that are no JSON") from None


def gather_over_torch(value: Any, num_ranks: int, device: torch.device | None = None) -> list[Any]:
    """`gather_json` over torch.distributed's default group; `device` where its tensors must lie (None: the CPU)."""

    def all_gather(own: torch.Tensor) -> torch.Tensor:
        sent = own if device is None else own.to(device)
        found = [torch.empty_like(sent) for _ in range(num_ranks)]
        dist.all_gather(found, sent)
        return torch.cat(found).cpu()

    return gather_json(value, num_ranks, all_gather)
