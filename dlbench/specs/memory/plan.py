"""A plan for activations: the chain in blocks, what is done with each, and what a pass will take and hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import CountOrZero, Fraction, NonNegative, Spec

Decision = Literal["keep", "swap", "recompute", "recompute-swap"]
"""keep: activations stay. swap: they leave the device after the forward pass and are back for the backward pass.
recompute: only the block's input stays, the forward pass is repeated before the backward pass. recompute-swap: the
same, and the input is swapped."""


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
