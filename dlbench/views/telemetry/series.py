"""What a node measured over time as few points, for drawing: smallest and largest values kept, gaps kept open.

Nothing is interpolated over a gap: between two points on its sides stands one without a value. Times are seconds from
the begin of the measured window, on the node's own clock.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench.reading.samples.integral import counter_curve, joined
from dlbench.reading.samples.node_means import COUNTERS
from dlbench.reading.samples.node_samples import Interval, NodeSamples, NodeStages
from dlbench.records.throttle_reasons import THROTTLING_MASK, throttling_names

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

MAX_POINTS = 200
"""Points of a line, those without a value counted."""
MAX_STRETCHES = 40
"""Of a lane: further ones are joined to their nearest neighbours."""

_KEPT_GAPS = 10
"""The longest gaps, both of whose sides are points."""

SeriesPoint = tuple[float, float | None]
"""Seconds, and a value; None within a gap."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A time in which a lane was at a stage, or throttled."""

    lane: str
    """Name of a GPU or a node."""
    begin_s: float
    end_s: float
    name: str
    """The stage, or the reasons."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Values over time, and between which neighbours nothing is known."""

    time_ns: Times
    values: Floats
    gap_behind: Flags
    """Shape (n - 1,)."""


def series(samples: NodeSamples, names: Sequence[str], window: Interval) -> tuple[SeriesPoint, ...]:
    """The mean (host.cpu.N.busy) or sum (anything else) of fields over time; of counters the rate, per second.

    Args:
        samples: of one node.
        names: fields of one kind, all of them sampled.
        window: of the measured steps; its begin is second 0.
    """
    import numpy as np

    line = _line(samples, names)
    if not len(line.values):
        return ()
    found: list[SeriesPoint] = []
    chosen = thinned(line.time_ns, line.values, line.gap_behind)
    holes = np.concatenate([[0], np.cumsum(line.gap_behind)])
    for place, index in enumerate(chosen):
        if place and holes[index] != holes[chosen[place - 1]]:
            middle = (int(line.time_ns[index]) + int(line.time_ns[chosen[place - 1]])) // 2
            found.append(((middle - window[0]) / 1e9, None))
        found.append(((int(line.time_ns[index]) - window[0]) / 1e9, float(line.values[index])))
    return tuple(found)


def _line(samples: NodeSamples, names: Sequence[str]) -> _Line:
    import numpy as np

    if COUNTERS.fullmatch(names[0]):
        values = np.sum([samples.columns[name] for name in names], axis=0)
        return _rates(samples, values, max(samples.period_of(name) for name in names))
    each = [samples.columns[name] for name in names]
    values = np.mean(each, axis=0) if names[0].endswith("busy") else np.sum(each, axis=0)
    held = np.isfinite(values)
    times = samples.time_ns[held]
    near = joined(times, max(samples.period_of(name) for name in names))
    return _Line(time_ns=times, values=values[held], gap_behind=~near)


def _rates(samples: NodeSamples, values: Floats, period_s: float) -> _Line:
    """The rate between neighbouring samples, in the middle between them; what a gap bridges is not drawn."""
    import numpy as np

    curve = counter_curve(samples.time_ns, values, period_s)
    drawn = np.flatnonzero(curve.known & ~curve.bridged)
    start, stop = curve.time_ns[:-1][drawn], curve.time_ns[1:][drawn]
    return _Line(time_ns=start + (stop - start) // 2, values=curve.begin_rate[drawn], gap_behind=np.diff(drawn) != 1)


def thinned(time_ns: Times, values: Floats, gap_behind: Flags, max_points: int = MAX_POINTS) -> list[int]:
    """Which points stand for all: the smallest and largest of equal spans of time, both sides of the longest gaps.

    With a point in every gap between two chosen ones there are at most `max_points`.

    Args:
        time_ns: growing, shape (n,).
        values: finite, shape (n,).
        gap_behind: whether nothing is known between a point and the next, shape (n - 1,).
        max_points: at least 50.
    """
    import numpy as np

    count = len(time_ns)
    gaps = np.flatnonzero(gap_behind)
    if count + len(gaps) <= max_points:
        return list(range(count))
    longest = gaps[np.argsort(np.diff(time_ns)[gaps], kind="stable")[::-1][:_KEPT_GAPS]]
    chosen = {0, count - 1, *longest.tolist(), *(longest + 1).tolist()}
    # Every gap may need a point of its own: many gaps leave less room for values.
    room = max_points - len(chosen) - len(gaps)
    spans = max(room, (max_points - 2 * len(chosen)) // 2) // 2
    length = int(time_ns[-1] - time_ns[0]) + 1
    bucket = ((time_ns - time_ns[0]) * spans) // length
    edges = np.searchsorted(bucket, np.arange(spans + 1))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if begin < end:
            chosen |= {begin + int(values[begin:end].argmin()), begin + int(values[begin:end].argmax())}
    return sorted(chosen)


def stage_stretches(lane: str, stages: NodeStages) -> tuple[Stretch, ...]:
    """The stages of a node without idle times; second 0 is the begin of the measured window."""
    start = stages.measured[0]
    stretches = [
        Stretch(lane=lane, begin_s=(begin - start) / 1e9, end_s=(end - start) / 1e9, name=stage)
        for stage, begin, end in stages.pieces
        if stage != "idle"
    ]
    return _joined_stretches(stretches)


def throttled_stretches(lane: str, samples: NodeSamples, gpu: int, window: Interval) -> tuple[Stretch, ...]:
    """When a GPU's clock was held down, with the reasons; a sample stands for half the way to its neighbours.

    Samples at the sides of a gap stand for nothing of the gap.
    """
    import numpy as np

    column = samples.columns.get(f"gpu.{gpu}.clock_reasons")
    if column is None:
        return ()
    held = np.isfinite(column)
    times, masks = samples.time_ns[held], column[held].astype(np.int64) & THROTTLING_MASK
    near = joined(times, samples.period_of(f"gpu.{gpu}.clock_reasons"))
    middle = (times[:-1] + np.diff(times) // 2 - window[0]) / 1e9
    own = (times - window[0]) / 1e9
    begins = np.concatenate([own[:1], np.where(near, middle, own[1:])])
    ends = np.concatenate([np.where(near, middle, own[:-1]), own[-1:]])
    stretches: list[Stretch] = []
    for index in np.flatnonzero(masks).tolist():
        name, begin, end = ", ".join(throttling_names(int(masks[index]))), float(begins[index]), float(ends[index])
        if stretches and stretches[-1].name == name and stretches[-1].end_s == begin:
            stretches[-1] = replace(stretches[-1], end_s=end)
        else:
            stretches.append(Stretch(lane=lane, begin_s=begin, end_s=end, name=name))
    return _joined_stretches(stretches)


def _joined_stretches(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """At most `MAX_STRETCHES`: those that are nearest to each other become one, which says so."""
    breaks = [after.begin_s - before.end_s for before, after in itertools.pairwise(stretches)]
    widest = sorted(range(len(breaks)), key=lambda place: -breaks[place])[: MAX_STRETCHES - 1]
    edges = [0, *sorted(place + 1 for place in widest), len(stretches)]
    return tuple(_one_stretch(stretches[begin:end]) for begin, end in itertools.pairwise(edges) if begin < end)


def _one_stretch(stretches: Sequence[Stretch]) -> Stretch:
    if len(stretches) == 1:
        return stretches[0]
    names = ", ".join(dict.fromkeys(stretch.name for stretch in stretches))
    return replace(stretches[0], end_s=stretches[-1].end_s, name=f"{names} (at times)")


def cpu_fields(samples: NodeSamples) -> list[str]:
    """The fields whose mean is how busy the node's cores were; none where they were not sampled."""
    cores = [name for name in samples.columns if re.fullmatch(r"host\.cpu\.\d+\.busy", name)]
    return cores or [name for name in ("host.cpu.mean.busy",) if name in samples.columns]
