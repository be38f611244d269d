"""The workloads' figures: do they learn, and do readers keep up with the bare work of decoding?"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench import convergence, density_input, image_input
from tests.bench.figures import Figure


def figures() -> Iterator[Figure]:
    """All figures of the area; input first, while nothing else has warmed the machine."""
    yield from image_input.figures()
    yield from density_input.figures()
    yield from convergence.figures()
