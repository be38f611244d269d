"""Computes which samples each rank owns in each epoch, in which order it reads them, and which it sends to whom.

Partial shuffling after Nguyen et al., "Why Globally Re-shuffle? Revisiting Data Shuffling in Large Scale Deep Learning"
(IPDPS 2022): in each epoch every rank shuffles its samples, and exchanges the first floor(Q * (N // M)) of that order.
The k-th samples of all ranks are distributed by a random permutation of the ranks, so that every rank sends and
receives the same number; a rank may draw itself and then keeps that sample. A sample that moves in an epoch is read
once more by its old rank, and belongs to its new rank from the next epoch on. Everything is a function of the seed, the
epoch and the sizes: every rank knows it of all others, and a resumed run needs only the epoch.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dlbench.specs.workload import DataSpec

_PARTITION = 0x9A27  # added to the seed, so that the partition is independent of the epochs' permutations
_ORDER, _LOTS = 0x0DE2, 0x107
"""Added to seed and epoch, so that the draws are independent of each other and of a global permutation."""
_CACHED_EPOCHS = 3
NOBODY = -1  # in the last column of `parts`: the rank has one sample less than others
_MASK = (1 << 64) - 1
_SALTS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)  # arbitrary, so that the two sums are unrelated


def first_parts(
    num_samples: int, ranks: int, *, seed: int, partition: Literal["shuffled", "contiguous"]
) -> list[NDArray[np.int64]]:
    """Returns the sample numbers (n,) of each rank when training begins; the first ranks may have one more.

    `partition`: `shuffled` over all samples, or `contiguous` in the order of storage.
    """
    order = np.arange(num_samples)
    if partition == "shuffled":
        order = np.random.default_rng([seed, _PARTITION]).permutation(num_samples)
    return np.array_split(order, ranks)


@dataclass(frozen=True)
class EpochExchange:
    """The samples that one rank sends and receives in an epoch, by slot; without those that it sends to itself."""

    slots: NDArray[np.int64]  # (n,) slots in which this rank sends to another rank, ascending
    samples: NDArray[np.int64]  # (n,) samples that it sends
    receivers: NDArray[np.int64]  # (n,) ranks that receive them
    awaited: NDArray[np.int64]  # (n,) samples that it receives
    senders: NDArray[np.int64]  # (n,) ranks that send them


def exchanged_slots(num_samples: int, ranks: int, share: float) -> int:
    """Returns how many samples of each rank are exchanged in an epoch: floor(Q * (N // M)); 0 for one rank."""
    if ranks == 1:
        return 0
    # Rounded, because 0.1 * 30 is 3.0000000000000004 and 0.29 * 100 is 28.999999999999996.
    return math.floor(round(share * (num_samples // ranks), 9))


class Ownership:
    """The samples of all ranks in each epoch. Can be pickled, and used from any thread.

    `num_samples`: N, of the data set. `ranks`: M. `seed`: of all random draws. `partition`: as in `first_parts`.
    `share`: Q; 0: no sample is exchanged (local shuffling).
    """

    def __init__(
        self,
        num_samples: int,
        ranks: int,
        *,
        seed: int,
        partition: Literal["shuffled", "contiguous"],
        share: float = 0.0,
    ) -> None:
        self.num_samples, self.ranks, self.seed, self.partition, self.share = num_samples, ranks, seed, partition, share
        self.slots = exchanged_slots(num_samples, ranks, share)  # Samples that each rank exchanges in an epoch.
        self._cache: OrderedDict[int, NDArray[np.int64]] = OrderedDict()  # `parts` by epoch.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._cache, self._lock = OrderedDict(), threading.RLock()

    def size(self, rank: int) -> int:
        """Returns the number of samples of a rank in any epoch: N // M, or one more on the first N % M ranks."""
        return self.num_samples // self.ranks + (rank < self.num_samples % self.ranks)

    def part(self, epoch: int, rank: int) -> NDArray[np.int64]:
        """Returns the samples (n,) that a rank owns and reads in an epoch, in arbitrary order."""
        return self.parts(epoch)[rank, : self.size(rank)]

    def parts(self, epoch: int) -> NDArray[np.int64]:
        """Returns the samples (M, ceil(N / M)) of each rank, read-only; `NOBODY` if a rank has one less.

        An epoch is computed from the one before, so that the first call for epoch n takes n steps.
        """
        with self._lock:
            if not self.slots:
                epoch = 0
            cached_epoch = max((cached for cached in self._cache if cached <= epoch), default=None)
            if cached_epoch is None:
                cached_epoch = 0
                parts = np.full((self.ranks, -(-self.num_samples // self.ranks)), NOBODY, np.int64)
                initial = first_parts(self.num_samples, self.ranks, seed=self.seed, partition=self.partition)
                for rank, samples in enumerate(initial):
                    parts[rank, : len(samples)] = samples
            else:
                parts = self._cache[cached_epoch]
            for number in range(cached_epoch, epoch):
                order = np.take_along_axis(parts, self._keys(number).argsort(axis=1, kind="stable"), axis=1)
                parts = order.copy()
                parts[self._lots(number), np.arange(self.slots)[:, None]] = order[:, : self.slots].T
            parts.flags.writeable = False
            self._cache[epoch] = parts
            self._cache.move_to_end(epoch)
            while len(self._cache) > _CACHED_EPOCHS:
                self._cache.popitem(last=False)
            return parts

    def order(self, epoch: int, rank: int) -> NDArray[np.int64]:
        """Returns the samples (n,) of a rank in the order in which it reads them in an epoch."""
        row = self.parts(epoch)[rank, : self.size(rank)]
        order: NDArray[np.int64] = row[self._keys(epoch)[rank, : len(row)].argsort(kind="stable")]
        return order

    def exchange(self, epoch: int, rank: int) -> EpochExchange:
        if not self.slots:
            empty = np.empty(0, np.int64)
            return EpochExchange(empty, empty, empty, empty, empty)
        columns = self._keys(epoch).argsort(axis=1, kind="stable")[:, : self.slots]
        exchanged = np.take_along_axis(self.parts(epoch), columns, axis=1)
        lots = self._lots(epoch)
        sending_slots = np.flatnonzero(lots[:, rank] != rank)
        senders = np.nonzero(lots == rank)[1]
        receiving_slots = np.flatnonzero(senders != rank)
        return EpochExchange(
            slots=sending_slots,
            samples=exchanged[rank, sending_slots],
            receivers=lots[sending_slots, rank],
            awaited=exchanged[senders[receiving_slots], receiving_slots],
            senders=senders[receiving_slots],
        )

    def _keys(self, epoch: int) -> NDArray[np.float64]:
        width = -(-self.num_samples // self.ranks)
        keys = np.random.default_rng([self.seed, _ORDER, epoch]).random((self.ranks, width))
        if self.num_samples % self.ranks:
            keys[self.num_samples % self.ranks :, -1] = 2.0  # `NOBODY` comes last
        return keys

    def _lots(self, epoch: int) -> NDArray[np.int64]:
        """Returns the receiver (slots, M) of each slot and rank; each row is a permutation of the ranks."""
        rows = np.broadcast_to(np.arange(self.ranks), (self.slots, self.ranks))
        return np.random.default_rng([self.seed, _LOTS, epoch]).permuted(rows, axis=1)


def ownership_for(spec: DataSpec, num_samples: int, ranks: int, *, seed: int) -> Ownership | None:
    """Returns the ownership of a plan; None with global shuffling, in which ranks do not own samples."""
    if spec.shuffle == "global":
        return None
    return Ownership(num_samples, ranks, seed=seed, partition=spec.partition, share=spec.exchanged_share)


def released(slots: int, *, done: int, batches: int) -> int:
    """Returns how many slots are sent after `done` batches of an epoch: evenly spread, all after the last batch."""
    return slots if done >= batches else slots * done // batches


@dataclass(frozen=True)
class Digest:
    """The number of samples, and two 64-bit sums of hashes of their numbers.

    Two different collections have the same digest with probability 2**-128, also if samples are doubled or missing.
    """

    count: int = 0
    sums: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, samples: NDArray[np.int64]) -> Self:
        """Returns the digest of sample numbers, which may be repeated."""
        values = np.asarray(samples).astype(np.uint64)
        first_sum, second_sum = (int(_mixed(values + np.uint64(salt)).sum(dtype=np.uint64)) for salt in _SALTS)
        return cls(len(values), (first_sum, second_sum))

    def __add__(self, other: Digest) -> Digest:
        first_sum, second_sum = ((a + b) & _MASK for a, b in zip(self.sums, other.sums, strict=True))
        return Digest(self.count + other.count, (first_sum, second_sum))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns SplitMix64's hash (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
