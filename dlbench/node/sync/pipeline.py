"""PyTorch's pipelines (`torch.distributed.pipelining`): each rank of a replica holds, trains and times one stage."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Batch, WholeState, settings_of
from dlbench.node.sync.run_store import TorchRanks
from dlbench.node.sync.timing import Clock, IntervalSums, clock_for, ring_bytes
from dlbench.perfmodels.stages import cut
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting, StageTimes
from dlbench.specs.plan import RunPlan
from dlbench.units import format_seconds

Forward = Callable[[nn.Module, Batch], Tensor]
_BUSY = "busy"  # Name of the intervals in which a stage computes.
_TIMED_PASSES = 3  # Passes over which a unit's time is a median, after one that is not timed.
_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class NetworkPart(nn.Module):
    """Consecutive units of a network, called with the arguments of the whole."""

    def __init__(self, network: nn.Module, units: range) -> None:
        super().__init__()
        self.network, self.units = network, units
        self.received: Tensor | None = None  # Output of the unit before.

    def forward(self, *arguments: Any) -> Any:
        network: Any = self.network
        return network.run_units(self.units, self.received, *arguments)


def unit_seconds(
    network: nn.Module, num_units: int, batch: Batch, forward: Forward, clock: Clock
) -> tuple[list[float], list[list[str]], list[int]]:
    """Returns each unit's seconds of both passes over a batch, names of its parameters, and the shape of its output.

    The network has no gradients afterwards.
    """
    seconds: list[list[float]] = [[] for _ in range(num_units)]
    names: list[list[str]] = [[] for _ in range(num_units)]
    outputs: list[Tensor] = []
    for _ in range(1 + _TIMED_PASSES):
        part = NetworkPart(network, range(0))
        outputs, inputs, moments = [], [], []
        for unit in range(num_units):
            part.units, begin = range(unit, unit + 1), clock.mark()
            outputs.append(forward(part, batch))
            moments.append([begin, clock.mark()])
            part.received = outputs[-1].detach().requires_grad_()
            inputs.append(part.received)
        for unit in reversed(range(num_units)):
            gradient = inputs[unit].grad if unit + 1 < num_units else None
            begin = clock.mark()
            torch.autograd.backward(outputs[unit], gradient)
            moments[unit] += [begin, clock.mark()]
            names[unit] = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
            network.zero_grad()
        clock.settle()
        for unit, (forward_begin, forward_end, backward_begin, backward_end) in enumerate(moments):
            unit_s = clock.between(forward_begin, forward_end) + clock.between(backward_begin, backward_end)
            seconds[unit].append(unit_s)
    return [statistics.median(timed[1:]) for timed in seconds], names, list(outputs[0].shape)


class TimedStage(PipelineStage):
    """A stage that times its passes and counts what it sends."""

    def __init__(self, part: NetworkPart, forward: Forward, shape: Sequence[int], clock: Clock, **place: Any) -> None:
        """`shape` is that of the tensors between stages, `place` the arguments of `PipelineStage`."""
        # With both given, torch runs no pass to find out shapes.
        hidden = torch.empty(*shape, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        received = () if place["stage_index"] == 0 else hidden
        sent = loss if place["stage_index"] == place["num_stages"] - 1 else hidden
        super().__init__(part, input_args=received, output_args=sent, **place)
        self._part, self._forward, self._clock = part, forward, clock
        self._microbatches: list[Batch] = []
        self.marks: dict[str, Callable[[], None]] = {}  # End phases of the step, by pass.
        self.beat: Callable[[str], None] = lambda _progress: None
        self.order = ""  # Passes of the last step in their order, F and B.
        self.sends: list[tuple[int, int]] = []  # Receiving stage and bytes of each message of the last step.
        self.times = IntervalSums(clock)  # Of steps: waits for a pass by its name, and busy.
        self._names: list[str] = []  # Of the intervals of a step.
        self._moments: list[Any] = []  # Of a step: begin, begin and end of each pass, end.

    def begin_passes(self, microbatches: list[Batch]) -> None:
        self._microbatches, self.order = microbatches, ""
        self.sends.clear()
        self._names, self._moments = [], [self._clock.mark()]

    def end_passes(self) -> None:
        """Notes that the passes of all stages have ended."""
        end = self._clock.mark()
        self.marks["backward"]()
        self.times.add([*self._names, "backward"], [*self._moments, end])

    def _timed(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.beat(f"pass {len(self.order)} of its stage")
        self._names += [name, _BUSY]
        self._moments.append(self._clock.mark())
        output = run(*args, **kwargs)
        self._moments.append(self._clock.mark())
        self.marks[name]()
        self.order += name[0].upper()
        return output

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("forward", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("backward", super().backward_one_chunk, *args, **kwargs)

    def forward_maybe_with_nosync(self, *received: Tensor, **_: Any) -> Tensor:
        """Computes the next microbatch; it replaces torch's call of the module."""
        self._part.received = received[0] if received else None
        output = self._forward(self._part, self._microbatches[self.order.count("F")])
        self._part.received = None
        return output / len(self._microbatches) if self.is_last else output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index + 1, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, receiver: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sends += [(receiver, operation.tensor.nbytes) for operation in operations]
        return operations


class PipelineEngine(TorchRanks):
    """Passes microbatches through the stages of a replica, then sums gradients over the replicas."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._settings, self._num_units = plan.engine.pipeline, plan.workload.model.num_units
        self._replica = place.replica(self._settings.stages)
        self._number = place.rank - self._replica.ranks.start  # Of this rank's stage.
        self._clock = clock_for(device)
        self._samples = plan.workload.train.batch_per_rank * self._settings.stages // self._settings.microbatches
        self._messages: list[Message] = []  # Sums of gradients of the last step.

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Cuts the network by measured times; keeps parameters, and optimizer state, of this rank's stage alone."""
        self.communicators().broadcast_parameters(model)
        self._model, stages = model, self._settings.stages
        mesh = init_device_mesh(self._device.type, (self._replica.replicas, stages), mesh_dim_names=("data", "stage"))
        self._stage_group, self._data_group = mesh["stage"].get_group(), mesh["data"].get_group()
        ends = [[first, first + stages - 1] for first in range(0, self._place.size, stages)]
        self._tied_group = [dist.new_group(ranks) for ranks in ends][self._replica.number]
        self._parameters = dict(model.named_parameters())
        self._cut()
        self._held = [parameter for parameter, holders in self._holders.items() if self._number in holders]
        self._tied = [parameter for parameter in self._held if len(self._holders[parameter]) > 1]
        self._planned = super().planned_groups(model, optimizer)
        held = set(self._held)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in held]
        self._drop_others()
        part = NetworkPart(model, self._units[self._number])
        self._stage = TimedStage(
            *(part, self.forward, self._shape, self._clock),
            stage_index=self._number,
            num_stages=stages,
            device=self._device,
            group=self._stage_group,
        )
        self._stage.beat, self._stage.marks = self.beat, {"backward": mark_backward}
        # The last stage returns its loss.
        self._schedule = _SCHEDULES[self._settings.schedule](
            self._stage, self._settings.microbatches, loss_fn=lambda loss, _target: loss, scale_grads=False
        )
        self._optimizer = optimizer
        return part, optimizer

    def _cut(self) -> None:
        """Cuts the units into stages so that the longest is as short as possible, by times on rank 0."""
        measured = None
        if self._place.rank == 0:
            self.beat("timing the layers of the network")
            batch = self.trial_batch(self._samples)
            measured = unit_seconds(self._model, self._num_units, batch, self.forward, self._clock)
        self._unit_s, names, self._shape = self.gather(measured)[0]
        self._units = [range(*piece) for piece in cut(self._unit_s, self._settings.stages)]
        self._holders: dict[nn.Parameter, list[int]] = {p: [] for p in self._parameters.values()}  # Stages, in order.
        for number, units in enumerate(self._units):
            for name in dict.fromkeys(itertools.chain.from_iterable(names[unit] for unit in units)):
                self._holders[self._parameters[name]].append(number)

    def _is_first_copy(self, parameter: nn.Parameter) -> bool:
        return self._holders[parameter][0] == self._number

    def _drop_others(self) -> None:
        for parameter, holders in self._holders.items():
            if self._number not in holders:
                # It keeps its shape, and the memory of one element.
                parameter.data = torch.zeros((), dtype=parameter.dtype, device=self._device).expand(parameter.shape)

    def run_passes(
        self, batch: Batch, gradients: Callable[[Batch], torch.Tensor], mark_forward: Callable[[], None]
    ) -> torch.Tensor:
        """Passes the microbatches through all stages; returns the loss of the replica's batch on each of its ranks."""
        stage, network, microbatches = self._stage, self._model, self._settings.microbatches
        stage.marks["forward"] = mark_forward
        # Other dropout masks than those of the stages before.
        torch.manual_seed((torch.initial_seed() + self._number) % 2**63)
        stage.begin_passes(network.microbatches(batch, microbatches))  # type: ignore[operator]
        losses: list[torch.Tensor] = []
        target = torch.arange(microbatches) if stage.is_last else None
        self._schedule.step(target=target, losses=losses, return_outputs=False)
        loss = torch.zeros((), device=self._device)
        for microbatch_loss in losses:
            loss += microbatch_loss.detach()
        self.beat("the passes of its stage")
        # Not a broadcast: all stages end their passes together, and none waits for another one in the exchange.
        dist.all_reduce(loss, group=self._stage_group)
        stage.end_passes()
        return loss

    def finish_exchange(self) -> None:
        """Averages gradients over replicas; then sums those of a tied parameter, so that its copies stay equal."""
        self._messages = []
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        if self._replica.replicas > 1:
            vector = torch.cat([gradient.flatten() for gradient in gradients])
            self._sum(vector, self._data_group, len(gradients))
            vector /= self._replica.replicas
            means = torch.split(vector, [gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        for parameter in self._tied:
            assert parameter.grad is not None
            self._sum(parameter.grad, self._tied_group, 1)

    def _sum(self, vector: torch.Tensor, group: dist.ProcessGroup, num_tensors: int) -> None:
        self.beat("it entered a sum of gradients, which other ranks did not")
        dist.all_reduce(vector, group=group)
        self._messages.append(Message(num_bytes=vector.nbytes, num_tensors=num_tensors, method="all-reduce"))

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Clips the norm over all stages, in which a tied parameter counts once."""
        gradients = {parameter: parameter.grad for parameter in self._held if parameter.grad is not None}
        square = nn.utils.get_total_norm([gradients[p] for p in gradients if self._is_first_copy(p)]).square_()
        dist.all_reduce(square, group=self._stage_group)
        torch._foreach_mul_(list(gradients.values()), (norm / (square.sqrt() + 1e-6)).clamp(max=1.0))

    @contextmanager
    def holding_whole(self) -> Iterator[None]:
        for parameter, holders in self._holders.items():
            values = parameter.data
            if not self._is_first_copy(parameter):
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            dist.broadcast(values, self._replica.ranks[holders[0]], group=self._stage_group)
            if self._number not in holders:  # a second copy is kept, as it must be equal
                parameter.data = values
        try:
            yield
        finally:
            self._drop_others()

    def evaluating(self) -> AbstractContextManager[None]:
        return self.holding_whole()

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """Collects the stages of the first replica on rank 0, in the host's memory."""
        local, tensors = super().whole_state(model, optimizer), dict[str, torch.Tensor]()
        for number, parameter in enumerate(itertools.chain.from_iterable(self._planned)):
            if self._replica.number == 0 and self._is_first_copy(parameter):  # type: ignore[arg-type]
                state = {"parameter": parameter.detach()} | local.values.get(number, {})
                tensors |= {f"{number} {key}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
        values: dict[int, dict[str, torch.Tensor]] = {}
        for number, key, tensor in self._collected(tensors):
            values.setdefault(number, {})[key] = tensor
        if self._place.rank != 0:
            return WholeState(model={}, values={}, group_steps=[])
        numbers = {p: number for number, p in enumerate(itertools.chain.from_iterable(self._planned))}
        whole = {name: values[numbers[parameter]].pop("parameter") for name, parameter in self._parameters.items()}
        return WholeState(model=whole, values=values, group_steps=local.group_steps)

    def _collected(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yields the tensors of all ranks on rank 0, in the host's memory, with the words of their names."""
        forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
        for rank, rank_forms in enumerate(self.gather(forms)):
            for name, dtype, shape in rank_forms:
                self.beat("putting the stages of a checkpoint together")
                values = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                if rank == self._place.rank:
                    values.copy_(tensors[name])
                    if rank:
                        dist.send(values, 0)
                elif self._place.rank == 0:
                    dist.recv(values, rank)
                number, key = name.split(" ", 1)
                if self._place.rank == 0:
                    yield int(number), key, values.cpu()

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        with self.holding_whole():
            super().load_whole(model, optimizer, whole)

    def watch(self, on: bool) -> None:
        if not on:
            self._stage.times.restart()

    def waits(self) -> CollectiveWaits | None:
        self._stage.times.settle()
        stages_s = {name: seconds for name, seconds in self._stage.times.seconds.items() if name != _BUSY}
        return CollectiveWaits(stages_s=stages_s, evidence="each pass of a stage, timed in every step")

    def stage(self) -> StageTimes:
        self._stage.times.settle()
        seconds = self._stage.times.seconds
        num_held = sum(parameter.numel() for parameter in self._held)
        busy_s, passes_s = seconds[_BUSY], sum(seconds.values())
        return StageTimes(number=self._number, num_parameters=num_held, busy_s=busy_s, passes_s=passes_s)

    def exchange_result(self) -> ExchangeResult | None:
        sends = [Message(num_bytes=size, num_tensors=1, method="send of activations") for _, size in self._stage.sends]
        facts = {"order": self._stage.order, "num_held": self.stage().num_parameters, "has_equal_copy": True}
        for parameter in self._tied:
            largest = parameter.detach().clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._tied_group)
            facts["has_equal_copy"] = torch.equal(largest, parameter)
        self._by_rank = self.gather(facts | self._sent_bytes())
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="flat",
            fusion="by stage",
            wire="fp32",
            group_size=self._place.local_size,
            num_groups=self._place.num_nodes,
            messages=(*sends, *self._messages),
            bytes_inside=statistics.fmean(facts["inside"] for facts in self._by_rank),
            bytes_across=statistics.fmean(facts["across"] for facts in self._by_rank),
            evidence=f"sends of activations by count, sums of gradients by the formula of a ring; {self._check()[1]}",
        )

    def _sent_bytes(self) -> dict[str, float]:
        """Returns bytes that this rank sends in a step: of activations, and all of them inside and across nodes."""
        sent, sums = {"inside": 0.0, "across": 0.0}, list(self._messages)
        messages = [(self._replica.ranks[receiver], num_bytes) for receiver, num_bytes in self._stage.sends]
        activations = sum(num_bytes for _, num_bytes in messages)
        if self._replica.replicas > 1:
            groups = min(self._place.num_nodes, self._replica.replicas)
            inside, across = ring_bytes(sums.pop(0).num_bytes, ranks=self._replica.replicas, groups=groups)
            sent = {"inside": inside, "across": across}
        # A ring of the first and the last stage: each sends as much as the tensor has.
        other_end = self._replica.ranks[0 if self._number else -1]
        for rank, num_bytes in [*messages, *((other_end, message.num_bytes) for message in sums)]:
            is_inside = rank // self._place.local_size == self._place.rank // self._place.local_size
            sent["inside" if is_inside else "across"] += num_bytes
        return sent | {"activations": activations}

    def _check(self) -> tuple[bool, str]:
        """Returns whether stages hold and send what they should, and the counts in words."""
        replica, num_boundaries = self._by_rank[: self._settings.stages], self._settings.stages - 1
        held, activations = (sum(facts[name] for facts in replica) for name in ("num_held", "activations"))
        expected = sum(parameter.numel() * len(holders) for parameter, holders in self._holders.items())
        # Forward and back over each boundary, in fp32.
        num_bytes = 2 * num_boundaries * self._settings.microbatches * torch.Size(self._shape).numel() * 4
        are_equal = all(facts["has_equal_copy"] for facts in replica)
        words = []
        for number, units in enumerate(self._units):
            seconds = format_seconds(sum(self._unit_s[unit] for unit in units))
            words.append(f"stage {number} has parts {units[0]} to {units[-1]} of {self._num_units} ({seconds})")
        return are_equal and held == expected and activations == num_bytes, (
            f"{', '.join(words)} by times of a microbatch on rank 0; stages hold {held} elements, {expected} expected, "
            f"copies of the embedding are {'equal' if are_equal else 'different'}; activations of {activations} bytes "
            f"were sent in a step by count, {num_bytes} expected"
        )

    def settings(self) -> list[Setting]:
        """Returns settings, after `exchange_result`; stages are in force only if parameters and bytes agree."""
        requested, (is_right, text) = self._settings, self._check()
        order = str(self._by_rank[requested.stages - 1]["order"])
        # One microbatch has the same order under both.
        schedule = "1f1b" if order.startswith("FB") and len(order) > 2 else "gpipe"
        how = f"passes of the last stage in their order: {order[:40]}"
        return super().settings() + settings_of(
            ("engine.pipeline.stages", requested.stages, requested.stages if is_right else 1, text),
            ("engine.pipeline.microbatches", requested.microbatches, order.count("F"), how),
            ("engine.pipeline.schedule", requested.schedule, schedule, how),
        )
