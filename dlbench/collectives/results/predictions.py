"""What a fitted network expects of collectives at layouts and sizes that need not have been measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.collectives.results.choice import RATE_SHARE, fusion_bytes
from dlbench.costs.collectives import Layout
from dlbench.costs.fit.link_fit import fit_line
from dlbench.costs.predictions import crossovers, predict
from dlbench.errors import UserError, nearest
from dlbench.specs.base import Precision
from dlbench.specs.collectives.network import NetworkModel
from dlbench.specs.collectives.plan import ALGORITHMS, ELEMENT_BYTES, GROUPED_ALGORITHMS, Collective

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
    workload_s: float | None
    """Of all gradients as one message."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One layout."""

    ranks: int
    group_size: int
    measured_ranks: int | None
    """Largest rank count behind the fit; None where the file does not say."""
    series: tuple[PredictedSeries, ...]
    best: tuple[str, ...]
    """Fastest algorithm by size."""
    crossovers: tuple[tuple[int, str, str], ...]
    """First size of the new best, bytes; from which; to which."""
    fusion_of: str
    """What is best at the largest size."""
    fusion_bytes: float | None
    """Smallest message that reaches `RATE_SHARE` of its asymptotic rate; None with one size or with free bytes."""
    fusion_messages: int | None
    """Messages of that size that all gradients make."""
    fusion_workload_s: float | None
    """Seconds that these take one after the other, without any overlap."""
    is_extrapolated: bool
    """Whether there are more ranks than were ever measured."""


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
    series = _series(network, algorithms, layout, wanted)
    fusion = _fusion(network, series, layout, wanted)
    measured = max((line.ranks for line in network.collectives), default=None)
    return Prediction(
        ranks=ranks,
        group_size=layout.group_size,
        measured_ranks=measured,
        series=tuple(series),
        best=tuple(min(series, key=lambda one: one.seconds[index]).name for index in range(len(wanted.sizes))),
        crossovers=_crossovers(network, algorithms, layout, wanted),
        fusion_of=fusion.name,
        fusion_bytes=fusion.num_bytes,
        fusion_messages=fusion.messages,
        fusion_workload_s=fusion.workload_s,
        is_extrapolated=measured is not None and ranks > measured,
    )


def _layout(ranks: int, wanted: Wanted) -> Layout:
    group = wanted.group_size or ranks
    if ranks < 2:
        raise UserError(f"--ranks {ranks}: a collective needs two ranks or more")
    if ranks % group:
        raise UserError(f"--group-size {group}: does not divide {ranks} ranks into groups")
    return Layout(ranks=ranks, group_size=group)


def _series(network: NetworkModel, algorithms: Sequence[str], layout: Layout, wanted: Wanted) -> list[PredictedSeries]:
    series = [
        PredictedSeries(
            name=name,
            is_line=False,
            seconds=tuple(_seconds(network, name, size, layout, wanted) for size in wanted.sizes),
            workload_s=_whole(network, name, layout, wanted),
        )
        for name in algorithms
    ]
    if not wanted.algorithms:
        series += _lines(network, layout.ranks, wanted)
    if not series:
        measured = sorted({line.ranks for line in network.collectives})
        raise UserError(
            f"--ranks {layout.ranks}: the network of {network.system} holds lines alone, for "
            f"{', '.join(map(str, measured))} ranks; fit runs of dlbench's own algorithms to predict others"
        )
    return series


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


def _whole(network: NetworkModel, name: str, layout: Layout, wanted: Wanted) -> float | None:
    if wanted.workload_bytes is None:
        return None
    return _seconds(network, name, _rounded(wanted.workload_bytes, wanted), layout, wanted)


def _rounded(num_bytes: float, wanted: Wanted) -> int:
    """To whole elements, at least one."""
    width = ELEMENT_BYTES[wanted.dtype]
    return max(1, round(num_bytes / width)) * width


def _lines(network: NetworkModel, ranks: int, wanted: Wanted) -> list[PredictedSeries]:
    """Lines of libraries' all-reduces that were measured at this rank count."""
    if wanted.collective != "allreduce":
        return []
    whole = wanted.workload_bytes
    return [
        PredictedSeries(
            name=line.name,
            is_line=True,
            seconds=tuple(line.time(size) for size in wanted.sizes),
            workload_s=None if whole is None else line.time(whole),
        )
        for line in network.collectives
        if line.ranks == ranks and line.name.endswith(" flat")
    ]


@dataclass(frozen=True, kw_only=True)
class _Fusion:
    """Start-up and bytes of the best series at the largest size as a line, and what follows."""

    name: str
    num_bytes: float | None
    messages: int | None = None
    workload_s: float | None = None


def _fusion(network: NetworkModel, series: Sequence[PredictedSeries], layout: Layout, wanted: Wanted) -> _Fusion:
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
