"""The interface of gradient synchronisation to the training loop; its defaults are those of a single rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import CollectiveWaits, EmulationResult, Setting, StageTimes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class WholeState:
    """Parameters, buffers and optimizer state under the names of one rank without an engine."""

    model: dict[str, torch.Tensor]  # The `state_dict` of the network.
    values: dict[int, dict[str, torch.Tensor]]
    """`state` of the `state_dict` of the optimizer that was given to `prepare`, in its order of parameters."""
    group_steps: list[int | None]
    """`step` of each group of that optimizer; None: it counts none there."""


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """The exchange of one message, in nanoseconds of this machine's CLOCK_MONOTONIC."""

    step: int  # Number of the watched step, from 0.
    number: int  # Number of the message in its step, from 0, in the order of sending.
    ready_ns: int  # When its last gradient was computed; `start_ns` where the engine does not record it.
    start_ns: int
    end_ns: int
    num_bytes: int  # Bytes of gradients, before any compression.
    num_tensors: int
    method: str  # The operation, see `dlbench.records.exchange.Message`.


Value = str | float | bool | None


def settings_of(*rows: tuple[str, Value, Value, str]) -> list[Setting]:
    """Returns settings from rows of key, requested value, value in force (None: not known), and evidence."""
    return [
        Setting(key=key, requested=requested, effective=effective, evidence=evidence)
        for key, requested, effective, evidence in rows
    ]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sharded tensor (`DTensor`) gathered from all ranks, which all call this; any other as it is."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    sharded: Any = tensor.to(mesh.device_type)  # the device that the ranks' library sends from: shards may be on a host
    full_tensor: torch.Tensor = sharded.full_tensor()
    return full_tensor


def share_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a whole tensor, cut as `like`, on its device."""
    # In the memory order of `like`: a file holds no strides, and fused updates would mix elements up.
    shard = torch.empty_like(like.detach(), dtype=whole.dtype)
    mesh: DeviceMesh | None = getattr(like, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        whole = distribute_tensor(whole, mesh, like.placements, src_data_rank=None)  # all have it: nothing is sent
    return shard.copy_(whole)


def _share_where_equal(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    if like is None or tensor.shape != like.shape:
        return tensor
    return share_of(tensor, like)


class RankGroup(Protocol):
    """A communicator of ranks that all make the same calls in the same order; sums are not divided by their number."""

    # Vectors are one-dimensional, contiguous and floating; a call returns when this rank's part is done.

    ranks: tuple[int, ...]  # Its ranks in the run, ascending.
    index: int  # Position of this rank in `ranks`.
    carrier: str  # Library that sends the bytes, e.g. gloo, mpi, nccl.

    def sum(self, vector: torch.Tensor) -> None:
        """All-reduces `vector`: replaces it by the sum over ranks."""

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        """Begins `sum` and returns a function that waits for its end; at most two may be in flight."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share (shape: n / ranks) of the sum; n must divide by the number of ranks."""

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """Fills `vector` (n) with the shares (n / ranks each) of all ranks, by index."""

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """Replaces `vector` by the sum on the rank with index `root`; leaves it undefined elsewhere."""

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """Replaces `vector` by that of the rank with index `root`."""

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, of equal lengths, by index."""

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row i to the rank with index i; returns the rows for this rank, by index: shape of `rows`."""


class Communicators(Protocol):
    """A started library that makes groups of its ranks."""

    carrier: str  # Library that sends the bytes, e.g. gloo, mpi, nccl.
    reduce_is_sum: bool  # Whether the library lacks a reduce to one rank, so that groups sum on every rank instead.

    def group(self, ranks: Sequence[int]) -> RankGroup | None:
        """Makes a group of ascending ranks, on all ranks in the same order; None if this rank is not in it."""

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Replaces all ranks' parameters and buffers by those of rank 0."""


class Engine:
    """Synchronises gradients between ranks. Used in this order: `start`, `prepare`, the loop, `stop`."""

    marks_backward = False  # Whether the engine itself marks the end of the backward phase (DDP waits in `backward()`).
    _optimizer: Any = None  # The optimizer that `prepare` returned.
    _planned: Sequence[list[torch.Tensor]] = ()  # Parameters by group, of engines that change those of the optimizer.
    beat: Callable[[str], None] = staticmethod(lambda progress: None)
    """Tells the watchdog where this rank is, in words, so that it can name the rank that others wait for."""
    forward: Callable[[nn.Module, Batch], torch.Tensor]
    """Runs the wrapped network, or a part of it, in the precision of training; returns its loss."""
    trial_batch: Callable[[int], Batch]  # Makes that many samples of the shapes of training, on the device.

    def __init__(self, *_: object) -> None:
        """Takes the arguments of all engines: plan, folder, place, device, and this rank's GPU or None."""

    def start(self) -> None:
        """Connects this rank to the others."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Makes all ranks' parameters those of rank 0 and hooks the synchronisation into the backward pass."""
        # `accumulation`: backward passes per synchronisation; all but the last one run inside `hold_exchange`.
        self._optimizer = optimizer
        return model, optimizer

    def begin_training(self, first: int) -> None:
        """Is called by all ranks after `prepare`: the next step is update `first` of the whole training, from 0."""

    def end_training(self) -> None:
        """Is called by all ranks after the last step: leaves the trained parameters in the model."""

    def begin_step(self, rate: float) -> None:
        """Is called before the first forward pass of a step with the learning rate of its update."""

    def run_passes(
        self, batch: Batch, gradients: Callable[[Batch], torch.Tensor], mark_forward: Callable[[], None]
    ) -> torch.Tensor:
        """Runs forward and backward passes over a batch, by default `gradients`; returns its mean loss."""
        return gradients(batch)

    def hold_exchange(self) -> AbstractContextManager[None]:
        """Returns a context in which a backward pass adds to the gradients and synchronises nothing."""
        return nullcontext()

    def begin_backward(self) -> None:
        """Is called before the backward pass whose gradients will be synchronised."""

    def watch(self, on: bool) -> None:
        """Begins or ends timing of single messages; called by all ranks between two warm-up steps."""

    def watch_memory(self, on: bool) -> None:
        """Says whether memory is being watched: then nobody may hold tensors of messages that have ended."""

    def message_spans(self) -> list[MessageSpan]:
        """Returns this rank's messages of the watched steps, after `watch(False)`; empty if they are not known."""
        return []

    def emulation(self) -> EmulationResult | None:
        """Returns what emulated workers did, after the last step; None: the engine emulates none."""
        return None

    def exchange_result(self) -> ExchangeResult | None:
        """Returns how gradients were exchanged, complete on rank 0; called once by all ranks after the last step."""
        return None

    def finish_exchange(self) -> None:
        """Returns when this step's gradients are averaged over ranks (on a GPU: when that is queued)."""

    def step(self, update: Callable[[Optimizer], object]) -> None:
        """Calls `update`, which steps the optimizer that it is given, without a second exchange."""
        update(self._optimizer)

    def exchange_parameters(self) -> bool:
        """Exchanges parameters after an update, if that is due, and returns whether it was."""
        return False

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Clips the total norm of all gradients, of whole parameters, after the exchange."""
        nn.utils.clip_grad_norm_(parameters, norm)

    def waits(self) -> CollectiveWaits | None:
        """Returns this rank's waiting for collectives in measured steps (after `watch(False)`); None: it runs none."""
        return None

    def stage(self) -> StageTimes | None:
        """Returns this rank's stage of a pipeline (after `watch(False)`); None: it trains all layers."""
        return None

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """Returns the state of training, complete on rank 0; called by all ranks, between steps."""
        planned = self.planned_groups(model, optimizer)
        steps: dict[torch.Tensor, int | None] = {}
        for group in optimizer.param_groups:
            steps.update(dict.fromkeys(group["params"], group.get("step")))
        order = itertools.chain.from_iterable(planned)
        return WholeState(
            model=model.state_dict(),
            values={number: optimizer.state[p] for number, p in enumerate(order) if p in optimizer.state},
            # Some of a group's parameters may be on other ranks.
            group_steps=[next((steps[p] for p in group if p in steps), None) for group in planned],
        )

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        """Loads whole tensors, after `prepare`; raises ValueError, RuntimeError or LookupError if they do not fit."""
        # Every rank has them; learning rates and decay stay the plan's.
        model_state = model.state_dict()
        model.load_state_dict(
            {name: _share_where_equal(tensor, model_state.get(name)) for name, tensor in whole.model.items()}
        )
        planned, groups = self.planned_groups(model, optimizer), optimizer.param_groups
        if len(whole.group_steps) != len(planned):
            raise ValueError(f"steps of {len(whole.group_steps)} parameter groups, the optimizer has {len(planned)}")
        steps: dict[torch.Tensor, int | None] = {}
        for parameters, step in zip(planned, whole.group_steps, strict=True):
            steps.update(dict.fromkeys(parameters, step))
        order = list(itertools.chain.from_iterable(planned))
        parameters_in_groups = itertools.chain.from_iterable(group["params"] for group in groups)
        number_of = {parameter: number for number, parameter in enumerate(parameters_in_groups)}
        state = {}
        for number, values in whole.values.items():
            parameter = order[number]
            if parameter not in number_of:
                continue  # another rank's
            state[number_of[parameter]] = {key: _share_where_equal(value, parameter) for key, value in values.items()}
        packed_groups = []
        for group in groups:
            packed = {**group, "params": [number_of[p] for p in group["params"]]}
            if group["params"] and (step := steps[group["params"][0]]) is not None:
                packed["step"] = step
            packed_groups.append(packed)
        optimizer.load_state_dict({"state": state, "param_groups": packed_groups})

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> Sequence[list[torch.Tensor]]:
        """Returns the optimizer's parameters in the groups and the order in which `prepare` was given them."""
        return self._planned or [group["params"] for group in optimizer.param_groups]

    def holding_whole(self) -> AbstractContextManager[None]:
        """Returns a context in which the network has all parameters, each whole or a `DTensor`; called by all ranks."""
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context whose forward passes exchange only with ranks of this replica; called by all ranks."""
        return nullcontext()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces floating-point tensors (outside of training steps) by their means over ranks, in place."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor on the rank's device (outside of training steps) by that of rank 0, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the JSON-serialisable `value` of every rank, by rank, on every rank; tuples come back as lists."""
        return [value]

    def barrier(self) -> None:
        """Returns when every rank has called this."""

    def settings(self) -> list[Setting]:
        """Returns the requested settings of the engine and those in force, read back where possible."""
        return []

    def stop(self) -> None:
        """Disconnects from the other ranks and shuts the library down."""

    def allow_groups(self) -> None:
        """Is called before `start` where `communicators` will make groups of ranks."""

    def communicators(self) -> Communicators:
        """Returns groups of ranks over the started library, for messages that dlbench itself exchanges."""
        raise NotImplementedError(f"{type(self).__name__} carries no messages of dlbench's own")


class SingleEngine(Engine):
    """One rank without synchronisation: the reference for the cost of an engine at one rank."""


class EngineOverLibrary(Engine):
    """An engine that uses a library, not started yet, for everything but gradients."""

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
    """Synchronises no gradient, so that parameters drift apart: such a run measures times and trains nothing useful."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        self._library.communicators().broadcast_parameters(model)
        return super().prepare(model, optimizer, mark_backward)

    def settings(self) -> list[Setting]:
        how = "no gradient was given to the library; see the check of parameters"
        return super().settings() + settings_of(("sync.exchange", "none", "none", how))
