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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.ddp import DdpEngine
from dlbench.node.sync.engine import Engine, EngineOverLibrary, MessageSpan, Value, WholeState, settings_of
from dlbench.node.sync.groups import GroupRanks, RankGroups, TorchGroup, make_groups
from dlbench.node.sync.timing import clock_for, median, ring_bytes
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

_SAMPLED = 4096  # Entries of an average by which it is seen how far ranks were apart.
_TIMED = 1000  # Averages whose times are kept, the last ones.


class LocalSgd(EngineOverLibrary):
    """A library finds the ranks, exchanges gradients as long as that is planned, and carries the averages."""

    def __init__(self, library: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        super().__init__(library)
        self._plan, self._sync, self._place = plan, plan.sync, place
        self._wraps = plan.sync.exchanges_gradients
        self._gradients = library if self._wraps else Engine()  # What exchanges those of a step.
        self._clock = clock_for(device)
        self._held = ExitStack()
        self._groups: RankGroups | None = None  # Where gradients are averaged inside them.
        self._parameters: list[torch.Tensor] = []
        self._updates = 0  # Of the whole training.
        self._has_parted = self._is_apart = False  # Ranks: from some update on, and now.
        self._seen, self._measured = Counter[str](), Counter[str]()  # What was done: in all steps, in measured ones.
        self._ways: deque[tuple[Any, Any]] = deque(maxlen=_TIMED)
        self._sampled: tuple[torch.Tensor, torch.Tensor] | None = None  # Of the last average: this rank's, the mean.
        self._distance = 0.0

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes parameters equal; model and optimizer stay plain where no gradient is ever exchanged."""
        self._parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        self._optimizer = optimizer
        if not self._wraps:
            self._library.communicators().broadcast_parameters(model)
        elif self._sync.exchange == "hierarchical":
            who = GroupRanks(size=self._place.size, group_size=self._plan.group_size)
            self._groups = make_groups(self._library.communicators(), who)
        self.marks_backward = self._gradients.marks_backward
        return self._gradients.prepare(model, optimizer, mark_backward, accumulation=accumulation)

    def begin_training(self, first: int) -> None:
        self._updates = first
        if first >= self._sync.average_from:
            self._part()

    def _part(self) -> None:
        """From the next step on gradients stay with their rank, or in its group."""
        self._has_parted = True
        if self._groups is not None:
            assert isinstance(self._library, DdpEngine)  # by the plan
            assert isinstance(self._groups.inside, TorchGroup)
            self._library.average_within(self._groups.inside)
        else:
            self._held.enter_context(self._gradients.hold_exchange())
            self._gradients, self.marks_backward = Engine(), False

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._gradients.hold_exchange()

    def begin_backward(self) -> None:
        self._gradients.begin_backward()

    def finish_exchange(self) -> None:
        self._gradients.finish_exchange()

    def watch(self, on: bool) -> None:
        if self._wraps:
            self._library.watch(on)
        if not on:  # the measured steps begin
            self._measured.clear()
            self._ways.clear()

    def message_spans(self) -> list[MessageSpan]:
        return self._library.message_spans() if self._wraps else []

    def step(self, update: Callable[[Optimizer], object]) -> None:
        super().step(update)
        self._updates += 1
        self._is_apart = self._has_parted
        self._count("apart" if self._has_parted else "exchanged")

    def _count(self, name: str) -> None:
        self._seen[name] += 1
        self._measured[name] += 1

    def exchange_parameters(self) -> bool:
        done = self._updates - self._sync.average_from
        if done == 0 and not self._has_parted:
            self._part()
        if done <= 0 or done % (self._sync.average_every or 1):
            return False
        begin = self._clock.mark()
        self._average(self._averaged())
        self._ways.append((begin, self._clock.mark()))
        self._count("averages")
        return True

    def _averaged(self, *, state: bool | None = None) -> list[torch.Tensor]:
        """Parameters, and with the planned or the given `state` also the optimizer's values of each of their entries,
        such as momentum; not the count of its steps.
        """
        if not (self._sync.average_momentum if state is None else state):
            return self._parameters
        held = [(p, value) for p, values in self._optimizer.state.items() for value in values.values()]
        return self._parameters + [t for p, t in held if isinstance(t, torch.Tensor) and t.shape == p.shape]

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, as one message, and notes how far this rank was from them."""
        inside = None if self._groups is None else self._groups.inside
        num, parts = sum(t.numel() for t in tensors), 1 if inside is None else len(inside.ranks)
        flat = torch.cat([*(t.reshape(-1) for t in tensors), tensors[0].new_zeros(-num % parts)])
        stride = -(-num // _SAMPLED)
        own = flat[::stride].clone()
        if self._groups is None or inside is None:
            self._library.average([flat])
        else:  # each rank of a group averages a share with those in its place, and the group gathers the shares
            share = flat.view(parts, -1)[inside.index]
            self._groups.across.sum(share)
            share /= len(self._groups.across.ranks)
            inside.all_gather(share, flat)
        self._sampled = own, flat[::stride].clone()
        pieces = torch.split(flat[:num], [t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])
        self._is_apart = False

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """All ranks take over the mean of parameters and optimizer state, which is that state."""
        if self._is_apart or (self._has_parted and not self._sync.average_momentum):
            self._average(self._averaged(state=True))
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

    def _sent(self, num_bytes: int, steps: int) -> tuple[float, float]:
        """Bytes that a rank sends in a measured step inside its group and across: rings, and gathers inside groups."""
        size, nodes, group, done = self._place.size, self._place.num_nodes, self._plan.group_size, self._measured
        gradients = (2 if self._sync.wire in ("fp16", "bf16") else 4) * sum(p.numel() for p in self._parameters)
        parts = [ring_bytes(gradients * done["exchanged"], ranks=size, groups=nodes)]
        if self._groups is None:
            parts.append(ring_bytes(num_bytes * done["averages"], ranks=size, groups=nodes))
        else:
            share = num_bytes * done["averages"] / group
            parts.append(((group - 1) * share, 2 * (1 - group / size) * share))
            parts.append(ring_bytes(gradients * done["apart"], ranks=group, groups=1))
        return sum(inside for inside, _ in parts) / steps, sum(across for _, across in parts) / steps

    def exchange_result(self) -> ExchangeResult | None:
        """Averages as they were counted in measured steps, beside the messages of gradients that DDP's hook saw."""
        gradients = self._library.exchange_result() if self._wraps else None
        self._clock.settle()
        if self._sampled is not None:
            own, mean = self._sampled
            self._distance = float(torch.linalg.vector_norm(own - mean) / torch.linalg.vector_norm(mean))
        took, done = [self._clock.between(*way) for way in self._ways], self._measured
        steps = done["apart"] + done["exchanged"]
        own_s = done["averages"] / steps * statistics.fmean(took) if took else 0.0
        everyone: list[tuple[float, float]] = self.gather((self._distance, own_s))
        self._distance = max(distance for distance, _ in everyone)
        if not self._has_parted:
            return gradients
        tensors, carrier = self._averaged(), self._library.communicators().carrier
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        inside, across = self._sent(num_bytes, steps) if steps and carrier == "gloo" else (None, None)
        words = f"average every {self._sync.average_every} updates"
        average = Message(num_bytes=num_bytes, num_tensors=len(tensors), method=words, exchange_s=median(took))
        per_step_s = statistics.fmean(seconds for _, seconds in everyone)
        found = ExchangeResult(
            carrier=carrier,
            by="dlbench",
            exchange=words if self._groups is None else f"gradients inside the group, {words}",
            fusion="one message",
            wire="fp32",
            group_size=self._plan.group_size,
            num_groups=self._place.size // self._plan.group_size,
            messages=(average,),
            bytes_inside=inside,
            bytes_across=across,
            communication_s=per_step_s,
            exposed_s=per_step_s,
            hidden_s=0.0,
            window_steps=steps,
            evidence=f"{done['averages']} averages in {steps} measured steps, counted; bytes by a ring's formula",
        )
        if gradients is None or not gradients.messages:
            return found
        first = f"flat until update {self._sync.average_from}, then " if self._sync.average_from else ""
        share = 1.0 if self._groups is not None else done["exchanged"] / max(1, steps)  # of steps that send gradients
        times = {
            key: None if of_one is None else share * of_one + getattr(found, key)
            for key in ("communication_s", "exposed_s", "hidden_s")
            for of_one in [getattr(gradients, key)]
        }
        more = {
            "exchange": first + found.exchange,
            "messages": (*gradients.messages, average),
            "evidence": f"{found.evidence}; times with gradients in {share:.0%} of these steps: {gradients.evidence}",
        }
        kept = ("fusion", "wire", "wire_overflows", "backward_s", "window_steps")
        return found.model_copy(update={**{key: getattr(gradients, key) for key in kept}, **times, **more})

    def settings(self) -> list[Setting]:
        """The library's, and how often parameters were averaged, told by how far ranks had come apart; after
        `exchange_result`.
        """
        sync, seen, tensors = self._sync, self._seen, self._averaged()
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        how = (
            f"{seen['averages']} averages of {format_bytes(num_bytes)} in {seen['apart']} updates apart, and "
            f"{seen['forced']} for checkpoints and the end; before the last, ranks were up to {self._distance:.2g} of "
            "the mean's norm from it"
        )
        found: Value = sync.average_every if self._distance else "no difference"
        if not seen["averages"]:
            found = "only at the end" if self._has_parted else "never"
        rows: list[tuple[str, Value, Value, str]] = [("sync.average_every", sync.average_every, found, how)]
        if self._groups is not None:
            by = f"here gradients over ranks {self._groups.inside.ranks}, parameters over {self._groups.across.ranks}"
            rows.append(("sync.exchange", sync.exchange, "hierarchical" if self._has_parted else "flat", by))
        if sync.average_from:
            first = f"{seen['exchanged']} updates of this run with exchanged gradients"
            rows.append(
                ("sync.average_from", sync.average_from, sync.average_from if self._has_parted else None, first)
            )
        if self._plan.workload.train.optimizer.slots:
            kept = f"{len(tensors) - len(self._parameters)} tensors of the optimizer's state in an average"
            rows.append(("sync.average_momentum", sync.average_momentum, len(tensors) > len(self._parameters), kept))
        return super().settings() + settings_of(*rows)
