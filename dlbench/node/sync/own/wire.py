"""What gradients look like on the wire: as they are, as 16-bit numbers, or only their largest entries.

A vector of gradients goes in, its sum over ranks comes out; in between it travels by whatever exchange is planned.
Which gradients travel together is decided by the caller, and PowerSGD is left to DDP's own hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dlbench.errors import UserError
from dlbench.node.sync.overflow import OverflowCount
from dlbench.node.sync.own.groups import Group
from dlbench.node.sync.own.topk import TopkWire
from dlbench.specs.sync import Wire

DenseSum = Callable[[torch.Tensor], None]
"""Sums a contiguous one-dimensional tensor of any floating type in place over all ranks; returns when it is done."""


class WireFormat(Protocol):
    """One format. All ranks exchange the same buckets in the same order."""

    name: str
    """As in `sync.wire`."""
    dense_switches: int
    """Sparse messages of the whole run that were sent dense because that took fewer bytes."""

    @property
    def overflows(self) -> int:
        """Messages of the whole run whose sum left the range of fp16 although this rank's gradients were finite.

        Waits for the device. Over ranks the least counts (`OverflowCount`).
        """

    @property
    def density(self) -> float | None:
        """Share of non-zero entries in all sums of sparse messages so far; None where nothing is sparse."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element on the wire: a flat exchange sends 2 (p-1)/p x elements x this a rank, of p ranks."""

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Says which tensors (name, elements) make up each bucket from now on; what is kept by tensor stays."""

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: Group) -> None:
        """`vector` (fp32, one-dimensional; divided by the number of ranks) becomes the sum over ranks.

        `number` is the bucket's position in the layout.
        """


class PlainWire:
    """Gradients as they are."""

    name = "fp32"
    overflows = 0
    dense_switches = 0
    density = None
    bytes_per_element = 4.0

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Nothing is kept."""

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: Group) -> None:
        """The planned exchange itself."""
        dense(vector)


class NarrowWire:
    """Gradients cast to a 16-bit type and summed in it (or wider, where what carries them does so)."""

    dense_switches = 0
    density = None
    bytes_per_element = 2.0

    def __init__(self, name: Wire, dtype: torch.dtype) -> None:
        """`dtype` is the type on the wire."""
        self.name: str = name
        self._overflow = OverflowCount()
        self._dtype = dtype
        self._buffer: torch.Tensor | None = None

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Nothing is kept."""

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: Group) -> None:
        """Casts, sums and casts back. fp16 ends at 65504: a sum that is not finite is found by reading it once more."""
        narrow = self._narrow(vector)
        slot = self._overflow.begin(vector) if self._dtype == torch.float16 else None
        narrow.copy_(vector)
        dense(narrow)
        if self._dtype == torch.float16:
            self._overflow.end(slot, narrow, lambda: [vector])
            self._overflow.settle_step()
        vector.copy_(narrow)

    @property
    def overflows(self) -> int:
        return self._overflow.total

    def _narrow(self, vector: torch.Tensor) -> torch.Tensor:
        """Room for the cast vector; reused, because memory that is touched for the first time is slow."""
        if self._buffer is None or self._buffer.numel() < vector.numel() or self._buffer.device != vector.device:
            self._buffer = torch.empty(vector.numel(), dtype=self._dtype, device=vector.device)
        return self._buffer[: vector.numel()]


def build_wire(name: Wire, *, density: float, world_size: int) -> WireFormat:
    """The format `sync.wire` names; `density` is for topk, of `world_size` ranks.

    Raises:
        UserError: powersgd, which is no format of vectors.
    """
    if name == "fp32":
        return PlainWire()
    if name == "fp16":
        return NarrowWire(name, torch.float16)
    if name == "bf16":
        return NarrowWire(name, torch.bfloat16)
    if name == "topk":
        return TopkWire(density, world_size)
    raise UserError(f"sync.wire {name}: is a hook of DDP; use --engine ddp with sync.exchange flat and fusion auto")
