"""Energy of a sample over rank counts: what a sample costs against the baseline, with an interval over runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.energy_sources import Kind
from dlbench.reading.samples.readings import MachineReadings
from dlbench.reading.scaling import Group
from dlbench.stats.estimates import Estimate, RunKey, by_definition, ratio_estimate
from dlbench.views.energy.numbers import KINDS, EnergyPoint, energy_points


@dataclass(frozen=True, kw_only=True)
class ScaledEnergy:
    """One rank count of a group."""

    point: EnergyPoint
    """Over the runs that were read."""
    efficiency: Mapping[Kind, Estimate]
    """Joules of a sample at the baseline over those here (1), of kinds that both tell."""
    num_unread: int
    """Runs of the point whose samples were not read."""


def scaled_energy(group: Group, table: RunTable, readings: MachineReadings) -> list[ScaledEnergy]:
    """The energy of each point of a group, by rank count; points none of whose runs was read whole are left out."""
    runs = [run for run in group.runs if readings.has_energy(run)]
    points = sorted(energy_points(runs, readings.energy_of), key=lambda point: (point.ranks, point.nodes))
    keys = run_keys(table)
    base = {kind: _joules(points[0], kind, keys) for kind in KINDS} if points else {}
    first = group.baseline
    is_baseline = bool(points) and (points[0].ranks, points[0].nodes) == (first.ranks, first.nodes)
    sizes = {(point.ranks, point.nodes): len(point.run_ids) for point in group.points}
    found = []
    for place, point in enumerate(points):
        efficiency: dict[Kind, Estimate] = {}
        for kind in KINDS:
            here = _joules(point, kind, keys)
            if is_baseline and here and base[kind]:
                efficiency[kind] = ratio_estimate(base[kind], here) if place else by_definition(1.0, len(here))
        unread = sizes[point.ranks, point.nodes] - len(point.runs) - len(point.damaged)
        found.append(ScaledEnergy(point=point, efficiency=efficiency, num_unread=unread))
    return found


def run_keys(table: RunTable) -> dict[str, RunKey]:
    """Block and repeat of every run with figures, by run id."""
    if table.figures.empty:
        return {}
    rows = zip(table.figures["run_id"], table.figures["block"], table.figures["repeat"], strict=True)
    return {str(run_id): (str(block), int(repeat)) for run_id, block, repeat in rows}


def _joules(point: EnergyPoint, kind: Kind, keys: Mapping[str, RunKey]) -> dict[RunKey, float]:
    told = ((keys[run.run_id], run.energy_per_sample_j(kind)) for run in point.runs)
    return {key: joules for key, joules in told if joules is not None and joules > 0}
