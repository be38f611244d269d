"""Reads the samples of the runs of a table once: energy and telemetry of a limited number of nodes.

A run of 128 nodes has 128 files of samples, and a table may have thousands of runs. So samples are read up to a number
of nodes: first the run with median throughput of every scaling point, the largest point first, then the runs next to
it. Nodes that were left out are counted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.analysis.telemetry.energy import RunEnergy, run_energy
from dlbench.analysis.telemetry.node_means import NodeTelemetry, node_telemetry
from dlbench.analysis.telemetry.node_samples import every_field, measured_window, nodes_of, read_node, why_not_sampled
from dlbench.errors import IncompleteDataError
from dlbench.records.scan import Run

MAX_NODES = 160  # Nodes whose samples are read for one table: a few seconds of work.
MAX_NODES_OF_LARGE_RUN = 8
"""Nodes, evenly spaced, that are read of the median run of a point if its runs have too many nodes."""

FIELDS = re.compile(  # Fields that are summarised, in addition to `host.cpu.busy`.
    r"gpu\.\d+\.(power_w|sm_clock_hz|utilization|memory_used_bytes|temperature_c)"
    r"|host\.(cpu\.mean\.busy|memory_used_bytes|page_cache_bytes)"
    r"|host\.(net|infiniband)\..+\.(received|sent)_bytes|host\.disk\..+\.(read|written)_bytes"
)

Samples = Literal["none", "some", "all"]
"""How many samples are read: none, those of at most `MAX_NODES` nodes, or those of all nodes with all their fields."""


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """Energy and telemetry of a run."""

    run_id: str
    energy: RunEnergy | None  # None if samples are damaged, or some nodes were left out.
    nodes: tuple[NodeTelemetry, ...]  # Telemetry of the measured window, by node.
    why: dict[str, str]  # Why nodes have no samples, by node (`node 3`).
    problem: str  # The damaged file and its error; empty if there is none.
    left_out: int = 0  # Nodes that were not read.


def read_machine(run: Run, nodes: Collection[int] | None = None, *, all_fields: bool = False) -> MachineReading:
    """Reads the samples of a run with a record; of some `nodes` only, without energy, if they are given.

    With `all_fields` every sampled field is summarised, otherwise those of `FIELDS`.
    """
    is_wanted: Callable[[str], object] = every_field if all_fields else FIELDS.fullmatch
    all_nodes = nodes_of(run)
    has_energy = nodes is None
    if nodes is None:
        nodes = all_nodes
    reasons = {node: why_not_sampled(run, node) for node in nodes}
    telemetry: tuple[NodeTelemetry, ...] = ()
    energy, problem = None, ""
    try:
        sampled = {node: read_node(run, node, every_field) for node, reason in reasons.items() if not reason}
        telemetry = tuple(node_telemetry(sampled[node], measured_window(run, node), is_wanted) for node in sampled)
        if has_energy:
            energy = run_energy(run, sampled)
    except IncompleteDataError as error:
        problem = str(error)
    left_out = 0
    if not problem:
        left_out = len(all_nodes) - len(nodes)
    return MachineReading(
        run_id=run.plan.run_id,
        energy=energy,
        nodes=telemetry,
        why={f"node {node}": reason for node, reason in reasons.items() if reason},
        problem=problem,
        left_out=left_out,
    )


def read_machines(points: Iterable[Sequence[Run]], samples: Samples) -> dict[str, MachineReading]:
    """Reads the samples of the runs of all points, one of each point at a time; returns those that were read, by id."""
    readings: dict[str, MachineReading] = {}
    nodes_left = {"none": -1, "some": MAX_NODES, "all": math.inf}[samples]
    # One run of every point, then a second of every point, and so on.
    for turn, runs in enumerate(itertools.zip_longest(*points)):
        for run in filter(None, runs):
            nodes = nodes_of(run)
            if len(nodes) <= nodes_left:
                readings[run.plan.run_id] = read_machine(run, all_fields=samples == "all")
                nodes_left -= len(nodes)
            elif turn == 0 and nodes_left >= MAX_NODES_OF_LARGE_RUN:
                some_nodes = nodes[:: -(-len(nodes) // MAX_NODES_OF_LARGE_RUN)]
                readings[run.plan.run_id] = read_machine(run, some_nodes)
                nodes_left -= len(some_nodes)
    return readings
