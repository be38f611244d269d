"""Sheets on energy: of a sample, and by stage."""

from __future__ import annotations

from collections.abc import Mapping

from dlbench.reading.samples.energy_sources import KINDS
from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    optional_figure,
    percent,
    place_text,
    times_text,
)
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.energy.numbers import EnergyPoint, KindEnergy

NOT_MEASURED = "not measured"

ENERGY_CAPTION = (
    "Joules of the measured window over its samples, medians over runs; GPUs and processors apart, never added: "
    "processors are those of whole nodes, whatever ran on them, and board, fans, disks and network are in neither. "
    "Efficiency: joules of a sample at the baseline over those here."
)
STAGES_CAPTION = (
    "Joules of each stage, medians over runs: what was spent before the first measured step (building, staging, "
    "warm-up), in the measured window, on evaluations and checkpoints, and idle between them."
)


def energy_sheets(group: Group) -> list[Sheet]:
    """Energy of a sample, and of the stages."""
    if group.energy is None:
        return []
    places = [(point, kind) for point in group.energy.points for kind in point.kinds]
    return [
        Sheet(
            name="energy",
            title="Energy per sample",
            text=_energy(group),
            caption=f"{ENERGY_CAPTION} {group.caption}.",
            columns=_ENERGY_COLUMNS,
            rows=tuple(_energy_row(group, point, kind) for point, kind in places),
            in_terminal=True,
        ),
        Sheet(
            name="energy-stages",
            title="Energy by stage",
            text=_stages(group),
            caption=f"{STAGES_CAPTION} {group.caption}.",
            columns=("group", "ranks", "nodes", "kind", "stage", "joules", "joules_low", "joules_high", "runs"),
            rows=tuple(
                {
                    **_place(group, point),
                    "kind": kind.kind,
                    "stage": stage,
                    **figure_columns("joules", figure),
                    "runs": figure.n,
                }
                for point, kind in places
                for stage, figure in kind.stages
            ),
        ),
    ]


def _place(group: Group, point: EnergyPoint) -> dict[str, Cell]:
    return {"group": group.id, "ranks": point.ranks, "nodes": point.nodes}


_ENERGY_COLUMNS = (
    *("group", "ranks", "nodes", "kind"),
    *(
        f"{name}{end}"
        for name in ("energy_per_sample_j", "samples_per_joule", "energy_efficiency", "mean_power_w")
        for end in ("", "_low", "_high")
    ),
    *("runs", "sources", "methods", "sampled_share"),
)


def _energy_row(group: Group, point: EnergyPoint, kind: KindEnergy) -> Mapping[str, Cell]:
    return {
        **_place(group, point),
        "kind": kind.kind,
        **figure_columns("energy_per_sample_j", kind.energy_per_sample),
        **figure_columns("samples_per_joule", kind.samples_per_joule),
        **figure_columns("energy_efficiency", kind.efficiency),
        **figure_columns("mean_power_w", kind.mean_power),
        "runs": kind.whole.n,
        "sources": _sources(kind),
        "methods": "; ".join(kind.methods),
        "sampled_share": kind.sampled_share,
    }


def _sources(kind: KindEnergy) -> str:
    return " or ".join(map(str, kind.num_sources))


def _energy(group: Group) -> Table:
    assert group.energy is not None
    rows: Table = [
        (
            "At",
            "Of",
            "J per sample",
            "Samples per J",
            "Efficiency",
            "Mean power, W",
            "Interval",
            "Sources",
            "Method",
            "Sampled",
        )
    ]
    for point in group.energy.points:
        place = place_text(point.ranks, point.nodes)
        for kind in point.kinds:
            joules = kind.energy_per_sample
            rows.append(
                (
                    place,
                    kind.kind,
                    "too little sampled" if joules is None else figure_text(joules),
                    optional_figure(kind.samples_per_joule),
                    DASH if kind.efficiency is None else times_text(kind.efficiency),
                    optional_figure(kind.mean_power),
                    DASH if joules is None else basis_text(joules),
                    _sources(kind),
                    "; ".join(kind.methods),
                    percent(kind.sampled_share, 0),
                )
            )
        told = {kind.kind for kind in point.kinds}
        for missing in KINDS:
            if missing not in told:
                why = "; ".join(reason for kind, reason in point.why if kind == missing) or "nothing tells"
                rows.append((place, missing, NOT_MEASURED, *([DASH] * 5), why, DASH))
    return rows


def _stages(group: Group) -> Table:
    assert group.energy is not None
    places = [(point, kind) for point in group.energy.points for kind in point.kinds]
    stages = list(dict.fromkeys(stage for _, kind in places for stage, _ in kind.stages))
    rows: Table = [("At", "Of", *(f"{stage}, J" for stage in stages), "whole run, J")]
    for point, kind in places:
        told = dict(kind.stages)
        cells = [optional_figure(told.get(stage)) for stage in stages]
        place = place_text(point.ranks, point.nodes)
        rows.append((place, kind.kind, *cells, figure_text(kind.whole)))
    return rows
