"""The chain of a network, measured: what each unit takes, keeps and needs in a forward and backward pass.

One forward pass is made, and every unit is measured alone when it is called: its forward pass and, with a gradient of
ones, its backward pass; then nothing of it is left but its output. So measuring takes what is largest of single units,
never what training in core takes: a network whose activations do not fit can be measured, and every unit undisturbed by
transfers. Nothing of it stays: weights, gradients, buffers and random states are afterwards what they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef as WeakReference
from torch.utils._pytree import tree_leaves, tree_map_only

from dlbench.node.models.build import Batch
from dlbench.node.models.optimizers import optimizer_of
from dlbench.node.out_of_core.cut import UnitModule, undisturbed
from dlbench.node.out_of_core.device_memory import Held, PeakMeter, peaks_on
from dlbench.node.out_of_core.saved import (
    HeldByOthers,
    PackedTensor,
    SavedStorages,
    activation_storage,
    first_tensor,
    is_of_parameter,
    weak_reference,
)
from dlbench.specs.out_of_core import Chain, Unit
from dlbench.specs.training import OptimizerSpec

WARM_PASSES, TIMED_PASSES = 3, 9
"""First passes, of which nothing counts yet (tried: the first ones of a process take 1.3 to 1.6 times as long); and,
behind the one that counts bytes, those whose medians of times are taken."""
LEAST_PASSES, LONG_S = 2, 4.0  # of each: as few are enough once they have taken so long, seconds

Storages = dict[int, int]  # bytes of storages by their address


@dataclass(kw_only=True)
class _Link:
    number: int
    unit: UnitModule
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved: Storages = field(default_factory=dict)
    casts: Storages = field(default_factory=dict)
    num_saved: int = 0  # how often autograd saved a tensor
    input: tuple[int, int] = (0, 0)  # address and bytes of its input's storage
    output: tuple[int, int] = (0, 0)
    gradient_bytes: int = 0  # of its parameters' gradients that its backward pass left

    @property
    def made_bytes(self) -> int:
        """Of its output; 0 where that lies in its input's storage."""
        return self.output[1] if self.output[0] != self.input[0] else 0


@dataclass(kw_only=True, eq=False)
class _MeasuredPass:
    model: nn.Module
    links: Sequence[_Link]  # Its units, in order.
    device: torch.device
    meter: PeakMeter
    counts: bool  # Whether storages are counted, which takes time; else times are kept.
    keeps_gradients: bool  # Whether gradients outlast a pass.
    roots: list[Tensor] = field(default_factory=list)  # Where backward passes of what is around the chain begin.
    gradients: int = 0  # Bytes of parameters' gradients that head, loss and what is before the chain leave.
    at_turn: list[tuple[WeakReference, int]] = field(default_factory=list)
    """The last unit's input and output: storage and bytes."""
    gone: Sequence[int] = (0, 0)  # Of these, the bytes that were gone when head and loss were done.
    moments: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.others = HeldByOthers(self.model)
        self.own = dict(storage_of(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()))

    def now(self) -> float:
        """Monotonic time when the device has done what it was given, seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def note(self, name: str) -> None:
        """This moment has a name; what is held from here on is measured apart."""
        self.moments[name] = self.now()
        self.meter.mark(name)

    def forward(self, link: _Link, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for a unit's forward pass: measures both of its passes, and gives its output alone."""
        if not torch.is_grad_enabled():
            return original(x, *args, **kwargs)
        if link.number == 0:
            self.note("chain")
            self.others.give([x] if link.unit.shared else [])
            if x.grad_fn is not None:
                self.roots.append(_Exit.apply(None, x))  # type: ignore[no-untyped-call]
        self.others.give((*args, *kwargs.values()))
        leaf = x.detach().requires_grad_(link.number > 0 or x.requires_grad)

        def call(entry: Tensor) -> Any:
            return original(entry, *args, **kwargs)

        if self.counts:
            self.measured(link, call, leaf, "away")
        output = self.measured(link, call, leaf, "kept")
        if link is self.links[-1]:
            given, made = x.untyped_storage(), _first(output).untyped_storage()
            self.at_turn = [(weak_reference(one), one.nbytes()) for one in (given, made)]
            self.note("turn")
        return output

    def measured(self, link: _Link, call: Callable[[Tensor], Any], leaf: Tensor, how: str) -> Any:
        """Both passes of a unit, which keeps what it saves, or has it taken away and brought back."""
        torch.clear_autocast_cache()
        entry = _Entry.apply(leaf)  # type: ignore[no-untyped-call]
        hooks: AbstractContextManager[object] = nullcontext()
        if self.counts:
            hooks = self.counting(link) if how == "kept" else self.away()
        self.meter.mark(f"{how} forward {link.number}")
        begin = self.now()
        with hooks:
            output = call(entry)
        middle = self.now()
        self.meter.mark(f"{how} backward {link.number}")
        tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
        reached = self.turned if link is self.links[-1] else None

        def given_on(one: Tensor) -> Any:
            leaf = one.detach().requires_grad_(one.requires_grad)
            return _Entry.apply(leaf, reached)  # type: ignore[no-untyped-call]

        result = tree_map_only(Tensor, given_on, output) if how == "kept" else None
        if self.counts and how == "kept":
            link.input, link.output = storage_of(entry), storage_of(_first(output))
        gradients = [torch.ones_like(one) for one in tensors]
        end = _Exit.apply(gradients, *tensors) if tensors else None  # type: ignore[no-untyped-call]
        del output, tensors, gradients, entry
        turned = self.now()
        if end is not None:
            with torch.autocast(self.device.type, enabled=False):
                torch.autograd.backward(end)
        ended = self.now()
        self.meter.mark(f"after {how} {link.number}")
        if not self.counts:
            link.forward_s.append(middle - begin)
            link.backward_s.append(ended - turned)
        if not self.keeps_gradients:
            link.gradient_bytes = self.gradient_bytes()
            for parameter in self.model.parameters():
                parameter.grad = None
        return result

    def gradient_bytes(self) -> int:
        """Of parameters' gradients that are there now, where these do not outlast a pass; else 0."""
        if self.keeps_gradients:
            return 0
        return sum(storage_of(one.grad)[1] for one in self.model.parameters() if one.grad is not None)

    def counting(self, link: _Link) -> saved_tensors_hooks:
        """Within it, what autograd saves is noted, also what is made of a parameter alone."""

        def pack(tensor: Tensor) -> Tensor:
            storage = activation_storage(tensor, self.others)
            link.num_saved += 1
            self.meter.mark(f"kept forward {link.number}, {link.num_saved} saved")
            if storage is not None:
                link.saved[storage.data_ptr()] = storage.nbytes()
            elif tensor.layout is torch.strided and is_of_parameter(tensor):
                address, size = storage_of(tensor)
                if address not in self.own:
                    link.casts[address] = size
            # With its graph a saved output would hold itself.
            return tensor.detach() if tensor.grad_fn is not None else tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def away(self) -> saved_tensors_hooks:
        """Within it, what autograd saves goes at once, and zeros come back in its place, storage by storage."""
        table = SavedStorages()

        def pack(tensor: Tensor) -> Any:
            storage = activation_storage(tensor, self.others)
            if storage is None:
                return tensor.detach() if tensor.grad_fn is not None else tensor
            handle = table.find(storage) or table.add(tensor, storage, 0)
            handle.storage = None
            return PackedTensor(handle, tensor)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, PackedTensor):
                return packed
            handle = packed.handle
            if handle.storage is None:
                handle.storage = torch.zeros(handle.num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
            return packed.tensor(handle.storage)

        return saved_tensors_hooks(pack, unpack)

    def turned(self) -> None:
        if "turned" not in self.moments:
            self.note("turned")
            are_gone = [storage.expired() for storage, _ in self.at_turn]  # type: ignore[no-untyped-call]
            self.gone = [size if is_gone else 0 for (_, size), is_gone in zip(self.at_turn, are_gone, strict=True)]


class _Entry(torch.autograd.Function):
    """A unit's input, behind a node: a leaf would be taken for a parameter's cast, and its gradient be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None] | None = None) -> Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        if ctx.reached is not None:
            ctx.reached()
        return None, None


class _Exit(torch.autograd.Function):
    """Outputs, from which a backward pass begins without holding them: with these gradients, or ones made then."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor] | None, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.likes = [(one.size(), one.stride(), one.dtype, one.device) for one in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = [
                torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)
                for size, stride, dtype, device in ctx.likes
            ]
        return None, *gradients


def _run_all(forwards: Sequence[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    """A unit of several modules, each of which gets what the one before returns."""
    x = forwards[0](x, *args, **kwargs)
    for forward in forwards[1:]:
        x = forward(x)
    return x


def _handed_on(x: Any, *_args: Any, **_kwargs: Any) -> Any:
    return x


def _first(output: Any) -> Tensor:
    tensor = first_tensor(output)
    assert tensor is not None, "a unit returns one (dlbench.node.out_of_core.cut)"
    return tensor


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor lies in."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@dataclass(kw_only=True)
class ChainProfile:
    """Passes over a network whose units are known; `keeps_gradients`: whether gradients outlast a pass."""

    model: nn.Module
    units: Sequence[UnitModule]
    device: torch.device
    keeps_gradients: bool
    beat: Callable[[str], None]

    def measure(
        self, loss_of: Callable[[Batch], Tensor], batch: Batch, *, state_bytes: int, update_bytes: int = 0
    ) -> Chain:
        """Returns the chain of a pass, in the precision of `loss_of`.

        `state_bytes`: of parameters, buffers, optimizer state, and gradients that outlast a pass. `update_bytes`:
        `update_growth`.
        """
        links = [_Link(number=number, unit=unit) for number, unit in enumerate(self.units)]
        with undisturbed(self.model, holds_gradients=self.keeps_gradients):
            # Before bytes are counted, too: the first pass over such a batch also holds what cuDNN tries algorithms in.
            self._timed(links, loss_of, batch, WARM_PASSES)
            counted = self._pass(links, loss_of, batch, peaks_on(self.device), counts=True)
            for link in links:
                link.forward_s.clear()
                link.backward_s.clear()
            timed = self._timed(links, loss_of, batch, TIMED_PASSES)
        held = counted.meter.held()
        casts = sum(sum(link.casts.values()) for link in links)
        batch_bytes = sum(storage_of(tensor)[1] for tensor in batch.values())
        # The last unit's input is an argument of a call that returns: it may go before the head does anything. With the
        # head's gradients goes what autograd holds of a weight that what is before the chain uses, too (tied weights).
        given, made = counted.gone
        begin = held["turn"].begin - given
        left = max(0, held["turned"].begin - begin + made - links[-1].output[1])
        # A median pass over the sum of its units' medians, in which what disturbs now and then hardly shows.
        times = [one for link in links for one in (link.forward_s, link.backward_s)]
        apart_s = sum(map(statistics.median, times))
        factor = statistics.median(map(sum, zip(*times, strict=True))) / apart_s if apart_s > 0 else 1.0
        units = self._units(links, held, factor)
        return Chain(
            units=units,
            batch=len(next(iter(batch.values()))),
            output_bytes=links[-1].output[1],
            before_s=_median(timed, "begin", "chain"),
            turn_s=_median(timed, "turn", "turned"),
            after_s=_median(timed, "turned", "end"),
            state_bytes=state_bytes,
            outside_bytes=batch_bytes + held["chain"].begin - held["begin"].begin + casts - units[0].input_bytes,
            turn_bytes=held["turn"].peak - begin,
            turn_gradient_bytes=left,
            after_bytes=held["turned"].growth,
            after_gradient_bytes=max(0, counted.gradients - left),
            update_bytes=update_bytes,
        )

    def _timed(
        self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, most: int
    ) -> list[_MeasuredPass]:
        begun, passages = time.monotonic(), list[_MeasuredPass]()
        while len(passages) < most and (len(passages) < LEAST_PASSES or time.monotonic() - begun < LONG_S):
            passages.append(self._pass(links, loss_of, batch, PeakMeter(), counts=False))
        return passages

    def _pass(
        self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, meter: PeakMeter, *, counts: bool
    ) -> _MeasuredPass:
        self.beat("a pass that measures memory")
        if not self.keeps_gradients:
            for parameter in self.model.parameters():
                parameter.grad = None
        keeps = self.keeps_gradients
        passage = _MeasuredPass(
            model=self.model, links=links, device=self.device, meter=meter, counts=counts, keeps_gradients=keeps
        )
        try:
            for link in links:
                whole = partial(_run_all, [module.forward for module in link.unit.modules])
                for module in link.unit.modules:
                    module.forward = _handed_on
                link.unit.modules[0].forward = partial(passage.forward, link, whole)
            with meter:
                passage.note("begin")
                passage.roots.append(loss_of(batch))
                torch.autograd.backward(passage.roots)
                passage.turned()
                passage.note("end")
                passage.gradients = passage.gradient_bytes()
                passage.roots.clear()
        finally:
            for module in (module for link in links for module in link.unit.modules):
                module.__dict__.pop("forward", None)  # the class's own is seen again
        return passage

    def _units(self, links: Sequence[_Link], held: Mapping[str, Held], factor: float) -> tuple[Unit, ...]:
        units = []
        before: _Link | None = None
        for link in links:
            address, size = link.input
            is_saved = address in link.saved or (before is not None and before.output[0] in before.saved)
            edges, casts = (address, link.output[0]), sum(link.casts.values())
            inner = [size for address, size in link.saved.items() if address not in edges]
            saved = sum(inner)
            # What was given on is there during the backward pass; in training only where the unit saved it.
            own = 0 if link.output[0] in link.saved else link.made_bytes

            begins = {how: held[f"{how} forward {link.number}"].begin for how in ("kept", "away")}

            def most(how: str, interval: str, begins: Mapping[str, int] = begins) -> int:
                """Held at most besides the unit's input."""
                return held[f"{how} {interval}"].peak - begins[how]

            number = link.number
            saving = [most("kept", f"forward {number}")]
            saving += [most("kept", f"forward {number}, {one} saved") for one in range(1, link.num_saved + 1)]
            units.append(
                Unit(
                    name=link.unit.name,
                    forward_s=factor * statistics.median(link.forward_s),
                    backward_s=factor * statistics.median(link.backward_s),
                    saved_bytes=saved,
                    saved_count=len(inner),
                    # What only looks at the input of the unit before (a Flatten's output) lies in the same storage.
                    input_bytes=size if (not link.unit.shared if before is None else before.made_bytes) else 0,
                    input_saved=is_saved,
                    joins=link.unit.joins,
                    input_shared=link.unit.shared,
                    gradient_bytes=link.gradient_bytes,
                    forward_working_bytes=max(0, max(saving) - saved - link.made_bytes - casts),
                    recomputing_working_bytes=max(0, max(saving[:-1], default=0) - saved - casts),
                    backward_working_bytes=max(0, most("kept", f"backward {number}") - saved - own - casts),
                    passing_working_bytes=max(0, most("away", f"forward {number}") - link.made_bytes - casts),
                    piecemeal_bytes=max(0, most("away", f"backward {number}") - casts),
                )
            )
            before = link
        return tuple(units)


def update_growth(model: nn.Module, spec: OptimizerSpec, device: torch.device) -> int:
    """Returns the bytes that an optimizer's update holds for a while, by an update of a copy of the parameters."""
    copies = [nn.Parameter(one.detach().clone()) for one in model.parameters() if one.requires_grad]
    optimizer = optimizer_of(copies, spec)
    for one in copies:
        one.grad = torch.zeros_like(one)
    optimizer.step()  # which makes the state
    with peaks_on(device) as meter:
        meter.mark("update")
        optimizer.step()
    return meter.held()["update"].growth


def _median(passages: Sequence[_MeasuredPass], begin: str, end: str) -> float:
    return max(0.0, statistics.median(each.moments[end] - each.moments[begin] for each in passages))
