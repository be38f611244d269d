"""One run of the collective benchmark, fully decided: which collectives, algorithms and sizes, over what."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import Count, CountOrZero, Flag, Name, Positive, Precision, Ranks, Repeats, Spec
from dlbench.specs.plan import LaunchPlan, LayoutSpec, job_label

Collective = Literal["allreduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"]

ALGORITHMS: dict[Collective, tuple[str, ...]] = {
    "allreduce": (
        "ring",
        "binomial-tree",
        "double-binary-tree",
        "recursive-doubling",
        "recursive-halving-doubling",
        "shifted-halving-doubling",
        "direct",
        "parameter-server",
        "hierarchical",
        "leader",
    ),
    "reduce-scatter": ("ring", "recursive-halving", "direct"),
    "all-gather": ("ring", "recursive-doubling", "direct"),
    "broadcast": ("binomial-tree", "chain", "scatter-all-gather"),
    "all-to-all": ("pairwise", "direct"),
}
"""dlbench's own algorithms, executed message by message."""

BACKENDS = ("gloo", "mpi", "nccl", "horovod")
"""Libraries whose own collectives are timed beside them, as references."""

LIBRARY = "library"
"""What a point calls the algorithm of a library, which chooses it itself."""
IN_PLACE, OUT_OF_PLACE = f"{LIBRARY}-in-place", f"{LIBRARY}-out-of-place"
"""The same of MPI's all-reduce, which is timed both ways: in place, as exchanges of training call it, and into a second
buffer, as osu_allreduce of OSU's micro-benchmarks does."""

GROUPED_ALGORITHMS = ("hierarchical", "leader")

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


class CommSpec(Spec):
    """What is measured."""

    collective: Collective = Field("allreduce", description="The collective.")
    algorithms: tuple[str, ...] = Field((), description="dlbench's own algorithms; none: only the references.")
    backends: tuple[Literal["gloo", "mpi", "nccl", "horovod"], ...] = Field(
        (), description="Libraries whose own collective is timed as a reference."
    )
    sizes: tuple[Count, ...] = Field(
        min_length=1, description="Sizes of the vector, bytes, ascending: of each rank's buffer, as in nccl-tests."
    )
    dtype: Precision = Field("fp32", description="Type of an element.")
    transport: Literal["torch", "mpi"] = Field(
        "torch", description="What carries the algorithms' messages: torch.distributed (gloo or NCCL), or mpi4py."
    )
    warmup: CountOrZero = Field(2, description="Untimed iterations of each point, after the trials for their length.")
    iterations: Count = Field(10, description="Timed iterations of each point.")
    group_size: Ranks | None = Field(None, description="Ranks of a group for grouped algorithms; none: of a node.")
    shards: Ranks | None = Field(None, description="Servers of parameter-server; none: every rank is one.")
    timeout_s: Positive = Field(60.0, description="Longest time of one iteration before the run is given up, seconds.")
    check: Flag = Field(True, description="Compare every result with the sum computed apart.")

    @model_validator(mode="after")
    def _names_and_sizes(self) -> Self:
        known = ALGORITHMS[self.collective]
        for name in self.algorithms:
            if name not in known:
                raise ValueError(f"algorithms: {name!r} is no algorithm of {self.collective}: {', '.join(known)}")
        if not self.algorithms and not self.backends:
            raise ValueError("nothing to measure: give algorithms, backends, or both")
        width = ELEMENT_BYTES[self.dtype]
        for size in self.sizes:
            if size % width:
                raise ValueError(f"sizes: {size} bytes are no whole number of {self.dtype} elements of {width} bytes")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes: must ascend, each once")
        return self


class CommSeries(Spec):
    """Where the run stands in its series."""

    id: Name = Field(description="The series: all runs started together.")
    repeat: CountOrZero = Field(description="Which repeat this is, from 0.")
    repeats: Repeats = Field(description="How often each point is run.")
    position: CountOrZero = Field(description="Order in the series.")


def group_problem(group_size: int | None, layout: LayoutSpec) -> str | None:
    """Why ranks of this layout do not form groups for a grouped algorithm; None if they do.

    Args:
        group_size: ranks of a group; none: those of a node.
        layout: nodes and ranks.
    """
    group, ranks = group_size or layout.ranks_per_node, layout.ranks
    if group not in (1, ranks) and layout.ranks_per_node % group == 0:
        return None
    return f"needs two groups of two ranks or more inside nodes, here are {ranks // group} of {group}"


class CommPlan(LaunchPlan):
    """One run of `dlbench comm`."""

    format: Literal["dlbench.comm-plan"] = Field("dlbench.comm-plan", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    comm: CommSpec = Field(description="What is measured.")
    series: CommSeries = Field(description="Where the run stands in its series.")
    stall_timeout_s: Positive = Field(600.0, description="Without progress for so long, a rank ends itself, seconds.")

    @property
    def title(self) -> str:
        """The collective and what carries it."""
        return f"collective benchmark of {self.comm.collective}"

    @property
    def word(self) -> str:
        """The collective."""
        return f"comm-{self.comm.collective}"

    @property
    def job_name(self) -> str:
        """Collective, nodes, ranks and repeat."""
        return job_label(self.word, self.layout, {}, f"r{self.series.repeat + 1}")

    @property
    def group_size(self) -> int:
        """Ranks of a group of a grouped algorithm."""
        return self.comm.group_size or self.layout.ranks_per_node

    @model_validator(mode="after")
    def _groups_exist(self) -> Self:
        group, ranks = self.group_size, self.layout.ranks
        if self.comm.group_size is not None and ranks % group:
            raise ValueError(f"comm.group_size: groups of {group} do not divide {ranks} ranks")
        grouped = [name for name in self.comm.algorithms if name in GROUPED_ALGORITHMS]
        problem = group_problem(self.comm.group_size, self.layout)
        if grouped and problem is not None:
            raise ValueError(
                f"algorithm {grouped[0]}: {problem}; use more nodes or ranks per node, or set --group-size"
            )
        if self.comm.shards is not None and self.comm.shards > ranks:
            raise ValueError(f"comm.shards: {self.comm.shards} servers need as many ranks, here are {ranks}")
        by_mpi = self.system.launch.by_mpi
        if self.comm.transport == "mpi" and not by_mpi:
            raise ValueError("transport mpi: needs launcher mpirun or srun-mpi")
        if "mpi" in self.comm.backends and not by_mpi:
            raise ValueError("backend mpi: needs launcher mpirun or srun-mpi")
        return self
