"""What carries the messages of a schedule: one protocol, and the counters that tell what was really sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SEGMENT_BYTES = 1024 * 1024
"""Longer messages travel in segments of so much, so that one is summed up while the next arrives."""


@dataclass(slots=True)
class Counters:
    """What one rank sent, counted when it was handed to the library.

    A message is one transfer of the schedule, in however many segments it travels: that is what the closed forms of the
    algorithms count. Bytes are those of the segments.
    """

    steps: int = 0
    """Steps gone through, also those without a message of this rank: steps of all ranks correspond."""
    messages: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0
    """Those that left the group of the sender."""

    def reset(self) -> None:
        """Back to zero."""
        self.steps = self.messages = self.bytes_sent = self.bytes_across = 0


@dataclass(slots=True)
class Part:
    """A message, or a segment of one: a run of elements in memory, and the rank at the other end."""

    handle: Any
    """The run of elements as `Transport.wrap` made it."""
    peer: int
    tag: int
    num_bytes: int
    is_across: bool
    """Whether it leaves the group."""
    opens: bool
    """Whether it is the first segment of its message."""


class Transport(Protocol):
    """Messages between two ranks. Errors end the use of a transport: none of it works afterwards."""

    rank: int
    size: int
    group_size: int
    carrier: str
    """What moves the bytes, e.g. torch-gloo."""
    segment_bytes: int | None
    """Longest segment; None if messages travel whole."""
    early: bool
    """Whether receives may be posted before this rank comes to their step."""
    counters: Counters

    def wrap(self, run: torch.Tensor) -> Any:
        """A contiguous run of elements as `post` takes it; made once and used in every iteration."""

    def line_up(self) -> None:
        """Waits for all ranks by what carries the messages, where that has a barrier of the host.

        Raises:
            RunError: a rank is gone or stuck.
        """

    def post(self, receives: Sequence[Part], sends: Sequence[Part]) -> tuple[list[Any], list[Any]]:
        """Begins to receive and to send, and counts what is sent; a thing to wait for, for each of them.

        Raises:
            RunError: the library refuses.
        """

    def wait(self, pending: Any, part: Part, direction: str) -> None:
        """Returns when this part is through.

        Args:
            pending: what `post` gave.
            part: the part it was given for.
            direction: `to` or `from`, for messages.

        Raises:
            RunError: the connection broke, or nothing came in time.
        """


def count_sends(counters: Counters, sends: Sequence[Part]) -> None:
    """Adds what is being sent."""
    for part in sends:
        counters.messages += part.opens
        counters.bytes_sent += part.num_bytes
        if part.is_across:
            counters.bytes_across += part.num_bytes
