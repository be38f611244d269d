"""The table of a network's layers as rows of text, header first; see `tabular`."""

from __future__ import annotations

from dlbench.report.tabular import Table
from dlbench.report.wording import percent
from dlbench.units import format_number
from dlbench.views.layers.numbers import LayerTable

MAX_LAYERS = 10
"""Layers with most multiply-accumulates that are listed; the others are summed."""


def layers(found: LayerTable) -> Table:
    """Layers with most multiply-accumulates, their shares, and the rest."""
    total = found.macs
    ordered = sorted(found.layers, key=lambda layer: -layer.macs)
    rows: Table = [("Layer", "Kind", "MACs of a sample, forward", "Share")]
    rows += [
        (layer.name, layer.kind, _macs(layer.macs), percent(layer.macs / total if total else 0.0))
        for layer in ordered[:MAX_LAYERS]
    ]
    others = ordered[MAX_LAYERS:]
    if others:
        macs = sum(layer.macs for layer in others)
        rows.append((f"{len(others)} others", "", _macs(macs), percent(macs / total if total else 0.0)))
    rows.append((f"sum: {len(ordered)} layers", "", _macs(total), percent(1.0)))
    return rows


def _macs(count: int) -> str:
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{format_number(count / factor)} {unit}MAC"
    return f"{count} MAC"
