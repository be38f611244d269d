"""Gives the workers of an emulated training the recorded steps of a run as their compute times."""

from __future__ import annotations

from pathlib import Path

from dlbench.analysis.measures import load_steps
from dlbench.errors import DlbenchError, UserError
from dlbench.lazy import np
from dlbench.records.scan import Run, read_run
from dlbench.specs.engine import RecordedWork
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, format_seconds

MOST_STEPS = 256  # Steps of a rank in a plan, evenly spaced.


def with_recorded_work(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Returns the plan with the steps of the run in `engine.emulated.steps_from`, and a note.

    Raises UserError: the run has none.
    """
    emulated = plan.engine.emulated
    if emulated.steps_from is None:
        return plan, None
    path = Path(emulated.steps_from)
    try:
        run = read_run(path.parent if path.is_file() else path)
        recorded = recorded_work(run, plan.emulated_workers)
    except DlbenchError as error:
        raise UserError(f"engine.emulated.steps_from {emulated.steps_from}: {error}") from None
    medians = [float(np.median(times)) for times in recorded.work_s]
    note = (
        f"engine.emulated.steps_from: {counted(len(medians), 'rank')} of {run.plan.run_id}, own work of a step "
        f"{format_seconds(min(medians))} to {format_seconds(max(medians))} (medians), exchange "
        f"{format_seconds(recorded.exchange_s)}"
    )
    settings = emulated.model_copy(update={"recorded": recorded, "steps_from": run.plan.run_id})
    engine = plan.engine.model_copy(update={"emulated": settings})
    return plan.model_copy(update={"engine": engine}), note


def recorded_work(run: Run, workers: int) -> RecordedWork:
    """Returns the recorded work of at most as many ranks as workers, evenly spaced. Raises UserError: not valid."""
    if run.state != "valid":
        raise UserError(f"its run is {run.state}; name the folder of a valid run")
    steps = load_steps(run)
    ranks, num_steps = steps.step_ns.shape
    exchange_ns = np.median(steps.phase_ns["exchange"].min(axis=0)) if ranks > 1 else 0.0
    work_s = (steps.step_ns - steps.phase_ns["exchange"]) / 1e9
    chosen = np.linspace(0, ranks - 1, min(ranks, workers)).round().astype(int)
    spaced = work_s[chosen, :: -(-num_steps // MOST_STEPS)].tolist()
    return RecordedWork(work_s=tuple(map(tuple, spaced)), exchange_s=float(exchange_ns) / 1e9)
