"""What all specifications share: frozen, keyword-only, unknown keys refused, no silent coercion."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Spec(BaseModel):
    """A validated, immutable part of a plan. Validation only checks; it never fills in from the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


# Strict, because YAML's `true` and `"8"` are mistakes where a count is meant.
Count = Annotated[int, Field(strict=True, gt=0)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]

# What may stand in a `#SBATCH` line unquoted; Slurm reads nothing else there safely.
SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:,/@=+\[\]-]{0,199}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$")]
MAX_TAG_VALUE = 200
TagValue = Annotated[str, Field(max_length=MAX_TAG_VALUE)]

Precision = Literal["fp32", "bf16", "fp16"]
