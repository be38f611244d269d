"""Causes and stragglers of a group become part of the `Report`."""

from __future__ import annotations

from dlbench.analysis.scaling import Group
from dlbench.analysis.tables import RunTable
from dlbench.publish.causes_model import CauseAccount


def causes(group: Group, table: RunTable) -> CauseAccount | None:
    """Where the lost percent goes; None where the table was made without causes."""
    return None
