"""The runs of a table, read one after the other or by several processes at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial

from dlbench import pool
from dlbench.errors import IncompleteDataError
from dlbench.reading.run_loading import LoadedRun, Wanted, load_or_say
from dlbench.records.scan import Run

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
