"""The lost percent in words: titles of causes, the diagnosis of each rank count, and what must be known to read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlbench.report.wording import number_text, percent, place_text, ranks_text, runs_text
from dlbench.views.causes.diagnosis import bound_text
from dlbench.views.causes.numbers import CausePoint, Diagnosed

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

INPUT_TITLES = {
    "fetch": "of it: fetching samples (storage)",
    "prepare": "of it: preparing samples (decode, augment)",
    "copy": "of it: copy to the device",
}
"""What the parts of input are called."""

NOT_MEASURED = "not measured"
"""Instead of a figure where some run says nothing of a cause: that is not no time at all."""

MAX_PLANTED = 8
"""Ranks with a planted fault that are named."""


def place(point: CausePoint) -> str:
    """Where a point is."""
    return place_text(point.ranks, point.nodes)


def findings(found: Diagnosed) -> Iterator[str]:
    """The diagnosis of each rank count, the largest first."""
    if found.fault:
        yield f"A fault was planted on purpose: {found.fault}."
    for point in reversed(found.points):
        verdict = point.verdict
        yield f"{place(point)}: {verdict.line}."
        if verdict.bound is not None and not point.is_baseline and bound_text(verdict.bound) not in verdict.line:
            yield f"A limit at {place(point)}, no forecast: {bound_text(verdict.bound)}."


def remarks(found: Diagnosed) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, planted faults, watching, limits."""
    for index, cause in enumerate(found.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        unknown = [point for point in found.points if not point.causes[index].is_measured]
        if unknown:
            where = "" if len(unknown) == len(found.points) else f" at {', '.join(map(place, unknown))}"
            reasons = _first(reason for point in unknown for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in found.points for note in point.causes[index].notes]
        if notes:
            yield f"{title}: {_first(notes)}."
    for point in found.points:
        if point.planted:
            ranks = ", ".join(
                f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:MAX_PLANTED]
            )
            left = len(point.planted) - MAX_PLANTED
            yield f"Planted at {place(point)}, per step: {ranks}{f' and {left} more ranks' if left > 0 else ''}."
    yield _watching(found)
    yield from found.limits


def _watching(found: Diagnosed) -> str:
    cost = found.watch_cost
    if cost is None:
        return f"Watching: {found.watching}."
    share = f"{percent(cost.value, 2)} [{percent(cost.low, 2)}, {percent(cost.high, 2)}]"
    where = f" at {ranks_text(cost.ranks)}" if cost.ranks is not None else f", {runs_text(cost.num_runs)}"
    return f"Watching ({found.watching}) cost {share} of a step ({cost.method}{where})."


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    first, *others = dict.fromkeys(texts)
    return first + (f" (and {len(others)} more reasons in other runs)" if others else "")
