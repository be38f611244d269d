"""What another way of exchanging gradients would give, forecast from fitted costs of the network.

The exchange of a run is replayed in the model of `dlbench.costs.overlap`, once as it ran and once changed: messages go
one after the other, each as soon as its gradients are there, and each takes what `dlbench.costs.predictions` says for
its size, layout and algorithm. What then shows behind the backward pass is the model's exposed exchange, e_ran and
e_new. The measured exposed exchange x (without waiting for late ranks) is scaled by their ratio, so that a network
that is twice as slow as its fit does not spoil the forecast. With T the mean step:

    forecast of the throughput = T / (T - x (1 - e_new / e_ran)) - 1

A flat exchange is priced as a ring. Without fitted costs there is only the bound: what it would be if x were nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlbench.costs import overlap
from dlbench.costs.collectives import Layout
from dlbench.costs.fit.least_errors import fit_line
from dlbench.costs.predictions import predict
from dlbench.errors import UserError
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.collectives.network import LineCost, NetworkModel

ALGORITHM = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""Algorithm that stands for an exchange; the others have no model."""

WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element on the wire; the formats that send only part of a gradient have no model."""

AS_IT_RAN = "as it ran"
"""The messages of the run stay as they were."""

GRID = 16
"""Sizes through which a line is laid, where messages are merged by it."""

Price = Callable[[float], float]
"""Seconds of a message of so many bytes of fp32 gradients."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How gradients go."""

    exchange: str
    fusion: str
    """`AS_IT_RAN`, or one of `single` and `mgwfbp`."""
    wire: str
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What to expect of a change."""

    gain: float
    """Share by which the throughput grows (1); below 0 where it shrinks."""
    basis: str
    """What it was computed from, in words."""


class _NoModelError(Exception):
    """Something has no model, or was not recorded; the message says what."""


def upper_bound(share: float) -> float:
    """Growth of the throughput if a share of the step (1, below 1) took no time: 1 / (1 - share) - 1."""
    return 1 / (1 - share) - 1


def forecast(
    network: NetworkModel, result: ExchangeResult, *, ranks: int, new: Way, exchange_s: float, step_s: float
) -> Forecast | str:
    """The throughput to expect if the exchange of a run were changed.

    Args:
        network: fitted costs.
        result: the exchange as it ran.
        ranks: of the run.
        new: the change.
        exchange_s: measured exposed exchange without waiting, mean seconds per step.
        step_s: mean step, seconds.

    Returns:
        The forecast; or, where the run or the network does not hold enough, what is missing, in words.
    """
    ran = Way(exchange=result.exchange, fusion=AS_IT_RAN, wire=result.wire, group_size=new.group_size)
    try:
        before = _exposed(network, result, ranks, ran)
        after = _exposed(network, result, ranks, new)
    except _NoModelError as error:
        return str(error)
    if before <= 0:
        return "by the model nothing of the exchange is exposed as it ran"
    saved = exchange_s * (1 - after / before)
    return Forecast(gain=step_s / (step_s - saved) - 1, basis=_basis(network, result, ran, new))


def _basis(network: NetworkModel, result: ExchangeResult, ran: Way, new: Way) -> str:
    names = list(dict.fromkeys(ALGORITHM[way.exchange] for way in (ran, new)))
    return (
        f"{' and '.join(names)} all-reduce on the fitted network of {network.system} over {network.transport}, priced "
        f"for the run's {len(result.messages)} messages"
    )


def _exposed(network: NetworkModel, result: ExchangeResult, ranks: int, way: Way) -> float:
    """Seconds behind the backward pass in the model; of messages without times of readiness, seconds of all."""
    price = _price(network, ranks, way)
    if way.fusion == AS_IT_RAN:
        sizes = [float(message.num_bytes) for message in result.messages]
        known = [message.ready_s for message in result.messages if message.ready_s is not None]
    else:
        order = sorted(result.gradients, key=lambda gradient: gradient.ready_s)
        sizes, known = [float(gradient.num_bytes) for gradient in order], [gradient.ready_s for gradient in order]
    if not sizes:
        raise _NoModelError("the run does not report its messages, or when its gradients were ready")
    if len(known) < len(sizes):
        return sum(map(price, sizes))
    backward = result.backward_s if result.backward_s is not None else max(known)
    groups = _groups(way.fusion, sizes, known, price, ranks)
    merged, ready = overlap.merged(groups, sizes, known)
    free = -math.inf
    for size, start in zip(merged, ready, strict=True):
        free = max(free, start) + price(size)
    return max(0.0, free - backward)


def _groups(fusion: str, sizes: Sequence[float], ready: Sequence[float], price: Price, ranks: int) -> tuple[int, ...]:
    """Gradients, or messages, that travel together."""
    if fusion == "single":
        return (len(sizes),)
    if fusion == "mgwfbp":
        return overlap.best_merge(sizes, ready, _line(price, min(sizes), sum(sizes), ranks))
    return (1,) * len(sizes)


def _line(price: Price, low: float, high: float, ranks: int) -> LineCost:
    if high <= low:
        return LineCost(name="one message", startup_s=price(low), per_byte_s=0.0, ranks=ranks)
    sizes = [round(low * (high / low) ** (i / (GRID - 1))) for i in range(GRID)]
    return fit_line("merging", ranks, sizes, [price(size) for size in sizes])


def _price(network: NetworkModel, ranks: int, way: Way) -> Price:
    algorithm, width = ALGORITHM.get(way.exchange), WIRE_BYTES.get(way.wire)
    if algorithm is None or width is None:
        raise _NoModelError(f"exchange {way.exchange} with wire {way.wire} has no model of costs")
    layout = Layout(ranks=ranks, group_size=way.group_size)
    known: dict[int, float] = {}

    def price(num_bytes: float) -> float:
        elements = max(1, math.ceil(num_bytes / 4))
        if elements not in known:
            try:
                known[elements] = predict(
                    "allreduce", algorithm, elements * width, layout, network, element_bytes=width
                )
            except UserError as error:
                raise _NoModelError(str(error)) from None
        return known[elements]

    return price
