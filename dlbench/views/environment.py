"""The view `environment`: all recorded facts of the environment of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlbench.analysis.environments import Difference, compare
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import text_sheet
from dlbench.report.wording import clean, runs_text
from dlbench.units import first_of
from dlbench.views.model import Environment, Report, ReportView


def environment_of(runs: Sequence[Run]) -> Environment:
    """Returns the facts that all runs have in common, and those in which they differ."""
    environments = compare(runs)
    return Environment(
        common=tuple((clean(key), clean(value)) for key, value in environments.common.items()),
        differences=tuple(map(_cleaned, environments.differences)),
        num_runs=len(runs),
    )


def _cleaned(item: Difference) -> Difference:
    values = tuple((clean(value), run_ids) for value, run_ids in item.values)
    return replace(item, key=clean(item.key), values=values)


class EnvironmentView(ReportView):
    """The environment of the runs."""

    id = "environment"
    title = "Environment"
    level = "appendix"
    after = "without-figures"

    def sections(self, report: Report) -> tuple[Section, ...]:
        environment = report.environment
        if not environment.num_runs:
            return ()
        rows = []
        unexpected = []
        for item in environment.differences:
            key = item.key
            if not item.expected:
                unexpected.append(item.key[:30])
                key += " (differs)"
            rows += [(key, value, str(len(run_ids))) for value, run_ids in item.values]
        rows += [(key, value, "all") for key, value in environment.common]
        headline = f"the same in all {runs_text(environment.num_runs)}"
        if unexpected:
            headline = f"runs differ in {first_of(unexpected, 2)}"
        title = "All recorded facts of the environment"
        sheet = replace(text_sheet("environment", title, ("Key", "Value", "Runs"), rows), is_folded=True)
        return (Section(id=self.id, title=self.title, headline=headline, sheets=(sheet,)),)
