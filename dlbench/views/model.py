"""The scaling report as plain data, control runs, and the runs from which views compute their numbers; views put these
under their own keys into `views`, of a group or the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.analysis import scaling
from dlbench.analysis.comparability import Condition
from dlbench.analysis.environments import Difference, Doubt
from dlbench.analysis.scaling import Point, group_by
from dlbench.analysis.table import RunTable
from dlbench.records.record import RankResult
from dlbench.records.scan import Run, Scan
from dlbench.report.document import BaseReport, ListedRun, Missing, without_figure
from dlbench.report.formats.data import HIDDEN, INLINE
from dlbench.report.table import Column, column
from dlbench.report.views import GroupView as GroupView
from dlbench.report.views import HasViews
from dlbench.report.views import ReportView as ReportView
from dlbench.report.views import Views as Views
from dlbench.report.wording import clean, place_text
from dlbench.specs.comm import NetworkModel
from dlbench.units import counted

_SHOWN_BY: Mapping[str, str] = {  # The report that compares runs of each variant with plain runs.
    "synthetic-input": "`dlbench diagnose RUNS` compares them (Decomposition)",
    "no-exchange": "`dlbench diagnose RUNS` compares them (Decomposition)",
    "cached-input": "the view `stalls` compares them",
    "unwatched": "they measured the cost of monitoring, which the plain runs state",
}
MEANS = "Means over the runs of a point."  # Caption of a section whose figures are parts of a whole.


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The control runs of one series."""

    series: str
    workload: str
    preset: str
    kinds: tuple[str, ...]  # Variants, or `side a` and `side b`.
    num_runs: int
    beside: tuple[str, ...]  # Ids of groups of the same series; else of the same workload and preset.
    shown_by: str  # A clause that names the report that compares them.

    @property
    def text(self) -> str:
        kinds = ", ".join(self.kinds)
        runs = f"{counted(self.num_runs, 'control run')} of {self.workload}"
        return f"{runs} ({kinds}), series {self.series}: {self.shown_by}."


def is_control(run: Run) -> bool:
    """Returns whether a run was made to be compared with others."""
    return run.plan.series.variant != "plain" or bool(run.plan.series.side)


def controls_of(runs: Sequence[Run], results: Iterable[tuple[str, Sequence[Run]]]) -> tuple[Controls, ...]:
    """Returns the control runs by series and workload; `results` are id and runs of each group of the report."""
    sets = group_by(filter(is_control, runs), lambda run: (run.plan.series.id, *_subject(run)))
    groups = list(results)
    return tuple(_controls(members, groups) for members in sets.values())


def _subject(run: Run) -> tuple[str, str]:
    return run.plan.workload.name, run.plan.workload.preset


def _controls(runs: Sequence[Run], groups: Sequence[tuple[str, Sequence[Run]]]) -> Controls:
    plan = runs[0].plan
    series = clean(plan.series.id)
    of_workload: list[str] = []
    of_series: list[str] = []
    for group_id, members in groups:
        if _subject(members[0]) == _subject(runs[0]):
            of_workload.append(group_id)
            if any(run.plan.series.id == plan.series.id for run in members):
                of_series.append(group_id)
    shown_by = f"`dlbench compare RUNS --paired --where series={series}` compares them"
    kinds = {f"side {run.plan.series.side}" for run in runs}
    if not plan.series.side:
        shown_by = _SHOWN_BY[plan.series.variant]
        kinds = {run.plan.series.variant for run in runs}
    return Controls(
        series=series,
        workload=clean(plan.workload.name),
        preset=clean(plan.workload.preset),
        kinds=tuple(sorted(kinds)),
        num_runs=len({run.plan.run_id for run in runs}),
        beside=tuple(of_series or of_workload),
        shown_by=shown_by,
    )


@dataclass(frozen=True, kw_only=True)
class GroupSource(HasViews):
    """The runs of a group, from which a view computes its numbers."""

    group: scaling.Group
    table: RunTable
    doubts: tuple[Doubt, ...]
    views: Mapping[str, object]  # Numbers of the views before this one, by key.
    network: NetworkModel | None = None  # Fitted costs of the network, if they were given.

    @property
    def is_oversubscribed(self) -> bool:
        """True if ranks shared cores, which makes figures of scaling meaningless."""
        return any(doubt.code == "oversubscribed" for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """The runs of a whole report, from which a view computes its numbers."""

    scan: Scan
    table: RunTable
    groups: Sequence[scaling.Group]  # All groups, also those of control runs.
    results: Sequence[scaling.Group]  # Groups that are not of control runs.
    history: BaseReport | None  # Changes over months; None if the report is made without a history.


@dataclass(frozen=True, kw_only=True)
class AtPlace:
    """Figures at one number of ranks and nodes."""

    ranks: int
    nodes: int


def place_of(row: Any) -> str:
    """Returns ranks and nodes of a row that has both, e.g. ``4 ranks on 2 nodes``."""
    return place_text(row.ranks, row.nodes)


def ranks_of(run: Run) -> Sequence[RankResult]:
    """Returns the results of a run's ranks; empty without a record."""
    return () if run.record is None else run.record.ranks


def known_mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def optional_text(text: str) -> str | None:
    """Returns the text; None for an empty one, which tables show as a dash."""
    return text or None


def place_columns() -> tuple[Column[Any], ...]:
    """Returns columns of rows with `ranks` and `nodes`: two for programs, and one for people."""
    return (Column("ranks", "", "ranks"), Column("nodes", "", "nodes"), Column("", "At", place_of, is_brief=True))


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
