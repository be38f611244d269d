"""Layer by layer: when each leaf module of a network computed, forward and backward, in a few warm-up steps.

Forward is seen by hooks around a module's call. Backward begins when the gradient of the module's output is there,
and ends when the last operation of the call has been differentiated. Those operations are found in autograd's graph:
they are the nodes behind the output whose sequence numbers were given out during the call. Hooks on nodes look on and
change nothing; unlike full backward hooks of modules they do not stand in the way of operations in place. They die with
the graph of their step, hooks on modules are taken away when the window closes.

A forward pass that is repeated within the backward pass is told as such. It lies within the time of the layer whose
operation asked for it first, as waits for what was swapped do.

On a GPU moments are CUDA events, set on the clock of the host when the window closes (not measured here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from dlbench.records.rows.spans import COMPUTE

MAX_HELD_CALLS = 20_000
"""Calls of modules held in memory until they are written."""

_LEAF_NUMBER = 2**64 - 1
"""Sequence number of nodes that add gradients up in parameters; they belong to no call."""


class MomentClock(Protocol):
    """Moments of a device; `dlbench.node.sync.clocks.Clock` is one."""

    def mark(self) -> Any:
        """This moment."""

    def anchor(self) -> None:
        """Notes how moments stand to CLOCK_MONOTONIC; waits for the device."""

    def settle(self) -> None:
        """Returns when moments can be read."""

    def monotonic_ns(self, moment: Any) -> int:
        """A moment as nanoseconds of CLOCK_MONOTONIC."""


AddSpan = Callable[..., None]
"""`RankSpans.add`."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of one module, in moments of the clock; None where there was none."""

    name: str
    step: int
    module: nn.Module
    is_repeated: bool
    """Whether it computes activations again, for a backward pass that has begun."""
    first_node: int
    """Sequence number of autograd at the beginning."""
    forward_start: Any
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class LayerWatch:
    """The window on one network: `open`, `enter` before each step, `leave` behind it, `close`.

    Args:
        model: its leaf modules are watched, by their names.
        clock: of the device where it computes.
        add: where spans go.
        computes: whether a call of a module, now, computes it; others are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        clock: MomentClock,
        add: AddSpan,
        computes: Callable[[nn.Module], bool] = lambda _module: True,
    ) -> None:
        self._model = model
        self._computes = computes
        self._clock = clock
        self._add = add
        self._hooks: list[Any] = []
        self._calls: list[_Call] = []
        self._running: list[_Call] = []
        self._step: int | None = None

    @property
    def num_hooks(self) -> int:
        """Hooks that are on modules now."""
        return len(self._hooks)

    def open(self) -> None:
        """Hooks every leaf module."""
        self._clock.anchor()
        for name, module in self._model.named_modules():
            if next(module.children(), None) is None:
                self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name)))
                self._hooks.append(module.register_forward_hook(self._end))

    def enter(self, step: int) -> None:
        """A step begins; outside of its time."""
        if len(self._calls) > MAX_HELD_CALLS:
            self._write()
        self._running.clear()
        self._step = step

    def leave(self) -> None:
        """The step has ended; what follows (an evaluation) is not watched."""
        self._step = None

    def close(self) -> None:
        """Takes every hook away and hands over the spans; twice does no harm."""
        self.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()
        self._write()

    def _begin(self, name: str, module: nn.Module, inputs: object) -> None:
        if self._step is None or not self._computes(module):
            return
        call = _Call(
            name=name,
            step=self._step,
            module=module,
            is_repeated=torch._C._current_graph_task_id() >= 0,
            first_node=torch._C._autograd._get_sequence_nr(),
            forward_start=self._clock.mark(),
        )
        self._running.append(call)

    def _end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._step is None or not self._computes(module):
            return
        # Calls that an error ended are passed over: a repeated forward pass ends where nothing more is needed.
        while self._running and self._running[-1].module is not module:
            self._running.pop()
        if not self._running:
            return
        call = self._running.pop()
        call.forward_end = self._clock.mark()
        self._calls.append(call)
        if call.is_repeated:
            return
        behind = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
        heads = [node for node in behind if _belongs(node, call.first_node)]
        for node in heads:
            node.register_prehook(partial(self._begin_backward, call))
        for node in _nodes_of_call(heads, call.first_node):
            node.register_hook(partial(self._end_backward, call))

    def _begin_backward(self, call: _Call, gradients: object) -> None:
        if call.backward_start is None and self._step == call.step:
            call.backward_start = self._clock.mark()

    def _end_backward(self, call: _Call, inputs: object, outputs: object) -> None:
        if call.backward_start is not None and self._step == call.step:
            call.backward_end = self._clock.mark()

    def _write(self) -> None:
        calls, self._calls = self._calls, []
        if not calls:
            return
        self._clock.settle()
        at = self._clock.monotonic_ns
        for call in calls:
            forward = "recompute" if call.is_repeated else "forward"
            self._add(COMPUTE, f"{forward} {call.name}", at(call.forward_start), at(call.forward_end), step=call.step)
            if call.backward_end is not None:
                self._add(
                    COMPUTE, f"backward {call.name}", at(call.backward_start), at(call.backward_end), step=call.step
                )


def _belongs(node: Any, first: int) -> bool:
    number: int = node._sequence_nr()
    return first <= number < _LEAF_NUMBER


def _nodes_of_call(heads: Iterable[Any], first: int) -> Iterator[Any]:
    """The nodes that a call made, each once."""
    seen = set()
    waiting = list(heads)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [behind for behind, _ in node.next_functions if behind is not None and _belongs(behind, first)]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
