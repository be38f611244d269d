"""Published scaling figures, and whether a run does the same work: only then may they stand beside its own.

The figures are data (`reports/anchors.yaml`), each with its source.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.records.scan import Run
from dlbench.specs.base import Count, Fraction, Name, Precision, Spec
from dlbench.specs.yamlfile import read_yaml


class Work(Spec):
    """What a published figure was measured on; all of it must agree."""

    preset: Name = Field(description="Preset of the workload that holds the published configuration.")
    scaling: Literal["weak", "strong"] = Field(description="What grew with the ranks.")
    batch_per_rank: Count = Field(description="Samples per rank and step.")
    precision: tuple[Precision, ...] = Field(description="Precisions of its class: any of them.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")
    model: dict[str, Any] = Field(description="Keys of the network; `family` names it.")


class Anchor(Spec):
    """One published figure."""

    id: Name = Field(description="Unique in the file.")
    title: str = Field(description="What to call it.")
    efficiency: Fraction = Field(description="Scaling efficiency.")
    ranks: Count = Field(description="At so many ranks.")
    baseline: str = Field(description="What it is measured against.")
    hardware: str = Field(description="What it was measured on.")
    recipe: str = Field(description="How.")
    source: str = Field(description="Who says so.")
    address: str = Field(pattern=r"^https://", description="Where.")
    work: Work = Field(description="What a run must agree in.")


class AnchorFile(Spec):
    """All of them."""

    format: Literal["dlbench.anchors"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    anchors: tuple[Anchor, ...] = Field(description="Published figures.")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a run does otherwise than a published figure."""

    what: str
    theirs: str
    ours: str


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A published figure of the same kind of network, and what the run does otherwise; nothing: the same work."""

    anchor: Anchor
    differences: tuple[Difference, ...]


@functools.cache
def published() -> tuple[Anchor, ...]:
    """All figures of the bundled file."""
    return AnchorFile.model_validate(read_yaml(bundled.folder("reports") / "anchors.yaml")).anchors


def beside(run: Run, anchors: tuple[Anchor, ...] | None = None) -> tuple[Beside, ...]:
    """The published figures of the run's kind of network, each with what keeps it from being set beside the run.

    Args:
        run: one run of a group; the group shares what is compared.
        anchors: figures; None: those of the bundled file.
    """
    family = run.plan.workload.model.family
    found = published() if anchors is None else anchors
    return tuple(
        Beside(anchor=anchor, differences=_differences(run, anchor.work))
        for anchor in found
        if anchor.work.model.get("family") == family
    )


def _differences(run: Run, work: Work) -> tuple[Difference, ...]:
    workload = run.plan.workload
    ours = workload.model.model_dump(mode="json")
    parts = workload.train.gradient_accumulation
    asked: list[tuple[str, object, object]] = [
        ("preset", work.preset, workload.preset),
        ("scaling", work.scaling, run.plan.series.scaling),
        ("batch per rank", work.batch_per_rank, workload.train.batch_per_rank),
        ("parts per batch", 1, parts),
        ("data", work.data, "synthetic" if workload.data.is_synthetic else "real"),
        *((f"model.{key}", value, ours.get(key)) for key, value in work.model.items()),
    ]
    found = [
        Difference(what=what, theirs=str(theirs), ours=str(mine)) for what, theirs, mine in asked if theirs != mine
    ]
    if workload.train.precision not in work.precision:
        found.append(
            Difference(what="precision", theirs=" or ".join(work.precision), ours=str(workload.train.precision))
        )
    return tuple(found)
