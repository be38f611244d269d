"""One run on one rank: builds what the plan says, trains and measures it, gathers what all ranks saw."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from dlbench.errors import UserError
from dlbench.node.cores import CoreBinding
from dlbench.node.data.loader import EvaluationSource
from dlbench.node.data.source import build_evaluation
from dlbench.node.models.flops import forward_macs, training_flops_per_sample
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.autotune import with_tuning_cost
from dlbench.node.sync.engine import Engine
from dlbench.node.training import noise_scale, phases, sanity
from dlbench.node.training.events import Events
from dlbench.node.training.loop import LoopResult, TrainingLoop
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.prepare import Prepared, prepare
from dlbench.records.exchange import ExchangeResult
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.record import NoiseScale, RankResult, Record
from dlbench.records.steps import StepWriter
from dlbench.specs.plan import RunPlan
from dlbench.trace import environment
from dlbench.units import utc_now


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
        on_course: Callable[[int], None],
        beat: Callable[[str], None],
        started: float,
    ) -> None:
        """Everything of one rank.

        Args:
            plan: the run.
            folder: where it is recorded.
            place: this rank.
            binding: its cores.
            engine: started already.
            device: where this rank computes.
            on_step: told each step's number before it begins.
            on_course: told how many steps there will be at most.
            beat: told what moved between steps.
            started: monotonic time at which the process began, seconds.
        """
        self._plan = plan
        self._folder = folder
        self._place = place
        self._binding = binding
        self._engine = engine
        self._device = device
        self._on_step = on_step
        self._on_course = on_course
        self._beat = beat
        self._started = started
        self._started_utc = utc_now()
        self._warnings = list(binding.warnings)
        self._events = Events(started)

    def run(self) -> Record | None:
        """Trains, measures and writes; returns the record on rank 0, None elsewhere."""
        plan, place = self._plan, self._place
        torch.set_num_threads(self._binding.threads)
        timer = phases.timer_for(self._device, synchronise=plan.measure.phases == "synchronised")
        ready = prepare(plan, place, self._engine, self._device, timer, self._start_run)
        validation: EvaluationSource | None = None
        try:
            if ready.course.evaluate_every is not None:
                validation = self._validation()
            self._require_steps(ready)
            self._beat("opening the data")
            self._warnings += ready.warnings
            self._on_course(ready.course.steps)
            initial = sanity.parameters_digest(ready.model)
            startup_s = time.monotonic() - self._started
            pauses = Pauses(
                plan,
                ready,
                self._engine,
                self._events,
                self._folder,
                validation,
                is_first=place.rank == 0,
                beat=self._beat,
            )
            seen = self._train(ready, timer, pauses)
        finally:
            ready.source.close()
            if validation is not None:
                validation.close()
        reached = (result := pauses.result()) is None or result.reached
        done = ready.course.first + seen.steps
        self._events.add(
            "run_stop", status="success" if reached else "aborted", epoch=ready.course.epoch(done), step=done
        )
        final = sanity.parameters_digest(ready.model)
        own = self._result(seen, ready, validation, startup_s, initial, final)
        return self._gather(own, ready, pauses, seen, timer.clock)

    def _start_run(self) -> None:
        self._beat("building network and optimiser")
        self._engine.barrier()
        self._events.start_run()

    def _validation(self) -> EvaluationSource:
        workload, quality = self._plan.workload, self._plan.workload.quality
        parts = workload.train.gradient_accumulation
        return build_evaluation(
            workload.model,
            workload.data,
            max_samples=quality.evaluate_samples if quality else None,
            # No gradients are kept, so what fits training fits here.
            batch_size=workload.train.batch_per_rank // parts,
            rank=self._place.rank,
            world_size=self._place.size,
            seed=workload.train.seed,
            pin_memory=self._device.type == "cuda",
        )

    def _require_steps(self, ready: Prepared) -> None:
        if ready.course.steps < 1:
            raise UserError(
                f"checkpoint.resume_from: {ready.course.first} steps are done already, the plan ends after "
                f"{ready.course.end}; nothing is left to train"
            )

    def _train(self, ready: Prepared, timer: phases.PhaseTimer, pauses: Pauses) -> LoopResult:
        place = self._place
        header = {"rank": place.rank, "clock": timer.clock, "device": self._device.type, "run_id": self._plan.run_id}
        with StepWriter(self._folder.steps(place.rank), header) as writer:
            return TrainingLoop(ready.trainee, timer, writer, ready.course, self._on_step, pauses).run()

    def _result(
        self,
        seen: LoopResult,
        ready: Prepared,
        validation: EvaluationSource | None,
        startup_s: float,
        initial: str,
        final: str,
    ) -> dict[str, Any]:
        finite = all(math.isfinite(loss) for loss in seen.losses)
        failures = [*ready.source.failures, *(validation.failures if validation else [])]
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
            "norms": ready.trainee.noise.told() if ready.trainee.noise is not None else [],
        }

    def _gather(
        self, own: dict[str, Any], ready: Prepared, pauses: Pauses, seen: LoopResult, clock: str
    ) -> Record | None:
        exchange = self._engine.exchange_result()
        everyone = self._engine.gather(own)
        settings = self._engine.settings()
        if self._place.rank != 0:
            return None
        plan = self._plan
        ranks = [RankResult.model_validate(item["result"]) for item in everyone]
        precision = ready.trainee.precision
        checks = sanity.check(
            plan,
            ranks,
            measured_steps=seen.steps - ready.course.warmup,
            exchange=exchange,
            is_scaled=precision.is_scaled,
        )
        layers = forward_macs(plan.workload.model, plan.workload.data)
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
                "num_parameters": sum(p.numel() for p in ready.model.parameters()),
                "gradient_bytes": sum(
                    p.numel() * p.element_size() for p in ready.model.parameters() if p.requires_grad
                ),
                "ranks": ranks,
                "checks": checks,
                "settings": settings,
                "exchange": with_tuning_cost(exchange, seen.step_s),
                "inert": sanity.inert(settings, ranks=self._place.size),
                "warnings": self._all_warnings(everyone, exchange, ranks, is_scaled=precision.is_scaled),
                "data": ready.source.describe(),
                "steps": seen.steps,
                "first_step": ready.course.first,
                "resumed_from": str(ready.resumed.path) if ready.resumed else None,
                "checkpoints": pauses.checkpoints(),
                "precision": precision.text,
                "overflow_steps": precision.overflow_steps if precision.is_scaled else None,
                "final_loss_scale": precision.scale if precision.is_scaled else None,
                "layers": layers,
                "training_flops_per_sample": training_flops_per_sample(layers),
                "quality": pauses.result(),
                "noise_scale": self._noise_scale([item["norms"] for item in everyone]),
                "events": self._events.all,
                "environment": reference,
                "environment_differences": _environment_differences(everyone, reference),
            }
        )
        write_json(self._folder.record, record.model_dump(mode="json"))
        return record

    def _noise_scale(self, norms: list[list[list[float]]]) -> NoiseScale | None:
        if not self._plan.measure.noise_scale:
            return None
        train = self._plan.workload.train
        return noise_scale.estimate(
            norms,
            small_batch=train.batch_per_rank // train.gradient_accumulation,
            large_batch=self._plan.global_batch,
        )

    def _all_warnings(
        self,
        everyone: list[dict[str, Any]],
        exchange: ExchangeResult | None,
        ranks: list[RankResult],
        *,
        is_scaled: bool,
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
        found += sanity.exchange_doubts(exchange, is_scaled=is_scaled)
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
