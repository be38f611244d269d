"""The workloads' figures: do they learn, and do readers keep up with the bare work of decoding?"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import convergence, image_input
from benchmarks.figures import Figure


def figures() -> Iterator[Figure]:
    """All figures of the area; input first, while nothing else has warmed the machine."""
    yield from image_input.figures()
    yield from convergence.figures()
