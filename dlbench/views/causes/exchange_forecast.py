"""What another way of exchanging gradients would give at the same rank count, by `dlbench.projection.exchange`.

The exchange of a run is replayed as it ran and changed. With e_ran and e_new what then shows behind the backward pass,
and x the measured exchange on the wire (the account's, without waiting for stragglers):

* e_ran above x: all costs are scaled so that e_ran is x, so that a network fitted twice as slow as it is gives the same
  forecast; what is saved is x - e_new;
* e_ran below x: only what the model knows of can be saved: e_ran - e_new;
* e_ran below `LEAST_EXPLAINED` of x: there is no forecast.

With T the mean step the forecast of the throughput is T / (T - saved) - 1. Its interval is over the draws of the
network's costs, each off by `network_factors`, and over the interval of x. A flat exchange is priced by the measured
line of the carrier's own all-reduce at this rank count, where there is one, and as a ring otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import network_factors
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.exchange import (
    NoModelError,
    Price,
    Way,
    bisected,
    last_end,
    messages_of,
    price_of,
    priced_as,
    way_of,
)
from dlbench.projection.refusals import LEAST_EXPLAINED
from dlbench.records.exchange import ExchangeResult
from dlbench.report.wording import percent
from dlbench.specs.comm import NetworkModel
from dlbench.stats.estimates import Estimate
from dlbench.stats.pairing import SEED

_NORMAL = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What to expect of a change."""

    gain: float  # Share by which the throughput grows (1); below 0 where it shrinks.
    low: float | None  # Ends of the 95 % interval; None where the network or the point has too few runs for one.
    high: float | None
    basis: str  # What it was computed from, in words.


def forecast(
    network: NetworkModel, result: ExchangeResult, *, ranks: int, new: Way, exchange: Estimate, step: Estimate
) -> Forecast | str:
    """The throughput to expect if the exchange of a run were changed. `exchange`: on the wire, as measured, seconds per
    step; `step`: mean, seconds. Where the run or the network does not hold enough: what is missing, in words.
    """
    draws = len(network.draws)
    ran = replace(way_of(result, new.by[0]), group_size=new.group_size)

    def exposed(way: Way, price: Price, scale: Array) -> Array:
        found = messages_of(result, way.fusion, lambda size: float(price(size)[0] * scale[0]), ranks)
        costs = [price(size) * scale for size in found.sizes]
        if found.ready_s is None:
            return np.asarray(sum(costs))
        return np.maximum(0.0, last_end(found.ready_s, costs) - found.backward_s)

    # Scattered as the interval of the measured exchange says; none below 0.
    width = 0.0 if exchange.low is None or exchange.high is None else (exchange.high - exchange.low) / (2 * _NORMAL)
    noise = np.random.default_rng(SEED).normal(0, width, draws)
    measured = np.concatenate([[exchange.value], np.maximum(exchange.value + noise, 1e-3 * exchange.value)])
    try:
        (before, before_name), (after, after_name) = (_price(network, result, ranks, way) for way in (ran, new))
        modelled = exposed(ran, before, np.ones(1 + draws))
        explained = float(modelled[0]) / exchange.value if exchange.value > 0 else math.inf
        if explained < LEAST_EXPLAINED:
            share = f"only {percent(explained)}" if explained > 0 else "nothing"
            return f"the model explains {share} of the measured exchange on the wire, too little for a forecast"
        # What to multiply all costs with so that the model gives no more than was measured: at most 1.
        _, high = bisected(lambda scale: exposed(ran, before, scale), measured, 0.0, 1.0)
        scale = np.where(modelled > measured, high, 1.0)
        saved = np.minimum(measured, np.minimum(measured, modelled) - exposed(new, after, scale))
    except NoModelError as error:
        return str(error)
    steps = step.value + (measured - exchange.value)
    gains = steps / np.maximum(steps - saved, 0.01 * steps) - 1
    ends = np.percentile(gains[1:], [2.5, 97.5]) if network.draws and exchange.is_confident else None
    gain = float(gains[0])
    held = f"it explains {percent(explained, 0)} of the measured exchange"
    if explained >= 1:
        held = f"costs x {float(scale[0]):.2g}, which gives the measured exchange"
    if result.chunks_are_guessed:
        held += "; chunks of hierarchical messages were not recorded, and are priced as this dlbench cuts them"
    return Forecast(
        gain=gain,
        low=None if ends is None else min(gain, float(ends[0])),
        high=None if ends is None else max(gain, float(ends[1])),
        basis=f"{' and '.join(dict.fromkeys((before_name, after_name)))} all-reduce on the fitted network of "
        f"{network.system} over {network.transport}, priced for the run's {len(result.of_gradients)} messages; {held}",
    )


def _price(network: NetworkModel, result: ExchangeResult, ranks: int, way: Way) -> tuple[Price, str]:
    """What messages cost, and what they are priced as."""
    # The line of the carrier's own all-reduce at this rank count, which a flat exchange of fp32 calls.
    measured = (one for one in network.collectives if (one.name, one.ranks) == (f"{result.carrier} flat", ranks))
    line = next(measured, None) if (way.exchange, way.wire) == ("flat", "fp32") else None
    if line is not None:
        # Scattered as its interval says.
        spread = math.log1p(line.half_width or 0.0) / _NORMAL
        noise = np.exp(np.random.default_rng((SEED, 1)).normal(0, spread, len(network.draws)))
        return lambda num_bytes: line.time(num_bytes) * np.concatenate([[1.0], noise]), f"measured {line.name}"
    algorithm = priced_as(way)
    found = price_of(network, Layout(ranks=ranks, group_size=way.group_size), way, algorithm)

    def price(num_bytes: float) -> Array:
        seconds = found(num_bytes).copy()
        seconds[1:] *= network_factors(network, "allreduce", algorithm, num_bytes, ranks)
        return seconds

    return price, algorithm
