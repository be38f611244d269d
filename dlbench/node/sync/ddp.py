"""PyTorch's DistributedDataParallel, as it comes, with its exposed exchange made visible.

DDP waits for its last bucket inside `backward()`. The communication hook is PyTorch's own for the wire format; around
it dlbench notes when the last bucket is handed over, which is when the backward pass of this rank has computed its last
gradient. What `backward()` takes from there is exposed exchange. In watched steps it also notes when each bucket went
and when it was back; for fp16 it looks in every step whether a sum left the range of fp16 (65,504).

PowerSGD (Vogels et al. 2019) sends three all-reduces a bucket, the later ones from callbacks of the earlier. Under
Gloo those callbacks run on its few worker threads and wait there: with two buckets under way they would start
collectives in an order that differs from rank to rank, or wait for a thread that never comes. There the hook
therefore waits for each bucket, and nothing of PowerSGD overlaps with the backward pass.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from dlbench.node.sync.groups import TorchGroup
from dlbench.node.sync.timing import (
    BackwardWatch,
    MessageInFlight,
    covered,
    layout,
    median,
    messages_of,
    ring_bytes,
    spans,
    tree_bytes,
)
from dlbench.node.sync.torch_ranks import TorchRanks
from dlbench.node.sync.wire import OverflowCount
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO
from dlbench.units import exact_bytes

if TYPE_CHECKING:
    from dlbench.node.sync.sharded_update import ShardedUpdate  # torch's takes a second to import

POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP rebuilds its buckets after the first, and error feedback needs them to stay."""

_CASTS: dict[str, tuple[Hook, torch.dtype]] = {
    "fp32": (default_hooks.allreduce_hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
}


class DdpEngine(TorchRanks):
    """torch.distributed over gloo or NCCL."""

    marks_backward = True

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._settings = plan.engine.ddp
        self._fusion = plan.sync.library_fusion
        self._powersgd_rank = plan.sync.powersgd_rank
        self._module: nn.parallel.DistributedDataParallel | None = None
        self._watch = BackwardWatch(device)
        self._hook: WatchedHook | None = None
        self._sharded: ShardedUpdate | None = None
        self._state_bytes: list[int] = []  # Of the optimizer, by rank, at the end.

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Wraps the model; DDP broadcasts rank 0's parameters and buffers itself."""
        device_ids = [self._device.index or 0] if self._device.type == "cuda" else None
        # Left out, DDP begins with a small first bucket (1 MiB); given, even its own default makes that one as large.
        # One that is full at one byte holds one parameter.
        cap = 1 if self._fusion.rule == "none" else self._fusion.bytes
        module = nn.parallel.DistributedDataParallel(
            model,
            device_ids=device_ids,
            bucket_cap_mb=None if cap is None else cap / 2**20,
            # BatchNorm statistics stay local to a rank, as Horovod leaves them: equal work for both engines.
            broadcast_buffers=False,
            # Gradients are None when a backward pass begins: each is still copied into its bucket, and then becomes the
            # view; nothing is copied back (reducer.cpp of torch 2.13, `mark_variable_ready_dense`).
            gradient_as_bucket_view=self._settings.views_buckets(on_gpu=self._device.type == "cuda"),
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
        """From the next step on gradients are averaged over the ranks of a group alone."""
        assert self._hook is not None
        self._hook.average_within(group)

    def begin_backward(self) -> None:
        self._watch.begin()

    def watch(self, on: bool) -> None:
        if on and self._place.size > 1:
            self._watch.open()
            return
        self._watch.close()
        if self._sharded is not None:
            self._sharded.restart()

    def waits(self) -> CollectiveWaits | None:
        return None if self._sharded is None else self._sharded.waits()

    def whole_state(self, model: nn.Module, optimizer: Optimizer) -> WholeState:
        if self._sharded is None:
            return super().whole_state(model, optimizer)
        values, steps = self._sharded.whole()
        return WholeState(model=model.state_dict(), values=values, group_steps=steps)

    def load_whole(self, model: nn.Module, optimizer: Optimizer, whole: WholeState) -> None:
        if self._sharded is None:
            super().load_whole(model, optimizer, whole)
            return
        own = self._sharded.own_values(whole.values)
        super().load_whole(model, self._sharded.optim, dataclasses.replace(whole, values=own))
        self._sharded.adopt()

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        return super().planned_groups(model, self._sharded or optimizer)

    def message_spans(self) -> list[MessageSpan]:
        return spans([step.messages for step in self._watch.steps], self._watch.clock)

    def exchange_result(self) -> ExchangeResult | None:
        """Buckets as the hook saw them; times are means over ranks of medians over steps."""
        self._watch.close()
        if self._place.size == 1 or self._hook is None:
            return None
        seen = summarise(self._watch)
        times = seen.times | {"backward_s": self._watch.backward_s()}
        nodes = self._place.num_nodes
        everyone = self.gather((times, self._hook.overflows.total, self._sharded.share() if self._sharded else None))
        shares = [share for *_, share in everyone if share is not None]  # Of every rank, or of none.
        self._state_bytes = [kept for *_, kept in shares]
        inside = across = None
        if seen.num_steps and self._backend == "gloo":
            # Gloo's all-reduce is a ring (allreduce.cc); NCCL chooses by itself.
            inside, across = ring_bytes(seen.wire_bytes, ranks=self._place.size, groups=nodes)
            if shares:
                sent = tree_bytes([size for _, size, _ in shares], groups=nodes)
                inside, across = inside + sent[0], across + sent[1]
        how = f"{self._backend} broadcast"
        sends = (Message(num_bytes=size, num_tensors=num, method=how) for num, size, _ in shares if num)
        known = {key: [found[key] for found, *_ in everyone if found[key] is not None] for key in times}
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="flat",
            fusion=str(self._fusion_setting().effective),
            wire=self._hook.wire_in_force,
            group_size=self._place.local_size,
            num_groups=self._place.num_nodes,
            messages=(*seen.messages, *sends),
            bytes_inside=inside,
            bytes_across=across,
            **{key: statistics.fmean(values) if values else None for key, values in known.items()},
            # A rank whose own gradient was not finite does not count; a true overflow of the sum counts on all.
            wire_overflows=min(count for _, count, _ in everyone),
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
            if self._sharded is not None:
                parts.append("and of its binomial tree for the broadcasts of updated parameters")
        else:
            parts.append("bytes unknown: NCCL chooses the algorithm")
        return "; ".join(filter(None, [*parts, self._hook.compression_text]))

    def finish_exchange(self) -> None:
        self._watch.exchange_ended()
        if self._hook is not None:
            self._hook.overflows.settle_step()

    def settings(self) -> list[Setting]:
        found = super().settings()
        if self._module is not None:
            found += [self._fusion_setting(), *self._flags(self._module)]
        if self._hook is not None:
            wire = self._hook.wire_in_force if self._place.size > 1 else None
            how = self._hook.compression_text or "the hook that DDP called for every bucket"
            found += settings_of(("sync.wire", self._wire, wire, how))
        if self._settings.shard_optimizer:
            from dlbench.node.sync.sharded_update import sharding_setting

            found.append(sharding_setting(self._state_bytes))
        return found

    def _fusion_setting(self) -> Setting:
        assert self._module is not None
        cap = int(_logged(self._module)["bucket_cap_bytes"])
        asked = ENGINES["ddp"].fusion if self._fusion == AUTO else self._fusion
        effective, how = "none" if cap == 1 else exact_bytes(cap), "bucket_cap_bytes of DDP's logging data"
        return settings_of(("sync.fusion", str(asked), effective, how))[0]

    def _flags(self, module: nn.parallel.DistributedDataParallel) -> list[Setting]:
        asked, seen = self._settings, self._hook.as_views if self._hook is not None else {}
        is_view, how = module.gradient_as_bucket_view, "DDP's own flag; no bucket was watched"
        if seen:
            views, gradients = (sum(column) for column in zip(*seen.values(), strict=True))
            is_view, how = views == gradients > 0, f"{views} of {gradients} gradients lay within their buckets"
        found = settings_of(("engine.ddp.gradient_as_bucket_view", asked.gradient_as_bucket_view, is_view, how))
        if asked.static_graph:
            is_static = bool(_logged(module)["static_graph"])
            found += settings_of(("engine.ddp.static_graph", True, is_static, "DDP's logging data"))
        return found


def _logged(module: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    found: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]


class WatchedHook:
    """The hook of one module. `watch`: hears of every bucket while its window is open. `mark_backward`: called when the
    last bucket is handed over.
    """

    def __init__(
        self, wire: str, powersgd_rank: int, backend: str, watch: BackwardWatch, mark_backward: Callable[[], None]
    ) -> None:
        self._wire = wire
        self._backend = backend
        self._watch = watch
        self._mark_backward = mark_backward
        group = dist.distributed_c10d._get_default_group()
        self.overflows = OverflowCount()
        self.as_views: dict[int, tuple[int, int]] = {}
        """By bucket: gradients that lay within it, and all that were looked at."""
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
        slot = self.overflows.begin(bucket.buffer()) if is_checked else None
        own = _kept_share(bucket) if is_checked and slot is None else list[torch.Tensor]
        sent = self._sent(bucket) if self._watch.is_open else None
        if bucket.is_last():
            self._mark_backward()
            self._watch.backward_ended()
        before = self._compressed
        future = self._inner(self._state, bucket)
        if sent is not None and self._powersgd is not None:
            elements = self._compressed - before
            if elements:  # none in the steps before it begins
                sent.wire_bytes = elements * torch.float32.itemsize
                sent.method = f"{self._backend} all-reduces of PowerSGD"
        if self._powersgd is not None and self._backend == "gloo":
            future.wait()
        if sent is None and not is_checked:
            return future

        def arrived(done: Future) -> torch.Tensor:
            if sent is not None:
                sent.done = self._watch.clock.mark()
            result = done.value()
            if is_checked:
                self.overflows.end(slot, result, own)
            return result

        return future.then(arrived)

    def average_within(self, group: TorchGroup) -> None:
        """Buckets from now on; not for PowerSGD, whose error feedback is of all ranks."""
        self._state = group.process_group

    @property
    def wire_in_force(self) -> str:
        """What was done to the buckets, as far as it is known."""
        if self._powersgd is None:
            return str(self._type).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        before, after = self._powersgd.total_numel_before_compression, self._compressed
        return "powersgd" if after < before else "fp32"

    @property
    def compression_text(self) -> str:
        """PowerSGD's own count of elements before and after; empty for other formats."""
        if self._powersgd is None:
            return ""
        before, after = self._powersgd.total_numel_before_compression, self._compressed
        if before == 0:
            return f"PowerSGD begins after {POWERSGD_START} steps, and the run ended before"
        return f"PowerSGD sent {after} elements for {before}, by its own count"

    @property
    def _compressed(self) -> int:
        return 0 if self._powersgd is None else int(self._powersgd.total_numel_after_compression)

    def _sent(self, bucket: GradBucket) -> MessageInFlight:
        buffer = bucket.buffer()
        size = torch.float32.itemsize if self._powersgd is not None else self._type.itemsize
        sent = MessageInFlight(
            num_bytes=buffer.nbytes,
            num_tensors=len(bucket.gradients()),
            wire_bytes=buffer.numel() * size,
            method=f"{self._backend} all-reduce",
            handed=self._watch.clock.mark(),
        )
        self._watch.hand_over(sent)
        places = [p.grad.data_ptr() for p in bucket.parameters() if p.grad is not None]
        begin = buffer.data_ptr()
        within = [begin <= place < begin + buffer.nbytes for place in places]
        self.as_views[bucket.index()] = sum(within), len(places)
        return sent


def _kept_share(bucket: GradBucket) -> Callable[[], Sequence[torch.Tensor]]:
    """What shows later whether this rank's share of a bucket, which its own sum overwrites, was finite."""
    gradients = [p.grad for p in bucket.parameters() if p.grad is not None]
    places = {view.data_ptr() for view in bucket.gradients()}
    if not any(gradient.data_ptr() in places for gradient in gradients):
        return lambda: gradients  # these stay this rank's until later
    greatest = torch.linalg.vector_norm(bucket.buffer(), float("inf"))
    return lambda: [greatest]


def hook_for_ddp(watched: WatchedHook) -> Callable[[object, GradBucket], Future]:
    """A function that DDP accepts: it compares the annotations themselves, which here are texts."""

    def hook(state: object, bucket: GradBucket) -> Future:
        return watched(bucket)

    hook.__annotations__.update(bucket=GradBucket, **{"return": Future})
    return hook


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """The watched steps of one rank in which gradients were grouped as in the last one; medians over them."""

    num_steps: int
    messages: tuple[Message, ...]
    wire_bytes: float  # Of all vectors of a step that were exchanged.
    times: dict[str, float | None]  # Fields of `ExchangeResult`.


def summarise(watch: BackwardWatch) -> BucketSummary:
    """What the closed window saw; DDP rebuilds its buckets after the first step, so not all steps need be alike."""
    steps = [
        step
        for step in watch.steps
        if layout(step.messages) == layout(watch.steps[-1].messages)
        and all(sent.done is not None for sent in step.messages)
        and step.backward_end is not None
    ]
    between, last = watch.clock.between, steps[-1].messages if steps else []
    times = []
    for step in steps:
        ways = [(between(step.begin, p.handed), between(step.begin, p.done)) for p in step.messages]
        ready = between(step.begin, step.backward_end)
        times.append((covered(ways), covered(ways, begin=ready), covered(ways, end=ready)))
    return BucketSummary(
        num_steps=len(steps),
        messages=messages_of(last, [(step.begin, step.messages) for step in steps], watch.clock),
        wire_bytes=sum(sent.wire_bytes for sent in last),
        times={
            "communication_s": median(total for total, _, _ in times),
            "exposed_s": median(exposed for _, exposed, _ in times),
            "hidden_s": median(hidden for _, _, hidden in times),
        },
    )
