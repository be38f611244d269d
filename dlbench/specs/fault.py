"""A fault planted on purpose, with a known size: to see whether reports find it. Never a default."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from dlbench.specs.base import NonNegative, RankNumber, Spec


class FaultSpec(Spec):
    """What is made worse, on which ranks. A run with a fault is compared only with runs of the same fault."""

    ranks: tuple[RankNumber, ...] | None = Field(
        None, min_length=1, description="Ranks it acts on, as a list or as text: 1, or 0,3; none: all of them."
    )
    compute_factor: Annotated[float, Field(strict=True, ge=1)] = Field(
        1.0,
        description="Forward and backward pass together take so many times as long: after each forward pass the rank "
        "sleeps (factor - 1) x 3 x the time it took, as a backward pass counts as two forward passes.",
    )
    input_delay_s: NonNegative = Field(0.0, description="Each batch comes so much later, seconds.")
    step_delay_s: NonNegative = Field(0.0, description="Each step ends so much later, seconds, outside of all phases.")

    def acts_on(self, rank: int) -> bool:
        """Whether this rank is made slower."""
        return self.ranks is None or rank in self.ranks

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_from_text(cls, value: object) -> object:
        """`--set` takes one value: a number, or numbers with commas between them."""
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if isinstance(value, str):
            if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
                raise ValueError("must be ranks separated by commas, e.g. 1 or 0,3")
            return tuple(int(part) for part in value.split(","))
        return value

    @field_validator("ranks", mode="after")
    @classmethod
    def _ranks_once(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("a rank is given twice")
        return None if value is None else tuple(sorted(value))

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.compute_factor == 1.0 and self.input_delay_s == 0.0 and self.step_delay_s == 0.0:
            raise ValueError("says no fault: set compute_factor above 1, input_delay_s or step_delay_s")
        return self
