"""Assembles the scaling report of a table of runs, as plain data and as a `Document` of the sections of all views."""

from __future__ import annotations

import dataclasses
import functools

import dlbench.views
from dlbench.analysis.table import tabulate
from dlbench.analysis.telemetry.readings import Samples
from dlbench.records.scan import Scan
from dlbench.report.document import BaseReport, Document, Section, methods_section
from dlbench.report.views import Views, collect
from dlbench.specs.comm import NetworkModel
from dlbench.views import controls
from dlbench.views.environment import environment_of
from dlbench.views.group_section import GROUP_COLUMNS, group_section, short_names
from dlbench.views.groups import group_numbers, report_source
from dlbench.views.methods import METHODS, not_shown
from dlbench.views.model import Report
from dlbench.views.runs import newest_end, notices_of, run_rows

TITLE = "dlbench scaling report"


@functools.cache
def scaling_views() -> Views:
    """Returns all views of the scaling report, in the order of its page."""
    return collect(dlbench.views)


def assemble(
    scan: Scan,
    history: BaseReport | None = None,
    views: Views | None = None,
    *,
    with_digests: bool = True,
    samples: Samples = "some",
    network: NetworkModel | None = None,
) -> Report:
    """Returns the report of all runs of one folder, by default with the views of the scaling report. Without digests no
    view may read single steps; `samples` says of how many nodes the samples are read.
    """
    if views is None:
        views = scaling_views()
    table = tabulate(scan, with_causes=True, with_digests=with_digests, samples=samples)
    source = report_source(scan, table, history)
    control_runs = controls.controls(scan.runs, [(group.id, group.runs) for group in source.results])
    groups = group_numbers(source, views, control_runs, network)
    damaged_samples = [reading.problem for reading in table.readings.values() if reading.problem]
    report = Report(
        title=TITLE,
        as_of=newest_end(table.runs.values()),
        notices=notices_of(scan.runs),
        groups=groups,
        controls=control_runs,
        views=views.report_numbers(source),
        runs=run_rows(scan, table),
        damaged=tuple(dict.fromkeys((*table.damaged, *damaged_samples))),
        environment=environment_of(list(table.runs.values())),
        methods=METHODS,
        missing=not_shown(groups),
    )
    return dataclasses.replace(report, missing=(*report.missing, *views.missing_of_report(report)))


def document_of(report: Report, views: Views | None = None) -> Document:
    """Returns the report ready for every format; `views` are those it was assembled with."""
    if views is None:
        views = scaling_views()
    names = short_names(report.groups)
    groups = [group_section(group, name, views) for group, name in zip(report.groups, names, strict=True)]
    sections = [*views.opening_sections(report), *groups]
    without_results = tuple(controls.text for controls in report.controls if not controls.beside)
    if without_results:
        sections.append(Section(id="controls", title="Control runs", words=without_results, brief=without_results))
    sections += [*views.closing_sections(report), *methods_section(report.methods)]
    if report.missing:
        title = "Not in this report"
        sections.append(
            Section(id="missing", title=title, level="appendix", missing=report.missing, missing_title="Not shown")
        )
    return report.document(
        *sections,
        runs=report.runs,
        notices=report.notices,
        always=views.always(GROUP_COLUMNS),
        one_group_at_a_time=True,
    )
