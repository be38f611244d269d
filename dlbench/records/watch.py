"""Monitoring of a run: samplers, spans and overhead; and the use of cores by other processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.records.clocks import ClockLine
from dlbench.specs.base import CountOrZero, NonNegative, Positive, RankNumber, Spec


class WatchOverhead(Spec):
    """The increase of a step by monitoring."""

    value: float = Field(description="Share of the step time (1): 0.004 is 0.4 %.")
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")
    num_pairs: Literal[0] = Field(0, description="Always 0; used by an earlier method.")
    method: Literal["accounted"] = Field(
        "accounted",
        description="From 0 to monitoring's CPU time in measured steps, as if the slowest rank waited for all.",
    )
    evidence: str = Field(description="Source of the figure.")


class NodeWatch(Spec):
    """The sampler of one node."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    num_samples: CountOrZero = Field(description="Samples written.")
    dropped_samples: CountOrZero = Field(0, description="Samples beyond the node's share of bytes.")
    period_s: Positive = Field(description="Longest sampling period, seconds; it doubles as the node's bytes run out.")
    late_median_s: NonNegative = Field(description="Median delay of samples, seconds.")
    late_max_s: NonNegative = Field(description="Largest delay of samples, seconds.")
    cpu_s: NonNegative = Field(description="CPU time of the sampler's process, seconds.")
    measured_cpu_s: NonNegative | None = Field(
        None, description="CPU time of the sampler's process in the measured steps, seconds; null: unknown."
    )
    wall_s: NonNegative = Field(description="Run time of the sampler, seconds.")
    sources: tuple[str, ...] = Field((), description="Fields that were sampled, by name.")
    unavailable: dict[str, str] = Field({}, description="Fields that were not sampled, each with the reason.")
    failures: tuple[str, ...] = Field((), description="Later failures, each a sentence.")
    clock: ClockLine = Field(description="Its clock relative to node 0's.")


class WatchResult(Spec):
    """Monitoring of one run."""

    nodes: tuple[NodeWatch, ...] = Field((), description="Samplers by node; none if the plan has none.")
    window_ranks: tuple[RankNumber, ...] = Field((), description="Ranks whose layers and messages were profiled.")
    window_first_step: CountOrZero | None = Field(None, description="First step of the window; null without one.")
    window_num_steps: CountOrZero = Field(0, description="Steps of the window.")
    num_spans: CountOrZero = Field(0, description="Spans written, all ranks together.")
    dropped_spans: CountOrZero = Field(0, description="Spans beyond their rank's share of bytes.")
    trace_bytes: CountOrZero = Field(0, description="Bytes of all spans and samples.")
    overhead: WatchOverhead | None = Field(None, description="Overhead of monitoring; null: no monitoring.")


class NodeLoad(Spec):
    """The use of the cores of a node's ranks during the measured steps, in every run, monitored or not."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    cores: tuple[int, ...] = Field(description="Cores that its ranks may run on, together.")
    window_s: NonNegative = Field(description="Measured steps without pauses, seconds.")
    busy_s: NonNegative | None = Field(
        description="CPU time of all processes on these cores without interrupts, seconds; null: unknown."
    )
    own_s: NonNegative = Field(description="CPU time of the ranks, their children and the sampler, seconds.")
    steal_s: NonNegative | None = Field(
        description="Time of these cores given to other machines, seconds; null: unknown."
    )
    pressure_s: NonNegative | None = Field(
        description="Time in which a process of the node waited for a core (PSI), seconds; null: unknown."
    )
    problem: str = Field("", description="Why cores were not measured; empty: they were.")

    @property
    def others_s(self) -> float | None:
        return None if self.busy_s is None else max(0.0, self.busy_s - self.own_s)
