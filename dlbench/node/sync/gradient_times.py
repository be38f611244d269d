"""When the gradients of a step are ready, and what is under way meanwhile: kept for a few warm-up steps.

Hooks on the parameters exist only while the window is open, so that measured steps carry none of them. On a
CPU moments are those of the monotonic clock; on a GPU they are CUDA events, read when the window is closed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dlbench.node.sync.clocks import clock_for
from dlbench.records.exchange import GradientTime

Interval = tuple[float, float]
"""Begin and end, seconds after the start of the backward pass."""


@dataclass(kw_only=True)
class Passage:
    """One bucket on its way, in moments of the clock."""

    num_bytes: int
    """Of gradients, before any compression."""
    num_tensors: int
    wire_bytes: float
    """Of the vector that is exchanged."""
    method: str
    handed: Any
    done: Any = None
    """None until it is back."""


@dataclass(kw_only=True)
class WatchedStep:
    """One step of the window, in moments of the clock."""

    begin: Any
    ready: dict[str, Any] = field(default_factory=dict)
    backward_end: Any = None
    exchange_end: Any = None
    passages: list[Passage] = field(default_factory=list)


class BackwardWatch:
    """The window of watched steps of one rank.

    Used by an engine: `attach` once, `open` and `close` between steps, and within every step `begin`, `backward_ended`
    and `exchange_ended`, which do nothing while the window is closed.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        self.is_open = False
        self.steps: list[WatchedStep] = []
        self._current: WatchedStep | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Whose gradients are watched."""
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> dict[str, int]:
        """Bytes of each gradient, by the parameter's name."""
        return {name: p.numel() * p.element_size() for name, p in self._parameters}

    def open(self) -> None:
        """Watches from the next backward pass on."""
        if self.is_open:
            return
        self.is_open = True
        self.clock.anchor()
        for name, parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        """Watches no more; a step that was not finished does not count."""
        self.is_open = False
        self._current = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.steps:
            self.clock.anchor()
            self.clock.settle()

    def begin(self) -> None:
        """The backward pass that is exchanged begins."""
        self._current = WatchedStep(begin=self.clock.mark()) if self.is_open else None

    def backward_ended(self) -> None:
        """The last gradient of this rank is there."""
        if self._current is not None:
            self._current.backward_end = self.clock.mark()

    def hand_over(self, passage: Passage) -> None:
        """A bucket goes on its way."""
        if self._current is not None:
            self._current.passages.append(passage)

    def exchange_ended(self) -> None:
        """Every gradient is exchanged; the step is complete."""
        step, self._current = self._current, None
        if step is not None:
            step.exchange_end = self.clock.mark()
            self.steps.append(step)

    def _hook(self, name: str) -> Any:
        def note(parameter: torch.Tensor) -> None:
            if self._current is not None:
                self._current.ready[name] = self.clock.mark()

        return note

    def ready_s(self, step: WatchedStep) -> dict[str, float]:
        """Seconds after the start of the backward pass at which each gradient was ready."""
        return {name: max(0.0, self.clock.between(step.begin, moment)) for name, moment in step.ready.items()}

    def gradients(self) -> tuple[GradientTime, ...]:
        """Each gradient's median over the window, in the order in which they were ready."""
        times: dict[str, list[float]] = {}
        for step in self.steps:
            for name, moment in self.ready_s(step).items():
                times.setdefault(name, []).append(moment)
        sizes = self.gradient_bytes
        found = [
            GradientTime(name=name, num_bytes=sizes[name], ready_s=statistics.median(all_s))
            for name, all_s in times.items()
        ]
        return tuple(sorted(found, key=lambda gradient: gradient.ready_s))

    def backward_s(self) -> float | None:
        """The backward pass, median over the window; None where no step was watched."""
        return median(
            self.clock.between(step.begin, step.backward_end) for step in self.steps if step.backward_end is not None
        )


def median(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def covered(intervals: Sequence[Interval], begin: float = float("-inf"), end: float = float("inf")) -> float:
    """Length of the union of intervals within [begin, end], seconds."""
    total, reach = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reach), min(last, end)
        if last > first:
            total += last - first
            reach = last
    return total


def ring_bytes(wire_bytes: float, *, ranks: int, groups: int) -> tuple[float, float]:
    """Bytes that a rank sends inside its group and to other groups in ring all-reduces; mean over ranks.

    A ring sends 2 (p - 1) / p of the vector to the right neighbour (science of all-reduce: Patarasuk and Yuan,
    2009). Where groups are blocks of neighbouring ranks, one rank of each group has its neighbour in another one.

    Args:
        wire_bytes: length of all vectors together.
        ranks: p.
        groups: equal blocks of neighbouring ranks.
    """
    total = 2 * (ranks - 1) / ranks * wire_bytes
    across = total * groups / ranks if groups > 1 else 0.0
    return total - across, across
