"""Learning rate over steps, in closed form: no state to checkpoint, the same on every rank."""

from __future__ import annotations

import math

from dlbench.specs.training import TrainSpec


class LearningRate:
    """The learning rate of each optimizer step.

    The peak is `optimizer.learning_rate`, scaled with the global batch where the plan says so (`OptimizerSpec.peak`);
    the rest is what the recipe has at that batch (`TrainSpec.at_batch`).

    Warm-up is linear over W steps: step 0 takes 1 / W of the way from its start (zero, or the unscaled rate) to the
    peak, step W - 1 all of it (Goyal et al. 2017, section 2.2, begun at one step's share so that no step is lost at 0).
    Afterwards, with p the share of the steps from W (`decay_from: start`: from 0) to T that has passed:

    - constant: the peak;
    - linear, polynomial: end + (peak - end) (1 - p) ** power, power 1 for linear; `end_learning_rate` from T on (You et
      al. 2017 for power 2);
    - cosine: end + (peak - end) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts);
    - step: the peak times the factor of the last boundary reached, boundaries counted from step 0.

    What is given in epochs is turned into steps by `steps_per_epoch`, fractions kept.

    Args:
        global_batch: samples of one step over all ranks.
        steps_per_epoch: steps of one epoch; None where the schedule does not count in epochs.

    Raises ValueError: the schedule counts in epochs and steps_per_epoch is None.
    """

    def __init__(self, spec: TrainSpec, *, global_batch: int, steps_per_epoch: float | None) -> None:
        schedule, base = spec.at_batch(global_batch).schedule, spec.optimizer.learning_rate
        if schedule.counts_epochs and steps_per_epoch is None:
            raise ValueError("a schedule in epochs needs steps_per_epoch")
        epoch = steps_per_epoch or 1.0
        self._schedule = schedule
        self.peak = spec.optimizer.peak(global_batch)
        self._start = base if schedule.warmup_from == "unscaled" else 0.0
        self._warmup = float(schedule.warmup_steps)
        if schedule.warmup_epochs is not None:
            self._warmup = schedule.warmup_epochs * epoch
        self._total = float(schedule.total_steps or 0)
        if schedule.total_epochs is not None:
            self._total = schedule.total_epochs * epoch
        unit = epoch if schedule.epoch_boundaries else 1.0
        self._boundaries = [boundary * unit for boundary in schedule.boundaries]

    def at(self, step: int) -> float:
        """The rate of one step, 0 for the first. Raises ValueError: step is negative."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        if step < self._warmup:
            share = min(1.0, (step + 1) / self._warmup)
            return self._start + (self.peak - self._start) * share
        return self._decayed(step)

    def _decayed(self, step: int) -> float:
        schedule, peak = self._schedule, self.peak
        if schedule.decay == "constant":
            return peak
        if schedule.decay == "step":
            factor = 1.0
            for boundary, share in zip(self._boundaries, schedule.step_factors, strict=True):
                if step >= boundary:
                    factor = share
            return peak * factor
        end = schedule.end_learning_rate
        if step >= self._total:
            return end
        began = self._warmup if schedule.decay_from == "warmup" else 0.0
        rest = (self._total - step) / (self._total - began)
        if schedule.decay == "cosine":
            return end + (peak - end) * (1 - math.cos(math.pi * rest)) / 2
        power = schedule.power if schedule.decay == "polynomial" else 1.0
        return float(end + (peak - end) * rest**power)
