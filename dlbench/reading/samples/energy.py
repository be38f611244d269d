"""Energy of one run from the samples of its nodes: by stage, GPUs and host apart, with how it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

from dlbench.reading.samples.energy_sources import (
    ENERGY_FIELDS,
    MIN_COVERAGE,
    Kind,
    SourceEnergy,
    gpu_sources,
    host_sources,
    source_doubts,
)
from dlbench.reading.samples.gpu_use import GpuUse, computes_on_gpu, gpus_of_ranks
from dlbench.reading.samples.integral import NOTHING
from dlbench.reading.samples.node_samples import (
    STAGES,
    NodeReader,
    NodeSamples,
    NodeStages,
    node_stages,
    nodes_of,
    read_node,
    why_not_sampled,
)
from dlbench.records.scan import Run

MAX_UNACCOUNTED = 0.02

WHOLE_NODE = (
    "the energy of processors is that of the whole node, memory included, as RAPL counts it, whatever ran there; "
    "board, fans, disks and network are not in it"
)


@dataclass(frozen=True, kw_only=True)
class StageEnergy:
    """All sources of one kind, of all nodes, in one stage."""

    joules: float
    """Of what was sampled."""
    sampled_share: float
    """Sampled share of the time of all sources (1)."""
    seconds: float
    """Mean time of a node in this stage."""
    filled_joules: float | None
    """Unsampled time taken to be like the rest, each source by itself; None below `MIN_COVERAGE` of one of them."""
    mean_power_w: float | None
    """Mean power of all sources together; None where nothing was sampled."""


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """Energy of one run."""

    run_id: str
    num_samples: int
    """Samples of the measured steps of all ranks."""
    sources: tuple[SourceEnergy, ...]
    why: dict[Kind, str]
    """For a kind without figures: why; a kind with figures is not in it."""
    doubts: tuple[str, ...]
    """Reasons for doubt, each a sentence without its full stop."""
    notes: tuple[str, ...]
    """What a reader must know, likewise."""

    def of(self, kind: Kind) -> tuple[SourceEnergy, ...]:
        """The sources behind the figures of a kind; none where there is no figure."""
        return () if kind in self.why else tuple(source for source in self.sources if source.kind == kind)

    def stage(self, kind: Kind, *stages: str) -> StageEnergy | None:
        """Some stages together (without names: the whole run); None where nothing is known of them."""
        chosen = stages or STAGES
        amounts = [
            reduce(add, (source.stages[stage] for stage in chosen if stage in source.stages), NOTHING)
            for source in self.of(kind)
        ]
        if not any(amount.length_ns for amount in amounts):
            return None
        rates = [amount.rate for amount in amounts if amount.length_ns]
        is_whole = all(amount.coverage >= MIN_COVERAGE for amount in amounts)
        total = reduce(add, amounts)
        return StageEnergy(
            joules=total.value,
            sampled_share=total.coverage,
            seconds=total.length_ns / len(amounts) / 1e9,
            filled_joules=sum(amount.value / amount.coverage for amount in amounts) if is_whole else None,
            mean_power_w=sum(rate for rate in rates if rate is not None) if None not in rates else None,
        )

    def energy_per_sample_j(self, kind: Kind) -> float | None:
        """Energy of the measured stage over its samples; None where there is no figure, or too little was sampled."""
        measured = self.stage(kind, "measured")
        if measured is None or measured.filled_joules is None or not self.num_samples:
            return None
        return measured.filled_joules / self.num_samples

    def methods(self, kind: Kind) -> tuple[str, ...]:
        """How the energy of a kind is known, each way once."""
        return tuple(sorted({source.method for source in self.of(kind)}))


def run_energy(run: Run, read: NodeReader = read_node) -> RunEnergy:
    """The energy of a run with a record.

    Figures of a kind are sums over all nodes: where those of one node are missing, there is none.

    Args:
        run: with a record.
        read: reads a node, so that readers of the same samples can share them.

    Raises:
        IncompleteDataError: samples, spans or steps are damaged.
        ValueError: the run has no record.
    """
    if run.record is None:
        raise ValueError(f"{run.plan.run_id} has no record: it has no energy")
    sources: list[SourceEnergy] = []
    why: dict[Kind, str] = {}
    doubts: list[str] = []
    notes: list[str] = []
    for node in nodes_of(run):
        reason = why_not_sampled(run, node)
        if reason:
            why.setdefault("processors", reason)
            why.setdefault("GPUs", reason)
            continue
        samples = read(run, node, lambda name: ENERGY_FIELDS.fullmatch(name) is not None)
        stages = node_stages(run, node)
        use = gpus_of_ranks(run, samples)
        found = tuple(gpu_sources(samples, stages, use))
        host = host_sources(samples, stages)
        sources += found
        # A node that does no work on a GPU takes nothing from the figures of those that do.
        if not found and (computes_on_gpu(run, node) or not _has_gpu(run)):
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


def _has_gpu(run: Run) -> bool:
    return any(computes_on_gpu(run, node) for node in nodes_of(run))


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
