"""What dlbench's own all-reduce did: moments of the last steps, settings in force, and the result of a run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dlbench.node.sync.timing import Clock

WINDOW_STEPS = 200  # Steps kept; enough for medians, and a long run does not fill the memory.


@dataclass(kw_only=True)
class StepMoments:
    """One step, as marks of a `Clock`."""

    begin: Any  # Start of the backward pass.
    gradients: list[Any]  # Ready, by number of the parameter; all None where they were not noted.
    ready: list[Any]  # Last gradient of each message, by message; in the order of sending, as all that follows.
    start: list[Any]
    end: list[Any]
    ways: list[str] = field(default_factory=list)  # How each message went.
    carried: list[tuple[Any, Any]] = field(default_factory=list)
    """When each message went to the carrier and came back; empty where gradients travel as they are."""
    backward_end: Any = None  # Last gradient of all.

    @property
    def has_gradients(self) -> bool:
        return all(mark is not None for mark in self.gradients)

    def marks(self) -> list[Any]:
        """All moments, each once: the last gradient's is also that of its message and of the backward pass."""
        found = (self.begin, *self.gradients, *self.ready, *self.start, *self.end, self.backward_end)
        found = (*found, *(mark for pair in self.carried for mark in pair))
        return list({id(mark): mark for mark in found if mark is not None}.values())


def gradient_times(steps: Iterable[StepMoments], clock: Clock) -> list[float]:
    """For each parameter the median time at which its gradient was ready, seconds; empty where it was never noted."""
    rows = [[clock.between(s.begin, mark) for mark in s.gradients] for s in steps if s.has_gradients]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@dataclass(kw_only=True)
class ExchangeMoments:
    """The kept steps of one plan of messages."""

    clock: Clock
    steps: deque[StepMoments] = field(default_factory=deque)

    def add(self, step: StepMoments) -> None:
        """Keeps one more step; the oldest makes room, and what it noted can be used again."""
        if len(self.steps) == WINDOW_STEPS:
            oldest = self.steps.popleft()
            if not oldest.has_gradients:  # a watched step is kept elsewhere, too
                self.clock.give_back(oldest.marks())
        self.steps.append(step)

    def messages(self) -> list[dict[str, float]]:
        """Medians of each message, fields of `Message`: seconds after the start of the backward pass, and its own."""
        between = self.clock.between
        return [
            {
                "ready_s": statistics.median(between(s.begin, s.ready[number]) for s in self.steps),
                "start_s": statistics.median(between(s.begin, s.start[number]) for s in self.steps),
                "exchange_s": statistics.median(between(s.start[number], s.end[number]) for s in self.steps),
            }
            for number in range(len(self.steps[0].ready))
        ]

    def sums(self) -> dict[str, float]:
        """Medians over steps, fields of `ExchangeResult`, seconds: communication, its parts after the backward pass
        (exposed) and within (hidden), and the backward pass; of it packing and merging, where messages are packed.
        """
        total, exposed, backward, *apart = map(statistics.median, zip(*map(self._step, self.steps), strict=True))
        # Of medians, not the median of differences: so that the two parts make the whole.
        found = {"communication_s": total, "exposed_s": exposed, "hidden_s": total - exposed}
        return {**found, "backward_s": backward, **dict(zip(("packing_s", "merging_s"), apart, strict=False))}

    def _step(self, step: StepMoments) -> tuple[float, ...]:
        """Communication, exposed part, backward pass, and where there are any packing and merging. One thread
        exchanges, so messages do not overlap each other.
        """
        between = self.clock.between
        backward = between(step.begin, step.backward_end)
        total = exposed = 0.0
        for start, end in zip(step.start, step.end, strict=True):
            first, last = between(step.begin, start), between(step.begin, end)
            total += last - first
            exposed += max(0.0, last - max(first, backward))
        packing = [between(start, out) for start, (out, _) in zip(step.start, step.carried, strict=False)]
        merging = [between(back, end) for end, (_, back) in zip(step.end, step.carried, strict=False)]
        return total, exposed, backward, *([sum(packing), sum(merging)] if step.carried else [])
