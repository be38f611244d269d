"""The view `utilisation`: model FLOPs utilisation (MFU), and published rates of the same network.

MFU = FLOPs of training per sample x samples per second / (ranks x peak of one rank), without recomputing (Chowdhery et
al., "PaLM", 2022, appendix B).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
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
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns, place_of, ranks_of

_GPU = re.compile(r"^cuda:\d+ \((.*)\)$")


def gpu_names(run: Run) -> set[str]:
    """Returns the names of the GPUs of a run's ranks, as torch reports them; empty on CPUs."""
    matches = [_GPU.match(rank.device) for rank in ranks_of(run)]
    return {match[1] for match in matches if match}


def gpus_per_rank(run: Run) -> float:
    """Returns the GPUs per rank; below 1 if ranks share one, as far as the system declares its GPUs."""
    gpus = run.plan.system.node.gpus
    return min(1.0, gpus / run.plan.layout.ranks_per_node) if gpus else 1.0


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """The peak of one rank."""

    flops_per_s: float  # Floating-point operations per second of its GPU, or of its cores together.
    unit_flops_per_s: float  # Floating-point operations per second of one GPU or one core.
    per_rank: float  # GPUs or cores per rank; below 1 if ranks share a GPU.
    unit: Literal["GPU", "core"]
    source: str  # Source of the peak, in words.
    is_declared: bool  # Whether it is `node.peak_tflops`; otherwise it is from a data sheet, by the GPU's name.
    memory_bytes_per_s: float | None = None  # Memory bandwidth by the data sheet; None: not known.

    def text(self, precision: str) -> str:
        """Returns the peak at a precision with its source."""
        text = f"peak: {format_number(self.unit_flops_per_s / TERA)} TFLOP/s per {self.unit} at {precision}"
        if self.per_rank != 1:
            text += f", {self.per_rank:.3g} {self.unit}s per rank"
        if self.memory_bytes_per_s:
            text += f"; memory {self.memory_bytes_per_s / TERA:.3g} TB/s"
        if self.is_declared:
            return f"{text} ({self.source})"
        return f"{text} ({self.source}, selected by the GPU's name; node.peak_tflops of the system overrides it)"


@dataclass(frozen=True, kw_only=True)
class UtilisationPoint(AtPlace):
    """The arithmetic at one rank count."""

    throughput: Estimate
    achieved: Estimate | None  # Model FLOPs per second and rank, `TFLOP/s/rank`; None: a sample's FLOPs are unknown.
    peak_tflops: float | None  # Peak of one rank; None: not known.
    mfu: Estimate | None = field(metadata=column("MFU"))  # Model FLOPs utilisation (1); None: no peak.


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """The use of the hardware by a group of runs."""

    training_flops_per_sample: int | None
    peak: str  # The peak with its source, or how to declare it.
    points: tuple[UtilisationPoint, ...]
    padding: str = ""  # A clause on FLOPs of padding that was not computed.
    published: tuple[PublishedRate, ...] = ()  # Of the same network, precision, cards and GPU count.


def utilisation(group: scaling.Group) -> Utilisation | None:
    """Returns the MFU of every point; None if neither FLOPs nor a published rate are known."""
    flops, published = training_flops(group), rates_beside(group)
    if flops is None and not published:
        return None
    if flops is None:
        points_without_flops = tuple(_point(point, None, None) for point in group.points)
        return Utilisation(training_flops_per_sample=None, peak="", points=points_without_flops, published=published)
    precision = group.sample.plan.workload.train.precision
    points: list[UtilisationPoint] = []
    peaks: list[str] = []
    for point in group.points:
        peak = peak_of(_first_run(group, point))
        if peak is not None:
            peaks.append(peak.text(precision))
        points.append(_point(point, flops, peak))
    # The plan alone does not show which attention was in force.
    settings = chain.from_iterable(run.record.settings for run in group.runs if run.record)
    padding = ""
    if any(setting.key == "model.attention" and setting.effective == "unpadded" for setting in settings):
        padding = "padding is counted but not computed (model.attention unpadded)"
    return Utilisation(
        training_flops_per_sample=flops,
        peak="; ".join(dict.fromkeys(peaks)) or _no_peak(group),
        points=tuple(points),
        padding=padding,
        published=published,
    )


def _first_run(group: scaling.Group, point: Point) -> Run:
    return next(run for run in group.runs if run.plan.run_id in point.run_ids)


def _point(point: Point, flops: int | None, peak: RankPeak | None) -> UtilisationPoint:
    achieved = peak_tflops = mfu = None
    if flops is not None:
        achieved = point.throughput.scaled(flops / point.ranks).scaled(1 / TERA, "TFLOP/s/rank")
    if peak is not None and flops is not None:
        peak_tflops = peak.flops_per_s / TERA
        mfu = point.throughput.scaled(flops / (peak.flops_per_s * point.ranks), "fraction")
    return UtilisationPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        throughput=point.throughput,
        achieved=achieved,
        peak_tflops=peak_tflops,
        mfu=mfu,
    )


def _no_peak(group: scaling.Group) -> str:
    plan = group.sample.plan
    unit = "GPU" if plan.system.node.gpus else "core"
    names = sorted(set().union(*map(gpu_names, group.runs)))
    precision = plan.workload.train.precision
    why = f"{names[0]}: {why_no_peak(names[0], precision)}; " if len(names) == 1 else ""
    return (
        f"{why}for the MFU declare node.peak_tflops ({{{precision}: TFLOP/s of one {unit}}}) and "
        f"node.peak_source in system {plan.system.name}"
    )


def training_flops(group: scaling.Group) -> int | None:
    """Returns the model FLOPs of training on one sample; None if no run records them, or runs differ."""
    recorded = {run.record.training_flops_per_sample for run in group.runs if run.record}
    if len(recorded) != 1:
        return None
    return recorded.pop() or None


def peak_of(run: Run) -> RankPeak | None:
    """Returns the peak of one rank of a run at its precision; None if it is not declared and no data sheet has it."""
    plan = run.plan
    node, precision = plan.system.node, plan.workload.train.precision
    on_gpu = any(rank.device.startswith("cuda") for rank in ranks_of(run))
    # Ranks that share a GPU share its peak.
    per_rank = gpus_per_rank(run) if on_gpu else float(plan.layout.cores_per_rank)
    # A declared peak is that of a GPU exactly if the node has some.
    is_declared = precision in node.peak_tflops and on_gpu == bool(node.gpus)
    memory_bytes_per_s = None
    if is_declared:
        tflops, source = node.peak_tflops[precision], node.peak_source or ""
    else:
        names = gpu_names(run)
        sheet = sheet_of(names.pop()) if len(names) == 1 else None
        if sheet is None or precision not in sheet.tflops:
            return None
        tflops, source, memory_bytes_per_s = sheet.tflops[precision], sheet.source, sheet.memory_bytes_per_s
    return RankPeak(
        flops_per_s=tflops * TERA * per_rank,
        unit_flops_per_s=tflops * TERA,
        per_rank=per_rank,
        unit="GPU" if on_gpu else "core",
        source=source,
        is_declared=is_declared,
        memory_bytes_per_s=memory_bytes_per_s,
    )


class RateSource(Spec):
    """A publication."""

    id: Name = Field(description="Unique in the file.")
    source: str = Field(min_length=10, description="Title, table, and when it was read.")
    address: str = Field(pattern=r"^https://", description="Where.")


class RatedNetwork(Spec):
    """A network with published rates."""

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
    """The file of all published rates."""

    format: Literal["dlbench.rates"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    sources: tuple[RateSource, ...] = Field(description="Who published.")
    networks: tuple[RatedNetwork, ...] = Field(description="What was trained.")
    rates: tuple[Rate, ...] = Field(description="Published figures.")


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """A published rate, and the measured rate on the same number of the same cards."""

    gpus: int = field(metadata=column("GPUs"))
    device: str
    published: float  # Published samples per second and GPU.
    measured: Estimate = field(metadata=column("Measured per GPU", "measured_per_gpu_s"))
    ratio: Estimate = field(metadata=column("Measured / published"))
    differences: tuple[str, ...] = field(
        metadata=column("Differences", value=lambda names: ", ".join(names) or "none known")
    )
    source: str
    address: str

    @property
    def published_text(self) -> str:
        return f"{format_number(self.published)} {self.measured.unit.removesuffix('/rank')}"


@functools.cache
def published_rates() -> RateFile:
    """Returns the bundled file of published rates."""
    return RateFile.model_validate(read_yaml(bundled.folder("reports") / "rates.yaml"))


def rates_beside(group: scaling.Group) -> tuple[PublishedRate, ...]:
    """Returns published rates of the group's network and precision on its card, for points with as many GPUs."""
    file = published_rates()
    sources = {source.id: source for source in file.sources}
    networks = {network.id: network for network in file.networks}
    rates = []
    for point in group.points:
        run = _first_run(group, point)
        names = gpu_names(run)
        if len(names) != 1 or gpus_per_rank(run) != 1:
            continue
        for rate in file.rates:
            if rate.gpus != point.ranks or not _is_same_work(run, rate, networks[rate.network]):
                continue
            per_gpu = rate.per_s / rate.gpus
            rates.append(
                PublishedRate(
                    gpus=rate.gpus,
                    device=next(iter(names)),
                    published=per_gpu,
                    measured=point.throughput_per_rank,
                    ratio=point.throughput_per_rank.scaled(1 / per_gpu, "ratio"),
                    differences=tuple(_differences(run, rate)),
                    source=sources[rate.source].source,
                    address=sources[rate.source].address,
                )
            )
    return tuple(rates)


def _is_same_work(run: Run, rate: Rate, network: RatedNetwork) -> bool:
    """Returns whether a run trains the network of a rate on its card, in a precision of its class."""
    workload = run.plan.workload
    model = workload.model.model_dump(mode="json")
    sequence_length = workload.data.sequence_length if isinstance(workload.data, TextData) else None
    return (
        bool(gpu_names(run) & set(rate.devices))
        and workload.train.precision in rate.precision
        and sequence_length == network.sequence_length
        and all(model.get(key) == value for key, value in network.model.items())
    )


def _differences(run: Run, rate: Rate) -> Iterator[str]:
    workload = run.plan.workload
    parts = workload.train.gradient_accumulation
    data = "synthetic" if workload.data.is_synthetic else "real"
    for name, published, measured in (
        ("batch at a time", rate.batch, workload.train.batch_per_rank // parts),
        ("parts of an update", rate.parts, parts),
        ("data", rate.data, data),
    ):
        if published != measured:
            yield f"{name} ({published} published, {measured} here)"
    if len(rate.precision) > 1 and workload.train.precision != "fp16":
        yield f"16-bit format ({workload.train.precision} here)"
    if workload.train.is_one_program:
        yield "compiled or captured here"


class UtilisationView(GroupView):
    """The use of the hardware."""

    id = "utilisation"
    title = "Hardware utilisation"
    key = "utilisation"
    after = "noise"
    lack = "these runs record no FLOPs per sample; newer runs do."

    def numbers(self, source: GroupSource) -> Utilisation | None:
        return utilisation(source.group)

    def shown(self, group: ReportGroup, utilisation: Utilisation) -> Section:
        sheets: list[Sheet[Any]] = []
        notes: list[str] = []
        if utilisation.training_flops_per_sample:
            sheets.append(_sheet(utilisation))
            note = f"{format_number(utilisation.training_flops_per_sample / 1e9)} GFLOP per sample"
            if utilisation.padding:
                note += f"; {utilisation.padding}, so the arithmetic done is less than stated"
            notes.append(f"{note}; {utilisation.peak}.")
        if utilisation.published:
            sheets.append(_published_sheet(utilisation.published))
        return Section(headline=_headline(utilisation), sheets=tuple(sheets), notes=tuple(notes))


def _headline(utilisation: Utilisation) -> str:
    last = utilisation.points[-1]
    if last.mfu is None and last.achieved is not None:
        unit, factor = _unit(utilisation)
        return f"{value_text(last.achieved.scaled(factor))} model {unit} per rank; MFU unknown: no peak declared"
    parts = []
    if last.mfu is not None:
        parts.append(f"MFU {value_text(last.mfu)} at {place_of(last)}")
    if utilisation.published:
        parts.append(f"{value_text(utilisation.published[-1].ratio)} of a published rate")
    return "; ".join(parts)


def _published_sheet(rates: tuple[PublishedRate, ...]) -> Sheet[PublishedRate]:
    columns = columns_of(
        PublishedRate,
        "gpus",
        Column("published_per_gpu_s", "Published per GPU", "published", "published_text"),
        *("measured", "ratio", "differences"),
        Column("source", "Source", "source", lambda rate: f"{rate.source}, {rate.address}"),
        "address",
    )
    return Sheet(
        name="published_rates",
        title=f"Published rates of {rates[0].device}, same network and precision",
        columns=columns,
        rows=rates,
        caption="Published with other software in another year: a ratio far below 1 needs an explanation; one near 1 "
        "proves nothing.",
    )


def _sheet(utilisation: Utilisation) -> Sheet[UtilisationPoint]:
    """Returns the table of all points; people see no column without a value."""
    unit, factor = _unit(utilisation)
    titles = {}
    if not any(point.mfu for point in utilisation.points):
        titles = {"peak_tflops_per_rank": "", "mfu": ""}
    columns = columns_of(
        UtilisationPoint,
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
            f"Peak {unit} per rank",
            "peak_tflops",
            lambda point: point.peak_tflops and point.peak_tflops * factor,
            unit="TFLOP/s/rank",
        ),
        "mfu",
        titles=titles,
    )
    return Sheet(name="utilisation", title="Use of the hardware", columns=columns, rows=utilisation.points)


def _unit(utilisation: Utilisation) -> tuple[str, float]:
    largest = max((point.achieved.value for point in utilisation.points if point.achieved), default=1.0)
    return ("TFLOP/s", 1.0) if largest >= 1 else ("GFLOP/s", 1000.0)
