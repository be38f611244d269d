"""What a table keeps of one run."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.reading.causes import Causes, causes_of
from dlbench.reading.comparability import group_id
from dlbench.reading.digest import StepDigest, digest_of
from dlbench.reading.measures import RunMeasures, load_steps, measure
from dlbench.records.registry import describe
from dlbench.records.scan import Run


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for beside the figures."""

    causes: bool = False
    digest: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """What is kept of a run."""

    row: dict[str, object]
    """Its row of `dlbench.reading.run_table.RunTable.figures`."""
    parts: dict[str, float]
    """Seconds a step of each of `dlbench.reading.measures.PARTS`, and `exchange_wait`."""
    causes: Causes | None
    """None unless asked for."""
    digest: StepDigest | None
    """None unless asked for."""


def load_run(run: Run, wanted: Wanted) -> LoadedRun:
    """Reads the step files of a run, once.

    Raises:
        IncompleteDataError: as `dlbench.reading.measures.load_steps`.
        ValueError: the run has no valid record and so no figures.
    """
    steps = load_steps(run)
    measures = measure(run, steps)
    return LoadedRun(
        row=_row(run, measures),
        parts={**measures.parts, "exchange_wait": measures.exchange_wait_s},
        causes=causes_of(run, steps) if wanted.causes else None,
        digest=digest_of(run, steps) if wanted.digest else None,
    )


def load_or_say(run: Run, wanted: Wanted) -> LoadedRun | IncompleteDataError:
    """What a run gave, or why it gives nothing."""
    try:
        return load_run(run, wanted)
    except IncompleteDataError as error:
        return error


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
