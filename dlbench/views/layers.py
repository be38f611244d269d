"""The layers of the networks that were trained, with the multiply-accumulates (MACs) of one sample's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.records.record import LayerMacs
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, RowKind, Sheet, column, columns_of
from dlbench.report.wording import percent
from dlbench.units import format_number
from dlbench.views.model import Report
from dlbench.views.utilisation import training_flops
from dlbench.views.view import ReportSource, ReportView


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


MAX_LAYERS = 5  # Layers with most multiply-accumulates that people see; the others are summed.

NOTE = "MAC: multiply-accumulate of a sample's forward pass (2 FLOPs); training takes three times as many."


class LayersView(ReportView):
    """The layers of each network once."""

    id = "layers"
    title = "Layers"
    level = "appendix"
    key = "layers"

    def numbers(self, source: ReportSource) -> tuple[LayerTable, ...]:
        # The layers of each network once, however many groups train it; of the first run of a group that records them.
        found: dict[tuple[LayerMacs, ...], LayerTable] = {}
        for group in source.groups:
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

    def shown(self, report: Report, found: tuple[LayerTable, ...]) -> Section:
        return Section(headline=_headline(found), sheets=tuple(map(_sheet, found)), notes=(NOTE,))

    def remedy(self, report: Report) -> str:
        return "not recorded by these runs; newer runs do."


def _headline(found: Sequence[LayerTable]) -> str:
    """The layer with the largest share of any network."""
    shares = [
        (layer.macs / table.macs, layer.name, table.title) for table in found if table.macs for layer in table.layers
    ]
    if not shares:
        return ""
    share, name, network = max(shares)
    return f"largest: {name[:40]} of {network[:30]}, {percent(share, 0)} of its MACs"


def macs_cell(macs: int) -> Cell:
    """E.g. ``4.1 GMAC``."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if macs >= factor:
            return Cell(f"{format_number(macs / factor)} {unit}MAC", number=macs)
    return Cell(f"{macs} MAC", number=macs)


@dataclass(frozen=True)
class _Row:
    """A layer, or several together."""

    name: str = field(metadata=column("Layer", "layer", limit=200))
    kind: str = field(metadata=column("Kind", limit=80))
    macs: int = field(metadata=column("MACs per sample", "macs_per_sample", text=macs_cell))
    is_layer: bool = True
    is_shown: bool = True
    role: RowKind = ""


def _sheet(found: LayerTable) -> Sheet[_Row]:
    """Layers with most multiply-accumulates first; people see the largest ones and the sum of the others."""
    ordered = sorted(found.layers, key=lambda layer: -layer.macs)
    rows = [
        _Row(layer.name, layer.kind, layer.macs, is_shown=number < MAX_LAYERS) for number, layer in enumerate(ordered)
    ]
    others = ordered[MAX_LAYERS:]
    if others:
        rows.append(_Row(f"{len(others)} others", "", sum(layer.macs for layer in others), is_layer=False))
    rows.append(_Row(f"sum: {len(ordered)} layers", "", found.macs, is_layer=False, role="sum"))
    columns = (
        Column("network", "", lambda row: found.title),
        *columns_of(_Row),
        Column("share", "Share", lambda row: row.macs / found.macs if found.macs else 0.0, unit="fraction"),
    )
    return Sheet(
        name="layers",
        title=f"Layers of {found.title}",
        columns=columns,
        rows=rows,
        is_data=lambda row: row.is_layer,
        is_shown=lambda row: row.is_shown,
        kind=lambda row: row.role,
        is_folded=True,
    )
