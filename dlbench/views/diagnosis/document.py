"""The diagnosis of everything found under one folder: causes, stragglers and slow nodes of all groups of runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dlbench
from dlbench.reading import scaling
from dlbench.reading.run_table import tabulate
from dlbench.reading.slow_nodes import SlowNodes, slow_nodes
from dlbench.records.scan import Scan
from dlbench.report.model import as_plain
from dlbench.specs.collectives.network import NetworkModel
from dlbench.views.causes.numbers import GroupCauses, group_causes

FORMAT = "dlbench.diagnosis"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `dlbench diagnose` says, but for telemetry, energy and decomposition."""

    groups: tuple[GroupCauses, ...]
    nodes: SlowNodes
    num_variants: int
    """Groups of runs with something taken away on purpose; they are not diagnosed by themselves."""
    without_figures: tuple[tuple[str, str, str], ...]
    """Run, state and why."""
    damaged: tuple[str, ...]
    network: str
    """System and carrier of the fitted costs behind forecasts; empty for none."""

    @property
    def has_figures(self) -> bool:
        """Whether any run has."""
        return bool(self.groups) or self.num_variants > 0


def assemble(scan: Scan, network: NetworkModel | None = None) -> Diagnosis:
    """The diagnosis of everything found under one folder.

    Args:
        scan: the runs.
        network: fitted costs, for forecasts; None: only bounds.
    """
    table = tabulate(scan, with_causes=True)
    found = scaling.groups(table)
    plain = [group for group in found if group.sample.plan.series.variant == "plain"]
    nodes = slow_nodes(table)
    return Diagnosis(
        groups=_told_apart(tuple(group_causes(group, table, nodes.exclude, network) for group in plain)),
        nodes=nodes,
        num_variants=len(found) - len(plain),
        without_figures=tuple((one.run.plan.run_id, one.state, one.why) for one in table.without),
        damaged=table.damaged,
        network="" if network is None else f"{network.system} over {network.transport}",
    )


def _told_apart(groups: tuple[GroupCauses, ...]) -> tuple[GroupCauses, ...]:
    """Groups of equal labels get their id behind the label."""
    labels = [group.label for group in groups]
    return tuple(
        dataclasses.replace(group, label=f"{group.label}, configuration {group.id}")
        if labels.count(group.label) > 1
        else group
        for group in groups
    )


def to_json(found: Diagnosis, further: Mapping[str, Any]) -> str:
    """The diagnosis as JSON: `format` and `version` first, then the keys of the dataclasses, then sections made
    elsewhere; null where a number is not finite.
    """
    content = {"format": FORMAT, "version": VERSION, "dlbench_version": dlbench.__version__, **as_plain(found)}
    return json.dumps({**content, **further}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
