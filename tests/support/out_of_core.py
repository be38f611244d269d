"""A chain that trains by each method as a rank does: measured, planned, and moved or recomputed. On any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.node.models.optimizers import optimizer_of
from dlbench.node.out_of_core.planning import Workbench, plan_memory
from dlbench.node.out_of_core.tiers import LaneSpan, Tier
from dlbench.node.part import StepSchedule
from dlbench.node.training.activations import ActivationMemory
from dlbench.perfmodels.out_of_core.search import smallest_capacity
from dlbench.specs.out_of_core import TransferRates
from dlbench.specs.training import OptimizerSpec, TrainSpec

STEPS = 4
METHODS = {
    "recompute": {"recompute": "blocks"},
    "offload": {"swap": "offload"},
    "streamed": {"swap": "streamed"},
    "recompute and streamed": {"recompute": "blocks", "swap": "streamed"},
    "planned swap": {"swap": "planned"},
    "planned": {"recompute": "planned", "swap": "planned"},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What training by a method left and took."""

    losses: list[float]
    parameters: list[Tensor]
    peak_bytes: int  # by torch's allocator on a GPU, from the second step on; 0 on a CPU
    capacity_bytes: int | None = None
    rates: TransferRates | None = None
    predicted_bytes: int = 0  # that leave in a pass
    told: dict[str, Any] | None = None
    spans: tuple[LaneSpan, ...] = ()
    warnings: tuple[str, ...] = ()

    def is_as(self, other: Outcome) -> bool:
        """To the last bit."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return self.losses == other.losses and all(torch.equal(one, two) for one, two in pairs)


class ChainTraining:
    """Linear layers of one width, with what else there is between them. `open_tier`: opens a far tier."""

    def __init__(self, device: torch.device, rows: int, width: int, open_tier: Callable[[int], Tier]) -> None:
        self.device, self.rows, self.width, self.open_tier = device, rows, width, open_tier
        self.x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device)
        self.optimizer = OptimizerSpec(name="sgd", learning_rate=0.05, momentum=0.9)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        kinds = [nn.GELU, nn.GELU, lambda: nn.Dropout(0.1), nn.GELU, nn.GELU]
        layers: list[nn.Module] = [nn.Linear(self.width, self.width)]
        for kind in kinds:
            layers += [kind(), nn.Linear(self.width, self.width)]
        return nn.Sequential(*layers).to(self.device)

    def by(self, method: str | None, share: float = 0.5) -> Outcome:
        """Four steps; None: in core. `share`: where a plan's capacity is, from the smallest (0) to in core (1)."""
        model = self.model()
        memory = None if method is None else self.memory(model, method, share)
        optimizer = optimizer_of(list(model.parameters()), self.optimizer)
        losses = []
        schedule = StepSchedule(first=0, end=STEPS, warmup=3, global_batch=self.rows, steps_per_epoch=None)
        for step in range(STEPS):
            if step == 1:
                self._reset_peak()
                if memory is not None:
                    memory.begin_measuring()
            if memory is not None:
                memory.before_warmup(step, schedule)
            torch.manual_seed(step)
            loss = model(self.x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        peak = self._peak()
        left: dict[str, Any] = {
            "losses": [float(loss) for loss in losses],
            "parameters": [one.detach().cpu() for one in model.parameters()],
            "peak_bytes": peak,
        }
        if memory is None:
            return Outcome(**left)
        memory.close_window()
        plan = memory.memory_plan.plan
        left |= {"spans": tuple(span for _, span in memory.spans()), "told": memory.rank_memory().model_dump()}
        left |= {"capacity_bytes": plan.capacity_bytes, "predicted_bytes": plan.predicted.swapped_bytes}
        left |= {"rates": memory.memory_plan.rates, "warnings": memory.warnings}
        memory.close()
        return Outcome(**left)

    def memory(self, model: nn.Module, method: str, share: float) -> ActivationMemory:
        """A method at work on a network; for `share` see `by`."""
        train = self._train(METHODS[method])
        bench = Workbench(
            model=model,
            train=train,
            device=self.device,
            loss_of=lambda batch: model(batch["x"]).square().mean(),
            batch_of=lambda samples: {"x": self.x[:samples]},
            open_tier=self.open_tier,
            beat=lambda _: None,
        )
        if train.is_planned:
            whole = plan_memory(bench)
            asked = {"recompute": train.recompute == "planned", "swap": train.swap == "planned"}
            least = smallest_capacity(whole.chain, **asked)
            capacity = round(least + share * (whole.in_core_bytes - least))
            train = self._train(METHODS[method], capacity)
            bench = Workbench(**{**vars(bench), "train": train})
        return ActivationMemory(bench, plan_memory(bench), 0, wrap_block=None)

    def _train(self, method: dict[str, str], capacity: int | None = None) -> TrainSpec:
        planned = "planned" in method.values()
        memory = {"capacity": str(capacity) if capacity is not None else "1000%"} if planned else {}
        return TrainSpec.model_validate(
            {"batch_per_rank": self.rows, "optimizer": self.optimizer.model_dump(), "memory": memory, **method}
        )

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
