"""Campaigns on Slurm: how long planning and asking take. `make bench AREA=slurm`, or AREA=slurm.<part>."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.figures import Figure
from benchmarks.slurm import asking, planning

SUBJECTS: dict[str, Callable[[], Iterator[Figure]]] = {"planning": planning.figures, "asking": asking.figures}
"""Parts of the area, by name."""


def figures() -> Iterator[Figure]:
    """All of them."""
    for subject in SUBJECTS.values():
        yield from subject()
