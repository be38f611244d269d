"""What the profile of a network's activations answers: its chain, and how fast they can be moved."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Spec
from dlbench.specs.memory import Chain, TransferRates


class MemoryProfile(Spec):
    """The answer. Newer programs may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["dlbench.memory-profile"]
    device: str = Field(description="On which it was measured, e.g. cpu, 2 threads.")
    chain: Chain = Field(description="The chain for the batch asked for.")
    rates: TransferRates = Field(description="Transfers between the device and where activations are swapped to.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt.")
