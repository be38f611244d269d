"""Buckets: the gradients of one message, their buffer, and the thread that exchanges messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import torch

from dlbench.errors import RunError
from dlbench.node.background import BackgroundWorker
from dlbench.node.failures import passed_on
from dlbench.units import counted

ALIGNMENT = 16  # Elements; every buffer begins on a new cache line.


def split(order: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits parameter numbers into messages: the first `counts[0]` of them, then the next `counts[1]`, and so on."""
    numbers = iter(order)
    return [tuple(islice(numbers, count)) for count in counts]


def at_least(sizes: Sequence[int], num_bytes: int) -> tuple[int, ...]:
    """Returns numbers of tensors, in order of `sizes` (bytes), for the shortest messages of at least `num_bytes`."""
    counts, count, message_bytes = [], 0, 0
    for size in sizes:
        count += 1
        message_bytes += size
        if message_bytes >= num_bytes:
            counts.append(count)
            count = message_bytes = 0
    if count:
        counts.append(count)
    return tuple(counts)


def arena_elements(counts: Sequence[int], multiple: int) -> int:
    """Returns the elements of an arena for tensors of `counts` elements, however they are put into messages."""
    return sum(counts) + len(counts) * (multiple + ALIGNMENT)


class Bucket:
    """One message: a buffer, and a view of it for each gradient."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], multiple: int, arena: torch.Tensor) -> None:
        self.parameters = tuple(parameters)
        self.num_elements = sum(p.numel() for p in parameters)
        self.vector = arena[: -(-self.num_elements // multiple) * multiple]
        self.vector[self.num_elements :].zero_()
        self.missing = len(self.parameters)
        self.takes_together = self.vector.device.type != "cpu"
        self._views = []
        offset = 0
        for parameter in parameters:
            view = self.vector[offset : offset + parameter.numel()]
            # In the parameter's own memory order, where optimizers are fastest.
            order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim(), torch.contiguous_format)
            if parameter.is_contiguous() or not parameter.is_contiguous(memory_format=order):
                self._views.append(view.view(parameter.shape))
            else:
                self._views.append(view.as_strided(parameter.shape, parameter.stride()))
            offset += parameter.numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.vector.element_size()

    def take(self, place: int, scale: float) -> None:
        """Copies a gradient times `scale` (zeros if none), makes it a view; on a GPU all with the last one."""
        # A view before the backward pass would cost more: autograd would add to a cleared buffer.
        self.missing -= 1
        if not self.takes_together:
            view, parameter = self._views[place], self.parameters[place]
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, scale, out=view)
            parameter.grad = view
            return
        if self.missing > 0:
            return
        pairs = [(view, p.grad) for view, p in zip(self._views, self.parameters, strict=True) if p.grad is not None]
        if len(pairs) < len(self._views):
            self.vector.zero_()
        with torch.no_grad():
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            self.vector[: self.num_elements].mul_(scale)
        for view, parameter in zip(self._views, self.parameters, strict=True):
            parameter.grad = view


class StepMessages:
    """The messages of a step: their gradients, by number of the parameter, their buffers, and how they were sent."""

    def __init__(
        self,
        arena: torch.Tensor,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        numbers: Sequence[tuple[int, ...]],
        multiple: int,
    ) -> None:
        """Places the buffers in `arena` one after another; its former content is lost."""
        self.numbers = numbers
        self.buckets: list[Bucket] = []
        self.place_of: dict[int, tuple[int, int]] = {}
        """Message of each gradient, and its position in the message."""
        self.tensors: list[list[tuple[str, int]]] = []
        """Name and number of elements of each gradient, message by message."""
        first = 0
        for message, members in enumerate(numbers):
            gradients = [named[number] for number in members]
            bucket = Bucket([parameter for _, parameter in gradients], multiple, arena[first:])
            first += -(-bucket.vector.numel() // ALIGNMENT) * ALIGNMENT
            self.buckets.append(bucket)
            self.place_of |= {number: (message, place) for place, number in enumerate(members)}
            self.tensors.append([(name, parameter.numel()) for name, parameter in gradients])
        self.num_bytes = [bucket.num_bytes for bucket in self.buckets]
        self.reset_methods()

    def reset_methods(self) -> None:
        self.methods: list[Counter[str]] = [Counter() for _ in self.numbers]

    @property
    def all_methods(self) -> Counter[str]:
        return sum(self.methods, Counter[str]())

    def describe(self, message: int) -> str:
        names = [name for name, _ in self.tensors[message]]
        range_text = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"message {message + 1} of {len(self.numbers)} ({counted(len(names), 'gradient')}, {range_text})"


def require_fp32(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises `RunError` if a trained parameter is not in fp32, so that gradients would not fit the buffers."""
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise RunError(f"{name} is {parameter.dtype}: dlbench's own exchange holds gradients in fp32")


class ExchangeThread:
    """Exchanges messages on one thread, in order, while the backward pass continues (Zhang et al., Poseidon, 2017)."""

    def __init__(
        self, enter: Callable[[], None], exchange: Callable[[int], None], describe: Callable[[int], str]
    ) -> None:
        """Starts the thread: it calls `enter`, then `exchange` with message numbers; `describe` names one in errors."""
        self._exchange = exchange
        self._describe = describe
        self._handed: set[int] = set()
        self._next = 0
        self._is_stopped = False
        self._worker = BackgroundWorker("dlbench exchange")
        self._worker.put(enter)

    def begin(self) -> None:
        self._handed.clear()
        self._next = 0

    def hand_over(self, number: int) -> None:
        self._handed.add(number)
        while self._next in self._handed:
            self._worker.put(partial(self._send, self._next))
            self._next += 1

    def wait(self) -> None:
        self._worker.wait()
        self._worker.require_well()

    def stop(self) -> None:
        """Ends the thread after the message that it is exchanging."""
        self._is_stopped = True
        self._worker.close()

    def _send(self, number: int) -> None:
        if self._is_stopped:
            return
        try:
            self._exchange(number)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise passed_on(f"the exchange of {self._describe(number)} failed: {reason}", error) from error
