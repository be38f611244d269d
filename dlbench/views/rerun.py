"""The command that makes more runs like those of a group: what a view suggests where its data are missing."""

from __future__ import annotations

from dlbench.report.model import Group


def rerun(group: Group, options: str) -> str:
    """``dlbench run WORKLOAD --preset PRESET --engine ENGINE OPTIONS`` for the group's workload, preset and engine."""
    known = {condition.name: condition.value for condition in group.conditions}
    return f"dlbench run {known['workload']} --preset {known['preset']} --engine {known['engine']} {options}"
