"""Cost lines from a file of fitted costs (`sync.network`, made by `dlbench comm fit`)."""

from __future__ import annotations

from pathlib import Path

from dlbench.costs.collectives import Layout
from dlbench.costs.fit.least_errors import fit_line
from dlbench.costs.predictions import predict
from dlbench.errors import UserError
from dlbench.node.sync.own.calibration import ELEMENT_BYTES, sizes_up_to
from dlbench.node.sync.own.groups import GroupRanks
from dlbench.records.network import read_network
from dlbench.specs.collectives.network import LineCost

_ALGORITHMS = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""By which algorithm of `dlbench comm` an exchange is predicted; libraries sum by a ring (Gloo) or as fast (MPI)."""


def given_line(path: str, name: str, method: str, who: GroupRanks, *, largest_bytes: int) -> LineCost:
    """The line of an exchange: of its name and rank count if the file has it, else through predictions.

    Args:
        path: the file.
        name: of the line, e.g. gloo hierarchical.
        method: flat, hierarchical or leader.
        who: ranks and groups.
        largest_bytes: predictions go up to this size.

    Raises:
        UserError: the file cannot be read, or lacks a level that the prediction needs.
        IncompleteDataError: it is damaged.
    """
    network = read_network(Path(path))
    for line in network.collectives:
        if line.name == name and line.ranks == who.size:
            return line
    layout = Layout(ranks=who.size, group_size=who.group_size)
    sizes = [count * ELEMENT_BYTES for count in sizes_up_to(largest_bytes, who.size)]
    try:
        seconds = [predict("allreduce", _ALGORITHMS[method], size, layout, network) for size in sizes]
    except UserError as error:
        raise UserError(f"sync.network {path}: {error}") from None
    return fit_line(f"{name}, predicted", who.size, sizes, seconds)
