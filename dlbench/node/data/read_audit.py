"""Audit of reading: rank 0 proves that all ranks together read every sample once per epoch.

A rank keeps the number and a digest (`Digest`) of the samples that it read in an epoch. Digests of all ranks, and of
the samples left out by rule, add up to that of the data set unless a sample was read twice or never. Only then lists
are gathered, to name the samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.shuffling import Digest
from dlbench.node.data.reader import Fetched
from dlbench.node.data.sharding import Position, ShardedOrder
from dlbench.records.data_path import ShuffleEpoch
from dlbench.units import plural

Summary = Mapping[str, Any]  # `ReadAudit.summary` of one rank
NAMED = 20  # Most samples that are named.


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
        self._shares: NDArray[np.float64] | None = None  # share of each class in the data set
        if labels is not None:
            self._shares = _shares(labels, int(labels.max(initial=0)) + 1)
        self._epoch = self._start.epoch
        self._batches: list[NDArray[np.int64]] = []
        self._failures = 0
        self._before: NDArray[np.bool_] | None = None
        self._done: list[dict[str, Any]] = []
        self._odd: dict[int, list[int]] = {}
        self._waited_ns = 0
        self._cost_ns = 0

    def take(self, fetched: Fetched) -> None:
        """Counts a batch that training gets now."""
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
                read = self._odd.get(epoch)
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
            self._odd[self._epoch] = read.tolist()
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
                "visits": _plain(Digest.of(read)),
                "left_out": _plain(Digest.of(self._order.left_out(self._epoch))),
                "failures": self._failures,
                "new": self._new(read, is_whole=is_whole),
                "label_distance": label_distance,
            }
        )
        self._failures = 0

    def _new(self, read: NDArray[np.int64], *, is_whole: bool) -> float | None:
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


def _plain(digest: Digest) -> list[int]:
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
        total = Digest()
        for count, *sums in digests:
            total += Digest(count, (sums[0], sums[1]))
        adds_up = total == expected
        if not all(rank["as_planned"] for rank in ranks) or (is_whole and not adds_up):
            doubtful.append(epoch)
    return doubtful


class Audited:
    """The result of the audit of all ranks.

    Args:
        everyone: `ReadAudit.summary` of every rank.
        lists: `ReadAudit.lists` of every rank, for the doubtful epochs.
        num_samples: Samples of the data set.
        exchanged: `SampleExchange.summary` of every rank; empty without an exchange.
        name: Returns the name of a sample for messages.
        may_replace: True if unreadable samples are replaced by others.
    """

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
        self._everyone, self._lists, self._num_samples = everyone, lists, num_samples
        self._exchanged, self._name, self._may_replace = exchanged, name, may_replace
        self.errors: list[str] = []  # samples read twice or never, by name
        self.replaced = 0  # unreadable samples that were replaced by others
        self.epochs = tuple(self._epoch(epoch, ranks) for epoch, ranks in _by_epoch(everyone).items())

    def _epoch(self, epoch: int, ranks: Sequence[Summary]) -> ShuffleEpoch:
        is_whole = all(rank["is_whole"] for rank in ranks)
        twice, never = self._odd(epoch, ranks, is_whole=is_whole)
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

    def _odd(self, epoch: int, ranks: Sequence[Summary], *, is_whole: bool) -> tuple[int, int]:
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
