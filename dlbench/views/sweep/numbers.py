"""A series with swept keys becomes a verdict at each rank count.

Runs of a group may be averaged; settings of a sweep are in different groups, and are compared on purpose. What makes
that fair is the series: one request, so that all but the swept keys is equal, and repeats interleaved over the
settings, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dlbench.reading.run_table import RunTable
from dlbench.records.scan import Run
from dlbench.views.sweep.cells import Cell, by_setting, cell_of, place_of, rates_of
from dlbench.views.sweep.settings import acting_keys


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One swept series."""

    series: str
    created: str
    keys: tuple[str, ...]
    sample: Run
    cells: tuple[Cell, ...]
    """By rank count; only where a swept key acts."""
    idle: tuple[tuple[int, int, float], ...]
    """Ranks, nodes and largest relative difference between settings where no swept key acts: scatter, not effect."""


def sweeps(table: RunTable) -> list[Sweep]:
    """All series with swept keys that hold figures, in the order of the runs."""
    planned = [*table.runs.values(), *(item.run for item in table.without if item.run.plan.run_id not in table.runs)]
    series: dict[tuple[str, str], list[Run]] = {}
    for run in planned:
        if run.plan.series.axes:
            series.setdefault((run.plan.created, run.plan.series.id), []).append(run)
    made = [_sweep(runs, table) for _, runs in sorted(series.items())]
    return [sweep for sweep in made if sweep.cells or sweep.idle]


def _sweep(runs: Sequence[Run], table: RunTable) -> Sweep:
    cells: list[Cell] = []
    idle: list[tuple[int, int, float]] = []
    by_place: dict[tuple[int, int, str, str, str], list[Run]] = {}
    for run in sorted(runs, key=_order):
        by_place.setdefault(place_of(run), []).append(run)
    for (ranks, nodes, *_), group in sorted(by_place.items()):
        figures = [run for run in group if run.plan.run_id in table.runs]
        if len({*by_setting(group)}) < 2 or not figures:
            continue
        if any(acting_keys(run.plan) for run in group):
            cells.append(cell_of(group, table))
        else:
            rates = [fmean(rates_of(found, table).values()) for found in by_setting(figures).values()]
            idle.append((ranks, nodes, max(rates) / min(rates) - 1))
    plan = runs[0].plan
    keys = tuple(sorted({key for run in runs for key in run.plan.series.axes}))
    return Sweep(
        series=plan.series.id,
        created=plan.created,
        keys=keys,
        sample=next((run for run in runs if run.plan.run_id in table.runs), runs[0]),
        cells=tuple(cells),
        idle=tuple(idle),
    )


def _order(run: Run) -> tuple[int, int]:
    """The order of the request: every second repeat runs it backwards."""
    place = run.plan.series
    return place.repeat, place.position if place.repeat % 2 == 0 else -place.position
