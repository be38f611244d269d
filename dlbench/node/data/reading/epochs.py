"""What was read in each epoch: summed up batch by batch on each rank, then over the ranks for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlbench.node.data.reader import Fetched
from dlbench.records.data_path import ReadEpoch
from dlbench.specs.system import Tier


@dataclass(kw_only=True)
class ReadSums:
    """What was read for some batches."""

    batches: int = 0
    samples: int = 0
    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    storage_bytes: int | None = 0
    """None where the kernel does not count for one of the readers."""
    fetch_ns: int = 0
    prepare_ns: int = 0

    def add(self, fetched: Fetched) -> None:
        """One batch more."""
        self.batches += 1
        self.samples += len(fetched.visited)
        for tier, num in fetched.tier_bytes.items():
            self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + num
        if self.storage_bytes is not None:
            self.storage_bytes = None if fetched.storage_bytes is None else self.storage_bytes + fetched.storage_bytes
        self.fetch_ns += fetched.fetch_ns
        self.prepare_ns += fetched.prepare_ns


@dataclass
class EpochReads(ReadSums):
    """What one rank read of one epoch for the batches that it was given, without what was read ahead and never used."""

    epoch: int
    wait_ns: int = 0

    def told(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return asdict(self)


class EpochLedger:
    """Sums of the batches of one rank, epoch by epoch."""

    def __init__(self) -> None:
        self.reads: list[EpochReads] = []

    def add(self, fetched: Fetched, wait_ns: int) -> None:
        """A batch was handed out after that time of waiting; one without a readable sample belongs to no epoch."""
        if not fetched.visited:
            return
        epoch = fetched.visited[0][0]
        if not self.reads or self.reads[-1].epoch != epoch:
            self.reads.append(EpochReads(epoch))
        sums = self.reads[-1]
        sums.add(fetched)
        sums.wait_ns += wait_ns


def read_epochs(
    told: Sequence[Sequence[Mapping[str, Any]]],
    step_s: Sequence[float],
    *,
    batches_per_epoch: int,
    counts_storage: bool,
    cached_shares: Mapping[int, float | None],
) -> tuple[ReadEpoch, ...]:
    """What all ranks read, epoch by epoch.

    Args:
        told: of each rank, its `EpochReads` as JSON gives them back.
        step_s: length of each step of rank 0, seconds; the steps take the batches in order.
        batches_per_epoch: of each rank in a whole epoch.
        counts_storage: whether the kernel is sure to count what comes from storage; otherwise it is taken to if any
            byte was counted.
        cached_shares: by epoch, share of the data set's pages in the page cache at its beginning, where looked at.
    """
    found, first = [], 0
    moved = any(epoch["storage_bytes"] for rank in told for epoch in rank)
    for number, own in enumerate(told[0]):
        everyone = [rank[number] for rank in told if number < len(rank)]
        tiers: dict[Tier, int] = {}
        for one in everyone:
            for tier, num in one["tier_bytes"].items():
                tiers[tier] = tiers.get(tier, 0) + num
        storage = [one["storage_bytes"] for one in everyone]
        is_counted = (counts_storage or moved) and None not in storage
        last = first + own["batches"]
        found.append(
            ReadEpoch(
                epoch=own["epoch"],
                is_whole=own["batches"] == batches_per_epoch,
                samples=sum(one["samples"] for one in everyone),
                tier_bytes=tiers,
                storage_bytes=sum(storage) if is_counted else None,
                fetch_s=sum(one["fetch_ns"] for one in everyone) / 1e9,
                prepare_s=sum(one["prepare_ns"] for one in everyone) / 1e9,
                wait_s=sum(one["wait_ns"] for one in everyone) / 1e9 / len(everyone),
                seconds=float(sum(step_s[first:last])),
                cached_share=cached_shares.get(own["epoch"]),
            )
        )
        first = last
    return tuple(found)
