"""The stage of one rank of a pipeline with its timed passes, and times of the units that it is cut from."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dlbench.node.sync.engine import Batch
from dlbench.node.sync.timing import Clock

Pass = Literal["forward", "backward"]
Forward = Callable[[nn.Module, Batch], Tensor]

_TIMED_PASSES = 3  # Passes over which a unit's time is a median, after one that is not timed.


class NetworkPart(nn.Module):
    """Consecutive units of a network, called with the arguments of the whole."""

    def __init__(self, network: nn.Module, units: range) -> None:
        super().__init__()
        self.network, self.units = network, units
        self.received: Tensor | None = None  # Output of the unit before.

    def forward(self, *arguments: Any) -> Any:
        run_units: Callable[..., Any] = getattr(self.network, "run_units")  # noqa: B009  (of networks with units)
        return run_units(self.units, self.received, *arguments)


def unit_seconds(
    network: nn.Module, num_units: int, batch: Batch, forward: Forward, clock: Clock
) -> tuple[list[float], list[int]]:
    """Returns the seconds of each unit's forward and backward pass over a batch, and the shape of what units pass on.

    The network has no gradients afterwards.
    """
    seconds: list[list[float]] = [[] for _ in range(num_units)]
    shape: list[int] = []
    for _ in range(1 + _TIMED_PASSES):
        part, outputs, inputs = NetworkPart(network, range(0)), list[Tensor](), list[Tensor]()
        moments: list[list[Any]] = []
        for unit in range(num_units):
            part.units = range(unit, unit + 1)
            begin = clock.mark()
            outputs.append(forward(part, batch))
            moments.append([begin, clock.mark()])
            part.received = outputs[-1].detach().requires_grad_()
            inputs.append(part.received)
        shape = list(inputs[0].shape)
        gradient: Tensor | None = None
        for unit in reversed(range(num_units)):
            begin = clock.mark()
            torch.autograd.backward(outputs[unit], gradient)
            moments[unit] += [begin, clock.mark()]
            if unit:
                gradient = inputs[unit - 1].grad
        clock.settle()
        for unit, (forward_begin, forward_end, backward_begin, backward_end) in enumerate(moments):
            unit_s = clock.between(forward_begin, forward_end) + clock.between(backward_begin, backward_end)
            seconds[unit].append(unit_s)
    for parameter in network.parameters():
        parameter.grad = None
    return [statistics.median(timed[1:]) for timed in seconds], shape


class TimedStage(PipelineStage):
    """A stage that times its passes and counts what it sends."""

    def __init__(self, part: NetworkPart, forward: Forward, shape: Sequence[int], clock: Clock, **place: Any) -> None:
        """`shape` is that of the tensors between stages, `place` the arguments of `PipelineStage`."""
        # With both given, torch runs no pass to find out shapes.
        hidden = torch.empty(*shape, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        is_first, is_last = place["stage_index"] == 0, place["stage_index"] == place["num_stages"] - 1
        super().__init__(
            _Pass(self), input_args=() if is_first else hidden, output_args=loss if is_last else hidden, **place
        )
        self.part, self.compute, self.clock = part, forward, clock
        self.microbatches: list[Batch] = []
        self.number = 0  # Microbatch of the forward pass.
        self.marks: dict[Pass, Callable[[], None]] = {}  # End the phases of the step.
        self.beat: Callable[[str], None] = lambda _progress: None
        self.order = ""  # Passes of the last step in their order, F and B.
        self.sends: list[tuple[int, int]] = []  # Receiving stage and bytes of each message of the last step.
        self.busy_s, self.passes_s = 0.0, 0.0
        self.waits_s: defaultdict[str, float] = defaultdict(float)  # Seconds in which it did not compute, by pass.
        self._calls: list[tuple[Pass, Any, Any]] = []
        self._begin: Any = None
        self._pending: deque[tuple[Any, list[tuple[Pass, Any, Any]], Any]] = deque()

    def begin_passes(self, microbatches: list[Batch]) -> None:
        self.microbatches, self.order = microbatches, ""
        self.sends.clear()
        self._calls, self._begin = [], self.clock.mark()

    def end_passes(self) -> None:
        """Notes that the passes of all stages have ended."""
        self._pending.append((self._begin, self._calls, self.clock.mark()))
        self.marks["backward"]()
        self.settle()

    def restart(self) -> None:
        """Resets all times; called between steps that the device has completed."""
        self.clock.settle()
        self.settle()
        self.busy_s = self.passes_s = 0.0
        self.waits_s.clear()

    def settle(self) -> None:
        """Adds up the steps whose times are known."""
        while self._pending and self.clock.has_passed(self._pending[0][-1]):
            begin, calls, end = self._pending.popleft()
            last, name = begin, "backward"
            for name, called, returned in calls:
                self.waits_s[name] += self.clock.between(last, called)
                self.busy_s += self.clock.between(called, returned)
                last = returned
            self.waits_s[name] += self.clock.between(last, end)
            self.passes_s += self.clock.between(begin, end)
            self.clock.give_back([begin, *(moment for call in calls for moment in call[1:]), end])

    def _timed(self, name: Pass, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.beat(f"pass {len(self._calls)} of its stage")
        called = self.clock.mark()
        output = run(*args, **kwargs)
        self._calls.append((name, called, self.clock.mark()))
        self.marks[name]()
        self.order += name[0].upper()
        return output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.number = fwd_chunk_id
        return self._timed("forward", super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._timed("backward", super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index + 1, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, receiver: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sends += [(receiver, operation.tensor.nbytes) for operation in operations]
        return operations


class _Pass(nn.Module):
    """The module that torch calls with what the stage received."""

    def __init__(self, stage: TimedStage) -> None:
        super().__init__()
        self._stage = [stage]  # in a list, as it is no part of this module

    def forward(self, *received: Tensor) -> Tensor:
        (stage,) = self._stage
        stage.part.received = received[0] if received else None
        output = stage.compute(stage.part, stage.microbatches[stage.number])
        stage.part.received = None
        if stage.is_last:
            output = output / len(stage.microbatches)
        return output
