"""Closed forms against counts: steps and bytes, exactly."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.closed_forms import FORMS, closed_form
from dlbench.perfmodels.schedules import Layout, pipeline_chunks
from dlbench.specs.comm import ALGORITHMS
from tests.bench.figures import Figure

RANKS = (*range(2, 34), 48, 64)


def figures() -> Iterator[Figure]:
    """All figures of the closed forms."""
    checked = wrong = 0
    for collective, names in ALGORITHMS.items():
        for name in names:
            for ranks in RANKS if f"{collective} {name}" in FORMS else ():
                layout = Layout(ranks=ranks, group_size=next(g for g in (4, 3, 2, 1) if ranks % g == 0))
                elements = 2 * ranks * 2 ** (ranks.bit_length() - 1)  # every part is whole
                counted = counts(collective, name, layout, elements, 4)
                chunks = pipeline_chunks(collective, name, layout, elements)
                form = closed_form(collective, name, layout, chunks=chunks)
                if form is None:  # of ranks that are no power of two
                    continue
                found = max(one.steps for one in counted), max(one.bytes_sent for one in counted)
                checked += 1
                wrong += found != (form.steps(), form.sent(n=4 * elements))
    yield Figure(
        name=f"closed forms that differ from counts, of {checked}",
        value=float(wrong),
        unit="forms",
        n=checked,
        goal="0, exactly",
        met=wrong == 0,
        reason=f"steps and bytes of the busiest rank, {len(FORMS)} algorithms, up to {RANKS[-1]} ranks",
    )
