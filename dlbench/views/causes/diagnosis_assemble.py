"""Causes, stragglers and slow nodes become a `Diagnosis`: foreign text cleaned, figures with units."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from dlbench.reading import scaling
from dlbench.reading.attribution import Part
from dlbench.reading.comparability import chosen_settings
from dlbench.reading.run_table import RunTable, tabulate
from dlbench.reading.slow_nodes import SLOW, SlowNodes, slow_nodes
from dlbench.reading.stragglers import Late
from dlbench.records.registry import describe
from dlbench.records.scan import Run, Scan
from dlbench.report.wording import ENGINE_TITLES, clean
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.figure import figure_of
from dlbench.views.causes import diagnosis_model as model
from dlbench.views.causes.diagnosis import Advice, diagnose
from dlbench.views.causes.diagnosis_words import cause_notes, finding_line, limits
from dlbench.views.causes.numbers import CausePoint, cause_points


def assemble(scan: Scan, network: NetworkModel | None = None) -> model.Diagnosis:
    """The diagnosis of everything found under one folder.

    Args:
        scan: the runs.
        network: fitted costs, for forecasts; None: only bounds.
    """
    table = tabulate(scan, with_causes=True)
    found = scaling.groups(table)
    plain = [group for group in found if group.sample.plan.series.variant == "plain"]
    history = slow_nodes(table)
    return model.Diagnosis(
        groups=_told_apart(tuple(diagnosed_group(group, table, history.exclude, network) for group in plain)),
        nodes=node_history(history),
        num_variants=len(found) - len(plain),
        without_figures=tuple((clean(one.run.plan.run_id), one.state, clean(one.why)) for one in table.without),
        damaged=tuple(clean(line) for line in table.damaged),
        network="" if network is None else clean(f"{network.system} over {network.transport}", 80),
    )


def diagnosed_group(
    group: scaling.Group, table: RunTable, exclude: tuple[str, ...], network: NetworkModel | None = None
) -> model.DiagnosedGroup:
    """The diagnosis of one group; the report and `dlbench diagnose` print the same one.

    Args:
        group: comparable runs.
        table: made `with_causes`, of the same runs.
        exclude: hosts that the history shows to be slow.
        network: fitted costs, for forecasts; None: only bounds.
    """
    described = describe(group.sample)
    runs = {run.plan.run_id: run for run in group.runs}
    return model.DiagnosedGroup(
        id=group.id,
        label=_label(group),
        watching=clean(described["watching"]),
        fault=clean(described["fault"]),
        watch_cost=_watch_cost(group.runs),
        limits=limits(runs[group.points[-1].run_ids[0]]),
        points=tuple(_point(point, runs, table, exclude, network) for point in cause_points(group, table)),
    )


def _label(group: scaling.Group) -> str:
    plan = group.sample.plan
    chosen = "".join(f", {clean(k)}={clean(v)}" for k, v in chosen_settings(group.sample).items())
    chosen += f", side {plan.series.side}" if plan.series.side else ""
    engine = ENGINE_TITLES[plan.engine.name]
    return f"{plan.workload.name}, {plan.workload.preset} preset, {engine}, {group.scaling} scaling{chosen}"


def _told_apart(groups: tuple[model.DiagnosedGroup, ...]) -> tuple[model.DiagnosedGroup, ...]:
    """Groups of equal labels get their id behind the label."""
    labels = [group.label for group in groups]
    return tuple(
        dataclasses.replace(group, label=f"{group.label}, configuration {group.id}")
        if labels.count(group.label) > 1
        else group
        for group in groups
    )


def _point(
    found: CausePoint,
    runs: Mapping[str, Run],
    table: RunTable,
    exclude: tuple[str, ...],
    network: NetworkModel | None,
) -> model.DiagnosedPoint:
    point = found.point
    own = [runs[run_id] for run_id in point.run_ids]
    diagnosis = diagnose(found, own, exclude=exclude, network=network)
    return model.DiagnosedPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=found.is_baseline,
        run_ids=tuple(map(clean, point.run_ids)),
        verdict=model.Verdict(
            line=finding_line(found, diagnosis),
            finding=diagnosis.finding,
            name=diagnosis.rule.name if diagnosis.rule is not None and diagnosis.finding == "found" else "",
            cause="" if diagnosis.largest is None else diagnosis.largest.name,
            bound=diagnosis.bound,
            experiments=tuple(_experiment(one) for one in diagnosis.advice),
        ),
        efficiency=figure_of(point.efficiency, "fraction"),
        causes=tuple(_share(part, found) for part in found.parts),
        whole=_share(found.whole, found),
        waiting_ranks=tuple(map(_straggler, found.ranks)),
        waiting_hosts=tuple(map(_straggler, found.hosts)),
        num_hosts=found.num_hosts,
        planted=_planted(own, table),
    )


def _experiment(one: Advice) -> model.NextExperiment:
    return model.NextExperiment(
        text=clean(one.text),
        forecast_gain=None if one.forecast is None else one.forecast.gain,
        basis=clean(one.why_not if one.forecast is None else one.forecast.basis),
    )


def _share(part: Part, point: CausePoint) -> model.CauseShare:
    return model.CauseShare(
        name=part.name,
        seconds=figure_of(part.seconds, "s"),
        ideal_seconds=part.ideal_seconds,
        lost=figure_of(part.lost, "fraction"),
        is_measured=part.name not in point.not_measured,
        not_measured=tuple(map(clean, point.not_measured.get(part.name, ()))),
        notes=cause_notes(part.name, point),
    )


def _straggler(late: Late) -> model.Straggler:
    return model.Straggler(
        rank=late.rank,
        host=clean(late.host, 64),
        last_share=late.last_share,
        waited_s=late.waited_s,
        waited_share=late.waited_share,
        input_s=late.late_s["input"],
        compute_s=late.late_s["compute"],
        host_s=late.late_s["host"],
        late_by=late.main_cause or "unexplained",
    )


def _planted(runs: list[Run], table: RunTable) -> tuple[tuple[int, float], ...]:
    """Ranks with a planted fault and seconds a step that it added, mean over the runs."""
    added: dict[int, float] = {}
    for run in runs:
        assert run.record is not None
        steps = table.causes[run.plan.run_id].steps
        for rank in run.record.ranks:
            if rank.planted_s:
                added[rank.rank] = added.get(rank.rank, 0.0) + rank.planted_s / steps / len(runs)
    return tuple(sorted(added.items()))


def _watch_cost(runs: tuple[Run, ...]) -> model.WatchCost | None:
    """Measured, if that was done for any run; all runs of a series and rank count carry the same figure then."""
    found = [(run.plan, run.watch_overhead) for run in runs]
    measured = [(plan, one) for plan, one in found if one is not None and one.method == "measured"]
    if measured:
        plan, newest = max(measured, key=lambda pair: (pair[0].created, pair[0].layout.ranks, pair[0].series.position))
        return model.WatchCost(
            value=newest.value,
            low=newest.low,
            high=newest.high,
            method="measured",
            ranks=plan.layout.ranks,
            num_runs=newest.num_pairs,
        )
    accounted = [one for _, one in found if one is not None]
    if not accounted:
        return None
    return model.WatchCost(
        value=statistics.median(one.value for one in accounted),
        low=min(one.low for one in accounted),
        high=max(one.high for one in accounted),
        method="accounted",
        ranks=None,
        num_runs=len(accounted),
    )


def node_history(found: SlowNodes) -> model.NodeHistory:
    """Slow nodes over all runs of a table."""
    return model.NodeHistory(
        hosts=tuple(
            model.SlowHost(
                host=clean(one.host, 64),
                ratio=figure_of(one.ratio, "ratio"),
                last_share=one.last_share,
                fair_share=one.fair_share,
                verdict=_host_verdict(one.verdict, one.ratio.n),
            )
            for one in found.hosts
        ),
        exclude=found.exclude,
        unsafe=tuple(clean(host, 64) for host in found.unsafe),
        option=f"--exclude={','.join(found.exclude)}" if found.exclude else "",
        threshold=SLOW,
        num_runs=found.num_runs,
        num_single_host=found.num_single_host,
        num_faulty=found.num_faulty,
    )


def _host_verdict(verdict: str, n: int) -> str:
    """With fewer than five runs a host is suspected at most."""
    return f"suspected ({n} run{'s' * (n > 1)}: insufficient)" if verdict == "suspected" else verdict
