"""How long a training takes, and whether a stated throughput, amount of training and time can all be true.

time = samples / throughput holds for every data-parallel training, whatever the machine. Two of the three numbers
decide the third, so a publication that prints all three can be checked. The best-known slip is a throughput of one
rank, node or machine that is printed as that of another. Time here is time in training steps: start, staging and
evaluation come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dlbench.specs.plan import RunPlan

UNSTATED_SAMPLES = 1_000_000  # Samples of a training whose length nobody states.
HOUR_S = 3_600

GROUP_SIZES: tuple[int, ...] = (2, 4, 6, 8, 16)
"""Usual numbers of GPUs in a node: factors by which a throughput is off when a node's is taken for the machine's."""

TOLERANCE = 0.05  # How much faster than its own throughput a training may be before the numbers contradict each other.
HINT_TOLERANCE = 0.15  # How near the factor of two times must be to a group size; wide, as printed figures are rounded.

Status = Literal["fits", "impossible", "unexplained"]


@dataclass(frozen=True, kw_only=True)
class TimeVerdict:
    """What a stated time is worth besides a throughput and an amount of training."""

    status: Status
    """fits; impossible: the time is too short for that throughput; unexplained: time is left over, which training at
    that throughput does not fill (evaluation, staging, restarts or another throughput)."""
    expected_s: float  # Seconds that the samples take at the throughput.
    stated_s: float  # Seconds that were stated.
    needed_throughput: float  # Samples per second that the stated time needs.
    speed_factor: float  # needed_throughput over the stated one: above 1, the time is too short.
    group: int | None
    """Size of a group of ranks for which the throughput may have been stated; None unless impossible and near one."""

    @property
    def group_s(self) -> float | None:
        """Seconds that the samples take if the throughput is that of one of `group` equal parts."""
        return None if self.group is None else self.expected_s / self.group


def consistency(
    throughput: float, samples: float, epochs: float, seconds: float, tolerance: float = TOLERANCE
) -> TimeVerdict:
    """Returns whether a throughput, an amount of training and a time, all above zero, can be true together.

    `throughput`: samples per second, all ranks together. `seconds`: the stated time to train. `tolerance`: share by
    which the two times may differ; 0.05 for figures of two digits.
    """
    expected = samples * epochs / throughput
    factor = expected / seconds
    status: Status = "fits"
    if factor > 1 + tolerance:
        status = "impossible"
    elif factor < 1 / (1 + tolerance):
        status = "unexplained"
    near = [size for size in GROUP_SIZES if abs(math.log(factor / size)) <= math.log1p(HINT_TOLERANCE)]
    group = min(near, key=lambda size: abs(math.log(factor / size)), default=None)
    return TimeVerdict(
        status=status,
        expected_s=expected,
        stated_s=seconds,
        needed_throughput=throughput * factor,
        speed_factor=factor,
        group=group if status == "impossible" else None,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """How much a full training is, by the plan."""

    epochs: float | None  # None where the plan counts steps or samples.
    samples: float  # Samples of the whole training, all ranks together.
    key: str  # Where the amount is from: a key of the plan.
    is_limit: bool  # Whether it is the most that would be trained, and not the length of the recipe.


def recipe_of(plan: RunPlan, epoch_samples: int | None) -> TrainingLength | None:
    """The length of a full training: the schedule's, else the limit of the quality; None if neither is known.

    Both are those in force at the plan's global batch.

    `epoch_samples`: samples of an epoch; None where they are not known.
    """
    schedule, quality = plan.workload.train.at_batch(plan.global_batch).schedule, plan.goal
    if schedule.total_epochs is not None and epoch_samples:
        epochs, key, limit = schedule.total_epochs, "train.schedule.total_epochs", False
    elif schedule.total_steps is not None:
        samples = float(schedule.total_steps * plan.global_batch)
        return TrainingLength(epochs=None, samples=samples, key="train.schedule.total_steps", is_limit=False)
    elif quality is not None and quality.max_epochs is not None and epoch_samples:
        epochs, key, limit = quality.max_epochs, "quality.max_epochs", True
    elif quality is not None and quality.max_samples is not None:
        return TrainingLength(epochs=None, samples=float(quality.max_samples), key="quality.max_samples", is_limit=True)
    else:
        return None
    return TrainingLength(epochs=epochs, samples=epoch_samples * epochs, key=key, is_limit=limit)
