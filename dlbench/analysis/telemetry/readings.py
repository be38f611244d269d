"""Reads and summarises the samples of up to `MAX_NODES` nodes of a table in the measured window.

Median runs are first, the largest point is before others; summaries are of power, clocks, utilisation, memory, traffic.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dlbench.analysis.telemetry.energy import RunEnergy, run_energy
from dlbench.analysis.telemetry.node_samples import (
    EVERY_FIELD,
    Interval,
    NodeSamples,
    counter_curve,
    joined,
    measured_window,
    nodes_of,
    read_node,
    why_not_sampled,
)
from dlbench.analysis.telemetry.throttling import nearest_time
from dlbench.errors import IncompleteDataError
from dlbench.lazy import Array, np
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import clock_reason_names

COUNTERS = re.compile(r".*(_j|throttled_s|(received|sent|read|written)_bytes|pcie_replays|ecc_(un)?corrected)")
"""Fields that are counters with any start value: their rate is reported."""

MAX_NODES = 160  # Nodes whose samples are read for one table: a few seconds of work.
MAX_NODES_OF_LARGE_RUN = 8  # Nodes, evenly spaced, of the median run of a point with too many nodes.
FIELDS = re.compile(  # Fields that are summarised, in addition to `host.cpu.busy`.
    r"gpu\.\d+\.(power_w|sm_clock_hz|utilization|memory_used_bytes|temperature_c)"
    r"|host\.(cpu\.mean\.busy|memory_used_bytes|page_cache_bytes)"
    r"|host\.(net|infiniband)\..+\.(received|sent)_bytes|host\.disk\..+\.(read|written)_bytes"
)
Samples = Literal["none", "some", "all"]  # None, those of at most `MAX_NODES` nodes, or all with all fields.


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
    fields: dict[str, FieldSummary]  # Fields with values, by name; `host.cpu.busy` is the mean of all cores.
    clock_reasons: dict[str, dict[str, float]]  # Share of sampled time with a clock reason, by GPU, reason (1).
    unavailable: dict[str, str]
    failures: tuple[str, ...]


def node_telemetry(samples: NodeSamples, window: Interval, pattern: re.Pattern[str]) -> NodeTelemetry:
    """Returns the summary of a node's measured window, with the wanted fields."""
    times = samples.time_ns
    first, last = np.maximum(times[:-1], window[0]), np.minimum(times[1:], window[1])
    near = joined(times, samples.period_s)
    inside = last > first
    sampled = int((last - first)[inside & near].sum())
    columns = {name: values for name, values in samples.columns.items() if pattern.fullmatch(name)}
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
    names_by_mask: dict[tuple[bytes, bool, str], list[str]] = {}
    for name, values in columns.items():
        is_read, is_counter, fallen = np.isfinite(values), COUNTERS.fullmatch(name) is not None, ""
        if is_counter and (np.diff(values[is_read]) < 0).any():
            fallen = name
        names_by_mask.setdefault((is_read.tobytes(), is_counter, fallen), []).append(name)
    for (mask, is_counter, _), names in names_by_mask.items():
        stacked = np.stack([columns[name] for name in names])
        if not is_counter:
            stacked = stacked.compress(inside & np.frombuffer(mask, dtype=np.bool_), axis=1)
            summaries |= _summarised(names, stacked, is_rate=False)
            continue
        curve = counter_curve(samples.time_ns, stacked, samples.period_of(names[0]))
        rates = curve.begin_rate.compress(curve.known_within(*window), axis=1)
        summaries |= _summarised(names, rates, is_rate=True)
        values, known_ns = curve.integrals((window[0], max(window)))
        if rates.size and known_ns[0]:
            for name, mean in zip(names, (values[:, 0] / known_ns[0] * 1e9).tolist(), strict=True):
                summaries[name] = replace(summaries[name], mean=mean)
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
    shares_by_gpu: dict[str, dict[str, float]] = {}
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
            shares_by_gpu[name.removesuffix(".clock_reasons")] = shares
    return shares_by_gpu


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """Energy and telemetry of a run."""

    run_id: str
    energy: RunEnergy | None  # None if samples are damaged, or some nodes were left out.
    nodes: tuple[NodeTelemetry, ...]  # Telemetry of the measured window, by node.
    why: dict[str, str]  # Why nodes have no samples, by node (`node 3`).
    problem: str  # The damaged file and its error; empty if there is none.
    left_out: int = 0  # Nodes that were not read.


def read_machine(run: Run, nodes: Collection[int] | None = None, *, all_fields: bool = False) -> MachineReading:
    """Reads the samples of a run, of only some `nodes` without energy; summarises `FIELDS`, or `all_fields`."""
    pattern = EVERY_FIELD if all_fields else FIELDS
    all_nodes = nodes_of(run)
    has_energy = nodes is None
    if nodes is None:
        nodes = all_nodes
    reasons = {node: why_not_sampled(run, node) for node in nodes}
    telemetry: tuple[NodeTelemetry, ...] = ()
    energy, problem = None, ""
    try:
        sampled = {node: read_node(run, node, EVERY_FIELD) for node, reason in reasons.items() if not reason}
        telemetry = tuple(node_telemetry(sampled[node], measured_window(run, node), pattern) for node in sampled)
        if has_energy:
            energy = run_energy(run, sampled)
    except IncompleteDataError as error:
        problem = str(error)
    left_out = 0
    if not problem:
        left_out = len(all_nodes) - len(nodes)
    return MachineReading(
        run_id=run.plan.run_id,
        energy=energy,
        nodes=telemetry,
        why={f"node {node}": reason for node, reason in reasons.items() if reason},
        problem=problem,
        left_out=left_out,
    )


def read_machines(points: Iterable[Sequence[Run]], samples: Samples) -> dict[str, MachineReading]:
    """Reads the samples of the runs of all points, one of each point at a time; returns those that were read, by id."""
    readings: dict[str, MachineReading] = {}
    nodes_left = {"none": -1, "some": MAX_NODES, "all": math.inf}[samples]
    # One run of every point, then a second of every point, and so on.
    for turn, runs in enumerate(itertools.zip_longest(*points)):
        for run in filter(None, runs):
            nodes = nodes_of(run)
            if len(nodes) <= nodes_left:
                readings[run.plan.run_id] = read_machine(run, all_fields=samples == "all")
                nodes_left -= len(nodes)
            elif turn == 0 and nodes_left >= MAX_NODES_OF_LARGE_RUN:
                some_nodes = nodes[:: -(-len(nodes) // MAX_NODES_OF_LARGE_RUN)]
                readings[run.plan.run_id] = read_machine(run, some_nodes)
                nodes_left -= len(some_nodes)
    return readings
