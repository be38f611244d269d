"""Asynchronous training, emulated: statistical and hardware efficiency of policies that read the same samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.analysis.comparability import digest_of
from dlbench.analysis.scaling import group_by
from dlbench.analysis.table import RunTable
from dlbench.lazy import Array, np
from dlbench.records.record import EmulationResult
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.report.chart_style import HEIGHT, NARROW, RANK_COLOURS
from dlbench.report.charts import Axis, Chart, ReportSubject, Rows, Series, finish, scatter, short
from dlbench.report.document import Section
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Sheet, column, columns_of, constant
from dlbench.report.wording import number_text, optional, value_text
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.views.model import Report, ReportSource, ReportView

MAX_MARKS = 60  # Steps drawn of a policy.


@dataclass(frozen=True, kw_only=True)
class EmulatedPolicy:
    """The runs of one policy."""

    policy: str = field(metadata=column("Policy, emulated", is_brief=True))
    updates: Estimate = field(metadata=column("Updates/s, emulated", "emulated_updates_per_s", is_brief=True))
    gradients_per_update: float = field(metadata=column("Gradients per update", unit="ratio"))
    staleness_median: int = field(metadata=column("Staleness, emulated: median"))
    """Clocks that the worker of an applied gradient was ahead of the slowest one, over all runs."""
    staleness_max: int = field(metadata=column("most"))
    bound: int | None = field(metadata=column("at most by the policy", "staleness_bound"))  # None: not bounded.
    loss: Estimate | None = field(metadata=column("Loss after equal samples", "loss", missing="not finite"))
    time: Estimate | None = field(metadata=column("Emulated time to the common loss", "emulated_s", is_brief=True))
    runs: int = field(metadata=column("Runs"))
    curve: Rows = field(repr=False, metadata={HIDDEN: False})  # Steps of the first run, for charts.


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """Policies with the same workload, workers and recorded steps."""

    id: str
    label: str
    common_loss: float | None  # The lowest that all runs reach; None if a run has none that is finite.
    policies: tuple[EmulatedPolicy, ...]


def _compared(digest: str, runs: Sequence[Run], table: RunTable) -> Asynchrony:
    plan = runs[0].plan
    losses = {run.plan.run_id: read_steps(run.folder.steps(0)).steps["loss"] for run in runs}
    lowest = float(max(np.fmin.reduce(of_run) for of_run in losses.values()))
    common_loss = lowest if np.isfinite(lowest) else None
    num_steps = min(map(len, losses.values()))
    policies = []
    for policy, members in group_by(runs, lambda run: run.plan.engine.emulated.words).items():
        rates, finals, times_s = {}, {}, {}
        num_by_staleness: Counter[int] = Counter()
        for run in members:
            key, emulation, of_run = table.keys[run.plan.run_id], _emulation(run), losses[run.plan.run_id]
            rates[key] = emulation.updates[-1] / emulation.end_s[-1]
            finals[key] = float(of_run[num_steps - 1])
            if common_loss is not None:
                times_s[key] = emulation.end_s[int(np.argmax(of_run <= common_loss))]
            num_by_staleness.update(dict(enumerate(emulation.staleness)))
        clocks = sorted(num_by_staleness.elements())
        row = EmulatedPolicy(
            policy=policy,
            updates=median_estimate(rates, "1/s"),
            gradients_per_update=len(clocks) / sum(_emulation(run).updates[-1] for run in members),
            staleness_median=clocks[len(clocks) // 2],
            staleness_max=clocks[-1],
            bound=members[0].plan.engine.emulated.bound,
            loss=median_estimate(finals, "loss") if np.isfinite(list(finals.values())).all() else None,
            time=of_known(median_estimate, times_s, "s"),
            runs=len(members),
            curve=_curve(policy, _emulation(members[0]), losses[members[0].plan.run_id]),
        )
        policies.append(row)
    label = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.emulated_workers} workers"
    return Asynchrony(id=digest, label=label, common_loss=common_loss, policies=tuple(policies))


def _emulation(run: Run) -> EmulationResult:
    assert run.record is not None
    assert run.record.emulation is not None
    return run.record.emulation


def _curve(policy: str, emulation: EmulationResult, losses: Array) -> Rows:
    rows: Rows = []
    for number in range(0, len(losses), -(-len(losses) // MAX_MARKS)):
        marks = {"updates": emulation.updates[number], "seconds": short(emulation.end_s[number])}
        rows.append({"policy": policy, **marks, "loss": short(float(losses[number]))})
    return rows


def _charts(compared: Asynchrony, table: Sheet[EmulatedPolicy]) -> list[Chart]:
    rows = list(itertools.chain.from_iterable(row.curve for row in compared.policies))
    names = [row.policy for row in compared.policies]
    series = Series("policy", dict(zip(names, itertools.cycle(RANK_COLOURS))), columns=1)
    loss = Axis("loss", "loss", scale={"zero": False})
    updates, seconds = Axis("updates, emulated", "updates"), Axis("emulated time, s", "seconds")
    tooltip = {"policy": "policy", "updates:Q": "updates", "seconds:Q": "emulated seconds", "loss:Q": "loss"}
    rates = "; ".join(f"{row.policy}: {value_text(row.updates)} updates/s, emulated" for row in compared.policies)
    charts = []
    for title, x, y in (
        ("Loss over updates, emulated", updates, loss),
        ("Updates over emulated time", seconds, updates),
        ("Loss over emulated time", seconds, loss),
    ):
        chart = finish(
            scatter(rows, x, y, series, tooltip, line=1.5, size=24),
            ReportSubject(compared.id, compared.label),
            name=f"asynchrony-{y.field}-{x.field}",
            title=title,
            alt=f"{title}. {rates}.",
            table=table,
            size=(NARROW, HEIGHT),
        )
        charts.append(chart)
    return charts


def _sheet(compared: Asynchrony) -> Sheet[EmulatedPolicy]:
    return Sheet(
        name="asynchrony",
        title=f"Policies, emulated: {compared.label}",
        columns=(constant("comparison", compared.id), *columns_of(EmulatedPolicy)),
        rows=compared.policies,
        caption="Emulated: work is drawn from recorded steps, and a recorded exchange is added where workers wait for "
        "each other; other messages are free, so that times of asp and ssp are lower limits. Equal samples are equal "
        f"work. Common loss: {optional(compared.common_loss, 'loss')}, the lowest of a step that all runs reach. "
        "Staleness: clocks that the worker of a gradient was ahead of the slowest.",
        in_terminal=True,
    )


class AsynchronyView(ReportView):
    """Asynchronous training as emulated by engine `emulated`."""

    id = "asynchrony"
    title = "Asynchrony, emulated"
    key = "asynchrony"
    after = "precision"

    def numbers(self, source: ReportSource) -> tuple[Asynchrony, ...]:
        runs = [
            run for run in source.table.runs.values() if run.record is not None and run.record.emulation is not None
        ]
        sets = group_by(runs, _common_digest)
        return tuple(_compared(digest, members, source.table) for digest, members in sets.items())

    def shown(self, report: Report, comparisons: tuple[Asynchrony, ...]) -> Section:
        sheets = list(map(_sheet, comparisons))
        first = comparisons[0]
        times_s = {row.policy: row.time.value for row in first.policies if row.time is not None}
        headline = "emulated; no loss that all runs reach"
        if times_s:
            soonest = min(times_s, key=times_s.__getitem__)
            headline = f"{soonest} reaches the common loss in {number_text(times_s[soonest], 's')}, emulated"
        return Section(
            headline=headline,
            charts=lambda: list(itertools.chain.from_iterable(map(_charts, comparisons, sheets))),
            charts_per_row=3,
            sheets=tuple(sheets),
        )


def _common_digest(run: Run) -> str:
    plan = run.plan
    content = {name: getattr(plan, name).model_dump(mode="json") for name in ("workload", "measure")}
    return digest_of({**content, "steps_from": plan.engine.emulated.steps_from})
