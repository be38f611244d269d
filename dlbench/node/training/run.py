"""One run on one rank: builds what the plan says, trains and measures it, gathers what all ranks saw."""

from __future__ import annotations

import math
import resource
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dlbench.errors import RunError, UserError
from dlbench.machine import environment
from dlbench.machine.environment import unpacked
from dlbench.machine.gpus import numa_nodes_of
from dlbench.machine.memory import peak_resident_bytes
from dlbench.node.cores import CoreBinding
from dlbench.node.data.loader import EvaluationSource
from dlbench.node.data.source import build_evaluation
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.devices import NcclLog, rank_gpu
from dlbench.node.failures import condensed
from dlbench.node.memory.fitting_batch import fits_in_memory, largest_batch, missing_state_bytes, out_of_memory
from dlbench.node.models.build import loss_for
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine
from dlbench.node.torch_facts import torch_facts
from dlbench.node.training import phases, sanity
from dlbench.node.training.activations import sample_batches, sample_loss
from dlbench.node.training.gathering import make_record
from dlbench.node.training.instruments import RankWatch
from dlbench.node.training.loop import LoopResult, TrainingLoop
from dlbench.node.training.pacing import Pacing
from dlbench.node.training.pauses.between_steps import Pauses
from dlbench.node.training.pauses.checkpoint import Progress, find_checkpoint
from dlbench.node.training.pauses.events import Events
from dlbench.node.training.prepare import Prepared, lister_for, prepare
from dlbench.node.training.shuffling import shuffled, told_of_samples
from dlbench.node.training.staging import Staging, stage
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.interrupted import attempt_of
from dlbench.records.record import RankResult, Record
from dlbench.records.rows.steps import StepWriter
from dlbench.specs.launch import WARNING_S
from dlbench.specs.plan import RunPlan
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
        watch: RankWatch,
        *,
        on_step: Callable[[int], None],
        on_course: Callable[[int, int], None],
        on_staging: Callable[[int, int], None],
        beat: Callable[[str], None],
        started: float,
        nccl: NcclLog | None = None,
    ) -> None:
        """Everything of one rank.

        Args:
            plan: the run.
            folder: where it is recorded.
            place: this rank.
            binding: its cores.
            engine: started already.
            device: where this rank computes.
            watch: what watches it; closed by the caller.
            on_step: told each step's number before it begins.
            on_course: told how many steps there will be at most, and how many of them are warm-up.
            on_staging: told the bytes that are staged, and those that have to be, over all nodes.
            beat: told what moved between steps.
            started: monotonic time at which the process began, seconds.
            nccl: the log of NCCL, closed by the caller; None where NCCL has no part.
        """
        self._nccl = nccl
        self._plan = plan
        self._folder = folder
        self._place = place
        self._binding = binding
        self._engine = engine
        self._device = device
        self._watch = watch
        self._on_step = on_step
        self._on_course = on_course
        self._on_staging = on_staging
        self._beat = beat
        self._started = started
        self._started_utc = utc_now()
        self._warnings = list(binding.warnings)
        self._events = Events(started)
        self._initial = ""
        self._pacing: Pacing | None = None
        self._hashing_s = 0.0

    def run(self) -> Record | None:
        """Trains, measures and writes; returns the record on rank 0, None elsewhere."""
        plan, place = self._plan, self._place
        self._watch.stage("building")
        torch.set_num_threads(self._binding.threads)
        timer = phases.timer_for(self._device, synchronise=plan.measure.phases == "synchronised")
        ready = prepare(
            *(plan, place, self._engine, self._device, timer),
            before_data=self._start_run,
            bring=self._stage,
            beat=self._beat,
            stage=self._watch.stage,
            resume_from=self._own_checkpoint(),
        )
        validation: EvaluationSource | None = None
        try:
            if ready.course.evaluate_every is not None:
                validation = self._validation(ready)
            self._require_steps(ready)
            self._beat("opening the data")
            self._warnings += ready.warnings
            self._on_course(ready.course.steps, ready.course.warmup)
            self._watch.attach(ready.model, self._engine, ready.source, ready.course, self._beat, ready.trainee.memory)
            startup_s = time.monotonic() - self._started - self._hashing_s
            pauses = Pauses(
                plan,
                ready,
                self._engine,
                self._events,
                self._folder,
                validation,
                self._watch,
                is_first=place.rank == 0,
                beat=self._beat,
            )
            self._pacing = Pacing(ready.course, self._engine.gather, self._on_course)
            seen = self._train(ready, timer, pauses)
        except BaseException:
            if ready.source.exchange is not None:
                ready.source.exchange.close()
            raise
        finally:
            if ready.trainee.host is not None:
                ready.trainee.host.close()
            ready.source.close()
            if validation is not None:
                validation.close()
            if ready.trainee.memory is not None:
                ready.trainee.memory.close()
        reached = (result := pauses.result()) is None or result.reached
        done = ready.course.first + seen.steps
        self._events.add(
            "run_stop", status="success" if reached else "aborted", epoch=ready.course.epoch(done), step=done
        )
        final = sanity.parameters_digest(ready.model)
        own = self._result(seen, ready, validation, startup_s, final, timer)
        return self._gather(own, ready, pauses, seen, timer.clock)

    def _start_run(self, model: nn.Module) -> None:
        """Parameters are as training will find them; hashing them is the check's business and in no figure."""
        began = time.monotonic()
        self._beat("hashing the parameters")
        self._initial = sanity.parameters_digest(model)
        self._hashing_s = time.monotonic() - began
        self._beat("building network and optimizer")
        self._engine.barrier()
        self._events.start_run()

    def _own_checkpoint(self) -> str | None:
        """The newest checkpoint that an earlier attempt at the run left; None without one.

        Rank 0 decides: nodes may list a shared folder unlike for a while, and ranks of two minds would never meet.
        """
        folder, found = self._folder, None
        if self._place.rank == 0 and attempt_of(folder) > 1 and any(folder.checkpoints.glob("step-*")):
            found = str(find_checkpoint(folder.path))
        newest = self._engine.gather(found)[0]
        return None if newest is None else str(newest)

    def _stage(self, progress: Progress | None) -> Staging | None:
        if self._plan.workload.data.is_synthetic or self._plan.workload.data.staging == "none":
            return None
        self._watch.stage("staging")
        self._events.add("staging_start")
        self._on_staging(0, 0)
        staging = stage(self._plan, self._place, self._engine, progress, beat=self._beat, tell=self._on_staging)
        self._events.add("staging_stop")
        if staging is not None and staging.node is not None:
            self._watch.staged(staging.node.moved)
        self._watch.stage("building")
        return staging

    def _validation(self, ready: Prepared) -> EvaluationSource:
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
            counts=self._device.type == "cuda",
            staged=ready.staging.data if ready.staging is not None else None,
            lister=lister_for(self._plan, self._place, "evaluation"),
            readers=ready.reading.readers if ready.reading is not None else None,
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
        launches = timer.clock == "cuda-events"
        with StepWriter(self._folder.steps(place.rank), header, launches=launches) as writer:
            loop = TrainingLoop(
                *(ready.trainee, timer, writer, ready.course, self._on_step, pauses, self._watch, self._pacing),
                give_way=pauses.give_way,
                warn_before_s=self._plan.system.slurm.warning_s or WARNING_S,
            )
            try:
                seen = loop.run()
            except torch.OutOfMemoryError as error:
                words = condensed(str(error))
                traceback.clear_frames(error.__traceback__)  # they hold the activations
            else:
                writer.sync()
                return seen
        raise self._out_of_memory(ready, words)

    def _out_of_memory(self, ready: Prepared, words: str) -> RunError:
        """The line that names the batch that fits, where that can be tried: in core, neither compiled nor captured."""
        plan, trainee = self._plan, ready.trainee
        train = plan.workload.train
        fit = None
        if trainee.memory is None and trainee.compilation is None and trainee.graphs is None:
            passes = fits_in_memory(
                ready.model,
                sample_loss(ready.model, loss_for(plan.workload.model, train.label_smoothing), trainee.precision),
                sample_batches(plan, self._device),
                self._device,
                0 if trainee.host is not None else missing_state_bytes(ready.model, trainee.optimizer, train.optimizer),
                self._beat,
            )
            fit = largest_batch(passes, train.batch_per_rank // train.gradient_accumulation)
        return out_of_memory(
            *(words, fit), rank=self._place.rank, batch=train.batch_per_rank, accumulation=train.gradient_accumulation
        )

    def _result(
        self,
        seen: LoopResult,
        ready: Prepared,
        validation: EvaluationSource | None,
        startup_s: float,
        final: str,
        timer: phases.PhaseTimer,
    ) -> dict[str, Any]:
        finite = all(math.isfinite(loss) for loss in seen.losses)
        failures = [*ready.source.failures, *(validation.failures if validation else [])]
        memory = ready.trainee.memory
        peak_resident = peak_resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not seen.has_own_peaks and seen.measured_samples:
            self._warnings.append(
                f"peak resident memory of rank {self._place.rank} is that since its start, what was measured before "
                "training included: the kernel does not let it begin anew (/proc/self/clear_refs)"
            )
        result = RankResult(
            rank=self._place.rank,
            node_rank=self._place.node_rank,
            host=self._place.host,
            switch=self._place.switch,
            device=_device_name(self._device),
            cores=self._binding.cores,
            threads=torch.get_num_threads(),
            pinned=self._binding.pinned,
            numa_nodes=numa_nodes_of(self._binding.cores),
            gpu=rank_gpu(self._device, self._binding.gpu),
            samples=seen.measured_samples,
            measured_s=seen.measured_ns / 1e9,
            first_loss=_finite(seen.losses[0]),
            last_loss=_finite(seen.losses[-1]),
            losses_finite=finite,
            initial_parameters_sha256=self._initial,
            final_parameters_sha256=final,
            peak_memory_bytes=_peak_memory(self._device, peak_resident),
            peak_reserved_bytes=_peak_reserved(self._device),
            peak_resident_bytes=peak_resident,
            startup_s=startup_s,
            unpacking_s=image.seconds if (image := unpacked()) is not None else None,
            bad_samples=tuple(failures[:20]),
            bad_sample_count=len(failures),
            garbage_collections=seen.garbage.collections,
            garbage_s=seen.garbage.seconds,
            clock_error_s=timer.clock_error_ns / 1e9,
            planted_s=ready.trainee.fault.planted_s if ready.trainee.fault is not None else 0.0,
        )
        if self._pacing is not None and self._place.rank == 0:
            self._warnings += self._pacing.warnings(seen.step_s, on_gpu=self._device.type == "cuda")
        if seen.garbage.in_steps:
            self._warnings.append(
                f"Python's garbage collector was started {seen.garbage.in_steps} times within measured steps of rank "
                f"{self._place.rank}, by a library; dlbench had turned it off"
            )
        compilation, graphs = ready.trainee.compilation, ready.trainee.graphs
        self._warnings += memory.warnings if memory is not None else ()
        self._warnings += compilation.warnings if compilation is not None else ()
        self._warnings += graphs.warnings if graphs is not None else ()
        transport = self._nccl.read() if self._nccl is not None else None
        found = environment.capture(self._warnings, withheld=self._plan.system.launch.referenced)
        found |= torch_facts(self._warnings, self._device)
        return {
            "result": result.model_dump(mode="json"),
            "environment": found,
            "nccl": transport,
            "warnings": self._warnings,
            "emulates_precision": ready.trainee.precision.is_emulated,
            "reads": [epoch.told() for epoch in ready.source.epoch_reads()],
            "norms": ready.trainee.noise.told() if ready.trainee.noise is not None else [],
            "memory": memory.told() if memory is not None else None,
        }

    def _gather(
        self, own: dict[str, Any], ready: Prepared, pauses: Pauses, seen: LoopResult, clock: str
    ) -> Record | None:
        exchange = self._engine.exchange_result()
        told = {
            **own,
            "watch": self._watch.told(),
            "samples": told_of_samples(ready.source),
            "staging": ready.staging.told() if ready.staging is not None else None,
        }
        everyone = self._engine.gather(told)
        if ready.source.exchange is not None:  # all ranks have trained: nobody waits for samples any more
            ready.source.exchange.close()
        if ready.staging is not None:
            self._engine.barrier()  # nobody reads or receives what is staged any more
            ready.staging.close()
        shuffle = shuffled(self._plan, ready.source, [each["samples"] for each in everyone], self._engine.gather)
        reading = ready.reading.settings() if ready.reading is not None else []
        if isinstance(ready.source, SyntheticSource):
            reading = ready.source.settings(self._plan.workload.data)
        settings = [*self._engine.settings(), *shuffle.settings, *reading, *ready.trainee.settings()]
        if self._pacing is not None:
            settings += self._pacing.settings(self._plan.measure, seen.step_s)
        if self._place.rank != 0:
            return None
        record = make_record(
            self._plan,
            everyone,
            ready=ready,
            seen=seen,
            pauses=pauses,
            exchange=exchange,
            settings=settings,
            shuffle=shuffle,
            started=self._started_utc,
            clock=clock,
            device=self._device,
            events=self._events,
            attempt=attempt_of(self._folder),
        )
        write_json(self._folder.record, record.model_dump(mode="json"))
        return record


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "cpu"


def _peak_memory(device: torch.device, peak_resident: int) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident


def _peak_reserved(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
