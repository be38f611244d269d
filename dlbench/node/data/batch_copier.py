"""Copies batches to a GPU ahead of time, on a separate stream, while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from dlbench.node.part import TrainingPart
from dlbench.records.record import Setting

Batch = dict[str, torch.Tensor]
Decode = Callable[[Batch], tuple[Batch, object]]
"""Decodes a batch on the device's current stream; also returns objects that must live until that is done."""
_KEY = "data.device_prefetch"


class BatchCopier(TrainingPart):
    """Copies the batches of one rank to its GPU while it computes, `prefetch` of them ahead, and keeps the host's
    memory until its copy is done. With 0, each is copied in its step, on the stream that computes. `decode` replaces
    copying.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        ahead: Callable[[], Batch | None],
        device: torch.device,
        prefetch: int,
        decode: Decode | None = None,
    ) -> None:
        self._batches, self._ahead, self._device, self._prefetch = batches, ahead, device, prefetch
        self._decode = decode
        self._stream = torch.cuda.Stream(device) if prefetch else None  # type: ignore[no-untyped-call]
        self._coming: deque[tuple[object, Batch, torch.cuda.Event | None]] = deque()
        """Source and result of each copy, and the event of its end; None if nothing was copied."""
        self._copying: deque[tuple[object, torch.cuda.Event]] = deque()  # sources that copies may still read
        self._batch: Batch = {}
        self._copies = self._copies_ahead = 0

    def fetch(self) -> None:
        """Takes the next batch; blocks until it is on the host."""
        while self._copying and self._copying[0][1].query():  # type: ignore[no-untyped-call]
            self._copying.popleft()
        self._batch = next(self._batches)

    def deliver(self) -> Batch:
        """Returns the taken batch on the device; later work of the current stream may read it."""
        batch, self._batch = self._batch, {}
        if not self._coming:
            self._copy(batch)
        source, moved, copied = self._coming.popleft()
        if copied is None:
            return moved
        compute = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            compute.wait_event(copied)
            for tensor in moved.values():
                # Its memory belongs to the copy stream, which must not reuse it before the step has ended.
                tensor.record_stream(compute)
        self._copying.append((source, copied))
        return moved

    def look_ahead(self) -> bool:
        """Starts copies of next batches; blocks until they are on the host. Returns whether there were any."""
        has_copied = False
        while len(self._coming) < self._prefetch:
            batch = self._ahead()
            if batch is None:
                break
            before = self._copies
            self._copy(batch)
            self._copies_ahead += self._copies - before
            has_copied = True
        return has_copied

    def _copy(self, host: Batch) -> None:
        if all(tensor.device == self._device for tensor in host.values()):
            self._coming.append((host, host, None))
            return
        # None: the current stream.
        with torch.cuda.stream(self._stream):
            source: object = host
            if self._decode is None:
                moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in host.items()}
            else:
                moved, decoded = self._decode(host)
                source = (host, decoded)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
        self._coming.append((source, moved, copied))
        self._copies += 1

    def settings(self) -> list[Setting]:
        if not self._copies:
            effective, evidence = None, "samples are on the GPU, so that nothing is copied"
        else:
            effective = self._prefetch if self._copies_ahead else 0
            evidence = f"{self._copies_ahead} of {self._copies} batches were copied on a separate stream"
        return [Setting(key=_KEY, requested=self._prefetch, effective=effective, evidence=evidence)]
