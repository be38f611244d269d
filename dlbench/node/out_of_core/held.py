"""What a rank's device holds at the peak of a step, by kind: weights, gradients, optimizer state, buffers.

What they leave of the peak is activations, gathered parameters and what operations take meanwhile. On a GPU the peak is
that of the allocator in the last warm-up step. On a CPU it is that of every allocation and release as torch's profiler
reports them, on top of what was there before the step. To start the profiler takes 0.1 s: it watches the first step of
all, whose times are used for nothing. The optimizer makes its values in the update of that step, so that its passes
hold as much less than those of later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.out_of_core.device_memory import PeakMeter, peak_bytes, peaks_on
from dlbench.node.part import TrainingPart
from dlbench.node.step_schedule import StepSchedule
from dlbench.records.record import HeldMemory


def local_bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Of tensors on that kind of device, each once; of a `DTensor` this rank's share."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.device.type == device.type:
                found[id(tensor)] = local.numel() * local.element_size()
    return sum(found.values())


class StepMemory(TrainingPart):
    """Watches one step of the warm-up, on this rank."""

    def __init__(
        self,
        watch: Callable[[bool], None],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        exchange: tuple[int, bool],
    ) -> None:
        """As the engine has prepared them. `watch`: its `watch_memory`; `exchange`: as `exchange_memory` gives it."""
        self._watch, self._model, self._optimizer, self._device = watch, model, optimizer, device
        self._exchange, self._gradients_stay = exchange
        self._meter: PeakMeter | None = None
        self._found: HeldMemory | None = None

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Watches the first step on a CPU. A GPU's memory is taken in its first step by cuDNN's search and by
        compilers, and not in the last step of the warm-up, which is watched there.
        """
        self.close()
        if step != (max(1, schedule.warmup - 1) if self._device.type == "cuda" else 0):
            return
        try:
            meter = peaks_on(self._device)
        except EnvironmentLacksError:
            return  # a torch without its profiler
        self.peak_before = peak_bytes(self._device)
        self._hook = self._optimizer.register_step_pre_hook(self._at_update)
        self._kinds = self._persistent(self._device)
        self._gradients = self._in_buffers = 0
        self._base = sum(self._kinds.values()) + self._exchange
        if self._device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self._device)
        self._watch(True)
        self._meter = meter.__enter__()
        meter.mark("passes")

    def _persistent(self, device: torch.device) -> dict[str, int]:
        # ZeroRedundancyOptimizer has the values of its share in another one.
        state = getattr(self._optimizer, "optim", self._optimizer).state
        return {
            "weights": local_bytes(self._model.parameters(), device),
            "optimizer": local_bytes((one for values in state.values() for one in values.values()), device),
            "buffers": local_bytes(self._model.buffers(), device),
        }

    def _at_update(self, *_: Any) -> None:
        """Before the optimizer's update, where each gradient is there."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._gradients = local_bytes(gradients, self._device)
        views = [one for one in gradients if one.untyped_storage().nbytes() > one.numel() * one.element_size()]
        self._in_buffers = min(self._exchange, local_bytes(views, self._device))
        assert self._meter is not None
        self._meter.mark("update")

    def close_window(self) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching, if it did, and keeps what was seen.

        Of a step that failed as well: with torch's profiler open, Python would crash at its end and lose the exit code.
        """
        if self._meter is None:
            return
        self._hook.remove()
        self._watch(False)
        self._meter.__exit__(None, None, None)
        seen, self._meter = self._meter.held(), None
        if "update" not in seen:
            return  # a loss scale that did not fit: nothing was updated
        on_cpu = self._device.type == "cpu"
        base = self._base + (self._gradients if self._gradients_stay and on_cpu else 0)
        kinds = self._persistent(self._device) | {"gradients": self._gradients}
        made = kinds["optimizer"] - self._kinds["optimizer"]
        kinds["buffers"] += self._exchange - self._in_buffers
        passes, update = base + made + seen["passes"].peak, base + seen["update"].peak
        peak = max(passes, update)
        how = "torch's allocator in the last warm-up step"
        if on_cpu:
            how = (
                "every allocation of the first step by torch's profiler, the optimizer's values counted from its start"
            )
            if (unseen := seen["update"].end - made) > peak // 100:
                how += f"; {unseen} bytes were not seen to be released, which other threads may have done"
        in_memory, on_host = self._persistent(torch.device("cpu")), None
        if not on_cpu and in_memory["weights"]:
            # Parameters, gradients and the optimizer's values that lie in the host's memory.
            on_host = 2 * in_memory["weights"] + in_memory["optimizer"]
        self._found = HeldMemory(
            **kinds,
            activations=max(0, peak - sum(kinds.values())),
            peak=peak,
            passes_peak=passes,
            update_peak=update,
            host=on_host,
            evidence=how,
        )

    def rank_result(self) -> dict[str, Any]:
        return {"held": self.result}

    @property
    def result(self) -> HeldMemory | None:
        """After training; None: no step was watched."""
        if self._found is None or self._device.type != "cuda":
            return self._found
        return self._found.model_copy(update={"retries": torch.cuda.memory_stats(self._device)["num_alloc_retries"]})
