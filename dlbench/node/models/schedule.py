"""Learning rate over steps, in closed form: no state to checkpoint, the same on every rank."""

from __future__ import annotations

from dlbench.specs.workload import ScheduleSpec, TrainSpec


def learning_rate(step: int, spec: TrainSpec) -> float:
    """The learning rate of one optimiser step.

    Args:
        step: 0 for the first step.
        spec: `optimizer.learning_rate` is the peak; `schedule` says how it is reached and left.

    Warm-up is linear: step 0 takes 1 / warmup_steps of the peak, step warmup_steps - 1 the peak itself (Goyal et al.
    2017, section 2.2, started at one step's share so that no step is lost at 0). Afterwards, with p the share of the
    steps from warmup_steps to total_steps that has passed:

    - constant: the peak;
    - linear, polynomial: end + (peak - end) (1 - p) ** power, power 1 for linear; `end_learning_rate` from total_steps
      on (You et al. 2017 for power 2);
    - step: the peak times the factor of the last boundary reached, boundaries counted from step 0.

    Raises:
        ValueError: step is negative.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    peak, schedule = spec.optimizer.learning_rate, spec.schedule
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    return _decayed(step, peak, schedule)


def _decayed(step: int, peak: float, schedule: ScheduleSpec) -> float:
    if schedule.decay == "constant":
        return peak
    if schedule.decay == "step":
        factor = 1.0
        for boundary, share in zip(schedule.step_boundaries, schedule.step_factors, strict=True):
            if step >= boundary:
                factor = share
        return peak * factor
    end = schedule.end_learning_rate
    if step >= schedule.total_steps:
        return end
    power = schedule.power if schedule.decay == "polynomial" else 1.0
    rest = (schedule.total_steps - step) / (schedule.total_steps - schedule.warmup_steps)
    return float(end + (peak - end) * rest**power)
