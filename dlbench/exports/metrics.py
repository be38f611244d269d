"""Exports runs as metrics in OpenMetrics 1.0, for the textfile collector of Prometheus' node_exporter."""
# Valid OpenMetrics 1.0 and the older text format that node_exporter reads: gauges without timestamps.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dlbench
from dlbench.analysis.metrics import metrics_by_run
from dlbench.analysis.repeats import circumstances_of
from dlbench.analysis.scaling import groups
from dlbench.analysis.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, geometric_mean_estimate
from dlbench.units import printable

LABELS = ("system", "workload", "preset", "engine", "precision", "scaling", "ranks", "nodes", "commit", "group")
"""Labels of every point: `commit` is the tag that its runs share, `group` the report's name of comparable runs."""

FIGURES: Mapping[str, tuple[str, str, str]] = {
    "throughput": ("dlbench_throughput{}_", "samples_per_second", "Samples of all ranks per second of training"),
    "efficiency": ("dlbench_scaling_efficiency{}_", "ratio", "Share of the ideal speed-up over the fewest ranks"),
    "step": ("dlbench_step{}_", "seconds", "Median step of the slowest rank"),
    "energy_per_sample": ("dlbench_energy_per_sample{}_", "joules", "Energy of the computing devices per sample"),
}
"""Figures of a point by their names in report.json: metric with {} for the end of the interval, unit, description."""


@dataclass(frozen=True, kw_only=True)
class MonitoredPoint:
    """A point of a report: one rank and node count of comparable runs."""

    labels: Mapping[str, str]
    run_ids: tuple[str, ...]
    finished: float  # End of its newest run, seconds since 1970; -inf if no run has one.
    figures: Mapping[str, Estimate]  # By name of `FIGURES`; energy only if all runs have it.


def monitored_points(table: RunTable) -> tuple[MonitoredPoint, ...]:
    """Returns the points with figures in the report's order, without control runs and sides of pairs."""
    energies: Mapping[str, Mapping[str, float]] = {}
    if table.runs:
        energies = metrics_by_run(table, names=("energy_per_sample_j",))
    points = []
    for group in groups(table):
        if group.sample.plan.series.variant != "plain" or group.sample.plan.series.side:
            continue
        for point in group.points:
            runs = [table.runs[run_id] for run_id in point.run_ids]
            commits = {run.plan.tags.get("commit", "") for run in runs}
            description = {**describe(runs[0]), "ranks": str(point.ranks), "nodes": str(point.nodes), "group": group.id}
            description["commit"] = commits.pop() if len(commits) == 1 else ""
            figures = {"throughput": point.throughput, "efficiency": point.efficiency, "step": point.step}
            joules = {table.keys[run_id]: energies[run_id].get("energy_per_sample_j", 0.0) for run_id in point.run_ids}
            if all(joules.values()):
                figures["energy_per_sample"] = geometric_mean_estimate(joules, "J")
            finished = max(circumstances_of(run).moment for run in runs)
            labels = {name: description[name] for name in LABELS}
            points.append(MonitoredPoint(labels=labels, run_ids=point.run_ids, finished=finished, figures=figures))
    return tuple(points)


def to_openmetrics(runs: Sequence[Run], table: RunTable) -> str:
    """Returns the text, every metric with its help, without metrics that no point has. `table`: of all `runs`."""
    points = monitored_points(table)
    lines = _gauge("dlbench_info", "", "The dlbench that wrote this", [({"version": dlbench.__version__}, 1)])
    for figure, (name, unit, description) in FIGURES.items():
        estimates = [(point.labels, point.figures[figure]) for point in points if figure in point.figures]
        values = [(labels, estimate.value) for labels, estimate in estimates]
        lines += _gauge(f"{name.format('')}{unit}", unit, description, values)
        for end in ("low", "high"):
            # Only confidence intervals; the range of two or three runs is none.
            ends = [(labels, getattr(estimate, end)) for labels, estimate in estimates if estimate.is_confident]
            lines += _gauge(f"{name.format(f'_{end}')}{unit}", unit, f"{description}, {end} end of the interval", ends)
    counts = [(point.labels, len(point.run_ids)) for point in points]
    lines += _gauge("dlbench_point_runs", "", "Runs behind the figures; below five there is no interval", counts)
    ends = [(point.labels, point.finished) for point in points if math.isfinite(point.finished)]
    lines += _gauge("dlbench_last_run_timestamp_seconds", "seconds", "End of the newest run", ends)
    invalid_states = {id(item.run): item.state for item in table.without}
    states = Counter(
        (run.plan.system.name, run.plan.workload.name, invalid_states.get(id(run), "valid")) for run in runs
    )
    counts = [
        ({"system": system, "workload": workload, "state": state}, count)
        for (system, workload, state), count in sorted(states.items())
    ]
    lines += _gauge("dlbench_runs", "", "Runs by their state; only valid ones have figures", counts)
    return "\n".join([*lines, "# EOF", ""])


def _gauge(name: str, unit: str, description: str, values: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    if not values:
        return []
    lines = [f"# HELP {name} {description}.", f"# TYPE {name} gauge"]
    if unit:
        lines.append(f"# UNIT {name} {unit}")
    for labels, value in values:
        label_text = ",".join(f"{key}={_quoted(text)}" for key, text in labels.items())
        lines.append(f"{name}{{{label_text}}} {value!r}")
    return lines


def _quoted(text: str) -> str:
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
