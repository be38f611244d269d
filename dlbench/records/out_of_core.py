"""What a run says of its activations: planned, held, moved and recomputed. Part of `record.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Count, CountOrZero, Fraction, NonNegative, RankNumber, Spec
from dlbench.specs.out_of_core import BlockPlan, Chain, Recompute, Swap, TransferRates


class RankMemory(Spec):
    """What one rank held, moved and waited for in its measured steps."""

    rank: RankNumber = Field(description="The rank, from 0.")
    steps: CountOrZero = Field(description="Measured steps that it counted.")
    activation_peak_bytes: CountOrZero | None = Field(
        description="The most that activations of the chain took, by our own count; null where nothing was counted."
    )
    over_budget_bytes: CountOrZero = Field(description="By how much that was more than the plan allowed, at most.")
    device_peak_bytes: CountOrZero | None = Field(
        description="Peak of a step: of the measured ones what torch allocated (GPU); of the run's first step alone "
        "(warm-up) live tensors by torch's profiler, with parameters and optimizer state (CPU: freed memory stays with "
        "the process, whose resident peak is `peak_resident_bytes`). Earlier records of a CPU: what became resident."
    )
    device_reserved_bytes: CountOrZero | None = Field(
        None,
        description="What torch's allocator took from the GPU at most, what lies free between tensors included, since "
        "peaks began; null on a CPU.",
    )
    swapped_out_bytes: CountOrZero = Field(description="Bytes that left the device, all measured steps.")
    swapped_in_bytes: CountOrZero = Field(description="Bytes that came back.")
    room_wait_s: NonNegative = Field(description="Forward passes waited for room, all measured steps, seconds.")
    swap_wait_s: NonNegative = Field(description="Backward passes waited for tensors to come back, seconds.")
    recompute_s: NonNegative = Field(description="Recomputing, seconds.")


class HostUpdate(Spec):
    """The update of parameters by the host (`train.optimizer_state host`)."""

    update_s: NonNegative = Field(description="Computing of the updates on the host, all measured steps, rank 0, s.")
    wait_s: NonNegative = Field(description="Forward passes waited for updated parameters, seconds.")
    copied_bytes: CountOrZero = Field(description="Gradients and parameters copied between device and host.")
    state_bytes: CountOrZero = Field(description="Optimizer state, and parameters' copies, held by the host.")


class TransferSpan(Spec):
    """One operation of a pass, as it was measured: for the picture of a step."""

    lane: str = Field(description="compute, out or in.")
    kind: str = Field(description="forward, recompute, backward, swap out, swap in or wait.")
    block: CountOrZero = Field(description="Number of the block, from 0.")
    start_s: NonNegative = Field(description="From the start of the pass, seconds.")
    end_s: NonNegative = Field(description="From the start of the pass, seconds.")


class MemoryResult(Spec):
    """How activations were treated in this run."""

    recompute: Recompute = Field(description="train.recompute.")
    swap: Swap = Field(description="train.swap.")
    tier: str | None = Field(description="Where swapped tensors were, in words; null: nothing was swapped.")
    parts: Count = Field(description="Passes of a step (train.gradient_accumulation).")
    chain: Chain = Field(description="The chain, as measured before training; of the slowest rank, unit by unit.")
    rates: TransferRates | None = Field(description="Transfers, as measured before training; null: none is used.")
    plan: BlockPlan = Field(description="What was done with every block, and what was predicted.")
    in_core_bytes: CountOrZero = Field(description="Bytes per rank in core, by the chain.")
    profile_s: NonNegative = Field(description="What measuring the chain took before training, seconds.")
    checksum_share: Fraction | None = Field(None, description="Share of the swapped bytes that was verified.")
    ranks: tuple[RankMemory, ...] = Field(min_length=1, description="Rank by rank.")
    timeline: tuple[TransferSpan, ...] = Field((), description="A watched pass of rank 0, operation by operation.")


class MemoryProfile(Spec):
    """The answer. Newer programs may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["dlbench.memory-profile"]
    device: str = Field(description="On which it was measured, e.g. cpu, 2 threads.")
    chain: Chain = Field(description="The chain for the batch asked for.")
    rates: TransferRates = Field(description="Transfers between the device and where activations are swapped to.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt.")
