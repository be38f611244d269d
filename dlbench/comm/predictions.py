"""Predicts collectives by the costs of a network, at layouts and sizes that need not have been measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from dlbench.comm.wording import STAY_WITHIN, Recommended, Standing, fusion_bytes, ranges_of, standing_fields
from dlbench.errors import UserError, nearest
from dlbench.lazy import np
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.predictions import doublings_beyond, features, network_error, network_factors
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.topology import Cables
from dlbench.perfmodels.topology import seconds as topology_seconds
from dlbench.specs.base import Precision
from dlbench.specs.comm import (
    ALGORITHMS,
    DEDICATED_SERVERS,
    ELEMENT_BYTES,
    GROUPED_ALGORITHMS,
    Collective,
    FittedRange,
    LargestHeldOut,
    LineCost,
    NetworkModel,
)
from dlbench.units import format_bytes

CABLES = "cables"  # Name of the transport if a topology is priced.


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A collective to predict: algorithms, sizes, type and layout."""

    collective: Collective = "allreduce"
    algorithms: tuple[str, ...] = ()
    sizes: tuple[int, ...]  # Bytes of each rank's whole buffer, ascending.
    dtype: Precision = "fp32"
    group_size: int | None = None  # Ranks of a group; None: all ranks are one group.
    leaf_size: int | None = None  # Ranks below a leaf switch; None: all ranks are below one.
    shards: int | None = None
    workload_bytes: int | None = None  # Bytes of all gradients of a step.
    topology: Cables | None = None  # Cables to price instead of fitted costs.


class Price(NamedTuple):
    """A predicted time in seconds, the ends of its interval, and its phi; see `PredictedSeries`."""

    seconds: float
    low: float | None = None
    high: float | None = None
    phi: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictedSeries:
    """Predicted times of one algorithm, or of a library's line."""

    name: str
    is_line: bool = False  # Whether it is a line through measured sizes at this rank count.
    seconds: tuple[float, ...]  # By size.
    low: tuple[float, ...] | None  # Low ends of 95 % intervals, by size; None: fit of single runs.
    high: tuple[float, ...] | None
    phi: tuple[float, ...]
    """Flows that a link of the busiest level carries at once (the contention coefficient of Kahira et al., HPDC 2021),
    by size, then for all gradients if they are given; empty for lines and cables."""
    beyond: str = ""  # Reason why a line is an extrapolation at some of these sizes.
    workload_s: float | None  # Time of all gradients as one message.
    workload_low_s: float | None = None
    workload_high_s: float | None = None
    poor_error: float | None = None
    """Worst error of the fit (fraction) if it is too large for a recommendation."""

    def price(self, index: int) -> Price:
        price = Price(self.seconds[index])
        if self.phi:
            price = price._replace(phi=self.phi[index])
        if self.low is not None and self.high is not None:
            price = price._replace(low=self.low[index], high=self.high[index])
        return price

    @property
    def workload_price(self) -> Price:
        price = Price(self.workload_s or 0.0, self.workload_low_s, self.workload_high_s)
        if self.phi:
            price = price._replace(phi=self.phi[-1])
        return price


@dataclass(frozen=True, kw_only=True)
class LayoutPrediction:
    """Predictions at one layout."""

    ranks: int
    group_size: int
    leaf_size: int | None  # Ranks below a leaf switch; None: all.
    extrapolated: tuple[str, ...]  # Ranks and sizes outside of the fitted ones, in words; not for lines.
    largest_held_out: LargestHeldOut | None  # Error of the same fit at the largest rank count, left out.
    model_error: float | None
    """Factor (95 %) by which times may be longer or shorter because the model may not hold beyond the fitted ranks, at
    the size where it is largest; intervals include it. None up to the largest fitted rank count."""
    series: tuple[PredictedSeries, ...]
    best: tuple[str, ...]
    ranges: tuple[Recommended, ...]  # Algorithms to use by size.
    fusion_of: str = ""  # The fastest at the largest size.
    fusion_is_measured: bool = False
    """Whether the fusion size is by a line measured at this rank count; else it is by predicted times."""
    fusion_bytes: float | None = None
    """Smallest message that reaches `RATE_SHARE` of its asymptotic rate; None with one size or free bytes."""
    fusion_limit: int | None = None  # Largest measured size, bytes, if `fusion_bytes` is beyond it.
    fusion_messages: int | None = None
    fusion_workload_s: float | None = None  # Seconds of these messages one after the other.


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of one collective at each layout."""

    format: str = "dlbench.comm-prediction"
    version: int = 1
    system: str
    transport: str
    collective: Collective
    dtype: Precision
    sizes: tuple[int, ...]
    workload_bytes: int | None
    predictions: tuple[LayoutPrediction, ...]
    network: NetworkModel = field(metadata={"json": False})


@dataclass(frozen=True)
class _Case:
    """A request to a network at one layout."""

    network: NetworkModel
    request: PredictionRequest
    layout: Layout

    @property
    def model(self) -> dict[str, Any]:
        return {"element_bytes": ELEMENT_BYTES[self.request.dtype], "shards": self.request.shards}

    def whole(self, num_bytes: float) -> int:
        """Returns a size rounded to whole elements, at least one."""
        width = ELEMENT_BYTES[self.request.dtype]
        return max(1, round(num_bytes / width)) * width

    def price(self, name: str, num_bytes: int) -> Price:
        """Returns the predicted time, its interval by the network's draws times `network_factors`, and its phi."""
        collective, ranks = self.request.collective, self.layout.ranks
        if self.request.topology is not None:
            return Price(
                topology_seconds(self.request.topology, collective, name, num_bytes, self.layout, **self.model)
            )
        loads = features(collective, name, num_bytes, self.layout, self.network, **self.model)
        value = loads.seconds(self.network)
        phi = max(loads.phi.values(), default=1.0)
        if not self.network.draws:
            return Price(value, phi=phi)
        error_factors = network_factors(self.network, collective, name, num_bytes, ranks)
        low, high = np.percentile(loads.drawn(self.network) * error_factors, [2.5, 97.5]).tolist()
        return Price(value, min(value, low), max(value, high), phi)

    def seconds(self, name: str, num_bytes: int) -> float:
        return self.price(name, num_bytes).seconds


def predict_all(network: NetworkModel, ranks: Sequence[int], request: PredictionRequest) -> Predictions:
    """Returns the predictions for each rank count."""
    names = ALGORITHMS[request.collective]
    if request.collective == "allreduce":
        names = (*names, DEDICATED_SERVERS)
    for name in request.algorithms:
        if name not in names:
            raise UserError(f"--algorithms: {name!r} is no algorithm of {request.collective}: {nearest(name, names)}")
    return Predictions(
        system=network.system,
        transport=network.transport,
        collective=request.collective,
        dtype=request.dtype,
        sizes=request.sizes,
        workload_bytes=request.workload_bytes,
        predictions=tuple(_predict(_Case(network, request, layout_asked(count, request))) for count in ranks),
        network=network,
    )


def _predict(case: _Case) -> LayoutPrediction:
    network, request, layout = case.network, case.request, case.layout
    sizes = (*request.sizes, *filter(None, [request.workload_bytes]))
    algorithms: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()
    model_error = None
    if network.levels or request.topology is not None or request.algorithms:
        algorithms = permitted(request, layout)
        doublings = doublings_beyond(network, layout.ranks)
        if doublings:
            model_error = max(network_error(network, size).factor(doublings, 0.95) for size in sizes)
        if request.topology is None:
            extrapolated = _beyond(network.fitted_over, layout, sizes)
    series = [_modelled(case, name) for name in algorithms]
    if request.collective == "allreduce" and not request.algorithms:
        # Libraries' all-reduces that were measured at this rank count.
        flat = (line for line in network.collectives if line.ranks == layout.ranks and line.name.endswith(" flat"))
        series += [_line_series(line, request) for line in flat]
    if not series:
        measured = ", ".join(map(str, sorted({line.ranks for line in network.collectives})))
        raise UserError(
            f"--ranks {layout.ranks}: the network of {network.system} only has lines for {measured} ranks; fit runs of "
            "dlbench's own algorithms to predict other rank counts"
        )
    usable = usable_series(series)
    standings = [_standing(usable, index, size) for index, size in enumerate(request.sizes)]
    return LayoutPrediction(
        ranks=layout.ranks,
        group_size=layout.group_size,
        leaf_size=layout.leaf_size,
        extrapolated=extrapolated,
        largest_held_out=network.largest_held_out,
        model_error=model_error,
        series=tuple(series),
        best=tuple(standing.title for standing in standings),
        ranges=ranges_of(standings),
        **_fusion(case, usable),
    )


def usable_series(series: Sequence[PredictedSeries]) -> Sequence[PredictedSeries]:
    """Returns the series that may be recommended: those with small errors of the fit, or all if there are none."""
    return [candidate for candidate in series if candidate.poor_error is None] or series


def _standing(all_series: Sequence[PredictedSeries], index: int, size: int) -> Standing:
    """Returns the fastest series at a size; those with overlapping intervals or within `STAY_WITHIN` are tied."""
    first, *others = sorted(all_series, key=lambda series: series.seconds[index])
    fastest = end = first.seconds[index]
    if first.high is not None:
        end = first.high[index]
    slower = {}
    for series in others:
        seconds = series.seconds[index]
        if seconds <= fastest * (1 + STAY_WITHIN) or (series.low is not None and series.low[index] <= end):
            slower[series.name] = seconds / fastest - 1
    return Standing(**standing_fields(size, first.name, slower))


def _beyond(fitted: FittedRange | None, layout: Layout, sizes: Sequence[int]) -> tuple[str, ...]:
    if fitted is None:
        return ("the file does not contain the points that its costs were fitted to",)
    counts: list[tuple[str, int, tuple[int, ...]]] = [
        ("ranks", layout.ranks, fitted.ranks),
        ("ranks in a group", layout.group_size, fitted.group_sizes),
        ("groups", layout.num_groups, fitted.num_groups),
    ]
    texts = []
    for noun, count, fitted_counts in counts:
        if not fitted_counts[0] <= count <= fitted_counts[-1]:
            texts.append(f"{count:,} {noun}, fitted at {', '.join(map('{:,}'.format, fitted_counts))}")
    return (*texts, *_sizes_beyond(sizes, fitted.sizes))


def _sizes_beyond(sizes: Sequence[int], fitted: tuple[int, int]) -> tuple[str, ...]:
    outside = [size for size in sizes if not fitted[0] <= size <= fitted[1]]
    if not outside:
        return ()
    where = " and ".join(format_bytes(size) for size in dict.fromkeys((min(outside), max(outside))))
    return (f"{where}, fitted from {format_bytes(fitted[0])} to {format_bytes(fitted[1])}",)


def layout_asked(ranks: int, request: PredictionRequest) -> Layout:
    """Returns the requested layout of a rank count. Raises `UserError`: groups do not divide it."""
    group = request.group_size or ranks
    if ranks < 2:
        raise UserError(f"--ranks {ranks}: a collective needs two ranks or more")
    if ranks % group:
        raise UserError(f"--group-size {group}: does not divide {ranks} ranks into groups")
    leaf = request.leaf_size
    if leaf is not None and (leaf % group or (leaf < ranks and ranks % leaf)):
        raise UserError(f"--leaf-size {leaf}: must be whole groups of {group} ranks, and divide {ranks} ranks")
    return Layout(ranks=ranks, group_size=group, leaf_size=leaf)


def permitted(request: PredictionRequest, layout: Layout) -> tuple[str, ...]:
    """Returns the requested algorithms, or all that a layout permits."""
    is_grouped = 1 < layout.group_size < layout.ranks
    if request.algorithms:
        grouped = [name for name in request.algorithms if name in GROUPED_ALGORITHMS]
        if grouped and not is_grouped:
            raise UserError(
                f"--algorithms {grouped[0]}: needs two groups of two ranks or more, but there are {layout.num_groups} "
                f"of {layout.group_size}; set --group-size"
            )
        return request.algorithms
    return tuple(name for name in ALGORITHMS[request.collective] if is_grouped or name not in GROUPED_ALGORITHMS)


def _modelled(case: _Case, name: str) -> PredictedSeries:
    request, sizes = case.request, list(case.request.sizes)
    if request.workload_bytes is not None:
        sizes.append(case.whole(request.workload_bytes))
    error = case.network.error_of(request.collective, name)
    poor_error = error.worst if error is not None and error.is_poor else None
    return replace(_series(name, [case.price(name, size) for size in sizes], request), poor_error=poor_error)


def _line_series(line: LineCost, request: PredictionRequest) -> PredictedSeries:
    prices = []
    for size in (*request.sizes, *filter(None, [request.workload_bytes])):
        price = Price(line.time(size))
        if line.half_width is not None:
            factor = 1 + line.half_width
            price = Price(price.seconds, price.seconds / factor, price.seconds * factor)
        prices.append(price)
    beyond = "" if line.sizes is None else "".join(_sizes_beyond(request.sizes, line.sizes))
    return replace(_series(line.name, prices, request), is_line=True, beyond=beyond)


def _series(name: str, prices: Sequence[Price], request: PredictionRequest) -> PredictedSeries:
    of_sizes = prices[: len(request.sizes)]
    workload = next(iter(prices[len(of_sizes) :]), None)
    return PredictedSeries(
        name=name,
        seconds=tuple(price.seconds for price in of_sizes),
        low=tuple(price.low for price in of_sizes if price.low is not None) or None,
        high=tuple(price.high for price in of_sizes if price.high is not None) or None,
        phi=tuple(price.phi for price in prices if price.phi is not None),
        workload_s=workload and workload.seconds,
        workload_low_s=workload and workload.low,
        workload_high_s=workload and workload.high,
    )


def _fusion(case: _Case, series: Sequence[PredictedSeries]) -> dict[str, Any]:
    network, request, ranks = case.network, case.request, case.layout.ranks
    # Lines of other collectives have three words: carrier, collective, algorithm.
    lines = [line for line in network.collectives if line.ranks == ranks and line.name.count(" ") == 1 and line.sizes]
    if request.collective == "allreduce" and not request.algorithms and lines:
        # Fusion is for large messages: take the line that is fastest at the largest measured size.
        largest = max(line.sizes[1] for line in lines if line.sizes)
        line = min(lines, key=lambda line: line.time(largest))
        size = fusion_bytes(line.startup_s, line.per_byte_s)
        if math.isfinite(size):
            of_line = {"fusion_of": line.name, "fusion_is_measured": True}
            return of_line | _fused(case, size, line.sizes, line.time)
    best = min(series, key=lambda candidate: candidate.seconds[-1])
    of_best = {"fusion_of": best.name}
    if len(request.sizes) < 2:
        return of_best
    line = fit_line(best.name, ranks, request.sizes, best.seconds)
    if line.per_byte_s <= 0 or line.startup_s <= 0:
        return of_best
    size = max(1.0, fusion_bytes(line.startup_s, line.per_byte_s))
    time: Callable[[int], float] = line.time
    if not best.is_line:
        time = partial(case.seconds, best.name)
    measured = None if network.fitted_over is None else network.fitted_over.sizes
    return of_best | _fused(case, size, measured, time)


def _fused(case: _Case, size: float, measured: tuple[int, int] | None, time: Callable[[int], float]) -> dict[str, Any]:
    """Returns the fields for a size of fused messages. `measured`: smallest and largest measured size."""
    fields: dict[str, Any] = {"fusion_bytes": size}
    if measured is not None and size > measured[1]:
        fields["fusion_limit"] = measured[1]
    workload = case.request.workload_bytes
    if workload is not None and size >= 1:
        messages = math.ceil(workload / size)
        fields["fusion_messages"] = messages
        fields["fusion_workload_s"] = messages * time(case.whole(workload / messages))
    return fields
