"""The cost of a campaign as a report of its own."""

from __future__ import annotations

import dataclasses

import dlbench
from dlbench.report.document import Document
from dlbench.report.wording import runs_text
from dlbench.views.campaign_cost.numbers import CampaignCost
from dlbench.views.campaign_cost.view import cost_section, jobs_text


def cost_document(found: CampaignCost) -> Document:
    """One section, open, for every format."""
    section = cost_section(found)
    words = (f"{section.headline}.", *section.words)  # no line stands for an open section
    return Document(
        title=f"Cost of {runs_text(len(found.runs))} in {jobs_text(found.jobs)}",
        dlbench_version=dlbench.__version__,
        sections=(dataclasses.replace(section, level="answer", headline="", words=words),),
        data=found,
        file_prefix="cost-",
        command="dlbench cost RUNS",
    )
