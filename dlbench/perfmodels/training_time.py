"""The time of a training, and whether a stated throughput, amount of training and time can all be true. The usual
mistake is the throughput of one rank, node or machine stated as that of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dlbench.specs.plan import RunPlan

UNSTATED_SAMPLES = 1_000_000  # Samples of a training whose length is not stated.
HOUR_S = 3_600

GROUP_SIZES: tuple[int, ...] = (2, 4, 6, 8, 16)  # Usual numbers of GPUs in a node.

TOLERANCE = 0.05  # Share by which a training may be faster than its throughput allows before the numbers contradict.
HINT_TOLERANCE = 0.15  # Largest relative distance of the speed factor to a group size; printed figures are rounded.

Status = Literal["fits", "impossible", "unexplained"]


@dataclass(frozen=True, kw_only=True)
class TimeVerdict:
    """A stated time compared with the time that follows from a throughput and an amount of training."""

    status: Status
    """impossible: the time is too short for that throughput; unexplained: it is longer than training takes."""
    expected_s: float  # Seconds that the samples take at the throughput.
    stated_s: float  # Seconds that were stated.
    needed_throughput: float  # Samples per second that the stated time needs.
    speed_factor: float  # needed_throughput over the stated one: above 1, the time is too short.
    group_size: (
        int | None
    )  # The usual node size nearest to `speed_factor`, if all ranks may be that many times as fast.

    @property
    def group_s(self) -> float | None:
        """Seconds that the samples take if all ranks together are `group_size` times as fast as stated."""
        if self.group_size is None:
            return None
        return self.expected_s / self.group_size


def consistency(
    throughput: float, samples: float, epochs: float, seconds: float, tolerance: float = TOLERANCE
) -> TimeVerdict:
    """Returns whether a throughput (samples/s, all ranks), an amount of training and a time can all be true. All are
    above zero; the two times may differ by the share `tolerance`, 0.05 for figures of two digits.
    """
    expected_s = samples * epochs / throughput
    factor = expected_s / seconds
    status: Status = "fits"
    group_size = None
    if factor > 1 + tolerance:
        status = "impossible"
        near = [size for size in GROUP_SIZES if abs(math.log(factor / size)) <= math.log1p(HINT_TOLERANCE)]
        group_size = min(near, key=lambda size: abs(math.log(factor / size)), default=None)
    elif factor < 1 / (1 + tolerance):
        status = "unexplained"
    return TimeVerdict(
        status=status,
        expected_s=expected_s,
        stated_s=seconds,
        needed_throughput=throughput * factor,
        speed_factor=factor,
        group_size=group_size,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """The length of a full training by the plan."""

    epochs: float | None  # None if the plan counts steps or samples.
    samples: float  # Samples of the whole training, all ranks together.
    key: str  # The key of the plan that gives the length.
    is_limit: bool  # Whether it is an upper limit instead of the length of the recipe.


def training_length_of(plan: RunPlan, epoch_samples: int | None) -> TrainingLength | None:
    """Returns the length of a full training: the schedule's, or else the limit of the quality; None if not known. Both
    are those at the plan's global batch. Lengths in epochs are not known without `epoch_samples`.
    """
    schedule, quality = plan.workload.train.at_batch(plan.global_batch).schedule, plan.goal
    if schedule.total_epochs is not None and epoch_samples:
        epochs, samples = schedule.total_epochs, schedule.total_epochs * epoch_samples
        return TrainingLength(epochs=epochs, samples=samples, key="train.schedule.total_epochs", is_limit=False)
    if schedule.total_steps is not None:
        samples = float(schedule.total_steps * plan.global_batch)
        return TrainingLength(epochs=None, samples=samples, key="train.schedule.total_steps", is_limit=False)
    if quality is not None and quality.max_epochs is not None and epoch_samples:
        epochs, samples = quality.max_epochs, quality.max_epochs * epoch_samples
        return TrainingLength(epochs=epochs, samples=samples, key="quality.max_epochs", is_limit=True)
    if quality is not None and quality.max_samples is not None:
        return TrainingLength(epochs=None, samples=float(quality.max_samples), key="quality.max_samples", is_limit=True)
    return None
