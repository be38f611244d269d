"""The command that makes more runs like those of a group: what a view suggests where its data are missing."""

from __future__ import annotations

from dlbench.views.model import Group


def rerun(group: Group, options: str) -> str:
    """``dlbench run WORKLOAD --preset PRESET --engine ENGINE OPTIONS`` for the group's workload, preset and engine."""
    workload, preset, engine = (group.condition(name) for name in ("workload", "preset", "engine"))
    return f"dlbench run {workload} --preset {preset} --engine {engine} {options}"
