"""Settings of out-of-core training, the measured chain of a network's modules, and memory plans.

A pass is the forward and the backward pass over one part of a rank's batch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dlbench.specs.base import ActsIf, Count, CountOrZero, Flag, Form, Fraction, FromText, NonNegative, Positive, Spec
from dlbench.specs.system import FolderOfNode
from dlbench.units import parse_bytes

Recompute = Literal["none", "blocks", "planned"]
Swap = Literal["none", "offload", "streamed", "planned"]

Capacity = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z. ]*%?$"), Form("a size or a share, e.g. 8GiB or 50%")]

Decision = Literal["keep", "swap", "recompute", "recompute-swap"]
"""recompute: only the block's input stays, the forward pass is repeated; recompute-swap: the input is swapped too."""


class MemorySpec(Spec):
    """Limits for the plan of recomputing and swapping."""

    acting = (
        ActsIf("capacity", "workload.train.is_planned", why="neither train.recompute nor swap is planned"),
        ActsIf("blocks", "workload.train.is_in_core", False, why="train.recompute and train.swap are none"),
        ActsIf("swap_folder verify", "workload.train.swaps", why="train.swap is none"),
    )

    capacity: Capacity | None = Field(
        None,
        description="Device memory that a rank's training may use (parameters, gradients, optimizer state and "
        "activations), e.g. 8GiB, or a share of what it needs without a plan, e.g. 50%; for planned.",
    )
    blocks: Annotated[tuple[str, ...], FromText] = Field(
        (),
        description="Modules with which blocks begin, a list, or text: layers.0,layers.8; none: chosen by the plan "
        "(planned), or every module of the chain is a block (blocks, offload, streamed).",
    )
    swap_folder: FolderOfNode | None = Field(
        None,
        description="Folder of the swap file on a CPU; none: system.storage.local. GPUs swap to page-locked host "
        "memory.",
    )
    verify: Flag = Field(False, description="Compare the checksum of every swapped tensor before and after.")

    @field_validator("capacity", mode="after")
    @classmethod
    def _capacity_can_be_read(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.endswith("%"):
            try:
                share = float(value[:-1])
            except ValueError:
                share = 0.0
            if not 0 < share <= 1000:
                raise ValueError(f"{value} is no share of what training holds in core; give one such as 50%")
            return value
        if parse_bytes(value) < 1:
            raise ValueError(f"{value}: must be more than no bytes")
        return value

    def capacity_bytes(self, in_core_bytes: int) -> int | None:
        if self.capacity is None:
            return None
        if self.capacity.endswith("%"):
            return round(float(self.capacity[:-1]) / 100 * in_core_bytes)
        return parse_bytes(self.capacity)


class PlannedBlock(Spec):
    """Consecutive units with the same decision."""

    first: CountOrZero = Field(description="Number of its first unit in the chain, from 0.")
    last: CountOrZero = Field(description="Number of its last unit.")
    decision: Decision = Field(description="keep, swap, recompute or recompute-swap.")


class Prediction(Spec):
    """Time and memory of a pass, as the simulator predicts them."""

    pass_s: NonNegative = Field(description="Duration of forward and backward pass of one part of the batch, seconds.")
    useful_s: NonNegative = Field(description="Duration of the pass without recomputing and waiting, seconds.")
    recompute_s: NonNegative = Field(description="Time spent recomputing, seconds.")
    stall_s: NonNegative = Field(description="Time in which computing waits for transfers or memory, seconds.")
    occupancy: Fraction = Field(description="Share of the pass spent computing, including recomputing.")
    efficiency: Fraction = Field(description="useful_s over pass_s.")
    peak_bytes: CountOrZero = Field(description="Peak memory of the pass, including state and workspace, bytes.")
    swapped_bytes: CountOrZero = Field(description="Bytes that are swapped out, and back in, per pass.")


class BlockPlan(Spec):
    """The decision for every block of the chain."""

    blocks: tuple[PlannedBlock, ...] = Field(min_length=1, description="Blocks in order; every unit is in one block.")
    capacity_bytes: CountOrZero | None = Field(description="Memory limit of the plan, bytes; null: no limit.")
    predicted: Prediction = Field(description="Predicted time and memory of a pass.")
    planner: str = Field(description="Algorithm that made the plan, e.g. greedy.")


class Unit(Spec):
    """A link of the chain: a module that is called once per forward pass and never divided."""

    name: str = Field(description="Name of the module in the network.")
    forward_s: NonNegative = Field(description="Duration of the forward pass, seconds.")
    backward_s: NonNegative = Field(description="Duration of the backward pass, seconds.")
    saved_bytes: CountOrZero = Field(
        description="Bytes that the forward pass saves for the backward pass, each storage once; without input and "
        "output of the unit, parameters, buffers, and casts of them."
    )
    saved_count: CountOrZero = Field(0, description="Storages of saved_bytes, moved separately; 0: moved as a whole.")
    input_bytes: CountOrZero = Field(description="Bytes of its input; 0 for the first unit if that is kept anyway.")
    input_saved: Flag = Field(description="Whether the backward pass of it or the unit before needs the input in core.")
    joins: Flag = Field(True, description="Whether it may join the block before it; false if others use its input.")
    input_shared: Flag = Field(True, description="If joins is false: whether others keep its input (never swapped).")
    gradient_bytes: CountOrZero = Field(0, description="Bytes of gradients allocated by backward; 0 if they persist.")
    forward_working_bytes: CountOrZero = Field(0, description="Forward peak beyond input, saved and output, bytes.")
    backward_working_bytes: CountOrZero = Field(
        0, description="Backward peak beyond input and saved tensors: gradients, workspace, and a saved output, bytes."
    )
    passing_working_bytes: CountOrZero = Field(
        0, description="Peak memory of a forward pass that saves nothing, beyond its input and output, bytes."
    )
    recomputing_working_bytes: CountOrZero = Field(
        0,
        description="Forward peak beyond input and saved tensors until the last is saved, where recomputing ends, "
        "bytes.",
    )
    piecemeal_bytes: CountOrZero = Field(0, description="Backward peak if tensors are swapped in one by one, bytes.")


class Chain(Spec):
    """The chain of a network for one batch size, with the costs outside the chain."""

    units: tuple[Unit, ...] = Field(min_length=1, description="Units in the order of the forward pass.")
    batch: Count = Field(description="Samples per pass.")
    output_bytes: CountOrZero = Field(description="Bytes of the chain's output, held until its backward pass begins.")
    before_s: NonNegative = Field(0.0, description="Duration of the forward pass before the chain, seconds.")
    turn_s: NonNegative = Field(0.0, description="Time between forward and backward pass (head, loss), seconds.")
    after_s: NonNegative = Field(0.0, description="Duration of the backward pass before the chain, seconds.")
    state_bytes: CountOrZero = Field(
        0, description="Parameters, buffers, optimizer state and persistent gradients, bytes."
    )
    exchange_bytes: CountOrZero = Field(0, description="Device buffers of the exchange, e.g. DDP's buckets, bytes.")
    outside_bytes: CountOrZero = Field(0, description="Batch, and activations kept before the chain, bytes.")
    turn_bytes: CountOrZero = Field(0, description="Peak memory of head and loss beyond the chain's output, bytes.")
    turn_gradient_bytes: CountOrZero = Field(0, description="Part of it that stays: gradients of parameters, bytes.")
    after_bytes: CountOrZero = Field(0, description="Peak memory of the backward pass before the chain, bytes.")
    after_gradient_bytes: CountOrZero = Field(0, description="Part of it that stays: gradients of parameters, bytes.")
    update_bytes: CountOrZero = Field(0, description="Peak of the update beyond parameters, gradients, state, bytes.")

    @property
    def fixed_bytes(self) -> int:
        """Memory that is used during the whole pass, bytes; a capacity must at least hold it."""
        return self.state_bytes + self.exchange_bytes + self.outside_bytes

    @property
    def useful_s(self) -> float:
        within = sum(unit.forward_s + unit.backward_s for unit in self.units)
        return self.before_s + within + self.turn_s + self.after_s


class TransferRates(Spec):
    """Rates at which activations leave the device and come back."""

    tier: str = Field(description="Destination of swapped tensors, in words, e.g. page-locked host memory.")
    out_bytes_per_s: Positive = Field(description="Rate from the device, bytes per second.")
    in_bytes_per_s: Positive = Field(description="Rate to the device, bytes per second.")
    latency_s: NonNegative = Field(0.0, description="Fixed time per transfer, seconds; each storage is one transfer.")
    drag: NonNegative = Field(0.0, description="Slowdown by concurrent transfers, seconds per second of transfer.")
