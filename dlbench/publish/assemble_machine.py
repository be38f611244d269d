"""What samplers and records tell of the machine becomes part of the `Report`."""

from __future__ import annotations

from dlbench.analysis.scaling import Group
from dlbench.analysis.tables import RunTable
from dlbench.publish import machine_model as model


def telemetry(group: Group, table: RunTable) -> model.Telemetry | None:
    """What the samplers saw; None where no run was sampled."""
    return None


def energy(group: Group, table: RunTable) -> model.Energy | None:
    """Energy of the runs; None where none tells of it."""
    return None


def data_path(group: Group, table: RunTable) -> model.DataPath | None:
    """Where samples come from; None where nothing tells."""
    return None


def memory(group: Group, table: RunTable) -> model.Memory | None:
    """Memory of the ranks; None where no run tells of it."""
    return None
