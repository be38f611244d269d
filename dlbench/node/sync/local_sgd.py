"""Local SGD: ranks update apart, and average their parameters after every so many updates.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019) does so from the first update on, post-local
SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020) after updates with exchanged gradients. Averages
lie at fixed updates of the whole training, so that a resumed run has those of one that ran through.

An evaluation sees the mean of all ranks' parameters, and training goes on from each rank's own: how often one looks
changes nothing. A checkpoint holds one state, so that all ranks take over the mean, of parameters and optimizer state,
and go on from it as a run that resumes will. Behind the last update all take over the mean. Norms are clipped rank by
rank (group by group, where gradients are averaged inside groups).
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.ddp import DdpEngine
from dlbench.node.sync.engine import Engine, EngineOverLibrary, MessageSpan, WholeState, settings_of
from dlbench.node.sync.groups import GroupRanks, RankGroups, TorchGroup, make_groups
from dlbench.node.sync.timing import clock_for, median, ring_bytes
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

_SAMPLED = 4096  # Entries of a mean by which it is seen how far ranks were from it.
_TIMED = 1000  # Averages whose times are kept, the last ones.


class LocalSgd(EngineOverLibrary):
    """A library finds the ranks, exchanges gradients as long as that is planned, and carries the averages."""

    def __init__(self, library: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        super().__init__(library)
        self._plan, self._sync, self._place = plan, plan.sync, place
        self._wraps = plan.sync.exchanges_gradients
        self._clock = clock_for(device)
        self._held = ExitStack()
        self._groups: RankGroups | None = None  # Where gradients are averaged inside them.
        self._parameters: list[torch.Tensor] = []
        self._updates = 0  # Of the whole training.
        self._has_parted = self._is_apart = False  # Parameters: from some update on, and now.
        self._buffer = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._seen, self._measured = Counter[str](), Counter[str]()  # What was done: in all steps, in measured ones.
        self._ways: deque[tuple[Any, Any]] = deque(maxlen=_TIMED)
        self._sampled: tuple[torch.Tensor, torch.Tensor] | None = None  # Of the last average: this rank's, the mean.
        self._distance = 0.0
        self._message: Message | None = None

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes parameters equal; model and optimizer stay plain where no gradient is ever exchanged."""
        self._parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        self._optimizer = optimizer
        if not self._wraps:
            self._library.communicators().broadcast_parameters(model)
            return model, optimizer
        if self._sync.exchange == "hierarchical":
            who = GroupRanks(size=self._place.size, group_size=self._plan.group_size)
            self._groups = make_groups(self._library.communicators(), who)
        self.marks_backward = self._library.marks_backward
        return self._library.prepare(model, optimizer, mark_backward, accumulation=accumulation)

    def begin_training(self, first: int) -> None:
        self._updates = first
        if first >= self._sync.average_from:
            self._part()

    def _part(self) -> None:
        """From the next step on gradients stay with their rank, or in its group."""
        self._has_parted = True
        if self._groups is not None:
            inside = self._groups.inside
            assert isinstance(self._library, DdpEngine)  # by the plan
            assert isinstance(inside, TorchGroup)
            self._library.average_within(inside)
        elif self._wraps:
            self._held.enter_context(self._library.hold_exchange())
            self.marks_backward = False

    @property
    def _exchanges(self) -> bool:
        """Whether gradients of this step are exchanged."""
        return self._wraps and (self._groups is not None or not self._has_parted)

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._library.hold_exchange() if self._wraps else nullcontext()

    def begin_backward(self) -> None:
        if self._exchanges:
            self._library.begin_backward()

    def finish_exchange(self) -> None:
        if self._exchanges:
            self._library.finish_exchange()

    def watch(self, on: bool) -> None:
        if self._wraps:
            self._library.watch(on)
        if not on:  # the measured steps begin
            self._measured = Counter[str]()
            self._ways.clear()

    def message_spans(self) -> list[MessageSpan]:
        return self._library.message_spans() if self._wraps else []

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        super().step(update)
        self._updates += 1
        self._is_apart = self._has_parted
        self._count("steps", "exchanged" if not self._has_parted else "inside" if self._exchanges else "apart")

    def _count(self, *names: str) -> None:
        for counter in (self._seen, self._measured):
            counter.update(names)

    def exchange_parameters(self) -> bool:
        done = self._updates - self._sync.average_from
        if done == 0 and not self._has_parted:
            self._part()
        if done <= 0 or done % (self._sync.average_every or 1):
            return False
        begin = self._clock.mark()
        self._average(self._parameters + (self._state() if self._sync.average_momentum else []))
        self._ways.append((begin, self._clock.mark()))
        self._count("averages")
        return True

    def _state(self) -> list[torch.Tensor]:
        """The optimizer's values of each entry, e.g. momentum; not the count of its steps."""
        state: dict[torch.Tensor, dict[str, Any]] = self._optimizer.state
        return [
            value
            for group in self._optimizer.param_groups
            for p in group["params"]
            for value in state.get(p, {}).values()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == p.shape
        ]

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, as one message, and notes how far this rank was from them."""
        parts = 1 if self._groups is None else len(self._groups.inside.ranks)
        num = sum(tensor.numel() for tensor in tensors)
        whole = num + -num % parts
        if [view.shape for view in self._views[: len(tensors)]] != [tensor.shape for tensor in tensors]:
            self._buffer = torch.zeros(whole, device=tensors[0].device)
            pieces = torch.split(self._buffer[:num], [tensor.numel() for tensor in tensors])
            self._views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        buffer, views = self._buffer[:whole], self._views[: len(tensors)]
        torch._foreach_copy_(views, list(tensors))
        own = buffer[:: -(-num // _SAMPLED)].clone()
        if self._groups is None:
            self._library.average([buffer])
        else:  # each rank of a group averages a share with those in its place, and the group gathers the shares
            inside, across = self._groups.inside, self._groups.across
            share = buffer.view(parts, -1)[inside.index]
            across.sum(share)
            share /= len(across.ranks)
            inside.all_gather(share, buffer)
        self._sampled = own, buffer[:: -(-num // _SAMPLED)].clone()
        torch._foreach_copy_(list(tensors), views)
        self._is_apart = False

    def whole_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> WholeState:
        """All ranks take over the mean of parameters and optimizer state, which is that state."""
        if self._is_apart or (self._has_parted and not self._sync.average_momentum):
            self._average(self._parameters + self._state())
            self._count("forced")
        return super().whole_state(model, optimizer)

    def end_training(self) -> None:
        if self._is_apart:
            self._average(self._parameters)
            self._count("forced")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it parameters are the mean of all ranks'; afterwards each rank has its own again."""
        if not self._is_apart:
            yield
            return
        own = [parameter.clone() for parameter in self._parameters]
        self._average(self._parameters)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, own)
            self._is_apart = True

    @property
    def _num_bytes(self) -> int:
        """Of an average after an update."""
        state = self._state() if self._sync.average_momentum else []
        return sum(t.numel() * torch.float32.itemsize for t in (*self._parameters, *state))

    def _sent(self, steps: int) -> tuple[float, float]:
        """Bytes that a rank sends in a measured step inside its group and across: rings, and gathers inside groups."""
        size, wire = self._place.size, 2 if self._sync.wire in ("fp16", "bf16") else 4
        gradients = wire * sum(p.numel() for p in self._parameters)
        done, num_bytes = self._measured, self._num_bytes
        inside, across = ring_bytes(gradients * done["exchanged"], ranks=size, groups=self._place.num_nodes)
        if self._groups is None:
            averages = ring_bytes(num_bytes * done["averages"], ranks=size, groups=self._place.num_nodes)
        else:
            group, groups = self._plan.group_size, size // self._plan.group_size
            inside += ring_bytes(gradients * done["inside"], ranks=group, groups=1)[0]
            share = num_bytes * done["averages"] / group
            averages = (group - 1) * share, 2 * (groups - 1) / groups * share
        return (inside + averages[0]) / steps, (across + averages[1]) / steps

    def exchange_result(self) -> ExchangeResult | None:
        """Averages as they were counted in measured steps, beside the messages of gradients that DDP's hook saw."""
        gradients = self._library.exchange_result() if self._wraps else None
        self._clock.settle()
        if self._sampled is not None:
            own, mean = self._sampled
            self._distance = float(torch.linalg.vector_norm(own - mean) / torch.linalg.vector_norm(mean))
        took = [self._clock.between(*way) for way in self._ways]
        steps, done = self._measured["steps"], self._measured
        own_s = done["averages"] / steps * statistics.fmean(took) if took else 0.0
        everyone: list[tuple[float, float]] = self.gather((self._distance, own_s))
        self._distance = max(distance for distance, _ in everyone)
        if not self._has_parted:
            return gradients
        carrier = self._library.communicators().carrier
        inside, across = self._sent(steps) if steps and carrier == "gloo" else (None, None)
        average = Message(
            num_bytes=self._num_bytes, num_tensors=len(self._views) or 1, method=self._words, exchange_s=median(took)
        )
        per_step_s = statistics.fmean(seconds for _, seconds in everyone) if steps else None
        times: dict[str, float | None] = {"communication_s": per_step_s, "exposed_s": per_step_s, "hidden_s": 0.0}
        evidence = (
            f"{done['averages']} averages in {steps} measured steps, counted; bytes are those of a ring, per step"
        )
        messages: tuple[Message, ...] = (average,)
        if gradients is not None and gradients.messages:
            times = {key: getattr(gradients, key) for key in (*times, "backward_s")}
            evidence, messages = f"{evidence}; gradients: {gradients.evidence}", (*gradients.messages, average)
        return ExchangeResult(
            carrier=carrier,
            by="dlbench",
            exchange=self._exchange_words,
            fusion="one message" if gradients is None else gradients.fusion,
            wire="fp32" if gradients is None else gradients.wire,
            wire_overflows=0 if gradients is None else gradients.wire_overflows,
            group_size=self._plan.group_size,
            num_groups=self._place.size // self._plan.group_size,
            messages=messages,
            bytes_inside=inside,
            bytes_across=across,
            **times,
            window_steps=steps if gradients is None else gradients.window_steps,
            evidence=evidence,
        )

    @property
    def _words(self) -> str:
        return f"average every {self._sync.average_every} updates"

    @property
    def _exchange_words(self) -> str:
        before = "flat until update {}, then " if self._wraps and self._sync.average_from else ""
        grouped = "gradients inside the group, " if self._groups is not None else ""
        return before.format(self._sync.average_from) + grouped + self._words

    def settings(self) -> list[Setting]:
        """The library's, and how often parameters were averaged, told by how far ranks had come apart; after
        `exchange_result`.
        """
        sync, seen = self._sync, self._seen
        apart = seen["apart"] + seen["inside"]
        how = (
            f"{seen['averages']} averages of {format_bytes(self._num_bytes)} in {apart} updates apart, and "
            f"{seen['forced']} for checkpoints and the end"
        )
        found: int | str | None = sync.average_every
        if not seen["averages"]:
            found = "only at the end" if self._has_parted else "never"
        elif not self._distance:
            found, how = "no difference", f"{how}; ranks had equal parameters before the last"
        else:
            how += f"; before the last, ranks were up to {self._distance:.2g} of the mean's norm from it"
        rows = [("sync.average_every", sync.average_every, found, how)]
        if sync.average_from:
            first = f"{seen['exchanged']} updates of this run with exchanged gradients"
            rows.append(("sync.average_from", sync.average_from, sync.average_from if apart else None, first))
        state = self._state()
        if state:
            kept = f"{len(state)} tensors of the optimizer's state"
            rows.append(("sync.average_momentum", sync.average_momentum, sync.average_momentum, kept))
        return super().settings() + settings_of(*rows)
