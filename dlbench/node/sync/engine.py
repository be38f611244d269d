"""What every way of gradient synchronisation looks like to the training loop.

An engine is a subclass of `Engine` in a module of its own, and an entry of `dlbench.specs.engine.ENGINES`, which names
that class; `build_engine` imports it by that name. Overridden is only what the engine does: the defaults are those of
one rank that synchronises nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import CollectiveWaits, Setting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dlbench.node.sync.groups import Communicators  # which an engine of one rank does without


@dataclass(frozen=True, kw_only=True)
class WholeState:
    """Parameters, buffers and the optimizer's values as one rank without an engine would name them. Tensors of which
    ranks hold a share each become whole by `whole_tensor`, one at a time, so that no device holds all of them.
    """

    model: dict[str, torch.Tensor]  # As `state_dict` of the network.
    values: dict[int, dict[str, torch.Tensor]]
    """As `state` of the `state_dict` of the optimizer that `prepare` was given, in its order of parameters."""
    group_steps: list[int | None]
    """`step` of each group of that optimizer; None: it counts none there."""


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """One message on its way, in nanoseconds of this machine's CLOCK_MONOTONIC."""

    step: int  # Of the watched steps, from 0.
    number: int  # Of the messages of its step, from 0, in the order of sending.
    ready_ns: int  # Its last gradient was there; the start, where the engine does not say.
    start_ns: int
    end_ns: int
    num_bytes: int  # Of gradients, before any compression.
    num_tensors: int
    method: str  # The operation, as in `dlbench.records.exchange.Message`.


Value = str | float | bool | None


def settings_of(*rows: tuple[str, Value, Value, str]) -> list[Setting]:
    """Settings by key, what was asked, what is in force (None: not known), and how that is known."""
    return [Setting(key=key, requested=asked, effective=found, evidence=how) for key, asked, found, how in rows]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of one (a `DTensor`) of which ranks hold a share each; then all of them call."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    shared: Any = tensor.to(mesh.device_type)  # where the ranks' library exchanges: shares may lie on the host
    whole: torch.Tensor = shared.full_tensor()
    return whole


def share_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of a whole tensor: as much of it as it has of `like`, of the same shape, in that one's order
    in memory (a file holds no strides, and fused updates would mix places up) and on its device.
    """
    kept = torch.empty_like(like.detach(), dtype=whole.dtype)
    mesh: DeviceMesh | None = getattr(like, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        whole = distribute_tensor(whole, mesh, like.placements, src_data_rank=None)  # all have it: nothing is sent
    return kept.copy_(whole)


class Engine:
    """One way of keeping ranks in step. Used in this order: `start`, `prepare`, the loop, `stop`."""

    marks_backward = False  # Whether the engine itself marks the end of the backward phase (DDP waits in `backward()`).
    _optimizer: Any = None  # As `prepare` returned it.
    beat: Callable[[str], None] = staticmethod(lambda what: None)
    """Tells the watchdog what moved: where a rank stands that waits for others in vain."""

    def __init__(self, *_: object) -> None:
        """Takes what every engine of a plan is given: plan, folder, place, device, and this rank's GPU or None."""

    def start(self) -> None:
        """Finds the other ranks."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes all ranks' parameters those of rank 0 and hooks the synchronisation into the backward pass.

        With `accumulation` k, gradients of k backward passes are summed before one synchronisation; all but the last of
        the passes (forward included) run inside `hold_exchange`.
        """
        self._optimizer = optimizer
        return model, optimizer

    def begin_training(self, first: int) -> None:
        """The next step is update `first` of the whole training, from 0; called by all ranks after `prepare`."""

    def end_training(self) -> None:
        """The last step is done: parameters become those that training has; called by all ranks."""

    def hold_exchange(self) -> AbstractContextManager[None]:
        """Within it, a backward pass adds to the gradients and synchronises nothing."""
        return nullcontext()

    def begin_backward(self) -> None:
        """The backward pass whose gradients will be synchronised begins now."""

    def watch(self, on: bool) -> None:
        """Begins or ends to watch messages closely; called by all ranks between two warm-up steps."""

    def watch_memory(self, on: bool) -> None:
        """Whether what a rank holds is watched: then tensors of a message that is through are held by nobody else."""

    def message_spans(self) -> list[MessageSpan]:
        """Messages of the watched steps as this rank saw them; after `watch(False)`. Empty where it cannot know."""
        return []

    def exchange_result(self) -> ExchangeResult | None:
        """What was exchanged and how; called once by all ranks after the last step, complete on rank 0."""
        return None

    def finish_exchange(self) -> None:
        """Returns when this step's gradients are averaged over ranks (or, on a GPU, ordered to be)."""

    def step(self, update: Callable[[Optimizer], object]) -> None:
        """Calls `update`, which steps the optimizer it is given, so that nothing is exchanged a second time."""
        update(self._optimizer)

    def exchange_parameters(self) -> bool:
        """After the update: exchanges parameters where that is due, and says whether it was."""
        return False

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Bounds the norm of all gradients together, of whole parameters, after the exchange."""
        nn.utils.clip_grad_norm_(parameters, norm)

    def waits(self) -> CollectiveWaits | None:
        """What this rank waited for collectives within the passes and the update of the measured steps, which begin
        with `watch(False)`; None: it exchanges nothing there.
        """
        return None

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """The state of training, complete on rank 0; called by all ranks, between steps."""
        planned = self.planned_groups(model, optimizer)
        steps = {p: group.get("step") for group in optimizer.param_groups for p in group["params"]}
        order = [p for group in planned for p in group]
        return WholeState(
            model=model.state_dict(),
            values={number: optimizer.state[p] for number, p in enumerate(order) if p in optimizer.state},
            group_steps=[steps[group[0]] if group else None for group in planned],
        )

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        """Takes over such a state, of whole tensors, which every rank has; called by all ranks after `prepare`. The
        plan's own settings (rates, decay) stay. Raises ValueError, RuntimeError, LookupError: it does not fit.
        """
        own = model.state_dict()
        model.load_state_dict(
            {n: share_of(t, own[n]) if n in own and t.shape == own[n].shape else t for n, t in whole.model.items()}
        )
        planned, groups = self.planned_groups(model, optimizer), optimizer.param_groups
        if len(whole.group_steps) != len(planned):
            raise ValueError(f"steps of {len(whole.group_steps)} parameter groups, the optimizer has {len(planned)}")
        steps = {p: step for group, step in zip(planned, whole.group_steps, strict=True) for p in group}
        order, numbers = [p for group in planned for p in group], itertools.count()
        places = {p: next(numbers) for group in groups for p in group["params"]}
        state = {
            places[order[number]]: {
                key: share_of(t, order[number]) if t.shape == order[number].shape else t for key, t in values.items()
            }
            for number, values in whole.values.items()
        }
        described = [{**group, "params": [places[p] for p in group["params"]]} for group in groups]
        for group, content in zip(groups, described, strict=True):
            if group["params"] and (step := steps[group["params"][0]]) is not None:
                content["step"] = step
        optimizer.load_state_dict({"state": state, "param_groups": described})

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """The optimizer's parameters in the groups and the order in which `prepare` was given them."""
        return [group["params"] for group in optimizer.param_groups]

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it a forward pass exchanges nothing but with ranks of this replica; called by all ranks."""
        return nullcontext()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces floating-point tensors (outside of training steps) by their means over ranks, in place."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """A contiguous tensor on the rank's device (outside of training steps) becomes that of rank 0, in place."""

    def gather(self, value: Any) -> list[Any]:
        """`value` (what JSON can hold) of every rank, by rank, on every rank; tuples come back as lists."""
        return [value]

    def barrier(self) -> None:
        """Returns when every rank is here."""

    def settings(self) -> list[Setting]:
        """What was asked of the engine and what is in force, read back where that is possible."""
        return []

    def stop(self) -> None:
        """Leaves the other ranks and the library."""

    def allow_groups(self) -> None:
        """Called before `start` where `communicators` will make groups of ranks."""

    def communicators(self) -> Communicators:
        """Groups of ranks over the started library: for dlbench's own messages, and for equal parameters at first."""
        raise NotImplementedError(f"{type(self).__name__} carries no messages of dlbench's own")


class SingleEngine(Engine):
    """One rank and nothing to synchronise: the yardstick for what an engine costs at one rank."""


class EngineOverLibrary(Engine):
    """An engine whose library serves all but gradients; not started yet."""

    def __init__(self, library: Engine) -> None:
        self._library = library

    def start(self) -> None:
        self._library.start()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        self._library.average(tensors)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._library.broadcast(tensor)

    def gather(self, value: Any) -> list[Any]:
        return self._library.gather(value)

    def barrier(self) -> None:
        self._library.barrier()

    def settings(self) -> list[Setting]:
        return self._library.settings()

    def stop(self) -> None:
        self._library.stop()


class NoSyncEngine(EngineOverLibrary):
    """No gradient is synchronised; a library only finds the ranks and keeps them in touch.

    What a step costs so is what it costs without all-reduce, without the library's hooks, and without waiting for other
    ranks. Parameters are equal at the start and drift apart: such a run shows times, and trains nothing of use.
    """

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes parameters equal; model and optimizer stay plain, without any hook."""
        self._library.communicators().broadcast_parameters(model)
        return super().prepare(model, optimizer, mark_backward)

    def settings(self) -> list[Setting]:
        how = "no gradient was handed to the library; see the check of parameters"
        return super().settings() + settings_of(("sync.exchange", "none", "none", how))
