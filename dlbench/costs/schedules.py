"""Collective algorithms as schedules: who sends which elements to whom in which step.

Pure; `node.collectives` executes them.

A schedule is one rank's list of steps. In a step all sends read the buffer as it was when the step
began; what arrives is applied when all of the step's messages are through: added to the elements at
its place, or put there. A step without messages for this rank is kept, so that steps of all ranks
correspond.
"""

from __future__ import annotations

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
