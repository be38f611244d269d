"""Horovod, unchanged: DistributedOptimizer with tensor fusion, over Gloo, MPI or NCCL."""
# Builds without NCCL, and all builds on a single node, ignore the flags for hierarchical and torus all-reduce.

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.devices import require_own_gpu
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine, MessageSpan, Value, settings_of
from dlbench.node.sync.horovod.report import (
    NOT_READ,
    NOT_WATCHED,
    READ,
    SEARCHED,
    TRACES_ALWAYS,
    TuningWatch,
    base_variables,
    evidence,
    exchange_of,
    fusion_in_force,
    read_back,
    refusal,
    require_import,
    wire_of,
)
from dlbench.node.sync.horovod.timeline import TimelineSummary, TimelineWindow
from dlbench.node.sync.run_store import gather_json, open_endpoint, serve_horovod
from dlbench.node.sync.timing import BackwardWatch, ring_bytes
from dlbench.node.sync.wire import CheckedFp16, OverflowCount, magnitudes
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu, Setting
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO


class HorovodEngine(Engine):
    """Exchanges gradients by Horovod's DistributedOptimizer."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        sync, launch = plan.sync, plan.system.launch
        self._stall_timeout_s = plan.measure.stall_timeout_s
        self._gpu = gpu
        self._settings = plan.engine.horovod
        self._tunes = self._settings.autotune and place.size > 1
        self._place = place
        self._device = device
        self._use_mpi = launch.by_mpi  # Otherwise Gloo, with the address of rank 0 in `_address_file`.
        self._address_file = folder.rendezvous
        self._interface = launch.interface
        self._fusion = ENGINES["horovod"].fusion if sync.library_fusion == AUTO else sync.library_fusion
        self._wire = sync.library_wire
        by_horovod = sync.exchanges_gradients and not sync.is_own
        self._exchange = sync.exchange if by_horovod else "flat"
        self._is_watched = by_horovod and place.size > 1
        self._unwatched_reason = NOT_WATCHED
        self._hvd: Any = None
        self._watch = BackwardWatch(device)
        self._window: TimelineWindow | None = None
        self._summary: TimelineSummary | None = None
        self._overflow = OverflowCount()
        self._checked: list[nn.Parameter] = []
        """Parameters whose sums are checked for overflows once per step; on CPUs the compressor checks each sum."""
        self._tuning: TuningWatch | None = None
        self._tuning_folder: tempfile.TemporaryDirectory[str] | None = None
        self._steps = 0
        self._is_measuring = False

    def allow_groups(self) -> None:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

    def communicators(self) -> HorovodCommunicators:
        return HorovodCommunicators(self._hvd, self._carrier)

    def start(self) -> None:
        self._set_variables()
        library = "mpi" if self._use_mpi else "gloo"
        # Also on GPUs, where small objects still travel by the CPU operations; different libraries would crash.
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = library
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise require_import(error) from None
        self._hvd = hvd
        on_gpu = self._device.type == "cuda"
        if refused := refusal(hvd, self._place, use_mpi=self._use_mpi, on_gpu=on_gpu, exchange=self._exchange):
            raise refused
        if on_gpu and self._is_watched and not read_back("horovod_closed_timeline_is_free", ctypes.c_bool):
            # Enabled, though not open, it would slow the measured steps; Horovod reads the variable in init().
            self._is_watched, self._unwatched_reason = False, TRACES_ALWAYS
            del os.environ["HOROVOD_TIMELINE"]
        if not self._use_mpi:
            self._set_rendezvous()
        if self._is_watched and self._place.rank == 0:
            self._window = TimelineWindow(self._watch)
        hvd.init()
        if self._window is not None:
            self._window.initialised()
        if hvd.size() != self._place.size or hvd.rank() != self._place.rank:
            raise RunError(
                f"Horovod sees rank {hvd.rank()} of {hvd.size()}, the launcher says rank {self._place.rank} of "
                f"{self._place.size}; nothing was measured"
            )
        if self._gpu is not None:
            # NCCL starts with the first gradient; this gather uses the CPU operations.
            require_own_gpu(self._gpu, self._place, self.gather, by_nccl=bool(hvd.nccl_built()))

    def _set_variables(self) -> None:
        settings = self._settings
        os.environ.pop("HOROVOD_TIMELINE", None)  # empty would be on
        variables = base_variables(self._exchange, is_watched=self._is_watched)
        if self._tunes:
            for name in SEARCHED:
                os.environ.pop(name, None)
            self._tuning_folder = tempfile.TemporaryDirectory(prefix="dlbench-autotune-")
            log = Path(self._tuning_folder.name) / "autotune.csv"
            variables |= {
                "HOROVOD_AUTOTUNE": "1",
                "HOROVOD_AUTOTUNE_LOG": str(log),
                "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": str(settings.autotune_warmup_samples),
                "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(settings.autotune_steps_per_sample),
                "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(settings.autotune_max_samples),
                # Switches that are set leave the search, whose length each of them would double.
                "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
                "HOROVOD_CACHE_CAPACITY": "1024",
            }
            if self._place.rank == 0:  # only rank 0 writes the log
                self._tuning = TuningWatch(settings, log)
        else:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(self._fusion.bytes or 0)
            variables["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time_ms)
        os.environ |= variables

    def _set_rendezvous(self) -> None:
        place = self._place
        patience_s = self._stall_timeout_s * rendezvous.PATIENCE
        endpoint = open_endpoint(self._address_file, place, self._interface, patience_s, serve_horovod)
        os.environ |= {
            "HOROVOD_RANK": str(place.rank),
            "HOROVOD_SIZE": str(place.size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_size),
            "HOROVOD_CROSS_RANK": str(place.node_rank),
            "HOROVOD_CROSS_SIZE": str(place.num_nodes),
            "HOROVOD_HOSTNAME": f"node-{place.node_rank}",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": endpoint.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(endpoint.port),
            # Horovod's default of 30 s is too short where nodes import at different speeds.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(self._stall_timeout_s + rendezvous.GRACE_S)),
            "HOROVOD_GLOO_IFACE": rendezvous.gloo_interface(place.num_nodes == 1, self._interface, endpoint),
        }

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        compression = self._hvd.Compression.none
        if self._wire == "fp16":
            compression = self._hvd.Compression.fp16
            if self._device.type == "cpu":
                compression = CheckedFp16(compression, self._overflow)
            elif self._place.size > 1:
                self._checked = [p for p in model.parameters() if p.requires_grad]
        self._watch.attach(model)
        if self._place.size > 1:  # one rank on a GPU needs no NCCL, which this broadcast would
            self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._optimizer = self._hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            backward_passes_per_step=accumulation,  # Horovod counts passes itself, so `hold_exchange` does nothing
        )
        return model, self._optimizer

    def begin_backward(self) -> None:
        """Records the start of the pass while steps are watched, and reads the autotuner's log during the warm-up."""
        if self._tuning is not None and not self._is_measuring:
            self._tuning.read_log(self._steps)
        self._steps += 1
        self._watch.begin()

    def watch(self, on: bool) -> None:
        if self._place.size == 1 or self._optimizer is None:
            return
        if on:
            self._watch.open()
            if self._window is not None:
                self._window.open(self._hvd)
            return
        self._is_measuring = True
        if self._tuning is not None:
            self._tuning.read_log(self._steps)
        if self._window is not None:
            self._window.close(self._hvd)
        self._watch.close()
        if self._window is not None:
            self._summary = self._window.summary()

    def message_spans(self) -> list[MessageSpan]:
        return self._window.spans() if self._window is not None else []

    def exchange_result(self) -> ExchangeResult | None:
        """Returns the messages of Horovod's timeline on rank 0; the other ranks report overflows only."""
        if self._place.size == 1 or self._optimizer is None:
            return None
        if not self._is_measuring:
            self.watch(False)
        fields: dict[str, Any] = {
            "exchange": self._exchange,
            "wire": self._wire,
            "evidence": f"Horovod's timeline: {self._unwatched_reason}",
        }
        if self._summary is not None:
            fields |= self._from_timeline(self._summary)
        if self._window is not None and self._window.scheduling_text:
            fields["evidence"] += f"; {self._window.scheduling_text}"
        if self._tuning is not None:
            fields["autotune"] = self._tuning.result()
        return ExchangeResult(
            carrier=self._carrier,
            by="backend",
            fusion=str(self._threshold().effective or "unknown"),
            group_size=self._place.local_size,
            num_groups=self._place.num_nodes,
            backward_s=self._watch.backward_s(),
            wire_overflows=min(self.gather(self._overflow.total)),
            gradients=self._watch.gradients(),
            **fields,
        )

    def _from_timeline(self, summary: TimelineSummary) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "exchange": exchange_of(summary.timeline.methods),
            "messages": summary.messages,
            "communication_s": summary.communication_s,
            "exposed_s": summary.exposed_s,
            "hidden_s": summary.hidden_s,
            "window_steps": len(summary.counts),
            "evidence": evidence(summary, self._carrier),
        }
        if summary.timeline.types:
            fields["wire"] = wire_of(summary.timeline.types)
        if self._carrier == "gloo" and summary.wire_bytes is not None:
            fields["bytes_inside"], fields["bytes_across"] = ring_bytes(
                summary.wire_bytes, ranks=self._place.size, groups=self._place.num_nodes
            )
        return fields

    def finish_exchange(self) -> None:
        self._watch.backward_ended()
        # Horovod casts into other memory: until it has synchronised, gradients are this rank's own.
        checked = [p.grad for p in self._checked if p.grad is not None]
        if checked:
            before = magnitudes(checked)
            self._optimizer.synchronize()
            self._overflow.count_all(before, magnitudes(checked))
        else:
            self._optimizer.synchronize()
        self._watch.exchange_ended()

    def step(self, update: Callable[[Optimizer], object]) -> None:
        with self._optimizer.skip_synchronize():
            update(self._optimizer)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors and self._place.size > 1:
            self._hvd.grouped_allreduce_(list(tensors), op=self._hvd.Average, name="dlbench.average")

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._hvd.broadcast_(tensor, root_rank=0, name=f"dlbench.broadcast.{tensor.numel()}")

    def gather(self, value: Any) -> list[Any]:
        def all_gather(tensor: torch.Tensor) -> torch.Tensor:
            gathered: torch.Tensor = self._hvd.allgather(tensor, name=f"dlbench.gather.{tensor.dtype}")
            return gathered

        return gather_json(value, self._place.size, all_gather)

    def barrier(self) -> None:
        self._hvd.barrier()

    def settings(self) -> list[Setting]:
        requested = None if self._tunes else self._settings.cycle_time_ms
        effective, how = read_back("horovod_effective_cycle_time_ms", ctypes.c_double), READ
        if effective is None:
            how = NOT_READ
        elif requested is not None and math.isclose(effective, requested, rel_tol=1e-6):
            effective = requested  # Horovod's 32-bit number rounds 0.1 in the eighth digit
        settings = settings_of(("engine.horovod.cycle_time_ms", requested, effective, how))
        if self._optimizer is not None:  # otherwise dlbench itself synchronises gradients, or nobody
            settings.insert(0, self._threshold())
            if self._place.size > 1:
                settings += self._timeline_settings()
        return settings + settings_of(
            ("engine.horovod.operations", None, self._carrier, "controller started, operations built")
        )

    def _timeline_settings(self) -> list[Setting]:
        wire, wire_evidence = self._wire, "compressor given to DistributedOptimizer"
        exchange, exchange_evidence = None, self._unwatched_reason
        if self._summary is not None:
            types, methods = self._summary.timeline.types, self._summary.timeline.methods
            if types:
                wire, wire_evidence = wire_of(types), f"types in Horovod's timeline: {', '.join(types)}"
            if methods:
                exchange = exchange_of(methods)
                exchange_evidence = f"operations in Horovod's timeline: {', '.join(methods)}"
        rows: list[tuple[str, Value, Value, str]] = [
            ("sync.wire", self._wire, wire, wire_evidence),
            ("sync.exchange", self._exchange, exchange, exchange_evidence),
        ]
        if self._tunes:
            evaluations = self._tuning.result().evaluations if self._tuning is not None else 0
            how = f"{evaluations} settings in the autotuner's log"
            rows.append(("engine.horovod.autotune", True, evaluations > 0, how))
        return settings_of(*rows)

    def _threshold(self) -> Setting:
        return fusion_in_force(None if self._tunes else self._fusion, self._summary, self._place)

    @property
    def _carrier(self) -> str:
        if self._device.type == "cuda" and self._hvd.nccl_built():
            return "nccl"
        return os.environ["HOROVOD_CONTROLLER"]

    def stop(self) -> None:
        if self._hvd is not None and self._hvd.is_initialized():
            self._hvd.shutdown()
        if self._tuning_folder is not None:
            self._tuning_folder.cleanup()


class HorovodGroup:
    """A process set of Horovod; tried on Horovod 0.28.1 over Gloo and MPI, in fp32 and fp16."""

    def __init__(self, hvd: Any, ranks: tuple[int, ...], index: int, carrier: str, process_set: Any) -> None:
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self._hvd = hvd
        self._set = process_set
        self._turn = 0

    def sum(self, vector: torch.Tensor) -> None:
        self.begin_sum(vector)()

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        hvd, self._turn = self._hvd, 1 - self._turn
        name = f"{self._name('sum', vector)}.{self._turn}"  # two in flight need different names
        return partial(hvd.synchronize, hvd.allreduce_async_(vector, op=hvd.Sum, name=name, process_set=self._set))

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        hvd = self._hvd
        name = self._name("reduce_scatter", vector)
        share: torch.Tensor = hvd.reducescatter(vector, op=hvd.Sum, name=name, process_set=self._set)
        return share

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        vector.copy_(self._hvd.allgather(share, name=self._name("all_gather", share), process_set=self._set))

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """Sums on all ranks of the group: Horovod has no reduce."""
        self.sum(vector)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        name = f"{self._name('broadcast', vector)}.{root}"
        self._hvd.broadcast_(vector, self.ranks[root], name=name, process_set=self._set)

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        # Lengths differ between steps, so the length is no part of this name.
        name = f"dlbench.{self._set.process_set_id}.gather.{tensor.dtype}"
        gathered: torch.Tensor = self._hvd.allgather(tensor, name=name, process_set=self._set)
        return list(torch.split(gathered, tensor.numel()))

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        name = self._name("all_to_all", rows)
        received: torch.Tensor = self._hvd.alltoall(rows.flatten(), name=name, process_set=self._set)
        return received.view_as(rows)

    def _name(self, operation: str, vector: torch.Tensor) -> str:
        # Horovod caches what it negotiated for a name, so the same name must come with the same shape.
        return f"dlbench.{self._set.process_set_id}.{operation}.{vector.dtype}.{vector.numel()}"


class HorovodCommunicators:
    """Makes process sets of Horovod, which was started with HOROVOD_DYNAMIC_PROCESS_SETS."""

    reduce_is_sum = True

    def __init__(self, hvd: Any, carrier: str) -> None:
        self._hvd = hvd
        self.carrier = carrier
        self._process_sets: dict[tuple[int, ...], Any] = {tuple(range(hvd.size())): hvd.global_process_set}

    def group(self, ranks: Sequence[int]) -> HorovodGroup | None:
        members = tuple(ranks)
        if members not in self._process_sets:  # Horovod refuses a second set of the same ranks
            self._process_sets[members] = self._hvd.add_process_set(list(members))
        rank = self._hvd.rank()
        if rank not in members:
            return None
        return HorovodGroup(self._hvd, members, members.index(rank), self.carrier, self._process_sets[members])

    def broadcast_parameters(self, model: nn.Module) -> None:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
