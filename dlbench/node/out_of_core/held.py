"""Measures a rank's memory at the peak of a step, by kind: weights, gradients, optimizer state, buffers."""
# The optimizer allocates its state in the update of the first step, so that step's passes need less memory by as much.

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.out_of_core.device_memory import PeakMeter, peak_bytes, peaks_on
from dlbench.node.part import StepSchedule, TrainingPart
from dlbench.records.record import HeldMemory


def local_bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Returns the bytes of tensors on that kind of device, each counted once; of a `DTensor` this rank's shard."""
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local: torch.Tensor = tensor
            if hasattr(tensor, "to_local"):
                local = tensor.to_local()
            if local.device.type == device.type:
                # A parameter of another rank's stage has a shape and no memory (`PipelineEngine`).
                sizes[id(tensor)] = min(local.numel() * local.element_size(), local.untyped_storage().nbytes())
    return sum(sizes.values())


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
        """Takes what the engine prepared. `watch`: `Engine.watch_memory`; `exchange`: from `exchange_memory`."""
        self._watch, self._model, self._optimizer, self._device = watch, model, optimizer, device
        self._exchange, self._gradients_stay = exchange
        self._meter: PeakMeter | None = None
        self._result: HeldMemory | None = None

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Begins to watch the first step on a CPU; on a GPU the last of the warm-up, as cuDNN searches in the first."""
        self.close()
        watched_step = max(1, schedule.warmup - 1) if self._device.type == "cuda" else 0
        if step != watched_step:
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
        # ZeroRedundancyOptimizer keeps the state of its part in a local optimizer.
        state = getattr(self._optimizer, "optim", self._optimizer).state
        state_tensors = chain.from_iterable(values.values() for values in state.values())
        return {
            "weights": local_bytes(self._model.parameters(), device),
            "optimizer": local_bytes(state_tensors, device),
            "buffers": local_bytes(self._model.buffers(), device),
        }

    def _at_update(self, *_: Any) -> None:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._gradients = local_bytes(gradients, self._device)
        views = [gradient for gradient in gradients if gradient.untyped_storage().nbytes() > gradient.nbytes]
        self._in_buffers = min(self._exchange, local_bytes(views, self._device))
        assert self._meter is not None
        self._meter.mark("update")

    def close_window(self) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching, and computes the result if a step was watched; also called after a failed step."""
        # With torch's profiler open, Python would crash at its end and lose the exit code.
        if self._meter is None:
            return
        self._hook.remove()
        self._watch(False)
        self._meter.__exit__(None, None, None)
        intervals, self._meter = self._meter.intervals(), None
        if "update" not in intervals:
            return  # a loss scale overflowed: nothing was updated
        on_cpu = self._device.type == "cpu"
        base = self._base
        if self._gradients_stay and on_cpu:
            base += self._gradients
        kinds = self._persistent(self._device) | {"gradients": self._gradients}
        new_state = kinds["optimizer"] - self._kinds["optimizer"]
        kinds["buffers"] += self._exchange - self._in_buffers
        passes_peak = base + new_state + intervals["passes"].peak
        update_peak = base + intervals["update"].peak
        peak = max(passes_peak, update_peak)
        how = "torch's allocator in the last warm-up step"
        if on_cpu:
            how = "every allocation of the first step by torch's profiler; optimizer state counted from its start"
            if (unreleased := intervals["update"].end - new_state) > peak // 100:
                how += f"; no release of {unreleased} bytes was seen, which other threads may have released"
        cpu_kinds, on_host = self._persistent(torch.device("cpu")), None
        if not on_cpu and cpu_kinds["weights"]:
            # Parameters, gradients and optimizer state in host memory.
            on_host = 2 * cpu_kinds["weights"] + cpu_kinds["optimizer"]
        self._result = HeldMemory(
            **kinds,
            activations=max(0, peak - sum(kinds.values())),
            peak=peak,
            passes_peak=passes_peak,
            update_peak=update_peak,
            host=on_host,
            evidence=how,
        )

    def rank_result(self) -> dict[str, Any]:
        return {"held": self.result}

    @property
    def result(self) -> HeldMemory | None:
        if self._result is None or self._device.type != "cuda":
            return self._result
        return self._result.model_copy(update={"retries": torch.cuda.memory_stats(self._device)["num_alloc_retries"]})
