"""Causes and stragglers of a group become part of the `Report`."""

from __future__ import annotations

import dataclasses

from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group
from dlbench.reading.slow_nodes import slow_nodes
from dlbench.report.wording import clean
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.views.causes.diagnosis_assemble import diagnosed_group, node_history
from dlbench.views.causes.diagnosis_model import NodeHistory
from dlbench.views.causes.model import CauseAccount, EfficiencyFactor, FactoredPoint
from dlbench.views.waterfall.numbers import Factor, Waterfall, waterfalls


def causes(group: Group, table: RunTable) -> CauseAccount | None:
    """Where the lost percent goes.

    None where the table was made without causes, and for runs with something taken away on purpose: a run without
    exchange has no exchange to blame, and is read beside the plain runs.
    """
    if not table.causes or group.sample.plan.series.variant != "plain":
        return None
    history = slow_nodes(table)
    return CauseAccount(
        waterfall=tuple(map(_factored, waterfalls(group, table))),
        diagnosed=diagnosed_group(group, table, history.exclude),
        nodes=_of_group(node_history(history), group, table),
    )


def _factored(found: Waterfall) -> FactoredPoint:
    return FactoredPoint(
        ranks=found.point.ranks,
        nodes=found.point.nodes,
        is_baseline=found.is_baseline,
        factors=tuple(map(_factor, found.factors)),
        parallel=optional_figure_of(found.parallel, "fraction"),
        efficiency=figure_of(found.efficiency, "fraction"),
    )


def _factor(found: Factor) -> EfficiencyFactor:
    return EfficiencyFactor(
        name=found.name,
        own=optional_figure_of(found.own, "fraction"),
        relative=figure_of(found.relative, "fraction"),
        level=found.level,
        step=found.step,
    )


def _of_group(history: NodeHistory, group: Group, table: RunTable) -> NodeHistory:
    """The history of the hosts on which this group ran; other groups tell of theirs."""
    own = {clean(host, 64) for run in group.runs for host in table.causes[run.plan.run_id].hosts}
    return dataclasses.replace(history, hosts=tuple(one for one in history.hosts if one.host in own))
