"""Activations of a run: planned, in memory, transferred and recomputed. Part of `record.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Count, CountOrZero, Fraction, NonNegative, RankNumber, Spec
from dlbench.specs.out_of_core import BlockPlan, Chain, Recompute, Swap, TransferRates
from dlbench.specs.plan import RunPlan

LayerPhase = Literal["forward", "backward", "split", "join"]


class RankMemory(Spec):
    """Memory, transfers and waits of a rank in its measured steps."""

    rank: RankNumber = Field(description="The rank, from 0.")
    steps: CountOrZero = Field(description="Number of measured steps.")
    activation_peak_bytes: CountOrZero | None = Field(
        description="Peak of the chain's activations, counted by dlbench; null: not counted."
    )
    over_budget_bytes: CountOrZero = Field(description="Largest excess over the plan.")
    device_peak_bytes: CountOrZero | None = Field(
        description="Peak of a step, with parameters and optimizer state: allocated by torch in measured steps (GPU); "
        "live tensors by torch's profiler in the first step (CPU)."
    )
    device_reserved_bytes: CountOrZero | None = Field(
        None, description="Peak of memory reserved by torch's allocator, with free blocks; null on a CPU."
    )
    swapped_out_bytes: CountOrZero = Field(description="Bytes swapped out, all measured steps.")
    swapped_in_bytes: CountOrZero = Field(description="Bytes swapped in, all measured steps.")
    room_wait_s: NonNegative = Field(
        description="Waits of forward passes for free memory, all measured steps, seconds."
    )
    swap_wait_s: NonNegative = Field(description="Waits of backward passes for swapped tensors, seconds.")
    recompute_s: NonNegative = Field(description="Recomputation, seconds.")


class HostUpdate(Spec):
    """The update of parameters by the host (`train.optimizer_state host`), all measured steps of rank 0."""

    update_s: NonNegative = Field(description="Updates on the host, seconds.")
    wait_s: NonNegative = Field(description="Waits of forward passes for updated parameters, seconds.")
    copied_bytes: CountOrZero = Field(description="Bytes of gradients and parameters copied.")
    state_bytes: CountOrZero = Field(description="Bytes of optimizer state and copies of parameters on the host.")


class TransferSpan(Spec):
    """A measured operation of a pass, for the chart of a step."""

    lane: str = Field(description="Lane: compute, out or in.")
    kind: str = Field(description="Kind: forward, recompute, backward, swap out, swap in or wait.")
    block: CountOrZero = Field(description="Number of the block, from 0.")
    start_s: NonNegative = Field(description="Start after the start of the pass, seconds.")
    end_s: NonNegative = Field(description="End after the start of the pass, seconds.")


class MemoryResult(Spec):
    """The treatment of activations in a run."""

    recompute: Recompute = Field(description="train.recompute.")
    swap: Swap = Field(description="train.swap.")
    tier: str | None = Field(description="Memory of swapped tensors, in words; null: no swapping.")
    parts: Count = Field(description="Passes of a step (train.gradient_accumulation).")
    chain: Chain = Field(description="Chain measured before training, of the slowest rank by unit.")
    rates: TransferRates | None = Field(description="Transfer rates measured before training; null: not used.")
    plan: BlockPlan = Field(description="Decision for each block, and the prediction.")
    in_core_bytes: CountOrZero = Field(description="Bytes per rank without swapping and recomputation.")
    profile_s: NonNegative = Field(description="Time to measure the chain, seconds.")
    checksum_share: Fraction | None = Field(None, description="Share of the swapped bytes that was verified.")
    ranks: tuple[RankMemory, ...] = Field(min_length=1, description="Memory by rank.")
    timeline: tuple[TransferSpan, ...] = Field((), description="Operations of a watched pass of rank 0.")


class MemoryProfile(Spec):
    """The answer of a profiling program; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["dlbench.memory-profile"]
    device: str = Field(description="Device, e.g. cpu, 2 threads.")
    chain: Chain = Field(description="Chain for the requested batch.")
    rates: TransferRates = Field(description="Transfer rates between device and swap memory.")
    warnings: tuple[str, ...] = Field((), description="Warnings.")


class LayerOrder(Spec):
    """A request to time a layer whole and in parts."""

    format: Literal["dlbench.layer-order"] = Field("dlbench.layer-order", description="Type of this request.")
    plan: RunPlan = Field(description="Plan of a run of one rank.")
    layer: str = Field(description="Name of a convolution or dense layer.")
    counts: tuple[Count, ...] = Field(description="Numbers of parts.")
    repeats: Count = Field(description="Samples of each time.")


class PartTimes(Spec):
    """The times of the share of a layer that one of `count` ranks computes."""

    cut: Literal["whole", "filters", "channels", "extent"] = Field(description="What is divided; whole: nothing.")
    count: Count = Field(description="Number of parts.")
    seconds: dict[LayerPhase, tuple[NonNegative, ...]] = Field(
        description="By repeat; split: copying a part out of a tensor, join: concatenating the tensors of all parts."
    )


class LayerPartTimes(Spec):
    """The times of a layer and its parts, the whole layer first; each repeat timed all parts."""

    device: str = Field(description="Device, e.g. cpu, 2 threads.")
    parts: tuple[PartTimes, ...] = Field(min_length=1, description="The layer, and its parts for each count.")
    warnings: tuple[str, ...] = Field((), description="Warnings.")
