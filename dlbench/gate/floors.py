"""`--at-least`: the throughput that runs must reach, with no other runs to compare them with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.errors import UserError
from dlbench.gate.sides import SidePoint, at_where
from dlbench.reading.metrics import Metric

FLOOR = Metric(
    name="throughput",
    title="Throughput floor",
    unit="samples/s",
    higher_is_worse=False,
    about="samples of all ranks over the longest measured time of any rank; A is the floor that --at-least gives, "
    "and of B / A below 1 is worse",
)

_EXAMPLE = (
    "write it as '2500 images/s' (no ',', 'k' or 'e3' in the number), or for some runs only as "
    "'workload=resnet50,ranks=4: 2500 images/s'"
)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What one `--at-least` asks."""

    text: str
    """As a person typed it."""
    rate: float
    """Samples per second."""
    sample_unit: str
    is_per_rank: bool
    where: Mapping[str, str] = field(default_factory=dict)
    """Properties of the points that it is for; empty: all whose samples have this unit."""


def parse_floor(text: str) -> Floor:
    """Reads ``[KEY=VALUE[,KEY=VALUE]:] NUMBER UNIT/s[/rank]``.

    Raises:
        UserError: it has another form.
    """
    where, _, rate = text.rpartition(":")
    # Digits that are followed at once by one letter alone are 2.5k or 1e3, of which 2.5 or 1 would pass for ever.
    number = r"([0-9]{1,15}(?:\.[0-9]{1,12})?)(?:\s+|(?=[^\W\d_]{2}))"
    match = re.fullmatch(rf"\s*{number}([^\W\d_][^/,]*)/s(/rank)?\s*", rate)
    pairs = [part.partition("=") for part in where.split(",") if part.strip()]
    chosen = {key.strip(): value.strip() for key, _, value in pairs}
    if match is None or not float(match[1]) or not all(chosen.values()) or len(chosen) != len(pairs):
        raise UserError(f"--at-least {text}: is no throughput; {_EXAMPLE}")
    return Floor(
        text=text, rate=float(match[1]), sample_unit=match[2].strip(), is_per_rank=bool(match[3]), where=chosen
    )


def floors_at(points: Sequence[SidePoint], floors: Sequence[Floor], name: str) -> dict[int, float]:
    """The floor of each point that has one, by its `id`, samples per second of all ranks: the highest that is for it.

    Args:
        points: of the side that is checked.
        floors: what was asked for.
        name: what the side is called, for errors.

    Raises:
        UserError: a floor is for no point, or its unit is not that of the samples.
    """
    found: dict[int, float] = {}
    for floor in floors:
        chosen = [points[number] for number in at_where(points, floor.where, name, "--at-least")]
        held = [point for point in chosen if point.sample_unit == floor.sample_unit]
        if not held:
            one = chosen[0]
            raise UserError(
                f"--at-least {floor.text}: {one.content.registered['workload']} counts {one.sample_unit}, not "
                f"{floor.sample_unit}: write NUMBER {one.sample_unit}/s{'/rank' if floor.is_per_rank else ''}"
            )
        for point in held:
            rate = floor.rate * (point.ranks if floor.is_per_rank else 1)
            found[id(point)] = max(rate, found.get(id(point), 0.0))
    return found
