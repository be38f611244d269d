"""The audit of reading: each sample once an epoch over all ranks, or by name which not; and what mixing it measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from dlbench.datasets.shuffling import Ownership
from dlbench.errors import UserError
from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.read_audit import Audited, ReadAudit, doubtful_epochs
from dlbench.node.data.sharding import HeldOrder, Key, Position, ShardedOrder
from tests.support.training_data import NumberReader

RANKS, BATCH = 3, 4
Partition = Literal["shuffled", "contiguous"]


def order_of(
    rank: int, num: int, *, share: float | None, partition: Partition = "shuffled", start: Position | None = None
) -> ShardedOrder:
    """`share` None: global shuffling."""
    if share is None:
        return ShardedOrder(num, batch_size=BATCH, rank=rank, world_size=RANKS, seed=5, start=start)
    ownership = Ownership(num, RANKS, seed=5, partition=partition, share=share)
    return HeldOrder(ownership, batch_size=BATCH, rank=rank, start=start)


class Changed(ShardedOrder):
    """Hands out another sample than it says, as a defect would."""

    instead: tuple[int, int, int] = (0, 0, 0)
    """Epoch, place in the epoch of this rank, and the sample that is read there."""

    def batches(self) -> Iterator[list[Key]]:
        epoch, place, sample = self.instead
        for number, keys in enumerate(super().batches()):
            first = (number % self.batches_per_epoch) * self._batch_size
            yield [
                (epoch, sample) if (key[0], first + offset) == (epoch, place) else key
                for offset, key in enumerate(keys)
            ]


def trained(
    orders: list[ShardedOrder],
    num: int,
    batches: int,
    *,
    bad: frozenset[int] = frozenset(),
    on_bad: Literal["stop", "skip"] = "stop",
    start: Position | None = None,
    is_held: bool = False,
) -> Audited:
    """What the audit of all ranks says of so many batches of each."""
    audits = []
    for order in orders:
        reader = NumberReader(num, bad)
        audit = ReadAudit(order, num_samples=num, ranks=RANKS, labels=reader.labels(), start=start)
        source = LoadedSource(reader, order, loader_workers=0, on_bad_sample=on_bad, audit=audit, is_held=is_held)
        for _ in range(batches):
            next(source)
        audits.append(audit)
    told: list[Any] = json.loads(json.dumps([audit.summary() for audit in audits]))
    doubtful = doubtful_epochs(told, num)
    lists = json.loads(json.dumps([audit.lists(doubtful) for audit in audits])) if doubtful else []
    return Audited(
        told, lists, num_samples=num, exchanged=[], name=NumberReader(num).name, may_replace=on_bad == "skip"
    )


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
@pytest.mark.parametrize("num", [12, 48, 53])
def test_whole_epochs_have_each_sample_once_and_say_what_was_left_out(num: int, share: float | None) -> None:
    orders = [order_of(rank, num, share=share) for rank in range(RANKS)]
    per_epoch = orders[0].batches_per_epoch
    found = trained(orders, num, 2 * per_epoch + 1)
    assert found.errors == []
    kept = per_epoch * BATCH * RANKS
    assert [(e.epoch, e.is_whole, e.visits) for e in found.epochs[:2]] == [(0, True, kept), (1, True, kept)]
    assert [(e.left_out, e.twice, e.never) for e in found.epochs[:2]] == [(num - kept, 0, 0)] * 2
    last = found.epochs[2]
    assert (last.visits, last.is_whole) == (BATCH * RANKS, per_epoch == 1)


def test_what_is_left_out_is_another_part_each_epoch() -> None:
    order = order_of(0, 53, share=0.0)
    assert order.dropped_per_epoch == 53 - 48
    assert set(order.left_out(0).tolist()) != set(order.left_out(1).tolist())
    everything = [order_of(rank, 53, share=0.0).left_out(0).tolist() for rank in range(RANKS)]
    assert sum(map(len, everything)) == order.dropped_per_epoch


def test_a_sample_read_twice_and_one_never_are_told_by_name() -> None:
    num = 48
    orders = [order_of(rank, num, share=None) for rank in range(RANKS)]
    wrong = Changed(num, batch_size=BATCH, rank=1, world_size=RANKS, seed=5)
    never, twice = int(orders[1].epoch(1)[6]), int(orders[2].epoch(1)[0])
    wrong.instead = (1, 6, twice)
    found = trained([orders[0], wrong, orders[2]], num, 3 * orders[0].batches_per_epoch)
    assert found.errors == [
        f"epoch 1: number {twice} was read twice (ranks 1, 2)",
        f"epoch 1: number {never} was read never",
    ]
    assert [(e.twice, e.never) for e in found.epochs] == [(0, 0), (1, 1), (0, 0)]


def test_two_ranks_that_read_the_same_part_are_found_though_each_reads_as_it_should() -> None:
    num = 48
    orders = [order_of(rank, num, share=0.0) for rank in (0, 0, 2)]
    found = trained(orders, num, orders[0].batches_per_epoch)
    assert (found.epochs[0].twice, found.epochs[0].never) == (16, 16)
    assert len(found.errors) == 20  # named at most


def test_an_epoch_that_is_not_read_whole_need_not_be_complete_but_must_be_as_dealt_out() -> None:
    num = 48
    start = Position(epoch=2, place=BATCH * RANKS)
    orders = [order_of(rank, num, share=0.5, start=start) for rank in range(RANKS)]
    found = trained(orders, num, orders[0].batches_per_epoch, start=start)
    assert found.errors == []
    assert [(e.epoch, e.is_whole) for e in found.epochs] == [(2, False), (3, False)]
    wrong = Changed(num, batch_size=BATCH, rank=0, world_size=RANKS, seed=5)
    wrong.instead = (0, 0, int(wrong.epoch(0)[1]))
    others = [order_of(rank, num, share=None) for rank in (1, 2)]
    partly = trained([wrong, *others], num, 1)
    assert partly.errors == [f"epoch 0: number {wrong.epoch(0)[1]} was read twice (rank 0)"]


@pytest.mark.parametrize("is_held", [True, False])
def test_samples_that_stand_in_for_unreadable_ones_are_no_error(is_held: bool) -> None:
    num, share = 48, 0.0 if is_held else None
    orders = [order_of(rank, num, share=share) for rank in range(RANKS)]
    found = trained(orders, num, orders[0].batches_per_epoch, bad=frozenset([7, 30]), on_bad="skip", is_held=is_held)
    assert found.errors == []
    assert found.replaced == 2
    assert (found.epochs[0].twice, found.epochs[0].never) == (2, 2)


def test_a_rank_that_holds_its_samples_takes_another_of_the_batch_for_an_unreadable_one() -> None:
    num = 48
    order = order_of(0, num, share=0.0)
    keys = next(order.batches())
    source = LoadedSource(
        NumberReader(num, frozenset([keys[-1][1]])), order, loader_workers=0, on_bad_sample="skip", is_held=True
    )
    assert next(source)["number"].tolist() == [index for _, index in [*keys[:-1], keys[0]]]
    nothing = LoadedSource(
        NumberReader(num, frozenset(range(num))), order, loader_workers=0, on_bad_sample="skip", is_held=True
    )
    with pytest.raises(UserError, match="4 samples in a row are unreadable"):
        next(nothing)


def test_novelty_tells_local_from_global_and_label_distance_a_sorted_partition_from_a_drawn_one() -> None:
    num, epochs = 1200, 4

    def epoch_of(share: float | None, partition: Partition) -> tuple[float, float]:
        orders = [order_of(rank, num, share=share, partition=partition) for rank in range(RANKS)]
        found = trained(orders, num, epochs * orders[0].batches_per_epoch)
        last = found.epochs[-1]
        assert found.epochs[0].novelty is None
        assert last.novelty is not None
        assert last.label_distance is not None
        return last.novelty, last.label_distance

    novelty_local, sorted_local = epoch_of(0.0, "contiguous")
    novelty_partial, sorted_partial = epoch_of(0.3, "contiguous")
    novelty_global, drawn = epoch_of(None, "shuffled")
    assert novelty_local == 0
    assert abs(novelty_partial - 0.3) < 0.05
    assert abs(novelty_global - 1) < 0.05
    # Each rank holds a third of four classes in the order of storage: one and a third of them.
    assert sorted_local == pytest.approx(0.5, abs=0.01)
    assert drawn < 0.05 < sorted_partial < sorted_local
