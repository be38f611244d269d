"""PyTorch's DistributedDataParallel, unchanged, with its exposed exchange measured by a communication hook."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim import Optimizer

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import MessageSpan, WholeState, settings_of
from dlbench.node.sync.run_store import TorchGroup, TorchRanks
from dlbench.node.sync.timing import (
    BackwardWatch,
    MessageInFlight,
    covered,
    layout,
    mean_over_ranks,
    median,
    messages_of,
    ring_bytes,
    spans,
    tree_bytes,
)
from dlbench.node.sync.wire import OverflowCount
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO
from dlbench.units import exact_bytes

if TYPE_CHECKING:
    from dlbench.node.sync.fsdp.shared_layers import SlabLayers
    from dlbench.node.sync.sharded_update import ShardedUpdate  # torch's takes a second to import

POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP rebuilds its buckets after the first, and error feedback needs fixed buckets."""

_CASTS: dict[str, tuple[Hook, torch.dtype]] = {
    "fp32": (default_hooks.allreduce_hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
}


class DdpEngine(TorchRanks):
    """Exchanges gradients by DDP over gloo or NCCL."""

    marks_backward = True

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._plan, self._settings = plan, plan.engine.ddp
        self._fusion = plan.sync.library_fusion
        self._powersgd_rank = plan.sync.powersgd_rank
        self._module: nn.parallel.DistributedDataParallel | None = None
        self._watch = BackwardWatch(device)
        self._hook: WatchedHook | None = None
        self._sharded: ShardedUpdate | None = None
        self._slabs: SlabLayers | None = None  # Layers that compute on slabs of volumes; None: no rank shares volumes.
        self._slabs_evidence = (False, "")  # Whether all ranks sent the planes expected; rank 0's bytes in words.
        self._state_bytes: list[int] = []  # Bytes of optimizer state by rank, at the end of the run.

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Wraps the model; DDP broadcasts rank 0's parameters and buffers itself."""
        if self._plan.engine.spatial_ranks > 1:
            from dlbench.node.sync.fsdp.shared_layers import SlabLayers

            self._slabs = SlabLayers(self._plan, self._place, self._device, self.beat)
            self._slabs.divide(model)
        on_gpu = self._device.type == "cuda"
        device_ids = [self._device.index or 0] if on_gpu else None
        # Without a cap DDP begins with a small first bucket (1 MiB); with one, even its default, the first is as large
        # as the others.
        bucket_cap_mb = None
        if self._fusion.rule == "none":
            bucket_cap_mb = 1 / 2**20  # one byte: every bucket is full with one parameter
        elif self._fusion.bytes is not None:
            bucket_cap_mb = self._fusion.bytes / 2**20
        module = nn.parallel.DistributedDataParallel(
            model,
            device_ids=device_ids,
            bucket_cap_mb=bucket_cap_mb,
            # BatchNorm statistics stay local to a rank, as with Horovod: equal work for both engines.
            broadcast_buffers=False,
            # Gradients are None when a backward pass begins: each is still copied into its bucket, and then becomes the
            # view; nothing is copied back (reducer.cpp of torch 2.13, `mark_variable_ready_dense`).
            gradient_as_bucket_view=self._settings.views_buckets(on_gpu=on_gpu),
            static_graph=self._settings.static_graph,
        )
        self._watch.attach(model)
        self._hook = WatchedHook(self._wire, self._powersgd_rank, self._backend, self._watch, mark_backward)
        module.register_comm_hook(None, hook_for_ddp(self._hook))
        self._module = module
        if self._settings.shard_optimizer and self._place.size > 1:
            from dlbench.node.sync.sharded_update import ShardedUpdate

            optimizer = self._sharded = ShardedUpdate(optimizer, self._watch.clock)
        self._optimizer = optimizer
        return module, optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        assert self._module is not None
        return self._module.no_sync()

    def average_within(self, group: TorchGroup) -> None:
        assert self._hook is not None
        self._hook.average_within(group)

    def begin_backward(self) -> None:
        self._watch.begin()

    def watch(self, on: bool) -> None:
        if self._slabs is not None and on:
            self._slabs.watch.open({})
        elif self._slabs is not None:
            self._slabs.watch.close()
        if on and self._place.size > 1:
            self._watch.open()
            return
        self._watch.close()
        if self._sharded is not None:
            self._sharded.times.restart()

    def step(self, update: Callable[[Optimizer], object]) -> None:
        super().step(update)
        if self._slabs is not None:
            self._slabs.watch.end_step()

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._slabs is None else self._slabs.watch.paused()

    def waits(self) -> CollectiveWaits | None:
        if self._slabs is not None:
            return self._slabs.waits()
        return None if self._sharded is None else self._sharded.waits()

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        if self._sharded is None:
            return super().whole_state(model, optimizer)
        values, group_steps = self._sharded.whole()
        return WholeState(model=model.state_dict(), values=values, group_steps=group_steps)

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        if self._sharded is None:
            super().load_whole(model, optimizer, whole)
            return
        values = self._sharded.local_values(whole.values)
        super().load_whole(model, self._sharded.optim, dataclasses.replace(whole, values=values))
        self._sharded.adopt()

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> Sequence[list[torch.Tensor]]:
        return super().planned_groups(model, self._sharded or optimizer)

    def message_spans(self) -> list[MessageSpan]:
        return list(spans([step.messages for step in self._watch.steps], self._watch.clock))

    def exchange_result(self) -> ExchangeResult | None:
        """Returns the buckets that the hook saw; times are means over ranks of medians over steps."""
        self._watch.close()
        if self._place.size == 1 or self._hook is None:
            return None
        buckets = summarise(self._watch)
        times = buckets.times | {"backward_s": self._watch.backward_s()}
        nodes = self._place.num_nodes
        share = self._sharded.share() if self._sharded is not None else None
        slabs = self._slabs.evidence() if self._slabs is not None else None
        by_rank = self.gather((times, self._hook.overflows.total, share, slabs))
        shares = [share for *_, share, _ in by_rank if share is not None]  # of every rank, or of none
        self._state_bytes = [state_bytes for *_, state_bytes in shares]
        inside = across = None
        if buckets.num_steps and self._backend == "gloo":
            # Gloo's all-reduce is a ring (allreduce.cc); NCCL chooses by itself.
            inside, across = ring_bytes(buckets.wire_bytes, ranks=self._place.size, groups=nodes)
            if shares:
                inside_tree, across_tree = tree_bytes([size for _, size, _ in shares], groups=nodes)
                inside += inside_tree
                across += across_tree
            if slabs is not None:  # between ranks of one node
                inside += statistics.fmean(sent_bytes for *_, (sent_bytes, *_) in by_rank)
        broadcasts = [
            Message(num_bytes=size, num_tensors=num_tensors, method=f"{self._backend} broadcast")
            for num_tensors, size, _ in shares
            if num_tensors
        ]
        planes: list[Message] = []
        if self._slabs is not None and slabs is not None:
            planes = self._slabs.messages()
            self._slabs_evidence = all(is_expected for *_, (_, is_expected, _) in by_rank), slabs[2]
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="flat",
            fusion=str(self._fusion_setting().effective),
            wire=self._hook.wire_in_force,
            group_size=self._place.local_size,
            num_groups=self._place.num_nodes,
            messages=(*buckets.messages, *broadcasts, *planes),
            bytes_inside=inside,
            bytes_across=across,
            **mean_over_ranks(rank_times for rank_times, *_ in by_rank),
            wire_overflows=min(count for _, count, *_ in by_rank),
            window_steps=len(self._watch.steps),
            evidence=self._evidence(buckets.num_steps),
            gradients=self._watch.gradients(),
        )

    def _evidence(self, equal_steps: int) -> str:
        assert self._hook is not None
        watched_steps = len(self._watch.steps)
        if not watched_steps:
            return "DDP's hook; no step was profiled: set measure.warmup_steps to 1 or more"
        parts = [
            f"DDP's communication hook timed each bucket in {equal_steps} warm-up steps",
            "a bucket's time runs from handing it over to its return and includes waiting for stragglers",
        ]
        if equal_steps < watched_steps:
            parts.append(f"{watched_steps - equal_steps} more steps had different buckets")
        if self._backend == "gloo":
            parts.append("bytes by the formula of Gloo's ring")
            if self._sharded is not None:
                parts.append("and by that of its binomial tree for the broadcasts of updated parameters")
        else:
            parts.append("bytes unknown: NCCL chooses the algorithm")
        return "; ".join(filter(None, [*parts, self._slabs_evidence[1], self._hook.compression_text]))

    def finish_exchange(self) -> None:
        self._watch.exchange_ended()
        if self._hook is not None:
            self._hook.overflows.settle_step()

    def settings(self) -> list[Setting]:
        settings = super().settings()
        if self._module is not None:
            settings += [self._fusion_setting(), *self._flags(self._module)]
        if self._hook is not None:
            wire = self._hook.wire_in_force if self._place.size > 1 else None
            how = self._hook.compression_text or "the hook that DDP called for every bucket"
            settings += settings_of(("sync.wire", self._wire, wire, how))
        if self._slabs is not None:
            (is_shared, how), requested = self._slabs_evidence, self._settings.spatial_ranks
            shared = requested if is_shared else 1
            settings += settings_of(("engine.ddp.spatial_ranks", requested, shared, how))
        if self._settings.shard_optimizer:
            from dlbench.node.sync.sharded_update import sharding_setting

            settings.append(sharding_setting(self._state_bytes))
        return settings

    def _fusion_setting(self) -> Setting:
        assert self._module is not None
        cap_bytes = int(_logging_data(self._module)["bucket_cap_bytes"])
        requested = ENGINES["ddp"].fusion if self._fusion == AUTO else self._fusion
        effective = "none" if cap_bytes == 1 else exact_bytes(cap_bytes)
        how = "bucket_cap_bytes of DDP's logging data"
        return settings_of(("sync.fusion", str(requested), effective, how))[0]

    def _flags(self, module: nn.parallel.DistributedDataParallel) -> list[Setting]:
        requested = self._settings
        is_view, how = module.gradient_as_bucket_view, "DDP's own flag; no bucket was watched"
        if self._hook is not None and self._hook.view_counts:
            views, gradients = map(sum, zip(*self._hook.view_counts.values(), strict=True))
            is_view, how = views == gradients > 0, f"{views} of {gradients} gradients were inside their buckets"
        settings = settings_of(("engine.ddp.gradient_as_bucket_view", requested.gradient_as_bucket_view, is_view, how))
        if requested.static_graph:
            is_static = bool(_logging_data(module)["static_graph"])
            settings += settings_of(("engine.ddp.static_graph", True, is_static, "DDP's logging data"))
        return settings


def _logging_data(module: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    logging_data: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return logging_data


Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]


class WatchedHook:
    """A communication hook that records buckets in an open `watch`, and calls `mark_backward` at the last bucket."""

    def __init__(
        self, wire: str, powersgd_rank: int, backend: str, watch: BackwardWatch, mark_backward: Callable[[], None]
    ) -> None:
        self._wire = wire
        self._backend = backend
        self._watch = watch
        self._mark_backward = mark_backward
        group = dist.distributed_c10d._get_default_group()
        self.overflows = OverflowCount()
        self.view_counts: dict[int, tuple[int, int]] = {}
        """By bucket: number of gradients that are views of it, and of gradients that were checked."""
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        if wire == "powersgd":
            self._inner: Hook = powerSGD_hook.powerSGD_hook
            self._powersgd = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=POWERSGD_START
            )
            self._state: Any = self._powersgd
        else:
            self._inner, self._type = _CASTS[wire]
            self._state = group

    def __call__(self, bucket: GradBucket) -> Future:
        is_checked = self._wire == "fp16"
        slot: int | None = None
        local_share: Callable[[], Sequence[torch.Tensor]] = list[torch.Tensor]
        if is_checked:
            slot = self.overflows.begin(bucket.buffer())
            if slot is None:
                local_share = _local_share(bucket)
        message: MessageInFlight | None = None
        if self._watch.is_open:
            message = self._hand_over(bucket)
        if bucket.is_last():  # DDP waits for it inside `backward()`: the rest of that call is exposed exchange
            self._mark_backward()
            self._watch.backward_ended()
        compressed_before = self._compressed
        future = self._inner(self._state, bucket)
        if message is not None and self._powersgd is not None:
            elements = self._compressed - compressed_before
            if elements:  # none in the steps before PowerSGD begins
                message.wire_bytes = elements * torch.float32.itemsize
                message.method = f"{self._backend} all-reduces of PowerSGD"
        if self._powersgd is not None and self._backend == "gloo":
            # PowerSGD (Vogels et al. 2019) sends later all-reduces from callbacks of earlier ones, which wait on Gloo's
            # few worker threads: with two buckets in flight ranks would deadlock.
            future.wait()
        if message is None and not is_checked:
            return future

        def arrived(done: Future) -> torch.Tensor:
            if message is not None:
                message.done = self._watch.clock.mark()
            averaged = done.value()
            if is_checked:
                self.overflows.end(slot, averaged, local_share)
            return averaged

        return future.then(arrived)

    def average_within(self, group: TorchGroup) -> None:
        """Averages later buckets over `group`; not for PowerSGD, whose error feedback belongs to all ranks."""
        self._state = group.process_group

    @property
    def wire_in_force(self) -> str:
        if self._powersgd is None:
            return str(self._type).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        before, after = self._powersgd.total_numel_before_compression, self._compressed
        return "powersgd" if after < before else "fp32"

    @property
    def compression_text(self) -> str:
        """Elements before and after compression, counted by PowerSGD; empty for other formats."""
        if self._powersgd is None:
            return ""
        before, after = self._powersgd.total_numel_before_compression, self._compressed
        if before == 0:
            return f"PowerSGD begins after {POWERSGD_START} steps, and the run ended before"
        return f"PowerSGD sent {after} elements for {before}, by its own count"

    @property
    def _compressed(self) -> int:
        if self._powersgd is None:
            return 0
        return int(self._powersgd.total_numel_after_compression)

    def _hand_over(self, bucket: GradBucket) -> MessageInFlight:
        buffer = bucket.buffer()
        wire_type = torch.float32 if self._powersgd is not None else self._type
        message = MessageInFlight(
            num_bytes=buffer.nbytes,
            num_tensors=len(bucket.gradients()),
            wire_bytes=buffer.numel() * wire_type.itemsize,
            method=f"{self._backend} all-reduce",
            handed=self._watch.clock.mark(),
        )
        self._watch.hand_over(message)
        addresses = [p.grad.data_ptr() for p in bucket.parameters() if p.grad is not None]
        begin = buffer.data_ptr()
        views = [address for address in addresses if begin <= address < begin + buffer.nbytes]
        self.view_counts[bucket.index()] = len(views), len(addresses)
        return message


def _local_share(bucket: GradBucket) -> Callable[[], Sequence[torch.Tensor]]:
    """Returns tensors that show later whether this rank's share of a bucket, which the sum overwrites, was finite."""
    gradients = [p.grad for p in bucket.parameters() if p.grad is not None]
    view_addresses = {view.data_ptr() for view in bucket.gradients()}
    if not any(gradient.data_ptr() in view_addresses for gradient in gradients):
        return lambda: gradients  # the sum leaves them alone until the end of the backward pass
    greatest = torch.linalg.vector_norm(bucket.buffer(), float("inf"))
    return lambda: [greatest]


def hook_for_ddp(watched: WatchedHook) -> Callable[[object, GradBucket], Future]:
    """Returns a function that DDP accepts: DDP compares annotations by identity, which here are texts."""

    def hook(state: object, bucket: GradBucket) -> Future:
        return watched(bucket)

    hook.__annotations__.update(bucket=GradBucket, **{"return": Future})
    return hook


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """Medians over the watched steps of one rank in which gradients were grouped as in the last step."""

    num_steps: int
    messages: tuple[Message, ...]
    wire_bytes: float  # Bytes of all exchanged vectors of a step.
    times: dict[str, float | None]  # Seconds by field of `ExchangeResult`.


def summarise(watch: BackwardWatch) -> BucketSummary:
    """Summarises a closed window; DDP rebuilds its buckets after the first step, so steps may differ."""
    steps = [
        step
        for step in watch.steps
        if layout(step.messages) == layout(watch.steps[-1].messages)
        and step.backward_end is not None
        and all(message.done is not None for message in step.messages)
    ]
    between = watch.clock.between
    last_messages = steps[-1].messages if steps else []
    total_s, exposed_s, hidden_s = list[float](), list[float](), list[float]()
    for step in steps:
        intervals = [(between(step.begin, sent.handed), between(step.begin, sent.done)) for sent in step.messages]
        backward_s = between(step.begin, step.backward_end)
        total_s.append(covered(intervals))
        exposed_s.append(covered(intervals, begin=backward_s))
        hidden_s.append(covered(intervals, end=backward_s))
    return BucketSummary(
        num_steps=len(steps),
        messages=tuple(messages_of(last_messages, [(step.begin, step.messages) for step in steps], watch.clock)),
        wire_bytes=sum(message.wire_bytes for message in last_messages),
        times={"communication_s": median(total_s), "exposed_s": median(exposed_s), "hidden_s": median(hidden_s)},
    )
