"""Cost lines from a file of fitted costs (`sync.network`, made by `dlbench comm fit`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from dlbench.costs.collectives import Layout
from dlbench.costs.least_errors import fit_line
from dlbench.costs.predictions import predict
from dlbench.errors import UserError
from dlbench.node.sync.calibration import ELEMENT_BYTES, sizes_up_to
from dlbench.node.sync.groups import GroupRanks
from dlbench.specs.network import LineCost, NetworkModel

_ALGORITHMS = {"flat": "ring", "hierarchical": "hierarchical", "leader": "leader"}
"""By which algorithm of `dlbench comm` an exchange is predicted; libraries sum by a ring (Gloo) or as fast (MPI)."""


@cache
def read_network(path: Path) -> NetworkModel:
    """The file.

    Raises:
        UserError: it cannot be read or is none.
    """
    try:
        return NetworkModel.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"sync.network {path}: no fitted costs of a network: {_first_line(error)}") from None


def _first_line(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error).splitlines()[0]


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
