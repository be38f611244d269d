"""Summaries of a node's samples in the measured window: power, clocks, utilisation, memory and traffic."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.analysis.telemetry.integral import counter_curve, joined
from dlbench.analysis.telemetry.node_samples import Interval, NodeSamples
from dlbench.analysis.telemetry.throttling import nearest_time
from dlbench.lazy import Array, np
from dlbench.records.throttle_reasons import clock_reason_names

COUNTERS = re.compile(r".*(_j|throttled_s|(received|sent|read|written)_bytes|pcie_replays|ecc_(un)?corrected)")
"""Fields that are counters with any start value: their rate is reported."""


@dataclass(frozen=True, kw_only=True)
class FieldSummary:
    """A field in the measured window; for a counter its rate, in its unit per second."""

    name: str
    is_rate: bool
    mean: float  # Mean over samples; of a counter over the time between its first and last value.
    median: float
    lowest: float
    highest: float
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class NodeTelemetry:
    """A node in the measured window."""

    node_rank: int
    host: str
    window_s: float
    num_samples: int  # Samples in the window.
    num_gaps: int  # Gaps of more than five periods without a sample.
    missing: float  # Share of the window in such gaps, before the first and after the last sample (1).
    fields: dict[str, FieldSummary]
    """Fields with values, by name; `host.cpu.busy` is the mean of all cores."""
    clock_reasons: dict[str, dict[str, float]]
    """For each GPU (`gpu.0`) the share of the sampled time in which a reason held its clock, by reason (1)."""
    unavailable: dict[str, str]
    failures: tuple[str, ...]


def node_telemetry(samples: NodeSamples, window: Interval, is_wanted: Callable[[str], object]) -> NodeTelemetry:
    """Returns the summary of a node's measured window, with the wanted fields."""
    times = samples.time_ns
    first, last = np.maximum(times[:-1], window[0]), np.minimum(times[1:], window[1])
    near = joined(times, samples.period_s)
    inside = last > first
    sampled = int((last - first)[inside & near].sum())
    columns = {name: values for name, values in samples.columns.items() if is_wanted(name)}
    busy = [values for name, values in samples.columns.items() if re.fullmatch(r"host\.cpu\.\d+\.busy", name)]
    if busy:
        columns["host.cpu.busy"] = np.mean(busy, axis=0)
    return NodeTelemetry(
        node_rank=samples.node_rank,
        host=samples.host,
        window_s=(window[1] - window[0]) / 1e9,
        num_samples=int(((times >= window[0]) & (times <= window[1])).sum()),
        num_gaps=int((inside & ~near).sum()),
        missing=1 - sampled / max(1, window[1] - window[0]),
        fields=_summaries(samples, columns, window),
        clock_reasons=_clock_reasons(samples, window),
        unavailable=samples.unavailable,
        failures=samples.failures,
    )


def _summaries(samples: NodeSamples, columns: Mapping[str, Array], window: Interval) -> dict[str, FieldSummary]:
    inside = (samples.time_ns >= window[0]) & (samples.time_ns <= window[1])
    summaries: dict[str, FieldSummary] = {}
    # Fields that were read at the same times are processed together: for one the calls take longer than the arithmetic.
    names_by_mask: dict[bytes, list[str]] = {}
    for name, values in columns.items():
        if COUNTERS.fullmatch(name) is None:
            names_by_mask.setdefault((inside & np.isfinite(values)).tobytes(), []).append(name)
            continue
        curve = counter_curve(samples.time_ns, values, samples.period_of(name))
        rates = curve.begin_rate[curve.known_within(*window)][None]
        for summary in _summarised([name], rates, is_rate=True).values():
            mean = curve.over(*window).rate
            summaries[name] = summary if mean is None else replace(summary, mean=mean)
    for mask, names in names_by_mask.items():
        stacked = np.stack([columns[name] for name in names]).compress(np.frombuffer(mask, dtype=np.bool_), axis=1)
        summaries |= _summarised(names, stacked, is_rate=False)
    return {name: summaries[name] for name in columns if name in summaries}


def _summarised(names: Sequence[str], values: Array, *, is_rate: bool) -> dict[str, FieldSummary]:
    """Returns the summaries of fields from their values, shape (fields, values); nothing without values."""
    if not values.size:
        return {}
    figures = values.mean(axis=1).tolist(), np.median(values, axis=1).tolist()
    ends = values.min(axis=1).tolist(), values.max(axis=1).tolist()
    return {
        name: FieldSummary(
            name=name,
            is_rate=is_rate,
            mean=mean,
            median=median,
            lowest=lowest,
            highest=highest,
            num_samples=values.shape[1],
        )
        for name, mean, median, lowest, highest in zip(names, *figures, *ends, strict=True)
    }


def _clock_reasons(samples: NodeSamples, window: Interval) -> dict[str, dict[str, float]]:
    seconds_by_field: dict[str, dict[str, float]] = {}
    for name, values in samples.columns.items():
        if re.fullmatch(r"gpu\.\d+\.clock_reasons", name) is None:
            continue
        is_finite = np.isfinite(values)
        masks = values[is_finite].astype(np.int64)
        weight = nearest_time(samples.time_ns[is_finite], window, samples.period_of(name))
        shares: dict[str, float] = {}
        for mask in np.unique(masks[weight > 0]).tolist():
            time_share = float(weight[masks == mask].sum() / weight.sum())
            for reason in clock_reason_names(mask):
                shares[reason] = shares.get(reason, 0.0) + time_share
        if weight.sum():
            seconds_by_field[name.removesuffix(".clock_reasons")] = shares
    return seconds_by_field
