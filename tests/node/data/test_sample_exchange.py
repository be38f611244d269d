"""The exchange of partial shuffling: ranks are threads here, with stores and connections of their own."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlbench.datasets.shuffling import Ownership
from dlbench.datasets.staging.samples import SampleStore
from dlbench.errors import EnvironmentLacksError, IncompleteDataError, PeerLostError, RunError
from dlbench.node.data import sample_exchange as exchange_module
from dlbench.node.data.reader import NotArrivedError
from dlbench.node.data.sample_exchange import AwaitingReader, SampleExchange, lost_mark
from dlbench.node.data.sharding import HeldOrder
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
