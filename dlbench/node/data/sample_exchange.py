"""Exchange of samples between ranks for partial shuffling, and a reader that waits for samples of other ranks. A thread
of each rank sends and receives over a separate Gloo group, in the order that all ranks draw
(`dlbench.datasets.shuffling`): a header, (number, length, CRC-32) as int64, and the bytes of a sample.
"""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from dlbench.datasets.shuffling import EpochExchange, Ownership, released
from dlbench.datasets.staging.samples import DamagedSampleError, SampleStore
from dlbench.errors import DlbenchError, EnvironmentLacksError, IncompleteDataError, PeerLostError, RunError, first_line
from dlbench.node.data.reader import Arrays, DataReader, NotArrivedError, Raw, WrappedReader

SENT_AT_ONCE = 8  # Slots exchanged together, to bound memory and hide round trips.
MAX_SAMPLE_BYTES = 1 << 30  # A larger sample is an error.
_ENDED = -1  # Sent by a closing rank instead of a number of slots.
_LONGEST = timedelta(days=30)  # A rank may be slow; one that has ended closes its connections.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def lost_mark(store: SampleStore) -> Path:
    """Returns the path of a file whose existence tells all readers that no more samples will arrive."""
    return store.folder / "lost"


class AwaitingReader(WrappedReader):
    """A reader that waits at most `patience_s` until the file of a sample is in the store."""

    def __init__(self, reader: DataReader, store: SampleStore, *, patience_s: float) -> None:
        super().__init__(reader)
        self._store, self._patience_s = store, patience_s
        self._lost = lost_mark(store)

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
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


@dataclass
class Counted:
    """Samples and bytes that one rank sent and received in one epoch."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0


class _GatheredStore(Store):
    """torch's key-value store over `gather`: all ranks set their own keys, and then get those of the others."""

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self._gather = gather
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        if isinstance(value, str):
            value = value.encode()
        self._values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            for values in self._gather({key: value.hex() for key, value in self._values.items()}):
                self._values.update({key: bytes.fromhex(value) for key, value in values.items()})
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class SampleExchange:
    """The exchange of samples of one rank, whose `store` must have its samples of `first_epoch`."""

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
        self._batches_per_epoch, self._address = batches_per_epoch, address
        self._first = self._current = first_epoch
        self._assigned = (first_epoch, 0)  # epoch, and its batches that were handed to readers
        self._done = 0  # slots since the first epoch
        self._due: tuple[int, EpochExchange] | None = None  # epoch and its exchange
        self._sent: dict[int, list[int]] = {}  # samples sent in each epoch and not yet deleted
        self._counted: dict[int, Counted] = {}
        self._held = self._held_peak = ownership.size(rank)
        self._error: DlbenchError | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._group: Any = None
        lost_mark(store).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._work, name="sample exchange", daemon=True)

    def connect(self, gather: Callable[[Any], list[Any]]) -> None:
        """Connects to the other ranks and starts the thread; called by all ranks."""
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _LONGEST
        try:
            options._devices = [gloo.create_device(hostname=self._address)]
            store, ranks = _GatheredStore(gather), self._ownership.ranks
            self._group = gloo(store, self._rank, ranks, options)
        except RuntimeError as error:
            raise RunError(f"samples cannot be exchanged: {self._address}: {first_line(error)}") from None
        self._thread.start()

    def on_batch_assigned(self, epoch: int, batches: int) -> None:
        """Notes how many batches of an epoch were handed to readers; never waits."""
        with self._changed:
            self._assigned = (epoch, batches)
            self._changed.notify()

    def consumed(self, epoch: int) -> None:
        """Notes that all batches of earlier epochs were handed out to training; never waits."""
        with self._changed:
            self._current = epoch
            self._changed.notify()

    def require_well(self) -> None:
        if self._error is not None:
            raise self._error

    def missing(self, epoch: int, index: int, waited_s: float) -> DlbenchError:
        """Returns the error for a sample that did not arrive; the exchange's own error if it has failed."""
        if self._error is not None:
            return self._error
        if epoch:
            due = self._ownership.exchange(epoch - 1, self._rank)
            for sender in due.senders[due.awaited == index]:
                return PeerLostError(
                    f"waited {waited_s:.0f} s for sample {index} of epoch {epoch}, which rank {sender} has not sent"
                )
        return RunError(f"sample {index} is not in {str(self._store.folder)!r}, and no rank has to send it")

    def summary(self) -> dict[str, Any]:
        """Returns counts of each epoch and the most samples held at one time, ready for JSON."""
        return {
            "held_peak": self._held_peak,
            "epochs": {str(epoch): asdict(counted) for epoch, counted in list(self._counted.items())},
        }

    def close(self) -> None:
        """Ends the thread and all connections, after all ranks have trained; a second call does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    # Only the thread calls the methods below.

    def _work(self) -> None:
        try:
            while self._exchange_next_slots():
                pass
        except DlbenchError as error:
            self._fail(error)
        except Exception as error:  # a defect must end the run, which would wait otherwise
            self._fail(RunError(f"the exchange of samples failed: {type(error).__name__}: {error}"))
        finally:
            self._group = None  # which closes the connections

    def _fail(self, error: DlbenchError) -> None:
        self._error = error
        with suppress(OSError):
            lost_mark(self._store).touch()

    def _exchange_next_slots(self) -> bool:
        """Exchanges the next few slots; returns False when the exchange is over."""
        with self._changed:
            while not self._is_closing and self._limit() <= self._done:
                if any(epoch < self._current for epoch in self._sent):
                    break
                self._changed.wait()
            current, own_limit = self._current, self._limit()
            if self._is_closing:
                own_limit = _ENDED
        # Samples sent in finished epochs are deleted; those that come back later have not arrived yet.
        for epoch in [sent_epoch for sent_epoch in self._sent if sent_epoch < current]:
            for index in self._sent.pop(epoch):
                self._store.remove(index)
                self._held -= 1
        if 0 <= own_limit <= self._done:
            return True
        limits = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ownership.ranks)]
        _wait(self._group.allgather([limits], [torch.tensor([own_limit])]), "a rank")
        everyone = [int(limit) for limit in limits]
        if _ENDED not in everyone:
            self._exchange(min(everyone))
            return True
        if not self._is_closing:
            raise PeerLostError(f"rank {everyone.index(_ENDED)}, which exchanges samples with this one, has ended")
        return False

    def _limit(self) -> int:
        """Returns the number of slots since the first epoch that may be exchanged now."""
        epoch, batches = self._assigned
        slots = self._ownership.slots
        limit = (epoch - self._first) * slots + released(slots, done=batches, batches=self._batches_per_epoch)
        # Samples received for two epochs would not fit, as those sent are deleted at an epoch's end.
        return min(limit, (self._current - self._first + 1) * slots)

    def _exchange(self, limit: int) -> None:
        """Sends and receives the samples of the next slots of one epoch, up to `limit` slots since the first."""
        past, begin = divmod(self._done, self._ownership.slots)
        epoch = self._first + past
        end = min(limit - past * self._ownership.slots, self._ownership.slots, begin + SENT_AT_ONCE)
        if self._due is None or self._due[0] != epoch:
            self._due = epoch, self._ownership.exchange(epoch, self._rank)
            # Cached for the training thread, which needs it for the order of the next epoch.
            self._ownership.parts(epoch + 1)
        due, counted = self._due[1], self._counted.setdefault(epoch, Counted())
        places = list(range(*due.slots.searchsorted([begin, end]).tolist()))
        sent = [due.samples[place] for place in places]
        outgoing = [self._stored(int(index)) for index in sent]
        headers = [
            torch.tensor([index, len(data), zlib.crc32(data)]) for index, data in zip(sent, outgoing, strict=True)
        ]
        announced = [torch.zeros(3, dtype=torch.int64) for _ in places]
        self._swap(due, places, 0, headers, announced)
        incoming = [
            torch.empty(_length(due, place, header), dtype=torch.uint8)
            for place, header in zip(places, announced, strict=True)
        ]
        payloads = [torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)) for data in outgoing]
        self._swap(due, places, 1, payloads, incoming)
        for place, header, payload in zip(places, announced, incoming, strict=True):
            data = payload.numpy().tobytes()
            if zlib.crc32(data) != int(header[2]):
                raise RunError(f"sample {due.awaited[place]} of rank {due.senders[place]} was damaged in transit")
            self._store_received(int(due.awaited[place]), data)
        self._sent.setdefault(epoch, []).extend(map(int, sent))
        counted.sent += len(places)
        counted.received += len(places)
        counted.sent_bytes += sum(map(len, outgoing))
        self._done += end - begin

    def _swap(
        self, due: EpochExchange, places: list[int], kind: int, sent: list[torch.Tensor], received: list[torch.Tensor]
    ) -> None:
        """Sends and receives a tensor at each place of an exchange; `kind` distinguishes two messages of a place."""
        works = []
        for place, payload, buffer in zip(places, sent, received, strict=True):
            tag = 2 * int(due.slots[place]) + kind
            receiver, sender = int(due.receivers[place]), int(due.senders[place])
            works.append((receiver, self._group.send([payload], receiver, tag)))
            works.append((sender, self._group.recv([buffer], sender, tag)))
        for peer, work in works:
            _wait(work, f"rank {peer}")

    def _stored(self, index: int) -> bytes:
        try:
            data = self._store.get(index)
        except DamagedSampleError as error:
            raise IncompleteDataError(str(error)) from None
        except OSError as error:
            raise RunError(f"{self._store.path(index)}: {error.strerror or error}") from None
        if data is None:
            raise RunError(f"sample {index} of this rank is no longer in {str(self._store.folder)!r}")
        return data

    def _store_received(self, index: int, data: bytes) -> None:
        is_new = not self._store.has(index)
        try:
            self._store.put(index, data)
        except OSError as error:
            text = f"{str(self._store.folder)!r}: {error.strerror or error}"
            if error.errno in _FULL:
                raise EnvironmentLacksError(
                    f"{text}: no room for a sample of another rank; partial shuffling holds up to 1 + Q times a rank's "
                    f"part, here {self._held} samples"
                ) from None
            raise RunError(text) from None
        if is_new:
            self._held += 1
        self._held_peak = max(self._held_peak, self._held)


def _length(due: EpochExchange, place: int, header: torch.Tensor) -> int:
    index, length, _crc = header.tolist()
    if index != due.awaited[place] or not 0 <= length <= MAX_SAMPLE_BYTES:
        raise RunError(
            f"rank {due.senders[place]} sent sample {index} of {length} bytes instead of sample {due.awaited[place]}"
        )
    return int(length)


def _wait(work: Any, peer: str) -> None:
    try:
        work.wait()
    except RuntimeError:
        raise PeerLostError(f"{peer}, which exchanges samples with this one, has ended") from None
