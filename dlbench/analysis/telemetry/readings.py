"""What samplers saw of the runs of a table, each file read once: energy and telemetry of as many runs as is cheap.

A run of 128 nodes has 128 files of samples, and a table may hold thousands of runs. So samples are read up to a number
of nodes: of every scaling point first the run whose throughput is in the middle, the largest point first, then the
runs next to it. What was left out is counted.
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
"""Nodes that are read of the middle run of a point whose runs have more nodes than may be read; evenly spread."""

FIELDS = re.compile(  # Fields that are summed up; `host.cpu.busy` is too.
    r"gpu\.\d+\.(power_w|sm_clock_hz|utilization|memory_used_bytes|temperature_c)"
    r"|host\.(cpu\.mean\.busy|memory_used_bytes|page_cache_bytes)"
    r"|host\.(net|infiniband)\..+\.(received|sent)_bytes|host\.disk\..+\.(read|written)_bytes"
)

Samples = Literal["none", "some", "all"]
"""How many samples are read: none, those of at most `MAX_NODES` nodes, or those of all nodes with all their fields."""


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """The machine while one run trained."""

    run_id: str
    energy: RunEnergy | None  # None where samples are damaged, or some nodes were left out.
    nodes: tuple[NodeTelemetry, ...]  # Of the measured window, by node.
    why: dict[str, str]  # Why nodes have no samples, by node (`node 3`).
    problem: str  # What is damaged; empty where nothing is.
    left_out: int = 0  # Nodes that were not read.


def read_machine(run: Run, nodes: Collection[int] | None = None, *, all_fields: bool = False) -> MachineReading:
    """Reads the samples of one run with a record. With `nodes`: only these, and no energy, which is that of all nodes.
    With `all_fields` every sampled field is summed up, else those of `FIELDS`.
    """
    is_wanted: Callable[[str], object] = every_field if all_fields else FIELDS.fullmatch
    wanted_nodes = nodes_of(run) if nodes is None else nodes
    reasons = {node: why_not_sampled(run, node) for node in wanted_nodes}
    telemetry: tuple[NodeTelemetry, ...] = ()
    energy, problem = None, ""
    try:
        sampled = {node: read_node(run, node, every_field) for node, reason in reasons.items() if not reason}
        telemetry = tuple(node_telemetry(sampled[node], measured_window(run, node), is_wanted) for node in sampled)
        energy = run_energy(run, sampled) if nodes is None else None
    except IncompleteDataError as error:
        problem = str(error)
    return MachineReading(
        run_id=run.plan.run_id,
        energy=energy,
        nodes=telemetry,
        why={f"node {node}": reason for node, reason in reasons.items() if reason},
        problem=problem,
        left_out=0 if nodes is None or problem else len(nodes_of(run)) - len(wanted_nodes),
    )


def read_machines(points: Iterable[Sequence[Run]], samples: Samples) -> dict[str, MachineReading]:
    """Reads the samples of the runs of all points, the most telling run of each first; by run id, without the runs that
    were not read.
    """
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
