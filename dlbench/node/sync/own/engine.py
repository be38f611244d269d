"""dlbench's own exchange as an engine: a library finds the ranks and carries messages, dlbench does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlbench.errors import UserError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.clocks import clock_for
from dlbench.node.sync.communicators import communicators_for
from dlbench.node.sync.engine import Engine, MessageSpan
from dlbench.node.sync.own import buckets
from dlbench.node.sync.own.exchange_report import exchange_settings
from dlbench.node.sync.own.exchanger import Exchanger
from dlbench.node.sync.own.route import RouteBuilder
from dlbench.records.exchange import ExchangeResult
from dlbench.records.network import read_network
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan


class OwnExchange:
    """An engine that serves all but gradients, and an `Exchanger` on top."""

    marks_backward = False

    def __init__(self, base: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        """`base` is not started yet.

        Raises:
            UserError: the plan asks for shared memory between GPUs, or names a
                file of costs that is none.
        """
        if plan.sync.inside == "shared-memory" and device.type != "cpu":
            raise UserError("sync.inside shared-memory: gradients lie on GPUs; use sync.inside backend")
        if plan.sync.network is not None:
            read_network(Path(plan.sync.network))  # before the ranks meet
        self._base = base
        self._plan = plan
        self._place = place
        self._device = device
        self._optimizer: torch.optim.Optimizer | None = None
        self._prepared: Exchanger | None = None

    def start(self) -> None:
        if self._plan.engine.name == "horovod":
            from dlbench.node.sync.own.horovod_groups import allow_process_sets

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
        """Makes groups, times messages where that is needed, makes parameters equal; model and optimizer stay plain."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets.require_fp32(named)
        clock = clock_for(self._device)
        communicators = communicators_for(self._plan.engine.name, self._device)
        communicators.broadcast_parameters(model)
        route = RouteBuilder(
            self._plan,
            self._place,
            self._device,
            communicators=communicators,
            clock=clock,
            gather=self._base.gather,
            tensor_elements=[parameter.numel() for _, parameter in named],
        ).build()
        self._prepared = Exchanger(self._plan, named, route, clock, self._base.gather, self._place.size)
        self._optimizer = optimizer
        return model, optimizer

    @property
    def _exchanger(self) -> Exchanger:
        assert self._prepared is not None
        return self._prepared

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._exchanger.held()

    def begin_backward(self) -> None:
        self._exchanger.begin()

    def watch(self, on: bool) -> None:
        """Every step is watched anyway; those in between are kept one by one."""
        self._exchanger.watch(on)

    def message_spans(self) -> list[MessageSpan]:
        return self._exchanger.message_spans()

    def finish_exchange(self) -> None:
        self._exchanger.finish()

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        assert self._optimizer is not None
        update(self._optimizer)
        self._exchanger.arrange_anew()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        self._base.average(tensors)

    def gather(self, value: Any) -> list[Any]:
        return self._base.gather(value)

    def barrier(self) -> None:
        self._base.barrier()

    def exchange_result(self) -> ExchangeResult | None:
        """Counted in measured steps; the same on all ranks but for the times of single messages."""
        times = self._exchanger.times_of_all_ranks()
        return self._exchanger.account().result(times)

    def settings(self) -> list[Setting]:
        """The engine's own, and what became of `sync`."""
        return exchange_settings(self._plan, self._base.settings(), self._exchanger.account())

    def stop(self) -> None:
        if self._prepared is not None:
            self._prepared.stop()
        self._base.stop()
