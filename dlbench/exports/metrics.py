"""Runs as metrics for monitoring: a file for Prometheus' textfile collector, and one JSON line a run.

The text is OpenMetrics 1.0 and the older text format of Prometheus at once, because node_exporter's textfile collector
reads the latter only: gauges without timestamps, with lines (UNIT, EOF) that are comments there. Names and units follow
Prometheus' own advice (base units, the unit last). A series is a point of a report: labels hold what tells points
apart, and nothing that grows with every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import dlbench
from dlbench.reading.metrics import metrics_by_run
from dlbench.reading.scaling import Point, groups
from dlbench.reading.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run, Scan
from dlbench.stats.estimates import Estimate, geometric_mean_estimate

LABELS = ("system", "workload", "preset", "engine", "precision", "scaling", "ranks", "nodes", "commit", "group")
"""Of every point: `commit` is the tag that its runs share, `group` the report's name for runs that are comparable."""
FORMAT = "dlbench.run-metrics"


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One rank and node count of comparable runs."""

    labels: Mapping[str, str]
    point: Point
    energy: Estimate | None
    """Joules per sample; None where a run tells none."""
    finished: float
    """End of its newest run, seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One figure of points: three metrics, of its value and of the ends of its interval."""

    name: str
    """With {} where the interval's end stands."""
    unit: str
    """As Prometheus writes it."""
    about: str
    figure: Callable[[MeasuredPoint], Estimate | None]


FAMILIES: tuple[Family, ...] = (
    Family(
        name="dlbench_throughput{}_samples_per_second",
        unit="samples_per_second",
        about="Samples of all ranks per second of training, geometric mean over runs",
        figure=lambda one: one.point.throughput,
    ),
    Family(
        name="dlbench_scaling_efficiency{}_ratio",
        unit="ratio",
        about="Share of the ideal speed-up over the group's smallest rank count",
        figure=lambda one: one.point.efficiency,
    ),
    Family(
        name="dlbench_step{}_seconds",
        unit="seconds",
        about="Median step of the slowest rank, geometric mean over runs",
        figure=lambda one: one.point.step,
    ),
    Family(
        name="dlbench_energy_per_sample{}_joules",
        unit="joules",
        about="Energy of the devices that computed per trained sample, geometric mean over runs",
        figure=lambda one: one.energy,
    ),
)


def measured_points(table: RunTable) -> tuple[MeasuredPoint, ...]:
    """The points of all runs with figures, in the report's order; control runs and sides of pairs are left out."""
    if not table.runs:
        return ()
    energies = metrics_by_run(table, wanted=("energy_per_sample_j",))
    found = []
    for group in groups(table):
        if group.sample.plan.series.variant != "plain" or group.sample.plan.series.side:
            continue
        for point in group.points:
            runs = [table.runs[run_id] for run_id in point.run_ids]
            told = {table.keys[name]: energies[name].get("energy_per_sample_j", 0.0) for name in point.run_ids}
            found.append(
                MeasuredPoint(
                    labels=_labels(runs, point, group.id),
                    point=point,
                    energy=geometric_mean_estimate(told, "J") if all(told.values()) else None,
                    finished=max(_seconds(run) for run in runs),
                )
            )
    return tuple(found)


def _labels(runs: Sequence[Run], point: Point, group: str) -> dict[str, str]:
    told = describe(runs[0])
    commits = {run.plan.tags.get("commit", "") for run in runs}
    shared = {"ranks": str(point.ranks), "nodes": str(point.nodes), "group": group}
    shared["commit"] = commits.pop() if len(commits) == 1 else ""
    return {name: shared[name] if name in shared else told[name] for name in LABELS}


def _seconds(run: Run) -> float:
    assert run.record is not None
    return datetime.fromisoformat(run.record.finished).timestamp()


def to_openmetrics(scan: Scan, points: Sequence[MeasuredPoint]) -> str:
    """The text, every metric with its help; a metric that no point has is not there.

    Args:
        scan: the runs, with and without figures.
        points: what `measured_points` gave for them.
    """
    lines = _gauge("dlbench_info", "", "The dlbench that wrote this", [({"version": dlbench.__version__}, 1)])
    for family in FAMILIES:
        for end, words in (("", ""), ("_low", ": lower end of the interval"), ("_high", ": upper end of the interval")):
            values = [(one.labels, value) for one in points if (value := _end(family.figure(one), end)) is not None]
            lines += _gauge(family.name.format(end), family.unit, f"{family.about}{words}.", values)
    counts = [(one.labels, len(one.point.run_ids)) for one in points]
    lines += _gauge("dlbench_point_runs", "", "Runs behind the figures; below five there is no interval.", counts)
    ends = [(one.labels, one.finished) for one in points]
    lines += _gauge("dlbench_last_run_timestamp_seconds", "seconds", "End of the newest run, seconds since 1970.", ends)
    states: dict[tuple[str, str, str], int] = {}
    for run in scan.runs:
        key = (run.plan.system.name, run.plan.workload.name, run.state)
        states[key] = states.get(key, 0) + 1
    told = [(dict(zip(("system", "workload", "state"), key, strict=True)), n) for key, n in sorted(states.items())]
    lines += _gauge("dlbench_runs", "", "Runs by their state; only valid ones have figures.", told)
    return "\n".join([*lines, "# EOF", ""])


def _end(figure: Estimate | None, end: str) -> float | None:
    """The value, or an end of an interval of a level; what two or three runs happened to give is none."""
    if figure is None or not end:
        return None if figure is None else figure.value
    return (figure.low if end == "_low" else figure.high) if figure.is_confident else None


def _gauge(name: str, unit: str, about: str, values: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    if not values:
        return []
    head = [f"# HELP {name} {about}", f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else [])]
    return head + [
        f"{name}{{{','.join(f'{key}={_quoted(text)}' for key, text in labels.items())}}} {value!r}"
        for labels, value in values
    ]


def _quoted(text: str) -> str:
    shown = "".join(char if char.isprintable() else " " for char in text)
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, kw_only=True)
class PointFigures:
    """The figures of a point over its runs."""

    throughput: Estimate
    """Samples per second of all ranks."""
    efficiency: Estimate
    """Share of the ideal speed-up over the smallest rank count of the group."""
    step: Estimate
    """Seconds, the median step of the slowest rank."""
    energy_per_sample: Estimate | None
    """Joules; null where a run tells none."""


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run, whatever became of it; names are those of the runs in report.json."""

    format: str = FORMAT
    version: int = 1
    dlbench_version: str = dlbench.__version__
    run_id: str
    series: str
    state: str
    """valid, invalid, failed, incomplete, ..., as in report.json."""
    story: str
    """Why there is no figure; empty where there is one."""
    finished: str
    """UTC, ISO 8601; empty without a record."""
    system: str
    workload: str
    preset: str
    engine: str
    precision: str
    scaling: str
    ranks: int
    nodes: int
    commit: str
    """The tag of this name; empty where the run has none."""
    group: str
    """Id of its group in report.json; empty for a run that is in no point."""
    sample_unit: str
    """What one sample is called."""
    steps: int | None
    throughput: float | None
    """Samples per second of all ranks, of this run."""
    step_median_s: float | None
    step_p95_s: float | None
    step_cv: float | None
    """Coefficient of variation of the slowest rank's steps."""
    point: PointFigures | None
    """Over all runs of its point, with intervals; null for a run that is in none."""


def to_json_lines(scan: Scan, table: RunTable, points: Sequence[MeasuredPoint]) -> str:
    """One line a run in the order of the scan; arguments as of `to_openmetrics`, and the table that they are of."""
    at = {run_id: one for one in points for run_id in one.point.run_ids}
    figures = {str(row["run_id"]): row for row in table.figures.to_dict(orient="records")}
    lines = [_line(run, figures.get(run.plan.run_id, {}), at.get(run.plan.run_id)) for run in scan.runs]
    return "".join(json.dumps(asdict(line), sort_keys=True, allow_nan=False) + "\n" for line in lines)


def _line(run: Run, row: Mapping[Hashable, Any], at: MeasuredPoint | None) -> RunLine:
    told, plan = describe(run), run.plan
    point = None
    if at is not None:
        point = PointFigures(
            throughput=at.point.throughput,
            efficiency=at.point.efficiency,
            step=at.point.step,
            energy_per_sample=at.energy,
        )
    return RunLine(
        run_id=plan.run_id,
        series=plan.series.id,
        state=run.state,
        story=run.story,
        finished="" if run.record is None else run.record.finished,
        **{name: told[name] for name in ("system", "workload", "preset", "engine", "precision", "scaling")},
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        commit=plan.tags.get("commit", ""),
        group="" if at is None else at.labels["group"],
        sample_unit=plan.workload.sample_unit,
        **{name: row.get(name) for name in ("steps", "throughput", "step_median_s", "step_p95_s", "step_cv")},
        point=point,
    )
