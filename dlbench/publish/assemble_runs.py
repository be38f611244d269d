"""Runs beside each other become part of the `Report`: precision, differences, systems."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.analysis.scaling import Group
from dlbench.analysis.tables import RunTable
from dlbench.publish import runs_model as model


def precisions(groups: Sequence[Group], table: RunTable) -> tuple[model.PrecisionComparison, ...]:
    """Groups that differ in nothing but precision, beside each other."""
    return ()


def differences(table: RunTable) -> tuple[model.RunDifference, ...]:
    """In which settings and properties of the environment runs differ."""
    return ()


def systems(table: RunTable) -> tuple[model.SystemDescription, ...]:
    """The systems that runs ran on."""
    return ()
