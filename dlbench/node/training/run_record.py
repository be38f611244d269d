"""The summary of one rank after training, the record of the run on rank 0, and the check of shuffling by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from dlbench.datasets.shuffling import exchanged_slots
from dlbench.machine import environment
from dlbench.machine.gpus import numa_nodes_of
from dlbench.node.data.loader import BatchSource, EvaluationSource
from dlbench.node.data.sharding import Audited, doubtful_epochs
from dlbench.node.data.source import data_set, files_account
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.devices import joined_transport, rank_gpu, torch_facts
from dlbench.node.models.build import forward_macs, training_flops_per_sample
from dlbench.node.out_of_core.device_memory import peak_bytes
from dlbench.node.part import Pacing
from dlbench.node.ranks import RankCores, check_sharing
from dlbench.node.sync.run_store import interface_settings
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
from dlbench.node.training.pauses import Pauses, finite_or_none
from dlbench.node.training.phases import PhaseTimer
from dlbench.records.data_path import ShuffleResult
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Check, LayerMacs, RankResult, RankSummary, Record, Setting
from dlbench.records.status import attempt_of
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import Workload
from dlbench.units import counted, first_of, utc_now

MOST_NAMED = 20  # Most unreadable samples of a rank that the record names.
_OF_ONE_GPU = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Result, checks and settings of shuffling."""

    result: ShuffleResult | None = None  # None if no data was read.
    checks: tuple[Check, ...] = ()
    settings: tuple[Setting, ...] = ()


def sample_summary(source: BatchSource) -> dict[str, Any] | None:
    """Returns what this rank read and exchanged, ready for JSON; None if it read no data."""
    if source.audit is None:
        return None
    summary = {**source.audit.summary(), "exchange": None}
    if source.exchange is not None:
        summary["exchange"] = source.exchange.summary()
    return summary


def shuffled(
    plan: RunPlan, source: BatchSource, everyone: Sequence[Mapping[str, Any] | None], gather: Callable[[Any], list[Any]]
) -> Shuffled:
    """Checks which samples all ranks together read; called by all ranks, since doubtful samples are gathered."""
    everyone = everyone[:: plan.ranks_per_replica]
    reported = [summary for summary in everyone if summary is not None]
    if source.audit is None or len(reported) != len(everyone):
        return Shuffled()
    doubtful = doubtful_epochs(reported, source.num_samples)
    lists = []
    if doubtful:
        lists = gather(source.audit.lists(doubtful))[:: plan.ranks_per_replica]
    data = plan.workload.data
    exchanged = [summary["exchange"] for summary in reported if summary["exchange"] is not None]
    audited = Audited(
        reported,
        lists,
        num_samples=source.num_samples,
        exchanged=exchanged,
        name=source.sample_name,
        may_replace=data.on_bad_sample == "skip",
    )
    slots, partition, exchanged_share = 0, None, 1.0
    if data.shuffle != "global":
        slots = exchanged_slots(source.num_samples, len(reported), data.exchanged_share)
        partition, exchanged_share = data.partition, slots / max(1, source.num_samples // len(reported))
    # Samples may be under way only in the exchange of an epoch that was still running.
    over = {epoch.epoch - 1 for epoch in audited.epochs if epoch.is_whole}
    lost = [
        f"epoch {epoch.epoch}: {epoch.sent} samples were sent and {epoch.received} arrived"
        for epoch in audited.epochs
        if epoch.epoch in over and epoch.sent != epoch.received
    ]
    result = ShuffleResult(
        shuffle=data.shuffle,
        partition=partition,
        exchanged_share=exchanged_share,
        errors=(*audited.errors, *lost),
        held_samples_peak=max((counts["held_peak"] for counts in exchanged), default=None),
        exchange_wait_s=max(summary["waited_s"] for summary in reported),
        audit_s=float(np.mean([summary["audit_s"] for summary in reported])),
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
        f"samples that ranks read in {counted(len(result.epochs), 'epoch')} were checked; {sent} were sent and stored, "
        f"{slots} drawn per rank and epoch"
    )
    if data.exchanged_share and not slots:
        effective, evidence = "local", "the share of a rank's samples is less than one sample"
        if plan.layout.ranks == 1:
            evidence = "one rank has no other to exchange with"
    return (Setting(key="data.shuffle", requested=data.shuffle, effective=effective, evidence=evidence),)


def samples_check(shuffle: ShuffleResult, *, replaced: int) -> Check:
    """Checks that every sample was read once in each epoch that the run read completely."""
    name = "every sample once per epoch"
    if shuffle.errors:
        return Check(name=name, passed=False, detail=first_of(shuffle.errors, 3, "; "))
    complete = [epoch for epoch in shuffle.epochs if epoch.is_whole]
    if complete:
        detail = (
            f"{counted(len(complete), 'complete epoch')}, in each {complete[0].visits} samples read and "
            f"{complete[0].left_out} left out"
        )
    else:
        detail = "no epoch was read completely; each rank read only samples assigned to it"
    if replaced:
        detail += f"; {counted(replaced, 'unreadable sample')} replaced by others (data.on_bad_sample skip)"
    return Check(name=name, passed=True, detail=detail)


class TrainedRank(TrainState):
    """A rank that has trained; it makes its summary and, on rank 0, the record, to which each part adds fields."""

    timer: PhaseTimer
    steps: LoopResult
    pauses: Pauses
    pacing: Pacing
    validation: EvaluationSource | None = None
    allocator: str | None = None  # Treatment of memory that tensors free; None on a GPU.
    initial_digest: str  # SHA-256 of the parameters before the first step.
    initial_weights: Setting | None = None  # File of initial weights; None without one, and on ranks other than 0.
    startup_s: float  # From the start of the process to the first step, without hashing, seconds.

    def summary(self) -> dict[str, Any]:
        """Returns the fields of `RankSummary` of this rank, except `watch`."""
        context, steps, warnings = self.context, self.steps, self.context.warnings
        result = self.rank_result()
        if not steps.has_own_peaks and steps.measured_samples:
            warnings.append(
                f"peak resident memory of rank {context.place.rank} includes everything since its start, also before "
                "training: the kernel does not allow to reset it (/proc/self/clear_refs)"
            )
        if context.place.rank == 0:
            warnings += self.pacing.warnings(steps.step_s, on_gpu=context.on_gpu)
        if steps.garbage.in_steps:
            warnings.append(
                f"a library started Python's garbage collector {counted(steps.garbage.in_steps, 'time')} within "
                f"measured steps of rank {context.place.rank}; dlbench had turned it off"
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
        context, steps, device = self.context, self.steps, self.context.device
        place, binding, losses = context.place, context.binding, self.steps.losses
        failures = list(self.source.failures)
        if self.validation is not None:
            failures += self.validation.failures
        resident_bytes = peak_bytes(torch.device("cpu"))
        fields: dict[str, Any] = {"device": "cpu", "peak_memory_bytes": resident_bytes}
        for part in self.parts:
            fields |= part.rank_result()
        if context.on_gpu:
            fields["device"] = f"{device} ({torch.cuda.get_device_name(device)})"
            fields["peak_memory_bytes"] = peak_bytes(device)
            fields["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        with context.engine.holding_whole():
            final_digest = parameters_digest(self.model)
        return RankResult(
            rank=place.rank,
            node_rank=place.node_rank,
            host=place.host,
            switch=place.switch,
            cores=binding.cores,
            threads=torch.get_num_threads(),
            pinned=binding.pinned,
            numa_nodes=numa_nodes_of(binding.cores),
            gpu=rank_gpu(device, binding.gpu),
            samples=steps.measured_samples,
            measured_s=steps.measured_ns / 1e9,
            first_loss=finite_or_none(losses[0]),
            last_loss=finite_or_none(losses[-1]),
            losses_finite=all(map(math.isfinite, losses)),
            initial_parameters_sha256=self.initial_digest,
            final_parameters_sha256=final_digest,
            peak_resident_bytes=resident_bytes,
            startup_peak_bytes=steps.startup_peak_bytes,
            waits=context.engine.waits(),
            stage=context.engine.stage(),
            startup_s=self.startup_s,
            bad_samples=tuple(failures[:MOST_NAMED]),
            bad_sample_count=len(failures),
            garbage_collections=steps.garbage.collections,
            garbage_s=steps.garbage.seconds,
            clock_error_s=self.timer.clock_error_ns / 1e9,
            **fields,
        )

    def settings(self, shuffle: Shuffled) -> list[Setting]:
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
        """Returns the record of a run that trained to its end."""
        context, plan, steps = self.context, self.context.plan, self.steps
        everyone, pinning_warnings = pinned_apart(everyone, plan.layout.cores_per_rank)
        ranks = [rank.result for rank in everyone]
        exchange = with_layers_noted(plan, self.schedule, exchange)
        if exchange is not None and exchange.autotune is not None:  # only Horovod has it, and others do not load it
            from dlbench.node.sync.horovod.report import with_tuning_cost

            exchange = with_tuning_cost(exchange, steps.step_s)
        is_scaled = self.precision.is_scaled
        checks = check(plan, ranks, measured_steps=self._num_measured(), exchange=exchange, is_scaled=is_scaled)
        checks += shuffle.checks
        state = "valid" if all(check.passed for check in checks) else "invalid"
        parameters = list(self.model.parameters())
        layers, described = layers_of(plan.workload), self.source.describe()
        fields: dict[str, Any] = {
            "run_id": plan.run_id,
            "configuration": plan.configuration_digest(),
            "state": state,
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
            "emulation": context.engine.emulation(),
            "nccl": joined_transport([rank.nccl for rank in everyone]),
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
            "environment_differences": environment_differences(plan, [rank.environment for rank in everyone]),
            **context.watch.record(everyone),
            **self.pauses.record(),
        }
        if self.reading is not None:
            fields["reading"] = self.reading.result([rank.reads for rank in everyone], steps.step_s)
        for part in self.parts:
            fields |= part.record(everyone)
        return Record.model_validate(fields)

    def _num_measured(self) -> int:
        if self.context.plan.measure.until == "steps":
            return self.schedule.measured
        # It ends when the target is met, on all ranks after the same step.
        return self.steps.steps - self.schedule.warmup

    def _record_warnings(self, everyone: Sequence[RankSummary], exchange: ExchangeResult | None) -> list[str]:
        plan = self.context.plan
        warnings = list(dict.fromkeys(chain.from_iterable(rank.warnings for rank in everyone)))
        of_staging = [rank.staging.warnings for rank in everyone if rank.staging is not None]
        warnings += dict.fromkeys(chain.from_iterable(of_staging))
        threads = {rank.result.threads for rank in everyone}
        if threads != {plan.layout.cores_per_rank}:
            warnings.append(
                f"ranks computed with {sorted(threads)} threads, but the plan has {plan.layout.cores_per_rank} cores "
                "per rank"
            )
        if plan.system.node.gpus and not self.context.on_gpu:
            warnings.append(
                f"node.gpus is {plan.system.node.gpus}, but ranks saw no GPU and trained on CPUs; request GPUs "
                "(slurm.gpu_request), or set node.gpus to 0"
            )
        if plan.measure.phases == "synchronised" and not self.context.on_gpu:
            warnings.append("measure.phases synchronised has no effect on a CPU, where phases are always exact")
        warnings += average_warnings(plan, self.schedule)
        warnings += exchange_warnings(exchange, is_scaled=self.precision.is_scaled)
        warnings += watch_warnings(plan, self.schedule, [rank.watch for rank in everyone], exchange)
        if self.reading is not None:
            warnings += self.reading.warnings()
        for part in self.parts:
            warnings += part.record_warnings(everyone)
        return warnings + checkpoint_warnings(self.pauses.writer.writes, self.schedule.first + self.steps.steps)


def pinned_apart(everyone: Sequence[RankSummary], cores_per_rank: int) -> tuple[list[RankSummary], tuple[str, ...]]:
    """Returns the summaries with `pinned` true only for ranks that share no cores, and warnings about shared cores."""
    results = [rank.result for rank in everyone]
    masks = []
    for rank in results:
        mask = RankCores(rank=rank.rank, host=rank.host, cores=rank.cores, threads=cores_per_rank, pinned=rank.pinned)
        masks.append(mask)
    pinned, warnings = check_sharing(masks)
    summaries = []
    for summary, result in zip(everyone, results, strict=True):
        checked = result.model_copy(update={"pinned": result.rank in pinned})
        summaries.append(summary.model_copy(update={"result": checked}))
    return summaries, warnings


def layers_of(workload: Workload) -> list[LayerMacs]:
    """Returns the multiply-adds of each layer, from a table or counted on the meta device."""
    table = workload.model.layer_table(workload.data)
    products = [layer for layer in table if layer.macs or layer.kind == "embedding"]
    layers = [LayerMacs(name=layer.name, kind=layer.kind, macs=layer.macs) for layer in products]
    return layers or forward_macs(workload.model, workload.data)


def environment_differences(plan: RunPlan, environments: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Returns the differences of the ranks' environments from rank 0's, a line each."""
    # mpirun exports lists of folders only on its own node; libraries loaded from them have keys of their own.
    names = (*_OF_ONE_GPU, *environment.DIGESTED, "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")
    ignored = [f"variable.{name}" for name in names]
    if plan.system.launch.launcher == "mpirun":
        # On other nodes than the first its daemon is a Slurm step of its own, whose variables differ from the ranks'.
        ignored += [key for key in chain.from_iterable(environments) if key.startswith("variable.SLURM_")]
    lines = []
    for rank, facts in enumerate(environments):
        differences = environment.differences(facts, environments[0], ignore=ignored)
        lines += [f"rank {rank}: {text}" for text in differences]
    return tuple(lines)
