"""One timed sample of a collective: how many operations it times, and the time that it gives over all ranks.

A barrier does not release all ranks at once: over TCP they wake some 10 us apart. Where one operation is as short as
that, several are timed back to back, as nccl-tests does, and a rank that is early waits in the first of them only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SAMPLE_S = 2e-3
"""Shortest sample: some fifty times the 15 to 40 us by which ranks were seen to leave gloo's barrier apart."""
MOST_OPERATIONS = 1000
"""Of a sample; OSU's benchmarks repeat small messages as often."""
_GROWTH = 16
"""From a trial to the next one at most: the first one, of one operation, is mostly barrier."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a sample says of one operation."""

    seconds: float
    skew_s: float
    """How far apart ranks began the sample."""


def over_ranks(
    starts_ns: Sequence[int], durations_ns: Sequence[int], operations: int, *, from_last_start: bool, one_clock: bool
) -> Timed:
    """One sample from what each rank noted.

    Args:
        starts_ns: by rank, on the rank's clock.
        durations_ns: by rank, from its start to its end.
        operations: in the sample.
        from_last_start: whether the time runs from the last rank's start to the last end, which takes one clock;
            otherwise it is the slowest rank's duration.
        one_clock: whether ranks share a clock. Otherwise starts cannot be compared: the spread of durations stands for
            theirs, since ranks that wait for each other end together, within one operation.
    """
    skew = (max(starts_ns) - min(starts_ns)) if one_clock else (max(durations_ns) - min(durations_ns))
    taken = max(durations_ns)
    if from_last_start and one_clock:
        taken = max(start + own for start, own in zip(starts_ns, durations_ns, strict=True)) - max(starts_ns)
    return Timed(seconds=taken / operations / 1e9, skew_s=skew / 1e9)


def enough_operations(seconds: float, operations: int, most: int) -> int:
    """How many operations to try, or to take, after a trial of `operations` whose sample lasted `seconds`.

    Returns:
        `operations` itself once that is long enough, or cannot be more than `most`.
    """
    if seconds >= LEAST_SAMPLE_S or operations >= most:
        return operations
    wanted = math.ceil(operations * LEAST_SAMPLE_S / seconds) if seconds > 0 else math.inf
    return int(min(most, _GROWTH * operations, max(wanted, 2 * operations)))
