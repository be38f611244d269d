"""What a fitted network expects of collectives at layouts and sizes that need not have been measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dlbench.comm.choice import STAY_WITHIN, Recommended, Standing, fusion_bytes, ranges_of, standing_fields
from dlbench.errors import UserError, nearest
from dlbench.lazy import np
from dlbench.perfmodels.extrapolation import doublings_beyond, network_error, network_factors
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.predictions import features
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.topology import Cables, seconds
from dlbench.specs.base import Precision
from dlbench.specs.comm import (
    ALGORITHMS,
    ELEMENT_BYTES,
    GROUPED_ALGORITHMS,
    Collective,
    FittedRange,
    LargestHeldOut,
    LineCost,
    NetworkModel,
)
from dlbench.units import format_bytes

CABLES = "cables"  # What stands for the transport where a topology is priced.


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """What is asked of a network."""

    collective: Collective = "allreduce"
    algorithms: tuple[str, ...] = ()
    sizes: tuple[int, ...]  # Bytes of each rank's whole buffer, ascending.
    dtype: Precision = "fp32"
    group_size: int | None = None  # Ranks of a group; None: all ranks are one group.
    leaf_size: int | None = None  # Ranks below a leaf switch; None: all ranks are below one.
    shards: int | None = None
    workload_bytes: int | None = None  # Bytes of all gradients of a step, to be exchanged as a whole.
    topology: Cables | None = None  # Cables to price instead of a network's fitted costs.


class Price(NamedTuple):
    """A predicted time, the ends of its interval, and its phi; see `PredictedSeries`."""

    seconds: float
    low: float | None = None
    high: float | None = None
    phi: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictedSeries:
    """Predicted times of one algorithm, or of a library's line."""

    name: str
    is_line: bool  # Whether it is a line through measured sizes at this rank count, and no model.
    seconds: tuple[float, ...]  # By size.
    low: tuple[float, ...] | None  # Low ends of 95 % intervals, by size; None: the fit is of single runs.
    high: tuple[float, ...] | None
    phi: tuple[float, ...]
    """By size, and of all gradients where they are asked for: flows that the links carry at once, of the level with the
    most (the contention coefficient of Kahira et al., HPDC 2021); none of lines and of cables."""
    beyond: str  # For a line, why it is an extrapolation at some of these sizes; empty where it is none.
    workload_s: float | None  # Of all gradients as one message.
    workload_low_s: float | None = None
    workload_high_s: float | None = None
    poor_error: float | None = None
    """Worst error of the fit where it misses this algorithm too far for advice (fraction); None where it does not."""

    def price(self, index: int) -> Price:
        """Returns the predicted time of one of the sizes."""
        low, high = (None if ends is None else ends[index] for ends in (self.low, self.high))
        return Price(self.seconds[index], low, high, self.phi[index] if self.phi else None)

    @property
    def workload_price(self) -> Price:
        """Returns the predicted time of all gradients as one message."""
        phi = self.phi[-1] if self.phi else None
        return Price(self.workload_s or 0.0, self.workload_low_s, self.workload_high_s, phi)


@dataclass(frozen=True, kw_only=True)
class LayoutPrediction:
    """One layout."""

    ranks: int
    group_size: int
    leaf_size: int | None  # Ranks below a leaf switch; None: all.
    extrapolated: tuple[str, ...]  # What is asked beyond the points behind the fitted costs, in words; not of lines.
    largest_held_out: LargestHeldOut | None  # How far the same fit is off one step beyond its points.
    model_error: float | None
    """Factor (95 %) by which times may be longer or shorter because the model may not go on, at the size where it is
    largest; intervals hold it. None up to the largest fitted rank count."""
    series: tuple[PredictedSeries, ...]
    best: tuple[str, ...]
    ranges: tuple[Recommended, ...]  # What to use by size, where the fastest is so beyond the intervals of predictions.
    fusion_of: str = ""  # What is best at the largest size.
    fusion_is_measured: bool = False
    """Whether it is of a line measured at this rank count, as in the report of the runs; else of predicted times."""
    fusion_bytes: float | None = None
    """Smallest message that reaches `RATE_SHARE` of its asymptotic rate; None with one size or with free bytes."""
    fusion_limit: int | None = None  # Largest measured size, bytes, if `fusion_bytes` is beyond it.
    fusion_messages: int | None = None
    fusion_workload_s: float | None = None  # Seconds that these take one after the other, without any overlap.


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a network expects of one collective, at each layout."""

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
    """What is asked of a network at one layout."""

    network: NetworkModel
    request: PredictionRequest
    layout: Layout

    @property
    def model(self) -> dict[str, Any]:
        """What decides how an algorithm's messages are cut."""
        return {"element_bytes": ELEMENT_BYTES[self.request.dtype], "shards": self.request.shards}

    def whole(self, num_bytes: float) -> int:
        """To whole elements, at least one."""
        width = ELEMENT_BYTES[self.request.dtype]
        return max(1, round(num_bytes / width)) * width

    def price(self, name: str, num_bytes: int) -> Price:
        """A predicted time with the middle 95 % of the network's draws, each off by `network_factors`; and its phi."""
        collective, ranks = self.request.collective, self.layout.ranks
        if self.request.topology is not None:
            return Price(seconds(self.request.topology, collective, name, num_bytes, self.layout, **self.model))
        found = features(collective, name, num_bytes, self.layout, self.network, **self.model)
        value = found.seconds(self.network)
        phi = max(found.phi.values(), default=1.0)
        if not self.network.draws:
            return Price(value, phi=phi)
        missed = network_factors(self.network, collective, name, num_bytes, ranks)
        low, high = np.percentile(found.drawn(self.network) * missed, [2.5, 97.5]).tolist()
        return Price(value, min(value, low), max(value, high), phi)


def predict_all(network: NetworkModel, ranks: Sequence[int], request: PredictionRequest) -> Predictions:
    """Predictions for each rank count."""
    known = ALGORITHMS[request.collective]
    for name in request.algorithms:
        if name not in known:
            raise UserError(f"--algorithms: {name!r} is no algorithm of {request.collective}: {nearest(name, known)}")
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
    has_levels = bool(network.levels) or request.topology is not None
    algorithms = permitted(request, layout) if has_levels or request.algorithms else ()
    sizes = (*request.sizes, *filter(None, [request.workload_bytes]))
    doublings = doublings_beyond(network, layout.ranks) if algorithms else 0.0
    series = [_modelled(case, name) for name in algorithms]
    if request.collective == "allreduce" and not request.algorithms:
        # Libraries' all-reduces that were measured at this rank count.
        own = (line for line in network.collectives if line.ranks == layout.ranks and line.name.endswith(" flat"))
        series += [_line_series(line, request) for line in own]
    if not series:
        measured = sorted({line.ranks for line in network.collectives})
        raise UserError(
            f"--ranks {layout.ranks}: the network of {network.system} holds lines alone, for "
            f"{', '.join(map(str, measured))} ranks; fit runs of dlbench's own algorithms to predict others"
        )
    usable = usable_series(series)
    places = range(len(request.sizes) if usable else 0)
    return LayoutPrediction(
        ranks=layout.ranks,
        group_size=layout.group_size,
        leaf_size=layout.leaf_size,
        extrapolated=_beyond(network.fitted_over, layout, sizes) if algorithms and request.topology is None else (),
        largest_held_out=network.largest_held_out,
        model_error=max(network_error(network, size).factor(doublings, 0.95) for size in sizes) if doublings else None,
        series=tuple(series),
        best=tuple(min(usable, key=lambda one: one.seconds[place]).name for place in places),
        ranges=ranges_of([_standing(usable, place, request.sizes[place]) for place in places]),
        **_fusion(case, usable),
    )


def usable_series(series: Sequence[PredictedSeries]) -> Sequence[PredictedSeries]:
    """Returns the series that advice is given on: those that the fit does not miss, or all where it misses all."""
    return [one for one in series if one.poor_error is None] or series


def _standing(all_series: Sequence[PredictedSeries], index: int, size: int) -> Standing:
    """Returns the fastest at one size; series whose interval it reaches, and those a few percent slower, are as good as
    it.
    """
    first, *others = sorted(all_series, key=lambda series: series.seconds[index])
    fastest = first.seconds[index]
    end = fastest if first.high is None else first.high[index]
    slower = {}
    for series in others:
        seconds = series.seconds[index]
        if seconds <= fastest * (1 + STAY_WITHIN) or (series.low is not None and series.low[index] <= end):
            slower[series.name] = seconds / fastest - 1
    return Standing(**standing_fields(size, first.name, slower))


def _beyond(fitted: FittedRange | None, layout: Layout, sizes: Sequence[int]) -> tuple[str, ...]:
    """What of a layout and its sizes lies outside of the points behind the costs, in words."""
    if fitted is None:
        return ("the file does not say what its costs were fitted to",)
    asked: list[tuple[str, int, tuple[int, ...]]] = [
        ("ranks", layout.ranks, fitted.ranks),
        ("ranks in a group", layout.group_size, fitted.group_sizes),
        ("groups", layout.num_groups, fitted.num_groups),
    ]
    found = [
        f"{count:,} {what}, fitted at {', '.join(f'{one:,}' for one in known)}"
        for what, count, known in asked
        if not known[0] <= count <= known[-1]
    ]
    return (*found, *_sizes_beyond(sizes, fitted.sizes))


def _sizes_beyond(sizes: Sequence[int], fitted: tuple[int, int]) -> tuple[str, ...]:
    outside = [size for size in sizes if not fitted[0] <= size <= fitted[1]]
    if not outside:
        return ()
    where = " and ".join(format_bytes(size) for size in dict.fromkeys((min(outside), max(outside))))
    return (f"{where}, fitted from {format_bytes(fitted[0])} to {format_bytes(fitted[1])}",)


def layout_asked(ranks: int, request: PredictionRequest) -> Layout:
    """A rank count in the groups that are asked for. Raises `UserError`: they do not divide it."""
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
    """The algorithms that are asked for, or all that a layout permits."""
    is_grouped = 1 < layout.group_size < layout.ranks
    if request.algorithms:
        grouped = [name for name in request.algorithms if name in GROUPED_ALGORITHMS]
        if grouped and not is_grouped:
            raise UserError(
                f"--algorithms {grouped[0]}: needs two groups of two ranks or more, here are {layout.num_groups} of "
                f"{layout.group_size}; set --group-size"
            )
        return request.algorithms
    return tuple(name for name in ALGORITHMS[request.collective] if is_grouped or name not in GROUPED_ALGORITHMS)


def _modelled(case: _Case, name: str) -> PredictedSeries:
    request = case.request
    workload = [] if request.workload_bytes is None else [case.whole(request.workload_bytes)]
    prices = [case.price(name, size) for size in (*request.sizes, *workload)]
    error = case.network.error_of(request.collective, name)
    series = _series(name, prices, request)
    return replace(series, poor_error=error.worst) if error is not None and error.is_poor else series


def _line_series(line: LineCost, request: PredictionRequest) -> PredictedSeries:
    prices = []
    for size in (*request.sizes, *filter(None, [request.workload_bytes])):
        seconds, wide = line.time(size), line.half_width
        price = Price(seconds) if wide is None else Price(seconds, seconds / (1 + wide), seconds * (1 + wide))
        prices.append(price)
    beyond = "" if line.sizes is None else "".join(_sizes_beyond(request.sizes, line.sizes))
    return replace(_series(line.name, prices, request), is_line=True, beyond=beyond)


def _series(name: str, prices: Sequence[Price], request: PredictionRequest) -> PredictedSeries:
    """Returns a series of the prices of all sizes, and of all gradients last where they are asked for."""
    of_sizes = prices[: len(request.sizes)]
    workload = None if request.workload_bytes is None else prices[-1]
    return PredictedSeries(
        name=name,
        is_line=False,
        seconds=tuple(price.seconds for price in of_sizes),
        low=tuple(price.low for price in of_sizes if price.low is not None) or None,
        high=tuple(price.high for price in of_sizes if price.high is not None) or None,
        phi=tuple(price.phi for price in prices if price.phi is not None),
        beyond="",
        workload_s=workload and workload.seconds,
        workload_low_s=workload and workload.low,
        workload_high_s=workload and workload.high,
    )


def _fusion(case: _Case, series: Sequence[PredictedSeries]) -> dict[str, Any]:
    """Returns the fields on the size of fused messages: by lines measured at this rank count, or by predicted times."""
    network, request, ranks = case.network, case.request, case.layout.ranks
    # Lines of other collectives have their name between the carrier's and the algorithm's.
    lines = [line for line in network.collectives if line.ranks == ranks and line.name.count(" ") == 1 and line.sizes]
    if request.collective == "allreduce" and not request.algorithms and lines:
        # Messages are fused for the sake of large ones: the line that is fastest at the largest measured size.
        largest = max(line.sizes[1] for line in lines if line.sizes)
        line = min(lines, key=lambda line: line.time(largest))
        size = fusion_bytes(line.startup_s, line.per_byte_s)
        if math.isfinite(size):
            of_line = {"fusion_of": line.name, "fusion_is_measured": True}
            return of_line | _fused(case, size, line.sizes, line.time)
    best = min(series, key=lambda one: one.seconds[-1], default=None)
    if best is None:
        return {}
    of_best = {"fusion_of": best.name}
    if len(request.sizes) < 2:
        return of_best
    line = fit_line(best.name, ranks, request.sizes, best.seconds)
    if line.per_byte_s <= 0 or line.startup_s <= 0:
        return of_best
    size = max(1.0, fusion_bytes(line.startup_s, line.per_byte_s))
    time = line.time if best.is_line else lambda num_bytes: case.price(best.name, int(num_bytes)).seconds
    measured = None if network.fitted_over is None else network.fitted_over.sizes
    return of_best | _fused(case, size, measured, time)


def _fused(case: _Case, size: float, measured: tuple[int, int] | None, time: Callable[[int], float]) -> dict[str, Any]:
    """Returns a size of fused messages with the fields that follow from it. `measured`: smallest and largest size."""
    fields: dict[str, Any] = {"fusion_bytes": size}
    if measured is not None and size > measured[1]:
        fields["fusion_limit"] = measured[1]
    workload = case.request.workload_bytes
    if workload is not None and size >= 1:
        messages = math.ceil(workload / size)
        fields["fusion_messages"] = messages
        fields["fusion_workload_s"] = messages * time(case.whole(workload / messages))
    return fields
