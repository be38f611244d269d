"""The layers of the networks that were trained, with the multiply-accumulates (MACs) of one sample's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.scaling import Group
from dlbench.records.record import LayerMacs
from dlbench.views.utilisation.numbers import training_flops


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Layers of one network, in the order of the forward pass."""

    title: str
    num_parameters: int
    training_flops_per_sample: int | None
    layers: tuple[LayerMacs, ...]

    @property
    def macs(self) -> int:
        """MACs of all layers."""
        return sum(layer.macs for layer in self.layers)


def layer_tables(groups: Sequence[Group]) -> tuple[LayerTable, ...]:
    """The layers of each network once, however many groups train it; of the first run of a group that records them."""
    found: dict[tuple[LayerMacs, ...], LayerTable] = {}
    for group in groups:
        layers = next((run.record.layers for run in group.runs if run.record and run.record.layers), ())
        record = group.sample.record
        if not layers or record is None or layers in found:
            continue
        workload = group.sample.plan.workload
        found[layers] = LayerTable(
            title=f"{workload.name}, {workload.preset} preset",
            num_parameters=record.num_parameters,
            training_flops_per_sample=training_flops(group),
            layers=layers,
        )
    return tuple(found.values())
