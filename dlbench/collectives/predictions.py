"""What a fitted network expects of collectives at layouts and sizes that need not have been measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dlbench.collectives.choice import (
    RATE_SHARE,
    STAY_WITHIN,
    Recommended,
    Standing,
    fusion_bytes,
    fusion_line,
    ranges_of,
)
from dlbench.costs.collectives import Layout
from dlbench.costs.link_fit import fit_line
from dlbench.costs.predictions import crossovers, features, predict
from dlbench.errors import UserError, nearest
from dlbench.specs.base import Precision
from dlbench.specs.collectives import (
    ALGORITHMS,
    ELEMENT_BYTES,
    GROUPED_ALGORITHMS,
    Collective,
    FitError,
    FittedRange,
    LargestHeldOut,
    LineCost,
    NetworkModel,
)
from dlbench.units import format_bytes

FORMAT = "dlbench.comm-prediction"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of a network."""

    collective: Collective = "allreduce"
    algorithms: tuple[str, ...] = ()
    """None: all that the layout permits."""
    sizes: tuple[int, ...]
    """Bytes of each rank's whole buffer, ascending."""
    dtype: Precision = "fp32"
    group_size: int | None = None
    """Ranks of a group; None: all ranks are one group."""
    shards: int | None = None
    workload_bytes: int | None = None
    """Bytes of all gradients of a step, to be exchanged as a whole."""


@dataclass(frozen=True, kw_only=True)
class PredictedSeries:
    """Predicted times of one algorithm, or of a library's line."""

    name: str
    is_line: bool
    """Whether it is a line through measured sizes at this rank count, and no model."""
    seconds: tuple[float, ...]
    """By size."""
    low: tuple[float, ...] | None
    """Low ends of 95 % intervals, by size; None: the fit is of single runs."""
    high: tuple[float, ...] | None
    beyond: str
    """For a line, why it is an extrapolation at some of these sizes; empty where it is none."""
    workload_s: float | None
    """Of all gradients as one message."""
    workload_low_s: float | None = None
    workload_high_s: float | None = None
    poor_error: float | None = None
    """Worst error of the fit where it misses this algorithm too far for advice (fraction); None where it does not."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One layout."""

    ranks: int
    group_size: int
    extrapolated: tuple[str, ...]
    """What is asked beyond the points behind the fitted costs, each in words; not of lines."""
    largest_held_out: LargestHeldOut | None
    """How far the same fit is off one step beyond its points."""
    series: tuple[PredictedSeries, ...]
    best: tuple[str, ...]
    """Fastest by size, of those that the fit does not miss."""
    ranges: tuple[Recommended, ...]
    """What to use by size, where the fastest is so beyond the intervals of predictions."""
    withheld: str
    """Why no algorithm is predicted, in a sentence: a fit that misses the largest rank count says nothing of more."""
    crossovers: tuple[tuple[int, str, str], ...]
    """First size of the new best, bytes; from which; to which."""
    fusion_of: str
    """What is best at the largest size."""
    fusion_is_measured: bool
    """Whether it is of a line measured at this rank count, as in the report of the runs; else of predicted times."""
    fusion_bytes: float | None
    """Smallest message that reaches `RATE_SHARE` of its asymptotic rate; None with one size or with free bytes."""
    fusion_messages: int | None
    """Messages of that size that all gradients make."""
    fusion_workload_s: float | None
    """Seconds that these take one after the other, without any overlap."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a network expects of one collective, at each layout."""

    format: str = FORMAT
    version: int = VERSION
    system: str
    transport: str
    collective: Collective
    dtype: Precision
    sizes: tuple[int, ...]
    workload_bytes: int | None
    predictions: tuple[Prediction, ...]
    network: NetworkModel = field(metadata={"json": False})


def predict_all(network: NetworkModel, ranks: Sequence[int], wanted: Wanted) -> Predictions:
    """Predictions for each rank count.

    Raises:
        UserError: an unknown algorithm, groups that do not divide the ranks, or a level that was never measured.
    """
    known = ALGORITHMS[wanted.collective]
    for name in wanted.algorithms:
        if name not in known:
            raise UserError(f"--algorithms: {name!r} is no algorithm of {wanted.collective}: {nearest(name, known)}")
    return Predictions(
        system=network.system,
        transport=network.transport,
        collective=wanted.collective,
        dtype=wanted.dtype,
        sizes=wanted.sizes,
        workload_bytes=wanted.workload_bytes,
        predictions=tuple(_predict(network, count, wanted) for count in ranks),
        network=network,
    )


def _predict(network: NetworkModel, ranks: int, wanted: Wanted) -> Prediction:
    layout = _layout(ranks, wanted)
    has_levels = network.inside is not None or network.across is not None
    algorithms = _algorithms(wanted, layout) if has_levels or wanted.algorithms else ()
    sizes = (*wanted.sizes, *filter(None, [wanted.workload_bytes]))
    withheld = network.why_withheld(ranks, sizes) if algorithms else ""
    algorithms = () if withheld else algorithms
    series = _series(network, algorithms, layout, wanted, withheld)
    usable = [one for one in series if one.poor_error is None] or series
    fusion = _measured_fusion(network, layout, wanted) or _fusion(network, usable, layout, wanted)
    return Prediction(
        ranks=ranks,
        group_size=layout.group_size,
        extrapolated=_beyond(network.fitted_over, layout, wanted) if algorithms else (),
        largest_held_out=network.largest_held_out,
        series=tuple(series),
        best=tuple(
            min(usable, key=lambda one: one.seconds[index]).name for index in range(len(wanted.sizes) if usable else 0)
        ),
        ranges=ranges_of([_standing(usable, place, size) for place, size in enumerate(wanted.sizes) if usable]),
        withheld=withheld,
        crossovers=_crossovers(
            network, [name for name in algorithms if not network.is_poor(wanted.collective, name)], layout, wanted
        ),
        fusion_of=fusion.name,
        fusion_is_measured=fusion.is_measured,
        fusion_bytes=fusion.num_bytes,
        fusion_messages=fusion.messages,
        fusion_workload_s=fusion.workload_s,
    )


def _standing(series: Sequence[PredictedSeries], place: int, size: int) -> Standing:
    """The fastest at one size; series whose interval it reaches, and those a few percent slower, are as good as it."""
    first, *others = sorted(series, key=lambda one: one.seconds[place])
    fastest, end = first.seconds[place], first.seconds[place] if first.high is None else first.high[place]
    tied = [
        one
        for one in others
        if one.seconds[place] <= fastest * (1 + STAY_WITHIN) or (one.low is not None and one.low[place] <= end)
    ]
    return Standing(
        num_bytes=size,
        title=first.name,
        is_clear=not tied,
        tied=(first.name, *(one.name for one in tied)),
        spread=max((one.seconds[place] / fastest - 1 for one in tied), default=0.0),
    )


def _beyond(fitted: FittedRange | None, layout: Layout, wanted: Wanted) -> tuple[str, ...]:
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
    sizes = (*wanted.sizes, *([] if wanted.workload_bytes is None else [wanted.workload_bytes]))
    return (*found, *_sizes_beyond(sizes, fitted.sizes))


def _sizes_beyond(sizes: Sequence[int], fitted: tuple[int, int]) -> tuple[str, ...]:
    outside = [size for size in sizes if not fitted[0] <= size <= fitted[1]]
    if not outside:
        return ()
    where = " and ".join(format_bytes(size) for size in dict.fromkeys((min(outside), max(outside))))
    return (f"{where}, fitted from {format_bytes(fitted[0])} to {format_bytes(fitted[1])}",)


def _layout(ranks: int, wanted: Wanted) -> Layout:
    group = wanted.group_size or ranks
    if ranks < 2:
        raise UserError(f"--ranks {ranks}: a collective needs two ranks or more")
    if ranks % group:
        raise UserError(f"--group-size {group}: does not divide {ranks} ranks into groups")
    return Layout(ranks=ranks, group_size=group)


def _series(
    network: NetworkModel, algorithms: Sequence[str], layout: Layout, wanted: Wanted, withheld: str
) -> list[PredictedSeries]:
    series = [
        _series_of(
            name,
            [_interval(network, name, size, layout, wanted) for size in wanted.sizes],
            network.error_of(wanted.collective, name),
        )
        for name in algorithms
    ]
    if wanted.workload_bytes is not None:
        series = [
            _with_workload(one, network, _rounded(wanted.workload_bytes, wanted), layout, wanted) for one in series
        ]
    if not wanted.algorithms:
        series += _lines(network, layout.ranks, wanted)
    if not series and not withheld:
        measured = sorted({line.ranks for line in network.collectives})
        raise UserError(
            f"--ranks {layout.ranks}: the network of {network.system} holds lines alone, for "
            f"{', '.join(map(str, measured))} ranks; fit runs of dlbench's own algorithms to predict others"
        )
    return series


def _series_of(
    name: str, times: Sequence[tuple[float, float | None, float | None]], error: FitError | None
) -> PredictedSeries:
    lows, highs = [low for _, low, _ in times if low is not None], [high for *_, high in times if high is not None]
    has_ends = len(lows) == len(highs) == len(times)
    return PredictedSeries(
        poor_error=error.worst if error is not None and error.is_poor else None,
        name=name,
        is_line=False,
        seconds=tuple(value for value, _, _ in times),
        low=tuple(lows) if has_ends else None,
        high=tuple(highs) if has_ends else None,
        beyond="",
        workload_s=None,
    )


def _interval(
    network: NetworkModel, name: str, num_bytes: int, layout: Layout, wanted: Wanted
) -> tuple[float, float | None, float | None]:
    """A predicted time with the middle 95 % of the network's draws, wider by how far the fit itself is off.

    That is its residual at the fitted rank counts next to this one. What a fit to the smaller rank counts missed at the
    largest one, it is taken to miss again for each step as long (in doublings) beyond that.
    """
    import numpy as np

    width = ELEMENT_BYTES[wanted.dtype]
    found = features(wanted.collective, name, num_bytes, layout, network, element_bytes=width, shards=wanted.shards)
    value = found.seconds(network)
    drawn = found.drawn(network)
    if not drawn:
        return value, None, None
    low, high = np.percentile(drawn, [2.5, 97.5])
    least, most = network.residual(wanted.collective, name, layout.ranks)
    factor = _continued_bias(network.largest_held_out, num_bytes, layout.ranks)
    return value, min(value, float(low) * least * min(1.0, factor)), max(value, float(high) * most * max(1.0, factor))


def _continued_bias(told: LargestHeldOut | None, num_bytes: int, ranks: int) -> float:
    """Measured over predicted (1) if the bias at the largest rank count, that of the nearest size, goes on."""
    if told is None or ranks <= told.ranks:
        return 1.0
    nearest_size = min(told.by_size, key=lambda one: abs(math.log(one.num_bytes / max(1, num_bytes))))
    steps = math.log(ranks / told.ranks) / math.log(told.ranks / told.fitted_ranks[-1])
    return float((1 / nearest_size.ratio) ** steps)


def _crossovers(
    network: NetworkModel, algorithms: Sequence[str], layout: Layout, wanted: Wanted
) -> tuple[tuple[int, str, str], ...]:
    sizes = wanted.sizes
    if len(algorithms) < 2 or len(sizes) < 2:
        return ()
    return tuple(
        crossovers(
            wanted.collective,
            algorithms,
            layout,
            network,
            sizes[0],
            sizes[-1],
            element_bytes=ELEMENT_BYTES[wanted.dtype],
            shards=wanted.shards,
        )
    )


def _algorithms(wanted: Wanted, layout: Layout) -> tuple[str, ...]:
    is_grouped = 1 < layout.group_size < layout.ranks
    if wanted.algorithms:
        grouped = [name for name in wanted.algorithms if name in GROUPED_ALGORITHMS]
        if grouped and not is_grouped:
            raise UserError(
                f"--algorithms {grouped[0]}: needs two groups of two ranks or more, here are {layout.num_groups} of "
                f"{layout.group_size}; set --group-size"
            )
        return wanted.algorithms
    return tuple(name for name in ALGORITHMS[wanted.collective] if is_grouped or name not in GROUPED_ALGORITHMS)


def _seconds(network: NetworkModel, name: str, num_bytes: int, layout: Layout, wanted: Wanted) -> float:
    width = ELEMENT_BYTES[wanted.dtype]
    return predict(wanted.collective, name, num_bytes, layout, network, element_bytes=width, shards=wanted.shards)


def _with_workload(
    series: PredictedSeries, network: NetworkModel, num_bytes: int, layout: Layout, wanted: Wanted
) -> PredictedSeries:
    value, low, high = _interval(network, series.name, num_bytes, layout, wanted)
    return replace(series, workload_s=value, workload_low_s=low, workload_high_s=high)


def _rounded(num_bytes: float, wanted: Wanted) -> int:
    """To whole elements, at least one."""
    width = ELEMENT_BYTES[wanted.dtype]
    return max(1, round(num_bytes / width)) * width


def _lines(network: NetworkModel, ranks: int, wanted: Wanted) -> list[PredictedSeries]:
    """Lines of libraries' all-reduces that were measured at this rank count."""
    if wanted.collective != "allreduce":
        return []
    return [
        _line_series(line, wanted)
        for line in network.collectives
        if line.ranks == ranks and line.name.endswith(" flat")
    ]


def _line_series(line: LineCost, wanted: Wanted) -> PredictedSeries:
    seconds = [line.time(size) for size in wanted.sizes]
    wide = line.half_width
    whole = None if wanted.workload_bytes is None else line.time(wanted.workload_bytes)
    beyond = () if line.sizes is None else _sizes_beyond(wanted.sizes, line.sizes)
    return PredictedSeries(
        name=line.name,
        is_line=True,
        seconds=tuple(seconds),
        low=None if wide is None else tuple(one / (1 + wide) for one in seconds),
        high=None if wide is None else tuple(one * (1 + wide) for one in seconds),
        beyond="".join(beyond),
        workload_s=whole,
        workload_low_s=None if whole is None or wide is None else whole / (1 + wide),
        workload_high_s=None if whole is None or wide is None else whole * (1 + wide),
    )


@dataclass(frozen=True, kw_only=True)
class _Fusion:
    """Start-up and bytes of the best series at the largest size as a line, and what follows."""

    name: str
    num_bytes: float | None
    messages: int | None = None
    workload_s: float | None = None
    is_measured: bool = False


def _measured_fusion(network: NetworkModel, layout: Layout, wanted: Wanted) -> _Fusion | None:
    """From the lines measured at this rank count, by the rule of the report; None where none is asked for or known."""
    lines = [one for one in network.collectives if one.ranks == layout.ranks and _is_allreduce(one) and one.sizes]
    if wanted.collective != "allreduce" or wanted.algorithms or not lines:
        return None
    line = fusion_line(lines, max(one.sizes[1] for one in lines if one.sizes))
    size = fusion_bytes(line.startup_s, line.per_byte_s, RATE_SHARE)
    if not math.isfinite(size):
        return None
    if wanted.workload_bytes is None or size < 1:
        return _Fusion(name=line.name, num_bytes=size, is_measured=True)
    messages = math.ceil(wanted.workload_bytes / size)
    seconds = messages * line.time(_rounded(wanted.workload_bytes / messages, wanted))
    return _Fusion(name=line.name, num_bytes=size, messages=messages, workload_s=seconds, is_measured=True)


def _is_allreduce(line: LineCost) -> bool:
    """Lines of other collectives have their name between the carrier's and the algorithm's."""
    return line.name.count(" ") == 1


def _fusion(network: NetworkModel, series: Sequence[PredictedSeries], layout: Layout, wanted: Wanted) -> _Fusion:
    if not series:
        return _Fusion(name="", num_bytes=None)
    best = min(series, key=lambda one: one.seconds[-1])
    if len(wanted.sizes) < 2:
        return _Fusion(name=best.name, num_bytes=None)
    line = fit_line(best.name, layout.ranks, wanted.sizes, best.seconds)
    if line.per_byte_s <= 0 or line.startup_s <= 0:
        return _Fusion(name=best.name, num_bytes=None)
    size = max(1.0, fusion_bytes(line.startup_s, line.per_byte_s, RATE_SHARE))
    if wanted.workload_bytes is None:
        return _Fusion(name=best.name, num_bytes=size)
    messages = math.ceil(wanted.workload_bytes / size)
    each = _rounded(wanted.workload_bytes / messages, wanted)
    seconds = line.time(each) if best.is_line else _seconds(network, best.name, each, layout, wanted)
    return _Fusion(name=best.name, num_bytes=size, messages=messages, workload_s=messages * seconds)
