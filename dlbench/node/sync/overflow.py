"""Sums that left the range of fp16 on the wire, told from gradients that were not finite before.

On a GPU nothing is waited for and little is launched: the greatest magnitude of what goes out and of what comes back is
left in a slot of device memory, one kernel each for a message, and slots are counted many at a time. (An infinity or a
NaN goes through a maximum of magnitudes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

SLOTS = 512
"""Messages between two countings."""

_INFINITY = float("inf")


class OverflowCount:
    """Counts on one rank; a sum is the same on all ranks, what went into it is not.

    A rank counts a sum that is not finite if its own share was. Over ranks the least count holds: a rank whose own
    gradient had overflowed before the exchange does not count it.
    """

    def __init__(self) -> None:
        self._count: torch.Tensor | int = 0
        self._slots: torch.Tensor | None = None
        self._used = 0

    def begin(self, own: torch.Tensor) -> int | None:
        """Before a message is cast; for `end`. On a CPU nothing is read yet.

        Args:
            own: this rank's share in fp32, one-dimensional.
        """
        if own.device.type == "cpu":
            return None
        if self._slots is None:
            self._slots = torch.zeros(2, SLOTS, device=own.device)
        if self._used == SLOTS:
            raise ValueError(f"more than {SLOTS} messages between two calls of settle_step")
        slot = self._used
        self._used += 1
        torch.linalg.vector_norm(own, _INFINITY, out=self._slots[0, slot])
        return slot

    def end(self, slot: int | None, result: torch.Tensor, own: Callable[[], Sequence[torch.Tensor]]) -> None:
        """After the message, on whatever stream.

        Args:
            slot: as `begin` returned it.
            result: the sum or mean, as it was on the wire or cast back.
            own: this rank's share once more, where nothing was read yet; called only if `result` is not finite.
        """
        if slot is None:
            if not _is_finite(result) and all(map(_is_finite, own())):
                self._count += 1
            return
        assert self._slots is not None
        # Cast before the maximum is taken: an infinity of fp16 is one of fp32.
        torch.linalg.vector_norm(result, _INFINITY, dtype=torch.float32, out=self._slots[1, slot])

    def settle_step(self, least: int = SLOTS // 2) -> None:
        """Between two steps, on a stream that comes after all messages: makes room where `least` slots are used."""
        if self._used >= max(1, least):
            assert self._slots is not None
            before, after = self._slots[:, : self._used].isfinite()
            self._count = self._count + (before & ~after).sum()
            self._used = 0

    def count_all(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Many sums at once, by the greatest magnitudes of each before and after (`magnitudes`)."""
        self._count = self._count + (before.isfinite() & ~after.isfinite()).sum()

    @property
    def total(self) -> int:
        """Messages so far; waits for the device, after all messages."""
        self.settle_step(least=1)
        return int(self._count)


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The greatest magnitude of each tensor, (len(tensors),); infinite or NaN where an entry is."""
    return torch.stack(torch._foreach_norm(list(tensors), _INFINITY))


class CheckedFp16:
    """An fp16 compressor of Horovod for CPUs, which looks at every result for an overflow."""

    def __init__(self, inner: Any, overflow: OverflowCount) -> None:
        self._inner = inner
        self._overflow = overflow

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor in fp16; the context keeps what it was."""
        narrow, context = self._inner.compress(tensor)
        return narrow, (context, tensor)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Back in its type. Until then the gradient itself is still this rank's own."""
        inner, own = context
        result: torch.Tensor = self._inner.decompress(tensor, inner)
        self._overflow.end(None, result, lambda: [own])
        return result


def _is_finite(tensor: torch.Tensor) -> bool:
    """Of a tensor on a CPU: whether no entry is infinite or NaN, without a temporary of its size."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)  # NaN goes through
    return math.isfinite(low.item()) and math.isfinite(high.item())
