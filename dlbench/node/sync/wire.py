"""What gradients look like on the wire: as they are, as 16-bit numbers, or only their largest entries.

topk sends the largest entries of a bucket, and the rest waits. Error feedback (Stich et al. 2018, "Sparsified SGD with
memory"): e <- e + g; send the k largest of |e|; e <- e - sent. Nothing is lost, it comes later; without it training
stalls.

Messages of all ranks are gathered as (int32 index, fp32 value) pairs and added in the order of ranks, so that every
rank adds the same numbers in the same order and parameters stay equal. Gathering sends (p-1) k 8 bytes per rank;
summing the sparse vector as a dense one sends 2 (p-1)/p n 4 in a ring; whichever is less is done, that is, dense from
p k > n on. SparCML (SC'19) has delta = n/2: pairs take 8 bytes and values 4; here it is n, because a ring sends each
value twice, to sum it and to spread the sum. It depends on n, k and p alone, so all ranks decide alike.

Sums that left the range of fp16 are counted apart from gradients that were not finite before. On a GPU nothing is
waited for and little is launched: the greatest magnitude of what goes out and of what comes back is left in a slot of
device memory, one kernel each for a message, and slots are counted many at a time. (An infinity or a NaN goes through a
maximum of magnitudes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlbench.errors import UserError
from dlbench.node.sync.groups import RankGroup
from dlbench.specs.sync import Wire

DenseSum = Callable[[torch.Tensor], None]
"""Sums a contiguous one-dimensional tensor of any floating type in place over all ranks; returns when it is done."""

VALUE_BYTES = 4
PAIR_BYTES = 8  # An int32 index and an fp32 value.
SLOTS = 512  # Messages between two countings.
_INFINITY = float("inf")


class WireFormat:
    """One format; all ranks exchange the same buckets in the same order. By default gradients travel as they are."""

    name = "fp32"  # As in `sync.wire`.
    dense_switches = 0  # Sparse messages of the whole run that were sent dense because that took fewer bytes.
    carrying: Callable[[], AbstractContextManager[object]] = nullcontext
    """Held while a message is the carrier's: what comes before is packing (choosing, casting), behind it merging."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element on the wire: a flat all-reduce sends 2 (p-1)/p x elements x this per rank, of p ranks."""
        return 4.0

    @property
    def overflows(self) -> int:
        """Messages of the whole run whose sum left the range of fp16 although this rank's gradients were finite. Waits
        for the device. Over ranks the least counts (`OverflowCount`).
        """
        return 0

    @property
    def density(self) -> float | None:
        """Share of non-zero entries in all sums of sparse messages so far; None where nothing is sparse."""
        return None

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Says which tensors (name, elements) make up each bucket from now on; what is kept by tensor stays."""

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """`vector` (fp32, one-dimensional; divided by the number of ranks) becomes the sum over ranks. `number` is the
        bucket's position in the layout.
        """
        dense(vector)


class NarrowWire(WireFormat):
    """Gradients cast to a 16-bit type and summed in it (or wider, where what carries them does so)."""

    bytes_per_element = 2.0

    def __init__(self, name: Wire, dtype: torch.dtype) -> None:
        self.name = name
        self._overflow = OverflowCount()
        self._dtype = dtype
        self._buffer: torch.Tensor | None = None

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """Casts, sums and casts back. fp16 ends at 65504: a sum that is not finite is found by reading it once more."""
        # Room for the cast vector; reused, because memory that is touched for the first time is slow.
        if self._buffer is None or self._buffer.numel() < vector.numel() or self._buffer.device != vector.device:
            self._buffer = torch.empty(vector.numel(), dtype=self._dtype, device=vector.device)
        narrow = self._buffer[: vector.numel()]
        slot = self._overflow.begin(vector) if self._dtype == torch.float16 else None
        narrow.copy_(vector)
        with self.carrying():
            dense(narrow)
        if self._dtype == torch.float16:
            self._overflow.end(slot, narrow, lambda: [vector])
            self._overflow.settle_step()
        vector.copy_(narrow)

    @property
    def overflows(self) -> int:
        return self._overflow.total


def build_wire(name: Wire, *, density: float, world_size: int) -> WireFormat:
    """The format `sync.wire` names; `density` is for topk, of `world_size` ranks."""
    if name == "fp32":
        return WireFormat()
    if name == "fp16":
        return NarrowWire(name, torch.float16)
    if name == "bf16":
        return NarrowWire(name, torch.bfloat16)
    if name == "topk":
        return TopkWire(density, world_size)
    raise UserError(f"sync.wire {name}: is a hook of DDP; use --engine ddp with sync.exchange flat and fusion auto")


def entries_to_send(elements: int, density: float) -> int:
    """Entries of a bucket that are sent, k: max(1, ceil(density x elements)), and no more than there are."""
    return min(elements, max(1, math.ceil(density * elements)))


def is_dense_cheaper(elements: int, entries: int, world_size: int) -> bool:
    """Whether a dense ring sends fewer bytes per rank than gathering this many entries of each; equal stays sparse. 2
    (p-1)/p n 4 < (p-1) k 8, with p - 1 and the fraction cancelled.
    """
    return 2 * elements * VALUE_BYTES < world_size * entries * PAIR_BYTES


class TopkWire(WireFormat):
    """Sparse messages with error feedback.

    What is not yet sent is kept by the name of its tensor, so it survives other buckets. It is not part of checkpoints.

    Gradients that are not finite are not fed back: such entries count as the largest, so they are sent and every rank
    sees them in the sum, but what waits stays as it was before. The step is lost, as for dense gradients; a NaN that
    stayed would spoil all later ones.
    """

    name = "topk"

    def __init__(self, density: float, world_size: int) -> None:
        """`density` is the share of a bucket's entries that a rank sends (0 to 1]."""
        self._share = density
        self._world_size = world_size
        self._layout: list[list[tuple[str, int]]] = []
        self._waiting: dict[int, torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}
        self._elements = 0
        self._wire_bytes = 0.0
        # On the device of the gradients: the host must not wait for a count that is read once per run.
        self._nonzero: torch.Tensor | None = None
        self.dense_switches = 0

    @property
    def density(self) -> float | None:
        return None if self._nonzero is None else int(self._nonzero.item()) / self._elements

    @property
    def bytes_per_element(self) -> float:
        """Mean over elements: 4 in a dense message, 4 p k / n in a gathered one, as in a ring of values so wide. Before
        the first exchange: 4.
        """
        return self._wire_bytes / self._elements if self._elements else float(VALUE_BYTES)

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        self._by_name = self.waiting()
        self._waiting = {}
        self._layout = [list(bucket) for bucket in layout]

    def waiting(self) -> dict[str, torch.Tensor]:
        """What is not yet sent, by tensor (flat views); tensors that were never exchanged are left out."""
        pieces = dict(self._by_name)
        for number, flat in self._waiting.items():
            bucket = self._layout[number]
            split = torch.split(flat, [size for _, size in bucket])
            pieces.update((name, piece) for (name, _), piece in zip(bucket, split, strict=True))
        return pieces

    def exchange(
        self, number: int, vector: torch.Tensor, dense: Callable[[torch.Tensor], None], world: RankGroup
    ) -> None:
        """Sends the largest entries of gradient and rest together; `vector` becomes the sum of what all ranks sent."""
        rest = self._rest(number, vector)
        elements = vector.numel()
        entries = entries_to_send(elements, self._share)
        vector.add_(rest)
        indices = torch.topk(vector.abs(), entries, sorted=False).indices
        values = vector[indices]
        # What is not sent waits in `rest`, which stays as it was where something is not finite.
        is_finite = torch.isfinite(values).all()
        if vector.device.type == "cpu":
            if is_finite:
                rest.copy_(vector).index_fill_(0, indices, 0.0)
        else:  # the host must not wait for the answer
            torch.where(is_finite, vector.index_fill(0, indices, 0.0), rest, out=rest)
        vector.zero_()
        if is_dense_cheaper(elements, entries, self._world_size):
            vector[indices] = values
            with self.carrying():
                dense(vector)
            self.dense_switches += 1
            self._wire_bytes += VALUE_BYTES * elements
        else:
            # Indices and values travel as one message, for one start-up.
            message = torch.cat([indices.to(torch.int32), values.view(torch.int32)])
            with self.carrying():
                gathered = world.gather_all(message)
            for other in gathered:
                places, numbers = other.chunk(2)
                vector.index_add_(0, places, numbers.view(torch.float32))
            self._wire_bytes += PAIR_BYTES * entries * self._world_size / 2
        self._elements += elements
        nonzero = torch.count_nonzero(vector)
        self._nonzero = nonzero if self._nonzero is None else self._nonzero + nonzero

    def _rest(self, number: int, vector: torch.Tensor) -> torch.Tensor:
        """What waits of a bucket, as one flat tensor; zeros at first."""
        bucket = self._layout[number]
        if vector.numel() >= 2**31:
            raise ValueError(f"bucket {number} has {vector.numel()} elements, 2^31 or more")
        if number not in self._waiting:
            pieces = [self._by_name.pop(name, None) for name, _ in bucket]
            self._waiting[number] = torch.cat(
                [
                    torch.zeros(size, dtype=vector.dtype, device=vector.device) if piece is None else piece
                    for piece, (_, size) in zip(pieces, bucket, strict=True)
                ]
            )
        return self._waiting[number]


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
        """Before a message is cast; for `end`. On a CPU nothing is read yet. `own`: this rank's share in fp32."""
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
        """After the message, on whatever stream. `result`: the sum or mean, as it was on the wire or cast back. `own`:
        this rank's share once more, where nothing was read yet; called only if `result` is not finite.
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
