"""Buckets: the gradients of one message, their buffer, the thread that exchanges messages, and times of last steps."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch

from dlbench.errors import RunError
from dlbench.node.failures import BackgroundWorker, passed_on
from dlbench.node.sync.timing import Clock
from dlbench.units import counted

ALIGNMENT = 16  # Elements; every buffer begins on a new cache line.
WINDOW_STEPS = 200  # Number of last steps kept: enough for medians, and a long run does not fill the memory.


def split(order: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits parameter numbers into messages: the first `counts[0]` of them, then the next `counts[1]`, and so on."""
    numbers = iter(order)
    return [tuple(islice(numbers, count)) for count in counts]


def at_least(sizes: Sequence[int], num_bytes: int) -> tuple[int, ...]:
    """Returns numbers of tensors, in order of `sizes` (bytes), for the shortest messages of at least `num_bytes`."""
    counts, count, message_bytes = [], 0, 0
    for size in sizes:
        count += 1
        message_bytes += size
        if message_bytes >= num_bytes:
            counts.append(count)
            count = message_bytes = 0
    if count:
        counts.append(count)
    return tuple(counts)


def arena_elements(counts: Sequence[int], multiple: int) -> int:
    """Returns the elements of an arena for tensors of `counts` elements, however they are put into messages."""
    return sum(counts) + len(counts) * (multiple + ALIGNMENT)


class Bucket:
    """One message: a buffer, and a view of it for each gradient."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], multiple: int, arena: torch.Tensor) -> None:
        self.parameters = tuple(parameters)
        self.num_elements = sum(p.numel() for p in parameters)
        self.vector = arena[: -(-self.num_elements // multiple) * multiple]
        self.vector[self.num_elements :].zero_()
        self.missing = len(self.parameters)
        self.takes_together = self.vector.device.type != "cpu"
        self._views = []
        offset = 0
        for parameter in parameters:
            view = self.vector[offset : offset + parameter.numel()]
            # In the parameter's own memory order, where optimizers are fastest.
            order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim(), torch.contiguous_format)
            if parameter.is_contiguous() or not parameter.is_contiguous(memory_format=order):
                self._views.append(view.view(parameter.shape))
            else:
                self._views.append(view.as_strided(parameter.shape, parameter.stride()))
            offset += parameter.numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.vector.element_size()

    def take(self, place: int, scale: float) -> None:
        """Copies a gradient times `scale` (zeros if none), makes it a view; on a GPU all with the last one."""
        # A view before the backward pass would cost more: autograd would add to a cleared buffer.
        self.missing -= 1
        if not self.takes_together:
            view, parameter = self._views[place], self.parameters[place]
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, scale, out=view)
            parameter.grad = view
            return
        if self.missing > 0:
            return
        pairs = [(view, p.grad) for view, p in zip(self._views, self.parameters, strict=True) if p.grad is not None]
        if len(pairs) < len(self._views):
            self.vector.zero_()
        with torch.no_grad():
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            self.vector[: self.num_elements].mul_(scale)
        for view, parameter in zip(self._views, self.parameters, strict=True):
            parameter.grad = view


class StepMessages:
    """The messages of a step: their gradients, by number of the parameter, their buffers, and how they were sent."""

    def __init__(
        self,
        arena: torch.Tensor,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        numbers: Sequence[tuple[int, ...]],
        multiple: int,
    ) -> None:
        """Places the buffers in `arena` one after another; its former content is lost."""
        self.numbers = numbers
        self.buckets: list[Bucket] = []
        self.place_of: dict[int, tuple[int, int]] = {}
        """Message of each gradient, and its position in the message."""
        self.tensors: list[list[tuple[str, int]]] = []
        """Name and number of elements of each gradient, message by message."""
        first = 0
        for message, members in enumerate(numbers):
            gradients = [named[number] for number in members]
            bucket = Bucket([parameter for _, parameter in gradients], multiple, arena[first:])
            first += -(-bucket.vector.numel() // ALIGNMENT) * ALIGNMENT
            self.buckets.append(bucket)
            self.place_of |= {number: (message, place) for place, number in enumerate(members)}
            self.tensors.append([(name, parameter.numel()) for name, parameter in gradients])
        self.num_bytes = [bucket.num_bytes for bucket in self.buckets]
        self.reset_methods()

    def reset_methods(self) -> None:
        self.methods: list[Counter[str]] = [Counter() for _ in self.numbers]

    @property
    def all_methods(self) -> Counter[str]:
        return sum(self.methods, Counter[str]())

    def describe(self, message: int) -> str:
        names = [name for name, _ in self.tensors[message]]
        range_text = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"message {message + 1} of {len(self.numbers)} ({counted(len(names), 'gradient')}, {range_text})"


def require_fp32(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises `RunError` if a trained parameter is not in fp32, so that gradients would not fit the buffers."""
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise RunError(f"{name} is {parameter.dtype}: dlbench's own exchange holds gradients in fp32")


class ExchangeThread:
    """Exchanges messages on one thread, in order, while the backward pass continues (Zhang et al., Poseidon, 2017)."""

    def __init__(
        self, enter: Callable[[], None], exchange: Callable[[int], None], describe: Callable[[int], str]
    ) -> None:
        """Starts the thread: it calls `enter`, then `exchange` with message numbers; `describe` names one in errors."""
        self._exchange = exchange
        self._describe = describe
        self._handed: set[int] = set()
        self._next = 0
        self._is_stopped = False
        self._worker = BackgroundWorker("dlbench exchange")
        self._worker.put(enter)

    def begin(self) -> None:
        self._handed.clear()
        self._next = 0

    def hand_over(self, number: int) -> None:
        self._handed.add(number)
        while self._next in self._handed:
            self._worker.put(partial(self._send, self._next))
            self._next += 1

    def wait(self) -> None:
        self._worker.wait()
        self._worker.require_well()

    def stop(self) -> None:
        """Ends the thread after the message that it is exchanging."""
        self._is_stopped = True
        self._worker.close()

    def _send(self, number: int) -> None:
        if self._is_stopped:
            return
        try:
            self._exchange(number)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise passed_on(f"the exchange of {self._describe(number)} failed: {reason}", error) from error


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
