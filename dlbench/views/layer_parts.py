"""One layer, whole and at 1/p of its filters, channels and extent: times, speed-up, and efficiency against 1/p."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add, truediv

from dlbench.records.out_of_core import LayerOrder, LayerPartTimes, PartTimes
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import basis_text
from dlbench.stats.estimates import Estimate, median_estimate


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
    measured: LayerPartTimes  # Raw times.


def _timing(part: PartTimes, whole: PartTimes) -> PartTiming:
    medians = {phase: median_estimate(samples, "s") for phase, samples in part.seconds.items()}
    speedup = efficiency = None
    if part.cut != "whole":
        speedup = median_estimate(list(map(truediv, _passes_s(whole), _passes_s(part))), "ratio")
        efficiency = speedup.scaled(1 / part.count, "fraction")
    return PartTiming(cut=part.cut, parts=part.count, efficiency=efficiency, speedup=speedup, **medians)


def _passes_s(part: PartTimes) -> list[float]:
    """Returns the seconds of forward and backward pass together, by repeat."""
    return list(map(add, part.seconds["forward"], part.seconds["backward"]))


def layer_document(order: LayerOrder, times: LayerPartTimes) -> Document:
    """Returns the times of a layer and its parts as a document for every format."""
    timings, workload = [_timing(part, times.parts[0]) for part in times.parts], order.plan.workload
    basis = basis_text(timings[0].forward, "repeat")
    words = (
        f"On {times.device}; medians, in brackets: {basis}. One rank is timed alone; nothing is sent.",
        "Efficiency: speed-up of forward and backward pass over p, 100 % if a part takes 1/p of the time. Splitting "
        "copies a part out of a tensor, joining concatenates the tensors of all parts. A part of the extent has halos.",
        *times.warnings,
    )
    sheet = Sheet(
        name="layer-parts",
        title=f"{order.layer}, whole and in parts",
        columns=columns_of(PartTiming, *PartTiming.__dataclass_fields__),
        rows=timings,
        in_terminal=True,
    )
    train = workload.train
    return Document(
        title=f"dlbench layer: {workload.name} ({workload.preset}), batch {train.batch_per_rank}, {train.precision}",
        sections=(Section(id="layer", title=sheet.title, words=words, brief=words, sheets=(sheet,)),),
        data=LayerTimings(order=order, parts=tuple(timings), measured=times),
        command="dlbench layer",
    )
