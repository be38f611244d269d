"""What the messages of a step cost at a rank count, which messages there are, and what of them shows behind computing.

Messages go one after the other, each as soon as its gradients are there (`dlbench.perfmodels.overlap`), and each takes
what the fitted network says for its size, layout, format and algorithm. Which gradients travel together depends on the
rank count where the engine decides by times: `own:mgwfbp` merges by the price of a message, and Horovod sends, once its
channel is free and a cycle has passed, all gradients that are ready, up to its threshold.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.perfmodels import overlap
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.predictions import Features, features
from dlbench.perfmodels.schedules import Layout, level_chunks
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.comm import LineCost, NetworkModel
from dlbench.specs.sync import Fusion

ALGORITHM = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""Algorithm that stands for an exchange; the others have no model."""

FASTEST = "the faster of ring and double-binary-tree"
"""Of a library that chooses by its own table of costs, as NCCL does between these two."""

WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # Bytes of an element on the wire.
_PAIR_BYTES = 8  # A number and its place, of wire topk.


_HALVINGS = 50  # Of a scale of costs, or of its logarithm: to the last digit that is printed, and far beyond.
_GRID = 16  # Sizes through which a line is laid, where messages are merged by it.

Price = Callable[[float], "Array"]
"""Seconds of a message of that many bytes of fp32 gradients: by the fitted costs, then by each draw of the network."""


class NoModelError(Exception):
    """Something has no model, or was not recorded; the message says what."""


@dataclass(frozen=True, kw_only=True)
class ExchangeMethod:
    """How gradients go."""

    exchange: str
    fusion: Fusion | None  # None: the messages of the run stay as they were.
    wire: str
    group_size: int
    topk_density: float | None = None  # Share of entries that wire topk sends.
    by: tuple[str, str] = ("", "")  # Engine, and what moves the bytes, in words: where hierarchical is cut.
    chunks: Mapping[float, int] = field(default_factory=dict)
    """Of messages as they ran, by bytes of fp32 gradients; others are cut as this dlbench does it."""


def way_of(result: ExchangeResult, engine: str) -> ExchangeMethod:
    """How gradients went in a run."""
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
    """How Horovod fuses."""

    threshold_bytes: float  # Most bytes of a message, unless one gradient has more.
    cycle_s: float  # Least time between the starts of two messages, seconds.


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages of a step, in the order of sending."""

    sizes: tuple[float, ...]  # Bytes of fp32 gradients.
    ready_s: tuple[float, ...] | None  # After the start of the backward pass of the run, seconds; None: not recorded.
    backward_s: float  # That backward pass, seconds.


def priced_as(way: ExchangeMethod) -> str:
    """The algorithm that stands for an exchange. Raises `NoModelError`: none does, or the format has no model."""
    algorithm = ALGORITHM.get(way.exchange)
    if algorithm is None or not (way.wire in WIRE_BYTES or (way.wire == "topk" and way.topk_density)):
        raise NoModelError(f"exchange {way.exchange} with wire {way.wire} has no model of costs")
    return algorithm


def taken_apart(
    network: NetworkModel, layout: Layout, way: ExchangeMethod, algorithm: str, num_bytes: float
) -> Features:
    """A message of that many bytes of fp32 gradients, taken apart into costs of the network. Raises `NoModelError`: a
    level was never measured, or there is no such algorithm for the layout.
    """
    if algorithm == FASTEST:
        both = [taken_apart(network, layout, way, name, num_bytes) for name in ("ring", "double-binary-tree")]
        return min(both, key=lambda one: one.seconds(network))
    elements = max(1, math.ceil(num_bytes / 4))
    try:
        if way.wire == "topk":
            entries = max(1, round(elements * (way.topk_density or 0.0)))
            # As `is_dense_cheaper` of dlbench.node.sync.wire decides: a dense ring, where it sends fewer bytes.
            if 2 * elements * 4 >= layout.ranks * entries * _PAIR_BYTES:
                size = layout.ranks * entries * _PAIR_BYTES
                return features("all-gather", "ring", size, layout, network, element_bytes=_PAIR_BYTES)
        width = 4 if way.wire == "topk" else WIRE_BYTES[way.wire]
        size, hierarchical = elements * width, way.exchange == "hierarchical"
        ran = way.chunks.get(num_bytes) if layout.num_groups > 1 else None
        chunks = (ran or level_chunks(*way.by, layout, size)) if hierarchical else None
        return features("allreduce", algorithm, size, layout, network, element_bytes=width, chunks=chunks)
    except UserError as error:
        raise NoModelError(str(error)) from None


def price_of(network: NetworkModel, layout: Layout, way: ExchangeMethod, algorithm: str) -> Price:
    """Of messages by one algorithm. The price raises `NoModelError`, as `taken_apart`."""

    @functools.cache
    def price(num_bytes: float) -> Array:
        found = taken_apart(network, layout, way, algorithm, num_bytes)
        return np.array([found.seconds(network), *found.drawn(network)])

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
    """The messages of a step where gradients are fused in a way. `seconds`: of a message, where times decide;
    `backward_s`: the backward pass to which readiness is scaled, None: that of the run; `cycle`: how Horovod fuses,
    None: another engine. Raises `NoModelError`: the run does not say enough.
    """
    if fusion is None and cycle is None:
        sizes = [float(message.num_bytes) for message in result.of_gradients]
        known = [message.ready_s for message in result.of_gradients if message.ready_s is not None]
    else:
        order = sorted(result.gradients, key=lambda gradient: gradient.ready_s)
        sizes, known = [float(gradient.num_bytes) for gradient in order], [gradient.ready_s for gradient in order]
    if not sizes:
        raise NoModelError("the run does not report its messages, or when its gradients were ready")
    ran_s = result.backward_s if result.backward_s is not None else max(known, default=0.0)
    new_s = ran_s if backward_s is None else backward_s
    if len(known) != len(sizes):
        return Messages(sizes=tuple(sizes), ready_s=None, backward_s=new_s)
    ready = [one * new_s / ran_s if ran_s > 0 else 0.0 for one in known]
    if cycle is not None:
        sizes, ready = _by_cycles(sizes, ready, seconds, cycle)
    elif fusion is None or fusion.rule == "none":
        pass
    elif fusion.rule == "mgwfbp":
        # Messages in the order of sending may be ready out of order; one that is ready earlier waits all the same.
        ready = list(itertools.accumulate(ready, max))
        low, high = min(sizes), sum(sizes)
        line = LineCost(name="one message", startup_s=seconds(low), per_byte_s=0.0, ranks=ranks)
        if high > low:
            grid = [round(low * (high / low) ** (i / (_GRID - 1))) for i in range(_GRID)]
            line = fit_line("merging", ranks, grid, [seconds(size) for size in grid])
        sizes, ready = map(list, overlap.merged(overlap.best_merge(sizes, ready, line), sizes, ready))
    elif fusion.rule == "single":
        sizes, ready = [sum(sizes)], [max(ready)]
    elif fusion.bytes is None:
        raise NoModelError(f"fusion {fusion} has no model")
    else:
        least = fusion.bytes
        groups: list[int] = []
        held: float = least
        for size in sizes:
            # A bucket is closed by the gradient that fills it, in DDP (compute_bucket_assignment_by_size) as here.
            if held >= least:
                groups.append(0)
                held = 0.0
            groups[-1] += 1
            held += size
        sizes, ready = map(list, overlap.merged(groups, sizes, ready))
    return Messages(sizes=tuple(sizes), ready_s=tuple(ready), backward_s=new_s)


def ready_at(messages: Messages, computing: Mapping[str, Array]) -> list[Array]:
    """When messages are ready on a median rank, after the start of the step; all at the end of the backward pass where
    that was not recorded.
    """
    shares = [1.0] * len(messages.sizes)
    if messages.ready_s is not None and messages.backward_s > 0:
        shares = [min(1.0, one / messages.backward_s) for one in messages.ready_s]
    return [computing["input"] + computing["forward"] + share * computing["backward"] for share in shares]


def last_end(ready: Sequence[Array | float], costs: Sequence[Array]) -> Array:
    """When the last message is through: each begins when it is ready and the one before is through. Same clock."""
    free: Array = np.full_like(costs[0], -math.inf)
    for start, cost in zip(ready, costs, strict=True):
        free = np.maximum(free, start) + cost
    return free


def bisected(gives: Callable[[Array], Array], wanted: Array, low: float, high: float) -> tuple[Array, Array]:
    """Ends between which `gives`, which grows, reaches what is wanted, each begun at `low` and `high`."""
    below, above = np.full_like(wanted, low), np.full_like(wanted, high)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        is_above = gives(middle) > wanted
        below, above = np.where(is_above, below, middle), np.where(is_above, middle, above)
    return below, above


def _by_cycles(
    sizes: Sequence[float], ready: Sequence[float], seconds: Callable[[float], float], cycle: Cycle
) -> tuple[list[float], list[float]]:
    """Sizes and starts of Horovod's messages: at each tick at which its channel is free, all gradients that are ready,
    up to the threshold, travel together (Sergeev and Del Balso, arXiv 1802.05799, section 4).
    """
    fused, starts = [], []
    place, now = 0, 0.0
    while place < len(sizes):
        now = max(now, ready[place])
        if cycle.cycle_s > 0:
            now = math.ceil(now / cycle.cycle_s - 1e-9) * cycle.cycle_s
        held = sizes[place]
        place += 1
        while place < len(sizes) and ready[place] <= now and held + sizes[place] <= cycle.threshold_bytes:
            held += sizes[place]
            place += 1
        fused.append(held)
        starts.append(now)
        now += max(seconds(held), cycle.cycle_s)
    return fused, starts
