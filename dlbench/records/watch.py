"""What the monitoring of a run says of itself: what it saw and could not see, what it cost; and who else computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.records.clocks import ClockLine
from dlbench.specs.base import CountOrZero, NonNegative, Positive, RankNumber, Spec


class WatchOverhead(Spec):
    """How much longer a step takes because it is monitored."""

    value: float = Field(description="Share of the step time (1): 0.004 is 0.4 %.")
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")
    num_pairs: Literal[0] = Field(0, description="Of an earlier dlbench's method; always 0.")
    method: Literal["accounted"] = Field(
        "accounted",
        description="accounted: from 0 to what monitoring computed during the measured steps, by the kernel's count, "
        "as if the slowest rank had waited for all of it.",
    )
    evidence: str = Field(description="How it is known, in one sentence.")


class NodeWatch(Spec):
    """The sampler of one node."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    num_samples: CountOrZero = Field(description="Samples written.")
    dropped_samples: CountOrZero = Field(0, description="Samples that did not fit into the node's share of bytes.")
    period_s: Positive = Field(
        description="Longest period at which a sample was written; it doubles as the node's share of bytes runs out."
    )
    late_median_s: NonNegative = Field(description="How late samples were taken, median, seconds.")
    late_max_s: NonNegative = Field(description="The same, worst.")
    cpu_s: NonNegative = Field(description="CPU time of the sampler's process, start to end, seconds.")
    measured_cpu_s: NonNegative | None = Field(
        None, description="CPU time of the sampler's process within the measured steps; null where it is not known."
    )
    wall_s: NonNegative = Field(description="How long it ran, seconds.")
    sources: tuple[str, ...] = Field((), description="Fields that were sampled, by name.")
    unavailable: dict[str, str] = Field({}, description="Fields that were not, each with the reason.")
    failures: tuple[str, ...] = Field((), description="What failed on the way, each a sentence.")
    clock: ClockLine = Field(description="How its clock stands to node 0's.")


class WatchResult(Spec):
    """Monitoring of one run."""

    nodes: tuple[NodeWatch, ...] = Field((), description="Samplers, by node; none where the plan has none.")
    window_ranks: tuple[RankNumber, ...] = Field((), description="Ranks whose layers and messages were profiled.")
    window_first_step: CountOrZero | None = Field(None, description="First step of the window; null without one.")
    window_num_steps: CountOrZero = Field(0, description="Steps of the window.")
    num_spans: CountOrZero = Field(0, description="Spans written, all ranks together.")
    dropped_spans: CountOrZero = Field(0, description="Spans that did not fit into their rank's share of bytes.")
    trace_bytes: CountOrZero = Field(0, description="Bytes of all spans and samples.")
    overhead: WatchOverhead | None = Field(None, description="What monitoring cost; null where nothing was monitored.")


class NodeLoad(Spec):
    """Who computed on the cores of one node's ranks during the measured steps; seen in every run, monitored or not."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    cores: tuple[int, ...] = Field(description="Cores that its ranks may run on, together.")
    window_s: NonNegative = Field(description="How long was looked: the measured steps without pauses, seconds.")
    busy_s: NonNegative | None = Field(
        description="CPU time of all processes on these cores, interrupts left out, seconds; null: not measured."
    )
    own_s: NonNegative = Field(description="CPU time of the ranks, their children and the sampler, seconds.")
    steal_s: NonNegative | None = Field(
        description="Time that the hypervisor gave to others on these cores, seconds; null: not measured."
    )
    pressure_s: NonNegative | None = Field(
        description="Time in which some process of the node waited for a core (PSI), seconds; null: not measured."
    )
    problem: str = Field("", description="Why cores were not measured; empty if they were.")

    @property
    def others_s(self) -> float | None:
        """CPU time of other processes on these cores, seconds; None where it was not measured."""
        return None if self.busy_s is None else max(0.0, self.busy_s - self.own_s)
