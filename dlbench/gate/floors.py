"""A throughput that runs must reach (`--at-least`), with no other runs to compare them with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.errors import UserError
from dlbench.gate.sides import SidePoint, at_where

_EXAMPLE = (
    "write it as '2500 images/s' (no ',', 'k' or 'e3' in the number), or for some runs only as "
    "'workload=resnet50,ranks=4: 2500 images/s'"
)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What one `--at-least` asks."""

    text: str
    rate: float  # Samples per second.
    sample_unit: str
    is_per_rank: bool
    where: Mapping[str, str] = field(default_factory=dict)
    """Properties of the points that it is for; empty: all whose samples have this unit."""


def parse_floor(text: str) -> Floor:
    """Reads ``[KEY=VALUE[,KEY=VALUE]:] NUMBER UNIT/s[/rank]``."""
    where, _, rate = text.rpartition(":")
    # Digits that are followed at once by one letter alone are 2.5k or 1e3, of which 2.5 or 1 would pass for ever.
    number = r"([0-9]{1,15}(?:\.[0-9]{1,12})?)(?:\s+|(?=[^\W\d_]{2}))"
    match = re.fullmatch(rf"\s*{number}([^\W\d_][^/,]*)/s(/rank)?\s*", rate)
    pairs = [part.partition("=") for part in where.split(",") if part.strip()]
    named_by = {key.strip(): value.strip() for key, _, value in pairs}
    if match is None or not float(match[1]) or not all(named_by.values()) or len(named_by) != len(pairs):
        raise UserError(f"--at-least {text}: is no throughput; {_EXAMPLE}")
    return Floor(
        text=text, rate=float(match[1]), sample_unit=match[2].strip(), is_per_rank=bool(match[3]), where=named_by
    )


def floors_at(points: Sequence[SidePoint], floors: Sequence[Floor], name: str) -> dict[int, float]:
    """Returns the floor of each point that has one, by its `id`: the highest that is for it, samples/s of all ranks."""
    found: dict[int, float] = {}
    for floor in floors:
        meant = at_where(points, floor.where, name, "--at-least")
        held = [point for point in meant if point.sample_unit == floor.sample_unit]
        if not held:
            unit = meant[0].sample_unit
            raise UserError(
                f"--at-least {floor.text}: {meant[0].workload} counts {unit}, not {floor.sample_unit}: write NUMBER "
                f"{unit}/s{'/rank' if floor.is_per_rank else ''}"
            )
        for point in held:
            rate = floor.rate * (point.ranks if floor.is_per_rank else 1)
            found[id(point)] = max(rate, found.get(id(point), 0.0))
    return found
