"""The order of a rank that reads only what it holds: under local and partial shuffling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dlbench.datasets.shuffling import Ownership
from dlbench.node.data.sharding import Key, Position, ShardedOrder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class HeldOrder(ShardedOrder):
    """The order of one rank among the samples that it holds.

    As a `ShardedOrder`, but each epoch has a permutation of each rank's own samples. Ranks hold equally many or one
    more; what not every rank has, and what fills no batch, stays at the end of a rank's order and is left out, others
    each epoch.

    Args:
        ownership: who holds what.
        batch_size, rank, drop_last, start: as of `ShardedOrder`; the place in `start` is a multiple of the ranks.

    Raises:
        UserError: the samples of a rank do not fill one batch.
    """

    def __init__(
        self, ownership: Ownership, *, batch_size: int, rank: int, drop_last: bool = True, start: Position | None = None
    ) -> None:
        super().__init__(
            ownership.num_samples,
            batch_size=batch_size,
            rank=rank,
            world_size=ownership.ranks,
            seed=ownership.seed,
            drop_last=drop_last,
            start=start,
        )
        self.ownership = ownership
        self.on_batch: Callable[[int, int], None] = lambda epoch, batches: None
        """Told of each batch that is handed out: its epoch, and how many of this epoch there were with it."""

    def epoch(self, number: int, place: int = 0) -> NDArray[np.int64]:
        """(n,) sample indices of this rank in one epoch, from a place of all ranks together on."""
        if place == 0:
            return self._whole(number)[0]
        mine = self.ownership.order(number, self._rank)
        return mine[place // self._world_size :][: self._per_rank(place)]

    def _split(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        mine, num = self.ownership.order(number, self._rank), self._per_rank(0)
        return mine[:num], mine[num:]

    def batches(self) -> Iterator[list[Key]]:
        """The keys of each batch, without end; tells `on_batch` of each."""
        number, taken = self._start.epoch, self.batches_per_epoch - self._num_batches(self._start.place)
        for keys in super().batches():
            if keys[0][0] != number:
                number, taken = keys[0][0], 0
            taken += 1
            self.on_batch(number, taken)
            yield keys
