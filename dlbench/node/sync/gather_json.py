"""Plain values of all ranks, gathered as JSON bytes in tensors.

Not by the libraries' own functions for objects (`all_gather_object`, `allgather_object`): those unpickle what the other
ranks send, so that who gets into one rank's place runs code in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import RunError

MAX_BYTES = 2**30
"""Of one rank's value; more is a mistake, or nonsense from the network."""


def gather_json(value: Any, num_ranks: int, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """`value` of every rank, by rank; tuples come back as lists, keys as text.

    Args:
        value: what JSON can hold, and numbers that are not finite.
        num_ranks: of the run.
        all_gather: makes one tensor of all ranks' equally long ones, in the order of ranks; they are of int64 or uint8
            and lie on the CPU.

    Raises:
        TypeError: JSON cannot hold the value.
        RunError: a rank sent what is no value.
    """
    own = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(own)], dtype=torch.int64)).tolist()
    if len(sizes) != num_ranks or not all(0 < size <= MAX_BYTES for size in sizes):
        raise RunError(
            f"ranks sent values of {sizes[:8]} bytes to each other; expected {num_ranks} of 1 to {MAX_BYTES}"
        )
    padded = torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8)
    everyone = all_gather(padded).reshape(num_ranks, -1).numpy()
    try:
        return [json.loads(everyone[rank, :size].tobytes()) for rank, size in enumerate(sizes)]
    except ValueError:
        raise RunError("a rank sent bytes that are no JSON") from None


def gather_over_torch(value: Any, num_ranks: int, device: torch.device | None = None) -> list[Any]:
    """`gather_json` over torch.distributed's default group; `device` where its tensors must lie (None: the CPU)."""

    def all_gather(own: torch.Tensor) -> torch.Tensor:
        sent = own if device is None else own.to(device)
        found = [torch.empty_like(sent) for _ in range(num_ranks)]
        dist.all_gather(found, sent)
        return torch.cat(found).cpu()

    return gather_json(value, num_ranks, all_gather)
