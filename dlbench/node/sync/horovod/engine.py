"""Horovod, as it comes: DistributedOptimizer with tensor fusion, over Gloo, MPI or NCCL.

Traps handled here: controller and CPU operations must name the same library (mixing them aborts or
crashes); fp16 sums overflow above 65,504; bfloat16 tensors do not exist for Horovod; at one rank it
registers no hooks at all, so its 1-rank baseline holds no Horovod cost and needs no NCCL; its flags for
hierarchical and torus all-reduce are silently ignored by builds without NCCL, and on a single node; its
timeline changes every step on GPUs unless dlbench's patch is in. What ran is taken from that timeline in a
short window (`timeline`), what the autotuner did from its log (`report`).

Horovod matches operations of ranks by name, and keeps what it negotiated by name: the same name must come with the same
shape. So each name of a group's operation holds the group, the operation, the type and the length. Tried on Horovod
0.28.1 over Gloo and MPI: all-reduce, reduce-scatter, all-gather (of unequal lengths too) and broadcast work on process
sets in fp32 and fp16. A broadcast's root is a rank of the run, not a place in the set. A reduce to one rank does not
exist, so it is an all-reduce here; its result on the other ranks is not used.
"""

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
from dlbench.node.sync.groups import gather_json
from dlbench.node.sync.horovod.report import (
    NOT_READ,
    NOT_WATCHED,
    READ,
    SEARCHED,
    TRACES_ALWAYS,
    TuningWatch,
    base_variables,
    closed_timeline_is_free,
    evidence,
    exchange_of,
    fusion_in_force,
    read_back,
    refusal,
    require_import,
    wire_of,
)
from dlbench.node.sync.horovod.timeline import TimelineSummary, TimelineWindow
from dlbench.node.sync.run_store import open_endpoint, serve_horovod
from dlbench.node.sync.timing import BackwardWatch, ring_bytes
from dlbench.node.sync.wire import CheckedFp16, OverflowCount, magnitudes
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu, Setting
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO


class HorovodEngine(Engine):
    """Horovod's DistributedOptimizer."""

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
        self._use_mpi = launch.by_mpi  # Else ranks meet through a file, where rank 0 gives its address, and Gloo.
        self._address_file = folder.rendezvous
        self._interface = launch.interface
        self._fusion = ENGINES["horovod"].fusion if sync.library_fusion == AUTO else sync.library_fusion
        self._wire = sync.library_wire
        # Not where dlbench itself exchanges.
        is_watched = not sync.is_own and sync.exchanges_gradients
        self._exchange = sync.exchange if is_watched else "flat"
        self._is_watched = is_watched and place.size > 1
        self._why_unseen = NOT_WATCHED
        self._hvd: Any = None
        self._watch = BackwardWatch(device)
        self._window: TimelineWindow | None = None
        self._summary: TimelineSummary | None = None
        self._overflow = OverflowCount()
        self._checked: list[nn.Parameter] = []
        """Whose sums are searched for overflows once per step; on CPUs the compressor looks at each."""
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
        # Also on GPUs, where small objects still travel by the CPU operations.
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = library
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise require_import(error) from None
        self._hvd = hvd
        on_gpu = self._device.type == "cuda"
        if refused := refusal(hvd, self._place, use_mpi=self._use_mpi, on_gpu=on_gpu, exchange=self._exchange):
            raise refused
        if on_gpu and self._is_watched and not closed_timeline_is_free():
            # It would change the measured steps, too; Horovod reads its variable later.
            self._is_watched, self._why_unseen = False, TRACES_ALWAYS
            del os.environ["HOROVOD_TIMELINE"]
        if not self._use_mpi:
            self._meet()
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
            # NCCL starts with the first gradient; this travels by the CPU operations.
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
                "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
                "HOROVOD_CACHE_CAPACITY": "1024",
            }
            if self._place.rank == 0:  # which alone writes it
                self._tuning = TuningWatch(settings, log)
        else:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(self._fusion.bytes or 0)
            variables["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time_ms)
        os.environ |= variables

    def _meet(self) -> None:
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
            # Horovod's own 30 s pass while nodes import at different speeds.
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
        if self._place.size > 1:  # alone, a build without NCCL would be asked for what it has not
            self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._optimizer = self._hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            backward_passes_per_step=accumulation,  # which Horovod counts itself: `hold_exchange` has nothing to do
        )
        return model, self._optimizer

    def begin_backward(self) -> None:
        """Notes the moment, while it watches, and what the autotuner has done since, while it may tune."""
        if self._tuning is not None and not self._is_measuring:
            self._tuning.look(self._steps)
        self._steps += 1
        self._watch.begin()

    def watch(self, on: bool) -> None:
        """Opens or closes the timeline (rank 0) and the window in which gradients are timed."""
        if self._place.size == 1 or self._optimizer is None:
            return
        if on:
            self._watch.open()
            if self._window is not None:
                self._window.open(self._hvd)
            return
        self._is_measuring = True
        if self._tuning is not None:
            self._tuning.look(self._steps)
        if self._window is not None:
            self._window.close(self._hvd)
        self._watch.close()
        self._summary = self._window.summary() if self._window is not None else None

    def message_spans(self) -> list[MessageSpan]:
        """Fused messages by Horovod's timeline, which rank 0 alone has."""
        return self._window.spans() if self._window is not None else []

    def exchange_result(self) -> ExchangeResult | None:
        """Messages as Horovod's timeline has them, on rank 0; the other ranks report overflows only."""
        if self._place.size == 1 or self._optimizer is None:
            return None
        if not self._is_measuring:
            self.watch(False)
        overflows = min(self.gather(self._overflow.total))
        seen, place, carrier = self._summary, self._place, self._carrier
        inside = across = None
        if seen is not None and carrier == "gloo" and seen.wire_bytes is not None:
            # Horovod's Gloo always takes the ring; MPI and NCCL choose by themselves.
            inside, across = ring_bytes(seen.wire_bytes, ranks=place.size, groups=place.num_nodes)
        return ExchangeResult(
            carrier=carrier,
            by="backend",
            exchange=self._exchange if seen is None else exchange_of(seen.timeline.methods),
            fusion=str(self._threshold().effective or "unknown"),
            wire=self._wire if seen is None or not seen.timeline.types else wire_of(seen.timeline.types),
            group_size=place.local_size,
            num_groups=place.num_nodes,
            messages=() if seen is None else seen.messages,
            bytes_inside=inside,
            bytes_across=across,
            **{key: getattr(seen, key, None) for key in ("communication_s", "exposed_s", "hidden_s")},
            backward_s=self._watch.backward_s(),
            wire_overflows=overflows,
            window_steps=0 if seen is None else len(seen.counts),
            evidence=evidence(seen, carrier, "" if self._window is None else self._window.calm_text, self._why_unseen),
            gradients=self._watch.gradients(),
            autotune=self._tuning.result() if self._tuning is not None else None,
        )

    def finish_exchange(self) -> None:
        self._watch.backward_ended()
        # What Horovod has cast lies elsewhere: gradients are this rank's own until it has waited.
        checked = [p.grad for p in self._checked if p.grad is not None]
        own = magnitudes(checked) if checked else None
        self._optimizer.synchronize()
        if own is not None:
            self._overflow.count_all(own, magnitudes(checked))
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
        def all_gather(own: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._hvd.allgather(own, name=f"dlbench.gather.{own.dtype}")
            return found

        return gather_json(value, self._place.size, all_gather)

    def barrier(self) -> None:
        self._hvd.barrier()

    def settings(self) -> list[Setting]:
        """Threshold and cycle time read back from the running library; the rest as it was seen on the wire."""
        # The autotuner chooses: nothing is set then.
        asked = None if self._tunes else self._settings.cycle_time_ms
        found = read_back("horovod_effective_cycle_time_ms", ctypes.c_double)
        # Horovod reads the cycle time as a 32-bit number, which rounds 0.1 in the eighth digit.
        same = asked is not None and found is not None and math.isclose(found, asked, rel_tol=1e-6)
        effective, how = asked if same else found, READ if found is not None else NOT_READ
        cycle, operations = settings_of(
            ("engine.horovod.cycle_time_ms", asked, effective, how),
            ("engine.horovod.operations", None, self._carrier, "controller started, operations built"),
        )
        if self._optimizer is None:  # dlbench itself synchronises gradients, or nobody
            return [cycle, operations]
        return [self._threshold(), cycle, *(self._seen() if self._place.size > 1 else ()), operations]

    def _seen(self) -> list[Setting]:
        types = () if self._summary is None else self._summary.timeline.types
        wire = wire_of(types) if types else self._wire
        how = "compressor given to DistributedOptimizer"
        if types:
            how = f"types in Horovod's timeline: {', '.join(types)}"
        rows: list[tuple[str, Value, Value, str]] = [("sync.wire", self._wire, wire, how)]
        methods = {} if self._summary is None else self._summary.timeline.methods
        exchange = exchange_of(methods) if methods else None
        how = f"operations in Horovod's timeline: {', '.join(methods)}" if methods else self._why_unseen
        rows.append(("sync.exchange", self._exchange, exchange, how))
        if self._tunes:
            tried = 0 if self._tuning is None else self._tuning.result().evaluations
            rows.append(("engine.horovod.autotune", True, tried > 0, f"{tried} settings in the autotuner's log"))
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
    """One process set."""

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
        name = f"{self._name('sum', vector)}.{self._turn}"  # of two under way each has its own
        return partial(hvd.synchronize, hvd.allreduce_async_(vector, op=hvd.Sum, name=name, process_set=self._set))

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        hvd = self._hvd
        name = self._name("reduce_scatter", vector)
        share: torch.Tensor = hvd.reducescatter(vector, op=hvd.Sum, name=name, process_set=self._set)
        return share

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        vector.copy_(self._hvd.allgather(share, name=self._name("all_gather", share), process_set=self._set))

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """As in the protocol; Horovod's all-reduce, for lack of a reduce."""
        self.sum(vector)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        name = f"{self._name('broadcast', vector)}.{root}"
        self._hvd.broadcast_(vector, self.ranks[root], name=name, process_set=self._set)

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        # Lengths differ between steps, so the length is no part of this name.
        name = f"dlbench.{self._set.process_set_id}.gather.{tensor.dtype}"
        gathered: torch.Tensor = self._hvd.allgather(tensor, name=name, process_set=self._set)
        return list(torch.split(gathered, tensor.numel()))

    def _name(self, operation: str, vector: torch.Tensor) -> str:
        return f"dlbench.{self._set.process_set_id}.{operation}.{vector.dtype}.{vector.numel()}"


class HorovodCommunicators:
    """Horovod, started already with HOROVOD_DYNAMIC_PROCESS_SETS."""

    reduce_is_sum = True

    def __init__(self, hvd: Any, carrier: str) -> None:
        self._hvd = hvd
        self.carrier = carrier
        self._made: dict[tuple[int, ...], Any] = {tuple(range(hvd.size())): hvd.global_process_set}

    def group(self, ranks: Sequence[int]) -> HorovodGroup | None:
        chosen = tuple(ranks)
        if chosen not in self._made:  # Horovod refuses a second set of the same ranks
            self._made[chosen] = self._hvd.add_process_set(list(chosen))
        rank = self._hvd.rank()
        if rank not in chosen:
            return None
        return HorovodGroup(self._hvd, chosen, chosen.index(rank), self.carrier, self._made[chosen])

    def broadcast_parameters(self, model: nn.Module) -> None:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
