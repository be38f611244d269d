"""`train.optimizer_state host`: the CPU updates parameters, block by block, alongside the next forward pass.

KARMA's fifth stage (Wahib et al., SC20), as ZeRO-Offload (Ren et al., ATC'21) does it without its delayed update: the
optimizer's state lies on the host, and the numbers are those of an update by the device. The engine exchanges gradients
as ever; then a thread updates the parameters in the order in which the forward pass needs them, and the forward pass
waits, module by module, for its own. Before a backward pass everything is updated.

Parameters are updated in place on a CPU, on page-locked copies of them where the device is a GPU. On a GPU gradients
are copied out on a stream of their own, once the exchange is done, and parameters back on another; the forward pass
waits for the copies that it needs by events between streams (not measured here).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.node.background import BackgroundWorker
from dlbench.node.models.optimizers import optimizer_of
from dlbench.node.page_locked import PIECE_BYTES, locked_memory
from dlbench.node.part import TrainingPart
from dlbench.records.out_of_core import HostUpdate
from dlbench.records.rank_summary import RankSummary
from dlbench.records.record import Setting
from dlbench.specs.training import OptimizerSpec
from dlbench.units import format_seconds

SETTING = "train.optimizer_state host"
GROUPS = 16  # Groups of parameters at most, by bytes: each costs some fixed time, the last one's update hides nothing.


class ForwardOrder:
    """Hooks in front of all modules that own trained parameters; the first forward pass shows their order.

    Parameters of a module that is never called itself (torch's attention reads its output projection's weights) are
    waited for by the nearest module around it that is. `reach`: called before every call of such a module. `is_hooked`:
    False: a compiled network, whose order is that of definition.
    """

    def __init__(self, model: nn.Module, reach: Callable[[nn.Module], None], *, is_hooked: bool = True) -> None:
        self._model = model
        self._reach = reach
        self._modules = dict(model.named_modules())
        self._owners: dict[nn.Parameter, list[str]] = {}
        for name, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self._owners.setdefault(parameter, []).append(name)
        self._calls: dict[str, int] = {}
        self._hooks = []
        for name in dict.fromkeys(("", *(name for names in self._owners.values() for name in names))):
            if is_hooked:
                self._hooks.append(self._modules[name].register_forward_pre_hook(partial(self._called, name)))
            else:
                self._calls[name] = len(self._calls)

    def _called(self, name: str, module: nn.Module, inputs: object) -> None:
        self._calls.setdefault(name, len(self._calls))
        self._reach(module)

    def _place(self, owner: str) -> str:
        """The owner or the nearest module around it that is called; "" is the network."""
        while owner and owner not in self._calls:
            owner = owner.rpartition(".")[0]
        return owner

    def groups(self) -> list[tuple[list[nn.Parameter], list[nn.Module]]]:
        """Returns trained parameters in the order in which the forward pass needs them, after its first run.

        With those that are updated together stand the modules before whose call they must be ready.
        """
        held: dict[str, list[nn.Parameter]] = {}
        for parameter, owners in self._owners.items():
            first = min(map(self._place, owners), key=lambda name: self._calls.get(name, -1))
            held.setdefault(first, []).append(parameter)
        total = sum(p.numel() * p.element_size() for p in self._owners)
        groups: list[tuple[list[nn.Parameter], list[nn.Module]]] = [([], [])]
        for name in sorted(held, key=lambda name: self._calls.get(name, -1)):
            parameters, modules = groups[-1]
            parameters += held[name]
            modules.append(self._modules[name])
            if sum(p.numel() * p.element_size() for p in parameters) * GROUPS >= total:
                groups.append(([], []))
        return [group for group in groups if group[0]]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class HostParameters:
    """Parameters as the host updates them; on a CPU these are the network's own memory, and nothing is copied."""

    tensors: dict[nn.Parameter, nn.Parameter]  # what the host's optimizer works on, by parameter
    num_bytes = 0  # held by the host for copies
    text = "on a CPU host and device share memory, so that nothing is spared: only the overlap is tried"

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Leaves of their own: the network's drop their gradients while these are still read.
        self.tensors = {p: nn.Parameter(p.detach()) for p in parameters}

    def enter_thread(self) -> None:
        """Called once on the updating thread."""

    def mark(self) -> Any:
        """This moment of the computation: what was ordered before it is done before gradients are read."""
        return None

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], since: Any) -> Any:
        """Begins to bring gradients to the host, after the moment `since`; what `receive` wants."""
        return gradients

    def receive(self, sent: Any) -> list[Tensor | None]:
        return list(sent)

    def give_back(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Begins to bring updated parameters to the device; what `join` wants."""
        return None

    def join(self, given: Any) -> None:
        """What is ordered from now on comes after that."""


class CudaLanes:
    """Two streams of a GPU, one a direction; `beat`: called while memory is page-locked."""

    def __init__(self, device: torch.device, beat: Callable[[str], None] = lambda _what: None) -> None:
        self._device, self._beat = device, beat
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        """This moment of the lane in force; of the computation outside of `out` and `back`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def out(self, since: torch.cuda.Event) -> AbstractContextManager[object]:
        """Within it copies leave the device, after the moment `since`."""
        self._out.wait_event(since)
        return torch.cuda.stream(self._out)

    def back(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._back)

    def wait(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()

    def join(self, moment: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(moment)

    def host_buffer(self, num: int, dtype: torch.dtype) -> Tensor:
        size = num * dtype.itemsize
        return locked_memory(size, SETTING, borders=(), beat=self._beat).view(dtype)


class HostCopies(HostParameters):
    """Copies of all parameters and room for their gradients, on the host; each in few pieces of memory.

    Not one a parameter, because locking pages takes milliseconds a call; no copy may cross from one piece into the
    next.
    """

    text = "gradients were copied to page-locked memory and parameters back, each on a stream of its own"

    def __init__(self, parameters: Iterable[nn.Parameter], lanes: CudaLanes, piece_bytes: int = PIECE_BYTES) -> None:
        self._lanes = lanes
        self.tensors = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self.num_bytes = 0
        for members in _pieces(parameters, piece_bytes):
            dtype = members[0].dtype
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


def _pieces(parameters: Iterable[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type that lie in one piece of memory of at most so many bytes, or one that is larger."""
    open_ones: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        members, size = open_ones.get(parameter.dtype, ([], 0))
        if members and size + parameter.nbytes > most:
            yield members
            members, size = [], 0
        open_ones[parameter.dtype] = ([*members, parameter], size + parameter.nbytes)
    yield from (members for members, _ in open_ones.values())


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """A piece of memory in the shape of a tensor, and in its order where that has no gaps: copies are then plain."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return flat.view(tensor.shape)


def host_parameters(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    spec: OptimizerSpec,
    *,
    check_room: Callable[[int], None] = lambda _num_bytes: None,
    beat: Callable[[str], None] = lambda _what: None,
) -> HostParameters:
    """Returns parameters as the host updates them; `check_room`: asked before anything is page-locked."""
    if device.type != "cuda":
        return HostParameters(parameters)
    known = list(parameters)
    size = sum(parameter.nbytes for parameter in known)
    check_room((2 + spec.slots) * size)
    return HostCopies(known, CudaLanes(device, beat))


class UpdateGroup:
    """Parameters that are updated together: their optimizer on the host, and how far this step's update is."""

    def __init__(self, parameters: Sequence[nn.Parameter], host: HostParameters, spec: OptimizerSpec) -> None:
        self.parameters = parameters
        self.tensors = [host.tensors[p] for p in parameters]
        self.optimizer = optimizer_of(self.tensors, spec)
        self.num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.gradients: list[Tensor | None] = []
        self.is_ready = True
        self.given: Any = None
        self.is_joined = True

    def begin(self) -> None:
        self.gradients = [p.grad for p in self.parameters]
        self.is_ready = False
        self.is_joined = False


class HostUpdater(TrainingPart):
    """Stands in for the step of an optimizer, which keeps its parameter groups and its `state`, now on the host.

    `host`: where the host updates. `overlaps`: whether the forward pass waits module by module; otherwise, before it
    begins, for all. `whole_steps`: that many first steps end with their update: after them the engine moves gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        host: HostParameters,
        *,
        overlaps: bool = True,
        whole_steps: int = 0,
    ) -> None:
        self._optimizer, self._spec, self._host = optimizer, spec, host
        self._overlaps = overlaps
        self._whole_steps = whole_steps
        self._order = ForwardOrder(model, self._reach, is_hooked=overlaps)
        self._groups: list[UpdateGroup] = []
        self._group_of: dict[nn.Module, UpdateGroup] = {}
        # The optimizer's state, restored or empty, moves to the host.
        for parameter, tensor in host.tensors.items():
            mine = optimizer.state[parameter]
            for name, value in mine.items():
                if isinstance(value, Tensor):
                    mine[name] = value.to(tensor.device)
        self._steps = self._updates = 0
        self._update_ns = self._wait_ns = 0
        self._worker = BackgroundWorker("dlbench update")
        self._worker.put(host.enter_thread)
        optimizer.step = self.begin  # type: ignore[assignment, method-assign]

    @property
    def doubts(self) -> tuple[str, ...]:
        found = []
        if not self._host.num_bytes:
            found.append(f"train.optimizer_state host: {self._host.text}")
        if not self._overlaps:
            found.append("train.optimizer_state host: the network is compiled as a whole and cannot wait inside")
        return tuple(found)

    def begin(self, closure: object = None) -> None:
        """The update of a step, with the gradients and the rates that are there now; returns before it is done."""
        self.settle()
        if not self._groups:
            for parameters, modules in self._order.groups():
                group = UpdateGroup(parameters, self._host, self._spec)
                for parameter, tensor in zip(group.parameters, group.tensors, strict=True):
                    # One and the same dictionary: what the group's optimizer makes, the whole one's checkpoint holds.
                    group.optimizer.state[tensor] = self._optimizer.state[parameter]
                self._groups.append(group)
                self._group_of |= dict.fromkeys(modules, group)
        # Rates and counts of steps as they stand in the optimizer's groups, which then count this step.
        for number, whole in enumerate(self._optimizer.param_groups):
            for group in self._groups:
                group.optimizer.param_groups[number].update({k: v for k, v in whole.items() if k != "params"})
            if "step" in whole and any(p.grad is not None for p in whole["params"]):
                whole["step"] += 1
        for group in self._groups:
            group.begin()
        self._worker.put(partial(self._update_all, self._host.mark()))
        self._steps += 1
        self._updates += 1
        if self._updates <= self._whole_steps:
            self.settle()

    def _reach(self, module: nn.Module) -> None:
        group = self._group_of.get(module)
        if group is not None and not group.is_joined:
            self._wait(group)

    def _wait(self, group: UpdateGroup) -> None:
        if not group.is_ready:
            start = time.monotonic_ns()
            with self._worker.changed:
                self._worker.changed.wait_for(lambda: group.is_ready or self._worker.error is not None)
            self._wait_ns += time.monotonic_ns() - start
        self._worker.require_well()
        group.is_joined = True
        self._host.join(group.given)

    def before_forward(self) -> None:
        """A forward pass begins; where it cannot wait module by module, it waits here."""
        if not self._overlaps:
            self.settle()

    def settle(self) -> None:
        """Returns when every parameter is updated (on a GPU: when what is ordered next comes after that)."""
        for group in self._groups:
            if not group.is_joined:
                self._wait(group)

    def _update_all(self, since: Any) -> None:
        sent = [self._host.send(group.parameters, group.gradients, since) for group in self._groups]
        for group in self._groups:
            gradients = self._host.receive(sent.pop(0))
            start = time.monotonic_ns()
            for tensor, gradient in zip(group.tensors, gradients, strict=True):
                tensor.grad = gradient
            group.optimizer.step()
            self._update_ns += time.monotonic_ns() - start
            for tensor in group.tensors:
                tensor.grad = None
            group.gradients = []
            group.given = self._host.give_back(group.parameters)
            with self._worker.changed:
                group.is_ready = True
                self._worker.changed.notify_all()

    def begin_measuring(self) -> None:
        self._steps = 0
        self._update_ns = self._wait_ns = 0

    def result(self) -> HostUpdate:
        self.settle()
        parameters = sum(group.num_bytes for group in self._groups)
        state = [t for one in self._optimizer.state.values() for t in one.values() if isinstance(t, Tensor)]
        return HostUpdate(
            update_s=self._update_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
            copied_bytes=2 * parameters * self._steps if self._host.num_bytes else 0,
            state_bytes=self._host.num_bytes + sum(t.numel() * t.element_size() for t in state),
        )

    def record(self, everyone: Sequence[RankSummary]) -> dict[str, Any]:
        return {"host_update": self.result()}

    def settings(self) -> list[Setting]:
        result = self.result()
        where = "in the order of the forward pass, which waited for each" if self._overlaps else "before a forward pass"
        evidence = (
            f"a thread of the CPU made every update: {len(self._host.tensors)} parameters in {len(self._groups)} "
            f"groups, {where}; of {format_seconds(result.update_s)} of updating {format_seconds(result.wait_s)} were "
            f"waited for; {self._host.text}"
        )
        return [Setting(key="train.optimizer_state", requested="host", effective="host", evidence=evidence)]

    def close(self) -> None:
        """Ends the thread once it is through with its step, and takes the hooks away; twice does no harm."""
        self._order.close()
        self._worker.close()
