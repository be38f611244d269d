"""Runs as metrics for monitoring: a file for Prometheus' textfile collector.

The text is OpenMetrics 1.0 and the older text format of Prometheus at once, because node_exporter's textfile collector
reads the latter only: gauges without timestamps, with lines (UNIT, EOF) that are comments there. Labels hold what
distinguishes the points of a report, and nothing that grows with every run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dlbench
from dlbench.analysis.metrics import metrics_by_run
from dlbench.analysis.scaling import groups
from dlbench.analysis.sessions import circumstances_of
from dlbench.analysis.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, geometric_mean_estimate
from dlbench.units import printable

LABELS = ("system", "workload", "preset", "engine", "precision", "scaling", "ranks", "nodes", "commit", "group")
"""Of every point: `commit` is the tag that its runs share, `group` the report's name for runs that are comparable."""

FIGURES: Mapping[str, tuple[str, str, str]] = {
    "throughput": ("dlbench_throughput{}_", "samples_per_second", "Samples of all ranks per second of training"),
    "efficiency": ("dlbench_scaling_efficiency{}_", "ratio", "Share of the ideal speed-up over the fewest ranks"),
    "step": ("dlbench_step{}_", "seconds", "Median step of the slowest rank"),
    "energy_per_sample": ("dlbench_energy_per_sample{}_", "joules", "Energy of the computing devices per sample"),
}
"""Figure of a point, as report.json calls it -> its metric, whose unit comes last, with {} for the interval's end."""


@dataclass(frozen=True, kw_only=True)
class MonitoredPoint:
    """One rank and node count of comparable runs."""

    labels: Mapping[str, str]
    run_ids: tuple[str, ...]
    finished: float  # End of its newest run, seconds since 1970; -inf where none says.
    figures: Mapping[str, Estimate]  # By name of `FIGURES`; without energy where a run has none.


def monitored_points(table: RunTable) -> tuple[MonitoredPoint, ...]:
    """The points of all runs with figures, in the report's order; control runs and sides of pairs are left out."""
    energies = metrics_by_run(table, names=("energy_per_sample_j",)) if table.runs else {}
    found = []
    for group in groups(table):
        if group.sample.plan.series.variant != "plain" or group.sample.plan.series.side:
            continue
        for point in group.points:
            runs = [table.runs[run_id] for run_id in point.run_ids]
            commits = {run.plan.tags.get("commit", "") for run in runs}
            known = {**describe(runs[0]), "ranks": str(point.ranks), "nodes": str(point.nodes), "group": group.id}
            known["commit"] = commits.pop() if len(commits) == 1 else ""
            figures = {"throughput": point.throughput, "efficiency": point.efficiency, "step": point.step}
            joules = {table.keys[one]: energies[one].get("energy_per_sample_j", 0.0) for one in point.run_ids}
            if all(joules.values()):
                figures["energy_per_sample"] = geometric_mean_estimate(joules, "J")
            ends = [circumstances_of(run).moment for run in runs]
            labels = {name: known[name] for name in LABELS}
            found.append(MonitoredPoint(labels=labels, run_ids=point.run_ids, finished=max(ends), figures=figures))
    return tuple(found)


def to_openmetrics(runs: Sequence[Run], table: RunTable) -> str:
    """Returns the text, every metric with its help; a metric that no point has is not there. `table`: of all `runs`."""
    points = monitored_points(table)
    lines = _gauge("dlbench_info", "", "The dlbench that wrote this", [({"version": dlbench.__version__}, 1)])
    for figure, (name, unit, about) in FIGURES.items():
        having = [(one.labels, one.figures[figure]) for one in points if figure in one.figures]
        lines += _gauge(f"{name.format('')}{unit}", unit, about, [(labels, one.value) for labels, one in having])
        for end in ("low", "high"):
            # Of an interval of a level; what two or three runs happened to give is none.
            ends = [(labels, getattr(one, end)) for labels, one in having if one.is_confident]
            lines += _gauge(f"{name.format(f'_{end}')}{unit}", unit, f"{about}, {end} end of the interval", ends)
    counts = [(one.labels, len(one.run_ids)) for one in points]
    lines += _gauge("dlbench_point_runs", "", "Runs behind the figures; below five there is no interval", counts)
    ends = [(one.labels, one.finished) for one in points if math.isfinite(one.finished)]
    lines += _gauge("dlbench_last_run_timestamp_seconds", "seconds", "End of the newest run", ends)
    without = {id(item.run): item.state for item in table.without}
    states = Counter((run.plan.system.name, run.plan.workload.name, without.get(id(run), "valid")) for run in runs)
    counts = [
        ({"system": system, "workload": workload, "state": state}, count)
        for (system, workload, state), count in sorted(states.items())
    ]
    lines += _gauge("dlbench_runs", "", "Runs by their state; only valid ones have figures", counts)
    return "\n".join([*lines, "# EOF", ""])


def _gauge(name: str, unit: str, about: str, values: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    if not values:
        return []
    head = [f"# HELP {name} {about}.", f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else [])]
    return head + [
        f"{name}{{{','.join(f'{key}={_quoted(text)}' for key, text in labels.items())}}} {value!r}"
        for labels, value in values
    ]


def _quoted(text: str) -> str:
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
