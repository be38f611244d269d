"""Control runs: made to be compared with other runs of their series, and not results themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.analysis.scaling import group_by
from dlbench.records.scan import Run
from dlbench.report.wording import clean
from dlbench.units import counted

_SHOWN_BY: Mapping[str, str] = {  # The report that compares runs of each variant with plain runs.
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


def controls(runs: Sequence[Run], results: Iterable[tuple[str, Sequence[Run]]]) -> tuple[Controls, ...]:
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
