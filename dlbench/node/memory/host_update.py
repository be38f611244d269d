"""`train.optimizer_state host`: the CPU updates parameters, block by block, beside the next forward pass.

KARMA's fifth stage (Wahib et al., SC20), as ZeRO-Offload (Ren et al., ATC'21) does it without its delayed update: the
optimizer's state lies on the host, and the numbers are those of an update by the device. The engine exchanges gradients
as ever; then a thread updates the parameters in the order in which the forward pass needs them, and the forward pass
waits, module by module, for its own. Before a backward pass everything is updated.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.node.memory.forward_order import ForwardOrder, Needed
from dlbench.node.memory.host_copies import HostParameters
from dlbench.node.models.optimizers import optimizer_of
from dlbench.records.memory import HostUpdate as HostUpdateResult
from dlbench.records.record import Setting
from dlbench.specs.training import OptimizerSpec
from dlbench.units import format_seconds


class _Group:
    """Parameters that are updated together: their optimizer on the host, and how far this step's update is."""

    def __init__(self, needed: Needed, host: HostParameters, spec: OptimizerSpec) -> None:
        self.parameters = needed.parameters
        self.tensors = [host.tensors[p] for p in needed.parameters]
        self.optimizer = optimizer_of(self.tensors, spec)
        self.num_bytes = sum(p.numel() * p.element_size() for p in needed.parameters)
        self.gradients: list[Tensor | None] = []
        self.ready = threading.Event()
        self.ready.set()
        self.given: Any = None
        self.is_joined = True

    def begin(self) -> None:
        self.gradients = [p.grad for p in self.parameters]
        self.ready.clear()
        self.is_joined = False


class HostUpdate:
    """Stands in for the step of an optimizer; the training loop and the engine call that as ever.

    The optimizer keeps its parameter groups (the loop writes rates there) and its `state`, whose tensors lie on the
    host from now on: a checkpoint holds the same either way. Its memory on the device is none.

    Args:
        model: the network, with the parameters of the first step in it.
        optimizer: of `build_optimizer` for the same network, wrapped by an engine or not; restored already.
        spec: its specification.
        host: where the host updates.
        overlaps: whether the forward pass waits module by module; otherwise, before it begins, for all.
        whole_steps: so many first steps end with their update: after them the engine moves gradients.
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
        self._groups: list[_Group] = []
        self._group_of: dict[nn.Module, _Group] = {}
        self._adopt()
        self._failure: BaseException | None = None
        self._steps = self._updates = 0
        self._update_ns = self._wait_ns = 0
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        # A daemon: a rank that fails elsewhere does not wait for it.
        self._thread = threading.Thread(target=self._run, name="dlbench update", daemon=True)
        self._thread.start()
        optimizer.step = self.begin  # type: ignore[assignment, method-assign]

    def _adopt(self) -> None:
        """The optimizer's state, restored or empty, moves to the host."""
        state = self._optimizer.state
        for parameter, tensor in self._host.tensors.items():
            mine = state[parameter]
            for name, value in mine.items():
                if isinstance(value, Tensor):
                    mine[name] = value.to(tensor.device)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What figures must not be read without, a sentence each."""
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
            self._arrange()
        self._set_rates()
        for group in self._groups:
            group.begin()
        self._waiting.put(self._host.mark())
        self._steps += 1
        self._updates += 1
        if self._updates <= self._whole_steps:
            self.settle()

    def _arrange(self) -> None:
        """Groups, now that a forward pass has shown the order."""
        for needed in self._order.groups():
            group = _Group(needed, self._host, self._spec)
            for parameter, tensor in zip(group.parameters, group.tensors, strict=True):
                # One and the same dictionary: what the group's optimizer makes, the whole one's checkpoint holds.
                group.optimizer.state[tensor] = self._optimizer.state[parameter]
            self._groups.append(group)
            self._group_of |= dict.fromkeys(needed.places, group)

    def _set_rates(self) -> None:
        """Rates and counts of steps as they stand in the optimizer's groups, which then count this step."""
        for number, whole in enumerate(self._optimizer.param_groups):
            for group in self._groups:
                group.optimizer.param_groups[number].update({k: v for k, v in whole.items() if k != "params"})
            if "step" in whole and any(p.grad is not None for p in whole["params"]):
                whole["step"] += 1

    def _reach(self, module: nn.Module) -> None:
        """The forward pass is at a module: its parameters must be ready."""
        group = self._group_of.get(module)
        if group is not None and not group.is_joined:
            self._wait(group)

    def _wait(self, group: _Group) -> None:
        if not group.ready.is_set():
            start = time.monotonic_ns()
            group.ready.wait()
            self._wait_ns += time.monotonic_ns() - start
        if self._failure is not None:
            raise self._failure
        group.is_joined = True
        self._host.join(group.given)

    def before_forward(self) -> None:
        """A forward pass begins; where it cannot wait module by module, it waits here."""
        if not self._overlaps:
            self.settle()

    def settle(self) -> None:
        """Returns when every parameter is updated (on a GPU: when what is ordered next comes after that).

        Raises:
            Exception: what made an update fail.
        """
        for group in self._groups:
            if not group.is_joined:
                self._wait(group)

    def _run(self) -> None:
        self._host.enter_thread()
        while (since := self._waiting.get()) is not False:
            try:
                self._update_all(since)
            except BaseException as error:
                # Whatever it is, it belongs to the step that waits for it.
                self._failure = error
                # Only here: once the last group is ready, the next step may have begun.
                for group in self._groups:
                    group.ready.set()

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
            group.ready.set()

    def begin_measuring(self) -> None:
        """Counts from here; everything is updated."""
        self._steps = 0
        self._update_ns = self._wait_ns = 0

    def result(self) -> HostUpdateResult:
        """What it did since `begin_measuring`."""
        self.settle()
        parameters = sum(group.num_bytes for group in self._groups)
        state = [t for one in self._optimizer.state.values() for t in one.values() if isinstance(t, Tensor)]
        return HostUpdateResult(
            update_s=self._update_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
            copied_bytes=2 * parameters * self._steps if self._host.num_bytes else 0,
            state_bytes=self._host.num_bytes + sum(t.numel() * t.element_size() for t in state),
        )

    def settings(self) -> list[Setting]:
        """That the host updated, and how that is known."""
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
        self._waiting.put(False)
        self._thread.join()
