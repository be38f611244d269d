"""What a source of samples looks like to the one that samples it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["<f4", "<f8"]
FLOAT: Kind = "<f4"
"""For gauges: keeps seven digits."""
DOUBLE: Kind = "<f8"
"""For counters, bytes and bit masks: keeps whole numbers up to 2^53."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One thing that can be read again and again."""

    name: str
    """Its name, which says the unit: `gpu.0.power_w`; letters, digits and `_.:-` alone."""
    kind: Kind = FLOAT
    """How a value is kept: 4- or 8-byte float."""
    is_slow: bool = False
    """Whether it belongs to the slow tier: dear to read, or changing seldom."""


class Source(Protocol):
    """Reads the fields of one machine. Read-only: nothing is set, reset or written.

    A field is probed once, when the source is opened. What answers is in `fields`; what does not is in `unavailable`
    with the reason, and is never read as zero.
    """

    @property
    def fields(self) -> tuple[Field, ...]:
        """What can be read, in the order of `read`; it stays as it was at opening."""

    @property
    def unavailable(self) -> dict[str, str]:
        """What was asked for and does not answer: name of the field, or of a whole group (`gpu`), and the reason."""

    def read(self, *, slow: bool) -> list[float]:
        """One value for each field, in their order; NaN where it was not read this time, or failed.

        Args:
            slow: read the slow tier too; without it slow fields are NaN.
        """

    @property
    def keep_up_s(self) -> float:
        """How often `read` or `keep_up` must be called, seconds, for counters that start again at zero; or infinity."""

    def keep_up(self) -> None:
        """Reads what else would miss such a start, and keeps it to itself; nothing else is read."""

    def drain_failures(self) -> list[tuple[str, str]]:
        """Field and reason of what failed since the last call. Each field fails once: it is NaN from then on."""

    def describe(self) -> dict[str, str]:
        """What does not change while sampling: devices, limits, and what a field of this machine means."""

    def close(self) -> None:
        """Gives libraries and files back; nothing can be read afterwards."""


def field_part(text: str, limit: int = 64) -> str:
    """A name from outside as one part of a field's name: all but letters, digits and `_.:-` becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", text[:limit]) or "_"


def field_parts(names: list[str]) -> dict[str, str]:
    """Each name's part of a field's name; names that would become equal get a number."""
    parts: dict[str, str] = {}
    for name in names:
        part = plain = field_part(name)
        number = 2
        while part in parts.values():
            part, number = f"{plain}_{number}", number + 1
        parts[name] = part
    return parts


def fact(text: object, limit: int = 200) -> str:
    """A text from outside as a fact: one line, nothing unprintable, bounded."""
    return "".join(letter if letter.isprintable() else "_" for letter in str(text)[:limit])
