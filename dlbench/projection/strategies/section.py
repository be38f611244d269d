"""The table of strategies as a section: of runs, of their ingredients and plan; or of rows that somebody else made."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.strategies.layers import LayerTimes, watched_layers
from dlbench.projection.strategies.memory import ELEMENT_BYTES, WEIGHT_BYTES, gamma, limit
from dlbench.projection.strategies.table import STRATEGIES, Row, best, table
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.system import SystemSpec
from dlbench.units import format_bytes, format_seconds

FEW_ROWS = 12  # Rows that the terminal's summary prints; of more it says the best.
_CONSEQUENCE = (
    "A strategy that is not marked with an accuracy is a model of what nobody has run: steps hold computing, exposed "
    "communication, and whatever else the runs' steps hold (input, host, waiting for others), unchanged."
)


def chosen(asked: str) -> tuple[str, ...]:
    """What `--strategy` names: `all`, or one, which stands for itself next to data, too. Raises `UserError`."""
    if asked == "all":
        return STRATEGIES
    if asked not in STRATEGIES:
        raise UserError(f"--strategy {asked}: {nearest(asked, ('all', *STRATEGIES))}")
    return tuple(dict.fromkeys((asked, *(one for one in (f"data+{asked}",) if one in STRATEGIES))))


def strategies_of(
    ingredients: Ingredients,
    run: Run,
    targets: Sequence[int],
    *,
    strategies: Sequence[str] = STRATEGIES,
    memory_limit: int | None = None,
    system: SystemSpec | None = None,
    sharing: bool = True,
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Rows at the targets, and at measured rank counts those that were measured; and what all rows rest on, in
    sentences. `run`: one of the largest point. `system`: another one than it ran on. `sharing`: whether flows share
    links. Raises `UserError`: what the table needs is not known.
    """
    plan, record, network = run.plan, run.record, ingredients.network
    train, model = plan.workload.train, plan.workload.model
    layers = model.layer_table(plan.workload.data)
    if not layers:
        raise UserError(
            f"--strategy: layers of {plan.workload.name} are not known; a network of DLBENCH_PATH, too, can give them "
            "by layer_table (docs/architecture.md)"
        )
    if network is None or record is None:
        raise UserError("--strategy needs costs of messages: --network FILE, or runs of dlbench comm beside RUNS")
    anchor = ingredients.anchor
    wanted = ("forward", "backward", "optimizer", "exchange")
    known = [one.parts for one in anchor.runs if all(name in one.parts for name in wanted)]
    if not known or anchor.batch_per_rank is None:
        raise UserError("--strategy needs forward, backward and update of the runs apart, which these did not record")
    parts = {name: statistics.fmean(one[name] for one in known) for name in wanted}
    rest = max(0.0, statistics.fmean(one.step_s for one in anchor.runs) - sum(parts.values()))
    watched = watched_layers(layers, run.folder.spans(0))
    times = LayerTimes.split(
        layers,
        forward_s=parts["forward"] / anchor.batch_per_rank,
        backward_s=parts["backward"] / anchor.batch_per_rank,
        update_s=parts["optimizer"],
        source="as watched in warm-up" if watched else "by multiply-adds",
        watched=watched,
    )
    held, held_from = gamma(layers, plan, record, WEIGHT_BYTES)
    most, most_from = limit(memory_limit, system or plan.system)
    memory, per_node, leaf = record.memory, ingredients.per_node, ingredients.nodes_per_leaf

    def at(ranks: int, batch: int, names: Sequence[str]) -> tuple[Row, ...]:
        return table(
            layers,
            times,
            network,
            Layout(ranks=ranks, group_size=per_node, leaf_size=None if leaf is None else leaf * per_node),
            batch=batch,
            optimizer_slots=train.optimizer.slots,
            element_bytes=WEIGHT_BYTES,
            activation_bytes=ELEMENT_BYTES[train.precision],
            gamma=held,
            memory_limit=most,
            chain=None if memory is None else memory.chain,
            rates=None if memory is None else memory.rates,
            rest_s=rest,
            strategies=names,
            sharing=sharing,
        )

    rows: list[Row] = []
    for point in ingredients.points if ingredients.system == plan.system.name else ():
        name = "data" if point.ranks > 1 else "serial"
        if name in strategies and point.batch_per_rank is not None:
            measured = statistics.fmean(one.step_s for one in point.runs)
            found = at(point.ranks, point.ranks * point.batch_per_rank, (name,))
            rows += [replace(row, measured_s=measured) for row in found]
    weak = ingredients.scaling == "weak"
    for ranks in targets:
        rows += at(ranks, (ranks if weak else anchor.ranks) * anchor.batch_per_rank, strategies)
    said = (
        f"Computing: forward, backward and update of {ranks_text(anchor.ranks)}, shared out over {len(layers)} layers "
        f"{times.source}.",
        f"Activations held at once, over all inputs and outputs of layers (gamma): {held_from}.",
        f"Memory: {most_from}.",
    )
    return tuple(rows), said


def section(rows: Sequence[Row], said: Sequence[str], *, anchor: str = "strategies") -> Section:
    """Rows of several rank counts. `said`: what all of them rest on. `anchor`: unique in a document."""
    verdicts = list(_verdicts(rows))
    shown = {id(row) for row in _shown(rows)}
    sheet = Sheet(
        name="strategies",
        title="Strategies",
        columns=COLUMNS,
        rows=tuple(rows),
        is_shown=lambda row: id(row) in shown,
        in_terminal=len(shown) <= FEW_ROWS,
    )
    return Section(
        id=anchor,
        title="Strategies: computing, communication and memory",
        short_title="Strategies",
        level="answer",
        headline=verdicts[-1].split(",")[0] if verdicts else "",
        words=tuple(verdicts),
        brief=tuple(verdicts),
        sheets=(sheet,),
        notes=(*said, "" if all(row.is_ideal for row in rows) else _CONSEQUENCE),
    )


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    for ranks, those in groupby(rows, key=lambda row: row.ranks):
        every = [row for row in those if row.measured_s is None]
        found = best(every)
        if not every:
            continue
        if found is None:
            yield f"{ranks_text(ranks)}: no strategy fits."
            continue
        where = "fits" if found.fits else "is fastest, whatever it holds"
        data = next((row for row in every if row.strategy == "data" and not row.refused and row is not found), None)
        beside = "" if data is None else f" (data: {format_seconds(data.step_s)})"
        took = f"{format_seconds(found.step_s)} a step{beside}"
        yield f"{ranks_text(ranks)}: {_named(found)} {where}, {took}; limited by {found.bound_by}."


def _shown(rows: Sequence[Row]) -> Iterator[Row]:
    """For people: of a strategy with several ways to group ranks its best; nothing that the network cannot have."""
    for _, those in groupby(rows, key=lambda row: (row.ranks, row.strategy, row.measured_s is None)):
        every = list(those)
        found = best(every) or min(every, key=lambda row: (bool(row.refused), row.memory_bytes))
        if found.limit is not None:
            yield found


def _named(row: Row) -> str:
    """With the groups of what is next to data: `data+tensor 4 x 8`, four groups of eight ranks."""
    is_grouped = row.strategy.startswith("data+") and not row.refused
    return f"{row.strategy} {row.replicas} x {row.ranks // row.replicas}" if is_grouped else row.strategy


def _basis(row: Row) -> str:
    if row.refused:
        return "refused"
    if row.is_ideal:
        return "ideal, by data sheet"
    return "model only" if row.accuracy is None else f"measured, accuracy {percent(row.accuracy)}"


def _column(name: str, title: str, unit: str = "", *, is_brief: bool = False) -> Column[Row]:
    """A figure of a row, where it is not refused."""

    def value(row: Row) -> float | None:
        found: float = getattr(row, name)
        return None if row.refused else found

    def size(row: Row) -> str | None:
        return None if row.refused else format_bytes(getattr(row, name))

    return Column(name, title, value, text=size if unit == "B" else None, unit=unit, is_brief=is_brief)


COLUMNS: tuple[Column[Row], ...] = (
    Column("ranks", "Ranks", lambda row: row.ranks, is_brief=True),
    Column("strategy", "Strategy", lambda row: row.strategy, text=_named, is_brief=True),
    Column("replicas", "", lambda row: row.replicas),
    _column("step_s", "Step", "s", is_brief=True),
    _column("compute_s", "Computing", "s"),
    _column("communication_s", "Messages", "s"),
    _column("exposed_s", "Exposed", "s", is_brief=True),
    _column("phi", "Flows per link"),
    _column("memory_bytes", "Memory", "B", is_brief=True),
    Column("fits", "Fits", lambda row: row.fits, is_brief=True),
    _column("redundant_bytes", "Redundant weights", "B"),
    Column("limit", "Most ranks", lambda row: row.limit),
    Column("bound_by", "Limited by", lambda row: row.bound_by),
    Column("measured_s", "", lambda row: row.measured_s),
    Column("accuracy", "", lambda row: row.accuracy),
    Column("basis", "Known from", _basis, is_brief=True),
    Column("remarks", "Remarks", lambda row: row.refused or "; ".join(row.notes)),
)
