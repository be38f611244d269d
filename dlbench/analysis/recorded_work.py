"""Gives the workers of an emulated training the recorded steps of a run as their compute times."""

from __future__ import annotations

from dlbench.analysis.measures import load_steps
from dlbench.errors import UserError
from dlbench.lazy import np
from dlbench.records.layer_profile import run_of
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, format_seconds

MOST_STEPS = 256  # Steps of a rank in a plan, evenly spaced.


def with_recorded_work(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Returns the plan with the steps of the run in `engine.emulated.steps_from`, of at most as many ranks as workers.

    The second value is a note. Raises UserError: the run has no steps.
    """
    emulated = plan.engine.emulated
    if emulated.steps_from is None:
        return plan, None
    key = f"engine.emulated.steps_from {emulated.steps_from}"
    run = run_of(key, emulated.steps_from)
    if run.state != "valid":
        raise UserError(f"{key}: its run is {run.state}; name the folder of a valid run")
    steps = load_steps(run)
    ranks, num_steps = steps.step_ns.shape
    exchange_s = float(np.median(steps.phase_ns["exchange"].min(axis=0))) / 1e9 if ranks > 1 else 0.0
    chosen = np.linspace(0, ranks - 1, min(ranks, plan.emulated_workers)).round().astype(int)
    work_s = (steps.step_ns - steps.phase_ns["exchange"])[chosen, :: -(-num_steps // MOST_STEPS)] / 1e9
    note = (
        f"engine.emulated.steps_from: {counted(len(work_s), 'rank')} of {run.plan.run_id}, own work of a step "
        f"{format_seconds(float(np.median(work_s)))} (median), exchange {format_seconds(exchange_s)}"
    )
    recorded = {"work_s": tuple(map(tuple, work_s.tolist())), "exchange_s": exchange_s, "steps_from": run.plan.run_id}
    engine = plan.engine.model_copy(update={"emulated": emulated.model_copy(update=recorded)})
    return plan.model_copy(update={"engine": engine}), note
