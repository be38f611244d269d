"""The ingredients of a projection as one file, made from runs (`gathering`) or written by hand. Unknown values are
null, and projections that need them are refused. Units are seconds, bytes, samples.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, WAIT_PARTS
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Positive, Ranks, Spec
from dlbench.specs.comm import NetworkModel

TOLERANCE = 0.01  # Largest difference between the step and the sum of its causes, as a share.
QUANTILES_OF_MAXIMA = 257


class RunFigures(Spec):
    """One run: its mean step and the parts of it."""

    run_id: str = Field(description="Id of the run, unique in its point.")
    session: str = Field("", description="Session of the machine; runs of a session are drawn together.")
    step_s: float = Field(
        ge=1e-9, le=1e6, description="Mean step: longest measured time of a rank over its steps, seconds."
    )
    parts: dict[str, NonNegative] = Field(
        default_factory=dict,
        description="Seconds of each cause (they sum to the step) and of forward, backward, optimizer, wait, copy.",
    )
    own_work_s: Positive | None = Field(
        None, description="Step minus exchange phase, seconds: mean over steps, median over ranks."
    )
    communication_s: NonNegative | None = Field(
        None, description="Time of messages without waiting for other ranks, seconds per step."
    )

    @model_validator(mode="after")
    def _sums(self) -> Self:
        total_s = sum(self.parts.get(name, 0.0) for name in CAUSES)
        if self.parts and abs(total_s / self.step_s - 1) > TOLERANCE:
            raise ValueError(f"the causes of run {self.run_id} sum to {total_s:.6g} s, its step is {self.step_s:.6g} s")
        for cause, names in (("compute", COMPUTE_PARTS), ("input", WAIT_PARTS)):
            cause_s, sum_s = self.parts.get(cause, 0.0), sum(self.parts.get(name, 0.0) for name in names)
            # Only the parts of compute are required.
            is_present = cause == "compute" or any(name in self.parts for name in names)
            if self.parts and is_present and abs(sum_s - cause_s) > TOLERANCE * self.step_s:
                words = ", ".join(names)
                raise ValueError(f"{words} of run {self.run_id} sum to {sum_s:.6g} s, its {cause} is {cause_s:.6g} s")
        return self


class PointFigures(Spec):
    """The runs of one rank count."""

    ranks: Ranks = Field(description="Ranks.")
    nodes: Ranks = Field(description="Nodes.")
    batch_per_rank: Count | None = Field(None, description="Samples per rank and step; null: not known.")
    strategy: str = Field("", description="Strategy: data, zero-1, fsdp, ...; empty: not known.")
    replicas: Ranks | None = Field(None, description="Groups of ranks that share samples; null: not known.")
    memory_bytes: NonNegative | None = Field(
        None, description="Peak memory of the rank with the most, bytes, median over runs; null: unknown."
    )
    sent_bytes: NonNegative | None = Field(
        None, description="Bytes that a rank sends in a step, median over runs; null: unknown."
    )
    cpu_s: NonNegative | None = Field(
        None, description="CPU time of a rank in a step, seconds, mean; null: not measured."
    )
    core_use: NonNegative | None = Field(
        None, description="Share of time in which a node's cores were used; null: not measured."
    )
    leaves: tuple[CountOrZero, ...] | None = Field(
        None, description="Index of the leaf switch of each node, of the median run; null: not recorded."
    )
    runs: tuple[RunFigures, ...] = Field(min_length=1, description="Its runs.")

    @model_validator(mode="after")
    def _runs_and_leaves(self) -> Self:
        names = [run.run_id for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"runs at {self.ranks} ranks: each run needs its own name, and some appear twice")
        if self.leaves is not None and len(self.leaves) != self.nodes:
            raise ValueError(
                f"there are leaf switches of {len(self.leaves)} nodes, but {self.ranks} ranks use {self.nodes}"
            )
        return self


LogRatio = Annotated[float, Field(ge=-5, le=5)]  # Of times of two nodes; a ratio of 150 at most.


class NodeScatter(Spec):
    """Scatter of nodes and their steps at the anchor, in logarithms of a rank's own work."""

    hosts: tuple[LogRatio, ...] = Field(
        description="By host: log of the work of its slowest rank over the median of all ranks, median over steps."
    )
    maxima: tuple[LogRatio, ...] = Field(
        (),
        description=f"{QUANTILES_OF_MAXIMA} quantiles of the residuals of nodes and steps: of n, the i-th from 0 is at "
        "1 - (1 - i / (n - 1))^3.",
    )
    num_maxima: CountOrZero = Field(0, description="Number of residuals (nodes x steps).")

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        if list(self.maxima) != sorted(self.maxima):
            raise ValueError("maxima are quantiles, so they ascend")
        return self


class SlowHosts(Spec):
    """Hosts of the system that a history found slower than the others."""

    hosts: Count = Field(description="Number of compared hosts.")
    ratios: tuple[LogRatio, ...] = Field((), description="By slow host: log of its work over that of the other hosts.")
    source: str = Field("", description="Source of the figures.")

    @model_validator(mode="after")
    def _some_of_all(self) -> Self:
        if len(self.ratios) > self.hosts:
            raise ValueError(f"{len(self.ratios)} slow hosts of {self.hosts}")
        return self


class StorageSupply(Spec):
    """Measured rate of storage."""

    sample_bytes: Positive | None = Field(None, description="Stored bytes of a sample; null: no files are read.")
    bytes_per_s: Positive | None = Field(None, description="Largest aggregate rate that was measured, bytes/s.")
    nodes: Ranks | None = Field(None, description="Nodes that it was measured on.")
    is_saturated: Flag = Field(False, description="Whether more demand did not increase the rate.")
    is_per_node: Flag = Field(
        False, description="Whether samples are on each node (staged), so that the rate grows with nodes."
    )
    source: str = Field("", description="Source of the rate.")


class BatchFigures(Spec):
    """Own work of a rank at one batch."""

    batch_per_rank: Count = Field(description="Samples per rank and step.")
    own_work_s: tuple[Positive, ...] = Field(min_length=1, description="Own work by run, seconds.")


class QualityRun(Spec):
    """A run that was trained to its target."""

    global_batch: Count = Field(description="Samples per step of all ranks.")
    epochs: Positive = Field(description="Epochs until the target was met.")


class QualityFigures(Spec):
    """Training needed for a target."""

    target: str = Field(description="The target, in words.")
    samples_per_epoch: Count = Field(description="Samples of an epoch.")
    runs: tuple[QualityRun, ...] = Field((), description="Runs that met it.")
    evaluation_s: NonNegative = Field(
        0.0, description="Seconds of evaluations per epoch, median over runs; taken to be the same at any rank count."
    )
    noise_scale: Positive | None = Field(
        None, description="Simple noise scale of the gradients (McCandlish et al. 2018), samples; null: not measured."
    )


class Ingredients(Spec):
    """`dlbench.ingredients`, version 1."""

    format: Literal["dlbench.ingredients"] = Field("dlbench.ingredients", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    title: str = Field(description="Title: workload, preset, engine, system.")
    source: str = Field(description="Source of the figures: folders, a file, a publication.")
    configuration: str = Field("", description="Digest of the configuration of comparable runs; empty: not of runs.")
    system: str = Field("", description="Name of the system.")
    sample_unit: str = Field("samples", description="Name of samples.")
    scaling: Literal["weak", "strong"] = Field(
        "weak", description="weak: batch per rank is fixed; strong: global batch."
    )
    ranks_per_node: Ranks | None = Field(
        None, description="Ranks of a full node, which larger targets fill; null: as at the largest point."
    )
    points: tuple[PointFigures, ...] = Field(min_length=1, description="By rank count, ascending.")
    is_crowded: Flag = Field(False, description="Whether ranks shared cores.")
    shared_cores: Count | None = Field(
        None, description="Cores that all nodes share, as nodes of one machine do; null: each node has its own."
    )
    exchange: ExchangeResult | None = Field(
        None, description="Messages and gradients of a step, of the median run at the largest point."
    )
    engine: str = Field("", description="Name of the engine.")
    training: str = Field(
        "", description="Digest of the configuration without engine, exchange and strategy; empty: not of runs."
    )
    average_every: Count | None = Field(None, description="Updates between two averages of local SGD; null: none.")
    data: str = Field("", description="Training data in words: synthetic data, or a data set.")
    fusion_threshold_bytes: CountOrZero | None = Field(None, description="Horovod: most bytes of a fused message.")
    cycle_s: NonNegative | None = Field(None, description="Horovod: least time between two fused messages, seconds.")
    network: NetworkModel | None = Field(None, description="Costs of messages; null: not known.")
    nodes_per_leaf: Count | None = Field(None, description="Nodes below a leaf switch; null: not known.")
    leaf_taper: float | None = Field(
        None, ge=1, description="Links of the nodes of a leaf switch over its uplinks, e.g. 2 for 2:1; null: not known."
    )
    nodes: NodeScatter | None = Field(None, description="Scatter of nodes; null: not known.")
    slow_hosts: SlowHosts | None = Field(
        None, description="Slow hosts by a history of the system; null: none was read."
    )
    supply: StorageSupply | None = Field(None, description="Rate of storage; null: synthetic data or not known.")
    batches: tuple[BatchFigures, ...] = Field((), description="Own work by measured batch, ascending.")
    quality: QualityFigures | None = Field(None, description="Training needed for a target; null: not known.")
    node_watts: Positive | None = Field(
        None, description="Mean power of a node while it trains, watts; null: not measured."
    )
    notes: tuple[str, ...] = Field((), description="Notes on these figures, in sentences.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        counts = [point.ranks for point in self.points]
        if counts != sorted(set(counts)):
            raise ValueError("points must ascend by ranks, each rank count once")
        full = self.per_node
        for point in self.points:
            if point.ranks != point.nodes * full and not (point.nodes == 1 and point.ranks < full):
                raise ValueError(f"the point of {point.ranks} ranks does not fill nodes of {full} ranks each")
        return self

    @property
    def is_series(self) -> bool:
        """Returns whether only step times are known: no system, network, exchange or parts of a step."""
        is_known = self.system or self.network is not None or self.exchange is not None
        return not is_known and not any(run.parts for point in self.points for run in point.runs)

    @property
    def anchor(self) -> PointFigures:
        """Returns the largest measured point, where projections start."""
        return self.points[-1]

    @property
    def per_node(self) -> int:
        """Returns the ranks of a full node."""
        return self.ranks_per_node or -(-self.anchor.ranks // self.anchor.nodes)

    def nodes_of(self, ranks: int) -> int:
        """Returns the nodes for a rank count: one if they fit, else full nodes."""
        return -(-ranks // self.per_node)

    def batch_at(self, ranks: int) -> int | None:
        """Returns samples per rank and step at a rank count; None if unknown or not a whole number."""
        batch = self.anchor.batch_per_rank
        if batch is None or self.scaling == "weak":
            return batch
        global_batch = batch * self.anchor.ranks
        return None if global_batch % ranks else global_batch // ranks

    def measured_at(self, ranks: int) -> PointFigures | None:
        """Returns the measured point at this rank count, if its batch is that of the projection."""
        key = (ranks, self.batch_at(ranks))
        return next((point for point in self.points if (point.ranks, point.batch_per_rank) == key), None)

    @property
    def digest(self) -> str:
        # Without a field that earlier ingredients do not have.
        content = self.model_dump_json(exclude={"points": {"__all__": {"replicas"}}})
        return hashlib.sha256(content.encode()).hexdigest()[:12]
