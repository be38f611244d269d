"""A scan of `runs/` becomes tables: figures of the runs that have any, and the story of those that have none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlbench.analysis.causes import Causes, causes_of
from dlbench.analysis.comparability import group_id
from dlbench.analysis.digest import StepDigest
from dlbench.analysis.measures import PARTS, RunMeasures, load_steps, measure
from dlbench.errors import IncompleteDataError
from dlbench.records.registry import describe
from dlbench.records.scan import Run, Scan

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class WithoutFigures:
    """A run that yields no figure, and why."""

    run: Run
    state: str
    """invalid, failed, incomplete, or damaged (a valid record whose step files are not whole)."""
    why: str


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """All runs of a scan."""

    figures: pd.DataFrame
    """One row for each run with figures, in the order of the scan; columns see `tabulate`."""
    parts: pd.DataFrame
    """The same runs by `run_id`: seconds a step of each of `PARTS` (they sum to the step) and `exchange_wait`."""
    runs: dict[str, Run]
    """Runs with figures, by run id."""
    without: tuple[WithoutFigures, ...]
    damaged: tuple[str, ...]
    """Damaged files, one line each; their runs yield no figure."""
    causes: dict[str, Causes] = field(default_factory=dict)
    """Of the runs with figures, by run id; empty unless they were asked for."""
    digests: dict[str, StepDigest] = field(default_factory=dict)
    """Of the runs with figures, by run id; empty unless they were asked for."""


def tabulate(scan: Scan, *, with_causes: bool = False, with_digests: bool = False) -> RunTable:
    """Figures of every valid run, if `with_causes` the causes of its step, and if `with_digests` its steps in short.

    Columns of `figures`: every name of the registry (text; `ranks` and `nodes` are integers), then
    `run_id`, `group` (equal for comparable runs), `series`, `repeat`, `block` (series and swept
    values: runs of one block and repeat ran interleaved), `position`, `side`,
    `finished` (UTC), `batch`
    (samples a rank, integer), `sample_unit`, `steps`, `samples`, `measured_s`, `throughput`
    (samples/s), `step_median_s`, `step_p95_s`, `step_cv` (1), `warnings` (number of recorded ones).

    Damaged runs are not raised but listed, so that one bad file does not hide the rest.
    """
    import pandas as pd

    rows: list[dict[str, object]] = []
    parts: dict[str, dict[str, float]] = {}
    runs: dict[str, Run] = {}
    causes: dict[str, Causes] = {}
    without: list[WithoutFigures] = []
    damaged = list(scan.problems)
    for run in scan.runs:
        if run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.story))
            continue
        try:
            _refuse_copy(run, runs)
            steps = load_steps(run)
            measures = measure(run, steps)
            found = causes_of(run, steps) if with_causes else None
        except IncompleteDataError as error:
            damaged.append(str(error))
            without.append(WithoutFigures(run=run, state="damaged", why=str(error)))
            continue
        runs[run.plan.run_id] = run
        if found is not None:
            causes[run.plan.run_id] = found
        rows.append(_row(run, measures))
        parts[run.plan.run_id] = {**measures.parts, "exchange_wait": measures.exchange_wait_s}
    return RunTable(
        figures=pd.DataFrame(rows),
        parts=pd.DataFrame.from_dict(parts, orient="index", columns=[*PARTS, "exchange_wait"]),
        runs=runs,
        without=tuple(without),
        damaged=tuple(damaged),
        causes=causes,
    )


def _refuse_copy(run: Run, seen: dict[str, Run]) -> None:
    """A copied folder is not a second measurement."""
    if run.plan.run_id in seen:
        raise IncompleteDataError(
            f"{run.folder.path}: holds run {run.plan.run_id} once more, like {seen[run.plan.run_id].folder.path}; "
            "a copy is no repeat and is left out"
        )


def _row(run: Run, measures: RunMeasures) -> dict[str, object]:
    assert run.record is not None
    plan = run.plan
    return {
        **describe(run),
        "ranks": plan.layout.ranks,
        "nodes": plan.layout.nodes,
        "run_id": plan.run_id,
        "group": group_id(run),
        "series": plan.series.id,
        "repeat": plan.series.repeat,
        "block": " ".join(
            [plan.series.id, plan.created, *(f"{key}={value}" for key, value in sorted(plan.series.axes.items()))]
        ),
        "side": plan.series.side,
        "position": plan.series.position,
        "finished": run.record.finished,
        "batch": plan.workload.train.batch_per_rank,
        "sample_unit": plan.workload.sample_unit,
        "steps": measures.steps,
        "samples": measures.samples,
        "measured_s": measures.measured_s,
        "throughput": measures.throughput,
        "step_median_s": measures.step_median_s,
        "step_p95_s": measures.step_p95_s,
        "step_cv": measures.step_cv,
        "warnings": len(run.record.warnings),
    }
