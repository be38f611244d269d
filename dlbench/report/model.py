"""The report as plain data: everything every format prints, and nothing that is computed later.

Formats (HTML, Markdown, CSV, JSON, terminal) read only this, so they cannot disagree. Numbers are
raw here (seconds, fractions, samples a second); `dlbench.report.wording` makes text of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from dlbench.history.page.model import TrendsReport
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.model import CauseAccount
from dlbench.views.exchange.numbers import ExchangePoint
from dlbench.views.forecast.numbers import Forecast
from dlbench.views.layers.numbers import LayerTable
from dlbench.views.machine.model import DataPath, Energy, Memory, Telemetry
from dlbench.views.noise.numbers import NoisePoint
from dlbench.views.precision.model import PrecisionComparison, RunDifference, SystemDescription
from dlbench.views.quality.numbers import Quality
from dlbench.views.steps.model import StepTimes
from dlbench.views.sweep.numbers import Sweep
from dlbench.views.utilisation.numbers import Utilisation

FORMAT = "dlbench.report"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step at a scaling point; parts sum to the mean step."""

    name: str
    seconds: Estimate
    """Mean over runs (not median), so that parts sum to the mean step."""
    ideal_seconds: float
    lost: Estimate
    """Share of the ideal lost here (fraction); parts sum to the loss."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One rank count of a group."""

    ranks: int
    nodes: int
    batch_per_rank: int
    is_baseline: bool
    throughput: Estimate
    throughput_per_rank: Estimate
    step: Estimate
    step_p95: Estimate
    speedup: Estimate
    ideal_speedup: float
    efficiency: Estimate
    serial_fraction: Estimate | None
    paired_with_baseline: bool
    parts: tuple[Part, ...]
    whole: Part
    """Sum of the parts: the mean step, and 1 - efficiency of means."""
    exchange_wait: Estimate
    """Share of the part `exchange` spent waiting for ranks that came later, seconds a step."""
    run_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One property that all runs of a group share."""

    name: str
    title: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """One reason for doubt, beside the figures it concerns."""

    code: str
    severity: Literal["serious", "note"]
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Untold:
    """What a view does not tell for want of data, and what would produce it."""

    view: str
    """Id of the view."""
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that may be compared with each other, and what they say."""

    id: str
    label: str
    """Short: workload, preset, engine, scaling."""
    title: str
    """The workload in words."""
    about: str
    """What the preset changes against the published configuration."""
    notice: str
    scaling: Literal["weak", "strong"]
    sample_unit: str
    conditions: tuple[Condition, ...]
    settings: tuple[tuple[str, str], ...]
    """What `--set` and `--sweep` chose, key and value."""
    caption: str
    """The conditions in one line: it stands under every chart and table of medians."""
    parts_caption: str
    """The same for charts and tables of parts, which are means."""
    verdict: str
    """One sentence."""
    is_sufficient: bool
    """Whether every point has enough runs for a comparison."""
    points: tuple[Point, ...]
    doubts: tuple[Doubt, ...]
    quality: Quality | None
    """None for runs that measure speed."""
    noise: tuple[NoisePoint, ...]
    """Empty where the noise scale was not asked for."""
    utilisation: Utilisation | None
    """None where neither the FLOPs of a sample nor the length of a training is known."""
    exchange: tuple[ExchangePoint, ...]
    """The gradient exchange by rank count; empty where no run tells of it."""
    causes: CauseAccount | None
    """Where the lost percent goes, and who was waited for."""
    step_times: StepTimes | None
    """Distribution, outliers, and maps of ranks by steps."""
    data_path: DataPath | None
    memory: Memory | None
    telemetry: Telemetry | None
    energy: Energy | None
    outlook: Forecast | None
    """Laws, anchors and forecasts: nothing of it is measured."""
    next_step: str = ""
    """What to do next, in a sentence; empty where nothing suggests itself."""
    untold: tuple[Untold, ...] = ()
    """Views that have nothing to say of these runs."""

    @property
    def baseline(self) -> Point:
        """The point all others are measured against."""
        return self.points[0]

    @property
    def largest(self) -> Point:
        """The point with most ranks."""
        return self.points[-1]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run, whatever became of it."""

    run_id: str
    group: str
    """Id of its group; empty for runs without figures."""
    state: str
    story: str
    """Why there is no figure; empty where there is one."""
    workload: str
    preset: str
    engine: str
    precision: str
    data: str
    batch_per_rank: int
    scaling: str
    series: str
    repeat: int
    ranks: int
    nodes: int
    sample_unit: str
    steps: int | None
    throughput: float | None
    """Samples a second."""
    step_median_s: float | None
    step_p95_s: float | None
    step_cv: float | None
    finished: str
    warnings: tuple[str, ...]
    goal: str
    """`speed`, or `quality` and the target."""
    reached: bool | None
    """Whether it met its target; None for a run of speed, and for one that tells nothing."""
    time_to_quality_s: float | None
    samples_to_quality: int | None
    epochs_to_quality: float | None

    @property
    def configuration(self) -> str:
        """What was run, in one line."""
        parts = (self.workload, f"{self.preset} preset", self.engine, self.precision, f"batch {self.batch_per_rank}")
        return f"{', '.join(parts)} a rank, {self.scaling}, {self.data}"


@dataclass(frozen=True, kw_only=True)
class EnvironmentDifference:
    """A key of the environment with more than one value among the runs."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    expected: bool
    """Whether it names the job or the place in it, and so differs by nature."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the runs ran in."""

    common: tuple[tuple[str, str], ...]
    differences: tuple[EnvironmentDifference, ...]
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run finished, UTC; empty if none did. Not the time of the report: equal runs, equal report."""
    dlbench_version: str
    notices: tuple[str, ...]
    groups: tuple[Group, ...]
    sweeps: tuple[Sweep, ...]
    """Swept series: settings of different groups side by side."""
    layers: tuple[LayerTable, ...]
    """Networks of the groups, each once."""
    precisions: tuple[PrecisionComparison, ...]
    differences: tuple[RunDifference, ...]
    systems: tuple[SystemDescription, ...]
    history: TrendsReport | None
    """What changed over months; None where the report was made without a history."""
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: Environment
    methods: tuple[tuple[str, str], ...]
    """Heading and text: how the numbers are made."""
    missing: tuple[Untold, ...]
    """What this report does not show, and what it would take; of single groups see `Group.untold`."""

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        """Runs that yield no figure."""
        return tuple(run for run in self.runs if run.throughput is None)


def as_plain(value: Any) -> Any:
    """Dataclasses, records, tuples and numbers as JSON has them; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return {name: as_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
