"""Some ranks that exchange among themselves: the few collectives of which every exchange of gradients is made."""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """A communicator. All its ranks make every call in the same order; it returns when this rank's part is done.

    Vectors are one-dimensional, contiguous and of a floating type; sums are not divided by the number of ranks.
    """

    ranks: tuple[int, ...]
    """Its ranks in the run, ascending."""
    index: int
    """Position of this rank among them."""
    carrier: str
    """What moves the bytes, e.g. gloo, mpi, nccl, shared memory."""

    def sum(self, vector: torch.Tensor) -> None:
        """All-reduce: `vector` becomes the sum over ranks, in place."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's share (shape: n / ranks) of the sum; n must divide by the number of ranks."""

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """`vector` (n) becomes the shares (n / ranks each) of all ranks, by index."""

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes the sum on the rank with index `root`; undefined elsewhere."""

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes that of the rank with index `root`."""

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, by index; their lengths may differ."""
