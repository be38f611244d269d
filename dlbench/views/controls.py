"""Control runs: made to be compared with others of their series, and no results of their own.

They stay in the data, and in the views that compare them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.records.scan import Run
from dlbench.report.wording import clean

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
        runs = f"{self.num_runs} control {'run' if self.num_runs == 1 else 'runs'} of {self.workload}"
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
