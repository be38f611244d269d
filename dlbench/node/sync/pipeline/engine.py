"""PyTorch's pipelines (`torch.distributed.pipelining`): each rank of a replica holds and trains one stage."""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Batch, MessageSpan, WholeState, settings_of
from dlbench.node.sync.pipeline.stage import NetworkPart, TimedStage, unit_seconds
from dlbench.node.sync.timing import MessageInFlight, clock_for, mean_over_ranks, ring_bytes, spans
from dlbench.node.sync.torch_ranks import TorchRanks
from dlbench.perfmodels.stages import cut
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting, StageTimes
from dlbench.specs.plan import RunPlan
from dlbench.units import format_seconds

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelineEngine(TorchRanks):
    """Passes microbatches through the stages of a replica, then sums gradients over the replicas."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._settings = plan.engine.pipeline
        self._replica = place.replica(self._settings.stages)
        self._number = place.rank - self._replica.ranks.start  # Of this rank's stage.
        self._clock = clock_for(device)
        self._samples = plan.workload.train.batch_per_rank * self._settings.stages // self._settings.microbatches
        self._is_watching = False
        self._messages: list[MessageInFlight] = []  # Sums of gradients of the last step.
        self._watched: list[list[MessageInFlight]] = []
        self._clip_s = 0.0

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Cuts the network by measured times; keeps parameters, and optimizer state, of this rank's stage alone."""
        self.communicators().broadcast_parameters(model)
        self._model: Any = model
        stages = self._settings.stages
        mesh = init_device_mesh(self._device.type, (self._replica.replicas, stages), mesh_dim_names=("data", "stage"))
        self._stage_group, self._data_group = mesh["stage"].get_group(), mesh["data"].get_group()
        for first in range(0, self._place.size, stages):
            group = dist.new_group([first, first + stages - 1])
            if first == self._replica.ranks.start:
                self._tied_group = group
        self._cut()
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._planned = super().planned_groups(model, optimizer)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self._holds(parameter)]
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
        schedule = _SCHEDULES[self._settings.schedule]
        # The module returns its loss.
        self._schedule = schedule(
            self._stage, self._settings.microbatches, loss_fn=lambda loss, _number: loss, scale_grads=False
        )
        self._optimizer = optimizer
        return part, optimizer

    def _cut(self) -> None:
        """Cuts the units into stages with the shortest longest stage, by times on rank 0."""
        measured, names = None, self._model.unit_names
        if self._place.rank == 0:
            self.beat("timing the layers of the network")
            measured = unit_seconds(self._model, len(names), self.trial_batch(self._samples), self.forward, self._clock)
        self._unit_s, self._shape = self.gather(measured)[0]
        self._units = [range(*piece) for piece in cut(self._unit_s, self._settings.stages)]
        self._stages_of: dict[nn.Parameter, list[int]] = {}  # Stages that hold a parameter.
        for number, units in enumerate(self._units):
            for parameter in itertools.chain.from_iterable(map(self._model.unit_parameters, units)):
                if number not in (held_by := self._stages_of.setdefault(parameter, [])):
                    held_by.append(number)

    def _holds(self, parameter: torch.Tensor) -> bool:
        return self._number in self._stages_of[parameter]  # type: ignore[index]

    @property
    def _held(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters.values() if self._holds(parameter)]

    @property
    def _tied(self) -> list[nn.Parameter]:
        """Parameters of this stage that another one holds as well."""
        return [parameter for parameter in self._held if len(self._stages_of[parameter]) > 1]

    def _drop_others(self) -> None:
        for parameter in self._parameters.values():
            if not self._holds(parameter):
                # It keeps its shape, and the memory of one element.
                parameter.data = torch.zeros((), dtype=parameter.dtype, device=self._device).expand(parameter.shape)

    def run_passes(
        self, batch: Batch, gradients: Callable[[Batch], torch.Tensor], mark_forward: Callable[[], None]
    ) -> torch.Tensor:
        """Passes the microbatches through all stages; returns the loss of the replica's batch on each of its ranks."""
        stage = self._stage
        stage.marks["forward"] = mark_forward
        # Other dropout masks than those of the stages before.
        seed = (torch.initial_seed() + self._number) % 2**63
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        stage.begin_passes(self._model.microbatches(batch, self._settings.microbatches))
        losses: list[torch.Tensor] = []
        target = torch.arange(self._settings.microbatches) if stage.is_last else None
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
        """Averages gradients over replicas; then sums those of a tied parameter, in the same order on both stages."""
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
        if self._is_watching:
            self._watched.append(self._messages)

    def _sum(self, vector: torch.Tensor, group: dist.ProcessGroup, num_tensors: int) -> None:
        self.beat("it entered a sum of gradients, which other ranks did not")
        is_timed = self._is_watching or self._clock.marks_are_free
        message = MessageInFlight(
            num_bytes=vector.nbytes,
            num_tensors=num_tensors,
            method="all-reduce",
            handed=self._clock.mark() if is_timed else None,
        )
        dist.all_reduce(vector, group=group)
        if is_timed:
            message.done = self._clock.mark()
        self._messages.append(message)

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Clips the norm over all stages, in which a tied parameter counts once."""
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        counted = [p.grad for p in self._held if p.grad is not None and self._stages_of[p][0] == self._number]
        square = nn.utils.get_total_norm(counted).square_()
        dist.all_reduce(square, group=self._stage_group)
        torch._foreach_mul_(gradients, (norm / (square.sqrt() + 1e-6)).clamp(max=1.0))

    @contextmanager
    def holding_whole(self) -> Iterator[None]:
        for parameter in self._parameters.values():
            owner = self._stages_of[parameter][0]
            if not self._holds(parameter):
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            values = parameter.data
            if self._holds(parameter) and owner != self._number:
                values = torch.empty_like(values)  # It keeps its own copy, which must be equal.
            dist.broadcast(values, self._replica.ranks[owner], group=self._stage_group)
        try:
            yield
        finally:
            self._drop_others()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.holding_whole():
            yield

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        return self._planned

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        """Collects the stages of the first replica on rank 0, in the host's memory."""
        local, names = super().whole_state(model, optimizer), {p: name for name, p in self._parameters.items()}
        owned = {p for p in self._held if self._stages_of[p][0] == self._number and self._replica.number == 0}
        tensors = {f"model {names[parameter]}": parameter.detach() for parameter in owned}
        order = list(itertools.chain.from_iterable(self._planned))
        for number, state in local.values.items():
            if order[number] in owned:
                tensors |= {f"{number} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
        whole = self._collected(tensors)
        if self._place.rank != 0:
            return WholeState(model={}, values={}, group_steps=[])
        values: dict[int, dict[str, torch.Tensor]] = {}
        for label, tensor in whole.items():
            number_text, _, key = label.partition(" ")
            if number_text != "model":
                values.setdefault(int(number_text), {})[key] = tensor
        parameters = {name: whole[f"model {name}"] for name in self._parameters}
        return WholeState(model=parameters, values=values, group_steps=local.group_steps)

    def _collected(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the named tensors of all ranks on rank 0, in the host's memory."""
        forms = []
        for label, tensor in tensors.items():
            forms.append([label, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        whole = {label: tensor.cpu().clone() for label, tensor in tensors.items()}
        for rank, rank_forms in enumerate(self.gather(forms)):
            for label, dtype, shape in rank_forms:
                self.beat("putting the stages of a checkpoint together")
                if rank == self._place.rank != 0:
                    dist.send(tensors[label].to(self._device).contiguous(), 0)
                elif rank != self._place.rank == 0:
                    received = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                    dist.recv(received, rank)
                    whole[label] = received.cpu()
        return whole

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        with self.holding_whole():
            super().load_whole(model, optimizer, whole)

    def watch(self, on: bool) -> None:
        self._is_watching = on
        if on:
            self._clock.anchor()
            return
        if self._watched:
            self._clock.anchor()
        self._stage.restart()

    def message_spans(self) -> list[MessageSpan]:
        return list(spans(self._watched, self._clock))

    def waits(self) -> CollectiveWaits | None:
        self._stage.settle()
        how = "each pass of a stage timed in every step; it waits for other stages between its passes"
        return CollectiveWaits(stages_s=dict(self._stage.waits_s), evidence=how)

    def stage(self) -> StageTimes | None:
        self._stage.settle()
        return StageTimes(
            number=self._number,
            units=self._unit_words(self._units[self._number]),
            num_parameters=sum(parameter.numel() for parameter in self._held),
            busy_s=self._stage.busy_s,
            passes_s=self._stage.passes_s,
        )

    def _unit_words(self, units: range) -> str:
        names = [self._model.unit_names[unit] for unit in (units[0], units[-1])]
        return " to ".join(dict.fromkeys(names))

    def exchange_result(self) -> ExchangeResult | None:
        """Returns sends of activations, counted, and sums of gradients, timed."""
        place, nodes = self._place, self._place.num_nodes
        sent = {True: 0.0, False: 0.0}  # Bytes of this rank by whether they stay in its node.
        for receiver, num_bytes in self._stage.sends:
            sent[self._is_on_node(self._replica.ranks[receiver])] += num_bytes
        sums = list(self._messages)
        if self._replica.replicas > 1:
            inside, across = ring_bytes(
                sums.pop(0).num_bytes, ranks=self._replica.replicas, groups=min(nodes, self._replica.replicas)
            )
            sent[True] += inside
            sent[False] += across
        ends = self._replica.ranks[0], self._replica.ranks[-1]
        for message in sums:  # a ring of two: each sends as much as the tensor has
            sent[all(map(self._is_on_node, ends))] += message.num_bytes
        times = mean_over_ranks(self.gather(self._exchange_times()))
        self._by_rank = self.gather(self._facts(sent))
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="flat",
            fusion="by stage",
            wire="fp32",
            group_size=place.local_size,
            num_groups=nodes,
            messages=tuple(self._message_rows()),
            bytes_inside=statistics.fmean(facts["inside"] for facts in self._by_rank),
            bytes_across=statistics.fmean(facts["across"] for facts in self._by_rank),
            **times,
            window_steps=len(self._watched),
            evidence=f"sends of activations by count, sums of gradients by the formula of a ring; {self._check()[1]}",
        )

    def _is_on_node(self, rank: int) -> bool:
        return rank // self._place.local_size == self._place.rank // self._place.local_size

    def _exchange_times(self) -> dict[str, float]:
        if not self._watched:
            return {}
        steps_s = [sum(self._clock.between(message.handed, message.done) for message in step) for step in self._watched]
        seconds = statistics.median(steps_s)
        return {"communication_s": seconds, "exposed_s": seconds, "hidden_s": 0.0}

    def _message_rows(self) -> Iterator[Message]:
        for receiver, num_bytes in self._stage.sends:
            what = "activations" if receiver > self._number else "gradients of activations"
            yield Message(num_bytes=num_bytes, num_tensors=1, method=f"send of {what}")
        for number, message in enumerate(self._messages):
            durations_s = [self._clock.between(step[number].handed, step[number].done) for step in self._watched]
            exchange_s = statistics.median(durations_s) if durations_s else None
            yield Message(
                num_bytes=message.num_bytes,
                num_tensors=message.num_tensors,
                method=message.method,
                exchange_s=exchange_s,
            )

    def _facts(self, sent: dict[bool, float]) -> dict[str, Any]:
        """Returns what this rank can prove its settings by."""
        tied = hashlib.sha256()
        for parameter in self._tied:
            tied.update(parameter.detach().cpu().numpy().data)
        return {
            "inside": sent[True],
            "across": sent[False],
            "activations": sum(num_bytes for _, num_bytes in self._stage.sends),
            "elements": sum(parameter.numel() for parameter in self._held),
            "order": self._stage.order,
            "tied": tied.hexdigest(),
        }

    def _check(self) -> tuple[bool, str]:
        """Returns whether stages hold and send what they should, and the counts; after `_facts` of all ranks."""
        stages, replica = self._settings.stages, self._by_rank[: self._settings.stages]
        held = sum(facts["elements"] for facts in replica)
        expected = sum(p.numel() * len(self._stages_of[p]) for p in self._parameters.values())
        activations = sum(facts["activations"] for facts in replica)
        # Forward and back over each boundary, in fp32.
        boundary_bytes = self._settings.microbatches * 4 * torch.Size(self._shape).numel() * 2
        is_right = held == expected and activations == (stages - 1) * boundary_bytes
        copies = "equal"
        if replica[0]["tied"] != replica[-1]["tied"]:
            is_right, copies = False, "different"
        words = []
        for number, units in enumerate(self._units):
            seconds = format_seconds(sum(self._unit_s[unit] for unit in units))
            words.append(f"stage {number} {self._unit_words(units)} ({seconds})")
        return is_right, (
            f"{', '.join(words)} by times of a microbatch on rank 0; they hold {held} elements with {copies} copies of "
            f"the embedding, expected {expected}, and sent {activations} bytes of activations in a step by count, "
            f"expected {(stages - 1) * boundary_bytes}"
        )

    def settings(self) -> list[Setting]:
        """Returns settings, after `exchange_result`; stages are in force only if parameters and bytes agree."""
        requested = self._settings
        is_right, text = self._check()
        order = self._by_rank[requested.stages - 1]["order"]  # of the last stage
        schedule = "1f1b" if order.startswith("FB") and requested.microbatches > 1 else "gpipe"
        if requested.microbatches == 1:
            schedule = requested.schedule
        how = f"passes of the last stage in their order: {order[:40]}"
        return super().settings() + settings_of(
            ("engine.pipeline.stages", requested.stages, requested.stages if is_right else 1, text),
            ("engine.pipeline.microbatches", requested.microbatches, order.count("F"), how),
            ("engine.pipeline.schedule", requested.schedule, schedule, how),
        )
