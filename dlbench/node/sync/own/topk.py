"""The largest entries of a bucket go on the wire, the rest waits: top-k with error feedback.

Error feedback (Stich et al. 2018, "Sparsified SGD with memory"): e <- e + g; send the k largest of |e|; e <- e - sent.
Nothing is lost, it comes later; without it training stalls.

Messages of all ranks are gathered as (int32 index, fp32 value) pairs and added in the order of ranks, so that every
rank adds the same numbers in the same order and parameters stay equal. Gathering sends (p-1) k 8 bytes per rank;
summing the sparse vector as a dense one sends 2 (p-1)/p n 4 in a ring; whichever is less is done, that is, dense from
p k > n on. SparCML (SC'19) has delta = n/2: pairs take 8 bytes and values 4; here it is n, because a ring sends each
value twice, to sum it and to spread the sum. It depends on n, k and p alone, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dlbench.node.sync.own.groups import Group

VALUE_BYTES = 4
PAIR_BYTES = 8
"""An int32 index and an fp32 value."""


def entries_to_send(elements: int, density: float) -> int:
    """Entries of a bucket that are sent, k: max(1, ceil(density x elements)), and no more than there are."""
    return min(elements, max(1, math.ceil(density * elements)))


def is_dense_cheaper(elements: int, entries: int, world_size: int) -> bool:
    """Whether a dense ring sends fewer bytes per rank than gathering so many entries of each; equal stays sparse.

    2 (p-1)/p n 4 < (p-1) k 8, with p - 1 and the fraction cancelled.
    """
    return 2 * elements * VALUE_BYTES < world_size * entries * PAIR_BYTES


class TopkWire:
    """Sparse messages with error feedback.

    What is not yet sent is kept by the name of its tensor, so it survives other buckets. It is not part of checkpoints.

    Gradients that are not finite are not fed back: such entries count as the largest, so they are sent and every rank
    sees them in the sum, but what waits stays as it was before. The step is lost, as for dense gradients; a NaN that
    stayed would spoil all later ones.
    """

    name = "topk"
    overflows = 0

    def __init__(self, density: float, world_size: int) -> None:
        """`density` is the share of a bucket's entries that a rank sends (0 to 1]."""
        self._share = density
        self._world_size = world_size
        self._layout: list[list[tuple[str, int]]] = []
        self._waiting: dict[int, torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}
        self._elements = 0
        self._wire_bytes = 0.0
        # On the device of the gradients: the host must not wait for a count that is read once a run.
        self._nonzero: torch.Tensor | None = None
        self.dense_switches = 0

    @property
    def density(self) -> float | None:
        """Non-zero entries of all sums so far over their elements; None before the first."""
        return None if self._nonzero is None else int(self._nonzero.item()) / self._elements

    @property
    def bytes_per_element(self) -> float:
        """Mean over elements: 4 in a dense message, 4 p k / n in a gathered one, as in a ring of values so wide.

        Before the first exchange: 4.
        """
        return self._wire_bytes / self._elements if self._elements else float(VALUE_BYTES)

    def reset(self, layout: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Buckets become these tensors (name, elements); needed before the first exchange too.

        Raises:
            ValueError: a name occurs twice, or a tensor that has something waiting is gone or has another size.
        """
        waiting = self.waiting()
        sizes = dict(pair for bucket in layout for pair in bucket)
        if len(sizes) != sum(len(bucket) for bucket in layout):
            raise ValueError("a tensor is named twice in the layout of buckets")
        for name, piece in waiting.items():
            if sizes.get(name) != piece.numel():
                raise ValueError(f"{name} has {piece.numel()} elements waiting, the new layout {sizes.get(name)}")
        self._by_name = waiting
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

    def exchange(self, number: int, vector: torch.Tensor, dense: Callable[[torch.Tensor], None], world: Group) -> None:
        """Sends the largest entries of gradient and rest together; `vector` becomes the sum of what all ranks sent.

        Raises:
            ValueError: the bucket is not in the layout, or not of this size.
        """
        rest = self._rest(number, vector)
        elements = vector.numel()
        entries = entries_to_send(elements, self._share)
        vector.add_(rest)
        indices = torch.topk(vector.abs(), entries, sorted=False).indices
        values = vector[indices]
        _feed_back(rest, vector, indices, values)
        vector.zero_()
        if is_dense_cheaper(elements, entries, self._world_size):
            vector[indices] = values
            dense(vector)
            self.dense_switches += 1
            self._wire_bytes += VALUE_BYTES * elements
        else:
            self._gather(indices, values, vector, world)
            self._wire_bytes += PAIR_BYTES * entries * self._world_size / 2
        self._elements += elements
        nonzero = torch.count_nonzero(vector)
        self._nonzero = nonzero if self._nonzero is None else self._nonzero + nonzero

    def _gather(self, indices: torch.Tensor, values: torch.Tensor, vector: torch.Tensor, world: Group) -> None:
        """Adds the entries of all ranks to `vector`; indices and values travel as one message, for one start-up."""
        message = torch.cat([indices.to(torch.int32), values.view(torch.int32)])
        for other in world.gather_all(message, equal=True):
            places, numbers = other.chunk(2)
            vector.index_add_(0, places, numbers.view(torch.float32))

    def _rest(self, number: int, vector: torch.Tensor) -> torch.Tensor:
        """What waits of a bucket, as one flat tensor; zeros at first."""
        if not 0 <= number < len(self._layout):
            raise ValueError(f"bucket {number} is not in the layout given by reset()")
        bucket = self._layout[number]
        if vector.numel() != sum(size for _, size in bucket) or vector.numel() >= 2**31:
            raise ValueError(
                f"bucket {number} has {vector.numel()} elements, not those of its layout, or 2^31 and more"
            )
        if number not in self._waiting:
            pieces = [self._by_name.pop(name, None) for name, _ in bucket]
            self._waiting[number] = torch.cat(
                [
                    torch.zeros(size, dtype=vector.dtype, device=vector.device) if piece is None else piece
                    for piece, (_, size) in zip(pieces, bucket, strict=True)
                ]
            )
        return self._waiting[number]


def _feed_back(rest: torch.Tensor, vector: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """What is not sent waits in `rest`, which stays as it was where something is not finite."""
    is_finite = torch.isfinite(values).all()
    if vector.device.type == "cpu":
        if is_finite:
            rest.copy_(vector).index_fill_(0, indices, 0.0)
    else:  # the host must not wait for the answer
        torch.where(is_finite, vector.index_fill(0, indices, 0.0), rest, out=rest)
