"""The lost percent in words: the diagnosis of each rank count, and what must be known to read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlbench.report.wording import figure_text, number_text, place_text, ranks_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.numbers import CausePoint, Diagnosed
from dlbench.views.causes.titles import CAUSE_TITLES, NOT_MEASURED

MAX_PLANTED = 8
"""Ranks with a planted fault that are named."""


def place(point: CausePoint) -> str:
    """Where a point is."""
    return place_text(point.ranks, point.nodes)


def findings(found: Diagnosed, *, is_loaded: bool) -> Iterator[str]:
    """The diagnosis of each rank count, the largest first; no advice to repeat beside foreign load (`is_loaded`)."""
    if found.fault:
        yield f"A fault was planted on purpose: {found.fault}."
    for point in reversed(found.points):
        is_idle_talk = is_loaded and point.verdict.finding in ("too few runs", "within noise")
        advice = f". Next: {point.verdict.next}" if point.verdict.next and not is_idle_talk else ""
        yield f"{place(point)}: {point.verdict.line}{advice}."


def remarks(found: Diagnosed) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, planted faults, monitoring, limits."""
    for index, cause in enumerate(found.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        unknown = [point for point in found.points if not point.causes[index].is_measured]
        if unknown:
            where = "" if len(unknown) == len(found.points) else f" at {', '.join(map(place, unknown))}"
            reasons = _first(reason for point in unknown for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in found.points for note in point.causes[index].notes]
        # That nothing recomputes, or that the host was ahead, stands among the parts without time.
        is_told = cause.name not in ("launch", "memory")
        if notes and (is_told or any(point.causes[index].seconds.value for point in found.points)):
            yield f"{title}: {_first(notes)}."
    for point in found.points:
        if point.planted:
            ranks = ", ".join(
                f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:MAX_PLANTED]
            )
            left = len(point.planted) - MAX_PLANTED
            yield f"Planted at {place(point)}, per step: {ranks}{f' and {left} more ranks' if left > 0 else ''}."
    last = found.points[-1]
    if last.pop is not None and last.ranks > 1:
        pop = last.pop
        yield (
            f"POP metrics at {place(last)}: parallel efficiency {figure_text(pop.parallel)} = load balance "
            f"{figure_text(pop.load_balance)} x communication efficiency {figure_text(pop.communication)}."
        )
    yield _monitoring(found)
    yield from found.limits


def _monitoring(found: Diagnosed) -> str:
    cost = found.watch_cost
    if cost is None:
        return f"Monitoring: {found.watching}."
    share = figure_text(Estimate(cost.value, cost.low, cost.high, cost.num_runs, "Student t", "fraction"))
    where = f" at {ranks_text(cost.ranks)}" if cost.ranks is not None else f", {runs_text(cost.num_runs)}"
    return f"Monitoring ({found.watching}) cost {share} of a step ({cost.method}{where})."


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    first, *others = dict.fromkeys(texts)
    return first + (f" (and {len(others)} more reasons in other runs)" if others else "")
