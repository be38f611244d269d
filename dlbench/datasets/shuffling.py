"""Which samples each rank holds in each epoch, in which order it reads them, and which it sends to whom.

Partial shuffling after Nguyen et al., "Why Globally Re-shuffle? Revisiting Data Shuffling in Large Scale Deep Learning"
(IPDPS 2022): in each epoch every rank shuffles what it holds, and the first floor(Q * (N // M)) samples of that order
leave their place. The k-th ones of all ranks are dealt out by a permutation of the ranks that all draw alike, so every
rank gives and gets equally many, whatever is drawn; a rank may draw itself and then keeps that sample. What moves
in an epoch is read there once more and belongs to its new rank from the next epoch on.

All of it is a function of the seed, the epoch and the sizes, so that every rank knows it of every other one, and
a resumed run needs nothing but the epoch.
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

_PARTITION = 0x9A27  # with the seed, so that the partition is none of the epochs' permutations
_ORDER, _LOTS = 0x0DE2, 0x107
"""With the seed and the epoch, so that the draws have nothing to do with each other or with a global permutation."""
_KEPT_EPOCHS = 3
NOBODY = -1  # in the last column of `parts`: the rank holds one sample less than others
_MASK = (1 << 64) - 1
_SALTS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)  # Without pattern: two unrelated sums.


def first_parts(
    num_samples: int, ranks: int, *, seed: int, partition: Literal["shuffled", "contiguous"]
) -> list[NDArray[np.int64]]:
    """The samples that each rank holds when training begins: equally many, or one more on the first ranks.

    `partition`: drawn from all samples, or in the order of storage.
    Returns for each rank (n,) sample numbers; together all of them, each once.
    """
    order = np.arange(num_samples)
    if partition == "shuffled":
        order = np.random.default_rng([seed, _PARTITION]).permutation(num_samples)
    return np.array_split(order, ranks)


@dataclass(frozen=True)
class EpochExchange:
    """What one rank sends and receives during an epoch, in the order of slots; without what it sends to itself."""

    slots: NDArray[np.int64]  # (n,) the slots in which this rank sends to another, ascending
    samples: NDArray[np.int64]  # (n,) what it sends in them
    receivers: NDArray[np.int64]  # (n,) to whom
    awaited: NDArray[np.int64]  # (m,) what it receives; m is n: both leave out slots in which it draws itself.
    senders: NDArray[np.int64]  # (m,) from whom


def exchanged_slots(num_samples: int, ranks: int, share: float) -> int:
    """Samples of each rank that are dealt out anew in an epoch: floor(Q * (N // M)); none at one rank."""
    if ranks == 1:
        return 0
    # 0.1 * 30 is 3.0000000000000004 and 0.29 * 100 is 28.999999999999996: a share is what its decimal digits say.
    return math.floor(round(share * (num_samples // ranks), 9))


class Ownership:
    """The samples of all ranks, epoch by epoch. Survives pickling; may be asked from any thread.

    `num_samples`: N, of the data set. `ranks`: M. `seed`: of everything drawn. `partition`: as in `first_parts`.
    `share`: Q; 0: nobody ever sends anything (local shuffling).
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
        self.slots = exchanged_slots(num_samples, ranks, share)  # Of each rank, dealt out anew in an epoch.
        self._kept: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._kept, self._lock = OrderedDict(), threading.RLock()

    def size(self, rank: int) -> int:
        """Samples that a rank holds at the start of any epoch: N // M, or one more on the first N % M ranks."""
        return self.num_samples // self.ranks + (rank < self.num_samples % self.ranks)

    def part(self, epoch: int, rank: int) -> NDArray[np.int64]:
        """(n,) the samples that a rank reads in an epoch and holds when it begins, in no order that means anything."""
        return self.parts(epoch)[rank, : self.size(rank)]

    def parts(self, epoch: int) -> NDArray[np.int64]:
        """(M, ceil(N / M)) the samples of each rank; `NOBODY` where it holds one less. Not to be changed.

        An epoch is made of the one before: the first call for a late one takes as many steps.
        """
        with self._lock:
            if not self.slots:
                epoch = 0
            known = [each for each in self._kept if each <= epoch]
            at = max(known, default=None)
            if at is None:
                parts = np.full((self.ranks, -(-self.num_samples // self.ranks)), NOBODY, np.int64)
                held = first_parts(self.num_samples, self.ranks, seed=self.seed, partition=self.partition)
                for rank, samples in enumerate(held):
                    parts[rank, : len(samples)] = samples
            else:
                parts = self._kept[at]
            for number in range(at or 0, epoch):
                order = np.take_along_axis(parts, self._keys(number).argsort(axis=1, kind="stable"), axis=1)
                parts = order.copy()
                parts[self._lots(number), np.arange(self.slots)[:, None]] = order[:, : self.slots].T
            parts.flags.writeable = False
            self._kept[epoch] = parts
            self._kept.move_to_end(epoch)
            while len(self._kept) > _KEPT_EPOCHS:
                self._kept.popitem(last=False)
            return parts

    def order(self, epoch: int, rank: int) -> NDArray[np.int64]:
        """(n,) the samples of a rank in the order in which it reads them in an epoch."""
        row = self.parts(epoch)[rank, : self.size(rank)]
        order: NDArray[np.int64] = row[self._keys(epoch)[rank, : len(row)].argsort(kind="stable")]
        return order

    def exchange(self, epoch: int, rank: int) -> EpochExchange:
        if not self.slots:
            nothing = np.empty(0, np.int64)
            return EpochExchange(nothing, nothing, nothing, nothing, nothing)
        places = self._keys(epoch).argsort(axis=1, kind="stable")[:, : self.slots]
        first = np.take_along_axis(self.parts(epoch), places, axis=1)
        lots = self._lots(epoch)
        slots = np.flatnonzero(lots[:, rank] != rank)
        senders = np.nonzero(lots == rank)[1]
        coming = np.flatnonzero(senders != rank)
        return EpochExchange(
            slots=slots,
            samples=first[rank, slots],
            receivers=lots[slots, rank],
            awaited=first[senders[coming], coming],
            senders=senders[coming],
        )

    def _keys(self, epoch: int) -> NDArray[np.float64]:
        """(M, ceil(N / M)) by which each rank's samples are put in order."""
        width = -(-self.num_samples // self.ranks)
        keys = np.random.default_rng([self.seed, _ORDER, epoch]).random((self.ranks, width))
        if self.num_samples % self.ranks:
            keys[self.num_samples % self.ranks :, -1] = 2.0  # nobody's sample comes last
        return keys

    def _lots(self, epoch: int) -> NDArray[np.int64]:
        """(slots, M) to whom the sample of each slot and rank goes; each row a permutation of the ranks."""
        rows = np.broadcast_to(np.arange(self.ranks), (self.slots, self.ranks))
        return np.random.default_rng([self.seed, _LOTS, epoch]).permuted(rows, axis=1)


def ownership_for(spec: DataSpec, num_samples: int, ranks: int, *, seed: int) -> Ownership | None:
    """Who holds what, as planned; None under global shuffling, where nobody holds samples of its own."""
    if spec.shuffle == "global":
        return None
    return Ownership(num_samples, ranks, seed=seed, partition=spec.partition, share=spec.exchanged_share)


def released(slots: int, *, done: int, batches: int) -> int:
    """Slots that are sent once `done` batches of an epoch have been handed out: Q * b for each, all with the last."""
    return slots if done >= batches else slots * done // batches


@dataclass(frozen=True)
class Digest:
    """How many samples, and two 64-bit sums of what a mixing function makes of their numbers.

    Two different collections have the same digest by chance once in 2**128, whatever is doubled or missing.
    """

    count: int = 0
    sums: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, samples: NDArray[np.int64]) -> Self:
        """The digest of sample numbers, each as often as it is there."""
        values = np.asarray(samples).astype(np.uint64)
        one, other = (int(_mixed(values + np.uint64(salt)).sum(dtype=np.uint64)) for salt in _SALTS)
        return cls(len(values), (one, other))

    def __add__(self, other: Digest) -> Digest:
        one, two = ((a + b) & _MASK for a, b in zip(self.sums, other.sums, strict=True))
        return Digest(self.count + other.count, (one, two))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
