"""What schedules are made of: transfers, steps, and the ranks and elements that a phase of an algorithm works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """A run of elements that travels."""

    peer: int
    """The other rank."""
    first: int
    """First element, in the buffer."""
    count: int
    """Elements."""


@dataclass(frozen=True)
class Step:
    """What one rank does at a time."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    reduce: bool = False
    """Whether what arrives is added (True) or put in place (False)."""
    from_input: bool = False
    """Whether sends read the untouched input instead of the working buffer (all-to-all)."""


Schedule = tuple[Step, ...]


def block(elements: int, parts: int, index: int) -> tuple[int, int]:
    """First element and number of elements of one of nearly equal parts; the first parts are the longer ones.

    Args:
        elements: of the whole, 0 or more.
        parts: into how many it is cut.
        index: which part, from 0.
    """
    share, rest = divmod(elements, parts)
    return index * share + min(index, rest), share + (index < rest)


@dataclass(frozen=True)
class Span:
    """A run of elements that a phase works on."""

    first: int
    count: int

    def part(self, parts: int, index: int) -> Span:
        """One of nearly equal parts."""
        first, count = block(self.count, parts, index)
        return Span(self.first + first, count)

    def cover(self, parts: int, low: int, high: int) -> Span:
        """Parts low, ..., high - 1 as one run."""
        first = block(self.count, parts, low)[0]
        end = block(self.count, parts, high)[0]
        return Span(self.first + first, end - first)


@dataclass(frozen=True)
class Team:
    """The ranks of a phase in order, and which of them this one is."""

    members: Sequence[int]
    index: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def rank(self, index: int) -> int:
        """The rank at a place, counted around the end."""
        return self.members[index % len(self.members)]


def moves(peer: int, *spans: Span) -> tuple[Transfer, ...]:
    """Runs of elements to or from a rank; empty runs do not travel."""
    return tuple(Transfer(peer, span.first, span.count) for span in spans if span.count)
