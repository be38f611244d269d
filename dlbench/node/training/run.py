"""One run on one rank: builds what the plan says, trains and measures it, gathers what all ranks saw."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node.cores import CoreBinding
from dlbench.node.data.source import BatchSource, build_source
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine
from dlbench.node.training import phases, sanity
from dlbench.node.training.loop import LoopResult, Trainee, TrainingLoop
from dlbench.node.training.phases import PhaseTimer
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankResult, Record, Setting
from dlbench.records.steps import StepWriter
from dlbench.specs.plan import RunPlan
from dlbench.trace import environment
from dlbench.units import utc_now


def device_for(plan: RunPlan, place: RankPlace) -> torch.device:
    """The rank's GPU where there is one for each rank of the node, the CPU where there is none at all.

    Raises:
        EnvironmentLacksError: a node has GPUs, but fewer than ranks, or GPUs were asked for and none is seen.
    """
    asked = plan.system.slurm.gpu_request if plan.system.scheduler == "slurm" else "none"
    if not torch.cuda.is_available():
        if asked != "none":
            raise EnvironmentLacksError(
                f"slurm.gpu_request is {asked}, but torch sees no GPU on {place.host}: check the driver and torch's "
                "build, or set gpu_request to none to train on CPUs"
            )
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if asked == "gpus-per-task" and visible == 1 and plan.system.launch.launcher != "mpirun":
        index = 0  # srun shows each rank its own GPU only; mpirun shows all ranks the same
    elif place.local_size <= visible:
        index = place.local_rank
    else:
        raise EnvironmentLacksError(
            f"{place.local_size} ranks a node, but {visible} GPUs on {place.host}: ranks must not share one; use fewer "
            "ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One rank, ready to train."""

    trainee: Trainee
    model: torch.nn.Module
    """The network itself, without the engine's wrapper."""
    source: BatchSource


def prepare(plan: RunPlan, place: RankPlace, engine: Engine, device: torch.device, timer: PhaseTimer) -> Prepared:
    """Builds network, optimiser and data as planned; the engine makes all ranks' parameters equal.

    Raises:
        UserError: the data set is not what the plan needs.
    """
    workload = plan.workload
    # fp32 means fp32: by default torch lets cuDNN compute convolutions in TF32 on an A100 and newer.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(workload.train.seed)
    model = build_model(workload.model).to(device)
    optimizer = build_optimizer(model, workload.train.optimizer)
    wrapped, optimizer = engine.prepare(model, optimizer, lambda: timer.mark(phases.BACKWARD))
    # Weights are equal everywhere; dropout must not be.
    torch.manual_seed(workload.train.seed * 1_000_003 + place.rank + 1)
    source = build_source(
        workload.model,
        workload.data,
        batch_size=workload.train.batch_per_rank,
        rank=place.rank,
        world_size=place.size,
        seed=workload.train.seed,
        # Without page-locked memory a copy to the GPU cannot run beside computation.
        pin_memory=device.type == "cuda",
    )
    trainee = Trainee(
        model=wrapped,
        optimizer=optimizer,
        loss=loss_for(workload.model, label_smoothing=workload.train.label_smoothing),
        engine=engine,
        batches=iter(source),
        device=device,
        train=workload.train,
    )
    return Prepared(trainee=trainee, model=model, source=source)


class RankRun:
    """The work of one rank, stage by stage."""

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        place: RankPlace,
        binding: CoreBinding,
        engine: Engine,
        device: torch.device,
        *,
        on_step: Callable[[int], None],
        started: float,
    ) -> None:
        """`started` is the monotonic time, seconds, at which the process began."""
        self._plan = plan
        self._folder = folder
        self._place = place
        self._binding = binding
        self._engine = engine
        self._device = device
        self._on_step = on_step
        self._started = started
        self._started_utc = utc_now()
        self._warnings = list(binding.warnings)

    def run(self) -> Record | None:
        """Trains, measures and writes; returns the record on rank 0, None elsewhere."""
        plan, place = self._plan, self._place
        torch.set_num_threads(self._binding.threads)
        timer = phases.timer_for(self._device, synchronise=plan.measure.phases == "synchronised")
        ready = prepare(plan, place, self._engine, self._device, timer)
        initial = sanity.parameters_digest(ready.model)
        startup_s = time.monotonic() - self._started
        header = {"rank": place.rank, "clock": timer.clock, "device": self._device.type, "run_id": plan.run_id}
        try:
            with StepWriter(self._folder.steps(place.rank), header) as writer:
                seen = TrainingLoop(ready.trainee, timer, writer, plan.measure, self._on_step).run()
        finally:
            ready.source.close()
        own = self._result(seen, ready.source, startup_s, initial, sanity.parameters_digest(ready.model))
        return self._gather(own, ready.model, ready.source, timer.clock)

    def _result(
        self, seen: LoopResult, source: BatchSource, startup_s: float, initial: str, final: str
    ) -> dict[str, Any]:
        finite = all(math.isfinite(loss) for loss in seen.losses)
        failures = list(source.failures)
        result = RankResult(
            rank=self._place.rank,
            node_rank=self._place.node_rank,
            host=self._place.host,
            device=_device_name(self._device),
            cores=self._binding.cores,
            threads=torch.get_num_threads(),
            pinned=self._binding.pinned,
            samples=seen.measured_samples,
            measured_s=seen.measured_ns / 1e9,
            first_loss=_finite(seen.losses[0]),
            last_loss=_finite(seen.losses[-1]),
            losses_finite=finite,
            initial_parameters_sha256=initial,
            final_parameters_sha256=final,
            peak_memory_bytes=_peak_memory(self._device),
            startup_s=startup_s,
            bad_samples=tuple(failures[:20]),
            bad_sample_count=len(failures),
        )
        return {
            "result": result.model_dump(mode="json"),
            "environment": environment.capture(),
            "warnings": self._warnings,
        }

    def _gather(self, own: dict[str, Any], model: torch.nn.Module, source: BatchSource, clock: str) -> Record | None:
        everyone = self._engine.gather(own)
        settings = self._engine.settings()
        if self._place.rank != 0:
            return None
        plan = self._plan
        ranks = [RankResult.model_validate(item["result"]) for item in everyone]
        checks = sanity.check(plan, ranks)
        reference = everyone[0]["environment"]
        record = Record.model_validate(
            {
                "run_id": plan.run_id,
                "configuration": plan.configuration_digest(),
                "state": "valid" if all(c.passed for c in checks) else "invalid",
                "started": self._started_utc,
                "finished": utc_now(),
                "clock": clock,
                "phases": plan.measure.phases,
                "num_parameters": sum(p.numel() for p in model.parameters()),
                "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
                "ranks": ranks,
                "checks": checks,
                "settings": settings,
                "warnings": self._all_warnings(everyone, settings, ranks),
                "data": source.describe(),
                "environment": reference,
                "environment_differences": _environment_differences(everyone, reference),
            }
        )
        write_json(self._folder.record, record.model_dump(mode="json"))
        return record

    def _all_warnings(
        self, everyone: list[dict[str, Any]], settings: list[Setting], ranks: list[RankResult]
    ) -> tuple[str, ...]:
        found = list(dict.fromkeys(text for item in everyone for text in item["warnings"]))
        plan = self._plan
        if len({r.threads for r in ranks}) > 1 or ranks[0].threads != plan.layout.cores_per_rank:
            found.append(
                f"ranks computed with {sorted({r.threads for r in ranks})} threads, the plan says "
                f"{plan.layout.cores_per_rank} cores a rank"
            )
        if plan.measure.phases == "synchronised" and self._device.type == "cpu":
            found.append("measure.phases synchronised has no effect on a CPU: its phases are exact anyway")
        if self._place.size > 1:
            found += [
                f"{s.key}: {s.requested} was asked for, {s.effective} was in force ({s.evidence})"
                for s in settings
                if s.requested is not None and s.effective is not None and s.effective != s.requested
            ]
        return tuple(found)


def _environment_differences(everyone: list[dict[str, Any]], reference: dict[str, str]) -> tuple[str, ...]:
    own = ("variable.CUDA_VISIBLE_DEVICES", "variable.HOROVOD_GLOO_IFACE", "variable.GLOO_SOCKET_IFNAME")
    return tuple(
        f"rank {rank}: {text}"
        for rank, item in enumerate(everyone)
        for text in environment.differences(item["environment"], reference, ignore=own)
    )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "cpu"


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
