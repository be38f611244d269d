"""The table of strategies as a section: of runs, of their ingredients and plan; or of rows that somebody else made."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.projected import Target
from dlbench.projection.strategies.layers import ELEMENT_BYTES, LayerTimes, counted, gamma, limit, watched_layers
from dlbench.projection.strategies.network import scaled
from dlbench.projection.strategies.table import AVERAGE_EVERY, STRATEGIES, StrategyCase, StrategyRow, best
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Pivot, Sheet, columns_of
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.system import SystemSpec
from dlbench.units import format_bytes, format_seconds

_CONSEQUENCE = (
    "A strategy that is not marked with an accuracy is a model of what nobody has run: steps hold computing, exposed "
    "communication, and whatever else the runs' steps hold (input, host, waiting for others), unchanged."
)


LEAST_ACCURACY = 0.8  # Of data at measured points; below it, strategies differ by less than the model misses.
PROJECTED = "the step is the projection's"


def chosen(asked: str) -> tuple[str, ...]:
    """What `--strategy` names: `all`, or one, which stands for itself next to data, too."""
    if asked not in ("all", *STRATEGIES):
        raise UserError(f"--strategy {asked}: {nearest(asked, ('all', *STRATEGIES))}")
    return tuple(name for name in STRATEGIES if asked in ("all", name, name.removeprefix("data+")))


def case_of(
    ingredients: Ingredients,
    run: Run,
    cost_scale: float,
    *,
    memory_limit: int | None = None,
    system: SystemSpec | None = None,
) -> tuple[StrategyCase, tuple[str, ...]]:
    """The training of the anchor as strategies share it, and what it rests on, in sentences. `cost_scale`: of the
    network's costs at the anchor (`Projection.cost_scale`). `memory_limit`: bytes of a rank, None: that of a device of
    `system`, None: of the run's.
    """
    plan, record, network, anchor = run.plan, run.record, ingredients.network, ingredients.anchor
    train = plan.workload.train
    layers = plan.workload.model.layer_table(plan.workload.data)
    if not layers:
        raise UserError(
            f"--strategy: layers of {plan.workload.name} are not known; a network of DLBENCH_PATH, too, can give them "
            "by layer_table (docs/architecture.md)"
        )
    if network is None or record is None:
        raise UserError("--strategy needs costs of messages: --network FILE, or runs of dlbench comm beside RUNS")
    parts = _mean_parts(anchor)
    if parts is None or anchor.batch_per_rank is None:
        raise UserError("--strategy needs forward, backward and update of the runs apart, which these did not record")
    gathered_s = parts.pop("gather")
    per_node, per_leaf = ingredients.per_node, ingredients.nodes_per_leaf
    watched = watched_layers(layers, run.folder.spans(0), plan.run_id)
    held, held_from = gamma(layers, plan, record)
    most, most_from = limit(memory_limit, system or plan.system)
    case = StrategyCase(
        layers=layers,
        times=LayerTimes.split(
            layers,
            forward_s=parts["forward"] / anchor.batch_per_rank,
            backward_s=parts["backward"] / anchor.batch_per_rank,
            update_s=parts["optimizer"],
            watched=watched,
        ),
        network=scaled(network, cost_scale),
        layout=Layout(ranks=anchor.ranks, group_size=per_node, leaf_size=per_leaf and per_leaf * per_node),
        batch=anchor.ranks * anchor.batch_per_rank,
        slots=train.optimizer.slots,
        activation_bytes=ELEMENT_BYTES[train.precision],
        gamma=held,
        counted=counted(layers, plan, record),
        memory_limit=most,
        chain=None if record.memory is None else record.memory.chain,
        rates=None if record.memory is None else record.memory.rates,
        rest_s=max(0.0, statistics.fmean(one.step_s for one in anchor.runs) - sum(parts.values()) - gathered_s),
        average_every=plan.sync.average_every or AVERAGE_EVERY,
        scatter="allreduce" if record.exchange is not None and record.exchange.carrier == "gloo" else "reduce-scatter",
    )
    by = f"{len(layers)} layers {'as watched in warm-up' if watched else 'by multiply-adds'}"
    return case, (
        f"Computing: forward, backward and update of {ranks_text(anchor.ranks)}, shared out over {by}.",
        f"Activations held at once, over all inputs and outputs of layers (gamma): {held_from}.",
        f"Memory: {most_from}.",
        f"Messages: the network's costs times {cost_scale:.3g}, as in the projection, which gives the step of data.",
    )


def _mean_parts(anchor: PointFigures) -> dict[str, float] | None:
    """Returns seconds of the parts of a step that strategies share or change, means over runs; None: not recorded."""
    needed = ("forward", "backward", "optimizer", "exchange")
    recorded = [run.parts for run in anchor.runs if all(name in run.parts for name in needed)]
    means = {name: [parts.get(name, 0.0) for parts in recorded] for name in (*needed, "gather")}
    return {name: statistics.fmean(seconds) for name, seconds in means.items()} if recorded else None


def measured_rows(
    case: StrategyCase, ingredients: Ingredients, others: Sequence[Ingredients] = ()
) -> tuple[StrategyRow, ...]:
    """What the runs did at every measured rank count whose batch is known, beside its row of the model. `others`: of
    groups that may differ in strategy alone, and are left out where they do not, or train otherwise.
    """
    rows: list[StrategyRow] = []
    same = [group for group in others if group.training == ingredients.training != "" and group is not ingredients]
    for one, point in [(group, point) for group in (ingredients, *same) for point in group.points]:
        name = point.strategy or ("data" if point.ranks > 1 else "serial")
        if point.batch_per_rank is None or (one is not ingredients and name in ("serial", ingredients.anchor.strategy)):
            continue
        like = replace(case, average_every=one.average_every or case.average_every)
        there = like.at(point.ranks, point.ranks * point.batch_per_rank)
        if name in STRATEGIES:
            found = there.table((name,))
        else:
            why = "the model has no such row; data+tensor is nearest to it, with whole state in each group"
            found = (
                StrategyRow(strategy=name, ranks=point.ranks, replicas=1, limit=point.ranks, bound_by="", refused=why),
            )
        measured = statistics.fmean(run.step_s for run in point.runs)
        held, sent = point.memory_bytes, point.sent_bytes
        rows += [
            replace(row, measured_s=measured, measured_memory_bytes=held, measured_sent_bytes=sent) for row in found
        ]
    return tuple(sorted(rows, key=lambda row: row.ranks))


def projected_rows(
    case: StrategyCase, targets: Sequence[Target], *, is_strong: bool, strategies: Sequence[str], own: str = "data"
) -> tuple[StrategyRow, ...]:
    """Strategies at the targets, among them that of the runs, `own`, with the projected step. `case`: of the anchor."""
    rows: list[StrategyRow] = []
    asked = [name for name in STRATEGIES if name in ("data", own) or name in strategies]
    for target in targets:
        batch = case.batch if is_strong else case.batch // case.layout.ranks * target.ranks
        parts = {part.name: part.seconds.median for part in target.parts}
        rest = sum(parts[name] for name in ("input", "host", "straggler")) if parts else case.rest_s
        for row in replace(case.at(target.ranks, batch), rest_s=rest).table(asked):
            if row.strategy == own and not row.refused:  # A screen says one thing of it.
                row = replace(row, step_s=target.step.median, notes=(PROJECTED,))
                if parts:
                    row = replace(row, compute_s=parts["compute"] + parts["optimizer"], exposed_s=parts["exchange"])
            rows.append(row)
    return tuple(rows)


def section(rows: Sequence[StrategyRow], said: Sequence[str], *, anchor: str = "strategies") -> Section:
    """Rows of several rank counts. `said`: what all of them rest on. `anchor`: unique in a document."""
    modelled = [row for row in rows if row.measured_s is None]
    verdicts = tuple(_verdict(ranks, list(those)) for ranks, those in groupby(modelled, key=lambda row: row.ranks))
    headline = verdicts[-1].split(", ")[0] if verdicts else ""
    known = [(row.accuracy, row) for row in rows if row.accuracy is not None and row.strategy == "data"]
    if known:
        least, worst = min(known, key=itemgetter(0))
        if least < LEAST_ACCURACY:
            headline = f"No strategy is called fastest: the model's accuracy is below {percent(LEAST_ACCURACY, 0)}"
            verdicts = (f"{headline} where it was measured.",)
        verdicts += (
            f"Accuracy for data is {percent(least)} at {ranks_text(worst.ranks)}: {format_seconds(worst.step_s)}, and "
            f"{format_seconds(worst.measured_s or 0.0)} measured{'; no less at other counts' * (len(known) > 1)}.",
        )
    verdicts += tuple(
        _beside(row) for row in rows if row.measured_s is not None and row.strategy not in ("data", "serial")
    )
    shown = list(_shown(rows))
    kind = "ideal" if all(row.is_ideal for row in rows) else "model only"
    if kind != "ideal" and not known:
        verdicts += ("No run shows how accurate the model is there.",)
    if kind != "ideal" and len({row.strategy for row in modelled} - {"data"}) <= 2:  # One was asked for, not all.
        verdicts += tuple(dict.fromkeys(f"{one.strategy}: {one.refused}." for one in modelled if one.limit is None))
    return Section(
        id=anchor,
        title="Strategies: computing, communication and memory",
        short_title="Strategies",
        level="answer",
        headline=headline,
        words=verdicts,
        brief=verdicts,
        sheets=(
            Sheet(
                name="strategies-by-ranks",
                title="Step by strategy",
                columns=(),
                rows=[
                    (row.strategy, ranks_text(row.ranks), "no fit" if row.fits is False else format_seconds(row.step_s))
                    for row in shown
                    if row.measured_s is None and not row.refused
                ],
                caption="No fit: more memory than a rank may hold.",
                pivot=Pivot(corner=f"Step, {kind}", down=itemgetter(0), across=itemgetter(1), cell=itemgetter(2)),
                in_terminal=True,
            ),
            Sheet(
                name="strategies",
                title="Strategies",
                columns=COLUMNS,
                rows=rows,
                is_shown=lambda row: any(row is one for one in shown),
            ),
        ),
        notes=(*said, "" if kind == "ideal" else _CONSEQUENCE),
    )


def _verdict(ranks: int, rows: Sequence[StrategyRow]) -> str:
    found = best(rows)
    if found is None:
        large = [row for row in rows if row.fits is False]
        least = min(large, key=lambda row: row.memory_bytes, default=None)
        why = "; ".join(dict.fromkeys(row.refused for row in rows if row.refused)) or "local-sgd trains otherwise"
        if least is not None:
            why = f"{_named(least)} needs least memory, {format_bytes(least.memory_bytes)}"
        return f"{ranks_text(ranks)}: no strategy fits: {why}."
    where = "fits" if found.fits else "is fastest, whatever it holds"
    data = (row for row in rows if row.strategy == "data" and not row.refused and row is not found)
    others = "".join(f" (data: {format_seconds(row.step_s)})" for row in data)
    step = f"{format_seconds(found.step_s)} a step{others}"
    most = "" if found.limit is None else f"; at most {ranks_text(found.limit)} ({found.bound_by})"
    return f"{ranks_text(ranks)}: {_named(found)} {where}, {step}{most}."


def _beside(row: StrategyRow) -> str:
    """A measured strategy against its row of the model."""
    step = f"{row.strategy} at {ranks_text(row.ranks)}: {format_seconds(row.measured_s or 0.0)} measured"
    if row.accuracy is None:
        return f"{step}; {row.refused}."
    more = [f"{format_seconds(row.step_s)} by the model, accuracy {percent(row.accuracy)}"]
    if row.measured_memory_bytes and row.memory_bytes:
        more.append(f"memory {row.measured_memory_bytes / row.memory_bytes:.2f} times the model's")
    if row.measured_sent_bytes and row.sent_bytes:
        more.append(f"bytes sent {row.measured_sent_bytes / row.sent_bytes:.2f} times the model's")
    return f"{step}; {', '.join(more)}."


def _shown(rows: Sequence[StrategyRow]) -> Iterator[StrategyRow]:
    """For people: of a strategy with several ways to group ranks its best; nothing that the network cannot have."""
    for _, those in groupby(rows, key=lambda row: (row.ranks, row.strategy, row.measured_s is None)):
        every = list(those)
        found = best(every) or min(every, key=lambda row: (bool(row.refused), row.memory_bytes))
        if found.limit is not None:
            yield found


def _named(row: StrategyRow) -> str:
    """With the groups of what is next to data: `data+tensor 4 x 8`, four groups of eight ranks."""
    is_grouped = row.strategy.startswith("data+") and not row.refused
    return f"{row.strategy} {row.replicas} x {row.ranks // row.replicas}" if is_grouped else row.strategy


def _basis(row: StrategyRow) -> str:
    if row.refused and row.measured_s is not None:
        return "measured, no model"
    if row.refused:
        return "refused"
    if row.accuracy is not None:
        return f"measured, accuracy {percent(row.accuracy)}"
    if PROJECTED in row.notes:
        return "projected"
    return "ideal" if row.is_ideal else "model only"


FIGURES = ("step_s", "compute_s", "communication_s", "exposed_s", "memory_bytes", "sent_bytes", "phi", "fits")
COLUMNS: tuple[Column[StrategyRow], ...] = (
    Column("ranks", "Ranks", lambda row: row.ranks),
    Column("strategy", "Strategy", lambda row: row.strategy, text=_named),
    Column("replicas", "", lambda row: row.replicas),
    *columns_of(StrategyRow, *FIGURES, of=lambda row: None if row.refused else row),
    *columns_of(
        StrategyRow, "limit", "bound_by", "measured_s", "measured_memory_bytes", "measured_sent_bytes", "accuracy"
    ),
    Column("basis", "Known from", _basis),
    Column("remarks", "Remarks", lambda row: row.refused or "; ".join(row.notes)),
)
