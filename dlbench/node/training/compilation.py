"""`train.compile`: torch.compile of the network or, where a plan treats its activations, of each block.

A whole network is compiled in place, so that its parameters keep their names; DDP's wrapper is compiled with what it
wraps, which makes torch cut the backward pass where a bucket of gradients is full. Compiling falls into the warm-up.
Evaluations run what was not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dlbench.errors import EnvironmentLacksError
from dlbench.node.memory.profile import undisturbed
from dlbench.node.memory.saved import HeldByOthers, activation_storage
from dlbench.node.models.build import Batch
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

NO_COMPILE = "set train.compile to none"

MOST_BLOCKS = 1024
"""Blocks whose functions may be compiled one by one; torch's own limit, 8 for one function, is made for mistakes."""


class Compilation:
    """What is compiled on one rank.

    Args:
        plan: compiles, by `train.compile`.
        device: where the network is.

    Raises:
        EnvironmentLacksError: torch's compiler lacks what it makes programs with.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        require_compiler(device)
        self._plan, self._train, self._device = plan, plan.workload.train, device
        import torch._dynamo.config
        import torch._inductor.config

        # As many as the rank has cores: ranks of one node share it.
        torch._inductor.config.compile_threads = max(1, plan.layout.cores_per_rank)
        # Blocks are one function with other contents each; a block that is left uncompiled would be no comparison.
        torch._dynamo.config.recompile_limit = MOST_BLOCKS
        torch._dynamo.config.accumulated_recompile_limit = MOST_BLOCKS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self._at_measuring: int | None = None
        self._budget_bytes: tuple[int, int] | None = None

    def set_budget(
        self,
        model: nn.Module,
        loss_of: Callable[[Batch], Tensor],
        batch_of: Callable[[int], Batch],
        beat: Callable[[str], None],
    ) -> None:
        """Puts `train.activation_budget` in force, and measures what it changes: one compilation without, one with it.

        Args:
            model: in training mode, on its device; nothing is hooked to it yet.
            loss_of: forward pass and loss.
            batch_of: so many samples, on the device.
            beat: told before each compilation.
        """
        budget = self._train.activation_budget
        if budget is None:
            return
        import torch._functorch.config

        batch = batch_of(self._train.batch_per_rank // self._train.gradient_accumulation)
        found = []
        for share in (torch._functorch.config.activation_memory_budget, budget):
            beat(f"compiling with an activation budget of {share:g}")
            torch._functorch.config.activation_memory_budget = share
            with undisturbed(model, self._device):
                model.compile()
                found.append(_saved_bytes(model, loss_of, batch))
            model._compiled_call_impl = None
            torch._dynamo.reset()
        self._budget_bytes = found[0], found[1]

    def network(self, wrapped: nn.Module) -> None:
        """Compiles a whole network, as the engine wraps it, when it is called first."""
        wrapped.compile()

    def block(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of one block, compiled when it is called first."""
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return compiled

    def uncompiled(self) -> AbstractContextManager[object]:
        """Within it, what was compiled runs as it was written: for evaluations, which need no second program."""
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance

    def begin_measuring(self) -> None:
        """What is compiled from here on lies in measured steps."""
        self._at_measuring = _graphs()

    @property
    def warnings(self) -> list[str]:
        """Reasons for doubt, a sentence each."""
        found = []
        late = 0 if self._at_measuring is None else _graphs() - self._at_measuring
        if late:
            found.append(
                f"train.compile: {late} graphs were compiled in measured steps, which took longer for it; more warm-up "
                "steps would have had them"
            )
        plan = self._plan
        if plan.layout.ranks > 1 and self._train.is_in_core and plan.engine.name != "ddp":
            found.append(
                "train.compile: the compiled backward pass hands over all gradients at its end, so that their exchange "
                "does not overlap with it"
            )
        if self._budget_bytes is not None and self._budget_bytes[0] == self._budget_bytes[1]:
            found.append(
                f"train.activation_budget {self._train.activation_budget:g} changed nothing: with and without it "
                f"the compiled network keeps {format_bytes(self._budget_bytes[0])} for its backward pass"
            )
        return found

    def settings(self) -> list[Setting]:
        """What was asked for and what was in force."""
        train, graphs = self._train, _graphs()
        unit = "the network" if train.is_in_core else "each block"
        found = [
            Setting(
                key="train.compile",
                requested=train.compile,
                effective=train.compile if graphs else "none",
                evidence=f"torch.compile of {unit}: {graphs} graphs",
            )
        ]
        if train.activation_budget is not None and self._budget_bytes is not None:
            import torch._functorch.config

            before, after = self._budget_bytes
            found.append(
                Setting(
                    key="train.activation_budget",
                    requested=train.activation_budget,
                    effective=torch._functorch.config.activation_memory_budget,
                    evidence=f"kept for the backward pass: {before} bytes without it, {after} with it",
                )
            )
        return found


def _graphs() -> int:
    """Graphs that were compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _saved_bytes(model: nn.Module, loss_of: Callable[[Batch], Tensor], batch: Batch) -> int:
    """Activations that a forward pass keeps for the backward pass, each storage once."""
    others = HeldByOthers(model)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = activation_storage(tensor, others)
        if storage is not None:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return sum(storages.values())


def require_compiler(device: torch.device, asked: str = "train.compile default", instead: str = NO_COMPILE) -> None:
    """Proves that torch can compile for a device.

    Args:
        device: where programs will run.
        asked: the setting that needs it.
        instead: what to do without.

    Raises:
        EnvironmentLacksError: it cannot.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise EnvironmentLacksError(
            f"{asked}: torch.compile needs a C++ compiler, and none works here; install g++, name one in CXX, or "
            f"{instead}"
        ) from None
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise EnvironmentLacksError(
                f"{asked}: torch.compile needs Triton on a GPU, and there is none that knows this one; install it, or "
                f"{instead}"
            )
