"""The figures of communication: collectives against their model, and gradient exchange in training."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import collectives, exchanges
from benchmarks.figures import Figure


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from collectives.figures()
    yield from exchanges.figures()
