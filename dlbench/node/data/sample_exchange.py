"""A reader of a rank's own samples, some of which are still on their way from another rank."""

from __future__ import annotations

import errno
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlbench.datasets.shuffling import Exchange, Ownership, released
from dlbench.datasets.staging.samples import DamagedSampleError, SampleStore
from dlbench.errors import DlbenchError, EnvironmentLacksError, IncompleteDataError, PeerLostError, RunError
from dlbench.node.background import BackgroundWorker
from dlbench.node.data.reader import Arrays, NotArrivedError, Raw, SampleReader, WrappedReader
from dlbench.node.data.sample_connections import (
    SECRET_BYTES,
    Arrival,
    Incoming,
    NonsenseError,
    Outgoing,
    PeerGoneError,
    Waker,
    listen,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_LOST = "lost"


def lost_mark(store: SampleStore) -> Path:
    """The file whose being there says to all readers that nothing more will arrive, next to the samples."""
    return store.folder / _LOST


class AwaitingReader(WrappedReader):
    """The same samples, each waited for until it is in the store.

    A sample is there when its file is (`SampleStore`), so that readers in other processes need no message.
    `patience_s`: how long a sample may be waited for, seconds.
    """

    def __init__(self, reader: SampleReader, store: SampleStore, *, patience_s: float) -> None:
        super().__init__(reader)
        self._store, self._patience_s = store, patience_s
        self._lost = lost_mark(store)

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """The stored bytes of one sample, once it is there.

        Raises NotArrivedError: it is not coming, or not in time. BadSampleError: it cannot be read.
        """
        if self._store.has(index):
            return self._reader.fetch(index, out)
        begun = time.monotonic_ns()
        pause_s = _FIRST_PAUSE_S
        while not self._store.has(index):
            waited_s = (time.monotonic_ns() - begun) / 1e9
            if waited_s > self._patience_s or self._lost.exists():
                raise NotArrivedError(index, waited_s)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        waited_ns = time.monotonic_ns() - begun
        return replace(self._reader.fetch(index, out), waited_ns=waited_ns)


SENT_AT_ONCE = 8  # samples on their way from a rank: memory is bounded, and a round trip is hidden
OPEN_AT_ONCE = 64  # connections on which a rank sends; the one that was idle for longest is closed for another
_APART = 64  # epochs that another rank may be ahead
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Counted:
    """What one rank sent and received in one epoch."""

    sent: int = 0  # stored by their receivers
    received: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ExchangeEndpoint:
    """What an exchange of samples needs of the run around it."""

    store: SampleStore  # holds this rank's samples of the epoch in which training begins, and nothing else
    address: str  # IPv4, of this rank
    gather: Callable[[Any], list[Any]]  # `Engine.gather`
    patience_s: float  # how long a reader may wait for a sample of another rank


class SampleExchange:
    """The exchange of one rank.

    `store`: holds this rank's samples of the first epoch, and nothing else. `batches_per_epoch`: batches of a rank in
    one epoch. `first_epoch`: in which training begins, or goes on.
    Raises RunError: cannot listen at this address.
    """

    def __init__(
        self,
        ownership: Ownership,
        rank: int,
        store: SampleStore,
        *,
        batches_per_epoch: int,
        address: str,
        first_epoch: int = 0,
    ) -> None:
        self._ownership, self._rank, self._store = ownership, rank, store
        self._batches_per_epoch = batches_per_epoch
        self._dealt = (first_epoch, 0)
        self._first = self._current = self._epoch = first_epoch
        self._sending: Exchange | None = None
        self._place = 0
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._not_here: dict[tuple[int, int], int] = {}
        self._on_way: dict[tuple[int, int], int] = {}
        self._sent: dict[int, list[int]] = {}
        self._awaited: dict[int, dict[int, int]] = {}
        self._received: dict[int, set[int]] = {}
        self._arrived: dict[int, int] = {}
        self._counted: dict[int, Counted] = {}
        self._held = self._held_peak = ownership.size(rank)
        self._error: DlbenchError | None = None
        self._is_closing = False
        self._out: dict[int, Outgoing] = {}
        self._in: set[Incoming] = set()
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        lost_mark(store).unlink(missing_ok=True)
        try:
            self._listener = listen(address)
        except OSError as error:
            self._waker.close()
            self._selector.close()
            raise RunError(f"samples cannot be exchanged: {address}: {error.strerror or error}") from None
        self._worker: BackgroundWorker | None = None

    def connect(self, gather: Callable[[Any], list[Any]]) -> None:
        """Says to all ranks where this one listens, and begins; called by all of them."""
        own = [*self._listener.getsockname(), secrets.token_hex(SECRET_BYTES // 2)]
        everyone = gather(own)
        self._addresses = [(str(host), int(port)) for host, port, _ in everyone]
        self._secret = str(everyone[0][2]).encode()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._worker = BackgroundWorker("sample exchange")
        self._worker.put(self._work)

    def dealt(self, epoch: int, batches: int) -> None:
        """Notes how many batches of an epoch were handed to readers; never waits."""
        self._dealt = (epoch, batches)
        self._waker.wake()

    def consumed(self, epoch: int) -> None:
        """All batches of the epochs before this one have been trained with, or are about to be; never waits."""
        if epoch != self._current:
            self._current = epoch
            self._waker.wake()

    def require_well(self) -> None:
        """Proves that the exchange goes on. Raises DlbenchError: it does not, and why."""
        if self._error is not None:
            raise self._error

    def missing(self, epoch: int, index: int, waited_s: float) -> DlbenchError:
        """Why a sample did not come; `self`'s own failure, where that is why."""
        if self._error is not None:
            return self._error
        due = self._ownership.exchange(epoch - 1, self._rank) if epoch else None
        sender = next((int(due.senders[at]) for at in (due.awaited == index).nonzero()[0]), None) if due else None
        if sender is None:
            return RunError(f"sample {index} is not in {str(self._store.folder)!r}, though no rank is to send it")
        return PeerLostError(
            f"waited {waited_s:.0f} s for sample {index} of epoch {epoch}, which rank {sender} has not sent"
        )

    def summary(self) -> dict[str, Any]:
        """Of each epoch what was sent and received, and the most samples held at one time; plain Python."""
        return {
            "held_peak": self._held_peak,
            "epochs": {str(epoch): asdict(counted) for epoch, counted in list(self._counted.items())},
        }

    def close(self) -> None:
        """Ends the thread and all connections; twice does no harm. Ranks close when all have trained."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._worker is None:
            self._release()
            return
        self._waker.wake()
        self._worker.close(10.0)

    # All below is the thread's alone.

    def _work(self) -> None:
        try:
            while not self._is_closing:
                self._order_due()
                self._delete_sent()
                self._send_waiting()
                self._go_on()
        except DlbenchError as error:
            self._fail(error)
        except PeerGoneError as error:
            self._fail(PeerLostError(f"rank {error.rank}, which exchanges samples with this one, is gone: {error}"))
        except NonsenseError as error:
            self._fail(RunError(f"the exchange of samples: {error}"))
        except Exception as error:  # a defect here must end the run, and not leave it waiting
            self._fail(RunError(f"the exchange of samples failed: {type(error).__name__}: {error}"))
        finally:
            self._release()

    def _fail(self, error: DlbenchError) -> None:
        self._error = error
        with suppress(OSError):
            lost_mark(self._store).touch()

    def _release(self) -> None:
        for outgoing in self._out.values():
            outgoing.close()
        for incoming in self._in:
            incoming.close()
        self._listener.close()
        self._waker.close()
        self._selector.close()

    def _order_due(self) -> None:
        """Puts into the queue what the batches handed out so far release.

        Not before the epoch before is over here: what it sent still lies here, and both together would not fit.
        """
        while True:
            epoch, batches = self._dealt
            if self._epoch > epoch or self._epoch > self._current:
                return
            if self._sending is None:
                self._sending, self._place = self._ownership.exchange(self._epoch, self._rank), 0
                self._awaited_in(self._epoch)
                # The order of the next epoch is made of it, by the training thread, which shall not wait for it.
                self._ownership.parts(self._epoch + 1)
            due = self._sending
            slots = self._ownership.slots
            limit = slots if epoch > self._epoch else released(slots, done=batches, batches=self._batches_per_epoch)
            while self._place < len(due.slots) and due.slots[self._place] < limit:
                self._order(self._epoch, int(due.samples[self._place]), int(due.receivers[self._place]))
                self._place += 1
            if limit < slots:
                return
            self._epoch += 1
            self._sending = None

    def _order(self, epoch: int, index: int, peer: int) -> None:
        """Puts a sample into the queue; one that is still to come once it has come, even where an older copy lies here.

        Sent on from the older copy, it could come after all that was sent is deleted, and would stay for ever.
        """
        if index in self._awaited_in(epoch - 1) and index not in self._received.get(epoch - 1, ()):
            self._not_here[epoch - 1, index] = peer
        else:
            self._waiting.append((epoch, index, peer))

    def _send_waiting(self) -> None:
        while self._waiting and len(self._on_way) < SENT_AT_ONCE:
            epoch, index, peer = self._waiting.popleft()
            try:
                data = self._store.get(index)
            except DamagedSampleError as error:
                raise IncompleteDataError(str(error)) from None
            except OSError as error:
                raise RunError(f"{self._store.path(index)}: {error.strerror or error}") from None
            if data is None:
                raise RunError(f"sample {index}, which this rank holds, is no longer in {str(self._store.folder)!r}")
            self._on_way[epoch, index] = len(data)
            self._connection(peer).send(epoch, index, data)

    def _connection(self, peer: int) -> Outgoing:
        known = self._out.get(peer)
        if known is not None:
            return known
        idle = sorted((each.used_s, number) for number, each in self._out.items() if each.is_idle)
        if len(self._out) >= OPEN_AT_ONCE and idle:
            self._out.pop(idle[0][1]).close()
        self._out[peer] = made = Outgoing(
            self._selector, peer, self._addresses[peer], secret=self._secret, rank=self._rank, on_stored=self._stored
        )
        return made

    def _stored(self, epoch: int, index: int) -> None:
        """A receiver has stored a sample."""
        counted = self._counted.setdefault(epoch, Counted())
        counted.sent += 1
        counted.sent_bytes += self._on_way.pop((epoch, index))
        self._sent.setdefault(epoch, []).append(index)

    def _delete_sent(self) -> None:
        for epoch in [each for each in self._sent if each < self._current]:
            for index in self._sent.pop(epoch):
                # It may have come back since, or be about to: then it is held again.
                if self._arrived.get(index, -1) > epoch or index in self._awaited_in(epoch + 1):
                    continue
                self._store.remove(index)
                self._held -= 1
        for epoch in [each for each in self._awaited if each < min(self._current - 2, self._epoch - 1)]:
            self._received.pop(epoch, None)
            for index in self._awaited.pop(epoch):
                if self._arrived.get(index) == epoch:
                    del self._arrived[index]

    def _awaited_in(self, epoch: int) -> dict[int, int]:
        """The samples that others send in an epoch, and who; none before the first, whose samples are all here."""
        if epoch < self._first:
            return {}
        found = self._awaited.get(epoch)
        if found is None:
            due = self._ownership.exchange(epoch, self._rank)
            found = self._awaited[epoch] = dict(zip(due.awaited.tolist(), due.senders.tolist(), strict=True))
        return found

    def _take(self, arrival: Arrival) -> None:
        """Stores a sample that has come.

        Raises NonsenseError: nobody was to send it. EnvironmentLacksError: the disk is full.
        """
        epoch, index = arrival.epoch, arrival.index
        got = self._received.setdefault(epoch, set()) if self._may_come(epoch) else {index}
        if index in got or self._awaited_in(epoch).get(index) != arrival.sender:
            raise NonsenseError(f"rank {arrival.sender} sent sample {index} in epoch {epoch}, which it was not to send")
        was_here = self._store.has(index)
        try:
            self._store.put(index, arrival.data)
        except OSError as error:
            text = f"{str(self._store.folder)!r}: {error.strerror or error}"
            if error.errno in _FULL:
                raise EnvironmentLacksError(
                    f"{text}: no room for a sample of another rank; partial shuffling holds up to 1 + Q times a rank's "
                    f"part, here {self._held} samples"
                ) from None
            raise RunError(text) from None
        got.add(index)
        self._arrived[index] = epoch
        self._held += not was_here
        self._held_peak = max(self._held_peak, self._held)
        self._counted.setdefault(epoch, Counted()).received += 1
        if (peer := self._not_here.pop((epoch, index), None)) is not None:
            self._waiting.append((epoch + 1, index, peer))

    def _may_come(self, epoch: int) -> bool:
        # Ranks that exchange gradients are at most an epoch apart, others a few more.
        return max(0, self._current - 2) <= epoch <= self._dealt[0] + _APART

    def _go_on(self) -> None:
        for connection in [each for each in self._in if each.is_overdue]:
            self._in.discard(connection)
            connection.close()
        strangers = any(each.peer is None for each in self._in)
        for key, events in self._selector.select(1.0 if strangers else None):
            handler = key.data
            if handler is None:
                self._accept()
            elif isinstance(handler, Incoming):
                if not handler.handle(events):
                    self._leave(handler)
            elif isinstance(handler, Outgoing):
                if self._out.get(handler.peer) is handler and not handler.handle(events):
                    self._out.pop(handler.peer).close()
            else:
                self._waker.handle()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # gone again, or no descriptor is left: later, and not in a busy loop
            return
        if len(self._in) >= self._ownership.ranks + OPEN_AT_ONCE:
            connection.close()
            return
        with suppress(OSError):
            self._in.add(
                Incoming(
                    self._selector, connection, secret=self._secret, ranks=self._ownership.ranks, on_arrival=self._take
                )
            )

    def _leave(self, connection: Incoming) -> None:
        """Another rank has closed its connection: it has nothing to send for now, or it is gone."""
        self._in.discard(connection)
        connection.close()
        peer = connection.peer
        if peer is None or self._is_closing:
            return
        owes = any(
            sender == peer and index not in self._received.get(epoch, ())
            for epoch, awaited in self._awaited.items()
            if epoch >= self._current - 1
            for index, sender in awaited.items()
        )
        if owes:
            # One that still sends accepts connections; one that is gone refuses, which ends this thread.
            self._connection(peer)
