"""Energy of one run from the samples of its nodes: by stage, GPUs and host apart, with how it is known."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal

from dlbench.analysis.telemetry.integral import NOTHING, Amount, Curve, counter_curve, rate_curve
from dlbench.analysis.telemetry.node_samples import (
    NodeSamples,
    NodeStages,
    node_stages,
    nodes_of,
    read_node,
    why_not_sampled,
)
from dlbench.analysis.telemetry.throttling import GpuUse, computes_on_gpu, gpus_of_ranks
from dlbench.records.scan import Run

Kind = Literal["GPUs", "processors"]
KINDS: tuple[Kind, ...] = ("GPUs", "processors")
Method = Literal["energy counter", "energy counter with reset", "power over time stamps"]

MIN_COVERAGE = 0.9  # Less of an interval sampled, and no figure is made of it.
MIN_WINDOW_S = 10.0  # A shorter window holds too few updates of a counter (about ten per second) and samples.
CHECK_TOLERANCE = 0.1  # Counter and power further apart than this are doubtful.

_HOST_FIELD = re.compile(r"host\.energy\.(.+)_j")

ENERGY_FIELDS = re.compile(r"gpu\.\d+\.(power_w|energy_j)|host\.energy\..+_j")  # Fields that energy is made of.
MAX_UNACCOUNTED = 0.02  # Share of the measured window in no step above which it is said.

WHOLE_NODE = (
    "the energy of processors is that of the whole node, memory included, as RAPL counts it, whatever ran there; "
    "board, fans, disks and network are not in it"
)


@dataclass(frozen=True, kw_only=True)
class SourceEnergy:
    """One GPU or one processor package of one node."""

    node_rank: int
    host: str
    name: str  # `gpu.0`, `package-0`.
    kind: Kind
    method: Method
    stages: dict[str, Amount]  # Joules of each stage the node was at.
    counter_over_power: float | None
    """Energy by the counter / by power, in the measured window (1); None where only one of them is there."""
    samples_in_window: int  # Samples of it in the measured window.

    def over(self, stages: Collection[str] = ()) -> Amount:
        """Returns what it took in some stages together; without names in the whole run."""
        chosen = [amount for stage, amount in self.stages.items() if not stages or stage in stages]
        return reduce(add, chosen, NOTHING)


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """Energy of one run."""

    run_id: str
    num_samples: int  # Samples of the measured steps of all ranks.
    sources: tuple[SourceEnergy, ...]
    why: dict[Kind, str]  # For a kind without figures: why; a kind with figures is not in it.
    doubts: tuple[str, ...]  # Reasons for doubt, each a sentence without its full stop.
    notes: tuple[str, ...]  # What a reader must know, likewise.

    def of(self, kind: Kind) -> tuple[SourceEnergy, ...]:
        """Returns the sources behind the figures of a kind; none where there is no figure."""
        return () if kind in self.why else tuple(source for source in self.sources if source.kind == kind)

    def amounts(self, kind: Kind, *stages: str) -> list[Amount]:
        """Returns what each source of a kind took in some stages together (without names: in the whole run); empty
        where nothing is known of them.
        """
        amounts = [source.over(stages) for source in self.of(kind)]
        return amounts if any(amount.length_ns for amount in amounts) else []

    def joules(self, kind: Kind, *stages: str) -> float | None:
        """Returns the energy of what was sampled, of all sources and nodes together."""
        amounts = self.amounts(kind, *stages)
        return sum(amount.value for amount in amounts) if amounts else None

    def sampled_share(self, kind: Kind, *stages: str) -> float | None:
        """Returns the sampled share of the time of all sources (1)."""
        amounts = self.amounts(kind, *stages)
        return reduce(add, amounts).coverage if amounts else None

    def mean_power_w(self, kind: Kind, *stages: str) -> float | None:
        """Returns the mean power of all sources together; None where one of them was not sampled."""
        rates = [amount.rate for amount in self.amounts(kind, *stages) if amount.length_ns]
        known_rates = [rate for rate in rates if rate is not None]
        return sum(known_rates) if rates and len(known_rates) == len(rates) else None

    def energy_per_sample_j(self, kind: Kind) -> float | None:
        """Returns the energy of the measured stage over its samples: unsampled time is taken to be like the rest, each
        source by itself. None where there is no figure, or too little was sampled of one of them.
        """
        amounts = self.amounts(kind, "measured")
        if not (amounts and self.num_samples) or any(amount.coverage < MIN_COVERAGE for amount in amounts):
            return None
        return sum(amount.value / amount.coverage for amount in amounts) / self.num_samples

    def methods(self, kind: Kind) -> tuple[str, ...]:
        """Returns how the energy of a kind is known, each way once."""
        return tuple(sorted({source.method for source in self.of(kind)}))


def run_energy(run: Run, sampled: Mapping[int, NodeSamples] | None = None) -> RunEnergy:
    """Returns the energy of a run with a record.

    Figures of a kind are sums over all nodes: where those of one node are missing, there is none. `sampled`: the
    samples of its nodes that have any; None: they are read. Raises IncompleteDataError: samples, spans or steps are
    damaged; or ValueError: the run has no record.
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
        samples = read_node(run, node, ENERGY_FIELDS.fullmatch) if sampled is None else sampled[node]
        stages = node_stages(run, node)
        use = gpus_of_ranks(run, samples)
        gpus = gpu_sources(samples, stages, use)
        host = host_sources(samples, stages)
        sources += gpus
        # A node that does no work on a GPU takes nothing from the figures of those that do.
        if not gpus and (on_gpus[node] or not any(on_gpus.values())):
            why.setdefault("GPUs", _on(samples, use.how if not use.gpus else _why_no_gpu(samples, use)))
        if isinstance(host, str):
            why.setdefault("processors", _on(samples, host))
        else:
            sources += host
        if not use.is_certain:
            doubts.append(use.how)
        doubts += _stage_doubts(samples, stages)
        doubts += [_on(samples, f"failed on the way: {text}") for text in samples.failures if "energy" in text]
    doubts += [text for source in sources if source.kind not in why for text in source_doubts(source)]
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
    for gpu in use.gpus:
        fields = f"gpu.{gpu}.energy_j", f"gpu.{gpu}.power_w"
        if not samples.columns.keys() & set(fields):
            return samples.why_not(*fields)
    return "energy of a GPU was never read twice in a stage of the run"


def _stage_doubts(samples: NodeSamples, stages: NodeStages) -> Iterator[str]:
    measured = sum(end - begin for stage, begin, end in stages.pieces if stage == "measured") / 1e9
    if not stages.has_spans:
        yield _on(samples, "no spans hold the stages: what came before the first and after the last step is left out")
    if stages.unaccounted_s > MAX_UNACCOUNTED * measured:
        yield _on(
            samples,
            f"{stages.unaccounted_s / measured:.0%} of the measured window is in no step: pauses that no span holds "
            "are part of its energy",
        )


def gpu_sources(samples: NodeSamples, stages: NodeStages, use: GpuUse) -> list[SourceEnergy]:
    """Returns the energy of all used GPUs, or of none: a sum over some of them is no figure."""
    sources = [_gpu_source(samples, stages, f"gpu.{gpu}") for gpu in use.gpus]
    known_sources = [source for source in sources if source is not None]
    return known_sources if len(known_sources) == len(sources) else []


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
        covered, second_covered = (reduce(add, amounts, NOTHING).coverage for _, amounts in known_parts)
        # A counter that failed half-way covers less than power that went on.
        chosen = known_parts[1] if covered < MIN_COVERAGE and second_covered > covered else known_parts[0]
    check = None  # mean power by the counter over mean power as read, in the measured window
    if len(curves) == 2:
        counted_w, read_w = (curve.over(*stages.measured).rate for curve in curves)
        if counted_w is not None and read_w:
            check = counted_w / read_w
    return _source(samples, stages, name, "GPUs", *chosen, check)


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
    curves = []
    for name, values in columns.items():
        curve = counter_curve(samples.time_ns, values, samples.period_s)
        amounts = curve.between(stages.edges)
        if not any(amount.known_ns for amount in amounts):
            return f"{name} was never read twice in a stage of the run"
        curves.append(_source(samples, stages, name, "processors", curve, amounts))
    return tuple(curves)


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
    begin_ns, end_ns = stages.measured
    return SourceEnergy(
        node_rank=samples.node_rank,
        host=samples.host,
        name=name,
        kind=kind,
        method=method,
        stages=by_stage,
        counter_over_power=check,
        samples_in_window=int(((curve.time_ns >= begin_ns) & (curve.time_ns <= end_ns)).sum()),
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
