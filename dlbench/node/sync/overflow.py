"""Sums that left the range of fp16 on the wire, told from gradients that were not finite before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class OverflowCount:
    """Counts on one rank; a sum is the same on all ranks, what went into it is not.

    A rank counts a sum that is not finite if its own share was. Over ranks the least count holds: a rank whose own
    gradient had overflowed before the exchange does not count it.
    """

    def __init__(self) -> None:
        self._count: torch.Tensor | None = None

    def look(self, result: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
        """After one message.

        Args:
            result: the sum or mean, cast back to fp32.
            own: this rank's gradients in fp32, from before they were cast. Read only if `result` is not finite, or on
                a GPU, where asking would wait for the device.
        """
        is_bad = ~_is_finite(result)
        if result.device.type == "cpu" and not is_bad:
            return
        was_good = torch.stack([_is_finite(tensor) for tensor in own]).all()
        found = (is_bad & was_good).long()
        self._count = found if self._count is None else self._count + found

    @property
    def total(self) -> int:
        """Messages so far."""
        return 0 if self._count is None else int(self._count.item())


class CheckedFp16:
    """An fp16 compressor of Horovod, which looks at every result for an overflow."""

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
        self._overflow.look(result, [own])
        return result


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether no entry is infinite or NaN, without a temporary of its size: NaN goes through a minimum."""
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()
