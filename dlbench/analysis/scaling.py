"""Scaling points of comparable runs: throughput, speed-up and efficiency, each with an interval over runs.

With p ranks, p0 the smallest rank count of the group and Thr the throughput in samples per second:

* speed-up S(p) = Thr(p) / Thr(p0); at a fixed global batch (strong scaling) this is T(p0) / T(p);
* efficiency E(p) = S(p) / (p / p0), for weak and strong scaling alike;
* serial fraction, strong scaling only: e = (1/S - 1/k) / (1 - 1/k), k = p / p0 (Karp and Flatt,
  CACM 33(5), 1990), relative to the baseline if that has more than one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.analysis.table import FigureRow, RunTable
from dlbench.records.scan import Run
from dlbench.stats.estimates import MIN_RUNS, Estimate, by_definition, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey, pairing


@dataclass(frozen=True, kw_only=True)
class Point:
    """All comparable runs with one rank and node count."""

    ranks: int
    nodes: int
    batch_per_rank: int  # Samples per step.
    is_baseline: bool
    throughput: Estimate  # Samples per second of all ranks; geometric mean over runs, so that ratios are speed-ups.
    throughput_per_rank: Estimate  # Samples per second and rank.
    step: Estimate  # Seconds; geometric mean over runs of each run's median step.
    step_p95: Estimate  # Seconds; geometric mean over runs of each run's 95th percentile.
    speedup: Estimate  # Against the baseline (1).
    ideal_speedup: float  # ranks / ranks of the baseline.
    efficiency: Estimate  # Share of the ideal (1).
    serial_fraction: Estimate | None  # Karp-Flatt (1); None under weak scaling and at the baseline.
    paired_with_baseline: bool  # Whether its runs and the baseline's are the same repeats, interleaved.
    mean_step: Estimate  # Seconds; geometric mean over runs of measured time / steps; efficiency is a ratio of these.
    run_ids: tuple[str, ...]
    leaf_switches: tuple[int, ...] = ()  # Numbers of leaf switches that its runs used, each once; empty: not recorded.

    @property
    def switches_text(self) -> str:
        return " or ".join(map(str, self.leaf_switches))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that may be compared with each other."""

    id: str
    scaling: Literal["weak", "strong"]
    points: tuple[Point, ...]  # By rank count, then node count; the first is the baseline.
    sample: Run  # A run with the common settings.
    runs: tuple[Run, ...]
    leaf_points: tuple[Point, ...] = ()  # Points whose runs differ in the number of leaf switches, one for each number.

    @property
    def baseline(self) -> Point:
        return self.points[0]

    @property
    def is_sufficient(self) -> bool:
        return min(len(point.run_ids) for point in self.points) >= MIN_RUNS


def groups(table: RunTable) -> list[Group]:
    """Returns all groups of comparable runs, sorted by workload, preset, scaling, engine and id."""
    by_group: dict[str, list[FigureRow]] = {}
    for row in table.figures.values():
        by_group.setdefault(row["group"], []).append(row)

    def order(group: Group) -> tuple[str, ...]:
        plan = group.sample.plan
        workload = plan.workload
        return workload.name, workload.preset, group.scaling, plan.engine.name, plan.created, group.id

    return sorted((_group(name, rows, table) for name, rows in by_group.items()), key=order)


def _group(name: str, rows: Sequence[FigureRow], table: RunTable) -> Group:
    by_place: dict[tuple[int, int], list[FigureRow]] = {}
    for row in rows:
        by_place.setdefault((row["ranks"], row["nodes"]), []).append(row)
    cells = [by_place[place] for place in sorted(by_place)]
    sample = table.runs[rows[0]["run_id"]]
    leaf_points = []
    for cell in cells:
        by_number: dict[int, list[FigureRow]] = {}
        for row in cell:
            by_number.setdefault(num_leaf_switches(table.runs[row["run_id"]]), []).append(row)
        by_number.pop(0, None)  # Not recorded.
        if len(by_number) > 1:
            leaf_points += [_point(by_number[number], cells[0], table) for number in sorted(by_number)]
    return Group(
        id=name,
        scaling=sample.plan.series.scaling,
        points=tuple(_point(cell, cells[0], table) for cell in cells),
        sample=sample,
        runs=tuple(table.runs[row["run_id"]] for row in rows),
        leaf_points=tuple(leaf_points),
    )


def _by_run(rows: Sequence[FigureRow], column: str, table: RunTable) -> dict[RunKey, float]:
    return {table.keys[row["run_id"]]: row[column] for row in rows}


def _point(rows: Sequence[FigureRow], baseline: Sequence[FigureRow], table: RunTable) -> Point:
    first = rows[0]
    ranks = first["ranks"]
    ideal = ranks / baseline[0]["ranks"]
    is_baseline = rows is baseline
    throughputs, reference = _by_run(rows, "throughput", table), _by_run(baseline, "throughput", table)
    if is_baseline:
        speedup = by_definition(1.0, len(rows))
    else:
        speedup = ratio_estimate(throughputs, reference)
    plan = table.runs[first["run_id"]].plan
    serial_fraction = None
    if plan.series.scaling == "strong" and ideal > 1:
        # Below 0 if the speed-up exceeds the ideal.
        serial_fraction = speedup.mapped(lambda value: (1 / value - 1 / ideal) / (1 - 1 / ideal), "fraction")
    unit = f"{plan.workload.sample_unit}/s"
    throughput = geometric_mean_estimate(throughputs, unit)
    mean_steps = {table.keys[row["run_id"]]: row["measured_s"] / row["steps"] for row in rows}
    return Point(
        ranks=ranks,
        nodes=first["nodes"],
        batch_per_rank=first["batch"],
        is_baseline=is_baseline,
        throughput=throughput,
        throughput_per_rank=throughput.scaled(1 / ranks, f"{unit}/rank"),
        step=geometric_mean_estimate(_by_run(rows, "step_median_s", table), "s"),
        step_p95=geometric_mean_estimate(_by_run(rows, "step_p95_s", table), "s"),
        speedup=speedup,
        ideal_speedup=ideal,
        efficiency=speedup.scaled(1 / ideal, "fraction"),
        serial_fraction=serial_fraction,
        paired_with_baseline=not is_baseline and pairing(throughputs, reference).is_paired,
        mean_step=geometric_mean_estimate(mean_steps, "s"),
        run_ids=tuple(row["run_id"] for row in rows),
        leaf_switches=tuple(sorted({num_leaf_switches(table.runs[row["run_id"]]) for row in rows} - {0})),
    )


def num_leaf_switches(run: Run) -> int:
    """Returns the number of leaf switches that join the nodes of a run; 0 if they were not recorded of all ranks."""
    if run.record is None:
        return 0
    switches = {rank.switch for rank in run.record.ranks}
    return 0 if "" in switches else len(switches)
