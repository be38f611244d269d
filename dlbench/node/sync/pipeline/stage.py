"""The stage of one rank of a pipeline with its timed passes, and times of the units that it is cut from."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dlbench.node.sync.engine import Batch
from dlbench.node.sync.timing import Clock

Forward = Callable[[nn.Module, Batch], Tensor]

_TIMED_PASSES = 3  # Passes over which a unit's time is a median, after one that is not timed.


class NetworkPart(nn.Module):
    """Consecutive units of a network, called with the arguments of the whole."""

    def __init__(self, network: nn.Module, units: range) -> None:
        super().__init__()
        self.network, self.units = network, units
        self.received: Tensor | None = None  # Output of the unit before.

    def forward(self, *arguments: Any) -> Any:
        network: Any = self.network
        return network.run_units(self.units, self.received, *arguments)


def unit_seconds(
    network: nn.Module, num_units: int, batch: Batch, forward: Forward, clock: Clock
) -> tuple[list[float], list[list[str]], list[int]]:
    """Returns each unit's seconds of both passes over a batch, names of its parameters, and the shape of its output.

    The network has no gradients afterwards.
    """
    seconds: list[list[float]] = [[] for _ in range(num_units)]
    names: list[list[str]] = [[] for _ in range(num_units)]
    outputs: list[Tensor] = []
    for _ in range(1 + _TIMED_PASSES):
        part = NetworkPart(network, range(0))
        outputs, inputs, moments = [], [], []
        for unit in range(num_units):
            part.units, begin = range(unit, unit + 1), clock.mark()
            outputs.append(forward(part, batch))
            moments.append([begin, clock.mark()])
            part.received = outputs[-1].detach().requires_grad_()
            inputs.append(part.received)
        for unit in reversed(range(num_units)):
            gradient = inputs[unit].grad if unit + 1 < num_units else None
            begin = clock.mark()
            torch.autograd.backward(outputs[unit], gradient)
            moments[unit] += [begin, clock.mark()]
            names[unit] = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
            network.zero_grad()
        clock.settle()
        for unit, (forward_begin, forward_end, backward_begin, backward_end) in enumerate(moments):
            unit_s = clock.between(forward_begin, forward_end) + clock.between(backward_begin, backward_end)
            seconds[unit].append(unit_s)
    return [statistics.median(timed[1:]) for timed in seconds], names, list(outputs[0].shape)


class TimedStage(PipelineStage):
    """A stage that times its passes and counts what it sends."""

    def __init__(self, part: NetworkPart, forward: Forward, shape: Sequence[int], clock: Clock, **place: Any) -> None:
        """`shape` is that of the tensors between stages, `place` the arguments of `PipelineStage`."""
        # With both given, torch runs no pass to find out shapes.
        hidden = torch.empty(*shape, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        received = () if place["stage_index"] == 0 else hidden
        sent = loss if place["stage_index"] == place["num_stages"] - 1 else hidden
        super().__init__(part, input_args=received, output_args=sent, **place)
        self._part, self._forward, self._clock = part, forward, clock
        self._microbatches: list[Batch] = []
        self.marks: dict[str, Callable[[], None]] = {}  # End phases of the step, by pass.
        self.beat: Callable[[str], None] = lambda _progress: None
        self.order = ""  # Passes of the last step in their order, F and B.
        self.sends: list[tuple[int, int]] = []  # Receiving stage and bytes of each message of the last step.
        self.busy_s = self.passes_s = 0.0
        self.waits_s: defaultdict[str, float] = defaultdict(float)  # Seconds in which it did not compute, by pass.
        self._moments: list[tuple[str, Any]] = []  # Of a step: begin, begin and end of each pass, end; and the pass.
        self._pending: deque[list[tuple[str, Any]]] = deque()

    def begin_passes(self, microbatches: list[Batch]) -> None:
        self._microbatches, self.order = microbatches, ""
        self.sends.clear()
        self._moments = [("", self._clock.mark())]

    def end_passes(self) -> None:
        """Notes that the passes of all stages have ended."""
        self._pending.append([*self._moments, ("backward", self._clock.mark())])
        self.marks["backward"]()
        self.settle()

    def restart(self) -> None:
        """Resets all times; called between steps that the device has completed."""
        self._clock.settle()
        self.settle()
        self.busy_s = self.passes_s = 0.0
        self.waits_s.clear()

    def settle(self) -> None:
        """Adds up the steps whose times are known."""
        while self._pending and self._clock.has_passed(self._pending[0][-1][1]):
            names, moments = zip(*self._pending.popleft(), strict=True)
            for number in range(1, len(moments)):
                interval_s = self._clock.between(moments[number - 1], moments[number])
                self.passes_s += interval_s
                if number % 2:
                    self.waits_s[names[number]] += interval_s
                else:
                    self.busy_s += interval_s
            self._clock.give_back(moments)

    def _timed(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.beat(f"pass {len(self.order)} of its stage")
        self._moments.append((name, self._clock.mark()))
        output = run(*args, **kwargs)
        self._moments.append((name, self._clock.mark()))
        self.marks[name]()
        self.order += name[0].upper()
        return output

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("forward", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("backward", super().backward_one_chunk, *args, **kwargs)

    def forward_maybe_with_nosync(self, *received: Tensor, **_: Any) -> Tensor:
        """Computes the next microbatch; it replaces torch's call of the module."""
        self._part.received = received[0] if received else None
        output = self._forward(self._part, self._microbatches[self.order.count("F")])
        self._part.received = None
        return output / len(self._microbatches) if self.is_last else output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index + 1, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, receiver: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sends += [(receiver, operation.tensor.nbytes) for operation in operations]
        return operations
