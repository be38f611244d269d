"""Where the host updates parameters: in place on a CPU, on page-locked copies of them where the device is a GPU.

On a GPU gradients are copied out on a stream of their own, once the exchange is done, and parameters back on another;
the forward pass waits for the copies that it needs by events between streams (not measured here).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class HostParameters(Protocol):
    """Parameters as the host updates them, and how gradients come to it."""

    tensors: dict[nn.Parameter, nn.Parameter]
    """What the host's optimizer works on, by parameter."""
    num_bytes: int
    """Held by the host for copies."""
    text: str
    """Where the host works, in words."""

    def enter_thread(self) -> None:
        """Called once on the updating thread."""

    def mark(self) -> Any:
        """This moment of the computation: what was ordered before it is done before gradients are read."""

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], since: Any) -> Any:
        """Begins to bring gradients to the host, after the moment `since`; what `receive` wants."""

    def receive(self, sent: Any) -> list[Tensor | None]:
        """The gradients, on the host."""

    def give_back(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Begins to bring updated parameters to the device; what `join` wants."""

    def join(self, given: Any) -> None:
        """What is ordered from now on comes after that."""


class SameMemory:
    """On a CPU the host's parameters are the network's own memory, and nothing is copied."""

    num_bytes = 0
    text = "on a CPU host and device share memory, so that nothing is spared: only the overlap is tried"

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Leaves of their own: the network's drop their gradients while these are still read.
        self.tensors = {p: nn.Parameter(p.detach()) for p in parameters}

    def enter_thread(self) -> None:
        pass

    def mark(self) -> None:
        return None

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], since: None) -> Any:
        return gradients

    def receive(self, sent: Any) -> list[Tensor | None]:
        return list(sent)

    def give_back(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def join(self, given: None) -> None:
        pass


class Lanes(Protocol):
    """Streams of a device: where copies run beside the computation."""

    def enter_thread(self) -> None:
        """Called once on the updating thread."""

    def mark(self) -> Any:
        """This moment of the lane in force; of the computation outside of `out` and `back`."""

    def out(self, since: Any) -> AbstractContextManager[object]:
        """Within it copies leave the device, after the moment `since`."""

    def back(self) -> AbstractContextManager[object]:
        """Within it copies come to the device."""

    def wait(self, moment: Any) -> None:
        """Returns when what was ordered before a moment is done."""

    def join(self, moment: Any) -> None:
        """The computation goes on after a moment."""

    def host_buffer(self, num: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can copy to and from by itself, (num,)."""


class CudaLanes:
    """Two streams of a GPU, one a direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def out(self, since: torch.cuda.Event) -> AbstractContextManager[object]:
        self._out.wait_event(since)
        return torch.cuda.stream(self._out)

    def back(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._back)

    def wait(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()

    def join(self, moment: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(moment)

    def host_buffer(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num, dtype=dtype, pin_memory=True)


class HostCopies:
    """Copies of all parameters and room for their gradients, on the host; each in one piece of memory per type.

    A piece each, because locking pages takes milliseconds a call however few they are.
    """

    text = "gradients were copied to page-locked memory and parameters back, each on a stream of its own"

    def __init__(self, parameters: Iterable[nn.Parameter], lanes: Lanes) -> None:
        self._lanes = lanes
        self.tensors: dict[nn.Parameter, nn.Parameter] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self.num_bytes = 0
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_type.items():
            room = sum(p.numel() for p in members)
            values, gradients = lanes.host_buffer(room, dtype), lanes.host_buffer(room, dtype)
            self.num_bytes += 2 * room * values.element_size()
            first = 0
            for p in members:
                value = _like(values[first : first + p.numel()], p)
                value.copy_(p.detach())
                self.tensors[p] = nn.Parameter(value)
                self._gradients[p] = _like(gradients[first : first + p.numel()], p)
                first += p.numel()

    def enter_thread(self) -> None:
        self._lanes.enter_thread()

    def mark(self) -> Any:
        return self._lanes.mark()

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], since: Any) -> Any:
        with torch.no_grad(), self._lanes.out(since):
            found: list[Tensor | None] = []
            for parameter, gradient in zip(parameters, gradients, strict=True):
                room = self._gradients[parameter]
                found.append(None if gradient is None else room.copy_(gradient, non_blocking=True))
            # The device's gradients with it: their memory must not be given away before they are read.
            return found, tuple(gradients), self._lanes.mark()

    def receive(self, sent: Any) -> list[Tensor | None]:
        found: list[Tensor | None]
        found, _, moment = sent
        self._lanes.wait(moment)
        return found

    def give_back(self, parameters: Sequence[nn.Parameter]) -> Any:
        with torch.no_grad(), self._lanes.back():
            for parameter in parameters:
                parameter.copy_(self.tensors[parameter], non_blocking=True)
            return self._lanes.mark()

    def join(self, given: Any) -> None:
        self._lanes.join(given)


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """A piece of memory in the shape of a tensor, and in its order where that has no gaps: copies are then plain."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return flat.view(tensor.shape)


def host_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> HostParameters:
    """Parameters as the host updates them beside a device."""
    if device.type == "cuda":
        return HostCopies(parameters, CudaLanes(device))
    return SameMemory(parameters)
