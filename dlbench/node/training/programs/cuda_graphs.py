"""`train.cuda_graphs network`: forward and backward pass captured once, and replayed in every step.

`torch.cuda.make_graphed_callables` captures the network before the engine wraps it, as DDP's notes on CUDA graphs ask
for; casts of autocast lie within, without its cache, which would not outlive the capture. Outside stay the copy of the
batch, the loss and its scaling, the exchange and the update. Parameters, buffers and inputs keep their addresses:
engines, checkpoints and the optimizer write them in place. Dropout draws anew in each replay, as the generator stands.
Evaluations run what was not captured, since their last batch may be short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.node.memory.profile import undisturbed
from dlbench.node.models.build import Batch
from dlbench.node.training.precision import Precision
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

Forward = Callable[..., Any]


class NetworkGraphs:
    """The captured network of one rank.

    Args:
        plan: captures, by `train.cuda_graphs`.
        device: where the network is.

    Raises:
        EnvironmentLacksError: it is no NVIDIA GPU, or this torch cannot capture.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        if device.type != "cuda":
            raise EnvironmentLacksError(
                "train.cuda_graphs network: this rank computes on a CPU, and CUDA graphs are launches on a "
                "GPU; set train.cuda_graphs to none"
            )
        self._plan, self._device = plan, device
        self._is_replayed = False
        self._held_bytes = 0
        self._seconds = 0.0

    def capture(
        self,
        model: nn.Module,
        precision: Precision,
        loss_of: Callable[[Batch], Tensor],
        batch: Batch,
        beat: Callable[[str], None],
    ) -> None:
        """Captures the network in place; gradients, buffers and random states are then as they were before.

        Args:
            model: in training mode, on the device, without hooks.
            precision: of training.
            loss_of: forward pass and loss of `model`.
            batch: of the shapes that every step has, on the device.
            beat: told before the capture.

        Raises:
            EnvironmentLacksError: torch cannot capture this network here.
        """
        beat("capturing CUDA graphs of the network")
        began = time.monotonic()
        with undisturbed(model, self._device):
            given = _arguments(model, loss_of, batch)
            shapes = _shapes(given)
            samples = tuple(one.detach().clone() for one in given if isinstance(one, Tensor))
            eager = model.forward
            before = torch.cuda.memory_reserved(self._device)
            model.forward = _tensors_only(eager, given, precision)
            try:
                torch.cuda.make_graphed_callables(
                    model, samples, num_warmup_iters=self._plan.engine.kind.capture_passes
                )
            except RuntimeError as error:
                model.forward = eager
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = str(error).splitlines()[0]
                raise EnvironmentLacksError(
                    f"train.cuda_graphs network: torch cannot capture the network here ({reason}); set it to none"
                ) from error
            self._held_bytes = torch.cuda.memory_reserved(self._device) - before
            model.forward = _replaying(model, eager, model.forward, shapes)
            self._is_replayed = _is_replayed(model(*given))
        torch.cuda.synchronize(self._device)
        self._seconds = time.monotonic() - began

    @property
    def warnings(self) -> list[str]:
        """Reasons for doubt, a sentence each."""
        if self._plan.layout.ranks == 1 or self._plan.sync.exchange == "none":
            return []
        return [
            "train.cuda_graphs: the captured backward pass hands over all gradients at its end, so that their exchange "
            "does not overlap with it"
        ]

    def settings(self) -> list[Setting]:
        """What was asked for and what was in force."""
        return [
            Setting(
                key="train.cuda_graphs",
                requested="network",
                effective="network" if self._is_replayed else "none",
                evidence=f"torch.cuda.make_graphed_callables captured forward and backward in {self._seconds:.1f} s "
                f"and holds {format_bytes(self._held_bytes)} of the GPU's memory; outputs of the network come from the "
                f"{'replayed graph' if self._is_replayed else 'network itself'}",
            )
        ]


def _arguments(model: nn.Module, loss_of: Callable[[Batch], Tensor], batch: Batch) -> tuple[Any, ...]:
    """What the network is called with in a step."""
    found: list[tuple[Any, ...]] = []
    handle = model.register_forward_pre_hook(lambda _module, arguments: found.append(arguments))
    try:
        loss_of(batch)
    finally:
        handle.remove()
    return found[0]


def _tensors_only(eager: Forward, given: Sequence[Any], precision: Precision) -> Forward:
    """The forward pass as a function of its tensors, which is all that can be captured; what else was given stays."""

    def forward(*tensors: Tensor) -> Any:
        left = iter(tensors)
        arguments = [next(left) if isinstance(one, Tensor) else one for one in given]
        # Its cache would hold casts that lie in the capture's memory.
        with precision.autocast(is_cached=False):
            return eager(*arguments)

    return forward


def _replaying(model: nn.Module, eager: Forward, replayed: Forward, shapes: tuple[object, ...]) -> Forward:
    """The captured forward pass in training, the network itself in evaluations.

    The function raises RunError where training gives it other inputs than were captured: a replay would spread them
    over the captured shape without a word.
    """

    def forward(*arguments: Any) -> Any:
        if not model.training:
            return eager(*arguments)
        if _shapes(arguments) != shapes:
            raise RunError(
                f"train.cuda_graphs network: the network was captured for inputs of {_text(shapes)}, and a step gives "
                f"it {_text(_shapes(arguments))}; set train.cuda_graphs to none"
            )
        return replayed(*[one for one in arguments if isinstance(one, Tensor)])

    return forward


def _shapes(arguments: Sequence[Any]) -> tuple[object, ...]:
    """Shape and type of every tensor; anything else as it is."""
    return tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in arguments)


def _text(shapes: tuple[object, ...]) -> str:
    return ", ".join("x".join(map(str, one[0])) if isinstance(one, tuple) else str(one) for one in shapes)


def _is_replayed(outputs: Any) -> bool:
    """Whether outputs come from a captured graph: `make_graphed_callables` names its autograd function Graphed."""
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return type(first.grad_fn).__name__ == "GraphedBackward"
