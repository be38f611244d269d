"""One layer, whole and at 1/p of its filters, channels and extent: times, speed-up, and efficiency against 1/p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.records.layer_parts import LayerTimes, Phase
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import basis_text
from dlbench.specs.layers import Layer, LayerPart, parts_of
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate, median_estimate


@dataclass(frozen=True, kw_only=True)
class PartTiming:
    """The times of a part of the layer."""

    cut: str = field(metadata=column("Divided", is_brief=True))
    parts: int = field(metadata=column("Parts", is_brief=True))
    forward: Estimate = field(metadata=column("Forward", is_brief=True))
    backward: Estimate = field(metadata=column("Backward", is_brief=True))
    speedup: Estimate | None = field(metadata=column("Speed-up"))  # Of both passes, over the whole layer.
    efficiency: Estimate | None = field(metadata=column("Efficiency", is_brief=True))  # Speed-up over parts.
    splitting: Estimate | None = field(metadata=column("Splitting", is_brief=True))
    joining: Estimate | None = field(metadata=column("Joining", is_brief=True))
    efficiency_with_copies: Estimate | None = field(metadata=column("With both", is_brief=True))
    samples_s: dict[str, tuple[float, ...]]  # Raw times, by phase and repeat.


@dataclass(frozen=True, kw_only=True)
class LayerTimings:
    """The JSON of `dlbench layer`."""

    format: str = "dlbench.layer"
    version: int = 1
    workload: str
    preset: str
    layer: Layer
    batch: int
    precision: str
    host: str
    device: str
    parts: tuple[PartTiming, ...]
    warnings: tuple[str, ...]


def timings_of(plan: RunPlan, layer: Layer, counts: Sequence[int], times: LayerTimes, host: str) -> LayerTimings:
    """Returns the figures of the answer of the timing program; ratios are those of the same repeat."""
    workload = plan.workload
    whole, *_ = samples = [dict(phases) for phases in times.parts]
    whole_s = _sums(whole, "forward", "backward")
    return LayerTimings(
        workload=workload.name,
        preset=workload.preset,
        layer=layer,
        batch=workload.train.batch_per_rank,
        precision=workload.train.precision,
        host=host,
        device=times.device,
        parts=tuple(
            _timing(part, phases, whole_s) for part, phases in zip(parts_of(layer, counts), samples, strict=True)
        ),
        warnings=times.warnings,
    )


def _timing(part: LayerPart, samples: Mapping[Phase, tuple[float, ...]], whole_s: Sequence[float]) -> PartTiming:
    speedup = efficiency = with_copies = None
    if part.cut != "whole":
        speedups = [whole / passes for whole, passes in zip(whole_s, _sums(samples, "forward", "backward"), strict=True)]
        speedup = median_estimate(speedups, "ratio")
        efficiency = speedup.scaled(1 / part.count, "fraction")
        step_s = _sums(samples, *samples)
        with_copies = median_estimate([w / s / part.count for w, s in zip(whole_s, step_s, strict=True)], "fraction")
    medians = {phase: median_estimate(values, "s") for phase, values in samples.items()}
    return PartTiming(
        cut=part.cut,
        parts=part.count,
        forward=medians["forward"],
        backward=medians["backward"],
        speedup=speedup,
        efficiency=efficiency,
        splitting=medians.get("split"),
        joining=medians.get("join"),
        efficiency_with_copies=with_copies,
        samples_s=dict(samples),
    )


def _sums(samples: Mapping[Phase, tuple[float, ...]], *phases: Phase) -> list[float]:
    """Returns the sum of phases by repeat, seconds."""
    return [sum(values) for values in zip(*(samples[phase] for phase in phases), strict=True)]


def layer_document(timings: LayerTimings) -> Document:
    """Returns the times as a document for every format."""
    layer, columns = timings.layer, [name for name in PartTiming.__dataclass_fields__ if name != "samples_s"]
    caption = (
        "The ideal is 1/p of the whole layer's time, an efficiency of 100 %: speed-up of forward and backward pass over "
        "the number of parts. Splitting copies a part out of a whole tensor, joining concatenates the tensors of all "
        "parts. Nothing is sent: one rank is timed alone. A part by extent has the halos of its neighbours."
    )
    basis = basis_text(timings.parts[0].forward, "repeat")
    words = [f"On {timings.host}, {timings.device}; medians, in brackets: {basis}.", *timings.warnings]
    sheet = Sheet(
        name="layer-parts",
        title=f"{layer.name}: {layer.kind}, {layer.channels} channels to {layer.filters} filters",
        columns=columns_of(PartTiming, *columns),
        rows=timings.parts,
        caption=caption,
        in_terminal=True,
    )
    of = f"{timings.workload} ({timings.preset}), {layer.name}, batch {timings.batch}, {timings.precision}"
    section = Section(id="layer", title=sheet.title, words=tuple(words), brief=tuple(words), sheets=(sheet,))
    return Document(title=f"dlbench layer: {of}", sections=(section,), data=timings, command="dlbench layer")
