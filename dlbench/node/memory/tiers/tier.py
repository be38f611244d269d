"""What every far tier does: take the bytes of a storage away, and bring them back.

Transfers out run one after the other in the order in which they were asked for, and so do transfers in; both beside the
computation, on a thread (file) or a stream (GPU) of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Transfer:
    """One transfer as it ran, in CLOCK_MONOTONIC."""

    is_out: bool
    block: int
    num_bytes: int
    start_ns: int
    end_ns: int


class Tier(Protocol):
    """A far tier of one rank.

    A ticket stands for the bytes of one storage from `swap_out` to `discard`; what it is, only the tier knows. After a
    transfer failed, every call raises the same `RunError`; nothing waits for a transfer that cannot end.
    """

    @property
    def words(self) -> str:
        """Where swapped tensors are, for records, e.g. `file in /local, direct I/O`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of it, each as one sentence."""

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> Any:
        """Starts to take a storage's bytes away, when all work ordered so far is done; returns its ticket.

        The ticket holds the storage until its bytes are away.
        """

    def is_out(self, ticket: Any) -> bool:
        """Whether the bytes are away and the memory is free; never waits."""

    def wait_out(self, ticket: Any) -> None:
        """What is ordered from now on has the memory: waits for the transfer (a GPU's stream waits, not the host)."""

    def recall(self, ticket: Any) -> torch.UntypedStorage | None:
        """The storage, if its bytes have not left yet: they stay, and the ticket is done with. None: they are away."""

    def swap_in(self, ticket: Any, block: int) -> None:
        """Starts to bring the bytes back, after they are away."""

    def take(self, ticket: Any) -> torch.UntypedStorage:
        """The storage that came back; waits for it as `wait_out` does. After `swap_in`."""

    def is_in(self, ticket: Any) -> bool:
        """Whether `take` would not wait."""

    def discard(self, ticket: Any) -> None:
        """The ticket's place in the tier is free again; at any time, once."""

    def watch(self, watching: bool) -> None:
        """Begins or ends noting each transfer's time."""

    def take_transfers(self) -> list[Transfer]:
        """Those noted since, oldest first; waits for none that runs (GPU: waits for the device)."""

    def close(self) -> None:
        """Ends threads and gives everything back; twice does no harm."""
