"""The cost of each algorithm of a collective: counted, predicted, measured, and over a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dlbench.comm.measurements import Measurement
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.predictions import predict, whole_elements
from dlbench.perfmodels.schedules import Layout, pipeline_chunks
from dlbench.report.table import Sheet, column, columns_of, drop_empty_columns
from dlbench.specs.base import Precision
from dlbench.specs.comm import ELEMENT_BYTES, Collective, Level, NetworkModel, Piece
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes

_BYTE = Level(pieces=(Piece(alpha_s=0, beta_s_per_byte=1),))
BYTES_ALONE = NetworkModel(system="", transport="", inside=_BYTE, across=_BYTE)
COST_WORDS = (
    "Steps: rounds of messages; a rank pays a start-up for each message that it receives in a round. Volume: bytes "
    "that the busiest rank sends. Over ideal: measured (or else predicted) time over a lower bound, the largest of the "
    "times for the fewest start-ups, bytes and additions of any algorithm. Without fitted costs: bytes along the "
    "longest path over the fewest that any algorithm needs (2 (p - 1)/p n for an all-reduce of p ranks). k: servers; "
    "c: chunks."
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one algorithm at one size."""

    algorithm: str = field(metadata=column("Algorithm", is_brief=True))
    num_bytes: int = field(metadata=column())
    steps: int = field(metadata=column("Steps", is_brief=True))  # Counted, of the rank with the most.
    volume: float = field(metadata=column("Volume, n", text="{:.3g}".format, is_brief=True))
    """Counted bytes that the busiest rank sends, over those of its buffer."""
    predicted_s: float | None = field(default=None, metadata=column("Predicted", unit="s", is_brief=True))
    over_ideal: float = field(metadata=column("Over ideal", text="{:.3g}x".format, is_brief=True))
    measured: Estimate | None = field(default=None, metadata=column("Measured", "measured_s", is_brief=True))
    minimum_s: float | None = field(default=None, metadata=column("Minimum", unit="s", is_brief=True))


def cost(  # noqa: PLR0913 - an operation has five properties, its price three sources
    collective: Collective,
    algorithm: str,
    layout: Layout,
    num_bytes: int,
    dtype: Precision,
    network: NetworkModel | None = None,
    shards: int | None = None,
    measured: Measurement | None = None,
) -> Cost:
    """Returns the cost of an algorithm by a network's costs; with `measured`, predicted by a fit without this point."""
    width = ELEMENT_BYTES[dtype]
    elements = whole_elements(num_bytes, width)
    chunks = pipeline_chunks(collective, algorithm, layout, elements)
    if measured is not None and measured.chunks:
        chunks = measured.chunks
    rank_counts = counts(collective, algorithm, layout, elements, width, shards=shards, chunks=chunks)
    # Without costs all bytes are alike, as on one node, whose ranks have one port.
    placed = layout if network else replace(layout, node_size=layout.ranks)
    prices = network or BYTES_ALONE
    seconds = predict(
        collective, algorithm, num_bytes, placed, prices, element_bytes=width, shards=shards, chunks=chunks
    )
    ideal_s = ideal_seconds(collective, placed, num_bytes, prices)
    suffixes = dict.fromkeys(("double-binary-tree", "chain", "hierarchical"), f", c = {chunks}")
    suffixes["parameter-server"] = f", k = {shards or layout.ranks}"
    priced = Cost(
        algorithm=algorithm + suffixes.get(algorithm, ""),
        num_bytes=num_bytes,
        steps=max(rank.steps for rank in rank_counts),
        volume=max(rank.bytes_sent for rank in rank_counts) / num_bytes,
        over_ideal=seconds / ideal_s,
    )
    if measured is not None:
        priced = replace(priced, predicted_s=measured.predicted_s, measured=measured.time, minimum_s=measured.minimum_s)
        if network is not None:
            priced = replace(priced, over_ideal=measured.time.value / ideal_s)
    elif network is not None:
        priced = replace(priced, predicted_s=seconds)
    return priced


def ideal_seconds(collective: Collective, layout: Layout, num_bytes: int, network: NetworkModel) -> float:
    """Returns a lower bound on the seconds of any algorithm (Chan et al. 2007, Collective communication): the largest
    of the least times for start-ups, bytes, additions and transfers between nodes, as these overlap.
    """
    inside, between = network.levels.get("inside"), network.levels.get("across")
    ranks, nodes = layout.ranks, -(-layout.ranks // layout.node_size)
    levels = []
    if inside is not None and layout.node_size > 1:
        levels.append(inside)
    if between is not None and nodes > 1:
        levels.append(between)
    bounds = [_transfer_bound(collective, ranks, levels, num_bytes)]
    if collective in ("allreduce", "reduce-scatter", "reduce"):
        bounds.append((ranks - 1) / ranks * num_bytes * network.gamma_s_per_byte)
    if between is not None and 1 < nodes < ranks:
        links = between.links or layout.node_size
        bounds.append(_transfer_bound(collective, nodes, [between], num_bytes, links))
    return max(bounds)


def _transfer_bound(
    collective: Collective, ranks: int, levels: Sequence[Level], num_bytes: int, links: int = 1
) -> float:
    """Returns the larger of the least seconds for start-ups and for the bytes that a rank must send."""
    alphas_s, betas = [], []
    for level in levels:
        alphas_s.append(min(piece.alpha_s for piece in level.pieces))
        betas.append(min(piece.beta_s_per_byte for piece in level.pieces))
    beta = 0.0
    if all(betas):
        beta = 1 / sum(1 / level_beta for level_beta in betas)
    part = (ranks - 1) / ranks
    share = {"broadcast": 1.0, "reduce": 1.0, "allreduce": 2 * part}.get(collective, part)
    return max((ranks - 1).bit_length() * min(alphas_s), share * num_bytes * beta / links)


COSTS = columns_of(Cost)


def sheet_of(rows: Sequence[Cost], num_bytes: int) -> Sheet[Cost]:
    """Returns a table with a line per algorithm at one size; programs get all sizes."""
    return Sheet(
        name="costs",
        title=f"Cost of each algorithm, n = {format_bytes(num_bytes)}",
        columns=drop_empty_columns(COSTS, rows),
        rows=rows,
        caption=f"At n = {format_bytes(num_bytes)}. Over ideal: measured or predicted time over a lower bound.",
        is_shown=lambda priced: priced.num_bytes == num_bytes,
        in_terminal=True,
    )
