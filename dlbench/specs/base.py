"""Types that all specifications share: frozen, keyword-only models that refuse unknown keys and coerce nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dlbench.units import parse_bytes

MAX_COUNT = 2**53 - 1  # The largest integer that every JSON parser reads exactly (RFC 8259, section 6).
MAX_RANKS = 1_000_000  # More than the devices of any machine; each rank writes files into the run's folder.

MAX_RUNS = 10_000
"""Maximum runs of a series. All are planned before the first starts, and every report reads all of them."""

# Strict, because YAML's `true` and `"8"` are not counts. Limited, because files may come from others, and readers
# allocate lists of these lengths.
Count = Annotated[int, Field(strict=True, gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Ranks = Annotated[int, Field(strict=True, gt=0, le=MAX_RANKS)]  # A number of ranks, nodes, cores or devices.
RankNumber = Annotated[
    int, Field(strict=True, ge=0, lt=MAX_RANKS)
]  # The number of a rank or node, or of a rank on a node, from 0.
Repeats = Annotated[int, Field(strict=True, gt=0, le=MAX_RUNS)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]

FromText = BeforeValidator(
    lambda value: tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
)
"""Splits a text at commas into a list of words, for `--set` and `--ab`; an empty text is an empty list."""
MAX_TAG_VALUE = 200
TagValue = Annotated[str, Field(max_length=MAX_TAG_VALUE)]


class ActsIf:
    """A condition for fields to have an effect: an attribute of the plan has one of some values."""

    def __init__(self, fields: str, path: str, *values: object, why: str) -> None:
        """`fields`: names separated by blanks; a section stands for all its keys. `path`: attribute path in the plan.

        `values`: values for which the fields have an effect; none: any true value. `why`: reason if they have none.
        """
        self.fields = frozenset(fields.split())
        self.why = why
        self._path = path.split(".")
        self._values = values

    def holds(self, plan: object) -> bool:
        value: object = plan
        for name in self._path:
            if value is not None:
                value = getattr(value, name)
        if not self._values:
            return bool(value)
        return value in self._values


class Spec(BaseModel):
    """A validated, immutable part of a plan. Validation only checks; it never fills in from the machine."""

    acting: ClassVar[tuple[ActsIf, ...]] = ()
    """The conditions under which its fields act; a field with several acts under all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)


def size_in_bytes(value: object) -> object:
    """Returns a text such as ``64MiB`` as a number of bytes, and a number unchanged. Raises `ValueError`: neither."""
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, bool | float):
        # pydantic only reports a ValueError in one line.
        raise ValueError(f"{value!r} is not a number of bytes such as 67108864, 64MiB or 64MB")  # noqa: TRY004
    return value


Bytes = Annotated[int, BeforeValidator(size_in_bytes), Field(strict=True, gt=0, le=MAX_COUNT)]


@dataclass(frozen=True)
class Form:
    """Describes the texts that a pattern in a type matches; completes the sentence `must be ...`."""

    words: str


# A word that needs no quoting in Slurm's options.
SlurmWord = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:,/@=+\[\]-]{0,199}$"), Form("one word without quotes or $, e.g. ib0")
]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
    Form("a name of up to 64 letters, digits and . _ -, the first a letter or digit"),
]
RunName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"), Form("a name of letters, digits and . _ -")
]
Tag = Annotated[
    str, Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$"), Form("letters, digits and . _ -, the first a letter")
]


def _known_precision(value: object) -> object:
    if value == "fp8":
        raise ValueError(
            "fp8 is not supported: it needs scaled matrix products of another library (Transformer Engine, torchao), "
            "whose recipe would decide the result; bf16 is the narrowest supported precision"
        )
    return value


Precision = Annotated[Literal["fp32", "tf32", "bf16", "fp16"], BeforeValidator(_known_precision)]
