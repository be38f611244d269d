"""What a step takes outside its passes, by the warm-up of the run: known before anything is measured."""

from __future__ import annotations

from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import np
from dlbench.records.rows.steps import StepReader
from dlbench.records.scan import Run

_COLUMNS = ("warmup", "step_ns", "forward_ns", "backward_ns")


def beside_passes_s(run: Run) -> float | None:
    """Seconds per step that are neither forward nor backward pass: input, exchange, optimizer and what no phase holds.

    The median over the warm-up steps of rank 0 but the first, in which much happens for the first time; None for fewer
    than two of them, and where the file cannot be read.
    """
    try:
        steps: dict[str, Any] = StepReader(run.folder.steps(0)).read(_COLUMNS)
    except IncompleteDataError:
        return None
    is_warm_up = steps["warmup"] != 0
    others = (steps["step_ns"] - steps["forward_ns"] - steps["backward_ns"])[is_warm_up][1:]
    return float(np.median(others)) / 1e9 if len(others) else None
