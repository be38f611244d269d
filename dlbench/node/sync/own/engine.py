"""dlbench's own all-reduce as an engine: a library finds the ranks and carries messages, dlbench does the rest.

Hooks on the parameters copy each gradient, divided by the number of ranks, into the buffer of its message as soon as
autograd has it; a complete message goes to the communication thread. Messages are made of gradients in the order in
which rank 0's first backward pass had them ready; before that, in reverse order of the parameters.

With fusion `own:mgwfbp` all gradients travel as one message (`own:single`) until the backward pass has been watched for
a few steps: undisturbed by exchanges, as the model of MG-WFBP wants its times. A gradient's time is that of the slowest
rank, as a collective ends for nobody before all are there.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.errors import RunError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine, EngineOverLibrary, MessageSpan, settings_of
from dlbench.node.sync.own.buckets import ExchangeThread, StepMessages, at_least, require_fp32, split
from dlbench.node.sync.own.report import ExchangeMoments, StepMoments, gradient_times
from dlbench.node.sync.own.route import RouteBuilder
from dlbench.node.sync.timing import clock_for
from dlbench.perfmodels.overlap import best_merge
from dlbench.records.comm import read_network
from dlbench.records.exchange import ExchangeResult, GradientTime, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS, OWN_SINGLE

WATCHED_STEPS = MGWFBP_STEPS - 1
"""Backward passes that own:mgwfbp takes its times from; the first pass, which sets things up, is not among them."""


class Phase(enum.Enum):
    """How far messages are arranged."""

    FIRST = enum.auto()  # The first backward pass: gradients go in reverse order of the parameters.
    WATCHING = enum.auto()  # With MG-WFBP: the moments at which gradients are ready are noted.
    ARRANGED = enum.auto()  # Messages stay as they are.


class OwnExchange(EngineOverLibrary):
    """A library serves all but gradients; these are exchanged step by step, by hooks and a thread."""

    def __init__(self, library: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        if plan.sync.network is not None:
            read_network(Path(plan.sync.network))  # before the ranks meet
        super().__init__(library)
        self._plan = plan
        self._place = place
        self._device = device
        self._thread: ExchangeThread | None = None
        self._is_held = self._is_watched = False
        self._steps = 0
        self._phase = Phase.FIRST
        self._watched: list[tuple[StepMoments, list[tuple[int, int]]]] = []
        self._now: StepMoments | None = None
        self._notes_gradients = True
        self._taken: set[int] = set()
        self._sequence: list[int] = []
        self._fusion = plan.sync.fusion_in_force
        if self._fusion.rule == "mgwfbp":
            self._fusion = OWN_SINGLE

    def start(self) -> None:
        self._library.allow_groups()
        super().start()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes groups, times messages where that is needed, makes parameters equal; model and optimizer stay plain."""
        self._named = named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        require_fp32(named)
        self._sizes = [p.numel() * p.element_size() for _, p in named]
        self._clock = clock_for(self._device)
        communicators = self._library.communicators()
        communicators.broadcast_parameters(model)
        self._route = RouteBuilder(
            plan=self._plan,
            place=self._place,
            device=self._device,
            communicators=communicators,
            clock=self._clock,
            gather=self.gather,
            tensor_elements=[parameter.numel() for _, parameter in named],
        ).build()
        if self._route.wire.name != "fp32":
            self._route.wire.carrying = self._carrying
        order = range(len(named) - 1, -1, -1)
        self._arrange(order, self._counts(order))
        self._thread = ExchangeThread(
            self._clock.enter_thread, self._exchange, lambda message: self._messages.describe(message)
        )
        for number, (_, parameter) in enumerate(named):
            on_gradient = partial(self._on_gradient, number)
            parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return super().prepare(model, optimizer, mark_backward)

    def _counts(self, order: Sequence[int]) -> tuple[int, ...]:
        if self._fusion.rule == "none":
            return (1,) * len(order)
        if self._fusion.bytes is None:
            return (len(order),)
        return at_least([self._sizes[n] for n in order], self._fusion.bytes)

    def _arrange(self, order: Sequence[int], counts: Sequence[int]) -> None:
        self._messages = StepMessages(self._route.arena, self._named, split(order, counts), self._route.multiple)
        self._route.wire.reset(self._messages.tensors)
        self._moments = ExchangeMoments(clock=self._clock)

    @contextmanager
    def hold_exchange(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def begin_backward(self) -> None:
        assert self._thread is not None
        count = len(self._messages.buckets)
        for bucket in self._messages.buckets:
            bucket.missing = len(bucket.parameters)
        self._sequence = []
        self._taken.clear()
        decides = self._plan.sync.fusion.rule == "mgwfbp" and self._phase is not Phase.ARRANGED
        self._notes_gradients = self._clock.marks_are_free or self._is_watched or decides
        self._now = StepMoments(
            begin=self._clock.mark(),
            gradients=[None] * len(self._named),
            ready=[None] * count,
            start=[None] * count,
            end=[None] * count,
            ways=[""] * count,
        )
        self._thread.begin()

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        if not self._is_held:
            self._take(number)

    def _take(self, number: int) -> None:
        now = self._now
        assert now is not None
        if number in self._taken:
            raise RunError(
                f"{self._named[number][0]}: its gradient came twice in one backward pass; dlbench's own exchange sends "
                "each once, use sync.fusion auto with the exchange of Horovod or DDP"
            )
        message, place = self._messages.place_of[number]
        bucket = self._messages.buckets[message]
        bucket.take(place, 1 / self._place.size)
        self._taken.add(number)
        self._sequence.append(number)
        is_last = len(self._sequence) == len(self._named)
        if not (self._notes_gradients or is_last or bucket.missing == 0):
            return
        moment = self._clock.mark()
        if self._notes_gradients:
            now.gradients[number] = moment
        if is_last:
            now.backward_end = moment
        if bucket.missing == 0:
            assert self._thread is not None
            now.ready[message] = moment
            self._thread.hand_over(message)

    def _exchange(self, message: int) -> None:
        now = self._now
        assert now is not None
        with self._clock.exchanging(now.ready[message]):
            now.start[message] = self._clock.mark()
            way = self._route.exchange(message, self._messages.buckets[message].vector)
            self._messages.ways[message][way] += 1
            now.ways[message] = way
            now.end[message] = self._clock.mark()

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        assert self._now is not None
        out = self._clock.mark()
        yield
        self._now.carried.append((out, self._clock.mark()))

    def finish_exchange(self) -> None:
        """Waits for the communication thread. Gradients that the loss does not depend on count as zeros."""
        now = self._now
        assert now is not None
        assert self._thread is not None
        with torch.no_grad():
            for number in range(len(self._named)):
                if number not in self._taken:
                    self._take(number)
        self._thread.wait()
        self._clock.join()
        self._moments.add(now)
        if self._is_watched:
            sizes = [*zip(self._messages.num_bytes, map(len, self._messages.numbers), strict=True)]
            self._watched.append((now, sizes))
        self._now = None
        self._steps += 1

    def watch(self, on: bool) -> None:
        """Between it on and off the messages of every step are kept one by one."""
        self._is_watched = on
        if on:
            self._clock.anchor()
        else:
            if self._watched:
                self._clock.settle()
            self._moments = ExchangeMoments(clock=self._clock)
            self._messages.forget_ways()

    def message_spans(self) -> list[MessageSpan]:
        """Messages of the watched steps, as they were arranged then; after `watch(False)`."""
        moment_ns = self._clock.monotonic_ns
        return [
            MessageSpan(
                step=number,
                number=place,
                ready_ns=moment_ns(step.ready[place]),
                start_ns=moment_ns(step.start[place]),
                end_ns=moment_ns(step.end[place]),
                num_bytes=num_bytes,
                num_tensors=num_tensors,
                method=step.ways[place],
            )
            for number, (step, sizes) in enumerate(self._watched)
            for place, (num_bytes, num_tensors) in enumerate(sizes)
        ]

    def step(self, update: Callable[[Optimizer], object]) -> None:
        """Afterwards messages are arranged anew where enough has been seen, all in the warm-up."""
        super().step(update)
        if self._phase is Phase.FIRST:
            order = self._agreed(self._sequence)
            self._arrange(order, self._counts(order))
            self._phase = Phase.WATCHING if self._plan.sync.fusion.rule == "mgwfbp" else Phase.ARRANGED
        elif self._phase is Phase.WATCHING and self._steps == 1 + WATCHED_STEPS:
            # Messages that are through earliest in MG-WFBP's model, from the median times of the slowest rank.
            assert self._route.line is not None
            self._clock.settle()
            everyone = self.gather(gradient_times(self._moments.steps, self._clock))
            slowest = [max(times) for times in zip(*everyone, strict=True)]
            order = sorted(range(len(slowest)), key=lambda n: (slowest[n], n))
            counts = best_merge([self._sizes[n] for n in order], [slowest[n] for n in order], self._route.line)
            self._fusion = self._plan.sync.fusion
            self._arrange(*self._agreed([order, list(counts)]))
            self._phase = Phase.ARRANGED

    def _agreed(self, value: Any) -> Any:
        """Rank 0's, on all ranks: backward passes differ, and numbers may round differently elsewhere."""
        return self.gather(value)[0]

    def exchange_result(self) -> ExchangeResult | None:
        """Counted in measured steps; the same on all ranks but for the times of single messages."""
        self._clock.settle()
        own = self._moments.sums() if self._moments.steps else None
        found: list[tuple[dict[str, float] | None, int]] = self.gather((own, self._route.wire.overflows))
        route, window = self._route, len(self._moments.steps)
        known = [times for times, _ in found if times is not None]
        # Bytes that a rank sends in a step, inside its group and across, mean over ranks.
        width = route.wire.bytes_per_element
        sent = [route.method.sent(bucket.vector.numel() * width) for bucket in self._messages.buckets]
        # Of measured steps; of watched ones where marks are not free.
        ready = gradient_times(self._moments.steps, self._clock)
        ready = ready or gradient_times([step for step, _ in self._watched], self._clock)
        order = sorted(range(len(ready)), key=lambda n: (ready[n], n))
        gradients = [GradientTime(name=self._named[n][0], num_bytes=self._sizes[n], ready_s=ready[n]) for n in order]
        return ExchangeResult(
            carrier=route.carrier,
            by="dlbench",
            exchange=self._exchange_used,
            fusion=str(self._fusion),
            wire=self._wire_used,
            group_size=route.group_size,
            num_groups=self._place.size // route.group_size,
            messages=self._messages_sent(),
            bytes_inside=sum(inside for inside, _ in sent),
            bytes_across=sum(across for _, across in sent),
            **{key: statistics.fmean(each[key] for each in known) for key in (known[0] if known else ())},
            wire_overflows=min(count for _, count in found),
            density=route.wire.density,
            dense_switches=route.wire.dense_switches,
            window_steps=window,
            evidence=(
                f"counted by dlbench in every step; times from the last {window} measured steps; bytes by the closed "
                "form of each exchange"
            ),
            gradients=tuple(gradients),
            costs=route.costs,
            hybrid_threshold_bytes=route.threshold_bytes,
        )

    def settings(self) -> list[Setting]:
        sync, route, sizes = self._plan.sync, self._route, self._messages.num_bytes
        how = f"{len(sizes)} messages per step, of {min(sizes)} to {max(sizes)} bytes, counted"
        group = f"ranks of the group that rank 0 exchanged in; {self._ways_text}"
        return super().settings() + settings_of(
            ("sync.exchange", sync.exchange, self._exchange_used, self._ways_text),
            ("sync.fusion", str(sync.fusion_in_force), self._fusion_as_counted(), how),
            ("sync.wire", sync.wire, self._wire_used, f"what was handed to {route.carrier}; {self._ways_text}"),
            ("sync.group_size", sync.group_size, route.group_size, group),
        )

    def _fusion_as_counted(self) -> str:
        counts, sizes = [len(numbers) for numbers in self._messages.numbers], self._messages.num_bytes
        agrees = {"none": set(counts) == {1}, "single": len(counts) == 1}
        if agrees.get(self._fusion.rule, all(size >= (self._fusion.bytes or 0) for size in sizes[:-1])):
            return str(self._fusion)
        return f"{len(counts)} messages"

    @property
    def _exchange_used(self) -> str:
        """By what messages went: hybrid only if some went one way and some the other."""
        dense = {way for way in self._messages.all_ways if way != "sparse"}
        if dense == {"flat", "hierarchical"}:
            return "hybrid"
        return next(iter(dense), "flat")

    @property
    def _wire_used(self) -> str:
        """The format of messages; topk only if some message was sparse."""
        wire = self._route.wire.name
        return "fp32" if wire == "topk" and self._messages.all_ways and not self._messages.all_ways["sparse"] else wire

    @property
    def _ways_text(self) -> str:
        total = sum(self._messages.all_ways.values())
        parts = ", ".join(f"{count} {way}" for way, count in sorted(self._messages.all_ways.items()))
        return f"{total} messages in measured steps: {parts}" if total else "no message in a measured step"

    def _messages_sent(self) -> tuple[Message, ...]:
        times = self._moments.messages() if self._moments.steps else [{} for _ in self._messages.numbers]
        method, width = self._route.method, self._route.wire.bytes_per_element
        return tuple(
            Message(
                num_bytes=num_bytes,
                num_tensors=len(numbers),
                method=ways.most_common(1)[0][0] if ways else method.way(num_bytes),
                chunks=method.chunks(int(bucket.vector.numel() * width)),
                **time,
            )
            for numbers, num_bytes, ways, bucket, time in zip(
                self._messages.numbers,
                self._messages.num_bytes,
                self._messages.ways,
                self._messages.buckets,
                times,
                strict=True,
            )
        )

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        super().stop()
