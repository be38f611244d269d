"""What share of the hardware's peak a scaling point turns into the model's arithmetic.

MFU = FLOPs of training per sample x samples per second / (ranks x peak of one rank), Chowdhery et al., "PaLM" (2022),
appendix B. Only FLOPs that the model needs are counted, none that are computed again (`dlbench.node.models.build`), so
MFU cannot be raised by doing work twice. The peak is the system's own declaration (`node.peak_tflops`), else a data
sheet's, found by the GPU's name (`dlbench.perfmodels.data_sheets`).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.analysis import scaling
from dlbench.perfmodels.data_sheets import TERA, sheet_of, why_no_peak
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.report.wording import value_text
from dlbench.specs.base import Count, Name, Positive, Precision, Spec
from dlbench.specs.files import read_yaml
from dlbench.specs.workload import TextData
from dlbench.stats.estimates import Estimate
from dlbench.units import format_number
from dlbench.views.model import ReportGroup
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

_GPU = re.compile(r"^cuda:\d+ \((.*)\)$")


def gpu_names(run: Run) -> set[str]:
    """Names of the GPUs of a run's ranks, as torch reports them; empty on CPUs."""
    devices = {rank.device for rank in run.record.ranks} if run.record else set()
    return {match[1] for device in devices if (match := _GPU.match(device))}


def gpus_per_rank(run: Run) -> float:
    """GPUs per rank; below 1 where ranks share one, as far as the system declares its GPUs."""
    gpus = run.plan.system.node.gpus
    return min(1.0, gpus / run.plan.layout.ranks_per_node) if gpus else 1.0


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """The peak of one rank."""

    flops_per_s: float  # Floating-point operations per second: of its GPU, or of its cores together.
    unit_flops_per_s: float  # Of one GPU or one core, as it was declared.
    per_rank: float  # GPUs or cores per rank; below 1 where ranks share a GPU.
    unit: Literal["GPU", "core"]
    source: str
    is_declared: bool  # From `node.peak_tflops`; otherwise from a data sheet, by the GPU's name.
    memory_bytes_per_s: float | None = None  # Of its memory, as the data sheet has it; None where that is not known.


@dataclass(frozen=True, kw_only=True)
class UtilisationPoint:
    """Arithmetic at one rank count."""

    ranks: int
    nodes: int
    throughput: Estimate
    achieved: Estimate | None  # Model FLOPs per second and rank, `TFLOP/s/rank`; None: a sample's FLOPs are unknown.
    peak_tflops: float | None  # Of one rank.
    mfu: Estimate | None = field(metadata=column("MFU"))  # Model FLOPs utilisation (1); None: no peak.


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Use of the hardware."""

    training_flops_per_sample: int | None
    peak: str  # The peak with its source, or how to declare it.
    points: tuple[UtilisationPoint, ...]
    padding: str = ""  # A clause on what is odd about FLOPs of samples whose padding was left out.
    published: tuple[PublishedRate, ...] = ()
    """Published rates of the same network in the same precision on as many of the same cards."""


def utilisation(group: scaling.Group) -> Utilisation | None:
    """MFU of every point; None where neither FLOPs nor a published rate are known."""
    flops, published = training_flops(group), rates_beside(group)
    if flops is None and not published:
        return None
    points: list[UtilisationPoint] = []
    peaks: list[str] = []
    for point in group.points:
        run = next(run for run in group.runs if run.plan.run_id in point.run_ids)
        peak = peak_of(run) if flops else None
        factor = flops / (peak.flops_per_s * point.ranks) if flops and peak else None
        if peak is not None:
            precision = group.sample.plan.workload.train.precision
            one = f"{format_number(peak.unit_flops_per_s / TERA)} TFLOP/s per {peak.unit} at {precision}"
            many = "" if peak.per_rank == 1 else f", {peak.per_rank:.3g} {peak.unit}s per rank"
            how = "" if peak.is_declared else ", found by the GPU's name; node.peak_tflops of the system overrides it"
            memory = f"; memory {peak.memory_bytes_per_s / TERA:.3g} TB/s" if peak.memory_bytes_per_s else ""
            peaks.append(f"peak: {one}{many}{memory} ({peak.source}{how})")
        achieved = point.throughput.scaled(flops / point.ranks).scaled(1 / TERA, "TFLOP/s/rank") if flops else None
        points.append(
            UtilisationPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                throughput=point.throughput,
                achieved=achieved,
                peak_tflops=peak.flops_per_s / TERA if peak else None,
                mfu=point.throughput.scaled(factor, "fraction") if factor else None,
            )
        )
    # By what runs say was in force: the plan alone does not show it.
    settings = [one for run in group.runs if run.record for one in run.record.settings if one.key == "model.attention"]
    is_unpadded = any(one.effective == "unpadded" for one in settings)
    return Utilisation(
        training_flops_per_sample=flops,
        peak="; ".join(dict.fromkeys(peaks)) or (_no_peak(group) if flops else ""),
        points=tuple(points),
        padding="padding is counted but not computed (model.attention unpadded)" if flops and is_unpadded else "",
        published=published,
    )


def _no_peak(group: scaling.Group) -> str:
    plan = group.sample.plan
    unit = "GPU" if plan.system.node.gpus else "core"
    names = sorted({name for run in group.runs for name in gpu_names(run)})
    precision = plan.workload.train.precision
    why = f"{names[0]}: {why_no_peak(names[0], precision)}; " if len(names) == 1 else ""
    return (
        f"{why}for the MFU declare node.peak_tflops ({{{precision}: TFLOP/s of one {unit}}}) and "
        f"node.peak_source in system {plan.system.name}"
    )


def training_flops(group: scaling.Group) -> int | None:
    """Model FLOPs of training on one sample; None if no run records them, or runs disagree."""
    recorded = {run.record.training_flops_per_sample for run in group.runs if run.record}
    (found,) = recorded if len(recorded) == 1 else (None,)
    return found or None


def peak_of(run: Run) -> RankPeak | None:
    """The peak of one rank of a run at its precision, if it is declared or a data sheet is known."""
    plan = run.plan
    node, precision = plan.system.node, plan.workload.train.precision
    on_gpu = any(rank.device.startswith("cuda") for rank in (run.record.ranks if run.record else ()))
    # Ranks that share a GPU share its peak.
    per_rank = gpus_per_rank(run) if on_gpu else float(plan.layout.cores_per_rank)
    # A declared peak is that of a GPU exactly if the node has some.
    if precision in node.peak_tflops and on_gpu == bool(node.gpus):
        one, source, declared = node.peak_tflops[precision] * TERA, node.peak_source or "", True
        memory = None
    else:
        names = gpu_names(run)
        sheet = sheet_of(names.pop()) if len(names) == 1 else None
        if sheet is None or precision not in sheet.tflops:
            return None
        one, source, declared, memory = sheet.tflops[precision] * TERA, sheet.source, False, sheet.memory_bytes_per_s
    return RankPeak(
        flops_per_s=one * per_rank,
        unit_flops_per_s=one,
        per_rank=per_rank,
        unit="GPU" if on_gpu else "core",
        source=source,
        is_declared=declared,
        memory_bytes_per_s=memory,
    )


class RateSource(Spec):
    """Who published."""

    id: Name = Field(description="Unique in the file.")
    source: str = Field(min_length=10, description="Title, table, and when it was read.")
    address: str = Field(pattern=r"^https://", description="Where.")


class RatedNetwork(Spec):
    """What was trained."""

    id: Name = Field(description="Unique in the file.")
    model: dict[str, Any] = Field(description="Keys of the network; `family` names it.")
    sequence_length: Count | None = Field(None, description="Tokens per sample, for text.")


class Rate(Spec):
    """One published figure."""

    source: Name = Field(description="Of `sources`.")
    network: Name = Field(description="Of `networks`.")
    devices: tuple[str, ...] = Field(min_length=1, description="The card, by the names that torch reports.")
    precision: tuple[Precision, ...] = Field(min_length=1, description="Precisions of its class: any of them.")
    gpus: Count = Field(description="GPUs together.")
    per_s: Positive = Field(description="Samples per second, of all of them.")
    batch: Count = Field(description="Samples that a GPU computed at a time.")
    parts: Count = Field(1, description="Parts of one update.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")


class RateFile(Spec):
    """All of them."""

    format: Literal["dlbench.rates"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    sources: tuple[RateSource, ...] = Field(description="Who published.")
    networks: tuple[RatedNetwork, ...] = Field(description="What was trained.")
    rates: tuple[Rate, ...] = Field(description="Published figures.")


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """A published figure, and what was measured on as many of the same cards."""

    gpus: int = field(metadata=column("GPUs"))
    device: str
    published: float  # Samples per second and GPU.
    measured: Estimate = field(metadata=column("Here per GPU", "measured_per_gpu_s"))  # The same, here.
    ratio: Estimate = field(metadata=column("Here / published"))  # Measured over published.
    differences: tuple[str, ...] = field(  # What the two do otherwise.
        metadata=column("What differs", value=lambda found: ", ".join(found) or "nothing known")
    )
    source: str
    address: str


@functools.cache
def published_rates() -> RateFile:
    """The bundled file."""
    return RateFile.model_validate(read_yaml(bundled.folder("reports") / "rates.yaml"))


def rates_beside(group: scaling.Group) -> tuple[PublishedRate, ...]:
    """The published figures of the group's network and precision on its card, for every point with as many GPUs."""
    found = published_rates()
    sources = {one.id: one for one in found.sources}
    networks = {one.id: one for one in found.networks}
    found_rates = []
    for point in group.points:
        run = next(run for run in group.runs if run.plan.run_id in point.run_ids)
        names = gpu_names(run)
        if len(names) != 1 or gpus_per_rank(run) != 1:
            continue
        workload = run.plan.workload
        ours = workload.model.model_dump(mode="json")
        length = workload.data.sequence_length if isinstance(workload.data, TextData) else None
        for rate in found.rates:
            if (
                rate.gpus != point.ranks
                or not names & set(rate.devices)
                or workload.train.precision not in rate.precision
                or length != networks[rate.network].sequence_length
                or any(ours.get(key) != value for key, value in networks[rate.network].model.items())
            ):
                continue
            one = rate.per_s / rate.gpus
            found_rates.append(
                PublishedRate(
                    gpus=rate.gpus,
                    device=next(iter(names)),
                    published=one,
                    measured=point.throughput_per_rank,
                    ratio=point.throughput_per_rank.scaled(1 / one, "ratio"),
                    differences=tuple(_differences(run, rate)),
                    source=sources[rate.source].source,
                    address=sources[rate.source].address,
                )
            )
    return tuple(found_rates)


def _differences(run: Run, rate: Rate) -> list[str]:
    workload = run.plan.workload
    parts = workload.train.gradient_accumulation
    asked: list[tuple[str, object, object]] = [
        ("batch at a time", rate.batch, workload.train.batch_per_rank // parts),
        ("parts of an update", rate.parts, parts),
        ("data", rate.data, "synthetic" if workload.data.is_synthetic else "real"),
    ]
    found = [f"{what} ({theirs} there, {mine} here)" for what, theirs, mine in asked if theirs != mine]
    if len(rate.precision) > 1 and workload.train.precision != "fp16":
        found.append(f"16-bit format ({workload.train.precision} here)")
    if workload.train.is_one_program:
        found.append("compiled or captured here")
    return found


class UtilisationView(GroupView):
    """Use of the hardware."""

    id = "utilisation"
    title = "Hardware utilisation"
    key = "utilisation"
    after = "noise"

    def numbers(self, source: GroupSource) -> Utilisation | None:
        return utilisation(source.group)

    def shown(self, group: ReportGroup, found: Utilisation) -> Section:
        sheets: list[Sheet[Any]] = [_published_sheet(found.published)] if found.published else []
        notes: list[str] = []
        if found.training_flops_per_sample:
            flops = format_number(found.training_flops_per_sample / 1e9)
            padding = f"; {found.padding}, so the arithmetic done is less than stated" if found.padding else ""
            notes = [f"{flops} GFLOP per sample{padding}; {found.peak}."]
            sheets.insert(0, _sheet(found))
        last = found.points[-1]
        published = f"{value_text(found.published[-1].ratio)} of a published rate" if found.published else ""
        headline = published
        if last.mfu is not None:
            headline = "; ".join(filter(None, [f"MFU {value_text(last.mfu)} at {place_of(last)}", published]))
        elif last.achieved is not None:
            unit, factor = _unit(found)
            headline = (
                f"{value_text(last.achieved.scaled(factor))} model {unit} per rank; MFU unknown: no peak declared"
            )
        return Section(headline=headline, sheets=tuple(sheets), notes=tuple(notes))

    def remedy(self, group: ReportGroup) -> str:
        return "these runs record no FLOPs per sample; newer runs do."


def _published_sheet(rates: tuple[PublishedRate, ...]) -> Sheet[PublishedRate]:
    columns = columns_of(
        PublishedRate,
        "gpus",
        Column(
            "published_per_gpu_s",
            "Published per GPU",
            "published",
            lambda rate: f"{format_number(rate.published)} {rate.measured.unit.removesuffix('/rank')}",
        ),
        "measured",
        "ratio",
        "differences",
        Column("source", "Source", "source", lambda rate: f"{rate.source}, {rate.address}"),
        "address",
    )
    return Sheet(
        name="published_rates",
        title=f"Published rates of {rates[0].device}, same network and precision",
        columns=columns,
        rows=rates,
        caption="Another library in another year: a ratio far below 1 asks for a reason, one near 1 proves nothing.",
    )


def _sheet(found: Utilisation) -> Sheet[UtilisationPoint]:
    """Every point; people see no column without a value."""
    has_mfu = any(point.mfu for point in found.points)
    unit, factor = _unit(found)
    columns: tuple[Column[UtilisationPoint], ...] = (
        *place_columns(),
        Column("throughput_per_s", "", "throughput"),
        Column(
            "tflops_per_rank",
            f"Model {unit} per rank",
            "achieved",
            lambda point: point.achieved and point.achieved.scaled(factor),
            has_interval=True,
        ),
        Column(
            "peak_tflops_per_rank",
            f"Peak {unit} per rank" if has_mfu else "",
            "peak_tflops",
            lambda point: point.peak_tflops and point.peak_tflops * factor,
            unit="TFLOP/s/rank",
        ),
        *columns_of(UtilisationPoint, titles={} if has_mfu else {"mfu": ""}),
    )
    return Sheet(name="utilisation", title="Use of the hardware", columns=columns, rows=found.points)


def _unit(found: Utilisation) -> tuple[str, float]:
    """The unit for people, and how many of it a TFLOP/s is."""
    largest = max((point.achieved.value for point in found.points if point.achieved), default=1.0)
    return ("TFLOP/s", 1.0) if largest >= 1 else ("GFLOP/s", 1000.0)
