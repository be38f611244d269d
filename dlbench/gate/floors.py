"""A throughput that runs must reach (`--at-least`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dlbench.errors import UserError
from dlbench.gate.sides import SidePoint, at_where

_EXAMPLE = (
    "write it as '2500 images/s' (no ',', 'k' or 'e3' in the number), or for some runs only as "
    "'workload=resnet50,ranks=4: 2500 images/s'"
)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The minimum throughput of one `--at-least`."""

    text: str
    rate: float  # Samples per second.
    sample_unit: str
    is_per_rank: bool
    where: Mapping[str, str] = field(default_factory=dict)  # Registered properties of its points; empty: all.

    @property
    def unit(self) -> str:
        return f"{self.sample_unit}/s/rank" if self.is_per_rank else f"{self.sample_unit}/s"

    def total_rate(self, ranks: int) -> float:
        return self.rate * ranks if self.is_per_rank else self.rate


def parse_floor(text: str) -> Floor:
    """Reads ``[KEY=VALUE[,KEY=VALUE]:] NUMBER UNIT/s[/rank]``."""
    where, _, rate = text.rpartition(":")
    # Digits directly followed by a single letter are 2.5k or 1e3; read as 2.5 or 1 they would always pass.
    number = r"([0-9]{1,15}(?:\.[0-9]{1,12})?)(?:\s+|(?=[^\W\d_]{2}))"
    match = re.fullmatch(rf"\s*{number}([^\W\d_][^/,]*)/s(/rank)?\s*", rate)
    pairs = [part.partition("=") for part in where.split(",") if part.strip()]
    properties = {key.strip(): value.strip() for key, _, value in pairs}
    if match is None or not float(match[1]) or not all(properties.values()) or len(properties) != len(pairs):
        raise UserError(f"--at-least {text}: is not a throughput; {_EXAMPLE}")
    return Floor(
        text=text, rate=float(match[1]), sample_unit=match[2].strip(), is_per_rank=bool(match[3]), where=properties
    )


def floors_at(points: Sequence[SidePoint], floors: Sequence[Floor], name: str) -> dict[int, float]:
    """Returns the floor of each point that has one, the highest, by the point's `id`, in samples/s of all ranks."""
    rates: dict[int, float] = {}
    for floor in floors:
        selected = at_where(points, floor.where, name, "--at-least")
        points_of_unit = [point for point in selected if point.sample_unit == floor.sample_unit]
        if not points_of_unit:
            measured = replace(floor, sample_unit=selected[0].sample_unit)
            raise UserError(
                f"--at-least {floor.text}: {selected[0].workload} counts {measured.sample_unit}, not "
                f"{floor.sample_unit}: write NUMBER {measured.unit}"
            )
        for point in points_of_unit:
            rates[id(point)] = max(floor.total_rate(point.ranks), rates.get(id(point), 0.0))
    return rates
