"""What dlbench's own all-reduce did: moments of the last steps, settings in force, and the result of a run."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.node.sync.own.route import Route
from dlbench.node.sync.timing import Clock
from dlbench.records.exchange import ExchangeResult, GradientTime, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import fusion_bytes

WINDOW_STEPS = 200
"""Steps kept; enough for medians, and a long run does not fill the memory."""


@dataclass(kw_only=True)
class StepMoments:
    """One step, as marks of a `Clock`."""

    begin: Any
    """Start of the backward pass."""
    gradients: list[Any]
    """Ready, by number of the parameter; all None where they were not noted."""
    ready: list[Any]
    """Last gradient of each message, by message; in the order of sending, as all that follows."""
    start: list[Any]
    end: list[Any]
    ways: list[str] = field(default_factory=list)
    """How each message went."""
    backward_end: Any = None
    """Last gradient of all."""

    @property
    def has_gradients(self) -> bool:
        return all(mark is not None for mark in self.gradients)

    def marks(self) -> list[Any]:
        """All moments, each once: the last gradient's is also that of its message and of the backward pass."""
        found = (self.begin, *self.gradients, *self.ready, *self.start, *self.end, self.backward_end)
        return list({id(mark): mark for mark in found if mark is not None}.values())


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Medians of one message, seconds after the start of the backward pass."""

    ready_s: float
    start_s: float
    exchange_s: float


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Medians over steps, of this rank, seconds."""

    communication_s: float
    exposed_s: float
    hidden_s: float
    backward_s: float


def gradient_times(steps: Iterable[StepMoments], clock: Clock) -> list[float]:
    """For each parameter the median time at which its gradient was ready, seconds; empty where it was never noted."""
    rows = [[clock.between(s.begin, mark) for mark in s.gradients] for s in steps if s.has_gradients]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@dataclass(kw_only=True)
class Moments:
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

    def gradients(self) -> list[float]:
        """For each parameter the median time at which its gradient was ready, seconds."""
        return gradient_times(self.steps, self.clock)

    def messages(self) -> list[MessageTimes]:
        between = self.clock.between
        return [
            MessageTimes(
                ready_s=statistics.median(between(s.begin, s.ready[number]) for s in self.steps),
                start_s=statistics.median(between(s.begin, s.start[number]) for s in self.steps),
                exchange_s=statistics.median(between(s.start[number], s.end[number]) for s in self.steps),
            )
            for number in range(len(self.steps[0].ready))
        ]

    def sums(self) -> StepSums:
        """Time of communication, its part after the backward pass (exposed) and its part within (hidden)."""
        total, exposed, backward = map(statistics.median, zip(*map(self._step, self.steps), strict=True))
        # Of medians, not the median of differences: so that the two parts make the whole.
        return StepSums(communication_s=total, exposed_s=exposed, hidden_s=total - exposed, backward_s=backward)

    def _step(self, step: StepMoments) -> tuple[float, float, float]:
        """Communication, exposed part, backward pass. One thread exchanges, so messages do not overlap each other."""
        between = self.clock.between
        backward = between(step.begin, step.backward_end)
        total = exposed = 0.0
        for start, end in zip(step.start, step.end, strict=True):
            first, last = between(step.begin, start), between(step.begin, end)
            total += last - first
            exposed += max(0.0, last - max(first, backward))
        return total, exposed, backward


@dataclass(frozen=True, kw_only=True)
class Account:
    """The messages in force at the end, and how each went."""

    names: Sequence[str]
    """Of the parameters."""
    sizes: Sequence[int]
    """Bytes of their gradients."""
    messages: Sequence[Sequence[int]]
    """Numbers of the parameters of each message, in the order of sending."""
    ways: Sequence[Counter[str]]
    """How often each message went which way, measured steps."""
    elements: Sequence[int]
    """Of each message, padding included."""
    fusion: str
    """As decided."""
    num_ranks: int
    route: Route
    moments: Moments
    gradient_times: Sequence[float]
    """When each gradient was ready, by number of the parameter; empty where it was never noted."""
    overflows: int
    """Of fp16 on the wire; the least of all ranks' counts, known after the last step."""

    @property
    def message_bytes(self) -> list[int]:
        return [sum(self.sizes[n] for n in one) for one in self.messages]

    @property
    def all_ways(self) -> Counter[str]:
        return sum(self.ways, Counter[str]())

    @property
    def exchange(self) -> str:
        """By what messages went: hybrid only if some went one way and some the other."""
        dense = {way for way in self.all_ways if way != "sparse"}
        if dense == {"flat", "hierarchical"}:
            return "hybrid"
        return next(iter(dense), "flat")

    @property
    def wire(self) -> str:
        """The format of messages; topk only if some message was sparse."""
        wire = self.route.wire.name
        return "fp32" if wire == "topk" and self.all_ways and not self.all_ways["sparse"] else wire

    @property
    def ways_text(self) -> str:
        total = sum(self.all_ways.values())
        parts = ", ".join(f"{count} {way}" for way, count in sorted(self.all_ways.items()))
        return f"{total} messages in measured steps: {parts}" if total else "no message in a measured step"

    def result(self, sums: Sequence[dict[str, Any] | None]) -> ExchangeResult:
        """The result of the run. `sums`: for each rank, its times of a step (fields of `StepSums`); None where no step
        was watched.
        """
        route, window = self.route, len(self.moments.steps)
        known = [each for each in sums if each is not None]
        inside, across = self._sent()
        return ExchangeResult(
            carrier=route.carrier,
            by="dlbench",
            exchange=self.exchange,
            fusion=self.fusion,
            wire=self.wire,
            group_size=route.group_size,
            num_groups=self.num_ranks // route.group_size,
            messages=self._messages(),
            bytes_inside=inside,
            bytes_across=across,
            **{key: statistics.fmean(each[key] for each in known) for key in (known[0] if known else ())},
            wire_overflows=self.overflows,
            density=route.wire.density,
            dense_switches=route.wire.dense_switches,
            window_steps=window,
            evidence=(
                f"counted by dlbench in every step; times from the last {window} measured steps; bytes by the closed "
                "form of each exchange"
            ),
            gradients=self._gradients(),
            costs=route.costs,
            hybrid_threshold_bytes=route.threshold_bytes,
        )

    def _sent(self) -> tuple[float, float]:
        """Bytes that a rank sends in a step, inside its group and across, mean over ranks."""
        width = self.route.wire.bytes_per_element
        each = [self.route.method.sent(count * width) for count in self.elements]
        return sum(inside for inside, _ in each), sum(across for _, across in each)

    def _messages(self) -> tuple[Message, ...]:
        times = self.moments.messages() if self.moments.steps else [None] * len(self.messages)
        return tuple(
            Message(
                num_bytes=num_bytes,
                num_tensors=len(one),
                method=ways.most_common(1)[0][0] if ways else self.route.method.way(num_bytes),
                ready_s=None if time is None else time.ready_s,
                start_s=None if time is None else time.start_s,
                exchange_s=None if time is None else time.exchange_s,
            )
            for one, num_bytes, ways, time in zip(self.messages, self.message_bytes, self.ways, times, strict=True)
        )

    def _gradients(self) -> tuple[GradientTime, ...]:
        ready = self.gradient_times
        order = sorted(range(len(ready)), key=lambda n: (ready[n], n))
        return tuple(GradientTime(name=self.names[n], num_bytes=self.sizes[n], ready_s=ready[n]) for n in order)


def exchange_settings(plan: RunPlan, base: Sequence[Setting], account: Account) -> list[Setting]:
    """What was asked of the exchange and what was in force, after the engine's own settings. `plan`: what was asked.
    `base`: settings of the engine that carried the messages. `account`: what was counted.
    """
    sync, sizes = plan.sync, account.message_bytes
    how = f"{len(sizes)} messages per step, of {min(sizes)} to {max(sizes)} bytes, counted"
    group = f"ranks of the group that rank 0 exchanged in; {account.ways_text}"
    rows = [
        ("sync.exchange", sync.exchange, account.exchange, account.ways_text),
        ("sync.fusion", sync.fusion_in_force, _fusion_as_counted(account), how),
        ("sync.wire", sync.wire, account.wire, f"what was handed to {account.route.carrier}; {account.ways_text}"),
        ("sync.inside", sync.inside, account.route.inside, f"carried by {account.route.carrier}"),
        ("sync.group_size", sync.group_size, account.route.group_size, group),
    ]
    own = [Setting(key=k, requested=asked, effective=found, evidence=evidence) for k, asked, found, evidence in rows]
    return [*base, *own]


def _fusion_as_counted(account: Account) -> str:
    counts, sizes, least = [len(one) for one in account.messages], account.message_bytes, fusion_bytes(account.fusion)
    agrees = {"own:none": set(counts) == {1}, "own:single": len(counts) == 1}
    if agrees.get(account.fusion, all(size >= (least or 0) for size in sizes[:-1])):
        return account.fusion
    return f"{len(counts)} messages"
