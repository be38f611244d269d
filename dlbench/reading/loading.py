"""Runs are read into what a table keeps of each, one after the other or by several processes at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dlbench import pool
from dlbench.errors import IncompleteDataError
from dlbench.reading.causes import Causes, causes_of
from dlbench.reading.comparability import averaged_id
from dlbench.reading.digest import StepDigest, digest_of
from dlbench.reading.measures import RunMeasures, load_steps, measure
from dlbench.records.registry import describe
from dlbench.records.rows.damage import damaged_traces
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
    """Its row of `dlbench.reading.table.RunTable.figures`."""
    parts: dict[str, float]
    """Seconds a step of each of `dlbench.reading.measures.PARTS`, `exchange_wait` and `exchange_wait_first`."""
    causes: Causes | None
    """None unless asked for."""
    digest: StepDigest | None
    """None unless asked for."""
    damaged: tuple[str, ...] = ()
    """Spans and samples that are damaged, one line each; they take no figure away."""


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
        parts={
            **measures.parts,
            "exchange_wait": measures.exchange_wait_s,
            "exchange_wait_first": measures.exchange_wait_first_s,
        },
        causes=causes_of(run, steps) if wanted.causes else None,
        digest=digest_of(run, steps) if wanted.digest else None,
        damaged=damaged_traces(run.folder.path, whole=False),
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
        "group": averaged_id(run),
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


MAX_PROCESSES = 6
"""More are not started: each holds the steps of a run, a fifth of a gigabyte for a million of them."""
WORTH_A_PROCESS = 32 << 20
"""Bytes of step files, `FILE_BYTES` added for each, that take longer to read than a process takes to start."""
FILE_BYTES = 16 << 10
"""As much of a step file is read in the time that it takes to open one and to look at its header."""


def load_runs(
    runs: Sequence[Run], wanted: Wanted, *, processes: int | None = None
) -> list[LoadedRun | IncompleteDataError]:
    """Reads many runs; what each gave, or why it gives nothing, in the order of `runs`.

    Args:
        runs: with valid records.
        wanted: beside the figures.
        processes: how many read; None: as many as pay for being started, at most one for each usable core. The results
            are the same.

    Raises:
        RunError: a process was killed.
        RuntimeError: a defect, with its traceback.
    """
    weights = [_weight(run) for run in runs]
    if processes is None:
        cores = len(os.sched_getaffinity(0))
        processes = min(cores, MAX_PROCESSES, sum(weights) // WORTH_A_PROCESS)
    # The largest first, so that none of them is left for the end.
    order = sorted(range(len(runs)), key=lambda number: -weights[number])
    items = [dataclasses.replace(runs[number], statuses=[]) for number in order]
    work = partial(load_or_say, wanted=wanted)
    with pool.run(work, items, processes, name=lambda run: str(run.folder.path), verb="read") as results:
        found = {order[place]: result for place, result in results}
    return [found[number] for number in range(len(runs))]


def _weight(run: Run) -> int:
    """Bytes of a run's step files, as if all were as large as the first, and as much again as opening them takes."""
    try:
        size = run.folder.steps(0).stat().st_size
    except OSError:
        size = 0
    return run.plan.layout.ranks * (size + FILE_BYTES)
