"""Which sample which rank takes when: one seeded permutation an epoch, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dlbench.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Key = tuple[int, int]
"""Epoch and sample index. All randomness of a sample derives from the seed and its key, nothing else."""


class ShardedOrder:
    """The order of one rank.

    Every epoch has a permutation of its own, the same on all ranks; rank r takes its places r, r + world_size, ... So
    no sample is used twice in an epoch, and every rank has equally many batches of equal sizes. What does not fill a
    batch on every rank is left out of that epoch (another part each time) and told by `dropped_per_epoch`.

    Args:
        num_samples: samples in the data set.
        batch_size: samples of one rank in one batch.
        rank, world_size: this rank's number, and how many there are.
        seed: of the permutations.
        drop_last: leave out a last batch that is smaller than the others; otherwise only what cannot be dealt out
            evenly is left out.

    Raises:
        UserError: the data set does not fill one batch on every rank.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, rank: int, world_size: int, seed: int, drop_last: bool = True
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks")
        needed = batch_size * world_size
        if num_samples < needed:
            raise UserError(
                f"data.source has {num_samples} samples, one step needs {needed} (train.batch_per_rank {batch_size} x "
                f"{world_size} ranks); use more data, fewer ranks or a smaller batch"
            )
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        self._rank, self._world_size = rank, world_size
        per_rank = num_samples // world_size
        if drop_last:
            per_rank -= per_rank % batch_size
        self._per_rank = per_rank
        self.batches_per_epoch = -(-per_rank // batch_size)
        self.dropped_per_epoch = num_samples - per_rank * world_size

    def epoch(self, number: int) -> NDArray[np.int64]:
        """(batches_per_epoch x batch_size,) sample indices of this rank in one epoch, fewer if a batch is smaller."""
        order = np.random.default_rng([self._seed, number]).permutation(self._num_samples)
        mine: NDArray[np.int64] = order[self._rank :: self._world_size][: self._per_rank]
        return mine

    def batches(self, start_batch: int = 0) -> Iterator[list[Key]]:
        """The keys of each batch, without end; `start_batch` batches are passed over."""
        number, first = divmod(start_batch, self.batches_per_epoch)
        while True:
            mine = self.epoch(number)
            for batch in range(first, self.batches_per_epoch):
                part = mine[batch * self._batch_size : (batch + 1) * self._batch_size]
                yield [(number, int(index)) for index in part]
            number, first = number + 1, 0
