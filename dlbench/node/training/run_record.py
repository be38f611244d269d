"""What one rank says when it has trained, and on rank 0 the record of the run; how it was shuffled, checked by all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dlbench.datasets.shuffling import exchanged_slots
from dlbench.machine import environment
from dlbench.machine.gpus import numa_nodes_of
from dlbench.node.cores import Seat, settle
from dlbench.node.data.loader import BatchSource, EvaluationSource
from dlbench.node.data.read_audit import Audited, doubtful_epochs
from dlbench.node.data.source import data_set, files_account
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.devices import rank_gpu
from dlbench.node.models.build import forward_macs, training_flops_per_sample
from dlbench.node.nccl_log import joined_transport
from dlbench.node.out_of_core.device_memory import peak_bytes
from dlbench.node.step_schedule import Pacing
from dlbench.node.sync.run_store import interface_settings
from dlbench.node.torch_facts import torch_facts
from dlbench.node.training.checks import (
    average_warnings,
    check,
    checkpoint_warnings,
    exchange_warnings,
    inert,
    parameters_digest,
    watch_warnings,
    with_layers_noted,
)
from dlbench.node.training.context import TrainState
from dlbench.node.training.loop import LoopResult
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.phases import PhaseTimer
from dlbench.records.data_path import ShuffleResult
from dlbench.records.exchange import ExchangeResult
from dlbench.records.interrupted import attempt_of
from dlbench.records.rank_summary import RankSummary
from dlbench.records.record import Check, LayerMacs, RankResult, Record, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import Workload
from dlbench.units import utc_now


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """What the record says of shuffling."""

    result: ShuffleResult | None = None  # None where nothing was read.
    checks: tuple[Check, ...] = ()
    settings: tuple[Setting, ...] = ()


def sample_summary(source: BatchSource) -> dict[str, Any] | None:
    """What this rank read and exchanged, plain Python; None where nothing is read."""
    if source.audit is None:
        return None
    return {**source.audit.summary(), "exchange": source.exchange.summary() if source.exchange is not None else None}


def shuffled(
    plan: RunPlan, source: BatchSource, everyone: Sequence[Mapping[str, Any] | None], gather: Callable[[Any], list[Any]]
) -> Shuffled:
    """What all ranks together read; called by all of them, because samples in doubt are gathered one by one."""
    everyone = everyone[:: plan.ranks_per_replica]
    reported = [each for each in everyone if each is not None]
    if source.audit is None or len(reported) != len(everyone):
        return Shuffled()
    doubtful = doubtful_epochs(reported, source.num_samples)
    lists = gather(source.audit.lists(doubtful))[:: plan.ranks_per_replica] if doubtful else []
    data = plan.workload.data
    exchanged = [each["exchange"] for each in reported if each["exchange"] is not None]
    audited = Audited(
        reported,
        lists,
        num_samples=source.num_samples,
        exchanged=exchanged,
        name=source.sample_name,
        may_replace=data.on_bad_sample == "skip",
    )
    slots = exchanged_slots(source.num_samples, len(reported), data.exchanged_share) if data.shuffle != "global" else 0
    is_global = data.shuffle == "global"
    # An exchange that went on while its epoch was running is not over, and loses nothing.
    over = {epoch.epoch - 1 for epoch in audited.epochs if epoch.is_whole}
    lost = [
        f"epoch {epoch.epoch}: {epoch.sent} samples were sent and {epoch.received} arrived"
        for epoch in audited.epochs
        if epoch.epoch in over and epoch.sent != epoch.received
    ]
    result = ShuffleResult(
        shuffle=data.shuffle,
        partition=None if is_global else data.partition,
        exchanged_share=1.0 if is_global else slots / max(1, source.num_samples // len(reported)),
        errors=(*audited.errors, *lost),
        held_samples_peak=max((each["held_peak"] for each in exchanged), default=None),
        exchange_wait_s=max(each["waited_s"] for each in reported),
        audit_s=float(np.mean([each["audit_s"] for each in reported])),
        epochs=audited.epochs,
    )
    check = samples_check(result, replaced=audited.replaced)
    return Shuffled(result=result, checks=(check,), settings=_settings(plan, result, slots))


def _settings(plan: RunPlan, result: ShuffleResult, slots: int) -> tuple[Setting, ...]:
    data = plan.workload.data
    if data.shuffle == "global":
        return ()
    effective, sent = str(data.shuffle), sum(epoch.sent for epoch in result.epochs)
    evidence = (
        f"audit of what ranks read in {len(result.epochs)} epochs; {sent} samples sent and stored, {slots} per rank "
        "and epoch drawn"
    )
    if data.exchanged_share and not slots:
        effective, evidence = "local", "the share of a rank's samples is less than one sample"
        if plan.layout.ranks == 1:
            evidence = "at one rank there is nobody to exchange with"
    return (Setting(key="data.shuffle", requested=data.shuffle, effective=effective, evidence=evidence),)


def samples_check(shuffle: ShuffleResult, *, replaced: int) -> Check:
    """Whether every sample was read once in each epoch that the run read whole."""
    name = "every sample once per epoch"
    if shuffle.errors:
        more = f" and {len(shuffle.errors) - 3} more" if len(shuffle.errors) > 3 else ""
        return Check(name=name, passed=False, detail="; ".join(shuffle.errors[:3]) + more)
    whole = [epoch for epoch in shuffle.epochs if epoch.is_whole]
    if whole:
        detail = f"{len(whole)} whole epochs, in each {whole[0].visits} samples read and {whole[0].left_out} left out"
    else:
        detail = "no epoch was read whole; what was read was dealt out to its rank"
    if replaced:
        detail += f"; {replaced} samples were unreadable and others stood in for them (data.on_bad_sample skip)"
    return Check(name=name, passed=True, detail=detail)


MOST_NAMED = 20  # Unreadable samples of a rank that the record names.
_OF_ONE_GPU = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class TrainedRank(TrainState):
    """A rank at its end. Parts of training say what they add to its summary and to the record."""

    timer: PhaseTimer
    steps: LoopResult
    pauses: Pauses
    pacing: Pacing
    validation: EvaluationSource | None = None
    allocator: str | None = None  # How memory that tensors free is treated; None on a GPU.
    initial_digest: str  # SHA-256 of the parameters as training finds them.
    initial_weights: Setting | None = None  # What training began with; None where no file was read, and off rank 0.
    startup_s: float  # From the start of the process to the first step, without hashing, seconds.

    def summary(self) -> dict[str, Any]:
        """Returns the fields of `RankSummary` of this rank, but for how it was watched."""
        context, steps, warnings = self.context, self.steps, self.context.warnings
        result = self.rank_result()
        if not steps.has_own_peaks and steps.measured_samples:
            warnings.append(
                f"peak resident memory of rank {context.place.rank} is that since its start, what was measured before "
                "training included: the kernel does not let it begin anew (/proc/self/clear_refs)"
            )
        if context.place.rank == 0:
            warnings += self.pacing.warnings(steps.step_s, on_gpu=context.on_gpu)
        if steps.garbage.in_steps:
            warnings.append(
                f"Python's garbage collector was started {steps.garbage.in_steps} times within measured steps of rank "
                f"{context.place.rank}, by a library; dlbench had turned it off"
            )
        for part in self.parts:
            warnings += part.warnings
        nccl = context.nccl.read() if context.nccl is not None else None
        facts = environment.capture(warnings, withheld=context.plan.system.launch.referenced)
        facts |= torch_facts(warnings, context.device)
        if self.allocator is not None:
            facts["memory.allocator"] = self.allocator
        fields: dict[str, Any] = {
            "result": result,
            "environment": facts,
            "nccl": nccl,
            "emulates_precision": self.precision.is_emulated,
            "reads": [asdict(epoch) for epoch in self.source.epoch_reads()],
            "samples": sample_summary(self.source),
        }
        for part in self.parts:
            fields |= part.summary(result)
        return {**fields, "warnings": tuple(warnings)}

    def rank_result(self) -> RankResult:
        """Returns what the record holds of this rank."""
        context, steps, device = self.context, self.steps, self.context.device
        place, binding, losses = context.place, context.binding, self.steps.losses
        validation = self.validation.failures if self.validation is not None else []
        failures = [*self.source.failures, *validation]
        peak_resident = peak_bytes(torch.device("cpu"))
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.rank_result()
        if context.on_gpu:
            fields["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        return RankResult(
            rank=place.rank,
            node_rank=place.node_rank,
            host=place.host,
            switch=place.switch,
            device=f"{device} ({torch.cuda.get_device_name(device)})" if context.on_gpu else "cpu",
            cores=binding.cores,
            threads=torch.get_num_threads(),
            pinned=binding.pinned,
            numa_nodes=numa_nodes_of(binding.cores),
            gpu=rank_gpu(device, binding.gpu),
            samples=steps.measured_samples,
            measured_s=steps.measured_ns / 1e9,
            first_loss=losses[0] if math.isfinite(losses[0]) else None,
            last_loss=losses[-1] if math.isfinite(losses[-1]) else None,
            losses_finite=all(map(math.isfinite, losses)),
            initial_parameters_sha256=self.initial_digest,
            final_parameters_sha256=parameters_digest(self.model),
            peak_memory_bytes=peak_bytes(device) if context.on_gpu else peak_resident,
            peak_resident_bytes=peak_resident,
            startup_peak_bytes=steps.startup_peak_bytes,
            waits=context.engine.waits(),
            startup_s=self.startup_s,
            bad_samples=tuple(failures[:MOST_NAMED]),
            bad_sample_count=len(failures),
            garbage_collections=steps.garbage.collections,
            garbage_s=steps.garbage.seconds,
            clock_error_s=self.timer.clock_error_ns / 1e9,
            **fields,
        )

    def settings(self, shuffle: Shuffled) -> list[Setting]:
        """Returns what was asked for and what was in force; called by all ranks."""
        context, plan = self.context, self.context.plan
        settings = [*context.engine.settings(), *shuffle.settings]
        if isinstance(self.source, SyntheticSource):
            settings += self.source.settings(plan.workload.data)
        if self.reading is not None:
            settings += self.reading.settings()
        for part in self.parts:
            settings += part.settings()
        if self.initial_weights is not None:
            settings.append(self.initial_weights)
        settings += self.pacing.settings(plan.measure, self.steps.step_s)
        return settings + interface_settings(plan.system.launch.interface, context.place)

    def make_record(
        self,
        everyone: Sequence[RankSummary],
        exchange: ExchangeResult | None,
        settings: Sequence[Setting],
        shuffle: Shuffled,
    ) -> Record:
        """Returns the record of a run that came to its end: what every part says, and what the ranks have in common."""
        context, plan, steps = self.context, self.context.plan, self.steps
        everyone, pinning_warnings = pinned_apart(everyone, plan.layout.cores_per_rank)
        ranks = [each.result for each in everyone]
        exchange = with_layers_noted(plan, self.schedule, exchange)
        if exchange is not None and exchange.autotune is not None:  # of Horovod, which other ranks need not load
            from dlbench.node.sync.horovod.report import with_tuning_cost

            exchange = with_tuning_cost(exchange, steps.step_s)
        # Training to a quality ends when it is met, everywhere after the same step.
        by_steps = plan.measure.until == "steps"
        measured = self.schedule.measured if by_steps else steps.steps - self.schedule.warmup
        checks = check(plan, ranks, measured_steps=measured, exchange=exchange, is_scaled=self.precision.is_scaled)
        checks += shuffle.checks
        parameters = list(self.model.parameters())
        layers, described = layers_of(plan.workload), self.source.describe()
        fields: dict[str, Any] = {
            "run_id": plan.run_id,
            "configuration": plan.configuration_digest(),
            "state": "valid" if all(one.passed for one in checks) else "invalid",
            "started": context.started_utc,
            "finished": utc_now(),
            "clock": self.timer.clock,
            "phases": plan.measure.phases,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
            "ranks": ranks,
            "checks": checks,
            "settings": settings,
            "exchange": exchange,
            "nccl": joined_transport([each.nccl for each in everyone]),
            "inert": inert(settings, ranks=plan.layout.ranks),
            "warnings": (*pinning_warnings, *self._record_warnings(everyone, exchange)),
            "data": described | data_set(plan.workload.data, described) | files_account(plan.workload.data),
            "shuffle": shuffle.result,
            "steps": steps.steps,
            "first_step": self.schedule.first,
            "resumed_from": str(self.resumed.path) if self.resumed is not None else None,
            "attempt": attempt_of(context.folder),
            "layers": layers,
            "training_flops_per_sample": training_flops_per_sample(layers),
            "events": context.events.all,
            "environment": everyone[0].environment,
            "environment_differences": environment_differences(plan, [each.environment for each in everyone]),
            **context.watch.record(everyone),
            **self.pauses.record(),
        }
        if self.reading is not None:
            fields["reading"] = self.reading.result([each.reads for each in everyone], steps.step_s)
        for part in self.parts:
            fields |= part.record(everyone)
        return Record.model_validate(fields)

    def _record_warnings(self, everyone: Sequence[RankSummary], exchange: ExchangeResult | None) -> list[str]:
        plan = self.context.plan
        warnings = [
            *dict.fromkeys(text for rank in everyone for text in rank.warnings),
            *dict.fromkeys(text for rank in everyone if rank.staging is not None for text in rank.staging.warnings),
        ]
        threads = {rank.result.threads for rank in everyone}
        if threads != {plan.layout.cores_per_rank}:
            warnings.append(
                f"ranks computed with {sorted(threads)} threads, the plan says {plan.layout.cores_per_rank} cores per "
                "rank"
            )
        if plan.system.node.gpus and not self.context.on_gpu:
            warnings.append(
                f"node.gpus is {plan.system.node.gpus}, and ranks saw no GPU: they trained on CPUs; ask for GPUs "
                "(slurm.gpu_request), or set node.gpus to 0"
            )
        if plan.measure.phases == "synchronised" and not self.context.on_gpu:
            warnings.append("measure.phases synchronised has no effect on a CPU: its phases are exact anyway")
        warnings += average_warnings(plan, self.schedule)
        warnings += exchange_warnings(exchange, is_scaled=self.precision.is_scaled)
        warnings += watch_warnings(plan, self.schedule, [rank.watch for rank in everyone], exchange)
        if self.reading is not None:
            warnings += self.reading.warnings()
        for part in self.parts:
            warnings += part.record_warnings(everyone)
        return warnings + checkpoint_warnings(self.pauses.writer.writes, self.schedule.first + self.steps.steps)


def pinned_apart(everyone: Sequence[RankSummary], cores_per_rank: int) -> tuple[list[RankSummary], tuple[str, ...]]:
    """Returns the summaries, each saying whether its rank had cores of its own, and warnings where ranks shared any."""
    seats = [
        Seat(rank=one.rank, host=one.host, cores=one.cores, threads=cores_per_rank, pinned=one.pinned)
        for one in (rank.result for rank in everyone)
    ]
    settled = settle(seats)
    results = [rank.result.model_copy(update={"pinned": rank.result.rank in settled.pinned}) for rank in everyone]
    ranks = zip(everyone, results, strict=True)
    return [rank.model_copy(update={"result": result}) for rank, result in ranks], settled.warnings


def layers_of(workload: Workload) -> list[LayerMacs]:
    """Returns the multiply-adds of each layer; counted where no table is known.

    Counting on the meta device may import torch's compiler (2 s).
    """
    table = workload.model.layer_table(workload.data)
    products = [layer for layer in table if layer.macs or layer.kind == "embedding"]
    layers = [LayerMacs(name=layer.name, kind=layer.kind, macs=layer.macs) for layer in products]
    return layers or forward_macs(workload.model, workload.data)


def environment_differences(plan: RunPlan, environments: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Returns where environments of ranks differ from rank 0's, each as a line."""
    # mpirun hands lists of folders on to its own node only; what is loaded from them has keys of its own.
    names = (*_OF_ONE_GPU, *environment.DIGESTED, "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")
    ignored = [f"variable.{name}" for name in names]
    if plan.system.launch.launcher == "mpirun":
        # On other nodes than the first its daemon is a step of Slurm's, which says nothing of the ranks.
        ignored += [key for facts in environments for key in facts if key.startswith("variable.SLURM_")]
    return tuple(
        f"rank {rank}: {text}"
        for rank, facts in enumerate(environments)
        for text in environment.differences(facts, environments[0], ignore=ignored)
    )
