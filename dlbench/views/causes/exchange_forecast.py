"""What another way of exchanging gradients would give, forecast from fitted costs of the network.

The exchange of a run is replayed in the model of `dlbench.perfmodels.overlap`, once as it ran and once changed:
messages go one after the other, each as soon as its gradients are there, and each takes what
`dlbench.perfmodels.predictions` says for its size, layout and algorithm. What then ends after the backward pass is the
model's exchange on the wire, e_ran and e_new. With x the measured one (the account's, without waiting for stragglers):

* e_ran above x: all costs are scaled so that e_ran is x, so that a network fitted twice as slow as it is gives the same
  forecast; what is saved is x - e_new;
* e_ran below x: only what the model knows of can be saved: e_ran - e_new;
* e_ran below `LEAST_EXPLAINED` of x: there is no forecast.

With T the mean step the forecast of the throughput is T / (T - saved) - 1. Its interval is over the draws of the
network's costs (resampled runs of `dlbench comm`) and over the interval of x.

Each draw is off by `network_factors`: by what the fit misses at the fitted rank counts next to the run's, and by the
error of the model where the run has more ranks than the fit has seen.

A flat exchange is priced by the measured line of the carrier's own all-reduce at this rank count, where there is one,
and as a ring otherwise. Without fitted costs there is only the bound: what it would be if x were nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from dlbench.errors import UserError
from dlbench.perfmodels import overlap
from dlbench.perfmodels.extrapolation import network_factors
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.predictions import features
from dlbench.perfmodels.schedules import Layout
from dlbench.records.exchange import ExchangeResult
from dlbench.report.wording import percent
from dlbench.specs.comm import LineCost, NetworkModel
from dlbench.stats.estimates import Estimate
from dlbench.stats.pairing import SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

_NORMAL = NormalDist().inv_cdf(0.975)

ALGORITHM = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""Algorithm that stands for an exchange; the others have no model."""

WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element on the wire; the formats that send only part of a gradient have no model."""

AS_IT_RAN = "as it ran"  # The messages of the run stay as they were.

GRID = 16  # Sizes through which a line is laid, where messages are merged by it.

LEAST_EXPLAINED = 0.2
"""Share of the measured exchange on the wire that the model must give as it ran: below, it is about something else."""

BISECTIONS = 40  # Halvings of a scale between 0 and 1: to the last digit that is printed, and far beyond.

Price = Callable[[float], "Array"]
"""Seconds of a message of that many bytes of fp32 gradients: by the fitted costs, then by each draw."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How gradients go."""

    exchange: str
    fusion: str  # `AS_IT_RAN`, or one of `single` and `mgwfbp`.
    wire: str
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What to expect of a change."""

    gain: float  # Share by which the throughput grows (1); below 0 where it shrinks.
    low: float | None  # Ends of the 95 % interval; None where the network or the point has too few runs for one.
    high: float | None
    basis: str  # What it was computed from, in words.


class _NoModelError(Exception):
    """Something has no model, or was not recorded; the message says what."""


def upper_bound(share: float) -> float:
    """Growth of the throughput if a share of the step (1, below 1) took no time: 1 / (1 - share) - 1."""
    return 1 / (1 - share) - 1


def forecast(
    network: NetworkModel, result: ExchangeResult, *, ranks: int, new: Way, exchange: Estimate, step: Estimate
) -> Forecast | str:
    """The throughput to expect if the exchange of a run were changed. `exchange`: on the wire, as measured, seconds per
    step; `step`: mean, seconds. Where the run or the network does not hold enough: what is missing, in words.
    """
    import numpy as np

    ran = Way(exchange=result.exchange, fusion=AS_IT_RAN, wire=result.wire, group_size=new.group_size)
    try:
        before, after = (_Replay(network, result, ranks, way) for way in (ran, new))
        modelled = before.exposed(np.ones(1 + len(network.draws)))
    except _NoModelError as error:
        return str(error)
    explained = float(modelled[0]) / exchange.value if exchange.value > 0 else math.inf
    if explained < LEAST_EXPLAINED:
        share = f"only {percent(explained)}" if explained > 0 else "nothing"
        return f"the model explains {share} of the measured exchange on the wire, too little for a forecast"
    measured = _scatter(exchange, len(network.draws))
    try:
        scale = _scale(before, modelled, measured)
        saved = np.minimum(measured, np.minimum(measured, modelled) - after.exposed(scale))
    except _NoModelError as error:
        return str(error)
    steps = step.value + (measured - exchange.value)
    gains = steps / np.maximum(steps - saved, 0.01 * steps) - 1
    ends = np.percentile(gains[1:], [2.5, 97.5]) if network.draws and exchange.is_confident else None
    gain = float(gains[0])
    return Forecast(
        gain=gain,
        low=None if ends is None else min(gain, float(ends[0])),
        high=None if ends is None else max(gain, float(ends[1])),
        basis=_basis(network, result, (before, after), float(scale[0]), explained),
    )


def _scatter(figure: Estimate, draws: int) -> Array:
    """The figure, then as many values as there are draws, scattered as its interval says; none below 0."""
    import numpy as np

    width = 0.0 if figure.low is None or figure.high is None else (figure.high - figure.low) / (2 * _NORMAL)
    noise = np.random.default_rng(SEED).normal(0, width, draws)
    return np.concatenate([[figure.value], np.maximum(figure.value + noise, 1e-3 * figure.value)])


def _scale(before: _Replay, modelled: Array, measured: Array) -> Array:
    """What to multiply all costs with so that the model gives no more than was measured, by draw: at most 1."""
    import numpy as np

    low, high = np.zeros_like(modelled), np.ones_like(modelled)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_above = before.exposed(middle) > measured
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    return np.where(modelled > measured, high, 1.0)


def _basis(
    network: NetworkModel, result: ExchangeResult, replays: tuple[_Replay, _Replay], scale: float, explained: float
) -> str:
    names = " and ".join(dict.fromkeys(one.priced_as for one in replays))
    held = f"it explains {percent(explained, 0)} of the measured exchange"
    if explained >= 1:
        held = f"costs x {scale:.2g}, which gives the measured exchange"
    return (
        f"{names} all-reduce on the fitted network of {network.system} over {network.transport}, priced for the run's "
        f"{len(result.messages)} messages; {held}"
    )


class _Replay:
    """The messages of a run, sent in one way, in the model. Raises _NoModelError: the way has no model, or the run does
    not say enough.
    """

    def __init__(self, network: NetworkModel, result: ExchangeResult, ranks: int, way: Way) -> None:
        self._way, self._ranks = way, ranks
        # The line of the carrier's own all-reduce at this rank count, which a flat exchange of fp32 calls.
        measured = (one for one in network.collectives if (one.name, one.ranks) == (f"{result.carrier} flat", ranks))
        line = next(measured, None) if (way.exchange, way.wire) == ("flat", "fp32") else None
        self._price = _price(network, ranks, way) if line is None else _line_price(line, len(network.draws))
        self.priced_as = ALGORITHM.get(way.exchange, way.exchange) if line is None else f"measured {line.name}"
        if way.fusion == AS_IT_RAN:
            self._sizes = [float(message.num_bytes) for message in result.messages]
            known = [message.ready_s for message in result.messages if message.ready_s is not None]
        else:
            order = sorted(result.gradients, key=lambda gradient: gradient.ready_s)
            self._sizes = [float(gradient.num_bytes) for gradient in order]
            known = [gradient.ready_s for gradient in order]
        if not self._sizes:
            raise _NoModelError("the run does not report its messages, or when its gradients were ready")
        self._ready = known if len(known) == len(self._sizes) else None
        self._backward = result.backward_s if result.backward_s is not None else max(known, default=0.0)

    def exposed(self, scale: Array) -> Array:
        """Seconds behind the backward pass, by draw; without times of readiness, seconds of all messages. `scale`: what
        costs are multiplied with, by draw.
        """
        import numpy as np

        if self._ready is None:
            return np.asarray(sum(self._price(size) * scale for size in self._sizes))
        merged, ready = overlap.merged(self._groups(float(scale[0])), self._sizes, self._ready)
        free = np.full_like(scale, -math.inf)
        for size, start in zip(merged, ready, strict=True):
            free = np.maximum(free, start) + self._price(size) * scale
        return np.maximum(0.0, free - self._backward)

    def _groups(self, scale: float) -> tuple[int, ...]:
        """Gradients, or messages, that travel together."""
        if self._way.fusion == "single":
            return (len(self._sizes),)
        if self._way.fusion == "mgwfbp" and self._ready is not None:
            line = _line(lambda size: float(self._price(size)[0]) * scale, self._sizes, self._ranks)
            return overlap.best_merge(self._sizes, self._ready, line)
        return (1,) * len(self._sizes)


def _line(price: Callable[[float], float], gradients: Sequence[float], ranks: int) -> LineCost:
    low, high = min(gradients), sum(gradients)
    if high <= low:
        return LineCost(name="one message", startup_s=price(low), per_byte_s=0.0, ranks=ranks)
    sizes = [round(low * (high / low) ** (i / (GRID - 1))) for i in range(GRID)]
    return fit_line("merging", ranks, sizes, [price(size) for size in sizes])


def _line_price(line: LineCost, draws: int) -> Price:
    import numpy as np

    spread = math.log1p(line.half_width or 0.0) / _NORMAL
    noise = np.exp(np.random.default_rng([SEED, 1]).normal(0, spread, draws))
    factors = np.concatenate([[1.0], noise])
    return lambda num_bytes: line.time(num_bytes) * factors


def _price(network: NetworkModel, ranks: int, way: Way) -> Price:
    import numpy as np

    algorithm, width = ALGORITHM.get(way.exchange), WIRE_BYTES.get(way.wire)
    if algorithm is None or width is None:
        raise _NoModelError(f"exchange {way.exchange} with wire {way.wire} has no model of costs")
    layout = Layout(ranks=ranks, group_size=way.group_size)
    known: dict[int, Array] = {}

    def price(num_bytes: float) -> Array:
        elements = max(1, math.ceil(num_bytes / 4))
        if elements not in known:
            try:
                found = features("allreduce", algorithm, elements * width, layout, network, element_bytes=width)
                missed = network_factors(network, "allreduce", algorithm, elements * width, ranks)
                known[elements] = np.array([found.seconds(network), *found.drawn(network) * missed])
            except UserError as error:
                raise _NoModelError(str(error)) from None
        return known[elements]

    return price
