"""The computing time that lowered clocks and used-up CPU quotas cost the measured steps, from the samples of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from dlbench.analysis.telemetry.node_samples import (
    Interval,
    NodeSamples,
    counter_curve,
    joined,
    measured_window,
    node_ranks,
    nodes_of,
    read_node,
    why_not_sampled,
)
from dlbench.lazy import Array, Times, np
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import IDLE_BIT, THROTTLING_MASK, throttling_names
from dlbench.units import counted

_QUOTA = "host.cpu.throttled_s"
_FIELDS = re.compile(rf"gpu\.\d+\.(sm_clock_hz|sm_clock_max_hz|clock_reasons)|{re.escape(_QUOTA)}")


@dataclass(frozen=True, kw_only=True)
class Throttled:
    """The loss of a GPU, or of the ranks of a node, by throttling."""

    where: str  # E.g. `gpu.0 of n0`, `n0`.
    share: float  # Lost share of the computing in the measured window (1).
    time_share: float  # Share of the sampled window with a throttling bit; of a node the share that its quota took (1).
    coverage: float  # Sampled share of the window (1).
    evidence: str


def throttled_share(run: Run, window_of: Callable[[int], Interval] | None = None) -> tuple[float | None, str]:
    """Returns the share of the measured window's computing that was lost to throttling (1) and the evidence, or why
    not.

    On GPUs a sample with a throttling bit loses 1 - clock / reference; the mean is over time and over the GPUs that
    ranks used. The reference is the GPU's highest clock at work without such a bit, or its maximum if a throttled clock
    exceeds that. It is a first order: work that waits for memory loses less. On CPUs it is the time for which the
    kernel stopped the processes because the cgroup's quota was used up, over the window times the CPUs of the ranks.
    `window_of`: the measured window of a node. Raises IncompleteDataError: samples or steps are damaged; ValueError: no
    record.
    """
    if run.record is None:
        raise ValueError(f"{run.plan.run_id} has no record: its clocks are not known")
    nodes = nodes_of(run)
    on_gpu = [node for node in nodes if computes_on_gpu(run, node)]
    readings: list[Throttled] = []
    why: list[str] = []
    silent = 0
    for node in on_gpu or nodes:
        outcomes = _node(run, node, window_of, on_gpu=bool(on_gpu))
        losses = [outcome for outcome in outcomes if isinstance(outcome, Throttled)]
        silent += not losses
        readings += losses
        why += [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not readings:
        return None, why[0]
    share = sum(reading.share for reading in readings) / len(readings)
    worst = max(readings, key=attrgetter("share", "time_share"))
    missing = 1 - sum(reading.coverage for reading in readings) / len(readings)
    parts = [f"mean of {counted(len(readings), 'GPU' if on_gpu else 'node')}"]
    if worst.time_share > 0:
        parts.append(f"most at {worst.where}, {worst.share:.1%}")
    parts.append(worst.evidence)
    if missing > 0.01:
        parts.append(f"{missing:.0%} of the window was not sampled")
    if silent:
        parts.append(f"not known of {counted(silent, 'node')}: {why[0]}")
    return share, "; ".join(parts)


def _node(run: Run, node: int, window_of: Callable[[int], Interval] | None, *, on_gpu: bool) -> list[Throttled | str]:
    reason = why_not_sampled(run, node)
    if reason:
        return [reason]
    samples = read_node(run, node, _FIELDS)
    window = measured_window(run, node) if window_of is None else window_of(node)
    if not on_gpu:
        return [_quota(run, samples, window)]
    use = gpus_of_ranks(run, samples)
    if not use.gpus:
        return [use.how]
    return _gpus(samples, use.gpus, window)


def _gpus(samples: NodeSamples, gpus: Sequence[int], window: Interval) -> list[Throttled | str]:
    """Returns the loss of each GPU, or why it is not known; GPUs that were read at the same times are processed
    together.
    """
    outcomes: dict[int, Throttled | str] = {}
    measured: list[int] = []
    for gpu in gpus:
        fields = f"gpu.{gpu}.clock_reasons", f"gpu.{gpu}.sm_clock_hz"
        missing = [field for field in fields if field not in samples.columns]
        if missing:
            outcomes[gpu] = f"gpu.{gpu} of {samples.host}: {samples.why_not(missing[0])}"
        else:
            measured.append(gpu)
    shape = (len(measured), len(samples.time_ns))
    reasons = np.array([samples.columns[f"gpu.{gpu}.clock_reasons"] for gpu in measured]).reshape(shape)
    clocks = np.array([samples.columns[f"gpu.{gpu}.sm_clock_hz"] for gpu in measured]).reshape(shape)
    has_clock = np.isfinite(clocks)
    rows_by_times: dict[tuple[bytes, float], list[int]] = {}
    for row, (times, count) in enumerate(zip(has_clock & np.isfinite(reasons), has_clock.sum(axis=1), strict=True)):
        rows_by_times.setdefault((times.tobytes(), samples.period_of_values(int(count))), []).append(row)
    for (times, period_s), rows in rows_by_times.items():
        is_read = np.frombuffer(times, dtype=np.bool_)
        weight = nearest_time(samples.time_ns[is_read], window, period_s)
        coverage = float(weight.sum() / (window[1] - window[0]))
        masks = reasons[rows][:, is_read].astype(np.int64)
        slow = ((masks & THROTTLING_MASK) != 0) & (weight > 0)
        for row, gpu_masks, is_slow in zip(rows, masks, slow.any(axis=1).tolist(), strict=True):
            gpu = measured[row]
            where = f"gpu.{gpu} of {samples.host}"
            if not coverage:
                outcomes[gpu] = f"{where}: no sample of its clock in the measured window"
            elif is_slow:
                outcomes[gpu] = _loss(samples, gpu, gpu_masks, clocks[row, is_read], weight, coverage)
            else:
                outcomes[gpu] = Throttled(
                    where=where, share=0.0, time_share=0.0, coverage=coverage, evidence="no sample was throttled"
                )
    return [outcomes[gpu] for gpu in gpus]


def _loss(
    samples: NodeSamples, gpu: int, masks: Times, clock: Array, weight: Array, coverage: float
) -> Throttled | str:
    """Returns the loss of a GPU with throttled samples, from masks, clocks (Hz) and weights (ns) of its samples."""
    where = f"gpu.{gpu} of {samples.host}"
    throttled = (masks & THROTTLING_MASK) != 0
    slow = throttled & (weight > 0)
    at_work = (weight > 0) & ~throttled & ((masks & IDLE_BIT) == 0)
    reference = _reference(samples, f"gpu.{gpu}", clock[at_work], float(clock[slow].max()))
    if reference is None:
        return f"{where}: no sample shows its clock at work without throttling, and its highest clock is not known"
    lost = np.where(throttled, np.maximum(0.0, 1 - clock / reference), 0.0)
    time_share = float(weight[slow].sum() / weight.sum())
    names = ", ".join(throttling_names(int(np.bitwise_or.reduce(masks[slow]))))
    return Throttled(
        where=where,
        share=float((lost * weight).sum() / weight.sum()),
        time_share=time_share,
        coverage=coverage,
        evidence=f"throttled {time_share:.0%} of the time ({names})",
    )


def _reference(samples: NodeSamples, name: str, at_work: Array, highest_throttled: float) -> float | None:
    """Returns the GPU's clock without throttling, Hz: the highest at work, or its maximum if that is below a throttled
    one.
    """
    if len(at_work) and at_work.max() > 0 and at_work.max() >= highest_throttled:
        return float(at_work.max())
    limits = samples.columns.get(f"{name}.sm_clock_max_hz", np.zeros(0))
    limits = limits[np.isfinite(limits)]
    if len(limits) and limits.max() > 0:
        return float(limits.max())
    try:
        highest = float(samples.facts.get(f"{name}.sm_clock_max_hz", ""))
    except ValueError:
        return None
    if not math.isfinite(highest) or highest <= 0:
        return None
    return highest


def nearest_time(time_ns: Times, window: Interval, period_s: float) -> Array:
    """Returns the nanoseconds of the window nearest to each sample, without gaps; `time_ns`: increasing, shape (n,)."""
    weight = np.zeros(len(time_ns))
    start, stop = time_ns[:-1], time_ns[1:]
    # The rounding, half a nanosecond, is below the resolution of clocks.
    middle = start + (stop - start) // 2
    near = joined(time_ns, period_s)
    weight[:-1] += np.where(near, _overlap(start, middle, window), 0)
    weight[1:] += np.where(near, _overlap(middle, stop, window), 0)
    return weight


def _overlap(start: Times, stop: Times, window: Interval) -> Times:
    length: Times = np.maximum(0, np.minimum(stop, window[1]) - np.maximum(start, window[0]))
    return length


def _quota(run: Run, samples: NodeSamples, window: Interval) -> Throttled | str:
    if _QUOTA not in samples.columns:
        return f"no GPU and no CPU quota, CPU frequency changes are not attributed: {samples.why_not(_QUOTA)}"
    held_back = counter_curve(samples.time_ns, samples.columns[_QUOTA], samples.period_s).over(*window)
    if not held_back.known_ns:
        return f"no sample of {_QUOTA} in the measured window of {samples.host}"
    ranks = node_ranks(run, samples.node_rank)
    # Threads beyond the cores wait for each other, not for the quota.
    cpus = min(len(set().union(*(rank.cores for rank in ranks))), sum(rank.threads for rank in ranks))
    seconds = held_back.value
    share = min(1.0, seconds / (held_back.known_ns / 1e9 * max(1, cpus)))
    throttling = f"the CPU quota throttled {samples.host} for {seconds:.3g} s in all"
    if not seconds:
        throttling = "no CPU-quota throttling"
    return Throttled(
        where=samples.host,
        share=share,
        time_share=share,
        coverage=held_back.coverage,
        evidence=f"{throttling}; CPU frequency changes are not attributed",
    )


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """The GPUs of a node whose energy and clocks count for the run."""

    how: str  # How they are known, or why there are none; a sentence without full stop.
    gpus: tuple[int, ...] = ()  # NVML's numbers; none if no rank used one, or the share of a board is not known.
    is_certain: bool = True  # False if the run may not have used some of them.


@lru_cache(maxsize=16)  # The nodes of a run mostly have the same fields.
def gpu_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the numbers of all GPUs that have a field among the names."""
    matches = (re.match(r"gpu\.(\d+)\.", name) for name in names)
    return tuple(sorted({int(match[1]) for match in matches if match}))


def computes_on_gpu(run: Run, node: int) -> bool:
    """Returns whether a rank of the node computed on a GPU."""
    return any(rank.device.startswith("cuda") for rank in node_ranks(run, node))


def gpus_of_ranks(run: Run, samples: NodeSamples) -> GpuUse:
    """Returns the GPUs of a node that the run's ranks used, by UUID; all of the node if UUIDs are not known."""
    ranks = node_ranks(run, samples.node_rank)
    if not computes_on_gpu(run, samples.node_rank):
        return GpuUse(how="no rank of the node computes on a GPU")
    gpus = gpu_numbers(samples.names)
    if not gpus:
        return GpuUse(how=samples.why_not("gpu.0.power_w", "gpu"))
    used = [rank.gpu for rank in ranks if rank.gpu is not None]
    numbers = {samples.facts.get(f"gpu.{gpu}.uuid"): gpu for gpu in gpus}
    indices = tuple(sorted(numbers[gpu.uuid] for gpu in used if gpu.uuid in numbers))
    if any(gpu.is_slice for gpu in used) or any(samples.facts.get(f"gpu.{gpu}.mig") == "on" for gpu in indices):
        return GpuUse(
            how=f"GPUs of {samples.host} are divided (MIG): power and energy are those of the whole board, and no "
            "share of them is known"
        )
    if len({gpu.uuid for gpu in used}) == len(gpus):
        return GpuUse(gpus=gpus, how="a rank on every GPU of the node")
    if used and len(indices) == len(used):
        return GpuUse(gpus=indices, how="by the UUIDs of the ranks' GPUs")
    if 0 < len(indices) < len(used):
        return GpuUse(
            how=f"the sampler of {samples.host} could see {len(gpus)} of the {len(used)} GPUs that its ranks used, as "
            "when Slurm hides GPUs of other tasks (slurm.gpu_bind site): the others were not sampled"
        )
    return GpuUse(
        gpus=gpus,
        is_certain=False,
        how=f"which of the {len(gpus)} GPUs of {samples.host} the {len(used)} ranks used is not known: all of "
        "them count",
    )
