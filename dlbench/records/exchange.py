"""What a training run says of its gradient exchange: counted, not assumed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Ranks, Spec
from dlbench.specs.comm import LineCost
from dlbench.specs.sync import Fusion, read_fusion

NOT_OF_GRADIENTS = ("broadcast", "all-gather", "activations", "updates")
"""How methods end whose messages carry parameters or activations; local SGD's are `average every 8 updates`."""


def carried(method: str) -> str:
    """What one tensor of a message of this method is."""
    if not method.endswith(NOT_OF_GRADIENTS):
        return "gradient"
    return "parameter" if method.endswith(("broadcast", "all-gather")) else "tensor"


class Message(Spec):
    """One message of a step: a bucket of gradients, a fused buffer of the engine, parameters, or activations."""

    num_bytes: CountOrZero = Field(
        description="Bytes of gradients, parameters or activations in it, before any compression."
    )
    num_tensors: Count = Field(description="Tensors in it.")
    method: str = Field(
        description="How it went: flat, hierarchical, leader, sparse, or the engine's operation; average every 8 "
        "updates: of parameters and optimizer state, not in each step."
    )
    chunks: Count | None = Field(
        None, description="Chunks in which the levels of hierarchical sent it; null: another way, or an earlier record."
    )
    ready_s: NonNegative | None = Field(
        None, description="When its last gradient was there, seconds after the start of the backward pass; median."
    )
    start_s: NonNegative | None = Field(None, description="When its exchange began, on the same clock; median.")
    exchange_s: NonNegative | None = Field(None, description="How long its exchange took, seconds; median.")


class GradientTime(Spec):
    """When one gradient was ready."""

    name: str = Field(description="Name of the parameter.")
    num_bytes: Count = Field(description="Bytes of its gradient.")
    ready_s: NonNegative = Field(description="Seconds after the start of the backward pass; median over the window.")


class AutotuneResult(Spec):
    """What Horovod's autotuner did."""

    evaluations: CountOrZero = Field(description="Settings it tried (rows of its log).")
    planned_steps: Count = Field(description="Steps its search takes by its own settings.")
    finished: Flag = Field(description="Whether it had settled before the measured steps.")
    settled_step: CountOrZero | None = Field(None, description="Step of the run at which it settled.")
    cost_s: NonNegative | None = Field(
        None, description="Time of the steps until then beyond as many steps afterwards, seconds."
    )
    fusion_threshold_bytes: NonNegative | None = Field(None, description="What it chose.")
    cycle_time_ms: NonNegative | None = Field(None, description="What it chose.")
    score: NonNegative | None = Field(None, description="Its own score of that, bytes per microsecond.")


class ExchangeResult(Spec):
    """The exchange of one run as rank 0 counted it, per step, unless a field says otherwise."""

    carrier: str = Field(description="Who moved the bytes: gloo, mpi, nccl, ...")
    by: Literal["backend", "dlbench"] = Field(
        description="Who grouped gradients and chose the exchange; backend: Horovod or PyTorch DDP."
    )
    exchange: str = Field(description="flat, hierarchical, leader, hybrid, ... as it ran.")
    fusion: str = Field(description="As it ran.")
    wire: str = Field(description="As it ran.")
    group_size: Ranks = Field(description="Ranks of a group.")
    num_groups: Ranks = Field(description="Groups.")
    messages: tuple[Message, ...] = Field((), description="Messages of a step, in the order of sending.")
    bytes_inside: NonNegative | None = Field(
        None, description="Bytes that a rank sends inside its group, by the algorithm; mean over ranks; null: unknown."
    )
    bytes_across: NonNegative | None = Field(None, description="The same to other groups.")
    communication_s: NonNegative | None = Field(
        None, description="Time in which at least one message was under way; median over steps, mean over ranks."
    )
    exposed_s: NonNegative | None = Field(None, description="The part of it after the backward pass.")
    hidden_s: NonNegative | None = Field(None, description="The part of it within the backward pass.")
    backward_s: NonNegative | None = Field(None, description="The backward pass, same steps.")
    packing_s: NonNegative | None = Field(
        None,
        description="The part of communication_s before messages went to the carrier: choosing the largest entries, or "
        "casting; null: gradients travelled as they are, or a library packed them.",
    )
    merging_s: NonNegative | None = Field(
        None, description="The part behind the carrier: adding what came, or casting back; the rest is the wire's."
    )
    wire_overflows: CountOrZero = Field(0, description="Messages of the whole run whose fp16 sum was not finite.")
    density: NonNegative | None = Field(None, description="Mean share of entries in the sum of sparse messages.")
    dense_switches: CountOrZero = Field(0, description="Sparse messages of the whole run that were sent dense.")
    window_steps: CountOrZero = Field(0, description="Steps that were watched for these figures.")
    evidence: str = Field(description="How all this is known.")
    gradients: tuple[GradientTime, ...] = Field((), description="Gradients in the order in which they were ready.")
    costs: tuple[LineCost, ...] = Field((), description="Lines measured or given for mgwfbp and hybrid.")
    hybrid_threshold_bytes: CountOrZero | None = Field(None, description="Threshold in force, for hybrid.")
    autotune: AutotuneResult | None = Field(None, description="Horovod's autotuner, if it was on.")

    @property
    def fusion_rule(self) -> Fusion | None:
        """Returns `fusion` as plans know it; None for what no plan can ask for, e.g. messages by blocks of FSDP."""
        try:
            return read_fusion(self.fusion)
        except ValueError:
            return None

    @property
    def of_gradients(self) -> tuple[Message, ...]:
        """The messages that carry gradients, and neither parameters nor activations."""
        return tuple(one for one in self.messages if not one.method.endswith(NOT_OF_GRADIENTS))

    @property
    def chunks(self) -> dict[float, int]:
        """Chunks of a message of gradients, by its bytes; empty: it went another way, or they were not recorded."""
        return {float(one.num_bytes): one.chunks for one in self.of_gradients if one.chunks is not None}

    @property
    def chunks_are_guessed(self) -> bool:
        """Whether an earlier dlbench cut messages for its levels and did not record in how many chunks."""
        is_cut = self.by == "dlbench" and self.exchange == "hierarchical"
        return is_cut and any(one.chunks is None for one in self.of_gradients)

    @property
    def sent_bytes(self) -> float | None:
        """Bytes that a rank sends in a step; None: unknown."""
        sent = [one for one in (self.bytes_inside, self.bytes_across) if one is not None]
        return sum(sent) if sent else None

    @property
    def averages_parameters(self) -> bool:
        """Whether ranks averaged parameters, not gradients, from some update on (local SGD)."""
        return any(message.method.startswith("average every") for message in self.messages)


class NcclTransport(Spec):
    """What NCCL said of itself while it started, by its own log (NCCL_DEBUG=INFO), ranks together."""

    version: str | None = Field(None, description="NCCL's version.")
    network: str | None = Field(None, description="Network module in use, e.g. IB, Socket, AWS Libfabric.")
    plugin: str | None = Field(None, description="Network plugin that was loaded; null: none.")
    channels: dict[str, Count] = Field(
        default_factory=dict, description="Connections by way, e.g. P2P/CUMEM, SHM/direct/direct, NET/IB/GDRDMA."
    )
    collective_channels: CountOrZero | None = Field(None, description="Channels for collectives per rank; the most.")
    nvls_channels: CountOrZero | None = Field(None, description="Channels of NVLink SHARP per rank; the most.")
    nvls: Flag = Field(False, description="Whether the switch can add and multicast (NVLink SHARP).")
    rings: CountOrZero = Field(0, description="Rings of the largest communicator.")
    trees: CountOrZero = Field(0, description="Trees of the largest communicator.")
    warnings: tuple[str, ...] = Field((), description="NCCL's warnings, each once.")
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="Adapters of fast networks that nodes have, whether NCCL used them or not: name and kind "
        "(InfiniBand, RoCE, EFA, Omni-Path, Slingshot, RDMA), by /sys.",
    )

    @property
    def has_peer_access(self) -> bool:
        """Whether GPUs of a node were reached directly."""
        return any(way.startswith("P2P") for way in self.channels)
