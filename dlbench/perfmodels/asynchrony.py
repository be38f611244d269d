"""Emulates the clocks of workers that train synchronously, asynchronously, or with bounded staleness.

Emulated are compute times, drawn with replacement from recorded steps, and one recorded exchange whenever a worker
starts at its bound: after it waited for others, or at the pace of all. Not emulated are a server, contention, and the
time of messages that nobody waits for. So times of asp, and of ssp below its bound, are lower limits.

Stale synchronous parallel (Ho et al. 2013): a worker may start clock c only if c - min(clocks) <= s, and then sees all
updates of clocks <= c - s - 1 and all its own; here also all others that have arrived.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.specs.engine import EmulatedSettings

WorkTime = Callable[[int], float]  # Returns the next compute time of a worker, seconds.
_ENDS, _STARTS = 0, 1  # Of events at one time, gradients arrive before workers read.


@dataclass(frozen=True, kw_only=True)
class ClockEvent:
    """A moment of emulated time: a worker starts a gradient, an update is made, or a late gradient is dropped."""

    seconds: float
    starts: int | None = None  # Worker that reads the newest weights.
    applied: Mapping[int, int] = field(default_factory=dict)
    """Staleness of the gradients of one update, by worker: clocks that it was ahead of the slowest."""
    dropped: int | None = None  # Worker whose gradient came after its update.


def drawn_times(work_s: Sequence[Sequence[float]], seed: str) -> WorkTime:
    """Returns draws from recorded times by rank: worker w has those of rank w modulo their number. Each worker has its
    own random numbers, so that its k-th time is the same under all policies.
    """
    generators: dict[int, random.Random] = {}

    def next_time(worker: int) -> float:
        generator = generators.setdefault(worker, random.Random(f"{seed} {worker}"))
        return generator.choice(work_s[worker % len(work_s)])

    return next_time


def emulate(settings: EmulatedSettings, workers: int, work_time: WorkTime) -> Iterator[ClockEvent]:
    """Yields what happens, in order of time and then of worker, without end."""
    team_size = settings.group_size if settings.policy == "groups" else workers
    bound = math.inf if settings.policy == "asp" else settings.bound or 0
    clocks, staleness = [0] * workers, [0] * workers
    arrived: set[int] = set()
    waiting: set[int] = set()
    late: set[int] = set()  # Workers whose update was made without their gradient.
    queue = [(0.0, _STARTS, worker) for worker in range(workers)]
    while True:
        seconds, kind, worker = heapq.heappop(queue)
        if kind == _STARTS:
            staleness[worker] = clocks[worker] - min(clocks)
            yield ClockEvent(seconds=seconds, starts=worker)
            heapq.heappush(queue, (seconds + work_time(worker), _ENDS, worker))
            continue
        if worker in late:
            late.remove(worker)
            yield ClockEvent(seconds=seconds, dropped=worker)
            heapq.heappush(queue, (seconds, _STARTS, worker))
            continue
        first = worker - worker % team_size
        team = range(first, first + team_size)
        clocks[worker] += 1
        arrived.add(worker)
        waiting.add(worker)
        of_team = sorted(arrived.intersection(team))
        if len(of_team) == settings.quorum(workers):
            yield ClockEvent(seconds=seconds, applied={number: staleness[number] for number in of_team})
            arrived.difference_update(team)
            if bound == 0:
                behind = [number for number in team if clocks[number] < clocks[worker]]
                late.update(behind)
                for number in behind:
                    clocks[number] += 1
        slowest = min(clocks[number] for number in team)
        for number in sorted(waiting.intersection(team)):
            lead = clocks[number] - slowest
            if lead <= bound:
                waiting.remove(number)
                wait_s = settings.exchange_s if lead == bound else 0.0
                heapq.heappush(queue, (seconds + wait_s, _STARTS, number))
