"""One layer, whole and at 1/p of its filters, channels and extent: times, speed-up, and efficiency against 1/p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.records.out_of_core import LayerOrder, LayerPhase, LayerTimes
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import basis_text
from dlbench.specs.layers import LayerPart
from dlbench.stats.estimates import Estimate, median_estimate

_Repeats = Sequence[Mapping[LayerPhase, float]]  # Seconds of each phase, by repeat.


@dataclass(frozen=True, kw_only=True)
class PartTiming:
    """The times of a part of the layer."""

    cut: str = field(metadata=column("Divided", is_brief=True))
    parts: int = field(metadata=column("p", is_brief=True))
    efficiency: Estimate | None = field(metadata=column("Efficiency", is_brief=True))  # Speed-up over parts.
    speedup: Estimate | None = field(metadata=column("Speed-up"))  # Of both passes together, against the whole layer.
    forward: Estimate = field(metadata=column("Forward", is_brief=True))
    backward: Estimate = field(metadata=column("Backward", is_brief=True))
    split: Estimate | None = field(default=None, metadata=column("Splitting", is_brief=True))
    join: Estimate | None = field(default=None, metadata=column("Joining", is_brief=True))


@dataclass(frozen=True, kw_only=True)
class LayerTimings:
    """The JSON of `dlbench layer`."""

    format: str = "dlbench.layer"
    version: int = 1
    order: LayerOrder
    parts: tuple[PartTiming, ...]
    measured: LayerTimes  # Raw times.


def _timing(part: LayerPart, repeats: _Repeats, repeats_of_whole: _Repeats) -> PartTiming:
    medians = {phase: median_estimate([seconds[phase] for seconds in repeats], "s") for phase in repeats[0]}
    speedup = efficiency = None
    if part.cut != "whole":
        speedups = []
        for seconds, whole in zip(repeats, repeats_of_whole, strict=True):
            speedups.append((whole["forward"] + whole["backward"]) / (seconds["forward"] + seconds["backward"]))
        speedup = median_estimate(speedups, "ratio")
        efficiency = speedup.scaled(1 / part.count, "fraction")
    return PartTiming(cut=part.cut, parts=part.count, efficiency=efficiency, speedup=speedup, **medians)


def layer_document(order: LayerOrder, times: LayerTimes) -> Document:
    """Returns the times of a layer and its parts as a document for every format."""
    by_part, workload = list(zip(*times.repeats, strict=True)), order.plan.workload
    timings = [_timing(part, repeats, by_part[0]) for part, repeats in zip(order.parts(), by_part, strict=True)]
    basis = basis_text(timings[0].forward, "repeat")
    words = (f"On {times.device}; medians, in brackets: {basis}.", *times.warnings)
    sheet = Sheet(
        name="layer-parts",
        title=f"{order.layer}, whole and in parts",
        columns=columns_of(PartTiming, *PartTiming.__dataclass_fields__),
        rows=timings,
        caption="Efficiency: speed-up of forward and backward pass over p, 100 % if a part takes 1/p of the time. "
        "Splitting copies a part out of a tensor, joining concatenates the tensors of all parts. One rank is timed "
        "alone; nothing is sent. A part of the extent has the halos of its neighbours.",
        in_terminal=True,
    )
    train = workload.train
    return Document(
        title=f"dlbench layer: {workload.name} ({workload.preset}), batch {train.batch_per_rank}, {train.precision}",
        sections=(Section(id="layer", title=sheet.title, words=words, brief=words, sheets=(sheet,)),),
        data=LayerTimings(order=order, parts=tuple(timings), measured=times),
        command="dlbench layer",
    )
