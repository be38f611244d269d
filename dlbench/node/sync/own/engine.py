"""dlbench's own all-reduce as an engine: a library connects the ranks and sends messages, dlbench does the rest."""

from __future__ import annotations

import enum
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
from dlbench.node.sync.own.buckets import (
    ExchangeMoments,
    ExchangeThread,
    StepMessages,
    StepMoments,
    at_least,
    gradient_times,
    require_fp32,
    split,
)
from dlbench.node.sync.own.route import RouteBuilder
from dlbench.node.sync.timing import clock_for, mean_over_ranks
from dlbench.perfmodels.lines import best_merge
from dlbench.records.comm import read_network
from dlbench.records.exchange import ExchangeResult, GradientTime, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS, OWN_SINGLE

WATCHED_STEPS = MGWFBP_STEPS - 1
"""Backward passes that own:mgwfbp times; the first pass, which initialises libraries, is not among them."""


class Phase(enum.Enum):
    """Progress of grouping gradients into messages."""

    FIRST = enum.auto()  # The first backward pass: gradients in reverse order of the parameters.
    WATCHING = enum.auto()  # With MG-WFBP: the passes that time when gradients are ready.
    ARRANGED = enum.auto()  # Messages are final.


class OwnExchange(EngineOverLibrary):
    """Exchanges gradients by hooks on the parameters and a thread; a library does everything else."""

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
        self._times_gradients = True
        self._taken: set[int] = set()  # Numbers of the gradients that this step has copied into their buckets.
        self._sequence: list[int] = []  # These numbers in the order in which gradients were ready.
        self._fusion = plan.sync.fusion_in_force
        if self._fusion.rule == "mgwfbp":
            self._fusion = OWN_SINGLE  # until gradients are timed, which exchanges would disturb

    def start(self) -> None:
        self._library.allow_groups()
        super().start()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes groups, times messages if that is needed, and broadcasts parameters; does not wrap the model."""
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
        self._thread = ExchangeThread(self._clock.enter_thread, self._exchange, self._describe)
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

    def _describe(self, message: int) -> str:
        return self._messages.describe(message)

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
        is_deciding = self._plan.sync.fusion.rule == "mgwfbp" and self._phase is not Phase.ARRANGED
        self._times_gradients = self._clock.marks_are_free or self._is_watched or is_deciding
        self._now = StepMoments(
            begin=self._clock.mark(),
            gradients=[None] * len(self._named),
            ready=[None] * count,
            start=[None] * count,
            end=[None] * count,
            methods=[""] * count,
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
                f"{self._named[number][0]}: its gradient was computed twice in one backward pass; dlbench's own "
                "exchange sends each once, use sync.fusion auto with the exchange of Horovod or DDP"
            )
        message, position = self._messages.place_of[number]
        bucket = self._messages.buckets[message]
        bucket.take(position, 1 / self._place.size)
        self._taken.add(number)
        self._sequence.append(number)
        is_last = len(self._sequence) == len(self._named)
        if not (self._times_gradients or is_last or bucket.missing == 0):
            return
        moment = self._clock.mark()
        if self._times_gradients:
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
            now.carried.append([])
            method = self._route.exchange(message, self._messages.buckets[message].vector)
            self._messages.methods[message][method] += 1
            now.methods[message] = method
            now.end[message] = self._clock.mark()

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        assert self._now is not None
        sent = self._clock.mark()
        yield
        self._now.carried[-1].append((sent, self._clock.mark()))

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
        self._is_watched = on
        if on:
            self._clock.anchor()
        else:
            if self._watched:
                self._clock.settle()
            self._moments = ExchangeMoments(clock=self._clock)
            self._messages.reset_methods()

    def message_spans(self) -> list[MessageSpan]:
        """Returns the messages of the watched steps, as they were grouped then; after `watch(False)`."""
        moment_ns = self._clock.monotonic_ns
        spans = []
        for step_number, (step, sizes) in enumerate(self._watched):
            for number, (num_bytes, num_tensors) in enumerate(sizes):
                span = MessageSpan(
                    step=step_number,
                    number=number,
                    ready_ns=moment_ns(step.ready[number]),
                    start_ns=moment_ns(step.start[number]),
                    end_ns=moment_ns(step.end[number]),
                    num_bytes=num_bytes,
                    num_tensors=num_tensors,
                    method=step.methods[number],
                )
                spans.append(span)
        return spans

    def step(self, update: Callable[[Optimizer], object]) -> None:
        """Steps the optimizer, and regroups messages once the order of gradients or their times are known."""
        super().step(update)
        if self._phase is Phase.FIRST:
            order = self._agreed(self._sequence)
            self._arrange(order, self._counts(order))
            self._phase = Phase.WATCHING if self._plan.sync.fusion.rule == "mgwfbp" else Phase.ARRANGED
        elif self._phase is Phase.WATCHING and self._steps == 1 + WATCHED_STEPS:
            # The messages that end earliest in the model of MG-WFBP (Shi et al. 2019), from the median times of the
            # slowest rank, because a collective ends on no rank before all have entered it.
            assert self._route.line is not None
            self._clock.settle()
            by_rank = self.gather(gradient_times(self._moments.steps, self._clock))
            slowest_s = [max(times) for times in zip(*by_rank, strict=True)]
            order = _ascending(slowest_s)
            counts = best_merge([self._sizes[n] for n in order], [slowest_s[n] for n in order], self._route.line)
            self._fusion = self._plan.sync.fusion
            self._arrange(*self._agreed([order, list(counts)]))
            self._phase = Phase.ARRANGED

    def _agreed(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks: backward passes differ, and numbers may round differently."""
        return self.gather(value)[0]

    def exchange_result(self) -> ExchangeResult | None:
        """Returns the exchange counted in measured steps; only times of single messages differ between ranks."""
        self._clock.settle()
        route, window = self._route, len(self._moments.steps)
        local_sums = self._moments.sums() if window else {}
        by_rank: list[tuple[dict[str, float], int]] = self.gather((local_sums, route.wire.overflows))
        width = route.wire.bytes_per_element
        sent = [route.method.sent(bucket.vector.numel() * width) for bucket in self._messages.buckets]
        # Times of measured steps, or of watched steps if marks are too expensive for others.
        ready_s = gradient_times(self._moments.steps, self._clock)
        if not ready_s:
            ready_s = gradient_times([step for step, _ in self._watched], self._clock)
        gradients = [
            GradientTime(name=self._named[n][0], num_bytes=self._sizes[n], ready_s=ready_s[n])
            for n in _ascending(ready_s)
        ]
        return ExchangeResult(
            carrier=route.carrier,
            by="dlbench",
            exchange=self._exchange_used,
            fusion=str(self._fusion),
            wire=self._wire_used,
            group_size=route.group_size,
            num_groups=self._place.size // route.group_size,
            messages=tuple(self._messages_sent()),
            bytes_inside=sum(inside for inside, _ in sent),
            bytes_across=sum(across for _, across in sent),
            **mean_over_ranks(sums for sums, _ in by_rank),
            wire_overflows=min(count for _, count in by_rank),
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
        fusion_text = f"{len(sizes)} messages per step, of {min(sizes)} to {max(sizes)} bytes, counted"
        wire_text = f"format given to {route.carrier}; {self._methods_text}"
        group_text = f"ranks of the group in which rank 0 exchanged; {self._methods_text}"
        return super().settings() + settings_of(
            ("sync.exchange", sync.exchange, self._exchange_used, self._methods_text),
            ("sync.fusion", str(sync.fusion_in_force), self._fusion_as_counted(), fusion_text),
            ("sync.wire", sync.wire, self._wire_used, wire_text),
            ("sync.group_size", sync.group_size, route.group_size, group_text),
        )

    def _fusion_as_counted(self) -> str:
        counts, sizes = [len(numbers) for numbers in self._messages.numbers], self._messages.num_bytes
        if self._fusion.rule == "none":
            agrees = set(counts) == {1}
        elif self._fusion.rule == "single":
            agrees = len(counts) == 1
        else:
            agrees = all(size >= (self._fusion.bytes or 0) for size in sizes[:-1])
        if agrees:
            return str(self._fusion)
        return f"{len(counts)} messages"

    @property
    def _exchange_used(self) -> str:
        """The method of dense messages; hybrid only if some were flat and some hierarchical."""
        dense = {method for method in self._messages.all_methods if method != self._route.wire.method}
        if dense == {"flat", "hierarchical"}:
            return "hybrid"
        return next(iter(dense), "flat")

    @property
    def _wire_used(self) -> str:
        methods, wire = self._messages.all_methods, self._route.wire
        if wire.method and methods and not methods[wire.method]:
            return "fp32"
        return wire.name

    @property
    def _methods_text(self) -> str:
        methods = self._messages.all_methods
        if not methods:
            return "no message in a measured step"
        parts = ", ".join(f"{count} {method}" for method, count in sorted(methods.items()))
        return f"{methods.total()} messages in measured steps: {parts}"

    def _messages_sent(self) -> Iterator[Message]:
        messages, method, width = self._messages, self._route.method, self._route.wire.bytes_per_element
        times: list[dict[str, float]] = self._moments.messages() or [{}] * len(messages.numbers)
        for number, members in enumerate(messages.numbers):
            num_bytes = messages.num_bytes[number]
            most_common, _ = next(iter(messages.methods[number].most_common(1)), (method.name_for(num_bytes), 0))
            yield Message(
                num_bytes=num_bytes,
                num_tensors=len(members),
                method=most_common,
                chunks=method.chunks(int(messages.buckets[number].vector.numel() * width)),
                **times[number],
            )

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        super().stop()


def _ascending(times_s: Sequence[float]) -> list[int]:
    return sorted(range(len(times_s)), key=times_s.__getitem__)
