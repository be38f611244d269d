"""Runs of `dlbench run --ab A B`: each run of side a with the run of side b that ran beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dlbench.errors import UserError
from dlbench.gate.content import KeyDifference, differences, digest, named, without
from dlbench.gate.sides import Side, SidePoint, chosen, points_of, refuse_no_figures
from dlbench.reading.table import RunTable, tabulate
from dlbench.records.scan import Run, Scan


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
    _refuse_unmatched(a, b, lonely, alone, allowed, any_match=len(lonely) < len(matches))
    return matches, alone


def _refuse_mixed(side: Side, one: SidePoint, other: SidePoint) -> None:
    """What may differ between the sides must not differ within one: its runs would be averaged."""
    raise UserError(
        f"{side.name}: holds runs that differ only in what may differ ({named(differences(one.content, other.content))}"
        "); choose those of this side with --where"
    )


def _refuse_unmatched(
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


@dataclass(frozen=True, kw_only=True)
class PairedPoint:
    """One point of a paired comparison."""

    match: Match
    """Both sides; equal places of their runs are pairs."""
    unpaired: int
    """Runs without their partner, which are in neither side."""


def paired_points(scan: Scan, name: str, where: Mapping[str, str], option: str) -> tuple[list[PairedPoint], Side]:
    """The points of all paired comparisons among some runs, and what was left out of them.

    The sides may differ in what the comparison set on each (`series.sides` of the plan), and in nothing else. Runs are
    pairs where series, time of the plan, swept values and repeat are equal.

    Args:
        scan: the runs.
        name: what to call them.
        where: properties that a run must have; see `dlbench.gate.sides.chosen`.
        option: the option that chose them, for errors.

    Raises:
        UserError: there are no runs with sides, or the sides differ in something else; names the keys.
        IncompleteDataError: no run of a side has figures; names why.
    """
    runs, left_out = chosen(scan, name, where, option)
    sided = [run for run in runs if run.plan.series.side]
    if not sided:
        raise UserError(f"{name}: no run belongs to a paired comparison; `dlbench run --ab A B` makes such runs")
    if len(sided) < len(runs):
        left_out.append(f"{len(runs) - len(sided)} runs that belong to no paired comparison")
    damaged: list[str] = []
    table = tabulate(Scan(root=scan.root, runs=sided, problems=list(scan.problems)))
    left_out += [
        f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without if item.state != "damaged"
    ]
    found: list[PairedPoint] = []
    for text, members in _comparisons(table).items():
        found += _of_comparison(json.loads(text), members, damaged)
    both = Side(name=name, points=(), left_out=tuple(left_out), damaged=(*table.damaged, *damaged))
    if not found:
        refuse_no_figures(name, (), left_out, table.damaged)
    return found, both


def _comparisons(table: RunTable) -> dict[str, RunTable]:
    """Runs by what their sides set: different comparisons are never mixed."""
    by_sides: dict[str, dict[str, Run]] = {}
    for run_id, run in table.runs.items():
        by_sides.setdefault(json.dumps(run.plan.series.sides, sort_keys=True), {})[run_id] = run
    return {
        sides: dataclasses.replace(table, runs=runs, figures=table.figures[table.figures["run_id"].isin(list(runs))])
        for sides, runs in by_sides.items()
    }


def _of_comparison(sides: Mapping[str, Mapping[str, object]], table: RunTable, damaged: list[str]) -> list[PairedPoint]:
    allowed = {"side", *(key for settings in sides.values() for key in settings)}
    by_place: dict[tuple[str, int, int], dict[str, SidePoint]] = {}
    for point in points_of(table, damaged):
        side = str(point.content.plan.get("side", ""))
        key = (digest(without(point.content, allowed)), *point.place)
        seen = by_place.setdefault(key, {})
        if side in seen:
            told = named(differences(seen[side].content, point.content))
            raise UserError(
                f"side {side} at {point.ranks} ranks holds runs of different comparisons ({told}); choose one with "
                "--where series=NAME"
            )
        seen[side] = point
    _refuse_unlike(list(by_place.values()), allowed)
    return [_paired(found) for found in by_place.values()]


def _refuse_unlike(places: list[dict[str, SidePoint]], allowed: set[str]) -> None:
    """Sides of one place that differ in more than was set on them."""
    for found in places:
        for other in places:
            one, two = found.get("a"), other.get("b")
            if one is None or two is None or len(found) + len(other) > 2 or one.place != two.place:
                continue
            if one.content.registered["workload"] == two.content.registered["workload"]:
                text = named(differences(without(one.content, allowed), without(two.content, allowed)))
                raise UserError(f"the sides at {one.ranks} ranks differ in more than was set on them: {text}")


def _paired(found: Mapping[str, SidePoint]) -> PairedPoint:
    given = {side: {run.pair: run for run in point.runs} for side, point in found.items()}
    a, b = given.get("a", {}), given.get("b", {})
    keys = sorted(a.keys() & b.keys())
    present = found.get("a") or found["b"]
    point_a = dataclasses.replace(found.get("a", present), runs=tuple(a[key] for key in keys))
    point_b = dataclasses.replace(found.get("b", present), runs=tuple(b[key] for key in keys))
    contents = [without(point.content, {"side"}) for point in (point_a, point_b)]
    return PairedPoint(
        match=Match(a=point_a, b=point_b, allowed=tuple(differences(*contents))),
        unpaired=len(a) + len(b) - 2 * len(keys),
    )
