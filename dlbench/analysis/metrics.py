"""The metrics of a run that comparisons, gates and histories use: each is one number per run, the experimental unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError

if TYPE_CHECKING:
    from dlbench.analysis.table import RunTable
    from dlbench.records.scan import Run


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run."""

    name: str
    title: str
    unit: str  # Unit as in `dlbench.stats.estimates.Estimate.unit`.
    about: str  # How it is computed, in a sentence.
    higher_is_worse: bool = True


METRICS: tuple[Metric, ...] = (
    Metric(
        name="step_median_s",
        title="Step time",
        unit="s",
        about="median over the measured steps of the slowest rank's time in each step",
    ),
    Metric(
        name="step_mean_s",
        title="Mean step",
        unit="s",
        about="longest measured time of any rank over steps: the inverse of the throughput, outliers included",
    ),
    Metric(
        name="step_p95_s",
        title="Step time, p95",
        unit="s",
        about="95th percentile over the measured steps of the slowest rank's time in each step",
    ),
    Metric(
        name="energy_per_sample_j",
        title="Energy per sample",
        unit="J",
        about="energy of the GPUs, or of processors if no GPU computed, in the measured window, divided by samples",
    ),
    Metric(
        name="time_to_quality_s",
        title="Time to quality",
        unit="s",
        about="from the start of training to the end of the first evaluation that met the target",
    ),
)
METRIC_NAMES = tuple(metric.name for metric in METRICS)
DEFAULT_METRICS = ("step_median_s", "step_mean_s")
"""Metrics with a verdict by default: the median detects small changes, the mean includes stalls of a few steps."""
FOLLOWED = ("step_median_s", "energy_per_sample_j", "time_to_quality_s")
"""Metrics that histories follow by default; mean and p95 of steps would show nearly the same."""


def by_name() -> Mapping[str, Metric]:
    """Returns the metrics by their names."""
    return {metric.name: metric for metric in METRICS}


def metrics_by_run(
    table: RunTable,
    *,
    names: Collection[str] = METRIC_NAMES,
    damaged: list[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Returns the metrics of these names of every run with figures, by run id and name, each in its unit.

    A metric is absent if a run does not have it: energy without enough samples, time to quality if the target was
    missed. Energy reads the samples of every node, other metrics read no file. `damaged` gets a line for each run whose
    samples are damaged; its energy is absent.
    """
    values_by_run: dict[str, dict[str, float]] = {}
    for row in table.figures.values():
        run = table.runs[str(row["run_id"])]
        values = {
            "step_median_s": float(row["step_median_s"]),
            "step_mean_s": float(row["measured_s"]) / int(row["steps"]),
            "step_p95_s": float(row["step_p95_s"]),
        }
        if run.record is not None and run.record.quality is not None:
            reached = run.record.quality.time_to_quality_s
            if reached is not None and reached > 0:
                values["time_to_quality_s"] = reached
        if "energy_per_sample_j" in names:
            energy = _energy(run, damaged)
            if energy is not None:
                values["energy_per_sample_j"] = energy
        values_by_run[run.plan.run_id] = {name: value for name, value in values.items() if name in names}
    return values_by_run


def _energy(run: Run, damaged: list[str] | None) -> float | None:
    """Returns the joules per sample of the GPUs if the run used them, or of the processors; None: not measured."""
    if run.record is None or run.record.watch is None:
        return None
    from dlbench.analysis.telemetry.energy import run_energy

    try:
        energy = run_energy(run)
    except IncompleteDataError as error:
        if damaged is not None:
            damaged.append(str(error))
        return None
    # Never processors in place of GPUs that were not measured: a median would mix both.
    on_gpu = any(rank.device.startswith("cuda") for rank in run.record.ranks)
    joules = energy.energy_per_sample_j("GPUs" if on_gpu else "processors")
    if joules is None or joules <= 0:
        return None
    return joules
