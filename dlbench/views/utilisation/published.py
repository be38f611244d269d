"""Published rates of the same card, network and precision, set beside what was measured; of no other card.

The figures are data (`reports/rates.yaml`), each with its source. A ratio says how a run compares with what people know
of their card; what the two do otherwise (batch, data, library) stands beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.reading.scaling import Group
from dlbench.records.scan import Run
from dlbench.specs.base import Count, Name, Positive, Precision, Spec
from dlbench.specs.workload import TextData
from dlbench.specs.yamlfile import read_yaml
from dlbench.stats.estimates import Estimate
from dlbench.views.utilisation.devices import gpu_names, gpus_per_rank


class Source(Spec):
    """Who published."""

    id: Name = Field(description="Unique in the file.")
    source: str = Field(min_length=10, description="Title, table, and when it was read.")
    address: str = Field(pattern=r"^https://", description="Where.")


class Network(Spec):
    """What was trained."""

    id: Name = Field(description="Unique in the file.")
    model: dict[str, Any] = Field(description="Keys of the network; `family` names it.")
    sequence_length: Count | None = Field(None, description="Tokens of a sample, for text.")


class Rate(Spec):
    """One published figure."""

    source: Name = Field(description="Of `sources`.")
    network: Name = Field(description="Of `networks`.")
    devices: tuple[str, ...] = Field(min_length=1, description="The card, by the names that torch tells.")
    precision: tuple[Precision, ...] = Field(min_length=1, description="Precisions of its class: any of them.")
    gpus: Count = Field(description="GPUs together.")
    per_s: Positive = Field(description="Samples a second, of all of them.")
    batch: Count = Field(description="Samples a GPU computed at a time.")
    parts: Count = Field(1, description="Parts of one update.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")


class RateFile(Spec):
    """All of them."""

    format: Literal["dlbench.rates"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    sources: tuple[Source, ...] = Field(description="Who published.")
    networks: tuple[Network, ...] = Field(description="What was trained.")
    rates: tuple[Rate, ...] = Field(description="Published figures.")


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """A published figure, and what was measured on as many of the same cards."""

    gpus: int
    device: str
    published: float
    """Samples a second and GPU."""
    measured: Estimate
    """The same, here."""
    ratio: Estimate
    """Measured over published."""
    differences: tuple[str, ...]
    """What the two do otherwise."""
    source: str
    address: str


@functools.cache
def published_rates() -> RateFile:
    """The bundled file."""
    return RateFile.model_validate(read_yaml(bundled.folder("reports") / "rates.yaml"))


def rates_beside(group: Group, file: RateFile | None = None) -> tuple[PublishedRate, ...]:
    """The published figures of the group's network and precision on its card, for every point with as many GPUs.

    Args:
        group: comparable runs.
        file: figures; None: the bundled ones.
    """
    found = published_rates() if file is None else file
    sources = {one.id: one for one in found.sources}
    networks = {one.id: one for one in found.networks}
    beside = []
    for point in group.points:
        run = next(run for run in group.runs if run.plan.run_id in point.run_ids)
        names = gpu_names(run)
        if len(names) != 1 or gpus_per_rank(run) != 1:
            continue
        for rate in found.rates:
            if (
                rate.gpus != point.ranks
                or not names & set(rate.devices)
                or not _same(run, rate, networks[rate.network])
            ):
                continue
            one = rate.per_s / rate.gpus
            beside.append(
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
    return tuple(beside)


def _same(run: Run, rate: Rate, network: Network) -> bool:
    workload = run.plan.workload
    ours = workload.model.model_dump(mode="json")
    length = workload.data.sequence_length if isinstance(workload.data, TextData) else None
    return (
        workload.train.precision in rate.precision
        and length == network.sequence_length
        and all(ours.get(key) == value for key, value in network.model.items())
    )


def _differences(run: Run, rate: Rate) -> list[str]:
    workload = run.plan.workload
    parts = workload.train.gradient_accumulation
    asked: list[tuple[str, object, object]] = [
        ("batch at a time", rate.batch, workload.train.batch_per_rank // parts),
        ("parts of an update", rate.parts, parts),
        ("data", rate.data, "synthetic" if workload.data.is_synthetic else "real"),
    ]
    if len(rate.precision) == 1 or workload.train.precision == "fp16":
        precision = []
    else:
        precision = [f"16-bit format ({workload.train.precision} here)"]
    return [f"{what} ({theirs} there, {mine} here)" for what, theirs, mine in asked if theirs != mine] + precision
