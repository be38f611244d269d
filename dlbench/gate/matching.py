"""Points of two sides that are the same but for what may differ; the others are refused or named."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dlbench.errors import UserError
from dlbench.gate.content import KeyDifference, differences, digest, named, without
from dlbench.gate.sides import Side, SidePoint


@dataclass(frozen=True, kw_only=True)
class Match:
    """A point of A with the same point of B."""

    a: SidePoint
    b: SidePoint | None
    """None: B has no runs there."""
    allowed: tuple[KeyDifference, ...]
    """What differs though, because it may."""


def match(a: Side, b: Side, allowed: Collection[str]) -> tuple[list[Match], list[SidePoint]]:
    """Every point of A with that of B, and points that only B has.

    Raises:
        UserError: runs of equal size on both sides differ in what must not, or no point is on both sides; names the
            keys and both values.
    """
    theirs: dict[tuple[str, int, int], SidePoint] = {}
    for side, points in ((a, a.points), (b, b.points)):
        seen: dict[tuple[str, int, int], SidePoint] = {}
        for point in points:
            key = (digest(without(point.content, allowed)), *point.place)
            if key in seen:
                _refuse_mixed(side, seen[key], point)
            seen[key] = point
        theirs = seen
    matches: list[Match] = []
    for point in a.points:
        other = theirs.pop((digest(without(point.content, allowed)), *point.place), None)
        found = () if other is None else tuple(differences(point.content, other.content))
        matches.append(Match(a=point, b=other, allowed=found))
    alone = list(theirs.values())
    lonely = [one.a for one in matches if one.b is None]
    _refuse_unlike(a, b, lonely, alone, allowed, any_match=len(lonely) < len(matches))
    return matches, alone


def _refuse_mixed(side: Side, one: SidePoint, other: SidePoint) -> None:
    """What may differ between the sides must not differ within one: its runs would be averaged."""
    raise UserError(
        f"{side.name}: holds runs that differ only in what may differ ({named(differences(one.content, other.content))}"
        "); choose those of this side with --where"
    )


def _refuse_unlike(
    a: Side, b: Side, lonely: list[SidePoint], alone: list[SidePoint], allowed: Collection[str], *, any_match: bool
) -> None:
    """Runs that were meant to be compared and must not be."""
    pairs = list(_unlike(lonely, alone, allowed, any_match=any_match))
    if not pairs:
        return
    found, point = min(pairs, key=lambda pair: len(pair[0]))
    keys = ",".join(one.key for one in found[:3] if one.key not in ("workload", "ranks", "nodes"))
    hint = f"; if that is meant: --allow {keys}" if keys and len(found) <= 3 else ""
    where = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    raise UserError(f"{a.name} and {b.name} are not comparable at {where}: {named(found)}{hint}")


def _unlike(
    lonely: list[SidePoint], alone: list[SidePoint], allowed: Collection[str], *, any_match: bool
) -> Iterator[tuple[list[KeyDifference], SidePoint]]:
    for one in lonely:
        for other in alone:
            same_work = one.content.registered["workload"] == other.content.registered["workload"]
            if any_match and not (one.place == other.place and same_work):
                continue
            yield (
                [*_places(one, other), *differences(without(one.content, allowed), without(other.content, allowed))],
                one,
            )


def _places(one: SidePoint, other: SidePoint) -> Iterator[KeyDifference]:
    for key, title, here, there in (
        ("ranks", "Ranks", one.ranks, other.ranks),
        ("nodes", "Nodes", one.nodes, other.nodes),
    ):
        if here != there:
            yield KeyDifference(key=key, title=title, a=str(here), b=str(there))
