"""The request to the program that times a layer whole and in parts, and its answer."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Count, NonNegative, Spec
from dlbench.specs.plan import RunPlan

LAYER_ORDER = "dlbench.layer-order"
Phase = Literal["forward", "backward", "split", "join"]


class LayerOrder(Spec):
    """A request to time a layer whole and in parts."""

    format: Literal["dlbench.layer-order"] = Field("dlbench.layer-order", description="Type of this request.")
    plan: RunPlan = Field(description="Plan of a run of one rank: network, batch, precision, cores.")
    layer: str = Field(description="Name of the layer.")
    counts: tuple[Count, ...] = Field(description="Numbers of parts.")
    repeats: Count = Field(description="Samples of each time; all parts alternate.")


class LayerTimes(Spec):
    """The times of a layer and of its parts; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["dlbench.layer-times"] = "dlbench.layer-times"
    device: str = Field(description="Device, e.g. cpu, 2 threads.")
    parts: tuple[dict[Phase, tuple[NonNegative, ...]], ...] = Field(
        description="Seconds of the phases, by repeat, of each of `parts_of`; split: copying a part out of a whole "
        "tensor; join: concatenating the tensors of all parts."
    )
    warnings: tuple[str, ...] = Field((), description="Warnings.")
