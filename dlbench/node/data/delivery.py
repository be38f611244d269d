"""Batches on their way to a GPU: copied ahead, on a stream of their own, while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from dlbench.node.part import TrainingPart
from dlbench.records.record import Setting

Batch = dict[str, torch.Tensor]
Ahead = Callable[[], Batch | None]
"""The batch after those that were handed out or looked at, without handing it out; None where it must not be read."""
Decode = Callable[[Batch], tuple[Batch, object]]
"""Brings a batch to the device in another form, on its current stream; and what must live until that is there."""
_KEY = "data.device_prefetch"


class Delivery(TrainingPart):
    """Brings the batches of one rank to its GPU.

    The copy of a batch waits for nothing that computes, and what computes waits for the copy, on the device alone. The
    memory on the host is let go when its copy is done: a loader process may write to it then.
    `ahead`: looks at those that come next. `prefetch`: batches that are copied ahead; 0: each is copied in its step, on
    the stream that computes. `decode`: makes of a batch what is trained with; None: it is copied as it is.
    """

    def __init__(
        self, batches: Iterator[Batch], ahead: Ahead, device: torch.device, prefetch: int, decode: Decode | None = None
    ) -> None:
        self._batches, self._ahead, self._device, self._prefetch = batches, ahead, device, prefetch
        self._decode = decode
        self._stream = torch.cuda.Stream(device) if prefetch else None  # type: ignore[no-untyped-call]
        self._coming: deque[tuple[object, Batch, torch.cuda.Event | None]] = deque()
        """What the copy reads, the copy, and its end; None where nothing was copied."""
        self._copying: deque[tuple[object, torch.cuda.Event]] = deque()  # what copies may still read
        self._batch: Batch = {}
        self._copies = self._copies_ahead = 0

    def fetch(self) -> None:
        """The next batch is taken; blocks until it is on the host. Errors as of the batches."""
        while self._copying and self._copying[0][1].query():  # type: ignore[no-untyped-call]
            self._copying.popleft()
        self._batch = next(self._batches)

    def deliver(self) -> Batch:
        """The batch that was taken, on the device; what is put into the current stream from now on may read it."""
        taken, self._batch = self._batch, {}
        if not self._coming:
            self._copy(taken)
        kept, moved, copied = self._coming.popleft()
        if copied is None:
            return moved
        compute = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            compute.wait_event(copied)
            for tensor in moved.values():
                # It belongs to the copy stream, which must not use its memory again before the step has ended.
                tensor.record_stream(compute)
        self._copying.append((kept, copied))
        return moved

    def look_ahead(self) -> bool:
        """Begins to copy what comes next; blocks until it is on the host. Returns whether there was anything to do."""
        looked = False
        while len(self._coming) < self._prefetch:
            batch = self._ahead()
            if batch is None:
                break
            before = self._copies
            self._copy(batch)
            self._copies_ahead += self._copies - before
            looked = True
        return looked

    def _copy(self, host: Batch) -> None:
        if all(tensor.device == self._device for tensor in host.values()):
            self._coming.append((host, host, None))
            return
        # None: the current stream.
        with torch.cuda.stream(self._stream):
            kept: object = host
            if self._decode is None:
                moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in host.items()}
            else:
                moved, decoded = self._decode(host)
                kept = (host, decoded)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
        self._coming.append((kept, moved, copied))
        self._copies += 1

    def settings(self) -> list[Setting]:
        """How many batches are copied ahead."""
        if not self._copies:
            effective, evidence = None, "samples lie on the GPU: nothing is copied"
        else:
            effective = self._prefetch if self._copies_ahead else 0
            evidence = f"{self._copies_ahead} of {self._copies} batches were copied on a stream of their own"
        return [Setting(key=_KEY, requested=self._prefetch, effective=effective, evidence=evidence)]
