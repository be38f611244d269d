"""What each algorithm of a collective costs: counted, predicted, measured, beside the ideal."""

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
    "Steps: rounds in which messages travel at once. A rank that takes several in a round (two of double-binary-tree, "
    "all others of direct) pays a start-up for each. Volume: bytes that the busiest rank sends. Over ideal: time, "
    "measured or else predicted, over a lower bound: the largest of what the fewest start-ups, bytes and additions of "
    "any algorithm take. Without costs of messages: bytes one after the other along the longest path, over the fewest "
    "that any algorithm needs (2 (p - 1)/p n in an all-reduce of p ranks). k: servers; c: chunks."
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One algorithm at one size."""

    algorithm: str = field(metadata=column("Algorithm", is_brief=True))
    num_bytes: int = field(metadata=column())
    steps: int = field(metadata=column("Steps", is_brief=True))  # The most of any rank, counted.
    volume: float = field(metadata=column("Volume, n", text=lambda share: f"{share:.3g}", is_brief=True))
    """Bytes that the busiest rank sends over those of its buffer, counted."""
    predicted_s: float | None = field(metadata=column("Predicted", unit="s", is_brief=True))
    over_ideal: float = field(metadata=column("Over ideal", text=lambda one: f"{one:.3g}x", is_brief=True))
    measured: Estimate | None = field(metadata=column("Measured", "measured_s", is_brief=True))
    minimum_s: float | None = field(metadata=column("Minimum", unit="s", is_brief=True))


def cost(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    num_bytes: int,
    dtype: Precision,
    network: NetworkModel | None = None,
    shards: int | None = None,
    row: Measurement | None = None,
) -> Cost:
    """One algorithm by the costs of a network; with `row`, as measured, predicted by a fit without it."""
    width = ELEMENT_BYTES[dtype]
    elements = whole_elements(num_bytes, width)
    chunks = (row.chunks if row else None) or pipeline_chunks(collective, algorithm, layout, elements)
    counted = counts(collective, algorithm, layout, elements, width, shards=shards, chunks=chunks)
    known = network or BYTES_ALONE
    # Without costs all bytes are alike, as on one node, whose ranks have one port.
    placed = layout if network else replace(layout, node_size=layout.ranks)
    seconds = predict(
        collective, algorithm, num_bytes, placed, known, element_bytes=width, shards=shards, chunks=chunks
    )
    modelled = None if network is None else seconds
    least = ideal_seconds(collective, placed, num_bytes, known)
    letters = dict.fromkeys(("double-binary-tree", "chain", "hierarchical"), f", c = {chunks}")
    letters["parameter-server"] = f", k = {shards or layout.ranks}"
    return Cost(
        algorithm=algorithm + letters.get(algorithm, ""),
        num_bytes=num_bytes,
        steps=max(one.steps for one in counted),
        volume=max(one.bytes_sent for one in counted) / num_bytes,
        predicted_s=modelled if row is None else row.predicted_s,
        over_ideal=(seconds if row is None or network is None else row.time.value) / least,
        measured=None if row is None else row.time,
        minimum_s=None if row is None else row.minimum_s,
    )


def ideal_seconds(collective: Collective, layout: Layout, num_bytes: int, network: NetworkModel) -> float:
    """The longest of the least costs of any algorithm, each by itself (Chan et al. 2007, Collective communication):
    start-ups, a rank's bytes (over all levels at once) and bytes reduced by the cheapest messages of a network, and
    start-ups and bytes between nodes. Sums of them are no bound: transfers, additions and levels may be under way at
    once.
    """

    def least(ranks: int, levels: Sequence[Level], flows: int) -> float:
        alpha_s = min(piece.alpha_s for level in levels for piece in level.pieces)
        betas = [min(piece.beta_s_per_byte for piece in level.pieces) for level in levels]
        beta = 1 / sum(1 / one for one in betas) if all(betas) else 0.0
        sent = 1.0 if collective in ("broadcast", "reduce") else (ranks - 1) / ranks
        sent *= 2 if collective == "allreduce" else 1
        return max((ranks - 1).bit_length() * alpha_s, sent * num_bytes * beta / flows)

    inside, between = network.levels.get("inside"), network.levels.get("across")
    ranks, nodes = layout.ranks, -(-layout.ranks // layout.node_size)
    used = [one for one, is_used in ((inside, layout.node_size > 1), (between, nodes > 1)) if one and is_used]
    is_summed = collective in ("allreduce", "reduce-scatter", "reduce")
    found = max(least(ranks, used, 1), is_summed * (ranks - 1) / ranks * num_bytes * network.gamma_s_per_byte)
    if between is None or not 1 < nodes < ranks:
        return found
    return max(found, least(nodes, [between], between.links or layout.node_size))


COSTS = columns_of(Cost)


def sheet_of(rows: Sequence[Cost], num_bytes: int) -> Sheet[Cost]:
    """A line for each algorithm at one size; programs get all sizes."""
    return Sheet(
        name="costs",
        title=f"Cost of each algorithm, n = {format_bytes(num_bytes)}",
        columns=drop_empty_columns(COSTS, rows),
        rows=rows,
        caption=COST_WORDS,
        is_shown=lambda one: one.num_bytes == num_bytes,
        in_terminal=True,
    )
