"""Moments of the last steps of dlbench's own all-reduce, and the times computed from them."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dlbench.node.sync.timing import Clock

WINDOW_STEPS = 200  # Number of last steps kept: enough for medians, and a long run does not fill the memory.


@dataclass(kw_only=True)
class StepMoments:
    """The moments of one step, marks of a `Clock`; lists by message are in the order of sending."""

    begin: Any  # Start of the backward pass.
    gradients: list[Any]  # When each gradient was ready, by number of the parameter; all None if not recorded.
    ready: list[Any]  # When the last gradient of each message was ready.
    start: list[Any]
    end: list[Any]
    methods: list[str] = field(default_factory=list)  # Method of each message, e.g. flat.
    carried: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """When parts of each message were given to the carrier and came back; none for fp32, which needs no packing."""
    backward_end: Any = None  # When the last gradient of all was ready.

    @property
    def has_gradients(self) -> bool:
        return all(mark is not None for mark in self.gradients)

    def gradient_times(self, clock: Clock) -> list[float]:
        return [clock.between(self.begin, mark) for mark in self.gradients]

    def marks(self) -> list[Any]:
        """Returns all marks once: the last gradient's mark is also that of its message and of the backward pass."""
        marks = [self.begin, *self.gradients, *self.ready, *self.start, *self.end, self.backward_end]
        for intervals in self.carried:
            marks += itertools.chain.from_iterable(intervals)
        return list({id(mark): mark for mark in marks if mark is not None}.values())


def gradient_times(steps: Iterable[StepMoments], clock: Clock) -> list[float]:
    """Returns the median time at which each parameter's gradient was ready, in seconds; empty if never recorded."""
    times_by_step = [step.gradient_times(clock) for step in steps if step.has_gradients]
    return [statistics.median(times) for times in zip(*times_by_step, strict=True)]


@dataclass(kw_only=True)
class ExchangeMoments:
    """The last steps with one grouping of gradients into messages."""

    clock: Clock
    steps: deque[StepMoments] = field(default_factory=deque)

    def add(self, step: StepMoments) -> None:
        """Adds a step and drops the oldest of `WINDOW_STEPS`, whose marks can be used again."""
        if len(self.steps) == WINDOW_STEPS:
            oldest = self.steps.popleft()
            if not oldest.has_gradients:  # the engine keeps watched steps, too
                self.clock.give_back(oldest.marks())
        self.steps.append(step)

    def messages(self) -> list[dict[str, float]]:
        """Returns medians of each message, in seconds, as fields of `Message`; none before the first step."""
        if not self.steps:
            return []
        between = self.clock.between
        messages = []
        for number in range(len(self.steps[0].ready)):
            ready_s = [between(step.begin, step.ready[number]) for step in self.steps]
            start_s = [between(step.begin, step.start[number]) for step in self.steps]
            exchange_s = [between(step.start[number], step.end[number]) for step in self.steps]
            times = {"ready_s": ready_s, "start_s": start_s, "exchange_s": exchange_s}
            messages.append({key: statistics.median(seconds) for key, seconds in times.items()})
        return messages

    def sums(self) -> dict[str, float]:
        """Returns medians over steps, in seconds, as fields of `ExchangeResult`; packing and merging if any."""
        times_of_steps = [self._step(step) for step in self.steps]
        times = {}
        for key in times_of_steps[0]:
            times[key] = statistics.median(step_times[key] for step_times in times_of_steps)
        # The difference of medians, not the median of differences: exposed and hidden part add up to the total.
        times["hidden_s"] = times["communication_s"] - times["exposed_s"]
        return times

    def _step(self, step: StepMoments) -> dict[str, float]:
        """Returns the times of one step. One thread exchanges, so messages do not overlap each other."""
        between = self.clock.between
        backward_s = between(step.begin, step.backward_end)
        total_s = exposed_s = 0.0
        for start, end in zip(step.start, step.end, strict=True):
            start_s, end_s = between(step.begin, start), between(step.begin, end)
            total_s += end_s - start_s
            exposed_s += max(0.0, end_s - max(start_s, backward_s))
        times = {"communication_s": total_s, "exposed_s": exposed_s, "backward_s": backward_s}
        if any(step.carried):
            times["packing_s"] = times["merging_s"] = 0.0
            for start, end, ((sent, received), *later) in zip(step.start, step.end, step.carried, strict=True):
                times["packing_s"] += between(start, sent)
                times["merging_s"] += between(received, end) - sum(itertools.starmap(between, later))
        return times
