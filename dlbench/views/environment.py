"""The view `environment`: everything that was recorded of what the runs ran in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlbench.analysis.environments import compare
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import text_sheet
from dlbench.report.wording import clean, runs_text
from dlbench.views.differences import listed
from dlbench.views.model import Environment, Report
from dlbench.views.view import ReportView


def environment_of(runs: Sequence[Run]) -> Environment:
    """Returns what the runs ran in: what all have in common, and in what they differ."""
    environments = compare(runs)
    return Environment(
        common=tuple((clean(key), clean(value)) for key, value in environments.common.items()),
        differences=tuple(
            replace(item, key=clean(item.key), values=tuple((clean(value), ids) for value, ids in item.values))
            for item in environments.differences
        ),
        num_runs=len(runs),
    )


class EnvironmentView(ReportView):
    """What the runs ran in."""

    id = "environment"
    title = "Environment"
    level = "appendix"
    after = "without-figures"

    def sections(self, report: Report) -> tuple[Section, ...]:
        found = report.environment
        if not found.num_runs:
            return ()
        surprising = [item.key[:30] for item in found.differences if not item.expected]
        finding = f"the same in all {runs_text(found.num_runs)}"
        if surprising:
            finding = f"runs differ in {listed(surprising, 2)}"
        rows = [
            (item.key + " (differs)" * (not item.expected), value, str(len(ids)))
            for item in found.differences
            for value, ids in item.values
        ]
        rows += [(key, value, "all") for key, value in found.common]
        title = "Everything that was recorded of the environment"
        sheet = replace(text_sheet("environment", title, ("Key", "Value", "Runs"), rows), is_folded=True)
        return (Section(id=self.id, title=self.title, headline=finding, sheets=(sheet,)),)
