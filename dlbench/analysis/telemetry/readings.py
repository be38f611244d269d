"""What samplers saw of the runs of a table, each file read once: energy and telemetry of as many runs as is cheap.

A run of 128 nodes has 128 files of samples, and a table may hold thousands of runs. So samples are read up to a number
of nodes: of every scaling point first the run whose throughput is in the middle, the largest point first, then the
runs next to it. What was left out is counted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.analysis.telemetry.energy import RunEnergy, run_energy
from dlbench.analysis.telemetry.node_means import NodeTelemetry, node_telemetry
from dlbench.analysis.telemetry.node_samples import NodeSamples, every_field, nodes_of, read_node
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

PointKey = tuple[str, int, int]  # Group, ranks, nodes.
FigureRow = Mapping[str, Any]  # A run's row of `RunTable.figures`.

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


@dataclass(frozen=True, kw_only=True)
class MachineReadings:
    """What samplers saw of the runs of a table."""

    by_run: Mapping[str, MachineReading]  # By run id; runs that were not read are not in it.
    middle: Mapping[PointKey, Run]  # The run of each point whose throughput is in the middle.

    def energy_of(self, run: Run) -> RunEnergy:
        """As `dlbench.analysis.telemetry.energy.run_energy`, of a run that was read whole. Raises IncompleteDataError:
        samples, spans or steps are damaged.
        """
        reading = self.by_run[run.plan.run_id]
        if reading.energy is None:
            raise IncompleteDataError(reading.problem)
        return reading.energy

    @property
    def damaged(self) -> tuple[str, ...]:
        """Returns what is damaged of the samples and spans that were read, one line each."""
        return tuple(dict.fromkeys(reading.problem for reading in self.by_run.values() if reading.problem))

    def has_energy(self, run: Run) -> bool:
        reading = self.by_run.get(run.plan.run_id)
        return reading is not None and not reading.left_out


@dataclass(kw_only=True)
class _Shared:
    """Reads every node of a run once, all of its fields."""

    held: dict[int, NodeSamples] = field(default_factory=dict)

    def __call__(self, run: Run, node: int, wanted: Callable[[str], bool]) -> NodeSamples:
        if node not in self.held:
            self.held[node] = read_node(run, node, every_field)
        return self.held[node]


def read_machine(run: Run, nodes: tuple[int, ...] | None = None, *, all_fields: bool = False) -> MachineReading:
    """The samples of one run with a record. With `nodes`: only these, and no energy, which is that of all nodes. With
    `all_fields` every sampled field is summed up, else those of `FIELDS`.
    """
    shared = _Shared()

    def wanted(name: str) -> bool:
        return all_fields or FIELDS.fullmatch(name) is not None

    found: list[NodeTelemetry] = []
    why: dict[str, str] = {}
    energy, problem = None, ""
    try:
        found, why = node_telemetry(run, nodes=nodes, wanted=wanted, read=shared)
        energy = run_energy(run, read=shared) if nodes is None else None
    except IncompleteDataError as error:
        problem = str(error)
    return MachineReading(
        run_id=run.plan.run_id,
        energy=energy,
        nodes=tuple(found),
        why=why,
        problem=problem,
        left_out=0 if nodes is None or problem else len(nodes_of(run)) - len(nodes),
    )


def read_machines(figures: Mapping[str, FigureRow], runs: Mapping[str, Run], samples: Samples) -> MachineReadings:
    """Reads the samples of runs with figures (see `dlbench.analysis.table.RunTable`)."""
    points = _points(figures)
    by_run: dict[str, MachineReading] = {}
    left = {"none": -1, "some": MAX_NODES, "all": math.inf}[samples]
    # One run of every point, then a second of every point, and so on.
    for number, run_ids_of_turn in enumerate(itertools.zip_longest(*points.values())):
        for run_id in filter(None, run_ids_of_turn):
            run = runs[run_id]
            nodes = nodes_of(run)
            if len(nodes) <= left:
                by_run[run_id] = read_machine(run, all_fields=samples == "all")
                left -= len(nodes)
            elif number == 0 and left >= MAX_NODES_OF_LARGE_RUN:
                few = nodes[:: -(-len(nodes) // MAX_NODES_OF_LARGE_RUN)]
                by_run[run_id] = read_machine(run, tuple(few))
                left -= len(few)
    return MachineReadings(by_run=by_run, middle={key: runs[run_ids[0]] for key, run_ids in points.items()})


def _points(figures: Mapping[str, FigureRow]) -> dict[PointKey, list[str]]:
    """Runs of every point, the one in the middle first, then those next to it; points with most ranks first."""
    rates: dict[PointKey, list[tuple[float, str]]] = {}
    for run_id, row in figures.items():
        rates.setdefault((row["group"], row["ranks"], row["nodes"]), []).append((row["throughput"], run_id))
    found: dict[PointKey, list[str]] = {}
    for key, of_point in rates.items():
        speeds = sorted(of_point)
        middle = (len(speeds) - 1) // 2
        order = sorted(range(len(speeds)), key=lambda place: (abs(place - middle), place))
        found[key] = [speeds[place][1] for place in order]
    return dict(sorted(found.items(), key=lambda item: (-item[0][1], -item[0][2], item[0][0])))
