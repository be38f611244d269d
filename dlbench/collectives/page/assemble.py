"""A table of collective measurements becomes a `CommReport`: foreign text cleaned, figures with units, words."""

from __future__ import annotations

import dataclasses
import re

import dlbench
from dlbench.collectives.page import model
from dlbench.collectives.page.figures import GIGA, rate_figure, time_figure
from dlbench.collectives.page.fits import fit_table, model_crossover_rows
from dlbench.collectives.page.methods import METHODS
from dlbench.collectives.page.wording import (
    COLLECTIVE_TITLES,
    range_text,
    rate_figure_text,
    size_text,
    time_text,
)
from dlbench.collectives.results import choice as comm_choice
from dlbench.collectives.results import doubts as comm_doubts
from dlbench.collectives.results.fit import Fits, fit_all
from dlbench.collectives.results.tables import CommGroup, CommTable, Series, tabulate
from dlbench.records.collectives_scan import CommRun, CommScan
from dlbench.report.model import Condition, Doubt
from dlbench.report.wording import clean, place_text, runs_text
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.figure import figure_of

TITLE = "dlbench collective benchmark"

_SECOND_FRACTION = re.compile(r"\.\d+(?=Z$)")


def assemble(scan: CommScan) -> model.CommReport:
    """The report of everything found under one folder; equal folders give equal reports."""
    table = tabulate(scan)
    measured = [run for group in table.groups for run in group.runs]
    fits = fit_all(table)
    return model.CommReport(
        title=TITLE,
        as_of=_SECOND_FRACTION.sub("", clean(max((run.record.finished for run in measured if run.record), default=""))),
        dlbench_version=dlbench.__version__,
        groups=_told_apart(tuple(_group(group, fits) for group in table.groups)),
        fits=tuple(fit_table(fit) for fit in fits.fits),
        unfitted=tuple(map(clean, fits.unfitted)),
        runs=_runs(scan, table),
        damaged=tuple(map(clean, table.damaged)),
        environment=tuple((clean(k), clean(v)) for k, v in comm_doubts.environment(measured).common.items()),
        methods=METHODS,
    )


# Groups


def _group(group: CommGroup, fits: Fits) -> model.CommGroup:
    plan, best = group.sample.plan, _best(group)
    label = _label(group)
    return model.CommGroup(
        id=group.id,
        label=label,
        collective=group.collective,
        dtype=group.dtype,
        system=clean(plan.system.name),
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        group_size=group.layout.group_size,
        verdict=_verdict(group, best),
        conditions=_conditions(group),
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=tuple(_series(group, series, fits, best) for series in group.series),
        best=best,
        crossovers=(*_crossovers(group), *model_crossover_rows(group, fits)),
        recommended=tuple(
            model.RecommendedRow(low=one.low, high=one.high, title=clean(one.name.title))
            for one in comm_choice.recommended(group)
        ),
        fusion=_fusion(group, fits),
        ratios=tuple(
            model.RatioRow(
                num_bytes=one.num_bytes,
                own=clean(one.own.title),
                library=clean(one.library.title),
                speed=figure_of(one.speed, "ratio"),
                paired=one.paired,
            )
            for one in comm_choice.ratios(group)
        ),
        rejected=_rejected(group),
        not_measured=tuple(
            dict.fromkeys(clean(text) for run in group.runs if run.record for text in run.record.not_measured)
        ),
        doubts=tuple(
            Doubt(code=one.code, severity=one.severity, text=clean(one.text), runs=one.runs)
            for one in comm_doubts.group_doubts(group)
        ),
    )


def _told_apart(groups: tuple[model.CommGroup, ...]) -> tuple[model.CommGroup, ...]:
    """Groups of equal labels get the conditions that differ behind the label, or else their id."""
    labels = []
    for group in groups:
        twins = [other for other in groups if other.label == group.label]
        differing = [
            f"{one.title} {one.value}" for one in group.conditions if any(one not in twin.conditions for twin in twins)
        ]
        labels.append(", ".join([group.label, *differing]))
    return tuple(
        dataclasses.replace(group, label=label if labels.count(label) == 1 else f"{label}, configuration {group.id}")
        for group, label in zip(groups, labels, strict=True)
    )


def _label(group: CommGroup) -> str:
    plan, layout = group.sample.plan, group.layout
    groups = f" in {layout.num_groups} groups of {layout.group_size}" if layout.num_groups > 1 else ""
    nodes = f" on {plan.layout.nodes} nodes" if plan.layout.nodes > 1 else ""
    carriers = ", ".join(dict.fromkeys(series.name.carrier for series in group.series))
    what = f"{COLLECTIVE_TITLES[group.collective]} {group.dtype}"
    return clean(f"{plan.system.name}: {what}, {plan.layout.ranks} ranks{groups}{nodes}, over {carriers}")


def _conditions(group: CommGroup) -> tuple[Condition, ...]:
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    iterations = sorted({one.iterations for series in group.series for one in series.sizes})
    hosts = sorted({host for run in group.runs if run.record for host in run.record.hosts})
    values = (
        ("system", "System", plan.system.name),
        ("launcher", "Launcher", plan.system.launch.launcher),
        ("layout", "Ranks", place_text(plan.layout.ranks, plan.layout.nodes)),
        ("groups", "Groups", f"{group.layout.num_groups} of {group.layout.group_size}"),
        ("cores", "Cores a rank", str(plan.layout.cores_per_rank)),
        ("device", "Device", record.device),
        ("collective", "Collective", COLLECTIVE_TITLES[group.collective]),
        ("dtype", "Type", group.dtype),
        ("shards", "Servers", str(plan.comm.shards or "every rank")),
        ("iterations", "Timed iterations", " or ".join(map(str, iterations))),
        ("hosts", "Hosts", ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")),
    )
    algorithms = {series.name.algorithm for series in group.series}
    return tuple(
        Condition(name=name, title=title, value=clean(value))
        for name, title, value in values
        if name != "shards" or "parameter-server" in algorithms
    )


def _verdict(group: CommGroup, best: tuple[model.BestRow, ...]) -> str:
    first, last = best[0], best[-1]
    rate_name = "busbw" if group.layout.ranks > 1 else "algbw"
    told = (
        f"At {size_text(last.num_bytes)} the fastest is {last.title}: {time_text(last.time)}, "
        f"{rate_figure_text(last.rate)} GB/s {rate_name}."
    )
    if len(best) > 1:
        told += f" At {size_text(first.num_bytes)} it is {first.title}: {time_text(first.time)}."
    ranges = comm_choice.recommended(group)
    if len(ranges) > 1:
        used = "; ".join(f"{range_text(one.low, one.high)}: {clean(one.name.title)}" for one in ranges)
        told += f" Recommended: {used}."
    few = " Too few runs for a comparison." if len(group.runs) < MIN_RUNS else ""
    return told + few


def _series(group: CommGroup, series: Series, fits: Fits, best: tuple[model.BestRow, ...]) -> model.SeriesTable:
    fit = None if series.name.is_library else fits.of(group, series.name.carrier)
    line = fits.lines.get((group.id, series.name))
    title = clean(series.name.title)
    fastest = {row.num_bytes for row in best if row.title == title}
    rows = []
    for one in series.sizes:
        predicted = None if fit is None else fit.predicted.get((group.id, series.name, one.num_bytes))
        point = one.point
        rows.append(
            model.SizeRow(
                num_bytes=one.num_bytes,
                time=time_figure(one),
                algbw=rate_figure(one, one.algbw),
                busbw=None if one.busbw is None else rate_figure(one, one.busbw),
                iterations=one.iterations,
                steps=point.steps,
                messages=max(point.messages, default=None),
                bytes_sent=max(point.bytes_sent, default=None),
                bytes_across=max(point.bytes_across, default=None),
                predicted_s=predicted,
                predicted_over_measured=None if predicted is None else predicted / one.seconds.value,
                is_best=one.num_bytes in fastest,
            )
        )
    return model.SeriesTable(
        title=title,
        carrier=clean(series.name.carrier),
        algorithm=clean(series.name.algorithm),
        is_library=series.name.is_library,
        rows=tuple(rows),
        startup_s=line.startup_s if line else None,
        per_byte_s=line.per_byte_s if line else None,
    )


def _best(group: CommGroup) -> tuple[model.BestRow, ...]:
    rows = []
    for one in comm_choice.best(group):
        series = group.find(one.name)
        measured = None if series is None else series.at(one.num_bytes)
        assert measured is not None
        rows.append(
            model.BestRow(
                num_bytes=one.num_bytes,
                title=clean(one.name.title),
                time=time_figure(measured),
                rate=rate_figure(measured, measured.busbw or measured.algbw),
                second="" if one.second is None else clean(one.second.title),
                lead=None if one.lead is None else figure_of(one.lead, "ratio"),
                is_clear=one.is_clear,
            )
        )
    return tuple(rows)


def _crossovers(group: CommGroup) -> tuple[model.CrossoverRow, ...]:
    return tuple(
        model.CrossoverRow(
            source="measured",
            before=clean(one.before.title),
            after=clean(one.after.title),
            num_bytes=one.num_bytes,
            low=one.low,
            high=one.high,
            is_clear=one.is_clear,
        )
        for one in comm_choice.crossovers(group)
    )


def _fusion(group: CommGroup, fits: Fits) -> model.Fusion | None:
    ranges = comm_choice.recommended(group)
    line = fits.lines.get((group.id, ranges[-1].name))
    if group.collective != "allreduce" or line is None:
        return None
    size = comm_choice.fusion_bytes(line.startup_s, line.per_byte_s)
    is_finite = line.per_byte_s > 0
    return model.Fusion(
        title=clean(ranges[-1].name.title),
        num_bytes=size if is_finite else None,
        share=comm_choice.RATE_SHARE,
        asymptotic_algbw=GIGA / line.per_byte_s if is_finite else None,
        beyond_measured=is_finite and size > group.sizes[-1],
    )


def _rejected(group: CommGroup) -> tuple[model.RejectedRow, ...]:
    runs: dict[tuple[str, int, str], list[str]] = {}
    for one in group.rejected:
        runs.setdefault((clean(one.name.title), one.num_bytes, clean(one.why)), []).append(one.run_id)
    return tuple(
        model.RejectedRow(title=title, num_bytes=size, why=why, runs=tuple(ids))
        for (title, size, why), ids in runs.items()
    )


# Runs


def _runs(scan: CommScan, table: CommTable) -> tuple[model.RunRow, ...]:
    groups = {id(run): group.id for group in table.groups for run in group.runs}
    without = {id(one.run): (one.state, one.why) for one in table.without}
    return tuple(_run(run, groups.get(id(run), ""), *without.get(id(run), ("valid", ""))) for run in scan.runs)


def _run(run: CommRun, group: str, state: str, story: str) -> model.RunRow:
    plan = run.plan
    return model.RunRow(
        run_id=plan.run_id,
        group=group,
        state=state,
        story=clean(story),
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        system=clean(plan.system.name),
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        repeat=plan.series.repeat,
        finished="" if run.record is None else clean(run.record.finished),
        warnings=tuple(clean(one.text) for one in comm_doubts.run_doubts(run)),
    )
