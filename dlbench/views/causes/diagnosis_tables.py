"""A diagnosis as tables of text and remarks: what `dlbench diagnose` and the report both print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dlbench.report.tabular import Table
from dlbench.report.wording import (
    basis_text,
    figure_text,
    lost_text,
    number_text,
    percent,
    place_text,
    ranks_text,
    runs_text,
)
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.diagnosis_model import (
    CauseShare,
    DiagnosedGroup,
    DiagnosedPoint,
    NodeHistory,
    SlowHost,
    Straggler,
)
from dlbench.views.causes.diagnosis_words import CAUSE_TITLES

NOT_MEASURED = "not measured"
"""Instead of a figure where no run tells of a cause: that is not no time at all."""

_STRAGGLER_TITLES = ("last in", "waited a step", "of all waiting", "late by")


def place(point: DiagnosedPoint) -> str:
    """Where a point is."""
    return place_text(point.ranks, point.nodes)


def bases(figures: Iterable[tuple[DiagnosedPoint, Estimate]]) -> str:
    """What the intervals of a table are, each kind once, with the places where they are not all alike."""
    places: dict[str, list[str]] = {}
    for point, figure in figures:
        places.setdefault(basis_text(figure), []).append(place(point))
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{basis} ({', '.join(where)})" for basis, where in places.items())


def seconds(group: DiagnosedGroup) -> Table:
    """Seconds a step of each cause, a column a point; the last line is the sum."""
    rows: Table = [("cause", *map(place, group.points))]
    for index, share in enumerate(group.points[0].causes):
        rows.append((CAUSE_TITLES[share.name], *(_time(point.causes[index]) for point in group.points)))
    rows.append(("sum: mean step", *(figure_text(point.whole.seconds) for point in group.points)))
    return rows


def _time(share: CauseShare) -> str:
    return figure_text(share.seconds) if share.is_measured else NOT_MEASURED


def lost(group: DiagnosedGroup) -> Table:
    """Points of the ideal lost to each cause, a column for each point but the baseline."""
    others = group.points[1:]
    rows: Table = [("cause", *map(place, others))]
    for index, share in enumerate(group.points[0].causes):
        rows.append((CAUSE_TITLES[share.name], *(_lost(point.causes[index]) for point in others)))
    rows.append(("sum: lost", *(lost_text(point.whole.lost) for point in others)))
    rows.append(("efficiency (of means)", *(percent(1 - point.whole.lost.value) for point in others)))
    return rows


def _lost(share: CauseShare) -> str:
    return lost_text(share.lost) if share.is_measured else NOT_MEASURED


def remarks(group: DiagnosedGroup) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, planted faults, watching, limits."""
    for index, cause in enumerate(group.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        silent = [point for point in group.points if not point.causes[index].is_measured]
        if silent:
            where = "" if len(silent) == len(group.points) else f" at {', '.join(map(place, silent))}"
            reasons = _first(reason for point in silent for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in group.points for note in point.causes[index].notes]
        if notes:
            yield f"{title}: {_first(notes)}."
    for point in group.points:
        if point.planted:
            added = ", ".join(f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:8])
            more = f" and {len(point.planted) - 8} more ranks" if len(point.planted) > 8 else ""
            yield f"Planted at {place(point)}: {added}{more} a step."
    if (cost := group.watch_cost) is not None:
        share = f"{percent(cost.value, 2)} [{percent(cost.low, 2)}, {percent(cost.high, 2)}]"
        where = f" at {ranks_text(cost.ranks)}" if cost.ranks is not None else f", {runs_text(cost.num_runs)}"
        yield f"Watching ({group.watching}) cost {share} of a step ({cost.method}{where})."
    else:
        yield f"Watching: {group.watching}."
    yield from group.limits


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    found = list(dict.fromkeys(texts))
    return found[0] + (f" (other runs tell {len(found) - 1} more)" if len(found) > 1 else "")


def late_ranks(found: Sequence[Straggler]) -> Table:
    """Ranks that were waited for."""
    return [("rank", "host", *_STRAGGLER_TITLES), *((str(late.rank), late.host, *_cells(late)) for late in found)]


def late_hosts(found: Sequence[Straggler]) -> Table:
    """Hosts whose ranks were waited for."""
    return [("host", *_STRAGGLER_TITLES), *((late.host, *_cells(late)) for late in found)]


def _cells(late: Straggler) -> tuple[str, ...]:
    times = {"input": late.input_s, "compute": late.compute_s, "host": late.host_s}
    own = f"{late.late_by} {number_text(times[late.late_by], 's')}" if late.late_by in times else late.late_by
    return (percent(late.last_share, 0), number_text(late.waited_s, "s"), percent(late.waited_share, 0), own)


def slow_hosts(found: Sequence[SlowHost]) -> Table:
    """Hosts over all runs, the slowest first."""
    rows: Table = [("host", "own work", "runs", "last in", "fair share", "verdict")]
    for one in found:
        cells = (str(one.ratio.n), percent(one.last_share, 0), percent(one.fair_share, 0), one.verdict)
        rows.append((one.host, ratio_text(one.ratio), *cells))
    return rows


def ratio_text(figure: Estimate) -> str:
    """A ratio near 1 with its interval, to the thousandth."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def history_words(found: NodeHistory) -> tuple[str, ...]:
    """What the comparison of hosts is, and over which runs."""
    told = []
    if not found.num_runs:
        told.append("Nothing to compare: no counted run had ranks on two hosts or more.")
    if found.num_faulty:
        told.append(f"{runs_text(found.num_faulty)} with a planted fault left out.")
    if found.num_runs:
        rest = f", {found.num_single_host} on one" if found.num_single_host else ""
        told.append(
            "Own work (no exchange) of a host's slowest rank relative to the other hosts' in the same run; slow: "
            f"interval above {found.threshold:g}. {len(found.hosts)} hosts, {runs_text(found.num_runs)} on several "
            f"hosts{rest}."
        )
    return tuple(told)


def exclude_lines(found: NodeHistory) -> tuple[str, ...]:
    """The option for Slurm, or that there is none to give; nothing where no hosts were compared."""
    if not found.num_runs:
        return ()
    unsafe = (f"Left out of the list, no name for an option: {host}" for host in found.unsafe)
    return (found.option or "No host is shown to be slow.", *unsafe)
