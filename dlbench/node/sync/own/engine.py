"""dlbench's own exchange as an engine: a library finds the ranks and carries messages, dlbench does the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from dlbench.errors import UserError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.clocks import clock_for
from dlbench.node.sync.engine import Engine, EngineOverLibrary, MessageSpan
from dlbench.node.sync.own import buckets
from dlbench.node.sync.own.exchange_report import exchange_settings
from dlbench.node.sync.own.exchanger import Exchanger
from dlbench.node.sync.own.route import RouteBuilder
from dlbench.records.exchange import ExchangeResult
from dlbench.records.network import read_network
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan


class OwnExchange(EngineOverLibrary):
    """A library that serves all but gradients, and an `Exchanger` on top."""

    def __init__(self, library: Engine, plan: RunPlan, place: RankPlace, device: torch.device) -> None:
        """One rank's, over a library that is not started yet.

        Raises:
            UserError: the plan asks for shared memory between GPUs, or names a file of costs that is none.
        """
        if plan.sync.inside == "shared-memory" and device.type != "cpu":
            raise UserError("sync.inside shared-memory: gradients lie on GPUs; use sync.inside backend")
        if plan.sync.network is not None:
            read_network(Path(plan.sync.network))  # before the ranks meet
        super().__init__(library)
        self._plan = plan
        self._place = place
        self._device = device
        self._prepared: Exchanger | None = None

    def start(self) -> None:
        self._library.allow_groups()
        super().start()

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
        communicators = self._library.communicators()
        communicators.broadcast_parameters(model)
        route = RouteBuilder(
            self._plan,
            self._place,
            self._device,
            communicators=communicators,
            clock=clock,
            gather=self.gather,
            tensor_elements=[parameter.numel() for _, parameter in named],
        ).build()
        self._prepared = Exchanger(self._plan, named, route, clock, self.gather, self._place.size)
        return super().prepare(model, optimizer, mark_backward)

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
        super().step(update)
        self._exchanger.arrange_anew()

    def exchange_result(self) -> ExchangeResult | None:
        """Counted in measured steps; the same on all ranks but for the times of single messages."""
        times = self._exchanger.times_of_all_ranks()
        return self._exchanger.account().result(times)

    def settings(self) -> list[Setting]:
        """The engine's own, and what became of `sync`."""
        return exchange_settings(self._plan, self._library.settings(), self._exchanger.account())

    def stop(self) -> None:
        if self._prepared is not None:
            self._prepared.stop()
        super().stop()
