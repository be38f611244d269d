"""The chain of a network, measured: what each unit takes, keeps and needs in a forward and backward pass.

A pass is made with every unit recomputed: its forward pass leaves nothing but its input, and its backward pass begins
with the forward pass anew. So a network whose activations do not fit can be measured, and every unit is measured alone,
undisturbed by transfers. Nothing of it stays: weights, gradients, buffers and random states are afterwards what they
were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dlbench.node.memory.cut import UnitModule
from dlbench.node.memory.peaks import NoPeaks, PeakMeter, peaks_on
from dlbench.node.memory.saved import HeldByOthers, activation_storage, is_of_parameter
from dlbench.specs.memory.chain import Chain, Unit

WARM_PASSES, TIMED_PASSES = 3, 9
"""Passes after the one that counts bytes, whose times do not count yet (tried: the first ones of a process take 1.3 to
1.6 times as long); and those whose medians are taken."""
LEAST_PASSES, LONG_S = 2, 4.0
"""Of each: as few are enough once they have taken so long, seconds."""

Batch = dict[str, Tensor]
Storages = dict[int, int]
"""Bytes of storages by their address."""


@dataclass(kw_only=True)
class _Link:
    """One unit while it is measured."""

    number: int
    unit: UnitModule
    changes_input: bool = False
    """Whether it writes to its input, which must then be copied to be used twice."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved: Storages = field(default_factory=dict)
    casts: Storages = field(default_factory=dict)
    input: tuple[int, int] = (0, 0)
    """Address and bytes of its input's storage when it was repeated."""
    output: tuple[int, int] = (0, 0)
    gradient_bytes: int = 0
    """Of the gradient of its output."""


class _Passage:
    """What one pass over the whole network notes.

    Args:
        model: the network.
        links: its units, in order.
        device: where it runs.
        meter: of the memory that is held.
        counts: whether storages are counted, which takes time; else times are kept.
    """

    def __init__(
        self, model: nn.Module, links: Sequence[_Link], device: torch.device, meter: PeakMeter, *, counts: bool
    ) -> None:
        self.model, self.links, self.device, self.meter, self.counts = model, links, device, meter, counts
        self.others = HeldByOthers(model)
        self.own = dict(storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()))
        self.there = {id(parameter.grad) for parameter in model.parameters()}
        self.outside: Storages = {}
        """Kept by what is not in the chain, and the first unit's input."""
        self.before_turn = self.turn_gradients = self.chain_output = 0
        """Bytes kept outside before the chain ended; bytes of gradients that its head made; address of its output."""
        self.casts: Storages = {}
        self.moments: dict[str, float] = {}

    def now(self) -> float:
        """Monotonic time when the device has done what it was given, seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def note(self, name: str) -> None:
        """This moment has a name; what is held from here on is measured apart."""
        self.moments[name] = self.now()
        self.meter.mark(name)

    def keeping(self, storages: Storages, casts: Storages) -> AbstractContextManager[object]:
        """Within it, what autograd saves is added to `storages`, or to `casts` if it is made of a parameter alone."""
        if not self.counts:
            return nullcontext()

        def pack(tensor: Tensor) -> Tensor:
            storage = activation_storage(tensor, self.others)
            if storage is not None:
                storages[storage.data_ptr()] = storage.nbytes()
            elif tensor.layout is torch.strided and is_of_parameter(tensor):
                address, size = storage_of(tensor)
                if address not in self.own:
                    casts[address] = size
            # With its graph a saved output would hold itself.
            return tensor.detach() if tensor.grad_fn is not None else tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def made_gradients(self) -> int:
        """Bytes of gradients that this pass has made so far."""
        made = (p.grad for p in self.model.parameters() if p.grad is not None and id(p.grad) not in self.there)
        return sum(storage_of(gradient)[1] for gradient in made)

    def forward(self, link: _Link, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for a unit's forward pass."""
        if not torch.is_grad_enabled():
            return original(x, *args, **kwargs)
        if link.number == 0:
            self.note("chain")
            self.outside.update([storage_of(x)])
            self.others.give([x])
        self.others.give((*args, *kwargs.values()))
        anchor = torch.zeros((), device=x.device, requires_grad=True)
        out = _Repeated.apply(anchor, x, self, link, original, args, kwargs)  # type: ignore[no-untyped-call]
        if link is self.links[-1]:
            self.chain_output = storage_of(out)[0]
            self.before_turn = sum(self.outside.values())
            self.note("turn")
        return out

    def repeat(self, ctx: Any, gradient: Tensor) -> Tensor | None:
        """The unit's forward pass anew, then its backward pass; returns the gradient of its input."""
        link: _Link = ctx.link
        if link is self.links[-1]:
            self.moments["turned"] = self.now()
            self.turn_gradients = self.made_gradients()
        leaf = ctx.x.requires_grad_(ctx.needs_input_grad[1])
        back: list[Tensor] = []
        with torch.enable_grad(), ctx.autocast:
            entry = _Entry.apply(leaf, back)  # type: ignore[no-untyped-call]
            entry = entry.clone() if link.changes_input else entry
            self.meter.mark(f"unit {link.number}")
            begin = self.now()
            with self.keeping(link.saved, link.casts):
                out = ctx.original(entry, *ctx.args, **ctx.kwargs)
            middle = self.now()
        if out.requires_grad:
            torch.autograd.backward(out, gradient)
        end = self.now()
        self.meter.mark(f"after unit {link.number}")
        if self.counts:
            link.input, link.output = storage_of(entry), storage_of(out)
            link.gradient_bytes = storage_of(gradient)[1]
        else:
            link.forward_s.append(middle - begin)
            link.backward_s.append(end - middle)
        if link.number == 0:
            self.moments["back"] = end
        return back[0] if back else None


class _Entry(torch.autograd.Function):
    """A unit's input, behind a node: what is made of a leaf alone would be taken for a parameter's cast.

    The gradient goes into a list: as that of a leaf it would be copied, which training does not do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: list[Tensor]) -> Tensor:
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.back.append(gradient)
        return None, None


class _Repeated(torch.autograd.Function):
    """A unit that keeps its input alone."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, passage: _Passage, link: _Link, original: Any, args: Any, kwargs: Any
    ) -> Tensor:
        ctx.passage, ctx.link, ctx.original, ctx.args, ctx.kwargs = passage, link, original, args, kwargs
        ctx.x = x.detach()
        ctx.autocast = _autocast_as_now(x.device)
        # Whether it writes to its input is not known before it was called once.
        entry = x.detach().clone() if passage.counts or link.changes_input else x.detach()
        before = entry._version
        out: Tensor = original(entry, *args, **kwargs)
        link.changes_input = link.changes_input or entry._version != before
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, ctx.passage.repeat(ctx, gradient), None, None, None, None, None)


def _run_all(forwards: Sequence[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    """A unit of several modules, each of which gets what the one before returns."""
    x = forwards[0](x, *args, **kwargs)
    for forward in forwards[1:]:
        x = forward(x)
    return x


def _handed_on(x: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Stands in for a module that was called as part of its unit."""
    return x


def _autocast_as_now(device: torch.device) -> AbstractContextManager[object]:
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor lies in."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, *, holds_gradients: bool = False) -> Iterator[None]:
    """Gives back gradients, buffers and random states as they were."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.detach().clone() for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if holds_gradients and parameter.requires_grad else None
            yield
        finally:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)


@dataclass(kw_only=True)
class ChainProfile:
    """Passes over a network whose units are known.

    Args:
        model: in training mode, on its device.
        units: in the order of the forward pass.
        device: where the model is.
        parts: passes of a step.
        beat: told before each pass.
    """

    model: nn.Module
    units: Sequence[UnitModule]
    device: torch.device
    parts: int
    beat: Callable[[str], None]

    def measure(self, loss_of: Callable[[Batch], Tensor], batch: Batch, *, state_bytes: int) -> Chain:
        """The chain of a pass.

        Args:
            loss_of: makes a forward pass over a batch, in the precision of training, and returns its loss.
            batch: on the device.
            state_bytes: of parameters, buffers, gradients and optimizer state.

        Raises:
            torch.OutOfMemoryError: a single unit's pass does not fit on the device.
            EnvironmentLacksError: memory cannot be measured with this torch.
        """
        links = [_Link(number=number, unit=unit) for number, unit in enumerate(self.units)]
        with undisturbed(self.model, self.device, holds_gradients=self.parts > 1):
            counted = self._pass(links, loss_of, batch, peaks_on(self.device), counts=True)
            self._timed(links, loss_of, batch, WARM_PASSES)
            for link in links:
                link.forward_s.clear()
                link.backward_s.clear()
            timed = self._timed(links, loss_of, batch, TIMED_PASSES)
        units = self._units(links)
        outside = sum(size for address, size in counted.outside.items() if address != counted.chain_output)
        casts = sum(counted.casts.values()) + sum(sum(link.casts.values()) for link in links)
        return Chain(
            units=units,
            batch=len(next(iter(batch.values()))),
            output_bytes=links[-1].output[1],
            before_s=_median(timed, "begin", "chain"),
            turn_s=_median(timed, "turn", "turned"),
            after_s=_median(timed, "back", "end"),
            state_bytes=state_bytes,
            outside_bytes=outside + casts,
            working_bytes=self._working(links, units, counted),
        )

    def _timed(self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, most: int) -> list[_Passage]:
        begun, passages = time.monotonic(), list[_Passage]()
        while len(passages) < most and (len(passages) < LEAST_PASSES or time.monotonic() - begun < LONG_S):
            passages.append(self._pass(links, loss_of, batch, NoPeaks(), counts=False))
        return passages

    def _pass(
        self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, meter: PeakMeter, *, counts: bool
    ) -> _Passage:
        self.beat("a pass that measures memory")
        if self.parts == 1:
            for parameter in self.model.parameters():
                parameter.grad = None
        passage = _Passage(self.model, links, self.device, meter, counts=counts)
        passage.outside.update(storage_of(tensor) for tensor in batch.values())
        try:
            for link in links:
                whole = partial(_run_all, [module.forward for module in link.unit.modules])
                for module in link.unit.modules:
                    module.forward = _handed_on
                link.unit.modules[0].forward = partial(passage.forward, link, whole)
            with meter:
                passage.note("begin")
                with passage.keeping(passage.outside, passage.casts):
                    loss = loss_of(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                passage.note("end")
        finally:
            for module in (module for link in links for module in link.unit.modules):
                module.__dict__.pop("forward", None)  # the class's own is seen again
        return passage

    def _units(self, links: Sequence[_Link]) -> tuple[Unit, ...]:
        units = []
        before: _Link | None = None
        for link in links:
            address, size = link.input
            is_saved = address in link.saved or (before is not None and before.output[0] in before.saved)
            # What only looks at the input of the unit before (a Flatten's output) lies in the same storage.
            is_same = before is not None and before.output[0] == before.input[0]
            edges = (address, link.output[0])
            units.append(
                Unit(
                    name=link.unit.name,
                    forward_s=statistics.median(link.forward_s),
                    backward_s=statistics.median(link.backward_s),
                    saved_bytes=sum(size for address, size in link.saved.items() if address not in edges),
                    input_bytes=0 if before is None or is_same else size,
                    input_saved=is_saved,
                    joins=link.unit.joins,
                )
            )
            before = link
        return tuple(units)

    def _working(self, links: Sequence[_Link], units: Sequence[Unit], counted: _Passage) -> int:
        """The most that was held beyond what is counted elsewhere, in any unit or between the chain's two passes."""
        held = counted.meter.held()
        turn = sum(counted.outside.values()) - counted.before_turn
        found = [held["turn"].growth - turn - counted.turn_gradients]
        for link, unit, following in zip(links, units, (*units[1:], None), strict=True):
            gradients = 0
            if self.parts == 1:
                gradients = sum(
                    p.numel() * p.element_size()
                    for module in link.unit.modules
                    for p in module.parameters()
                    if p.requires_grad
                )
            output = following.input_bytes if following is not None and following.input_saved else 0
            growth = held[f"unit {link.number}"].growth + link.gradient_bytes
            found.append(growth - unit.saved_bytes - output - sum(link.casts.values()) - gradients)
        return max(0, *found)


def _median(passages: Sequence[_Passage], begin: str, end: str) -> float:
    return max(0.0, statistics.median(each.moments[end] - each.moments[begin] for each in passages))
