"""The order in which ranks read samples: one seeded permutation per epoch, divided among them; and its audit.

Rank 0 proves that all ranks together read every sample once per epoch. Digests of the samples that ranks read or left
out add up to that of the data set; if not, lists are gathered, to name the samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.shuffling import Digest, Ownership
from dlbench.errors import UserError
from dlbench.node.data.reader import Fetched, Key
from dlbench.records.data_path import ShuffleEpoch
from dlbench.specs.base import CountOrZero
from dlbench.units import plural

_CACHED_EPOCHS = 3
Summary = Mapping[str, Any]  # `ReadAudit.summary` of one rank
NAMED = 20  # Most samples that are named.


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


class ReadAudit:
    """Compares the samples that one rank reads with its `order`; `labels` (num_samples,) are their classes, if any."""

    def __init__(
        self,
        order: ShardedOrder,
        *,
        num_samples: int,
        ranks: int,
        labels: NDArray[np.int32] | None,
        start: Position | None = None,
    ) -> None:
        self._order, self._num_samples, self._ranks, self._labels = order, num_samples, ranks, labels
        self._start = start or Position()
        # Share of each class in the data set.
        self._shares = None if labels is None else _shares(labels, int(labels.max(initial=0)) + 1)
        self._epoch = self._start.epoch
        self._batches: list[NDArray[np.int64]] = []
        self._failures = 0
        self._before: NDArray[np.bool_] | None = None
        self._done: list[dict[str, Any]] = []
        self._unplanned: dict[int, list[int]] = {}
        self._waited_ns = 0
        self._cost_ns = 0

    def take(self, fetched: Fetched) -> None:
        begun = time.perf_counter_ns()
        if fetched.visited:
            if fetched.visited[0][0] != self._epoch:
                self._finish()
                self._epoch = fetched.visited[0][0]
            self._batches.append(np.fromiter((index for _, index in fetched.visited), np.int64, len(fetched.visited)))
        self._failures += len(fetched.failures)
        self._waited_ns += fetched.waited_ns
        self._cost_ns += time.perf_counter_ns() - begun

    def summary(self) -> dict[str, Any]:
        """Returns all epochs, waiting time and the audit's own time, ready for JSON; called after training."""
        begun = time.perf_counter_ns()
        self._finish()
        self._cost_ns += time.perf_counter_ns() - begun
        return {"epochs": self._done, "waited_s": self._waited_ns / 1e9, "audit_s": self._cost_ns / 1e9}

    def lists(self, epochs: Sequence[int]) -> dict[str, list[list[int]]]:
        """Returns the samples read and left out by rule in some epochs, ready for JSON."""
        lists = {}
        for summary in self._done:
            epoch = summary["epoch"]
            if epoch in epochs:
                read = self._unplanned.get(epoch)
                if read is None:
                    read = self._expected(epoch, summary["visits"][0]).tolist()
                lists[str(epoch)] = [read, self._order.left_out(epoch).tolist()]
        return lists

    def _expected(self, epoch: int, count: int) -> NDArray[np.int64]:
        return self._order.epoch(epoch, self._first_place(epoch))[:count]

    def _first_place(self, epoch: int) -> int:
        return 0 if epoch != self._start.epoch else self._start.place

    def _finish(self) -> None:
        if not self._batches:
            return
        read = np.concatenate(self._batches)
        self._batches = []
        as_planned = np.array_equal(read, self._expected(self._epoch, len(read)))
        if not as_planned:
            self._unplanned[self._epoch] = read.tolist()
        is_whole = self._first_place(self._epoch) == 0 and len(read) >= len(self._order.epoch(self._epoch))
        label_distance = None
        if self._labels is not None and self._shares is not None:
            difference = _shares(self._labels[read], len(self._shares)) - self._shares
            label_distance = float(np.abs(difference).sum() / 2)
        self._done.append(
            {
                "epoch": self._epoch,
                "is_whole": is_whole,
                "as_planned": as_planned,
                "visits": _as_list(Digest.of(read)),
                "left_out": _as_list(Digest.of(self._order.left_out(self._epoch))),
                "failures": self._failures,
                "new": self._novelty(read, is_whole=is_whole),
                "label_distance": label_distance,
            }
        )
        self._failures = 0

    def _novelty(self, read: NDArray[np.int64], *, is_whole: bool) -> float | None:
        """Returns the share of samples that this rank did not read in the epoch before; None if not known."""
        if self._ranks == 1:
            return None
        before, now = self._before, None
        if is_whole:
            now = np.zeros(self._num_samples, np.bool_)
            now[read] = True
        self._before = now
        return None if before is None else float(1 - before[read].mean())


def _shares(labels: NDArray[np.int32], classes: int) -> NDArray[np.float64]:
    return np.bincount(labels, minlength=classes) / max(1, len(labels))


def _as_list(digest: Digest) -> list[int]:
    return [digest.count, *digest.sums]


def _by_epoch(everyone: Sequence[Summary]) -> dict[int, list[Summary]]:
    """Groups the summaries of ranks by epoch, for epochs that all of them read."""
    by_epoch: dict[int, list[Summary]] = {}
    for summary in everyone:
        for rank_epoch in summary["epochs"]:
            by_epoch.setdefault(rank_epoch["epoch"], []).append(rank_epoch)
    return {epoch: summaries for epoch, summaries in sorted(by_epoch.items()) if len(summaries) == len(everyone)}


def doubtful_epochs(everyone: Sequence[Summary], num_samples: int) -> list[int]:
    """Returns the epochs with wrong digests, equal on every rank."""
    expected = Digest.of(np.arange(num_samples))
    doubtful = []
    for epoch, ranks in _by_epoch(everyone).items():
        is_whole = all(rank["is_whole"] for rank in ranks)
        digests = [rank[key] for rank in ranks for key in ("visits", "left_out")]
        total = sum((Digest(count, (first, second)) for count, first, second in digests), Digest())
        if not all(rank["as_planned"] for rank in ranks) or (is_whole and total != expected):
            doubtful.append(epoch)
    return doubtful


class Audited:
    """The audit of all ranks, from the summaries of each and `ReadAudit.lists` of doubtful epochs."""

    def __init__(
        self,
        everyone: Sequence[Summary],
        lists: Sequence[Mapping[str, Sequence[Sequence[int]]]],
        *,
        num_samples: int,
        exchanged: Sequence[Summary],
        name: Callable[[int], str],
        may_replace: bool,
    ) -> None:
        self._lists, self._num_samples = lists, num_samples
        self._exchanged, self._name, self._may_replace = exchanged, name, may_replace
        self.errors: list[str] = []  # samples read twice or never, by name
        self.replaced = 0  # unreadable samples that were replaced by others
        self.epochs = tuple(self._epoch(epoch, ranks) for epoch, ranks in _by_epoch(everyone).items())

    def _epoch(self, epoch: int, ranks: Sequence[Summary]) -> ShuffleEpoch:
        is_whole = all(rank["is_whole"] for rank in ranks)
        twice, never = self._count_misread(epoch, ranks, is_whole=is_whole)
        moved = [summary["epochs"].get(str(epoch), {}) for summary in self._exchanged]
        new = [rank["new"] for rank in ranks]
        distances = [rank["label_distance"] for rank in ranks]
        novelty = label_distance = None
        if None not in new:
            novelty = float(np.mean(new)) / (1 - 1 / len(ranks))
        if None not in distances:
            label_distance = float(np.mean(distances))
        return ShuffleEpoch(
            epoch=epoch,
            is_whole=is_whole,
            visits=sum(rank["visits"][0] for rank in ranks),
            left_out=sum(rank["left_out"][0] for rank in ranks),
            twice=twice,
            never=never,
            sent=sum(counts.get("sent", 0) for counts in moved),
            received=sum(counts.get("received", 0) for counts in moved),
            sent_bytes=sum(counts.get("sent_bytes", 0) for counts in moved),
            novelty=novelty,
            label_distance=label_distance,
        )

    def _count_misread(self, epoch: int, ranks: Sequence[Summary], *, is_whole: bool) -> tuple[int, int]:
        """Returns how many samples were read twice and never; adds errors that name them, unless they were replaced."""
        lists = [rank_lists[str(epoch)] for rank_lists in self._lists if str(epoch) in rank_lists]
        if not lists:
            return 0, 0
        visits = np.zeros(self._num_samples, np.int64)
        is_left_out = np.zeros(self._num_samples, np.bool_)
        for read, left_out in lists:
            np.add.at(visits, read, 1)
            is_left_out[left_out] = True
        twice = np.flatnonzero(visits > 1)
        never = np.flatnonzero((visits == 0) & ~is_left_out) if is_whole else np.empty(0, np.int64)
        failures = sum(rank["failures"] for rank in ranks)
        if self._may_replace and max(len(twice), len(never)) <= failures:
            self.replaced += failures
            return len(twice), len(never)
        for adverb, samples in (("twice", twice), ("never", never)):
            for index in samples[: max(0, NAMED - len(self.errors))]:
                readers = [str(rank) for rank, (read, _) in enumerate(lists) if int(index) in read]
                error = f"epoch {epoch}: {self._name(int(index))} was read {adverb}"
                if readers:
                    error += f" ({plural('rank', len(readers))} {', '.join(readers)})"
                self.errors.append(error)
        if not len(twice) and not len(never):
            self.errors.append(f"epoch {epoch}: a rank did not read the samples that were assigned to it")
        return len(twice), len(never)
