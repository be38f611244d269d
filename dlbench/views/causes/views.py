"""Views of the lost percent: waterfall of efficiency, causes, stragglers, slow nodes."""

from __future__ import annotations

import dataclasses

from dlbench.report.charts.chart import Chart
from dlbench.report.model import Group, Report
from dlbench.report.view import Sheet, View
from dlbench.report.wording import basis_text, figure_text, percent, place_text
from dlbench.views.causes import charts as causes_charts
from dlbench.views.causes import diagnosis_tables
from dlbench.views.causes import tables as causes_tables
from dlbench.views.causes.diagnosis_model import DiagnosedPoint, NodeHistory, SlowHost, Straggler
from dlbench.views.causes.diagnosis_tables import place
from dlbench.views.causes.diagnosis_words import bound_text
from dlbench.views.causes.tables import FACTOR_TITLES, account_of
from dlbench.views.rerun import rerun
from dlbench.views.stragglers import charts as causes_straggler_charts
from dlbench.views.stragglers import tables as causes_straggler_tables


def _is_plain(group: Group) -> bool:
    return group.causes is not None


def _variant(group: Group) -> str:
    """Runs with something taken away on purpose have no account of causes."""
    return (
        "not told: in these runs something was taken away on purpose; the plain runs beside them have this view, and "
        "dlbench diagnose tells the difference."
    )


# Waterfall


def _has_factors(group: Group) -> bool:
    found = group.causes
    return found is not None and found.has_loss and any(point.factors for point in found.waterfall)


def _no_factors(group: Group) -> str:
    found = group.causes
    if found is None:
        return _variant(group)
    if not found.has_loss:
        ranks = group.baseline.ranks
        return f"one rank count only: {rerun(group, f'--ranks {ranks},{2 * ranks} --repeats 5')} adds another."
    return "not known: these runs computed nothing, and factors need a step that computes."


def _waterfall_words(group: Group) -> tuple[str, ...]:
    told = []
    for point in reversed(account_of(group).waterfall):
        if point.is_baseline or not point.factors:
            continue
        product = " x ".join(f"{FACTOR_TITLES[one.name]} {percent(one.relative.value)}" for one in point.factors)
        least = min(point.factors, key=lambda one: one.relative.value)
        text = f"{place_text(point.ranks, point.nodes)}: {product} = {figure_text(point.efficiency)} of the ideal"
        if least.relative.value < 1:
            text += f"; the smallest factor is {FACTOR_TITLES[least.name]}"
        told.append(f"{text}.")
    return tuple(told)


# Causes


def _cause_words(group: Group) -> tuple[str, ...]:
    found = account_of(group).diagnosed
    told = [f"A fault was planted on purpose: {found.fault}."] if found.fault else []
    for point in reversed(found.points):
        told.append(f"{place(point)}: {point.verdict.line}.")
        if (
            point.verdict.bound is not None
            and not point.is_baseline
            and bound_text(point.verdict.bound) not in told[-1]
        ):
            told.append(f"A limit at {place(point)}, no forecast: {bound_text(point.verdict.bound)}.")
    return (*told, *diagnosis_tables.remarks(found))


# Stragglers


def _can_wait(group: Group) -> bool:
    return group.causes is not None and group.largest.ranks > 1


def _cannot_wait(group: Group) -> str:
    if group.causes is None:
        return _variant(group)
    return f"one rank waits for nobody: {rerun(group, '--ranks 1,2 --repeats 5')} adds a second one."


def _straggler_words(group: Group) -> tuple[str, ...]:
    found = account_of(group)
    told = [_waited_for(point) for point in reversed(found.diagnosed.points) if point.ranks > 1]
    told += [
        f"Over all runs of this folder {one.host} is slow: {diagnosis_tables.ratio_text(one.ratio)} times the work of "
        f"the other hosts ({basis_text(one.ratio)})."
        for one in _slow_hosts(found.nodes)
    ]
    if found.nodes.option and _slow_hosts(found.nodes):
        told.append(f"To keep jobs off all slow hosts: sbatch {found.nodes.option}")
    return tuple(told)


def _slow_hosts(found: NodeHistory) -> list[SlowHost]:
    return [one for one in found.hosts if one.verdict == "slow"]


def _waited_for(point: DiagnosedPoint) -> str:
    if not point.waiting_ranks:
        return f"{place(point)}: no rank waited for another one."
    first = point.waiting_ranks[0]
    return (
        f"{place(point)}: {percent(first.waited_share, 0)} of all waiting is for {_who(first)} (an even share is "
        f"{percent(1 / point.ranks)}), last in {percent(first.last_share, 0)} of the steps, late by {first.late_by}."
    )


def _who(late: Straggler) -> str:
    return f"rank {late.rank} on {late.host}"


# Slow nodes


def history(report: Report) -> NodeHistory | None:
    """All hosts of the report: every group tells of its own, with the same figures; None where no group has any."""
    known = [group.causes.nodes for group in report.groups if group.causes is not None]
    if not known:
        return None
    hosts = {one.host: one for nodes in known for one in nodes.hosts}
    ordered = sorted(hosts.values(), key=lambda one: (-one.ratio.value, one.host))
    return dataclasses.replace(known[0], hosts=tuple(ordered))


def _has_hosts(report: Report) -> bool:
    found = history(report)
    return found is not None and bool(found.hosts)


def _history_words(report: Report) -> tuple[str, ...]:
    found = history(report)
    return () if found is None else (*diagnosis_tables.exclude_lines(found), *diagnosis_tables.history_words(found))


def _history_charts(report: Report) -> list[Chart]:
    found = history(report)
    return causes_straggler_charts.slow_node_charts(found) if found is not None and found.hosts else []


def _history_sheets(report: Report) -> list[Sheet]:
    found = history(report)
    return [causes_straggler_tables.slow_node_sheet(found)] if found is not None and found.hosts else []


VIEWS: tuple[View, ...] = (
    View(
        id="waterfall",
        title="Efficiency, factor by factor",
        place="group",
        is_for=_has_factors,
        remedy=_no_factors,
        words=_waterfall_words,
        charts=causes_charts.waterfall_charts,
        sheets=causes_tables.waterfall_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="causes",
        title="The lost percent, by cause",
        place="group",
        is_for=_is_plain,
        remedy=_variant,
        words=_cause_words,
        charts=causes_charts.cause_charts,
        sheets=causes_tables.cause_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="stragglers",
        title="Who is waited for",
        place="group",
        is_for=_can_wait,
        remedy=_cannot_wait,
        words=_straggler_words,
        charts=causes_straggler_charts.straggler_charts,
        sheets=causes_straggler_tables.straggler_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="slow-nodes",
        title="Slow nodes",
        place="closing",
        is_shown=_has_hosts,
        report_remedy=lambda report: "not known: no counted run had ranks on two hosts or more.",
        report_words=_history_words,
        report_charts=_history_charts,
        report_sheets=_history_sheets,
        template="sheets.html.j2",
    ),
)
