"""The algorithm to use at each size, or none if there is no clear winner; the size of fused messages; and sentences on
these, on the conditions of a group and on the basis of a fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from dlbench.analysis.comparability import Condition
from dlbench.comm.measurements import CollectiveGroup, Measurement
from dlbench.report.wording import figure_text, percent, place_text, runs_text
from dlbench.specs.comm import ALGORITHMS, LargestHeldOut, Level, NetworkModel
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate
from dlbench.units import and_text, first_of, format_bytes, format_number

STAY_WITHIN = 0.05  # Algorithms slower than the fastest by at most this share count as equally fast.
RATE_SHARE = 0.9  # Share of the asymptotic rate that a fused message should reach.
MAX_TIED = 3  # Algorithms without a winner that are named.
MAX_HOSTS = 8  # Hosts that are named.
COLLECTIVE_TITLES: dict[str, str] = {name: name for name in ALGORITHMS} | {
    "allreduce": "all-reduce",
    "p2p": "pairs of ranks",
}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The fastest series at a size, and whether it is clearly the fastest."""

    num_bytes: int
    title: str
    is_clear: bool  # Whether every other series is slower beyond scatter and by more than `STAY_WITHIN`.
    tied: tuple[str, ...]  # The fastest series and those that are not clearly slower.
    spread: float  # How much slower than the fastest the slowest of `tied` was (fraction).


@dataclass(frozen=True, kw_only=True)
class Best(Standing):
    """The fastest series of a size and the second, as measured."""

    time: Estimate
    minimum_s: float  # The fastest iteration of all.
    rate: Estimate  # busbw (for one rank algbw), GB/s.
    second: str
    lead: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int  # Smallest measured size of the range, bytes.
    high: int  # Largest measured size of the range, bytes.
    title: str  # The clear winner; empty if there is none.
    tied: tuple[str, ...] = ()  # Without a winner: series not clearly slower at any size.
    spread: float = 0.0


def standing_fields(num_bytes: int, title: str, slower: Mapping[str, float]) -> dict[str, Any]:
    """Returns the fields of a `Standing`. `slower`: the fraction by which each equally fast series is slower."""
    return {
        "num_bytes": num_bytes,
        "title": title,
        "is_clear": not slower,
        "tied": (title, *slower),
        "spread": max(slower.values(), default=0.0),
    }


def best(group: CollectiveGroup) -> tuple[Best, ...]:
    """Returns the fastest series at each size, by size."""
    by_size: dict[int, list[Measurement]] = {}
    for series in group.series:
        for row in series.rows:
            by_size.setdefault(row.num_bytes, []).append(row)
    fastest_by_size = []
    for size, rows in sorted(by_size.items()):
        fastest, *others = sorted(rows, key=attrgetter("time.value"))
        leads = {row.series.title: ratio_estimate(row.by_run, fastest.by_run) for row in others}
        slower = {
            title: lead.value - 1
            for title, lead in leads.items()
            if lead.n < MIN_RUNS or lead.low is None or lead.low <= 1 or lead.value <= 1 + STAY_WITHIN
        }
        second = next(iter(leads), "")
        fields = standing_fields(size, fastest.series.title, slower) | {"second": second, "lead": leads.get(second)}
        best_of_size = Best(**fields, time=fastest.time, minimum_s=fastest.minimum_s, rate=fastest.rate)
        fastest_by_size.append(best_of_size)
    return tuple(fastest_by_size)


def ranges_of(standings: Sequence[Standing]) -> tuple[Recommended, ...]:
    """Returns ranges of sizes with a clear winner, or none. Unclear sizes between ranges of one winner join them."""
    winners = [""] * len(standings)
    for index, standing in enumerate(standings):
        if standing.is_clear:
            winners[index] = standing.title
    end = 0
    for winner, items in itertools.groupby(list(winners)):
        start, end = end, end + len(list(items))
        if winner or start == 0 or end == len(winners) or winners[start - 1] != winners[end]:
            continue
        if all(winners[end] in standing.tied for standing in standings[start:end]):
            winners[start:end] = [winners[end]] * (end - start)
    ranges: list[Recommended] = []
    for standing, winner in zip(standings, winners, strict=True):
        size = standing.num_bytes
        new = Recommended(low=size, high=size, title=winner)
        if not winner:
            new = replace(new, tied=standing.tied, spread=standing.spread)
        if ranges and ranges[-1].title == winner:
            last = ranges[-1]
            common = tuple(name for name in last.tied if name in new.tied)
            if winner or common:
                new = replace(new, low=last.low, tied=common, spread=max(last.spread, new.spread))
                ranges.pop()
        ranges.append(new)
    return tuple(ranges)


def fusion_bytes(startup_s: float, per_byte_s: float) -> float:
    """Returns the smallest message, bytes, whose rate is `RATE_SHARE` of the asymptotic one; infinite if bytes are
    free. With t(n) = s + n b: n_90 = 9 s / b (half the rate at n_1/2 = s / b: Hockney, Parallel Computing 20(3), 1994).
    """
    if per_byte_s <= 0:
        return math.inf
    return RATE_SHARE / (1 - RATE_SHARE) * startup_s / per_byte_s


def per_byte_text(seconds_per_byte: float) -> str:
    """Returns the rate in GB/s of a time per byte; `free` if bytes cost nothing."""
    if seconds_per_byte <= 0:
        return "free"
    return format_number(1e-9 / seconds_per_byte, 3)


def label_of(group: CollectiveGroup) -> str:
    """Returns the title of a group: system, collective, type, layout, carriers."""
    plan, layout = group.sample.plan, group.layout
    ranks = f"{plan.layout.ranks} ranks"
    if layout.num_groups > 1:
        ranks += f" in {layout.num_groups} groups of {layout.group_size}"
    if plan.layout.nodes > 1:
        ranks += f" on {plan.layout.nodes} nodes"
    carriers = ", ".join(dict.fromkeys(series.carrier for series in group.series))
    return f"{plan.system.name}: {COLLECTIVE_TITLES[group.collective]} {group.dtype}, {ranks}, over {carriers}"


def conditions_of(group: CollectiveGroup) -> tuple[Condition, ...]:
    """Returns the conditions that all runs of a group share."""
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    iterations = sorted({point.iterations for point in group.points})
    hosts = set(chain.from_iterable(run.record.hosts for run in group.runs if run.record is not None))
    timings = {point.timing for point in group.points}
    layout, groups = group.layout, f"{group.layout.num_groups} of {group.layout.group_size}"
    collective, iterations_title, timing, servers = COLLECTIVE_TITLES[group.collective], "Timed iterations", "", ""
    if plan.comm.pairs:
        collective, iterations_title = "", "Timed operations"
        if layout.num_groups == 1:
            groups = ""
    if "in-stream" in timings:
        timing = "in the GPU's stream"
    if any(series.algorithm == "parameter-server" for series in group.series):
        servers = str(plan.comm.shards or "every rank")
    values = (
        ("system", "System", plan.system.name),
        ("launcher", "Launcher", plan.system.launch.launcher),
        ("layout", "Ranks", place_text(plan.layout.ranks, plan.layout.nodes)),
        ("groups", "Groups", groups),
        ("cores", "Cores per rank", str(plan.layout.cores_per_rank)),
        ("device", "Device", record.device),
        ("collective", "Collective", collective),
        ("congestors", "Congestors", ", ".join(f"{first}:{second}" for first, second in plan.comm.congestors)),
        ("dtype", "Type", group.dtype),
        ("timing", "Timing", timing),
        ("shards", "Servers", servers),
        ("iterations", iterations_title, " or ".join(map(str, iterations))),
        ("hosts", "Hosts", first_of(sorted(hosts), MAX_HOSTS)),
    )
    return tuple(Condition(name=name, title=title, value=value) for name, title, value in values if value)


def verdict(advice: str, fastest: Best, rate_name: str) -> str:
    """Returns the advice, then the fastest at the largest size with its rate."""
    return (
        f"{advice} Fastest measured at {format_bytes(fastest.num_bytes)}: {fastest.title}, "
        f"{figure_text(fastest.time)}, {figure_text(fastest.rate)} GB/s {rate_name}."
    )


def advice(group: CollectiveGroup, ranges: Sequence[Recommended]) -> str:
    """Returns the algorithms to use by size, in a sentence."""
    collective = COLLECTIVE_TITLES[group.collective]
    if len({series.title for series in group.series}) == 1:
        return f"No choice: only {group.series[0].title} was measured."
    library = "use any of them"
    if any(series.is_library for series in group.series):
        library = "keep the library's choice"
    if len(group.runs) < MIN_RUNS:
        return (
            f"No recommendation from {runs_text(len(group.runs))}: it needs at least {MIN_RUNS} runs "
            f"(--repeats {MIN_RUNS}); until then, {library}."
        )
    if not any(size_range.title for size_range in ranges):
        widest = max(ranges, key=attrgetter("spread"))
        return f"No winner for {collective}: {tied_text(widest, len(group.series))}; {library}."
    text = f"For {collective} use: {ranges_text(ranges, len(group.series))}"
    if all(size_range.title for size_range in ranges):
        return f"{text}."
    return f"{text}; without a winner, {library}."


def ranges_text(ranges: Sequence[Recommended], count: int) -> str:
    """Returns the winner of each range of sizes, or the algorithms, of `count`, that are equally fast there."""
    texts = []
    for size_range in ranges:
        sizes = " to ".join(dict.fromkeys(map(format_bytes, (size_range.low, size_range.high))))
        winner = size_range.title or f"no winner ({tied_text(size_range, count)})"
        texts.append(f"{sizes}: {winner}")
    return "; ".join(texts)


def tied_text(size_range: Recommended, count: int) -> str:
    """Returns in words the algorithms, of `count`, that are equally fast."""
    names = list(size_range.tied)
    if len(names) == 1:
        return f"{names[0]} is not clearly slower at any of these sizes"
    if len(names) > MAX_TIED:
        names = [*names[:MAX_TIED], f"{len(names) - MAX_TIED} more"]
    algorithms = f"{', '.join(names[:-1])} and {names[-1]}"
    if len(size_range.tied) == count > MAX_TIED:
        algorithms = f"all {count} algorithms"
    return f"the intervals of {algorithms} overlap, or they differ by less than {percent(STAY_WITHIN, 0)}"


def fit_caption(network: NetworkModel) -> str:
    """Returns the basis of a fit and its largest error, in a few sentences."""
    over, levels = network.fitted_over, network.levels
    if over is None:
        return "Only libraries were measured: each is a line through its sizes, at the measured rank counts."
    basis = "too few runs for intervals"
    if network.fitted_to == "minimum":
        basis = "each the fastest of all iterations, which leaves out congestion, so without intervals"
    if network.draws:
        basis = f"in brackets 95 % intervals over {over.runs} runs per point"
    text = f"Fitted to {network.num_points} points at {and_text([*map(str, over.ranks)])} ranks; {basis}."
    if "across" in levels:
        text += f" In the model, ranks of a group {_shared(levels['across'])} to other groups."
    if "beyond" in levels:
        text += f" Ranks below one leaf switch {_shared(levels['beyond'])} to other leaf switches."
    if "inside" in levels and levels["inside"].links is not None:
        text += " In a group the bytes of all its ranks add up: they share memory or processors."
    left_out, points = "each size and rank count", "points of other sizes and other rank counts"
    if len(over.ranks) == 1:
        left_out, points = "each size", f"points of other sizes, all at {over.ranks[0]} ranks, the only rank count"
    return (
        f"{text} {largest_text(network.largest_held_out)} Held out: {left_out} is predicted from {points}. The kinds "
        "of costs and the shared links are chosen with all points, so these errors are slightly too small."
    )


def _shared(level: Level) -> str:
    if level.links is None:
        return "have one link each"
    if level.links == 1:
        return "share one link"
    return f"share {level.links} links"


def largest_text(largest: LargestHeldOut | None) -> str:
    """Returns the error at the largest rank count, in a sentence."""
    if largest is None:
        return "Error at the largest rank count: unknown, as the smaller rank counts do not determine it."
    bias = largest.ratio - 1
    direction = "too long" if bias > 0 else "too short"
    fitted_ranks = and_text([*map(str, largest.fitted_ranks)])
    return (
        f"Error at the largest rank count, held out ({largest.ranks} ranks from {fitted_ranks}): "
        f"{percent(largest.median_error)} (median; {percent(abs(bias))} {direction})."
    )
