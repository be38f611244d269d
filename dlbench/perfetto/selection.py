"""What of a run a trace shows: some ranks, some steps, the cores one by one or their mean."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlbench.errors import UserError

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was asked for."""

    ranks: tuple[int, ...]
    """In order, each once."""
    steps: tuple[int, int] | None = None
    """First and last step; None: all."""
    cores: bool = False
    """Whether every core has a counter of its own."""


def parse_ranks(text: str | None, num_ranks: int) -> tuple[int, ...]:
    """Ranks from a text such as `0,1,8-15`; all of them without a text.

    Raises:
        UserError: it is no list of ranks, or names a rank that the run does not have.
    """
    if text is None:
        return tuple(range(num_ranks))
    chosen: set[int] = set()
    for part in text.split(","):
        first, last = _range("--ranks", text, part)
        if last >= num_ranks:
            raise UserError(f"--ranks {text}: the run has no rank {last}, only 0 to {num_ranks - 1}")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """First and last step from a text such as `100-120` or `7`; None without a text.

    Raises:
        UserError: it is no range.
    """
    return None if text is None else _range("--steps", text, text)


def _range(option: str, text: str, part: str) -> tuple[int, int]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        example = "0,1,8-15" if option == "--ranks" else "100-120"
        raise UserError(f"{option} {text}: {part.strip()!r} is neither a number nor a range; right: {example}")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise UserError(f"{option} {text}: {part.strip()} runs backwards; right: {last}-{first}")
    return first, last
