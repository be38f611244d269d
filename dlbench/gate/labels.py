"""What points of a side are called, for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dlbench.gate.content import TITLES, KeyDifference, digest
from dlbench.gate.sides import SidePoint
from dlbench.report.formats.terminal import shorten
from dlbench.report.wording import ENGINE_TITLES, place_text, ranks_text, runs_text

_VALUE_WIDTH = 30


def setting_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """Workload, preset, engine, precision, batch and scaling; keys in `without` are left out."""
    told = {key: value for key, value in point.content.registered.items() if key not in without}
    batch = f"batch {told['batch_per_rank']} per rank" if "batch_per_rank" in told else ""
    batch = batch or (f"batch {told['global_batch']} in all" if "global_batch" in told else "")
    words = (
        told.get("workload", ""),
        f"{told['preset']} preset" if "preset" in told else "",
        ENGINE_TITLES.get(told.get("engine", ""), told.get("engine", "")),
        told.get("precision", ""),
        batch,
        f"{told['scaling']} scaling" if "scaling" in told else "",
    )
    return ", ".join(filter(None, words))


def point_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """The same with the ranks."""
    return ", ".join([setting_label(point, without), place_text(point.ranks, point.nodes)])


def versus(allowed: Sequence[KeyDifference]) -> str:
    """What the sides are, where they differ on purpose, e.g. ``Horovod (B) against PyTorch DDP (A)``."""
    if not allowed:
        return ""
    first = min(allowed, key=lambda one: one.key != "engine")
    a, b = (
        ENGINE_TITLES.get(value, value) if first.key == "engine" else f"{first.title} {shorten(value, _VALUE_WIDTH)}"
        for value in (first.a or "none", first.b or "none")
    )
    return f"{b} (B) against {a} (A)"


def settings_of(points: Sequence[SidePoint]) -> dict[str, list[SidePoint]]:
    """Points by the label of their setting; where labels are equal, keys that differ stand behind them."""
    by_content: dict[str, list[SidePoint]] = {}
    for point in points:
        by_content.setdefault(digest(point.content), []).append(point)
    groups = list(by_content.values())
    labels = [setting_label(group[0]) for group in groups]
    found: dict[str, list[SidePoint]] = {}
    for group, label in zip(groups, labels, strict=True):
        twins = [other[0] for other, same in zip(groups, labels, strict=True) if same == label and other is not group]
        more = _apart(group[0], twins)
        found.setdefault(", ".join([label, *more]), []).extend(group)
    return found


def _apart(point: SidePoint, twins: Sequence[SidePoint]) -> list[str]:
    """Up to two keys on which a point differs from others of the same label, with its values."""
    contents: list[Mapping[str, object]] = [{**one.content.plan, **one.content.registered} for one in (point, *twins)]
    own = contents[0]
    keys = [key for key in own if any(other.get(key) != own[key] for other in contents[1:])]
    keys.sort(key=lambda key: key not in point.content.registered)
    return [f"{TITLES.get(key, key)} {shorten(str(own[key]) or 'none', _VALUE_WIDTH)}" for key in keys[:2]]


def counts_text(points: Sequence[SidePoint], sessions: Mapping[str, str] | None = None) -> str:
    """Runs of the points of one setting, e.g. ``5 runs at 1 and 2 ranks, 4 runs at 4 ranks``.

    Args:
        points: of one setting.
        sessions: of the runs; where they are given, their number is told.
    """
    by_count: dict[str, list[SidePoint]] = {}
    for point in points:
        count = len({sessions[run.run_id] for run in point.runs}) if sessions else 0
        held = f" in {count} session{'s' * (count > 1)}" if sessions else ""
        by_count.setdefault(f"{runs_text(len(point.runs))}{held}", []).append(point)
    return ", ".join(f"{count} at {_places(found)}" for count, found in by_count.items())


def _places(points: Sequence[SidePoint]) -> str:
    if any(point.nodes > 1 for point in points) or len(points) == 1:
        return ", ".join(place_text(point.ranks, point.nodes) for point in points)
    ranks = [point.ranks for point in points]
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks_text(ranks[-1])}"
