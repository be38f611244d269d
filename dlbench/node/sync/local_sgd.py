"""Local SGD: ranks update independently, and average their parameters every few updates.

Local SGD (Stich 2019, arXiv 1805.09767) does so from the first update, post-local SGD (Lin et al. 2020, arXiv
1808.07217) after some updates with exchanged gradients.
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
from dlbench.node.sync.run_store import GroupRanks, RankGroups, TorchGroup, make_groups
from dlbench.node.sync.timing import clock_for, median, ring_bytes
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

_SAMPLED = 4096  # Entries of an average that are compared before and after, to see how far ranks had diverged.
_TIMED = 1000  # Number of last averages whose times are kept.


class LocalSgd(EngineOverLibrary):
    """Averages parameters over a library, which also exchanges gradients during the updates that plan it."""

    def __init__(self, library: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        super().__init__(library)
        self._plan, self._sync, self._place = plan, plan.sync, place
        self._exchanges_gradients = plan.sync.exchanges_gradients  # At the start of training, or inside groups.
        self._gradients = library if self._exchanges_gradients else Engine()  # Engine for the gradients of a step.
        self._clock = clock_for(device)
        self._held_exchange = ExitStack()
        self._groups: RankGroups | None = None  # Set if gradients are averaged inside groups.
        self._parameters: list[torch.Tensor] = []
        self._updates = 0  # Updates of the whole training.
        self._is_local = False  # Whether the phase of independent updates has begun.
        self._has_diverged = False  # Whether parameters differ between ranks now.
        # Number of "independent", "exchanged", "averages" and "forced":
        self._counts = Counter[str]()  # in all steps,
        self._measured = Counter[str]()  # in measured steps.
        self._averages: deque[tuple[Any, Any]] = deque(maxlen=_TIMED)  # Begin and end, moments of the clock.
        self._sampled: tuple[torch.Tensor, torch.Tensor] | None = None
        """Entries of this rank's parameters before the last average, and of the mean."""
        self._distance = 0.0  # Norm of their difference over that of the mean, largest of all ranks.

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes parameters equal; model and optimizer stay plain where no gradient is ever exchanged."""
        self._parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        self._optimizer = optimizer
        if not self._exchanges_gradients:
            self._library.communicators().broadcast_parameters(model)
        elif self._sync.exchange == "hierarchical":
            group_ranks = GroupRanks(size=self._place.size, group_size=self._plan.group_size)
            self._groups = make_groups(self._library.communicators(), group_ranks)
        self.marks_backward = self._gradients.marks_backward
        return self._gradients.prepare(model, optimizer, mark_backward, accumulation=accumulation)

    def begin_training(self, first: int) -> None:
        self._updates = first
        if first >= self._sync.average_from:
            self._begin_local_phase()

    def _begin_local_phase(self) -> None:
        self._is_local = True
        if self._groups is not None:
            assert isinstance(self._library, DdpEngine)  # by the plan
            assert isinstance(self._groups.inside, TorchGroup)
            self._library.average_within(self._groups.inside)
        else:
            self._held_exchange.enter_context(self._gradients.hold_exchange())
            self._gradients, self.marks_backward = Engine(), False

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._gradients.hold_exchange()

    def begin_backward(self) -> None:
        self._gradients.begin_backward()

    def finish_exchange(self) -> None:
        self._gradients.finish_exchange()

    def watch(self, on: bool) -> None:
        if self._exchanges_gradients:
            self._library.watch(on)
        if not on:  # the measured steps begin
            self._measured.clear()
            self._averages.clear()

    def message_spans(self) -> list[MessageSpan]:
        return self._library.message_spans() if self._exchanges_gradients else []

    def step(self, update: Callable[[Optimizer], object]) -> None:
        super().step(update)
        self._updates += 1
        self._has_diverged = self._is_local
        self._count("independent" if self._is_local else "exchanged")

    def _count(self, name: str) -> None:
        self._counts[name] += 1
        self._measured[name] += 1

    def exchange_parameters(self) -> bool:
        local_updates = self._updates - self._sync.average_from
        if local_updates == 0 and not self._is_local:
            self._begin_local_phase()
        if local_updates <= 0 or local_updates % (self._sync.average_every or 1):
            return False
        begin = self._clock.mark()
        self._average(self._averaged_tensors())
        self._averages.append((begin, self._clock.mark()))
        self._count("averages")
        return True

    def _averaged_tensors(self) -> list[torch.Tensor]:
        if not self._sync.average_momentum:
            return self._parameters
        return self._parameters + self._optimizer_state()

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Returns optimizer state that has a value per entry of a parameter, e.g. momentum, but no step counts."""
        state: list[torch.Tensor] = []
        for parameter, values in self._optimizer.state.items():
            tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
            state += [tensor for tensor in tensors if tensor.shape == parameter.shape]
        return state

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, as one message, and samples this rank's distance to them."""
        num_elements = sum(tensor.numel() for tensor in tensors)
        parts = len(self._groups.inside.ranks) if self._groups is not None else 1
        padding = tensors[0].new_zeros(-num_elements % parts)
        flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])
        stride = -(-num_elements // _SAMPLED)
        sampled_before = flat[::stride].clone()
        if self._groups is None:
            self._library.average([flat])
        else:  # each rank of a group averages a share with its peers in other groups, and the group gathers the shares
            inside, across = self._groups.inside, self._groups.across
            share = flat.view(parts, -1)[inside.index]
            across.sum(share)
            share /= len(across.ranks)
            inside.all_gather(share, flat)
        self._sampled = sampled_before, flat[::stride].clone()
        pieces = torch.split(flat[:num_elements], [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])
        self._has_diverged = False

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """Averages parameters and optimizer state on all ranks, and returns that state."""
        if self._has_diverged or (self._is_local and not self._sync.average_momentum):
            self._average(self._parameters + self._optimizer_state())
            self._count("forced")
        return super().whole_state(model, optimizer)

    def end_training(self) -> None:
        if self._has_diverged:
            self._average(self._parameters)
            self._count("forced")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets parameters to the mean of all ranks within the context; afterwards each rank has its own again."""
        if not self._has_diverged:
            yield
            return
        local_parameters = [parameter.clone() for parameter in self._parameters]
        self._average(self._parameters)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, local_parameters)
            self._has_diverged = True

    def _sent(self, num_bytes: int, steps: int) -> tuple[float, float]:
        size, nodes, group_size = self._place.size, self._place.num_nodes, self._plan.group_size
        counts = self._measured
        width = 2 if self._sync.wire in ("fp16", "bf16") else 4
        gradient_bytes = width * sum(parameter.numel() for parameter in self._parameters)
        parts = [ring_bytes(gradient_bytes * counts["exchanged"], ranks=size, groups=nodes)]
        if self._groups is None:
            parts.append(ring_bytes(num_bytes * counts["averages"], ranks=size, groups=nodes))
        else:
            share = num_bytes * counts["averages"] / group_size
            parts.append(((group_size - 1) * share, 2 * (1 - group_size / size) * share))
            parts.append(ring_bytes(gradient_bytes * counts["independent"], ranks=group_size, groups=1))
        return sum(inside for inside, _ in parts) / steps, sum(across for _, across in parts) / steps

    def exchange_result(self) -> ExchangeResult | None:
        """Returns the averages counted in measured steps together with the gradient messages of the library."""
        gradients = self._library.exchange_result() if self._exchanges_gradients else None
        self._clock.settle()
        if self._sampled is not None:
            local, mean = self._sampled
            self._distance = float(torch.linalg.vector_norm(local - mean) / torch.linalg.vector_norm(mean))
        counts = self._measured
        steps = counts["independent"] + counts["exchanged"]
        average_s = [self._clock.between(begin, end) for begin, end in self._averages]
        per_step_s = 0.0
        if average_s:
            per_step_s = counts["averages"] / steps * statistics.fmean(average_s)
        by_rank: list[tuple[float, float]] = self.gather((self._distance, per_step_s))
        self._distance = max(distance for distance, _ in by_rank)
        if not self._is_local:
            return gradients
        mean_per_step_s = statistics.fmean(seconds for _, seconds in by_rank)
        tensors, carrier = self._averaged_tensors(), self._library.communicators().carrier
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        inside = across = None
        if steps and carrier == "gloo":
            inside, across = self._sent(num_bytes, steps)
        method = f"average every {self._sync.average_every} updates"
        averages = ExchangeResult(
            carrier=carrier,
            by="dlbench",
            exchange=f"gradients inside the group, {method}" if self._groups is not None else method,
            fusion="one message",
            wire="fp32",
            group_size=self._plan.group_size,
            num_groups=self._place.size // self._plan.group_size,
            messages=(
                Message(num_bytes=num_bytes, num_tensors=len(tensors), method=method, exchange_s=median(average_s)),
            ),
            bytes_inside=inside,
            bytes_across=across,
            communication_s=mean_per_step_s,
            exposed_s=mean_per_step_s,
            hidden_s=0.0,
            window_steps=steps,
            evidence=f"{counts['averages']} averages in {steps} measured steps, counted; bytes by a ring's formula",
        )
        if gradients is None or not gradients.messages:
            return averages
        return self._with_gradients(averages, gradients)

    def _with_gradients(self, averages: ExchangeResult, gradients: ExchangeResult) -> ExchangeResult:
        share = 1.0  # Share of the measured steps that exchanged gradients.
        if self._groups is None:
            share = self._measured["exchanged"] / max(1, averages.window_steps)
        exchange = averages.exchange
        if self._sync.average_from:
            exchange = f"flat until update {self._sync.average_from}, then {exchange}"
        fields: dict[str, Any] = {
            "exchange": exchange,
            "messages": (*gradients.messages, *averages.messages),
            "evidence": f"{averages.evidence}; times with gradients in {share:.0%} of these steps: "
            f"{gradients.evidence}",
        }
        for key in ("fusion", "wire", "wire_overflows", "backward_s", "window_steps"):
            fields[key] = getattr(gradients, key)
        for key in ("communication_s", "exposed_s", "hidden_s"):
            gradients_s = getattr(gradients, key)
            fields[key] = None
            if gradients_s is not None:
                fields[key] = share * gradients_s + getattr(averages, key)
        return averages.model_copy(update=fields)

    def settings(self) -> list[Setting]:
        """Returns settings, after `exchange_result`; averages are in force if ranks had diverged before them."""
        sync, counts, tensors = self._sync, self._counts, self._averaged_tensors()
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        averages = f"{counts['averages']} averages of {format_bytes(num_bytes)}"
        how = (
            f"{averages} in {counts['independent']} independent updates, and {counts['forced']} for checkpoints and "
            "the end; before the last, the distance of a rank from the mean was up to "
            f"{self._distance:.2g} of the mean's norm"
        )
        average_every: Value = sync.average_every if self._distance else "no difference"
        if not counts["averages"]:
            average_every = "only at the end" if self._is_local else "never"
        rows: list[tuple[str, Value, Value, str]] = [("sync.average_every", sync.average_every, average_every, how)]
        if self._groups is not None:
            exchange = "hierarchical" if self._is_local else "flat"
            how = f"here gradients over ranks {self._groups.inside.ranks}, parameters over {self._groups.across.ranks}"
            rows.append(("sync.exchange", sync.exchange, exchange, how))
        if sync.average_from:
            average_from = sync.average_from if self._is_local else None
            how = f"{counts['exchanged']} updates of this run with exchanged gradients"
            rows.append(("sync.average_from", sync.average_from, average_from, how))
        if self._plan.workload.train.optimizer.slots:
            state_tensors = len(tensors) - len(self._parameters)
            how = f"{state_tensors} tensors of the optimizer's state in an average"
            rows.append(("sync.average_momentum", sync.average_momentum, state_tensors > 0, how))
        return super().settings() + settings_of(*rows)
