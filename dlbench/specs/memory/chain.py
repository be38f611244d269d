"""A network as a chain of modules, with what each takes and keeps in a pass; and how fast activations can be moved.

All of it is measured (`dlbench.node.memory.profile`). A pass is the forward and the backward pass over one part of a
rank's batch (`train.gradient_accumulation` parts a step).
"""

from __future__ import annotations

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Positive, Spec


class Unit(Spec):
    """One link of the chain: a module that is called once per forward pass; never divided."""

    name: str = Field(description="Name of the module in the network.")
    forward_s: NonNegative = Field(description="Forward pass, seconds.")
    backward_s: NonNegative = Field(description="Backward pass, seconds.")
    saved_bytes: CountOrZero = Field(
        description="Bytes that its forward pass keeps for its backward pass: each storage once; without its input and "
        "its output, and without parameters, buffers and casts of them."
    )
    input_bytes: CountOrZero = Field(
        description="Bytes of its input, which the unit before makes; 0 for the first, whose input others hold anyway."
    )
    input_saved: Flag = Field(
        description="Whether the backward pass in core needs its input: this unit's own, or that of the unit before."
    )
    joins: Flag = Field(
        True, description="Whether it may be in one block with the unit before; not where others use its input as well."
    )
    gradient_bytes: CountOrZero = Field(
        0, description="Gradients of its parameters that its backward pass leaves; 0 where they outlast a pass."
    )
    forward_working_bytes: CountOrZero = Field(
        0, description="The most that its forward pass holds beside its input, what it saves and its output."
    )
    backward_working_bytes: CountOrZero = Field(
        0,
        description="The most that its backward pass holds beside its input and what it saved: gradients, workspace, "
        "and its output where it saved that.",
    )
    passing_working_bytes: CountOrZero = Field(
        0, description="The most that its forward pass holds beside its input and its output where nothing stays."
    )
    recomputing_working_bytes: CountOrZero = Field(
        0,
        description="The most that its forward pass holds beside its input and what it saves, up to the last that it "
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
    outside_bytes: CountOrZero = Field(0, description="Batch, and what modules before the chain keep, bytes.")
    turn_bytes: CountOrZero = Field(
        0, description="The most that head and loss hold beside the chain's output, in both passes."
    )
    turn_gradient_bytes: CountOrZero = Field(0, description="Of it: gradients of parameters, which stay.")
    after_bytes: CountOrZero = Field(0, description="The most that the backward pass before the chain takes.")
    after_gradient_bytes: CountOrZero = Field(0, description="Of it: gradients of parameters, which stay.")
    update_bytes: CountOrZero = Field(
        0, description="The most that the optimizer's update holds beside parameters, gradients and its state."
    )

    @property
    def fixed_bytes(self) -> int:
        """What is held all the time: a capacity must hold this before anything of a pass."""
        return self.state_bytes + self.outside_bytes

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
    latency_s: NonNegative = Field(0.0, description="Fixed time of a transfer of one block, seconds.")
    drag: NonNegative = Field(
        0.0, description="Seconds that computing takes longer for each second in which a transfer runs beside it."
    )
