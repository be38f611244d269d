"""What a projection refuses, and what it flags: each with a code, a sentence and what would mend it.

`reasons` and `flags` know what ingredients alone say. What only the model can tell (R5, R8, R10, F5, F7, F8, F10, F12)
it says by `refused` and `flagged`, so that all codes and their words are here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.projected import Flag, Refused, counted
from dlbench.report.wording import percent, ranks_text
from dlbench.stats.resampling import LEAST_RUNS

FARTHEST = 64  # Times the largest measured rank count beyond which nothing is said.
FAR = 8  # The same from which a figure is flagged.
FARTHEST_BY_POINTS = 4
"""The same of points alone: series of large machines were 4 to 14 % off at 8 to 16 times the ranks, some 40 %."""
MIN_POINTS = 3  # Rank counts of a curve through points alone: through two goes every curve.
UNSTABLE = 0.15  # Scatter of runs (standard deviation over mean) beyond which a point is of no one state of a machine.
SMALLEST_BATCH = 4  # The least batch is so many times smaller than the smallest measured one.
LEAST_HOSTS = 4  # With fewer, their scatter is hardly known.
LEAST_SLOWER = 0.03  # How much longer a slow host works than the one in the middle (log of the ratio), at least.
TAIL = 4  # More nodes than 1 / so many of the observed node-steps ask for slower nodes than were ever seen.
MOST_BUSY = 0.6  # Share of the time of shared cores from which on ranks wait for a core, and steps say nothing else.
SCALE = 3.0  # Costs of the network may be so many times too high or too low for the measured exchange.
UNEXPLAINED = 0.5
"""Share of the measured exchange that the network's costs may miss: beyond, most of what is projected is not theirs."""
SMALL = 0.05  # Share of a step below which that does not matter: it stays as it is at every rank count.
WITH_MODEL = ("serial", "data", "out-of-core")  # Strategies whose step the model knows.
LEAST_EXPLAINED = 0.2  # Share that they must give for a word on another way of exchanging: else it is not of the wire.


REFUSALS = {
    "R1": (
        "fewer than {least} runs at {ranks} do not show how much runs differ from each other",
        "repeat the runs: --repeats 5",
    ),
    "R2": (
        "all measured points are on one node, so the cost of messages between nodes is in none of them",
        "measure several nodes: --nodes 1,2,4",
    ),
    "R3": (
        "the cost of messages {level} was never measured",
        "measure it: dlbench comm submit --system {system} --nodes {measured}",
    ),
    "R4": ("{what}", "give each rank cores of its own, then measure again"),
    "R5": (
        "the network file does not belong to these runs: {what}",
        "measure the network of these runs (dlbench comm submit) and pass it with --network FILE",
    ),
    "R6": (
        "the runs at {ranks} differ by {scatter} (at most {most}), so the machine changed between them",
        "find what disturbed them (dlbench diagnose RUNS), then repeat them",
    ),
    "R7": ("{what}", "{other}"),
    "R8": ("{what}", "choose a setting that has a model, or measure this one at that rank count"),
    "R9": ("{what}", "measure that batch: --set train.batch_per_rank={batch}"),
    "R10": (
        "{known} to the target and no gradient noise scale do not show how many epochs other batches need",
        "train to the target at three batches, or measure the noise scale: --set measure.noise_scale=true",
    ),
}
"""Of each code what it says and what would mend it; in braces what the case fills in."""

SERIES_REMEDIES = {
    "R1": f"a row for each run, at least {LEAST_RUNS} of each rank count",
    "R2": f"rows of at least {MIN_POINTS} counts of full nodes",
    "R6": "rows of runs on a quiet machine",
}
"""Remedies in place of those of `REFUSALS` where nothing but step times is known, so that no command measures more."""

FLAGS = {
    "F1": "only one measured point is on several nodes, so the model's error is assumed. Measure two more node counts",
    "F2": "this is {times} times the largest measured rank count. Measure a larger one before you rely on it",
    "F3": "{hosts} hosts do not show how unequal hosts are: new ones are taken as like them. Measure {least} or more",
    "F4": "the slowest of {nodes:,} nodes is rarer than all {seen:,} steps of nodes measured. Measure more steps",
    "F5": "the step needs {needed} of storage, and {proven} was measured at {nodes} nodes; if that is all, it takes "
    "{longest:.4g} s. Measure the storage on more nodes: dlbench io",
    "F6": "the points are of {sessions} sessions, and what changed between these is in the result. Measure all rank "
    "counts in one session",
    "F7": "this continues the measured step times alone, as {law}, because {why}. {remedy}",
    "F8": "computing was measured on {system}, and messages are priced for {there} by {by}, where no run was made. "
    "Run the workload there once to see how far off this is",
    "F9": "links between leaf switches were never measured, and are assumed to be {taper:.3g} times fewer than nodes' "
    "links. Measure them: dlbench comm submit on nodes of two leaf switches",
    "F10": "{seconds} of the exchange are not in the network's costs, and are assumed not to change. Measure the "
    "network with the messages of these runs: dlbench comm submit",
    "F11": "none of the {hosts} measured hosts is slow, but up to {share} of the others may be, which is in the band. "
    "Measure more hosts, or give the history of this system (--history DIR)",
    "F12": "no recorded run shows how ranks lie below several leaf switches, so their order is drawn between sorted "
    "and shuffled. Measure on nodes of two leaf switches where Slurm reports them (topology.conf)",
    "F13": "the points bend upwards: with a probability of {probability} the law that goes on outgrows the logarithm, "
    "so the band reaches far up. Measure {ranks} or more",
}
"""Of each code why a figure is less certain, and what to do; in braces what the case fills in."""


def refused(code: str, target: int | None, /, **words: object) -> Refused:
    """A refusal of the table, in words. `target`: of which rank count; None: of all."""
    text, remedy = (one.format(**words) for one in REFUSALS[code])
    return Refused(code=code, ranks=target, text=text, remedy=remedy)


def flagged(code: str, /, **words: object) -> Flag:
    """A flag of the table, in words."""
    return Flag(code=code, text=FLAGS[code].format(**words))


def reasons(ingredients: Ingredients, ranks: int, *, by: Literal["model", "points"] = "model") -> tuple[Refused, ...]:
    """Returns everything that forbids a word on a rank count, by what the ingredients hold; empty where nothing does.

    `by`: the model needs a network and a recorded exchange; points alone reach less far.
    """
    without_model = tuple(_of_kind(ingredients, ranks))
    if by == "model" and not without_model:
        return (*_of_any(ingredients, ranks, FARTHEST), *_of_model(ingredients, ranks))
    by_points = (*_of_any(ingredients, ranks, FARTHEST_BY_POINTS), *_of_points(ingredients, ranks))
    if ingredients.is_series:
        return tuple(replace(one, remedy=SERIES_REMEDIES.get(one.code, one.remedy)) for one in by_points)
    return by_points if by == "points" else (*by_points, *without_model)


def usable_points(ingredients: Ingredients, ranks: int, least_runs: int = LEAST_RUNS) -> list[PointFigures]:
    """Returns the points that a curve to a rank count may go through.

    What holds inside a node is not what holds beyond it: of a target on several nodes count points on several, with
    full nodes, or a single full node where these are too few. A series of the other kind of scaling has other batches.
    """
    points = [
        point
        for point in ingredients.points
        if len(point.runs) >= least_runs and point.batch_per_rank == ingredients.batch_at(point.ranks)
    ]
    if ingredients.nodes_of(ranks) == 1:
        return points
    beyond = [point for point in points if point.nodes > 1]
    if len(beyond) >= MIN_POINTS:
        return beyond
    return [point for point in points if point.nodes > 1 or point.ranks == ingredients.per_node]


def _of_any(ingredients: Ingredients, ranks: int, farthest: int) -> Iterator[Refused]:
    """Yields what is refused whatever projects."""
    first, anchor, per_node = ingredients.points[0].ranks, ingredients.anchor, ingredients.per_node
    if ingredients.is_crowded:
        yield refused("R4", None, what="ranks shared cores, so the points do not show what more ranks would do")
    for point in ingredients.points:
        steps = [run.step_s for run in point.runs]
        scatter = statistics.stdev(steps) / statistics.fmean(steps) if len(steps) > 1 else 0.0
        if scatter > UNSTABLE:
            most = percent(UNSTABLE, 0)
            yield refused("R6", None, ranks=ranks_text(point.ranks), scatter=percent(scatter), most=most)

    def out_of_range(what: str, other: str) -> Refused:
        return refused("R7", ranks, what=what, other=other)

    if ranks < first:
        what = f"{ranks_text(ranks)} are fewer than the smallest measured count, {first:,}"
        yield out_of_range(what, "ask for more, or measure it")
    if ranks > farthest * anchor.ranks:
        what = f"{ranks_text(ranks)} are more than {farthest} times the largest measured count, {anchor.ranks:,}"
        yield out_of_range(what, f"measure {ranks_text(-(-ranks // farthest))} or more")
    if ranks > per_node and ranks % per_node:
        what = f"{ranks_text(ranks)} do not fill nodes of {per_node}"
        yield out_of_range(what, f"ask for {ingredients.nodes_of(ranks) * per_node:,}")
    if ingredients.nodes_of(ranks) > 1 and anchor.nodes == 1:
        yield refused("R2", ranks)
    if ingredients.scaling == "strong" and anchor.batch_per_rank and ingredients.batch_at(ranks) is None:
        whole = anchor.batch_per_rank * anchor.ranks
        what = f"a global batch of {whole:,} samples does not divide among {ranks_text(ranks)}"
        yield out_of_range(what, "ask for a divisor of it")


def _of_points(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    """Yields what is refused where points are too few for a curve, or runs for their scatter."""
    anchor, is_beyond = ingredients.anchor, ingredients.nodes_of(ranks) > 1
    points = usable_points(ingredients, ranks, least_runs=1)
    is_long_enough = len(points) >= MIN_POINTS
    short = [point.ranks for point in points if len(point.runs) < LEAST_RUNS]
    if len(anchor.runs) < LEAST_RUNS or (is_long_enough and len(usable_points(ingredients, ranks)) < MIN_POINTS):
        yield refused("R1", None, ranks=f"{counted(short or [anchor.ranks])} ranks", least=LEAST_RUNS)
    if is_long_enough or (is_beyond and anchor.nodes == 1):  # The latter is R2.
        return
    kind = f"counts of full nodes ({ranks_text(ingredients.per_node)} each)" if is_beyond else "rank counts"
    what = f"a curve needs at least {MIN_POINTS} {kind}, and there are {len(points)}"
    if points:
        what += f": {counted([point.ranks for point in points])} ranks"
    yield refused("R7", ranks, what=what, other=f"measure {MIN_POINTS - len(points)} more")


def _of_kind(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    """Yields why no model knows steps of this kind, whatever else is measured."""
    anchor, exchange = ingredients.anchor, ingredients.exchange
    if not anchor.runs[0].parts:
        yield refused("R8", ranks, what="the parts of the step are not known")
    if anchor.strategy not in ("", *WITH_MODEL):
        what = f"the model of the step knows no waiting for parameters and no collectives of {anchor.strategy}"
        yield refused("R8", ranks, what=what)
    elif any(run.parts.get("gather") for run in anchor.runs):
        yield refused("R8", ranks, what="steps hold waiting for parameters, which has no model")
    if anchor.ranks > 1 and exchange is None:
        yield refused("R8", ranks, what="the exchange was not recorded")
    elif exchange is not None and exchange.averages_parameters:
        yield refused("R8", ranks, what="ranks averaged parameters, and the model exchanges gradients in each step")


def _of_model(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    """Yields what is refused for want of what the model needs."""
    anchor, network, nodes = ingredients.anchor, ingredients.network, ingredients.nodes_of(ranks)
    if len(anchor.runs) < LEAST_RUNS:
        yield refused("R1", None, ranks=ranks_text(anchor.ranks), least=LEAST_RUNS)
    cores, core_use = ingredients.shared_cores, (anchor.core_use or 0.0) * ranks / anchor.ranks
    if cores is not None and core_use > MOST_BUSY and ranks != anchor.ranks:
        what = (
            f"all nodes share {cores} cores of one machine, which {ranks_text(ranks)} would use for "
            f"{percent(core_use, 0)} of the time (at most {percent(MOST_BUSY, 0)})"
        )
        yield refused("R4", ranks, what=what)
    leaf, known = ingredients.nodes_per_leaf, {} if network is None else network.levels
    is_beyond = leaf is not None and nodes > leaf and ingredients.leaf_taper is None
    unknown = [
        (words, measured)
        for level, words, is_needed, measured in (
            ("inside", "inside a node", ingredients.per_node > 1, "2,4"),
            ("across", "between nodes", nodes > 1, "2,4"),
            ("beyond", "beyond a leaf switch", is_beyond, f"{2 * (leaf or 1)}  # on two leaves"),
        )
        if ranks > 1 and is_needed and level not in known
    ]
    if unknown:
        level, system = " and ".join(words for words, _ in unknown), ingredients.system or "SYSTEM"
        yield refused("R3", ranks, level=level, system=system, measured=unknown[-1][1])
    wanted = ingredients.batch_at(ranks)
    if ingredients.scaling == "strong" and ingredients.measured_at(ranks) is None:
        batches = sorted(one.batch_per_rank for one in ingredients.batches)
        if len(batches) < 2 and (wanted or not anchor.batch_per_rank):  # Else that is R7.
            what = "the batch per rank changes, and its work was measured at one batch"
            yield refused("R9", ranks, what=what, batch=wanted or "OTHER")
        elif wanted is not None and wanted * SMALLEST_BATCH < batches[0]:
            what = f"{wanted} samples per rank are less than a quarter of the smallest measured batch, {batches[0]}"
            yield refused("R9", ranks, what=what, batch=wanted)


def flags(ingredients: Ingredients, ranks: int, *, by: Literal["model", "points"] = "model") -> tuple[Flag, ...]:
    """What to know beside a figure at a rank count, by what the ingredients hold. `by`: who gives the figure."""
    found = []
    nodes, scatter = ingredients.nodes_of(ranks), ingredients.nodes
    if nodes > 1 and sum(point.nodes > 1 for point in ingredients.points) == 1:
        found.append(flagged("F1"))
    times = ranks / ingredients.anchor.ranks
    if times > FAR:
        found.append(flagged("F2", times=f"{times:g}"))
    hosts = 0 if scatter is None else len(scatter.hosts)
    if by == "model" and nodes > 1 and hosts < LEAST_HOSTS:
        found.append(flagged("F3", hosts=hosts, least=LEAST_HOSTS))
    elif by == "model" and scatter is not None and nodes > max(1, scatter.num_maxima / TAIL):
        found.append(flagged("F4", nodes=nodes, seen=scatter.num_maxima))
    effects = (0.0,) if scatter is None else scatter.hosts
    is_one_slow = max(effects) - statistics.median(effects) >= LEAST_SLOWER
    if by == "model" and nodes > hosts >= LEAST_HOSTS and not is_one_slow and ingredients.slow_hosts is None:
        # So large a share of slow hosts leaves a chance of 5 % that none is among those measured.
        found.append(flagged("F11", hosts=hosts, share=percent(1 - 0.05 ** (1 / hosts), 0)))
    leaf, taper, network = ingredients.nodes_per_leaf, ingredients.leaf_taper, ingredients.network
    if by == "model" and leaf and taper and nodes > leaf and network is not None and network.beyond is None:
        found.append(flagged("F9", taper=taper))
    sessions = {run.session for point in ingredients.points for run in point.runs}
    if len(sessions) > 1 and any({run.session for run in point.runs} != sessions for point in ingredients.points):
        found.append(flagged("F6", sessions=len(sessions)))
    return tuple(found)
