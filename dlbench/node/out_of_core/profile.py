"""Measures a network's chain: time, saved bytes and temporary memory of each unit's forward and backward pass."""
# Every unit is measured alone and keeps only its output, so networks that do not fit in memory can be measured.

from __future__ import annotations

import itertools
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
from dlbench.node.out_of_core.device_memory import MemoryInterval, PeakMeter, peaks_on
from dlbench.node.out_of_core.saved import (
    PackedTensor,
    SavedStorages,
    UnmovedStorages,
    activation_storage,
    first_tensor,
    is_of_parameter,
    weak_reference,
    without_graph,
)
from dlbench.specs.out_of_core import Chain, Unit
from dlbench.specs.training import OptimizerSpec

WARM_PASSES, TIMED_PASSES = 3, 9
"""Passes that are not used (the first took 1.3 to 1.6 times as long), and passes whose median times are used."""
LEAST_PASSES, LONG_S = 2, 4.0  # Fewest passes of each kind, enough once they have taken LONG_S seconds.

Storages = dict[int, int]  # Bytes of storages by their address.


@dataclass(kw_only=True)
class _Link:
    number: int
    unit: UnitModule
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved: Storages = field(default_factory=dict)
    casts: Storages = field(default_factory=dict)
    num_saved: int = 0  # Number of tensors that autograd saved.
    input: tuple[int, int] = (0, 0)  # Address and bytes of its input's storage.
    output: tuple[int, int] = (0, 0)  # Address and bytes of its output's storage.
    gradient_bytes: int = 0  # Bytes of its parameters' gradients after its backward pass.

    @property
    def made_bytes(self) -> int:
        """Bytes of its output; 0 if the output is in its input's storage."""
        (input_address, _), (output_address, output_bytes) = self.input, self.output
        return output_bytes if output_address != input_address else 0


@dataclass(kw_only=True, eq=False)
class _MeasuredPass:
    model: nn.Module
    links: Sequence[_Link]  # Its units, in order.
    device: torch.device
    meter: PeakMeter
    counts: bool  # Whether storages are counted, which takes time; otherwise times are recorded.
    keeps_gradients: bool  # Whether gradients stay after a pass.
    roots: list[Tensor] = field(default_factory=list)  # Tensors from which backward passes outside of the chain begin.
    gradients: int = 0  # Bytes of parameters' gradients from outside of the chain after the pass.
    at_turn: list[tuple[WeakReference, int]] = field(default_factory=list)
    """Storage and bytes of the last unit's input and output."""
    freed: Sequence[int] = (0, 0)  # Bytes of these that were freed when head and loss were done.
    moments: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unmoved = UnmovedStorages(self.model)
        self.model_storages = dict(map(storage_of, (*self.model.parameters(), *self.model.buffers())))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self, name: str) -> None:
        self.moments[name] = self.now()
        self.meter.mark(name)

    def forward(self, link: _Link, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replaces a unit's forward pass: measures both of its passes, and returns its output."""
        if not torch.is_grad_enabled():
            return original(x, *args, **kwargs)
        if link.number == 0:
            self.mark("chain")
            if link.unit.shared:
                self.unmoved.add_arguments([x])
            if x.grad_fn is not None:
                self.roots.append(_Exit.apply(None, x))  # type: ignore[no-untyped-call]
        self.unmoved.add_arguments((*args, *kwargs.values()))
        leaf = x.detach().requires_grad_(link.number > 0 or x.requires_grad)

        def call(entry: Tensor) -> Any:
            return original(entry, *args, **kwargs)

        if self.counts:
            self.measured(link, call, leaf, "away")
        output = self.measured(link, call, leaf, "kept")
        if link is self.links[-1]:
            storages = x.untyped_storage(), _first(output).untyped_storage()
            self.at_turn = [(weak_reference(storage), storage.nbytes()) for storage in storages]
            self.mark("turn")
        return output

    def measured(self, link: _Link, call: Callable[[Tensor], Any], leaf: Tensor, how: str) -> Any:
        """Runs both passes of a unit. `how`: `kept`, or `away` if saved tensors are freed and allocated again."""
        torch.clear_autocast_cache()
        entry = _Entry.apply(leaf)  # type: ignore[no-untyped-call]
        hooks: AbstractContextManager[object] = nullcontext()
        if self.counts:
            hooks = self.counting(link) if how == "kept" else self.away()
        self.meter.mark(f"{how} forward {link.number}")
        forward_begin = self.now()
        with hooks:
            output = call(entry)
        forward_end = self.now()
        self.meter.mark(f"{how} backward {link.number}")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        on_backward = self.turned if link is self.links[-1] else None

        def detached(tensor: Tensor) -> Any:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            return _Entry.apply(leaf, on_backward)  # type: ignore[no-untyped-call]

        detached_output = None
        if how == "kept":
            detached_output = tree_map_only(Tensor, detached, output)
            if self.counts:
                link.input, link.output = storage_of(entry), storage_of(_first(output))
        end = None
        if tensors:
            end = _Exit.apply(list(map(torch.ones_like, tensors)), *tensors)  # type: ignore[no-untyped-call]
        del output, tensors, entry
        backward_begin = self.now()
        if end is not None:
            with torch.autocast(self.device.type, enabled=False):
                torch.autograd.backward(end)
        backward_end = self.now()
        self.meter.mark(f"after {how} {link.number}")
        if not self.counts:
            link.forward_s.append(forward_end - forward_begin)
            link.backward_s.append(backward_end - backward_begin)
        if not self.keeps_gradients:
            link.gradient_bytes = self.gradient_bytes()
            for parameter in self.model.parameters():
                parameter.grad = None
        return detached_output

    def gradient_bytes(self) -> int:
        if self.keeps_gradients:
            return 0
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return sum(gradient.untyped_storage().nbytes() for gradient in gradients)

    def counting(self, link: _Link) -> saved_tensors_hooks:
        """Returns hooks that count saved tensors, also casts and copies of parameters."""

        def pack(tensor: Tensor) -> Tensor:
            storage = activation_storage(tensor, self.unmoved)
            link.num_saved += 1
            self.meter.mark(f"kept forward {link.number}, {link.num_saved} saved")
            if storage is not None:
                link.saved[storage.data_ptr()] = storage.nbytes()
            elif tensor.layout is torch.strided and is_of_parameter(tensor):
                address, size = storage_of(tensor)
                if address not in self.model_storages:
                    link.casts[address] = size
            return without_graph(tensor)

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def away(self) -> saved_tensors_hooks:
        """Returns hooks that free saved storages at once, and replace them by zeros in the backward pass."""
        table = SavedStorages()

        def pack(tensor: Tensor) -> Any:
            storage = activation_storage(tensor, self.unmoved)
            if storage is None:
                return without_graph(tensor)
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
            self.mark("turned")
            freed = []
            for storage, size in self.at_turn:
                is_freed = storage.expired()  # type: ignore[no-untyped-call]
                freed.append(size if is_freed else 0)
            self.freed = freed


class _Entry(torch.autograd.Function):
    """A node in front of a unit's input: a leaf would look like a parameter's cast, and its gradient be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_backward: Callable[[], None] | None = None) -> Tensor:
        ctx.on_backward = on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        if ctx.on_backward is not None:
            ctx.on_backward()
        return None, None


class _Exit(torch.autograd.Function):
    """A node from which a backward pass begins without holding the outputs: with given gradients, or with ones."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor] | None, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.layouts = [(output.size(), output.stride(), output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = [
                torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)
                for size, stride, dtype, device in ctx.layouts
            ]
        return None, *gradients


def _run_all(forwards: Sequence[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    x = forwards[0](x, *args, **kwargs)
    for forward in forwards[1:]:
        x = forward(x)
    return x


def _identity(x: Any, *_args: Any, **_kwargs: Any) -> Any:
    return x


def _first(output: Any) -> Tensor:
    tensor = first_tensor(output)
    assert tensor is not None, "a unit returns one (dlbench.node.out_of_core.cut)"
    return tensor


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Returns address and bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@dataclass(kw_only=True)
class ChainProfile:
    """Measures a network whose units are known; `keeps_gradients`: whether gradients stay after a pass."""

    model: nn.Module
    units: Sequence[UnitModule]
    device: torch.device
    keeps_gradients: bool
    beat: Callable[[str], None]

    def measure(
        self, loss_of: Callable[[Batch], Tensor], batch: Batch, *, state_bytes: int, update_bytes: int = 0
    ) -> Chain:
        """Returns the chain of a pass, in the precision of `loss_of`; the two numbers of bytes become part of it."""
        links = [_Link(number=number, unit=unit) for number, unit in enumerate(self.units)]
        with undisturbed(self.model, holds_gradients=self.keeps_gradients):
            # Before bytes are counted, too: in the first pass over such a batch cuDNN allocates memory for its search.
            self._timed(links, loss_of, batch, WARM_PASSES)
            counted = self._pass(links, loss_of, batch, peaks_on(self.device), counts=True)
            for link in links:
                link.forward_s.clear()
                link.backward_s.clear()
            timed = self._timed(links, loss_of, batch, TIMED_PASSES)
        intervals = counted.meter.intervals()
        cast_bytes = sum(sum(link.casts.values()) for link in links)
        batch_bytes = sum(tensor.untyped_storage().nbytes() for tensor in batch.values())
        _, output_bytes = links[-1].output
        # The last unit's input is an argument of a call that returns: it may be freed before the head computes. Counted
        # with the head's gradients is autograd's memory of a weight that is also used before the chain (tied weights).
        freed_input, freed_output = counted.freed
        before_chain_bytes = intervals["chain"].begin - intervals["begin"].begin
        begin = intervals["turn"].begin - freed_input
        gradient_bytes = max(0, intervals["turned"].begin - begin + freed_output - output_bytes)
        # Units' times are scaled to a median pass: rare disturbances hardly show in the medians of single units.
        times = list(itertools.chain.from_iterable((link.forward_s, link.backward_s) for link in links))
        units_s = sum(map(statistics.median, times))
        factor = 1.0
        if units_s > 0:
            factor = statistics.median(map(sum, zip(*times, strict=True))) / units_s
        links_before = [None, *links[:-1]]
        units = tuple(_unit(link, before, intervals, factor) for link, before in zip(links, links_before, strict=True))
        return Chain(
            units=units,
            batch=len(next(iter(batch.values()))),
            output_bytes=output_bytes,
            before_s=_median(timed, "begin", "chain"),
            turn_s=_median(timed, "turn", "turned"),
            after_s=_median(timed, "turned", "end"),
            state_bytes=state_bytes,
            outside_bytes=batch_bytes + before_chain_bytes + cast_bytes - units[0].input_bytes,
            turn_bytes=intervals["turn"].peak - begin,
            turn_gradient_bytes=gradient_bytes,
            after_bytes=intervals["turned"].growth,
            after_gradient_bytes=max(0, counted.gradients - gradient_bytes),
            update_bytes=update_bytes,
        )

    def _timed(
        self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, most: int
    ) -> list[_MeasuredPass]:
        begin, passes = time.monotonic(), list[_MeasuredPass]()
        while len(passes) < most and (len(passes) < LEAST_PASSES or time.monotonic() - begin < LONG_S):
            passes.append(self._pass(links, loss_of, batch, PeakMeter(), counts=False))
        return passes

    def _pass(
        self, links: list[_Link], loss_of: Callable[[Batch], Tensor], batch: Batch, meter: PeakMeter, *, counts: bool
    ) -> _MeasuredPass:
        self.beat("a pass that measures memory")
        if not self.keeps_gradients:
            for parameter in self.model.parameters():
                parameter.grad = None
        keeps = self.keeps_gradients
        measured = _MeasuredPass(
            model=self.model, links=links, device=self.device, meter=meter, counts=counts, keeps_gradients=keeps
        )
        modules = list(itertools.chain.from_iterable(link.unit.modules for link in links))
        try:
            for link in links:
                unit_forward = partial(_run_all, [module.forward for module in link.unit.modules])
                for module in link.unit.modules:
                    module.forward = _identity
                link.unit.modules[0].forward = partial(measured.forward, link, unit_forward)
            with meter:
                measured.mark("begin")
                measured.roots.append(loss_of(batch))
                torch.autograd.backward(measured.roots)
                measured.turned()
                measured.mark("end")
                measured.gradients = measured.gradient_bytes()
                measured.roots.clear()
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)  # uncovers that of the class
        return measured


def _unit(link: _Link, previous: _Link | None, intervals: Mapping[str, MemoryInterval], factor: float) -> Unit:
    number = link.number
    (input_address, input_bytes), (output_address, _) = link.input, link.output
    input_saved = input_address in link.saved
    has_own_input = not link.unit.shared
    if previous is not None:
        input_saved = input_saved or previous.output[0] in previous.saved
        # The output of a unit that only views its input (Flatten) is in the storage of that input.
        has_own_input = previous.made_bytes > 0
    inner_bytes = [size for address, size in link.saved.items() if address not in (input_address, output_address)]
    saved_bytes, cast_bytes = sum(inner_bytes), sum(link.casts.values())
    # The detached output exists during the backward pass; in training only if the unit saved it.
    output_bytes = 0 if output_address in link.saved else link.made_bytes

    def peak(how: str, interval: str) -> int:
        """Returns the peak in addition to the unit's input, in bytes."""
        return intervals[f"{how} {interval}"].peak - intervals[f"{how} forward {number}"].begin

    forward_peaks = [peak("kept", f"forward {number}")]
    forward_peaks += [peak("kept", f"forward {number}, {count} saved") for count in range(1, link.num_saved + 1)]
    forward_peak, recomputing_peak = max(forward_peaks), max(forward_peaks[:-1], default=0)
    return Unit(
        name=link.unit.name,
        forward_s=factor * statistics.median(link.forward_s),
        backward_s=factor * statistics.median(link.backward_s),
        saved_bytes=saved_bytes,
        saved_count=len(inner_bytes),
        input_bytes=input_bytes if has_own_input else 0,
        input_saved=input_saved,
        joins=link.unit.joins,
        input_shared=link.unit.shared,
        gradient_bytes=link.gradient_bytes,
        forward_working_bytes=max(0, forward_peak - saved_bytes - link.made_bytes - cast_bytes),
        recomputing_working_bytes=max(0, recomputing_peak - saved_bytes - cast_bytes),
        backward_working_bytes=max(0, peak("kept", f"backward {number}") - saved_bytes - output_bytes - cast_bytes),
        passing_working_bytes=max(0, peak("away", f"forward {number}") - link.made_bytes - cast_bytes),
        piecemeal_bytes=max(0, peak("away", f"backward {number}") - cast_bytes),
    )


def update_growth(model: nn.Module, spec: OptimizerSpec, device: torch.device) -> int:
    """Returns the temporary bytes of an optimizer's update, measured on a copy of the parameters."""
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(copies, spec)
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the state
    with peaks_on(device) as meter:
        meter.mark("update")
        optimizer.step()
    return meter.intervals()["update"].growth


def _median(passes: Sequence[_MeasuredPass], begin: str, end: str) -> float:
    durations_s = [measured.moments[end] - measured.moments[begin] for measured in passes]
    return max(0.0, statistics.median(durations_s))
