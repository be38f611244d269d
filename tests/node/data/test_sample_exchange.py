"""Shuffling: the exchange of samples, its checkpoints and record, and the audit of reading: each sample once an epoch.

Ranks of the exchange are threads here, with stores and connections of their own; the audit names samples that lack.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from dlbench.datasets.shuffling import Ownership
from dlbench.datasets.staging.samples import SampleStore
from dlbench.errors import EnvironmentLacksError, IncompleteDataError, PeerLostError, RunError, UserError
from dlbench.node.data import sample_exchange as exchange_module
from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.reader import Key, NotArrivedError
from dlbench.node.data.sample_exchange import AwaitingReader, SampleExchange, lost_mark
from dlbench.node.data.sharding import Audited, HeldOrder, Position, ReadAudit, ShardedOrder, doubtful_epochs
from dlbench.node.training.checkpoint import SHARED_BY, Checkpoint, require_same_holders, trained_identity
from dlbench.node.training.run_record import sample_summary, shuffled
from dlbench.specs.plan import RunPlan
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.run_factory import plans
from tests.support.training_data import NumberReader, StoreReader, number_bytes

LIMIT_S = 60.0


class Ranks:
    """The exchanges of all ranks, met."""

    def __init__(self, folder: Path, ownership: Ownership, *, batch_size: int = 2, first_epoch: int = 0) -> None:
        self.ownership, self.first_epoch = ownership, first_epoch
        ranks = range(ownership.ranks)
        self.orders = [HeldOrder(ownership, batch_size=batch_size, rank=rank) for rank in ranks]
        self.stores = [SampleStore(folder / str(rank)) for rank in ranks]
        for rank in ranks:
            for index in ownership.part(first_epoch, rank):
                self.stores[rank].put(int(index), number_bytes(int(index)))
        self.all = [
            SampleExchange(
                ownership,
                rank,
                self.stores[rank],
                batches_per_epoch=self.orders[rank].batches_per_epoch,
                address="127.0.0.1",
                first_epoch=first_epoch,
            )
            for rank in ranks
        ]
        self.addresses: list[Any] = [None] * ownership.ranks
        meeting = threading.Barrier(ownership.ranks)

        def gather_of(rank: int) -> Callable[[Any], list[Any]]:
            def gather(value: Any) -> list[Any]:
                self.addresses[rank] = value
                meeting.wait(LIMIT_S)
                everyone = list(self.addresses)
                meeting.wait(LIMIT_S)
                return everyone

            return gather

        with ThreadPoolExecutor(ownership.ranks) as pool:
            list(pool.map(lambda rank: self.all[rank].connect(gather_of(rank)), ranks))

    def train(self, rank: int, epochs: int, pause_s: float = 0.0) -> None:
        """Reads some epochs as a training does that reads each batch when it needs it."""
        order, exchange = self.orders[rank], self.all[rank]
        reader = AwaitingReader(StoreReader(self.stores[rank]), self.stores[rank], patience_s=LIMIT_S)
        for epoch in range(self.first_epoch, self.first_epoch + epochs):
            mine = order.epoch(epoch).tolist()
            for number in range(order.batches_per_epoch):
                exchange.require_well()
                exchange.on_batch_assigned(epoch, number + 1)
                for index in mine[number * 2 : number * 2 + 2]:
                    assert reader.fetch(index).data == number_bytes(index)
                if number + 1 == order.batches_per_epoch:
                    exchange.consumed(epoch + 1)
                time.sleep(pause_s)

    def settle(self, epoch: int) -> None:
        """Waits until each store holds what its rank owns in an epoch; what would come back at once may stay."""
        ranks = range(self.ownership.ranks)
        back = [set(self.ownership.exchange(epoch, rank).awaited.tolist()) for rank in ranks]
        owned = [set(self.ownership.part(epoch, rank).tolist()) - back[rank] for rank in ranks]
        until(lambda: [set(self.stores[rank].indices()) - back[rank] for rank in ranks] == owned)

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.all)) as pool:
            list(pool.map(lambda exchange: exchange.close(), self.all))


@contextmanager
def met(folder: Path, ownership: Ownership, **options: int) -> Iterator[Ranks]:
    ranks = Ranks(folder, ownership, **options)
    try:
        yield ranks
    finally:
        ranks.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "sample exchange"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("num_samples", "ranks", "share", "first_epoch"),
    [(40, 2, 0.3, 0), (47, 3, 1.0, 2), (61, 5, 0.5, 0), (90, 2, 1.0, 0)],
)
def test_after_some_epochs_each_store_holds_what_its_rank_owns(
    tmp_path: Path, num_samples: int, ranks: int, share: float, first_epoch: int
) -> None:
    ownership = Ownership(num_samples, ranks, seed=7, partition="contiguous", share=share)
    epochs = 4
    with met(tmp_path, ownership, first_epoch=first_epoch) as group:
        with ThreadPoolExecutor(ranks) as pool:
            # Ranks that are unlike fast, as without an exchange of gradients.
            list(pool.map(lambda rank: group.train(rank, epochs, pause_s=0.001 * rank), range(ranks)))
        last = first_epoch + epochs
        group.settle(last)
        told = [exchange.summary() for exchange in group.all]
        for exchange in group.all:
            exchange.require_well()
    for epoch in range(first_epoch, last):
        for rank in range(ranks):
            expected = len(ownership.exchange(epoch, rank).samples)
            counted = told[rank]["epochs"][str(epoch)]
            assert (counted["sent"], counted["received"]) == (expected, expected)
            assert counted["sent_bytes"] == sum(len(number_bytes(i)) for i in ownership.exchange(epoch, rank).samples)
    for rank in range(ranks):
        # (1 + Q) N / M, and the few that come while the last batches of the epoch before are trained with.
        assert ownership.size(rank) < told[rank]["held_peak"] <= ownership.size(rank) + 2 * ownership.slots
        for index in ownership.part(last, rank).tolist():
            assert group.stores[rank].get(index) == number_bytes(index)


def test_samples_leave_as_batches_are_asked_for_and_stay_until_their_epoch_is_over(tmp_path: Path) -> None:
    ownership = Ownership(80, 2, seed=1, partition="shuffled", share=0.5)
    with met(tmp_path, ownership) as group:
        due = ownership.exchange(0, 0)
        batches = group.orders[0].batches_per_epoch

        def sent() -> int:
            return int(group.all[0].summary()["epochs"].get("0", {}).get("sent", 0))

        assert sent() == 0
        group.all[0].on_batch_assigned(0, batches)
        group.all[1].on_batch_assigned(0, batches // 2)
        half = int((due.slots < ownership.slots * (batches // 2) // batches).sum())
        until(lambda: sent() == half)
        time.sleep(0.05)
        assert sent() == half, "the rank that has assigned least says how far all go"
        group.all[1].on_batch_assigned(0, batches)
        until(lambda: sent() == len(due.samples))
        assert all(group.stores[0].has(int(index)) for index in due.samples)
        for exchange in group.all:
            exchange.consumed(1)
        gone = set(due.samples.tolist()) - set(ownership.exchange(1, 0).awaited.tolist())
        until(lambda: not any(group.stores[0].has(index) for index in gone))


def test_a_rank_that_is_gone_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    ownership = Ownership(80, 2, seed=1, partition="shuffled", share=0.5)
    with met(tmp_path, ownership) as group:
        group.all[1]._is_closing = True
        group.all[1].on_batch_assigned(0, 0)
        begun = time.monotonic()
        group.all[0].on_batch_assigned(0, group.orders[0].batches_per_epoch)
        awaited = int(ownership.exchange(0, 0).awaited[0])
        reader = AwaitingReader(StoreReader(group.stores[0]), group.stores[0], patience_s=LIMIT_S)
        with pytest.raises(NotArrivedError):
            reader.fetch(awaited)
        assert time.monotonic() - begun < LIMIT_S / 2
        with pytest.raises(PeerLostError, match="rank 1, which exchanges samples with this one, has ended"):
            raise group.all[0].missing(1, awaited, 0.0)


def test_a_sample_that_does_not_come_in_time_is_told_with_its_rank(tmp_path: Path) -> None:
    ownership = Ownership(80, 3, seed=1, partition="shuffled", share=0.5)
    with met(tmp_path, ownership) as group:
        due = ownership.exchange(0, 0)
        reader = AwaitingReader(StoreReader(group.stores[0]), group.stores[0], patience_s=0.05)
        with pytest.raises(NotArrivedError) as seen:
            reader.fetch(int(due.awaited[0]))
        error = group.all[0].missing(1, int(due.awaited[0]), seen.value.waited_s)
        assert isinstance(error, PeerLostError)
        assert f"which rank {due.senders[0]} has not sent" in str(error)
        held = int(group.orders[0].epoch(1)[0])
        assert "no rank has to send it" in str(group.all[0].missing(0, held, 1.0))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("full", EnvironmentLacksError, "No space left on device: no room for a sample"),
        ("denied", RunError, "Permission denied"),
        ("damaged", IncompleteDataError, "changed or truncated since it was staged"),
        ("removed", RunError, "is no longer in"),
        ("defect", RunError, "the exchange of samples failed: ZeroDivisionError"),
    ],
)
def test_what_fails_in_the_background_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kind: type[Exception], words: str
) -> None:
    ownership = Ownership(80, 2, seed=1, partition="shuffled", share=0.5)
    with met(tmp_path, ownership) as group:
        due = ownership.exchange(0, 0)
        first, store = int(due.samples[0]), group.stores[0]
        if what in ("full", "denied"):
            number = errno.ENOSPC if what == "full" else errno.EACCES

            def refuse(index: int, data: bytes) -> None:
                raise OSError(number, "No space left on device" if what == "full" else "Permission denied")

            monkeypatch.setattr(store, "put", refuse)
        elif what == "damaged":
            path = store.path(first)
            path.write_bytes(path.read_bytes()[:-1])
        elif what == "removed":
            store.remove(first)
        else:
            monkeypatch.setattr(exchange_module, "released", lambda *_, **__: 1 // 0)
        for exchange in group.all:
            exchange.on_batch_assigned(0, group.orders[0].batches_per_epoch)
        until(lambda: lost_mark(store).exists())
        with pytest.raises(kind, match=words):
            group.all[0].require_well()


def test_a_reader_of_arrivals_is_that_of_the_store_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore(tmp_path)
    store.put(3, number_bytes(3))
    plain = NumberReader(9)
    reader = AwaitingReader(StoreReader(store), store, patience_s=LIMIT_S)
    assert reader.fetch(3).data == number_bytes(3)
    assert reader.fetch(3).waited_ns == 0
    looked, has = threading.Event(), store.has

    def seen(index: int) -> bool:
        found = has(index)
        looked.set()
        return found

    def put_late() -> None:
        looked.wait(LIMIT_S)
        time.sleep(0.05)
        store.put(4, number_bytes(4))

    monkeypatch.setattr(store, "has", seen)
    late = threading.Thread(target=put_late)
    late.start()
    assert reader.fetch(4).waited_ns > 10e6
    late.join()
    assert plain.read((0, 3)).arrays["number"] == reader.read((0, 3)).arrays["number"]


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


def plan_of(ranks: int = 2, shuffle: str = "local", **data: Any) -> RunPlan:
    overrides = {"data.shuffle": shuffle, **{f"data.{key}": value for key, value in data.items()}}
    if shuffle.startswith("partial"):
        overrides["data.staging"] = "shard"
    (plan,) = plans(points=(ranks,), repeats=1, data="/data/pictures", overrides=overrides)
    return plan


def checkpoint_of(path: Path, plan: RunPlan, place: int) -> Checkpoint:
    model = nn.Linear(1, 1)
    progress = progress_at(4, epoch=1.0, position=Position(epoch=1, place=place))
    optimizer = torch.optim.SGD(model.parameters())
    write_checkpoint(path, model, optimizer, progress, {**trained_identity(plan), SHARED_BY: plan.layout.ranks})
    return Checkpoint(path)


@pytest.mark.parametrize("shuffle", ["local", "partial:0.3"])
def test_other_ranks_go_on_at_the_end_of_an_epoch_only(tmp_path: Path, shuffle: str) -> None:
    middle = checkpoint_of(tmp_path / "middle", plan_of(2, shuffle), place=8)
    end = checkpoint_of(tmp_path / "end", plan_of(2, shuffle), place=0)
    require_same_holders(plan_of(2, shuffle), middle)
    require_same_holders(plan_of(4, shuffle), end)
    with pytest.raises(UserError, match="written within epoch 1 by 2 ranks, each of which has read a part"):
        require_same_holders(plan_of(4, shuffle), middle)
    # Under global shuffling a place means the same for any number of ranks.
    require_same_holders(plan_of(4, "global"), checkpoint_of(tmp_path / "global", plan_of(2, "global"), place=8))


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ({"shuffle": "local"}, {"shuffle": "global"}, "data.shuffle 'local', the plan has 'global'"),
        ({"shuffle": "global"}, {"shuffle": "partial:0.1"}, "data.shuffle 'global', the plan has 'partial:0.1'"),
        ({"shuffle": "partial:0.1"}, {"shuffle": "partial:0.2"}, "data.shuffle 'partial:0.1', the plan has"),
        ({"partition": "contiguous"}, {"partition": "shuffled"}, "data.partition 'contiguous', the plan has"),
    ],
)
def test_another_shuffle_share_or_partition_is_refused(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], key: str
) -> None:
    kept = checkpoint_of(tmp_path / "kept", plan_of(**before), place=0)
    kept.require(trained_identity(plan_of(**before)))
    with pytest.raises(UserError, match=key):
        kept.require(trained_identity(plan_of(**after)))


class Read:
    """What the record asks of a source."""

    exchange = None
    num_samples = 48

    def __init__(self, order: HeldOrder | Changed, batches: int) -> None:
        from dlbench.node.data.loader import LoadedSource

        reader = NumberReader(self.num_samples)
        self.audit = ReadAudit(order, num_samples=self.num_samples, ranks=3, labels=reader.labels())
        source = LoadedSource(reader, order, loader_workers=0, on_bad_sample="stop", audit=self.audit)
        for _ in range(batches):
            next(source)

    def sample_name(self, index: int) -> str:
        return f"number {index}"


def test_the_record_says_how_samples_were_shuffled_and_the_check_fails_with_names() -> None:
    good = [Read(order_of(rank, 48, share=0.0), 8) for rank in range(3)]  # type: ignore[arg-type]
    told = [sample_summary(each) for each in good]  # type: ignore[arg-type]
    plan = plan_of(3, "local", partition="contiguous")
    found = shuffled(plan, good[0], told, lambda value: [value])  # type: ignore[arg-type]
    assert (found.result.shuffle, found.result.partition, found.result.exchanged_share) == ("local", "contiguous", 0)
    assert found.result.audit_s > 0
    (check,) = found.checks
    assert (check.passed, check.detail) == (True, "2 complete epochs, in each 48 samples read and 0 left out")
    assert [(s.requested, s.effective) for s in found.settings] == [("local", "local")]

    wrong = Changed(48, batch_size=4, rank=0, world_size=3, seed=5)
    others = [order_of(rank, 48, share=None) for rank in (1, 2)]
    wrong.instead = (0, 0, int(others[0].epoch(0)[0]))
    bad = [Read(order, 4) for order in (wrong, *others)]  # type: ignore[arg-type]
    told = [sample_summary(each) for each in bad]  # type: ignore[arg-type]
    lists: list[Any] = [each.audit.lists([0]) for each in bad]
    failed = shuffled(plan_of(3, "global"), bad[0], told, lambda value: lists)  # type: ignore[arg-type]
    (check,) = failed.checks
    assert not check.passed
    assert f"epoch 0: number {wrong.instead[2]} was read twice (ranks 0, 1)" in check.detail
    assert f"number {wrong.epoch(0)[0]} was read never" in check.detail
