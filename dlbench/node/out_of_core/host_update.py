"""`train.optimizer_state host`: the CPU updates parameters, block by block, alongside the next forward pass."""
# This is KARMA's fifth stage (Wahib et al., SC20), like ZeRO-Offload (Ren et al., ATC'21) without its delayed update,
# so results equal those of an update by the device. Copies from and to a GPU are not measured here.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.node.failures import BackgroundWorker
from dlbench.node.models.optimizers import optimizer_of
from dlbench.node.page_locked import PIECE_BYTES, locked_memory
from dlbench.node.part import TrainingPart
from dlbench.records.out_of_core import HostUpdate
from dlbench.records.record import RankSummary, Setting
from dlbench.specs.training import OptimizerSpec
from dlbench.units import format_seconds

SETTING = "train.optimizer_state host"
GROUPS = 16  # Most groups of parameters, by bytes: each has a fixed cost, and the last one's update cannot overlap.


class ForwardOrder:
    """Finds the order in which modules with trained parameters are called, by hooks that call `reach` before each."""

    # Without hooks (a compiled network) it is that of definition. Parameters of a module that is never called itself
    # (torch's attention reads its output projection's weights) belong to the nearest enclosing module that is called.

    def __init__(self, model: nn.Module, reach: Callable[[nn.Module], None], *, is_hooked: bool = True) -> None:
        self._model = model
        self._reach = reach
        self._modules = dict(model.named_modules())
        self._owners: dict[nn.Parameter, list[str]] = {}
        for name, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self._owners.setdefault(parameter, []).append(name)
        self._calls: dict[str, int] = {}  # Position of each module in the order of first calls, by name.
        self._hooks = ExitStack()
        for name in dict.fromkeys(chain([""], *self._owners.values())):
            if is_hooked:
                self._hooks.enter_context(self._modules[name].register_forward_pre_hook(partial(self._called, name)))
            else:
                self._calls[name] = len(self._calls)

    def _called(self, name: str, module: nn.Module, inputs: object) -> None:
        self._calls.setdefault(name, len(self._calls))
        self._reach(module)

    def _waiting_module(self, owner: str) -> str:
        while owner and owner not in self._calls:
            owner = owner.rpartition(".")[0]
        return owner

    def _position(self, name: str) -> int:
        return self._calls.get(name, -1)

    def groups(self) -> list[tuple[list[nn.Parameter], list[nn.Module]]]:
        """Returns parameters that are updated together, and modules that wait for them, in forward order."""
        parameters_by_module: dict[str, list[nn.Parameter]] = {}
        for parameter, owners in self._owners.items():
            first_module = min(map(self._waiting_module, owners), key=self._position)
            parameters_by_module.setdefault(first_module, []).append(parameter)
        total = sum(p.numel() * p.element_size() for p in self._owners)
        groups: list[tuple[list[nn.Parameter], list[nn.Module]]] = [([], [])]
        for name in sorted(parameters_by_module, key=self._position):
            parameters, modules = groups[-1]
            parameters += parameters_by_module[name]
            modules.append(self._modules[name])
            if sum(p.numel() * p.element_size() for p in parameters) * GROUPS >= total:
                groups.append(([], []))
        return [(parameters, modules) for parameters, modules in groups if parameters]

    def close(self) -> None:
        self._hooks.close()


class HostParameters:
    """The parameters that the host updates; on a CPU these are the network's own memory, and nothing is copied."""

    tensors: dict[nn.Parameter, nn.Parameter]  # Parameters of the host's optimizer, by parameter of the network.
    num_bytes = 0  # Host memory for copies.
    text = "on a CPU host and device share memory, so no memory is saved: only the overlap is tested"

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Separate leaves: the network's drop their gradients while these are still read.
        self.tensors = {p: nn.Parameter(p.detach()) for p in parameters}

    def enter_thread(self) -> None:
        """Is called once on the updating thread."""

    def mark(self) -> Any:
        """Returns this moment of the computation, which gradients wait for before they are read."""
        return None

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], since: Any) -> Any:
        """Begins to copy gradients to the host, after the moment `since`; returns the argument of `receive`."""
        return gradients

    def receive(self, sent: Any) -> list[Tensor | None]:
        return list(sent)

    def give_back(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Begins to copy updated parameters to the device; returns the argument of `join`."""
        return None

    def join(self, copied: Any) -> None:
        """Makes work that is queued from now on wait for these copies."""


class CudaLanes:
    """Two streams of a GPU, one for each direction; `beat` is called while memory is page-locked."""

    def __init__(self, device: torch.device, beat: Callable[[str], None] = lambda _progress: None) -> None:
        self._device, self._beat = device, beat
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        """Returns this moment of the current stream: the computing one outside of `out` and `back`."""
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
        size = num * dtype.itemsize
        return locked_memory(size, SETTING, borders=(), beat=self._beat).view(dtype)


class HostCopies(HostParameters):
    """Copies of all parameters and memory for their gradients on the host, in few pieces of page-locked memory."""

    # Locking pages takes milliseconds per call, so parameters share pieces; no copy may cross from one into the next.

    text = "gradients were copied to page-locked memory and parameters back, on two separate streams"

    def __init__(self, parameters: Iterable[nn.Parameter], lanes: CudaLanes, piece_bytes: int = PIECE_BYTES) -> None:
        self._lanes = lanes
        self.tensors = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self.num_bytes = 0
        for members in _pieces(parameters, piece_bytes):
            dtype = members[0].dtype
            elements = sum(p.numel() for p in members)
            values, gradients = lanes.host_buffer(elements, dtype), lanes.host_buffer(elements, dtype)
            self.num_bytes += 2 * elements * values.element_size()
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
            host_gradients: list[Tensor | None] = []
            for parameter, gradient in zip(parameters, gradients, strict=True):
                host_gradient = None
                if gradient is not None:
                    host_gradient = self._gradients[parameter].copy_(gradient, non_blocking=True)
                host_gradients.append(host_gradient)
            # The device's gradients stay referenced: their memory must not be reused before they are read.
            return host_gradients, tuple(gradients), self._lanes.mark()

    def receive(self, sent: Any) -> list[Tensor | None]:
        host_gradients: list[Tensor | None]
        host_gradients, _, moment = sent
        self._lanes.wait(moment)
        return host_gradients

    def give_back(self, parameters: Sequence[nn.Parameter]) -> Any:
        with torch.no_grad(), self._lanes.back():
            for parameter in parameters:
                parameter.copy_(self.tensors[parameter], non_blocking=True)
            return self._lanes.mark()

    def join(self, copied: Any) -> None:
        self._lanes.join(copied)


def _pieces(parameters: Iterable[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yields parameters of one type for one piece of memory of at most `most_bytes`, or a single larger one."""
    pieces: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}  # members and bytes of the piece that grows
    for parameter in parameters:
        members, size = pieces.get(parameter.dtype, ([], 0))
        if members and size + parameter.nbytes > most_bytes:
            yield members
            members, size = [], 0
        pieces[parameter.dtype] = ([*members, parameter], size + parameter.nbytes)
    yield from (members for members, _ in pieces.values())


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """Views memory in the shape of a tensor, and in its memory order if that has no gaps, so that copies are plain."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return flat.view(tensor.shape)


def host_parameters(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    spec: OptimizerSpec,
    *,
    check_room: Callable[[int], None] = lambda _num_bytes: None,
    beat: Callable[[str], None] = lambda _progress: None,
) -> HostParameters:
    """Returns the parameters that the host updates; `check_room` is called with bytes before memory is page-locked."""
    if device.type != "cuda":
        return HostParameters(parameters)
    parameters = list(parameters)
    size = sum(parameter.nbytes for parameter in parameters)
    check_room((2 + spec.slots) * size)
    return HostCopies(parameters, CudaLanes(device, beat))


class UpdateGroup:
    """Parameters that are updated together: their optimizer on the host, and the progress of this step's update."""

    def __init__(self, parameters: Sequence[nn.Parameter], host: HostParameters, spec: OptimizerSpec) -> None:
        self.parameters = parameters
        self.tensors = [host.tensors[p] for p in parameters]
        self.optimizer = optimizer_of(self.tensors, spec)
        self.num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.gradients: list[Tensor | None] = []
        self.is_ready = True
        self.copied: Any = None  # Copies of updated parameters to the device, for `HostParameters.join`.
        self.is_joined = True

    def begin(self) -> None:
        self.gradients = [p.grad for p in self.parameters]
        self.is_ready = False
        self.is_joined = False


class HostUpdater(TrainingPart):
    """Replaces the `step` of an optimizer, which keeps its parameter groups and its `state`, now on the host."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        host: HostParameters,
        *,
        overlaps: bool = True,  # Whether the forward pass waits module by module, not for all updates.
        whole_steps: int = 0,  # First steps that end with their update: the engine replaces gradients after them.
    ) -> None:
        self._optimizer, self._spec, self._host = optimizer, spec, host
        self._overlaps = overlaps
        self._whole_steps = whole_steps
        self._order = ForwardOrder(model, self._reach, is_hooked=overlaps)
        self._groups: list[UpdateGroup] = []
        self._group_of: dict[nn.Module, UpdateGroup] = {}
        # The optimizer's state, restored or empty, moves to the host.
        for parameter, tensor in host.tensors.items():
            state = optimizer.state[parameter]
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(tensor.device)
        self._steps = self._updates = 0
        self._update_ns = self._wait_ns = 0
        self._worker = BackgroundWorker("dlbench update")
        self._worker.put(host.enter_thread)
        optimizer.step = self.begin  # type: ignore[assignment, method-assign]

    @property
    def early_warnings(self) -> tuple[str, ...]:
        warnings = []
        if not self._host.num_bytes:
            warnings.append(f"train.optimizer_state host: {self._host.text}")
        if not self._overlaps:
            warnings.append("train.optimizer_state host: the network is compiled as a whole and cannot wait inside")
        return tuple(warnings)

    def begin(self, closure: object = None) -> None:
        """Begins the update of a step with the current gradients and learning rates; returns before it is done."""
        self.settle()
        if not self._groups:
            for parameters, modules in self._order.groups():
                group = UpdateGroup(parameters, self._host, self._spec)
                for parameter, tensor in zip(group.parameters, group.tensors, strict=True):
                    # The same dictionary: the network's optimizer checkpoints the state that the group's makes.
                    group.optimizer.state[tensor] = self._optimizer.state[parameter]
                self._groups.append(group)
                self._group_of |= dict.fromkeys(modules, group)
        # Rates and step counts come from the network's optimizer, whose groups then count this step.
        for number, param_group in enumerate(self._optimizer.param_groups):
            settings = {key: value for key, value in param_group.items() if key != "params"}
            for group in self._groups:
                group.optimizer.param_groups[number].update(settings)
            if "step" in param_group and any(p.grad is not None for p in param_group["params"]):
                param_group["step"] += 1
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
        self._host.join(group.copied)

    def before_forward(self) -> None:
        if not self._overlaps:
            self.settle()

    def settle(self) -> None:
        """Returns when every parameter is updated (on a GPU: when work that is queued next will wait for that)."""
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
            group.copied = self._host.give_back(group.parameters)
            with self._worker.changed:
                group.is_ready = True
                self._worker.changed.notify_all()

    def begin_measuring(self) -> None:
        self._steps = 0
        self._update_ns = self._wait_ns = 0

    def result(self) -> HostUpdate:
        self.settle()
        copied_bytes = 0
        if self._host.num_bytes:
            copied_bytes = 2 * sum(group.num_bytes for group in self._groups) * self._steps
        state = chain.from_iterable(values.values() for values in self._optimizer.state.values())
        return HostUpdate(
            update_s=self._update_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
            copied_bytes=copied_bytes,
            state_bytes=self._host.num_bytes + sum(value.nbytes for value in state if isinstance(value, Tensor)),
        )

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        return {"host_update": self.result()}

    def settings(self) -> list[Setting]:
        result = self.result()
        order = "in the order of the forward pass, which waited for each"
        if not self._overlaps:
            order = "before a forward pass"
        evidence = (
            f"a thread of the CPU made every update: {len(self._host.tensors)} parameters in {len(self._groups)} "
            f"groups, {order}; updates took {format_seconds(result.update_s)}, of which training waited "
            f"{format_seconds(result.wait_s)}; {self._host.text}"
        )
        return [Setting(key="train.optimizer_state", requested="host", effective="host", evidence=evidence)]

    def close(self) -> None:
        """Ends the thread after its step, and removes the hooks; may be called twice."""
        self._order.close()
        self._worker.close()
