"""dlbench's own exchange of gradients: the engine carries, dlbench decides which gradients go when and how.

Hooks on the parameters copy each gradient, divided by the number of ranks, into the buffer of its message as soon as
autograd has it; a complete message goes to the communication thread. Messages are made of gradients in the order in
which rank 0's first backward pass had them ready; before that, in reverse order of the parameters.

With fusion `mgwfbp` all gradients travel as one message (`single`) until the backward pass has been watched for a few
steps: undisturbed by exchanges, as the rule of MG-WFBP wants its times. A gradient's time is that of the slowest rank,
as a collective ends for nobody before all are there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dlbench.costs.overlap import merge
from dlbench.errors import RunError, UserError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync import buckets
from dlbench.node.sync.account import Account, exchange_settings
from dlbench.node.sync.buckets import BucketPlan
from dlbench.node.sync.clocks import clock_for
from dlbench.node.sync.engine import Engine
from dlbench.node.sync.groups import Communicators
from dlbench.node.sync.moments import Moments, StepMoments
from dlbench.node.sync.route import RouteBuilder
from dlbench.node.sync.worker import ExchangeThread
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan

WATCHED_STEPS = 3
"""Backward passes that mgwfbp takes its times from; the first pass of all, which sets things up, is not among them."""


class OwnExchange:
    """An engine's process group with dlbench's own exchange on top."""

    marks_backward = False

    def __init__(self, base: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        """`base` finds the ranks and serves all but gradients.

        Raises:
            UserError: the plan leaves mgwfbp too few warm-up steps, or asks for shared memory between GPUs.
        """
        if plan.sync.fusion == "mgwfbp" and plan.measure.warmup_steps < 1 + WATCHED_STEPS:
            raise UserError(
                f"sync.fusion mgwfbp: watches {1 + WATCHED_STEPS} warm-up steps before it merges, the plan has "
                f"{plan.measure.warmup_steps}; set measure.warmup_steps to {1 + WATCHED_STEPS} or more"
            )
        if plan.sync.inside == "shared-memory" and device.type != "cpu":
            raise UserError("sync.inside shared-memory: gradients lie on GPUs; use sync.inside engine")
        self._base = base
        self._plan = plan
        self._place = place
        self._device = device
        self._fusion = "single" if plan.sync.fusion == "mgwfbp" else plan.sync.fusion_in_force
        self._named: list[tuple[str, nn.Parameter]] = []
        self._steps = 0
        self._is_held = False
        self._now: StepMoments | None = None
        self._sequence: list[int] = []

    def start(self) -> None:
        if self._plan.engine.name == "horovod":
            from dlbench.node.sync.horovod_groups import allow_process_sets

            allow_process_sets()
        self._base.start()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes groups and costs known, parameters equal, and hooks each parameter; model and optimiser stay plain."""
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets.require_fp32(self._named)
        self._optimizer = optimizer
        self._clock = clock_for(self._device)
        communicators = self._communicators()
        communicators.broadcast_parameters(model)
        self._route = RouteBuilder(
            self._plan,
            self._place,
            self._device,
            communicators=communicators,
            clock=self._clock,
            gather=self._base.gather,
            tensor_elements=[parameter.numel() for _, parameter in self._named],
        ).build()
        self._arrange(range(len(self._named) - 1, -1, -1), self._fusion)
        self._thread = ExchangeThread(self._clock.enter_thread, self._exchange, self._describe)
        for number, (_, parameter) in enumerate(self._named):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, number)
            )
        return model, optimizer

    def _communicators(self) -> Communicators:
        if self._plan.engine.name == "horovod":
            from dlbench.node.sync.horovod_groups import HorovodCommunicators

            return HorovodCommunicators(self._device)
        from dlbench.node.sync.torch_groups import TorchCommunicators

        return TorchCommunicators()

    def _sizes(self, numbers: Sequence[int]) -> list[int]:
        return [self._named[n][1].numel() * self._named[n][1].element_size() for n in numbers]

    def _arrange(self, order: Sequence[int], fusion: str, counts: tuple[int, ...] | None = None) -> None:
        """Makes buckets for gradients that are ready in this order; `counts` where they are decided already."""
        if counts is None:
            if fusion == "none":
                counts = buckets.one_each(len(order))
            elif fusion == "single":
                counts = buckets.all_in_one(len(order))
            else:
                assert self._plan.sync.bucket_bytes is not None
                counts = buckets.at_least(self._sizes(order), self._plan.sync.bucket_bytes)
        self._fusion = fusion
        messages = BucketPlan(order=tuple(order), counts=counts).messages()
        parameters = [[self._named[n][1] for n in one] for one in messages]
        self._buckets = buckets.fill(self._route.arena, parameters, self._route.multiple)
        self._messages = messages
        self._place_of = {n: (k, i) for k, one in enumerate(messages) for i, n in enumerate(one)}
        self._route.wire.reset([[(self._named[n][0], self._named[n][1].numel()) for n in one] for one in messages])
        self._moments = Moments(clock=self._clock)
        self._ways: list[Counter[str]] = [Counter() for _ in messages]

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def hold_exchange(self) -> AbstractContextManager[None]:
        """Within it hooks do nothing, and autograd adds up."""
        return self._held()

    def begin_backward(self) -> None:
        """Opens the step: its clock starts. It comes before every exchange."""
        count = len(self._buckets)
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._sequence = []
        self._now = StepMoments(
            begin=self._clock.mark(),
            gradients=[None] * len(self._named),
            ready=[None] * count,
            start=[None] * count,
            end=[None] * count,
        )
        self._thread.begin(count)

    def watch(self, on: bool) -> None:
        """Every step is watched anyway."""

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        if not self._is_held:
            self._take(number)

    def _take(self, number: int) -> None:
        """Moves a gradient into its message; hands the message over if it is complete."""
        now = self._now
        assert now is not None
        if now.gradients[number] is not None:
            raise RunError(
                f"{self._named[number][0]}: its gradient came twice in one backward pass; dlbench's own exchange sends "
                "each once, use sync.fusion engine"
            )
        message, place = self._place_of[number]
        bucket = self._buckets[message]
        bucket.take(place, 1 / self._place.size)
        self._sequence.append(number)
        moment = now.gradients[number] = self._clock.mark()
        if len(self._sequence) == len(self._named):
            now.backward_end = moment
        if bucket.missing == 0:
            now.ready[message] = moment
            self._thread.hand_over(message)

    def _exchange(self, message: int) -> None:
        """On the communication thread."""
        now = self._now
        assert now is not None
        with self._clock.exchanging(now.ready[message]):
            now.start[message] = self._clock.mark()
            self._ways[message][self._route.exchange(message, self._buckets[message].vector)] += 1
            now.end[message] = self._clock.mark()

    def _describe(self, message: int) -> str:
        names = [self._named[n][0] for n in self._messages[message]]
        some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"message {message + 1} of {len(self._messages)} ({len(names)} gradients, {some})"

    def finish_exchange(self) -> None:
        """Waits for the communication thread. Gradients that the loss does not depend on count as zeros, on all ranks.

        Raises:
            RunError: a message failed on this rank.
        """
        now = self._now
        assert now is not None
        with torch.no_grad():
            for number in range(len(self._named)):
                if now.gradients[number] is None:
                    self._take(number)
        self._thread.wait()
        self._clock.join()
        self._moments.steps.append(now)
        self._now = None
        self._steps += 1

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """The update; after some of the first steps, messages are arranged anew (within a warm-up step's time)."""
        update(self._optimizer)
        if self._steps == 1:
            self._arrange(self._agreed(self._sequence), self._fusion)
        elif self._plan.sync.fusion == "mgwfbp" and self._steps == 1 + WATCHED_STEPS:
            self._merge()
        if self._steps == self._plan.measure.warmup_steps:
            self._moments.steps.clear()
            self._ways = [Counter() for _ in self._messages]

    def _merge(self) -> None:
        """Messages by the rule of MG-WFBP, from the median times of the slowest rank."""
        self._clock.settle()
        everyone = self._base.gather(self._moments.gradients())
        slowest = [max(times) for times in zip(*everyone, strict=True)]
        order = sorted(range(len(slowest)), key=lambda n: (slowest[n], n))
        assert self._route.line is not None
        counts = merge(self._sizes(order), [slowest[n] for n in order], self._route.line)
        order, counts = self._agreed([order, list(counts)])
        self._arrange(order, "mgwfbp", tuple(counts))

    def _agreed(self, value: Any) -> Any:
        """Rank 0's, on all ranks: floating-point numbers may round differently elsewhere."""
        return self._base.gather(value)[0]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        self._base.average(tensors)

    def gather(self, value: Any) -> list[Any]:
        return self._base.gather(value)

    def barrier(self) -> None:
        self._base.barrier()

    def _account(self) -> Account:
        return Account(
            names=[name for name, _ in self._named],
            sizes=self._sizes(range(len(self._named))),
            messages=self._messages,
            ways=self._ways,
            elements=[bucket.vector.numel() for bucket in self._buckets],
            fusion=self._fusion,
            num_ranks=self._place.size,
            route=self._route,
            moments=self._moments,
        )

    def exchange_result(self) -> ExchangeResult | None:
        self._clock.settle()
        everyone = self._base.gather(dataclasses.asdict(self._moments.sums()) if self._moments.steps else None)
        return self._account().result(everyone)

    def settings(self) -> list[Setting]:
        """The engine's own, as far as they act here, and what became of `sync`."""
        return exchange_settings(self._plan, self._base.settings(), self._account())

    def stop(self) -> None:
        if self._named:
            self._thread.stop()
            self._route.close()
        self._base.stop()
