"""Groups of ranks over torch.distributed: gloo on CPUs, NCCL on GPUs (the latter not measured here).

Over gloo, reduce-scatter and all-gather are made of point-to-point messages: PyTorch's ProcessGroupGloo sums the
whole vector on every rank to give each its share (twice the bytes), and gathers through a buffer of its own. Here each
rank sends every other rank its share directly: (p - 1) / p of the vector leaves a rank, in p - 1 messages, which is the
least that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

_TAG = 17
"""Of direct messages; those of a pair of ranks arrive in the order of sending."""


class TorchGroup:
    """One process group."""

    def __init__(self, ranks: tuple[int, ...], index: int, carrier: str, group: dist.ProcessGroup | None) -> None:
        """`group`: None for the default group of all ranks."""
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self._group = group
        self._arrived: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def sum(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector, group=self._group)

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """As in the protocol; over gloo the share is a part of `vector`, whose other parts keep this rank's values."""
        length = vector.numel() // len(self.ranks)
        if self.carrier != "gloo":
            share = torch.empty(length, dtype=vector.dtype, device=vector.device)
            dist.reduce_scatter_tensor(share, vector, group=self._group)
            return share
        arrived = self._room(length, vector.dtype)
        parts = vector.view(len(self.ranks), length)
        others = [i for i in range(len(self.ranks)) if i != self.index]
        receiving = [
            dist.irecv(row, src=self.ranks[i], group=self._group, tag=_TAG)
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
            dist.all_gather_into_tensor(vector, share, group=self._group)
            return
        parts = vector.view(len(self.ranks), share.numel())
        receiving = [
            dist.irecv(parts[i], src=self.ranks[i], group=self._group, tag=_TAG)
            for i in range(len(self.ranks))
            if i != self.index
        ]
        sending = [self._send(share, i) for i in self._others_onward()]
        if parts[self.index].data_ptr() != share.data_ptr():
            parts[self.index].copy_(share)
        for work in (*receiving, *sending):
            _wait(work)

    def _send(self, tensor: torch.Tensor, index: int) -> dist.Work | None:
        return dist.isend(tensor, dst=self.ranks[index], group=self._group, tag=_TAG)

    def _others_onward(self) -> list[int]:
        """The other indices, beginning after the own one, so that not all ranks send to the same one first."""
        size = len(self.ranks)
        return [(self.index + step) % size for step in range(1, size)]

    def _room(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A kept buffer (ranks - 1, length); fresh memory for every message would cost page faults."""
        key = (length, dtype)
        if key not in self._arrived:
            self._arrived[key] = torch.empty(len(self.ranks) - 1, length, dtype=dtype)
        return self._arrived[key]

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        dist.reduce(vector, dst=self.ranks[root], group=self._group)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        dist.broadcast(vector, src=self.ranks[root], group=self._group)

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        if equal:
            alike = [torch.empty_like(tensor) for _ in self.ranks]
            dist.all_gather(alike, tensor, group=self._group)
            return alike
        own = torch.tensor([tensor.numel()], dtype=torch.int64, device=tensor.device)
        lengths = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(lengths, own, group=self._group)
        counts = [int(length) for length in lengths]
        # torch.distributed gathers equal shapes only.
        padded = torch.zeros(max(counts), dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = tensor
        found = [torch.empty_like(padded) for _ in self.ranks]
        dist.all_gather(found, padded, group=self._group)
        return [part[:count] for part, count in zip(found, counts, strict=True)]


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
