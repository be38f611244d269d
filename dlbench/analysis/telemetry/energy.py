"""Energy of a run from the samples of its nodes, by stage, for GPUs and processors separately."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal

from dlbench.analysis.telemetry.node_samples import (
    NOTHING,
    Amount,
    Curve,
    NodeSamples,
    NodeStages,
    counter_curve,
    node_stages,
    nodes_of,
    rate_curve,
    read_node,
    why_not_sampled,
)
from dlbench.analysis.telemetry.throttling import GpuUse, computes_on_gpu, gpus_of_ranks
from dlbench.records.scan import Run

Kind = Literal["GPUs", "processors"]
KINDS: tuple[Kind, ...] = ("GPUs", "processors")
Method = Literal["energy counter", "energy counter with reset", "power over time stamps"]

MIN_COVERAGE = 0.9  # Minimum sampled share of an interval with a figure.
MIN_WINDOW_S = 10.0  # A shorter window has too few updates of a counter (about ten per second) and samples.
CHECK_TOLERANCE = 0.1  # Largest relative difference of counter and power without a warning.

_HOST_FIELD = re.compile(r"host\.energy\..+_j")

ENERGY_FIELDS = re.compile(r"gpu\.\d+\.(power_w|energy_j)|host\.energy\..+_j")  # Fields that energy is computed from.
MAX_UNACCOUNTED = 0.02  # Share of the measured window outside of steps from which there is a warning.

WHOLE_NODE = (
    "the energy of processors is that of the whole node with memory, counted by RAPL, including other processes; "
    "board, fans, disks and network are not included"
)


@dataclass(frozen=True, kw_only=True)
class SourceEnergy:
    """The energy of a GPU or a processor package of one node."""

    node_rank: int
    host: str
    name: str  # `gpu.0`, `package-0`.
    kind: Kind
    method: Method
    stages: dict[str, Amount]  # Joules in each stage of the node.
    counter_over_power: float | None  # Energy by counter / by power in the measured window (1); None without both.

    def over(self, stages: Collection[str] = ()) -> Amount:
        """Returns its energy in some stages together; without names in the whole run."""
        chosen = [amount for stage, amount in self.stages.items() if not stages or stage in stages]
        return reduce(add, chosen, NOTHING)


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """The energy of a run."""

    run_id: str
    num_samples: int  # Samples of the measured steps of all ranks.
    sources: tuple[SourceEnergy, ...]
    why: dict[Kind, str]  # Reasons of kinds without figures.
    doubts: tuple[str, ...]  # Warnings, each a sentence without full stop.
    notes: tuple[str, ...]  # Notes for the reader, each a sentence without full stop.

    def of(self, kind: Kind) -> tuple[SourceEnergy, ...]:
        if kind in self.why:
            return ()
        return tuple(source for source in self.sources if source.kind == kind)

    def amounts(self, kind: Kind, *stages: str) -> list[Amount]:
        """Returns the energy of each source in some stages (none: the whole run); empty if nothing was sampled."""
        amounts = [source.over(stages) for source in self.of(kind)]
        if not any(amount.length_ns for amount in amounts):
            return []
        return amounts

    def joules(self, kind: Kind, *stages: str) -> float | None:
        """Returns the energy of the sampled time, of all sources and nodes together; None if nothing was sampled."""
        amounts = self.amounts(kind, *stages)
        return sum(amount.value for amount in amounts) if amounts else None

    def sampled_share(self, kind: Kind, *stages: str) -> float | None:
        amounts = self.amounts(kind, *stages)
        return reduce(add, amounts).coverage if amounts else None

    def mean_power_w(self, kind: Kind, *stages: str) -> float | None:
        """Returns the mean power of all sources together; None if one of them was not sampled."""
        rates = [amount.rate for amount in self.amounts(kind, *stages) if amount.length_ns]
        known_rates = [rate for rate in rates if rate is not None]
        if not rates or len(known_rates) < len(rates):
            return None
        return sum(known_rates)

    def energy_per_sample_j(self, kind: Kind) -> float | None:
        """Returns the energy per measured sample, unsampled time at mean power; None if too much is missing."""
        amounts = self.amounts(kind, "measured")
        if not (amounts and self.num_samples) or any(amount.coverage < MIN_COVERAGE for amount in amounts):
            return None
        return sum(amount.value / amount.coverage for amount in amounts) / self.num_samples

    def methods(self, kind: Kind) -> tuple[str, ...]:
        return tuple(sorted({source.method for source in self.of(kind)}))


def run_energy(run: Run, sampled: Mapping[int, NodeSamples] | None = None) -> RunEnergy:
    """Returns the energy of a run; figures of a kind are sums over all nodes, none if one node has none.

    `sampled`: samples, if read. Raises IncompleteDataError: files are damaged; ValueError: there is no record.
    """
    if run.record is None:
        raise ValueError(f"{run.plan.run_id} has no record: it has no energy")
    sources: list[SourceEnergy] = []
    why: dict[Kind, str] = {}
    doubts: list[str] = []
    notes: list[str] = []
    on_gpus = {node: computes_on_gpu(run, node) for node in nodes_of(run)}
    for node in on_gpus:
        reason = why_not_sampled(run, node)
        if reason:
            why.setdefault("processors", reason)
            why.setdefault("GPUs", reason)
            continue
        if sampled is None:
            samples = read_node(run, node, ENERGY_FIELDS)
        else:
            samples = sampled[node]
        stages = node_stages(run, node)
        use = gpus_of_ranks(run, samples)
        gpus = gpu_sources(samples, stages, use)
        host = host_sources(samples, stages)
        sources += gpus
        # A node without work on GPUs does not affect the figures of the others.
        if not gpus and (on_gpus[node] or not any(on_gpus.values())):
            why.setdefault("GPUs", _on(samples, _why_no_gpu(samples, use)))
        if isinstance(host, str):
            why.setdefault("processors", _on(samples, host))
        else:
            sources += host
        if not use.is_certain:
            doubts.append(use.how)
        doubts += _stage_doubts(samples, stages)
        doubts += [_on(samples, f"failed during the run: {text}") for text in samples.failures if "energy" in text]
    for source in sources:
        if source.kind not in why:
            doubts += source_doubts(source)
    if "processors" not in why:
        notes.append(WHOLE_NODE)
    return RunEnergy(
        run_id=run.plan.run_id,
        num_samples=sum(rank.samples for rank in run.record.ranks),
        sources=tuple(sources),
        why=why,
        doubts=tuple(dict.fromkeys(doubts)),
        notes=tuple(notes),
    )


def _on(samples: NodeSamples, text: str) -> str:
    return f"{text} ({samples.host})" if samples.host and samples.host not in text else text


def _why_no_gpu(samples: NodeSamples, use: GpuUse) -> str:
    if not use.gpus:
        return use.how
    for gpu in use.gpus:
        fields = f"gpu.{gpu}.energy_j", f"gpu.{gpu}.power_w"
        if not samples.columns.keys() & set(fields):
            return samples.why_not(*fields)
    return "energy of a GPU was never read twice in a stage of the run"


def _stage_doubts(samples: NodeSamples, stages: NodeStages) -> Iterator[str]:
    measured = sum(end - begin for stage, begin, end in stages.pieces if stage == "measured") / 1e9
    if not stages.has_spans:
        yield _on(samples, "no spans of stages: the time before the first and after the last step is left out")
    if stages.unaccounted_s > MAX_UNACCOUNTED * measured:
        yield _on(
            samples,
            f"{stages.unaccounted_s / measured:.0%} of the measured window is outside of steps: pauses without a span "
            "are part of its energy",
        )


def gpu_sources(samples: NodeSamples, stages: NodeStages, use: GpuUse) -> list[SourceEnergy]:
    """Returns the energy of all used GPUs, or none if one is not measured: a partial sum is no figure."""
    sources = [_gpu_source(samples, stages, f"gpu.{gpu}") for gpu in use.gpus]
    known_sources = [source for source in sources if source is not None]
    return [] if len(known_sources) < len(sources) else known_sources


def _gpu_source(samples: NodeSamples, stages: NodeStages, name: str) -> SourceEnergy | None:
    curves: list[Curve] = []
    for field, make_curve in ((f"{name}.energy_j", counter_curve), (f"{name}.power_w", rate_curve)):
        if field in samples.columns:
            curves.append(make_curve(samples.time_ns, samples.columns[field], samples.period_s))
    parts = [(curve, curve.between(stages.edges)) for curve in curves]
    known_parts = [(curve, amounts) for curve, amounts in parts if any(amount.known_ns for amount in amounts)]
    if not known_parts:
        return None
    chosen = known_parts[0]
    if len(known_parts) == 2:
        counter_coverage, power_coverage = (reduce(add, amounts, NOTHING).coverage for _, amounts in known_parts)
        # A counter that failed during the run covers less than power.
        if counter_coverage < MIN_COVERAGE and power_coverage > counter_coverage:
            chosen = known_parts[1]
    check = None  # Mean power by the counter over mean measured power, in the measured window.
    if len(curves) == 2:
        counted_w, read_w = (curve.over(*stages.measured).rate for curve in curves)
        if counted_w is not None and read_w:
            check = counted_w / read_w
    return _source(samples, stages, name, "GPUs", *chosen, check)


def host_sources(samples: NodeSamples, stages: NodeStages) -> tuple[SourceEnergy, ...] | str:
    """Returns the processor packages and memory of a node by RAPL, or why one is not measured: no partial sums."""
    columns = {name: values for name, values in samples.columns.items() if _HOST_FIELD.fullmatch(name)}
    if not columns:
        return samples.why_not("host.energy")
    for name, reason in samples.unavailable.items():
        if _HOST_FIELD.fullmatch(name):
            return f"{_package(name)} is not read: {reason}"
    curves = []
    for field, values in columns.items():
        name = _package(field)
        curve = counter_curve(samples.time_ns, values, samples.period_s)
        amounts = curve.between(stages.edges)
        if not any(amount.known_ns for amount in amounts):
            return f"{name} was never read twice in a stage of the run"
        curves.append(_source(samples, stages, name, "processors", curve, amounts))
    return tuple(curves)


def _package(field: str) -> str:
    return field.removeprefix("host.energy.").removesuffix("_j")


def _source(
    samples: NodeSamples,
    stages: NodeStages,
    name: str,
    kind: Kind,
    curve: Curve,
    amounts: Sequence[Amount],
    check: float | None = None,
) -> SourceEnergy:
    method: Method = "power over time stamps"
    if curve.is_counter:
        method = "energy counter with reset" if curve.resets else "energy counter"
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
    )


def source_doubts(source: SourceEnergy) -> Iterator[str]:
    """Yields warnings about the figures of a source, each a sentence without full stop."""
    where = f"{source.name} of {source.host}"
    measured = source.stages["measured"]
    if measured.length_ns < MIN_WINDOW_S * 1e9:
        yield (
            f"the measured window is short, {measured.length_ns / 1e9:.3g} s of at least {MIN_WINDOW_S:.0f}: energy is "
            "uncertain by about one sample at either end"
        )
    if measured.coverage < MIN_COVERAGE:
        yield f"{where}: only {measured.coverage:.0%} of the measured window was sampled: it gives no figure"
    elif measured.coverage < 0.99:
        missing = 1 - measured.coverage
        yield f"{where}: {missing:.0%} of the measured window was not sampled; the same mean power is assumed there"
    if source.method == "energy counter with reset":
        yield f"{where}: its energy counter was reset during the run: the energy between two samples is missing"
    ratio = source.counter_over_power
    if ratio is not None and abs(ratio - 1) > CHECK_TOLERANCE:
        yield (
            f"{where}: the energy counter gives {ratio:.2f} times the sum of its power: some GPUs measure "
            "power only part of the time (arXiv 2312.02741)"
        )
