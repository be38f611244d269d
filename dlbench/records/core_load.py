"""Who computed on the cores of a node's ranks during the measured steps: the ranks, others, the hypervisor."""

from __future__ import annotations

from pydantic import Field

from dlbench.specs.base import CountOrZero, NonNegative, Spec


class NodeLoad(Spec):
    """The cores of one node's ranks."""

    node_rank: CountOrZero = Field(description="The node, from 0.")
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
