"""The figures of one run that comparisons, gates and histories look at, each with its direction.

The run is the experimental unit: every metric is one number of one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of a run."""

    name: str
    title: str
    unit: str
    """As `dlbench.publish.figure.Figure.unit`."""
    higher_is_worse: bool
    about: str
    """How it is made, in a sentence."""


METRICS: tuple[Metric, ...] = (
    Metric(
        name="step_median_s",
        title="Step time",
        unit="s",
        higher_is_worse=True,
        about="median over the measured steps of the slowest rank's time in each step",
    ),
    Metric(
        name="step_mean_s",
        title="Mean step",
        unit="s",
        higher_is_worse=True,
        about="longest measured time of any rank over steps: the inverse of the throughput, outliers included",
    ),
    Metric(
        name="step_p95_s",
        title="Step time, p95",
        unit="s",
        higher_is_worse=True,
        about="95th percentile over the measured steps of the slowest rank's time in each step",
    ),
    Metric(
        name="energy_j_per_sample",
        title="Energy a sample",
        unit="J",
        higher_is_worse=True,
        about="joules of GPUs, else of processors, over the measured window, by samples",
    ),
    Metric(
        name="time_to_quality_s",
        title="Time to quality",
        unit="s",
        higher_is_worse=True,
        about="from the start of training to the end of the first evaluation that met the target",
    ),
)
DEFAULT_METRIC = "step_median_s"


def by_name() -> Mapping[str, Metric]:
    """The metrics by their names."""
    return {metric.name: metric for metric in METRICS}
