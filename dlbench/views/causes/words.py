"""What causes are called, and what must be known to read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlbench.report.wording import number_text, percent, place_text, ranks_text, runs_text
from dlbench.views.causes.diagnosis import bound_text
from dlbench.views.causes.numbers import CausePoint, GroupCauses

CAUSE_TITLES = {
    "exchange": "exposed exchange",
    "straggler": "waiting for late ranks",
    "input": "input and copy to the device",
    "host": "host between phases",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "compute": "compute",
    "rest": "rest: imbalance of ends",
}
"""What the causes are called in tables, in order."""

NOT_MEASURED = "not measured"
"""Instead of a figure where no run tells of a cause: that is not no time at all."""


def place(point: CausePoint) -> str:
    """Where a point is."""
    return place_text(point.ranks, point.nodes)


def cause_words(found: GroupCauses) -> tuple[str, ...]:
    """The diagnosis of each rank count, the largest first, and what must be known to read it."""
    told = [f"A fault was planted on purpose: {found.fault}."] if found.fault else []
    for point in reversed(found.points):
        told.append(f"{place(point)}: {point.verdict.line}.")
        if (
            point.verdict.bound is not None
            and not point.is_baseline
            and bound_text(point.verdict.bound) not in told[-1]
        ):
            told.append(f"A limit at {place(point)}, no forecast: {bound_text(point.verdict.bound)}.")
    return (*told, *remarks(found))


def remarks(group: GroupCauses) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, planted faults, watching, limits."""
    for index, cause in enumerate(group.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        silent = [point for point in group.points if not point.causes[index].is_measured]
        if silent:
            where = "" if len(silent) == len(group.points) else f" at {', '.join(map(place, silent))}"
            reasons = _first(reason for point in silent for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in group.points for note in point.causes[index].notes]
        if notes:
            yield f"{title}: {_first(notes)}."
    for point in group.points:
        if point.planted:
            added = ", ".join(f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:8])
            more = f" and {len(point.planted) - 8} more ranks" if len(point.planted) > 8 else ""
            yield f"Planted at {place(point)}: {added}{more} a step."
    if (cost := group.watch_cost) is not None:
        share = f"{percent(cost.value, 2)} [{percent(cost.low, 2)}, {percent(cost.high, 2)}]"
        where = f" at {ranks_text(cost.ranks)}" if cost.ranks is not None else f", {runs_text(cost.num_runs)}"
        yield f"Watching ({group.watching}) cost {share} of a step ({cost.method}{where})."
    else:
        yield f"Watching: {group.watching}."
    yield from group.limits


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    found = list(dict.fromkeys(texts))
    return found[0] + (f" (other runs tell {len(found) - 1} more)" if len(found) > 1 else "")
