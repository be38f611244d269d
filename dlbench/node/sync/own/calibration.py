"""What a message costs by the exchange in force: a few sizes timed before training, and a line through them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dlbench.costs.fit.least_errors import fit_line
from dlbench.node.sync.clocks import Clock
from dlbench.node.sync.own.groups import Group
from dlbench.node.sync.timed_samples import LEAST_SAMPLE_S
from dlbench.specs.collectives.network import LineCost

SMALLEST_BYTES = 4096
REPEATS = 5
"""Timed samples of a size, after two messages that are not: one is cold, one tells how many make a sample."""

ELEMENT_BYTES = 4


def sizes_up_to(largest_bytes: int, multiple: int) -> list[int]:
    """Elements of the vectors to time: a factor of four apart from 4 KiB to the largest, each a multiple of `multiple`.

    At least two, as a line needs.
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    sizes.append(max(largest_bytes, sizes[-1] * 4 if len(sizes) == 1 else 0))
    return sorted({-(-size // (ELEMENT_BYTES * multiple)) * multiple for size in sizes})


def calibrate(
    name: str,
    exchange: Callable[[int, torch.Tensor], object],
    counts: list[int],
    *,
    world: Group,
    clock: Clock,
    arena: torch.Tensor,
    budget_s: float,
    gather: Callable[[Any], list[Any]],
) -> LineCost:
    """The cost line of an exchange, the same on all ranks.

    A time is that of the slowest rank, from a start in step; of the repeats of a size the median. Ranks do not leave
    that start at once: short messages are timed several back to back, each in a place of the arena of its own. Larger
    sizes are left out once rank 0 has used the budget; two sizes are always timed.

    Args:
        name: of the line.
        exchange: called with the position of a size and a vector of it.
        counts: elements of the vectors, ascending; two or more.
        world: all ranks.
        clock: of the device.
        arena: where vectors lie, as those of training do; it is overwritten.
        budget_s: time to spend, seconds.
        gather: `Engine.gather`.
    """
    began = time.monotonic()
    timed: list[list[float]] = []
    for number, count in enumerate(counts):

        def sample(messages: int, number: int = number, count: int = count) -> float:
            vectors = torch.split(arena[: messages * count].normal_(), count)  # sums of sums would overflow

            def send() -> None:
                for vector in vectors:
                    exchange(number, vector)

            return _seconds(send, world, clock, arena.device) / messages

        # The last rank to start waits for nobody: its time is the message's.
        single = min(gather([sample(1), sample(1)][1]))
        messages = min(len(arena) // count, max(1, math.ceil(LEAST_SAMPLE_S / max(single, 1e-9))))
        timed.append([sample(messages) for _ in range(REPEATS)])
        is_over = world.index == 0 and time.monotonic() - began > budget_s
        if _any(world, arena.device, is_over) and number > 0:
            break
    everyone = gather(timed)
    slowest = [
        statistics.median(max(repeat) for repeat in zip(*(times[size] for times in everyone), strict=True))
        for size in range(len(timed))
    ]
    sizes = [count * ELEMENT_BYTES for count in counts[: len(timed)]]
    # Every rank fits the same numbers, and yet rank 0 decides: processors may round differently.
    line = fit_line(name, len(world.ranks), sizes, slowest)
    return LineCost.model_validate(gather(line.model_dump(mode="json"))[0])


def _seconds(send: Callable[[], None], world: Group, clock: Clock, device: torch.device) -> float:
    """Seconds of some messages, from a start in step: by the host's clock, or where it only orders work in the stream.

    There a second meeting is ordered in the stream, so that neither the way out of the first, nor launches, nor waiting
    for the device are in the time.
    """
    _in_step(world, device)
    clock.settle()
    if clock.marks_are_free:
        start = time.monotonic()
        send()
        return time.monotonic() - start
    world.sum(torch.zeros(1, device=device))
    begin = clock.mark()
    send()
    end = clock.mark()
    clock.settle()
    return clock.between(begin, end)


def _in_step(world: Group, device: torch.device) -> None:
    _any(world, device, False)


def _any(world: Group, device: torch.device, here: bool) -> bool:
    """Whether it is so on any rank; all ranks leave together."""
    flag = torch.full((1,), float(here), device=device)
    world.sum(flag)
    return flag.item() > 0
