"""The scaling report as plain data; views put their numbers under their own keys into `views`, of a group or the
report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlbench.analysis.comparability import Condition
from dlbench.analysis.environments import Difference, Doubt
from dlbench.analysis.scaling import Point
from dlbench.report.document import BaseReport, ListedRun, Missing, without_figure
from dlbench.report.formats.json import HIDDEN, INLINE
from dlbench.report.table import column
from dlbench.report.views import HasViews
from dlbench.views.controls import Controls


@dataclass(frozen=True, kw_only=True)
class ReportGroup(HasViews):
    """Runs that may be compared with each other, and their figures."""

    id: str
    label: str  # Short: workload, preset, engine, scaling.
    title: str
    about: str  # Differences of the preset from the published configuration.
    notice: str
    scaling: Literal["weak", "strong"]
    sample_unit: str
    conditions: tuple[Condition, ...]
    settings: tuple[tuple[str, str], ...]  # Keys and values of `--set` and `--sweep`.
    conditions_line: str = field(metadata={HIDDEN: False})  # Conditions of all figures; printed once, in the section.
    caption: str  # The conditions in one line with the notice, for tables outside the page.
    parts_caption: str  # As `caption`, for tables of parts, which are means.
    verdict: str
    baseline_note: str  # A handicap of the baseline, in a sentence; empty without one.
    is_sufficient: bool  # Whether every point has enough runs for a comparison.
    points: tuple[Point, ...]
    most_ranks: int | None  # Ranks that one machine of these runs holds, per GPU or else per core; None: not known.
    doubts: tuple[Doubt, ...]
    views: Mapping[str, object] = field(metadata={INLINE: True})  # By key of the view.
    next_step: str = ""  # The suggested next step, in a sentence; empty without one.
    missing: tuple[Missing, ...] = ()  # Views without numbers of these runs.
    controls: tuple[Controls, ...] = ()

    @property
    def baseline(self) -> Point:
        """The point with which all others are compared."""
        return self.points[0]

    @property
    def largest(self) -> Point:
        """The point with most ranks."""
        return self.points[-1]

    @property
    def on_gpu(self) -> bool:
        return self.condition("device").startswith("cuda")

    def condition(self, name: str) -> str:
        """Returns the value of a condition (`workload`, `preset`, `engine` ...); empty if there is none."""
        return next((condition.value for condition in self.conditions if condition.name == name), "")


@dataclass(frozen=True, kw_only=True)
class TrainingRun(ListedRun):
    """One run of training."""

    workload: str
    preset: str
    engine: str
    precision: str
    data: str
    batch_per_rank: int
    scaling: str
    series: str
    variant: str  # `plain`, or the variant of a control run.
    side: str  # Side of a paired comparison, whose runs are control runs, too; empty: none.
    sample_unit: str
    steps: int | None
    throughput: float | None = field(metadata=column("Samples/s", "throughput_per_s", unit="ratio"))
    step_median_s: float | None = field(metadata=column("Step, median", unit="s"))
    step_p95_s: float | None = field(metadata=column("Step, p95", unit="s"))
    step_cv: float | None = field(metadata=column("Scatter", unit="fraction"))
    epoch_s: float | None = field(metadata=column("Epoch", unit="s"))
    goal: str  # `throughput`, or `target` and its value.
    reached: bool | None  # Whether it met its target; None for a run without target, or if it is not recorded.
    time_to_quality_s: float | None
    samples_to_quality: int | None
    epochs_to_quality: float | None

    @property
    def configuration(self) -> str:
        return f"{self.engine}, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment of the runs: settings that are equal in all of them, and differences."""

    common: tuple[tuple[str, str], ...]
    differences: tuple[Difference, ...]
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Report(BaseReport, HasViews):
    """The whole scaling report."""

    format: str = "dlbench.report"
    notices: tuple[str, ...]
    groups: tuple[ReportGroup, ...]  # Results: of control runs only where there are no others.
    controls: tuple[Controls, ...]
    views: Mapping[str, object] = field(metadata={INLINE: True})  # By key of the view.
    runs: tuple[TrainingRun, ...]
    damaged: tuple[str, ...]
    environment: Environment
    methods: tuple[tuple[str, str], ...]
    missing: tuple[Missing, ...]  # Views of the report without numbers, and what would produce them.

    @property
    def without_figures(self) -> tuple[TrainingRun, ...]:
        return without_figure(self.runs)
