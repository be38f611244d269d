"""Truth: does every interval cover what it says, does every verdict keep its promise? Simulated, with fixed seeds.

Each subject is a module with `figures()`; every figure has the goal that it is held against. `truth-sessions` makes
real runs and so is an area of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.figures import Figure
from benchmarks.truth import collectives, gate, hosts, intervals, points, predictions, projection, trends, verdicts

SUBJECTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "intervals": intervals.figures,
    "gate": gate.figures,
    "hosts": hosts.figures,
    "trends": trends.figures,
    "verdicts": verdicts.figures,
    "predictions": predictions.figures,
    "collectives": collectives.figures,
    "projection": projection.figures,
    "points": points.points,
}
"""Name -> its figures; in the order of the issue they answer."""


def figures() -> Iterator[Figure]:
    """All subjects, one after the other."""
    for subject in SUBJECTS.values():
        yield from subject()
