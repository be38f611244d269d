"""Sentences on collectives: what a group measured, which algorithm to use at which size, what stands behind a fit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from dlbench.analysis.comparability import Condition
from dlbench.comm.choice import STAY_WITHIN, Best, Recommended
from dlbench.comm.measurements import CollectiveGroup
from dlbench.report.wording import figure_text, percent, place_text, runs_text
from dlbench.specs.comm import ALGORITHMS, LargestHeldOut, Level, NetworkModel
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import format_bytes, format_number

MAX_TIED = 3  # Algorithms without a winner that are named.
MAX_HOSTS = 8  # Hosts that are named.
COLLECTIVE_TITLES: dict[str, str] = {name: name for name in ALGORITHMS} | {
    "allreduce": "all-reduce",
    "p2p": "pairs of ranks",
}


def per_byte_text(seconds_per_byte: float) -> str:
    """Seconds per byte as the rate that they are, GB/s; `free` where bytes cost nothing."""
    return "free" if seconds_per_byte <= 0 else format_number(1e-9 / seconds_per_byte, 3)


def label_of(group: CollectiveGroup) -> str:
    """A group in one line: system, collective, type, layout, carriers."""
    plan, layout = group.sample.plan, group.layout
    groups = f" in {layout.num_groups} groups of {layout.group_size}" if layout.num_groups > 1 else ""
    nodes = f" on {plan.layout.nodes} nodes" if plan.layout.nodes > 1 else ""
    carriers = ", ".join(dict.fromkeys(series.carrier for series in group.series))
    what = f"{COLLECTIVE_TITLES[group.collective]} {group.dtype}"
    return f"{plan.system.name}: {what}, {plan.layout.ranks} ranks{groups}{nodes}, over {carriers}"


def conditions_of(group: CollectiveGroup) -> tuple[Condition, ...]:
    """What all runs of a group share."""
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    iterations = sorted({row.iterations for series in group.series for row in series.rows})
    hosts = sorted({host for run in group.runs if run.record for host in run.record.hosts})
    more_hosts = f" and {len(hosts) - MAX_HOSTS} more" if len(hosts) > MAX_HOSTS else ""
    timings = {row.timing for series in group.series for row in series.rows}
    has_servers = any(series.algorithm == "parameter-server" for series in group.series)
    pairs, layout = plan.comm.pairs, group.layout
    values = (
        ("system", "System", plan.system.name),
        ("launcher", "Launcher", plan.system.launch.launcher),
        ("layout", "Ranks", place_text(plan.layout.ranks, plan.layout.nodes)),
        ("groups", "Groups", "" if pairs and layout.num_groups == 1 else f"{layout.num_groups} of {layout.group_size}"),
        ("cores", "Cores per rank", str(plan.layout.cores_per_rank)),
        ("device", "Device", record.device),
        ("collective", "Collective", "" if pairs else COLLECTIVE_TITLES[group.collective]),
        ("congestors", "Congestors", ", ".join(f"{first}:{second}" for first, second in plan.comm.congestors)),
        ("dtype", "Type", group.dtype),
        ("timing", "Timing", "in the GPU's stream" if "in-stream" in timings else ""),
        ("shards", "Servers", str(plan.comm.shards or "every rank") if has_servers else ""),
        ("iterations", f"Timed {'operations' if pairs else 'iterations'}", " or ".join(map(str, iterations))),
        ("hosts", "Hosts", ", ".join(hosts[:MAX_HOSTS]) + more_hosts),
    )
    return tuple(Condition(name=name, title=title, value=value) for name, title, value in values if value)


def verdict(advice: str, fastest: Best, rate_name: str) -> str:
    """Returns the advice, then the fastest at the largest size with its rate."""
    return (
        f"{advice} Fastest measured at {format_bytes(fastest.num_bytes)}: {fastest.title}, "
        f"{figure_text(fastest.time)}, {figure_text(fastest.rate)} GB/s {rate_name}."
    )


def advice(group: CollectiveGroup, ranges: Sequence[Recommended]) -> str:
    """Returns what to use at which size, in a sentence."""
    what = COLLECTIVE_TITLES[group.collective]
    if len({series.title for series in group.series}) == 1:
        return f"Nothing to choose from: only {group.series[0].title} was measured."
    has_library = any(series.is_library for series in group.series)
    library = "keep the library's choice" if has_library else "any of them will do"
    if len(group.runs) < MIN_RUNS:
        return (
            f"No advice from {runs_text(len(group.runs))}: an algorithm is recommended from {MIN_RUNS} runs on "
            f"(--repeats {MIN_RUNS}); until then {library}."
        )
    if not any(each.title for each in ranges):
        widest = max(ranges, key=attrgetter("spread"))
        return f"No winner for {what}: {tied_text(widest, len(group.series))}; {library}."
    keep = "" if all(each.title for each in ranges) else f"; where none is clear, {library}"
    return f"For {what} use: {ranges_text(ranges, len(group.series))}{keep}."


def ranges_text(ranges: Sequence[Recommended], count: int) -> str:
    """Returns the winner of each range of sizes, or which of `count` algorithms cannot be told apart there."""
    texts = []
    for each in ranges:
        sizes = " to ".join(dict.fromkeys(map(format_bytes, (each.low, each.high))))
        texts.append(f"{sizes}: {each.title or f'no winner ({tied_text(each, count)})'}")
    return "; ".join(texts)


def tied_text(found: Recommended, count: int) -> str:
    """Returns in words which of `count` algorithms cannot be told apart."""
    names = list(found.tied)
    if len(names) == 1:
        return f"{names[0]} is clearly slower at none of these sizes"
    if len(names) > MAX_TIED:
        names = [*names[:MAX_TIED], f"{len(names) - MAX_TIED} more"]
    who = f"{', '.join(names[:-1])} and {names[-1]}"
    if len(found.tied) == count > MAX_TIED:
        who = f"all {count} algorithms"
    return f"the intervals of {who} overlap, or they are within {percent(STAY_WITHIN, 0)}"


def fit_caption(network: NetworkModel) -> str:
    """What stands behind a fit, in a few sentences."""
    over, levels = network.fitted_over, network.levels
    if over is None:
        return "Only libraries were measured: each is a line through its sizes, at the rank counts measured."
    basis = (
        f"in brackets 95 % intervals over {over.runs} runs a point" if network.draws else "too few runs for intervals"
    )
    text = f"Fitted to {network.num_points} points at {_and(over.ranks)} ranks; {basis}."
    if "across" in levels:
        text += f" In the model, ranks of a group {_shared(levels['across'])} to other groups."
    if "beyond" in levels:
        text += f" Ranks below one leaf switch {_shared(levels['beyond'])} to other leaf switches."
    if "inside" in levels and levels["inside"].links is not None:
        text += " Inside a group the bytes of all its ranks add up: they share memory or processors."
    each, points = "each size and rank count", "points of other sizes and other rank counts"
    if len(over.ranks) == 1:
        each, points = "each size", f"points of other sizes, all at {over.ranks[0]} ranks, the only rank count"
    return (
        f"{text} {largest_text(network.largest_held_out)} Held out: {each} is predicted from {points}; "
        "which costs there are and what ranks share is taken from all points, which flatters these errors a little."
    )


def _and(ranks: Sequence[int]) -> str:
    return " and ".join(", ".join(map(str, ranks)).rsplit(", ", 1))


def _shared(level: Level) -> str:
    many = "one link" if level.links == 1 else f"{level.links} links"
    return "have a link each" if level.links is None else f"share {many}"


def largest_text(largest: LargestHeldOut | None) -> str:
    """The error at the largest rank count, in a sentence."""
    if largest is None:
        return "Error at the largest rank count: not known, the smaller ones do not determine it."
    bias = largest.ratio - 1
    way = "too long" if bias > 0 else "too short"
    return (
        f"Error at the largest rank count, held out ({largest.ranks} ranks from {_and(largest.fitted_ranks)}): "
        f"{percent(largest.median_error)} (median; {percent(abs(bias))} {way})."
    )
