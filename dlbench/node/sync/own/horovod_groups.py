"""Groups of ranks over Horovod's process sets, on Gloo, MPI or NCCL (the latter not measured here).

Horovod matches operations of ranks by name, and keeps what it negotiated by name: the same name must come with the same
shape. So each name here holds the group, the operation, the type and the length. Tried on Horovod 0.28.1 over Gloo and
MPI: all-reduce, reduce-scatter, all-gather (of unequal lengths too) and broadcast work on process sets in fp32 and
fp16. A broadcast's root is a rank of the run, not a place in the set. A reduce to one rank does not exist, so it is
an all-reduce here; its result on the other ranks is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class HorovodGroup:
    """One process set."""

    def __init__(self, hvd: Any, ranks: tuple[int, ...], index: int, carrier: str, process_set: Any) -> None:
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self._hvd = hvd
        self._set = process_set

    def sum(self, vector: torch.Tensor) -> None:
        hvd = self._hvd
        hvd.allreduce_(vector, op=hvd.Sum, name=self._name("sum", vector), process_set=self._set)

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        hvd = self._hvd
        name = self._name("reduce_scatter", vector)
        share: torch.Tensor = hvd.reducescatter(vector, op=hvd.Sum, name=name, process_set=self._set)
        return share

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        vector.copy_(self._hvd.allgather(share, name=self._name("all_gather", share), process_set=self._set))

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """As in the protocol; Horovod's all-reduce, for want of a reduce."""
        self.sum(vector)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        name = f"{self._name('broadcast', vector)}.{root}"
        self._hvd.broadcast_(vector, self.ranks[root], name=name, process_set=self._set)

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        hvd = self._hvd
        # Lengths differ between steps, so the length is no part of these names.
        name = f"dlbench.{self._set.process_set_id}.gather.{tensor.dtype}"
        lengths = [tensor.numel()] * len(self.ranks)
        if not equal:
            own = torch.tensor([tensor.numel()], dtype=torch.int64)
            lengths = hvd.allgather(own, name=f"{name}.lengths", process_set=self._set).tolist()
        found: torch.Tensor = hvd.allgather(tensor, name=name, process_set=self._set)
        return list(torch.split(found, lengths))

    def _name(self, operation: str, vector: torch.Tensor) -> str:
        return f"dlbench.{self._set.process_set_id}.{operation}.{vector.dtype}.{vector.numel()}"


class HorovodCommunicators:
    """Horovod, started already with HOROVOD_DYNAMIC_PROCESS_SETS."""

    reduce_is_sum = True

    def __init__(self, hvd: Any, carrier: str) -> None:
        self._hvd = hvd
        self.carrier = carrier
        self._made: dict[tuple[int, ...], Any] = {tuple(range(hvd.size())): hvd.global_process_set}

    def group(self, ranks: Sequence[int]) -> HorovodGroup | None:
        chosen = tuple(ranks)
        if chosen not in self._made:  # Horovod refuses a second set of the same ranks
            self._made[chosen] = self._hvd.add_process_set(list(chosen))
        rank = self._hvd.rank()
        if rank not in chosen:
            return None
        return HorovodGroup(self._hvd, chosen, chosen.index(rank), self.carrier, self._made[chosen])

    def broadcast_parameters(self, model: nn.Module) -> None:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
