"""Wire formats of gradients: fp32, 16-bit types, 8 bits with scales (int8), or only the largest entries (topk)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlbench.errors import UserError
from dlbench.node.sync.engine import RankGroup
from dlbench.specs.sync import INT8_BLOCK, Wire

DenseSum = Callable[[torch.Tensor], None]
"""Sums a contiguous one-dimensional tensor of any floating type in place over all ranks; returns when it is done."""

VALUE_BYTES = 4
PAIR_BYTES = 8  # An int32 index and an fp32 value.
INT8_MAX = 127  # Largest magnitude of an int8 value; -128 is not used, so that both signs have the same range.
SLOTS = 512  # Largest number of messages between two countings.
_INFINITY = float("inf")


class WireFormat:
    """A format of messages, here fp32; all ranks exchange the same buckets in the same order."""

    name = "fp32"  # The value of `sync.wire`.
    method = ""  # Method of messages that are no dense sum, in records; empty: there are none.
    dense_switches = 0  # Messages of the whole run that were sent dense because that took fewer bytes.
    carrying: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context entered while the carrier has a message: before it is packing (choosing, casting), after it merging."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element on the wire: a flat all-reduce sends 2 (p-1)/p x elements x this per rank, of p ranks."""
        return 4.0

    @property
    def overflows(self) -> int:
        """Messages of the whole run whose sum left the range of fp16; waits for the device. See `OverflowCount`."""
        return 0

    @property
    def density(self) -> float | None:
        """Share of non-zero entries in all sums of sparse messages so far; None without sparse messages."""
        return None

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Sets the tensors (name, elements) of each bucket from now on; state that is kept by tensor stays."""

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """Sums `vector` (fp32, one-dimensional) over ranks in place; `number`: the bucket's position in the layout."""
        dense(vector)


class NarrowWire(WireFormat):
    """Casts gradients to a 16-bit type and sums them in it (or wider, if the carrier does so)."""

    bytes_per_element = 2.0

    def __init__(self, name: Wire, dtype: torch.dtype) -> None:
        self.name = name
        self._overflow = OverflowCount()
        self._dtype = dtype
        self._buffer: torch.Tensor | None = None

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """Casts, sums and casts back. fp16 ends at 65504: the sum is read again to count values that are not finite."""
        # The buffer is reused, because memory that is touched for the first time is slow.
        if self._buffer is None or self._buffer.numel() < vector.numel() or self._buffer.device != vector.device:
            self._buffer = torch.empty(vector.numel(), dtype=self._dtype, device=vector.device)
        narrow = self._buffer[: vector.numel()]
        is_checked = self._dtype == torch.float16
        slot: int | None = self._overflow.begin(vector) if is_checked else None
        narrow.copy_(vector)
        with self.carrying():
            dense(narrow)
        if is_checked:
            self._overflow.end(slot, narrow, lambda: [vector])
            self._overflow.settle_step()
        vector.copy_(narrow)

    @property
    def overflows(self) -> int:
        return self._overflow.total


def build_wire(name: Wire, *, density: float, world_size: int) -> WireFormat:
    """Returns the format that `sync.wire` names; `density` and `world_size` are for topk."""
    if name == "fp32":
        return WireFormat()
    if name in ("fp16", "bf16"):
        return NarrowWire(name, {"fp16": torch.float16, "bf16": torch.bfloat16}[name])
    if name == "topk":
        return TopkWire(density, world_size)
    if name == "int8":
        return Int8Wire()
    raise UserError(f"sync.wire {name}: is a hook of DDP; use --engine ddp with sync.exchange flat and fusion auto")


def entries_to_send(elements: int, density: float) -> int:
    """Returns k, the entries of a bucket that are sent: ceil(density x elements), at least 1 and at most all."""
    return min(elements, max(1, math.ceil(density * elements)))


def is_dense_cheaper(elements: int, entries: int, world_size: int) -> bool:
    """Returns whether a dense ring, 2 (p-1)/p n 4 bytes per rank, sends fewer than gathered pairs, (p-1) k 8 bytes."""
    # So from p k > n on; SparCML (SC'19) has n/2, but a ring sends each value twice.
    return 2 * elements * VALUE_BYTES < world_size * entries * PAIR_BYTES


class ErrorFeedback(WireFormat):
    """A format that sends a part of each gradient; the residual is kept by tensor, and not in checkpoints."""

    # Error feedback (Stich et al. 2018, "Sparsified SGD with memory"), without which training stalls: e <- e + g; send
    # a part of e; e <- e - sent. Gradients that are not finite are sent, and the residual stays as it was before: the
    # step is lost, as for dense gradients, but a NaN in the residual would spoil all later steps.

    first_width = float(VALUE_BYTES)  # Bytes of an element before any message was sent.

    def __init__(self) -> None:
        self._layout: list[list[tuple[str, int]]] = []
        self._residuals: dict[int, torch.Tensor] = {}  # By bucket, flat.
        self._residuals_by_name: dict[str, torch.Tensor] = {}  # Of tensors not sent since the last `reset`.
        self._elements = 0
        self._wire_bytes = 0.0
        self.dense_switches = 0

    @property
    def bytes_per_element(self) -> float:
        """Mean over the elements of all messages."""
        if not self._elements:
            return self.first_width
        return self._wire_bytes / self._elements

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        self._residuals_by_name = self.residuals()
        self._residuals = {}
        self._layout = [list(bucket) for bucket in layout]

    def residuals(self) -> dict[str, torch.Tensor]:
        """Returns the unsent parts by tensor (flat views), without tensors that were never exchanged."""
        residuals = dict(self._residuals_by_name)
        for number, flat in self._residuals.items():
            bucket = self._layout[number]
            pieces = torch.split(flat, [size for _, size in bucket])
            residuals.update((name, piece) for (name, _), piece in zip(bucket, pieces, strict=True))
        return residuals

    def _residual(self, number: int, vector: torch.Tensor) -> torch.Tensor:
        if vector.numel() >= 2**31:
            raise ValueError(f"bucket {number} has {vector.numel()} elements, 2^31 or more")
        if number not in self._residuals:
            unsent = self._residuals_by_name
            pieces = [unsent.pop(name, vector.new_zeros(size)) for name, size in self._layout[number]]
            self._residuals[number] = torch.cat(pieces)
        return self._residuals[number]

    def _send_dense(self, vector: torch.Tensor, dense: DenseSum) -> None:
        with self.carrying():
            dense(vector)
        self.dense_switches += 1
        self._wire_bytes += VALUE_BYTES * vector.numel()


class TopkWire(ErrorFeedback):
    """Sparse messages: the largest entries, with their indices. Entries that are not finite count as the largest."""

    name = "topk"
    method = "sparse"

    def __init__(self, density: float, world_size: int) -> None:
        """Takes the share of a bucket's entries that a rank sends (0 to 1]."""
        super().__init__()
        self._share = density
        self._world_size = world_size
        # On the device of the gradients: the host must not wait for a count that is read once per run.
        self._nonzero: torch.Tensor | int = 0

    @property
    def density(self) -> float | None:
        return int(self._nonzero) / self._elements if self._elements else None

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """Sends the largest entries of gradient plus residual; `vector` becomes the sum of the sent entries."""
        residual = self._residual(number, vector)
        elements = vector.numel()
        entries = entries_to_send(elements, self._share)
        vector.add_(residual)
        indices = torch.topk(vector.abs(), entries, sorted=False).indices
        values = vector[indices]
        is_finite = torch.isfinite(values).all()
        if vector.device.type == "cpu":
            if is_finite:
                residual.copy_(vector).index_fill_(0, indices, 0.0)
        else:  # the host must not wait for the answer
            torch.where(is_finite, vector.index_fill(0, indices, 0.0), residual, out=residual)
        vector.zero_()
        if is_dense_cheaper(elements, entries, self._world_size):
            vector[indices] = values
            self._send_dense(vector, dense)
        else:
            # Indices and values are one message, which has one start-up.
            message = torch.cat([indices.to(torch.int32), values.view(torch.int32)])
            with self.carrying():
                gathered = world.gather_all(message)
            for rank_message in gathered:
                rank_indices, rank_values = rank_message.chunk(2)
                vector.index_add_(0, rank_indices, rank_values.view(torch.float32))
            self._wire_bytes += PAIR_BYTES * entries * self._world_size / 2
        self._elements += elements
        self._nonzero = self._nonzero + torch.count_nonzero(vector)


class Int8Wire(ErrorFeedback):
    """Values in 8 bits with an fp32 scale per block of at most `INT8_BLOCK`; sums are made in fp32."""

    # Each rank gets its share of the message from all ranks, adds it in fp32, and sends the sum to all ranks in 8 bits:
    # 2 (p-1)/p n bytes leave a rank, as in a ring. To gather all messages on each rank would take (p-1) n bytes, more
    # than fp32 from 9 ranks on. The rank that rounds a sum feeds the error back (as servers of DoubleSqueeze do, Tang
    # et al. 2019), so that all residuals and all sums add up to the gradients.

    name = "int8"
    method = "int8"
    first_width = 1 + VALUE_BYTES / INT8_BLOCK

    def exchange(self, number: int, vector: torch.Tensor, dense: DenseSum, world: RankGroup) -> None:
        """Sends gradient plus residual in 8 bits; `vector` becomes the sum that all ranks have received."""
        residual = self._residual(number, vector)
        elements, num_ranks = vector.numel(), len(world.ranks)
        num_blocks = math.ceil(elements / (num_ranks * INT8_BLOCK))  # of the share that a rank adds
        length = math.ceil(elements / (num_ranks * num_blocks))
        message_bytes = num_ranks * num_blocks * (length + VALUE_BYTES)
        self._elements += elements
        vector.add_(residual)
        if message_bytes >= VALUE_BYTES * elements:  # a few elements, of which each would need a scale
            residual.zero_()
            self._send_dense(vector, dense)
            return
        unsent = vector.new_zeros(num_ranks * num_blocks * length)
        unsent[:elements] = vector
        unsent = unsent.view(num_ranks, num_blocks, length)
        message = in_int8(unsent)
        with self.carrying():
            received = world.all_to_all(message)
        unsent -= from_int8(message)
        share = from_int8(received).sum(0)
        message = in_int8(share)
        with self.carrying():
            sums = torch.stack(world.gather_all(message.flatten()))
        unsent[world.index] += share - from_int8(message)
        vector.copy_(from_int8(sums.view(received.shape)).flatten()[:elements])
        unsent = unsent.flatten()[:elements]
        torch.where(unsent.isfinite().all(), unsent, residual, out=residual)
        self._wire_bytes += message_bytes


def in_int8(blocks: torch.Tensor) -> torch.Tensor:
    """Returns blocks, shape (..., n), in 8 bits as bytes, shape (..., n + 4): values, then the block's fp32 scale.

    A block with a value that is not finite has no finite value afterwards.
    """
    largest = torch.linalg.vector_norm(blocks, _INFINITY, dim=-1, keepdim=True)
    # A quotient by a subnormal scale could overflow.
    scales = (largest / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    values = (blocks / scales).round_().to(torch.int8)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], -1)


def from_int8(message: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 values of `in_int8`, shape (..., n)."""
    scales = message[..., -VALUE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return message[..., :-VALUE_BYTES].view(torch.int8) * scales


class OverflowCount:
    """Counts sums beyond the range of fp16 that are not finite although this rank's share was."""

    # The smallest count of all ranks is the true one: a rank whose own gradient had overflowed does not count the sum.
    # On a GPU the host does not wait: kernels write the largest magnitude to a slot, and slots are counted later.

    def __init__(self) -> None:
        self._count: torch.Tensor | int = 0
        self._slots: torch.Tensor | None = None
        self._used = 0

    def begin(self, local_share: torch.Tensor) -> int | None:
        """Reads this rank's share in fp32 before it is cast; returns the slot for `end`, None on a CPU, read later."""
        if local_share.device.type == "cpu":
            return None
        if self._slots is None:
            self._slots = torch.zeros(2, SLOTS, device=local_share.device)
        if self._used == SLOTS:
            raise ValueError(f"more than {SLOTS} messages between two calls of settle_step")
        slot = self._used
        self._used += 1
        torch.linalg.vector_norm(local_share, _INFINITY, out=self._slots[0, slot])
        return slot

    def end(self, slot: int | None, reduced: torch.Tensor, local_share: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Reads the sum or mean after the exchange; calls `local_share` only on a CPU, if `reduced` is not finite."""
        if slot is None:
            if not _is_finite(reduced) and all(map(_is_finite, local_share())):
                self._count += 1
            return
        assert self._slots is not None
        # Cast before the maximum is taken: an infinity of fp16 is one of fp32.
        torch.linalg.vector_norm(reduced, _INFINITY, dtype=torch.float32, out=self._slots[1, slot])

    def settle_step(self, min_used: int = SLOTS // 2) -> None:
        """Counts and frees the slots if `min_used` are used; between steps, on a stream that follows all messages."""
        if self._used >= max(1, min_used):
            assert self._slots is not None
            before, after = self._slots[:, : self._used].isfinite()
            self._count = self._count + (before & ~after).sum()
            self._used = 0

    def count_all(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Counts many sums at once, by the largest magnitudes of each before and after (`magnitudes`)."""
        self._count = self._count + (before.isfinite() & ~after.isfinite()).sum()

    @property
    def total(self) -> int:
        self.settle_step(min_used=1)
        return int(self._count)


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the largest magnitude of each tensor, shape (len(tensors),); infinite or NaN if an entry is."""
    return torch.stack(torch._foreach_norm(list(tensors), _INFINITY))


class CheckedFp16:
    """An fp16 compressor of Horovod for CPUs, which checks every sum for an overflow."""

    def __init__(self, inner: Any, overflow: OverflowCount) -> None:
        self._inner = inner
        self._overflow = overflow

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        narrow, context = self._inner.compress(tensor)
        return narrow, (context, tensor)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Casts back and checks; until then the gradient itself is still this rank's own."""
        inner_context, local_gradient = context
        reduced: torch.Tensor = self._inner.decompress(tensor, inner_context)
        self._overflow.end(None, reduced, lambda: [local_gradient])
        return reduced


def _is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether no entry is infinite or NaN, for a tensor on a CPU, without a temporary of its size."""
    if tensor.numel() == 0:
        return True
    smallest, largest = torch.aminmax(tensor)  # NaN if an entry is NaN
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())
