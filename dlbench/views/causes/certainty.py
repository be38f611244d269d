"""Which causes of a loss stand out of the noise: all count, because the largest of many is large by chance."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.reading.attribution import Part
from dlbench.stats.multiplicity import LEVEL, holm
from dlbench.stats.verdicts import placed


def adjusted_p(points: Sequence[Sequence[Part]], num_groups: int = 1) -> list[dict[str, float]]:
    """The p values of losses to causes, after Holm over all causes of all points and Bonferroni over groups.

    With nothing lost, the chance that any cause of a report is called found is at most 5 %.

    Args:
        points: the causes of each rank count of a group that were measured, the baseline's too.
        num_groups: groups of the report with several rank counts.

    Returns:
        For each point, by cause; nothing of the baseline, and of causes that took no time anywhere.
    """
    tested = [
        (place, part.name, part.p)
        for place, parts in enumerate(points)
        for part in parts
        if part.p is not None and (part.seconds.value or part.ideal_seconds)
    ]
    found: list[dict[str, float]] = [{} for _ in points]
    for (place, name, _), adjusted in zip(tested, holm([p for *_, p in tested]), strict=True):
        found[place][name] = min(1.0, num_groups * adjusted)
    return found


def stands_out(part: Part, adjusted: float) -> bool:
    """Whether a cause loses something for certain: after the correction, and by its own interval.

    Args:
        part: the cause.
        adjusted: its p by `adjusted_p`.
    """
    return adjusted < LEVEL and placed(part.lost, 0, 0) == "above"
