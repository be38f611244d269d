"""Types that all specifications share: frozen, keyword-only models that refuse unknown keys and coerce nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dlbench.units import parse_bytes

MAX_COUNT = 2**53 - 1  # The largest whole number that every reader of JSON takes as written (RFC 8259, section 6).
MAX_RANKS = 1_000_000  # More than the devices of any machine, and each rank writes files into the run's folder.

MAX_RUNS = 10_000
"""Runs of a series. All are planned before the first starts, each has a folder, and every report reads them all."""

# Strict, because YAML's `true` and `"8"` are mistakes where a count is meant. Bounded, because files may be anybody's,
# and readers make lists as long as some of these numbers say.
Count = Annotated[int, Field(strict=True, gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Ranks = Annotated[int, Field(strict=True, gt=0, le=MAX_RANKS)]  # Of ranks, nodes, or cores or devices of a node.
RankNumber = Annotated[int, Field(strict=True, ge=0, lt=MAX_RANKS)]  # Of a rank, a node or a place on it, from 0.
Repeats = Annotated[int, Field(strict=True, gt=0, le=MAX_RUNS)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]

FromText = BeforeValidator(
    lambda value: tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
)
"""Lets a list of words be one text with commas, as `--set` and `--ab` take it; an empty text is none."""
MAX_TAG_VALUE = 200
TagValue = Annotated[str, Field(max_length=MAX_TAG_VALUE)]


class ActsIf:
    """A condition under which fields of a specification have an effect: an attribute of the plan has one of some
    values.
    """

    def __init__(self, fields: str, path: str, *values: object, why: str) -> None:
        """`fields`: names with blanks between; of a section, all below it. `path`: what decides, from the plan on.

        `values`: those under which the fields act; none: anything that is true. `why`: why they do not.
        """
        self.fields = frozenset(fields.split())
        self.why = why
        self._path = path.split(".")
        self._values = values

    def holds(self, plan: object) -> bool:
        value: object = plan
        for name in self._path:
            value = None if value is None else getattr(value, name)
        return value in self._values if self._values else bool(value)


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
        # pydantic makes one line of a ValueError only.
        raise ValueError(f"{value!r} is not a number of bytes such as 67108864, 64MiB or 64MB")  # noqa: TRY004
    return value


Bytes = Annotated[int, BeforeValidator(size_in_bytes), Field(strict=True, gt=0, le=MAX_COUNT)]


@dataclass(frozen=True)
class Form:
    """Describes the texts that a pattern in a type matches; completes the sentence `must be ...`."""

    words: str


# A word of Slurm's that needs no quoting anywhere.
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
            "fp8 is not built: it needs scaled matrix products of another library (Transformer Engine, torchao), whose "
            "recipe would decide the figure; bf16 is the narrowest that is measured"
        )
    return value


Precision = Annotated[Literal["fp32", "tf32", "bf16", "fp16"], BeforeValidator(_known_precision)]
