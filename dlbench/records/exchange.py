"""The gradient exchange of a training run as it was measured. Part of `record.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Ranks, Spec
from dlbench.specs.comm import LineCost
from dlbench.specs.sync import Fusion, read_fusion

NOT_OF_GRADIENTS = ("broadcast", "all-gather", "activations", "updates")
"""Ends of the names of methods that send parameters or activations; for local SGD `average every 8 updates`."""


def carried(method: str) -> str:
    """Returns the kind of tensor in a message of this method."""
    if not method.endswith(NOT_OF_GRADIENTS):
        return "gradient"
    return "parameter" if method.endswith(("broadcast", "all-gather")) else "tensor"


class Message(Spec):
    """One message of a step: a bucket of gradients, a fused buffer of the engine, parameters, or activations."""

    num_bytes: CountOrZero = Field(description="Bytes of gradients, parameters or activations before any compression.")
    num_tensors: Count = Field(description="Tensors in it.")
    method: str = Field(
        description="Method: flat, hierarchical, leader, sparse, int8, or the engine's operation; average every 8 "
        "updates: parameters and optimizer state, not in each step."
    )
    chunks: Count | None = Field(None, description="Chunks of hierarchical; null: another method, or not recorded.")
    ready_s: NonNegative | None = Field(
        None, description="Last gradient ready, seconds into the backward pass; median."
    )
    start_s: NonNegative | None = Field(None, description="Start of its exchange, seconds on that clock; median.")
    exchange_s: NonNegative | None = Field(None, description="Duration of its exchange, seconds; median.")


class GradientTime(Spec):
    """The time when a gradient was ready."""

    name: str = Field(description="Name of the parameter.")
    num_bytes: Count = Field(description="Bytes of its gradient.")
    ready_s: NonNegative = Field(description="Seconds after the start of the backward pass; median over the window.")


class AutotuneResult(Spec):
    """The result of Horovod's autotuner."""

    evaluations: CountOrZero = Field(description="Settings it tried (rows of its log).")
    planned_steps: Count = Field(description="Steps its search takes by its own settings.")
    finished: Flag = Field(description="Whether it ended before the measured steps.")
    settled_step: CountOrZero | None = Field(None, description="Step at which it ended.")
    cost_s: NonNegative | None = Field(None, description="Time of these steps beyond as many later ones, seconds.")
    fusion_threshold_bytes: NonNegative | None = Field(None, description="Chosen threshold, bytes.")
    cycle_time_ms: NonNegative | None = Field(None, description="Chosen cycle time, milliseconds.")
    score: NonNegative | None = Field(None, description="Its score of that, bytes per microsecond.")


class ExchangeResult(Spec):
    """The exchange of a run, counted by rank 0, per step unless a field names another unit."""

    carrier: str = Field(description="Library that sends the bytes: gloo, mpi, nccl, ...")
    by: Literal["backend", "dlbench"] = Field(description="Who fuses and sends; backend: Horovod or PyTorch DDP.")
    exchange: str = Field(description="Exchange in force: flat, hierarchical, leader, hybrid, ...")
    fusion: str = Field(description="Fusion in force.")
    wire: str = Field(description="Wire format in force.")
    group_size: Ranks = Field(description="Ranks of a group.")
    num_groups: Ranks = Field(description="Groups.")
    messages: tuple[Message, ...] = Field((), description="Messages of a step, in the order of sending.")
    bytes_inside: NonNegative | None = Field(None, description="Bytes that a rank sends in its group, mean over ranks.")
    bytes_across: NonNegative | None = Field(None, description="Bytes that a rank sends to other groups, mean.")
    communication_s: NonNegative | None = Field(
        None, description="Time with a message in flight, seconds; median over steps, mean over ranks."
    )
    exposed_s: NonNegative | None = Field(None, description="The part of communication_s after the backward pass.")
    hidden_s: NonNegative | None = Field(None, description="The part of communication_s within the backward pass.")
    backward_s: NonNegative | None = Field(None, description="The backward pass of the same steps, seconds.")
    packing_s: NonNegative | None = Field(
        None, description="The part of communication_s for compressing or casting; null: none, or by the library."
    )
    merging_s: NonNegative | None = Field(None, description="The part of communication_s for adding or casting back.")
    wire_overflows: CountOrZero = Field(0, description="Messages of the whole run whose fp16 sum was not finite.")
    density: NonNegative | None = Field(None, description="Mean share of entries in the sum of sparse messages.")
    dense_switches: CountOrZero = Field(0, description="Sparse or int8 messages of the whole run that were sent dense.")
    window_steps: CountOrZero = Field(0, description="Steps in which these figures were measured.")
    evidence: str = Field(description="Source of these figures.")
    gradients: tuple[GradientTime, ...] = Field((), description="Gradients in the order in which they were ready.")
    costs: tuple[LineCost, ...] = Field((), description="Lines measured or given for mgwfbp and hybrid.")
    hybrid_threshold_bytes: CountOrZero | None = Field(None, description="Threshold in force, for hybrid.")
    autotune: AutotuneResult | None = Field(None, description="Horovod's autotuner, if it was on.")

    @property
    def fusion_rule(self) -> Fusion | None:
        """Returns `fusion` as a setting of plans; None if it is none, e.g. messages by blocks of FSDP."""
        try:
            return read_fusion(self.fusion)
        except ValueError:
            return None

    @property
    def of_gradients(self) -> tuple[Message, ...]:
        """Returns the messages of gradients, without those of parameters and activations."""
        return tuple(message for message in self.messages if not message.method.endswith(NOT_OF_GRADIENTS))

    @property
    def chunks(self) -> dict[float, int]:
        """Returns the chunks of messages of gradients, by bytes; empty: another method, or not recorded."""
        return {float(message.num_bytes): message.chunks for message in self.of_gradients if message.chunks is not None}

    @property
    def sent_bytes(self) -> float | None:
        sent = [num_bytes for num_bytes in (self.bytes_inside, self.bytes_across) if num_bytes is not None]
        return sum(sent) if sent else None

    @property
    def averages_parameters(self) -> bool:
        """Returns whether ranks averaged parameters instead of gradients (local SGD)."""
        return any(message.method.startswith("average every") for message in self.messages)


class NcclTransport(Spec):
    """NCCL's transports by its log (NCCL_DEBUG=INFO), all ranks together."""

    version: str | None = Field(None, description="NCCL's version.")
    network: str | None = Field(None, description="Network module in use, e.g. IB, Socket, AWS Libfabric.")
    plugin: str | None = Field(None, description="Network plugin that was loaded; null: none.")
    channels: dict[str, Count] = Field(default_factory=dict, description="Connections by transport, e.g. P2P/CUMEM.")
    collective_channels: CountOrZero | None = Field(None, description="Channels for collectives per rank, maximum.")
    nvls_channels: CountOrZero | None = Field(None, description="Channels of NVLink SHARP per rank, maximum.")
    nvls: Flag = Field(False, description="Whether NVLink SHARP is available.")
    rings: CountOrZero = Field(0, description="Rings of the largest communicator.")
    trees: CountOrZero = Field(0, description="Trees of the largest communicator.")
    warnings: tuple[str, ...] = Field((), description="NCCL's warnings, each once.")
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="Fast network adapters of nodes by /sys, used or not: name and kind (InfiniBand, RoCE, EFA, "
        "Omni-Path, Slingshot, RDMA).",
    )

    @property
    def has_peer_access(self) -> bool:
        return any(connection.startswith("P2P") for connection in self.channels)
