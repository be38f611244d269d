"""Out-of-core training: `train.recompute`, `train.swap`, `train.memory`; a network as a chain of modules; and plans.

All of it is measured (`dlbench.node.out_of_core.profile`). A pass is the forward and the backward pass over one part
of a rank's batch (`train.gradient_accumulation` parts per step).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dlbench.specs.base import (
    ActsIf,
    Count,
    CountOrZero,
    Flag,
    Form,
    Fraction,
    FromText,
    NonNegative,
    Positive,
    Spec,
)
from dlbench.specs.system import FolderOfNode
from dlbench.units import parse_bytes

Recompute = Literal["none", "blocks", "planned"]
Swap = Literal["none", "offload", "streamed", "planned"]

Capacity = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z. ]*%?$"), Form("a size or a share, e.g. 8GiB or 50%")]

Decision = Literal["keep", "swap", "recompute", "recompute-swap"]
"""keep: activations stay. swap: they leave the device after the forward pass and are back for the backward pass.
recompute: only the block's input stays, the forward pass is repeated before the backward pass. recompute-swap: the
same, and the input is swapped."""


class MemorySpec(Spec):
    """What a plan of recomputing and swapping may use."""

    acting = (
        ActsIf("capacity", "workload.train.is_planned", why="neither train.recompute nor swap is planned"),
        ActsIf("blocks", "workload.train.is_in_core", False, why="train.recompute and train.swap are none"),
        ActsIf("swap_folder verify", "workload.train.swaps", why="train.swap is none"),
    )

    capacity: Capacity | None = Field(
        None,
        description="What a rank's training may hold on its device: parameters, gradients, optimizer state and "
        "activations, e.g. 8GiB, or a share of what it holds in core, e.g. 50%; for planned.",
    )
    blocks: Annotated[tuple[str, ...], FromText] = Field(
        (),
        description="Names of the modules with which blocks begin, as a list, or as text: layers.0,layers.8; none: the "
        "plan chooses (planned), or every module of the chain is a block (blocks, offload, streamed).",
    )
    swap_folder: FolderOfNode | None = Field(
        None,
        description="Folder of the swap file of a rank that trains on a CPU; none: system.storage.local. On a GPU "
        "tensors are swapped to page-locked host memory.",
    )
    verify: Flag = Field(
        False, description="Compare a checksum of every tensor that comes back with that of what went out."
    )

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
    """Consecutive units, treated alike."""

    first: CountOrZero = Field(description="Number of its first unit in the chain, from 0.")
    last: CountOrZero = Field(description="Number of its last unit.")
    decision: Decision = Field(description="keep, swap, recompute or recompute-swap.")


class Prediction(Spec):
    """A pass as the simulator sees it."""

    pass_s: NonNegative = Field(description="Forward and backward pass over one part of the batch, seconds.")
    useful_s: NonNegative = Field(description="The same without recomputing and waiting, seconds.")
    recompute_s: NonNegative = Field(description="Of it: recomputing, seconds.")
    stall_s: NonNegative = Field(description="Of it: computing stands still for a transfer or for room, seconds.")
    occupancy: Fraction = Field(description="Share of the pass in which something is computed, recomputing included.")
    efficiency: Fraction = Field(description="Useful time over the pass.")
    peak_bytes: CountOrZero = Field(description="The most that is held at a time, state and workspace included.")
    swapped_bytes: CountOrZero = Field(description="Bytes that leave the device, and come back, in a pass.")


class BlockPlan(Spec):
    """What is done with every block."""

    blocks: tuple[PlannedBlock, ...] = Field(min_length=1, description="All units, in order, each in one block.")
    capacity_bytes: CountOrZero | None = Field(description="What it was planned for; null: no limit.")
    predicted: Prediction = Field(description="What a pass takes and holds.")
    planner: str = Field(description="How it was found, e.g. greedy.")


class Unit(Spec):
    """One link of the chain: a module that is called once per forward pass; never divided."""

    name: str = Field(description="Name of the module in the network.")
    forward_s: NonNegative = Field(description="Forward pass, seconds.")
    backward_s: NonNegative = Field(description="Backward pass, seconds.")
    saved_bytes: CountOrZero = Field(
        description="Bytes that its forward pass keeps for its backward pass: each storage once; without its input and "
        "its output, and without parameters, buffers and casts of them."
    )
    saved_count: CountOrZero = Field(
        0, description="Storages that they lie in: each moves by itself. Earlier records have none: blocks move whole."
    )
    input_bytes: CountOrZero = Field(
        description="Bytes of its input, which the unit before makes; 0 for the first if others hold that anyway."
    )
    input_saved: Flag = Field(
        description="Whether the backward pass in core needs its input: this unit's own, or that of the unit before."
    )
    joins: Flag = Field(
        True, description="Whether it may be in one block with the unit before; not where others use its input as well."
    )
    input_shared: Flag = Field(
        True, description="Where it does not join: whether others hold its input as well, which then never moves."
    )
    gradient_bytes: CountOrZero = Field(
        0, description="Gradients of its parameters that its backward pass leaves; 0 where they outlast a pass."
    )
    forward_working_bytes: CountOrZero = Field(
        0, description="The most that its forward pass holds besides its input, what it saves and its output."
    )
    backward_working_bytes: CountOrZero = Field(
        0,
        description="The most that its backward pass holds besides its input and what it saved: gradients, workspace, "
        "and its output where it saved that.",
    )
    passing_working_bytes: CountOrZero = Field(
        0, description="The most that its forward pass holds besides its input and its output where nothing stays."
    )
    recomputing_working_bytes: CountOrZero = Field(
        0,
        description="The most that its forward pass holds besides its input and what it saves, up to the last that it "
        "saves: there recomputing it ends.",
    )
    piecemeal_bytes: CountOrZero = Field(
        0, description="The most that its backward pass holds where what it saved comes back tensor by tensor."
    )


class Chain(Spec):
    """The chain of a network for one batch, and what is around it."""

    units: tuple[Unit, ...] = Field(min_length=1, description="In the order of the forward pass.")
    batch: Count = Field(description="Samples of a pass.")
    output_bytes: CountOrZero = Field(description="Bytes of the chain's output, held until its backward pass begins.")
    before_s: NonNegative = Field(0.0, description="Forward pass of what comes before the chain, seconds.")
    turn_s: NonNegative = Field(
        0.0, description="From the end of the chain's forward pass to the start of its backward pass (head, loss), s."
    )
    after_s: NonNegative = Field(0.0, description="Backward pass of what comes before the chain, seconds.")
    state_bytes: CountOrZero = Field(
        0, description="Parameters, buffers, optimizer state, and gradients that outlast a pass, on the device."
    )
    exchange_bytes: CountOrZero = Field(
        0,
        description="Buffers of the gradients' exchange on the device: DDP's buckets, Horovod's fusion buffer, or the "
        "messages of dlbench's own exchange.",
    )
    outside_bytes: CountOrZero = Field(0, description="Batch, and what modules before the chain keep, bytes.")
    turn_bytes: CountOrZero = Field(
        0, description="The most that head and loss hold besides the chain's output, in both passes."
    )
    turn_gradient_bytes: CountOrZero = Field(0, description="Of it: gradients of parameters, which stay.")
    after_bytes: CountOrZero = Field(0, description="The most that the backward pass before the chain takes.")
    after_gradient_bytes: CountOrZero = Field(0, description="Of it: gradients of parameters, which stay.")
    update_bytes: CountOrZero = Field(
        0, description="The most that the optimizer's update holds besides parameters, gradients and its state."
    )

    @property
    def fixed_bytes(self) -> int:
        """What is held all the time: a capacity must hold this before anything of a pass."""
        return self.state_bytes + self.exchange_bytes + self.outside_bytes

    @property
    def useful_s(self) -> float:
        """A pass in core, seconds: nothing recomputed, nothing waited for."""
        within = sum(unit.forward_s + unit.backward_s for unit in self.units)
        return self.before_s + within + self.turn_s + self.after_s


class TransferRates(Spec):
    """How fast activations leave the device and come back."""

    tier: str = Field(description="Where they are meanwhile, in words, e.g. page-locked host memory.")
    out_bytes_per_s: Positive = Field(description="From the device, bytes per second.")
    in_bytes_per_s: Positive = Field(description="To the device, bytes per second.")
    latency_s: NonNegative = Field(0.0, description="Fixed time of each transfer, one a storage, seconds.")
    drag: NonNegative = Field(
        0.0, description="Seconds that computing takes longer for each second in which a transfer runs next to it."
    )
