"""Emulates the clocks of workers that train synchronously, asynchronously, or with bounded staleness.

Emulated are the workers' compute times, drawn with replacement from recorded steps, and one recorded exchange whenever
a worker starts at its bound, i.e. after it had to wait for others. Not emulated are a server, the network of
asynchronous messages (they arrive at once and free of charge) and contention. So times of asp, and of ssp below its
bound, are lower limits.

Stale synchronous parallel (Ho et al. 2013): a worker may start clock c only if c - min(clocks) <= s. It sees all
updates of clocks <= c - s - 1 and all its own, here also all others that have arrived.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlbench.specs.engine import EmulatedSettings

WorkTime = Callable[[int], float]  # Returns the next compute time of a worker, seconds.


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A rule for when workers may start, and how many gradients make an update."""

    team_size: int  # Neighbouring workers that wait for each other; a divisor of their number.
    quorum: int  # Gradients of a team that make an update.
    bound: float  # Clocks that a worker may be ahead of the slowest of its team.


class Gradient(NamedTuple):
    """A gradient and the age of the weights at which it was taken."""

    worker: int
    clocks: int  # Clocks between its worker's and the slowest worker's when it was started: updates it lacks.
    updates: int  # Updates of all workers between its start and its own.


@dataclass(frozen=True, kw_only=True)
class Event:
    """A moment of emulated time: a worker starts a gradient, gradients are applied, or a late one is dropped."""

    seconds: float
    starts: int | None = None  # Worker that reads the newest weights.
    applied: tuple[Gradient, ...] = ()  # Gradients of one update, by worker.
    dropped: int | None = None  # Worker whose gradient came after its update.


def policy_of(settings: EmulatedSettings, workers: int) -> Policy:
    """Returns the policy of some workers."""
    if settings.policy == "groups":
        return Policy(team_size=settings.group_size, quorum=settings.group_size, bound=0)
    if settings.policy == "backup":
        return Policy(team_size=workers, quorum=settings.waited_for(workers), bound=0)
    bound = {"bsp": 0, "asp": math.inf, "ssp": settings.staleness}[settings.policy]
    # All gradients of a clock arrive before the next starts only if the bound is 0.
    quorum = 1 if bound else workers
    return Policy(team_size=workers, quorum=quorum, bound=bound)


def drawn_times(work_s: Sequence[Sequence[float]], seed: str) -> WorkTime:
    """Returns draws from recorded times by rank: worker w has those of rank w modulo their number.

    Each worker has its own random numbers, so that its k-th time is the same under all policies.
    """
    generators: dict[int, random.Random] = {}

    def next_time(worker: int) -> float:
        generator = generators.setdefault(worker, random.Random(f"{seed} {worker}"))
        return generator.choice(work_s[worker % len(work_s)])

    return next_time


_ENDS, _STARTS = 0, 1  # Of events at one time, gradients arrive before workers read.


def emulate(policy: Policy, workers: int, work_time: WorkTime, exchange_s: float) -> Iterator[Event]:
    """Yields what happens, in order of time and then of worker, without end."""
    clocks, versions = [0] * workers, [0] * workers
    lacking = [0] * workers  # `Gradient.clocks` of the gradients in work.
    arrived: list[int] = []
    waiting: set[int] = set()
    late: set[int] = set()  # Workers whose update was made without their gradient.
    num_updates = 0
    queue = [(0.0, _STARTS, worker) for worker in range(workers)]
    while True:
        seconds, kind, worker = heapq.heappop(queue)
        if kind == _STARTS:
            versions[worker], lacking[worker] = num_updates, clocks[worker] - min(clocks)
            yield Event(seconds=seconds, starts=worker)
            heapq.heappush(queue, (seconds + work_time(worker), _ENDS, worker))
            continue
        if worker in late:
            late.remove(worker)
            yield Event(seconds=seconds, dropped=worker)
            heapq.heappush(queue, (seconds, _STARTS, worker))
            continue
        first = worker - worker % policy.team_size
        team = range(first, first + policy.team_size)
        clocks[worker] += 1
        arrived.append(worker)
        waiting.add(worker)
        of_team = sorted(set(arrived).intersection(team))
        if len(of_team) == policy.quorum:
            gradients = [Gradient(number, lacking[number], num_updates - versions[number]) for number in of_team]
            yield Event(seconds=seconds, applied=tuple(gradients))
            num_updates += 1
            arrived = [number for number in arrived if number not in team]
            for number in team:
                if policy.bound == 0 and clocks[number] < clocks[worker]:
                    clocks[number] += 1
                    late.add(number)
        slowest = min(clocks[number] for number in team)
        for number in sorted(waiting.intersection(team)):
            lead = clocks[number] - slowest
            if lead <= policy.bound:
                waiting.remove(number)
                start_s = seconds
                if lead == policy.bound:
                    start_s += exchange_s
                heapq.heappush(queue, (start_s, _STARTS, number))
