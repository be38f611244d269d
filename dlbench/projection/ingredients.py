"""The ingredients of a projection as one file: measured figures of one comparable group, its network and its input.

`dlbench.projection.gathering` makes it from runs; it can also be written by hand from figures of another tool or a
publication. Unknown values are null, and projections that need them are refused. Units are seconds, bytes, samples.
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

    @property
    def has_parts(self) -> bool:
        """Returns whether the parts of a step are known for a run."""
        return any(run.parts for run in self.runs)

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [run.run_id for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"runs at {self.ranks} ranks: each run needs its own name, and some are there twice")
        return self

    @model_validator(mode="after")
    def _leaf_of_each_node(self) -> Self:
        if self.leaves is not None and len(self.leaves) != self.nodes:
            raise ValueError(
                f"there are leaf switches of {len(self.leaves)} nodes, but {self.ranks} ranks use {self.nodes}"
            )
        return self


LogRatio = Annotated[float, Field(ge=-5, le=5)]  # Of times of two nodes; a ratio of 150 at most.


class NodeScatter(Spec):
    """Scatter of nodes and their steps at the anchor, in logarithms of a rank's own work."""

    hosts: tuple[LogRatio, ...] = Field(
        description="Of each host, how much longer than the median of all ranks its slowest rank works (log of the "
        "ratio), median over steps."
    )
    maxima: tuple[LogRatio, ...] = Field(
        (),
        description=f"{QUANTILES_OF_MAXIMA} quantiles of what is left per node and step: of n, the i-th from 0 is at "
        "1 - (1 - i / (n - 1))^3.",
    )
    num_maxima: CountOrZero = Field(0, description="Node-steps behind them.")

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        if list(self.maxima) != sorted(self.maxima):
            raise ValueError("maxima are quantiles, so they ascend")
        return self


class SlowHosts(Spec):
    """Hosts of the system that a history found slower than the others."""

    hosts: Count = Field(description="Hosts that were compared.")
    ratios: tuple[LogRatio, ...] = Field(
        (), description="Of each slow one, how much longer it works than the other hosts (log of the ratio)."
    )
    source: str = Field("", description="Where the figures are from.")

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
    is_saturated: Flag = Field(False, description="Whether more demand no longer gave more.")
    is_per_node: Flag = Field(
        False, description="Whether samples lie on each node (staged), so that supply grows with nodes."
    )
    source: str = Field("", description="Where the rate is from.")


class BatchFigures(Spec):
    """Own work of a rank at one batch."""

    batch_per_rank: Count = Field(description="Samples per rank and step.")
    own_work_s: tuple[Positive, ...] = Field(min_length=1, description="Of each run, seconds.")


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

    format: Literal["dlbench.ingredients"] = Field("dlbench.ingredients", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    title: str = Field(description="What is projected, in words: workload, preset, engine, system.")
    source: str = Field(description="Where the figures are from: folders, a file, a publication.")
    configuration: str = Field("", description="Digest of what comparable runs share; empty: not of runs.")
    system: str = Field("", description="Name of the system.")
    sample_unit: str = Field("samples", description="What a sample is called.")
    scaling: Literal["weak", "strong"] = Field(
        "weak", description="weak: batch per rank is fixed; strong: global batch."
    )
    ranks_per_node: Ranks | None = Field(
        None, description="Ranks of a full node, which larger targets fill; null: as at the largest point."
    )
    points: tuple[PointFigures, ...] = Field(min_length=1, description="By rank count, ascending.")
    is_crowded: Flag = Field(False, description="Whether ranks shared cores.")
    shared_cores: Count | None = Field(
        None, description="Cores that all nodes have together, as nodes of one machine do; null: each has its own."
    )
    exchange: ExchangeResult | None = Field(
        None, description="Messages and gradients of a step, of the run in the middle at the largest point."
    )
    engine: str = Field("", description="Name of the engine.")
    training: str = Field(
        "",
        description="Digest of what runs share that differ in engine, exchange and strategy alone; empty: not of runs.",
    )
    average_every: Count | None = Field(None, description="Updates between two averages of local SGD; null: no such.")
    data: str = Field("", description="What was trained on, in words: synthetic data, or which data set.")
    fusion_threshold_bytes: CountOrZero | None = Field(None, description="Of Horovod: most bytes of a fused message.")
    cycle_s: NonNegative | None = Field(None, description="Of Horovod: least time between two fused messages, seconds.")
    network: NetworkModel | None = Field(None, description="Costs of messages; null: not known.")
    nodes_per_leaf: Count | None = Field(None, description="Nodes below a leaf switch; null: not known.")
    leaf_taper: float | None = Field(
        None,
        ge=1,
        description="Links of all nodes of a leaf over links from there on, e.g. 2 for 2:1; null: not known.",
    )
    nodes: NodeScatter | None = Field(None, description="How unequal nodes are; null: not known.")
    slow_hosts: SlowHosts | None = Field(None, description="Slow hosts of its history; null: no history was read.")
    supply: StorageSupply | None = Field(None, description="What storage delivers; null: synthetic data or not known.")
    batches: tuple[BatchFigures, ...] = Field((), description="Own work at every batch measured, ascending.")
    quality: QualityFigures | None = Field(None, description="How much training a target takes; null: not known.")
    node_watts: Positive | None = Field(
        None, description="Mean power of a node while it trains, watts; null: not measured."
    )
    notes: tuple[str, ...] = Field((), description="What a reader must know of these figures, in sentences.")

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
        return not is_known and not any(point.has_parts for point in self.points)

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
        """Returns the first 12 digits of the SHA-256 of the content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
