"""The report of the collective benchmark as plain data: measurements, what follows from them, and the words on both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import dlbench
from dlbench.collectives.page import words
from dlbench.collectives.results import choice, doubts
from dlbench.collectives.results.contenders import contenders, same_messages
from dlbench.collectives.results.fits import Fit, Fits, fit_all
from dlbench.collectives.results.measurements import (
    CollectiveGroup,
    CollectiveTable,
    Rejected,
    Series,
    comparable_id,
    tabulate,
)
from dlbench.reading.comparability import Condition, asked_apart, unique_labels
from dlbench.reading.doubts import Doubt
from dlbench.records.collectives_scan import CommRun, CommScan
from dlbench.report.wording import runs_text
from dlbench.specs.base import Precision
from dlbench.specs.collectives.plan import Collective
from dlbench.units import whole_seconds

FORMAT = "dlbench.comm-report"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One collective at one layout."""

    id: str
    label: str
    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    group_size: int
    verdict: str
    advice: str
    """What to use at which size."""
    same_messages: tuple[tuple[str, ...], ...]
    """Algorithms that count as one, because at two ranks they send the same messages."""
    conditions: tuple[Condition, ...]
    caption: str
    """The conditions in one line, under every table and chart."""
    num_runs: int
    series: tuple[Series, ...]
    best: tuple[choice.Best, ...]
    crossovers: tuple[choice.Crossover, ...]
    recommended: tuple[choice.Recommended, ...]
    fusion: choice.Fusion | None
    ratios: tuple[choice.Ratio, ...]
    rejected: tuple[Rejected, ...]
    not_measured: tuple[str, ...]
    doubts: tuple[Doubt, ...]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run, whatever became of it."""

    run_id: str
    group: str
    """Id of its group; empty for runs without figures."""
    state: str
    story: str
    """Why it has no figures; empty where it has some."""
    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    repeat: int
    finished: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CollectivesReport:
    """Everything."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run finished, UTC; empty if none did."""
    dlbench_version: str
    groups: tuple[GroupReport, ...]
    fits: tuple[Fit, ...]
    unfitted: tuple[str, ...]
    """Systems and carriers without a fit, and why."""
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """What the environments of all runs with figures share."""
    methods: tuple[tuple[str, str], ...]

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        """Runs that yield no figure."""
        return tuple(run for run in self.runs if not run.group)


def assemble(scan: CommScan) -> CollectivesReport:
    """The report of everything found under one folder; equal folders give equal reports."""
    table = tabulate(scan)
    measured = [run for group in table.groups for run in group.runs]
    fits = fit_all(table)
    asked = asked_apart([(comparable_id(group.sample), group.sample.plan) for group in table.groups])
    groups = tuple(_group(group, fits, apart) for group, apart in zip(table.groups, asked, strict=True))
    return CollectivesReport(
        title=words.TITLE,
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        dlbench_version=dlbench.__version__,
        groups=tuple(
            dataclasses.replace(group, label=label) for group, label in zip(groups, unique_labels(groups), strict=True)
        ),
        fits=fits.fits,
        unfitted=fits.unfitted,
        runs=_runs(scan, table),
        damaged=table.damaged,
        environment=tuple(doubts.environment(measured).common.items()),
        methods=words.METHODS,
    )


def _group(group: CollectiveGroup, fits: Fits, apart: tuple[Condition, ...]) -> GroupReport:
    plan = group.sample.plan
    among = dataclasses.replace(group, series=contenders(group))
    label, best, ranges = words.label_of(group), choice.best(among), choice.recommended(among)
    return GroupReport(
        id=group.id,
        label=label,
        collective=group.collective,
        dtype=group.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        group_size=group.layout.group_size,
        verdict=words.verdict(among, best, ranges),
        advice=words.advice(among, ranges),
        same_messages=same_messages(group),
        conditions=(*words.conditions_of(group), *apart),
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=fits.beside(group).series,
        best=best,
        crossovers=(*choice.crossovers(among), *choice.model_crossovers(among, fits)),
        recommended=ranges,
        fusion=choice.fusion(group),
        ratios=tuple(choice.ratios(group)),
        rejected=group.rejected,
        not_measured=tuple(dict.fromkeys(text for run in group.runs if run.record for text in run.record.not_measured)),
        doubts=tuple(doubts.group_doubts(group)),
    )


def _runs(scan: CommScan, table: CollectiveTable) -> tuple[RunRow, ...]:
    groups = {id(run): group.id for group in table.groups for run in group.runs}
    without = {id(one.run): (one.state, one.why) for one in table.without}
    return tuple(_run(run, groups.get(id(run), ""), *without.get(id(run), ("valid", ""))) for run in scan.runs)


def _run(run: CommRun, group: str, state: str, story: str) -> RunRow:
    plan = run.plan
    return RunRow(
        run_id=plan.run_id,
        group=group,
        state=state,
        story=story,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        repeat=plan.series.repeat,
        finished="" if run.record is None else run.record.finished,
        warnings=tuple(one.text for one in doubts.run_doubts(run)),
    )
