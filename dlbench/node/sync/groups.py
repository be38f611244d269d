"""Groups of ranks and the collectives that dlbench's all-reduces are made of, here over torch.distributed."""

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

_TAG = 17  # Tag of point-to-point messages; those of a pair of ranks arrive in the order of sending.
MAX_BYTES = 2**30  # Largest value of one rank; more is a mistake, or damaged data from the network.


class RankGroup(Protocol):
    """A communicator of ranks that all make the same calls in the same order; sums are not divided by their number."""

    # Vectors are one-dimensional, contiguous and floating; a call returns when this rank's part is done.

    ranks: tuple[int, ...]  # Its ranks in the run, ascending.
    index: int  # Position of this rank in `ranks`.
    carrier: str  # Library that sends the bytes, e.g. gloo, mpi, nccl.

    def sum(self, vector: torch.Tensor) -> None:
        """All-reduces `vector`: replaces it by the sum over ranks."""

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        """Begins `sum` and returns a function that waits for its end; at most two may be in flight."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share (shape: n / ranks) of the sum; n must divide by the number of ranks."""

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """Fills `vector` (n) with the shares (n / ranks each) of all ranks, by index."""

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """Replaces `vector` by the sum on the rank with index `root`; leaves it undefined elsewhere."""

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """Replaces `vector` by that of the rank with index `root`."""

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, of equal lengths, by index."""

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row i to the rank with index i; returns the rows for this rank, by index: shape of `rows`."""


class Communicators(Protocol):
    """A started library that makes groups of its ranks."""

    carrier: str  # Library that sends the bytes, e.g. gloo, mpi, nccl.
    reduce_is_sum: bool  # Whether the library lacks a reduce to one rank, so that groups sum on every rank instead.

    def group(self, ranks: Sequence[int]) -> RankGroup | None:
        """Makes a group of ascending ranks, on all ranks in the same order; None if this rank is not in it."""

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Replaces all ranks' parameters and buffers by those of rank 0."""


@dataclass(frozen=True, kw_only=True)
class GroupRanks:
    """The ranks of each group, laid out in blocks: rank = group x group size + index in the group."""

    size: int  # Ranks of the run.
    group_size: int  # Ranks of a group; divides `size`.

    @property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        step = self.group_size
        return tuple(tuple(range(first, first + step)) for first in range(0, self.size, step))

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each index in a group, the ranks with that index; the first are the leaders."""
        return tuple(tuple(range(index, self.size, self.group_size)) for index in range(self.group_size))


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups that one rank is in."""

    world: RankGroup
    inside: RankGroup  # Ranks of its group.
    across: RankGroup  # Ranks with its index in every group; with index 0 it is the group of leaders.


def make_world(communicators: Communicators, group_ranks: GroupRanks) -> RankGroup:
    """Makes the group of all ranks."""
    world = communicators.group(range(group_ranks.size))
    assert world is not None  # every rank is in it
    return world


def make_groups(communicators: Communicators, group_ranks: GroupRanks) -> RankGroups:
    """Makes every group of the run, on all ranks in the same order; returns those of this rank."""
    world = make_world(communicators, group_ranks)
    inside = [communicators.group(ranks) for ranks in group_ranks.inside]
    across = [communicators.group(ranks) for ranks in group_ranks.across]
    return RankGroups(world=world, inside=next(filter(None, inside)), across=next(filter(None, across)))


class TorchGroup:
    """A process group of torch.distributed."""

    def __init__(self, ranks: tuple[int, ...], index: int, carrier: str, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self.process_group = group  # None: all ranks of the run
        self._receive_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def sum(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector, group=self.process_group)

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        return partial(_wait, dist.all_reduce(vector, group=self.process_group, async_op=True))

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the sum; over gloo a view of `vector`, whose other parts do not change."""
        length = vector.numel() // len(self.ranks)
        if self.carrier != "gloo":
            share = torch.empty(length, dtype=vector.dtype, device=vector.device)
            dist.reduce_scatter_tensor(share, vector, group=self.process_group)
            return share
        # PyTorch's ProcessGroupGloo sums the whole vector on every rank, with twice the bytes of the shares sent here.
        key = (length, vector.dtype)
        if key not in self._receive_buffers:  # reused: fresh memory for every message would cost page faults
            self._receive_buffers[key] = torch.empty(len(self.ranks) - 1, length, dtype=vector.dtype)
        received = self._receive_buffers[key]
        parts = vector.view(len(self.ranks), length)
        others = [i for i in range(len(self.ranks)) if i != self.index]
        receiving = [
            dist.irecv(row, src=self.ranks[i], group=self.process_group, tag=_TAG)
            for row, i in zip(received, others, strict=True)
        ]
        sending = [self._send(parts[i], i) for i in self._others_onward()]
        for work, row in zip(receiving, received, strict=True):
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
        """Returns the other indices, beginning after this rank's, so that not all ranks send to the same rank first."""
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

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.process_group)
        return received


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
        members = tuple(ranks)
        process_group = None if len(members) == self._size else dist.new_group(list(members))
        if self._rank not in members:
            return None
        return TorchGroup(members, members.index(self._rank), self.carrier, process_group)

    def broadcast_parameters(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def gather_json(value: Any, num_ranks: int, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Returns the `value` of every rank, by rank; tuples come back as lists, keys as text."""
    # The libraries' functions for objects unpickle data of other ranks: one of them could run code in all.
    encoded = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(encoded)], dtype=torch.int64)).tolist()
    if len(sizes) != num_ranks or not all(0 < size <= MAX_BYTES for size in sizes):
        raise RunError(
            f"ranks sent values of {sizes[:8]} bytes to each other; expected {num_ranks} of 1 to {MAX_BYTES}"
        )
    padded = torch.frombuffer(bytearray(encoded.ljust(max(sizes))), dtype=torch.uint8)
    gathered = all_gather(padded).reshape(num_ranks, -1).numpy()
    try:
        return [json.loads(gathered[rank, :size].tobytes()) for rank, size in enumerate(sizes)]
    except ValueError:
        raise RunError("a rank sent bytes that are not JSON") from None


def gather_over_torch(value: Any, num_ranks: int, device: torch.device | None = None) -> list[Any]:
    """Gathers `value` over torch.distributed's default group, in tensors on `device` (None: the CPU)."""

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None:
            tensor = tensor.to(device)
        gathered = [torch.empty_like(tensor) for _ in range(num_ranks)]
        dist.all_gather(gathered, tensor)
        return torch.cat(gathered).cpu()

    return gather_json(value, num_ranks, all_gather)
