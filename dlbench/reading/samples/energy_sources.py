"""Energy of the single GPUs and processor packages of one node, by stage, with how it is known.

The energy counter where there is one (NVML's nvmlDeviceGetTotalEnergyConsumption, RAPL), read off between samples by
linear interpolation, else power integrated over the real time stamps (trapezoidal rule). Where both are there they are
checked against each other: on some GPUs NVML measures power during a part of the time only, on A100 and H100 during a
quarter of it (Yang, Adamek and Armour, arXiv 2312.02741).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal

from dlbench.reading.samples.gpu_use import GpuUse
from dlbench.reading.samples.integral import NOTHING, Amount, Curve, counter_curve, rate_curve
from dlbench.reading.samples.node_samples import NodeSamples, NodeStages

Kind = Literal["GPUs", "processors"]
KINDS: tuple[Kind, ...] = ("GPUs", "processors")
Method = Literal["energy counter", "energy counter with reset", "power over time stamps"]

MIN_COVERAGE = 0.9
"""Less of an interval sampled, and no figure is made of it."""
MIN_WINDOW_S = 10.0
"""A shorter measured window holds too few updates of a counter (about ten per second) and too few samples."""
CHECK_TOLERANCE = 0.1
"""Counter and power further apart than this are doubtful."""

_HOST_FIELD = re.compile(r"host\.energy\.(.+)_j")

ENERGY_FIELDS = re.compile(r"gpu\.\d+\.(power_w|energy_j)|host\.energy\..+_j")
"""Fields that energy is made of."""


@dataclass(frozen=True, kw_only=True)
class SourceEnergy:
    """One GPU or one processor package of one node."""

    node_rank: int
    host: str
    name: str
    """`gpu.0`, `package-0`."""
    kind: Kind
    method: Method
    stages: dict[str, Amount]
    """Joules of each stage the node was at."""
    counter_over_power: float | None
    """Energy by the counter / by power, in the measured window (1); None where only one of them is there."""
    samples_in_window: int
    """Samples of it in the measured window."""

    @property
    def whole(self) -> Amount:
        """Joules of the whole run."""
        return reduce(add, self.stages.values(), NOTHING)


def gpu_sources(samples: NodeSamples, stages: NodeStages, use: GpuUse) -> Iterator[SourceEnergy]:
    """All used GPUs, or none: a sum over some of them is no figure."""
    found = [_gpu_source(samples, stages, f"gpu.{gpu}") for gpu in use.gpus]
    if None not in found:
        yield from (source for source in found if source is not None)


def _gpu_source(samples: NodeSamples, stages: NodeStages, name: str) -> SourceEnergy | None:
    columns = samples.columns
    energy, power = columns.get(f"{name}.energy_j"), columns.get(f"{name}.power_w")
    counter = None
    if energy is not None:
        counter = counter_curve(samples.time_ns, energy, samples.period_s)
    rate = rate_curve(samples.time_ns, power, samples.period_s) if power is not None else None
    parts = [(curve, curve.between(stages.edges)) for curve in (counter, rate) if curve is not None]
    known = [(curve, amounts) for curve, amounts in parts if any(amount.known_ns for amount in amounts)]
    if not known:
        return None
    chosen = known[0]
    if len(known) == 2:
        covered, other = (reduce(add, amounts, NOTHING).coverage for _, amounts in known)
        # A counter that failed half-way covers less than power that went on.
        chosen = known[1] if covered < MIN_COVERAGE and other > covered else known[0]
    if chosen[0] is rate:
        method: Method = "power over time stamps"
    else:
        method = "energy counter with reset" if chosen[0].resets else "energy counter"
    return _source(samples, stages, name, "GPUs", *chosen, method, _check(counter, rate, stages))


def _check(counter: Curve | None, rate: Curve | None, stages: NodeStages) -> float | None:
    """Mean power by the counter over mean power as read, in the measured window."""
    if counter is None or rate is None:
        return None
    one, other = counter.over(*stages.measured).rate, rate.over(*stages.measured).rate
    return one / other if one is not None and other else None


def host_sources(samples: NodeSamples, stages: NodeStages) -> tuple[SourceEnergy, ...] | str:
    """The processor packages of a node and their memory, by RAPL; no two of its fields overlap.

    All of them, or why not: a sum over some of them is not the energy of the node.
    """
    columns = {match[1]: values for name, values in samples.columns.items() if (match := _HOST_FIELD.fullmatch(name))}
    if not columns:
        return samples.why_not("host.energy")
    for name, reason in samples.unavailable.items():
        if match := _HOST_FIELD.fullmatch(name):
            return f"{match[1]} is not read: {reason}"
    found = []
    for name, values in columns.items():
        curve = counter_curve(samples.time_ns, values, samples.period_s)
        amounts = curve.between(stages.edges)
        if not any(amount.known_ns for amount in amounts):
            return f"{name} was never read twice in a stage of the run"
        method: Method = "energy counter with reset" if curve.resets else "energy counter"
        found.append(_source(samples, stages, name, "processors", curve, amounts, method, None))
    return tuple(found)


def _source(
    samples: NodeSamples,
    stages: NodeStages,
    name: str,
    kind: Kind,
    curve: Curve,
    amounts: Sequence[Amount],
    method: Method,
    check: float | None,
) -> SourceEnergy:
    by_stage: dict[str, Amount] = {}
    for (stage, _, _), amount in zip(stages.pieces, amounts, strict=True):
        by_stage[stage] = by_stage.get(stage, NOTHING) + amount
    return SourceEnergy(
        node_rank=samples.node_rank,
        host=samples.host,
        name=name,
        kind=kind,
        method=method,
        stages=by_stage,
        counter_over_power=check,
        samples_in_window=curve.num_within(*stages.measured),
    )


def source_doubts(source: SourceEnergy) -> Iterator[str]:
    """What gives reason to doubt the figures of a source, each a sentence without its full stop."""
    where = f"{source.name} of {source.host}"
    measured = source.stages["measured"]
    if measured.length_ns < MIN_WINDOW_S * 1e9:
        yield (
            f"the measured window is short, {measured.length_ns / 1e9:.3g} s of at least {MIN_WINDOW_S:.0f}: energy is "
            "uncertain by about one sample at either end"
        )
    if measured.coverage < MIN_COVERAGE:
        yield f"{where}: only {measured.coverage:.0%} of the measured window was sampled: no figure is made of it"
    elif measured.coverage < 0.99:
        missing = 1 - measured.coverage
        yield f"{where}: {missing:.0%} of the measured window was not sampled, and is taken to be like the rest"
    if source.method == "energy counter with reset":
        yield f"{where}: its energy counter was reset during the run: what it counted between two samples is lost"
    ratio = source.counter_over_power
    if ratio is not None and abs(ratio - 1) > CHECK_TOLERANCE:
        yield (
            f"{where}: the energy counter says {ratio:.2f} times what its power adds up to: some GPUs measure "
            "power during a part of the time only (arXiv 2312.02741)"
        )
