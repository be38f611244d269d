"""The order in which ranks read samples: one seeded permutation per epoch, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.shuffling import Ownership
from dlbench.errors import UserError
from dlbench.specs.base import CountOrZero

_CACHED_EPOCHS = 3

Key = tuple[int, int]  # Epoch and sample index, which with the seed decide a sample's random augmentation.


def keys_of(epoch: int, samples: Iterable[int]) -> list[Key]:
    """Returns the keys of some samples in one epoch."""
    return [(epoch, int(index)) for index in samples]


class Position(NamedTuple):
    """A position in the order of all ranks together, for any number of ranks."""

    epoch: CountOrZero = 0
    place: CountOrZero = 0  # samples of the epoch's permutation before it


class ShardedOrder:
    """The order of one rank: every epoch has another permutation, the same on all ranks. From each sequence of
    batch_size x world_size places, rank r takes r, r + world_size, ..., so that the samples of a step depend only on
    the global batch. Samples that do not fill a batch on every rank (without `drop_last`, that cannot be divided
    evenly) are left out of the epoch. `start` is the position of a resumed run.
    """

    workers = 1  # Emulated workers of the rank: the parts of its batch are the batches of as many ranks.

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
                f"data.source has {num_samples} samples, but a step needs {needed} (train.batch_per_rank {batch_size} "
                f"x {world_size} ranks); use more data, fewer ranks or a smaller batch"
            )
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        self._rank, self._world_size, self._drop_last = rank, world_size, drop_last
        self._start = start or Position()
        self._splits: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}  # cache of `_split` by epoch
        self.batches_per_epoch = self._num_batches(0)
        self.dropped_per_epoch = num_samples - self._per_rank(0) * world_size

    def _per_rank(self, place: int) -> int:
        """Returns the samples of each rank from a place of an epoch to its end."""
        per_rank = max(0, self._num_samples - place) // self._world_size
        if self._drop_last:
            per_rank -= per_rank % self._batch_size
        return per_rank

    def _num_batches(self, place: int) -> int:
        return -(-self._per_rank(place) // self._batch_size)

    def epoch(self, number: int, place: int = 0) -> NDArray[np.int64]:
        """Returns the sample indices of this rank in one epoch, (n,), from a place of the permutation on."""
        if place == 0:
            return self._whole(number)[0]
        order = self._permutation(number)[place:]
        return order[self._rank :: self._world_size][: self._per_rank(place)]

    def left_out(self, number: int) -> NDArray[np.int64]:
        """Returns samples that no rank reads in an epoch, (n,); each is reported by one of the ranks."""
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
        if number not in self._splits:
            if len(self._splits) >= _CACHED_EPOCHS:
                del self._splits[next(iter(self._splits))]
            self._splits[number] = self._split(number)
        return self._splits[number]

    def batches(self) -> Iterator[list[Key]]:
        number, place = self._start.epoch, self._start.place
        while True:
            samples = self.epoch(number, place)
            for first in range(0, len(samples), self._batch_size):
                batch = samples[first : first + self._batch_size]
                yield keys_of(number, batch.reshape(-1, self.workers).T.ravel())
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
    """Yields the keys of one pass over a validation set, in order, with each sample on one rank."""
    samples = range(rank, num_samples, world_size)
    for first in range(0, len(samples), batch_size):
        yield keys_of(0, samples[first : first + batch_size])


class HeldOrder(ShardedOrder):
    """The order of one rank among the samples that it holds; the last ones may be left out of an epoch."""

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
        """Called for each batch with its epoch and the number of the epoch's batches up to it."""

    def epoch(self, number: int, place: int = 0) -> NDArray[np.int64]:
        """Returns the sample indices of this rank in one epoch, (n,), from a place of all ranks together on."""
        if place == 0:
            return self._whole(number)[0]
        samples = self.ownership.order(number, self._rank)
        return samples[place // self._world_size :][: self._per_rank(place)]

    def _split(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        samples, num = self.ownership.order(number, self._rank), self._per_rank(0)
        return samples[:num], samples[num:]

    def batches(self) -> Iterator[list[Key]]:
        """Yields the keys of each batch, without end; calls `on_batch` for each."""
        number, num_batches = self._start.epoch, self.batches_per_epoch - self._num_batches(self._start.place)
        for keys in super().batches():
            if keys[0][0] != number:
                number, num_batches = keys[0][0], 0
            num_batches += 1
            self.on_batch(number, num_batches)
            yield keys
