"""The scaling report as plain data: runs, comparable groups, scaling points, and what each view found out.

No view is known here by name: each puts its numbers under its own key into `views`, of a group or of the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlbench.analysis.comparability import Condition
from dlbench.analysis.doubts import Doubt
from dlbench.analysis.environments import Difference
from dlbench.analysis.scaling import Point
from dlbench.records.scan import Run
from dlbench.report.document import BaseReport, ListedRun, Missing, without_figure
from dlbench.report.formats.json import HIDDEN, INLINE
from dlbench.report.views import HasViews
from dlbench.report.wording import clean


@dataclass(frozen=True, kw_only=True)
class Group(HasViews):
    """Runs that may be compared with each other, and what they say."""

    id: str
    label: str  # Short: workload, preset, engine, scaling.
    title: str
    about: str  # What the preset changes against the published configuration.
    notice: str
    scaling: Literal["weak", "strong"]
    sample_unit: str
    conditions: tuple[Condition, ...]
    settings: tuple[tuple[str, str], ...]  # What `--set` and `--sweep` chose, key and value.
    conditions_line: str = field(metadata={HIDDEN: False})  # Of all its figures; stated once, in its section.
    caption: str  # The conditions in one line with the notice: for tables that leave the page.
    parts_caption: str  # The same for tables of parts, which are means.
    verdict: str
    baseline_note: str  # What must be known of the baseline, in a sentence; empty where nothing holds it back.
    is_sufficient: bool  # Whether every point has enough runs for a comparison.
    points: tuple[Point, ...]
    most_ranks: int | None
    """Ranks that the machine of these runs holds, one per GPU or else per core; None: not one machine, or not known."""
    doubts: tuple[Doubt, ...]
    views: Mapping[str, object] = field(metadata={INLINE: True})
    """What each view found out, by its key; None where it has nothing to say."""
    next_step: str = ""  # What to do next, in a sentence; empty where nothing suggests itself.
    missing: tuple[Missing, ...] = ()  # Views that have nothing to say of these runs.
    controls: tuple[Controls, ...] = ()

    @property
    def baseline(self) -> Point:
        """The point all others are measured against."""
        return self.points[0]

    @property
    def largest(self) -> Point:
        """The point with most ranks."""
        return self.points[-1]

    @property
    def on_gpu(self) -> bool:
        """Whether its ranks compute on GPUs."""
        return self.condition("device").startswith("cuda")

    def condition(self, name: str) -> str:
        """The value of a condition (`workload`, `preset`, `engine` ...); empty where there is none."""
        return next((one.value for one in self.conditions if one.name == name), "")


@dataclass(frozen=True, kw_only=True)
class RunRow(ListedRun):
    """One run of training."""

    workload: str
    preset: str
    engine: str
    precision: str
    data: str
    batch_per_rank: int
    scaling: str
    series: str
    variant: str  # `plain`, or what was taken away: a control run.
    side: str  # Of a paired comparison, whose runs are control runs, too; empty: none.
    sample_unit: str
    steps: int | None
    throughput: float | None
    step_median_s: float | None
    step_p95_s: float | None
    step_cv: float | None
    epoch_s: float | None  # An epoch of its data at its throughput, seconds; None for synthetic data.
    goal: str  # `throughput`, or `target` and its value.
    reached: bool | None  # Whether it met its target; None for a run of speed, and for one that does not say.
    time_to_quality_s: float | None
    samples_to_quality: int | None
    epochs_to_quality: float | None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the runs ran in."""

    common: tuple[tuple[str, str], ...]
    differences: tuple[Difference, ...]
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Report(BaseReport, HasViews):
    """Everything."""

    format: str = "dlbench.report"
    notices: tuple[str, ...]
    groups: tuple[Group, ...]  # Results: of control runs only where there are no others.
    controls: tuple[Controls, ...]
    views: Mapping[str, object] = field(metadata={INLINE: True})
    """What views of the whole report found out, by their keys."""
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: Environment
    methods: tuple[tuple[str, str], ...]
    missing: tuple[Missing, ...]  # What this report does not show, and what it would take; see also `Group.missing`.

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        return without_figure(self.runs)


# Control runs: made to be compared with others of their series, and no results of their own. They stay in the data, and
# in the views that compare them.

_SHOWN_BY: Mapping[str, str] = {  # What compares runs of each variant with the plain ones.
    "synthetic-input": "`dlbench diagnose RUNS` compares them (Decomposition)",
    "no-exchange": "`dlbench diagnose RUNS` compares them (Decomposition)",
    "cached-input": "the view `stalls` compares them",
    "unwatched": "they measured the cost of monitoring, which the plain runs state",
}


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The control runs of one series."""

    series: str
    workload: str
    preset: str
    kinds: tuple[str, ...]  # Variants, or `side a` and `side b`.
    num_runs: int
    beside: tuple[str, ...]
    """Ids of the report's groups that they stand next to: of the same series, else of the same workload and preset."""
    shown_by: str

    @property
    def text(self) -> str:
        """One sentence."""
        kinds = ", ".join(self.kinds)
        runs = f"{self.num_runs} control run{'s' * (self.num_runs > 1)} of {self.workload}"
        return f"{runs} ({kinds}), series {self.series}: {self.shown_by}."


def is_control(run: Run) -> bool:
    """Whether a run was made to be compared with others."""
    return run.plan.series.variant != "plain" or bool(run.plan.series.side)


def controls(runs: Sequence[Run], results: Iterable[tuple[str, Sequence[Run]]]) -> tuple[Controls, ...]:
    """The control runs of each series and workload, in the order in which they first come. `results`: id and runs of
    each group that the report shows.
    """
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in filter(is_control, runs):
        plan = run.plan
        found.setdefault((plan.series.id, plan.workload.name, plan.workload.preset), []).append(run)
    groups = list(results)
    return tuple(_controls(members, groups) for members in found.values())


def _controls(runs: Sequence[Run], groups: Sequence[tuple[str, Sequence[Run]]]) -> Controls:
    plan = runs[0].plan
    subject = plan.workload.name, plan.workload.preset
    like = [
        (group_id, members)
        for group_id, members in groups
        if (members[0].plan.workload.name, members[0].plan.workload.preset) == subject
    ]
    same = [group_id for group_id, members in like if any(one.plan.series.id == plan.series.id for one in members)]
    kinds = dict.fromkeys(
        f"side {run.plan.series.side}" if run.plan.series.side else run.plan.series.variant for run in runs
    )
    series = clean(plan.series.id)
    paired = f"`dlbench compare RUNS --paired --where series={series}` compares them"
    return Controls(
        series=series,
        workload=clean(plan.workload.name),
        preset=clean(plan.workload.preset),
        kinds=tuple(sorted(kinds)),
        num_runs=len({run.plan.run_id for run in runs}),
        beside=tuple(same or [group_id for group_id, _ in like]),
        shown_by=paired if plan.series.side else _SHOWN_BY[plan.series.variant],
    )
