"""The diagnosis of everything found under one folder: the views of the scaling report that say why, in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dlbench.records.scan import Scan
from dlbench.report.document import Document
from dlbench.specs.collectives.network import NetworkModel
from dlbench.views.assemble import assemble
from dlbench.views.causes.view import CausesView
from dlbench.views.decomposition.view import DecompositionView
from dlbench.views.document import document_of
from dlbench.views.energy.numbers import DetailedEnergy
from dlbench.views.energy.view import DetailedEnergyView
from dlbench.views.model import Report
from dlbench.views.runs.view import WithoutFiguresView
from dlbench.views.slow_nodes.view import SlowNodesView
from dlbench.views.stalls.view import StallsView
from dlbench.views.stragglers.view import StragglersView
from dlbench.views.telemetry.view import DetailedTelemetryView
from dlbench.views.view import Views

FORMAT = "dlbench.diagnosis"
TITLE = "dlbench diagnosis"


def views_of(network: NetworkModel | None = None, slurm: Mapping[str, float] | None = None) -> Views:
    """The views of a diagnosis; arguments as of `diagnosis`."""
    return Views(
        group=(CausesView(network), StragglersView(), DetailedTelemetryView(), DetailedEnergyView(slurm)),
        closing=(SlowNodesView(), DecompositionView(), StallsView(), WithoutFiguresView()),
    )


def diagnosis(
    scan: Scan, network: NetworkModel | None = None, slurm: Mapping[str, float] | None = None
) -> tuple[Report, Document]:
    """The diagnosis as plain data, and ready for every format.

    Args:
        scan: the runs.
        network: fitted costs, for forecasts; None: only bounds.
        slurm: joules that Slurm counted for the jobs of runs, by run id.
    """
    views = views_of(network, slurm)
    report = assemble(scan, views=views, with_digests=False)
    # Samples of all runs are read here alone.
    energies = (group.of(DetailedEnergy) for group in report.groups)
    damaged = [line for energy in energies if energy is not None for line in energy.damaged]
    report = dataclasses.replace(
        report,
        format=FORMAT,
        title=TITLE,
        methods=(),
        damaged=tuple(dict.fromkeys([*report.damaged, *damaged])),
        missing=views.missing_of_report(report),
    )
    document = document_of(report, views)
    costs = () if network is None else (f"Forecasts: fitted costs of {network.system} over {network.transport}.",)
    empty = () if report.groups else ("No run has figures.",)
    groups = (dataclasses.replace(one, about=(), facts=()) if one.is_group else one for one in document.sections)
    return report, dataclasses.replace(document, meta=(*document.meta, *costs, *empty), sections=tuple(groups))
