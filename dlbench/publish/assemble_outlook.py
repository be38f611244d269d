"""Scaling laws, published anchors and forecasts of a group become part of the `Report`; none of them is measured."""

from __future__ import annotations

from dlbench.analysis.scaling import Group
from dlbench.analysis.tables import RunTable
from dlbench.publish.outlook_model import Outlook


def outlook(group: Group, table: RunTable) -> Outlook | None:
    """Fits, anchors and forecasts; None where there are none."""
    return None
