"""Which series of a group there is to choose among: at two ranks, algorithms that send the same messages are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlbench.collectives.results.measurements import CollectiveGroup, Measurement, Series, rate
from dlbench.costs.predictions import bus_factor
from dlbench.stats.estimates import median_estimate

Counters = tuple[tuple[int, int | None, int | None, int | None], ...]


def contenders(group: CollectiveGroup) -> tuple[Series, ...]:
    """The series of a group, those that send the same messages merged into one with the times of all of them.

    Two ranks that exchange equal parts in an equal number of steps send the same messages, whatever the algorithm is
    called: the fastest of several such series is fastest by chance.
    """
    classes: dict[tuple[str, Counters], list[Series]] = {}
    is_pair = bool(group.runs) and group.layout.ranks == 2
    for series in group.series:
        counters = tuple((row.num_bytes, row.steps, row.messages, row.bytes_sent) for row in series.rows)
        is_counted = is_pair and not series.is_library and all(row.steps is not None for row in series.rows)
        classes.setdefault((series.carrier, counters) if is_counted else (series.title, ()), []).append(series)
    return tuple(_merged(group, members) for members in classes.values())


def same_messages(group: CollectiveGroup) -> tuple[tuple[str, ...], ...]:
    """Algorithms that are one among the contenders, the first of each by the name of which it is one."""
    known = {series.title for series in group.series}
    merged = [series for series in contenders(group) if series.title not in known]
    return tuple(
        tuple(one.algorithm for one in group.series if one.carrier == series.carrier and _is_in(one, series))
        for series in merged
    )


def _is_in(one: Series, merged: Series) -> bool:
    mine, other = one.rows[0], merged.rows[0]
    own = (mine.num_bytes, mine.steps, mine.messages, mine.bytes_sent)
    return not one.is_library and own == (other.num_bytes, other.steps, other.messages, other.bytes_sent)


def _merged(group: CollectiveGroup, members: Sequence[Series]) -> Series:
    first, *others = members
    if not others:
        return first
    title = f"{first.algorithm} (or {len(others)} equal) over {first.carrier}"
    rows = tuple(_row(group, [one.rows[place] for one in members]) for place in range(len(first.rows)))
    return replace(first, title=title, rows=rows)


def _row(group: CollectiveGroup, rows: Sequence[Measurement]) -> Measurement:
    """One size: of each run the median over the series."""
    import numpy as np

    first = rows[0]
    keys = dict.fromkeys(key for row in rows for key in row.by_run)
    by_run = {key: float(np.median([row.by_run[key] for row in rows if key in row.by_run])) for key in keys}
    time = median_estimate(list(by_run.values()), "s")
    factor = bus_factor(group.collective, group.layout.ranks)
    return replace(
        first,
        time=time,
        algbw=rate(time, first.num_bytes),
        busbw=rate(time, first.num_bytes * factor) if factor > 0 else None,
        by_run=by_run,
    )
