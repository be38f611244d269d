"""Which sample which rank takes when: one seeded permutation an epoch, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.shuffling import Ownership
from dlbench.errors import UserError
from dlbench.specs.base import CountOrZero

_KNOWN_EPOCHS = 3

Key = tuple[int, int]  # Epoch and sample index: with the seed, the only source of a sample's randomness.


class Position(NamedTuple):
    """A place in the order of all ranks together; it means the same for any number of ranks."""

    epoch: CountOrZero = 0
    place: CountOrZero = 0  # samples of the epoch's permutation that have been dealt out


class ShardedOrder:
    """The order of one rank.

    Every epoch has a permutation of its own, the same on all ranks. It is dealt out like cards: of each run of
    batch_size x world_size places, rank r takes r, r + world_size, ... So no sample is used twice in an epoch, every
    rank has equally many batches of equal sizes, and the set of samples behind step n depends on the global batch
    alone. What does not fill a batch on every rank is left out of that epoch (another part each time) and counted by
    `dropped_per_epoch`.
    `drop_last`: leave out a last batch that is smaller than the others; otherwise only what cannot be dealt out evenly
    is left out. `start`: where to begin, for a run that continues another, perhaps with another number of ranks.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        drop_last: bool = True,
        start: Position | None = None,
    ) -> None:
        needed = batch_size * world_size
        if num_samples < needed:
            raise UserError(
                f"data.source has {num_samples} samples, one step needs {needed} (train.batch_per_rank {batch_size} x "
                f"{world_size} ranks); use more data, fewer ranks or a smaller batch"
            )
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        self._rank, self._world_size, self._drop_last = rank, world_size, drop_last
        self._start = start or Position()
        self._known: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self.batches_per_epoch = self._num_batches(0)
        self.dropped_per_epoch = num_samples - self._per_rank(0) * world_size

    def _per_rank(self, place: int) -> int:
        """Samples of each rank from a place of an epoch to its end."""
        per_rank = max(0, self._num_samples - place) // self._world_size
        return per_rank - per_rank % self._batch_size if self._drop_last else per_rank

    def _num_batches(self, place: int) -> int:
        return -(-self._per_rank(place) // self._batch_size)

    def epoch(self, number: int, place: int = 0) -> NDArray[np.int64]:
        """(n,) sample indices of this rank in one epoch, from a place of the permutation on."""
        if place == 0:
            return self._whole(number)[0]
        order = self._permutation(number)[place:]
        return order[self._rank :: self._world_size][: self._per_rank(place)]

    def left_out(self, number: int) -> NDArray[np.int64]:
        """(n,) samples that no rank reads in an epoch, by rule; each is reported by one rank, perhaps another."""
        return self._whole(number)[1]

    def _permutation(self, number: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, number]).permutation(self._num_samples)

    def _split(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the samples that this rank reads in a complete epoch, and those that it reports as left out."""
        order = self._permutation(number)
        dealt = self._per_rank(0) * self._world_size
        left_out = order[dealt:] if self._rank == 0 else order[:0]
        return order[:dealt][self._rank :: self._world_size].copy(), left_out.copy()

    def _whole(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns `_split`, cached for the last epochs, since reading and its audit both need it."""
        if number not in self._known:
            if len(self._known) >= _KNOWN_EPOCHS:
                del self._known[next(iter(self._known))]
            self._known[number] = self._split(number)
        return self._known[number]

    def batches(self) -> Iterator[list[Key]]:
        """The keys of each batch, without end."""
        number, place = self._start.epoch, self._start.place
        while True:
            mine = self.epoch(number, place)
            for first in range(0, len(mine), self._batch_size):
                yield [(number, int(index)) for index in mine[first : first + self._batch_size]]
            number, place = number + 1, 0

    def position(self, num_batches: int) -> Position:
        """Returns the position of all ranks after `num_batches` each."""
        epoch, place = self._start.epoch, self._start.place
        remaining = self._num_batches(place)
        if num_batches < remaining:
            return Position(epoch=epoch, place=place + num_batches * self._batch_size * self._world_size)
        epochs, in_epoch = divmod(num_batches - remaining, self.batches_per_epoch)
        return Position(epoch=epoch + 1 + epochs, place=in_epoch * self._batch_size * self._world_size)


def evaluation_batches(num_samples: int, *, batch_size: int, rank: int, world_size: int) -> Iterator[list[Key]]:
    """The keys of one pass over a validation set, in order: each sample on one rank, a last batch may be smaller."""
    mine = range(rank, num_samples, world_size)
    for first in range(0, len(mine), batch_size):
        yield [(0, index) for index in mine[first : first + batch_size]]


class HeldOrder(ShardedOrder):
    """The order of one rank among the samples that it holds.

    As a `ShardedOrder`, but each epoch has a permutation of each rank's own samples. Ranks hold equally many or one
    more; what not every rank has, and what fills no batch, stays at the end of a rank's order and is left out, others
    each epoch.
    """

    def __init__(self, ownership: Ownership, *, batch_size: int, rank: int, start: Position | None = None) -> None:
        super().__init__(
            ownership.num_samples,
            batch_size=batch_size,
            rank=rank,
            world_size=ownership.ranks,
            seed=ownership.seed,
            start=start,
        )
        self.ownership = ownership
        self.on_batch: Callable[[int, int], None] = lambda epoch, batches: None
        """Called for each batch that is handed out: its epoch, and how many of this epoch there were with it."""

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
        """The keys of each batch, without end; calls `on_batch` for each."""
        number, num_batches = self._start.epoch, self.batches_per_epoch - self._num_batches(self._start.place)
        for keys in super().batches():
            if keys[0][0] != number:
                number, num_batches = keys[0][0], 0
            num_batches += 1
            self.on_batch(number, num_batches)
            yield keys
