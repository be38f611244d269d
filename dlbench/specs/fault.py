"""A fault planted on purpose, with a known size: to see whether reports find it. Never a default."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from dlbench.specs.base import CountOrZero, NonNegative, Spec


class FaultSpec(Spec):
    """What is made worse, on which ranks. A run with a fault is compared only with runs of the same fault."""

    ranks: tuple[CountOrZero, ...] | None = Field(None, description="Ranks it acts on; none: all of them.")
    compute_factor: Annotated[float, Field(ge=1)] = Field(
        1.0, description="Forward and backward pass take so many times as long: the rank sleeps before its backward."
    )
    input_delay_s: NonNegative = Field(0.0, description="Each batch comes so much later, seconds.")
    step_delay_s: NonNegative = Field(0.0, description="Each step ends so much later, seconds, outside of all phases.")

    def acts_on(self, rank: int) -> bool:
        """Whether this rank is made slower."""
        return self.ranks is None or rank in self.ranks

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.compute_factor == 1.0 and self.input_delay_s == 0.0 and self.step_delay_s == 0.0:
            raise ValueError("says no fault: set compute_factor above 1, input_delay_s or step_delay_s")
        return self
