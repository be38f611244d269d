"""PyTorch's DistributedDataParallel, as it comes, with its exposed exchange made visible.

DDP waits for its last bucket inside `backward()`. The communication hook used here is PyTorch's own; around it
dlbench notes when the last bucket is handed over, which is when the backward pass of this rank has computed its last
gradient (`ddp_hooks`). What `backward()` takes from there is exposed exchange.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node import rendezvous
from dlbench.node.devices import require_own_gpu
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.ddp.hooks import WatchedHook, hook_for_ddp, require_sum, summarise
from dlbench.node.sync.engine import Engine, MessageSpan
from dlbench.node.sync.gather_json import gather_over_torch
from dlbench.node.sync.gradient_times import BackwardWatch, ring_bytes
from dlbench.node.sync.message_spans import passage_spans
from dlbench.node.sync.own.torch_groups import TorchCommunicators
from dlbench.node.sync.run_store import RunStore, meet
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu, Setting
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import fusion_bytes
from dlbench.units import exact_bytes


class DdpEngine(Engine):
    """torch.distributed over gloo or NCCL."""

    marks_backward = True

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        """See `Engine.for_plan`."""
        self._stall_timeout_s = plan.measure.stall_timeout_s
        self._gpu = gpu
        self._settings = plan.engine.ddp
        self._place = place
        self._device = device
        self._address_file = folder.rendezvous
        self._interface = plan.system.launch.interface
        self._backend: str = self._settings.backend
        if self._backend == "auto":
            self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._fusion = plan.sync.library_fusion
        self._wire = plan.sync.library_wire
        self._powersgd_rank = plan.sync.powersgd_rank
        self._module: nn.parallel.DistributedDataParallel | None = None
        self._watch = BackwardWatch(device)
        self._hook: WatchedHook | None = None
        self._left: object = None
        self._store: RunStore | None = None

    @classmethod
    def for_plan(
        cls, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> Self:
        return cls(plan, folder, place, device, gpu)

    def start(self) -> None:
        """Joins the process group."""
        if self._backend == "nccl" and self._device.type != "cuda":
            raise EnvironmentLacksError("engine.ddp.backend: nccl needs a GPU on every rank; use gloo or auto")
        if self._backend == "nccl" and not dist.is_nccl_available():
            raise EnvironmentLacksError("engine.ddp.backend: this torch was built without NCCL; use gloo or auto")
        patience = datetime.timedelta(seconds=self._stall_timeout_s * rendezvous.PATIENCE)
        self._store = store = meet(self._address_file, self._place, self._interface, patience)
        by_nccl = self._backend == "nccl"
        # Before NCCL starts: of two ranks on one GPU it says a bus number, if anything.
        require_own_gpu(self._gpu, self._place, lambda told: store.of_node("gpu", told, self._place), by_nccl=by_nccl)
        dist.init_process_group(
            self._backend,
            store=store,
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=datetime.timedelta(seconds=self._stall_timeout_s + rendezvous.GRACE_S),
            # NCCL then starts here and not in the first step, and a hang shows where it is.
            device_id=self._device if by_nccl else None,
        )
        require_sum(self._wire, self._backend, self._device, self._place.size)

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wraps the model; DDP broadcasts rank 0's parameters and buffers itself."""
        device_ids = [self._device.index or 0] if self._device.type == "cuda" else None
        # Left out, DDP begins with a small first bucket (1 MiB); given, even its own default makes that one as large.
        # One that is full at one byte holds one parameter.
        cap = 1 if self._fusion == "none" else fusion_bytes(self._fusion)
        module = nn.parallel.DistributedDataParallel(
            model,
            device_ids=device_ids,
            bucket_cap_mb=None if cap is None else cap / 2**20,
            # BatchNorm statistics stay local to a rank, as Horovod leaves them: equal work for both engines.
            broadcast_buffers=False,
            gradient_as_bucket_view=self._settings.gradient_as_bucket_view,
            static_graph=self._settings.static_graph,
        )
        self._watch.attach(model)
        self._hook = WatchedHook(self._wire, self._powersgd_rank, self._backend, self._watch, mark_backward)
        module.register_comm_hook(None, hook_for_ddp(self._hook))
        self._module = module
        self._optimizer = optimizer
        return module, optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        """DDP's own no_sync()."""
        assert self._module is not None
        return self._module.no_sync()

    def begin_backward(self) -> None:
        """Notes the moment, while it watches."""
        self._watch.begin()

    def watch(self, on: bool) -> None:
        """Opens or closes the window in which buckets and gradients are timed."""
        if on and self._place.size > 1:
            self._watch.open()
        else:
            self._watch.close()

    def message_spans(self) -> list[MessageSpan]:
        """Buckets from handing over to their return."""
        return passage_spans(self._watch.steps, self._watch.clock)

    def exchange_result(self) -> ExchangeResult | None:
        """Buckets as the hook saw them; times are means over ranks of medians over steps."""
        self._watch.close()
        if self._place.size == 1 or self._hook is None:
            return None
        seen = summarise(self._watch)
        times = {
            "communication_s": seen.communication_s,
            "exposed_s": seen.exposed_s,
            "hidden_s": seen.hidden_s,
            "backward_s": self._watch.backward_s(),
        }
        everyone = self.gather((times, self._hook.overflows()))
        inside, across = (None, None)
        if seen.num_steps and self._backend == "gloo":
            # Gloo's all-reduce is a ring (allreduce.cc); NCCL chooses by itself.
            inside, across = ring_bytes(seen.wire_bytes, ranks=self._place.size, groups=self._place.num_nodes)
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="flat",
            fusion=str(self._fusion_setting().effective),
            wire=self._hook.wire_in_force,
            group_size=self._place.local_size,
            num_groups=self._place.num_nodes,
            messages=seen.messages,
            bytes_inside=inside,
            bytes_across=across,
            **{key: _mean([found[key] for found, _ in everyone]) for key in times},
            # A rank whose own gradient was not finite does not count; a true overflow of the sum counts on all.
            wire_overflows=min(count for _, count in everyone),
            window_steps=len(self._watch.steps),
            evidence=self._evidence(seen.num_steps),
            gradients=self._watch.gradients(),
        )

    def _evidence(self, alike: int) -> str:
        assert self._hook is not None
        seen = len(self._watch.steps)
        if not seen:
            return "DDP's hook; no step was profiled: set measure.warmup_steps to 1 or more"
        parts = [
            f"DDP's communication hook noted each bucket's way in {alike} warm-up steps",
            "a bucket's time runs from handing over to its return, waiting for stragglers included",
        ]
        if alike < seen:
            parts.append(f"{seen - alike} more steps had other buckets")
        if self._backend == "gloo":
            parts.append("bytes by the formula of Gloo's ring")
        else:
            parts.append("bytes unknown: NCCL chooses the algorithm")
        return "; ".join(filter(None, [*parts, self._hook.compression_text]))

    def finish_exchange(self) -> None:
        """Done inside `backward()`."""
        self._watch.exchange_ended()
        if self._hook is not None:
            self._hook.settle_step()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """One all-reduce a tensor; outside of training steps its cost does not matter."""
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self._place.size

    def gather(self, value: Any) -> list[Any]:
        return gather_over_torch(value, self._place.size, self._device if self._backend == "nccl" else None)

    def barrier(self) -> None:
        dist.barrier()

    def settings(self) -> list[Setting]:
        """Back-end and bucket size; the latter as DDP itself reports it."""
        found = [
            Setting(
                key="engine.ddp.backend",
                requested=None if self._settings.backend == "auto" else self._settings.backend,
                effective=str(dist.get_backend()),
                evidence="torch.distributed.get_backend()",
            )
        ]
        if self._module is not None:
            found += [self._fusion_setting(), *self._flags(self._module)]
        if self._hook is not None:
            found.append(
                Setting(
                    key="sync.wire",
                    requested=self._wire,
                    effective=self._hook.wire_in_force if self._place.size > 1 else None,
                    evidence=self._hook.compression_text or "the hook that DDP called for every bucket",
                )
            )
        return found

    def communicators(self) -> TorchCommunicators:
        return TorchCommunicators()

    def _fusion_setting(self) -> Setting:
        assert self._module is not None
        cap = int(_logged(self._module)["bucket_cap_bytes"])
        return Setting(
            key="sync.fusion",
            requested=ENGINES["ddp"].fusion if self._fusion == "auto" else self._fusion,
            effective="none" if cap == 1 else exact_bytes(cap),
            evidence="bucket_cap_bytes of DDP's logging data",
        )

    def _flags(self, module: nn.parallel.DistributedDataParallel) -> list[Setting]:
        """What was asked for of DDP beyond its defaults."""
        found, asked = [], self._settings
        if asked.gradient_as_bucket_view:
            seen = self._hook.seen_as_views if self._hook is not None else None
            is_view, how = module.gradient_as_bucket_view, "DDP's own flag; no bucket was watched"
            if seen is not None:
                views, gradients = seen
                is_view, how = views == gradients > 0, f"{views} of {gradients} gradients lay within their buckets"
            key = "engine.ddp.gradient_as_bucket_view"
            found.append(Setting(key=key, requested=True, effective=is_view, evidence=how))
        if asked.static_graph:
            found.append(
                Setting(
                    key="engine.ddp.static_graph",
                    requested=True,
                    effective=bool(_logged(module)["static_graph"]),
                    evidence="DDP's logging data",
                )
            )
        return found

    def stop(self) -> None:
        if dist.is_initialized():
            # Gloo's worker thread may still hold the last callback, and with it the group. Were that the last
            # reference, the thread would end by waiting for itself, and the process with it (std::system_error).
            self._left = dist.distributed_c10d._get_default_group()
            dist.destroy_process_group()


def _logged(module: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    found: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
