"""The messages of a step at a rank count, their prices, and the time at which the last one has ended. Fusion depends on
the rank count if the engine decides by times: `own:mgwfbp` by prices, Horovod by cycles.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.perfmodels.lines import best_merge, fit_line, merged
from dlbench.perfmodels.predictions import Features, features
from dlbench.perfmodels.schedules import Layout, level_chunks
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.comm import LineCost, NetworkModel
from dlbench.specs.sync import INT8_BLOCK, Fusion

ALGORITHM = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""The algorithm by which an exchange is priced; other exchanges have no model."""

FASTEST = "the faster of ring and double-binary-tree"
"""The algorithm of a library that chooses by its own table of costs, as NCCL does between these two."""

WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # Bytes of an element on the wire.
_PAIR_BYTES = 8  # Bytes of a value and its index, for wire topk.
_HALVINGS = 50  # Bisections of a scale of costs, for far more digits than are printed.
_GRID = 16  # Sizes of the line by which messages are merged.

Price = Callable[[float], "Array"]
"""Seconds of a message by bytes of fp32 gradients: by the fitted costs, then by each draw of the network."""


class NoModelError(Exception):
    """The exchange has no model, or was not recorded; the message names the reason."""


@dataclass(frozen=True, kw_only=True)
class ExchangeMethod:
    """The exchange of gradients."""

    exchange: str
    fusion: Fusion | None  # None: the messages of the run are kept.
    wire: str
    group_size: int
    topk_density: float | None = None  # Share of entries that wire topk sends.
    by: tuple[str, str] = ("", "")  # Engine and carrier, which determine the chunks of hierarchical.
    chunks: Mapping[float, int] = field(default_factory=dict)
    """Chunks of the messages of the run, by bytes of fp32 gradients; other messages get those of this dlbench."""


def method_of_run(result: ExchangeResult, engine: str) -> ExchangeMethod:
    """Returns the exchange of gradients that a run used."""
    return ExchangeMethod(
        exchange=result.exchange,
        fusion=None,
        wire=result.wire,
        group_size=result.group_size,
        by=(engine, result.carrier),
        chunks=result.chunks,
    )


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """The fusion of Horovod."""

    threshold_bytes: float  # Most bytes of a message, unless one gradient has more.
    cycle_s: float  # Least time between the starts of two messages, seconds.


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages of a step, in the order of sending."""

    sizes: tuple[float, ...]  # Bytes of fp32 gradients.
    ready_s: tuple[float, ...] | None  # Seconds after the start of the backward pass; None: not recorded.
    backward_s: float  # Length of that backward pass, seconds.


def priced_as(method: ExchangeMethod) -> str:
    """Returns the algorithm by which an exchange is priced. Raises `NoModelError`: it or its format has no model."""
    algorithm = ALGORITHM.get(method.exchange)
    if algorithm is None or not (method.wire in WIRE_BYTES or (method.wire == "topk" and method.topk_density)):
        raise NoModelError(f"there is no cost model for exchange {method.exchange} with wire {method.wire}")
    return algorithm


def loads_of_message(
    network: NetworkModel, layout: Layout, method: ExchangeMethod, algorithm: str, num_bytes: float
) -> Features:
    """Returns the loads of a message, by bytes of fp32 gradients. Raises `NoModelError`: a level was not measured."""
    if algorithm == FASTEST:
        ring = loads_of_message(network, layout, method, "ring", num_bytes)
        tree = loads_of_message(network, layout, method, "double-binary-tree", num_bytes)
        return min(ring, tree, key=lambda loads: loads.seconds(network))
    elements = max(1, math.ceil(num_bytes / 4))
    try:
        if method.wire == "topk":
            entries = max(1, round(elements * (method.topk_density or 0.0)))
            # As `is_dense_cheaper` of dlbench.node.sync.wire decides: a dense ring, where it sends fewer bytes.
            if 2 * elements * 4 >= layout.ranks * entries * _PAIR_BYTES:
                size = layout.ranks * entries * _PAIR_BYTES
                return features("all-gather", "ring", size, layout, network, element_bytes=_PAIR_BYTES)
        width = WIRE_BYTES.get(method.wire, 4)
        size, chunks = elements * width, None
        if method.wire == "int8":
            # An all-to-all and an all-gather of shares send as many and as large messages as a ring.
            algorithm = "ring"
            size += 4 * math.ceil(elements / INT8_BLOCK)
        if method.exchange == "hierarchical":
            chunks = level_chunks(*method.by, layout, size)
            if layout.num_groups > 1:
                chunks = method.chunks.get(num_bytes) or chunks
        return features("allreduce", algorithm, size, layout, network, element_bytes=width, chunks=chunks)
    except UserError as error:
        raise NoModelError(str(error)) from None


def price_of(network: NetworkModel, layout: Layout, method: ExchangeMethod, algorithm: str) -> Price:
    """Returns the price of messages by one algorithm. It raises `NoModelError` as `loads_of_message` does."""

    @functools.cache
    def price(num_bytes: float) -> Array:
        loads = loads_of_message(network, layout, method, algorithm, num_bytes)
        return np.array([loads.seconds(network), *loads.drawn(network)])

    return price


def messages_of(
    result: ExchangeResult,
    fusion: Fusion | None,
    seconds: Callable[[float], float],
    ranks: int,
    *,
    backward_s: float | None = None,
    cycle: Cycle | None = None,
) -> Messages:
    """Returns the messages of a step. `seconds`: price of a message, for fusion by times. `backward_s`: backward pass
    to which ready times are scaled; None: the run's. Raises `NoModelError`: the run recorded too little.
    """
    if fusion is None and cycle is None:
        sizes = [float(message.num_bytes) for message in result.of_gradients]
        ready_times = [message.ready_s for message in result.of_gradients if message.ready_s is not None]
    else:
        order = sorted(result.gradients, key=lambda gradient: gradient.ready_s)
        sizes, ready_times = [float(gradient.num_bytes) for gradient in order], [gradient.ready_s for gradient in order]
    if not sizes:
        raise NoModelError("the run does not report its messages, or when its gradients were ready")
    run_backward_s = result.backward_s
    if run_backward_s is None:
        run_backward_s = max(ready_times, default=0.0)
    if backward_s is None:
        backward_s = run_backward_s
    if len(ready_times) != len(sizes):
        return Messages(sizes=tuple(sizes), ready_s=None, backward_s=backward_s)
    ready = [0.0] * len(sizes)
    if run_backward_s > 0:
        ready = [ready_s * backward_s / run_backward_s for ready_s in ready_times]
    if cycle is not None:
        sizes, ready = _by_cycles(sizes, ready, seconds, cycle)
    elif fusion is not None and fusion.rule != "none":
        sizes, ready = _fused(fusion, sizes, ready, seconds, ranks)
    return Messages(sizes=tuple(sizes), ready_s=tuple(ready), backward_s=backward_s)


def _fused(
    fusion: Fusion, sizes: Sequence[float], ready: Sequence[float], seconds: Callable[[float], float], ranks: int
) -> tuple[list[float], list[float]]:
    if fusion.rule == "single":
        return [sum(sizes)], [max(ready)]
    groups: Sequence[int]
    if fusion.rule == "mgwfbp":
        # Messages in the order of sending may be ready out of order; one that is ready earlier has to wait.
        ready = list(itertools.accumulate(ready, max))
        low, high = min(sizes), sum(sizes)
        line = LineCost(name="one message", startup_s=seconds(low), per_byte_s=0.0, ranks=ranks)
        if high > low:
            grid = [round(low * (high / low) ** (i / (_GRID - 1))) for i in range(_GRID)]
            line = fit_line("merging", ranks, grid, [seconds(size) for size in grid])
        groups = best_merge(sizes, ready, line)
    elif fusion.bytes is None:
        raise NoModelError(f"fusion {fusion} has no model")
    else:
        counts: list[int] = []
        filled_bytes: float = fusion.bytes
        for size in sizes:
            # A bucket is closed by the gradient that fills it, as in DDP (compute_bucket_assignment_by_size).
            if filled_bytes >= fusion.bytes:
                counts.append(0)
                filled_bytes = 0.0
            counts[-1] += 1
            filled_bytes += size
        groups = counts
    merged_sizes, merged_ready = merged(groups, sizes, ready)
    return list(merged_sizes), list(merged_ready)


def ready_at(messages: Messages, computing: Mapping[str, Array]) -> list[Array]:
    """Returns when messages are ready on a median rank, seconds into the step; if unknown, after the backward pass."""
    shares = [1.0] * len(messages.sizes)
    if messages.ready_s is not None and messages.backward_s > 0:
        shares = [min(1.0, ready_s / messages.backward_s) for ready_s in messages.ready_s]
    return [computing["input"] + computing["forward"] + share * computing["backward"] for share in shares]


def last_end(ready: Sequence[Array | float], costs: Sequence[Array]) -> Array:
    """Returns when the last message ends: each begins when it is ready and the one before has ended."""
    free: Array = np.full_like(costs[0], -math.inf)
    for start, cost in zip(ready, costs, strict=True):
        free = np.maximum(free, start) + cost
    return free


def bisected(function: Callable[[Array], Array], target: Array, low: float, high: float) -> tuple[Array, Array]:
    """Returns the ends between which a growing function reaches the target, by bisection from `low` and `high`."""
    below, above = np.full_like(target, low), np.full_like(target, high)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        is_above = function(middle) > target
        below, above = np.where(is_above, below, middle), np.where(is_above, middle, above)
    return below, above


def _by_cycles(
    sizes: Sequence[float], ready: Sequence[float], seconds: Callable[[float], float], cycle: Cycle
) -> tuple[list[float], list[float]]:
    """Returns sizes and starts of Horovod's messages by cycles (Sergeev and Del Balso, arXiv 1802.05799, section 4)."""
    fused, starts = [], []
    index, now = 0, 0.0
    while index < len(sizes):
        now = max(now, ready[index])
        if cycle.cycle_s > 0:
            now = math.ceil(now / cycle.cycle_s - 1e-9) * cycle.cycle_s
        num_bytes = sizes[index]
        index += 1
        while index < len(sizes) and ready[index] <= now and num_bytes + sizes[index] <= cycle.threshold_bytes:
            num_bytes += sizes[index]
            index += 1
        fused.append(num_bytes)
        starts.append(now)
        now += max(seconds(num_bytes), cycle.cycle_s)
    return fused, starts
