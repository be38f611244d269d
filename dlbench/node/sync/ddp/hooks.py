"""DDP's communication hook as dlbench registers it: PyTorch's own hook for the wire format, watched.

The hook tells when the last bucket is handed over, which is when the backward pass of this rank has computed its last
gradient. In watched steps it also notes when each bucket went and when it was back; for fp16 it looks in every step
whether a sum left the range of fp16 (65,504).

PowerSGD (Vogels et al. 2019) sends three all-reduces a bucket, the later ones from callbacks of the earlier. Under
Gloo those callbacks run on its few worker threads and wait there: with two buckets under way they would start
collectives in an order that differs from rank to rank, or wait for a thread that never comes. There the hook
therefore waits for each bucket, and nothing of PowerSGD overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dlbench.errors import EnvironmentLacksError
from dlbench.node.sync.gradient_times import BackwardWatch, Passage, WatchedStep, covered, median
from dlbench.node.sync.overflow import OverflowCount
from dlbench.records.exchange import Message

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]

POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP rebuilds its buckets after the first, and error feedback needs them to stay."""

_CASTS: dict[str, tuple[Hook, torch.dtype]] = {
    "fp32": (default_hooks.allreduce_hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
}


class WatchedHook:
    """The hook of one module.

    Args:
        wire: fp32, fp16, bf16 or powersgd.
        powersgd_rank: rank of the approximation.
        backend: gloo or nccl.
        watch: told of every bucket while its window is open.
        mark_backward: called when the last bucket is handed over.
    """

    def __init__(
        self, wire: str, powersgd_rank: int, backend: str, watch: BackwardWatch, mark_backward: Callable[[], None]
    ) -> None:
        self._wire = wire
        self._backend = backend
        self._watch = watch
        self._mark_backward = mark_backward
        group = dist.distributed_c10d._get_default_group()
        self._overflows = OverflowCount()
        self._as_views: dict[int, tuple[int, int]] = {}
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
        """Averages a bucket over ranks."""
        is_checked = self._wire == "fp16"
        slot = self._overflows.begin(bucket.buffer()) if is_checked else None
        own = _kept_share(bucket) if is_checked and slot is None else list[torch.Tensor]
        passage = self._passage(bucket) if self._watch.is_open else None
        if bucket.is_last():
            self._mark_backward()
            self._watch.backward_ended()
        before = self._compressed
        future = self._inner(self._state, bucket)
        if passage is not None and self._powersgd is not None:
            self._note_compression(passage, self._compressed - before)
        if self._powersgd is not None and self._backend == "gloo":
            future.wait()
        if passage is None and not is_checked:
            return future

        def arrived(done: Future) -> torch.Tensor:
            if passage is not None:
                passage.done = self._watch.clock.mark()
            result = done.value()
            if is_checked:
                self._overflows.end(slot, result, own)
            return result

        return future.then(arrived)

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

    def settle_step(self) -> None:
        """After the last bucket is back, on the stream that computes."""
        self._overflows.settle_step()

    @property
    def seen_as_views(self) -> tuple[int, int] | None:
        """Gradients that lay within their bucket, and all that were looked at; None where none was watched."""
        if not self._as_views:
            return None
        views, gradients = zip(*self._as_views.values(), strict=True)
        return sum(views), sum(gradients)

    def overflows(self) -> int:
        """Sums that were not finite though this rank's gradients were."""
        return self._overflows.total

    @property
    def _compressed(self) -> int:
        return 0 if self._powersgd is None else int(self._powersgd.total_numel_after_compression)

    def _passage(self, bucket: GradBucket) -> Passage:
        buffer = bucket.buffer()
        size = torch.float32.itemsize if self._powersgd is not None else self._type.itemsize
        passage = Passage(
            num_bytes=buffer.numel() * buffer.element_size(),
            num_tensors=len(bucket.gradients()),
            wire_bytes=buffer.numel() * size,
            method=f"{self._backend} all-reduce",
            handed=self._watch.clock.mark(),
        )
        self._watch.hand_over(passage)
        gradients = [p.grad for p in bucket.parameters() if p.grad is not None]
        self._as_views[bucket.index()] = sum(_lies_within(one, buffer) for one in gradients), len(gradients)
        return passage

    def _note_compression(self, passage: Passage, elements: int) -> None:
        if elements:  # none in the steps before it begins
            passage.wire_bytes = elements * torch.float32.itemsize
            passage.method = f"{self._backend} all-reduces of PowerSGD"


def _kept_share(bucket: GradBucket) -> Callable[[], Sequence[torch.Tensor]]:
    """What tells later whether this rank's share of a bucket, which its own sum overwrites, was finite."""
    gradients = [p.grad for p in bucket.parameters() if p.grad is not None]
    places = {view.data_ptr() for view in bucket.gradients()}
    if not any(gradient.data_ptr() in places for gradient in gradients):
        return lambda: gradients  # these stay this rank's until later
    greatest = torch.linalg.vector_norm(bucket.buffer(), float("inf"))
    return lambda: [greatest]


def _lies_within(gradient: torch.Tensor, buffer: torch.Tensor) -> bool:
    begin = buffer.data_ptr()
    return begin <= gradient.data_ptr() < begin + buffer.numel() * buffer.element_size()


def hook_for_ddp(watched: WatchedHook) -> Callable[[object, GradBucket], Future]:
    """A function that DDP accepts: it compares the annotations themselves, which here are texts."""

    def hook(state: object, bucket: GradBucket) -> Future:
        return watched(bucket)

    hook.__annotations__.update(bucket=GradBucket, **{"return": Future})
    return hook


def require_sum(wire: str, backend: str, device: torch.device, ranks: int) -> None:
    """Whether the back-end really sums this format; called by all ranks.

    Raises:
        EnvironmentLacksError: it does not.
    """
    if wire not in ("fp16", "bf16"):
        return
    kind = _CASTS[wire][1]
    ones = torch.full((8,), 1.5, dtype=kind, device=device)
    try:
        dist.all_reduce(ones)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentLacksError(
            f"sync.wire {wire}: {backend} of this torch does not sum it ({reason}); use fp32"
        ) from None
    if not torch.equal(ones.float().cpu(), torch.full((8,), 1.5 * ranks)) and ranks <= 64:
        raise EnvironmentLacksError(f"sync.wire {wire}: {backend} of this torch sums it wrongly; use fp32")


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """The watched steps of one rank in which gradients were grouped as in the last one; medians over them."""

    num_steps: int
    messages: tuple[Message, ...]
    wire_bytes: float
    """Of all vectors of a step that were exchanged."""
    communication_s: float | None
    exposed_s: float | None
    hidden_s: float | None


def summarise(watch: BackwardWatch) -> BucketSummary:
    """What the closed window saw; DDP rebuilds its buckets after the first step, so not all steps need be alike."""
    steps = _alike(watch.steps)
    between = watch.clock.between
    times = []
    for step in steps:
        ways = [(between(step.begin, p.handed), between(step.begin, p.done)) for p in step.passages]
        ready = between(step.begin, step.backward_end)
        times.append((covered(ways), covered(ways, begin=ready), covered(ways, end=ready)))
    return BucketSummary(
        num_steps=len(steps),
        messages=tuple(_message(watch, steps, number) for number in range(len(steps[-1].passages) if steps else 0)),
        wire_bytes=sum(passage.wire_bytes for passage in steps[-1].passages) if steps else 0.0,
        communication_s=median(total for total, _, _ in times),
        exposed_s=median(exposed for _, exposed, _ in times),
        hidden_s=median(hidden for _, _, hidden in times),
    )


def _message(watch: BackwardWatch, steps: Sequence[WatchedStep], number: int) -> Message:
    between = watch.clock.between
    ways = [(step.begin, step.passages[number]) for step in steps]
    last = ways[-1][1]
    # DDP hands a bucket over when its last gradient is there.
    handed_s = median(between(begin, passage.handed) for begin, passage in ways)
    return Message(
        num_bytes=last.num_bytes,
        num_tensors=last.num_tensors,
        method=last.method,
        ready_s=handed_s,
        start_s=handed_s,
        exchange_s=median(between(passage.handed, passage.done) for _, passage in ways),
    )


def _alike(steps: Sequence[WatchedStep]) -> list[WatchedStep]:
    """The steps with the buckets of the last one, every bucket back."""
    if not steps:
        return []
    return [
        step
        for step in steps
        if _layout(step) == _layout(steps[-1])
        and all(passage.done is not None for passage in step.passages)
        and step.backward_end is not None
    ]


def _layout(step: WatchedStep) -> list[tuple[int, int, str]]:
    return [(passage.num_bytes, passage.num_tensors, passage.method) for passage in step.passages]
